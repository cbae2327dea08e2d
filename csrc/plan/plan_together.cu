// Plans a batch in one cooperative launch: a radix sort with grid-wide barriers, then the entries
// of the plan. Called by plan.cu for batches that are too large for one block, but so small that a
// dozen launches cost the host more than the work costs the GPU. Each id is read once, and is
// written and read once for each 8 bits of the largest row number; nothing crosses the link.

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <atomic>
#include <utility>

#define CCCL_DISABLE_BF16_SUPPORT
#define CCCL_DISABLE_FP16_SUPPORT
#define CCCL_DISABLE_NVTX
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>

#include "core/cuda_calls.h"
#include "plan/plan_entries.cuh"
#include "plan/plan_together.h"

namespace speedtorch {
namespace {

constexpr int kThreads = 512;
constexpr int kPerThread = 4;
constexpr int64_t kTile = int64_t{kThreads} * kPerThread;  // ids per block
// All blocks run at once. This limit leaves half of a large GPU's multiprocessors to other work.
constexpr int kMaxBlocks = 64;
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
static_assert(kDigits <= kThreads);

template <typename Key>
struct Scratch {
  Found* found;
  Key* keys[2];
  int32_t* positions[2];
  int32_t* counts;  // [blocks][kDigits]: number of a block's ids with a digit
  int32_t* heads;   // [blocks]: number of a block's entries that differ from the one before
};

template <typename Key>
int64_t carve(void* memory, int64_t n, Scratch<Key>& scratch) {
  auto next = reinterpret_cast<uintptr_t>(memory);
  auto take = [&](int64_t size) { return std::exchange(next, next + padded(size)); };
  scratch.found = reinterpret_cast<Found*>(take(sizeof(Found)));
  for (auto& keys : scratch.keys) keys = reinterpret_cast<Key*>(take(n * sizeof(Key)));
  for (auto& positions : scratch.positions) positions = reinterpret_cast<int32_t*>(take(n * 4));
  scratch.counts = reinterpret_cast<int32_t*>(take(kMaxBlocks * kDigits * 4));
  scratch.heads = reinterpret_cast<int32_t*>(take(kMaxBlocks * 4));
  return static_cast<int64_t>(next - reinterpret_cast<uintptr_t>(memory));
}

// A block owns kTile neighbors of the batch, and of each order during the sort; a thread owns
// kPerThread neighbors of them. Entries after the last id have the largest key and remain there,
// because every pass is stable.
template <typename Key>
__global__ void __launch_bounds__(kThreads)
    plan_together_kernel(const void* ids, bool wide, PlanTable table, int last_bit,
                         Scratch<Key> scratch, PlanView out) {
  using Sort = cub::BlockRadixSort<Key, kThreads, kPerThread, int32_t>;
  using Scan = cub::BlockScan<int32_t, kThreads>;
  __shared__ union {
    typename Sort::TempStorage sort;
    typename Scan::TempStorage scan;
    int32_t digit[kTile];
  } shared;
  __shared__ int32_t begin[kDigits], end[kDigits];  // of the block's entries with each digit
  const auto grid = cooperative_groups::this_grid();
  const int64_t n = out.count, tile = int64_t{blockIdx.x} * kTile;
  const int64_t first = tile + int64_t{threadIdx.x} * kPerThread;
  const int mine = static_cast<int>(min(kTile, n - tile));  // number of valid entries in this block
  Key key[kPerThread];
  int32_t position[kPerThread];
  unsigned long long bad = 0, bad_from_end = 0;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t i = first + k;
    const int64_t id = i < n ? id_at(ids, wide, i) : 0;
    key[k] = i < n ? static_cast<Key>(table.key_of(id)) : static_cast<Key>(~uint64_t{0});
    position[k] = static_cast<int32_t>(i);
    if (i < n && is_outside(id, table.rows)) {
      ++bad;
      bad_from_end = max(bad_from_end, static_cast<unsigned long long>(n - i));
    }
  }
  if (grid.thread_rank() == 0) *scratch.found = {};
  int to = 0;  // the target of the two arrays
  for (int bit = 0; bit < last_bit; bit += kDigitBits, to ^= 1) {
    const int bits = min(kDigitBits, last_bit - bit);
    Sort(shared.sort).Sort(key, position, bit, bit + bits);
    __syncthreads();
    const auto digit_of = [&](int k) {
      return static_cast<int32_t>(key[k] >> bit) & ((1 << bits) - 1);
    };
    if (threadIdx.x < kDigits) begin[threadIdx.x] = end[threadIdx.x] = 0;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) shared.digit[threadIdx.x * kPerThread + k] = digit_of(k);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int at = static_cast<int>(threadIdx.x) * kPerThread + k, digit = digit_of(k);
      if (at >= mine) continue;
      if (at == 0 || shared.digit[at - 1] != digit) begin[digit] = at;
      if (at == mine - 1 || shared.digit[at + 1] != digit) end[digit] = at + 1;
    }
    __syncthreads();
    int32_t* const counts = scratch.counts + threadIdx.x;
    if (threadIdx.x < kDigits) {
      counts[blockIdx.x * kDigits] = end[threadIdx.x] - begin[threadIdx.x];
    }
    grid.sync();
    if (bad > 0) {  // scratch.found was cleared before the last grid.sync
      atomicAdd(reinterpret_cast<unsigned long long*>(&scratch.found->bad_count), bad);
      note_last(&scratch.found->bad_from_end, static_cast<int64_t>(bad_from_end));
      bad = 0;
    }
    // The begin of each digit's entries: after all smaller digits, and after the same digit in
    // earlier blocks.
    int32_t before = 0, all = 0, smaller = 0;
    if (threadIdx.x < kDigits) {
      for (unsigned block = 0; block < gridDim.x; ++block) {
        const int32_t count = counts[block * kDigits];
        if (block < blockIdx.x) before += count;
        all += count;
      }
    }
    Scan(shared.scan).ExclusiveSum(all, smaller);
    if (threadIdx.x < kDigits) begin[threadIdx.x] = smaller + before - begin[threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int at = static_cast<int>(threadIdx.x) * kPerThread + k;
      if (at >= mine) continue;
      const int64_t there = begin[digit_of(k)] + at;
      scratch.keys[to][there] = key[k];
      scratch.positions[to][there] = position[k];
    }
    grid.sync();  // also ends the use of the counts
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t i = first + k;
      key[k] = i < n ? scratch.keys[to][i] : static_cast<Key>(~uint64_t{0});
      position[k] = i < n ? scratch.positions[to][i] : static_cast<int32_t>(i);
    }
  }
  const Key* const sorted = scratch.keys[to ^ 1];
  bool head[kPerThread];
  int32_t rank[kPerThread];
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t i = first + k;
    head[k] = i < n && (i == 0 || key[k] != (k > 0 ? key[k - 1] : sorted[i - 1]));
    rank[k] = head[k];
  }
  int32_t heads = 0;
  Scan(shared.scan).InclusiveSum(rank, rank, heads);
  if (threadIdx.x == 0) scratch.heads[blockIdx.x] = heads;
  grid.sync();
  int64_t before = 0, all = 0;  // distinct ids of earlier blocks, and of all
  for (unsigned block = 0; block < gridDim.x; ++block) {
    const int32_t count = scratch.heads[block];
    if (block < blockIdx.x) before += count;
    all += count;
  }
  unsigned long long from_end = 0;  // ids from the first repeated one to the end of the batch
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t i = first + k;
    if (i >= n) continue;
    if (write_entry(i, static_cast<int64_t>(key[k]), position[k], before + rank[k], head[k], all,
                    table, out)) {
      from_end = max(from_end, static_cast<unsigned long long>(n - position[k]));
    }
  }
  note_repeat(scratch.found, from_end);
  grid.sync();
  if (grid.thread_rank() != 0) return;
  const int64_t distinct = write_ends(static_cast<int64_t>(sorted[n - 1]), all, table, out);
  write_status(ids, wide, table, *scratch.found, distinct, out);
}

// The number of blocks that a GPU runs at once, queried once; 0: no cooperative launches.
int blocks_at_once(int device) {
  int supported = 0, processors = 0, blocks_per_processor = 0;
  const RelaxedCapture while_capturing;  // the kernel may have to be loaded first
  const bool known =
      succeeded(cudaDeviceGetAttribute(&supported, cudaDevAttrCooperativeLaunch, device)) &&
      succeeded(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) &&
      succeeded(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
          &blocks_per_processor, plan_together_kernel<uint64_t>, kThreads, 0));
  return known && supported ? processors * blocks_per_processor : 0;
}

int64_t blocks_of(int64_t n) { return (n + kTile - 1) / kTile; }

template <typename Key>
int launch(const void* ids, bool wide, PlanTable table, void* memory, PlanView out,
           cudaStream_t stream) {
  Scratch<Key> scratch{};
  carve(memory, out.count, scratch);
  int last_bit = end_bit(table);
  void* arguments[] = {&ids, &wide, &table, &last_bit, &scratch, &out};
  return cudaLaunchCooperativeKernel(plan_together_kernel<Key>,
                                     dim3(static_cast<unsigned>(blocks_of(out.count))),
                                     dim3(kThreads), arguments, 0, stream);
}

}  // namespace

bool can_plan_together(int64_t n) {
  constexpr int kKnownGpus = 64;
  static std::atomic<int> known[kKnownGpus];  // 0: not queried; else the answer + 1
  if (blocks_of(n) > kMaxBlocks) return false;
  int device = 0;
  if (!succeeded(cudaGetDevice(&device)) || device >= kKnownGpus) return false;
  if (known[device] == 0) known[device] = blocks_at_once(device) + 1;
  return blocks_of(n) < known[device];
}

int64_t together_scratch_bytes(int64_t n, const PlanTable& table) {
  Scratch<uint32_t> few{};
  Scratch<uint64_t> many{};
  return has_short_keys(table) ? carve(nullptr, n, few) : carve(nullptr, n, many);
}

int launch_plan_together(const void* ids, bool wide, const PlanTable& table, void* scratch,
                         const PlanView& out, void* stream) {
  auto on = static_cast<cudaStream_t>(stream);
  return has_short_keys(table) ? launch<uint32_t>(ids, wide, table, scratch, out, on)
                               : launch<uint64_t>(ids, wide, table, scratch, out, on);
}

}  // namespace speedtorch

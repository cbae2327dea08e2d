// Plans ids on the GPU: counts ids out of range, sorts pairs (id, position) by id, and numbers the
// distinct ids. Called by plan.cpp. The sort reads and writes keys in GPU memory several times;
// nothing crosses the link. Ids out of range leave garbage in the plan but cause no access out of
// bounds. Kernels that move rows read the status and then move none.

#include <cuda_runtime.h>

#include <algorithm>
#include <iterator>
#include <utility>

// Ids are integers, and CUB is not profiled here: these defines save a fifth of the compile time.
#define CCCL_DISABLE_BF16_SUPPORT
#define CCCL_DISABLE_FP16_SUPPORT
#define CCCL_DISABLE_NVTX
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "plan/ids.cuh"
#include "plan/plan_entries.cuh"
#include "plan/plan_together.h"

namespace speedtorch {
namespace {

// A batch of up to kFewIds ids is planned by one block, in the time of a few launches.
constexpr int kFewThreads = 512;
constexpr int kFewPerThread = 4;
constexpr int64_t kFewIds = kFewThreads * kFewPerThread;

template <typename Key>
struct Scratch {
  Found* found;
  Key* keys;
  Key* sorted_keys;
  int32_t* positions;
  int32_t* sorted_positions;
  int32_t* ranks;
  void* cub;
  int64_t cub_bytes;
};

// Marks of sorted entries for the scan: 1 if an id differs from the one before it.
template <typename Key>
struct Heads {
  using iterator_category = std::random_access_iterator_tag;
  using value_type = int32_t;
  using difference_type = int64_t;
  using pointer = const int32_t*;
  using reference = int32_t;

  const Key* keys;
  int64_t at;

  __host__ __device__ int32_t operator[](int64_t i) const {
    return at + i == 0 || keys[at + i] != keys[at + i - 1];
  }
  __host__ __device__ int32_t operator*() const { return (*this)[0]; }
  __host__ __device__ Heads operator+(int64_t i) const { return {keys, at + i}; }
};

// Sorts (key, position) by key. With a null scratch.cub, only returns the needed bytes.
template <typename Key>
cudaError_t sort(const Scratch<Key>& scratch, size_t& bytes, int64_t n, const PlanTable& table,
                 cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(scratch.cub, bytes, scratch.keys, scratch.sorted_keys,
                                         scratch.positions, scratch.sorted_positions,
                                         static_cast<int>(n), 0, end_bit(table), stream);
}

// Computes the number of heads up to each entry; bytes as above.
template <typename Key>
cudaError_t rank_heads(const Scratch<Key>& scratch, size_t& bytes, int64_t n, cudaStream_t stream) {
  return cub::DeviceScan::InclusiveSum(scratch.cub, bytes, Heads<Key>{scratch.sorted_keys, 0},
                                       scratch.ranks, static_cast<int>(n), stream);
}

template <typename Key>
int64_t scratch_bytes_of(int64_t n, const PlanTable& table) {
  size_t sort_bytes = 0, scan_bytes = 0;
  sort(Scratch<Key>{}, sort_bytes, n, table, nullptr);
  rank_heads(Scratch<Key>{}, scan_bytes, n, nullptr);
  return padded(sizeof(Found)) + 2 * padded(n * sizeof(Key)) + 3 * padded(n * 4) +
         static_cast<int64_t>(std::max(sort_bytes, scan_bytes));
}

template <typename Key>
Scratch<Key> carve(void* memory, int64_t bytes, int64_t n) {
  char* next = static_cast<char*>(memory);
  auto take = [&](int64_t size) { return std::exchange(next, next + padded(size)); };
  Scratch<Key> scratch{};
  scratch.found = reinterpret_cast<Found*>(take(sizeof(Found)));
  scratch.keys = reinterpret_cast<Key*>(take(n * sizeof(Key)));
  scratch.sorted_keys = reinterpret_cast<Key*>(take(n * sizeof(Key)));
  scratch.positions = reinterpret_cast<int32_t*>(take(n * 4));
  scratch.sorted_positions = reinterpret_cast<int32_t*>(take(n * 4));
  scratch.ranks = reinterpret_cast<int32_t*>(take(n * 4));
  scratch.cub = next;
  scratch.cub_bytes = static_cast<char*>(memory) + bytes - next;
  return scratch;
}

// ---- kernels

// A thread owns ids i, i + threads, ...: finds ids out of range and prepares the sort.
template <typename Key>
__global__ void mark_ids_kernel(const void* ids, bool wide, int64_t n, PlanTable table, Key* keys,
                                int32_t* positions, Found* found) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    const int64_t id = id_at(ids, wide, i);
    if (is_outside(id, table.rows)) {
      count_one(&found->bad_count);
      note_last(&found->bad_from_end, n - i);
    }
    keys[i] = static_cast<Key>(table.key_of(id));
    positions[i] = static_cast<int32_t>(i);
  }
}

// A thread owns sorted entries, a grid stride apart, and writes their part of the plan. The last
// block to finish writes the status.
template <typename Key>
__global__ void write_plan_kernel(const void* ids, bool wide, PlanTable table,
                                  const Key* sorted_keys, const int32_t* sorted_positions,
                                  const int32_t* ranks, Found* found, PlanView out) {
  const int64_t n = out.count;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t all = ranks[n - 1];
  unsigned long long from_end = 0;  // ids from the first repeated one to the end of the batch
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    const int64_t position = sorted_positions[i];
    const bool head = i == 0 || ranks[i - 1] != ranks[i];
    const auto key = static_cast<int64_t>(sorted_keys[i]);
    if (write_entry(i, key, position, ranks[i], head, all, table, out)) {
      from_end = max(from_end, static_cast<unsigned long long>(n - position));
    }
  }
  note_repeat(found, from_end);
  __threadfence();  // publishes this block's results before its count
  __syncthreads();
  if (threadIdx.x != 0) return;
  auto* done = reinterpret_cast<unsigned long long*>(&found->blocks_done);
  if (atomicAdd(done, 1ull) + 1 < gridDim.x) return;
  __threadfence();
  const int64_t distinct = write_ends(static_cast<int64_t>(sorted_keys[n - 1]), all, table, out);
  write_status(ids, wide, table, *found, distinct, out);
}

// One block does the work of all kernels above, for batches so small that a dozen launches take
// longer. A thread owns kFewPerThread neighbors, before and after the sort.
__global__ void __launch_bounds__(kFewThreads)
    plan_few_kernel(const void* ids, bool wide, PlanTable table, int last_bit, PlanView out) {
  using Sort = cub::BlockRadixSort<uint64_t, kFewThreads, kFewPerThread, int32_t>;
  using Scan = cub::BlockScan<int32_t, kFewThreads>;
  __shared__ union {
    typename Sort::TempStorage sort;
    typename Scan::TempStorage scan;
    uint64_t last_key[kFewThreads];  // the last key of each thread
  } shared;
  __shared__ Found found;
  __shared__ int64_t final_key;  // key of the last sorted entry
  const int64_t n = out.count;
  if (threadIdx.x == 0) found = {};
  __syncthreads();
  const int64_t first = int64_t{threadIdx.x} * kFewPerThread;
  uint64_t key[kFewPerThread];
  int32_t position[kFewPerThread], rank[kFewPerThread];
#pragma unroll
  for (int k = 0; k < kFewPerThread; ++k) {
    const int64_t i = first + k;
    const int64_t id = i < n ? id_at(ids, wide, i) : 0;
    key[k] = i < n ? static_cast<uint64_t>(table.key_of(id)) : ~uint64_t{0};
    position[k] = static_cast<int32_t>(i);
    if (i < n && is_outside(id, table.rows)) {
      count_one(&found.bad_count);
      note_last(&found.bad_from_end, n - i);
    }
  }
  // The sort is stable, so that padding entries remain after the last id.
  Sort(shared.sort).Sort(key, position, 0, last_bit);
  __syncthreads();
  shared.last_key[threadIdx.x] = key[kFewPerThread - 1];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kFewPerThread; ++k) {
    const int64_t i = first + k;
    const uint64_t before = k > 0 ? key[k - 1] : i > 0 ? shared.last_key[threadIdx.x - 1] : 0;
    rank[k] = i < n && (i == 0 || key[k] != before);
    if (i == n - 1) final_key = static_cast<int64_t>(key[k]);
  }
  bool head[kFewPerThread];
#pragma unroll
  for (int k = 0; k < kFewPerThread; ++k) head[k] = rank[k] != 0;
  __syncthreads();
  int32_t all = 0;
  Scan(shared.scan).InclusiveSum(rank, rank, all);
#pragma unroll
  for (int k = 0; k < kFewPerThread; ++k) {
    const int64_t i = first + k;
    if (i >= n) continue;
    if (write_entry(i, static_cast<int64_t>(key[k]), position[k], rank[k], head[k], all, table,
                    out)) {
      note_last(&found.repeat_from_end, n - position[k]);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  write_status(ids, wide, table, found, write_ends(final_key, all, table, out), out);
}

}  // namespace

// ---- launchers

int64_t count_scratch_bytes(int64_t n) {
  size_t bytes = 0;
  cub::DeviceScan::InclusiveSum(nullptr, bytes, static_cast<const int32_t*>(nullptr),
                                static_cast<int32_t*>(nullptr), static_cast<int>(n));
  return static_cast<int64_t>(bytes);
}

int count_marks(const int32_t* marks, int64_t n, int32_t* counts, void* scratch,
                int64_t scratch_bytes, void* stream) {
  size_t bytes = static_cast<size_t>(scratch_bytes);
  return cub::DeviceScan::InclusiveSum(scratch, bytes, marks, counts, static_cast<int>(n),
                                       static_cast<cudaStream_t>(stream));
}

int64_t plan_scratch_bytes(int64_t n, const PlanTable& table) {
  if (n <= kFewIds) return 0;
  if (can_plan_together(n)) return together_scratch_bytes(n, table);
  return has_short_keys(table) ? scratch_bytes_of<uint32_t>(n, table)
                               : scratch_bytes_of<uint64_t>(n, table);
}

namespace {

template <typename Key>
int plan_many(const void* ids, bool wide, const PlanTable& table, void* memory,
              int64_t scratch_bytes, const PlanView& out, cudaStream_t stream) {
  const int64_t n = out.count;
  const Scratch<Key> scratch = carve<Key>(memory, scratch_bytes, n);
  const int blocks = blocks_for_ids(n);
  int error = cudaMemsetAsync(scratch.found, 0, sizeof(Found), stream);
  if (error != cudaSuccess) return error;
  mark_ids_kernel<Key><<<blocks, kIdThreads, 0, stream>>>(ids, wide, n, table, scratch.keys,
                                                          scratch.positions, scratch.found);
  size_t cub_bytes = static_cast<size_t>(scratch.cub_bytes);
  if ((error = sort(scratch, cub_bytes, n, table, stream)) != cudaSuccess) return error;
  cub_bytes = static_cast<size_t>(scratch.cub_bytes);
  if ((error = rank_heads(scratch, cub_bytes, n, stream)) != cudaSuccess) return error;
  write_plan_kernel<Key><<<blocks, kIdThreads, 0, stream>>>(ids, wide, table, scratch.sorted_keys,
                                                            scratch.sorted_positions, scratch.ranks,
                                                            scratch.found, out);
  return cudaGetLastError();
}

}  // namespace

int launch_plan(const void* ids, bool wide, const PlanTable& table, void* memory,
                int64_t scratch_bytes, const PlanView& out, void* stream) {
  auto on = static_cast<cudaStream_t>(stream);
  if (out.count <= kFewIds) {
    plan_few_kernel<<<1, kFewThreads, 0, on>>>(ids, wide, table, end_bit(table), out);
    return cudaGetLastError();
  }
  if (can_plan_together(out.count)) {
    return launch_plan_together(ids, wide, table, memory, out, stream);
  }
  return has_short_keys(table)
             ? plan_many<uint32_t>(ids, wide, table, memory, scratch_bytes, out, on)
             : plan_many<uint64_t>(ids, wide, table, memory, scratch_bytes, out, on);
}

}  // namespace speedtorch

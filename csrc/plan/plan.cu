// Ids -> address order on the GPU: mark bad ids, sort (id, position) by id, number the distinct
// ids. Called by plan.cpp. Every id is read once or twice from GPU memory; nothing crosses the
// link. Bad ids leave garbage in the plan but never an address out of bounds; the status tells the
// movers to leave everything as it was.

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>

// Ids are integers, and nobody profiles CUB here: a fifth of this file's compiling.
#define CCCL_DISABLE_BF16_SUPPORT
#define CCCL_DISABLE_FP16_SUPPORT
#define CCCL_DISABLE_NVTX
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "plan/ids.cuh"

namespace speedtorch {
namespace {

// One block plans so few ids in the time of a few launches.
constexpr int kFewThreads = 512;
constexpr int kFewPerThread = 4;
constexpr int64_t kFewIds = kFewThreads * kFewPerThread;

struct Scratch {
  uint64_t* keys;
  uint64_t* sorted_keys;
  int32_t* positions;
  int32_t* sorted_positions;
  int32_t* heads;
  int32_t* ranks;
  void* cub;
  int64_t cub_bytes;
};

int end_bit(int64_t rows) {
  return std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(rows - 1))));
}

// Sorts (key, position) by key, or says how many bytes of scratch.cub that takes where it is null.
cudaError_t sort(const Scratch& scratch, size_t& bytes, int64_t n, int64_t rows,
                 cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(scratch.cub, bytes, scratch.keys, scratch.sorted_keys,
                                         scratch.positions, scratch.sorted_positions,
                                         static_cast<int>(n), 0, end_bit(rows), stream);
}

Scratch carve(void* memory, int64_t bytes, int64_t n) {
  char* next = static_cast<char*>(memory);
  auto take = [&](int64_t size) { return std::exchange(next, next + padded(size)); };
  Scratch scratch{};
  scratch.keys = reinterpret_cast<uint64_t*>(take(n * 8));
  scratch.sorted_keys = reinterpret_cast<uint64_t*>(take(n * 8));
  scratch.positions = reinterpret_cast<int32_t*>(take(n * 4));
  scratch.sorted_positions = reinterpret_cast<int32_t*>(take(n * 4));
  scratch.heads = reinterpret_cast<int32_t*>(take(n * 4));
  scratch.ranks = reinterpret_cast<int32_t*>(take(n * 4));
  scratch.cub = next;
  scratch.cub_bytes = static_cast<char*>(memory) + bytes - next;
  return scratch;
}

// ------------------------------------------------------------------------------------------------
// kernels

// By one thread: a status of a batch in which nothing is wrong yet.
__device__ void reset(PlanStatus* status, int64_t rows, int64_t n) {
  *status = {0, n, 0, 0, rows, n, n, 0};
}

__global__ void reset_status_kernel(PlanStatus* status, int64_t rows, int64_t n) {
  reset(status, rows, n);
}

// A thread owns ids i, i + threads, ...: finds those out of range and prepares the sort.
__global__ void mark_ids_kernel(const void* ids, bool wide, int64_t n, int64_t rows, uint64_t* keys,
                                int32_t* positions, PlanStatus* status) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    const int64_t id = id_at(ids, wide, i);
    if (is_outside(id, rows)) {
      count_one(&status->bad_count);
      note_first(&status->bad_position, i);
    }
    keys[i] = static_cast<uint64_t>(id);
    positions[i] = static_cast<int32_t>(i);
  }
}

// A thread owns sorted entries: 1 where an id differs from the one before it.
__global__ void mark_heads_kernel(const uint64_t* sorted_keys, int64_t n, int32_t* heads) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    heads[i] = i == 0 || sorted_keys[i] != sorted_keys[i - 1];
  }
}

// A thread owns sorted entries: writes its share of the plan. ranks[i] is the number of distinct
// ids up to entry i.
__global__ void write_plan_kernel(const uint64_t* sorted_keys, const int32_t* sorted_positions,
                                  const int32_t* ranks, PlanView out) {
  const int64_t n = out.count;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t distinct = ranks[n - 1];
  unsigned long long first_repeat = static_cast<unsigned long long>(n);
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    const int64_t mine = ranks[i] - 1;
    const int64_t position = sorted_positions[i];
    const bool head = i == 0 || ranks[i - 1] != ranks[i];
    out.order[i] = position;
    out.inverse[position] = mine;
    if (head) {
      out.unique[mine] = static_cast<int64_t>(sorted_keys[i]);
      out.offsets[mine] = i;
    } else {
      first_repeat = min(first_repeat, static_cast<unsigned long long>(position));
    }
    if (i >= distinct) {
      out.unique[i] = -1;
      out.offsets[i] = n;
    }
    if (i == n - 1) {
      out.offsets[n] = n;
      out.status->distinct = distinct;
    }
  }
  // Once for each warp, and rarely: one atomic for each repeated id took longer than the sort.
  for (int apart = 16; apart > 0; apart /= 2) {
    first_repeat = min(first_repeat, __shfl_xor_sync(~0u, first_repeat, apart));
  }
  auto* found = reinterpret_cast<unsigned long long*>(&out.status->repeat_position);
  if (threadIdx.x % 32 == 0 && first_repeat < *found) atomicMin(found, first_repeat);
}

// By one thread: the ids at the first bad and the first repeated position.
__device__ void name_ids(const void* ids, bool wide, int64_t n, volatile PlanStatus* status) {
  if (status->bad_count > 0) status->bad_id = id_at(ids, wide, status->bad_position);
  if (status->repeat_position < n) status->repeat_id = id_at(ids, wide, status->repeat_position);
}

__global__ void name_ids_kernel(const void* ids, bool wide, int64_t n, PlanStatus* status) {
  name_ids(ids, wide, n, status);
}

// One block: all of the above, for batches so small that a dozen launches take longer. A thread
// owns kFewPerThread neighbours, before and after the sort.
__global__ void __launch_bounds__(kFewThreads)
    plan_few_kernel(const void* ids, bool wide, int64_t rows, int last_bit, PlanView out) {
  using Sort = cub::BlockRadixSort<uint64_t, kFewThreads, kFewPerThread, int32_t>;
  using Scan = cub::BlockScan<int32_t, kFewThreads>;
  __shared__ union {
    typename Sort::TempStorage sort;
    typename Scan::TempStorage scan;
    uint64_t last_key[kFewThreads];  // of each thread's neighbours
  } shared;
  PlanStatus* status = out.status;
  const int64_t n = out.count;
  if (threadIdx.x == 0) reset(status, rows, n);
  __syncthreads();
  const int64_t first = int64_t{threadIdx.x} * kFewPerThread;
  uint64_t key[kFewPerThread];
  int32_t position[kFewPerThread], rank[kFewPerThread];
#pragma unroll
  for (int k = 0; k < kFewPerThread; ++k) {
    const int64_t i = first + k;
    key[k] = i < n ? static_cast<uint64_t>(id_at(ids, wide, i)) : ~uint64_t{0};
    position[k] = static_cast<int32_t>(i);
    if (i < n && key[k] >= static_cast<uint64_t>(rows)) {
      count_one(&status->bad_count);
      note_first(&status->bad_position, i);
    }
  }
  // Stable, so that what is behind the last id stays there.
  Sort(shared.sort).Sort(key, position, 0, last_bit);
  __syncthreads();
  shared.last_key[threadIdx.x] = key[kFewPerThread - 1];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kFewPerThread; ++k) {
    const int64_t i = first + k;
    const uint64_t before = k > 0 ? key[k - 1] : i > 0 ? shared.last_key[threadIdx.x - 1] : 0;
    rank[k] = i < n && (i == 0 || key[k] != before);
  }
  bool head[kFewPerThread];
#pragma unroll
  for (int k = 0; k < kFewPerThread; ++k) head[k] = rank[k] != 0;
  __syncthreads();
  int32_t distinct = 0;
  Scan(shared.scan).InclusiveSum(rank, rank, distinct);
  int64_t repeat = n;
#pragma unroll
  for (int k = 0; k < kFewPerThread; ++k) {
    const int64_t i = first + k, mine = rank[k] - 1;
    if (i >= n) continue;
    out.order[i] = position[k];
    out.inverse[position[k]] = mine;
    if (head[k]) {
      out.unique[mine] = static_cast<int64_t>(key[k]);
      out.offsets[mine] = i;
    } else {
      repeat = min(repeat, int64_t{position[k]});
    }
    if (i >= distinct) {
      out.unique[i] = -1;
      out.offsets[i] = n;
    }
  }
  if (repeat < n) note_first(&status->repeat_position, repeat);
  __threadfence();
  __syncthreads();
  if (threadIdx.x != 0) return;
  out.offsets[n] = n;
  status->distinct = distinct;
  name_ids(ids, wide, n, status);
}

}  // namespace

// ------------------------------------------------------------------------------------------------
// launchers

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

int64_t plan_scratch_bytes(int64_t n, int64_t rows) {
  if (n <= kFewIds) return 0;
  size_t sort_bytes = 0;
  sort(Scratch{}, sort_bytes, n, rows, nullptr);
  return 2 * padded(n * 8) + 4 * padded(n * 4) +
         std::max(static_cast<int64_t>(sort_bytes), count_scratch_bytes(n));
}

int launch_plan(const void* ids, bool wide, int64_t rows, void* memory, int64_t scratch_bytes,
                const PlanView& out, void* stream) {
  auto on = static_cast<cudaStream_t>(stream);
  const int64_t n = out.count;
  if (n <= kFewIds) {
    plan_few_kernel<<<1, kFewThreads, 0, on>>>(ids, wide, rows, end_bit(rows), out);
    return cudaGetLastError();
  }
  const Scratch scratch = carve(memory, scratch_bytes, n);
  const int blocks = blocks_for_ids(n);
  reset_status_kernel<<<1, 1, 0, on>>>(out.status, rows, n);
  mark_ids_kernel<<<blocks, kIdThreads, 0, on>>>(ids, wide, n, rows, scratch.keys,
                                                 scratch.positions, out.status);
  size_t cub_bytes = static_cast<size_t>(scratch.cub_bytes);
  if (const int error = sort(scratch, cub_bytes, n, rows, on); error != cudaSuccess) return error;
  mark_heads_kernel<<<blocks, kIdThreads, 0, on>>>(scratch.sorted_keys, n, scratch.heads);
  const int error =
      count_marks(scratch.heads, n, scratch.ranks, scratch.cub, scratch.cub_bytes, stream);
  if (error != cudaSuccess) return error;
  write_plan_kernel<<<blocks, kIdThreads, 0, on>>>(scratch.sorted_keys, scratch.sorted_positions,
                                                   scratch.ranks, out);
  name_ids_kernel<<<1, 1, 0, on>>>(ids, wide, n, out.status);
  return cudaGetLastError();
}

}  // namespace speedtorch

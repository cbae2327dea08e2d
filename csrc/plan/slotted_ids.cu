// Kernels that check ids in ascending order and the places of their rows. Called by
// slotted_ids.cpp. Every id and place is read once or twice from GPU memory; nothing crosses the
// link.

#include <cuda_runtime.h>

#include "plan/ids.cuh"

namespace speedtorch {
namespace {

// One multiprocessor checks lists so long in the time of a few launches.
constexpr int64_t kFewIds = 16384;
constexpr int kFewThreads = 1024;

// Until the last kernel `bad_id` is the first entry whose place is out of range.
__device__ void reset(const SlottedCheck& list, int64_t table_rows) {
  int64_t count = list.view.count;
  if (list.count != nullptr) count = is_outside(*list.count, count + 1) ? 0 : *list.count;
  *list.view.status = {0, count, count, count, table_rows, count, count, 0};
}

// The calling threads own entries first, first + stride, ...
__device__ void check_entries(const SlottedCheck& list, int64_t table_rows, int64_t first,
                              int64_t stride) {
  PlanStatus* status = list.view.status;
  const int64_t count = status->count;
  for (int64_t i = first; i < count; i += stride) {
    const int64_t id = list.view.unique[i];
    if (is_outside(id, table_rows)) {
      count_one(&status->bad_count);
      note_first(&status->bad_position, i);
    } else if (i > 0 && id <= list.view.unique[i - 1]) {
      note_first(&status->repeat_position, i);
    } else if (is_outside(list.view.order[i], list.side_rows)) {
      note_first(&status->bad_id, i);
    }
  }
}

// By one thread: says what is wrong, and blocks the copy kernels then.
__device__ void judge(const SlottedCheck& list, int64_t table_rows, ErrorRecord* record) {
  volatile PlanStatus* status = list.view.status;
  Report about{record, Op::kSwap, list.list, table_rows};
  const int64_t count = status->count, bad_place = status->bad_id;
  if (status->bad_position < count) {
    const int64_t at = status->bad_position;
    report(about, IdError::kOutOfRange, list.view.unique[at], at, status->bad_count, count);
  } else if (status->repeat_position < count) {
    const int64_t at = status->repeat_position;
    report(about, IdError::kUnordered, list.view.unique[at], at, 1, count);
  } else if (bad_place < count) {
    about.rows = list.side_rows;
    report(about, IdError::kBadPlace, list.view.order[bad_place], bad_place, 1, count);
  } else {
    return;
  }
  status->bad_count = 0;  // the copy kernels need not report it again
  status->distinct = -1;
}

// One thread: statuses in which nothing is wrong yet.
__global__ void reset_kernel(SlottedCheck evict, SlottedCheck load, int64_t table_rows) {
  reset(evict, table_rows);
  reset(load, table_rows);
}

__global__ void check_slotted_kernel(SlottedCheck evict, SlottedCheck load, int64_t table_rows) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  check_entries(evict, table_rows, first, stride);
  check_entries(load, table_rows, first, stride);
}

// One thread.
__global__ void judge_kernel(SlottedCheck evict, SlottedCheck load, int64_t table_rows,
                             ErrorRecord* record) {
  judge(evict, table_rows, record);
  judge(load, table_rows, record);
}

// One block: all of the above, for lists so short that three launches take longer.
__global__ void check_few_slotted_kernel(SlottedCheck evict, SlottedCheck load, int64_t table_rows,
                                         ErrorRecord* record) {
  if (threadIdx.x == 0) {
    reset(evict, table_rows);
    reset(load, table_rows);
  }
  __syncthreads();
  check_entries(evict, table_rows, threadIdx.x, blockDim.x);
  check_entries(load, table_rows, threadIdx.x, blockDim.x);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    judge(evict, table_rows, record);
    judge(load, table_rows, record);
  }
}

}  // namespace

int launch_check_slotted(const SlottedCheck& evict, const SlottedCheck& load, int64_t table_rows,
                         ErrorRecord* record, void* stream) {
  auto on = static_cast<cudaStream_t>(stream);
  const int64_t longer = evict.view.count > load.view.count ? evict.view.count : load.view.count;
  if (longer <= kFewIds) {
    check_few_slotted_kernel<<<1, kFewThreads, 0, on>>>(evict, load, table_rows, record);
    return cudaGetLastError();
  }
  reset_kernel<<<1, 1, 0, on>>>(evict, load, table_rows);
  check_slotted_kernel<<<blocks_for_ids(longer), kIdThreads, 0, on>>>(evict, load, table_rows);
  judge_kernel<<<1, 1, 0, on>>>(evict, load, table_rows, record);
  return cudaGetLastError();
}

}  // namespace speedtorch

// Kernels that check ids in ascending order and the places of their rows. Called by placed_ids.cpp.
// Every id and place is read once or twice from GPU memory; nothing crosses the link.

#include <cuda_runtime.h>

#include "ids.cuh"
#include "letter.cuh"
#include "placed_ids_launch.h"

namespace speedtorch {
namespace {

// One multiprocessor checks so many ids in the time of two launches.
constexpr int64_t kFewIds = 16384;
constexpr int kFewThreads = 1024;

__device__ void note_first(int64_t* first, int64_t position) {
  atomicMin(reinterpret_cast<unsigned long long*>(first),
            static_cast<unsigned long long>(position));
}

// One thread: a status in which nothing is wrong yet. Until the last kernel `bad_id` is the first
// entry whose place is out of range.
__global__ void reset_kernel(PlanStatus* status, int64_t table_rows, int64_t count) {
  *status = {0, count, count, count, table_rows, count, count, 0};
}

// The calling threads own entries first, first + stride, ...
__device__ void check_entries(const int64_t* ids, const int64_t* places, int64_t count,
                              int64_t table_rows, int64_t side_rows, PlanStatus* status,
                              int64_t first, int64_t stride) {
  for (int64_t i = first; i < count; i += stride) {
    const int64_t id = ids[i];
    if (is_outside(id, table_rows)) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&status->bad_count), 1ull);
      note_first(&status->bad_position, i);
    } else if (i > 0 && id <= ids[i - 1]) {
      note_first(&status->repeat_position, i);
    } else if (is_outside(places[i], side_rows)) {
      note_first(&status->bad_id, i);
    }
  }
}

// By one thread: says what is wrong, and blocks the movers then.
__device__ void judge(const int64_t* ids, const int64_t* places, volatile PlanStatus* status,
                      int64_t side_rows, Complaint about) {
  const int64_t count = status->count, bad_place = status->bad_id;
  if (status->bad_position < count) {
    complain(about, LetterKind::kOutOfRange, ids[status->bad_position], status->bad_position,
             status->bad_count, count);
  } else if (status->repeat_position < count) {
    const int64_t at = status->repeat_position;
    complain(about, LetterKind::kUnordered, ids[at], at, 1, count);
  } else if (bad_place < count) {
    about.rows = side_rows;
    complain(about, LetterKind::kBadPlace, places[bad_place], bad_place, 1, count);
  } else {
    return;
  }
  status->bad_count = 0;  // the movers need not say it again
  status->distinct = -1;
}

__global__ void check_placed_kernel(const int64_t* ids, const int64_t* places, int64_t count,
                                    int64_t table_rows, int64_t side_rows, PlanStatus* status) {
  check_entries(ids, places, count, table_rows, side_rows, status,
                int64_t{blockIdx.x} * blockDim.x + threadIdx.x, int64_t{gridDim.x} * blockDim.x);
}

__global__ void judge_kernel(const int64_t* ids, const int64_t* places, PlanStatus* status,
                             int64_t side_rows, Complaint about) {
  judge(ids, places, status, side_rows, about);
}

// One block: all of the above, for lists so short that three launches take longer.
__global__ void check_few_placed_kernel(const int64_t* ids, const int64_t* places, int64_t count,
                                        int64_t table_rows, int64_t side_rows, PlanStatus* status,
                                        Complaint about) {
  if (threadIdx.x == 0) *status = {0, count, count, count, table_rows, count, count, 0};
  __syncthreads();
  check_entries(ids, places, count, table_rows, side_rows, status, threadIdx.x, blockDim.x);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) judge(ids, places, status, side_rows, about);
}

}  // namespace

int launch_check_placed(const int64_t* ids, const int64_t* places, int64_t count,
                        int64_t table_rows, int64_t side_rows, IdList list, PlanStatus* status,
                        Letter* box, void* stream) {
  auto on = static_cast<cudaStream_t>(stream);
  const Complaint about{box, Op::kSwap, list, table_rows};
  if (count <= kFewIds) {
    check_few_placed_kernel<<<1, kFewThreads, 0, on>>>(ids, places, count, table_rows, side_rows,
                                                       status, about);
    return cudaGetLastError();
  }
  reset_kernel<<<1, 1, 0, on>>>(status, table_rows, count);
  check_placed_kernel<<<blocks_for_ids(count), kIdThreads, 0, on>>>(ids, places, count, table_rows,
                                                                    side_rows, status);
  judge_kernel<<<1, 1, 0, on>>>(ids, places, status, side_rows, about);
  return cudaGetLastError();
}

}  // namespace speedtorch

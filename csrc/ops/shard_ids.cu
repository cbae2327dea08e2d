// Kernels of shard_ids and requested_ids. Called by shard_ids.cpp. All data is in GPU memory. In
// each kernel a thread owns entries a grid stride apart unless noted otherwise.

#include <cuda_runtime.h>

#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

__device__ int64_t first_of_thread() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ int64_t threads_of_grid() { return int64_t{gridDim.x} * blockDim.x; }

// A thread owns ids, and computes their numbers.
__global__ void number_ids_kernel(ShardIds work) {
  for (int64_t i = first_of_thread(); i < work.count; i += threads_of_grid()) {
    work.numbers[i] = work.number_of(id_at(work.ids, work.wide, i));
  }
}

// One block, because all threads need the begin of each rank; a thread owns ranks. Writes `begins`,
// the counts and, as the last entry of `begins`, the fault.
__global__ void count_by_rank_kernel(ShardIds work, PlanView plan) {
  const int64_t distinct = plan.status->distinct;
  for (int64_t rank = threadIdx.x; rank <= work.ranks + 1; rank += blockDim.x) {
    work.begins[rank] = rank > work.ranks
                            ? distinct
                            : lower_bound(plan.unique, distinct, rank * work.rows_per_rank);
  }
  __syncthreads();
  bool is_over = false;
  for (int64_t rank = threadIdx.x; rank < work.ranks; rank += blockDim.x) {
    work.counts[rank] = work.count_of(rank);
    is_over |= work.fault_of(rank) != ShardFault::kNone;
  }
  const bool some_over = __syncthreads_or(is_over);
  if (threadIdx.x > 0) return;
  const ShardFault fault = some_over ? ShardFault::kOverShare : work.fault_of(work.ranks);
  work.begins[work.ranks + 2] = static_cast<int64_t>(fault);
}

// A thread owns entries of `sent`, then ids. No id needs a search.
__global__ void shard_ids_kernel(ShardIds work, PlanView plan) {
  const auto fault = static_cast<ShardFault>(work.begins[work.ranks + 2]);
  for (int64_t i = first_of_thread(); i < work.sent_size(); i += threads_of_grid()) {
    work.send(plan, i, fault);
  }
  if (work.share < 0) return;
  for (int64_t i = first_of_thread(); i < work.count; i += threads_of_grid()) {
    work.places[i] = work.place_of(plan, i);
  }
}

// A thread owns entries of `ids`. The threads of the first block also reduce the ranks' faults to
// the largest.
__global__ void requested_ids_kernel(RequestedIds work) {
  const int64_t size = work.ranks * work.share;
  for (int64_t i = first_of_thread(); i < size; i += threads_of_grid()) {
    work.ids[i] = work.id_at(i);
  }
  if (blockIdx.x > 0) return;
  __shared__ int most;  // faults are small numbers
  if (threadIdx.x == 0) most = static_cast<int>(work.own_fault());
  __syncthreads();
  for (int64_t rank = threadIdx.x; rank < work.ranks; rank += blockDim.x) {
    atomicMax(&most, static_cast<int>(work.fault_of(rank)));
  }
  __syncthreads();
  if (threadIdx.x == 0) *work.fault = most;
}

}  // namespace

int launch_number_ids(const ShardIds& work, void* stream) {
  if (work.count == 0) return cudaSuccess;
  number_ids_kernel<<<blocks_for_ids(work.count), kIdThreads, 0,
                      static_cast<cudaStream_t>(stream)>>>(work);
  return cudaGetLastError();
}

int launch_shard_ids(const ShardIds& work, const PlanView& plan, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  count_by_rank_kernel<<<1, kIdThreads, 0, on>>>(work, plan);
  const cudaError_t error = cudaGetLastError();
  const int64_t size = max(work.sent_size(), work.count);
  if (error != cudaSuccess || size == 0) return error;
  shard_ids_kernel<<<blocks_for_ids(size), kIdThreads, 0, on>>>(work, plan);
  return cudaGetLastError();
}

int launch_requested_ids(const RequestedIds& work, void* stream) {
  const int64_t size = max(work.ranks * work.share, int64_t{1});
  requested_ids_kernel<<<blocks_for_ids(size), kIdThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      work);
  return cudaGetLastError();
}

}  // namespace speedtorch

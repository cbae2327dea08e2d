// Kernels of round_rows: float32 rows become numbers that fit 16 bits. Called by round_rows.cpp.

#include <cuda_runtime.h>

#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

// A thread owns one group of columns of a row, for which one call of the generator gives all random
// words. The rows are in GPU memory, and are read and written once.
__global__ void round_rows_kernel(RoundedRows work) {
  const uint64_t key = key_of_step(work.key[0], work.key[1]);
  const int64_t groups = work.groups();
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < work.count * groups;
       i += stride) {
    work.round(key, i / groups, i % groups);
  }
}

__global__ void count_step_kernel(int64_t* key) { key[1] += 1; }

}  // namespace

int launch_round_rows(const RoundedRows& work, void* stream) {
  const int64_t shares = work.count * work.groups();
  if (shares == 0) return cudaSuccess;
  round_rows_kernel<<<shares_of(shares, kIdThreads, kDeviceBlocks * 8), kIdThreads, 0,
                      static_cast<cudaStream_t>(stream)>>>(work);
  return cudaGetLastError();
}

int launch_count_step(int64_t* key, void* stream) {
  count_step_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(key);
  return cudaGetLastError();
}

}  // namespace speedtorch

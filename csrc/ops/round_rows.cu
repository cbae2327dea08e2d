// Kernels of round_rows: round float32 rows to numbers that fit in 16 bits. Called by
// round_rows.cpp.

#include <cuda_runtime.h>

#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

// A block owns blockDim.x / `lanes` rows at a time, and `lanes` threads own one of them. Each
// thread owns every `lanes`-th group of columns; one call of the generator yields the random words
// of a group. The rows are in GPU memory and are read and written once. kWhole: every group is one
// access of 16 bytes.
template <bool kWhole>
__global__ void round_rows_kernel(RoundedRows work, int lanes) {
  const uint64_t key = key_of_step(work.key[0], work.key[1]);
  const int64_t groups = work.groups();
  const int in_block = blockDim.x / lanes, lane = threadIdx.x % lanes;
  if (threadIdx.x / lanes >= in_block) return;
  for (int64_t row = int64_t{blockIdx.x} * in_block + threadIdx.x / lanes; row < work.count;
       row += int64_t{gridDim.x} * in_block) {
    for (int64_t group = lane; group < groups; group += lanes) {
      if constexpr (!kWhole) {
        work.round(key, row, group);
      } else if (work.has_row(row)) {
        auto* numbers = reinterpret_cast<uint4*>(work.rows) + row * groups + group;
        const uint4 now = *numbers;
        const RandomWords random = work.words(key, row, group);
        *numbers = {work.rounded(now.x, random.word[0]), work.rounded(now.y, random.word[1]),
                    work.rounded(now.z, random.word[2]), work.rounded(now.w, random.word[3])};
      }
    }
  }
}

__global__ void count_step_kernel(int64_t* key) { key[1] += 1; }

}  // namespace

int launch_round_rows(const RoundedRows& work, void* stream) {
  if (work.count == 0) return cudaSuccess;
  const int lanes = shares_of(work.groups(), 1, 32);
  const int blocks = shares_of(work.count, kIdThreads / lanes, kDeviceBlocks);
  const bool whole = work.columns % kRoundedTogether == 0 &&
                     reinterpret_cast<uint64_t>(work.rows) % sizeof(uint4) == 0;
  auto* kernel = whole ? round_rows_kernel<true> : round_rows_kernel<false>;
  kernel<<<blocks, kIdThreads, 0, static_cast<cudaStream_t>(stream)>>>(work, lanes);
  return cudaGetLastError();
}

int launch_count_step(int64_t* key, void* stream) {
  count_step_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(key);
  return cudaGetLastError();
}

}  // namespace speedtorch

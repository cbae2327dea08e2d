// Kernel of table_ids. Called by table_ids.cpp. All data is in GPU memory; each id costs a binary
// search in the offsets of the bags.

#include <cuda_runtime.h>

#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

// A thread owns entries, a grid stride apart. If offsets do not ascend, the entry gets some
// existing bag.
__global__ void table_ids_kernel(TableIds work) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t bags = work.features * work.samples;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < work.count; i += stride) {
    // The entry belongs to the first bag that ends after the entry.
    const int64_t bag = min(lower_bound(work.offsets + 1, bags, i + 1), bags - 1);
    const int64_t feature = bag / work.samples, sample = bag % work.samples;
    const int64_t id = id_at(work.ids, work.wide, i);
    const int64_t* range = work.ranges + 2 * feature;
    work.rows[i] = id >= 0 && id < range[1] ? id + range[0] : -1;
    work.bags[i] = sample * work.features + feature;
  }
}

}  // namespace

int launch_table_ids(const TableIds& work, void* stream) {
  if (work.count == 0) return cudaSuccess;
  table_ids_kernel<<<blocks_for_ids(work.count), kIdThreads, 0,
                     static_cast<cudaStream_t>(stream)>>>(work);
  return cudaGetLastError();
}

}  // namespace speedtorch

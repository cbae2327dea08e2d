// Whether bulk copies can be had: the GPU must have them, and the shared memory that our kernel
// takes, and the kernel must have been compiled for it.

#include "core/cuda_calls.h"
#include "move/bulk_mover.cuh"

namespace speedtorch {

struct NoMoves {
  __device__ bool blocked() const { return false; }
  __device__ void complain() const {}
  __device__ int64_t count() const { return 0; }
  __device__ int64_t from(int64_t) const { return -1; }
  __device__ int64_t to(int64_t) const { return 0; }
};

int ask_bulk_copies(int device, int* supported) {
  int major = 0, shared_bytes = 0;
  *supported = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  if (major < 9 || shared_bytes < kMostSharedBytes) return cudaSuccess;
  // A library built for older GPUs alone runs here too, from code that knows no bulk copies.
  cudaFuncAttributes kernel{};
  error = cudaFuncGetAttributes(&kernel, bulk_move_rows_kernel<NoMoves>);
  *supported = error == cudaSuccess && kernel.ptxVersion >= 90;
  return error;
}

}  // namespace speedtorch

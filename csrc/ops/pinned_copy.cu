// Kernel of pinned_copy: copies consecutive rows between mapped host memory and the GPU. Called by
// pinned_copy.cpp with checked shapes. Each byte crosses the link once.

#include "core/cuda_calls.h"
#include "move/bulk_copy.cuh"
#include "ops/launchers.h"

namespace speedtorch {
int launch_copy(const Rows& from, const Rows& to, bool to_host, CopyKernel kernel, void* stream) {
  auto* launch = kernel.bulk ? launch_bulk_copy<Consecutive>
                 : to_host   ? launch_register_copy<Link::kTo, Consecutive>
                             : launch_register_copy<Link::kFrom, Consecutive>;
  return launch(Consecutive{to.count}, from, to, to.count, 0, kernel.max_blocks, stream);
}

// Requires three things: a GPU with bulk copies, enough shared memory for the kernel, and a kernel
// compiled for this architecture.
int query_bulk_copies(int device, int* supported) {
  int major = 0, shared_bytes = 0;
  *supported = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  if (major < 9 || shared_bytes < kMaxSharedBytes) return cudaSuccess;
  // A library built only for older GPUs also runs here, but its code has no bulk copies.
  cudaFuncAttributes kernel{};
  error = cudaFuncGetAttributes(&kernel, bulk_move_rows_kernel<Consecutive>);
  *supported = error == cudaSuccess && kernel.ptxVersion >= 90;
  return error;
}

}  // namespace speedtorch

// The kernel that moves rows in one direction with Hopper's bulk copies, for pinned_copy,
// pinned_gather and pinned_scatter. Shared memory instead of threads covers the link's latency, so
// that few multiprocessors saturate the link. `RowMap` is described in row_copy.cuh.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "move/row_copy.cuh"

namespace speedtorch {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Arrives at the barrier; its phase ends after `bytes` bytes are copied.
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void wait_phase(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\nbra again;\nover:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until this thread's bulk stores have read shared memory.
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Waits until this thread's bulk stores are complete.
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif

// A chunk of a row in flight; bytes == 0: nothing to move.
struct Chunk {
  const char* source;
  char* target;
  uint32_t bytes;
};

template <typename RowMap>
__device__ Chunk chunk_of(const RowMap& map, const Rows& from, const Rows& to,
                          const BulkShape& shape, int64_t number, int64_t chunks) {
  if (number >= chunks) return {nullptr, nullptr, 0};
  const int64_t m = shape.chunks_per_row == 1 ? number : number / shape.chunks_per_row;
  const int64_t row = map.from(m, map.planned());
  if (row < 0) return {nullptr, nullptr, 0};
  const int64_t begin = (number - m * shape.chunks_per_row) * shape.chunk_bytes;
  const int64_t left = to.row_bytes - begin;
  return {from.base + row * from.stride_bytes + begin,
          to.base + map.to(m, map.planned()) * to.stride_bytes + begin,
          static_cast<uint32_t>(left < shape.chunk_bytes ? left : shape.chunk_bytes)};
}

// A warp owns kChunksPerWarp chunks at a time, and each lane owns one of these chunks. The warp
// loads all chunks into shared memory and then stores them. Blocks share nothing. Each row crosses
// the link once. Addresses and lengths are multiples of 16. Unaligned rows would need the 16-byte
// blocks around them; measured: 1.3 to 1.8 times as slow as plain threads.
template <typename RowMap>
__global__ void __launch_bounds__(kMaxBulkWarps * 32)
    bulk_move_rows_kernel(RowMap map, Rows from, Rows to, BulkShape shape, int64_t zero_rows) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char shared[];
  if (map.blocked()) return zero_instead<uint4>(map, to, zero_rows);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  uint64_t* barrier = reinterpret_cast<uint64_t*>(shared) + warp;
  char* buffer = shared + kBulkBarrierBytes + int64_t{threadIdx.x} * shape.chunk_bytes;
  if (lane == 0) init_barrier(barrier);
  __syncwarp();

  const int64_t chunks = map.count() * shape.chunks_per_row;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + warp * 32;
  Chunk next = chunk_of(map, from, to, shape, first + lane, chunks);
  uint32_t parity = 0;
  for (int64_t base = first; base < chunks; base += stride) {
    const Chunk chunk = next;
    const uint32_t expected = __reduce_add_sync(~0u, chunk.bytes);
    if (lane == 0) expect_bytes(barrier, expected);
    __syncwarp();
    if (chunk.bytes > 0) bulk_load(buffer, chunk.source, chunk.bytes, barrier);
    next = chunk_of(map, from, to, shape, base + stride + lane, chunks);
    wait_phase(barrier, parity);
    parity ^= 1;
    if (chunk.bytes > 0) bulk_store(chunk.target, buffer, chunk.bytes);
    wait_stores_read();
    __syncwarp();
  }
  wait_stores();
#else
  __trap();  // not launched if query_bulk_copies() reports no support
#endif
}

// Raises a kernel's limit of shared memory on the current device to the maximum of all launches,
// once per kernel and device. The limit belongs to the kernel: a limit per launch could be lowered
// by another thread before the launch. Occupancy depends only on the bytes that a launch requests.
template <typename RowMap>
cudaError_t allow_shared_memory() {
  constexpr int kKnown = 64;  // devices with a flag
  static std::atomic<bool> is_allowed[kKnown];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  std::atomic<bool>* allowed = device < kKnown ? is_allowed + device : nullptr;
  if (allowed != nullptr && *allowed) return cudaSuccess;
  error = cudaFuncSetAttribute(bulk_move_rows_kernel<RowMap>,
                               cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes);
  if (error == cudaSuccess && allowed != nullptr) *allowed = true;
  return error;
}

// Does the same as launch_register_copy, with bulk copies.
template <typename RowMap>
int launch_bulk_copy(const RowMap& map, const Rows& from, const Rows& to, int64_t max_rows,
                     int64_t zero_rows, int max_blocks, void* stream) {
  const BulkShape shape = bulk_shape(to.row_bytes, max_rows, max_blocks);
  const cudaError_t error = allow_shared_memory<RowMap>();
  if (error != cudaSuccess) return error;
  bulk_move_rows_kernel<RowMap>
      <<<shape.blocks, shape.warps * 32, shape.shared_bytes, static_cast<cudaStream_t>(stream)>>>(
          map, from, to, shape, zero_rows);
  return cudaGetLastError();
}

}  // namespace speedtorch

// Kernels of pinned_scatter: copy rows on the GPU to a table in mapped host memory or on the GPU.
// Called by pinned_scatter.cpp. row_copy.cuh and bulk_copy.cuh say what a thread owns.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "move/bulk_copy.cuh"
#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

// Moves of the last occurrences, which each block finds with a hash table in shared memory.
struct LastInBlock {
  DedupView ids;
  Report about;

  static constexpr int kSlots = 2 * kIdsDedupedInBlock;

  __device__ static int32_t* positions() {
    __shared__ int32_t shared[kSlots];  // position + 1, or 0
    return shared;
  }
  __device__ int64_t id(int64_t m) const { return id_at(ids.ids, ids.wide, m); }
  // The slot that holds the id at position m, or the first free slot.
  __device__ int slot_from(int64_t m, int slot) const {
    while (true) {
      const int32_t seen = *reinterpret_cast<volatile int32_t*>(positions() + slot);
      if (seen == 0 || id(seen - 1) == id(m)) return slot;
      slot = (slot + 1) % kSlots;
    }
  }
  __device__ int slot_of(int64_t m) const {
    return slot_from(m, static_cast<int>(hash_of(id(m)) % kSlots));
  }
  __device__ bool blocked() const {
    for (int slot = threadIdx.x; slot < kSlots; slot += blockDim.x) positions()[slot] = 0;
    __syncthreads();
    bool bad = false;
    for (int64_t m = threadIdx.x; m < ids.count; m += blockDim.x) {
      bad |= is_outside(id(m), about.rows);
      const int32_t mine = static_cast<int32_t>(m + 1);
      int slot = slot_of(m);
      while (true) {
        const int32_t seen = atomicCAS(positions() + slot, 0, mine);
        if (seen == 0) break;
        if (id(seen - 1) == id(m)) {
          atomicMax(positions() + slot, mine);
          break;
        }
        slot = slot_from(m, slot);
      }
    }
    return __syncthreads_or(bad);
  }
  __device__ void report() const { report_outside(about, ids); }
  __device__ int64_t count() const { return ids.count; }
  __device__ bool planned() const { return false; }
  __device__ int64_t from(int64_t m, bool) const {
    return positions()[slot_of(m)] == m + 1 ? m : -1;
  }
  __device__ int64_t to(int64_t m, bool) const { return id(m); }
};

// Moves of the last occurrences. With a plan, move m copies from the last position of unique id m.
// With a hash table, move m copies from position m if it was kept.
struct LastOccurrences : RowMapOnce {
  __device__ int64_t from(int64_t m, bool planned) const {
    if (planned) return plan.order[plan.offsets[m + 1] - 1];
    return dedup.slots[dedup.kept_at[m]] == m + 1 ? m : -1;
  }
  __device__ int64_t to(int64_t m, bool planned) const {
    return planned ? plan.unique[m] : id_at(dedup.ids, dedup.wide, m);
  }
};

using speedtorch::plus;
__device__ __half plus(__half a, __half b) {
  return __float2half_rn(__half2float(a) + __half2float(b));
}
__device__ __nv_bfloat16 plus(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __float2bfloat16_rn(__bfloat162float(a) + __bfloat162float(b));
}

// Table numbers may be unaligned, as in a tensor over the bytes of a file.
template <typename T>
__device__ void copy_number(T* to, const T* from, bool aligned) {
  if (aligned) {
    *to = *from;
  } else if constexpr (sizeof(T) > 1) {
    for (size_t b = 0; b < sizeof(T); ++b) {
      reinterpret_cast<char*>(to)[b] = reinterpret_cast<const char*>(from)[b];
    }
  }
}

// A warp owns a distinct id at a time; a lane owns every 32nd number of the row, kNumbersInFlight
// at a time. A row crosses the link twice: once each way. `aligned` refers to the table; src is
// always aligned.
template <typename T>
__global__ void __launch_bounds__(kMoverThreads)
    add_rows_kernel(Rows table, Rows src, PlanView plan, Report about, bool aligned) {
  constexpr int kNumbersInFlight = 16 / sizeof(T);
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (is_blocked(*plan.status, about.rows)) {
    if (thread == 0) report_blocked(about, *plan.status);
    return;
  }
  const int64_t warps = int64_t{gridDim.x} * blockDim.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t numbers = table.row_bytes / static_cast<int64_t>(sizeof(T));
  for (int64_t m = thread / 32; m < plan.status->distinct; m += warps) {
    T* row = reinterpret_cast<T*>(table.base + plan.unique[m] * table.stride_bytes);
    const int64_t begin = plan.offsets[m], end = plan.offsets[m + 1];
    for (int64_t first = lane; first < numbers; first += 32 * kNumbersInFlight) {
      T sum[kNumbersInFlight];
#pragma unroll
      for (int u = 0; u < kNumbersInFlight; ++u) {
        if (first + 32 * u < numbers) copy_number(sum + u, row + first + 32 * u, aligned);
      }
      for (int64_t i = begin; i < end; ++i) {
        const T* added = reinterpret_cast<const T*>(src.base + plan.order[i] * src.stride_bytes);
#pragma unroll
        for (int u = 0; u < kNumbersInFlight; ++u) {
          if (first + 32 * u < numbers) sum[u] = plus(sum[u], added[first + 32 * u]);
        }
      }
#pragma unroll
      for (int u = 0; u < kNumbersInFlight; ++u) {
        if (first + 32 * u < numbers) copy_number(row + first + 32 * u, sum + u, aligned);
      }
    }
  }
}

}  // namespace

int launch_scatter(const Rows& table, const Rows& src, const RowIdsView& ids, CopyKernel kernel,
                   const Report& about, void* stream) {
  if (ids.plan.status == nullptr && ids.dedup.status == nullptr) {
    return launch_register_copy<Link::kTo>(LastInBlock{ids.dedup, about}, src, table, src.count, 0,
                                           kernel.max_blocks, stream);
  }
  auto* launch = kernel.bulk ? launch_bulk_copy<LastOccurrences>
                             : launch_register_copy<Link::kTo, LastOccurrences>;
  return launch(LastOccurrences{{ids, about}}, src, table, src.count, 0, kernel.max_blocks, stream);
}

int launch_scatter_add(const Rows& table, const Rows& src, const PlanView& plan, NumberKind kind,
                       int max_blocks, const Report& about, void* stream) {
  // one warp for each id
  const int blocks = shares_of(plan.count, kMoverThreads / 32, max_blocks);
  with_number_type<__half, __nv_bfloat16>(kind, [&](auto number) {
    const bool aligned = table.bits() % sizeof(number) == 0;
    add_rows_kernel<decltype(number)>
        <<<blocks, kMoverThreads, 0, static_cast<cudaStream_t>(stream)>>>(table, src, plan, about,
                                                                          aligned);
  });
  return cudaGetLastError();
}

}  // namespace speedtorch

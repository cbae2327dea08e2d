// Checks ids and finds the occurrence of each id that moves its row, with a hash table in GPU
// memory. Called by dedup.cpp. Each id is read once, and again for each id with the same slot;
// nothing crosses the link.

#include <cuda_runtime.h>

#include "plan/ids.cuh"

namespace speedtorch {
namespace {

struct Claim {
  int32_t slot;
  int32_t holder;  // index of the id that had the slot before; the caller's if the slot was free
};

// Finds the slot of `id` and claims it if it is free. kLast: also claims it from an earlier
// position.
template <Keep kKeep>
__device__ Claim claim_slot(const DedupView& dedup, int64_t id, int32_t position) {
  const uint64_t mask = static_cast<uint64_t>(dedup.slot_count) - 1;
  uint64_t slot = hash_of(id) & mask;
  while (true) {
    int32_t seen = *reinterpret_cast<volatile int32_t*>(dedup.slots + slot);
    if (seen == 0) seen = atomicCAS(dedup.slots + slot, 0, position + 1);
    if (seen == 0) return {static_cast<int32_t>(slot), position};
    if (id_at(dedup.ids, dedup.wide, seen - 1) == id) {
      if (kKeep == Keep::kLast && seen <= position) {
        atomicMax(dedup.slots + slot, position + 1);
      }
      return {static_cast<int32_t>(slot), seen - 1};
    }
    slot = (slot + 1) & mask;
  }
}

// All lanes of a warp must call this. Lanes with `repeats` append their positions to the list.
__device__ void append_repeated(const DedupView& dedup, bool repeats, int64_t m) {
  const unsigned all = __ballot_sync(~0u, repeats);
  if (all == 0) return;
  const int lane = threadIdx.x % 32;
  unsigned long long first = 0;
  if (lane == 0) {
    auto* count = reinterpret_cast<unsigned long long*>(&dedup.status->repeats);
    first = atomicAdd(count, static_cast<unsigned long long>(__popc(all)));
  }
  first = __shfl_sync(~0u, first, 0);
  if (repeats) {
    dedup.repeated[first + __popc(all & ((1u << lane) - 1))] = static_cast<int32_t>(m);
  }
}

// A thread owns positions, a grid stride apart, starting at the end of the batch. With kLast the
// first position to claim a slot then mostly keeps it, so that frequent ids cause few writes. In a
// warp, the lane with the last position claims the slot for all lanes with the same id.
template <Keep kKeep>
__global__ void __launch_bounds__(kIdThreads) dedup_kernel(DedupView dedup, int64_t rows) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int lane = threadIdx.x % 32;
  // Whole warps iterate: __match_any_sync needs all lanes.
  const int64_t end = (dedup.count + 31) / 32 * 32;
  for (int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; t < end; t += stride) {
    const int64_t m = dedup.count - 1 - t;
    const int64_t id = m >= 0 ? id_at(dedup.ids, dedup.wide, m) : -1;
    const bool outside = is_outside(id, rows);
    if (outside && m >= 0) {
      count_one(&dedup.status->bad_count);
      note_last(&dedup.status->bad_from_end, dedup.count - m);
    }
    if (kKeep == Keep::kAll) continue;
    const unsigned same = __match_any_sync(~0u, static_cast<unsigned long long>(id));
    const int leader = __ffs(static_cast<int>(same)) - 1;  // the lowest lane has the last position
    Claim claim{0, static_cast<int32_t>(m)};
    if (lane == leader && !outside) {
      claim = claim_slot<kKeep>(dedup, id, static_cast<int32_t>(m));
    }
    const int32_t mine = kKeep == Keep::kAny ? claim.holder : claim.slot;
    const int32_t warps = __shfl_sync(~0u, mine, leader);
    if (m >= 0) dedup.kept_at[m] = warps;
    if (kKeep == Keep::kAny) append_repeated(dedup, m >= 0 && !outside && warps != m, m);
  }
}

}  // namespace

int launch_dedup(const DedupView& dedup, Keep keep, int64_t rows, void* stream) {
  auto on = static_cast<cudaStream_t>(stream);
  const size_t slot_bytes = static_cast<size_t>(dedup.slot_count) * sizeof(int32_t);
  const cudaError_t error = cudaMemsetAsync(dedup.status, 0, sizeof(DedupStatus) + slot_bytes, on);
  if (error != cudaSuccess) return error;
  auto* kernel = keep == Keep::kAny    ? dedup_kernel<Keep::kAny>
                 : keep == Keep::kLast ? dedup_kernel<Keep::kLast>
                                       : dedup_kernel<Keep::kAll>;
  kernel<<<blocks_for_ids(dedup.count), kIdThreads, 0, on>>>(dedup, rows);
  return cudaGetLastError();
}

}  // namespace speedtorch

// Ids -> which occurrence of each id moves its row, by a hash table in GPU memory: what movers need
// that take rows in any order, at a tenth of a sort's time. Called by pinned_gather.cpp and
// pinned_scatter.cpp. Ids are read once, those that share a slot again; nothing crosses the link.

#include "plan/claims.cuh"

#include <cuda_runtime.h>

#include "plan/claims_launch.h"

namespace speedtorch {
namespace {

__device__ void report_outside(ClaimStatus* status, int64_t from_end) {
  atomicAdd(reinterpret_cast<unsigned long long*>(&status->bad_count), 1ull);
  atomicMax(reinterpret_cast<unsigned long long*>(&status->bad_from_end),
            static_cast<unsigned long long>(from_end));
}

struct Claim {
  int32_t slot;
  int32_t holder;  // position that had the slot before, or one's own
};

// Finds the slot of `id` and takes it if it is free, or from an earlier position if the last wins.
template <Winner kWinner, typename Id>
__device__ Claim claim(const ClaimsView& claims, Id id, int32_t position) {
  const auto* ids = static_cast<const Id*>(claims.ids);
  const uint64_t mask = static_cast<uint64_t>(claims.slot_count) - 1;
  uint64_t slot = hash_of(static_cast<int64_t>(id)) & mask;
  while (true) {
    int32_t seen = *reinterpret_cast<volatile int32_t*>(claims.slots + slot);
    if (seen == 0) seen = atomicCAS(claims.slots + slot, 0, position + 1);
    if (seen == 0) return {static_cast<int32_t>(slot), position};
    if (ids[seen - 1] == id) {
      if (kWinner == Winner::kLast && seen <= position) {
        atomicMax(claims.slots + slot, position + 1);
      }
      return {static_cast<int32_t>(slot), seen - 1};
    }
    slot = (slot + 1) & mask;
  }
}

// Every lane of a warp calls this; those that repeat append their positions to the list.
__device__ void append_repeated(const ClaimsView& claims, bool repeats, int64_t m) {
  const unsigned all = __ballot_sync(~0u, repeats);
  if (all == 0) return;
  const int lane = threadIdx.x % 32;
  unsigned long long first = 0;
  if (lane == 0) {
    auto* count = reinterpret_cast<unsigned long long*>(&claims.status->repeats);
    first = atomicAdd(count, static_cast<unsigned long long>(__popc(all)));
  }
  first = __shfl_sync(~0u, first, 0);
  if (repeats) {
    claims.repeated[first + __popc(all & ((1u << lane) - 1))] = static_cast<int32_t>(m);
  }
}

// A thread owns positions, the last ones first: where the last wins they mostly stay, so that an id
// that is named often is written rarely. Of the lanes of a warp that have one id only the last
// position claims, for all.
template <Winner kWinner, typename Id>
__global__ void __launch_bounds__(kIdThreads) claim_kernel(ClaimsView claims, int64_t rows) {
  const auto* ids = static_cast<const Id*>(claims.ids);
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int lane = threadIdx.x % 32;
  // Whole warps go round, so that their lanes can compare ids.
  const int64_t end = (claims.count + 31) / 32 * 32;
  for (int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; t < end; t += stride) {
    const int64_t m = claims.count - 1 - t;
    const int64_t id = m >= 0 ? static_cast<int64_t>(ids[m]) : -1;
    const bool outside = is_outside(id, rows);
    if (outside && m >= 0) report_outside(claims.status, claims.count - m);
    const unsigned same = __match_any_sync(~0u, static_cast<unsigned long long>(id));
    const int leader = __ffs(static_cast<int>(same)) - 1;  // the lowest lane has the last position
    Claim found{0, static_cast<int32_t>(m)};
    if (lane == leader && !outside) {
      found = claim<kWinner>(claims, static_cast<Id>(id), static_cast<int32_t>(m));
    }
    const int32_t mine = kWinner == Winner::kAny ? found.holder : found.slot;
    const int32_t warps = __shfl_sync(~0u, mine, leader);
    if (m >= 0) claims.claims[m] = warps;
    if (kWinner == Winner::kAny) append_repeated(claims, m >= 0 && !outside && warps != m, m);
  }
}

// A thread owns positions.
template <typename Id>
__global__ void __launch_bounds__(kIdThreads) check_ids_kernel(ClaimsView claims, int64_t rows) {
  const auto* ids = static_cast<const Id*>(claims.ids);
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t m = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; m < claims.count; m += stride) {
    if (is_outside(ids[m], rows)) report_outside(claims.status, claims.count - m);
  }
}

}  // namespace

ClaimsView carve_claims(void* memory, const void* ids, bool wide, int64_t n) {
  ClaimsView claims;
  claims.status = static_cast<ClaimStatus*>(memory);
  claims.slots = reinterpret_cast<int32_t*>(claims.status + 1);
  claims.slot_count = claim_slots(n);
  claims.claims = claims.slots + claims.slot_count;
  claims.repeated = claims.claims + n;
  claims.ids = ids;
  claims.wide = wide;
  claims.count = n;
  return claims;
}

int launch_claims(const ClaimsView& claims, Winner winner, int64_t rows, void* stream) {
  auto on = static_cast<cudaStream_t>(stream);
  const size_t slot_bytes = static_cast<size_t>(claims.slot_count) * sizeof(int32_t);
  const cudaError_t error = cudaMemsetAsync(claims.status, 0, sizeof(ClaimStatus) + slot_bytes, on);
  if (error != cudaSuccess) return error;
  auto* kernel = winner == Winner::kAny ? (claims.wide ? claim_kernel<Winner::kAny, int64_t>
                                                       : claim_kernel<Winner::kAny, int32_t>)
                                        : (claims.wide ? claim_kernel<Winner::kLast, int64_t>
                                                       : claim_kernel<Winner::kLast, int32_t>);
  kernel<<<blocks_for_ids(claims.count), kIdThreads, 0, on>>>(claims, rows);
  return cudaGetLastError();
}

int launch_check_ids(const ClaimsView& claims, int64_t rows, void* stream) {
  auto on = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaMemsetAsync(claims.status, 0, sizeof(ClaimStatus), on);
  if (error != cudaSuccess) return error;
  auto* kernel = claims.wide ? check_ids_kernel<int64_t> : check_ids_kernel<int32_t>;
  kernel<<<blocks_for_ids(claims.count), kIdThreads, 0, on>>>(claims, rows);
  return cudaGetLastError();
}

}  // namespace speedtorch

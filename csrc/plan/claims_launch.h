// Launchers of claims.cu. All return a cudaError_t as int; pointers are GPU memory. No torch here.
#pragma once

#include <bit>
#include <cstdint>

#include "plan/claims_view.h"

namespace speedtorch {

// Twice as many slots as ids keep the walks through the hash table short.
constexpr int64_t claim_slots(int64_t n) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(2 * n)));
}
// Bytes of scratch for the claims of n ids.
constexpr int64_t claims_bytes(int64_t n) {
  return static_cast<int64_t>(sizeof(ClaimStatus)) +
         static_cast<int64_t>(sizeof(int32_t)) * (claim_slots(n) + 2 * n);
}
ClaimsView carve_claims(void* memory, const void* ids, bool wide, int64_t n);

// Finds ids out of range, and for each id the occurrence that moves its row.
int launch_claims(const ClaimsView& claims, Winner winner, int64_t rows, void* stream);
// Only finds ids out of range: `claims` needs no slots.
int launch_check_ids(const ClaimsView& claims, int64_t rows, void* stream);

}  // namespace speedtorch

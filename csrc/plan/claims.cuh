// How movers read the claims of a batch (claims.cu). No torch here.
#pragma once

#include "plan/claims_view.h"
#include "plan/complaint.cuh"
#include "plan/ids.cuh"

namespace speedtorch {

// Whether position m moves the row of its id, after claims of which the last wins.
__device__ inline bool is_last(const ClaimsView& claims, int64_t m) {
  return claims.slots[claims.claims[m]] == m + 1;
}

// By one thread.
__device__ inline void complain_of_claims(const Complaint& about, const ClaimsView& claims) {
  const int64_t position = claims.count - claims.status->bad_from_end;
  complain(about, LetterKind::kOutOfRange, id_at(claims.ids, claims.wide, position), position,
           claims.status->bad_count, claims.count);
}

// The same without a status: one thread looks through all ids.
__device__ inline void complain_of_ids(const Complaint& about, const ClaimsView& claims) {
  int64_t first = 0, bad_count = 0;
  for (int64_t m = claims.count - 1; m >= 0; --m) {
    if (!is_outside(id_at(claims.ids, claims.wide, m), about.rows)) continue;
    ++bad_count;
    first = m;
  }
  complain(about, LetterKind::kOutOfRange, id_at(claims.ids, claims.wide, first), first, bad_count,
           claims.count);
}

}  // namespace speedtorch

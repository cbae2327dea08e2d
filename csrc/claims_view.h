// Which occurrence of each id moves its row, as plain pointers for kernels; see claims.h. No torch
// here.
#pragma once

#include <cstdint>

namespace speedtorch {

// Zeros: nothing is wrong.
struct ClaimStatus {
  int64_t bad_count;     // ids out of range
  int64_t bad_from_end;  // ids from the first of them to the end of the batch
  int64_t repeats;       // not zero: some id stands in the batch twice
};

// A hash table of positions in the batch, by id. Position m holds the row of its id if its slot
// says m + 1: of several occurrences of an id the last one does.
struct ClaimsView {
  ClaimStatus* status = nullptr;
  int32_t* slots = nullptr;    // [slot_count]: position + 1, or 0
  int32_t* slot_of = nullptr;  // [count]
  int64_t slot_count = 0;      // a power of two
  const void* ids = nullptr;
  bool wide = true;
  int64_t count = 0;
};

}  // namespace speedtorch

// Which occurrence of each id moves its row, as plain pointers for kernels; see claims.h. No torch
// here.
#pragma once

#include <cstdint>

namespace speedtorch {

// Zeros: nothing is wrong.
struct ClaimStatus {
  int64_t bad_count;     // ids out of range
  int64_t bad_from_end;  // ids from the first of them to the end of the batch
  int64_t repeats;       // entries of `repeated`
};

// Which of several occurrences of an id moves its row: any of them (they all mean the same row of a
// gather), or the last.
enum class Winner { kAny, kLast };

struct ClaimsView {
  ClaimStatus* status = nullptr;
  // A hash table of positions in the batch, by id: position + 1, or 0.
  int32_t* slots = nullptr;
  int64_t slot_count = 0;  // a power of two
  // [count], of kAny: the position that moves the row; of kLast: the slot that says so.
  int32_t* claims = nullptr;
  int32_t* repeated = nullptr;  // [count], of kAny: positions that another one moves the row for
  const void* ids = nullptr;
  bool wide = true;
  int64_t count = 0;
};

}  // namespace speedtorch

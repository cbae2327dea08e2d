// What kernels read of a batch's ids, as plain pointers: a plan, or dedup, which say which
// occurrence of each id moves its row; and the launchers that write them, which return a
// cudaError_t as int. No torch here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace speedtorch {

// Fields of a plan's status, in order.
struct PlanStatus {
  int64_t bad_count;        // ids out of range
  int64_t bad_position;     // the first of them, or the number of ids
  int64_t bad_id;           // the id there
  int64_t distinct;         // valid entries of `unique`
  int64_t rows;             // of the table that the plan was made for
  int64_t count;            // ids in all
  int64_t repeat_position;  // first position whose id stands earlier too, or the number of ids
  int64_t repeat_id;        // the id there
};
constexpr int64_t kPlanStatusFields = 8;
static_assert(sizeof(PlanStatus) == kPlanStatusFields * sizeof(int64_t));

struct PlanView {
  int64_t* unique = nullptr;   // [n]
  int64_t* inverse = nullptr;  // [n]
  int64_t* order = nullptr;    // [n]
  int64_t* offsets = nullptr;  // [n + 1]
  PlanStatus* status = nullptr;
  int64_t count = 0;  // n
};

// Zeros: nothing is wrong.
struct DedupStatus {
  int64_t bad_count;     // ids out of range
  int64_t bad_from_end;  // ids from the first of them to the end of the batch
  int64_t repeats;       // entries of `repeated`
};

// Which of several occurrences of an id moves its row: any of them (they all mean the same row of a
// gather), or the last.
enum class Keep { kAny, kLast };

struct DedupView {
  DedupStatus* status = nullptr;
  // A hash table of positions in the batch, by id: position + 1, or 0.
  int32_t* slots = nullptr;
  int64_t slot_count = 0;  // a power of two
  // [count], of kAny: the position that moves the row; of kLast: the slot that says so.
  int32_t* kept_at = nullptr;
  int32_t* repeated = nullptr;  // [count], of kAny: positions that another one moves the row for
  const void* ids = nullptr;
  bool wide = true;
  int64_t count = 0;
};

// Ids of which each distinct one moves its row once: by a plan, or by a hash table.
struct IdsOnceView {
  PlanView plan;
  DedupView dedup;
};

// ------------------------------------------------------------------------------------------------
// plan.cu and dedup.cu; pointers are GPU memory

// Bytes of scratch that launch_plan needs for n ids of a table of `rows` rows.
int64_t plan_scratch_bytes(int64_t n, int64_t rows);
// Fills the plan of out.count ids.
int launch_plan(const void* ids, bool wide, int64_t rows, void* scratch, int64_t scratch_bytes,
                const PlanView& out, void* stream);

// The number of marks up to each entry, in GPU memory; the compiler needs seconds for its headers.
int64_t count_scratch_bytes(int64_t n);
int count_marks(const int32_t* marks, int64_t n, int32_t* counts, void* scratch,
                int64_t scratch_bytes, void* stream);

// Finds ids out of range, and for each id the occurrence that moves its row.
int launch_dedup(const DedupView& dedup, Keep keep, int64_t rows, void* stream);
// Only finds ids out of range: `dedup` needs no slots.
int launch_check_ids(const DedupView& dedup, int64_t rows, void* stream);

}  // namespace speedtorch

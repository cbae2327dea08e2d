// A batch's ids in the form that kernels read, as plain pointers: a plan, or a hash table of the
// distinct ids. Both name the occurrence of each id that moves its row. Also declares the launchers
// that write them, which return a cudaError_t as int. Includes no torch header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/error_record.h"

namespace speedtorch {

// The fields of a plan's status, in order. A plan compared with held rows has kChangeCounts more.
struct PlanStatus {
  int64_t bad_count;        // ids out of range
  int64_t bad_position;     // position of the first bad id, or the number of ids
  int64_t bad_id;           // the id at this position
  int64_t distinct;         // valid entries of `unique`, without the padding's
  int64_t rows;             // rows of the table that the plan was made for
  int64_t count;            // total number of ids
  int64_t repeat_position;  // first position whose id also occurs earlier, or the number of ids
  int64_t repeat_id;        // the id there
};
constexpr int64_t kPlanStatusFields = 8;
constexpr int64_t kChangeCounts = 4;
static_assert(sizeof(PlanStatus) == kPlanStatusFields * sizeof(int64_t));

// The status of `count` valid distinct ids of a table with `rows` rows.
constexpr PlanStatus status_of_distinct(int64_t count, int64_t rows) {
  return {0, count, 0, count, rows, count, count, 0};
}

// The table that a plan is made for, and how a step stores its rows.
struct PlanTable {
  int64_t rows;
  int64_t padding = -1;   // the id of a row that is not trained, or -1
  int64_t capacity = -1;  // rows of the block for the batch's rows; -1: as many as the batch names

  // The sort key of an id: the padding comes last.
  constexpr int64_t key_of(int64_t id) const { return padding >= 0 && id == padding ? rows : id; }
  constexpr int64_t last_key() const { return padding >= 0 ? rows : rows - 1; }
  // The place of a distinct id in the block. Ids beyond the capacity share the last place.
  constexpr int64_t place_of(int64_t entry, bool is_padding) const {
    if (capacity < 0) return entry;
    return is_padding ? capacity : entry < capacity ? entry : capacity - 1;
  }
};

struct PlanView {
  int64_t* unique = nullptr;   // [n], or [n + 1] with a padding
  int64_t* inverse = nullptr;  // [n]
  int64_t* order = nullptr;    // [n]
  int64_t* offsets = nullptr;  // [n + 1]
  PlanStatus* status = nullptr;
  int64_t count = 0;  // n
  bool has_padding = false;
  // the first place of a list without `order`, whose rows are in list order
  int64_t first_place = 0;

  constexpr int64_t place(int64_t entry) const {
    return order == nullptr ? first_place + entry : order[entry];
  }
};

// All zeros: no error.
struct DedupStatus {
  int64_t bad_count;     // ids out of range
  int64_t bad_from_end;  // ids from the first bad one to the end of the batch
  int64_t repeats;       // entries of `repeated`
};

// The occurrences of an id that move its row: all, any one (a gather reads the same row for each),
// or the last.
enum class Keep { kAll, kAny, kLast };

// The ids of a batch, and the positions that move rows.
struct DedupView {
  DedupStatus* status = nullptr;  // null: the ids are not checked yet
  // kAny, kLast: a hash table from id to position in the batch + 1 (0: free).
  int32_t* slots = nullptr;
  int64_t slot_count = 0;  // a power of two
  // [count] kAny: the position that moves the id's row. kLast: the index in `slots` where that
  // position is. kAll: null.
  int32_t* kept_at = nullptr;
  int32_t* repeated = nullptr;  // [count] kAny: the positions that do not move their row
  const void* ids = nullptr;
  bool wide = true;
  int64_t count = 0;
};

// The ids of a batch for a kernel: `plan`, or `dedup` if plan.status is null.
struct RowIdsView {
  PlanView plan;
  DedupView dedup;
};

// ---- plan.cu and dedup.cu; pointers are GPU memory

// Bytes of scratch that launch_plan needs for n ids.
int64_t plan_scratch_bytes(int64_t n, const PlanTable& table);
// Fills the plan of out.count ids.
int launch_plan(const void* ids, bool wide, const PlanTable& table, void* scratch,
                int64_t scratch_bytes, const PlanView& out, void* stream);

// Writes the number of marks up to and including each entry, in GPU memory. Separate, because CUB's
// headers take seconds to compile.
int64_t count_scratch_bytes(int64_t n);
int count_marks(const int32_t* marks, int64_t n, int32_t* counts, void* scratch,
                int64_t scratch_bytes, void* stream);

// Checks the ids' range and finds the occurrences that move rows.
int launch_dedup(const DedupView& dedup, Keep keep, int64_t rows, void* stream);

}  // namespace speedtorch

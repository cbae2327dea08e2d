// What diff_ids.cpp and diff_ids.cu have in common. No torch here.
#pragma once

#include <cstdint>

#include "plan/plan_launch.h"

namespace speedtorch {

// A list of distinct ids, ascending; of `size` entries the first `*count` are ids.
struct SortedIds {
  const int64_t* ids;
  int64_t size;
  const int64_t* count;  // null: all of them
};

// The rows to load, to keep and to evict when a batch follows on held rows.
struct IdDiff {
  int64_t* load_ids;  // [named.size], as the next three; [capacity] of a batch with a capacity
  int64_t* load_places;
  int64_t* keep_places;
  int64_t* keep_from;
  int64_t* evict_ids;     // [held.size]
  int64_t* evict_places;  // [held.size]
  int64_t* counts;        // [kChangeCounts]: rows named, kept, loaded, evicted
  // The id of a row that is loaded by every batch and never kept or evicted, or -1. It follows the
  // other ids to load, which then have one entry more.
  int64_t padding;
};

// Why a batch does not fit its capacity. Values are part of the contract with readers of a Fault.
enum class Misfit : int64_t { kNone = 0, kBadIds = 1, kTooMany = 2, kForeignPlan = 3 };

// Why the first batch did not fit. `kind` is a Misfit, written last.
struct Fault {
  int64_t kind;
  int64_t distinct;  // rows that the batch names, without the padding's
  int64_t capacity;
  int64_t bad_count;  // this and the next three: of the plan's status
  int64_t bad_position;
  int64_t bad_id;
  int64_t count;
  int64_t table_rows;
};
constexpr int64_t kFaultFields = 8;
static_assert(sizeof(Fault) == kFaultFields * sizeof(int64_t));

// What a batch must fit, and where the kernel records the first that does not. After that none
// fits.
struct Fitting {
  const PlanStatus* status;  // of the plan whose ids are `named`
  int64_t capacity;          // at most so many rows
  int64_t table_rows;        // that the plan was made for
  int64_t* halt;             // [2]: whether a batch did not fit, how many were skipped since
  Fault* fault;

  constexpr Misfit misfit() const {
    if (status->bad_count != 0) return Misfit::kBadIds;
    if (status->rows != table_rows) return Misfit::kForeignPlan;
    return status->distinct > capacity ? Misfit::kTooMany : Misfit::kNone;
  }
  // Of a batch that does not fit: everything but the kind.
  constexpr Fault fault_of() const {
    return {0,
            status->distinct,
            capacity,
            status->bad_count,
            status->bad_position,
            status->bad_id,
            status->count,
            table_rows};
  }
};

// Bytes of scratch that the launcher needs.
int64_t diff_scratch_bytes(int64_t named_size, int64_t held_size);
// A batch that must fit (`fitting` is not null) and does not names no id: all held rows are
// evicted. Returns a cudaError_t.
int launch_diff_ids(const SortedIds& named, const SortedIds& held, const Fitting* fitting,
                    const IdDiff& out, void* scratch, int64_t scratch_bytes, void* stream);

}  // namespace speedtorch

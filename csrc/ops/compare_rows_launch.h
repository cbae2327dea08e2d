// Launcher of compare_rows.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "plan/plan_launch.h"

namespace speedtorch {

// Two lists of distinct ids, ascending; of `size` entries the first `*count` are ids.
struct SortedIds {
  const int64_t* ids;
  int64_t size;
  const int64_t* count;  // null: all of them
};

struct ComparedRows {
  int64_t* arriving_ids;  // [named.size], as the next three; [capacity] of a batch that fits
  int64_t* arriving_places;
  int64_t* stay_places;
  int64_t* stay_from;
  int64_t* leaving_ids;     // [held.size]
  int64_t* leaving_places;  // [held.size]
  int64_t* counts;          // [4]: rows named, staying, arriving, leaving
};

// Why a batch does not fit. Values are part of the contract with who reads a Fault.
enum class Misfit : int64_t { kNone = 0, kBadIds = 1, kTooMany = 2, kForeignPlan = 3 };

// Word of a batch that did not fit. `kind` is a Misfit, written last.
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

// What a batch must fit that is compared, and where word is left of the first that does not: from
// then on none fits.
struct Fitting {
  const PlanStatus* status;  // of the plan whose ids are `named`
  int64_t capacity;          // at most so many rows
  int64_t table_rows;        // that the plan was made for
  int64_t* halt;             // [2]: whether a batch did not fit, how many were left out since
  Fault* fault;
};

// Bytes of scratch that the launcher needs.
int64_t compare_scratch_bytes(int64_t named_size, int64_t held_size);
// `padding` is an id that is no row, or -1. Of a batch that must fit (`fitting` is not null) and
// does not, no id counts: all that is held leaves.
int launch_compare_rows(SortedIds named, const SortedIds& held, int64_t padding,
                        const Fitting* fitting, const ComparedRows& out, void* scratch,
                        int64_t scratch_bytes, void* stream);

}  // namespace speedtorch

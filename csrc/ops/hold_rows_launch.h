// Launchers of hold_rows.cu; each returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "core/rows.h"
#include "plan/plan_launch.h"

namespace speedtorch {

// One field: contiguous rows, equally many of each.
struct HeldField {
  Rows held;
  Rows coming;
  Rows left;  // without rows: what leaves is not put aside
};

constexpr int kHeldPerLaunch = 16;

// Which rows stay and leave; every list has as many entries as there are rows.
struct HeldChanges {
  const int64_t* stay_places;
  const int64_t* stay_from;
  const int64_t* leaving_places;
  const int64_t* counts;  // [4]: rows named, staying, arriving, leaving
  int64_t most_named;
};

// What says which rows are held.
struct HeldIds {
  const int64_t* ids;  // [most_named] of HeldChanges: of the rows named
  int64_t* held_ids;   // [size]; kNoId after those that are held, so that all ascend
  PlanStatus* status;
  int64_t size;
  // Of the rows put aside, null where none are: their ids, [size], go to `left_ids`, and how many
  // they are to `left_count`.
  const int64_t* leaving;
  int64_t* left_ids;
  int64_t* left_count;
};
constexpr int64_t kNoId = INT64_MAX;

// Both of at most kHeldPerLaunch fields. Rows that stay go from `held` to `coming`, those that
// leave to `left`, and rows of `coming` beyond those named become zeros.
int launch_complete_coming(const HeldField* fields, int field_count, const HeldChanges& changes,
                           void* stream);
// What has come is held; `ids` are written by one launch, null for the others.
int launch_take_over(const HeldField* fields, int field_count, const HeldChanges& changes,
                     const HeldIds* ids, void* stream);

}  // namespace speedtorch

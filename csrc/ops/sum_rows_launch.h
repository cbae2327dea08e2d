// Launcher of sum_rows.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "core/error_record.h"
#include "move/number_kind.h"
#include "plan/plan_launch.h"

namespace speedtorch {

// Positions begin to begin + count of a batch have rows; those of one id are added up.
struct SumRows {
  const void* rows;  // [row_count, columns]
  int64_t row_count;
  int64_t row_step;       // numbers from the begin of a row to that of the next
  const int64_t* source;  // [count]: which row each has; null: each its own, in order
  int64_t begin;
  int64_t count;
  int64_t columns;
  void* out;         // [distinct, columns]
  int64_t distinct;  // entries of the plan's `unique` that are ids
  int64_t table_rows;
  // In GPU memory, or null: how many of the sums are some, whatever the plan says; the others, and
  // those of a bad plan, are zeros, of which no word is left.
  const int64_t* named;
};

// Kinds are those of floating-point numbers. Bytes of scratch for a plan of `entries` ids.
int64_t sum_scratch_bytes(NumberKind kind, int64_t entries, int64_t columns);
// `out` becomes zeros, and word of it is left in `record`, if the plan is one of bad ids, of
// another table or of another number of distinct ids. Sources that are none of the rows count as
// zeros.
int launch_sum_rows(NumberKind kind, const SumRows& work, const PlanView& plan, void* scratch,
                    ErrorRecord* record, void* stream);

}  // namespace speedtorch

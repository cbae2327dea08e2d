// Launcher of sum_rows.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "core/error_record.h"
#include "move/number_kind.h"
#include "plan/plan_launch.h"

namespace speedtorch {

// Entries of a plan that are added up one after the other; longer runs are added up from such
// parts. Fixed, so that a sum has the same bits on every GPU.
constexpr int64_t kEntriesPerPart = 128;

// Rows of positions begin to begin + count of a batch; those of one id are added up.
struct SumRows {
  const void* rows;  // [count, columns]
  int64_t begin;
  int64_t count;
  int64_t columns;
  void* out;         // [distinct, columns]
  int64_t distinct;  // entries of the plan's `unique` that are ids
  int64_t table_rows;
};

// Kinds are those of floating-point numbers. Bytes of scratch for a plan of `entries` ids.
int64_t sum_scratch_bytes(NumberKind kind, int64_t entries, int64_t columns);
// `out` becomes zeros, and word of it is left in `box`, if the plan is one of bad ids, of another
// table or of another number of distinct ids.
int launch_sum_rows(NumberKind kind, const SumRows& work, const PlanView& plan, void* scratch,
                    ErrorRecord* record, void* stream);

}  // namespace speedtorch

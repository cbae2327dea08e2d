// Launcher of sum_rows.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "core/letter.h"
#include "plan/plan_view.h"

namespace speedtorch {

enum class SumKind : int { kHalf, kBFloat16, kFloat, kDouble };

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

// Bytes of scratch for a plan of `entries` ids.
int64_t sum_scratch_bytes(SumKind kind, int64_t entries, int64_t columns);
// `out` becomes zeros, and word of it is left in `box`, if the plan is one of bad ids, of another
// table or of another number of distinct ids.
int launch_sum_rows(SumKind kind, const SumRows& work, const PlanView& plan, void* scratch,
                    Letter* box, void* stream);

}  // namespace speedtorch

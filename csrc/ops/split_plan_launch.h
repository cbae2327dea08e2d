// Launcher of split_plan.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "plan/plan_launch.h"

namespace speedtorch {

// The plan of ids of several tables, whose rows are ranges of one, as a plan of each table. The ids
// of a table come one after another, those of the next follow; so do the parts of its plan.
struct SplitPlan {
  PlanView plan;           // of all: what is split
  int64_t table_rows;      // of all
  const int64_t* offsets;  // [tables + 1]: where the ids of each begin, and the last ones end
  const int64_t* ranges;   // [tables, 2]: first row, number of rows; ascending
  int64_t tables;
  int64_t* unique;     // [n]
  int64_t* inverse;    // [n]
  int64_t* order;      // [n]
  int64_t* begins;     // [n + tables]: the `offsets` of each plan
  PlanStatus* status;  // [tables]
  int64_t* bounds;     // [tables + 1]: where the distinct rows of each begin among those of all
};

int launch_split_plan(const SplitPlan& work, void* stream);

}  // namespace speedtorch

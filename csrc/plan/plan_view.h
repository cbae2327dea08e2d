// A plan as plain pointers, for kernels and CPU loops. No torch here.
#pragma once

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
  const int64_t* unique = nullptr;   // [n]
  const int64_t* inverse = nullptr;  // [n]
  const int64_t* order = nullptr;    // [n]
  const int64_t* offsets = nullptr;  // [n + 1]
  const PlanStatus* status = nullptr;
  int64_t count = 0;  // n
};

}  // namespace speedtorch

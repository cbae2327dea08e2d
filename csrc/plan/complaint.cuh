// How a kernel leaves word of bad ids in the letter box (gpu.h). No torch here.
#pragma once

#include "core/letter.h"
#include "plan/plan_view.h"

namespace speedtorch {

// What a mover needs to know to say which ids are bad.
struct Complaint {
  Letter* box;  // null: another launch of the same op says it
  Op op;
  IdList list;
  int64_t rows;  // of the table
};

// True if a plan's ids must not be used on this table.
__device__ inline bool is_blocked(const PlanStatus& status, int64_t rows) {
  return status.bad_count > 0 || status.rows != rows;
}

// By one thread. The first letter stays until the host has read it. Two kernels that complain at
// the same moment on two streams may mix their letters: an error is raised all the same.
__device__ inline void complain(const Complaint& about, LetterKind kind, int64_t id,
                                int64_t position, int64_t bad_count, int64_t count) {
  volatile Letter* box = about.box;
  if (box == nullptr || box->full != 0) return;
  box->kind = static_cast<int32_t>(kind);
  box->op = static_cast<int32_t>(about.op);
  box->list = static_cast<int32_t>(about.list);
  box->rows = about.rows;
  box->id = id;
  box->position = position;
  box->bad_count = bad_count;
  box->count = count;
  __threadfence_system();
  box->full = 1;
}

__device__ inline void complain_if_blocked(const Complaint& about, const PlanStatus& status) {
  if (status.bad_count > 0) {
    complain(about, LetterKind::kOutOfRange, status.bad_id, status.bad_position, status.bad_count,
             status.count);
  } else if (status.rows != about.rows) {
    complain(about, LetterKind::kForeignPlan, status.rows, 0, 0, status.count);
  }
}

}  // namespace speedtorch

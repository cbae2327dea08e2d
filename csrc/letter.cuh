// How a kernel leaves word of bad ids in the letter box (gpu.h). No torch here.
#pragma once

#include "letter.h"
#include "plan_view.h"

namespace speedtorch {

// What a mover needs to know to say which ids are bad.
struct Complaint {
  Letter* box;
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
__device__ inline void complain(const Complaint& about, const PlanStatus& status, LetterKind kind) {
  volatile Letter* box = about.box;
  if (box->full != 0) return;
  box->kind = static_cast<int32_t>(kind);
  box->op = static_cast<int32_t>(about.op);
  box->list = static_cast<int32_t>(about.list);
  box->rows = about.rows;
  box->count = status.count;
  switch (kind) {
    case LetterKind::kOutOfRange:
      box->id = status.bad_id;
      box->position = status.bad_position;
      box->bad_count = status.bad_count;
      break;
    case LetterKind::kRepeated:
      box->id = status.repeat_id;
      box->position = status.repeat_position;
      box->bad_count = status.count - status.distinct;
      break;
    case LetterKind::kForeignPlan:
      box->id = status.rows;
      box->position = 0;
      box->bad_count = 0;
  }
  __threadfence_system();
  box->full = 1;
}

__device__ inline void complain_if_blocked(const Complaint& about, const PlanStatus& status) {
  if (status.bad_count > 0) {
    complain(about, status, LetterKind::kOutOfRange);
  } else if (status.rows != about.rows) {
    complain(about, status, LetterKind::kForeignPlan);
  }
}

}  // namespace speedtorch

// Launchers of pinned_gather.cu; each returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "core/letter.h"
#include "move/row_mover.h"
#include "plan/claims_view.h"
#include "plan/plan_view.h"

namespace speedtorch {

struct GatherRows {
  char* table;
  int64_t table_rows;
  int64_t table_stride_bytes;
  char* out;  // contiguous, one row per id
  int64_t row_bytes;
  int64_t count;  // ids
};

// Row by row in the order of the ids, one that stands twice is fetched twice. `checked` says
// whether the ids are good (see launch_check_ids); for at most kIdsCheckedInBlock ids its status
// may be null.
int launch_gather_direct(const GatherRows& rows, const ClaimsView& checked, int most_blocks,
                         Letter* box, void* stream);
// In the order of the ids; each distinct row is fetched once and its repetitions are copied on the
// GPU.
int launch_gather_distinct(const GatherRows& rows, const ClaimsView& claims, Mover mover,
                           Letter* box, void* stream);
// The same in address order.
int launch_gather_ordered(const GatherRows& rows, const PlanView& plan, Mover mover, Letter* box,
                          void* stream);

}  // namespace speedtorch

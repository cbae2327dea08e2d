// Launchers of pinned_scatter.cu; each returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "core/letter.h"
#include "move/addend_kind.h"
#include "move/row_mover.h"
#include "plan/claims_view.h"
#include "plan/plan_view.h"

namespace speedtorch {

struct ScatterRows {
  char* table;
  int64_t table_rows;
  int64_t table_stride_bytes;
  const char* src;  // contiguous inside a row, one row per id
  int64_t src_stride_bytes;
  int64_t row_bytes;
};

// table[id] = src of the last occurrence of id, at most kIdsClaimedInBlock ids (claims.status is
// not used).
int launch_scatter_direct(const ScatterRows& rows, const ClaimsView& ids, int most_blocks,
                          Letter* box, void* stream);
// The same for any number of ids, in their order.
int launch_scatter_distinct(const ScatterRows& rows, const ClaimsView& claims, Mover mover,
                            Letter* box, void* stream);
// The same in address order.
int launch_scatter_ordered(const ScatterRows& rows, const PlanView& plan, Mover mover, Letter* box,
                           void* stream);
// table[id] += src of each occurrence, in index order, rounded at each addition. src is aligned to
// its numbers.
int launch_scatter_add(const ScatterRows& rows, const PlanView& plan, AddendKind kind,
                       int most_blocks, Letter* box, void* stream);

}  // namespace speedtorch

// Launchers of pinned_scatter.cu; each returns a cudaError_t as int. No torch here.
#pragma once

#include "core/error_record.h"
#include "core/rows.h"
#include "move/number_kind.h"
#include "move/row_mover.h"
#include "plan/plan_launch.h"

namespace speedtorch {

// table[id] = src of the last occurrence of id, at most kIdsDedupedInBlock ids (their status is not
// used). `src` is contiguous inside a row, one row per id.
int launch_scatter_direct(const Rows& table, const Rows& src, const DedupView& ids, int most_blocks,
                          ErrorRecord* record, void* stream);
// The same for any number of ids: in address order by a plan, or in the order of the ids by a Dedup
// (of kLast).
int launch_scatter_once(const Rows& table, const Rows& src, const IdsOnceView& ids,
                        CopyKernel kernel, ErrorRecord* record, void* stream);
// table[id] += src of each occurrence, in index order, rounded at each addition. src is aligned to
// its numbers.
int launch_scatter_add(const Rows& table, const Rows& src, const PlanView& plan, NumberKind kind,
                       int most_blocks, ErrorRecord* record, void* stream);

}  // namespace speedtorch

// Launchers of pinned_gather.cu; each returns a cudaError_t as int. No torch here.
#pragma once

#include "core/error_record.h"
#include "core/rows.h"
#include "move/row_mover.h"
#include "plan/plan_launch.h"

namespace speedtorch {

// `out` is contiguous, one row per id. Row by row in the order of the ids, one that stands twice is
// fetched twice. `checked` says whether the ids are good (see launch_check_ids); for at most
// kIdsCheckedInBlock ids its status may be null.
int launch_gather_direct(const Rows& table, const Rows& out, const DedupView& checked,
                         int most_blocks, ErrorRecord* record, void* stream);
// Each distinct row is fetched once and its repetitions are copied on the GPU: in address order by
// a plan, or in the order of the ids by a Dedup (of kAny).
int launch_gather_once(const Rows& table, const Rows& out, const IdsOnceView& ids,
                       CopyKernel kernel, ErrorRecord* record, void* stream);

}  // namespace speedtorch

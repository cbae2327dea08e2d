// Launcher of placed_ids.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "letter.h"
#include "plan_view.h"

namespace speedtorch {

// Writes the status of ids and places in GPU memory; `distinct` is 0 if something is wrong.
int launch_check_placed(const int64_t* ids, const int64_t* places, int64_t count,
                        int64_t table_rows, int64_t side_rows, IdList list, PlanStatus* status,
                        Letter* box, void* stream);

}  // namespace speedtorch

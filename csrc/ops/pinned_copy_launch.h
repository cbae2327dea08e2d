// Launcher of pinned_copy.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include "core/rows.h"
#include "move/row_mover.h"

namespace speedtorch {

// Row m goes to row m.
int launch_copy(const Rows& from, const Rows& to, bool to_host, CopyKernel kernel, void* stream);

}  // namespace speedtorch

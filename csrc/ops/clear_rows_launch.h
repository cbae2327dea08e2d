// Launcher of clear_rows.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "core/rows.h"

namespace speedtorch {

constexpr int kClearedPerLaunch = 16;

// Contiguous rows in GPU memory, at most kClearedPerLaunch fields: those from `*count` on become
// zeros.
int launch_clear_rows(const Rows* fields, int field_count, const int64_t* count, void* stream);

}  // namespace speedtorch

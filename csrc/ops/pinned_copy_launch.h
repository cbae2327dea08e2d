// Launcher of pinned_copy.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "move/row_mover.h"

namespace speedtorch {

// Row m goes to row m.
struct CopyRows {
  char* from;
  int64_t from_stride_bytes;
  char* to;
  int64_t to_stride_bytes;
  int64_t row_bytes;
  int64_t count;
  bool to_host;
};

int launch_copy(const CopyRows& rows, Mover mover, void* stream);

}  // namespace speedtorch

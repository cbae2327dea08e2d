// Launchers of pinned_gather.cu; each returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "letter.h"
#include "plan_view.h"

namespace speedtorch {

struct GatherRows {
  const char* table;
  int64_t table_rows;
  int64_t table_stride_bytes;
  char* out;  // contiguous, one row per id
  int64_t row_bytes;
  int64_t count;  // ids
  bool crosses_link;
};

// A batch of at most so many ids is checked by the kernel that moves it, in each block anew: one
// launch instead of four.
constexpr int64_t kIdsCheckedInBlock = 4096;

// Row by row in the order of the ids; `status` says whether they are good, or is null for at most
// kIdsCheckedInBlock ids.
int launch_gather_direct(const GatherRows& rows, const void* ids, bool wide,
                         const PlanStatus* status, Letter* box, void* stream);
// In address order: each distinct row crosses the link once, its repetitions are copied on the GPU.
int launch_gather_planned(const GatherRows& rows, const PlanView& plan, Letter* box, void* stream);

}  // namespace speedtorch

// Launcher of optimizer_state_swap.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "core/letter.h"
#include "plan/plan_view.h"

namespace speedtorch {

// One field: rows leave from `leaving` to host rows, and arrive from host rows in `arriving`.
struct SwapField {
  char* host;
  int64_t host_stride_bytes;
  const char* leaving;  // contiguous
  char* arriving;       // contiguous
  int64_t row_bytes;
};

constexpr int kFieldsPerLaunch = 16;

// Scratch of the op, made by the caller.
struct SwapScratch {
  int64_t* arrives_from;  // [load]: position in `evict` whose row stays on the GPU, or -1
  uint8_t* stays;         // [evict]: that row stays on the GPU
};

int launch_swap_match(const PlanView& evict, const PlanView& load, const SwapScratch& scratch,
                      void* stream);
// At most kFieldsPerLaunch fields.
int launch_swap(const SwapField* fields, int field_count, int64_t table_rows, const PlanView& evict,
                const PlanView& load, const SwapScratch& scratch, int most_blocks, Letter* box,
                void* stream);

}  // namespace speedtorch

// Launchers of pinned_scatter.cu; each returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "addend_kind.h"
#include "letter.h"
#include "plan_view.h"

namespace speedtorch {

struct ScatterRows {
  char* table;
  int64_t table_rows;
  int64_t table_stride_bytes;
  const char* src;  // contiguous inside a row, one row per id
  int64_t src_stride_bytes;
  int64_t row_bytes;
  bool crosses_link;
};

// table[id] = src of the last occurrence of id.
int launch_scatter(const ScatterRows& rows, const PlanView& plan, Letter* box, void* stream);
// table[id] += src of each occurrence, in index order, rounded at each addition.
int launch_scatter_add(const ScatterRows& rows, const PlanView& plan, AddendKind kind, Letter* box,
                       void* stream);

}  // namespace speedtorch

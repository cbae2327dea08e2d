// Launcher of pool_rows.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

#include "move/number_kind.h"

namespace speedtorch {

// The rows of each bag are added up.
struct PoolRows {
  const void* rows;  // [row_count, columns]
  int64_t row_count;
  int64_t columns;
  const int64_t* places;  // [count]: which row each entry names
  int64_t count;
  const int64_t* offsets;  // [features * samples + 1], feature after feature
  int64_t features;
  int64_t samples;
  bool mean;  // divided by the number of entries
  void* out;  // [samples, features, columns]

  int64_t bags() const { return features * samples; }
};

// Kinds are those of floating-point numbers. Places that are none of the rows count as zeros.
int launch_pool_rows(NumberKind kind, const PoolRows& work, void* stream);

}  // namespace speedtorch

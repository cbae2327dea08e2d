// Launcher of table_ids.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

namespace speedtorch {

// Ids of the bags of several features, whose tables are ranges of rows of one.
struct TableIds {
  const void* ids;  // [count], of int64 if `wide`, else of int32
  bool wide;
  int64_t count;
  const int64_t* offsets;  // [features * samples + 1], feature after feature; of one bag or more
  const int64_t* ranges;   // [features, 2]: first row, number of rows
  int64_t features;
  int64_t samples;
  int64_t* rows;  // [count]: of the one table, or -1
  int64_t* bags;  // [count]: sample after sample
};

int launch_table_ids(const TableIds& work, void* stream);

}  // namespace speedtorch

// Kernel of clear_rows: fills rows beyond a count with zeros. Called by clear_rows.cpp. The count
// is in GPU memory.

#include "move/row_copy.cuh"
#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

struct Cleared {
  Rows rows[kFieldsPerLaunch];
  int vec_bytes[kFieldsPerLaunch];
};

// The blocks with the same blockIdx.y own a field; a thread owns vectors of its rows, a grid stride
// apart.
__global__ void __launch_bounds__(kMoverThreads)
    clear_rows_kernel(Cleared fields, const int64_t* count) {
  const Rows& rows = fields.rows[blockIdx.y];
  with_vec_type(fields.vec_bytes[blockIdx.y], [&](auto vec) {
    fill_zeros<decltype(vec)>(rows, clamped(*count, rows.count), rows.count);
  });
}

}  // namespace

int launch_clear_rows(const Rows* fields, int field_count, const int64_t* count, void* stream) {
  Cleared all{};
  int64_t max_vecs = 0;
  for (int f = 0; f < field_count; ++f) {
    const Rows& rows = all.rows[f] = fields[f];
    all.vec_bytes[f] = widest_access(rows.bits());
    max_vecs = max(max_vecs, rows.count * (rows.row_bytes / all.vec_bytes[f]));
  }
  const dim3 blocks(shares_of(max_vecs, kMoverThreads, kDeviceBlocks), field_count);
  clear_rows_kernel<<<blocks, kMoverThreads, 0, static_cast<cudaStream_t>(stream)>>>(all, count);
  return cudaGetLastError();
}

}  // namespace speedtorch

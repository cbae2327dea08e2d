// Kernel of pinned_copy: consecutive rows between mapped host memory and the GPU. Called by
// pinned_copy.cpp with checked shapes. Each byte crosses the link once.

#include "move/bulk_mover.cuh"
#include "ops/pinned_copy_launch.h"

namespace speedtorch {
namespace {

struct Consecutive {
  int64_t rows;

  __device__ bool blocked() const { return false; }
  __device__ void complain() const {}
  __device__ int64_t count() const { return rows; }
  __device__ int64_t from(int64_t m) const { return m; }
  __device__ int64_t to(int64_t m) const { return m; }
};

template <Link kLink>
int launch(const CopyRows& rows, Mover mover, void* stream) {
  return launch_moves<kLink>(Consecutive{rows.count},
                             RowRange{rows.from, rows.from_stride_bytes, rows.count},
                             RowRange{rows.to, rows.to_stride_bytes, rows.count}, rows.row_bytes,
                             rows.count, 0, mover, static_cast<cudaStream_t>(stream));
}

}  // namespace

int launch_copy(const CopyRows& rows, Mover mover, void* stream) {
  return rows.to_host ? launch<Link::kTo>(rows, mover, stream)
                      : launch<Link::kFrom>(rows, mover, stream);
}

}  // namespace speedtorch

// Kernels of merge_rows and join_batch. Called by merge_rows.cpp and load_rows.cpp. All data is in
// GPU memory.

#include "move/row_copy.cuh"
#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

// A thread owns entries of both lists, a grid stride apart; each id costs a binary search in the
// other list.
__global__ void merge_ids_kernel(MergedIds work) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < work.all() + work.padding_rows; i += stride) {
    if (i < work.held_count) {
      const int64_t id = work.held[i], place = i + lower_bound(work.more, work.more_count, id + 1);
      work.ids[place] = id;
      work.held_places[i] = place;
    } else if (i < work.all()) {
      const int64_t entry = i - work.held_count, id = work.more[entry];
      const int64_t place = entry + lower_bound(work.held, work.held_count, id);
      work.ids[place] = id;
      work.more_places[entry] = place;
    } else {
      work.held_places[work.held_count] = work.all();
    }
  }
}

// A thread owns ids, a grid stride apart; each costs a binary search.
__global__ void positions_kernel(Positions work) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < work.n; i += stride) {
    const int64_t id = work.unique[work.inverse[i]];
    work.out[i] = id == work.padding ? work.count : lower_bound(work.ids, work.count, id);
  }
}

struct Spread {
  Rows from[kFieldsPerLaunch], to[kFieldsPerLaunch];
  int vec_bytes[kFieldsPerLaunch];
};

// The blocks with the same blockIdx.y own a field; a thread owns vectors of its rows, a grid stride
// apart.
__global__ void __launch_bounds__(kMoverThreads)
    spread_rows_kernel(Spread fields, const int64_t* places) {
  const Rows &from = fields.from[blockIdx.y], &to = fields.to[blockIdx.y];
  with_vec_type(fields.vec_bytes[blockIdx.y], [&](auto vec) {
    using Vec = decltype(vec);
    const int64_t vecs = from.row_bytes / static_cast<int64_t>(sizeof(Vec));
    const int64_t stride = int64_t{gridDim.x} * blockDim.x;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < from.count * vecs;
         i += stride) {
      const int64_t m = i / vecs, at = i % vecs;
      reinterpret_cast<Vec*>(to.base + places[m] * to.stride_bytes)[at] =
          reinterpret_cast<const Vec*>(from.base + m * from.stride_bytes)[at];
    }
  });
}

}  // namespace

int launch_merge_ids(const MergedIds& work, void* stream) {
  if (work.all() + work.padding_rows == 0) return 0;
  merge_ids_kernel<<<blocks_for_ids(work.all() + work.padding_rows), kIdThreads, 0,
                     static_cast<cudaStream_t>(stream)>>>(work);
  return cudaGetLastError();
}

int launch_positions(const Positions& work, void* stream) {
  if (work.n == 0) return 0;
  positions_kernel<<<blocks_for_ids(work.n), kIdThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      work);
  return cudaGetLastError();
}

int launch_spread_rows(const Rows* from, const Rows* to, int field_count, const int64_t* places,
                       void* stream) {
  Spread all{};
  int64_t max_vecs = 0;
  for (int f = 0; f < field_count; ++f) {
    all.from[f] = from[f];
    all.to[f] = to[f];
    all.vec_bytes[f] = widest_access(from[f].bits() | to[f].bits());
    max_vecs = max(max_vecs, from[f].count * (from[f].row_bytes / all.vec_bytes[f]));
  }
  if (max_vecs == 0) return 0;
  const dim3 blocks(shares_of(max_vecs, kMoverThreads, kDeviceBlocks), field_count);
  spread_rows_kernel<<<blocks, kMoverThreads, 0, static_cast<cudaStream_t>(stream)>>>(all, places);
  return cudaGetLastError();
}

}  // namespace speedtorch

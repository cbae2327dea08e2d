// Kernels of pinned_gather: copy rows of a table in mapped host memory or on the GPU to contiguous
// rows on the GPU. Called by pinned_gather.cpp. row_copy.cuh and bulk_copy.cuh say what a thread
// owns.

#include "move/bulk_copy.cuh"
#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

// Moves from the table to `out`. With a plan, move m copies to the first position of unique id m.
// With a hash table, move m copies to position m if it was kept. With neither, every position
// moves. Without a status each block checks all ids itself.
struct TableRows : RowMapOnce {
  __device__ bool blocked() const {
    if (planned() || dedup.status != nullptr) return RowMapOnce::blocked();
    bool bad = false;
    for (int64_t m = threadIdx.x; m < dedup.count; m += blockDim.x) {
      bad |= is_outside(id_at(dedup.ids, dedup.wide, m), about.rows);
    }
    return __syncthreads_or(bad);
  }
  __device__ int64_t from(int64_t m, bool planned) const {
    if (planned) return plan.unique[m];
    const int64_t id = id_at(dedup.ids, dedup.wide, m);
    return dedup.kept_at == nullptr || dedup.kept_at[m] == m ? id : -1;
  }
  __device__ int64_t to(int64_t m, bool planned) const {
    return planned ? plan.order[plan.offsets[m]] : m;
  }
};

// Moves of repetitions within `out`, from a position with the same id. With a plan, move m copies
// from the first position of the id to position m. With a hash table, move m copies to the m-th
// position that was not kept.
struct Repetitions : RowMapOnce {
  __device__ bool blocked() const {
    return RowMapOnce::blocked() ||
           (planned() ? plan.status->distinct == plan.count : dedup.status->repeats == 0);
  }
  __device__ void report() const {}
  __device__ int64_t count() const { return planned() ? plan.count : dedup.status->repeats; }
  __device__ int64_t from(int64_t m, bool planned) const {
    if (!planned) return dedup.kept_at[dedup.repeated[m]];
    const int64_t first = plan.order[plan.offsets[plan.inverse[m]]];
    return first == m ? -1 : first;
  }
  __device__ int64_t to(int64_t m, bool planned) const { return planned ? m : dedup.repeated[m]; }
};

}  // namespace

int launch_gather(const Rows& table, const Rows& out, const RowIdsView& ids, CopyKernel kernel,
                  const Report& about, void* stream) {
  auto* launch =
      kernel.bulk ? launch_bulk_copy<TableRows> : launch_register_copy<Link::kFrom, TableRows>;
  const int error =
      launch(TableRows{{ids, about}}, table, out, out.count, out.count, kernel.max_blocks, stream);
  const bool once = ids.plan.status != nullptr || ids.dedup.kept_at != nullptr;
  if (error != cudaSuccess || !once) return error;
  return launch_register_copy<Link::kNone>(Repetitions{{ids, about}}, out, out, out.count, 0,
                                           kDeviceBlocks, stream);
}

}  // namespace speedtorch

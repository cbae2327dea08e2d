// Kernels of pinned_gather: rows of a mapped host table (or of a table on the GPU) to contiguous
// rows on the GPU. Called by pinned_gather.cpp with checked shapes; bad ids leave zeros in `out`
// and word in the letter box.

#include "move/bulk_mover.cuh"
#include "ops/pinned_gather_launch.h"
#include "plan/claims.cuh"
#include "plan/complaint.cuh"

namespace speedtorch {
namespace {

constexpr IdList kList = IdList::kIndex;

// out[m] = table[ids[m]]. Without a status each block looks through all ids itself.
struct InIndexOrder {
  ClaimsView ids;
  Complaint complaint;

  __device__ bool is_bad(int64_t m) const { return is_outside(from(m), complaint.rows); }
  __device__ bool blocked() const {
    if (ids.status != nullptr) return ids.status->bad_count > 0;
    bool bad = false;
    for (int64_t m = threadIdx.x; m < ids.count; m += blockDim.x) bad |= is_bad(m);
    return __syncthreads_or(bad);
  }
  __device__ void complain() const {
    ids.status != nullptr ? complain_of_claims(complaint, ids) : complain_of_ids(complaint, ids);
  }
  __device__ int64_t count() const { return ids.count; }
  __device__ int64_t from(int64_t m) const { return id_at(ids.ids, ids.wide, m); }
  __device__ int64_t to(int64_t m) const { return m; }
};

// The occurrence of each id that claimed its row.
struct ClaimedRows {
  ClaimsView claims;
  Complaint complaint;

  __device__ bool blocked() const { return claims.status->bad_count > 0; }
  __device__ void complain() const { complain_of_claims(complaint, claims); }
  __device__ int64_t count() const { return claims.count; }
  __device__ int64_t from(int64_t m) const {
    const int64_t id = id_at(claims.ids, claims.wide, m);
    return claims.claims[m] == m ? id : -1;
  }
  __device__ int64_t to(int64_t m) const { return m; }
};

// Every other occurrence, within `out`.
struct ClaimedRepetitions {
  ClaimsView claims;

  __device__ bool blocked() const {
    return claims.status->bad_count > 0 || claims.status->repeats == 0;
  }
  __device__ void complain() const {}
  __device__ int64_t count() const { return claims.status->repeats; }
  __device__ int64_t from(int64_t m) const { return claims.claims[claims.repeated[m]]; }
  __device__ int64_t to(int64_t m) const { return claims.repeated[m]; }
};

// The first occurrence of distinct id m.
struct DistinctRows {
  PlanView plan;
  Complaint complaint;

  __device__ bool blocked() const { return is_blocked(*plan.status, complaint.rows); }
  __device__ void complain() const { complain_if_blocked(complaint, *plan.status); }
  __device__ int64_t count() const { return plan.status->distinct; }
  __device__ int64_t from(int64_t m) const { return plan.unique[m]; }
  __device__ int64_t to(int64_t m) const { return plan.order[plan.offsets[m]]; }
};

// Position m from the first occurrence of its id, within `out`.
struct Repetitions {
  PlanView plan;
  int64_t rows;

  __device__ bool blocked() const {
    return is_blocked(*plan.status, rows) || plan.status->distinct == plan.count;
  }
  __device__ void complain() const {}
  __device__ int64_t count() const { return plan.count; }
  __device__ int64_t from(int64_t m) const {
    const int64_t first = plan.order[plan.offsets[plan.inverse[m]]];
    return first == m ? -1 : first;
  }
  __device__ int64_t to(int64_t m) const { return m; }
};

RowRange table_range(const GatherRows& rows) {
  return {rows.table, rows.table_stride_bytes, rows.table_rows};
}
RowRange out_range(const GatherRows& rows) { return {rows.out, rows.row_bytes, rows.count}; }

template <typename Moves>
int fetch(const Moves& moves, const GatherRows& rows, Mover mover, void* stream) {
  return launch_moves<Link::kFrom>(moves, table_range(rows), out_range(rows), rows.row_bytes,
                                   rows.count, rows.count, mover,
                                   static_cast<cudaStream_t>(stream));
}

template <typename Moves>
int repeat(const Moves& moves, const GatherRows& rows, void* stream) {
  return launch_register_moves<Link::kNone>(moves, out_range(rows), out_range(rows), rows.row_bytes,
                                            rows.count, 0, kDeviceBlocks,
                                            static_cast<cudaStream_t>(stream));
}

}  // namespace

int launch_gather_direct(const GatherRows& rows, const ClaimsView& checked, int most_blocks,
                         Letter* box, void* stream) {
  const Complaint complaint{box, Op::kGather, kList, rows.table_rows};
  return launch_register_moves<Link::kFrom>(InIndexOrder{checked, complaint}, table_range(rows),
                                            out_range(rows), rows.row_bytes, rows.count, rows.count,
                                            most_blocks, static_cast<cudaStream_t>(stream));
}

int launch_gather_distinct(const GatherRows& rows, const ClaimsView& claims, Mover mover,
                           Letter* box, void* stream) {
  const Complaint complaint{box, Op::kGather, kList, rows.table_rows};
  const int error = fetch(ClaimedRows{claims, complaint}, rows, mover, stream);
  return error != cudaSuccess ? error : repeat(ClaimedRepetitions{claims}, rows, stream);
}

int launch_gather_ordered(const GatherRows& rows, const PlanView& plan, Mover mover, Letter* box,
                          void* stream) {
  const Complaint complaint{box, Op::kGather, kList, rows.table_rows};
  const int error = fetch(DistinctRows{plan, complaint}, rows, mover, stream);
  return error != cudaSuccess ? error : repeat(Repetitions{plan, rows.table_rows}, rows, stream);
}

}  // namespace speedtorch

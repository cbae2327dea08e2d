// Kernels of pinned_gather: rows of a mapped host table (or of a table on the GPU) to contiguous
// rows on the GPU. Called by pinned_gather.cpp with checked shapes; bad ids leave zeros in `out`
// and word in the letter box.

#include "letter.cuh"
#include "pinned_gather_launch.h"
#include "row_mover.cuh"

namespace speedtorch {
namespace {

constexpr IdList kList = IdList::kIndex;

// out[m] = table[ids[m]]. Without a status each block looks through all ids itself.
struct InIndexOrder {
  const void* ids;
  bool wide;
  int64_t n;
  const PlanStatus* status;
  Complaint complaint;

  __device__ bool is_bad(int64_t m) const {
    return static_cast<uint64_t>(from(m)) >= static_cast<uint64_t>(complaint.rows);
  }
  __device__ bool blocked() const {
    if (status != nullptr) return is_blocked(*status, complaint.rows);
    bool bad = false;
    for (int64_t m = threadIdx.x; m < n; m += blockDim.x) bad |= is_bad(m);
    return __syncthreads_or(bad);
  }
  __device__ void complain() const {
    if (status != nullptr) return complain_if_blocked(complaint, *status);
    PlanStatus found{0, n, 0, 0, complaint.rows, n, n, 0};
    for (int64_t m = n - 1; m >= 0; --m) {
      if (!is_bad(m)) continue;
      ++found.bad_count;
      found.bad_position = m;
      found.bad_id = from(m);
    }
    complain_if_blocked(complaint, found);
  }
  __device__ int64_t count() const { return n; }
  __device__ int64_t from(int64_t m) const {
    return wide ? static_cast<const int64_t*>(ids)[m] : static_cast<const int32_t*>(ids)[m];
  }
  __device__ int64_t to(int64_t m) const { return m; }
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
  return {const_cast<char*>(rows.table), rows.table_stride_bytes};
}
RowRange out_range(const GatherRows& rows) { return {rows.out, rows.row_bytes}; }

}  // namespace

int launch_gather_direct(const GatherRows& rows, const void* ids, bool wide,
                         const PlanStatus* status, Letter* box, void* stream) {
  const InIndexOrder moves{
      ids, wide, rows.count, status, {box, Op::kGather, kList, rows.table_rows}};
  launch_move_rows(moves, table_range(rows), out_range(rows), rows.row_bytes, rows.count,
                   rows.count, rows.crosses_link, static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

int launch_gather_planned(const GatherRows& rows, const PlanView& plan, Letter* box, void* stream) {
  auto on = static_cast<cudaStream_t>(stream);
  const DistinctRows distinct{plan, {box, Op::kGather, kList, rows.table_rows}};
  launch_move_rows(distinct, table_range(rows), out_range(rows), rows.row_bytes, rows.count,
                   rows.count, rows.crosses_link, on);
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  const Repetitions repetitions{plan, rows.table_rows};
  launch_move_rows(repetitions, out_range(rows), out_range(rows), rows.row_bytes, rows.count, 0,
                   false, on);
  return cudaGetLastError();
}

}  // namespace speedtorch

// Device functions that write the entries of a plan from sorted ids. Called by the kernels of
// plan.cu and plan_together.cu, which sort the ids. Includes no torch header.
#pragma once

#include <algorithm>
#include <bit>

#include "plan/ids.cuh"

namespace speedtorch {

// The findings of the kernels before the status is written; all zeros: none.
struct Found {
  int64_t bad_count;
  int64_t bad_from_end;     // ids from the first bad one to the end of the batch
  int64_t repeat_from_end;  // ids from the first repeated one to the end of the batch
  int64_t blocks_done;
};

inline int end_bit(const PlanTable& table) {
  return std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(table.last_key()))));
}

// Whether every key fits in 32 bits.
inline bool has_short_keys(const PlanTable& table) {
  return table.last_key() <= int64_t{UINT32_MAX};
}

// Called by one thread after all ids of the batch are examined: writes the status.
__device__ inline void write_status(const void* ids, bool wide, const PlanTable& table,
                                    const volatile Found& found, int64_t distinct,
                                    const PlanView& out) {
  const int64_t n = out.count, bad = n - found.bad_from_end, repeat = n - found.repeat_from_end;
  *out.status = {found.bad_count,
                 bad,
                 bad < n ? id_at(ids, wide, bad) : 0,
                 distinct,
                 table.rows,
                 n,
                 repeat,
                 repeat < n ? id_at(ids, wide, repeat) : 0};
}

// Writes the values of sorted entry i to the plan. `rank` is the number of distinct ids up to the
// entry, including the padding, and `all` the number in the batch. Returns whether an earlier entry
// has the same id.
__device__ inline bool write_entry(int64_t i, int64_t key, int64_t position, int64_t rank,
                                   bool head, int64_t all, const PlanTable& table,
                                   const PlanView& out) {
  const int64_t n = out.count;
  const bool is_padding = table.padding >= 0 && key == table.rows;
  out.order[i] = position;
  out.inverse[position] = table.place_of(rank - 1, is_padding);
  if (head) {
    out.unique[rank - 1] = is_padding ? table.padding : key;
    out.offsets[rank - 1] = i;
  }
  if (i >= all) {
    out.unique[i] = -1;
    out.offsets[i] = n;
  }
  return !head && !is_padding;
}

// Called by the thread with the last sorted entry: writes the values after all entries. Returns the
// number of distinct ids without the padding.
__device__ inline int64_t write_ends(int64_t last_key, int64_t all, const PlanTable& table,
                                     const PlanView& out) {
  const int64_t n = out.count;
  const bool names_padding = n > 0 && table.padding >= 0 && last_key == table.rows;
  out.offsets[n] = n;
  if (table.padding >= 0) {
    if (all < n || names_padding) out.unique[n] = -1;
    if (!names_padding) out.unique[all] = table.padding;
  }
  return all - names_padding;
}

// Called by all lanes of a warp, at most once per warp: one atomic per repeated id took longer than
// the sort.
__device__ inline void note_repeat(Found* found, unsigned long long from_end) {
  for (int apart = 16; apart > 0; apart /= 2) {
    from_end = max(from_end, __shfl_xor_sync(~0u, from_end, apart));
  }
  auto* known = reinterpret_cast<unsigned long long*>(&found->repeat_from_end);
  if (threadIdx.x % 32 == 0 && from_end > *known) atomicMax(known, from_end);
}

}  // namespace speedtorch

// Device functions for the ids of a batch: read, check, hash and search them, and report bad ids in
// the error record (gpu.h). Included by kernels. Includes no torch header.
#pragma once

#include <cstdint>

#include "core/error_record.h"
#include "move/row_copy.h"
#include "plan/plan_launch.h"

namespace speedtorch {

constexpr int kIdThreads = 256;
// Enough threads to saturate GPU memory on batches of a million ids, few enough to leave room for
// other kernels.
constexpr int64_t kMaxIdBlocks = 1024;

inline int blocks_for_ids(int64_t n) { return shares_of(n, kIdThreads, kMaxIdBlocks); }

// Bytes of a part of scratch memory, rounded to the alignment of cudaMalloc.
constexpr int64_t padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

__device__ inline int64_t id_at(const void* ids, bool wide, int64_t m) {
  return wide ? static_cast<const int64_t*>(ids)[m] : static_cast<const int32_t*>(ids)[m];
}

__device__ inline bool is_outside(int64_t id, int64_t rows) {
  return static_cast<uint64_t>(id) >= static_cast<uint64_t>(rows);
}

// Clamps an unchecked count to the valid range.
__device__ inline int64_t clamped(int64_t count, int64_t most) {
  return min(max(count, int64_t{0}), most);
}

// Fibonacci hashing: the upper half of the product depends on all bits of the id.
__device__ inline uint64_t hash_of(int64_t id) {
  return static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15ull >> 32;
}

// The index of the first id in ascending ids that is not below `id`.
__device__ inline int64_t lower_bound(const int64_t* ids, int64_t count, int64_t id) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (ids[middle] < id) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ inline void count_one(int64_t* count) {
  atomicAdd(reinterpret_cast<unsigned long long*>(count), 1ull);
}
__device__ inline void note_last(int64_t* from_end, int64_t count) {
  atomicMax(reinterpret_cast<unsigned long long*>(from_end),
            static_cast<unsigned long long>(count));
}

// ---- Reports of bad ids; one thread calls each.

// The first report remains until the host has read it. If kernels on several streams of a GPU
// report at the same time, one claims the record and the other reports are dropped.
__device__ inline void report(const Report& about, IdError kind, int64_t id, int64_t position,
                              int64_t bad_count, int64_t count) {
  volatile ErrorRecord* record = about.record;
  if (record == nullptr) return;
  const int32_t taken = record->taken;
  if (atomicCAS(&about.record->claimed, taken, taken + 1) != taken) return;
  record->kind = static_cast<int32_t>(kind);
  record->op = static_cast<int32_t>(about.op);
  record->list = static_cast<int32_t>(about.list);
  record->rows = about.rows;
  record->id = id;
  record->position = position;
  record->bad_count = bad_count;
  record->count = count;
  __threadfence_system();
  record->written = taken + 1;
}

// True if a plan's ids must not be used on this table.
__device__ inline bool is_blocked(const PlanStatus& status, int64_t rows) {
  return status.bad_count > 0 || status.rows != rows;
}

__device__ inline void report_blocked(const Report& about, const PlanStatus& status) {
  if (status.bad_count > 0) {
    report(about, IdError::kOutOfRange, status.bad_id, status.bad_position, status.bad_count,
           status.count);
  } else if (status.rows != about.rows) {
    report(about, IdError::kForeignPlan, status.rows, 0, 0, status.count);
  }
}

// Searches all ids if there is no status.
__device__ inline void report_outside(const Report& about, const DedupView& ids) {
  int64_t first = 0, bad_count = 0;
  if (ids.status != nullptr) {
    first = ids.count - ids.status->bad_from_end;
    bad_count = ids.status->bad_count;
  } else {
    for (int64_t m = ids.count - 1; m >= 0; --m) {
      if (!is_outside(id_at(ids.ids, ids.wide, m), about.rows)) continue;
      ++bad_count;
      first = m;
    }
  }
  report(about, IdError::kOutOfRange, id_at(ids.ids, ids.wide, first), first, bad_count, ids.count);
}

// ------------------------------------------------------------------------------------------------

// A RowMap (see row_copy.cuh) that moves the row of each distinct id once.
struct RowMapOnce : RowIdsView {
  Report about;

  __device__ bool planned() const { return plan.status != nullptr; }
  __device__ bool blocked() const {
    return planned() ? is_blocked(*plan.status, about.rows) : dedup.status->bad_count > 0;
  }
  __device__ void report() const {
    planned() ? report_blocked(about, *plan.status) : report_outside(about, dedup);
  }
  __device__ int64_t count() const { return planned() ? plan.status->distinct : dedup.count; }
};

}  // namespace speedtorch

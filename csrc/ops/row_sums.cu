// Kernels of sum_rows and pool_rows: sums of the rows of one id, and sums or means of the rows of
// one bag, in batch order. Called by row_sums.cpp. Each row is read once for each sum that has it;
// nothing crosses the link. A group of lanes owns a sum; each lane owns neighboring columns of it.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

constexpr int kSumThreads = 256;
constexpr int kInFlight = 4;  // rows that a group of lanes loads at a time

template <typename Number, int kCount>
struct alignas(sizeof(Number) * kCount) Numbers {
  Number at[kCount];
};

// The columns of a group's lanes: `count` lanes cover columns from 0 on, the next block covers the
// columns after them, and so on. All blocks are numbered in x, because a grid has at most 65,535
// blocks in y.
struct SumLanes {
  int count;               // a power of two
  unsigned column_blocks;  // blocks to cover all columns
};

// A thread's group and its first column (past the end for idle threads).
template <int kVec>
struct SumLane {
  int64_t group;
  int64_t column;

  __device__ explicit SumLane(const SumLanes& lanes) {
    const int thread = static_cast<int>(threadIdx.x);
    const unsigned group_block = blockIdx.x / lanes.column_blocks;
    group = int64_t{group_block} * (kSumThreads / lanes.count) + thread / lanes.count;
    column = (int64_t{blockIdx.x - group_block * lanes.column_blocks} * lanes.count +
              thread % lanes.count) *
             kVec;
  }
};

// Loads the numbers of a row from a thread's column on. `rows` points at this column of row 0, and
// `step` is the row stride. A place out of range yields zeros. Zeros can be added without a branch:
// a sum that starts at zero is never -0.0.
template <int kVec, typename T>
__device__ __forceinline__ Numbers<T, kVec> row_or_zeros(const T* rows, int64_t place,
                                                         int64_t row_count, int64_t step) {
  if (static_cast<uint64_t>(place) >= static_cast<uint64_t>(row_count)) return {};
  return *reinterpret_cast<const Numbers<T, kVec>*>(rows + place * step);
}

template <typename T, int kVec>
__device__ __forceinline__ void add(Numbers<SumOf<T>, kVec>& sum, const Numbers<T, kVec>& row) {
  for (int v = 0; v < kVec; ++v) sum.at[v] += static_cast<SumOf<T>>(row.at[v]);
}

template <typename T, int kVec>
__device__ __forceinline__ void store(T* out, const Numbers<SumOf<T>, kVec>& sum) {
  Numbers<T, kVec> row;
  for (int v = 0; v < kVec; ++v) row.at[v] = static_cast<T>(sum.at[v]);
  *reinterpret_cast<Numbers<T, kVec>*>(out) = row;
}

struct SumShape {
  SumLanes lanes;
  unsigned blocks;
};

template <int kVec>
SumShape sum_shape(int64_t groups, int64_t columns) {
  const int64_t needed = (columns + kVec - 1) / kVec;
  int lanes = 1;
  while (lanes < 32 && lanes < needed) lanes *= 2;
  const int64_t column_blocks = (needed + lanes - 1) / lanes;
  const int64_t blocks = (groups * lanes + kSumThreads - 1) / kSumThreads * column_blocks;
  return {{lanes, static_cast<unsigned>(column_blocks)}, static_cast<unsigned>(blocks)};
}

template <typename Number, int kCount>
struct Vector {
  using T = Number;
  static constexpr int kVec = kCount;
};

// Calls `use` with the widest vector type of the kind: 16 bytes if all rows of `columns`, which are
// `step` apart, are aligned to that. `bits` is the bitwise OR of the tensors' addresses.
template <typename Use>
auto with_vector(NumberKind kind, int64_t columns, int64_t step, uint64_t bits, const Use& use) {
  return with_float_type<__half, __nv_bfloat16>(kind, [&](auto number) {
    using T = decltype(number);
    constexpr int kVec = 16 / sizeof(T);
    const bool all = columns % kVec == 0 && step % kVec == 0 && bits % 16 == 0;
    return all ? use(Vector<T, kVec>{}) : use(Vector<T, 1>{});
  });
}

// ---- sum_rows. The sorted entries of an id form a run. A run is cut into parts of kEntriesPerPart
// from its own begin, so that a sum does not depend on the rest of the batch. The sorted entries
// are also cut into windows of the same length. A group of lanes adds up the parts that begin in
// its window. A run of one part is finished then. For a long run the sums of the parts are stored,
// and a second kernel adds them in order.

// Entries that are added sequentially. Fixed, so that sums are bitwise identical on every GPU.
// Shorter parts let more groups share a frequent id.
constexpr int64_t kEntriesPerPart = 32;
// Stored parts that a thread loads at a time. The most frequent id may have thousands, and one
// thread per column adds them while little else runs.
constexpr int kPartsInFlight = 64;

// A run of several parts.
struct LongRun {
  int64_t id;
  int64_t window;  // the window of its begin
  int64_t parts;
};

template <typename Sum>
struct PartSums {
  unsigned long long* long_count;
  LongRun* long_runs;  // in any order; at most one long run begins in a window
  // [2 * windows, columns]. Two rows per window suffice: the first parts of two long runs begin at
  // least one window apart, and so do two later parts.
  Sum* sums;

  __device__ static int64_t sum_index(int64_t window, bool first) { return 2 * window + first; }
};

// Called by all threads: sets sums from `first` on to zero. Returns true for one thread.
template <typename T>
__device__ bool zero_from(const SumRows& work, int64_t first) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t k = first * work.columns + thread; k < work.distinct * work.columns; k += threads) {
    static_cast<T*>(work.out)[k] = T{};
  }
  return thread == 0;
}

// Returns whether the plan does not fit these rows. If so, all sums are zeros and the error is
// reported.
template <typename T>
__device__ bool rejects(const SumRows& work, const PlanStatus& status, const Report& about) {
  const bool blocked = is_blocked(status, work.table_rows);
  if (!blocked && status.distinct == work.distinct) return false;
  if (!zero_from<T>(work, 0)) return true;
  if (is_blocked(status, work.table_rows)) {
    report_blocked(about, status);
  } else {
    Report other = about;
    other.rows = work.distinct;
    report(other, IdError::kOtherDistinct, status.distinct, 0, 0, status.count);
  }
  return true;
}

// A part of a run, and its position among the sorted entries.
struct Part {
  int64_t id;
  int64_t run_begin;
  int64_t run_end;
  int64_t begin;

  __device__ int64_t end() const { return min(begin + kEntriesPerPart, run_end); }
  __device__ bool is_first() const { return begin == run_begin; }
  __device__ bool is_last() const { return end() == run_end; }
};

// The part that contains an entry. A plan not made by plan_rows causes no read out of bounds.
__device__ Part part_at(const SumRows& work, const PlanView& plan, int64_t entries, int64_t entry) {
  const int64_t position = plan.order[entry];
  int64_t id = is_outside(position, plan.count) ? 0 : plan.inverse[position];
  if (is_outside(id, work.distinct)) id = 0;
  const int64_t run_begin = min(max(plan.offsets[id], int64_t{0}), entry);
  const int64_t run_end = min(max(plan.offsets[id + 1], entry + 1), entries);
  return {id, run_begin, run_end, entry - (entry - run_begin) % kEntriesPerPart};
}

// A group of lanes owns a window, and reads at most kEntriesPerPart - 1 entries beyond it. While
// rows are loading, the group loads the places of the next rows and the positions of the rows after
// those.
template <typename T, int kVec>
__global__ void __launch_bounds__(kSumThreads)
    sum_parts_kernel(SumRows work, PlanView plan, PartSums<SumOf<T>> part_sums, SumLanes lanes,
                     Report about) {
  if (work.named != nullptr) {
    const bool blocked = is_blocked(*plan.status, work.table_rows);
    const int64_t named = blocked ? 0 : clamped(*work.named, work.distinct);
    zero_from<T>(work, named);
    if (named == 0) return;
    work.distinct = named;
  } else if (rejects<T>(work, *plan.status, about)) {
    return;
  }
  // The entries after the distinct ids belong to the padding, which gets no gradient.
  const int64_t summed = clamped(plan.offsets[work.distinct], plan.count);
  const SumLane<kVec> lane(lanes);
  const int64_t first = lane.group * kEntriesPerPart;
  if (first >= summed || lane.column >= work.columns) return;
  Part part = part_at(work, plan, summed, first);
  const Part last = part_at(work, plan, summed, min(first + kEntriesPerPart, summed) - 1);
  if (lane.column == 0 && last.run_begin >= first && !(last.is_first() && last.is_last())) {
    const int64_t entries = last.run_end - last.run_begin;
    part_sums.long_runs[atomicAdd(part_sums.long_count, 1ull)] = {
        last.id, lane.group, (entries + kEntriesPerPart - 1) / kEntriesPerPart};
  }

  const T* rows = static_cast<const T*>(work.rows) + lane.column;
  Numbers<SumOf<T>, kVec> sum{};
  auto finish = [&] {
    if (part.begin < first || part.id >= work.distinct) return;
    if (part.is_first() && part.is_last()) {
      store(static_cast<T*>(work.out) + part.id * work.columns + lane.column, sum);
    } else {
      const int64_t sum_index = part_sums.sum_index(lane.group, part.is_first());
      store(part_sums.sums + sum_index * work.columns + lane.column, sum);
    }
  };

  const int64_t end = last.end();
  int32_t positions[kInFlight];  // plans have fewer than 2^31
  int64_t places[kInFlight];
  auto load_positions = [&](int64_t entry) {
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      positions[u] = entry + u < end ? static_cast<int32_t>(plan.order[entry + u]) : -1;
    }
  };
  auto load_places = [&] {
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t place = positions[u] - work.begin;
      const bool counts = positions[u] >= 0 && !is_outside(place, work.count);
      places[u] = !counts ? -1 : work.source ? work.source[place] : place;
    }
  };
  // The part that contains `first` may begin in an earlier window; then another group owns it.
  int64_t entry = part.begin < first ? part.end() : first;
  load_positions(entry);
  load_places();
  load_positions(entry + kInFlight);
  for (; entry < end; entry += kInFlight) {
    Numbers<T, kVec> some[kInFlight];
    int64_t next_ends[kInFlight];  // of the runs after `part`
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      some[u] = row_or_zeros<kVec>(rows, places[u], work.row_count, work.row_step);
      next_ends[u] = plan.offsets[min(part.id + 2 + u, work.distinct)];
    }
    load_places();
    load_positions(entry + 2 * kInFlight);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (entry + u >= end) break;
      if (entry + u == part.end()) {
        finish();
        part.begin = entry + u;
        if (part.begin == part.run_end) {
          ++part.id;
          part.run_begin = part.begin;
          part.run_end = max(next_ends[0], part.begin + 1);
#pragma unroll
          for (int k = 1; k < kInFlight; ++k) next_ends[k - 1] = next_ends[k];
        }
        sum = {};
      }
      add(sum, some[u]);
    }
  }
  finish();
}

// Adds kCount numbers that are `step` apart. No branch separates their loads, because a branch
// would serialize them.
template <int kCount, typename Sum>
__device__ __forceinline__ void add_numbers(const Sum* from, int64_t step, Sum& sum) {
  Sum some[kCount];
#pragma unroll
  for (int u = 0; u < kCount; ++u) some[u] = from[u * step];
#pragma unroll
  for (int u = 0; u < kCount; ++u) sum += some[u];
}

// A thread owns one column of a long run and adds its stored parts in order. Without the 1 in the
// launch bounds the compiler uses 32 registers and keeps few loads in flight.
template <typename T>
__global__ void __launch_bounds__(kSumThreads, 1)
    add_part_sums_kernel(SumRows work, PartSums<SumOf<T>> part_sums) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t numbers = static_cast<int64_t>(*part_sums.long_count) * work.columns;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < numbers; i += stride) {
    const LongRun run = part_sums.long_runs[i / work.columns];
    const SumOf<T>* sums = part_sums.sums + i % work.columns;
    const int64_t step = part_sums.sum_index(1, false) * work.columns;
    SumOf<T> sum = sums[part_sums.sum_index(run.window, true) * work.columns];
    int64_t part = run.window + 1;
    const int64_t end = run.window + run.parts;
    for (; part + kPartsInFlight <= end; part += kPartsInFlight) {
      add_numbers<kPartsInFlight>(sums + part * step, step, sum);
    }
    for (; part + kInFlight <= end; part += kInFlight) {
      add_numbers<kInFlight>(sums + part * step, step, sum);
    }
    for (; part < end; ++part) sum += sums[part * step];
    static_cast<T*>(work.out)[run.id * work.columns + i % work.columns] = static_cast<T>(sum);
  }
}

int64_t windows_of(int64_t entries) { return (entries + kEntriesPerPart - 1) / kEntriesPerPart; }

template <typename T, int kVec>
int launch(const SumRows& work, const PlanView& plan, void* scratch, const Report& about,
           cudaStream_t stream) {
  const int64_t windows = windows_of(plan.count);
  char* memory = static_cast<char*>(scratch);
  char* sums = memory + padded(sizeof(int64_t)) + padded(windows * sizeof(LongRun));
  const PartSums<SumOf<T>> part_sums{reinterpret_cast<unsigned long long*>(memory),
                                     reinterpret_cast<LongRun*>(memory + padded(sizeof(int64_t))),
                                     reinterpret_cast<SumOf<T>*>(sums)};
  const int error = cudaMemsetAsync(part_sums.long_count, 0, sizeof(int64_t), stream);
  if (error != cudaSuccess) return error;
  const SumShape shape = sum_shape<kVec>(windows, work.columns);
  const int blocks = shares_of(windows * work.columns, kSumThreads, kDeviceBlocks);
  sum_parts_kernel<T, kVec>
      <<<shape.blocks, kSumThreads, 0, stream>>>(work, plan, part_sums, shape.lanes, about);
  add_part_sums_kernel<T><<<blocks, kSumThreads, 0, stream>>>(work, part_sums);
  return cudaGetLastError();
}

// ---- pool_rows

// A group of lanes owns a bag. While rows are loading, the group loads the places (row indices) of
// the next kInFlight entries. Offsets that do not ascend cause no read out of bounds. Without the 1
// in the launch bounds the compiler uses fewer registers and serializes the row loads.
template <typename T, int kVec>
__global__ void __launch_bounds__(kSumThreads, 1)
    pool_rows_kernel(PoolRows work, int64_t bags, SumLanes lanes) {
  const SumLane<kVec> lane(lanes);
  if (lane.group >= bags || lane.column >= work.columns) return;
  const int64_t begin = min(max(work.offsets[lane.group], int64_t{0}), work.count);
  const int64_t end = min(max(work.offsets[lane.group + 1], begin), work.count);
  const T* rows = static_cast<const T*>(work.rows) + lane.column;
  Numbers<SumOf<T>, kVec> sum{};
  int64_t places[kInFlight];
  auto load_places = [&](int64_t entry) {
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      places[u] = entry + u < end ? work.places[entry + u] : -1;
    }
  };
  load_places(begin);
  for (int64_t entry = begin; entry < end; entry += kInFlight) {
    Numbers<T, kVec> some[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      some[u] = row_or_zeros<kVec>(rows, places[u], work.row_count, work.columns);
    }
    load_places(entry + kInFlight);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) add(sum, some[u]);
  }
  if (work.mean && end > begin) {
    for (int v = 0; v < kVec; ++v) sum.at[v] /= static_cast<SumOf<T>>(end - begin);
  }
  const int64_t feature = lane.group / work.samples, sample = lane.group % work.samples;
  const int64_t row = sample * work.features + feature;
  store(static_cast<T*>(work.out) + row * work.columns + lane.column, sum);
}

}  // namespace

// ---- launchers

int64_t sum_scratch_bytes(NumberKind kind, int64_t entries, int64_t columns) {
  const int64_t windows = windows_of(entries);
  const int64_t number_bytes = kind == NumberKind::kDouble ? 8 : 4;  // of sums
  return padded(sizeof(int64_t)) + padded(windows * sizeof(LongRun)) +
         2 * windows * columns * number_bytes;
}

int launch_sum_rows(NumberKind kind, const SumRows& work, const PlanView& plan, void* scratch,
                    const Report& about, void* stream) {
  if (work.columns == 0) return cudaSuccess;
  if (plan.count == 0) {  // every sum is zero
    return with_float_type<__half, __nv_bfloat16>(kind, [&](auto number) {
      return static_cast<int>(cudaMemsetAsync(work.out, 0,
                                              work.distinct * work.columns * sizeof(number),
                                              static_cast<cudaStream_t>(stream)));
    });
  }
  const auto bits = reinterpret_cast<uint64_t>(work.rows) | reinterpret_cast<uint64_t>(work.out);
  return with_vector(kind, work.columns, work.row_step, bits, [&](auto vector) {
    using V = decltype(vector);
    return launch<typename V::T, V::kVec>(work, plan, scratch, about,
                                          static_cast<cudaStream_t>(stream));
  });
}

int launch_pool_rows(NumberKind kind, const PoolRows& work, void* stream) {
  const int64_t bags = work.bags();
  if (bags == 0 || work.columns == 0) return cudaSuccess;
  const auto bits = reinterpret_cast<uint64_t>(work.rows) | reinterpret_cast<uint64_t>(work.out);
  return with_vector(kind, work.columns, work.columns, bits, [&](auto vector) {
    using V = decltype(vector);
    const SumShape shape = sum_shape<V::kVec>(bags, work.columns);
    pool_rows_kernel<typename V::T, V::kVec>
        <<<shape.blocks, kSumThreads, 0, static_cast<cudaStream_t>(stream)>>>(work, bags,
                                                                              shape.lanes);
    return static_cast<int>(cudaGetLastError());
  });
}

}  // namespace speedtorch

// Kernels of sum_rows: rows of one id are added up in the order of the batch. Called by
// sum_rows.cpp. Each row is read once; nothing crosses the link.
//
// The sorted entries of the plan are cut into parts of kEntriesPerPart. A group of lanes adds up a
// part, id after id. An id whose entries all lie within the part is done; of one that goes on in
// the next part the sum is kept aside, and a second kernel adds up what was kept, part after part.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/sum_rows_launch.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // rows that a group of lanes has asked for at a time

// Half-precision numbers are added up in single precision and rounded once.
template <typename T>
struct SumOf {
  using Type = float;
};
template <>
struct SumOf<double> {
  using Type = double;
};

template <typename Number, int kCount>
struct alignas(sizeof(Number) * kCount) Numbers {
  Number at[kCount];
};

// Where a thread works: its group, and its first column (or one past all).
template <int kVec>
struct Seat {
  int64_t group;
  int64_t column;

  __device__ explicit Seat(int lanes) {
    const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    group = thread / lanes;
    column = (int64_t{blockIdx.y} * lanes + thread % lanes) * kVec;
  }
};

// Whether the plan is none for these rows.
__device__ bool is_bad(const SumRows& work, const PlanStatus& status) {
  return is_blocked(status, work.table_rows) || status.distinct != work.distinct;
}

// By all threads: no sums, and word of what is wrong.
template <typename T>
__device__ void zero_instead(const SumRows& work, const PlanStatus& status, const Report& about) {
  const int64_t block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  const int64_t thread = block * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * gridDim.y * blockDim.x;
  for (int64_t k = thread; k < work.distinct * work.columns; k += threads) {
    static_cast<T*>(work.out)[k] = T{};
  }
  if (thread != 0) return;
  if (is_blocked(status, work.table_rows)) {
    report_blocked(about, status);
  } else {
    Report other = about;
    other.rows = work.distinct;
    report(other, IdError::kOtherDistinct, status.distinct, 0, 0, status.count);
  }
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(SumRows work, PlanView plan, typename SumOf<T>::Type* kept, int lanes,
                     Report about) {
  using Sum = typename SumOf<T>::Type;
  using Row = Numbers<T, kVec>;
  using Sums = Numbers<Sum, kVec>;
  if (is_bad(work, *plan.status)) return zero_instead<T>(work, *plan.status, about);
  const Seat<kVec> seat(lanes);
  const int64_t first = seat.group * kEntriesPerPart;
  if (first >= plan.count || seat.column >= work.columns) return;
  const int64_t last = min(first + kEntriesPerPart, plan.count);
  const T* rows = static_cast<const T*>(work.rows) + seat.column;
  Sums sum{};
  int64_t current = plan.inverse[plan.order[first]];
  auto finish = [&](int64_t id) {
    if (id >= work.distinct) return;
    const bool began_before = plan.offsets[id] < first;
    const bool goes_on = plan.offsets[id + 1] > last;
    if (began_before || goes_on) {
      // Slot 0 is for an id that began before this part, slot 1 for one that begins in it.
      const int64_t slot = 2 * seat.group + (began_before ? 0 : 1);
      *reinterpret_cast<Sums*>(kept + slot * work.columns + seat.column) = sum;
    } else {
      Row row;
      for (int v = 0; v < kVec; ++v) row.at[v] = static_cast<T>(sum.at[v]);
      *reinterpret_cast<Row*>(static_cast<T*>(work.out) + id * work.columns + seat.column) = row;
    }
  };
  for (int64_t entry = first; entry < last; entry += kInFlight) {
    int64_t ids[kInFlight], places[kInFlight];
    Row some[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      places[u] = entry + u < last ? plan.order[entry + u] : -1;
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      ids[u] = places[u] < 0 ? -1 : plan.inverse[places[u]];
      places[u] -= work.begin;
      if (ids[u] < 0 || places[u] < 0 || places[u] >= work.count) {
        places[u] = -1;
      } else {
        some[u] = *reinterpret_cast<const Row*>(rows + places[u] * work.columns);
      }
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (ids[u] < 0) break;
      if (ids[u] != current) {
        finish(current);
        current = ids[u];
        sum = {};
      }
      if (places[u] < 0) continue;
      for (int v = 0; v < kVec; ++v) sum.at[v] += static_cast<Sum>(some[u].at[v]);
    }
  }
  finish(current);
}

// A group owns a part, and adds up the id that begins in it and goes on.
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    sum_kept_kernel(SumRows work, PlanView plan, const typename SumOf<T>::Type* kept, int lanes) {
  using Sum = typename SumOf<T>::Type;
  using Sums = Numbers<Sum, kVec>;
  const Seat<kVec> seat(lanes);
  const int64_t first = seat.group * kEntriesPerPart;
  if (is_bad(work, *plan.status) || first >= plan.count || seat.column >= work.columns) return;
  const int64_t last = min(first + kEntriesPerPart, plan.count);
  const int64_t id = plan.inverse[plan.order[last - 1]];
  const int64_t end = plan.offsets[id + 1];
  if (plan.offsets[id] < first || end <= last || id >= work.distinct) return;
  auto slot = [&](int64_t part, int which) {
    return *reinterpret_cast<const Sums*>(kept + (2 * part + which) * work.columns + seat.column);
  };
  Sums sum = slot(seat.group, 1);
  const int64_t parts_end = (end + kEntriesPerPart - 1) / kEntriesPerPart;
  for (int64_t part = seat.group + 1; part < parts_end; part += kInFlight) {
    Sums some[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (part + u < parts_end) some[u] = slot(part + u, 0);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (part + u >= parts_end) break;
      for (int v = 0; v < kVec; ++v) sum.at[v] += some[u].at[v];
    }
  }
  Numbers<T, kVec> row;
  for (int v = 0; v < kVec; ++v) row.at[v] = static_cast<T>(sum.at[v]);
  *reinterpret_cast<Numbers<T, kVec>*>(static_cast<T*>(work.out) + id * work.columns +
                                       seat.column) = row;
}

int64_t parts_of(int64_t entries) { return (entries + kEntriesPerPart - 1) / kEntriesPerPart; }

template <typename T, int kVec>
int launch(const SumRows& work, const PlanView& plan, void* scratch, ErrorRecord* record,
           cudaStream_t stream) {
  using Sum = typename SumOf<T>::Type;
  const int64_t needed = (work.columns + kVec - 1) / kVec;
  int lanes = 1;
  while (lanes < 32 && lanes < needed) lanes *= 2;
  const int64_t threads = parts_of(plan.count) * lanes;
  const dim3 grid(static_cast<unsigned>((threads + kThreads - 1) / kThreads),
                  static_cast<unsigned>((needed + lanes - 1) / lanes));
  auto* kept = static_cast<Sum*>(scratch);
  const Report about{record, Op::kSum, IdList::kIndex, work.table_rows};
  sum_parts_kernel<T, kVec><<<grid, kThreads, 0, stream>>>(work, plan, kept, lanes, about);
  sum_kept_kernel<T, kVec><<<grid, kThreads, 0, stream>>>(work, plan, kept, lanes);
  return cudaGetLastError();
}

}  // namespace

int64_t sum_scratch_bytes(NumberKind kind, int64_t entries, int64_t columns) {
  const int64_t number_bytes = kind == NumberKind::kDouble ? 8 : 4;
  return 2 * parts_of(entries) * columns * number_bytes;
}

int launch_sum_rows(NumberKind kind, const SumRows& work, const PlanView& plan, void* scratch,
                    ErrorRecord* record, void* stream) {
  if (plan.count == 0 || work.columns == 0) return cudaSuccess;
  const auto bits = reinterpret_cast<uint64_t>(work.rows) | reinterpret_cast<uint64_t>(work.out);
  return with_float_type<__half, __nv_bfloat16>(kind, [&](auto number) {
    using T = decltype(number);
    constexpr int kVec = 16 / sizeof(T);
    auto* on = static_cast<cudaStream_t>(stream);
    return work.columns % kVec == 0 && bits % 16 == 0
               ? launch<T, kVec>(work, plan, scratch, record, on)
               : launch<T, 1>(work, plan, scratch, record, on);
  });
}

}  // namespace speedtorch

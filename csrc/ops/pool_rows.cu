// Kernel of pool_rows: the rows of each bag, added up in order. Called by pool_rows.cpp. Each row
// is read once for each entry that names it; nothing crosses the link.

#include <cuda_runtime.h>

#include "ops/pool_rows_launch.h"
#include "ops/row_sums.cuh"

namespace speedtorch {
namespace {

// A group owns a bag. While rows are on their way it asks for the places of the next ones. Offsets
// that do not ascend read nothing out of bounds. (Without the 1 of the bounds the compiler takes
// fewer registers, and lets rows wait for each other.)
template <typename T, int kVec>
__global__ void __launch_bounds__(kSumThreads, 1)
    pool_rows_kernel(PoolRows work, int64_t bags, SumLanes lanes) {
  const Seat<kVec> seat(lanes);
  if (seat.group >= bags || seat.column >= work.columns) return;
  const int64_t begin = min(max(work.offsets[seat.group], int64_t{0}), work.count);
  const int64_t end = min(max(work.offsets[seat.group + 1], begin), work.count);
  const T* rows = static_cast<const T*>(work.rows) + seat.column;
  Numbers<SumOf<T>, kVec> sum{};
  int64_t places[kInFlight];
  auto ask_for_places = [&](int64_t entry) {
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      places[u] = entry + u < end ? work.places[entry + u] : -1;
    }
  };
  ask_for_places(begin);
  for (int64_t entry = begin; entry < end; entry += kInFlight) {
    Numbers<T, kVec> some[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      some[u] = row_or_zeros<kVec>(rows, places[u], work.row_count, work.columns);
    }
    ask_for_places(entry + kInFlight);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) add(sum, some[u]);
  }
  if (work.mean && end > begin) {
    for (int v = 0; v < kVec; ++v) sum.at[v] /= static_cast<SumOf<T>>(end - begin);
  }
  const int64_t feature = seat.group / work.samples, sample = seat.group % work.samples;
  const int64_t row = sample * work.features + feature;
  store(static_cast<T*>(work.out) + row * work.columns + seat.column, sum);
}

}  // namespace

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

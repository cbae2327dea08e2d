// What kernels that add up rows share: numbers that are read at once, and which thread adds up
// which columns. A group of lanes owns a sum; lanes own neighbouring columns of it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "move/number_kind.h"

namespace speedtorch {

constexpr int kSumThreads = 256;
constexpr int kInFlight = 4;  // rows that a group of lanes has asked for at a time

template <typename Number, int kCount>
struct alignas(sizeof(Number) * kCount) Numbers {
  Number at[kCount];
};

// Which columns the lanes of a group add up: those from 0 on, and in other blocks those from
// `count` on, and so on. Blocks of all turns lie in x: a grid has 65,535 in y at most.
struct SumLanes {
  int count;       // a power of two
  unsigned turns;  // that all columns take
};

// Where a thread works: its group, and its first column (or one past all).
template <int kVec>
struct Seat {
  int64_t group;
  int64_t column;

  __device__ explicit Seat(const SumLanes& lanes) {
    const int thread = static_cast<int>(threadIdx.x);
    const unsigned turn = blockIdx.x / lanes.turns;
    group = int64_t{turn} * (kSumThreads / lanes.count) + thread / lanes.count;
    column = (int64_t{blockIdx.x - turn * lanes.turns} * lanes.count + thread % lanes.count) * kVec;
  }
};

// The numbers of a row from a thread's column on, where `rows` begins, which lie `step` apart;
// zeros of a row that there is none of. They can be added like any other: a sum that began as zero
// is never -0.0.
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
  const int64_t turns = (needed + lanes - 1) / lanes;
  const int64_t blocks = (groups * lanes + kSumThreads - 1) / kSumThreads * turns;
  return {{lanes, static_cast<unsigned>(turns)}, static_cast<unsigned>(blocks)};
}

template <typename Number, int kCount>
struct Vector {
  using T = Number;
  static constexpr int kVec = kCount;
};

// Calls `use` with the Vector of the kind that can be read at once: of 16 bytes where all rows of
// `columns`, which lie `step` apart, begin at multiples of that; `bits` are the tensors' addresses
// or'ed together.
template <typename Use>
auto with_vector(NumberKind kind, int64_t columns, int64_t step, uint64_t bits, const Use& use) {
  return with_float_type<__half, __nv_bfloat16>(kind, [&](auto number) {
    using T = decltype(number);
    constexpr int kVec = 16 / sizeof(T);
    const bool all = columns % kVec == 0 && step % kVec == 0 && bits % 16 == 0;
    return all ? use(Vector<T, kVec>{}) : use(Vector<T, 1>{});
  });
}

}  // namespace speedtorch

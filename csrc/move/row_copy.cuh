// How kernels move rows in one direction, for gather, scatter, copy and held rows. `RowMap` maps
// each move to its rows:
//   bool blocked()   whether bad ids forbid every move; called by all threads of a block
//   void report()    writes the error record; called by one thread
//   int64_t count()  number of moves
//   bool planned()   passed to from() and to(): whether a plan names the rows
//   int64_t from(m, planned), to(m, planned)  row numbers, m < count(); from < 0: no move
#pragma once

#include <cuda_runtime.h>

#include "core/rows.h"
#include "move/row_copy.h"

namespace speedtorch {

// Loads and stores with a streaming cache hint, because a row is used once.
template <typename Vec>
__device__ __forceinline__ Vec load_streaming(const char* row, int64_t vec) {
  return __ldcs(reinterpret_cast<const Vec*>(row) + vec);
}
template <typename Vec>
__device__ __forceinline__ void store_streaming(char* row, int64_t vec, Vec value) {
  __stcs(reinterpret_cast<Vec*>(row) + vec, value);
}

// Fills contiguous rows [begin, end) with zeros. A thread owns vectors a grid stride apart.
template <typename Vec>
__device__ void fill_zeros(const Rows& rows, int64_t begin, int64_t end) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  const int64_t vecs = rows.row_bytes / static_cast<int64_t>(sizeof(Vec));
  for (int64_t v = begin * vecs + thread; v < end * vecs; v += threads) {
    store_streaming(rows.base, v, Vec{});
  }
}

// For bad ids: reports them, and fills `zero_rows` contiguous rows of `to` with zeros (0 for a
// scatter).
template <typename Vec, typename RowMap>
__device__ void zero_instead(const RowMap& map, const Rows& to, int64_t zero_rows) {
  if (blockIdx.x == 0 && threadIdx.x == 0) map.report();
  fill_zeros<Vec>(to, 0, zero_rows);
}

// A RowMap of consecutive rows on both sides.
struct Consecutive {
  int64_t rows;

  __device__ bool blocked() const { return false; }
  __device__ void report() const {}
  __device__ int64_t count() const { return rows; }
  __device__ bool planned() const { return false; }
  __device__ int64_t from(int64_t m, bool) const { return m; }
  __device__ int64_t to(int64_t m, bool) const { return m; }
};

// The side of a move that is host memory, whose lines should cross the link once; or none.
enum class Link { kFrom, kTo, kNone };

// Vectors between the start of a line (or of the bytes of a warp, if fewer) and `row`.
template <typename Vec>
__device__ int vecs_before(const char* row) {
  constexpr int kWindow = 32 * sizeof(Vec) < 128 ? 32 * sizeof(Vec) : 128;
  return static_cast<int>(reinterpret_cast<uint64_t>(row) % kWindow / sizeof(Vec));
}

// Finds the rows of moves first, first + step, ...; a null source means no move. Branches between
// the loads would serialize the loads. Therefore `planned()` is evaluated once, and numbers after
// the last move load the rows of the last move.
template <int kRows, typename RowMap>
__device__ __forceinline__ void find_rows(const RowMap& map, const Rows& from, const Rows& to,
                                          int64_t first, int64_t step, int64_t count,
                                          const char* (&source)[kRows], char* (&target)[kRows]) {
  const auto find = [&](bool planned) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t m = first + u * step, at = min(m, count - 1);
      const int64_t row = map.from(at, planned);
      source[u] = row < 0 || m >= count ? nullptr : from.base + row * from.stride_bytes;
      target[u] = to.base + map.to(at, planned) * to.stride_bytes;
    }
  };
  map.planned() ? find(true) : find(false);
}

// A thread owns every lanes_per_row-th vector of a row. A group of lanes_per_row threads owns kRows
// moves at a time, with all loads in flight together. The groups of a warp own interleaved moves,
// which are near each other in address order. This is 8 to 13 % faster for rows of 128 bytes in
// registered memory than interleaving all groups, and narrow rows share sectors. Few moves are
// spread over all groups. Blocks share nothing. Each row crosses the link once. If a row needs
// several iterations, the row is cut where lines of host memory begin. A line touched by two
// iterations would cross the link in two requests (rows of 1,028 bytes: 17 requests instead of 9).
template <typename Vec, int kRows, Link kLink, typename RowMap>
__device__ __forceinline__ void move_rows(const RowMap& map, const Rows& from, const Rows& to,
                                          const MoveShape& shape) {
  const int thread = static_cast<int>(blockIdx.x * kMoverThreads + threadIdx.x);
  const int group = thread / shape.lanes_per_row, lane = thread % shape.lanes_per_row;
  const int groups = shape.groups, in_warp = shape.groups_in_warp;
  if (group >= groups) return;  // threads beyond the last whole group
  const int64_t count = map.count();
  const bool few = count < groups * kRows;
  const int begin = few ? group : group / in_warp * in_warp * (kRows - 1) + group;
  const bool is_iterated = kLink != Link::kNone && shape.vecs_per_row > shape.lanes_per_row;
  for (int64_t first = begin; first < count; first += groups * kRows) {
    const char* source[kRows];
    char* target[kRows];
    int before[kRows];
    int max_before = 0;
    find_rows(map, from, to, first, few ? groups : in_warp, count, source, target);
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      before[u] = is_iterated ? vecs_before<Vec>(kLink == Link::kFrom ? source[u] : target[u]) : 0;
      max_before = max(max_before, before[u]);
    }
    for (int64_t column = lane; column < shape.vecs_per_row + max_before;
         column += shape.lanes_per_row) {
      Vec values[kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const int64_t v = column - before[u];
        if (source[u] != nullptr && v >= 0 && v < shape.vecs_per_row)
          values[u] = load_streaming<Vec>(source[u], v);
      }
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const int64_t v = column - before[u];
        if (source[u] != nullptr && v >= 0 && v < shape.vecs_per_row)
          store_streaming<Vec>(target[u], v, values[u]);
      }
    }
  }
}

// Calls move_rows if the ids are good, else zero_instead.
template <typename Vec, int kRows, Link kLink, typename RowMap>
__global__ void __launch_bounds__(kMoverThreads, kLink == Link::kNone || sizeof(Vec) == 16 ? 2 : 0)
    move_rows_kernel(RowMap map, Rows from, Rows to, MoveShape shape, int64_t zero_rows) {
  if (map.blocked()) return zero_instead<Vec>(map, to, zero_rows);
  move_rows<Vec, kRows, kLink>(map, from, to, shape);
}

// Like move_rows, for rows of 1- or 2-byte vectors in host memory that need several iterations. A
// warp owns kRows moves at a time. A lane loads the 4-byte word that contains its vectors, so that
// an iteration covers a whole line, and stores the vectors one by one. Only at the ends of `from`
// may a word extend beyond the table's memory.
template <typename Vec, typename RowMap>
__global__ void __launch_bounds__(kMoverThreads)
    move_words_kernel(RowMap map, Rows from, const char* from_end, Rows to, int64_t zero_rows) {
  constexpr int kRows = 2 * kRowsInFlight;
  constexpr int kWord = sizeof(uint32_t), kVec = sizeof(Vec);
  union Word {
    uint32_t whole;
    Vec vecs[kWord / kVec];
  };
  if (map.blocked()) return zero_instead<Vec>(map, to, zero_rows);
  const int64_t row_bytes = to.row_bytes;
  const int64_t groups = int64_t{gridDim.x} * blockDim.x / 32;
  const int64_t group = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  const int64_t count = map.count();
  for (int64_t first = group; first < count; first += groups * kRows) {
    const char* source[kRows];
    char* target[kRows];
    int before[kRows];  // bytes between the start of a line and the row
    find_rows(map, from, to, first, groups, count, source, target);
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      before[u] = static_cast<int>(reinterpret_cast<uint64_t>(source[u]) % 128);
    }
    for (int64_t offset = 0; offset < row_bytes + 128; offset += 128) {
      Word words[kRows];
      auto at = [&](int u) { return offset + lane * kWord - before[u]; };
      auto touches = [&](int u) {
        return source[u] != nullptr && at(u) > -kWord && at(u) < row_bytes;
      };
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (!touches(u)) continue;
        const char* word = source[u] + at(u);
        if (word >= from.base && word + kWord <= from_end) {
          words[u].whole = load_streaming<uint32_t>(word, 0);
        } else {
          for (int v = 0; v < kWord / kVec; ++v) {
            const int64_t byte = at(u) + v * kVec;
            if (byte >= 0 && byte < row_bytes)
              words[u].vecs[v] = load_streaming<Vec>(source[u] + byte, 0);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (!touches(u)) continue;
#pragma unroll
        for (int v = 0; v < kWord / kVec; ++v) {
          const int64_t byte = at(u) + v * kVec;
          if (byte >= 0 && byte < row_bytes)
            store_streaming<Vec>(target[u] + byte, 0, words[u].vecs[v]);
        }
      }
    }
  }
}

// Calls `use` with a value of the type whose size is one access. nv_exec_check_disable: nvcc would
// warn, because `use` exists only on the host or only on the device.
#pragma nv_exec_check_disable
template <typename Use>
__host__ __device__ void with_vec_type(int vec_bytes, Use use) {
  switch (vec_bytes) {
    case 16:
      return use(uint4{});
    case 8:
      return use(uint2{});
    case 4:
      return use(uint32_t{});
    case 2:
      return use(static_cast<unsigned short>(0));
    default:
      return use(static_cast<unsigned char>(0));
  }
}

// `max_rows` bounds map.count(), which only the GPU knows.
template <Link kLink, typename RowMap>
int launch_register_copy(const RowMap& map, const Rows& from, const Rows& to, int64_t max_rows,
                         int64_t zero_rows, int max_blocks, void* stream) {
  const MoveShape shape = move_shape(to.row_bytes, from.bits() | to.bits(), max_rows, max_blocks);
  auto on = static_cast<cudaStream_t>(stream);
  with_vec_type(shape.vec_bytes, [&](auto vec) {
    if constexpr (kLink == Link::kFrom && sizeof(vec) < sizeof(uint32_t)) {
      if (shape.vecs_per_row > shape.lanes_per_row) {
        return move_words_kernel<decltype(vec), RowMap>
            <<<shape.blocks, kMoverThreads, 0, on>>>(map, from, from.end(), to, zero_rows);
      }
    }
    constexpr int kRows = sizeof(vec) == 16 ? kRowsInFlight : 2 * kRowsInFlight;
    move_rows_kernel<decltype(vec), kRows, kLink, RowMap>
        <<<shape.blocks, kMoverThreads, 0, on>>>(map, from, to, shape, zero_rows);
  });
  return cudaGetLastError();
}

}  // namespace speedtorch

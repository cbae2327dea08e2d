// Kernels of hold_rows: the rows of one batch replace the held rows of the batch before. Called by
// hold_rows.cpp. All rows are in GPU memory; a kept row is read twice and written twice.

#include "move/row_copy.cuh"
#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

struct Fields {
  HeldField field[kFieldsPerLaunch];
  MoveShape shape[kFieldsPerLaunch];
};

// A RowMap of rows between listed places. A place out of range means no move.
struct Listed {
  const int64_t* from_places;
  const int64_t* to_places;  // null: row m for entry m
  int64_t moves, from_rows, to_rows;

  __device__ int64_t count() const { return moves; }
  __device__ bool planned() const { return false; }
  __device__ int64_t from(int64_t m, bool) const {
    const bool none = is_outside(from_places[m], from_rows) || is_outside(target(m), to_rows);
    return none ? -1 : from_places[m];
  }
  __device__ int64_t to(int64_t m, bool) const {
    return is_outside(target(m), to_rows) ? 0 : target(m);
  }
  __device__ int64_t target(int64_t m) const { return to_places == nullptr ? m : to_places[m]; }
};

__device__ int64_t named_of(const HeldChanges& changes) {
  return clamped(changes.counts[0], changes.max_named);
}

// A grid row (blockIdx.y) of blocks owns a field; threads and groups work as in move_rows. Kept
// rows go to places of named rows only. All rows of `incoming` behind these become zeros, whatever
// the lists contain.
__global__ void __launch_bounds__(kMoverThreads, 2)
    complete_incoming_kernel(Fields fields, HeldChanges changes) {
  const HeldField& field = fields.field[blockIdx.y];
  const MoveShape& shape = fields.shape[blockIdx.y];
  const int64_t rows = field.held.count, named = named_of(changes);
  const Listed kept_rows{changes.kept_from, changes.kept_places, clamped(changes.counts[1], rows),
                         rows, named};
  const Listed evicted_rows{changes.evicted_places, nullptr,
                            clamped(changes.counts[3], field.evicted.count), rows, rows};
  with_vec_type(shape.vec_bytes, [&](auto vec) {
    using Vec = decltype(vec);
    move_rows<Vec, kRowsInFlight, Link::kNone>(kept_rows, field.held, field.incoming, shape);
    move_rows<Vec, kRowsInFlight, Link::kNone>(evicted_rows, field.held, field.evicted, shape);
    fill_zeros<Vec>(field.incoming, named, rows);
  });
}

// A grid row of blocks owns a field, as above. The threads of the first grid row also write the
// ids, a grid stride apart.
__global__ void __launch_bounds__(kMoverThreads, 2)
    take_over_kernel(Fields fields, HeldChanges changes, HeldIds ids) {
  const HeldField& field = fields.field[blockIdx.y];
  const MoveShape& shape = fields.shape[blockIdx.y];
  with_vec_type(shape.vec_bytes, [&](auto vec) {
    using Vec = decltype(vec);
    move_rows<Vec, kRowsInFlight, Link::kNone>(Consecutive{field.held.count}, field.incoming,
                                               field.held, shape);
  });
  if (blockIdx.y > 0 || ids.status == nullptr) return;
  const int64_t named = named_of(changes), stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < ids.size; i += stride) {
    ids.held_ids[i] = i < named ? ids.ids[i] : kNoId;
    if (ids.saved_count != nullptr) ids.saved_ids[i] = ids.evicted_ids[i];
  }
  if (first != 0) return;
  *ids.status = status_of_distinct(named, ids.status->rows);
  if (ids.saved_count != nullptr) *ids.saved_count = clamped(changes.counts[3], ids.size);
}

// Fills the kernel's fields and returns the grid, with one grid row per field.
dim3 arrange(const HeldField* fields, int field_count, Fields& all) {
  int blocks = 1;
  for (int f = 0; f < field_count; ++f) {
    const HeldField& field = all.field[f] = fields[f];
    const uint64_t bits = field.held.bits() | field.incoming.bits() | field.evicted.bits();
    all.shape[f] = move_shape(field.held.row_bytes, bits, field.held.count, kDeviceBlocks);
    blocks = max(blocks, all.shape[f].blocks);
  }
  return dim3(blocks, field_count);
}

}  // namespace

int launch_complete_incoming(const HeldField* fields, int field_count, const HeldChanges& changes,
                             void* stream) {
  Fields all{};
  const dim3 blocks = arrange(fields, field_count, all);
  complete_incoming_kernel<<<blocks, kMoverThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      all, changes);
  return cudaGetLastError();
}

int launch_take_over(const HeldField* fields, int field_count, const HeldChanges& changes,
                     const HeldIds* ids, void* stream) {
  Fields all{};
  const dim3 blocks = arrange(fields, field_count, all);
  take_over_kernel<<<blocks, kMoverThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      all, changes, ids == nullptr ? HeldIds{} : *ids);
  return cudaGetLastError();
}

}  // namespace speedtorch

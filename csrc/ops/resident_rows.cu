// The kernel of resident_begin_find, which finds the slots of rows. Called by resident_rows.cpp.
// The index is in host memory. A row needs about two short reads over the link, and the reads of
// different rows overlap.

#include <cuda_runtime.h>

#include <bit>

#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

// Returns the slot of a row, with what the index knows about it, or -1.
__device__ int32_t find_slot(const ResidentIndex& index, int64_t row, Slot* found) {
  const uint64_t hash = mixed(static_cast<uint64_t>(row));
  uint64_t place = hash & index.mask;
  for (;;) {
    const uint64_t first = place / kEntriesRead * kEntriesRead;
    const uint4 read = __ldcg(reinterpret_cast<const uint4*>(index.table + first));
    const uint32_t entries[kEntriesRead] = {read.x, read.y, read.z, read.w};
#pragma unroll
    for (uint64_t k = 0; k < kEntriesRead; ++k) {
      if (first + k < place) continue;
      if (entries[k] == 0) return -1;
      if (!index.may_have(entries[k], hash)) continue;
      const int32_t slot = index.slot_of(entries[k]);
      *found = std::bit_cast<Slot>(__ldcg(reinterpret_cast<const int4*>(index.slots + slot)));
      if (found->row == row) return slot;
    }
    place = (first + kEntriesRead) & index.mask;
  }
}

// Threads mark slots without atomics: a slot occurs at most once among the rows that change and
// once among the others, and the two parts write different bytes.
__global__ void find_slots_kernel(ResidentIndex index, const int64_t* rows, int64_t count,
                                  int64_t changing, int64_t* slots) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = first; i < count; i += stride) {
    Slot found;
    const int32_t slot = find_slot(index, rows[i], &found);
    slots[i] = slot;
    index.found[i] = slot;
    if (slot < 0) {
      *index.missing = 1;
    } else if (i < changing) {
      if (!found.is_changed) index.slots[slot].is_changed = true;
    } else if (found.chances < kMaxChances) {
      index.slots[slot].chances = found.chances + 1;
    }
  }
}

}  // namespace

int launch_find_slots(const ResidentIndex& index, const int64_t* rows, int64_t count,
                      int64_t changing, int64_t* slots, void* stream) {
  if (count == 0) return cudaSuccess;
  find_slots_kernel<<<blocks_for_ids(count), kIdThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      index, rows, count, changing, slots);
  return cudaGetLastError();
}

}  // namespace speedtorch

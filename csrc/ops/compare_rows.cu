// Kernels that compare two ascending lists of ids. Called by compare_rows.cpp. Everything is in GPU
// memory; an id costs a search by halving in the other list.

#include <cuda_runtime.h>

#include "ops/compare_rows_launch.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

// A count that is none (of a status that plan_rows did not write) reads nothing out of bounds.
__device__ int64_t count_of(const SortedIds& list) {
  return list.count == nullptr ? list.size : clamped(*list.count, list.size);
}

// Where the row of an entry is held: entries without that of the padding, which is none.
struct Places {
  int64_t padding_at;  // its entry, or one past all

  __device__ Places(const int64_t* ids, int64_t count, int64_t padding) : padding_at(count) {
    if (padding < 0) return;
    const int64_t at = lower_bound(ids, count, padding);
    if (at < count && ids[at] == padding) padding_at = at;
  }
  __device__ int64_t of(int64_t entry) const { return entry - (entry > padding_at); }
};

// One thread decides for all kernels that follow, as it changes what it decides by: `*count` ids of
// the batch are compared.
__global__ void decide_kernel(SortedIds named, int64_t padding, Fitting fitting, int64_t* count) {
  *count = 0;
  if (fitting.halt[0] != 0) {
    ++fitting.halt[1];
    return;
  }
  const int64_t named_count = count_of(named);
  const Places places(named.ids, named_count, padding);
  const int64_t distinct = named_count - (places.padding_at < named_count);
  const PlanStatus& status = *fitting.status;
  const Misfit why = status.bad_count != 0               ? Misfit::kBadIds
                     : status.rows != fitting.table_rows ? Misfit::kForeignPlan
                     : distinct > fitting.capacity       ? Misfit::kTooMany
                                                         : Misfit::kNone;
  if (why == Misfit::kNone) {
    *count = named_count;
    return;
  }
  fitting.halt[0] = 1;
  *fitting.fault = {0,
                    distinct,
                    fitting.capacity,
                    status.bad_count,
                    status.bad_position,
                    status.bad_id,
                    status.count,
                    fitting.table_rows};
  __threadfence_system();
  *static_cast<volatile int64_t*>(&fitting.fault->kind) = static_cast<int64_t>(why);
}

// A thread owns entries of both lists, one after the other: 1 where an id is not in the other list.
__global__ void mark_apart_kernel(SortedIds named, SortedIds held, int64_t padding,
                                  int32_t* apart) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t named_count = count_of(named), held_count = count_of(held);
  const int64_t entries = named.size + held.size;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < entries; i += stride) {
    const bool is_named = i < named.size;
    const int64_t entry = is_named ? i : i - named.size;
    int32_t mark = 0;
    if (entry < (is_named ? named_count : held_count)) {
      const int64_t id = is_named ? named.ids[entry] : held.ids[entry];
      const int64_t* others = is_named ? held.ids : named.ids;
      const int64_t count = is_named ? held_count : named_count;
      const int64_t at = lower_bound(others, count, id);
      mark = id != padding && (at >= count || others[at] != id);
    }
    apart[i] = mark;
  }
}

// A thread owns entries of both lists; ranks[i] is the number of marks up to entry i.
__global__ void write_compared_kernel(SortedIds named, SortedIds held, int64_t padding,
                                      const int32_t* apart, const int32_t* ranks,
                                      ComparedRows out) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t named_count = count_of(named), held_count = count_of(held);
  const Places places(named.ids, named_count, padding);
  const Places held_places(held.ids, held_count, padding);
  const int64_t fresh = named.size > 0 ? ranks[named.size - 1] : 0;
  const int64_t entries = named.size + held.size;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < entries; i += stride) {
    if (i == 0) {
      out.counts[0] = named_count - (places.padding_at < named_count);
      out.counts[1] = out.counts[0] - fresh;
      out.counts[2] = fresh;
      out.counts[3] = ranks[entries - 1] - fresh;
    }
    if (i < named.size) {
      if (i >= named_count || i == places.padding_at) continue;
      const int64_t id = named.ids[i], place = places.of(i);
      const int64_t rank = ranks[i] - apart[i];
      if (apart[i]) {
        out.arriving_ids[rank] = id;
        out.arriving_places[rank] = place;
      } else {
        out.stay_places[place - rank] = place;
        out.stay_from[place - rank] = held_places.of(lower_bound(held.ids, held_count, id));
      }
    } else if (apart[i]) {
      const int64_t rank = ranks[i] - 1 - fresh;
      out.leaving_ids[rank] = held.ids[i - named.size];
      out.leaving_places[rank] = held_places.of(i - named.size);
    }
  }
}

}  // namespace

int64_t compare_scratch_bytes(int64_t named_size, int64_t held_size) {
  const int64_t entries = named_size + held_size;
  return padded(sizeof(int64_t)) + 2 * padded(entries * 4) + count_scratch_bytes(entries);
}

int launch_compare_rows(SortedIds named, const SortedIds& held, int64_t padding,
                        const Fitting* fitting, const ComparedRows& out, void* scratch,
                        int64_t scratch_bytes, void* stream) {
  auto on = static_cast<cudaStream_t>(stream);
  const int64_t entries = named.size + held.size;
  const int64_t list_bytes = padded(entries * 4);
  auto* count = static_cast<int64_t*>(scratch);
  char* memory = static_cast<char*>(scratch) + padded(sizeof(int64_t));
  auto* apart = reinterpret_cast<int32_t*>(memory);
  auto* ranks = reinterpret_cast<int32_t*>(memory + list_bytes);
  if (fitting != nullptr) {
    decide_kernel<<<1, 1, 0, on>>>(named, padding, *fitting, count);
    named.count = count;
  }
  if (entries == 0) return cudaMemsetAsync(out.counts, 0, 4 * sizeof(int64_t), on);
  const int blocks = blocks_for_ids(entries);
  mark_apart_kernel<<<blocks, kIdThreads, 0, on>>>(named, held, padding, apart);
  const int error = count_marks(apart, entries, ranks, memory + 2 * list_bytes,
                                scratch_bytes - padded(sizeof(int64_t)) - 2 * list_bytes, stream);
  if (error != cudaSuccess) return error;
  write_compared_kernel<<<blocks, kIdThreads, 0, on>>>(named, held, padding, apart, ranks, out);
  return cudaGetLastError();
}

}  // namespace speedtorch

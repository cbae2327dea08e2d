// Kernels that compare two ascending lists of ids. Called by diff_ids.cpp. All data is in GPU
// memory, except for the fault, which may be in mapped host memory. Each id costs a binary search
// in the other list, and each id to keep another one.

#include <cuda_runtime.h>

#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

// Clamps the count, so that a count not written by plan_rows causes no read out of bounds.
__device__ int64_t count_of(const SortedIds& list) {
  return list.count == nullptr ? list.size : clamped(*list.count, list.size);
}

__device__ bool contains(const SortedIds& list, int64_t count, int64_t id) {
  const int64_t at = lower_bound(list.ids, count, id);
  return at < count && list.ids[at] == id;
}

// A thread owns entries of both lists, which are numbered consecutively, a grid stride apart.
// Writes 1 if an id is not in the other list. The first thread of the grid writes the number of
// compared ids.
__global__ void mark_apart_kernel(SortedIds named, SortedIds held, Fitting fitting, int32_t* apart,
                                  int64_t* compared) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const bool fits = fitting.status == nullptr || fitting.fits();
  const int64_t named_count = fits ? count_of(named) : 0, held_count = count_of(held);
  if (first == 0) *compared = named_count;
  const int64_t entries = named.size + held.size;
  for (int64_t i = first; i < entries; i += stride) {
    if (i < named.size) {
      apart[i] = i < named_count && !contains(held, held_count, named.ids[i]);
    } else {
      const int64_t entry = i - named.size;
      apart[i] = entry < held_count && !contains(named, named_count, held.ids[entry]);
    }
  }
}

// Called by one thread after all other threads have read the fields that this writes.
__device__ void record_misfit(const Fitting& fitting) {
  const Misfit why = fitting.record();
  if (why == Misfit::kNone) return;
  __threadfence_system();
  *static_cast<volatile int64_t*>(&fitting.fault->kind) = static_cast<int64_t>(why);
}

// A thread owns entries of both lists, a grid stride apart. ranks[i] is the sum of apart[0] to
// apart[i].
__global__ void write_diff_kernel(SortedIds named, SortedIds held, Fitting fitting,
                                  const int32_t* apart, const int32_t* ranks,
                                  const int64_t* compared, IdDiff out) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t named_count = *compared, held_count = count_of(held);
  const int64_t entries = named.size + held.size;
  const int64_t loaded = named.size > 0 ? ranks[named.size - 1] : 0;
  if (first == 0) {
    const bool has_padding = out.padding >= 0;
    if (has_padding) {
      out.load_ids[loaded] = out.padding;
      out.load_places[loaded] = named_count;
    }
    out.counts[0] = named_count;
    out.counts[1] = named_count - loaded;
    out.counts[2] = loaded + has_padding;
    out.counts[3] = entries > 0 ? ranks[entries - 1] - loaded : 0;
    if (fitting.status != nullptr) record_misfit(fitting);
  }
  for (int64_t i = first; i < entries; i += stride) {
    if (i < named_count) {
      const int64_t rank = ranks[i] - apart[i];
      if (apart[i]) {
        out.load_ids[rank] = named.ids[i];
        out.load_places[rank] = i;
      } else {
        out.keep_places[i - rank] = i;
        out.keep_from[i - rank] = lower_bound(held.ids, held_count, named.ids[i]);
      }
    } else if (i >= named.size && apart[i]) {
      const int64_t rank = ranks[i] - 1 - loaded;
      out.evict_ids[rank] = held.ids[i - named.size];
      out.evict_places[rank] = i - named.size;
    }
  }
}

}  // namespace

int64_t diff_scratch_bytes(int64_t named_size, int64_t held_size) {
  const int64_t entries = named_size + held_size;
  return padded(sizeof(int64_t)) + 2 * padded(entries * 4) + count_scratch_bytes(entries);
}

int launch_diff_ids(const SortedIds& named, const SortedIds& held, const Fitting* fitting,
                    const IdDiff& out, void* scratch, int64_t scratch_bytes, void* stream) {
  auto on = static_cast<cudaStream_t>(stream);
  const int64_t entries = named.size + held.size;
  const int64_t list_bytes = padded(entries * 4);
  auto* compared = static_cast<int64_t*>(scratch);
  char* memory = static_cast<char*>(scratch) + padded(sizeof(int64_t));
  auto* apart = reinterpret_cast<int32_t*>(memory);
  auto* ranks = reinterpret_cast<int32_t*>(memory + list_bytes);
  const Fitting fit = fitting != nullptr ? *fitting : Fitting{};
  const int blocks = entries > 0 ? blocks_for_ids(entries) : 1;
  mark_apart_kernel<<<blocks, kIdThreads, 0, on>>>(named, held, fit, apart, compared);
  if (entries > 0) {
    const int error = count_marks(apart, entries, ranks, memory + 2 * list_bytes,
                                  scratch_bytes - padded(sizeof(int64_t)) - 2 * list_bytes, stream);
    if (error != cudaSuccess) return error;
  }
  write_diff_kernel<<<blocks, kIdThreads, 0, on>>>(named, held, fit, apart, ranks, compared, out);
  return cudaGetLastError();
}

}  // namespace speedtorch

// Kernels that split the lists of a swap into rows that cross the link and rows in a cache. Called
// by optimizer_state_swap.cpp after launch_swap_match. All data is in GPU memory.

#include <cuda_runtime.h>

#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

// The number of valid entries of a list whose status match_kernel has written.
__device__ int64_t count_of(const PlanView& list) {
  return clamped(list.status->distinct, list.count);
}

// The slot of a row that match_kernel has accepted, or -1.
__device__ int64_t slot_of(const HotRows& hot, int64_t id) {
  const int64_t slot = hot.rows[id].slot;
  return is_outside(slot, hot.slots) ? -1 : slot;
}

// A thread owns entries of both lists, which are numbered consecutively, a grid stride apart.
// Writes 1 if a row crosses the link. Also counts the loads of each row; no row is in a list twice.
__global__ void mark_host_kernel(PlanView evict, PlanView load, SwapScratch scratch, HotRows hot,
                                 int32_t* in_host) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t evicted = count_of(evict), loaded = count_of(load);
  for (int64_t i = first; i < evict.count + load.count; i += stride) {
    const int64_t m = i - evict.count;
    bool crosses = false;
    if (m < 0) {
      crosses = i < evicted && !scratch.is_kept[i] && slot_of(hot, evict.unique[i]) < 0;
    } else if (m < loaded && scratch.load_from[m] == kFromHost) {
      hot.rows[load.unique[m]].uses += 1;
      crosses = slot_of(hot, load.unique[m]) < 0;
    }
    in_host[i] = crosses;
  }
}

// Writes entry k of a split list.
__device__ void put(const PlanView& list, int64_t k, int64_t id, int64_t place) {
  list.unique[k] = id;
  list.order[k] = place;
}

// A thread owns entries of both lists, a grid stride apart. ranks[i] is the sum of in_host[0] to
// in_host[i]. Rows that do not cross the link, including rows that are not moved, go to the lists
// of the cache.
__global__ void part_lists_kernel(PlanView evict, PlanView load, SwapScratch scratch, HotRows hot,
                                  const int32_t* in_host, const int32_t* ranks, SwapLists host,
                                  SwapLists cached, int64_t rows) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t evicted = count_of(evict), loaded = count_of(load);
  const int64_t entries = evict.count + load.count;
  const int64_t host_evicted = evict.count > 0 ? ranks[evict.count - 1] : 0;
  if (first == 0) {
    const int64_t host_loaded = (entries > 0 ? ranks[entries - 1] : 0) - host_evicted;
    *host.evict.status = status_of_distinct(host_evicted, rows);
    *host.load.status = status_of_distinct(host_loaded, rows);
    *cached.evict.status = status_of_distinct(evicted - host_evicted, hot.slots);
    *cached.load.status = status_of_distinct(loaded - host_loaded, hot.slots);
  }
  for (int64_t i = first; i < entries; i += stride) {
    const int64_t rank = ranks[i] - in_host[i];
    if (i < evict.count) {
      if (i >= evicted) continue;
      const int64_t id = evict.unique[i], place = evict.place(i);
      if (in_host[i]) {
        put(host.evict, rank, id, place);
        host.scratch.is_kept[rank] = false;
      } else {
        const bool is_kept = scratch.is_kept[i];
        put(cached.evict, i - rank, is_kept ? 0 : slot_of(hot, id), place);
        cached.scratch.is_kept[i - rank] = is_kept;
      }
      continue;
    }
    const int64_t m = i - evict.count, host_rank = rank - host_evicted;
    if (m >= loaded) continue;
    const int64_t id = load.unique[m], place = load.place(m), from = scratch.load_from[m];
    if (in_host[i]) {
      put(host.load, host_rank, id, place);
      host.scratch.load_from[host_rank] = from;
    } else {
      put(cached.load, m - host_rank, from == kFromHost ? slot_of(hot, id) : 0, place);
      cached.scratch.load_from[m - host_rank] = from;
    }
  }
}

// Divides the memory that the caller allocated.
class MemoryParts {
 public:
  explicit MemoryParts(void* memory) : next_(static_cast<char*>(memory)) {}

  template <typename T>
  T* take(int64_t count) {
    auto* part = reinterpret_cast<T*>(next_);
    next_ += padded(count * static_cast<int64_t>(sizeof(T)));
    return part;
  }

 private:
  char* next_;
};

SwapLists lists_of(MemoryParts& parts, int64_t evict_count, int64_t load_count) {
  SwapLists lists{};
  lists.scratch.checked = parts.take<CheckedLists>(1);
  lists.scratch.load_from = parts.take<int64_t>(load_count);
  lists.scratch.is_kept = parts.take<uint8_t>(evict_count);
  for (PlanView* list : {&lists.evict, &lists.load}) {
    list->count = list == &lists.evict ? evict_count : load_count;
    list->unique = parts.take<int64_t>(list->count);
    list->order = parts.take<int64_t>(list->count);
  }
  lists.evict.status = &lists.scratch.checked->evict;
  lists.load.status = &lists.scratch.checked->load;
  return lists;
}

}  // namespace

int64_t part_lists_bytes(int64_t evict_count, int64_t load_count) {
  const int64_t entries = evict_count + load_count;
  const int64_t lists = padded(sizeof(CheckedLists)) + padded(evict_count) +
                        2 * padded(evict_count * 8) + 3 * padded(load_count * 8);
  return 2 * lists + 2 * padded(entries * 4) + count_scratch_bytes(entries);
}

int launch_part_lists(const PlanView& evict, const PlanView& load, const SwapScratch& scratch,
                      int64_t rows, const HotRows& hot, SwapLists* host, SwapLists* cached,
                      void* memory, void* stream) {
  auto on = static_cast<cudaStream_t>(stream);
  MemoryParts parts(memory);
  *host = lists_of(parts, evict.count, load.count);
  *cached = lists_of(parts, evict.count, load.count);
  const int64_t entries = evict.count + load.count;
  auto* in_host = parts.take<int32_t>(entries);
  auto* ranks = parts.take<int32_t>(entries);
  const int blocks = entries > 0 ? blocks_for_ids(entries) : 1;
  mark_host_kernel<<<blocks, kIdThreads, 0, on>>>(evict, load, scratch, hot, in_host);
  if (entries > 0) {
    const int error = count_marks(in_host, entries, ranks, parts.take<char>(0),
                                  count_scratch_bytes(entries), stream);
    if (error != cudaSuccess) return error;
  }
  part_lists_kernel<<<blocks, kIdThreads, 0, on>>>(evict, load, scratch, hot, in_host, ranks, *host,
                                                   *cached, rows);
  return cudaGetLastError();
}

}  // namespace speedtorch

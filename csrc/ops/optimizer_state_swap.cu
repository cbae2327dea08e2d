// Kernels of optimizer_state_swap: evict the rows of one list to the host while the rows of another
// are loaded. Called by optimizer_state_swap.cpp.

#include "move/row_copy.cuh"
#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

constexpr int kMatchThreads = 256;

// True if the list names ids that are out of range or stand in it twice.
__device__ bool is_bad(const PlanStatus& status, int64_t rows) {
  return is_blocked(status, rows) || status.distinct != status.count;
}

__device__ void report_bad(const Report& about, const PlanStatus& status) {
  if (is_blocked(status, about.rows)) {
    report_blocked(about, status);
  } else if (status.distinct >= 0) {  // else match_kernel has reported the error
    report(about, IdError::kRepeated, status.repeat_id, status.repeat_position,
           status.count - status.distinct, status.count);
  }
}

// Entries of a list, of one that is not bad: those that count.
__device__ int64_t count_of(const PlanView& list) { return min(list.status->distinct, list.count); }

// The same of a list with places. A count that is none stands for no entry.
__device__ int64_t count_of(const PlanView& list, const int64_t* count) {
  if (count == nullptr) return list.count;
  return is_outside(*count, list.count + 1) ? 0 : *count;
}

// Where an id stands in a list, or -1.
__device__ int64_t find(const PlanView& list, int64_t id) {
  const int64_t at = lower_bound(list.unique, list.count, id);
  return at < list.count && list.unique[at] == id ? at : -1;
}

__device__ bool is_good(const PlanView& list, int64_t m, int64_t rows, int64_t side_rows) {
  return !is_outside(list.unique[m], rows) && !is_outside(list.order[m], side_rows);
}

__device__ void report_entry(const PlanView& list, int64_t m, IdError kind, int64_t bad_count,
                             int64_t side_rows, Report about) {
  const bool is_place = kind == IdError::kBadPlace;
  if (is_place) about.rows = side_rows;
  report(about, kind, is_place ? list.order[m] : list.unique[m], m, bad_count, list.count);
}

// Whether entry m names a row and a place. Otherwise adds it to `found`, or without that records
// the error. Ids must ascend only where errors are added.
__device__ bool check(const PlanView& list, int64_t m, int64_t side_rows, const Report& about,
                      BadEntries* found) {
  const int64_t id = list.unique[m];
  IdError kind = IdError::kOutOfRange;
  if (!is_outside(id, about.rows)) {
    const bool unordered = found != nullptr && m > 0 && id <= list.unique[m - 1];
    if (!unordered && !is_outside(list.order[m], side_rows)) return true;
    kind = unordered ? IdError::kUnordered : IdError::kBadPlace;
  }
  if (found == nullptr) {
    report_entry(list, m, kind, 1, side_rows, about);
  } else {
    if (kind == IdError::kOutOfRange) count_one(&found->bad_count);
    note_last(&found->from_end[static_cast<int>(kind)], list.count - m);
  }
  return false;
}

// By one thread, when all entries have been checked: records the error, and blocks swap_kernel.
__device__ void judge(const PlanView& list, int64_t side_rows, const Report& about,
                      const volatile BadEntries& found) {
  constexpr IdError kKinds[] = {IdError::kOutOfRange, IdError::kUnordered, IdError::kBadPlace};
  for (const IdError kind : kKinds) {
    const int64_t from_end = found.from_end[static_cast<int>(kind)];
    if (from_end == 0) continue;
    report_entry(list, list.count - from_end, kind, found.bad_count, side_rows, about);
    list.status->distinct = -1;
    return;
  }
}

// A thread owns entries of both lists in address order, and searches each in the other list. Of
// lists with places it checks its entries as well, and the first thread writes the statuses: a bad
// entry is not moved, and a row whose other entry is bad is not copied from it. Where one bad entry
// stops all others, the last block says so.
template <bool kPlaced>
__global__ void match_kernel(PlanView evict, PlanView load, PlacedLists placed, Report evicting,
                             Report loading, SwapScratch scratch) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t rows = evicting.rows;
  evict.count = kPlaced ? count_of(evict, placed.evict_count) : count_of(evict);
  load.count = kPlaced ? count_of(load, placed.load_count) : count_of(load);
  if (kPlaced && first == 0) {
    *evict.status = status_of_distinct(evict.count, rows);
    *load.status = status_of_distinct(load.count, rows);
  }
  BadEntries* bad_evict = placed.all_or_none ? &scratch.checked->bad_evict : nullptr;
  BadEntries* bad_load = placed.all_or_none ? &scratch.checked->bad_load : nullptr;
  for (int64_t m = first; m < load.count; m += stride) {
    const int64_t at = find(evict, load.unique[m]);
    int64_t from = at < 0 ? kFromHost : evict.order[at];
    if (kPlaced && !check(load, m, placed.arriving_rows, loading, bad_load)) from = kNotMoved;
    if (kPlaced && at >= 0 && !is_good(evict, at, rows, placed.leaving_rows)) from = kNotMoved;
    scratch.arrives_from[m] = from;
  }
  for (int64_t m = first; m < evict.count; m += stride) {
    const int64_t at = find(load, evict.unique[m]);
    bool stays = placed.evict_count == nullptr && at >= 0;
    if (kPlaced && stays) stays = is_good(load, at, rows, placed.arriving_rows);
    if (kPlaced && !check(evict, m, placed.leaving_rows, evicting, bad_evict)) stays = true;
    scratch.stays[m] = stays;
  }
  if (!kPlaced || !placed.all_or_none) return;
  __threadfence();  // before this block counts as done
  __syncthreads();
  if (threadIdx.x != 0) return;
  auto* done = reinterpret_cast<unsigned long long*>(&scratch.checked->blocks_done);
  if (atomicAdd(done, 1ull) + 1 < gridDim.x) return;
  __threadfence();
  judge(evict, placed.leaving_rows, evicting, *bad_evict);
  judge(load, placed.arriving_rows, loading, *bad_load);
}

struct Fields {
  SwapField field[kFieldsPerLaunch];
  int64_t first_vec[kFieldsPerLaunch + 1];  // a record's vectors are numbered across its fields
  int count;
};

// How rows of the host are found: those of one table, or those of several, of which a row is in
// none (-1) if the table is not among them.
struct OneTable {
  __device__ int table_of(int64_t) const { return 0; }
  __device__ char* row(const SwapField& field, int, int, int64_t id) const {
    return field.host.base + id * field.host.stride_bytes;
  }
};

struct SomeTables {
  SwapTables all;
  int fields;

  __device__ int table_of(int64_t id) const {
    if (id < all.firsts[0] || id >= all.firsts[all.count]) return -1;
    // The first that begins after the row, less one: tables without rows are none.
    return static_cast<int>(lower_bound(all.firsts, all.count, id + 1)) - 1;
  }
  __device__ char* row(const SwapField&, int f, int table, int64_t id) const {
    const HostPlace& place = all.places[table * fields + f];
    return place.base + id * place.stride_bytes;
  }
};

// What a launch may be given before CUDA 12.1.
static_assert(sizeof(Fields) + sizeof(SomeTables) + 2 * sizeof(PlanView) + sizeof(SwapScratch) +
                  2 * sizeof(Report) + 2 * sizeof(int64_t) <=
              4096);

// A group of lanes owns kRowsInFlight entries of both lists at a time; entry m of each list is the
// m-th in address order, so that both directions work on the same neighbourhood of the table and
// share its pages. Loads of all entries come before their stores. No row is read and written at
// once: a row in both lists is not read from the host.
// `blocks` blocks work on the lists; this is one of them.
template <typename Vec, typename Tables>
__device__ void swap_rows(const Fields& fields, const Tables& tables, const PlanView& evict,
                          const PlanView& load, const SwapScratch& scratch, int lanes,
                          const Report& evicting, const Report& loading, int64_t block,
                          int64_t blocks) {
  const int64_t thread = block * blockDim.x + threadIdx.x;
  const bool bad_evict = is_bad(*evict.status, evicting.rows),
             bad_load = is_bad(*load.status, loading.rows);
  if (bad_evict || bad_load) {
    if (thread == 0)
      bad_evict ? report_bad(evicting, *evict.status) : report_bad(loading, *load.status);
    return;
  }
  const int64_t groups = blocks * blockDim.x / lanes;
  const int64_t group = thread / lanes;
  const int lane = static_cast<int>(thread % lanes);
  if (group >= groups) return;
  const int64_t evict_count = count_of(evict), load_count = count_of(load);
  const int64_t entries = max(evict_count, load_count);
  const int64_t vecs = fields.first_vec[fields.count];
  for (int64_t first = group; first < entries; first += groups * kRowsInFlight) {
    int64_t leaves_to[kRowsInFlight], leaves_from[kRowsInFlight];
    int64_t arrives_to[kRowsInFlight], arrives_from[kRowsInFlight], loaded[kRowsInFlight];
    int leaves_table[kRowsInFlight], loaded_table[kRowsInFlight];
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int64_t m = first + u * groups;
      bool leaves = m < evict_count && !scratch.stays[m];
      leaves_to[u] = leaves ? evict.unique[m] : -1;
      leaves_table[u] = leaves ? tables.table_of(leaves_to[u]) : -1;
      leaves = leaves_table[u] >= 0;
      leaves_from[u] = leaves ? evict.order[m] : -1;
      // Three loads that do not wait for each other.
      const bool arrives = m < load_count;
      loaded[u] = arrives ? load.unique[m] : -1;
      arrives_to[u] = arrives ? load.order[m] : -1;
      arrives_from[u] = arrives ? scratch.arrives_from[m] : kNotMoved;
      loaded_table[u] = arrives ? tables.table_of(loaded[u]) : -1;
      if (loaded_table[u] < 0 || arrives_from[u] == kNotMoved) arrives_to[u] = -1;
    }
    int f = 0;
    for (int64_t vec = lane; vec < vecs; vec += lanes) {
      while (vec >= fields.first_vec[f + 1]) ++f;
      const SwapField field = fields.field[f];
      const int64_t column = vec - fields.first_vec[f], row_bytes = field.host.row_bytes;
      Vec in[kRowsInFlight], out[kRowsInFlight];
#pragma unroll
      for (int u = 0; u < kRowsInFlight; ++u) {
        if (arrives_to[u] >= 0) {
          const char* source = arrives_from[u] >= 0
                                   ? field.leaving.base + arrives_from[u] * row_bytes
                                   : tables.row(field, f, loaded_table[u], loaded[u]);
          in[u] = load_streaming<Vec>(source, column);
        }
        if (leaves_from[u] >= 0)
          out[u] = load_streaming<Vec>(field.leaving.base + leaves_from[u] * row_bytes, column);
      }
#pragma unroll
      for (int u = 0; u < kRowsInFlight; ++u) {
        if (leaves_from[u] >= 0) {
          store_streaming<Vec>(tables.row(field, f, leaves_table[u], leaves_to[u]), column, out[u]);
        }
        if (arrives_to[u] >= 0) {
          store_streaming<Vec>(field.arriving.base + arrives_to[u] * row_bytes, column, in[u]);
        }
      }
    }
  }
}

template <typename Vec, typename Tables>
__global__ void __launch_bounds__(kMoverThreads)
    swap_kernel(const __grid_constant__ Fields fields, const __grid_constant__ Tables tables,
                PlanView evict, PlanView load, SwapScratch scratch, int lanes, Report evicting,
                Report loading) {
  swap_rows<Vec>(fields, tables, evict, load, scratch, lanes, evicting, loading, blockIdx.x,
                 gridDim.x);
}

// Lists of one table, and how its rows are moved.
struct Part {
  Fields fields;
  PlanView evict, load;
  SwapScratch scratch;
  int lanes;
  int64_t rows;
};

static_assert(2 * sizeof(Part) + sizeof(int) + sizeof(ErrorRecord*) <= 4096);

// The first blocks work on rows that cross the link, which few can keep busy, and the others on
// rows of the GPU's own memory: at the same time.
template <typename Vec>
__global__ void __launch_bounds__(kMoverThreads)
    swap_parts_kernel(const __grid_constant__ Part host, const __grid_constant__ Part cached,
                      int host_blocks, ErrorRecord* record) {
  const bool is_host = blockIdx.x < host_blocks;
  const Part& part = is_host ? host : cached;
  const Report evicting{record, Op::kSwap, IdList::kEvict, part.rows};
  const Report loading{record, Op::kSwap, IdList::kLoad, part.rows};
  swap_rows<Vec>(part.fields, OneTable{}, part.evict, part.load, part.scratch, part.lanes, evicting,
                 loading, is_host ? blockIdx.x : blockIdx.x - host_blocks,
                 is_host ? host_blocks : gridDim.x - host_blocks);
}

// Bits of all addresses, strides and row lengths, or'ed together; adds up the bytes of a record.
uint64_t bits_of(const SwapField* fields, int field_count, int64_t* record_bytes) {
  uint64_t bits = 0;
  for (int f = 0; f < field_count; ++f) {
    const SwapField& field = fields[f];
    bits |= field.host.bits() | static_cast<uint64_t>(field.host.row_bytes) |
            reinterpret_cast<uint64_t>(field.leaving.base) |
            reinterpret_cast<uint64_t>(field.arriving.base);
    *record_bytes += field.host.row_bytes;
  }
  return bits;
}

Fields fields_of(const SwapField* fields, int field_count, int vec_bytes) {
  Fields all{};
  all.count = field_count;
  for (int f = 0; f < field_count; ++f) {
    all.field[f] = fields[f];
    all.first_vec[f + 1] = all.first_vec[f] + fields[f].host.row_bytes / vec_bytes;
  }
  return all;
}

}  // namespace

int launch_swap_match(const PlanView& evict, const PlanView& load, const PlacedLists* placed,
                      int64_t rows, const SwapScratch& scratch, ErrorRecord* record, void* stream) {
  auto on = static_cast<cudaStream_t>(stream);
  const int64_t longer = max(evict.count, load.count);
  if (longer == 0 && placed == nullptr) return cudaSuccess;
  if (placed != nullptr && placed->all_or_none) {
    const cudaError_t error = cudaMemsetAsync(scratch.checked, 0, sizeof(CheckedLists), on);
    if (error != cudaSuccess) return error;
  }
  const int blocks = longer == 0 ? 1 : shares_of(longer, kMatchThreads, kDeviceBlocks);
  auto* kernel = placed == nullptr ? match_kernel<false> : match_kernel<true>;
  kernel<<<blocks, kMatchThreads, 0, on>>>(evict, load, placed == nullptr ? PlacedLists{} : *placed,
                                           Report{record, Op::kSwap, IdList::kEvict, rows},
                                           Report{record, Op::kSwap, IdList::kLoad, rows}, scratch);
  return cudaGetLastError();
}

int launch_swap(const SwapField* fields, int field_count, const SwapTables* tables, int64_t rows,
                const PlanView& evict, const PlanView& load, const SwapScratch& scratch,
                int most_blocks, ErrorRecord* record, void* stream) {
  uint64_t bits = 0;
  for (int p = 0; tables != nullptr && p < tables->count * field_count; ++p) {
    const HostPlace& place = tables->places[p];
    bits |= reinterpret_cast<uint64_t>(place.base) | static_cast<uint64_t>(place.stride_bytes);
  }
  int64_t record_bytes = 0;
  bits |= bits_of(fields, field_count, &record_bytes);
  const MoveShape shape = move_shape(record_bytes, bits, max(evict.count, load.count), most_blocks);
  const Fields all = fields_of(fields, field_count, shape.vec_bytes);
  const Report evicting{record, Op::kSwap, IdList::kEvict, rows};
  const Report loading{record, Op::kSwap, IdList::kLoad, rows};
  with_vec_type(shape.vec_bytes, [&](auto vec) {
    const auto launch = [&](const auto& found) {
      swap_kernel<decltype(vec)>
          <<<shape.blocks, kMoverThreads, 0, static_cast<cudaStream_t>(stream)>>>(
              all, found, evict, load, scratch, shape.lanes_per_row, evicting, loading);
    };
    tables == nullptr ? launch(OneTable{}) : launch(SomeTables{*tables, field_count});
  });
  return cudaGetLastError();
}

int launch_swap_parts(const SwapPart& host, const SwapPart& cached, int field_count,
                      int most_host_blocks, ErrorRecord* record, void* stream) {
  int64_t record_bytes = 0, same = 0;
  const uint64_t bits =
      bits_of(host.fields, field_count, &record_bytes) | bits_of(cached.fields, field_count, &same);
  auto shape_of = [&](const SwapPart& part, int most_blocks) {
    const int64_t entries = max(part.lists.evict.count, part.lists.load.count);
    return move_shape(record_bytes, bits, entries, most_blocks);
  };
  auto part_of = [&](const SwapPart& part, const MoveShape& shape) {
    return Part{fields_of(part.fields, field_count, shape.vec_bytes),
                part.lists.evict,
                part.lists.load,
                part.lists.scratch,
                shape.lanes_per_row,
                part.rows};
  };
  const MoveShape over_link = shape_of(host, most_host_blocks);
  const MoveShape on_gpu = shape_of(cached, kDeviceBlocks);
  with_vec_type(over_link.vec_bytes, [&](auto vec) {
    swap_parts_kernel<decltype(vec)>
        <<<over_link.blocks + on_gpu.blocks, kMoverThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            part_of(host, over_link), part_of(cached, on_gpu), over_link.blocks, record);
  });
  return cudaGetLastError();
}

}  // namespace speedtorch

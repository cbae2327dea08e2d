// Kernels of optimizer_state_swap: evict the rows of one list to the host while the rows of another
// are loaded. Called by optimizer_state_swap.cpp.

#include "move/row_mover.cuh"
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
  } else if (status.distinct >= 0) {  // else slotted_ids.cu has reported the error
    report(about, IdError::kRepeated, status.repeat_id, status.repeat_position,
           status.count - status.distinct, status.count);
  }
}

// Entries of a list, of one that is not bad: those that count.
__device__ int64_t count_of(const PlanView& list) { return min(list.status->distinct, list.count); }

// Where an id stands among the first `count` of a list, or -1.
__device__ int64_t find(const PlanView& list, int64_t count, int64_t id) {
  const int64_t at = lower_bound(list.unique, count, id);
  return at < count && list.unique[at] == id ? at : -1;
}

constexpr int64_t kFromHost = -1, kNotMoved = -2;  // of SwapScratch::arrives_from

__device__ bool is_good(const PlanView& list, int64_t m, int64_t rows, int64_t side_rows) {
  return !is_outside(list.unique[m], rows) && !is_outside(list.order[m], side_rows);
}

// Whether entry m names a row and a place. Records the error otherwise.
__device__ bool check(const PlanView& list, int64_t m, int64_t side_rows, Report about) {
  if (is_good(list, m, about.rows, side_rows)) return true;
  const bool is_id = is_outside(list.unique[m], about.rows);
  if (!is_id) about.rows = side_rows;
  report(about, is_id ? IdError::kOutOfRange : IdError::kBadPlace,
         is_id ? list.unique[m] : list.order[m], m, 1, list.count);
  return false;
}

// A thread owns entries of both lists in address order, and searches each in the other list. Of
// unchecked lists it checks its entries as well, and the first thread writes the statuses: a bad
// entry is not moved, and a row whose other entry is bad is not copied from it.
template <bool kChecked>
__global__ void match_kernel(PlanView evict, PlanView load, bool write_through,
                             UncheckedLists lists, SwapScratch scratch) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t rows = lists.table_rows;
  if (!kChecked && first == 0) {
    *evict.status = status_of_distinct(evict.count, rows);
    *load.status = status_of_distinct(load.count, rows);
  }
  const int64_t evict_count = kChecked ? count_of(evict) : evict.count;
  const int64_t load_count = kChecked ? count_of(load) : load.count;
  const Report evicting{lists.record, Op::kSwap, IdList::kEvict, rows};
  const Report loading{lists.record, Op::kSwap, IdList::kLoad, rows};
  for (int64_t m = first; m < load_count; m += stride) {
    const int64_t at = find(evict, evict_count, load.unique[m]);
    int64_t from = at < 0 ? kFromHost : evict.order[at];
    if (!kChecked && !check(load, m, lists.arriving_rows, loading)) from = kNotMoved;
    if (!kChecked && at >= 0 && !is_good(evict, at, rows, lists.leaving_rows)) from = kNotMoved;
    scratch.arrives_from[m] = from;
  }
  for (int64_t m = first; m < evict_count; m += stride) {
    const int64_t at = find(load, load_count, evict.unique[m]);
    bool stays = !write_through && at >= 0;
    if (!kChecked && stays) stays = is_good(load, at, rows, lists.arriving_rows);
    if (!kChecked && !check(evict, m, lists.leaving_rows, evicting)) stays = true;
    scratch.stays[m] = stays;
  }
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
template <typename Vec, typename Tables>
__global__ void __launch_bounds__(kMoverThreads)
    swap_kernel(const __grid_constant__ Fields fields, const __grid_constant__ Tables tables,
                PlanView evict, PlanView load, SwapScratch scratch, int lanes, Report evicting,
                Report loading) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const bool bad_evict = is_bad(*evict.status, evicting.rows),
             bad_load = is_bad(*load.status, loading.rows);
  if (bad_evict || bad_load) {
    if (thread == 0)
      bad_evict ? report_bad(evicting, *evict.status) : report_bad(loading, *load.status);
    return;
  }
  const int64_t groups = int64_t{gridDim.x} * blockDim.x / lanes;
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

}  // namespace

int launch_swap_match(const PlanView& evict, const PlanView& load, bool write_through,
                      const UncheckedLists* unchecked, const SwapScratch& scratch, void* stream) {
  const int64_t longer = max(evict.count, load.count);
  if (longer == 0 && unchecked == nullptr) return cudaSuccess;
  const int blocks = longer == 0 ? 1 : shares_of(longer, kMatchThreads, kDeviceBlocks);
  auto* kernel = unchecked == nullptr ? match_kernel<true> : match_kernel<false>;
  kernel<<<blocks, kMatchThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      evict, load, write_through, unchecked == nullptr ? UncheckedLists{} : *unchecked, scratch);
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
  for (int f = 0; f < field_count; ++f) {
    const SwapField& field = fields[f];
    bits |= field.host.bits() | static_cast<uint64_t>(field.host.row_bytes) |
            reinterpret_cast<uint64_t>(field.leaving.base) |
            reinterpret_cast<uint64_t>(field.arriving.base);
    record_bytes += field.host.row_bytes;
  }
  const MoveShape shape = move_shape(record_bytes, bits, max(evict.count, load.count), most_blocks);
  Fields all{};
  all.count = field_count;
  for (int f = 0; f < field_count; ++f) {
    all.field[f] = fields[f];
    all.first_vec[f + 1] = all.first_vec[f] + fields[f].host.row_bytes / shape.vec_bytes;
  }
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

}  // namespace speedtorch

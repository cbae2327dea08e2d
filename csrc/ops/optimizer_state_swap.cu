// Kernels of optimizer_state_swap: evict the rows of one list to the host while the rows of another
// are loaded. Called by optimizer_state_swap.cpp.

#include <type_traits>

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

// A field as a launch moves it.
struct MovedField {
  char* host;
  int64_t host_stride_bytes;
  const char* leaving;
  char* arriving;
  int64_t side_row_bytes;
  int vec_bytes;  // of one access of the host's rows, where fields differ in it
  Stored stored;
};

struct Fields {
  MovedField field[kFieldsPerLaunch];
  int64_t first_vec[kFieldsPerLaunch + 1];  // a record's vectors are numbered across its fields
  int count;
};

// How rows of the host are found: those of one table, or those of several, of which a row is in
// none (-1) if the table is not among them.
struct OneTable {
  __device__ int table_of(int64_t) const { return 0; }
  __device__ char* row(const MovedField& field, int, int, int64_t id) const {
    return field.host + id * field.host_stride_bytes;
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
  __device__ char* row(const MovedField&, int f, int table, int64_t id) const {
    const HostPlace& place = all.places[table * fields + f];
    return place.base + id * place.stride_bytes;
  }
};

// What a launch may be given before CUDA 12.1.
static_assert(sizeof(Fields) + sizeof(SomeTables) + 2 * sizeof(PlanView) + sizeof(SwapScratch) +
                  2 * sizeof(Report) + 2 * sizeof(int64_t) <=
              4096);

// The moves of a group of lanes: where rows leave from and to, and arrive from and at; negative
// where none does.
struct Moves {
  int64_t leaves_to[kRowsInFlight], leaves_from[kRowsInFlight];
  int64_t arrives_to[kRowsInFlight], arrives_from[kRowsInFlight], loaded[kRowsInFlight];
  int leaves_table[kRowsInFlight], loaded_table[kRowsInFlight];
};

// A vector of float32 numbers in twice as many bytes as Vec has.
template <typename Vec>
struct Floats {
  static constexpr int kNumbers = sizeof(Vec) / 2;
  union {
    Vec half[2];
    uint32_t number[kNumbers];
  };
};

// One vector of a side's row as the host stores it.
template <typename Vec, bool kConverts>
__device__ __forceinline__ Vec load_side(const char* row, int64_t column, Stored stored) {
  if constexpr (kConverts && sizeof(Vec) >= 2) {
    if (stored != Stored::kSame) {
      Floats<Vec> floats;
      floats.half[0] = load_streaming<Vec>(row, 2 * column);
      floats.half[1] = load_streaming<Vec>(row, 2 * column + 1);
      union {
        Vec vec;
        uint16_t number[sizeof(Vec) / 2];
      } packed;
#pragma unroll
      for (int i = 0; i < Floats<Vec>::kNumbers; ++i) {
        packed.number[i] = stored_of(floats.number[i], stored);
      }
      return packed.vec;
    }
  }
  return load_streaming<Vec>(row, column);
}

template <typename Vec, bool kConverts>
__device__ __forceinline__ void store_side(char* row, int64_t column, Vec value, Stored stored) {
  if constexpr (kConverts && sizeof(Vec) >= 2) {
    if (stored != Stored::kSame) {
      union {
        Vec vec;
        uint16_t number[sizeof(Vec) / 2];
      } packed{value};
      Floats<Vec> floats;
#pragma unroll
      for (int i = 0; i < Floats<Vec>::kNumbers; ++i) {
        floats.number[i] = float_of(packed.number[i], stored);
      }
      store_streaming<Vec>(row, 2 * column, floats.half[0]);
      store_streaming<Vec>(row, 2 * column + 1, floats.half[1]);
      return;
    }
  }
  store_streaming<Vec>(row, column, value);
}

// One column of all moves. Loads of all entries come before their stores.
template <typename Vec, bool kConverts, typename Tables>
__device__ __forceinline__ void move_column(const MovedField& field, int f, int64_t column,
                                            const Tables& tables, const Moves& moves) {
  const int64_t side_bytes = field.side_row_bytes;
  Vec in[kRowsInFlight], out[kRowsInFlight];
#pragma unroll
  for (int u = 0; u < kRowsInFlight; ++u) {
    if (moves.arrives_to[u] >= 0) {
      if (moves.arrives_from[u] >= 0) {
        in[u] = load_side<Vec, kConverts>(field.leaving + moves.arrives_from[u] * side_bytes,
                                          column, field.stored);
      } else {
        const char* row = tables.row(field, f, moves.loaded_table[u], moves.loaded[u]);
        in[u] = load_streaming<Vec>(row, column);
      }
    }
    if (moves.leaves_from[u] >= 0) {
      out[u] = load_side<Vec, kConverts>(field.leaving + moves.leaves_from[u] * side_bytes, column,
                                         field.stored);
    }
  }
#pragma unroll
  for (int u = 0; u < kRowsInFlight; ++u) {
    if (moves.leaves_from[u] >= 0) {
      char* row = tables.row(field, f, moves.leaves_table[u], moves.leaves_to[u]);
      store_streaming<Vec>(row, column, out[u]);
    }
    if (moves.arrives_to[u] >= 0) {
      store_side<Vec, kConverts>(field.arriving + moves.arrives_to[u] * side_bytes, column, in[u],
                                 field.stored);
    }
  }
}

// Stands for the type of an access where each field has its own, or stores other numbers.
struct EachItsOwn {};

// A group of lanes owns kRowsInFlight entries of both lists at a time; entry m of each list is the
// m-th in address order, so that both directions work on the same neighbourhood of the table and
// share its pages. No row is read and written at once: a row in both lists is not read from the
// host. `blocks` blocks work on the lists; this is one of them.
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
    Moves moves;
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int64_t m = first + u * groups;
      bool leaves = m < evict_count && !scratch.stays[m];
      moves.leaves_to[u] = leaves ? evict.unique[m] : -1;
      moves.leaves_table[u] = leaves ? tables.table_of(moves.leaves_to[u]) : -1;
      leaves = moves.leaves_table[u] >= 0;
      moves.leaves_from[u] = leaves ? evict.order[m] : -1;
      // Three loads that do not wait for each other.
      const bool arrives = m < load_count;
      moves.loaded[u] = arrives ? load.unique[m] : -1;
      moves.arrives_to[u] = arrives ? load.order[m] : -1;
      moves.arrives_from[u] = arrives ? scratch.arrives_from[m] : kNotMoved;
      moves.loaded_table[u] = arrives ? tables.table_of(moves.loaded[u]) : -1;
      if (moves.loaded_table[u] < 0 || moves.arrives_from[u] == kNotMoved) moves.arrives_to[u] = -1;
    }
    int f = 0;
    for (int64_t vec = lane; vec < vecs; vec += lanes) {
      while (vec >= fields.first_vec[f + 1]) ++f;
      const MovedField field = fields.field[f];
      const int64_t column = vec - fields.first_vec[f];
      if constexpr (std::is_same_v<Vec, EachItsOwn>) {
        with_vec_type(field.vec_bytes, [&](auto part) {
          move_column<decltype(part), true>(field, f, column, tables, moves);
        });
      } else {
        move_column<Vec, false>(field, f, column, tables, moves);
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

// What a field's addresses, strides and row lengths are all multiples of: their bits, or'ed.
uint64_t bits_of(const SwapField& field) {
  return field.host.bits() | static_cast<uint64_t>(field.host.row_bytes) |
         reinterpret_cast<uint64_t>(field.leaving.base) |
         reinterpret_cast<uint64_t>(field.arriving.base);
}

// How the fields of one launch are moved: all by accesses of one width, or each by its own.
struct Access {
  uint64_t bits = 0;         // of all fields
  int widest = 1;            // access of any field, in bytes
  int64_t record_bytes = 0;  // in the host
  bool converts = false;

  void add(const SwapField* fields, int field_count, uint64_t other_bits) {
    for (int f = 0; f < field_count; ++f) {
      bits |= bits_of(fields[f]) | other_bits;
      widest = max(widest, widest_access(bits_of(fields[f]) | other_bits));
      record_bytes += fields[f].host.row_bytes;
      converts |= fields[f].stored != Stored::kSame;
    }
  }
  bool is_mixed() const { return converts || widest_access(bits) < widest; }
};

Fields fields_of(const SwapField* fields, int field_count, const Access& access,
                 uint64_t other_bits) {
  Fields all{};
  all.count = field_count;
  for (int f = 0; f < field_count; ++f) {
    const SwapField& from = fields[f];
    const uint64_t bits = access.is_mixed() ? bits_of(from) | other_bits : access.bits;
    all.field[f] = {from.host.base,     from.host.stride_bytes, from.leaving.base,
                    from.arriving.base, from.side_row_bytes(),  widest_access(bits),
                    from.stored};
    all.first_vec[f + 1] = all.first_vec[f] + from.host.row_bytes / all.field[f].vec_bytes;
  }
  return all;
}

struct SwapShape {
  int lanes, blocks;
};

// Of records of so many vectors. Where fields differ, all lanes work in each turn: one number after
// 512 bytes would else take a turn of its own.
SwapShape swap_shape(int64_t vecs, const Access& access, int64_t entries, int most_blocks) {
  const int64_t turns = access.is_mixed() ? (vecs + 31) / 32 : 1;
  const int lanes = shares_of(vecs, max(int64_t{1}, turns), 32);
  return {lanes, shares_of(entries, kMoverThreads / lanes, most_blocks)};
}

// Calls `use` with a value of the type of an access.
template <typename Use>
void with_access(const Access& access, const Use& use) {
  access.is_mixed() ? use(EachItsOwn{}) : with_vec_type(widest_access(access.bits), use);
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
  uint64_t places_bits = 0;
  for (int p = 0; tables != nullptr && p < tables->count * field_count; ++p) {
    const HostPlace& place = tables->places[p];
    places_bits |=
        reinterpret_cast<uint64_t>(place.base) | static_cast<uint64_t>(place.stride_bytes);
  }
  Access access;
  access.add(fields, field_count, places_bits);
  const Fields all = fields_of(fields, field_count, access, places_bits);
  const SwapShape shape =
      swap_shape(all.first_vec[field_count], access, max(evict.count, load.count), most_blocks);
  const Report evicting{record, Op::kSwap, IdList::kEvict, rows};
  const Report loading{record, Op::kSwap, IdList::kLoad, rows};
  with_access(access, [&](auto vec) {
    const auto launch = [&](const auto& found) {
      swap_kernel<decltype(vec)>
          <<<shape.blocks, kMoverThreads, 0, static_cast<cudaStream_t>(stream)>>>(
              all, found, evict, load, scratch, shape.lanes, evicting, loading);
    };
    tables == nullptr ? launch(OneTable{}) : launch(SomeTables{*tables, field_count});
  });
  return cudaGetLastError();
}

int launch_swap_parts(const SwapPart& host, const SwapPart& cached, int field_count,
                      int most_host_blocks, ErrorRecord* record, void* stream) {
  Access access;
  for (const SwapPart* part : {&host, &cached}) access.add(part->fields, field_count, 0);
  auto part_of = [&](const SwapPart& part) {
    return Part{fields_of(part.fields, field_count, access, 0),
                part.lists.evict,
                part.lists.load,
                part.lists.scratch,
                1,
                part.rows};
  };
  auto shape_of = [&](Part& moved, const SwapPart& part, int most_blocks) {
    const int64_t entries = max(part.lists.evict.count, part.lists.load.count);
    const SwapShape shape =
        swap_shape(moved.fields.first_vec[field_count], access, entries, most_blocks);
    moved.lanes = shape.lanes;
    return shape.blocks;
  };
  Part over_link = part_of(host), on_gpu = part_of(cached);
  const int host_blocks = shape_of(over_link, host, most_host_blocks);
  const int blocks = host_blocks + shape_of(on_gpu, cached, kDeviceBlocks);
  with_access(access, [&](auto vec) {
    swap_parts_kernel<decltype(vec)>
        <<<blocks, kMoverThreads, 0, static_cast<cudaStream_t>(stream)>>>(over_link, on_gpu,
                                                                          host_blocks, record);
  });
  return cudaGetLastError();
}

}  // namespace speedtorch

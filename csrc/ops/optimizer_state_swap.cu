// Kernels of optimizer_state_swap: evict the rows of one list to the host while loading the rows of
// another. Called by optimizer_state_swap.cpp. Each moved row crosses the link once; a row in both
// lists is never read from the host.

#include "move/row_copy.cuh"
#include "move/stored_float.cuh"
#include "ops/launchers.h"
#include "plan/ids.cuh"

namespace speedtorch {
namespace {

constexpr int kMatchThreads = 256;

// True if the list has repeated ids or ids out of range.
__device__ bool is_bad(const PlanStatus& status, int64_t rows) {
  return is_blocked(status, rows) || status.distinct != status.count;
}

__device__ void report_bad(const Report& about, const PlanStatus& status) {
  if (is_blocked(status, about.rows)) {
    report_blocked(about, status);
  } else if (status.distinct >= 0) {  // else match_kernel reported the error
    report(about, IdError::kRepeated, status.repeat_id, status.repeat_position,
           status.count - status.distinct, status.count);
  }
}

// The number of valid entries of a list without errors.
__device__ int64_t count_of(const PlanView& list) { return min(list.status->distinct, list.count); }

// The same for a list with places. A count out of range means no valid entry.
__device__ int64_t count_of(const PlanView& list, const int64_t* count) {
  if (count == nullptr) return list.count;
  return is_outside(*count, list.count + 1) ? 0 : *count;
}

// The entry of an id in a list, or -1.
__device__ int64_t find(const PlanView& list, int64_t id) {
  const int64_t at = lower_bound(list.unique, list.count, id);
  return at < list.count && list.unique[at] == id ? at : -1;
}

__device__ bool is_good(const PlanView& list, const int64_t* host_rows, int64_t m, int64_t rows,
                        int64_t side_rows) {
  return !is_outside(host_rows[m], rows) && !is_outside(list.place(m), side_rows);
}

__device__ void report_entry(const PlanView& list, const int64_t* host_rows, int64_t m,
                             IdError kind, int64_t bad_count, int64_t side_rows, Report about) {
  const bool is_place = kind == IdError::kBadPlace;
  if (is_place) about.rows = side_rows;
  report(about, kind, is_place ? list.place(m) : host_rows[m], m, bad_count, list.count);
}

// Returns whether entry m has a valid host row and place. A bad entry is added to `found`, or
// reported if `found` is null. Ids must ascend only with `found`.
__device__ bool check(const PlanView& list, const int64_t* host_rows, int64_t m, int64_t side_rows,
                      const Report& about, BadEntries* found) {
  const int64_t id = list.unique[m];
  IdError kind = IdError::kOutOfRange;
  if (!is_outside(host_rows[m], about.rows)) {
    const bool unordered = found != nullptr && m > 0 && id <= list.unique[m - 1];
    if (!unordered && !is_outside(list.place(m), side_rows)) return true;
    kind = unordered ? IdError::kUnordered : IdError::kBadPlace;
  }
  if (found == nullptr) {
    report_entry(list, host_rows, m, kind, 1, side_rows, about);
  } else {
    if (kind == IdError::kOutOfRange) count_one(&found->bad_count);
    note_last(&found->from_end[static_cast<int>(kind)], list.count - m);
  }
  return false;
}

// Called by one thread after all entries are checked: reports the error and blocks swap_kernel.
__device__ void report_first_error(const PlanView& list, int64_t side_rows, const Report& about,
                                   const volatile BadEntries& found) {
  constexpr IdError kKinds[] = {IdError::kOutOfRange, IdError::kUnordered, IdError::kBadPlace};
  for (const IdError kind : kKinds) {
    const int64_t from_end = found.from_end[static_cast<int>(kind)];
    if (from_end == 0) continue;
    report_entry(list, list.unique, list.count - from_end, kind, found.bad_count, side_rows, about);
    list.status->distinct = -1;
    return;
  }
}

// A thread owns entries of both lists, a grid stride apart, and searches each id in the other list.
// For placed lists the thread also checks its entries, and the first thread of the grid writes both
// statuses. A bad entry moves no row. A row in both lists is copied from `leaving` to `arriving`,
// unless its evict entry is bad: then the row is not loaded. If one bad entry stops all moves, the
// last block to finish judges both lists.
template <bool kPlaced>
__global__ void match_kernel(PlanView evict, PlanView load, PlacedLists placed, Report evicting,
                             Report loading, SwapScratch scratch) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t rows = evicting.rows;
  const int64_t* evict_rows = placed.evict_rows == nullptr ? evict.unique : placed.evict_rows;
  const int64_t* load_rows = placed.load_rows == nullptr ? load.unique : placed.load_rows;
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
    int64_t from = at < 0 ? kFromHost : evict.place(at);
    if (kPlaced && !check(load, load_rows, m, placed.arriving_rows, loading, bad_load)) {
      from = kNotMoved;
    }
    if (kPlaced && at >= 0 && !is_good(evict, evict_rows, at, rows, placed.leaving_rows)) {
      from = kNotMoved;
    }
    scratch.load_from[m] = from;
  }
  for (int64_t m = first; m < evict.count; m += stride) {
    const int64_t at = find(load, evict.unique[m]);
    bool is_kept = placed.evict_count == nullptr && at >= 0;
    if (kPlaced && is_kept) is_kept = is_good(load, load_rows, at, rows, placed.arriving_rows);
    if (kPlaced && !check(evict, evict_rows, m, placed.leaving_rows, evicting, bad_evict)) {
      is_kept = true;
    }
    scratch.is_kept[m] = is_kept;
  }
  if (!kPlaced || !placed.all_or_none) return;
  __threadfence();  // publishes this block's results before its count
  __syncthreads();
  if (threadIdx.x != 0) return;
  auto* done = reinterpret_cast<unsigned long long*>(&scratch.checked->blocks_done);
  if (atomicAdd(done, 1ull) + 1 < gridDim.x) return;
  __threadfence();
  report_first_error(evict, placed.leaving_rows, evicting, *bad_evict);
  report_first_error(load, placed.arriving_rows, loading, *bad_load);
}

// A field in the form that a launch moves.
struct MovedField {
  char* host;
  int64_t host_stride_bytes;
  const char* leaving;
  char* arriving;
  int64_t side_row_bytes;
  int number;  // index among all fields of a row
};

struct Fields {
  MovedField field[kFieldsPerLaunch];
  int64_t first_vec[kFieldsPerLaunch + 1];  // a record's vectors are numbered across its fields
  int count;
};

// Finds rows of the host: in one table, or in several, of which a launch may have only some. A row
// of another table gets -1.
struct OneTable {
  __device__ int table_of(int64_t) const { return 0; }
  __device__ char* row(const MovedField& field, int, int64_t id) const {
    return field.host + id * field.host_stride_bytes;
  }
};

struct SomeTables {
  SwapTables all;
  int fields;

  __device__ int table_of(int64_t id) const {
    if (id < all.firsts[0] || id >= all.firsts[all.count]) return -1;
    // The first table that begins after the row, less one; this skips tables without rows.
    return static_cast<int>(lower_bound(all.firsts, all.count, id + 1)) - 1;
  }
  __device__ char* row(const MovedField& field, int table, int64_t id) const {
    const HostPlace& place = all.places[table * fields + field.number];
    return place.base + id * place.stride_bytes;
  }
};

// CUDA before 12.1 limits the arguments of a launch to 4 KiB.
static_assert(sizeof(Fields) + sizeof(SomeTables) + 2 * sizeof(PlanView) + sizeof(SwapScratch) +
                  2 * sizeof(Report) + 2 * sizeof(int64_t) <=
              4096);

// The moves of a group of lanes: sources and targets of evicted and loaded rows; negative for no
// move.
struct Moves {
  int64_t evict_to[kRowsInFlight], evict_from[kRowsInFlight];
  int64_t load_to[kRowsInFlight], load_from[kRowsInFlight], loaded[kRowsInFlight];
  int evict_table[kRowsInFlight], load_table[kRowsInFlight];
};

// Moves one column of all moves if host and side store the same type. Loads of all entries precede
// the stores.
template <typename Vec, typename Tables>
__device__ __forceinline__ void move_column(const MovedField& field, int64_t column,
                                            const Tables& tables, const Moves& moves) {
  const int64_t side_bytes = field.side_row_bytes;
  Vec in[kRowsInFlight], out[kRowsInFlight];
#pragma unroll
  for (int u = 0; u < kRowsInFlight; ++u) {
    if (moves.load_to[u] >= 0) {
      const char* source = moves.load_from[u] >= 0
                               ? field.leaving + moves.load_from[u] * side_bytes
                               : tables.row(field, moves.load_table[u], moves.loaded[u]);
      in[u] = load_streaming<Vec>(source, column);
    }
    if (moves.evict_from[u] >= 0)
      out[u] = load_streaming<Vec>(field.leaving + moves.evict_from[u] * side_bytes, column);
  }
#pragma unroll
  for (int u = 0; u < kRowsInFlight; ++u) {
    if (moves.evict_from[u] >= 0) {
      char* row = tables.row(field, moves.evict_table[u], moves.evict_to[u]);
      store_streaming<Vec>(row, column, out[u]);
    }
    if (moves.load_to[u] >= 0) {
      store_streaming<Vec>(field.arriving + moves.load_to[u] * side_bytes, column, in[u]);
    }
  }
}

// As many 16-bit numbers as Vec holds, and the same numbers as float32.
template <typename Vec>
union Halves {
  static constexpr int kNumbers = sizeof(Vec) / 2;
  Vec vec;
  uint16_t number[kNumbers];
  uint32_t pair[kNumbers < 2 ? 1 : kNumbers / 2];
};
template <typename Vec>
union Floats {
  Vec part[2];
  uint32_t number[Halves<Vec>::kNumbers];
};

template <typename Vec>
__device__ __forceinline__ Floats<Vec> load_floats(const char* row, int64_t column) {
  return {load_streaming<Vec>(row, 2 * column), load_streaming<Vec>(row, 2 * column + 1)};
}
template <typename Vec>
__device__ __forceinline__ void store_floats(char* row, int64_t column, const Floats<Vec>& value) {
  store_streaming<Vec>(row, 2 * column, value.part[0]);
  store_streaming<Vec>(row, 2 * column + 1, value.part[1]);
}

template <Stored kStored, typename Vec>
__device__ __forceinline__ Halves<Vec> halves_of(const Floats<Vec>& floats) {
  Halves<Vec> halves;
  if constexpr (sizeof(Vec) < sizeof(uint32_t)) {
    halves.number[0] = static_cast<uint16_t>(stored_pair<kStored>(floats.number[0], 0));
  } else {
#pragma unroll
    for (int i = 0; i < Halves<Vec>::kNumbers; i += 2) {
      halves.pair[i / 2] = stored_pair<kStored>(floats.number[i], floats.number[i + 1]);
    }
  }
  return halves;
}

template <Stored kStored, typename Vec>
__device__ __forceinline__ Floats<Vec> floats_of(const Halves<Vec>& halves) {
  Floats<Vec> floats;
#pragma unroll
  for (int i = 0; i < Halves<Vec>::kNumbers; ++i) {
    floats.number[i] = float_of_stored<kStored>(halves.number[i]);
  }
  return floats;
}

// The same for a field that the host stores in 16 bits. Conversions follow all loads, because a
// conversion waits for its load. Rows that move from side to side are rounded as the host would
// store them. Such rows do not cross the link and are moved last.
template <typename Vec, Stored kStored, typename Tables>
__device__ __forceinline__ void convert_column(const MovedField& field, int64_t column,
                                               const Tables& tables, const Moves& moves) {
  const int64_t side_bytes = field.side_row_bytes;
  Halves<Vec> in[kRowsInFlight];
  Floats<Vec> out[kRowsInFlight];
#pragma unroll
  for (int u = 0; u < kRowsInFlight; ++u) {
    if (moves.load_to[u] >= 0 && moves.load_from[u] < 0) {
      const char* row = tables.row(field, moves.load_table[u], moves.loaded[u]);
      in[u].vec = load_streaming<Vec>(row, column);
    }
    if (moves.evict_from[u] >= 0)
      out[u] = load_floats<Vec>(field.leaving + moves.evict_from[u] * side_bytes, column);
  }
#pragma unroll
  for (int u = 0; u < kRowsInFlight; ++u) {
    if (moves.evict_from[u] >= 0) {
      char* row = tables.row(field, moves.evict_table[u], moves.evict_to[u]);
      store_streaming<Vec>(row, column, halves_of<kStored>(out[u]).vec);
    }
    if (moves.load_to[u] >= 0 && moves.load_from[u] < 0) {
      store_floats(field.arriving + moves.load_to[u] * side_bytes, column,
                   floats_of<kStored>(in[u]));
    }
  }
#pragma unroll
  for (int u = 0; u < kRowsInFlight; ++u) {
    if (moves.load_to[u] < 0 || moves.load_from[u] < 0) continue;
    const auto floats = load_floats<Vec>(field.leaving + moves.load_from[u] * side_bytes, column);
    store_floats(field.arriving + moves.load_to[u] * side_bytes, column,
                 floats_of<kStored>(halves_of<kStored>(floats)));
  }
}

// The type of a host access and the storage format of numbers.
template <typename Vec_, Stored kStored_>
struct MoveType {
  using Vec = Vec_;
  static constexpr Stored kStored = kStored_;
};

// A group of `lanes` threads owns kRowsInFlight entries of both lists at a time; a lane owns
// columns of their rows. Entry m of each list is the m-th in address order, unless the caller
// passed host rows, so that both directions work on the same part of the table and share its pages.
// No row is read and written at once, because a row in both lists is not read from the host. The
// calling block is one of `blocks` blocks that share the lists.
template <typename MoveType, typename Tables>
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
  // Lists without places read ids instead and replace them below. A branch would keep the loads of
  // a group's rows from overlapping; measured, a large exchange then takes 1.4 times as long.
  const int64_t* evict_places = evict.order == nullptr ? evict.unique : evict.order;
  const int64_t* load_places = load.order == nullptr ? load.unique : load.order;
  for (int64_t first = group; first < entries; first += groups * kRowsInFlight) {
    Moves moves;
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int64_t m = first + u * groups;
      bool is_evicted = m < evict_count && !scratch.is_kept[m];
      moves.evict_to[u] = is_evicted ? evict.unique[m] : -1;
      moves.evict_table[u] = is_evicted ? tables.table_of(moves.evict_to[u]) : -1;
      is_evicted = moves.evict_table[u] >= 0;
      moves.evict_from[u] = is_evicted ? evict_places[m] : -1;
      // Three independent loads.
      const bool is_loaded = m < load_count;
      moves.loaded[u] = is_loaded ? load.unique[m] : -1;
      moves.load_to[u] = is_loaded ? load_places[m] : -1;
      moves.load_from[u] = is_loaded ? scratch.load_from[m] : kNotMoved;
      moves.load_table[u] = is_loaded ? tables.table_of(moves.loaded[u]) : -1;
      if (moves.load_table[u] < 0 || moves.load_from[u] == kNotMoved) moves.load_to[u] = -1;
    }
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int64_t m = first + u * groups;
      if (evict.order == nullptr && moves.evict_from[u] >= 0)
        moves.evict_from[u] = evict.first_place + m;
      if (load.order == nullptr && moves.load_to[u] >= 0) moves.load_to[u] = load.first_place + m;
    }
    int f = 0;
    for (int64_t vec = lane; vec < vecs; vec += lanes) {
      while (vec >= fields.first_vec[f + 1]) ++f;
      const MovedField field = fields.field[f];
      const int64_t column = vec - fields.first_vec[f];
      if constexpr (MoveType::kStored != Stored::kSame) {
        convert_column<typename MoveType::Vec, MoveType::kStored>(field, column, tables, moves);
      } else {
        move_column<typename MoveType::Vec>(field, column, tables, moves);
      }
    }
  }
}

template <typename MoveType, typename Tables>
__global__ void __launch_bounds__(kMoverThreads)
    swap_kernel(const __grid_constant__ Fields fields, const __grid_constant__ Tables tables,
                PlanView evict, PlanView load, SwapScratch scratch, int lanes, Report evicting,
                Report loading) {
  swap_rows<MoveType>(fields, tables, evict, load, scratch, lanes, evicting, loading, blockIdx.x,
                      gridDim.x);
}

// The lists of one table and the layout of its rows.
struct Part {
  Fields fields;
  PlanView evict, load;
  SwapScratch scratch;
  int lanes;
  int64_t rows;
};

static_assert(2 * sizeof(Part) + sizeof(int) + sizeof(ErrorRecord*) <= 4096);

// The first `host_blocks` blocks move rows across the link, because few blocks saturate the link.
// The other blocks move rows within GPU memory at the same time. Threads and groups work as in
// swap_rows.
template <typename MoveType>
__global__ void __launch_bounds__(kMoverThreads)
    swap_parts_kernel(const __grid_constant__ Part host, const __grid_constant__ Part cached,
                      int host_blocks, ErrorRecord* record) {
  const bool is_host = blockIdx.x < host_blocks;
  const Part& part = is_host ? host : cached;
  const Report evicting{record, Op::kSwap, IdList::kEvict, part.rows};
  const Report loading{record, Op::kSwap, IdList::kLoad, part.rows};
  swap_rows<MoveType>(part.fields, OneTable{}, part.evict, part.load, part.scratch, part.lanes,
                      evicting, loading, is_host ? blockIdx.x : blockIdx.x - host_blocks,
                      is_host ? host_blocks : gridDim.x - host_blocks);
}

// The bitwise OR of a field's addresses, strides and row lengths: an access width must divide it.
uint64_t bits_of(const SwapField& field) {
  return field.host.bits() | static_cast<uint64_t>(field.host.row_bytes) |
         reinterpret_cast<uint64_t>(field.leaving.base) |
         reinterpret_cast<uint64_t>(field.arriving.base);
}

// Numbers of fields with the same access type.
struct FieldGroup {
  int number[kFieldsPerLaunch];
  int count = 0;
  int vec_bytes = 16;
  Stored stored = Stored::kSame;
};

// Records of at least this length get a launch separate from fields of narrow rows, which would
// narrow all accesses.
constexpr int64_t kLongRecord = 128;

// Groups the fields of a launch. `bits`: bits_of each field.
class FieldGroups {
 public:
  FieldGroups(const SwapField* fields, int field_count, const uint64_t* bits) {
    for (const Stored stored : {Stored::kSame, Stored::kBFloat16, Stored::kFloat16}) {
      uint64_t all_bits = 0;
      int64_t record_bytes = 0;
      for (int f = 0; f < field_count; ++f) {
        if (fields[f].stored != stored) continue;
        all_bits |= bits[f];
        record_bytes += fields[f].host.row_bytes;
      }
      for (int f = 0; f < field_count; ++f) {
        if (fields[f].stored != stored) continue;
        add(f, widest_access(record_bytes < kLongRecord ? all_bits : bits[f]), stored);
      }
    }
  }

  const FieldGroup* begin() const { return groups_; }
  const FieldGroup* end() const { return groups_ + count_; }

 private:
  void add(int field, int vec_bytes, Stored stored) {
    if (stored != Stored::kSame && vec_bytes == 8) vec_bytes = 4;  // saves one kernel
    int g = 0;
    while (g < count_ && (groups_[g].vec_bytes != vec_bytes || groups_[g].stored != stored)) ++g;
    if (g == count_) groups_[count_++] = FieldGroup{{}, 0, vec_bytes, stored};
    groups_[g].number[groups_[g].count++] = field;
  }

  FieldGroup groups_[kFieldsPerLaunch];
  int count_ = 0;
};

Fields fields_of(const SwapField* fields, const FieldGroup& group) {
  Fields all{};
  all.count = group.count;
  for (int f = 0; f < group.count; ++f) {
    const SwapField& from = fields[group.number[f]];
    all.field[f] = {from.host.base,     from.host.stride_bytes, from.leaving.base,
                    from.arriving.base, from.side_row_bytes(),  group.number[f]};
    all.first_vec[f + 1] = all.first_vec[f] + from.host.row_bytes / group.vec_bytes;
  }
  return all;
}

MoveShape shape_of(const Fields& fields, const FieldGroup& group, int64_t entries, int max_blocks) {
  const int64_t row_bytes = fields.first_vec[fields.count] * group.vec_bytes;
  MoveShape shape =
      move_shape(row_bytes, static_cast<uint64_t>(group.vec_bytes), entries, max_blocks);
  if (group.stored != Stored::kSame) {  // keeps all lanes busy in every iteration
    const int64_t iterations = shares_of(shape.vecs_per_row, 32, INT32_MAX);
    shape.lanes_per_row = shares_of(shape.vecs_per_row, iterations, 32);
    shape.blocks = shares_of(entries, kMoverThreads / shape.lanes_per_row, max_blocks);
  }
  return shape;
}

// Calls `use` with the MoveType of a group's fields.
template <typename Use>
void with_move_type(const FieldGroup& group, const Use& use) {
  with_vec_type(group.vec_bytes, [&](auto vec) {
    if constexpr (sizeof(vec) > 1 && sizeof(vec) != 8) {
      if (group.stored == Stored::kBFloat16)
        return use(MoveType<decltype(vec), Stored::kBFloat16>{});
      if (group.stored == Stored::kFloat16) return use(MoveType<decltype(vec), Stored::kFloat16>{});
    }
    use(MoveType<decltype(vec), Stored::kSame>{});
  });
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
                int max_blocks, ErrorRecord* record, void* stream) {
  uint64_t bits[kFieldsPerLaunch];
  for (int f = 0; f < field_count; ++f) {
    bits[f] = bits_of(fields[f]);
    for (int table = 0; tables != nullptr && table < tables->count; ++table) {
      const HostPlace& place = tables->places[table * field_count + f];
      bits[f] |= reinterpret_cast<uint64_t>(place.base) | static_cast<uint64_t>(place.stride_bytes);
    }
  }
  for (const FieldGroup& group : FieldGroups(fields, field_count, bits)) {
    const Fields group_fields = fields_of(fields, group);
    const MoveShape shape = shape_of(group_fields, group, max(evict.count, load.count), max_blocks);
    const Report evicting{record, Op::kSwap, IdList::kEvict, rows};
    const Report loading{record, Op::kSwap, IdList::kLoad, rows};
    with_move_type(group, [&](auto move_type) {
      const auto launch = [&](const auto& found) {
        swap_kernel<decltype(move_type)>
            <<<shape.blocks, kMoverThreads, 0, static_cast<cudaStream_t>(stream)>>>(
                group_fields, found, evict, load, scratch, shape.lanes_per_row, evicting, loading);
      };
      tables == nullptr ? launch(OneTable{}) : launch(SomeTables{*tables, field_count});
    });
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    record = nullptr;  // only one launch reports an error
  }
  return cudaSuccess;
}

int launch_swap_parts(const SwapPart& host, const SwapPart& cached, int field_count,
                      int max_host_blocks, ErrorRecord* record, void* stream) {
  uint64_t bits[kFieldsPerLaunch];
  for (int f = 0; f < field_count; ++f) {
    bits[f] = bits_of(host.fields[f]) | bits_of(cached.fields[f]);
  }
  for (const FieldGroup& group : FieldGroups(host.fields, field_count, bits)) {
    const auto part_of = [&](const SwapPart& part, int max_blocks, int* blocks) {
      const Fields group_fields = fields_of(part.fields, group);
      const int64_t entries = max(part.lists.evict.count, part.lists.load.count);
      const MoveShape shape = shape_of(group_fields, group, entries, max_blocks);
      *blocks = shape.blocks;
      const SwapLists& lists = part.lists;
      return Part{group_fields,  lists.evict,         lists.load,
                  lists.scratch, shape.lanes_per_row, part.rows};
    };
    int host_blocks = 0, cached_blocks = 0;
    const Part over_link = part_of(host, max_host_blocks, &host_blocks);
    const Part on_gpu = part_of(cached, kDeviceBlocks, &cached_blocks);
    with_move_type(group, [&](auto move_type) {
      swap_parts_kernel<decltype(move_type)>
          <<<host_blocks + cached_blocks, kMoverThreads, 0, static_cast<cudaStream_t>(stream)>>>(
              over_link, on_gpu, host_blocks, record);
    });
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    record = nullptr;
  }
  return cudaSuccess;
}

}  // namespace speedtorch

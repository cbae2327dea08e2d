// Launchers of all ops: the ops' C++ files, which include torch, call them; the CUDA files define
// them. Each launcher queues its kernels on `stream` and returns a cudaError_t as int. Pointers are
// GPU memory or host memory mapped on the GPU. Callers have checked shapes; ids and places may be
// out of range. This header includes no torch header.
#pragma once

#include "core/error_record.h"
#include "core/rows.h"
#include "memory/resident_index.h"
#include "move/number_kind.h"
#include "move/row_copy.h"
#include "move/stored_float.h"
#include "plan/plan_launch.h"

namespace speedtorch {

// The maximum number of fields of one launch, for ops that accept any number.
constexpr int kFieldsPerLaunch = 16;

// ---- pinned_copy.cu, pinned_gather.cu, pinned_scatter.cu. `out` and `src` have one row per id;
// rows of `out` are contiguous. If an id is out of range, kernels write an error record, leave the
// table unchanged and fill `out` with zeros.

// Copies row m to row m.
int launch_copy(const Rows& from, const Rows& to, bool to_host, CopyKernel kernel, void* stream);
// With a plan or a DedupView of kAny: reads each distinct row of the table once and copies its
// repetitions on the GPU. With kAll: reads a row once per id; at most kIdsCheckedInBlock ids may be
// unchecked.
int launch_gather(const Rows& table, const Rows& out, const RowIdsView& ids, CopyKernel kernel,
                  const Report& about, void* stream);
// table[id] = src of the last occurrence of id. Takes a plan, a DedupView of kLast, or at most
// kIdsDedupedInBlock unchecked ids.
int launch_scatter(const Rows& table, const Rows& src, const RowIdsView& ids, CopyKernel kernel,
                   const Report& about, void* stream);
// table[id] += src of each occurrence, in index order, rounded at each addition. `src` is aligned
// to its element size.
int launch_scatter_add(const Rows& table, const Rows& src, const PlanView& plan, NumberKind kind,
                       int max_blocks, const Report& about, void* stream);

// ---- optimizer_state_swap.cu

// One field: rows are evicted from `leaving` to host rows and loaded from host rows to `arriving`.
// `leaving` and `arriving` are contiguous, with float32 numbers unless `stored` is kSame.
struct SwapField {
  Rows host, leaving, arriving;
  Stored stored = Stored::kSame;

  constexpr int64_t side_row_bytes() const {
    return stored == Stored::kSame ? host.row_bytes : 2 * host.row_bytes;
  }
};

// The maximum numbers of tables, and of fields of all tables together, in one launch. The rows of
// all tables are numbered consecutively.
constexpr int kTablesPerLaunch = 64;
constexpr int kPlacesPerLaunch = 96;

// The address of row 0 in the consecutive numbering, which may lie before the table.
struct HostPlace {
  char* base;
  int64_t stride_bytes;
};

struct SwapTables {
  int count;
  int64_t firsts[kTablesPerLaunch + 1];  // ascending: first row of each table, then the row count
  HostPlace places[kPlacesPerLaunch];    // table by table, field by field
};

// Lists of ascending ids with a place for each (`order`), unchecked before the launch. The last id
// to load may be out of order.
struct PlacedLists {
  int64_t leaving_rows, arriving_rows;  // limits of the places
  // Numbers of valid entries, or null if all are valid. With counts, rows in both lists are also
  // written to the host, so that the caller may discard the loaded rows. A count out of range means
  // no valid entry.
  const int64_t* evict_count;
  const int64_t* load_count;
  // The host row of each entry; null: the entry's id, or no entry. Different ids have different
  // host rows. Not with `all_or_none`.
  const int64_t* evict_rows;
  const int64_t* load_rows;
  // Whether one bad entry stops all moves. If so, ids that do not ascend are bad as well.
  bool all_or_none;
};

// Bad entries of a list. All zeros: no bad entry.
struct BadEntries {
  int64_t bad_count;    // ids out of range
  int64_t from_end[6];  // for each IdError: entries from the first such one to the end
};

// The results that launch_swap_match writes for lists with places.
struct CheckedLists {
  PlanStatus evict, load;
  BadEntries bad_evict, bad_load;
  int64_t blocks_done;
};

constexpr int64_t kFromHost = -1, kNotMoved = -2;

// Scratch memory that the caller allocates.
struct SwapScratch {
  CheckedLists* checked;
  int64_t* load_from;  // [load]: place in `leaving` of a row in both lists; kFromHost; kNotMoved
  uint8_t* is_kept;    // [evict]: the row is in both lists and is not written to the host
};

// Fills the scratch. With `placed`: writes the lists' statuses too; an entry whose id or place is
// out of range is recorded as an error and not moved.
int launch_swap_match(const PlanView& evict, const PlanView& load, const PlacedLists* placed,
                      int64_t rows, const SwapScratch& scratch, ErrorRecord* record, void* stream);
// Moves at most kFieldsPerLaunch fields; `host` is the first table's field. With `tables`, moves
// only rows of these tables; `rows` counts the rows of all tables. If the status of either list
// reports an error, moves nothing.
int launch_swap(const SwapField* fields, int field_count, const SwapTables* tables, int64_t rows,
                const PlanView& evict, const PlanView& load, const SwapScratch& scratch,
                int max_blocks, ErrorRecord* record, void* stream);

// ---- hot_rows.cu

// The cache state of one row of a cached table.
struct HotRow {
  int32_t slot;  // cache slot with the newer copy of the row, or -1
  int32_t uses;  // number of loads, from host memory or from its slot
};

struct HotRows {
  HotRow* rows;
  int64_t slots;
};

// Both lists of a swap, with the results of launch_swap_match.
struct SwapLists {
  PlanView evict, load;
  SwapScratch scratch;
};

// Lists of one table or cache; `rows` is its number of rows or slots.
struct SwapPart {
  const SwapField* fields;
  int64_t rows;
  SwapLists lists;
};

// Moves the rows of both parts at the same time, with few blocks for `host`. One launch moves all
// fields with the same access type. Defined in optimizer_state_swap.cu.
int launch_swap_parts(const SwapPart& host, const SwapPart& cached, int field_count,
                      int max_host_blocks, ErrorRecord* record, void* stream);
// Splits lists that launch_swap_match has matched. `host` moves rows of the table. `cached` moves
// rows of slots, with slot numbers as ids, and rows in both lists. Counts the loads. `memory` has
// part_lists_bytes.
int64_t part_lists_bytes(int64_t evict_count, int64_t load_count);
int launch_part_lists(const PlanView& evict, const PlanView& load, const SwapScratch& scratch,
                      int64_t rows, const HotRows& hot, SwapLists* host, SwapLists* cached,
                      void* memory, void* stream);

// ---- row_sums.cu. Kinds are floating point. A place out of range stands for a row of zeros.

// Sums of the rows of each distinct id. Only positions in [begin, begin + count) of the batch have
// rows.
struct SumRows {
  const void* rows;  // [row_count, columns]
  int64_t row_count;
  int64_t row_step;       // elements between the starts of consecutive rows
  const int64_t* source;  // [count]: the row of each position; null: rows in order
  int64_t begin;
  int64_t count;
  int64_t columns;
  void* out;         // [distinct, columns]
  int64_t distinct;  // valid entries of the plan's `unique`
  int64_t table_rows;
  // The number of sums to compute, in GPU memory, or null. This number overrides the plan's status.
  // Other sums, and all sums of a bad plan, are zeros without an error record.
  const int64_t* named;
};

// Sums of the rows of each bag.
struct PoolRows {
  const void* rows;  // [row_count, columns]
  int64_t row_count;
  int64_t columns;
  const int64_t* places;  // [count]: row of each entry
  int64_t count;
  const int64_t* offsets;  // [features * samples + 1], feature after feature
  int64_t features;
  int64_t samples;
  bool mean;  // divide by the number of entries
  void* out;  // [samples, features, columns]

  int64_t bags() const { return features * samples; }
};

// Bytes of scratch that launch_sum_rows needs for a plan of `entries` ids.
int64_t sum_scratch_bytes(NumberKind kind, int64_t entries, int64_t columns);
// Fills `out` with zeros and writes an error record if the plan has bad ids or was made for another
// table or another number of distinct ids.
int launch_sum_rows(NumberKind kind, const SumRows& work, const PlanView& plan, void* scratch,
                    const Report& about, void* stream);
int launch_pool_rows(NumberKind kind, const PoolRows& work, void* stream);

// ---- table_ids.cu

// Ids in bags of several features; each feature's rows are a range of one table's rows.
struct TableIds {
  const void* ids;  // [count], of int64 if `wide`, else of int32
  bool wide;
  int64_t count;
  const int64_t* offsets;  // [features * samples + 1], feature after feature; of one bag or more
  const int64_t* ranges;   // [features, 2]: first row, number of rows
  int64_t features;
  int64_t samples;
  int64_t* rows;  // [count]: row of the table, or -1
  int64_t* bags;  // [count]: sample * features + feature
};

int launch_table_ids(const TableIds& work, void* stream);

// ---- shard_ids.cu

// Why ranks cannot begin a step together. The largest fault of all ranks counts. The values are
// those of speedtorch/plan/fixed_size_batch.py and speedtorch/step/fixed_blocks.py.
enum class ShardFault : int64_t { kNone = 0, kBadIds = 1, kOverShare = 3, kOtherModule = 4 };

// Maps ids to the ranks that own their rows, in blocks of rows. Row `id` has the number `id +
// distances[id / block]`. Rank r owns the numbers from r * rows_per_rank up to, but without,
// (r + 1) * rows_per_rank. An id that is not a row has the number end().
struct ShardIds {
  const void* ids;  // [count], of int64 if `wide`, else of int32
  bool wide;
  int64_t count;
  const int64_t* distances;
  int64_t rows;
  int64_t block;
  int64_t rows_per_rank;
  int64_t ranks;
  int64_t share;  // maximum rows to request from a rank, and the size of its block; -1: no maximum
  int64_t* numbers;  // [count]
  // [ranks + 3]: the begin of each rank's numbers among the distinct ones, the begin and end of the
  // number of invalid ids, and, inside the kernels, the fault.
  int64_t* begins;
  int64_t* counts;  // [ranks]: distinct rows of each rank; all -1 if an id is not a row
  // With a share [ranks, share + 1]: the rows requested from each rank, padded with -1, then the
  // fault. Without [count]: the rows, grouped by rank, padded with -1.
  int64_t* sent;
  int64_t* places;   // [count]: place of each id's row in the blocks
  int64_t* entries;  // [ranks * share]: index in the plan's `unique`, or `count` for padding

  constexpr int64_t end() const { return ranks * rows_per_rank; }
  constexpr int64_t sent_size() const { return share < 0 ? count : ranks * (share + 1); }

  constexpr int64_t number_of(int64_t id) const {
    if (id < 0 || id >= rows) return end();
    const int64_t number = id + distances[id / block];
    return number >= 0 && number < end() ? number : end();
  }

  // The following functions read `begins`. Rank `ranks` stands for ids that are not rows.
  constexpr int64_t count_of(int64_t rank) const {
    return begins[ranks + 1] > begins[ranks] ? -1 : begins[rank + 1] - begins[rank];
  }
  constexpr ShardFault fault_of(int64_t rank) const {
    const int64_t named = begins[rank + 1] - begins[rank];
    if (rank == ranks) return named > 0 ? ShardFault::kBadIds : ShardFault::kNone;
    return share >= 0 && named > share ? ShardFault::kOverShare : ShardFault::kNone;
  }
  constexpr int64_t place_of(const PlanView& plan, int64_t i) const {
    const int64_t rank = numbers[i] < end() ? numbers[i] / rows_per_rank : ranks;
    const int64_t place = plan.inverse[i] - begins[rank] + rank * share;
    const int64_t last = ranks * share - 1;  // reached for invalid ids or more than `share` rows
    return place < 0 || last < 0 ? 0 : place < last ? place : last;
  }
  // Writes entry `i` of `sent`, and the entry of `entries` at the same place.
  constexpr void send(const PlanView& plan, int64_t i, ShardFault fault) const {
    if (share < 0) {
      sent[i] = i < begins[ranks] ? plan.unique[i] % rows_per_rank : -1;
      return;
    }
    const int64_t rank = i / (share + 1), column = i % (share + 1);
    const int64_t entry = begins[rank] + column;
    const bool is_row = entry < begins[rank + 1];
    if (column == share) {
      sent[i] = static_cast<int64_t>(fault);
    } else {
      sent[i] = is_row ? plan.unique[entry] - rank * rows_per_rank : -1;
      entries[rank * share + column] = is_row ? entry : count;
    }
  }
};

// Fills `numbers`.
int launch_number_ids(const ShardIds& work, void* stream);
// Fills all other outputs; `plan` is the plan of the numbers.
int launch_shard_ids(const ShardIds& work, const PlanView& plan, void* stream);

// The rows that all ranks request from this rank, in the blocks that ShardIds writes.
struct RequestedIds {
  const int64_t* blocks;  // [ranks, share + 1]
  int64_t ranks;
  int64_t share;
  int64_t none;            // the id that stands for padding
  const int64_t* differs;  // [1]: nonzero if ranks look up different tables; null for equal tables
  int64_t* ids;            // [ranks * share]
  int64_t* fault;          // [1]: the largest ShardFault of all ranks

  constexpr int64_t id_at(int64_t i) const {
    const int64_t row = blocks[i + i / share];  // skips the faults of earlier ranks
    return row < 0 ? none : row;
  }
  constexpr int64_t fault_of(int64_t rank) const { return blocks[(rank + 1) * (share + 1) - 1]; }
  constexpr int64_t own_fault() const {
    const bool is_other = differs != nullptr && *differs != 0;
    return static_cast<int64_t>(is_other ? ShardFault::kOtherModule : ShardFault::kNone);
  }
};

int launch_requested_ids(const RequestedIds& work, void* stream);

// ---- clear_rows.cu

// Fills rows `*count` and beyond of at most kFieldsPerLaunch contiguous fields with zeros.
int launch_clear_rows(const Rows* fields, int field_count, const int64_t* count, void* stream);

// ---- merge_rows.cu

// Merges two disjoint lists of ascending ids into one.
struct MergedIds {
  const int64_t* held;
  int64_t held_count;
  const int64_t* more;
  int64_t more_count;
  int64_t padding_rows;  // 0 or 1: a last row without an id
  int64_t* ids;          // [all()]
  int64_t* held_places;  // [held_count + padding_rows]
  int64_t* more_places;  // [more_count]

  constexpr int64_t all() const { return held_count + more_count; }
};

int launch_merge_ids(const MergedIds& work, void* stream);
// The places of the ids unique[inverse[i]] for i < n among `count` ascending ids, which contain all
// of them; the padding's place is `count`.
struct Positions {
  const int64_t* unique;
  const int64_t* inverse;
  int64_t n;
  const int64_t* ids;
  int64_t count;
  int64_t padding;  // or -1
  int64_t* out;     // [n]
};

int launch_positions(const Positions& work, void* stream);
// Copies row m to row places[m], which no kernel checks, for at most kFieldsPerLaunch fields.
int launch_spread_rows(const Rows* from, const Rows* to, int field_count, const int64_t* places,
                       void* stream);

// ---- diff_ids.cu

// A list of distinct ascending ids. The first `*count` of `size` entries are valid.
struct SortedIds {
  const int64_t* ids;
  int64_t size;
  const int64_t* count;  // null: all are valid
};

// The rows to load, keep and evict when a batch replaces the held rows.
struct IdDiff {
  int64_t* load_ids;  // [named.size], also the next three; [capacity] for a batch with a capacity
  int64_t* load_places;
  int64_t* keep_places;
  int64_t* keep_from;
  int64_t* evict_ids;     // [held.size]
  int64_t* evict_places;  // [held.size]
  int64_t* counts;        // [kChangeCounts]: rows named, kept, loaded, evicted
  // The id of a row that every batch loads and none keeps or evicts, or -1. This id follows the
  // other ids to load, which then have one more entry.
  int64_t padding;
};

// Why a batch with a capacity is not loaded: bad ids, too many rows, or a plan for a table of
// another size. The values are part of the contract with readers of a Fault.
enum class Misfit : int64_t { kNone = 0, kBadIds = 1, kTooMany = 2, kForeignPlan = 3 };

// The first batch that did not fit, and why. `kind` is a Misfit, written last.
struct Fault {
  int64_t kind;
  int64_t distinct;  // rows that the batch names, without the padding row
  int64_t capacity;
  int64_t bad_count;  // this and the next three: from the plan's status
  int64_t bad_position;
  int64_t bad_id;
  int64_t count;
  int64_t table_rows;
};
constexpr int64_t kFaultFields = 8;
static_assert(sizeof(Fault) == kFaultFields * sizeof(int64_t));

// The limits of a batch, and the record of the first batch that does not fit. After this batch no
// batch fits until the caller clears `halt`.
struct Fitting {
  const PlanStatus* status;  // status of the plan whose ids are `named`
  int64_t capacity;          // maximum number of rows
  int64_t table_rows;        // the number of rows that the plan must be made for
  int64_t* halt;             // [2]: whether a batch did not fit, how many were skipped since
  Fault* fault;

  constexpr bool fits() const { return halt[0] == 0 && misfit() == Misfit::kNone; }
  constexpr Misfit misfit() const {
    if (status->bad_count != 0) return Misfit::kBadIds;
    if (status->rows != table_rows) return Misfit::kForeignPlan;
    return status->distinct > capacity ? Misfit::kTooMany : Misfit::kNone;
  }
  // Records a batch that does not fit. For the first such batch, fills `fault` except for its kind,
  // and returns the Misfit. The caller writes this to fault->kind last, so that a reader that sees
  // a kind also sees the other fields. Returns kNone for later batches, and if the batch fits.
  constexpr Misfit record() const {
    if (halt[0] != 0) {
      ++halt[1];
      return Misfit::kNone;
    }
    const Misfit why = misfit();
    if (why == Misfit::kNone) return why;
    halt[0] = 1;
    *fault = {0,
              status->distinct,
              capacity,
              status->bad_count,
              status->bad_position,
              status->bad_id,
              status->count,
              table_rows};
    return why;
  }
};

// Bytes of scratch that the launcher needs.
int64_t diff_scratch_bytes(int64_t named_size, int64_t held_size);
// A batch that does not fit (`fitting` is not null then) counts as a batch without ids: all held
// rows are evicted.
int launch_diff_ids(const SortedIds& named, const SortedIds& held, const Fitting* fitting,
                    const IdDiff& out, void* scratch, int64_t scratch_bytes, void* stream);

// ---- plan_fault.cu

// Whether a block with this capacity can hold the rows of a plan.
struct PlanFault {
  PlanStatus* status;
  int64_t capacity;

  // Returns a Misfit; 0: the rows fit.
  constexpr int64_t kind() const {
    if (status->bad_count > 0) return static_cast<int64_t>(Misfit::kBadIds);
    return static_cast<int64_t>(status->distinct > capacity ? Misfit::kTooMany : Misfit::kNone);
  }
  // If `agreed` is larger than the plan's own fault, marks the plan as having a bad id at the
  // position `-agreed`.
  constexpr void spoil(int64_t agreed) const {
    if (agreed <= kind()) return;
    status->bad_count = 1;
    status->bad_position = -agreed;
  }
};

// Writes the fault to `fault` [1].
int launch_plan_fault(const PlanFault& work, int64_t* fault, void* stream);
int launch_spoil_plan(const PlanFault& work, const int64_t* agreed, void* stream);

// ---- hold_rows.cu

// One field: three contiguous tensors of rows, with the same number of rows each.
struct HeldField {
  Rows held;
  Rows incoming;
  Rows evicted;  // without rows: evicted rows are not saved
};

// Which held rows are kept and which are evicted. Each list has one entry per row of `held`.
struct HeldChanges {
  const int64_t* kept_places;
  const int64_t* kept_from;
  const int64_t* evicted_places;
  const int64_t* counts;  // [4]: rows named, kept, loaded, evicted
  int64_t max_named;
};

// Ids that the launch writes (`held_ids`, `saved_ids`), and their sources (`ids`, `evicted_ids`).
struct HeldIds {
  const int64_t* ids;  // [max_named] of HeldChanges: ids of the rows named
  int64_t* held_ids;   // [size]; ascending, padded with kNoId
  PlanStatus* status;
  int64_t size;
  // The ids [size] of evicted rows are copied to `saved_ids`, their number to `saved_count`, unless
  // this is null: then no evicted row is saved.
  const int64_t* evicted_ids;
  int64_t* saved_ids;
  int64_t* saved_count;
};
constexpr int64_t kNoId = INT64_MAX;

// Both launchers take at most kFieldsPerLaunch fields. The first copies kept rows from `held` to
// `incoming` and evicted rows from `held` to `evicted`, then fills the rows of `incoming` behind
// the named ones with zeros.
int launch_complete_incoming(const HeldField* fields, int field_count, const HeldChanges& changes,
                             void* stream);
// Copies `incoming` to `held`. The launch with `ids` also writes the held ids; pass null for all
// other launches of the batch.
int launch_take_over(const HeldField* fields, int field_count, const HeldChanges& changes,
                     const HeldIds* ids, void* stream);

// ---- round_rows.cu

// The number of columns whose random numbers come from one call of the generator.
constexpr int kRoundedTogether = 4;

// float32 rows of one field, to be rounded to numbers that 16 bits can store.
struct RoundedRows {
  uint32_t* rows;  // [count, columns]
  int64_t count;
  int64_t columns;
  const int64_t* ids;  // [count], ids of the rows; negative or kNoId: skip the row
  const int64_t* key;  // [2]: seed and step
  int64_t field;       // index among the fields of a row
  Stored stored;
  bool at_random;  // stochastic rounding; else to nearest

  constexpr int64_t groups() const { return (columns + kRoundedTogether - 1) / kRoundedTogether; }

  constexpr bool has_row(int64_t row) const { return ids[row] >= 0 && ids[row] != kNoId; }
  // The random words of a group of columns. `step_key` is the result of key_of_step.
  constexpr RandomWords words(uint64_t step_key, int64_t row, int64_t group) const {
    if (!at_random) return {};
    const uint64_t place = static_cast<uint64_t>(field) << 48 | static_cast<uint64_t>(group);
    return random_words(step_key, static_cast<uint64_t>(ids[row]), place);
  }
  constexpr uint32_t rounded(uint32_t number, uint32_t word) const {
    return at_random ? rounded_at_random(number, word, stored) : rounded_to_nearest(number, stored);
  }
  // Rounds a group of columns of a row.
  constexpr void round(uint64_t step_key, int64_t row, int64_t group) const {
    if (!has_row(row)) return;
    const RandomWords random = words(step_key, row, group);
    const int64_t first = group * kRoundedTogether;
    for (int64_t k = 0; k < kRoundedTogether && first + k < columns; ++k) {
      uint32_t& number = rows[row * columns + first + k];
      number = rounded(number, random.word[k]);
    }
  }
};

int launch_round_rows(const RoundedRows& work, void* stream);
// Adds 1 to the step of a key.
int launch_count_step(int64_t* key, void* stream);

// ---- resident_rows.cu

// Writes the slots of rows, or -1, to `slots` and to the index, and marks the slots; see
// ResidentRows::begin_find. The first `changing` rows change. Neither these rows nor the other rows
// contain a row twice.
int launch_find_slots(const ResidentIndex& index, const int64_t* rows, int64_t count,
                      int64_t changing, int64_t* slots, void* stream);

// ---- split_plan.cu

// Splits the plan of one batch over several tables into one plan per table. The tables' rows are
// ranges of one row numbering. Ids and plan parts are stored table after table.
struct SplitPlan {
  PlanView plan;           // the plan to split, over all tables
  int64_t table_rows;      // over all tables
  const int64_t* offsets;  // [tables + 1]: begin of each table's ids, then the end
  const int64_t* ranges;   // [tables, 2]: first row, number of rows; ascending
  int64_t tables;
  int64_t* unique;     // [n]
  int64_t* inverse;    // [n]
  int64_t* order;      // [n]
  int64_t* begins;     // [n + tables]: the `offsets` of each plan
  PlanStatus* status;  // [tables]
  int64_t* bounds;     // [tables + 1]: begin of each table's distinct rows among all
};

int launch_split_plan(const SplitPlan& work, void* stream);

}  // namespace speedtorch

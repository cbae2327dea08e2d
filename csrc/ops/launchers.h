// Launchers: the C++ files of ops include torch and call them, the CUDA files define them. Each
// launcher queues its kernels on `stream` and returns a cudaError_t as int. Pointers are GPU memory
// or host memory mapped on the GPU. Callers have checked shapes; ids and places may be out of
// range. No torch here.
#pragma once

#include "core/error_record.h"
#include "core/rows.h"
#include "move/number_kind.h"
#include "move/row_copy.h"
#include "move/stored_float.h"
#include "plan/plan_launch.h"

namespace speedtorch {

// Fields of one launch, where an op takes any number of them.
constexpr int kFieldsPerLaunch = 16;

// ------------------------------------------------------------------------------------------------
// pinned_copy.cu, pinned_gather.cu, pinned_scatter.cu. `out` and `src` have one row per id; rows of
// `out` are contiguous. If an id is out of range, kernels write an error record, leave the table
// unchanged and fill `out` with zeros.

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
                       int most_blocks, const Report& about, void* stream);

// ------------------------------------------------------------------------------------------------
// optimizer_state_swap.cu

// One field: rows are evicted from `leaving` to host rows and loaded from host rows to `arriving`.
// `leaving` and `arriving` are contiguous; they have float32 where the host stores 16 bits.
struct SwapField {
  Rows host, leaving, arriving;
  Stored stored = Stored::kSame;

  constexpr int64_t side_row_bytes() const {
    return stored == Stored::kSame ? host.row_bytes : 2 * host.row_bytes;
  }
};

// Tables whose rows are numbered consecutively. Limits of tables and of fields of all tables per
// launch.
constexpr int kTablesPerLaunch = 64;
constexpr int kPlacesPerLaunch = 96;

// The address that a field's row 0 of the consecutive numbering would have.
struct HostPlace {
  char* base;
  int64_t stride_bytes;
};

struct SwapTables {
  int count;
  int64_t firsts[kTablesPerLaunch + 1];  // ascending: the first row of each, and one after the last
  HostPlace places[kPlacesPerLaunch];    // table by table, field by field
};

// Lists of ascending ids with a place of each (`order`), which no kernel has checked. The last id
// to load may be out of order.
struct PlacedLists {
  int64_t leaving_rows, arriving_rows;  // places must be below
  // Valid entries, or null: all. With them, rows in both lists are written to the host as well, so
  // that the caller may discard the loaded rows. A count out of range means no valid entry.
  const int64_t* evict_count;
  const int64_t* load_count;
  // Whether one bad entry stops all others; ids that do not ascend are bad as well then.
  bool all_or_none;
};

// Bad entries of a list; zeros: none.
struct BadEntries {
  int64_t bad_count;    // ids out of range
  int64_t from_end[6];  // for each IdError: entries from the first such one to the end
};

// What is written of lists with places.
struct CheckedLists {
  PlanStatus evict, load;
  BadEntries bad_evict, bad_load;
  int64_t blocks_done;
};

constexpr int64_t kFromHost = -1, kNotMoved = -2;

// Scratch memory that the caller allocates.
struct SwapScratch {
  CheckedLists* checked;
  int64_t* arrives_from;  // [load]: place in `leaving` of a row in both lists, or one of the above
  uint8_t* stays;         // [evict]: the row is in both lists and is not written to the host
};

// Fills the scratch. With `placed`: writes the lists' statuses too; an entry whose id or place is
// out of range is recorded as an error and not moved.
int launch_swap_match(const PlanView& evict, const PlanView& load, const PlacedLists* placed,
                      int64_t rows, const SwapScratch& scratch, ErrorRecord* record, void* stream);
// Takes at most kFieldsPerLaunch fields; `host` is that of the first table. With `tables`, moves
// rows of these tables only; `rows` counts the rows of all tables. A bad id in either list: moves
// nothing.
int launch_swap(const SwapField* fields, int field_count, const SwapTables* tables, int64_t rows,
                const PlanView& evict, const PlanView& load, const SwapScratch& scratch,
                int most_blocks, ErrorRecord* record, void* stream);

// ------------------------------------------------------------------------------------------------
// hot_rows.cu

// What is kept of each row of a table that has a cache.
struct HotRow {
  int32_t slot;  // of the cache, which has the newer copy of the row; or -1
  int32_t uses;  // how often it was loaded, in host memory or in its slot
};

struct HotRows {
  HotRow* rows;
  int64_t slots;
};

// Both lists of a swap, with what launch_swap_match finds of them.
struct SwapLists {
  PlanView evict, load;
  SwapScratch scratch;
};

// Lists of one table or cache, of so many rows or slots.
struct SwapPart {
  const SwapField* fields;
  int64_t rows;
  SwapLists lists;
};

// Moves the rows of both parts at once, those of `host` by few blocks. Of optimizer_state_swap.cu.
int launch_swap_parts(const SwapPart& host, const SwapPart& cached, int field_count,
                      int most_host_blocks, ErrorRecord* record, void* stream);
// Parts lists that launch_swap_match has matched: `host` moves rows of the table, `cached` those of
// slots, whose numbers its ids are, and rows in both lists. Counts the loads. `memory` has
// part_lists_bytes.
int64_t part_lists_bytes(int64_t evict_count, int64_t load_count);
int launch_part_lists(const PlanView& evict, const PlanView& load, const SwapScratch& scratch,
                      int64_t rows, const HotRows& hot, SwapLists* host, SwapLists* cached,
                      void* memory, void* stream);

// ------------------------------------------------------------------------------------------------
// row_sums.cu. Kinds are floating point. A place out of range counts as a row of zeros.

// Sums of the rows of each distinct id. Only positions begin to begin + count of the batch have
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
  // In GPU memory, or null: the number of sums to compute, whatever the plan's status says. The
  // other sums, and all sums of a bad plan, are zeros without an error record.
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
  bool mean;  // divided by the number of entries
  void* out;  // [samples, features, columns]

  int64_t bags() const { return features * samples; }
};

// Bytes of scratch that launch_sum_rows needs for a plan of `entries` ids.
int64_t sum_scratch_bytes(NumberKind kind, int64_t entries, int64_t columns);
// Fills `out` with zeros and writes an error record if the plan has bad ids, or was made for
// another table or another number of distinct ids.
int launch_sum_rows(NumberKind kind, const SumRows& work, const PlanView& plan, void* scratch,
                    const Report& about, void* stream);
int launch_pool_rows(NumberKind kind, const PoolRows& work, void* stream);

// ------------------------------------------------------------------------------------------------
// table_ids.cu

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

// ------------------------------------------------------------------------------------------------
// shard_ids.cu

// Why ranks cannot begin a step together. The largest of all ranks' is the one that counts. Values
// are those of speedtorch/plan/fixed_size_batch.py and speedtorch/step/fixed_blocks.py.
enum class ShardFault : int64_t { kNone = 0, kBadIds = 1, kOverShare = 3, kOtherModule = 4 };

// Ids of rows that ranks own in blocks. Row `id` has the number `id + distances[id / block]`; those
// of a rank are its `room` numbers from `rank * room` on. What is no row has the number behind all.
struct ShardIds {
  const void* ids;  // [count], of int64 if `wide`, else of int32
  bool wide;
  int64_t count;
  const int64_t* distances;
  int64_t rows;
  int64_t block;
  int64_t room;
  int64_t ranks;
  int64_t share;     // the most rows to ask a rank for, in blocks of so many; -1: what is named
  int64_t* numbers;  // [count]
  // [ranks + 3]: where the numbers of each rank begin among the distinct ones, where that of no row
  // begins and ends, and in the kernels the fault.
  int64_t* begins;
  int64_t* counts;  // [ranks]: distinct rows of each, or -1 each if an id is no row
  // With a share [ranks, share + 1]: rows of each rank, -1 for none, and the fault. Else [count]:
  // the rows, one rank's after another's, -1 behind them.
  int64_t* sent;
  int64_t* places;   // [count]: of each id's row in the blocks
  int64_t* entries;  // [ranks * share]: of the plan's `unique` in the blocks, `count` for none

  constexpr int64_t end() const { return ranks * room; }
  constexpr int64_t sent_size() const { return share < 0 ? count : ranks * (share + 1); }

  constexpr int64_t number_of(int64_t id) const {
    if (id < 0 || id >= rows) return end();
    const int64_t number = id + distances[id / block];
    return number >= 0 && number < end() ? number : end();
  }

  // These read `begins`; rank `ranks` owns what is no row.
  constexpr int64_t count_of(int64_t rank) const {
    return begins[ranks + 1] > begins[ranks] ? -1 : begins[rank + 1] - begins[rank];
  }
  constexpr ShardFault fault_of(int64_t rank) const {
    const int64_t named = begins[rank + 1] - begins[rank];
    if (rank == ranks) return named > 0 ? ShardFault::kBadIds : ShardFault::kNone;
    return share >= 0 && named > share ? ShardFault::kOverShare : ShardFault::kNone;
  }
  constexpr int64_t place_of(const PlanView& plan, int64_t i) const {
    const int64_t rank = numbers[i] < end() ? numbers[i] / room : ranks;
    const int64_t place = plan.inverse[i] - begins[rank] + rank * share;
    const int64_t last = ranks * share - 1;  // for ids that are no rows, or too many
    return place < 0 || last < 0 ? 0 : place < last ? place : last;
  }
  // Writes an entry of `sent`.
  constexpr void send(const PlanView& plan, int64_t i, ShardFault fault) const {
    if (share < 0) {
      sent[i] = i < begins[ranks] ? plan.unique[i] % room : -1;
      return;
    }
    const int64_t rank = i / (share + 1), column = i % (share + 1);
    const int64_t entry = begins[rank] + column;
    const bool is_row = entry < begins[rank + 1];
    if (column == share) {
      sent[i] = static_cast<int64_t>(fault);
    } else {
      sent[i] = is_row ? plan.unique[entry] - rank * room : -1;
      entries[rank * share + column] = is_row ? entry : count;
    }
  }
};

// Fills `numbers`.
int launch_number_ids(const ShardIds& work, void* stream);
// Fills all else; `plan` is that of the numbers.
int launch_shard_ids(const ShardIds& work, const PlanView& plan, void* stream);

// What ranks ask for, as ShardIds sends it.
struct RequestedIds {
  const int64_t* blocks;  // [ranks, share + 1]
  int64_t ranks;
  int64_t share;
  int64_t none;            // the id that stands for no row
  const int64_t* differs;  // [1]: not 0 where ranks look up other tables; null: they do not
  int64_t* ids;            // [ranks * share]
  int64_t* fault;          // [1]: the largest

  constexpr int64_t id_at(int64_t i) const {
    const int64_t row = blocks[i + i / share];  // behind the faults of the ranks before
    return row < 0 ? none : row;
  }
  constexpr int64_t fault_of(int64_t rank) const { return blocks[(rank + 1) * (share + 1) - 1]; }
  constexpr int64_t own_fault() const {
    const bool is_other = differs != nullptr && *differs != 0;
    return static_cast<int64_t>(is_other ? ShardFault::kOtherModule : ShardFault::kNone);
  }
};

int launch_requested_ids(const RequestedIds& work, void* stream);

// ------------------------------------------------------------------------------------------------
// clear_rows.cu

// Fills rows `*count` and beyond of at most kFieldsPerLaunch contiguous fields with zeros.
int launch_clear_rows(const Rows* fields, int field_count, const int64_t* count, void* stream);

// ------------------------------------------------------------------------------------------------
// merge_rows.cu

// Two lists of ascending ids, of which none is in both, become one.
struct MergedIds {
  const int64_t* held;
  int64_t held_count;
  const int64_t* more;
  int64_t more_count;
  int64_t others;        // rows without an id, at most one, which comes last
  int64_t* ids;          // [all()]
  int64_t* held_places;  // [held_count + others]
  int64_t* more_places;  // [more_count]

  constexpr int64_t all() const { return held_count + more_count; }
};

int launch_merge_ids(const MergedIds& work, void* stream);
// Row m goes to row places[m], which no kernel checks, of at most kFieldsPerLaunch fields.
int launch_spread_rows(const Rows* from, const Rows* to, int field_count, const int64_t* places,
                       void* stream);

// ------------------------------------------------------------------------------------------------
// diff_ids.cu

// A list of distinct ids, ascending; of `size` entries the first `*count` are ids.
struct SortedIds {
  const int64_t* ids;
  int64_t size;
  const int64_t* count;  // null: all of them
};

// The rows to load, to keep and to evict when a batch follows on held rows.
struct IdDiff {
  int64_t* load_ids;  // [named.size], as the next three; [capacity] of a batch with a capacity
  int64_t* load_places;
  int64_t* keep_places;
  int64_t* keep_from;
  int64_t* evict_ids;     // [held.size]
  int64_t* evict_places;  // [held.size]
  int64_t* counts;        // [kChangeCounts]: rows named, kept, loaded, evicted
  // The id of a row that is loaded by every batch and never kept or evicted, or -1. It follows the
  // other ids to load, which then have one entry more.
  int64_t padding;
};

// Why a batch does not fit its capacity. Values are part of the contract with readers of a Fault.
enum class Misfit : int64_t { kNone = 0, kBadIds = 1, kTooMany = 2, kForeignPlan = 3 };

// Why the first batch did not fit. `kind` is a Misfit, written last.
struct Fault {
  int64_t kind;
  int64_t distinct;  // rows that the batch names, without the padding's
  int64_t capacity;
  int64_t bad_count;  // this and the next three: of the plan's status
  int64_t bad_position;
  int64_t bad_id;
  int64_t count;
  int64_t table_rows;
};
constexpr int64_t kFaultFields = 8;
static_assert(sizeof(Fault) == kFaultFields * sizeof(int64_t));

// What a batch must fit, and where the kernel records the first that does not. After that none
// fits.
struct Fitting {
  const PlanStatus* status;  // of the plan whose ids are `named`
  int64_t capacity;          // at most so many rows
  int64_t table_rows;        // that the plan was made for
  int64_t* halt;             // [2]: whether a batch did not fit, how many were skipped since
  Fault* fault;

  constexpr bool fits() const { return halt[0] == 0 && misfit() == Misfit::kNone; }
  constexpr Misfit misfit() const {
    if (status->bad_count != 0) return Misfit::kBadIds;
    if (status->rows != table_rows) return Misfit::kForeignPlan;
    return status->distinct > capacity ? Misfit::kTooMany : Misfit::kNone;
  }
  // Records a batch that does not fit, all but the kind of the fault, and returns that where it is
  // the first such batch.
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
// A batch that must fit (`fitting` is not null) and does not names no id: all held rows are
// evicted.
int launch_diff_ids(const SortedIds& named, const SortedIds& held, const Fitting* fitting,
                    const IdDiff& out, void* scratch, int64_t scratch_bytes, void* stream);

// ------------------------------------------------------------------------------------------------
// plan_fault.cu

// Whether a block of a capacity can hold the rows of a plan.
struct PlanFault {
  PlanStatus* status;
  int64_t capacity;

  // A Misfit; 0: it can.
  constexpr int64_t kind() const {
    if (status->bad_count > 0) return static_cast<int64_t>(Misfit::kBadIds);
    return static_cast<int64_t>(status->distinct > capacity ? Misfit::kTooMany : Misfit::kNone);
  }
  // Where `agreed` is larger than the plan's own fault, marks the plan as one of a bad id at the
  // position `-agreed`.
  constexpr void spoil(int64_t agreed) const {
    if (agreed <= kind()) return;
    status->bad_count = 1;
    status->bad_position = -agreed;
  }
};

// Writes the fault, `[1]`.
int launch_plan_fault(const PlanFault& work, int64_t* fault, void* stream);
int launch_spoil_plan(const PlanFault& work, const int64_t* agreed, void* stream);

// ------------------------------------------------------------------------------------------------
// hold_rows.cu

// One field: contiguous rows, equally many of each.
struct HeldField {
  Rows held;
  Rows coming;
  Rows left;  // without rows: what leaves is not put aside
};

// Which rows stay and leave; every list has as many entries as there are rows.
struct HeldChanges {
  const int64_t* stay_places;
  const int64_t* stay_from;
  const int64_t* leaving_places;
  const int64_t* counts;  // [4]: rows named, staying, arriving, leaving
  int64_t most_named;
};

// What says which rows are held.
struct HeldIds {
  const int64_t* ids;  // [most_named] of HeldChanges: of the rows named
  int64_t* held_ids;   // [size]; kNoId after those that are held, so that all ascend
  PlanStatus* status;
  int64_t size;
  // Of the rows put aside, null where none are: their ids, [size], go to `left_ids`, and how many
  // they are to `left_count`.
  const int64_t* leaving;
  int64_t* left_ids;
  int64_t* left_count;
};
constexpr int64_t kNoId = INT64_MAX;

// Both of at most kFieldsPerLaunch fields. Rows that stay go from `held` to `coming`, those that
// leave to `left`, and rows of `coming` beyond those named become zeros.
int launch_complete_coming(const HeldField* fields, int field_count, const HeldChanges& changes,
                           void* stream);
// What has come is held; `ids` are written by one launch, null for the others.
int launch_take_over(const HeldField* fields, int field_count, const HeldChanges& changes,
                     const HeldIds* ids, void* stream);

// ------------------------------------------------------------------------------------------------
// round_rows.cu

// Columns of a row whose random numbers one call of the generator gives.
constexpr int kRoundedTogether = 4;

// float32 rows of one field, which are to be numbers that 16 bits store.
struct RoundedRows {
  uint32_t* rows;  // [count, columns]
  int64_t count;
  int64_t columns;
  const int64_t* ids;  // [count], of the rows; negative or kNoId: none
  const int64_t* key;  // [2]: seed and step
  int64_t field;       // its number among those of a row
  Stored stored;
  bool at_random;  // else to nearest

  constexpr int64_t groups() const { return (columns + kRoundedTogether - 1) / kRoundedTogether; }

  constexpr bool has_row(int64_t row) const { return ids[row] >= 0 && ids[row] != kNoId; }
  // The random words of a group of columns. `step_key` is key_of_step's.
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

// ------------------------------------------------------------------------------------------------
// split_plan.cu

// The plan of ids of several tables, whose rows are ranges of one, as a plan of each table. The ids
// of a table come one after another, those of the next follow; so do the parts of its plan.
struct SplitPlan {
  PlanView plan;           // of all: what is split
  int64_t table_rows;      // of all
  const int64_t* offsets;  // [tables + 1]: where the ids of each begin, and the last ones end
  const int64_t* ranges;   // [tables, 2]: first row, number of rows; ascending
  int64_t tables;
  int64_t* unique;     // [n]
  int64_t* inverse;    // [n]
  int64_t* order;      // [n]
  int64_t* begins;     // [n + tables]: the `offsets` of each plan
  PlanStatus* status;  // [tables]
  int64_t* bounds;     // [tables + 1]: where the distinct rows of each begin among those of all
};

int launch_split_plan(const SplitPlan& work, void* stream);

}  // namespace speedtorch

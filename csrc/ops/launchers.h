// Launchers: the C++ files of ops include torch and call them, the CUDA files define them. Each
// launcher queues its kernels on `stream` and returns a cudaError_t as int. Pointers are GPU memory
// or host memory mapped on the GPU. Callers have checked shapes; ids and places may be out of
// range. No torch here.
#pragma once

#include "core/error_record.h"
#include "core/rows.h"
#include "move/number_kind.h"
#include "move/row_mover.h"
#include "plan/plan_launch.h"

namespace speedtorch {

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
// `leaving` and `arriving` are contiguous.
struct SwapField {
  Rows host, leaving, arriving;
};

constexpr int kFieldsPerLaunch = 16;

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

// Scratch memory that the caller allocates.
struct SwapScratch {
  CheckedLists* checked;
  int64_t* arrives_from;  // [load]: place in `leaving` of a row that is in both lists, or -1
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
// clear_rows.cu

constexpr int kClearedPerLaunch = 16;

// Fills rows `*count` and beyond of at most kClearedPerLaunch contiguous fields with zeros.
int launch_clear_rows(const Rows* fields, int field_count, const int64_t* count, void* stream);

}  // namespace speedtorch

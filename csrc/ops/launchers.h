// What the C++ files of ops, which know torch, ask of their CUDA files: launchers, each of which
// queues kernels on `stream` and returns a cudaError_t as int. Pointers are GPU memory, or host
// memory that the GPU reaches. Shapes are checked; ids and places may be bad. No torch here.
#pragma once

#include "core/error_record.h"
#include "core/rows.h"
#include "move/number_kind.h"
#include "move/row_mover.h"
#include "plan/plan_launch.h"

namespace speedtorch {

// ------------------------------------------------------------------------------------------------
// pinned_copy.cu, pinned_gather.cu, pinned_scatter.cu: rows between a table and rows on the GPU,
// which are contiguous, one per id. Bad ids leave a table as it was, and zeros in `out`.

// Row m goes to row m.
int launch_copy(const Rows& from, const Rows& to, bool to_host, CopyKernel kernel, void* stream);
// By a plan or a Dedup (of kAny) each distinct row is fetched once, and its repetitions are copied
// on the GPU. Of kAll a row that stands twice is fetched twice; at most kIdsCheckedInBlock ids of
// it may be unchecked.
int launch_gather(const Rows& table, const Rows& out, const RowIdsView& ids, CopyKernel kernel,
                  const Report& about, void* stream);
// table[id] = src of the last occurrence of id: by a plan or a Dedup (of kLast), or of at most
// kIdsDedupedInBlock unchecked ids.
int launch_scatter(const Rows& table, const Rows& src, const RowIdsView& ids, CopyKernel kernel,
                   const Report& about, void* stream);
// table[id] += src of each occurrence, in index order, rounded at each addition. src is aligned to
// its numbers.
int launch_scatter_add(const Rows& table, const Rows& src, const PlanView& plan, NumberKind kind,
                       int most_blocks, const Report& about, void* stream);

// ------------------------------------------------------------------------------------------------
// optimizer_state_swap.cu

// One field: rows leave from `leaving` to host rows, and arrive from host rows in `arriving`; both
// are contiguous.
struct SwapField {
  Rows host, leaving, arriving;
};

constexpr int kFieldsPerLaunch = 16;

// Tables whose rows are numbered one after another. At most so many of them, and of their fields,
// fit a launch.
constexpr int kTablesPerLaunch = 64;
constexpr int kPlacesPerLaunch = 96;

// Where row 0 of the numbers that all tables share would be.
struct HostPlace {
  char* base;
  int64_t stride_bytes;
};

struct SwapTables {
  int count;
  int64_t firsts[kTablesPerLaunch + 1];  // ascending: the first row of each, and one after the last
  HostPlace places[kPlacesPerLaunch];    // table by table, field by field
};

// Scratch of the op, made by the caller.
struct SwapScratch {
  int64_t* arrives_from;  // [load]: position in `evict` whose row stays on the GPU, or -1
  uint8_t* stays;         // [evict]: that row stays on the GPU, and its host row as it was
};

// `write_through`: rows in both lists go to the host as well.
int launch_swap_match(const PlanView& evict, const PlanView& load, bool write_through,
                      const SwapScratch& scratch, void* stream);
// At most kFieldsPerLaunch fields, whose `host` lie as the first table's do. With `tables` rows of
// these alone move, `rows` are those of all. Bad ids in either list leave everything as it was.
int launch_swap(const SwapField* fields, int field_count, const SwapTables* tables, int64_t rows,
                const PlanView& evict, const PlanView& load, const SwapScratch& scratch,
                int most_blocks, ErrorRecord* record, void* stream);

// ------------------------------------------------------------------------------------------------
// row_sums.cu. Kinds are those of floating-point numbers. Places that are none of the rows count as
// zeros.

// Positions begin to begin + count of a batch have rows; those of one id are added up.
struct SumRows {
  const void* rows;  // [row_count, columns]
  int64_t row_count;
  int64_t row_step;       // numbers from the begin of a row to that of the next
  const int64_t* source;  // [count]: which row each has; null: each its own, in order
  int64_t begin;
  int64_t count;
  int64_t columns;
  void* out;         // [distinct, columns]
  int64_t distinct;  // entries of the plan's `unique` that are ids
  int64_t table_rows;
  // In GPU memory, or null: how many of the sums are some, whatever the plan says; the others, and
  // those of a bad plan, are zeros, of which no word is left.
  const int64_t* named;
};

// The rows of each bag are added up.
struct PoolRows {
  const void* rows;  // [row_count, columns]
  int64_t row_count;
  int64_t columns;
  const int64_t* places;  // [count]: which row each entry names
  int64_t count;
  const int64_t* offsets;  // [features * samples + 1], feature after feature
  int64_t features;
  int64_t samples;
  bool mean;  // divided by the number of entries
  void* out;  // [samples, features, columns]

  int64_t bags() const { return features * samples; }
};

// Bytes of scratch for a plan of `entries` ids.
int64_t sum_scratch_bytes(NumberKind kind, int64_t entries, int64_t columns);
// `out` becomes zeros, and word of it is left, if the plan is one of bad ids, of another table or
// of another number of distinct ids.
int launch_sum_rows(NumberKind kind, const SumRows& work, const PlanView& plan, void* scratch,
                    const Report& about, void* stream);
int launch_pool_rows(NumberKind kind, const PoolRows& work, void* stream);

// ------------------------------------------------------------------------------------------------
// table_ids.cu

// Ids of the bags of several features, whose tables are ranges of rows of one.
struct TableIds {
  const void* ids;  // [count], of int64 if `wide`, else of int32
  bool wide;
  int64_t count;
  const int64_t* offsets;  // [features * samples + 1], feature after feature; of one bag or more
  const int64_t* ranges;   // [features, 2]: first row, number of rows
  int64_t features;
  int64_t samples;
  int64_t* rows;  // [count]: of the one table, or -1
  int64_t* bags;  // [count]: sample after sample
};

int launch_table_ids(const TableIds& work, void* stream);

// ------------------------------------------------------------------------------------------------
// clear_rows.cu

constexpr int kClearedPerLaunch = 16;

// Contiguous rows of at most kClearedPerLaunch fields: those from `*count` on become zeros.
int launch_clear_rows(const Rows* fields, int field_count, const int64_t* count, void* stream);

}  // namespace speedtorch

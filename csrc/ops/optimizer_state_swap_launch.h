// Launcher of optimizer_state_swap.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include "core/error_record.h"
#include "core/rows.h"
#include "plan/plan_launch.h"

namespace speedtorch {

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
// these alone move, `rows` are those of all.
int launch_swap(const SwapField* fields, int field_count, const SwapTables* tables, int64_t rows,
                const PlanView& evict, const PlanView& load, const SwapScratch& scratch,
                int most_blocks, ErrorRecord* record, void* stream);

}  // namespace speedtorch

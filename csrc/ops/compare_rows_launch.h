// Launcher of compare_rows.cu; returns a cudaError_t as int. No torch here.
#pragma once

#include <cstdint>

namespace speedtorch {

// Two lists of distinct ids, ascending; of `size` entries the first `*count` are ids.
struct SortedIds {
  const int64_t* ids;
  int64_t size;
  const int64_t* count;  // null: all of them
};

struct ComparedRows {
  int64_t* arriving_ids;     // [named.size]
  int64_t* arriving_places;  // [named.size]
  int64_t* stay_places;      // [named.size]
  int64_t* stay_from;        // [named.size]
  int64_t* leaving_ids;      // [held.size]
  int64_t* leaving_places;   // [held.size]
  int64_t* counts;           // [3]: rows named, arriving, leaving
};

// Bytes of scratch that the launcher needs.
int64_t compare_scratch_bytes(int64_t named_size, int64_t held_size);
// `padding` is an id that is no row, or -1.
int launch_compare_rows(const SortedIds& named, const SortedIds& held, int64_t padding,
                        const ComparedRows& out, void* scratch, int64_t scratch_bytes,
                        void* stream);

}  // namespace speedtorch

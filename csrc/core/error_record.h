// The record of bad ids: a kernel writes it to host memory, and a later call reads it and throws
// (gpu.h). Included by kernels and by the ops. This header includes no torch header.
#pragma once

#include <cstdint>

namespace speedtorch {

enum class IdError : int32_t {
  kOutOfRange = 1,
  kRepeated = 2,
  kForeignPlan = 3,   // `id` is the number of rows that the plan was made for
  kUnordered = 4,     // ids with places must ascend
  kBadPlace = 5,      // `id` is a place, which must be below `rows`
  kOtherDistinct = 6  // `id` is the plan's number of unique ids, `rows` the caller's
};

// The op and the id list of an error. Kernels write these values to memory.
enum class Op : int32_t { kGather = 0, kScatter = 1, kSwap = 2, kSum = 3 };
enum class IdList : int32_t { kIndex = 0, kEvict = 1, kLoad = 2 };
constexpr const char* name_of(IdList list) {
  constexpr const char* kNames[] = {"index", "evict", "load"};
  return kNames[static_cast<int32_t>(list)];
}

// The record of one GPU. A launch with bad ids claims the record, writes the error's fields, then
// `written`. The host reads them and then writes `taken`. The first three fields count errors. CPU
// and GPU never write the same field, because GPU atomics on host memory are not atomic for the
// CPU. `op` and `list` are an Op and an IdList.
struct ErrorRecord {
  int32_t claimed;  // written by a launch: `taken` + 1, or `taken` if the record is free
  int32_t written;  // written by that launch, last
  int32_t taken;    // written by the host
  int32_t kind;
  int32_t op;
  int32_t list;
  int64_t rows;
  int64_t id;
  int64_t position;
  int64_t bad_count;
  int64_t count;
};

// The data besides the ids that a kernel needs to report bad ids.
struct Report {
  ErrorRecord* record;  // null: another launch of the same op reports
  Op op;
  IdList list;
  int64_t rows;  // number of rows of the table
};

}  // namespace speedtorch

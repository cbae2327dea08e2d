// Word of bad ids, left by a kernel in host memory for a later call to read. No torch here.
#pragma once

#include <cstdint>

namespace speedtorch {

enum class IdError : int32_t {
  kOutOfRange = 1,
  kRepeated = 2,
  kForeignPlan = 3,
  kUnordered = 4,     // ids that come with places must ascend
  kBadPlace = 5,      // `id` is a place, `rows` are those that it should be among
  kOtherDistinct = 6  // `id` is what the plan says, `rows` what the call says
};

// Which op and which of its id lists an error speaks of; the values travel through GPU memory.
enum class Op : int32_t { kGather = 0, kScatter = 1, kSwap = 2, kSum = 3 };
enum class IdList : int32_t { kIndex = 0, kEvict = 1, kLoad = 2 };
constexpr const char* name_of(IdList list) {
  constexpr const char* kNames[] = {"index", "evict", "load"};
  return kNames[static_cast<int32_t>(list)];
}

// Of one GPU. A launch that has bad ids claims it, writes all of it and says so in `written`; the
// host reads it and says so in `taken`. Each of the three counts words, and none is written by both
// sides: an atomic of a GPU on host memory is none for the CPU. `op` and `list` are an Op and an
// IdList.
struct ErrorRecord {
  int32_t claimed;  // by a launch: one above `taken`, or the same where the record is free
  int32_t written;  // by that launch, last
  int32_t taken;    // by the host
  int32_t kind;
  int32_t op;
  int32_t list;
  int64_t rows;
  int64_t id;
  int64_t position;
  int64_t bad_count;
  int64_t count;
};

// What a kernel needs besides the ids to report bad ones.
struct Report {
  ErrorRecord* record;  // null: another launch of the same op reports
  Op op;
  IdList list;
  int64_t rows;  // of the table
};

}  // namespace speedtorch

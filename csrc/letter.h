// Word of bad ids, left by a kernel in host memory for a later call to read. No torch here.
#pragma once

#include <cstdint>

namespace speedtorch {

enum class LetterKind : int32_t {
  kOutOfRange = 1,
  kRepeated = 2,
  kForeignPlan = 3,
  kUnordered = 4,     // ids that come with places must ascend
  kBadPlace = 5,      // `id` is a place, `rows` are those that it should be among
  kOtherDistinct = 6  // `id` is what the plan says, `rows` what the call says
};

// `full` is written last. `op` and `list` are Op and IdList of plan_view.h.
struct Letter {
  int32_t full;
  int32_t kind;
  int32_t op;
  int32_t list;
  int64_t rows;
  int64_t id;
  int64_t position;
  int64_t bad_count;
  int64_t count;
};

}  // namespace speedtorch

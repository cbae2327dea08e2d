// A tensor seen as rows of bytes or as ids, and the checks that an op's arguments fit each other.
// The ops call these once arguments.h has checked the kinds of their tensors; each failure throws
// with the op, the argument, the rule and the value.
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/error_record.h"
#include "core/rows.h"
#include "core/text.h"

namespace speedtorch {

using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::Tensor;

// Ids of a batch, contiguous. `keep` owns them; `wide` says int64 (otherwise int32).
struct Ids {
  Tensor keep;
  const void* data = nullptr;
  int64_t count = 0;
  bool wide = true;
  bool on_cpu = true;

  int64_t at(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

int64_t element_bytes(const Tensor& tensor);
// The first byte of the tensor's elements and how many they span, whatever its strides. Not empty.
std::pair<char*, int64_t> span_of(const Tensor& tensor);
// Whether its numbers begin at multiples of their size. Not so in tensors over bytes of a file.
bool is_aligned(const Tensor& tensor);
// The numbers of an int64 tensor, null if there is none.
int64_t* data_of(const Tensor& tensor);
std::string shape_text(const std::vector<int64_t>& shape);
std::vector<int64_t> shape_of(const Tensor& tensor);
std::string device_text(const Tensor& tensor);
const char* dtype_text(const Tensor& tensor);

template <typename... Parts>
[[noreturn]] void throw_value_error(const char* op, const Parts&... message) {
  throw std::invalid_argument(text(op, ": ", message...));
}

// Refuses tensors with no dimension and rows that are not contiguous inside (any row stride is
// fine). Reads no byte of them.
Rows as_rows(const char* op, const char* name, const Tensor& tensor);
// As above, and refuses rows that overlap each other (expanded tensors): they cannot be written one
// by one.
Rows as_writable_rows(const char* op, const char* name, const Tensor& tensor);
// As as_rows, and refuses any that are not contiguous, of the dtype and shape of the rows of `like`
// and on the device of `on`.
Rows as_rows_like(const char* op, const char* name, const Tensor& tensor, const char* like_name,
                  const Tensor& like, const char* on_name, const Tensor& on);
// int32 or int64, at most 2^31 - 1 of them.
void check_ids_kind(const char* op, const char* name, const Tensor& index);
// Of checked kind. Copies ids that are not contiguous: not before check_memory().
Ids as_ids(const Tensor& index);

void check_shape(const char* op, const char* name, const Tensor& tensor,
                 const std::vector<int64_t>& expected);
void check_dtype(const char* op, const char* name, const Tensor& tensor, const char* other_name,
                 const Tensor& other);
void check_contiguous(const char* op, const char* name, const Tensor& tensor);
void check_aligned(const char* op, const char* name, const Tensor& tensor);
// A contiguous int64 tensor on the device of `on`: [size], or [n] without a size.
void check_list(const char* op, const char* name, const Tensor& tensor, const char* on_name,
                const Tensor& on, std::optional<int64_t> size = std::nullopt);
// Refuses a count that is not 0 to `most`.
int64_t check_count(const char* op, const char* name, int64_t count, int64_t most);
// Refuses an empty list.
void check_fields(const char* op, const char* name, size_t count);
// `tensor` must be on the CPU or on the device of `compute`.
void check_device(const char* op, const char* name, const Tensor& tensor, const char* compute_name,
                  const Tensor& compute);
void check_same_device(const char* op, const char* name, const Tensor& tensor,
                       const char* compute_name, const Tensor& compute);

// What is wrong with the ids of a batch, found on the CPU or on the GPU. `list` names the argument.
struct BadIds {
  IdError kind = IdError::kOutOfRange;
  const char* op = "";
  const char* list = "index";
  int64_t rows = 0;      // of the table
  int64_t id = 0;        // the first bad id
  int64_t position = 0;  // where it stands in the flattened ids
  int64_t bad_count = 0;
  int64_t count = 0;  // ids in all
};

// IndexError with everything above in one sentence; ValueError for a wrong number of distinct ids.
[[noreturn]] void throw_bad_ids(const BadIds& bad);
// Checks ids that lie on the CPU.
void check_ids_on_cpu(const char* op, const char* list, const Ids& ids, int64_t rows);
// Checks on the CPU that each of `count` numbers is one of `rows` rows.
void check_places_on_cpu(const char* op, const char* name, const int64_t* places, int64_t count,
                         int64_t rows);
// Checks on the CPU that offsets of bags, at least one of them, share out `entries` entries.
void check_offsets_on_cpu(const char* op, const char* name, const Tensor& offsets, int64_t entries);

}  // namespace speedtorch

// Views of tensors as rows of bytes or as ids, and checks that an op's arguments fit each other.
// The ops call these after arguments.h has checked the kinds of their tensors. Each failure throws
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

// Contiguous ids of a batch. `keep` owns them; `wide` means int64, otherwise int32.
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
// The address of the tensor's first element and the bytes from there to the end of the last, for
// any strides. The tensor must not be empty.
std::pair<char*, int64_t> span_of(const Tensor& tensor);
// Whether the numbers are aligned to their size. Tensors over the bytes of a file may not be.
bool is_aligned(const Tensor& tensor);
// The data of an int64 tensor, or null if the tensor has no elements.
int64_t* data_of(const Tensor& tensor);
std::string shape_text(const std::vector<int64_t>& shape);
std::vector<int64_t> shape_of(const Tensor& tensor);
std::string device_text(const Tensor& tensor);
const char* dtype_text(const Tensor& tensor);

template <typename... Parts>
[[noreturn]] void throw_value_error(const char* op, const Parts&... message) {
  throw std::invalid_argument(text(op, ": ", message...));
}

// Throws for tensors without dimensions and for rows that are not contiguous inside. Any row stride
// is valid. Does not read the data.
Rows as_rows(const char* op, const char* name, const Tensor& tensor);
// Also throws for rows that overlap each other (expanded tensors), because writes to them would
// conflict.
Rows as_writable_rows(const char* op, const char* name, const Tensor& tensor);
// Does as_rows and throws unless the tensor is contiguous, has the dtype and row shape of `like`,
// and is on the device of `on`.
Rows as_rows_like(const char* op, const char* name, const Tensor& tensor, const char* like_name,
                  const Tensor& like, const char* on_name, const Tensor& on);
// Throws unless the ids are int32 or int64, and their number is at most 2^31 - 1.
void check_ids_kind(const char* op, const char* name, const Tensor& index);
// Views ids whose kind is checked. Copies ids that are not contiguous or not aligned, so call
// check_memory() first.
Ids as_ids(const Tensor& index);

void check_shape(const char* op, const char* name, const Tensor& tensor,
                 const std::vector<int64_t>& expected);
void check_dtype(const char* op, const char* name, const Tensor& tensor, const char* other_name,
                 const Tensor& other);
void check_contiguous(const char* op, const char* name, const Tensor& tensor);
void check_aligned(const char* op, const char* name, const Tensor& tensor);
// Throws unless the tensor is a contiguous, aligned int64 tensor on the device of `on`: [size], or
// [n] without a size, or [n, m] with two dimensions.
void check_list(const char* op, const char* name, const Tensor& tensor, const char* on_name,
                const Tensor& on, std::optional<int64_t> size = std::nullopt,
                int64_t dimensions = 1);
// Throws unless `count` is in [least, most]; returns it.
int64_t check_count(const char* op, const char* name, int64_t count, int64_t most,
                    int64_t least = 0);
// Throws for an empty list.
void check_fields(const char* op, const char* name, size_t count);
// Throws unless `tensor` is on the CPU or on the device of `compute`.
void check_device(const char* op, const char* name, const Tensor& tensor, const char* compute_name,
                  const Tensor& compute);
void check_same_device(const char* op, const char* name, const Tensor& tensor,
                       const char* compute_name, const Tensor& compute);

// The error in a batch's ids, found on the CPU or on the GPU. `list` names the argument. IdError
// says what `rows` and `id` are if they are not as below.
struct BadIds {
  IdError kind = IdError::kOutOfRange;
  const char* op = "";
  const char* list = "index";
  int64_t rows = 0;      // number of rows of the table
  int64_t id = 0;        // the first bad id
  int64_t position = 0;  // its index in the flattened ids
  int64_t bad_count = 0;
  int64_t count = 0;  // total number of ids
};

// Throws std::out_of_range (IndexError in Python), or for kOtherDistinct std::invalid_argument
// (ValueError).
[[noreturn]] void throw_bad_ids(const BadIds& bad);
// Throws for a bad id among ids on the CPU.
void check_ids_on_cpu(const char* op, const char* list, const Ids& ids, int64_t rows);
// Throws unless each of `count` places on the CPU is in [0, rows).
void check_places_on_cpu(const char* op, const char* name, const int64_t* places, int64_t count,
                         int64_t rows);
// Throws unless the offsets of bags on the CPU, at least one, partition `entries` entries.
void check_offsets_on_cpu(const char* op, const char* name, const Tensor& offsets, int64_t entries);

}  // namespace speedtorch

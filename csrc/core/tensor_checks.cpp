// Implements the argument checks shared by all ops; see tensor_checks.h.

#include "core/tensor_checks.h"

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <limits>

#include "core/parallel_for.h"

namespace speedtorch {
namespace {

constexpr int64_t kMaxIds = std::numeric_limits<int32_t>::max();
// Checking an id takes a fraction of a ns: smaller tasks cost more than they save.
constexpr int64_t kIdsPerTask = 1 << 18;

template <typename Id>
bool all_within(const Id* ids, int64_t begin, int64_t end, int64_t rows) {
  // The sign bit of either term marks an id below 0 or above the last row. No branch, so that
  // compilers vectorize the loop.
  const uint64_t last = static_cast<uint64_t>(rows) - 1;
  uint64_t signs = 0;
  for (int64_t i = begin; i < end; ++i) {
    const uint64_t id = static_cast<uint64_t>(static_cast<int64_t>(ids[i]));
    signs |= id | (last - id);
  }
  return static_cast<int64_t>(signs) >= 0;
}

}  // namespace

int64_t element_bytes(const Tensor& tensor) {
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
}

std::pair<char*, int64_t> span_of(const Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {static_cast<char*>(tensor.data_ptr()), (last + 1) * element_bytes(tensor)};
}

bool is_aligned(const Tensor& tensor) {
  return tensor.numel() == 0 || reinterpret_cast<uint64_t>(tensor.data_ptr()) %
                                        static_cast<uint64_t>(element_bytes(tensor)) ==
                                    0;
}

int64_t* data_of(const Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : static_cast<int64_t*>(tensor.data_ptr());
}

std::vector<int64_t> shape_of(const Tensor& tensor) {
  std::vector<int64_t> shape(static_cast<size_t>(tensor.dim()));
  for (size_t d = 0; d < shape.size(); ++d) shape[d] = tensor.size(static_cast<int64_t>(d));
  return shape;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string result = "[";
  for (size_t d = 0; d < shape.size(); ++d) result += (d ? ", " : "") + text(shape[d]);
  return result + "]";
}

std::string device_text(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  return (tensor.is_cuda() ? "cuda:" : "device ") + text(tensor.get_device_index());
}

const char* dtype_text(const Tensor& tensor) {
  return torch::headeronly::toString(tensor.scalar_type());
}

Rows as_rows(const char* op, const char* name, const Tensor& tensor) {
  const int64_t dims = tensor.dim();
  if (dims == 0) {
    throw_value_error(op, name, " must have at least one dimension [rows, ...], got a scalar");
  }
  const int64_t item = element_bytes(tensor);
  int64_t columns = 1;
  for (int64_t d = dims - 1; d >= 1; --d) {
    if (tensor.numel() > 0 && tensor.size(d) != 1 && tensor.stride(d) != columns) {
      throw_value_error(op, "each row of ", name, " must be contiguous, but dimension ", d,
                        " has stride ", tensor.stride(d), ", expected ", columns,
                        ". Call .contiguous() or pass a tensor with whole rows");
    }
    columns *= tensor.size(d);
  }
  Rows rows;
  rows.count = tensor.size(0);
  rows.row_bytes = columns * item;
  rows.stride_bytes = tensor.stride(0) * item;
  rows.base = tensor.numel() == 0 ? nullptr : static_cast<char*>(tensor.data_ptr());
  return rows;
}

Rows as_writable_rows(const char* op, const char* name, const Tensor& tensor) {
  const Rows rows = as_rows(op, name, tensor);
  if (rows.count > 1 && rows.stride_bytes < rows.row_bytes) {
    throw_value_error(op, "the rows of ", name, " overlap (row stride ", rows.stride_bytes,
                      " bytes, row ", rows.row_bytes,
                      " bytes). An expanded tensor cannot be written to; pass its .clone()");
  }
  return rows;
}

Rows as_rows_like(const char* op, const char* name, const Tensor& tensor, const char* like_name,
                  const Tensor& like, const char* on_name, const Tensor& on) {
  Rows rows = as_rows(op, name, tensor);
  check_contiguous(op, name, tensor);
  check_dtype(op, name, tensor, like_name, like);
  check_same_device(op, name, tensor, on_name, on);
  std::vector<int64_t> expected = shape_of(like);
  expected[0] = tensor.size(0);
  check_shape(op, name, tensor, expected);
  rows.stride_bytes = rows.row_bytes;  // torch's stride is arbitrary for a single row
  return rows;
}

void check_ids_kind(const char* op, const char* name, const Tensor& index) {
  const ScalarType dtype = index.scalar_type();
  if (dtype != ScalarType::Long && dtype != ScalarType::Int) {
    throw_value_error(op, name, " must be int32 or int64, got ", dtype_text(index));
  }
  if (index.numel() > kMaxIds) {
    throw_value_error(op, name, " has ", index.numel(), " ids, at most ", kMaxIds,
                      " are allowed in one call");
  }
}

Ids as_ids(const Tensor& index) {
  Ids ids;
  ids.keep = index.is_contiguous() ? index : torch::stable::contiguous(index);
  if (!is_aligned(ids.keep)) ids.keep = torch::stable::clone(ids.keep);
  ids.count = index.numel();
  ids.data = ids.count == 0 ? nullptr : ids.keep.data_ptr();
  ids.wide = index.scalar_type() == ScalarType::Long;
  ids.on_cpu = index.is_cpu();
  return ids;
}

void check_shape(const char* op, const char* name, const Tensor& tensor,
                 const std::vector<int64_t>& expected) {
  if (shape_of(tensor) != expected) {
    throw_value_error(op, name, " has shape ", shape_text(shape_of(tensor)), ", expected ",
                      shape_text(expected));
  }
}

void check_dtype(const char* op, const char* name, const Tensor& tensor, const char* other_name,
                 const Tensor& other) {
  if (tensor.scalar_type() != other.scalar_type()) {
    throw_value_error(op, name, " has dtype ", dtype_text(tensor), ", expected ", dtype_text(other),
                      ", the dtype of ", other_name);
  }
}

void check_contiguous(const char* op, const char* name, const Tensor& tensor) {
  if (!tensor.is_contiguous()) throw_value_error(op, name, " must be contiguous");
}

void check_aligned(const char* op, const char* name, const Tensor& tensor) {
  if (is_aligned(tensor)) return;
  throw_value_error(op, name, " must begin at an address that is a multiple of its element size, ",
                    element_bytes(tensor), " bytes. Pass its .clone()");
}

void check_list(const char* op, const char* name, const Tensor& tensor, const char* on_name,
                const Tensor& on, std::optional<int64_t> size, int64_t dimensions) {
  if (tensor.scalar_type() != ScalarType::Long || tensor.dim() != dimensions ||
      !tensor.is_contiguous()) {
    throw_value_error(op, name, " must be a contiguous int64 tensor ",
                      dimensions == 1 ? "[n]" : "[n, m]");
  }
  check_aligned(op, name, tensor);
  check_same_device(op, name, tensor, on_name, on);
  if (size) check_shape(op, name, tensor, {*size});
}

int64_t check_count(const char* op, const char* name, int64_t count, int64_t most, int64_t least) {
  if (count < least || count > most) {
    throw_value_error(op, name, " must be ", least, " to ", most, ", got ", count);
  }
  return count;
}

void check_fields(const char* op, const char* name, size_t count) {
  if (count == 0) throw_value_error(op, name, " must have at least one field, got an empty list");
}

void check_device(const char* op, const char* name, const Tensor& tensor, const char* compute_name,
                  const Tensor& compute) {
  if (!tensor.is_cpu()) check_same_device(op, name, tensor, compute_name, compute);
}

void check_same_device(const char* op, const char* name, const Tensor& tensor,
                       const char* compute_name, const Tensor& compute) {
  const bool same = tensor.is_cpu() ? compute.is_cpu()
                                    : tensor.is_cuda() && compute.is_cuda() &&
                                          tensor.get_device_index() == compute.get_device_index();
  if (!same) {
    throw_value_error(op, name, " is on ", device_text(tensor), " but ", compute_name, " is on ",
                      device_text(compute), "; move one of them with .to()");
  }
}

void throw_bad_ids(const BadIds& bad) {
  const std::string id = text("id ", bad.id, " at position ", bad.position, " of ", bad.list);
  std::string what;
  switch (bad.kind) {
    case IdError::kOutOfRange:
      what = text(id, " is out of range for a table of ", bad.rows, " rows (", bad.bad_count,
                  " of ", bad.count, " ids are out of range)");
      break;
    case IdError::kRepeated:
      what = text(id, " appears twice (", bad.bad_count, " of ", bad.count,
                  " ids are repeated). The ids of one list must be unique");
      break;
    case IdError::kForeignPlan:
      what = text("the plan of ", bad.list, " was made for a table of ", bad.id,
                  " rows, but this table has ", bad.rows);
      break;
    case IdError::kUnordered:
      what = id + " is not larger than the previous id. Ids with places must be strictly ascending";
      break;
    case IdError::kBadPlace:
      what = text("place ", bad.id, " of the row at position ", bad.position, " of ", bad.list,
                  " is out of range for ", bad.rows, " rows");
      break;
    case IdError::kOtherDistinct:
      throw_value_error(bad.op, "distinct is ", bad.rows, ", but the plan of ", bad.list, " has ",
                        bad.id, " unique ids");
  }
  throw std::out_of_range(text(bad.op, ": ", what, "; no row was moved"));
}

void check_ids_on_cpu(const char* op, const char* list, const Ids& ids, int64_t rows) {
  std::atomic<bool> all_good{true};
  parallel_for(0, ids.count, kIdsPerTask, [&](int64_t begin, int64_t end) {
    const bool good = ids.wide
                          ? all_within(static_cast<const int64_t*>(ids.data), begin, end, rows)
                          : all_within(static_cast<const int32_t*>(ids.data), begin, end, rows);
    if (!good) all_good = false;
  });
  if (all_good) return;
  auto is_bad = [&](int64_t i) {
    return static_cast<uint64_t>(ids.at(i)) >= static_cast<uint64_t>(rows);
  };
  BadIds bad{
      .kind = IdError::kOutOfRange, .op = op, .list = list, .rows = rows, .count = ids.count};
  for (int64_t i = ids.count - 1; i >= 0; --i) {
    if (!is_bad(i)) continue;
    ++bad.bad_count;
    bad.position = i;
    bad.id = ids.at(i);
  }
  throw_bad_ids(bad);
}

void check_places_on_cpu(const char* op, const char* name, const int64_t* places, int64_t count,
                         int64_t rows) {
  for (int64_t i = 0; i < count; ++i) {
    if (places[i] >= 0 && places[i] < rows) continue;
    throw_value_error(op, name, " has ", places[i], " at position ", i,
                      ", which is out of range for ", rows, " rows");
  }
}

void check_offsets_on_cpu(const char* op, const char* name, const Tensor& offsets,
                          int64_t entries) {
  const int64_t* all = data_of(offsets);
  const int64_t last = offsets.numel() - 1;
  for (int64_t i = 0; i <= last; ++i) {
    const int64_t least = i == 0 ? 0 : all[i - 1];
    const int64_t most = i == 0 ? 0 : entries;
    if (all[i] >= least && all[i] <= most && (i < last || all[i] == entries)) continue;
    throw_value_error(op, name, " has ", all[i], " at position ", i,
                      ". Offsets must ascend from 0 to ", entries, ", the number of entries");
  }
}

}  // namespace speedtorch

// Checks of a swap's arguments; see swap_rows.h.

#include "ops/swap_rows.h"

#include <string>

namespace speedtorch {
namespace {

std::string item(const char* list, size_t k) {
  return std::string(list) + "[" + std::to_string(k) + "]";
}

}  // namespace

std::vector<SwapRows> check_swap(const char* op, const Tensors& host, const Tensors& leaving,
                                 const Tensors& arriving, int64_t evicted, int64_t loaded) {
  if (host.empty()) throw_value_error(op, "host must name at least one field, got an empty list");
  if (leaving.size() != host.size() || arriving.size() != host.size()) {
    throw_value_error(op, "host, leaving and arriving must be lists of one length, got " +
                              std::to_string(host.size()) + ", " + std::to_string(leaving.size()) +
                              " and " + std::to_string(arriving.size()));
  }
  std::vector<SwapRows> fields;
  for (size_t k = 0; k < host.size(); ++k) {
    const std::string host_name = item("host", k);
    SwapRows field;
    field.host = as_writable_rows(op, host_name.c_str(), host[k]);
    if (host[k].size(0) != host[0].size(0)) {
      throw_value_error(op, host_name + " has " + std::to_string(host[k].size(0)) +
                                " rows, host[0] has " + std::to_string(host[0].size(0)) +
                                "; all fields of a table have the same rows");
    }
    check_device(op, host_name.c_str(), host[k], "arriving[0]", arriving[0]);
    auto check_side = [&](const char* list, const Tensor& side, int64_t needed) {
      const std::string name = item(list, k);
      const Rows rows = as_rows(op, name.c_str(), side);
      check_contiguous(op, name.c_str(), side);
      check_dtype(op, name.c_str(), side, host_name.c_str(), host[k]);
      check_same_device(op, name.c_str(), side, "arriving[0]", arriving[0]);
      std::vector<int64_t> expected = shape_of(host[k]);
      expected[0] = side.size(0);
      check_shape(op, name.c_str(), side, expected);
      if (side.size(0) < needed) {
        throw_value_error(op, name + " has " + std::to_string(side.size(0)) + " rows, at least " +
                                  std::to_string(needed) + " are needed");
      }
      return rows;
    };
    field.leaving = check_side("leaving", leaving[k], evicted);
    field.arriving = check_side("arriving", arriving[k], loaded);
    fields.push_back(field);
  }
  return fields;
}

}  // namespace speedtorch

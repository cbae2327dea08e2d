// clear_rows: fills the rows of each field beyond a count with zeros. This file has the checks and
// the CPU loop; the GPU kernel is in clear_rows.cu.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "call/arguments.h"
#include "core/gpu.h"
#include "core/registration.h"
#include "core/tensor_checks.h"
#include "ops/launchers.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "clear_rows";

void clear_rows(const Tensors& rows, const Tensor& count) {
  const Arguments all(kOp, {written("rows", rows, true), read("count", count)});
  check_fields(kOp, "rows", rows.size());
  std::vector<Rows> fields;
  for (size_t k = 0; k < rows.size(); ++k) {
    const std::string name = item("rows", k);
    fields.push_back(
        as_rows_like(kOp, name.c_str(), rows[k], name.c_str(), rows[k], "rows[0]", rows[0]));
  }
  check_list(kOp, "count", count, "rows[0]", rows[0], 1);
  all.check_memory();
  if (count.is_cpu()) {
    for (const Rows& field : fields) check_count(kOp, "count", *data_of(count), field.count);
    all.mark_written();
    for (const Rows& field : fields) {
      const int64_t bytes = (field.count - *data_of(count)) * field.row_bytes;
      if (bytes > 0) std::memset(field.row(*data_of(count)), 0, static_cast<size_t>(bytes));
    }
    return;
  }
  const CurrentStream stream(kOp, count);
  all.mark_written();
  if constexpr (kWithCuda) {
    for (size_t first = 0; first < fields.size(); first += kFieldsPerLaunch) {
      const auto field_count = std::min<size_t>(fields.size() - first, kFieldsPerLaunch);
      check_cuda(launch_clear_rows(&fields[first], static_cast<int>(field_count), data_of(count),
                                   stream.get()),
                 kOp);
    }
  }
}

const Ops kOps{
    {"clear_rows(Tensor(a! -> *)[] rows, Tensor count) -> ()", TORCH_BOX(&clear_rows)},
};

}  // namespace
}  // namespace speedtorch

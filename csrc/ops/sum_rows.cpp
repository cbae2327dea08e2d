// sum_rows: the rows of each distinct id of a batch, added up: the gradient of looking them up.
// Checks and the CPU loop; GPU kernels: .cu.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "call/arguments.h"
#include "call/list_ops.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/tensor_checks.h"
#include "ops/float_kind.h"
#include "ops/sum_rows_launch.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "sum_rows";
constexpr const char* kIndex = "index";  // whose plan it is

template <typename T>
void sum_on_cpu(const SumRows& work, const PlanView& plan) {
  using Sum = SumOf<T>;
  const T* rows = static_cast<const T*>(work.rows);
  T* out = static_cast<T*>(work.out);
  torch::stable::parallel_for(0, work.distinct, 64, [&](int64_t begin, int64_t end) {
    std::vector<Sum> sum(static_cast<size_t>(work.columns));
    for (int64_t k = begin; k < end; ++k) {
      std::fill(sum.begin(), sum.end(), Sum{0});
      for (int64_t entry = plan.offsets[k]; entry < plan.offsets[k + 1]; ++entry) {
        const int64_t place = plan.order[entry] - work.begin;
        if (place < 0 || place >= work.count) continue;
        const T* row = rows + (work.source ? work.source[place] : place) * work.row_step;
        for (int64_t c = 0; c < work.columns; ++c) {
          sum[static_cast<size_t>(c)] += static_cast<Sum>(row[c]);
        }
      }
      for (int64_t c = 0; c < work.columns; ++c) {
        out[k * work.columns + c] = static_cast<T>(sum[static_cast<size_t>(c)]);
      }
    }
  });
}

// Which rows of the batch.
void check_part(int64_t begin, int64_t count, int64_t entries) {
  if (begin < 0 || count > entries || begin > entries - count) {
    const std::string end =
        begin < 0 ? std::to_string(begin + count)
                  : std::to_string(static_cast<uint64_t>(begin) + static_cast<uint64_t>(count));
    throw_value_error(kOp, "rows ", begin, " to ", end, " are not all among the ", entries,
                      " ids of the plan");
  }
}

// With `named` so many of the sums are some, and `distinct` is how many there are room for.
Tensor summed(const Tensor& rows, const Tensors& plan, int64_t table_rows, int64_t begin,
              int64_t distinct, const std::optional<Tensor>& named,
              const std::optional<Tensor>& source) {
  const Arguments all(
      kOp, {read("rows", rows), read("plan", plan), read("named", named), read("source", source)});
  const NumberKind kind = float_kind_of(kOp, "rows", rows);
  const Rows shape = as_rows(kOp, "rows", rows);
  check_aligned(kOp, "rows", rows);
  const int64_t entries = plan.empty() ? 0 : plan[0].numel();
  check_plan(kOp, kIndex, plan, entries, rows);
  if (source) check_list(kOp, "source", *source, "rows", rows);
  const int64_t count = source ? source->numel() : shape.count;
  check_part(begin, count, entries);
  if (named) {
    check_list(kOp, "named", *named, "rows", rows);
    check_shape(kOp, "named", *named, {1});
  }
  const int64_t most = named ? std::numeric_limits<int64_t>::max() : entries;
  if (distinct < 0 || distinct > most) {
    throw_value_error(kOp, named ? "capacity" : "distinct", " must be 0 to ", most,
                      named ? "" : ", the ids of the plan", ", got ", distinct);
  }
  all.check_memory();
  const PlanView view = view_plan(kOp, kIndex, plan, entries, table_rows);
  int64_t sums = distinct;  // that the CPU computes
  if (rows.is_cpu()) {
    check_offsets(kOp, kIndex, view);
    if (named) sums = check_count(kOp, "named", *data_of(*named), distinct);
    if (view.status->distinct != sums && !(named && sums == 0)) {
      throw_bad_ids({.kind = IdError::kOtherDistinct,
                     .op = kOp,
                     .list = kIndex,
                     .rows = sums,
                     .id = view.status->distinct});
    }
    if (source) check_places_on_cpu(kOp, "source", *source, shape.count);
  }
  std::vector<int64_t> out_shape = shape_of(rows);
  out_shape[0] = distinct;
  const Tensor out = new_tensor(kOp, out_shape, rows.scalar_type(), rows);
  if (out.numel() == 0) return out;
  const int64_t columns = out.numel() / distinct;
  const SumRows work{.rows = rows.data_ptr(),
                     .row_count = shape.count,
                     .row_step = shape.stride_bytes / element_bytes(rows),
                     .source = source ? data_of(*source) : nullptr,
                     .begin = begin,
                     .count = count,
                     .columns = columns,
                     .out = out.mutable_data_ptr(),
                     .distinct = rows.is_cpu() ? sums : distinct,
                     .table_rows = table_rows,
                     .named = named ? data_of(*named) : nullptr};
  if (rows.is_cpu()) {
    const auto bytes = static_cast<size_t>((distinct - sums) * columns * element_bytes(rows));
    auto* end = static_cast<char*>(work.out) + sums * columns * element_bytes(rows);
    std::memset(end, 0, bytes);
    using torch::headeronly::BFloat16, torch::headeronly::Half;
    with_float_type<Half, BFloat16>(kind,
                                    [&](auto number) { sum_on_cpu<decltype(number)>(work, view); });
    return out;
  }
  const CurrentStream stream(kOp, rows);
  if constexpr (kWithCuda) {
    const Tensor scratch =
        new_tensor(kOp, {sum_scratch_bytes(kind, entries, columns)}, ScalarType::Byte, rows);
    check_cuda(launch_sum_rows(kind, work, view, scratch.data_ptr(), error_record(stream.device()),
                               stream.get()),
               kOp);
  }
  return out;
}

Tensor sum_rows(const Tensor& rows, const Tensors& plan, int64_t table_rows, int64_t begin,
                int64_t distinct, const std::optional<Tensor>& source) {
  return summed(rows, plan, table_rows, begin, distinct, std::nullopt, source);
}

// Its third argument tells it from sum_rows, as TorchScript's archives name no overload.
Tensor sum_rows_counted(const Tensor& rows, const Tensors& plan, const Tensor& named,
                        int64_t table_rows, int64_t begin, int64_t capacity,
                        const std::optional<Tensor>& source) {
  return summed(rows, plan, table_rows, begin, capacity, named, source);
}

const ListOps kListOps{
    {"sum_rows(Tensor rows, Tensor[] plan, int table_rows, int begin, int distinct, Tensor? "
     "source=None) -> Tensor",
     TORCH_BOX(&sum_rows)},
    {"sum_rows.counted(Tensor rows, Tensor[] plan, Tensor named, int table_rows, int begin, int "
     "capacity, Tensor? source=None) -> Tensor",
     TORCH_BOX(&sum_rows_counted)},
};

}  // namespace
}  // namespace speedtorch

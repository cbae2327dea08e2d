// sum_rows: adds up the gradient rows of each distinct id, for the backward of a lookup. pool_rows:
// sums or averages the rows of each bag, for the lookups of all features of a collection at once.
// This file has the checks and the CPU loops; the GPU kernels are in row_sums.cu.

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/parallel_for.h"
#include "core/registration.h"
#include "core/tensor_checks.h"
#include "ops/launchers.h"
#include "plan/plan.h"

namespace speedtorch {
namespace {

constexpr const char* kSum = "sum_rows";
constexpr const char* kPool = "pool_rows";
constexpr const char* kIndex = "index";  // the id list of the plan, for messages

NumberKind float_kind_of(const char* op, const Tensor& rows) {
  switch (rows.scalar_type()) {
    case ScalarType::Half:
      return NumberKind::kHalf;
    case ScalarType::BFloat16:
      return NumberKind::kBFloat16;
    case ScalarType::Float:
      return NumberKind::kFloat;
    case ScalarType::Double:
      return NumberKind::kDouble;
    default:
      throw_value_error(op, "rows must be float16, bfloat16, float32 or float64, got ",
                        dtype_text(rows));
  }
}

// A sum of rows, accumulated in call order.
template <typename T>
class RowSum {
 public:
  explicit RowSum(int64_t columns) : sum_(static_cast<size_t>(columns)) {}

  void add(const T* row) {
    for (size_t c = 0; c < sum_.size(); ++c) sum_[c] += static_cast<SumOf<T>>(row[c]);
  }
  // Writes the sum divided by `count` and resets the sum.
  void store(T* out, int64_t count) {
    for (size_t c = 0; c < sum_.size(); ++c) {
      out[c] = static_cast<T>(std::exchange(sum_[c], 0) / static_cast<SumOf<T>>(count));
    }
  }

 private:
  std::vector<SumOf<T>> sum_;
};

// Calls use(k, sum, number of the kind's type) for k < count on torch's threads.
template <typename Use>
void for_sums(NumberKind kind, int64_t count, int64_t columns, const Use& use) {
  using torch::headeronly::BFloat16, torch::headeronly::Half;
  with_float_type<Half, BFloat16>(kind, [&](auto number) {
    parallel_for(0, count, 64, [&](int64_t begin, int64_t end) {
      RowSum<decltype(number)> sum(columns);
      for (int64_t k = begin; k < end; ++k) use(k, sum, number);
    });
  });
}

// ---- sum_rows

void sum_on_cpu(NumberKind kind, const SumRows& work, const PlanView& plan) {
  for_sums(kind, work.distinct, work.columns, [&](int64_t k, auto& sum, auto number) {
    using T = decltype(number);
    for (int64_t entry = plan.offsets[k]; entry < plan.offsets[k + 1]; ++entry) {
      const int64_t place = plan.order[entry] - work.begin;
      if (place < 0 || place >= work.count) continue;
      sum.add(static_cast<const T*>(work.rows) +
              (work.source ? work.source[place] : place) * work.row_step);
    }
    sum.store(static_cast<T*>(work.out) + k * work.columns, 1);
  });
}

// Throws unless [begin, begin + count) lies in the batch.
void check_part(int64_t begin, int64_t count, int64_t entries) {
  if (begin < 0 || count > entries || begin > entries - count) {
    const std::string end =
        begin < 0 ? std::to_string(begin + count)
                  : std::to_string(static_cast<uint64_t>(begin) + static_cast<uint64_t>(count));
    throw_value_error(kSum, "rows ", begin, " to ", end, " must be within the ", entries,
                      " ids of the plan");
  }
}

// `distinct`: the number of rows of the result. `named`: the number of sums to compute; further
// rows are zeros.
Tensor sum_rows(const Tensor& rows, const Tensors& plan, int64_t table_rows, int64_t begin,
                int64_t distinct, const std::optional<Tensor>& source,
                const std::optional<Tensor>& named) {
  const Arguments all(
      kSum, {read("rows", rows), read("plan", plan), read("named", named), read("source", source)});
  const NumberKind kind = float_kind_of(kSum, rows);
  const Rows shape = as_rows(kSum, "rows", rows);
  check_aligned(kSum, "rows", rows);
  const int64_t entries = plan.size() < 3 ? 0 : plan[2].numel();
  check_plan(kSum, kIndex, plan, entries, rows, true);
  if (source) check_list(kSum, "source", *source, "rows", rows);
  const int64_t count = source ? source->numel() : shape.count;
  check_part(begin, count, entries);
  if (named) check_list(kSum, "named", *named, "rows", rows, 1);
  const int64_t most = named ? std::numeric_limits<int64_t>::max() : entries;
  if (distinct < 0 || distinct > most) {
    throw_value_error(kSum, named ? "capacity" : "distinct", " must be 0 to ", most,
                      named ? "" : ", the number of ids of the plan", ", got ", distinct);
  }
  all.check_memory();
  int64_t sums = distinct;  // sums that the CPU computes
  if (named && rows.is_cpu()) sums = check_count(kSum, "named", *data_of(*named), distinct);
  // A plan of bad ids has no sums.
  const bool has_sums = !(named && rows.is_cpu() && sums == 0);
  const PlanView view = has_sums ? view_plan(kSum, kIndex, plan, entries, table_rows) : PlanView{};
  if (rows.is_cpu() && has_sums) {
    check_offsets(kSum, kIndex, view);
    if (view.status->distinct != sums) {
      throw_bad_ids({.kind = IdError::kOtherDistinct,
                     .op = kSum,
                     .list = kIndex,
                     .rows = sums,
                     .id = view.status->distinct});
    }
    if (source) check_places_on_cpu(kSum, "source", data_of(*source), count, shape.count);
  }
  std::vector<int64_t> out_shape = shape_of(rows);
  out_shape[0] = distinct;
  const Tensor out = new_tensor(kSum, out_shape, rows.scalar_type(), rows);
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
    sum_on_cpu(kind, work, view);
    return out;
  }
  const CurrentStream stream(kSum, rows);
  if constexpr (kWithCuda) {
    const Tensor scratch =
        new_tensor(kSum, {sum_scratch_bytes(kind, entries, columns)}, ScalarType::Byte, rows);
    const Report about{error_record(stream.device()), Op::kSum, IdList::kIndex, table_rows};
    check_cuda(launch_sum_rows(kind, work, view, scratch.data_ptr(), about, stream.get()), kSum);
  }
  return out;
}

// ---- pool_rows

// Adds and divides in the order of torch's embedding_bag; bitwise identical in single and double
// precision.
void pool_on_cpu(NumberKind kind, const PoolRows& work) {
  for_sums(kind, work.bags(), work.columns, [&](int64_t bag, auto& sum, auto number) {
    using T = decltype(number);
    const int64_t first = work.offsets[bag], last = work.offsets[bag + 1];
    for (int64_t entry = first; entry < last; ++entry) {
      sum.add(static_cast<const T*>(work.rows) + work.places[entry] * work.columns);
    }
    const int64_t feature = bag / work.samples, sample = bag % work.samples;
    sum.store(static_cast<T*>(work.out) + (sample * work.features + feature) * work.columns,
              work.mean && last > first ? last - first : 1);
  });
}

Tensor pool_rows(const Tensor& rows, const Tensor& places, const Tensor& offsets, int64_t features,
                 bool mean) {
  const Arguments all(kPool,
                      {read("rows", rows), read("places", places), read("offsets", offsets)});
  const NumberKind kind = float_kind_of(kPool, rows);
  if (rows.dim() != 2) {
    throw_value_error(kPool, "rows must be [rows, columns], got shape ",
                      shape_text(shape_of(rows)));
  }
  check_contiguous(kPool, "rows", rows);
  check_aligned(kPool, "rows", rows);
  check_list(kPool, "places", places, "rows", rows);
  check_list(kPool, "offsets", offsets, "rows", rows);
  const int64_t bags = offsets.numel() - 1;
  if (bags < 0) throw_value_error(kPool, "offsets must have one entry more than there are bags");
  if (features < 0 || (features == 0 ? bags > 0 : bags % features != 0)) {
    throw_value_error(kPool, "features must divide the ", bags, " bags, got ", features);
  }
  all.check_memory();
  if (rows.is_cpu()) {
    check_offsets_on_cpu(kPool, "offsets", offsets, places.numel());
    check_places_on_cpu(kPool, "places", data_of(places), places.numel(), rows.size(0));
  }
  const Tensor out = new_tensor(kPool, {bags, rows.size(1)}, rows.scalar_type(), rows);
  if (out.numel() == 0) return out;
  const PoolRows work{.rows = rows.data_ptr(),
                      .row_count = rows.size(0),
                      .columns = rows.size(1),
                      .places = data_of(places),
                      .count = places.numel(),
                      .offsets = data_of(offsets),
                      .features = features,
                      .samples = bags / features,
                      .mean = mean,
                      .out = out.mutable_data_ptr()};
  if (rows.is_cpu()) {
    pool_on_cpu(kind, work);
    return out;
  }
  const CurrentStream stream(kPool, rows);
  if constexpr (kWithCuda) check_cuda(launch_pool_rows(kind, work, stream.get()), kPool);
  return out;
}

const Ops kOps{
    {"pool_rows(Tensor rows, Tensor places, Tensor offsets, int features, bool mean) -> Tensor",
     TORCH_BOX(&pool_rows)},
    {"sum_rows(Tensor rows, Tensor[] plan, int table_rows, int begin, int distinct, Tensor? "
     "source=None, Tensor? named=None) -> Tensor",
     TORCH_BOX(&sum_rows)},
};

}  // namespace
}  // namespace speedtorch

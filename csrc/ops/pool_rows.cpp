// pool_rows: the rows that bags of several features name, added up: one lookup of them all. Checks
// and the CPU loop; GPU kernel: .cu.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/tensor_checks.h"
#include "ops/float_kind.h"
#include "ops/pool_rows_launch.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "pool_rows";

// Adds and divides as torch's embedding_bag does, to the same bits in single and double precision.
template <typename T>
void pool_on_cpu(const PoolRows& work) {
  using Sum = SumOf<T>;
  const T* rows = static_cast<const T*>(work.rows);
  torch::stable::parallel_for(0, work.bags(), 64, [&](int64_t begin, int64_t end) {
    std::vector<Sum> sum(static_cast<size_t>(work.columns));
    for (int64_t bag = begin; bag < end; ++bag) {
      std::fill(sum.begin(), sum.end(), Sum{0});
      const int64_t first = work.offsets[bag], last = work.offsets[bag + 1];
      for (int64_t entry = first; entry < last; ++entry) {
        const T* row = rows + work.places[entry] * work.columns;
        for (int64_t c = 0; c < work.columns; ++c) {
          sum[static_cast<size_t>(c)] += static_cast<Sum>(row[c]);
        }
      }
      const Sum count = static_cast<Sum>(work.mean && last > first ? last - first : 1);
      const int64_t feature = bag / work.samples, sample = bag % work.samples;
      T* out = static_cast<T*>(work.out) + (sample * work.features + feature) * work.columns;
      for (int64_t c = 0; c < work.columns; ++c) {
        out[c] = static_cast<T>(sum[static_cast<size_t>(c)] / count);
      }
    }
  });
}

Tensor pool_rows(const Tensor& rows, const Tensor& places, const Tensor& offsets, int64_t features,
                 bool mean) {
  const Arguments all(kOp, {read("rows", rows), read("places", places), read("offsets", offsets)});
  const NumberKind kind = float_kind_of(kOp, "rows", rows);
  if (rows.dim() != 2) {
    throw_value_error(kOp, "rows must be [rows, columns], got shape ", shape_text(shape_of(rows)));
  }
  check_contiguous(kOp, "rows", rows);
  check_aligned(kOp, "rows", rows);
  check_list(kOp, "places", places, "rows", rows);
  check_list(kOp, "offsets", offsets, "rows", rows);
  const int64_t bags = offsets.numel() - 1;
  if (bags < 0) throw_value_error(kOp, "offsets must hold one number more than there are bags");
  if (features < 0 || (features == 0 ? bags > 0 : bags % features != 0)) {
    throw_value_error(kOp, "features must divide the ", bags, " bags, got ", features);
  }
  all.check_memory();
  if (rows.is_cpu()) {
    check_offsets_on_cpu(kOp, "offsets", offsets, places.numel());
    check_places_on_cpu(kOp, "places", places, rows.size(0));
  }
  const Tensor out = new_tensor(kOp, {bags, rows.size(1)}, rows.scalar_type(), rows);
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
    using torch::headeronly::BFloat16, torch::headeronly::Half;
    with_float_type<Half, BFloat16>(kind,
                                    [&](auto number) { pool_on_cpu<decltype(number)>(work); });
    return out;
  }
  const CurrentStream stream(kOp, rows);
  if constexpr (kWithCuda) check_cuda(launch_pool_rows(kind, work, stream.get()), kOp);
  return out;
}

}  // namespace
}  // namespace speedtorch

STABLE_TORCH_LIBRARY_FRAGMENT(speedtorch, m) {
  m.def("pool_rows(Tensor rows, Tensor places, Tensor offsets, int features, bool mean) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(speedtorch, CompositeExplicitAutograd, m) {
  m.impl("pool_rows", TORCH_BOX(&speedtorch::pool_rows));
}

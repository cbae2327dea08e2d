// table_ids: maps the ids of several features to rows of one table with all their rows, and to the
// bag of each id. This file has the checks and the CPU loop; the GPU kernel is in table_ids.cu.

#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/parallel_for.h"
#include "core/registration.h"
#include "core/tensor_checks.h"
#include "ops/launchers.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "table_ids";

void find_on_cpu(const TableIds& work, const Ids& ids) {
  const int64_t bags = work.features * work.samples;
  parallel_for(0, bags, 256, [&](int64_t begin, int64_t end) {
    for (int64_t bag = begin; bag < end; ++bag) {
      const int64_t feature = bag / work.samples, sample = bag % work.samples;
      const int64_t first_row = work.ranges[2 * feature], rows = work.ranges[2 * feature + 1];
      for (int64_t i = work.offsets[bag]; i < work.offsets[bag + 1]; ++i) {
        const int64_t id = ids.at(i);
        work.rows[i] = id >= 0 && id < rows ? id + first_row : -1;
        work.bags[i] = sample * work.features + feature;
      }
    }
  });
}

// Whether `bags` equals features * samples, without the product, which may overflow.
bool is_product(int64_t bags, int64_t features, int64_t samples) {
  if (features == 0 || samples == 0) return bags == 0;
  return bags % features == 0 && bags / features == samples;
}

void check_fit(const Tensor& ids, const Tensor& offsets, const Tensor& ranges, int64_t samples) {
  check_ids_kind(kOp, "ids", ids);
  if (ids.dim() != 1 || !ids.is_contiguous()) {
    throw_value_error(kOp, "ids must be a contiguous tensor [n]");
  }
  check_aligned(kOp, "ids", ids);
  check_list(kOp, "offsets", offsets, "ids", ids);
  check_list(kOp, "ranges", ranges, "ids", ids, std::nullopt, 2);
  check_shape(kOp, "ranges", ranges, {ranges.size(0), 2});
  if (samples < 0) throw_value_error(kOp, "samples must not be negative, got ", samples);
  const int64_t features = ranges.size(0), bags = offsets.numel() - 1;
  if (!is_product(bags, features, samples)) {
    throw_value_error(kOp, "offsets has ", offsets.numel(), " entries, expected one more than ",
                      features, " features times ", samples, " samples");
  }
  if (bags == 0 && ids.numel() > 0) {
    throw_value_error(kOp, "ids must be empty if there are no bags, got ", ids.numel(), " ids");
  }
}

std::vector<Tensor> table_ids(const Tensor& ids, const Tensor& offsets, const Tensor& ranges,
                              int64_t samples) {
  const Arguments all(kOp, {read("ids", ids), read("offsets", offsets), read("ranges", ranges)});
  check_fit(ids, offsets, ranges, samples);
  all.check_memory();
  if (ids.is_cpu()) check_offsets_on_cpu(kOp, "offsets", offsets, ids.numel());
  const int64_t count = ids.numel();
  const std::vector<Tensor> made{new_tensor(kOp, {count}, ScalarType::Long, ids),
                                 new_tensor(kOp, {count}, ScalarType::Long, ids)};
  if (count == 0) return made;
  const Ids view = as_ids(ids);
  const TableIds work{.ids = view.data,
                      .wide = view.wide,
                      .count = count,
                      .offsets = data_of(offsets),
                      .ranges = data_of(ranges),
                      .features = ranges.size(0),
                      .samples = samples,
                      .rows = data_of(made[0]),
                      .bags = data_of(made[1])};
  if (ids.is_cpu()) {
    find_on_cpu(work, view);
    return made;
  }
  const CurrentStream stream(kOp, ids);
  if constexpr (kWithCuda) check_cuda(launch_table_ids(work, stream.get()), kOp);
  return made;
}

const Ops kOps{
    {"table_ids(Tensor ids, Tensor offsets, Tensor ranges, int samples) -> Tensor[]",
     TORCH_BOX(&table_ids)},
};

}  // namespace
}  // namespace speedtorch

// round_rows: rounds float32 rows to numbers that a table can store in 16 bits, after each step.
// This file has the checks and the CPU loop; the GPU kernels are in round_rows.cu.

#include <torch/csrc/stable/library.h>

#include <string>
#include <vector>

#include "call/arguments.h"
#include "core/gpu.h"
#include "core/parallel_for.h"
#include "core/registration.h"
#include "core/tensor_checks.h"
#include "ops/launchers.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "round_rows";
constexpr int64_t kNumbersPerTask = 1 << 14;

// Maps the exponent bits of a 16-bit float to its kind; 0: rows are stored unchanged.
Stored stored_as(int64_t exponent_bits) {
  if (exponent_bits == 0) return Stored::kSame;
  if (exponent_bits == 8) return Stored::kBFloat16;
  if (exponent_bits == 5) return Stored::kFloat16;
  throw_value_error(kOp, "exponent_bits must be 0, 5 or 8, got ", exponent_bits);
}

void round_on_cpu(const RoundedRows& work) {
  const int64_t groups = work.groups();
  const int64_t per_task = kNumbersPerTask / (groups * kRoundedTogether) + 1;
  parallel_for(0, work.count, per_task, [&](int64_t begin, int64_t end) {
    const uint64_t key = key_of_step(work.key[0], work.key[1]);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t group = 0; group < groups; ++group) work.round(key, row, group);
    }
  });
}

// Rounds all fields, then increments the step once.
void round_rows(const Tensors& rows, const Tensor& ids, const Tensor& key,
                const std::vector<int64_t>& exponent_bits, bool at_random) {
  const Arguments all(kOp, {written("rows", rows, true), read("ids", ids), written("key", key)});
  check_fields(kOp, "rows", rows.size());
  if (exponent_bits.size() != rows.size()) {
    throw_value_error(kOp, "rows and exponent_bits must have the same length, got ", rows.size(),
                      " and ", exponent_bits.size());
  }
  check_list(kOp, "ids", ids, "rows[0]", rows[0]);
  check_list(kOp, "key", key, "rows[0]", rows[0], 2);
  std::vector<RoundedRows> fields;
  for (size_t k = 0; k < rows.size(); ++k) {
    const std::string name = item("rows", k);
    const Rows some =
        as_rows_like(kOp, name.c_str(), rows[k], name.c_str(), rows[k], "rows[0]", rows[0]);
    const Stored stored = stored_as(exponent_bits[k]);
    if (some.count < ids.numel()) {
      throw_value_error(kOp, name, " has ", some.count, " rows, at least ", ids.numel(),
                        " are needed");
    }
    if (stored == Stored::kSame || some.row_bytes == 0) continue;
    if (rows[k].scalar_type() != ScalarType::Float) {
      throw_value_error(kOp, name, " must be float32 to be stored in 16 bits, got ",
                        dtype_text(rows[k]));
    }
    check_aligned(kOp, name.c_str(), rows[k]);
    fields.push_back({.rows = reinterpret_cast<uint32_t*>(some.base),
                      .count = ids.numel(),
                      .columns = some.row_bytes / static_cast<int64_t>(sizeof(float)),
                      .ids = data_of(ids),
                      .key = data_of(key),
                      .field = static_cast<int64_t>(k),
                      .stored = stored,
                      .at_random = at_random});
  }
  all.check_memory();
  if (ids.is_cpu()) {
    all.mark_written();
    for (const RoundedRows& field : fields) round_on_cpu(field);
    data_of(key)[1] += 1;
    return;
  }
  const CurrentStream stream(kOp, ids);
  all.mark_written();
  if constexpr (kWithCuda) {
    for (const RoundedRows& field : fields) check_cuda(launch_round_rows(field, stream.get()), kOp);
    check_cuda(launch_count_step(data_of(key), stream.get()), kOp);
  }
}

const Ops kOps{
    // For speedtorch/step and speedtorch/layers: row i belongs to ids[i]; negative ids and kNoId
    // mark no row. `key` is (seed, step), and the op increments the step.
    {"round_rows(Tensor(a! -> *)[] rows, Tensor ids, Tensor(b!) key, int[] exponent_bits, bool "
     "at_random) -> ()",
     TORCH_BOX(&round_rows)},
};

}  // namespace
}  // namespace speedtorch

// The ops with which Python asks for the cost model's choice and steers it; see cost_model.h.

#include "move/paths.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <string>
#include <vector>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "memory/host_blocks.h"

namespace speedtorch {
namespace {

Tensor doubles(const double* values, int64_t count) {
  std::array<int64_t, 1> sizes{count};
  Tensor tensor = torch::stable::empty(sizes, ScalarType::Double);
  std::memcpy(tensor.mutable_data_ptr(), values, static_cast<size_t>(count) * sizeof(double));
  return tensor;
}

Direction direction_of(const char* op, int64_t direction) {
  if (direction != 0 && direction != 1) {
    throw_value_error(op, "direction must be 0 (in) or 1 (out), got " + std::to_string(direction));
  }
  return static_cast<Direction>(direction);
}

// {path, microseconds direct, distinct, ordered, GB/s of the movement, GB/s of the link, reach}.
Tensor explain_move(const Tensor& table, int64_t ids, int64_t direction, bool accumulate) {
  constexpr const char* kOp = "explain";
  const Arguments all(kOp, {read("table", table)});
  const Rows rows = as_rows(kOp, "table", table);
  const Direction way = direction_of(kOp, direction);
  if (ids < 0) throw_value_error(kOp, "ids must not be negative, got " + std::to_string(ids));
  all.check_memory();
  const Reach reach = reach_of(kOp, table, rows);
  Batch batch = batch_of(way, reach, rows, ids);
  batch.accumulate = accumulate;
  const Costs now = costs();
  const Choice choice = choose_path(kOp, batch, now);
  const double values[] = {static_cast<double>(choice.path),
                           choice.path_us[0],
                           choice.path_us[1],
                           choice.path_us[2],
                           choice.gigabytes_per_s,
                           now.link_gbps[direction],
                           static_cast<double>(reach)};
  return doubles(values, std::size(values));
}

// {bulk, blocks, threads per block, bytes of one access or piece, lanes or pieces per row, shared
// bytes per block}: the launch for rows that cross the link.
std::vector<int64_t> link_launch(int64_t direction, int64_t row_bytes, int64_t host_bits,
                                 int64_t other_bits, int64_t rows, bool bulk, int64_t sms) {
  constexpr const char* kOp = "link_launch";
  if (row_bytes < 0 || rows < 0 || sms < 1) {
    throw_value_error(kOp, "row_bytes and rows must not be negative and sms at least 1, got " +
                               std::to_string(row_bytes) + ", " + std::to_string(rows) + " and " +
                               std::to_string(sms));
  }
  const auto host = static_cast<uint64_t>(host_bits), other = static_cast<uint64_t>(other_bits);
  const Mover mover = link_mover(direction_of(kOp, direction), row_bytes, host, other, rows, bulk,
                                 static_cast<int>(sms));
  if (mover.bulk) {
    const BulkShape shape = bulk_shape(row_bytes, rows, mover.most_blocks);
    return {1,
            shape.blocks,
            shape.warps * 32,
            shape.piece_bytes,
            shape.pieces_per_row,
            shape.shared_bytes};
  }
  const MoveShape shape = move_shape(row_bytes, host | other, rows, mover.most_blocks);
  return {0, shape.blocks, kMoverThreads, shape.vec_bytes, shape.lanes_per_row, 0};
}

Tensor costs_as_tensor() {
  const Costs now = costs();
  return doubles(reinterpret_cast<const double*>(&now), kCostCount);
}

void set_costs_from_tensor(const Tensor& values) {
  constexpr const char* kOp = "set_costs";
  const Arguments arguments(kOp, {read("costs", values)});
  check_shape(kOp, "costs", values, {kCostCount});
  check_contiguous(kOp, "costs", values);
  if (!values.is_cpu() || values.scalar_type() != ScalarType::Double) {
    throw_value_error(kOp, "costs must be float64 on the CPU");
  }
  arguments.check_memory();
  Costs all;
  std::memcpy(&all, values.data_ptr(), sizeof(all));
  set_costs(all);
}

}  // namespace
}  // namespace speedtorch

STABLE_TORCH_LIBRARY_IMPL(speedtorch, CompositeExplicitAutograd, m) {
  m.impl("explain_move", TORCH_BOX(&speedtorch::explain_move));
  m.impl("link_launch", TORCH_BOX(&speedtorch::link_launch));
  m.impl("costs", TORCH_BOX(&speedtorch::costs_as_tensor));
  m.impl("set_costs", TORCH_BOX(&speedtorch::set_costs_from_tensor));
  m.impl("force_path", TORCH_BOX(&speedtorch::force_path));
  m.impl("num_sms", TORCH_BOX(&speedtorch::num_sms));
  m.impl("set_num_sms", TORCH_BOX(&speedtorch::set_num_sms));
}

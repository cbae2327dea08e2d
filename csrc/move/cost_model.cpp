// Chooses the path, and defines the ops that explain and set the choice; see cost_model.h.

#include "move/cost_model.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <vector>

#include "call/arguments.h"
#include "core/registration.h"

namespace speedtorch {
namespace {

// Row lengths with measured times. Times of lengths between them are interpolated linearly.
constexpr size_t kLengths = 3;
constexpr std::array<int64_t, kLengths> kMeasuredRowBytes{64, 512, 1536};

// Nanoseconds per row moved in index order or in address order, by Access (managed, mapped),
// Direction and length, and the costs to find repeated ids (dedup) and to sort ids (plan).
struct Costs {
  double row_ns[2][2][2][kLengths];  // [access][direction][in address order][length]
  double dedup_us;                   // fixed cost per batch
  double dedup_ns;                   // cost per id
  double plan_us;
  double plan_ns;
  double link_gbps[2];  // rate of the copy engine, by Direction
};
constexpr int64_t kCostCount = sizeof(Costs) / sizeof(double);

constexpr int kGpuPaths = 3;

struct Choice {
  Path path = Path::kOrdered;
  // Microseconds of each GPU path for a batch of distinct ids; infinite: not possible.
  std::array<double, kGpuPaths> path_us{};
  double gigabytes_per_s = 0;  // rate of the row movement alone on the chosen path
};

constexpr double kImpossible = std::numeric_limits<double>::infinity();

// A GPU's translation cache covers about this much memory in small pages. In smaller tables, order
// does not matter.
constexpr int64_t kTranslatedBytes = int64_t{1} << 30;

// Bytes of one link transfer. Rows that are not aligned to this take 1.7 times as long with bulk
// copies as with threads. Writing such rows in random order costs a quarter more than in address
// order, in which neighbors complete each other's lines.
constexpr uint64_t kLineBytes = 128;
constexpr double kPartialLines = 1.25;

// A smaller batch finishes before shared memory is set up for bulk copies.
constexpr int64_t kBulkRows = 4096;
// For shorter rows, threads keep more requests in flight than bulk copies do.
constexpr int64_t kBulkRowBytes = 256;
// Multiprocessors that saturate the link with bulk copies of longer rows. Measured: 2 suffice
// except for gathers of 512 bytes, which are 1 % slower. Beside a large matrix product, a scatter
// on 3 or more slows the product by a quarter, on 2 by a twentieth.
constexpr int64_t kLongBulkRowBytes = 512;
constexpr int64_t kRecordBytes = 1024;
constexpr int sms_for_long_rows(int64_t row_bytes, Direction direction) {
  return direction == Direction::kIn && row_bytes < kRecordBytes ? 3 : 2;
}

// The rate of the link on which these counts were measured. A faster link needs proportionally more
// requests in flight. A rate within kSameLink of this one counts as the same link.
constexpr double kMeasuredLinkGbps = 55.4;
constexpr double kSameLink = 1.25;
// far above any real link; a file of costs may contain anything
constexpr double kMaxLinkRatio = 1000;
// The rate of the calibrated link in its slower direction, relative to the measured link; at least
// 1.
std::atomic<double> link_ratio{1};

int64_t for_link(int64_t sms) {
  return static_cast<int64_t>(std::lround(static_cast<double>(sms) * link_ratio));
}

// Both directions at once, records of 1,536 bytes: 8 multiprocessors reach 0.83 of memcpy's rate in
// both directions, in 16 and in 48 GiB; 16 reach 0.83 and 0.76, 64 reach 0.77 and 0.70.
constexpr int64_t kSmsForSwap = 8;

// Measured on an H200 (PCIe 5 x16) with tables of 16 GiB. The default without a calibration.
Costs stored_costs = {
    .row_ns = {{{{2.9, 9.9, 29.6}, {2.1, 9.9, 29.6}}, {{2.8, 10.8, 28.9}, {1.5, 9.7, 28.9}}},
               {{{25.0, 27.0, 35.0}, {6.4, 12.0, 30.0}}, {{25.0, 34.0, 40.0}, {6.4, 14.0, 30.0}}}},
    .dedup_us = 12,
    .dedup_ns = 0.06,
    .plan_us = 60,
    .plan_ns = 0.15,
    .link_gbps = {kMeasuredLinkGbps, kMeasuredLinkGbps}};
std::mutex costs_lock;

// The costs that this process uses.
Costs costs() {
  std::lock_guard lock(costs_lock);
  return stored_costs;
}

// Slots of a hash table (dedup.h) are counted with 31 bits; each id needs two slots.
constexpr int64_t kMaxHashedIds = int64_t{1} << 29;

std::atomic<int64_t> forced_path{-1};
std::atomic<int64_t> chosen_sms{0};  // set by the user; 0: not set

double row_ns(const Batch& batch, bool in_address_order, const Costs& costs) {
  const bool small_pages = batch.access == Access::kMapped && batch.table_bytes > kTranslatedBytes;
  const auto& ns = costs.row_ns[small_pages][static_cast<int>(batch.direction)][in_address_order];
  if (batch.row_bytes <= kMeasuredRowBytes.front()) return ns[0];
  const size_t upper = batch.row_bytes <= kMeasuredRowBytes[1] ? 1 : 2;
  const double share = static_cast<double>(batch.row_bytes - kMeasuredRowBytes[upper - 1]) /
                       static_cast<double>(kMeasuredRowBytes[upper] - kMeasuredRowBytes[upper - 1]);
  return ns[upper - 1] + share * (ns[upper] - ns[upper - 1]);
}

// Moves within the GPU cost the same in any order; only the preparation of the ids differs.
double moving_us(const Batch& batch, bool in_address_order, const Costs& costs) {
  if (batch.access == Access::kOnGpu) return 0;
  const bool partial =
      batch.direction == Direction::kOut && !in_address_order && batch.host_bits % kLineBytes != 0;
  return static_cast<double>(batch.ids) * row_ns(batch, in_address_order, costs) *
         (partial ? kPartialLines : 1) / 1e3;
}

bool direct_is_safe(const Batch& batch) {
  if (batch.direction == Direction::kOut) return batch.ids <= kIdsDedupedInBlock;
  // In larger batches a repeated row would cross the link repeatedly.
  return batch.ids <= kIdsCheckedInBlock || batch.access == Access::kOnGpu;
}

Choice choose_path(const char* op, const Batch& batch, const Costs& costs) {
  Choice choice;
  if (batch.access == Access::kNot) {
    choice.path = Path::kStaged;
    choice.path_us.fill(kImpossible);
    return choice;
  }
  const double ids = static_cast<double>(batch.ids);
  const double in_index_order = moving_us(batch, false, costs);
  choice.path_us = {in_index_order, in_index_order + costs.dedup_us + ids * costs.dedup_ns / 1e3,
                    moving_us(batch, true, costs) + costs.plan_us + ids * costs.plan_ns / 1e3};
  if (!direct_is_safe(batch)) choice.path_us[0] = kImpossible;
  if (batch.ids > kMaxHashedIds) choice.path_us[1] = kImpossible;
  // Accumulation needs every occurrence of an id, in order.
  if (batch.accumulate) choice.path_us[0] = choice.path_us[1] = kImpossible;
  const auto best = std::min_element(choice.path_us.begin(), choice.path_us.end());
  choice.path = static_cast<Path>(best - choice.path_us.begin());
  if (const int64_t forced = forced_path; forced >= 0) {
    if (choice.path_us[static_cast<size_t>(forced)] == kImpossible) {
      throw_value_error(op, "path ", forced, " is not possible for ", batch.ids,
                        " ids of this table");
    }
    choice.path = static_cast<Path>(forced);
  }
  const double us = moving_us(batch, choice.path == Path::kOrdered, costs);
  if (us > 0) choice.gigabytes_per_s = ids * static_cast<double>(batch.row_bytes) / us / 1e3;
  return choice;
}

// The kernel for rows that cross the link; `bulk`: this GPU has bulk copies.
CopyKernel link_copy_kernel(const Batch& batch, uint64_t other_bits, bool bulk, int sms) {
  const int64_t row_bytes = batch.row_bytes;
  const int access = widest_access(other_bits | static_cast<uint64_t>(row_bytes));
  const bool aligned = access == 16 && batch.host_bits % kLineBytes == 0;
  if (!bulk || !aligned || row_bytes < kBulkRowBytes || batch.ids <= kBulkRows) {
    return {false, sms};
  }
  if (row_bytes < kLongBulkRowBytes) return {true, sms};
  const int64_t enough = for_link(sms_for_long_rows(row_bytes, batch.direction));
  return {true, static_cast<int>(std::min<int64_t>(sms, enough))};
}

// The number of multiprocessors that kernels over the link may fill, at least 1: the user's
// setting, or the need of the calibrated link.
int64_t num_sms() {
  const int64_t chosen = chosen_sms;
  return chosen > 0 ? chosen : for_link(kDefaultSms);
}

}  // namespace

Path path_for(const char* op, const Batch& batch) { return choose_path(op, batch, costs()).path; }

#ifdef SPEEDTORCH_CUDA

CopyKernel copy_kernel_for(const Batch& batch, const Rows& other, const CurrentStream& stream) {
  if (batch.access == Access::kOnGpu) return gpu_copy_kernel();
  // Measured: with small pages, bulk copies in address order are a fifth to a half slower.
  const bool bulk = batch.access == Access::kManaged && stream.has_bulk_copies();
  return link_copy_kernel(batch, other.bits(), bulk, link_sms(stream));
}

int link_sms(const CurrentStream& stream) {
  const int64_t most = num_sms();
  if (most <= kDefaultSms) return static_cast<int>(most);  // more blocks than that do no harm
  return static_cast<int>(std::min<int64_t>(most, stream.multiprocessors()));
}

int swap_sms(const CurrentStream& stream) {
  return static_cast<int>(std::min<int64_t>(link_sms(stream), for_link(kSmsForSwap)));
}

#endif

// ---- ops

namespace {

// Forces the path of later gathers and scatters on a GPU without a plan, unless rows are staged; -1
// ends this. For tests and measurements.
void force_path(int64_t path) {
  if (path < -1 || path >= kGpuPaths) {
    throw_value_error("force_path", "path must be -1 to 2, got ", path);
  }
  forced_path = path;
}

void set_num_sms(std::optional<int64_t> count) {
  constexpr int64_t kMost = 1 << 16;  // more than any GPU
  if (count && (*count < 1 || *count > kMost)) {
    throw_value_error("set_num_sms", "the number of multiprocessors must be 1 to ", kMost,
                      " or None, got ", *count);
  }
  chosen_sms = count.value_or(0);
}

Tensor doubles(const double* values, int64_t count) {
  std::array<int64_t, 1> sizes{count};
  Tensor tensor = torch::stable::empty(sizes, ScalarType::Double);
  std::memcpy(tensor.mutable_data_ptr(), values, static_cast<size_t>(count) * sizeof(double));
  return tensor;
}

Direction direction_of(const char* op, int64_t direction) {
  if (direction != 0 && direction != 1) {
    throw_value_error(op, "direction must be 0 (in) or 1 (out), got ", direction);
  }
  return static_cast<Direction>(direction);
}

// {path, microseconds direct, distinct, ordered, GB/s of the movement, GB/s of the link, access}.
Tensor explain_move(const Tensor& table, int64_t ids, int64_t direction, bool accumulate) {
  constexpr const char* kOp = "explain";
  const Arguments all(kOp, {read("table", table)});
  const Rows rows = as_rows(kOp, "table", table);
  const Direction way = direction_of(kOp, direction);
  if (ids < 0) throw_value_error(kOp, "ids must not be negative, got ", ids);
  all.check_memory();
  const Access access = gpu_access(kOp, table, rows, std::nullopt);
  const Costs now = costs();
  const Choice choice = choose_path(kOp, batch_of(way, access, rows, ids, accumulate), now);
  const double values[] = {static_cast<double>(choice.path),
                           choice.path_us[0],
                           choice.path_us[1],
                           choice.path_us[2],
                           choice.gigabytes_per_s,
                           now.link_gbps[direction],
                           static_cast<double>(access)};
  return doubles(values, std::size(values));
}

// The launch for rows that cross the link: {bulk, blocks, threads per block, bytes of one access or
// chunk, lanes or chunks per row, shared bytes per block}.
std::vector<int64_t> link_launch(int64_t direction, int64_t row_bytes, int64_t host_bits,
                                 int64_t other_bits, int64_t rows, bool bulk, int64_t sms) {
  constexpr const char* kOp = "link_launch";
  if (row_bytes < 0 || rows < 0 || sms < 1) {
    throw_value_error(kOp, "row_bytes and rows must not be negative and sms at least 1, got ",
                      row_bytes, ", ", rows, " and ", sms);
  }
  const auto host = static_cast<uint64_t>(host_bits), other = static_cast<uint64_t>(other_bits);
  const Batch batch{.direction = direction_of(kOp, direction),
                    .ids = rows,
                    .row_bytes = row_bytes,
                    .host_bits = host};
  const CopyKernel kernel = link_copy_kernel(batch, other, bulk, static_cast<int>(sms));
  if (kernel.bulk) {
    const BulkShape shape = bulk_shape(row_bytes, rows, kernel.max_blocks);
    return {1,
            shape.blocks,
            shape.warps * 32,
            shape.chunk_bytes,
            shape.chunks_per_row,
            shape.shared_bytes};
  }
  const MoveShape shape = move_shape(row_bytes, host | other, rows, kernel.max_blocks);
  return {0, shape.blocks, kMoverThreads, shape.vec_bytes, shape.lanes_per_row, 0};
}

Tensor costs_as_tensor() {
  const Costs now = costs();
  return doubles(reinterpret_cast<const double*>(&now), kCostCount);
}

void set_costs(const Tensor& values) {
  constexpr const char* kOp = "set_costs";
  const Arguments arguments(kOp, {read("costs", values)});
  check_shape(kOp, "costs", values, {kCostCount});
  check_contiguous(kOp, "costs", values);
  if (!values.is_cpu() || values.scalar_type() != ScalarType::Double) {
    throw_value_error(kOp, "costs must be float64 on the CPU");
  }
  arguments.check_memory();
  std::lock_guard lock(costs_lock);
  std::memcpy(&stored_costs, values.data_ptr(), sizeof(Costs));
  const auto& gbps = stored_costs.link_gbps;
  const double ratio = std::min(gbps[0], gbps[1]) / kMeasuredLinkGbps;
  link_ratio = ratio > kSameLink ? std::min(ratio, kMaxLinkRatio) : 1;
}

const Ops kOps{
    // The choice of path, called by speedtorch/memory. Only tests call link_launch.
    {"explain_move(Tensor table, int ids, int direction, bool accumulate) -> Tensor",
     TORCH_BOX(&explain_move)},
    {"link_launch(int direction, int row_bytes, int host_bits, int other_bits, int rows, bool "
     "bulk, int sms) -> int[]",
     TORCH_BOX(&link_launch)},
    {"costs() -> Tensor", TORCH_BOX(&costs_as_tensor)},
    {"set_costs(Tensor costs) -> ()", TORCH_BOX(&set_costs)},
    {"force_path(int path) -> ()", TORCH_BOX(&force_path)},
    {"num_sms() -> int", TORCH_BOX(&num_sms)},
    {"set_num_sms(int? count) -> ()", TORCH_BOX(&set_num_sms)},
};

}  // namespace
}  // namespace speedtorch

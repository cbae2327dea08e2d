// The choice of path; see cost_model.h.

#include "move/cost_model.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <string>

#include "core/rows.h"

namespace speedtorch {
namespace {

constexpr double kImpossible = std::numeric_limits<double>::infinity();

// A GPU's translations of small pages reach about this far: in tables up to it, order does not
// matter.
constexpr int64_t kReachBytes = int64_t{1} << 30;

// What crosses the link at once. Rows that begin elsewhere take bulk copies 1.7 times as long as
// threads; and written in any order they cost a quarter more than in address order, in which
// neighbours complete each other's lines.
constexpr uint64_t kLineBytes = 128;
constexpr double kPartialLines = 1.25;

// A smaller batch is over before shared memory has been set up for bulk copies.
constexpr int64_t kBulkRows = 4096;
// With rows below this, threads keep more requests under way than bulk copies do.
constexpr int64_t kBulkRowBytes = 256;
// So many multiprocessors saturate the link by bulk copies of longer rows. Measured: 2 do in every
// case but gathers of 512 bytes, which they leave 1 % short; and beside a large matrix product a
// scatter on 3 or more cost that a quarter of its speed, on 2 a twentieth.
constexpr int64_t kLongBulkRowBytes = 512;
constexpr int64_t kRecordBytes = 1024;
constexpr int sms_for_long_rows(int64_t row_bytes, Direction direction) {
  return direction == Direction::kIn && row_bytes < kRecordBytes ? 3 : 2;
}

// Both directions at once, records of 1,536 bytes: 8 multiprocessors reach 0.83 of what memcpy
// moves both ways, in 16 and in 48 GiB; 16 reach 0.83 and 0.76, 64 reach 0.77 and 0.70.
constexpr int64_t kSmsForSwap = 8;

std::mutex costs_lock;
Costs& stored_costs() {
  static Costs costs = default_costs();
  return costs;
}

// Slots of claims are counted in 31 bits, two for each id.
constexpr int64_t kMostClaimed = int64_t{1} << 29;

std::atomic<int64_t> forced_path{-1};
std::atomic<int64_t> sms{kDefaultSms};

double row_ns(const Batch& batch, bool in_address_order, const Costs& costs) {
  const bool small_pages = batch.reach == Reach::kMapped && batch.table_bytes > kReachBytes;
  const auto& ns = costs.row_ns[small_pages][static_cast<int>(batch.direction)][in_address_order];
  if (batch.row_bytes <= kMeasuredRowBytes.front()) return ns[0];
  const size_t upper = batch.row_bytes <= kMeasuredRowBytes[1] ? 1 : 2;
  const double share = static_cast<double>(batch.row_bytes - kMeasuredRowBytes[upper - 1]) /
                       static_cast<double>(kMeasuredRowBytes[upper] - kMeasuredRowBytes[upper - 1]);
  return ns[upper - 1] + share * (ns[upper] - ns[upper - 1]);
}

// Moves on the GPU itself cost the same in any order; what matters there is what comes before them.
double moving_us(const Batch& batch, bool in_address_order, const Costs& costs) {
  if (batch.reach == Reach::kOnGpu) return 0;
  const bool partial =
      batch.direction == Direction::kOut && !in_address_order && batch.host_bits % kLineBytes != 0;
  return static_cast<double>(batch.ids) * row_ns(batch, in_address_order, costs) *
         (partial ? kPartialLines : 1) / 1e3;
}

bool direct_is_safe(const Batch& batch) {
  if (batch.direction == Direction::kOut) return batch.ids <= kIdsClaimedInBlock;
  // Beyond this a row that stands in the batch often would cross the link as often.
  return batch.ids <= kIdsCheckedInBlock || batch.reach == Reach::kOnGpu;
}

}  // namespace

Costs default_costs() {
  return {.row_ns = {{{{2.9, 9.9, 29.6}, {2.1, 9.9, 29.6}}, {{2.8, 10.8, 28.9}, {1.5, 9.7, 28.9}}},
                     {{{25.0, 27.0, 35.0}, {6.4, 12.0, 30.0}},
                      {{25.0, 34.0, 40.0}, {6.4, 14.0, 30.0}}}},
          .claim_us = 12,
          .claim_ns = 0.06,
          .plan_us = 60,
          .plan_ns = 0.15,
          .link_gbps = {55.4, 55.4}};
}

Costs costs() {
  std::lock_guard lock(costs_lock);
  return stored_costs();
}

void set_costs(const Costs& costs) {
  std::lock_guard lock(costs_lock);
  stored_costs() = costs;
}

Choice choose_path(const char* op, const Batch& batch, const Costs& costs) {
  Choice choice;
  if (batch.reach == Reach::kNot) {
    choice.path = Path::kStaged;
    choice.path_us.fill(kImpossible);
    return choice;
  }
  const double ids = static_cast<double>(batch.ids);
  const double in_index_order = moving_us(batch, false, costs);
  choice.path_us = {in_index_order, in_index_order + costs.claim_us + ids * costs.claim_ns / 1e3,
                    moving_us(batch, true, costs) + costs.plan_us + ids * costs.plan_ns / 1e3};
  if (!direct_is_safe(batch)) choice.path_us[0] = kImpossible;
  if (batch.ids > kMostClaimed) choice.path_us[1] = kImpossible;
  // Sums need every occurrence of an id, in order.
  if (batch.accumulate) choice.path_us[0] = choice.path_us[1] = kImpossible;
  const auto best = std::min_element(choice.path_us.begin(), choice.path_us.end());
  choice.path = static_cast<Path>(best - choice.path_us.begin());
  if (const int64_t forced = forced_path; forced >= 0) {
    if (choice.path_us[static_cast<size_t>(forced)] == kImpossible) {
      throw_value_error(op, "path " + std::to_string(forced) + " is not possible for " +
                                std::to_string(batch.ids) + " ids of this table");
    }
    choice.path = static_cast<Path>(forced);
  }
  const double us = moving_us(batch, choice.path == Path::kOrdered, costs);
  if (us > 0) choice.gigabytes_per_s = ids * static_cast<double>(batch.row_bytes) / us / 1e3;
  return choice;
}

void force_path(int64_t path) {
  if (path < -1 || path >= kGpuPaths) {
    throw_value_error("force_path", "path must be -1 to 2, got " + std::to_string(path));
  }
  forced_path = path;
}

void set_num_sms(int64_t count) {
  constexpr int64_t kMost = 1 << 16;  // more than any GPU has
  if (count < 1 || count > kMost) {
    throw_value_error("set_num_sms", "the number of multiprocessors must be 1 to " +
                                         std::to_string(kMost) + ", got " + std::to_string(count));
  }
  sms = count;
}

int64_t num_sms() { return sms; }

int swap_sms() { return static_cast<int>(std::min(num_sms(), kSmsForSwap)); }

Mover link_mover(Direction direction, int64_t row_bytes, uint64_t host_bits, uint64_t other_bits,
                 int64_t rows, bool bulk, int sms) {
  const int access = widest_access(other_bits | static_cast<uint64_t>(row_bytes));
  const bool aligned = access == 16 && host_bits % kLineBytes == 0;
  if (!bulk || !aligned || row_bytes < kBulkRowBytes || rows <= kBulkRows) {
    return {false, sms};
  }
  if (row_bytes < kLongBulkRowBytes) return {true, sms};
  return {true, std::min(sms, sms_for_long_rows(row_bytes, direction))};
}

}  // namespace speedtorch

// Which path an op takes: what each would cost, from measured times of moving one row. Pure
// functions of a batch's shape, so that explain() tells exactly what an op will do, and that tests
// need no GPU.
#pragma once

#include <array>
#include <cstdint>

#include "memory/reach.h"
#include "move/row_mover.h"

namespace speedtorch {

// Values are part of the contract with speedtorch/memory/cost_model.py.
enum class Path : int64_t {
  kDirect = 0,    // one launch, in the order of the ids
  kDistinct = 1,  // each distinct row once, in the order of the ids
  kOrdered = 2,   // each distinct row once, in address order
  kStaged = 3,    // by the CPU, through pinned staging
  kOnCpu = 4
};
constexpr int kGpuPaths = 3;

enum class Direction : int64_t { kIn = 0, kOut = 1 };  // to the GPU, from it

// Row lengths that movement is measured at; between them time is taken to be linear.
constexpr std::array<int64_t, 3> kMeasuredRowBytes{64, 512, 1536};

// Nanoseconds for a row that moves in index order or in address order, by Reach (managed, mapped),
// Direction and length; and what finding repetitions and sorting cost.
struct Costs {
  double row_ns[2][2][2][kMeasuredRowBytes.size()];  // [reach][direction][in address order][length]
  double claim_us;                                   // for any number of ids
  double claim_ns;                                   // and for each
  double plan_us;
  double plan_ns;
  double link_gbps[2];  // of the copy engine, by Direction
};
constexpr int64_t kCostCount = sizeof(Costs) / sizeof(double);

// Measured on an H200 (PCIe 5 x16) with tables of 16 GiB; serves where nothing else was measured.
Costs default_costs();
// What this process goes by.
Costs costs();
void set_costs(const Costs& costs);

struct Batch {
  Direction direction = Direction::kIn;
  Reach reach = Reach::kManaged;
  int64_t ids = 0;
  int64_t row_bytes = 0;
  int64_t table_bytes = 0;
  uint64_t host_bits = 0;  // the table's address and stride, or'ed together
  bool accumulate = false;
};

struct Choice {
  Path path = Path::kOrdered;
  // Microseconds of each GPU path for a batch of distinct ids; infinite: not possible.
  std::array<double, kGpuPaths> path_us{};
  double gigabytes_per_s = 0;  // of the movement alone, on the chosen path
};

// The cheapest path, or the one that tests ask for; throws ValueError if that is not possible.
Choice choose_path(const char* op, const Batch& batch, const Costs& costs);

// From here on every op takes this path; -1: the cheapest again. For tests and measurements.
void force_path(int64_t path);

// How many multiprocessors kernels over the link may fill, at least 1.
void set_num_sms(int64_t count);
int64_t num_sms();

// The kernel for rows that cross the link (`bulk`: this GPU has bulk copies), or do not. Bits are
// the address and stride of the host's side and of the other, or'ed together.
Mover link_mover(Direction direction, int64_t row_bytes, uint64_t host_bits, uint64_t other_bits,
                 int64_t rows, bool bulk, int sms);
constexpr Mover gpu_mover() { return {false, kDeviceBlocks}; }
// Blocks of a swap.
int swap_sms();

}  // namespace speedtorch

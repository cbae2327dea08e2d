// numbers_to_host: queues a copy of a few numbers from a GPU to the CPU under a handle of
// python/numbers_handle.cpp. Called by speedtorch/plan/host_copy.py.

#include "call/arguments.h"
#include "call/host_numbers.h"
#include "core/registration.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "numbers_to_host";

void numbers_to_host(const Tensor& numbers, int64_t handle) {
  const Arguments all(kOp, {read("numbers", numbers)});
  check_contiguous(kOp, "numbers", numbers);
  if (numbers.scalar_type() != ScalarType::Long || numbers.is_cpu()) {
    throw_value_error(kOp, "numbers must be int64 on a GPU, got ", dtype_text(numbers), " on ",
                      device_text(numbers));
  }
  queue_numbers(kOp, numbers, handle);
}

const Ops kOps{
    {"numbers_to_host(Tensor numbers, int handle) -> ()", TORCH_BOX(&numbers_to_host)},
};

}  // namespace
}  // namespace speedtorch

// numbers_to_host: queues a copy of a few numbers of a GPU to pinned memory, which takes torch's
// copy_ several times as long on the host.

#include "call/arguments.h"
#include "core/gpu.h"
#include "core/registration.h"
#include "core/tensor_checks.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "numbers_to_host";

// The caller waits for the current stream before it reads `host`, and before it frees it.
void numbers_to_host(const Tensor& numbers, const Tensor& host) {
  const Arguments all(kOp, {read("numbers", numbers), written("host", host)});
  check_contiguous(kOp, "numbers", numbers);
  check_contiguous(kOp, "host", host);
  check_shape(kOp, "host", host, shape_of(numbers));
  check_dtype(kOp, "host", host, "numbers", numbers);
  if (numbers.is_cpu() || !host.is_cpu()) {
    throw_value_error(kOp, "numbers must be on a GPU and host on the CPU, got ",
                      device_text(numbers), " and ", device_text(host));
  }
  const CurrentStream stream(kOp, numbers);
  const auto bytes = static_cast<size_t>(numbers.numel() * element_bytes(numbers));
  check_cuda(
      cuda_calls().copy_to_host(host.mutable_data_ptr(), numbers.data_ptr(), bytes, stream.get()),
      kOp);
}

// For speedtorch/plan/host_copy.py.
const Ops kOps{
    {"numbers_to_host(Tensor numbers, Tensor(a!) host) -> ()", TORCH_BOX(&numbers_to_host)},
};

}  // namespace
}  // namespace speedtorch

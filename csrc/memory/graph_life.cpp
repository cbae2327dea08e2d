// Whether a CUDA graph that was captured is still there: what it uses must stay where it is until
// then. Called by speedtorch/step for steps that are captured whole.

#include <atomic>
#include <deque>
#include <mutex>
#include <utility>

#include "core/cuda_calls.h"
#include "core/gpu.h"
#include "core/registration.h"
#include "core/tensor_checks.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "watch_graph";

// One for each capture that was watched, at the same address for ever: CUDA's own threads write
// there, also while the process ends.
struct Captures {
  std::mutex lock;
  std::deque<std::atomic<bool>> are_alive;
};

Captures& captures() {
  static auto* all = new Captures;
  return *all;
}

// In a thread of CUDA's, which must make no call of CUDA.
void note_gone(void* is_alive) { static_cast<std::atomic<bool>*>(is_alive)->store(false); }

// A new number, and where note_gone writes. The lock goes before CUDA is called.
std::pair<int64_t, std::atomic<bool>*> begin_watch() {
  Captures& all = captures();
  const std::lock_guard guard(all.lock);
  std::atomic<bool>& is_alive = all.are_alive.emplace_back(true);
  return {static_cast<int64_t>(all.are_alive.size()) - 1, &is_alive};
}

// A number of the graph that the current stream of the tensor's GPU captures.
int64_t watch_graph(const Tensor& on) {
  if (on.is_cpu()) throw_value_error(kOp, "on must be on a GPU, got ", device_text(on));
  const CurrentStream stream(kOp, on);
  const auto [number, is_alive] = begin_watch();
  const int error = cuda_calls().retain_in_capture(stream.get(), is_alive, note_gone);
  if (error != 0) *is_alive = false;  // a graph that never was
  check_cuda(error, kOp);
  return number;
}

// Whether that graph, or what was instantiated of it, is still there.
bool graph_is_alive(int64_t number) {
  Captures& all = captures();
  const std::lock_guard guard(all.lock);
  const auto count = static_cast<int64_t>(all.are_alive.size());
  if (number < 0 || number >= count) {
    throw_value_error("graph_is_alive", "there is no graph ", number, " among ", count);
  }
  return all.are_alive[static_cast<size_t>(number)];
}

const Ops kOps{
    {"watch_graph(Tensor on) -> int", TORCH_BOX(&watch_graph)},
    {"graph_is_alive(int number) -> bool", TORCH_BOX(&graph_is_alive)},
};

}  // namespace
}  // namespace speedtorch

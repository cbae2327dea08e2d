// Tracks whether a captured CUDA graph is alive. Memory that the graph uses must keep its address
// while the graph is alive. Called by speedtorch/step/capturing_graphs.py. graph_is_alive() may be
// called from any thread.

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

// One flag for each watched capture. A flag is never freed, because CUDA's own threads write to it,
// even during process exit.
struct Captures {
  std::mutex lock;
  std::deque<std::atomic<bool>> are_alive;
};

Captures& captures() {
  static auto* all = new Captures;
  return *all;
}

// CUDA calls this on its own thread, where CUDA calls are forbidden.
void note_destroyed(void* is_alive) { static_cast<std::atomic<bool>*>(is_alive)->store(false); }

// Returns a new number and the flag for note_destroyed. Releases the lock before the caller calls
// CUDA.
std::pair<int64_t, std::atomic<bool>*> begin_watch() {
  Captures& all = captures();
  const std::lock_guard guard(all.lock);
  std::atomic<bool>& is_alive = all.are_alive.emplace_back(true);
  return {static_cast<int64_t>(all.are_alive.size()) - 1, &is_alive};
}

// Returns a number for the graph that the current stream of the tensor's GPU captures.
int64_t watch_graph(const Tensor& on) {
  if (on.is_cpu()) throw_value_error(kOp, "on must be on a GPU, got ", device_text(on));
  const CurrentStream stream(kOp, on);
  const auto [number, is_alive] = begin_watch();
  const int error = cuda_calls().retain_in_capture(stream.get(), is_alive, note_destroyed);
  if (error != 0) *is_alive = false;  // no graph holds the flag
  check_cuda(error, kOp);
  return number;
}

// Whether the graph, or an executable instantiated from it, is alive.
bool graph_is_alive(int64_t number) {
  Captures& all = captures();
  const std::lock_guard guard(all.lock);
  const auto count = static_cast<int64_t>(all.are_alive.size());
  if (number < 0 || number >= count) {
    throw_value_error("graph_is_alive", "no watched graph has number ", number,
                      ". The process has watched ", count, " graphs");
  }
  return all.are_alive[static_cast<size_t>(number)];
}

const Ops kOps{
    {"watch_graph(Tensor on) -> int", TORCH_BOX(&watch_graph)},
    {"graph_is_alive(int number) -> bool", TORCH_BOX(&graph_is_alive)},
};

}  // namespace
}  // namespace speedtorch

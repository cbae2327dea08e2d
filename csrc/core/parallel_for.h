// torch's parallel_for for the CPU loops of ops: calls `use(begin, end)` for parts of a range on
// torch's threads. After a fork that lost threads it makes one call in this thread, because libgomp
// would wait forever for the lost threads.
//
// libgomp starts and joins these threads without calls that ThreadSanitizer intercepts. Without
// this wrapper, ThreadSanitizer would report races between the loop and the code around it. A build
// with ThreadSanitizer announces the fork and the join here.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "core/process.h"

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace speedtorch {

// The least bytes to copy that are worth waking a thread.
constexpr int64_t kBytesPerTask = int64_t{64} << 10;

#ifdef __SANITIZE_THREAD__

// Runs the loop's body, and tells ThreadSanitizer that the body follows the fork and precedes the
// join. Fork and join need separate addresses. With one address, the end of a part would happen
// before the begin of each later part, which would hide races between parts.
template <typename Use>
struct AnnouncedUse {
  const Use& use;
  mutable char fork{}, join{};  // only their addresses matter

  void operator()(int64_t begin, int64_t end) const {
    __tsan_acquire(&fork);  // before reading data of the caller, including `use`
    use(begin, end);
    __tsan_release(&join);
  }
};

#endif

template <typename Use>
void parallel_for(int64_t begin, int64_t end, int64_t grain_size, const Use& use) {
  if (has_lost_threads()) {
    if (begin < end) use(begin, end);
    return;
  }
#ifdef __SANITIZE_THREAD__
  const AnnouncedUse<Use> announced{use};
  __tsan_release(&announced.fork);
  torch::stable::parallel_for(begin, end, grain_size, announced);
  __tsan_acquire(&announced.join);
#else
  torch::stable::parallel_for(begin, end, grain_size, use);
#endif
}

}  // namespace speedtorch

// torch's parallel_for, as the CPU loops of ops call it: `use(begin, end)` for parts of a range, on
// torch's threads. An ordinary build has torch's own function under this name.
//
// libgomp starts and joins these threads without a call that ThreadSanitizer intercepts. A build
// with it would report a race for each write before a loop that the loop reads, and the other way
// round. There this file announces the fork and the join.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace speedtorch {

#ifdef __SANITIZE_THREAD__

// The loop's body, between two announcements. Each has an address of its own: with one for both, a
// part that ends would happen before each part that begins later, which hides their races.
template <typename Use>
struct AnnouncedUse {
  const Use& use;
  mutable char fork{}, join{};  // their addresses are all that counts

  void operator()(int64_t begin, int64_t end) const {
    __tsan_acquire(&fork);  // before this reads what the caller wrote, `use` itself included
    use(begin, end);
    __tsan_release(&join);
  }
};

template <typename Use>
void parallel_for(int64_t begin, int64_t end, int64_t grain_size, const Use& use) {
  const AnnouncedUse<Use> announced{use};
  __tsan_release(&announced.fork);
  torch::stable::parallel_for(begin, end, grain_size, announced);
  __tsan_acquire(&announced.join);
}

#else

using torch::stable::parallel_for;

#endif

}  // namespace speedtorch

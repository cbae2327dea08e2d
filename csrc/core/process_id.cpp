// The number of this process, kept and renewed after a fork; see process_id.h.

#include "core/process_id.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace speedtorch {

pid_t process_id() {
  static std::atomic<pid_t> id = [] {
    pthread_atfork(nullptr, nullptr, [] { id = getpid(); });
    return getpid();
  }();
  return id.load(std::memory_order_relaxed);
}

}  // namespace speedtorch

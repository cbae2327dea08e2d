// Maps, fills and pins host pages; see host_pages.h.

#include "memory/host_pages.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <fstream>
#include <limits>
#include <mutex>
#include <new>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/cuda_calls.h"
#include "core/text.h"

namespace speedtorch {
namespace {

constexpr int64_t kLargePage = int64_t{2} << 20;
constexpr int64_t kBytesPerThread = int64_t{32}
                                    << 20;  // a thread starts in 30 us, fills this in 5 ms
// Bytes that a thread fills at a time, in 1 to 2 ms. Reading the available memory takes up to 0.3
// ms.
constexpr int64_t kBytesPerChunk = int64_t{8} << 20;
// How long a reading of available memory is valid: while the scheduler pauses a thread, other
// processes allocate memory.
constexpr std::chrono::milliseconds kReadCounts{20};

class MemoryError : public std::bad_alloc {
 public:
  explicit MemoryError(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

int64_t page_bytes() { return sysconf(_SC_PAGESIZE); }

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The number in a file; kUnlimited if the file is missing or contains "max".
int64_t number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  return (file >> value) ? value : kUnlimited;
}

// The number after `key` in a file of "key number" lines, times `factor`.
std::optional<int64_t> number_after(const std::string& key, const std::string& path,
                                    int64_t factor) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t value = 0;
    if (words >> name >> value && name == key) return value * factor;
  }
  return std::nullopt;
}

// Free bytes under the limits of this process's cgroup and of all its parents (version 2, then
// version 1). Unused file cache counts as free, as in MemAvailable.
int64_t cgroup_free_bytes() {
  int64_t free_bytes = kUnlimited;
  auto apply_limit = [&](const std::string& folder, const char* limit_file, const char* used_file,
                         const char* cache_key) {
    const int64_t limit = number_in(folder + "/" + limit_file);
    const int64_t used = number_in(folder + "/" + used_file);
    if (limit == kUnlimited || used == kUnlimited) return;
    const int64_t cache = number_after(cache_key, folder + "/memory.stat", 1).value_or(0);
    free_bytes = std::min(free_bytes, std::max<int64_t>(0, limit - used + cache));
  };
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const bool unified = line.compare(0, 3, "0::") == 0;
    if (!unified && line.substr(first + 1, second - first - 1).find("memory") == std::string::npos)
      continue;
    const std::string root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    for (std::string path = line.substr(second + 1);; path = path.substr(0, path.rfind('/'))) {
      const std::string folder = root + (path == "/" ? "" : path);
      if (unified) {
        apply_limit(folder, "memory.max", "memory.current", "inactive_file");
      } else {
        apply_limit(folder, "memory.limit_in_bytes", "memory.usage_in_bytes",
                    "total_inactive_file");
      }
      if (path.empty() || path == "/") break;
    }
  }
  return free_bytes;
}

// Bytes available to a table of `bytes`, of which `filled` are allocated, after the `other_bytes`
// that other threads of this process will still fill. Throws if the rest does not fit.
int64_t check_free_bytes(int64_t bytes, int64_t filled, int64_t other_bytes) {
  const int64_t available = std::max<int64_t>(0, available_bytes() - other_bytes);
  if (bytes - filled <= available) return available;
  const std::string allocated =
      filled == 0 ? "" : text("of which ", filled, " are already allocated, ");
  const std::string reserved =
      other_bytes == 0 ? ""
                       : text(", minus ", other_bytes,
                              " bytes that other threads of this process are allocating");
  throw MemoryError(text(
      "host memory: ", bytes, " bytes requested, ", allocated, available,
      " bytes available (the minimum of MemAvailable and the free bytes under the cgroup's limits",
      reserved,
      "). Free memory, use fewer or narrower rows, or set SPEEDTORCH_MEMORY_CHECK=0 to skip this "
      "check"));
}

// A fill in progress. The system counts memory as available until it is filled, so each fill adds
// its bytes to a shared account when it begins.
class Filling {
 public:
  Filling(int64_t bytes, bool check_memory) : bytes_(bytes) {
    const std::scoped_lock lock(account_mutex);
    if (check_memory) check_free_bytes(bytes, 0, unfilled);
    unfilled += bytes;
  }
  Filling(const Filling&) = delete;
  Filling& operator=(const Filling&) = delete;
  ~Filling() { add(bytes_ - filled_); }

  void add(int64_t bytes) {
    const std::scoped_lock lock(account_mutex);
    filled_ += bytes;
    unfilled -= bytes;
  }
  int64_t filled() const {
    const std::scoped_lock lock(account_mutex);
    return filled_;
  }
  // Bytes available once chunks up to `next` are handed out; throws if the rest does not fit. If
  // the answer depends on chunks that are partly filled, waits for all of them.
  int64_t free_bytes(int64_t next) const {
    try {
      return check_free_bytes(bytes_, filled(), other_bytes());
    } catch (const MemoryError&) {
      while (filled() < next) std::this_thread::yield();
      return check_free_bytes(bytes_, next, other_bytes());
    }
  }
  static int64_t unfilled_by_all() {
    const std::scoped_lock lock(account_mutex);
    return unfilled;
  }

 private:
  int64_t other_bytes() const {
    const std::scoped_lock lock(account_mutex);
    return unfilled - (bytes_ - filled_);
  }

  static inline std::mutex account_mutex;
  static inline int64_t unfilled = 0;
  // A fork waits until no thread holds the mutex. No fill of another thread goes on in the child.
  [[maybe_unused]] static inline const int watches_forks =
      pthread_atfork([] { account_mutex.lock(); }, [] { account_mutex.unlock(); },
                     [] {
                       unfilled = 0;
                       account_mutex.unlock();
                     });
  int64_t bytes_;
  int64_t filled_ = 0;
};

}  // namespace

int64_t available_bytes() {
  const auto free = number_after("MemAvailable:", "/proc/meminfo", 1024);
  return std::min(free.value_or(kUnlimited), cgroup_free_bytes());
}

void* map_pages(int64_t bytes) {
  const int64_t size = round_up(bytes, page_bytes());
  const int64_t slack = size >= kLargePage ? kLargePage : 0;
  void* mapped =
      mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    throw MemoryError(
        text("host memory: mapping ", bytes, " bytes failed: ", std::strerror(errno)));
  }
  char* begin = static_cast<char*>(mapped);
  if (slack != 0) {
    char* aligned = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(begin), kLargePage));
    if (aligned != begin) munmap(begin, aligned - begin);
    char* mapped_end = begin + size + slack;
    if (mapped_end != aligned + size) munmap(aligned + size, mapped_end - (aligned + size));
    begin = aligned;
    madvise(begin, size, MADV_HUGEPAGE);  // fails without harm if large pages are switched off
  }
  return begin;
}

void unmap_pages(void* address, int64_t bytes) { munmap(address, round_up(bytes, page_bytes())); }

void fill_with_zeros(void* address, int64_t bytes, bool check_memory) {
  char* begin = static_cast<char*>(address);
  const int64_t threads = std::clamp<int64_t>(bytes / kBytesPerThread, 1, usable_cpus());
  using Clock = std::chrono::steady_clock;
  Filling filling(bytes, check_memory);
  std::mutex mutex;
  Clock::time_point last_read = Clock::now();
  int64_t next = 0;  // start of the next chunk
  // limit of `next` until available memory is read again
  int64_t allowed = check_memory ? kBytesPerChunk : bytes;
  std::exception_ptr failure;
  auto next_chunk = [&] {
    const std::scoped_lock lock(mutex);
    const bool is_due = next >= allowed || (check_memory && Clock::now() - last_read > kReadCounts);
    if (is_due && next < bytes) {
      // Other processes fill memory at the same time, so fill at most an eighth between reads.
      const int64_t free_bytes = filling.free_bytes(next) - (next - filling.filled());
      allowed = next + std::max(kBytesPerChunk, free_bytes / 8);
      last_read = Clock::now();
    }
    return std::exchange(next, std::min(bytes, next + kBytesPerChunk));
  };
  auto fill_chunk = [&] {
    const int64_t start = next_chunk();
    const int64_t size = std::min(kBytesPerChunk, bytes - start);
    std::memset(begin + start, 0, size);
    filling.add(size);
    return size > 0;
  };
  auto fill_chunks = [&] {
    try {
      while (fill_chunk()) {
      }
    } catch (...) {
      const std::scoped_lock lock(mutex);
      next = bytes;
      failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> workers;  // the destructor joins
    try {
      while (std::ssize(workers) + 1 < threads) workers.emplace_back(fill_chunks);
    } catch (const std::system_error&) {  // the threads that did start fill everything
    }
    fill_chunks();
  }
  if (failure) std::rethrow_exception(failure);
}

void check_available(int64_t bytes) { check_free_bytes(bytes, 0, Filling::unfilled_by_all()); }

void unregister_pages(char* base, int64_t bytes) noexcept {
  const RelaxedCapture while_capturing;
  for (int64_t start = 0; start < bytes; start += kBytesPerRegistration) {
    succeeded(cuda_calls().host_unregister(base + start));
  }
}

int register_pages(char* base, int64_t bytes, bool read_only) {
  const RelaxedCapture while_capturing;
  for (int64_t start = 0; start < bytes; start += kBytesPerRegistration) {
    const int64_t part_bytes = std::min(kBytesPerRegistration, bytes - start);
    const int error = cuda_calls().host_register(base + start, part_bytes, read_only);
    if (!succeeded(error)) {
      unregister_pages(base, start);
      return error;
    }
  }
  return 0;
}

bool is_at_own_address(const char* base) {
  int kind = 0;
  void* on_gpu = nullptr;
  // If CUDA does not report the address, assume that both are equal, as on nearly every system.
  return !succeeded(cuda_calls().pointer_kind(base, &kind, &on_gpu)) || on_gpu == base;
}

int allocate_pinned(char** base, int64_t bytes) {
  const RelaxedCapture while_capturing;
  void* address = nullptr;
  const int error = cuda_calls().host_alloc(&address, static_cast<size_t>(bytes));
  succeeded(error);
  *base = static_cast<char*>(address);
  return error;
}

void free_pinned(char* base) noexcept { succeeded(cuda_calls().host_free(base)); }

std::string pinning_failure(int64_t bytes, const char* call, int error) {
  if (is_without_gpu(error)) return "host memory: pinning needs a GPU" + without_gpu(error);
  return text("host memory: pinning ", bytes, " bytes with ", call,
              " failed: ", cuda_calls().error_string(error), " (CUDA error ", error,
              "). Bytes available on this machine: ", available_bytes(),
              ". CUDA cannot pin writable shared mappings of disk files or memory that is already "
              "registered. Load the data into speedtorch.memory.empty(...), free host memory, or "
              "use memory='plain'");
}

}  // namespace speedtorch

// The rate of random pages that threads read from a file, and write back, without the page cache.
// Compiled and called by bench_file_tables.py.

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

constexpr int64_t kPage = 4096;

// Returns the pages of a second, or -1 after an error.
extern "C" double pages_per_s(int file, int64_t pages, int threads, int writes, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  std::atomic<int64_t> count{0};
  std::atomic<bool> has_failed{false};
  const auto run = [&](int number) {
    alignas(kPage) char page[kPage];
    std::mt19937_64 draws(static_cast<uint64_t>(number));
    while (passed() < seconds && !has_failed) {
      const int64_t offset = static_cast<int64_t>(draws() % static_cast<uint64_t>(pages)) * kPage;
      if (pread(file, page, kPage, offset) != kPage ||
          (writes && pwrite(file, page, kPage, offset) != kPage)) {
        has_failed = true;
      }
      ++count;
    }
  };
  std::vector<std::thread> all;
  for (int k = 0; k < threads; ++k) all.emplace_back(run, k);
  for (std::thread& thread : all) thread.join();
  return has_failed ? -1 : static_cast<double>(count) / passed();
}

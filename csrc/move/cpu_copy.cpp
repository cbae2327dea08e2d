// Defines the functions of cpu_copy.h, which loop over rows on the CPU. The numbers below were
// measured on an EPYC 9005 (one and two threads) with 131,072 random rows of a 5.12 GB table.

#include "move/cpu_copy.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <numeric>
#include <type_traits>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "core/parallel_for.h"

namespace speedtorch {
namespace {

// The distance between counters of two chunks: 128 bytes, so that no two threads share a cache line
// (measured: 15 ns an id if they do).
constexpr int64_t kCountersApart = 16;
constexpr int64_t kIdsPerChunk = 8192;  // ids that a thread sorts

// Rows this many bytes ahead are prefetched (4 KiB: 1.1 times as slow for 512-byte rows on 16
// threads). Fewer than 64 rows of 64 bytes do not cover the latency (32 rows: 1.3 times as slow).
constexpr int64_t kAheadBytes = 8192;
constexpr int64_t kMinAhead = 4;
constexpr int64_t kMaxAhead = 64;
// Bytes prefetched of each row; the processor prefetches the rest itself. Measured with 16 threads,
// gathers of 512 bytes: 0.81 ms; with the whole row 0.82, the first line 1.20, no prefetch 1.27.
constexpr int64_t kPrefetchBytes = 256;
constexpr int64_t kLineBytes = 64;

// Neighboring rows within two cache lines belong to one thread. Larger stripes would give one
// thread all the frequent rows of a table sorted by frequency.
constexpr int64_t kStripeBytes = 128;

void prefetch(const char* row, int64_t row_bytes) {
  const char* end = row + std::min(row_bytes, kPrefetchBytes);
  row -= reinterpret_cast<uintptr_t>(row) % static_cast<uintptr_t>(kLineBytes);
  for (; row < end; row += kLineBytes) __builtin_prefetch(row);
  asm volatile("");  // GCC removes calls of functions that only prefetch
}

template <typename T>
[[gnu::always_inline]] inline void add_numbers(T* __restrict sum, const T* __restrict addend,
                                               int64_t count) {
  for (int64_t k = 0; k < count; ++k) sum[k] = plus(sum[k], addend[k]);
}

// Like add_numbers, for a table with unaligned numbers.
template <typename T>
void add_numbers_anywhere(char* sum, const char* addend, int64_t count) {
  for (int64_t k = 0; k < count; ++k) {
    T numbers[2];
    std::memcpy(&numbers[0], sum + k * sizeof(T), sizeof(T));
    std::memcpy(&numbers[1], addend + k * sizeof(T), sizeof(T));
    numbers[0] = plus(numbers[0], numbers[1]);
    std::memcpy(sum + k * sizeof(T), &numbers[0], sizeof(T));
  }
}

#ifdef __x86_64__
// add_numbers with AVX2, which not every x86-64 has: rows of 512 bytes take 0.7 of the time.
template <typename T>
[[gnu::target("avx2")]] void add_numbers_avx2(T* sum, const T* addend, int64_t count) {
  add_numbers(sum, addend, count);
}
#endif

template <typename T>
auto best_add_numbers() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) return add_numbers_avx2<T>;
#endif
  return add_numbers<T>;
}

// Stores that bypass the caches do not read a line before they overwrite it: random rows of 512
// bytes take half of the time, on 1 to 16 threads. A smaller batch may fit into the caches.
constexpr int64_t kMinPassingBytes = int64_t{4} << 20;
constexpr int64_t kPassingBytes = 32;  // bytes of one store, and the alignment that rows need

#ifdef __x86_64__
[[gnu::target("avx2")]] void store_past_caches(char* row, const char* from, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += kPassingBytes) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(row + b),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + b)));
  }
}

bool can_pass_caches(const Rows& table, const Ids& ids) {
  const auto bits = reinterpret_cast<uint64_t>(table.base) |
                    static_cast<uint64_t>(table.stride_bytes | table.row_bytes);
  return bits % kPassingBytes == 0 && ids.count * table.row_bytes >= kMinPassingBytes &&
         __builtin_cpu_supports("avx2");
}

// Makes this thread's stores visible to other threads.
void finish_stores() { _mm_sfence(); }
#else
void finish_stores() {}
#endif

template <typename Use>
void with_ids(const Ids& ids, const Use& use) {
  if (ids.wide) {
    use(static_cast<const int64_t*>(ids.data));
  } else {
    use(static_cast<const int32_t*>(ids.data));
  }
}

// Calls use(bytes) with a constant for the widths of narrow rows. A call of memcpy would take
// longer than the copy (measured: 1.1 to 2 times as long in total).
template <typename Use>
void with_width(int64_t bytes, const Use& use) {
  switch (bytes) {
    case 4:
      return use(std::integral_constant<size_t, 4>{});
    case 8:
      return use(std::integral_constant<size_t, 8>{});
    case 16:
      return use(std::integral_constant<size_t, 16>{});
    case 32:
      return use(std::integral_constant<size_t, 32>{});
    case 64:
      return use(std::integral_constant<size_t, 64>{});
    default:
      return use(static_cast<size_t>(bytes));
  }
}

// Calls move(i) for i = position(begin) ... position(end - 1), and fetch(i) several calls earlier.
template <typename Position, typename Fetch, typename Move>
void with_prefetch(int64_t begin, int64_t end, int64_t row_bytes, const Position& position,
                   const Fetch& fetch, const Move& move) {
  const int64_t ahead = std::clamp(kAheadBytes / row_bytes, kMinAhead, kMaxAhead);
  for (int64_t k = begin; k < std::min(begin + ahead, end); ++k) fetch(position(k));
  int64_t k = begin;
  for (; k < end - ahead; ++k) {
    fetch(position(k + ahead));
    move(position(k));
  }
  for (; k < end; ++k) move(position(k));
}

// Maps a row to the one of `count` threads that writes it: multiplicative hashing of the row's
// stripe. Two multiplications are cheaper than a division by a run-time number.
struct Owners {
  int stripe_shift;
  uint64_t count;

  Owners(int64_t row_bytes, int64_t count)
      : stripe_shift(std::bit_width(static_cast<uint64_t>((kStripeBytes - 1) / row_bytes))),
        count(static_cast<uint64_t>(count)) {}

  size_t of(int64_t id) const {
    const uint64_t mixed = static_cast<uint64_t>(id >> stripe_shift) * 0x9E3779B97F4A7C15u;
    return static_cast<size_t>(((mixed >> 32) * count) >> 32);
  }
};

// Calls move(i) for every id. Ids of one row are processed in index order by one thread, the row's
// owner. The first pass sorts each chunk of ids by owner. In the second pass, every owner processes
// its ids of all chunks in order.
template <typename Id, typename Fetch, typename Move>
void for_each_id(const Id* ids, int64_t count, int64_t row_bytes, const Fetch& fetch,
                 const Move& move) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t tasks = std::clamp<int64_t>(count * row_bytes / kBytesPerTask, 1, threads);
  if (tasks == 1) {
    with_prefetch(0, count, row_bytes, [](int64_t k) { return k; }, fetch, move);
    finish_stores();
    return;
  }
  const Owners owners(row_bytes, tasks);
  const int64_t chunks = std::clamp<int64_t>(count / kIdsPerChunk, 1, tasks);
  const auto chunk_begin = [&](int64_t chunk) { return count * chunk / chunks; };
  const int64_t stride = tasks + kCountersApart;
  // Positions of chunk c by owner; positions of owner o end before ends[c * stride + o].
  const auto order = std::make_unique_for_overwrite<int32_t[]>(static_cast<size_t>(count));
  std::vector<int64_t> ends(static_cast<size_t>(chunks * stride));
  parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      int64_t* next = &ends[static_cast<size_t>(chunk * stride)];
      const int64_t begin = chunk_begin(chunk);
      const int64_t end = chunk_begin(chunk + 1);
      for (int64_t i = begin; i < end; ++i) ++next[owners.of(ids[i])];
      std::exclusive_scan(next, next + tasks, next, begin);
      for (int64_t i = begin; i < end; ++i) {
        order[static_cast<size_t>(next[owners.of(ids[i])]++)] = static_cast<int32_t>(i);
      }
    }
  });
  parallel_for(0, tasks, 1, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t* end = &ends[static_cast<size_t>(chunk * stride + task)];
        const int64_t begin = task == 0 ? chunk_begin(chunk) : end[-1];
        with_prefetch(
            begin, *end, row_bytes,
            [&](int64_t k) -> int64_t { return order[static_cast<size_t>(k)]; }, fetch, move);
      }
    }
    finish_stores();
  });
}

// Calls write(row of the table, row of src) for every id; ids of one row in index order. If
// `reads`, the table's rows are prefetched, because the processor reads them before it writes.
template <typename Write>
void write_rows(const Rows& table, const Ids& ids, const Rows& src, bool reads,
                const Write& write) {
  with_ids(ids, [&](const auto* id) {
    const auto fetch = [&](int64_t i) {
      if (reads) prefetch(table.row(id[i]), table.row_bytes);
      // A thread's rows of src have gaps. The processor prefetches wide rows itself (an explicit
      // prefetch is 1.1 to 1.4 times as slow), but not narrow ones.
      if (src.row_bytes <= kLineBytes) prefetch(src.row(i), src.row_bytes);
    };
    for_each_id(id, ids.count, src.row_bytes, fetch,
                [&](int64_t i) { write(table.row(id[i]), src.row(i)); });
  });
}

}  // namespace

void gather_on_cpu(const Rows& table, const Ids& ids, const Rows& out) {
  const int64_t rows_per_task = kBytesPerTask / out.row_bytes + 1;
  with_ids(ids, [&](const auto* id) {
    with_width(out.row_bytes, [&](auto width) {
      parallel_for(0, ids.count, rows_per_task, [&](int64_t begin, int64_t end) {
        with_prefetch(
            begin, end, out.row_bytes, [](int64_t i) { return i; },
            [&](int64_t i) { prefetch(table.row(id[i]), out.row_bytes); },
            [&](int64_t i) { std::memcpy(out.row(i), table.row(id[i]), width); });
      });
    });
  });
}

void scatter_on_cpu(const Rows& table, const Ids& ids, const Rows& src) {
#ifdef __x86_64__
  if (can_pass_caches(table, ids)) {
    return write_rows(table, ids, src, false, [&src](char* row, const char* from) {
      store_past_caches(row, from, src.row_bytes);
    });
  }
#endif
  with_width(src.row_bytes, [&](auto width) {
    write_rows(table, ids, src, true,
               [width](char* row, const char* from) { std::memcpy(row, from, width); });
  });
}

void add_on_cpu(const Rows& table, const Ids& ids, const Rows& src, NumberKind kind) {
  with_number_type<torch::headeronly::Half, torch::headeronly::BFloat16>(kind, [&](auto number) {
    using T = decltype(number);
    const int64_t numbers = src.row_bytes / static_cast<int64_t>(sizeof(T));
    const auto bits =
        reinterpret_cast<uint64_t>(table.base) | static_cast<uint64_t>(table.stride_bytes);
    if (bits % sizeof(T) != 0) {
      return write_rows(table, ids, src, true, [numbers](char* row, const char* from) {
        add_numbers_anywhere<T>(row, from, numbers);
      });
    }
    const auto add_to = best_add_numbers<T>();
    write_rows(table, ids, src, true, [numbers, add_to](char* row, const char* from) {
      add_to(reinterpret_cast<T*>(row), reinterpret_cast<const T*>(from), numbers);
    });
  });
}

void move_on_cpu(const Rows& from, const int64_t* from_places, const Rows& to,
                 const int64_t* to_places, int64_t count) {
  if (to.row_bytes == 0) return;
  const int64_t rows_per_task = kBytesPerTask / to.row_bytes + 1;
  const auto at = [](const int64_t* places, int64_t i) { return places ? places[i] : i; };
  parallel_for(0, count, rows_per_task, [&](int64_t begin, int64_t end) {
    with_prefetch(
        begin, end, to.row_bytes, [](int64_t i) { return i; },
        [&](int64_t i) { prefetch(from.row(at(from_places, i)), to.row_bytes); },
        [&](int64_t i) {
          std::memcpy(to.row(at(to_places, i)), from.row(at(from_places, i)),
                      static_cast<size_t>(to.row_bytes));
        });
  });
}

}  // namespace speedtorch

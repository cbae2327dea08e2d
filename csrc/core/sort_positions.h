// Sorts positions by int64 keys, for plans on the CPU and for slots of resident rows.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

namespace speedtorch {

// Writes the positions 0..n-1 to `order`, sorted by key_of(position), equal keys in position order.
// Keys are from 0 to `last_key`. A radix sort from the least significant digit on.
template <typename KeyOf>
void sort_positions(int64_t n, int64_t last_key, const KeyOf& key_of, int64_t* order) {
  constexpr int kDigitBits = 11;  // 2,048 counters of 8 bytes fit in the first-level cache
  constexpr size_t kBuckets = size_t{1} << kDigitBits;
  constexpr int64_t kFew = 512;  // a comparison sort of these is faster than clearing the counters
  for (int64_t i = 0; i < n; ++i) order[i] = i;
  if (n <= kFew) {
    std::array<std::pair<int64_t, int64_t>, kFew> keyed;
    for (int64_t i = 0; i < n; ++i) keyed[static_cast<size_t>(i)] = {key_of(i), i};
    std::sort(keyed.begin(), keyed.begin() + n);
    for (int64_t i = 0; i < n; ++i) order[i] = keyed[static_cast<size_t>(i)].second;
    return;
  }
  auto other = std::make_unique<int64_t[]>(static_cast<size_t>(n));
  int64_t* from = order;
  int64_t* to = other.get();
  const int bits = std::bit_width(static_cast<uint64_t>(std::max<int64_t>(last_key, 0)));
  for (int shift = 0; shift < bits; shift += kDigitBits) {
    const auto digit = [&](int64_t i) {
      return (static_cast<uint64_t>(key_of(i)) >> shift) & (kBuckets - 1);
    };
    std::array<int64_t, kBuckets> next{};
    for (int64_t i = 0; i < n; ++i) ++next[digit(i)];
    int64_t sum = 0;
    for (int64_t& bucket : next) bucket = std::exchange(sum, sum + bucket);
    for (int64_t i = 0; i < n; ++i) to[next[digit(from[i])]++] = from[i];
    std::swap(from, to);
  }
  if (from != order) std::memcpy(order, from, static_cast<size_t>(n) * sizeof(int64_t));
}

}  // namespace speedtorch

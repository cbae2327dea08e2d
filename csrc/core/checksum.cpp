// Computes CRC-32C with CPU instructions or tables; see checksum.h. A polynomial over GF(2) is a
// word whose highest bit is the coefficient of x^0. The state between bytes is the remainder
// without the inversions at the begin and end of the checksum.

#include "core/checksum.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define SPEEDTORCH_WITH_CRC __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define SPEEDTORCH_WITH_CRC __attribute__((target("+crc")))
#endif

namespace speedtorch {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;
constexpr uint32_t kOne = 1u << 31;

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ ((a & 1) != 0 ? kPolynomial : 0); }

// Reads a little-endian word at any address.
uint64_t word_at(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

// ---- By tables

using Table = std::array<uint32_t, 256>;

// tables[n][byte] is the state after the byte and n zero bytes.
constexpr std::array<Table, 8> kTables = [] {
  std::array<Table, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = times_x(state);
    tables[0][byte] = state;
  }
  for (size_t n = 1; n < tables.size(); ++n) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[n - 1][byte];
      tables[n][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}();

uint32_t state_by_tables(uint32_t state, const uint8_t* data, int64_t count) {
  for (; count >= 8; data += 8, count -= 8) {
    const uint64_t word = word_at(data) ^ state;
    state = 0;
    for (size_t i = 0; i < 8; ++i) state ^= kTables[7 - i][word >> (8 * i) & 0xff];
  }
  for (; count > 0; ++data, --count) state = (state >> 8) ^ kTables[0][(state ^ *data) & 0xff];
  return state;
}

// ---- By instructions

#ifdef SPEEDTORCH_WITH_CRC

#ifdef __x86_64__

bool has_instructions() { return __builtin_cpu_supports("sse4.2") != 0; }

SPEEDTORCH_WITH_CRC inline uint32_t after_word(uint32_t state, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(state, word));
}

SPEEDTORCH_WITH_CRC inline uint32_t after_byte(uint32_t state, uint8_t byte) {
  return _mm_crc32_u8(state, byte);
}

#else

bool has_instructions() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }

SPEEDTORCH_WITH_CRC inline uint32_t after_word(uint32_t state, uint64_t word) {
  return __crc32cd(state, word);
}

SPEEDTORCH_WITH_CRC inline uint32_t after_byte(uint32_t state, uint8_t byte) {
  return __crc32cb(state, byte);
}

#endif

// Multiplies modulo the polynomial.
constexpr uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) sum ^= b;
    b = times_x(b);
  }
  return sum;
}

// An instruction has a latency of three cycles and a throughput of one per cycle, so three runs of
// bytes are processed at once. With runs of 16 KiB, the products that join them take 3 % of the
// time.
constexpr int64_t kRun = 16 << 10;
constexpr int64_t kRuns = 3;

// The factor that advances a state over a run of zeros: x^(8 * kRun).
constexpr uint32_t kAfterRun = [] {
  uint32_t power = kOne >> 8;  // x^8
  for (int64_t bytes = 1; bytes < kRun; bytes *= 2) power = product(power, power);
  return power;
}();

SPEEDTORCH_WITH_CRC uint32_t state_by_instructions(uint32_t state, const uint8_t* data,
                                                   int64_t count) {
  for (; count >= kRuns * kRun; data += kRuns * kRun, count -= kRuns * kRun) {
    uint32_t second = 0, third = 0;
    for (int64_t at = 0; at < kRun; at += 8) {
      state = after_word(state, word_at(data + at));
      second = after_word(second, word_at(data + kRun + at));
      third = after_word(third, word_at(data + 2 * kRun + at));
    }
    state = product(product(state, kAfterRun) ^ second, kAfterRun) ^ third;
  }
  for (; count >= 8; data += 8, count -= 8) state = after_word(state, word_at(data));
  for (; count > 0; ++data, --count) state = after_byte(state, *data);
  return state;
}

#endif

}  // namespace

uint32_t crc32c_by_tables(const uint8_t* data, int64_t count) {
  return ~state_by_tables(~uint32_t{0}, data, count);
}

uint32_t crc32c(const uint8_t* data, int64_t count) {
#ifdef SPEEDTORCH_WITH_CRC
  static const bool by_instructions = has_instructions();
  if (by_instructions) return ~state_by_instructions(~uint32_t{0}, data, count);
#endif
  return crc32c_by_tables(data, count);
}

}  // namespace speedtorch

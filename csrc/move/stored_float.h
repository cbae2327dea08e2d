// float32 numbers stored in 16 bits: conversion in both directions, and stochastic rounding. Called
// by swaps and by round_rows. Uses only integer arithmetic, so that CPU and GPU results are bitwise
// identical. Includes no CUDA or torch header.
#pragma once

#include <cstdint>

namespace speedtorch {

// How a table stores a field: with the same bits, or float32 in 16 bits.
enum class Stored : int { kSame, kBFloat16, kFloat16 };

constexpr uint32_t kSignBit = 0x80000000u, kInfinity = 0x7F800000u;
constexpr uint32_t kSmallestFloat16 = 103u << 23;  // 2^-24, as float32

constexpr uint16_t kStoredNan = 0x7FFF;  // NaN of both kinds, as GPUs convert it

// Rounds to nearest, ties to even.
constexpr uint16_t bfloat16_of(uint32_t bits) {
  if ((bits & ~kSignBit) > kInfinity) return kStoredNan;
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

constexpr uint16_t float16_of(uint32_t bits) {
  const uint32_t sign = (bits & kSignBit) >> 16, size = bits & ~kSignBit;
  if (size > kInfinity) return kStoredNan;
  if (size >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00);  // 65520 and more
  if (size >= 113u << 23) {                                              // normal numbers
    const uint32_t rebased = size - (112u << 23);
    return static_cast<uint16_t>(sign | ((rebased + 0xFFF + ((rebased >> 13) & 1)) >> 13));
  }
  const uint32_t exponent = size >> 23;
  if (exponent < 102) return static_cast<uint16_t>(sign);
  const uint32_t whole = (size & 0x7FFFFF) | 0x800000, dropped = 126 - exponent;
  const uint32_t half = 1u << (dropped - 1), kept = whole >> dropped;
  const uint32_t rest = whole & ((1u << dropped) - 1);
  return static_cast<uint16_t>(sign | (kept + (rest > half || (rest == half && (kept & 1)))));
}

constexpr uint32_t float_of_float16(uint16_t stored) {
  const uint32_t sign = static_cast<uint32_t>(stored & 0x8000) << 16;
  const uint32_t exponent = (stored >> 10) & 0x1F;
  uint32_t fraction = stored & 0x3FF;
  if (exponent == 0x1F) return sign | kInfinity | (fraction << 13);
  if (exponent > 0) return sign | ((exponent + 112) << 23) | (fraction << 13);
  if (fraction == 0) return sign;
  uint32_t shift = 0;
  while ((fraction & 0x400) == 0) {
    fraction <<= 1;
    ++shift;
  }
  return sign | ((113 - shift) << 23) | ((fraction & 0x3FF) << 13);
}

constexpr uint16_t stored_of(uint32_t bits, Stored kind) {
  return kind == Stored::kBFloat16 ? bfloat16_of(bits) : float16_of(bits);
}

constexpr uint32_t float_of(uint16_t stored, Stored kind) {
  return kind == Stored::kBFloat16 ? static_cast<uint32_t>(stored) << 16 : float_of_float16(stored);
}

constexpr uint32_t rounded_to_nearest(uint32_t bits, Stored kind) {
  return float_of(stored_of(bits, kind), kind);
}

// Rounds to one of the two stored numbers around a float32. The probability of the upper one is the
// distance from the lower one, in 2^-32 of the gap. Numbers that are stored exactly do not change.
// Numbers beyond the largest, NaN and infinities are rounded to nearest.
constexpr uint32_t rounded_at_random(uint32_t bits, uint32_t random, Stored kind) {
  const uint32_t sign = bits & kSignBit, size = bits & ~kSignBit, exponent = size >> 23;
  if (size > (kind == Stored::kBFloat16 ? 0x7F7F0000u : 0x477FE000u)) {
    return rounded_to_nearest(bits, kind);
  }
  uint32_t dropped = kind == Stored::kBFloat16 ? 16 : 13;
  if (kind == Stored::kFloat16 && exponent < 113) dropped += 113 - exponent;
  uint32_t down = 0, up = kSmallestFloat16, beyond = 0;
  if (dropped < 24) {
    const uint32_t low = size & ((1u << dropped) - 1);
    down = size - low;
    up = down + (1u << dropped);
    beyond = low << (32 - dropped);
  } else if (dropped < 56) {  // less than the smallest float16
    beyond = static_cast<uint32_t>((uint64_t{(size & 0x7FFFFF) | 0x800000} << 32) >> dropped);
  }
  return sign | (random < beyond ? up : down);
}

// Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011): four random
// words from a key and a counter.
struct RandomWords {
  uint32_t word[4];
};

constexpr RandomWords random_words(uint64_t key, uint64_t low, uint64_t high) {
  RandomWords now{{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                   static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)}};
  auto key_low = static_cast<uint32_t>(key), key_high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53u} * now.word[0];
    const uint64_t second = uint64_t{0xCD9E8D57u} * now.word[2];
    now = {{static_cast<uint32_t>(second >> 32) ^ now.word[1] ^ key_low,
            static_cast<uint32_t>(second),
            static_cast<uint32_t>(first >> 32) ^ now.word[3] ^ key_high,
            static_cast<uint32_t>(first)}};
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return now;
}

// The key of a step's random words: a permutation of 64 bits (splitmix64's) of seed and step.
constexpr uint64_t key_of_step(int64_t seed, int64_t step) {
  uint64_t key = static_cast<uint64_t>(seed) + 0x9E3779B97F4A7C15u * static_cast<uint64_t>(step);
  key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9u;
  key = (key ^ (key >> 27)) * 0x94D049BB133111EBu;
  return key ^ (key >> 31);
}

static_assert(float16_of(0x3F800000u) == 0x3C00 && float_of_float16(0x0001) == kSmallestFloat16);
static_assert(bfloat16_of(0x3F808000u) == 0x3F80 && bfloat16_of(0x3F818000u) == 0x3F82);

}  // namespace speedtorch

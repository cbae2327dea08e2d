// Which row of a file each slot has, in host memory that GPUs read and mark: the slots, a hash
// table of their rows, and a list of found slots. Includes no CUDA or torch header.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace speedtorch {

constexpr int64_t kNoRow = -1;
// Entries of the hash table that a kernel reads in one access.
constexpr uint64_t kEntriesRead = 4;
// Rounds of the hand that a slot of a row survives without a use, at most.
constexpr uint8_t kMaxChances = 3;

// A kernel reads a slot in one access.
struct alignas(16) Slot {
  int64_t row = kNoRow;
  uint32_t call = 0;  // the last call that used the slot
  uint16_t leases = 0;
  uint8_t chances = 0;  // rounds of the hand that the row survives without a use
  bool is_changed = false;
};
static_assert(sizeof(Slot) == 16);

// Mixes all bits (splitmix64), because rows of one batch may differ in few.
constexpr uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// Pointers into the memory of an index.
struct ResidentIndex {
  Slot* slots;
  int64_t slot_count;
  // A hash table with open addressing. Its size is a power of 2, and at most two thirds of it are
  // used. An entry is 0, or 1 + a slot in the bits of `slot_mask`. The other bits are a part of the
  // hash of the slot's row, so that a search reads few slots of other rows.
  uint32_t* table;
  uint64_t mask;
  uint32_t slot_mask;
  int32_t* found;    // [slots]: the slots that the last kernel found
  int32_t* missing;  // not 0: the kernel did not find all rows

  static constexpr int64_t kBytesBeside = 32;  // for `missing`
  static constexpr int64_t table_size(int64_t slot_count) {
    const auto slots = static_cast<uint64_t>(slot_count);
    return static_cast<int64_t>(std::bit_ceil(std::max(3 * slots / 2 + 1, kEntriesRead)));
  }
  // At most 32 * (slots + 2).
  static constexpr int64_t bytes(int64_t slot_count) {
    return slot_count * 20 + 4 * table_size(slot_count) + kBytesBeside;
  }
  // `memory` has the bytes of the index and is aligned like a slot.
  static ResidentIndex in(char* memory, int64_t slot_count) {
    ResidentIndex index;
    index.slots = reinterpret_cast<Slot*>(memory);
    index.slot_count = slot_count;
    index.missing = reinterpret_cast<int32_t*>(index.slots + slot_count);
    index.table = reinterpret_cast<uint32_t*>(index.missing) + kBytesBeside / 4;
    index.mask = static_cast<uint64_t>(table_size(slot_count)) - 1;
    index.slot_mask =
        static_cast<uint32_t>(std::bit_ceil(static_cast<uint64_t>(slot_count) + 1)) - 1;
    index.found = reinterpret_cast<int32_t*>(index.table + table_size(slot_count));
    return index;
  }

  constexpr uint64_t first_place(int64_t row) const {
    return mixed(static_cast<uint64_t>(row)) & mask;
  }
  // The slot of an entry, or -1.
  constexpr int32_t slot_of(uint32_t entry) const {
    return static_cast<int32_t>(entry & slot_mask) - 1;
  }
  // Whether the slot of an entry may have a row with this hash.
  constexpr bool may_have(uint32_t entry, uint64_t hash) const {
    return ((entry ^ static_cast<uint32_t>(hash >> 32)) & ~slot_mask) == 0;
  }
  constexpr uint32_t entry_of(uint64_t hash, int64_t slot) const {
    return (static_cast<uint32_t>(hash >> 32) & ~slot_mask) | static_cast<uint32_t>(slot + 1);
  }
  // The place of a row in the hash table, or of the empty place where it would be.
  constexpr uint64_t place_of(int64_t row) const {
    const uint64_t hash = mixed(static_cast<uint64_t>(row));
    uint64_t place = hash & mask;
    while (table[place] != 0 &&
           !(may_have(table[place], hash) && slots[slot_of(table[place])].row == row)) {
      place = (place + 1) & mask;
    }
    return place;
  }
  constexpr int32_t slot_of_row(int64_t row) const { return slot_of(table[place_of(row)]); }
};

}  // namespace speedtorch

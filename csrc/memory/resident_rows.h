// The most used records of a file, in slots of host memory. A slot has one record: the bytes of a
// row. A changed record is written to the file when its slot gets another row, and by write().
//
// The caller must wait for the GPU before each call that may read or overwrite records. Between
// calls only threads of read_ahead() exist, which access no slot.
//
// Between find() and release() the caller may read and write records in the slots that were found.
// Other calls meanwhile, such as from garbage collection or another thread, do not empty these
// slots, and their rows remain marked as changed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace speedtorch {

// The errno of the first file call that failed, EBUSY or EAGAIN (see find()), or 0; and a row.
struct FileFailure {
  int error = 0;
  int64_t row = 0;
};

// Numbers since the constructor.
struct ResidentCounts {
  int64_t hits = 0;     // rows that were in slots
  int64_t misses = 0;   // rows that were not
  int64_t reads = 0;    // records read from the file
  int64_t writes = 0;   // records written to the file
  int64_t wait_ns = 0;  // time of calls that read or wrote records
  int64_t ahead = 0;    // records that read_ahead() began to read
};

class ResidentRows {
 public:
  // Record r of the file begins at byte r * record_bytes. `memory` has `slot_count` records and
  // must remain allocated. Opens the file again by its descriptor; throws std::system_error if that
  // fails.
  ResidentRows(int file, char* memory, int64_t slot_count, int64_t record_bytes);
  ResidentRows(const ResidentRows&) = delete;
  ResidentRows& operator=(const ResidentRows&) = delete;

  // Finds the slots of `count` rows of the file, after reading records that have none, and keeps
  // them for `lease`. The first `changing` records are then marked as changed. If a file call
  // fails, no slot is kept and no change is lost. Fails with EBUSY if too few slots are free, and
  // with EAGAIN if `only_hits` is true and a row has no slot. With `only_hits` the caller need not
  // have waited for the GPU, because the call accesses no record.
  FileFailure find(const int64_t* rows, int64_t count, int64_t changing, int64_t lease,
                   bool only_hits, int64_t* slots);
  // Begins to read the records of rows that have no slot into the page cache, where find() reads
  // them without a wait. Also reads the pages to which find() will probably write evicted records.
  // Ignores errors and invalid rows. Does nothing while 3 calls still read, and after 16 calls of
  // find() without a miss until the next miss.
  void read_ahead(const int64_t* rows, int64_t count);
  // Ends a lease. Does nothing if there is none.
  void release(int64_t lease);
  // Writes changed records of these rows to the file; those of all rows if `rows` is null.
  FileFailure write(const int64_t* rows, int64_t count);
  // Removes all rows from their slots, except rows of a lease. Changes of the removed rows since
  // the last write() are lost.
  void forget();

  int64_t slot_count() const { return static_cast<int64_t>(slots_.size()); }
  int64_t resident() const { return resident_; }
  const ResidentCounts& counts() const { return counts_; }
  std::mutex& mutex() { return mutex_; }

 private:
  struct Slot {
    int64_t row = kNone;
    uint32_t call = 0;  // the last call that used the slot
    uint16_t leases = 0;
    uint8_t chances = 0;  // rounds of the hand that the row survives without a use
    bool is_changed = false;
  };
  struct File {  // closed by its last user, which may be a thread of read_ahead()
    File(int file, int64_t record_bytes);  // duplicates a descriptor
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    void begin_to_read(int64_t row) const;  // into the page cache

    const int descriptor;
    const int64_t record_bytes;
    std::atomic<int> readers_ahead{0};
  };
  static constexpr int64_t kNone = -1;
  static constexpr uint8_t kMaxChances = 3;

  char* record(int64_t slot) const { return memory_ + slot * record_bytes_; }
  size_t place_of(int64_t row) const;
  // Writes the slot of each row, or -1.
  void look_up(const int64_t* rows, int64_t count, int64_t* slots) const;
  void insert(int64_t row, int64_t slot);
  void erase(int64_t row);
  int64_t next_victim();  // or kNone
  // Adds rows that find() will probably evict for `count` misses, and whose records are changed.
  void add_likely_victims(int64_t count, std::vector<int64_t>& rows);
  FileFailure read_records(const std::vector<int64_t>& rows, const std::vector<int64_t>& slots);
  FileFailure write_slots(std::vector<int64_t> slots);

  std::shared_ptr<File> file_;
  char* memory_;
  int64_t record_bytes_;
  std::vector<Slot> slots_;
  // A hash table with open addressing: 1 + a slot, or 0. Its size is a power of 2, and at most half
  // of it is used.
  std::vector<int32_t> table_;
  std::unordered_map<int64_t, std::vector<int64_t>> leases_;
  int64_t resident_ = 0;
  int64_t hand_ = 0;
  int64_t hand_ahead_ = 0;  // where add_likely_victims() goes on
  uint32_t call_ = 0;
  int64_t calls_without_miss_ = 0;
  ResidentCounts counts_;
  std::mutex mutex_;
};

}  // namespace speedtorch

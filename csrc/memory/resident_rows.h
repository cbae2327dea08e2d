// The most used records of a file, in slots of host memory. A slot has one record: the bytes of a
// row. A changed record is written to the file when its slot gets another row, and by write().
//
// The caller waits for GPU work on records under lock(), before each call that may read or
// overwrite records. Between calls, threads of read_ahead() run, which access no slot, and at most
// one kernel of begin_find(), which reads the index and marks slots. A forked child begins with
// empty slots, because its parent writes the changed records.
//
// Between find() and release() the caller may read and write records in the slots that were found.
// Other calls meanwhile, such as from garbage collection or another thread, do not empty these
// slots, and their rows remain marked as changed.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "memory/resident_index.h"

namespace speedtorch {

// The errno of the first file call that failed, EBUSY (see find()), or 0; and a row.
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
  // Record r of the file begins at byte r * record_bytes; the file has `row_count` records.
  // `memory` has `slot_count` records, and `index` ResidentIndex::bytes(slot_count); both must
  // remain allocated. Opens the file again by its descriptor; throws std::system_error if that
  // fails.
  ResidentRows(int file, int64_t row_count, char* memory, char* index, int64_t slot_count,
               int64_t record_bytes);
  ResidentRows(const ResidentRows&) = delete;
  ResidentRows& operator=(const ResidentRows&) = delete;

  // Finds the slots of `count` rows of the file, after reading records that have none, and keeps
  // them for `lease`. The first `changing` records are then marked as changed. If a file call
  // fails, no slot is kept and no change is lost. Fails with EBUSY if too few slots are free.
  FileFailure find(const int64_t* rows, int64_t count, int64_t changing, int64_t lease,
                   int64_t* slots);
  // Like find(), with a kernel that `launch` queues, but accesses no record. The kernel writes the
  // slots of `count` rows to the index, with `missing` if a row has none, and marks slots as find()
  // does. The next call that needs its results calls `wait`, as does the next begin_find().
  void begin_find(int64_t count, int64_t lease,
                  const std::function<void(const ResidentIndex&)>& launch,
                  std::function<void()> wait);
  // Returns whether begin_find() found all rows of this lease. If not, the lease keeps no slot; the
  // next find() for it counts no use of the rows that the kernel has counted. Does not wait if all
  // rows of the file have slots.
  bool end_find(int64_t lease);
  // Waits for the kernel of begin_find(), if that is not done. If a row had no slot, ends its
  // lease.
  void await_found();
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

  int64_t slot_count() const { return index_.slot_count; }
  int64_t resident() const { return resident_; }
  const ResidentCounts& counts() const { return counts_; }
  // All other calls are made with this lock.
  std::unique_lock<std::mutex> lock();
  // The mutex of lock(), for handlers of a fork.
  std::mutex& mutex() { return mutex_; }

 private:
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
  static constexpr int64_t kNone = kNoRow;

  char* record(int64_t slot) const { return memory_ + slot * record_bytes_; }
  // Empties all slots and forgets all leases.
  void begin_empty();
  // Counts the slots that the kernel found as slots of their lease.
  void keep_found();
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
  int64_t row_count_;
  char* memory_;
  int64_t record_bytes_;
  ResidentIndex index_;
  std::vector<Slot> own_index_;  // memory of a forked child's index
  pid_t process_;
  std::unordered_map<int64_t, std::vector<int64_t>> leases_;
  int64_t found_lease_ = kNone;  // of the last begin_find(), while its slots are only in the index
  int64_t found_count_ = 0;
  int64_t missed_lease_ = kNone;  // of the last begin_find() without slots for all rows
  std::function<void()> wait_;    // for the kernel of begin_find(); empty after the wait
  int64_t resident_ = 0;
  int64_t hand_ = 0;
  int64_t hand_ahead_ = 0;  // where add_likely_victims() goes on
  uint32_t call_ = 0;
  int64_t calls_without_miss_ = 0;
  ResidentCounts counts_;
  std::mutex mutex_;
};

}  // namespace speedtorch

// Slots, their eviction and the threads of file calls; see resident_rows.h.

#include "memory/resident_rows.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <limits>
#include <system_error>
#include <thread>

#include "core/parallel_for.h"

namespace speedtorch {
namespace {

// The maximum number of consecutive records that one call writes; less than IOV_MAX.
constexpr int64_t kRecordsPerCall = 256;
// The number of records that a thread begins to read before it waits for one. A disk is fastest
// with many requests at once, and one thread can begin them all.
constexpr size_t kReadsAtOnce = 512;
// The maximum number of slots that read_ahead() looks at for a row that find() may evict.
constexpr int64_t kLooksPerVictim = 16;
// The number of rows that are worth a thread.
constexpr int64_t kRowsPerThread = 2048;
// The number of rows between a prefetch instruction and the use of what it loads.
constexpr int64_t kAhead = 16;
// A loop that prefetches reads two batches ahead, or three.
constexpr int kMaxReadersAhead = 3;
// The number of calls of find() without a miss after which read_ahead() looks for no misses, which
// takes as long as such a call.
constexpr int kCallsUntilRest = 16;
constexpr auto relaxed = std::memory_order_relaxed;

// Mixes all bits (splitmix64), because rows of one batch may differ in few.
uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// Blocks all signals in this thread during the object's lifetime. Threads that start meanwhile
// inherit the mask, so that signals such as Ctrl-C reach Python's thread.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

// Transfers all bytes of `parts` from `offset` on by preadv or pwritev; returns an errno or 0.
template <typename Call>
int transfer(const Call& call, int file, iovec* parts, int64_t count, int64_t offset) {
  while (count > 0) {
    ssize_t moved = call(file, parts, static_cast<int>(count), offset);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno;
    if (moved == 0) return EIO;  // behind the end of a file that was truncated
    offset += moved;
    for (; count > 0 && moved >= static_cast<ssize_t>(parts->iov_len); ++parts, --count) {
      moved -= static_cast<ssize_t>(parts->iov_len);
    }
    if (count > 0) {
      parts->iov_base = static_cast<char*>(parts->iov_base) + moved;
      parts->iov_len -= static_cast<size_t>(moved);
    }
  }
  return 0;
}

}  // namespace

ResidentRows::ResidentRows(int file, char* memory, int64_t slot_count, int64_t record_bytes)
    : file_(std::make_shared<File>(file, record_bytes)),
      memory_(memory),
      record_bytes_(record_bytes),
      slots_(static_cast<size_t>(slot_count)),
      table_(std::bit_ceil(2 * static_cast<size_t>(slot_count))) {}

ResidentRows::File::File(int file, int64_t record_bytes)
    : descriptor(fcntl(file, F_DUPFD_CLOEXEC, 0)), record_bytes(record_bytes) {
  if (descriptor < 0) throw std::system_error(errno, std::generic_category(), "resident rows");
}

ResidentRows::File::~File() { close(descriptor); }

void ResidentRows::File::begin_to_read(int64_t row) const {
  posix_fadvise(descriptor, row * record_bytes, record_bytes, POSIX_FADV_WILLNEED);
}

// The place of a row in the hash table, or of the empty place where it would be.
size_t ResidentRows::place_of(int64_t row) const {
  const size_t mask = table_.size() - 1;
  size_t place = mixed(static_cast<uint64_t>(row)) & mask;
  while (table_[place] != 0 && slots_[static_cast<size_t>(table_[place] - 1)].row != row) {
    place = (place + 1) & mask;
  }
  return place;
}

void ResidentRows::look_up(const int64_t* rows, int64_t count, int64_t* slots) const {
  const size_t mask = table_.size() - 1;
  const auto first_place = [&](int64_t i) { return mixed(static_cast<uint64_t>(rows[i])) & mask; };
  parallel_for(0, count, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // Each row misses the cache twice: its place in the table, and its slot.
      if (i + 2 * kAhead < end) __builtin_prefetch(&table_[first_place(i + 2 * kAhead)]);
      if (i + kAhead < end) {
        if (const int32_t likely = table_[first_place(i + kAhead)]; likely != 0) {
          __builtin_prefetch(&slots_[static_cast<size_t>(likely - 1)]);
        }
      }
      slots[i] = table_[place_of(rows[i])] - 1;
    }
  });
}

void ResidentRows::insert(int64_t row, int64_t slot) {
  Slot& made = slots_[static_cast<size_t>(slot)];
  made.row = row;
  made.is_changed = false;
  made.chances = 0;
  table_[place_of(row)] = static_cast<int32_t>(slot + 1);
  ++resident_;
}

// Moves later rows of the same run to the free place, so that no run has a gap.
void ResidentRows::erase(int64_t row) {
  const size_t mask = table_.size() - 1;
  size_t hole = place_of(row);
  slots_[static_cast<size_t>(table_[hole] - 1)].row = kNone;
  for (size_t place = (hole + 1) & mask; table_[place] != 0; place = (place + 1) & mask) {
    const int64_t other = slots_[static_cast<size_t>(table_[place] - 1)].row;
    const size_t home = mixed(static_cast<uint64_t>(other)) & mask;
    if (((place - home) & mask) < ((place - hole) & mask)) continue;
    table_[hole] = table_[place];
    hole = place;
  }
  table_[hole] = 0;
  --resident_;
}

// The next slot without a row, or else with a row that was not used for a long time. Slots of this
// call or of a lease are skipped.
int64_t ResidentRows::next_victim() {
  // After kMaxChances rounds no row has a chance left.
  for (int64_t looks = (kMaxChances + 2) * slot_count(); looks > 0; --looks) {
    const int64_t slot = hand_;
    hand_ = (hand_ + 1) % slot_count();
    Slot& found = slots_[static_cast<size_t>(slot)];
    if (found.call == call_ || found.leases > 0) continue;
    if (found.row == kNone || found.chances == 0) return slot;
    --found.chances;
  }
  return kNone;
}

void ResidentRows::add_likely_victims(int64_t count, std::vector<int64_t>& rows) {
  // The hand moves before the next call, to where the last call began.
  const int64_t slots = slot_count(), passed = (hand_ - hand_ahead_ + slots) % slots;
  if (passed < slots / 2) hand_ahead_ = hand_;
  for (int64_t looks = std::min(slots, kLooksPerVictim * count); looks > 0 && count > 0; --looks) {
    const Slot& found = slots_[static_cast<size_t>(hand_ahead_)];
    hand_ahead_ = (hand_ahead_ + 1) % slots;
    if (found.row != kNone && (found.chances > 0 || found.leases > 0)) continue;
    if (found.row != kNone && found.is_changed) rows.push_back(found.row);
    --count;
  }
}

FileFailure ResidentRows::find(const int64_t* rows, int64_t count, int64_t changing, int64_t lease,
                               bool only_hits, int64_t* slots) {
  std::vector<int64_t>& kept = leases_[lease];  // allocated before anything changes
  kept.reserve(static_cast<size_t>(count));
  if (++call_ == 0) {  // no slot may seem to be of this call
    for (Slot& slot : slots_) slot.call = 0;
    call_ = 1;
  }
  look_up(rows, count, slots);
  std::vector<int64_t> missing;
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] < 0) missing.push_back(rows[i]);
  }
  if (only_hits && !missing.empty()) return {EAGAIN, missing[0]};
  // A row may be listed twice, by two threads.
  parallel_for(0, count, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end && slots[i + kAhead] >= 0) {
        __builtin_prefetch(&slots_[static_cast<size_t>(slots[i + kAhead])], 1);
      }
      if (slots[i] < 0) continue;
      Slot& slot = slots_[static_cast<size_t>(slots[i])];
      const bool is_first = std::atomic_ref(slot.call).exchange(call_, relaxed) != call_;
      if (is_first && slot.chances < kMaxChances) ++slot.chances;
    }
  });
  calls_without_miss_ = missing.empty() ? calls_without_miss_ + 1 : 0;
  std::ranges::sort(missing);
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  counts_.hits += count - static_cast<int64_t>(missing.size());
  counts_.misses += static_cast<int64_t>(missing.size());
  if (!missing.empty()) {
    std::vector<int64_t> victims, changed;
    for (size_t k = 0; k < missing.size(); ++k) {
      victims.push_back(next_victim());
      if (victims.back() == kNone) return {EBUSY, missing[k]};
      Slot& victim = slots_[static_cast<size_t>(victims.back())];
      victim.call = call_;
      if (victim.row != kNone && victim.is_changed) changed.push_back(victims.back());
    }
    if (const FileFailure failure = write_slots(std::move(changed)); failure.error != 0) {
      return failure;
    }
    for (const int64_t victim : victims) {
      if (const int64_t row = slots_[static_cast<size_t>(victim)].row; row != kNone) erase(row);
    }
    if (const FileFailure failure = read_records(missing, victims); failure.error != 0) {
      return failure;
    }
    for (size_t k = 0; k < missing.size(); ++k) insert(missing[k], victims[k]);
  }
  parallel_for(0, count, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (slots[i] < 0) slots[i] = table_[place_of(rows[i])] - 1;
      Slot& slot = slots_[static_cast<size_t>(slots[i])];
      if (i < changing) std::atomic_ref(slot.is_changed).store(true, relaxed);
      std::atomic_ref(slot.leases).fetch_add(1, relaxed);
    }
  });
  kept.assign(slots, slots + count);  // within its capacity
  return {};
}

void ResidentRows::read_ahead(const int64_t* rows, int64_t count) {
  if (calls_without_miss_ >= kCallsUntilRest) return;
  if (file_->readers_ahead >= kMaxReadersAhead) return;
  std::vector<int64_t> slots(static_cast<size_t>(count)), missing;
  look_up(rows, count, slots.data());
  const int64_t last = std::numeric_limits<int64_t>::max() / record_bytes_ - 1;
  for (int64_t i = 0; i < count; ++i) {
    if (slots[static_cast<size_t>(i)] < 0 && rows[i] >= 0 && rows[i] <= last) {
      missing.push_back(rows[i]);
    }
  }
  std::ranges::sort(missing);
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  if (missing.empty()) return;
  const auto misses = static_cast<int64_t>(missing.size());
  add_likely_victims(misses, missing);
  auto work = [file = file_, rows = std::move(missing)] {
    for (const int64_t row : rows) file->begin_to_read(row);
    --file->readers_ahead;
  };
  ++file_->readers_ahead;
  try {
    const BlockedSignals blocked;
    std::thread(std::move(work)).detach();
    counts_.ahead += misses;
  } catch (const std::exception&) {  // no memory, or too many threads
    --file_->readers_ahead;
  }
}

void ResidentRows::release(int64_t lease) {
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return;
  for (const int64_t slot : found->second) --slots_[static_cast<size_t>(slot)].leases;
  leases_.erase(found);
}

FileFailure ResidentRows::write(const int64_t* rows, int64_t count) {
  std::vector<int64_t> changed;
  const auto add = [&](int64_t slot) {
    if (slots_[static_cast<size_t>(slot)].row != kNone &&
        slots_[static_cast<size_t>(slot)].is_changed) {
      changed.push_back(slot);
    }
  };
  if (rows == nullptr) {
    for (int64_t slot = 0; slot < slot_count(); ++slot) add(slot);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      if (const int32_t found = table_[place_of(rows[i])]; found != 0) add(found - 1);
    }
  }
  return write_slots(std::move(changed));
}

void ResidentRows::forget() {
  if (resident_ == 0) return;
  std::ranges::fill(table_, 0);
  resident_ = 0;
  for (int64_t slot = 0; slot < slot_count(); ++slot) {
    Slot& found = slots_[static_cast<size_t>(slot)];
    if (found.leases == 0) {
      found = Slot{};
    } else if (found.row != kNone) {
      const Slot before = found;
      insert(found.row, slot);
      found = before;
    }
  }
}

// Reads records of the file into slots.
FileFailure ResidentRows::read_records(const std::vector<int64_t>& rows,
                                       const std::vector<int64_t>& slots) {
  const auto begin = std::chrono::steady_clock::now();
  FileFailure failure;
  size_t begun = 0;
  for (size_t k = 0; k < rows.size() && failure.error == 0; ++k) {
    for (; begun < std::min(rows.size(), k + kReadsAtOnce); ++begun) {
      file_->begin_to_read(rows[begun]);
    }
    iovec part{record(slots[k]), static_cast<size_t>(record_bytes_)};
    const int error = transfer(preadv, file_->descriptor, &part, 1, rows[k] * record_bytes_);
    if (error != 0) failure = {error, rows[k]};
  }
  if (failure.error == 0) counts_.reads += static_cast<int64_t>(rows.size());
  counts_.wait_ns += (std::chrono::steady_clock::now() - begin).count();
  return failure;
}

// Writes the records of slots, consecutive rows in one call, and marks them as unchanged.
FileFailure ResidentRows::write_slots(std::vector<int64_t> slots) {
  if (slots.empty()) return {};
  const auto begin = std::chrono::steady_clock::now();
  const auto row_of = [&](size_t k) { return slots_[static_cast<size_t>(slots[k])].row; };
  std::ranges::sort(slots, {}, [&](int64_t slot) { return slots_[static_cast<size_t>(slot)].row; });
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  std::vector<size_t> runs;  // the first slot of each run
  for (size_t k = 0; k < slots.size(); ++k) {
    const bool continues = k > 0 && row_of(k) == row_of(k - 1) + 1 &&
                           static_cast<int64_t>(k - runs.back()) < kRecordsPerCall;
    if (!continues) runs.push_back(k);
  }
  runs.push_back(slots.size());
  FileFailure failure;
  const size_t count = runs.size() - 1;
  size_t begun = 0;
  for (size_t i = 0; i < count; ++i) {
    // A write of part of a page waits for the page, and file systems such as ext4 let one thread at
    // a time write to a file.
    for (; begun < std::min(count, i + kReadsAtOnce); ++begun) {
      file_->begin_to_read(row_of(runs[begun]));
      file_->begin_to_read(row_of(runs[begun + 1] - 1));
    }
    const size_t first = runs[i], end = runs[i + 1];
    iovec parts[kRecordsPerCall];
    for (size_t k = first; k < end; ++k) {
      parts[k - first] = {record(slots[k]), static_cast<size_t>(record_bytes_)};
    }
    const int error = transfer(pwritev, file_->descriptor, parts, static_cast<int64_t>(end - first),
                               row_of(first) * record_bytes_);
    if (error != 0) {
      failure = {error, row_of(first)};
      break;
    }
    for (size_t k = first; k < end; ++k) {
      Slot& slot = slots_[static_cast<size_t>(slots[k])];
      slot.is_changed = slot.leases > 0;  // the caller of find() may not have written it yet
    }
  }
  if (failure.error == 0) counts_.writes += static_cast<int64_t>(slots.size());
  counts_.wait_ns += (std::chrono::steady_clock::now() - begin).count();
  return failure;
}

}  // namespace speedtorch

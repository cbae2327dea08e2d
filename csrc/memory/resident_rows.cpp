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
#include <utility>

#include "core/parallel_for.h"
#include "core/process.h"

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

ResidentRows::ResidentRows(int file, int64_t row_count, char* memory, char* index,
                           int64_t slot_count, int64_t record_bytes)
    : file_(std::make_shared<File>(file, record_bytes)),
      row_count_(row_count),
      memory_(memory),
      record_bytes_(record_bytes),
      index_(ResidentIndex::in(index, slot_count)),
      process_(process_id()) {
  begin_empty();
}

std::unique_lock<std::mutex> ResidentRows::lock() {
  std::unique_lock locked(mutex_);
  if (process_ != process_id()) {  // managed memory does not exist in a forked child
    own_index_.resize(static_cast<size_t>(ResidentIndex::bytes(slot_count())) / sizeof(Slot) + 1);
    index_ = ResidentIndex::in(reinterpret_cast<char*>(own_index_.data()), slot_count());
    begin_empty();
    process_ = process_id();
  }
  return locked;
}

void ResidentRows::begin_empty() {
  std::fill_n(index_.slots, slot_count(), Slot{});
  std::fill_n(index_.table, index_.mask + 1, 0);
  leases_.clear();
  found_lease_ = kNone;
  wait_ = nullptr;
  resident_ = 0;
}

ResidentRows::File::File(int file, int64_t record_bytes)
    : descriptor(fcntl(file, F_DUPFD_CLOEXEC, 0)), record_bytes(record_bytes) {
  if (descriptor < 0) throw std::system_error(errno, std::generic_category(), "resident rows");
}

ResidentRows::File::~File() { close(descriptor); }

void ResidentRows::File::begin_to_read(int64_t row) const {
  posix_fadvise(descriptor, row * record_bytes, record_bytes, POSIX_FADV_WILLNEED);
}

void ResidentRows::look_up(const int64_t* rows, int64_t count, int64_t* slots) const {
  parallel_for(0, count, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // Each row misses the cache twice: its place in the table, and its slot.
      if (i + 2 * kAhead < end)
        __builtin_prefetch(&index_.table[index_.first_place(rows[i + 2 * kAhead])]);
      if (i + kAhead < end) {
        const uint32_t likely = index_.table[index_.first_place(rows[i + kAhead])];
        if (likely != 0) {
          __builtin_prefetch(&index_.slots[index_.slot_of(likely)]);
        }
      }
      slots[i] = index_.slot_of_row(rows[i]);
    }
  });
}

void ResidentRows::insert(int64_t row, int64_t slot) {
  Slot& made = index_.slots[slot];
  made.row = row;
  made.is_changed = false;
  made.chances = 0;
  index_.table[index_.place_of(row)] = index_.entry_of(mixed(static_cast<uint64_t>(row)), slot);
  ++resident_;
}

// Moves later rows of the same run to the free place, so that no run has a gap.
void ResidentRows::erase(int64_t row) {
  const uint64_t mask = index_.mask;
  uint64_t hole = index_.place_of(row);
  index_.slots[index_.slot_of(index_.table[hole])].row = kNone;
  for (uint64_t place = (hole + 1) & mask; index_.table[place] != 0; place = (place + 1) & mask) {
    const int64_t other = index_.slots[index_.slot_of(index_.table[place])].row;
    const uint64_t home = index_.first_place(other);
    if (((place - home) & mask) < ((place - hole) & mask)) continue;
    index_.table[hole] = index_.table[place];
    hole = place;
  }
  index_.table[hole] = 0;
  --resident_;
}

// The next slot without a row, or else with a row that was not used for a long time. Slots of this
// call or of a lease are skipped.
int64_t ResidentRows::next_victim() {
  // After kMaxChances rounds no row has a chance left.
  for (int64_t looks = (kMaxChances + 2) * slot_count(); looks > 0; --looks) {
    const int64_t slot = hand_;
    hand_ = (hand_ + 1) % slot_count();
    Slot& found = index_.slots[slot];
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
    const Slot& found = index_.slots[hand_ahead_];
    hand_ahead_ = (hand_ahead_ + 1) % slots;
    if (found.row != kNone && (found.chances > 0 || found.leases > 0)) continue;
    if (found.row != kNone && found.is_changed) rows.push_back(found.row);
    --count;
  }
}

FileFailure ResidentRows::find(const int64_t* rows, int64_t count, int64_t changing, int64_t lease,
                               int64_t* slots) {
  keep_found();
  std::vector<int64_t>& kept = leases_[lease];  // allocated before anything changes
  kept.reserve(static_cast<size_t>(count));
  if (++call_ == 0) {  // no slot may seem to be of this call
    for (int64_t slot = 0; slot < slot_count(); ++slot) index_.slots[slot].call = 0;
    call_ = 1;
  }
  look_up(rows, count, slots);
  std::vector<int64_t> missing;
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] < 0) missing.push_back(rows[i]);
  }
  // Changed rows were loaded by an earlier call, which counted their use. A row may be in both
  // parts, or twice in one, and two threads may find it.
  const bool is_counted = std::exchange(missed_lease_, kNone) == lease;
  const auto mark = [&](int64_t first, int64_t end, bool is_use) {
    parallel_for(first, end, kRowsPerThread, [&](int64_t begin, int64_t last) {
      for (int64_t i = begin; i < last; ++i) {
        if (i + kAhead < last && slots[i + kAhead] >= 0) {
          __builtin_prefetch(&index_.slots[slots[i + kAhead]], 1);
        }
        if (slots[i] < 0) continue;
        Slot& slot = index_.slots[slots[i]];
        const bool is_first = std::atomic_ref(slot.call).exchange(call_, relaxed) != call_;
        if (is_use && is_first && slot.chances < kMaxChances) ++slot.chances;
      }
    });
  };
  mark(changing, count, !is_counted);
  mark(0, changing, false);
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
      Slot& victim = index_.slots[victims.back()];
      victim.call = call_;
      if (victim.row != kNone && victim.is_changed) changed.push_back(victims.back());
    }
    if (const FileFailure failure = write_slots(std::move(changed)); failure.error != 0) {
      return failure;
    }
    for (const int64_t victim : victims) {
      if (const int64_t row = index_.slots[victim].row; row != kNone) erase(row);
    }
    if (const FileFailure failure = read_records(missing, victims); failure.error != 0) {
      return failure;
    }
    for (size_t k = 0; k < missing.size(); ++k) insert(missing[k], victims[k]);
  }
  parallel_for(0, count, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (slots[i] < 0) slots[i] = index_.slot_of_row(rows[i]);
      Slot& slot = index_.slots[slots[i]];
      if (i < changing) std::atomic_ref(slot.is_changed).store(true, relaxed);
      std::atomic_ref(slot.leases).fetch_add(1, relaxed);
    }
  });
  kept.assign(slots, slots + count);  // within its capacity
  return {};
}

void ResidentRows::begin_find(int64_t count, int64_t lease,
                              const std::function<void(const ResidentIndex&)>& launch,
                              std::function<void()> wait) {
  keep_found();
  leases_[lease];
  *index_.missing = 0;
  try {
    launch(index_);
  } catch (...) {
    leases_.erase(lease);
    throw;
  }
  found_lease_ = lease;
  found_count_ = count;
  wait_ = std::move(wait);
}

bool ResidentRows::end_find(int64_t lease) {
  if (lease == found_lease_ && resident_ < row_count_) await_found();
  return leases_.contains(lease);
}

void ResidentRows::await_found() {
  if (!wait_) return;
  wait_();
  wait_ = nullptr;
  if (*index_.missing == 0) {
    ++calls_without_miss_;
    counts_.hits += found_count_;
  } else {
    leases_.erase(found_lease_);
    missed_lease_ = std::exchange(found_lease_, kNone);
  }
}

void ResidentRows::keep_found() {
  await_found();
  if (found_lease_ == kNone) return;
  leases_[found_lease_].assign(index_.found, index_.found + found_count_);
  found_lease_ = kNone;
  for (int64_t i = 0; i < found_count_; ++i) ++index_.slots[index_.found[i]].leases;
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
  if (lease == found_lease_) found_lease_ = kNone;
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return;
  for (const int64_t slot : found->second) --index_.slots[slot].leases;
  leases_.erase(found);
}

FileFailure ResidentRows::write(const int64_t* rows, int64_t count) {
  keep_found();
  std::vector<int64_t> changed;
  const auto add = [&](int64_t slot) {
    if (index_.slots[slot].row != kNone && index_.slots[slot].is_changed) {
      changed.push_back(slot);
    }
  };
  if (rows == nullptr) {
    for (int64_t slot = 0; slot < slot_count(); ++slot) add(slot);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      if (const int32_t slot = index_.slot_of_row(rows[i]); slot >= 0) add(slot);
    }
  }
  return write_slots(std::move(changed));
}

void ResidentRows::forget() {
  if (resident_ == 0) return;
  keep_found();
  std::fill_n(index_.table, index_.mask + 1, 0);
  resident_ = 0;
  for (int64_t slot = 0; slot < slot_count(); ++slot) {
    Slot& found = index_.slots[slot];
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
  const auto row_of = [&](size_t k) { return index_.slots[slots[k]].row; };
  std::ranges::sort(slots, {}, [&](int64_t slot) { return index_.slots[slot].row; });
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
      Slot& slot = index_.slots[slots[k]];
      slot.is_changed = slot.leases > 0;  // the caller of find() may not have written it yet
    }
  }
  if (failure.error == 0) counts_.writes += static_cast<int64_t>(slots.size());
  counts_.wait_ns += (std::chrono::steady_clock::now() - begin).count();
  return failure;
}

}  // namespace speedtorch

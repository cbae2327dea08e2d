// The Python class RankWords: numbers from each rank to each rank, in a file that all ranks map.
// speedtorch/parallel/shared_memory_barrier.py makes the file and has the rules of its use.
//
// A word of 8 bytes contains a number, and in its two lowest bits the index modulo 4 of the
// exchange. A reader waits until a word has the index of the reader's own exchange.
//
// Each rank writes two rows of the memory: one in even exchanges and one in odd ones. A row has
// `width` words for each rank, and each exchange writes all of them. A rank begins exchange n + 2
// only after all ranks have written in exchange n + 1, and thus have read the numbers of exchange
// n. Therefore no rank overwrites a number that another rank may still read.
//
// Each rank locks one byte of the file. The lock shows whether the rank's process lives.

#include "python/rank_words.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <thread>
#include <vector>

#include "core/process.h"
#include "python/classes.h"

namespace speedtorch {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr int64_t kAborted = -1;  // replaces the numbers of a rank that has called abort()
constexpr int64_t kMostPlusOne = int64_t{1} << 61;
constexpr int64_t kIndices = 4;
constexpr int kIndexBits = 2;
constexpr Seconds kSpin{2e-5};   // of waiting before other threads of this core may run
constexpr Seconds kYield{5e-4};  // of waiting before the first sleep
constexpr Seconds kNap{5e-5};    // of each sleep
constexpr Seconds kLook{0.1};    // between checks for signals and for ended processes

enum class Wait { kWritten, kMissing, kLonger };

struct Words {
  int file, rank, size;
  int64_t width;
  void* memory;
  size_t bytes;
  int64_t* first;
  int64_t call = 0;        // the index of the last exchange
  bool is_awaited = true;  // whether all ranks have written in the last exchange
  std::vector<int64_t> sent;

  // The words from one rank to another in the last exchange.
  int64_t* between(int from, int to) const {
    return first + ((call % 2 * size + from) * size + to) * width;
  }

  bool has_written(int from, int64_t count) const {
    int64_t* const words = between(from, rank);
    return std::all_of(words, words + count, [&](int64_t& word) {
      return (std::atomic_ref(word).load(std::memory_order_acquire) & (kIndices - 1)) == call;
    });
  }

  bool lock(int of_rank, short kind) const {
    struct flock range = {};
    range.l_type = kind;
    range.l_whence = SEEK_SET;
    range.l_start = of_rank;
    range.l_len = 1;
    return fcntl(file, F_SETLK, &range) == 0;
  }

  bool lives(int other) const {
    if (other == rank || !lock(other, F_WRLCK)) return true;
    lock(other, F_UNLCK);
    return false;
  }

  void write() {
    call = (call + 1) % kIndices;
    for (int to = 0; to < size; ++to) {
      int64_t* const words = between(rank, to);
      for (int64_t k = 0; k < width; ++k) {
        std::atomic_ref(words[k]).store(sent[to * width + k] << kIndexBits | call,
                                        std::memory_order_release);
      }
    }
  }

  void abort() {
    for (int64_t parity = 0; parity < 2; ++parity) {
      int64_t* const words = first + (parity * size + rank) * size * width;
      for (int64_t k = 0; k < size * width; ++k) {
        const std::atomic_ref word(words[k]);
        word.store(kAborted << kIndexBits | (word.load() & (kIndices - 1)));
      }
    }
    lock(rank, F_UNLCK);
  }

  // Waits for one rank, but not much longer than kLook.
  Wait await(int from, int64_t count, Clock::time_point end) const {
    const Clock::time_point begin = Clock::now();
    while (!has_written(from, count)) {
      const Clock::time_point now = Clock::now();
      if (now >= end) return Wait::kMissing;
      const Seconds waited = now - begin;
      if (waited > kLook) {
        // The rank may have written its words and ended since the last test.
        return lives(from) || has_written(from, count) ? Wait::kLonger : Wait::kMissing;
      }
      if (waited > kYield) {
        std::this_thread::sleep_for(kNap);
      } else if (waited > kSpin) {
        sched_yield();
      }
    }
    return Wait::kWritten;
  }
};

struct RankWords {
  PyObject object;
  Words* words;
};

Words& words_of(PyObject* self) { return *reinterpret_cast<RankWords*>(self)->words; }

// Sets a Python error and returns false unless there are so many arguments.
bool check_length(PyObject* arguments, Py_ssize_t count) {
  if (PyTuple_Size(arguments) == count) return true;
  PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
  return false;
}

// Waits for `count` words from each rank; returns whether all ranks have written them. Returns
// nothing, with a Python error set, if a signal handler raised one.
std::optional<bool> await_all(Words& words, int64_t count, double seconds) {
  const auto most = std::chrono::duration_cast<Clock::duration>(Seconds(std::min(seconds, 1e9)));
  const Clock::time_point end = Clock::now() + most;
  for (int from = 0; from < words.size;) {
    if (words.has_written(from, count)) {
      ++from;
      continue;
    }
    Wait found;
    {
      const WithoutPythonLock while_waiting;
      found = words.await(from, count, end);
    }
    if (found == Wait::kMissing) return false;
    if (found == Wait::kLonger && PyErr_CheckSignals() != 0) return std::nullopt;
  }
  words.is_awaited = true;
  return true;
}

// Reads the lists for all ranks into `words.sent`, with zeros behind them. Returns their length, or
// -1 with a Python error set.
int64_t read_sent(Words& words, PyObject* lists) {
  std::fill(words.sent.begin(), words.sent.end(), 0);
  int64_t count = -1;
  if (PySequence_Size(lists) != words.size) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "expected one list for each rank");
    return -1;
  }
  for (int to = 0; to < words.size; ++to) {
    PyObject* const list = PySequence_GetItem(lists, to);
    if (list == nullptr) return -1;
    const int64_t length = PySequence_Size(list);
    if (count < 0) count = length;
    bool is_good = length > 0 && length == count && length <= words.width;
    for (int64_t k = 0; is_good && k < length; ++k) {
      PyObject* const item = PySequence_GetItem(list, k);
      const int64_t number = item == nullptr ? -1 : PyLong_AsLongLong(item);
      if (item != nullptr) Py_DecRef(item);
      is_good = number >= 0 && number < kMostPlusOne;
      words.sent[to * words.width + k] = number;
    }
    Py_DecRef(list);
    if (is_good) continue;
    if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_ValueError,
                      "expected lists of one length, not 0, with numbers below 2 ** 61");
    }
    return -1;
  }
  return count;
}

// Returns the lists of numbers from all ranks, None if a rank has aborted, or nullptr with a Python
// error set.
PyObject* received(const Words& words, int64_t count) {
  bool has_aborted = false;
  PyObject* const lists = list_of(words.size, [&](Py_ssize_t from) {
    int64_t* const sent = words.between(static_cast<int>(from), words.rank);
    return list_of(count, [&](Py_ssize_t k) {
      const int64_t number = std::atomic_ref(sent[k]).load(std::memory_order_relaxed) >> kIndexBits;
      has_aborted = has_aborted || number == kAborted;
      return PyLong_FromLongLong(number);
    });
  });
  if (lists == nullptr || !has_aborted) return lists;
  Py_DecRef(lists);
  return none();
}

PyObject* exchange(PyObject* self, PyObject* arguments) {
  if (!check_length(arguments, 2)) return nullptr;
  const double seconds = PyFloat_AsDouble(PyTuple_GetItem(arguments, 1));
  if (PyErr_Occurred()) return nullptr;
  Words& words = words_of(self);
  const int64_t count = read_sent(words, PyTuple_GetItem(arguments, 0));
  if (count < 0) return nullptr;
  std::optional<bool> have_written = true;
  if (!words.is_awaited) {  // others may not have read the numbers before the interrupted exchange
    have_written = await_all(words, 1, seconds);
  }
  if (have_written == true) {
    words.write();
    words.is_awaited = false;
    have_written = await_all(words, count, seconds);
  }
  if (!have_written) return nullptr;
  return *have_written ? received(words, count) : none();
}

PyObject* abort(PyObject* self, PyObject*) {
  words_of(self).abort();
  return none();
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
  if (!check_length(arguments, 5)) return nullptr;
  int64_t given[5];
  for (Py_ssize_t i = 0; i < 5; ++i) given[i] = PyLong_AsLongLong(PyTuple_GetItem(arguments, i));
  if (PyErr_Occurred()) return nullptr;
  const int64_t begin = given[1], width = given[2];
  const int file = static_cast<int>(given[0]), rank = static_cast<int>(given[3]),
            size = static_cast<int>(given[4]);
  const auto bytes = static_cast<size_t>(begin + 2 * size * size * width * 8);
  struct stat status = {};
  if (fstat(file, &status) != 0) return PyErr_SetFromErrno(PyExc_OSError);
  if (static_cast<size_t>(status.st_size) != bytes) {
    PyErr_SetString(PyExc_ValueError, "the file has another size");
    return nullptr;
  }
  std::unique_ptr<Words> words;
  try {
    words = std::make_unique<Words>();
    words->sent.resize(static_cast<size_t>(size * width));
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  words->file = file, words->rank = rank, words->size = size, words->width = width;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
  words->memory = memory, words->bytes = bytes;
  words->first = reinterpret_cast<int64_t*>(static_cast<char*>(memory) + begin);
  PyObject* self = nullptr;
  if (!words->lock(rank, F_WRLCK)) {
    PyErr_SetFromErrno(PyExc_OSError);
  } else {
    self = PyType_GenericNew(type, nullptr, nullptr);
  }
  if (self == nullptr) {
    munmap(memory, bytes);
    return nullptr;
  }
  reinterpret_cast<RankWords*>(self)->words = words.release();
  return self;
}

void free_words(PyObject* self) {
  const std::unique_ptr<Words> words(&words_of(self));
  munmap(words->memory, words->bytes);
  free_object(self);
}

}  // namespace

bool add_rank_words(PyObject* module) {
  static PyMethodDef methods[] = {{"exchange", exchange, METH_VARARGS, nullptr},
                                  {"abort", abort, METH_NOARGS, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};
  return add(module, "RankWords",
             make_class("speedtorch._C.RankWords", sizeof(RankWords), make, free_words, methods,
                        "Numbers from each rank to each rank, in shared memory."));
}

}  // namespace speedtorch

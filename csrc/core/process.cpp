// The process id, updated after a fork, and Python's GIL if there is a Python; see process.h.

#include "core/process.h"

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>

// Declared weak here instead of by Python.h: a program without Python has none of these symbols.
extern "C" {
__attribute__((weak)) int Py_IsInitialized();
__attribute__((weak)) void* PyEval_SaveThread();
__attribute__((weak)) void PyEval_RestoreThread(void* thread);
}

namespace speedtorch {
namespace {

std::atomic<bool> exits{false}, lost_threads{false};
std::atomic<unsigned long> forked_by{0};

bool has_several_threads() {
  DIR* const threads = opendir("/proc/self/task");
  if (threads == nullptr) return true;
  int entries = 0;  // "." and ".." are two of them
  while (readdir(threads) != nullptr) ++entries;
  closedir(threads);
  return entries > 3;
}

// Registered as the library is loaded, because a process may fork before it calls a function of it.
[[maybe_unused]] const int watches_forks = [] {
  static bool loses_threads = false;  // of the fork in progress
  return pthread_atfork([] { loses_threads = has_several_threads(); }, nullptr,
                        [] {
                          lost_threads = lost_threads || loses_threads;
                          forked_by = static_cast<unsigned long>(pthread_self());
                        });
}();

// True if this thread holds the GIL. Every CPython exports PyGILState_Check, but the limited API
// does not have it. A lookup at runtime keeps the library free of symbols outside that API.
bool has_python_lock() {
  static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check != nullptr && check() != 0;
}

}  // namespace

pid_t process_id() {
  static std::atomic<pid_t> id = [] {
    pthread_atfork(nullptr, nullptr, [] { id = getpid(); });
    return getpid();
  }();
  return id.load(std::memory_order_relaxed);
}

bool has_lost_threads() { return lost_threads.load(std::memory_order_relaxed); }

unsigned long forking_thread() { return forked_by.load(std::memory_order_relaxed); }

bool process_exits() { return exits; }

void note_process_exit() { exits = true; }

void watch_process_exit() {
  static const bool hook_set = [] { return std::atexit(note_process_exit) == 0; }();
  (void)hook_set;
}

WithoutPythonLock::WithoutPythonLock() {
  const bool has_python = Py_IsInitialized != nullptr && PyEval_SaveThread != nullptr &&
                          PyEval_RestoreThread != nullptr;
  if (has_python && Py_IsInitialized() && has_python_lock()) thread_ = PyEval_SaveThread();
}

WithoutPythonLock::~WithoutPythonLock() noexcept(false) {
  if (thread_ != nullptr) PyEval_RestoreThread(thread_);
}

}  // namespace speedtorch

// The process's number, renewed after a fork, and Python's lock, where there is a Python; see
// process.h.

#include "core/process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

// Declared here rather than by Python.h, weak: a program without Python has none of them.
// (PyGILState_Check is in every CPython, though not in the limited API's headers.)
extern "C" {
__attribute__((weak)) int PyGILState_Check();
__attribute__((weak)) int Py_IsInitialized();
__attribute__((weak)) void* PyEval_SaveThread();
__attribute__((weak)) void PyEval_RestoreThread(void* thread);
}

namespace speedtorch {

pid_t process_id() {
  static std::atomic<pid_t> id = [] {
    pthread_atfork(nullptr, nullptr, [] { id = getpid(); });
    return getpid();
  }();
  return id.load(std::memory_order_relaxed);
}

WithoutPythonLock::WithoutPythonLock() {
  const bool here = PyGILState_Check != nullptr && Py_IsInitialized != nullptr &&
                    PyEval_SaveThread != nullptr && PyEval_RestoreThread != nullptr;
  if (here && Py_IsInitialized() && PyGILState_Check()) thread_ = PyEval_SaveThread();
}

WithoutPythonLock::~WithoutPythonLock() {
  if (thread_ != nullptr) PyEval_RestoreThread(thread_);
}

}  // namespace speedtorch

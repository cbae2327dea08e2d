// This process: its id, whether it exits, and Python's global interpreter lock. Works without
// Python.
#pragma once

#include <sys/types.h>

namespace speedtorch {

// Makes no system call. Correct in a forked child, too.
pid_t process_id();
// True in a process that was forked from one with several threads, after that one loaded this
// library. The other threads do not exist in this process.
bool has_lost_threads();

// The thread that forked this process, as PyThread_get_thread_ident() names it; 0 if none did. Of
// the threads of the parent only this one exists here.
unsigned long forking_thread();

// True once the process exits. From then on, code that frees memory makes no CUDA call.
bool process_exits();
void note_process_exit();
// Registers an exit handler that calls note_process_exit().
void watch_process_exit();

// Releases Python's global interpreter lock (GIL) during its lifetime if this thread holds the GIL,
// so that other Python threads run during a driver or system call. Ops already run without the GIL;
// Python calls deleters with it. Does nothing in a program without Python.
class WithoutPythonLock {
 public:
  WithoutPythonLock();
  ~WithoutPythonLock() noexcept(false);  // Python ends a daemon thread here if the process exits
  WithoutPythonLock(const WithoutPythonLock&) = delete;
  WithoutPythonLock& operator=(const WithoutPythonLock&) = delete;

 private:
  void* thread_ = nullptr;
};

}  // namespace speedtorch

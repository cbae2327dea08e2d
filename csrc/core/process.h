// This process: its number, whether it ends, and Python's global lock.
#pragma once

#include <sys/types.h>

namespace speedtorch {

// Without a system call, also right in a forked child.
pid_t process_id();

// True once the process exits: from then on no CUDA call is made when memory goes.
bool process_exits();
void note_process_exit();
// Has it noted from here on.
void watch_process_exit();

// Lets other Python threads run while this one waits in a driver or system call: releases Python's
// global lock if this thread holds it, and takes it again when it goes. Ops run without the lock
// already; this is for deleters, which Python calls with it. Does nothing in a program without
// Python.
class WithoutPythonLock {
 public:
  WithoutPythonLock();
  ~WithoutPythonLock();
  WithoutPythonLock(const WithoutPythonLock&) = delete;
  WithoutPythonLock& operator=(const WithoutPythonLock&) = delete;

 private:
  void* thread_ = nullptr;
};

}  // namespace speedtorch

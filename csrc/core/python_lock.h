// Lets other Python threads run while this one waits in a driver or system call.
#pragma once

namespace speedtorch {

// Releases Python's global lock if this thread holds it, and takes it again when it goes. Ops run
// without the lock already; this is for deleters, which Python calls with it. Does nothing in a
// program without Python.
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

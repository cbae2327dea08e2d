// The Python classes RowLock and RowLocks: reentrant locks that serve waiting threads in order of
// arrival. speedtorch's Python modules use them as context managers. A plain Python lock can serve
// one looping thread for minutes while others wait. The code is C++ for two reasons: Ctrl-C cannot
// leave the lock acquired, and small steps pay no Python overhead.
//
// The global interpreter lock (GIL) protects all state of this file. Only a thread that waits for a
// row lock releases the GIL.

#include "python/row_lock.h"

#include "core/process.h"
#include "python/classes.h"

namespace speedtorch {
namespace {

// A waiting thread. The object lives on the stack of this thread.
struct Waiter {
  PyThread_type_lock wake;  // locked until this thread owns the row lock
  unsigned long thread;
  bool owns_lock = false;
  Waiter* next = nullptr;
};

struct RowLock {
  PyObject object;
  // The number of acquisitions by `thread` that it has not released. 0: free, without waiters.
  Py_ssize_t depth;
  unsigned long thread;
  pid_t process;  // in which the lock was used last
  Waiter* first;
  // The lock into which this lock was merged, or null. All state is in that lock then. Owned
  // reference.
  RowLock* merged_into;
};

// In a forked child, the lock of a thread that does not exist here is free, in the state that an
// exception in this thread would leave, and no thread waits.
RowLock& state_of(PyObject* self) {
  RowLock* lock = reinterpret_cast<RowLock*>(self);
  while (lock->merged_into != nullptr) lock = lock->merged_into;
  if (lock->process != process_id()) {
    if (lock->thread != forking_thread()) lock->depth = 0;
    lock->first = nullptr;
    lock->process = process_id();
  }
  return *lock;
}

// Sets a Python error and returns false unless the calling thread owns the lock.
bool check_held(const RowLock& lock) {
  if (lock.depth > 0 && lock.thread == PyThread_get_thread_ident()) return true;
  PyErr_SetString(PyExc_RuntimeError,
                  "this thread does not own the lock; acquire it with a with statement first");
  return false;
}

// Appends a list of waiters to the queue.
void append(RowLock& lock, Waiter* waiters) {
  Waiter** end = &lock.first;
  while (*end != nullptr) end = &(*end)->next;
  *end = waiters;
}

void remove(RowLock& lock, const Waiter& waiter) {
  Waiter** at = &lock.first;
  while (*at != &waiter) at = &(*at)->next;
  *at = waiter.next;
}

void release(RowLock& lock) {
  if (--lock.depth > 0 || lock.first == nullptr) return;
  Waiter& following = *lock.first;
  lock.first = following.next;
  lock.thread = following.thread;
  lock.depth = 1;
  following.owns_lock = true;
  PyThread_release_lock(following.wake);
}

bool enter(PyObject* self);

// Waits until this thread owns the lock. Returns false with a Python error set if the handler of a
// signal raised.
bool wait_for(PyObject* self, Waiter& waiter) {
  const pid_t process = process_id();
  while (!waiter.owns_lock) {
    PyThreadState* const state = PyEval_SaveThread();
    PyThread_acquire_lock_timed(waiter.wake, -1, /*intr_flag=*/1);  // signals interrupt the wait
    PyEval_RestoreThread(state);
    if (waiter.owns_lock) return true;
    // The handler is Python code, so other threads may have run and passed the lock here.
    const bool has_raised = PyErr_CheckSignals() != 0;
    const bool has_forked = process_id() != process;  // the child does not know the waiter
    if (has_forked && !waiter.owns_lock) return !has_raised && enter(self);
    if (!has_raised) continue;
    if (waiter.owns_lock) {
      release(state_of(self));
    } else {
      remove(state_of(self), waiter);
    }
    return false;
  }
  return true;
}

bool is_owned_by_other(const RowLock& lock) {
  return lock.depth != 0 && lock.thread != PyThread_get_thread_ident();
}

// Whether the interpreter shuts down. No other thread runs then, so the lock can be taken from its
// owner.
bool is_ending() {
  PyObject* const is_finalizing = PySys_GetObject("is_finalizing");
  PyObject* const result = is_finalizing == nullptr ? nullptr : PyObject_CallNoArgs(is_finalizing);
  const bool is_ending = result == nullptr || PyObject_IsTrue(result) == 1;
  if (result == nullptr) PyErr_Clear();  // sys.is_finalizing is already gone
  Py_DecRef(result);
  return is_ending;
}

// Takes the lock for the calling thread, which owns it already or finds it free.
void acquire(RowLock& lock) {
  lock.thread = PyThread_get_thread_ident();
  ++lock.depth;
}

// Acquires the lock. Returns false with a Python error set on failure.
bool enter(PyObject* self) {
  RowLock& lock = state_of(self);
  const unsigned long thread = PyThread_get_thread_ident();
  if (is_owned_by_other(lock) && is_ending()) lock.depth = 0;
  if (!is_owned_by_other(lock)) {
    acquire(lock);
    return true;
  }
  Waiter waiter{.wake = PyThread_allocate_lock(), .thread = thread};
  if (waiter.wake == nullptr) {
    PyErr_NoMemory();
    return false;
  }
  PyThread_acquire_lock(waiter.wake, WAIT_LOCK);
  append(lock, &waiter);
  const bool owns_lock = wait_for(self, waiter);
  PyThread_free_lock(waiter.wake);
  return owns_lock;
}

PyObject* py_enter(PyObject* self, PyObject*) { return enter(self) ? none() : nullptr; }

PyObject* py_exit(PyObject* self, PyObject*) {
  RowLock& lock = state_of(self);
  if (!check_held(lock)) return nullptr;
  release(lock);
  return none();
}

PyObject* merge(PyObject* self, PyObject* other) {
  if (Py_TYPE(self) != Py_TYPE(other)) {
    PyErr_SetString(PyExc_TypeError, "merge() accepts only a RowLock");
    return nullptr;
  }
  RowLock &lock = state_of(self), &other_lock = state_of(other);
  if (!check_held(lock) || !check_held(other_lock)) return nullptr;
  if (&lock == &other_lock) return none();
  append(lock, other_lock.first);
  lock.depth += other_lock.depth;
  other_lock.first = nullptr;
  other_lock.depth = 0;
  Py_IncRef(&lock.object);
  other_lock.merged_into = &lock;
  return none();
}

void free_lock(PyObject* self) {
  Py_DecRef(reinterpret_cast<PyObject*>(reinterpret_cast<RowLock*>(self)->merged_into));
  free_object(self);
}

// Several locks that a thread acquires together. While py_enter_all() waits for one lock, it has
// acquired none of the others. Threads that own no row lock before therefore cannot deadlock.
struct RowLocks {
  PyObject object;
  PyObject* locks;  // a tuple of RowLock
};

PyTypeObject* lock_type = nullptr;

PyObject* locks_of(PyObject* self) { return reinterpret_cast<RowLocks*>(self)->locks; }

PyObject* make_locks(PyTypeObject* type, PyObject* locks, PyObject*) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(locks); ++i) {
    if (Py_TYPE(PyTuple_GetItem(locks, i)) == lock_type) continue;
    PyErr_SetString(PyExc_TypeError, "RowLocks() accepts only RowLock objects");
    return nullptr;
  }
  PyObject* const self = PyType_GenericNew(type, nullptr, nullptr);
  if (self == nullptr) return nullptr;
  Py_IncRef(locks);
  reinterpret_cast<RowLocks*>(self)->locks = locks;
  return self;
}

// The first lock that another thread owns, or nullptr.
PyObject* first_owned_by_other(PyObject* locks) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(locks); ++i) {
    PyObject* const item = PyTuple_GetItem(locks, i);
    if (is_owned_by_other(state_of(item))) return item;
  }
  return nullptr;
}

void acquire_all(PyObject* locks) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(locks); ++i) {
    acquire(state_of(PyTuple_GetItem(locks, i)));
  }
}

PyObject* py_enter_all(PyObject* self, PyObject*) {
  PyObject* const locks = locks_of(self);
  while (PyObject* const contended = first_owned_by_other(locks)) {
    if (!enter(contended)) return nullptr;
    const bool are_free = first_owned_by_other(locks) == nullptr;
    if (are_free) acquire_all(locks);
    release(state_of(contended));
    if (are_free) return none();
  }
  acquire_all(locks);
  return none();
}

PyObject* py_exit_all(PyObject* self, PyObject*) {
  PyObject* const locks = locks_of(self);
  for (Py_ssize_t i = PyTuple_Size(locks); i-- > 0;) {
    RowLock& lock = state_of(PyTuple_GetItem(locks, i));
    if (!check_held(lock)) return nullptr;
    release(lock);
  }
  return none();
}

void free_locks(PyObject* self) {
  Py_DecRef(locks_of(self));
  free_object(self);
}

}  // namespace

bool add_row_locks(PyObject* module) {
  static PyMethodDef lock_methods[] = {{"__enter__", py_enter, METH_NOARGS, nullptr},
                                       {"__exit__", py_exit, METH_VARARGS, nullptr},
                                       {"merge", merge, METH_O, nullptr},
                                       {nullptr, nullptr, 0, nullptr}};
  static PyMethodDef locks_methods[] = {{"__enter__", py_enter_all, METH_NOARGS, nullptr},
                                        {"__exit__", py_exit_all, METH_VARARGS, nullptr},
                                        {nullptr, nullptr, 0, nullptr}};
  PyObject* const lock_class = make_class(
      "speedtorch._C.RowLock", sizeof(RowLock), PyType_GenericNew, free_lock, lock_methods,
      "A reentrant lock that serves waiting threads in the order of their requests.");
  lock_type = reinterpret_cast<PyTypeObject*>(lock_class);  // the module keeps a reference
  if (!add(module, "RowLock", lock_class)) return false;
  return add(module, "RowLocks",
             make_class("speedtorch._C.RowLocks", sizeof(RowLocks), make_locks, free_locks,
                        locks_methods, "Several row locks that a thread acquires together."));
}

}  // namespace speedtorch

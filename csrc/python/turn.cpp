// The Python classes Turn and Turns: reentrant locks that serve waiting threads in order of
// arrival. speedtorch's Python modules use them as context managers. A plain Python lock can serve
// one looping thread for minutes while others wait. The code is C++ for two reasons: Ctrl-C cannot
// leave the lock acquired, and small steps pay no Python overhead.
//
// The global interpreter lock (GIL) protects all state of this file. Only a thread that waits for a
// turn releases the GIL.

#include "python/turn.h"

namespace speedtorch {
namespace {

// A waiting thread. The object lives on the stack of this thread.
struct Waiter {
  PyThread_type_lock wake;  // locked until this thread owns the turn
  unsigned long thread;
  bool has_turn = false;
  Waiter* next = nullptr;
};

struct Turn {
  PyObject object;
  // The number of acquisitions by `thread` that it has not released. 0: free, without waiters.
  Py_ssize_t depth;
  unsigned long thread;
  Waiter* first;
  // The turn that this turn was united with, or null. All state is in that turn then. Owned
  // reference.
  Turn* whole;
};

Turn& whole_of(PyObject* self) {
  Turn* turn = reinterpret_cast<Turn*>(self);
  while (turn->whole != nullptr) turn = turn->whole;
  return *turn;
}

// Sets a Python error and returns false unless the calling thread owns the turn.
bool check_held(const Turn& turn) {
  if (turn.depth > 0 && turn.thread == PyThread_get_thread_ident()) return true;
  PyErr_SetString(PyExc_RuntimeError, "this thread does not have the turn");
  return false;
}

// Appends a list of waiters to the queue.
void append(Turn& turn, Waiter* waiters) {
  Waiter** end = &turn.first;
  while (*end != nullptr) end = &(*end)->next;
  *end = waiters;
}

void remove(Turn& turn, const Waiter& waiter) {
  Waiter** at = &turn.first;
  while (*at != &waiter) at = &(*at)->next;
  *at = waiter.next;
}

void release(Turn& turn) {
  if (--turn.depth > 0 || turn.first == nullptr) return;
  Waiter& following = *turn.first;
  turn.first = following.next;
  turn.thread = following.thread;
  turn.depth = 1;
  following.has_turn = true;
  PyThread_release_lock(following.wake);
}

// Waits until this thread owns the turn. Returns false with a Python error set if the handler of a
// signal raised.
bool wait_for(PyObject* self, Waiter& waiter) {
  while (!waiter.has_turn) {
    PyThreadState* const state = PyEval_SaveThread();
    PyThread_acquire_lock_timed(waiter.wake, -1, /*intr_flag=*/1);  // signals interrupt the wait
    PyEval_RestoreThread(state);
    if (waiter.has_turn || PyErr_CheckSignals() == 0) continue;
    // The handler is Python code, so other threads may have run and passed the turn to this one.
    if (waiter.has_turn) {
      release(whole_of(self));
    } else {
      remove(whole_of(self), waiter);
    }
    return false;
  }
  return true;
}

// Whether the interpreter shuts down. No other thread runs then, so the turn can be taken from its
// owner.
bool is_ending() {
  PyObject* const ask = PySys_GetObject("is_finalizing");
  PyObject* const said = ask == nullptr ? nullptr : PyObject_CallNoArgs(ask);
  const bool is_ending = said == nullptr || PyObject_IsTrue(said) == 1;
  if (said == nullptr) PyErr_Clear();  // sys.is_finalizing is already gone
  Py_DecRef(said);
  return is_ending;
}

PyObject* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

PyObject* enter(PyObject* self, PyObject*) {
  Turn& turn = whole_of(self);
  const unsigned long thread = PyThread_get_thread_ident();
  if (turn.depth != 0 && turn.thread != thread && is_ending()) turn.depth = 0;
  if (turn.depth == 0 || turn.thread == thread) {
    turn.thread = thread;
    ++turn.depth;
    return none();
  }
  Waiter waiter{.wake = PyThread_allocate_lock(), .thread = thread};
  if (waiter.wake == nullptr) return PyErr_NoMemory();
  PyThread_acquire_lock(waiter.wake, WAIT_LOCK);
  append(turn, &waiter);
  const bool has_turn = wait_for(self, waiter);
  PyThread_free_lock(waiter.wake);
  return has_turn ? none() : nullptr;
}

PyObject* leave(PyObject* self, PyObject*) {
  Turn& turn = whole_of(self);
  if (!check_held(turn)) return nullptr;
  release(turn);
  return none();
}

PyObject* unite(PyObject* self, PyObject* other) {
  if (Py_TYPE(self) != Py_TYPE(other)) {
    PyErr_SetString(PyExc_TypeError, "unite() takes a Turn");
    return nullptr;
  }
  Turn &turn = whole_of(self), &part = whole_of(other);
  if (!check_held(turn) || !check_held(part)) return nullptr;
  if (&turn == &part) return none();
  append(turn, part.first);
  turn.depth += part.depth;
  part.first = nullptr;
  part.depth = 0;
  Py_IncRef(&turn.object);
  part.whole = &turn;
  return none();
}

// Frees an object of a class in this file and releases its reference to `referred`.
void free_with(PyObject* self, PyObject* referred) {
  PyTypeObject* const type = Py_TYPE(self);
  Py_DecRef(referred);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DecRef(reinterpret_cast<PyObject*>(type));
}

void free_turn(PyObject* self) {
  free_with(self, reinterpret_cast<PyObject*>(reinterpret_cast<Turn*>(self)->whole));
}

// Several turns that a thread acquires together. A thread that waits for one of them owns none of
// the others by this call, which excludes deadlock.
struct Turns {
  PyObject object;
  PyObject* turns;  // a tuple of Turn
};

PyTypeObject* turn_type = nullptr;

PyObject* turns_of(PyObject* self) { return reinterpret_cast<Turns*>(self)->turns; }

PyObject* make_turns(PyTypeObject* type, PyObject* turns, PyObject*) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(turns); ++i) {
    if (Py_TYPE(PyTuple_GetItem(turns, i)) == turn_type) continue;
    PyErr_SetString(PyExc_TypeError, "Turns() takes Turns alone");
    return nullptr;
  }
  PyObject* const self = PyType_GenericNew(type, nullptr, nullptr);
  if (self == nullptr) return nullptr;
  Py_IncRef(turns);
  reinterpret_cast<Turns*>(self)->turns = turns;
  return self;
}

// The first turn that another thread owns, or nullptr.
PyObject* first_taken(PyObject* turns) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(turns); ++i) {
    PyObject* const each = PyTuple_GetItem(turns, i);
    const Turn& turn = whole_of(each);
    if (turn.depth != 0 && turn.thread != PyThread_get_thread_ident()) return each;
  }
  return nullptr;
}

void take_all(PyObject* turns) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(turns); ++i) {
    Turn& turn = whole_of(PyTuple_GetItem(turns, i));
    turn.thread = PyThread_get_thread_ident();
    ++turn.depth;
  }
}

PyObject* enter_all(PyObject* self, PyObject*) {
  PyObject* const turns = turns_of(self);
  while (PyObject* const taken = first_taken(turns)) {
    PyObject* const entered = enter(taken, nullptr);
    if (entered == nullptr) return nullptr;
    if (first_taken(turns) == nullptr) {
      take_all(turns);
      release(whole_of(taken));
      return entered;
    }
    release(whole_of(taken));
    Py_DecRef(entered);
  }
  take_all(turns);
  return none();
}

PyObject* leave_all(PyObject* self, PyObject*) {
  PyObject* const turns = turns_of(self);
  for (Py_ssize_t i = PyTuple_Size(turns); i-- > 0;) {
    Turn& turn = whole_of(PyTuple_GetItem(turns, i));
    if (!check_held(turn)) return nullptr;
    release(turn);
  }
  return none();
}

void free_turns(PyObject* self) { free_with(self, turns_of(self)); }

PyObject* make_class(const char* name, int size, newfunc make, destructor free,
                     PyMethodDef* methods, const char* doc) {
  PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(free)},
                         {Py_tp_methods, methods},
                         {Py_tp_doc, const_cast<char*>(doc)},
                         {0, nullptr}};
  PyType_Spec spec = {name, size, 0, Py_TPFLAGS_DEFAULT, slots};
  return PyType_FromSpec(&spec);
}

bool add(PyObject* module, const char* name, PyObject* made) {
  const bool is_added = made != nullptr && PyModule_AddObjectRef(module, name, made) == 0;
  Py_DecRef(made);
  return is_added;
}

}  // namespace

bool add_turns(PyObject* module) {
  static PyMethodDef of_one[] = {{"__enter__", enter, METH_NOARGS, nullptr},
                                 {"__exit__", leave, METH_VARARGS, nullptr},
                                 {"unite", unite, METH_O, nullptr},
                                 {nullptr, nullptr, 0, nullptr}};
  static PyMethodDef of_several[] = {{"__enter__", enter_all, METH_NOARGS, nullptr},
                                     {"__exit__", leave_all, METH_VARARGS, nullptr},
                                     {nullptr, nullptr, 0, nullptr}};
  PyObject* const one = make_class(
      "speedtorch._C.Turn", sizeof(Turn), PyType_GenericNew, free_turn, of_one,
      "A lock that its thread may take again, and that goes to threads in the order they ask.");
  turn_type = reinterpret_cast<PyTypeObject*>(one);  // the module keeps a reference
  if (!add(module, "Turn", one)) return false;
  return add(module, "Turns",
             make_class("speedtorch._C.Turns", sizeof(Turns), make_turns, free_turns, of_several,
                        "Several turns, taken at once."));
}

}  // namespace speedtorch

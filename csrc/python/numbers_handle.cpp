// The Python class NumbersHandle: names a copy of numbers from a GPU to the CPU, which an op queues
// under this name, and frees the copy's memory with the object. See call/host_numbers.h.

#include "python/numbers_handle.h"

#include <exception>
#include <memory>

#include "call/host_numbers.h"
#include "core/process.h"
#include "python/classes.h"

namespace speedtorch {
namespace {

constexpr const char* kRead = "read_numbers";

struct NumbersHandle {
  PyObject object;
  int64_t handle;
};

int64_t handle_of(PyObject* self) { return reinterpret_cast<NumbersHandle*>(self)->handle; }

// Calls a function whose exceptions become RuntimeError.
template <typename Call>
PyObject* with_errors(const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

const int64_t* wait_for(const HostNumbers& numbers) {
  const WithoutPythonLock while_waiting;
  return numbers.wait(kRead);
}

PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* const self = PyType_GenericNew(type, nullptr, nullptr);
  if (self != nullptr) reinterpret_cast<NumbersHandle*>(self)->handle = new_handle();
  return self;
}

PyObject* number(PyObject* self, PyObject*) { return PyLong_FromLongLong(handle_of(self)); }

PyObject* read(PyObject* self, PyObject*) {
  return with_errors([&] {
    const std::shared_ptr<const HostNumbers> copy = numbers_of(kRead, handle_of(self));
    const int64_t* const numbers = wait_for(*copy);
    return list_of(copy->count(), [&](Py_ssize_t i) { return PyLong_FromLongLong(numbers[i]); });
  });
}

PyObject* is_complete(PyObject* self, PyObject*) {
  return with_errors(
      [&] { return PyBool_FromLong(numbers_of("is_complete", handle_of(self))->is_complete()); });
}

void free_handle(PyObject* self) {
  drop_numbers(handle_of(self));
  free_object(self);
}

}  // namespace

bool add_numbers_handle(PyObject* module) {
  static PyMethodDef methods[] = {{"number", number, METH_NOARGS, nullptr},
                                  {"read", read, METH_NOARGS, nullptr},
                                  {"is_complete", is_complete, METH_NOARGS, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};
  return add(module, "NumbersHandle",
             make_class("speedtorch._C.NumbersHandle", sizeof(NumbersHandle), make, free_handle,
                        methods, "Names a copy of numbers from a GPU to the CPU."));
}

}  // namespace speedtorch

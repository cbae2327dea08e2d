// Helpers of the Python classes in this folder.

#pragma once

#include "python/python.h"

namespace speedtorch {

// A new reference to None.
PyObject* none();
// Makes a class; returns nullptr with a Python error set on failure.
PyObject* make_class(const char* name, int size, newfunc make, destructor free,
                     PyMethodDef* methods, const char* doc);
// Returns a list of item(0) to item(count - 1), or nullptr if one of these is nullptr.
template <typename Item>
PyObject* list_of(Py_ssize_t count, const Item& item) {
  PyObject* const list = PyList_New(count);
  for (Py_ssize_t i = 0; list != nullptr && i < count; ++i) {
    PyObject* const made = item(i);
    if (made != nullptr && PyList_SetItem(list, i, made) == 0) continue;
    Py_DecRef(list);
    return nullptr;
  }
  return list;
}
// Frees an object of a class from make_class. The class's destructor calls this last.
void free_object(PyObject* self);
// Adds an object to the module and releases the reference `made`. Returns false with a Python error
// set on failure, also if `made` is nullptr.
bool add(PyObject* module, const char* name, PyObject* made);

}  // namespace speedtorch

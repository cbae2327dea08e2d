// Helpers of the Python classes in this folder.

#pragma once

#include "python/python.h"

namespace speedtorch {

// A new reference to None.
PyObject* none();
// Makes a class; returns nullptr with a Python error set on failure.
PyObject* make_class(const char* name, int size, newfunc make, destructor free,
                     PyMethodDef* methods, const char* doc);
// Frees an object of a class from make_class. The class's destructor calls this last.
void free_object(PyObject* self);
// Adds an object to the module and releases the reference `made`. Returns false with a Python error
// set on failure, also if `made` is nullptr.
bool add(PyObject* module, const char* name, PyObject* made);

}  // namespace speedtorch

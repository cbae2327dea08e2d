// Adds the class NumbersHandle to the extension module: the owner of a copy of numbers from a GPU
// to the CPU. Called by module.cpp at import.

#pragma once

#include "python/python.h"

namespace speedtorch {

// Returns false with a Python error set on failure.
bool add_numbers_handle(PyObject* module);

}  // namespace speedtorch

// Adds the classes Turn (a reentrant, fair lock for Python threads) and Turns (several such locks,
// acquired together) to the extension module. Called by module.cpp at import.

#pragma once

#include "python/python.h"

namespace speedtorch {

// Returns false with a Python error set on failure.
bool add_turns(PyObject* module);

}  // namespace speedtorch

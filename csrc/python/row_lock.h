// Adds the classes RowLock (a reentrant, fair lock for Python threads) and RowLocks (several such
// locks, acquired together) to the extension module. Called by module.cpp at import.

#pragma once

#include "python/python.h"

namespace speedtorch {

// Returns false with a Python error set on failure.
bool add_row_locks(PyObject* module);

}  // namespace speedtorch

// Turn: a lock of Python's threads, as a context manager; Turns: several of them.

#pragma once

#include "python/python.h"

namespace speedtorch {

// Adds both classes to the module; false with Python's error set.
bool add_turns(PyObject* module);

}  // namespace speedtorch

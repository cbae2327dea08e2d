// Turn: a lock of Python's threads, as a context manager.

#pragma once

#include "python/python.h"

namespace speedtorch {

// A new reference to the class, or nullptr with Python's error set.
PyObject* turn_class();

}  // namespace speedtorch

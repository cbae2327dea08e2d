// Adds the class RankWords to the extension module: the ranks of one machine exchange numbers in
// shared memory. Called by module.cpp at import.

#pragma once

#include "python/python.h"

namespace speedtorch {

// Returns false with a Python error set on failure.
bool add_rank_words(PyObject* module);

}  // namespace speedtorch

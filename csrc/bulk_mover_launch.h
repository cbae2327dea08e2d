// What bulk_mover.cu offers; returns a cudaError_t as int. No torch here.
#pragma once

namespace speedtorch {

// `device` is the current one.
int ask_bulk_copies(int device, int* supported);

}  // namespace speedtorch

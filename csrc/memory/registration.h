// Pinning of memory with cudaHostRegister, in pieces, all or nothing.
#pragma once

#include <cstdint>
#include <string>

namespace speedtorch {

// Returns a cudaError_t; a failure undoes the pieces before it and leaves no error behind for
// others to find.
int register_pieces(char* base, int64_t bytes, bool read_only);
void unregister_pieces(char* base, int64_t bytes) noexcept;
// What to tell the user: how many bytes, why, what to do.
std::string registration_failure(int64_t bytes, int error);

}  // namespace speedtorch

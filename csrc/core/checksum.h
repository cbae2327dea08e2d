// CRC-32C, the checksum of RFC 3720 (polynomial 0x1edc6f41), of bytes in memory. Called by the op
// chunk_digests. Uses SSE 4.2 or the CRC32 instructions of Arm v8 if the CPU has them, else tables;
// the first call decides.
#pragma once

#include <cstdint>

namespace speedtorch {

uint32_t crc32c(const uint8_t* data, int64_t count);
// Computes the same with tables, as on a CPU without such instructions.
uint32_t crc32c_by_tables(const uint8_t* data, int64_t count);

}  // namespace speedtorch

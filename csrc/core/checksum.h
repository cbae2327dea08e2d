// CRC-32C, the checksum of RFC 3720 (polynomial 0x1edc6f41), of bytes in memory; for the op
// chunk_digests. SSE 4.2 or the CRC32 instructions of Arm v8 compute it if the CPU has them, which
// is looked up at the first call, and tables otherwise.
#pragma once

#include <cstdint>

namespace speedtorch {

uint32_t crc32c(const uint8_t* data, int64_t count);
// The same by tables, as on a CPU without such instructions.
uint32_t crc32c_by_tables(const uint8_t* data, int64_t count);

}  // namespace speedtorch

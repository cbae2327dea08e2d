// memcpy, memmove and memset that report their ranges to ThreadSanitizer. The linker option --wrap,
// which only builds with ThreadSanitizer have, redirects this library's calls to these functions.
// ThreadSanitizer checks libc's functions only together with calls from Python and torch, whose
// synchronization it does not see, so tests/sanitized.py sets ignore_noninstrumented_modules.

#ifdef __SANITIZE_THREAD__

#include <cstddef>

extern "C" {

void __tsan_read_range(const void* from, size_t bytes);
void __tsan_write_range(void* to, size_t bytes);

void* __real_memcpy(void* to, const void* from, size_t bytes);
void* __real_memmove(void* to, const void* from, size_t bytes);
void* __real_memset(void* to, int byte, size_t bytes);

void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  __tsan_read_range(from, bytes);
  __tsan_write_range(to, bytes);
  return __real_memcpy(to, from, bytes);
}

void* __wrap_memmove(void* to, const void* from, size_t bytes) {
  __tsan_read_range(from, bytes);
  __tsan_write_range(to, bytes);
  return __real_memmove(to, from, bytes);
}

void* __wrap_memset(void* to, int byte, size_t bytes) {
  __tsan_write_range(to, bytes);
  return __real_memset(to, byte, bytes);
}

}  // extern "C"

#endif

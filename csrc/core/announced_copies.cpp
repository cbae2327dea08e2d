// memcpy, memmove and memset of a build with ThreadSanitizer, which setup.py has the linker take
// for those of libc. ThreadSanitizer intercepts those of libc, but looks at them only if it looks
// at the calls of Python and torch as well, whose threads it does not see synchronise:
// tests/sanitized.py sets ignore_noninstrumented_modules. An ordinary build has nothing of this
// file.

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

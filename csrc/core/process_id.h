// This process's number without a system call, also right in a forked child.
#pragma once

#include <sys/types.h>

namespace speedtorch {

pid_t process_id();

}  // namespace speedtorch

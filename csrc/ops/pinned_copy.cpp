// pinned_copy: dst[:] = src for ranges of rows between host memory and a GPU, either way, by our
// own kernel: the copy engine moves managed memory at a fifth of the link's speed. Checks and
// dispatch; the kernel is in pinned_copy.cu.

#include <torch/csrc/stable/library.h>

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/rows.h"
#include "memory/host_blocks.h"
#include "move/paths.h"
#include "ops/pinned_copy_launch.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "pinned_copy";
// Contiguous memory is cut into rows of this length, which share themselves out among threads.
constexpr int64_t kCutBytes = 2048;

bool is_one_run(const Rows& rows) { return rows.count <= 1 || rows.stride_bytes == rows.row_bytes; }

void copy_on_gpu(const Rows& from, const Rows& to, Reach reach, bool to_host,
                 const CurrentStream& stream) {
  CopyRows work{.from = from.base,
                .from_stride_bytes = from.stride_bytes,
                .to = to.base,
                .to_stride_bytes = to.stride_bytes,
                .row_bytes = to.row_bytes,
                .count = to.count,
                .to_host = to_host};
  auto launch = [&] {
    if (work.count == 0) return;
    const Rows in{work.from, work.count, work.row_bytes, work.from_stride_bytes};
    const Rows out{work.to, work.count, work.row_bytes, work.to_stride_bytes};
    const Mover mover = to_host ? mover_for(Direction::kOut, out, reach, in, work.count, stream)
                                : mover_for(Direction::kIn, in, reach, out, work.count, stream);
    if constexpr (kWithCuda) check_cuda(launch_copy(work, mover, stream.get()), kOp);
  };
  if (!is_one_run(from) || !is_one_run(to)) return launch();
  const int64_t bytes = to.count * to.row_bytes;
  work.row_bytes = work.from_stride_bytes = work.to_stride_bytes = kCutBytes;
  work.count = bytes / kCutBytes;
  launch();
  const int64_t moved = work.count * kCutBytes;
  work.from += moved;
  work.to += moved;
  work.row_bytes = work.from_stride_bytes = work.to_stride_bytes = bytes - moved;
  work.count = bytes > moved ? 1 : 0;
  launch();
}

void pinned_copy(const Tensor& dst, const Tensor& src) {
  const Arguments all(kOp, {written("dst", dst), read("src", src)});
  const Rows to = as_writable_rows(kOp, "dst", dst);
  const Rows from = as_rows(kOp, "src", src);
  check_shape(kOp, "src", src, shape_of(dst));
  check_dtype(kOp, "src", src, "dst", dst);
  all.check_memory();
  if (dst.numel() == 0) return all.mark_written();
  if (dst.is_cpu() == src.is_cpu()) {  // nothing crosses the link
    all.mark_written();
    return copy_async(kOp, src, dst);
  }
  const bool to_host = dst.is_cpu();
  const Tensor& host = to_host ? dst : src;
  const Rows& host_rows = to_host ? to : from;
  const CurrentStream stream(kOp, to_host ? src : dst);
  const Reach reach = reach_of(kOp, host, host_rows);
  if (reach == Reach::kNot) {
    stream.refuse_capture(kOp,
                          "the host side is in pageable memory, which takes the host; pin it with "
                          "speedtorch.pin_memory_(tensor) or keep it in a HostTable");
    all.mark_written();
    return copy_and_wait(kOp, src, dst);
  }
  all.mark_written();
  queue_and_note(host, host_rows, stream.get(),
                 [&] { copy_on_gpu(from, to, reach, to_host, stream); });
}

}  // namespace
}  // namespace speedtorch

STABLE_TORCH_LIBRARY_IMPL(speedtorch, CompositeExplicitAutograd, m) {
  m.impl("pinned_copy", TORCH_BOX(&speedtorch::pinned_copy));
}

// pinned_copy: dst[:] = src for ranges of rows between host memory and a GPU, in either direction,
// with a kernel: the copy engine moves managed memory at a fifth of the link's speed. This file has
// the checks and the dispatch; the kernel is in pinned_copy.cu.

#include "call/arguments.h"
#include "call/torch_calls.h"
#include "core/gpu.h"
#include "core/registration.h"
#include "core/tensor_checks.h"
#include "memory/host_memory.h"
#include "move/cost_model.h"
#include "ops/launchers.h"

namespace speedtorch {
namespace {

constexpr const char* kOp = "pinned_copy";
// Contiguous memory is cut into rows of this length, to spread the work over threads.
constexpr int64_t kCutBytes = 2048;

bool is_one_run(const Rows& rows) { return rows.count <= 1 || rows.stride_bytes == rows.row_bytes; }

void copy_on_gpu(const Rows& from, const Rows& to, Access access, bool to_host,
                 const CurrentStream& stream) {
  auto launch = [&](const Rows& in, const Rows& out) {
    if (out.count == 0) return;
    if constexpr (kWithCuda) {
      const CopyKernel kernel =
          to_host ? copy_kernel_for(batch_of(Direction::kOut, access, out, out.count), in, stream)
                  : copy_kernel_for(batch_of(Direction::kIn, access, in, out.count), out, stream);
      check_cuda(launch_copy(in, out, to_host, kernel, stream.get()), kOp);
    }
  };
  if (!is_one_run(from) || !is_one_run(to)) return launch(from, to);
  const int64_t bytes = to.count * to.row_bytes, cuts = bytes / kCutBytes;
  const int64_t moved = cuts * kCutBytes, rest = bytes - moved;
  launch({from.base, cuts, kCutBytes, kCutBytes}, {to.base, cuts, kCutBytes, kCutBytes});
  launch({from.base + moved, rest > 0, rest, rest}, {to.base + moved, rest > 0, rest, rest});
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
    return copy(kOp, src, dst, false);
  }
  const bool to_host = dst.is_cpu();
  const Tensor& host = to_host ? dst : src;
  const Rows& host_rows = to_host ? to : from;
  const CurrentStream stream(kOp, to_host ? src : dst);
  const Access access = gpu_access(kOp, host, host_rows, stream.device());
  if (access == Access::kNot) {
    stream.check_pageable_not_captured(kOp, "the host side", "tensor");
    all.mark_written();
    return copy(kOp, src, dst, true);
  }
  all.mark_written();
  TableUse use{host, host_rows, stream.queue()};
  copy_on_gpu(from, to, access, to_host, stream);
  use.note();
}

const Ops kOps{
    {"pinned_copy(Tensor(a!) dst, Tensor src) -> ()", TORCH_BOX(&pinned_copy)},
};

}  // namespace
}  // namespace speedtorch

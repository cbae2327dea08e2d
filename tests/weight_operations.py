"""Operations on the weight of an Embedding by hand, as sources of Python.

In each, w is the weight and t has other tensors on its device; two spaces separate operations. The
last statement's value is the result if it is an expression.
"""

from __future__ import annotations

import copy
import io
import pickle
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import weight_contract as contract
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel
from weight_contract import Operation

NAMES = {
    "copy": copy,
    "io": io,
    "pickle": pickle,
    "np": np,
    "torch": torch,
    "F": F,
    "nn": nn,
    "optim": optim,
    "parametrizations": parametrizations,
    "prune": prune,
    "Tensor": Tensor,
    "AveragedModel": AveragedModel,
}


@cache
def by_hand(
    *families: str, writes: bool = True, supported: tuple[bool, ...] = ()
) -> tuple[Operation, ...]:
    """The operations of some families; their names are their sources."""
    sources = "  ".join(line for each in families for line in each.strip().splitlines())
    return tuple(operation(source, writes, supported) for source in sources.split("  "))


def operation(source: str, writes: bool, supported: tuple[bool, ...]) -> Operation:
    before, _, last = source.rpartition("; ")
    if is_expression(last):
        codes = [compile(before, source, "exec"), compile(last, source, "eval")]
    else:
        codes = [compile(source, source, "exec"), compile("None", source, "eval")]

    def call(weight: Any) -> Any:
        names = {**NAMES, "w": weight, "t": others_on(contract.device_of(weight))}
        exec(codes[0], names)
        return eval(codes[1], names)

    return Operation(source, call, writes, supported=supported)


def is_expression(source: str) -> bool:
    try:
        compile(source, source, "eval")
    except SyntaxError:
        return False
    return True


def others_on(device: Any) -> Any:
    """Copies of the other tensors."""
    values = {name.lower(): getattr(contract, name) for name in contract.OTHERS}
    return SimpleNamespace(**{name: each.to(device, copy=True) for name, each in values.items()})


READS = """
w[3]  w[-1]  w[2:5]  w[1:-1, 2]  w[::3]  w[3, 2]  w[t.ids]  w[t.ids.int()]  w[t.ids - 2]
w[[1, 3, 3]]  w[t.ids, :]  w[t.ids, 1:3]  w[t.ids, t.ids]  w[t.ids.view(2, 2)]  w[t.mask]
w[t.mask[:, 0]]  w[t.mask[:, 0], 1]  w[[True, False] * 6]  w[np.array([1, 3])]  w[torch.tensor(3)]
w[torch.tensor(3, dtype=torch.uint8)]  w[True]  w[t.ids[:0]]  w[12]  w[t.ids + 10]
F.embedding(t.ids, w)  F.embedding_bag(t.ids[None], w)
F.embedding_bag(t.ids, w, torch.tensor([0, 2]).to(w.device), mode="max")  torch.embedding(w, t.ids)
w.index_select(0, t.ids)  w.index_select(1, t.ids)  w.take(t.ids)  w.gather(0, t.places)  t.row in w
bool(w.sum() > 0)  float(w[3, 2])  w[3].tolist()  w.tolist()  w[2:4].norm(dim=1)
w.view(torch.int32)  w.repeat_interleave(2, 0)  w.data.t() @ t.same  t.same.t() @ w  t.same + w
1 - w  2 / w  2 ** w  w ** 2  w @ t.wide  abs(w), -w, w // 1, w % 1  w == t.same
torch.allclose(w, t.same)  torch.einsum("nd,dm->nm", w, t.wide)  torch.cat([w, t.same, w.data])
torch.stack([w[1], w[2], t.row])  torch.where(t.mask, w, t.same)  torch.where(w > 0)
torch.cdist(w, t.same)  torch.meshgrid(w[0], w[1], indexing="ij")  torch.broadcast_tensors(w, t.row)
torch.block_diag(w, t.square)  torch.diagonal_scatter(w, t.row)
torch.select_scatter(w, t.row, 0, 3)  torch.slice_scatter(w, t.same[:2], 0, 2, 4)
torch.scatter_reduce(w, 0, t.places, t.same, "mean")
torch.index_reduce(w, 0, t.ids, t.same[:4], "amax")  torch.topk(w, 3, dim=0)
torch.sort(w, 0, stable=True)  torch.unique(w, dim=0, return_inverse=True, return_counts=True)
torch.searchsorted(w.data.flatten().sort().values, t.row)  torch.special.polygamma(1, w)
torch.fft.rfft(w, dim=0)  torch.view_as_complex(w.data.view(12, 2, 2))  torch.std_mean(w, 0)
torch.logsumexp(w, (0, 1))  F.linear(t.row, w)  F.linear(w, t.square)  F.pad(w, (1, 1))
F.prelu(w, t.row)  F.cross_entropy(w, t.classes)
F.binary_cross_entropy_with_logits(w, t.mask.float())  F.normalize(w, dim=1)
F.cosine_similarity(w, t.same)  F.layer_norm(w, (4,))  F.gumbel_softmax(w, hard=True).sum(1)
torch.func.vmap(lambda row: row.sum())(w.data)  torch.linalg.norm(w, dim=1)
w.new_tensor([1.0, 2.0])  w.new_zeros(2, 3)  w.new_full((2,), 3)  w.new_ones(w.shape)
torch.zeros_like(w), torch.ones_like(w), torch.full_like(w, 0.5)
torch.zeros_like(w, dtype=torch.int64)  torch.rand_like(w.data).shape  torch.tensor(w.detach())
torch.tensor(w[3].detach())  torch.as_tensor(w.detach())  torch.asarray(w.detach(), copy=True)
torch.sparse_coo_tensor(t.ids[None], w[:4].detach(), (12, 4)).to_dense()
np.asarray(w.detach().cpu())  np.array(w.detach().cpu())  np.sum(w.detach().cpu().numpy(), 0)
np.add(w.detach().cpu().numpy(), 1)  w.detach().cpu().numpy()  w.numpy(force=True)  w.cpu()
w.to(torch.float64)  w.half()  w.to("cpu", copy=True)  w.type(torch.float16)  w.to("meta").shape
w.shape, w.dtype, w.ndim, w.numel(), len(w), w.stride(), w.is_contiguous(), w.itemsize, w.nbytes
w.requires_grad, w.is_leaf, w.grad_fn, w.layout, w.is_sparse, w.is_floating_point(), w.names
w.retains_grad, w.output_nr, w.element_size(), w.storage_offset(), w.dim(), w.size(-1)
isinstance(w, nn.Parameter), isinstance(w.data, Tensor), torch.is_tensor(w)  copy.deepcopy(w)
copy.deepcopy({"weight": w, "again": w})  memoryview(w.detach().cpu().numpy()).tolist()
w.as_subclass(Tensor)  nn.Parameter(w)  nn.Parameter(w.data)  nn.Parameter(w[2:4].detach())
nn.Embedding.from_pretrained(w)(t.ids)  nn.Embedding.from_pretrained(w.detach())(t.ids)
nn.utils.parameters_to_vector([w.data])  nn.utils.get_total_norm([w.data])
torch.nn.utils.rnn.pad_sequence([w[1:3], w[4:9]])
torch.utils.data.default_collate([w.data, w.data])  torch._foreach_norm([w.data])
torch.distributions.Normal(w.data, 1.0).log_prob(t.same)  torch.multinomial(w.data.abs(), 3).shape
torch.histogram(w.data, 4)  torch.isfinite(w).all()  w.logical_and(w)
w.register_hook(lambda grad: None) is not None  w.sum_to_size(1, 4)
w.map_(t.same, lambda a, b: a + b)  w.apply_(lambda a: a + 1)  w.norm().item()  w.cpu().data.numpy()
w.clone().detach()  w.contiguous().data  w.double().data  w.max(0)  w.argmax(1)  w[9:]
w.data.norm()  w.detach().sum()  w.square()  w.mean()  torch.sum(w)  w.float()
"""

READS_WITHOUT_GRADIENTS = """
w[..., 1]  w[None]  w[:, None]  w[()]  F.embedding(t.ids, w, padding_idx=3)
F.embedding(t.ids, w, max_norm=1.0)  F.embedding(t.ids, w, scale_grad_by_freq=True)
F.embedding_bag(t.ids[None], w, per_sample_weights=t.row[None], mode="sum")  list(w)
[each.sum() for each in w]  w.view(-1)  w.view(3, 16)  w.reshape(4, 12)  w.permute(1, 0)
w.movedim(0, 1)  w.unflatten(0, (3, 4))  w.narrow(0, 2, 3)  w.split_with_sizes([5, 7])
w.unfold(0, 3, 2)  w.diagonal()  torch.equal(w, w.clone())  F.pad(w[None], (1, 1), mode="reflect")
F.interpolate(w[None], 7)  F.conv1d(t.wide[None], w[:, :, None])
F.scaled_dot_product_attention(w[None], w[None], w[None])  nn.utils.parameters_to_vector([w, t.row])
torch.autograd.grad(w[t.ids].sum(), [w])  w.unsafe_chunk(2)
"""

READS_THAT_RAISE = """
copy.copy(w)  pickle.loads(pickle.dumps(w))
torch.load(io.BytesIO((b := io.BytesIO(), torch.save(w, b), b.getvalue())[2]), weights_only=False)
torch.from_dlpack(w.detach())  torch.from_dlpack(torch.utils.dlpack.to_dlpack(w.detach()))
w.data.as_strided((2, 4), (8, 1))
"""

BACKWARDS = """
w[t.ids].square().sum().backward()  w[3].sum().backward()  w[2:5].sum().backward()
w[t.mask[:, 0]].sum().backward()  w[t.ids, 1:3].sum().backward()
F.embedding(t.ids, w).sum().backward()  F.embedding_bag(t.ids[None], w, mode="sum").sum().backward()
torch.index_select(w, 0, t.ids).sum().backward()  w[:, 1].sum().backward()
torch.autograd.backward([w[3].sum(), w[t.ids].sum()])
torch.func.grad(lambda x: x.square().sum())(w.detach())
"""

BACKWARDS_THAT_RAISE = """
F.embedding(t.ids, w, padding_idx=3).sum().backward()  w.sum().backward()  (w * 2).sum().backward()
w.norm().backward()  torch.cat([w, t.same]).sum().backward()  F.linear(t.row, w).sum().backward()
w.max(0).values.sum().backward()  w[t.mask].sum().backward()  w.gather(0, t.places).sum().backward()
w.clone().sum().backward()  w.double().sum().backward()  w.to("cpu").sum().backward()
(w[t.ids].sum() + w.square().mean()).backward()  torch.stack(list(w)).sum().backward()
(w + t.same).sum().backward()  torch._foreach_mul([w], 2)[0].sum().backward()  w.backward(t.same)
"""

WRITES = """
w[3] = 7  w[-1] = t.row  w[2:5] = 0  w[2:5] = t.same[:3]  w[::2] = t.row  w[t.ids] = t.same[:4]
w[t.ids] = 1.5  w[[1, 2]] = 0  w[t.mask] = 0  w[t.mask[:, 0]] = t.row  w[t.mask[:, 0], 1] = 3
w[3, 2] = 9  w[3, 1:] = 9  w[:, 0] = 1  w[..., -1] = t.same[:, 0]  w[t.ids, 1] = t.row
w[t.ids, t.ids] = 2  w[None] = t.same  w[()] = t.same  w[:] = t.same  w[...] = 0.5  w[3] = t.same
w[12] = 0  w[torch.tensor(3)] = 1  w[3] += 1  w[t.ids] += 1  w[2:4] *= 2  w.data[3] = 7
w.data[t.ids] -= t.same[:4]  w.data += 1  w.data -= t.same  w.data *= 2  w.data /= t.same
w.data **= 2  w.data //= 2  w.data %= 1  w.data = t.same  w.data = w.data * 2
w.data = w.data.clone()  w += 1  w *= t.same  w -= t.same[0]  w /= 2  w &= 1  w.copy_(t.row)
w.copy_(t.same.double())  w.copy_(t.square)  w.data.copy_(w.data.flip(0))  w[1:].copy_(w[:-1])
w.data[:6].copy_(w.data[6:])  w.add_(w)  w.mul_(w.data)  w.addmm_(t.same, t.square)
w.lerp_(t.same, 0.25)  w.addcmul_(t.same, t.same, value=2)  w.renorm_(2, 0, 1.0)
w.clamp_(-0.5, 0.5)  w.masked_fill_(t.mask, 0)  w.masked_scatter_(t.mask, t.same)
w.index_add_(0, t.ids, t.same[:4])  w.index_copy_(0, t.ids.unique(), t.same[:3])
w.index_fill_(0, t.ids, 0)  w.index_put_((t.ids,), t.row, accumulate=True)
w.index_reduce_(0, t.ids, t.same[:4], "amax")  w.scatter_(0, t.places, 0.5)
w.scatter_add_(0, t.places, t.same)  w.put_(t.ids, t.row)  w.fill_diagonal_(0)
w.apply_(lambda number: number + 1)  w.map_(t.same, lambda a, b: a * b)  w.resize_(3, 4)
w.resize_as_(t.same)  w.requires_grad_(False).sum()  w.pin_memory()
torch.mul(t.same, 2, out=w.data)  torch.add(w.data, t.same, out=w.data)
torch.sub(t.same, w.data, alpha=2, out=w.data)  torch.clamp(t.same, 0, 1, out=w.data)
torch.abs(w.data, out=w.data)  torch.sum(t.same, 0, out=w.data[3])
torch.matmul(t.same, t.square, out=w.data)  torch.index_select(t.same, 0, t.classes, out=w.data)
torch.cat([t.same[:6], t.same[6:]], out=w.data)  torch.sum(t.same, out=w.data)
torch.index_select(w.data, 0, t.ids, out=torch.empty(0, device=w.device))
torch.max(w.data, 0, out=(t.row, torch.empty(4, dtype=torch.int64, device=w.device)))
F.relu(w, inplace=True)  F.relu(w.data, True)  F.leaky_relu(w.data, 0.5, inplace=True)
F.elu_(w.data)  F.hardtanh(w.data, -0.5, 0.5, True)  F.threshold(w.data, 0, 1, True)
F.normalize(w.data, out=w.data)  F.dropout(w.data, 0.0, inplace=True)
F.embedding(t.ids, w.data, max_norm=1.0)
t.same.index_copy_(0, torch.arange(12).to(w.device), w.data)  torch._foreach_add_([w.data], 1)
torch._foreach_add_([w.data, t.row], [t.same, t.row], alpha=2)
torch._foreach_mul_([t.row, w.data], 2)  torch._foreach_mul_([w.data, w.data], 2)
torch._foreach_lerp_([w.data], [t.same], 0.25)
torch._foreach_copy_([w.data, t.row], [t.same, t.row + 1])  torch._foreach_copy_([t.same], [w.data])
torch._foreach_zero_([w.data, t.row])  torch._foreach_clamp_max_([w.data], 0.5)
torch._foreach_addcdiv_([w.data], [t.same], [t.same + 4], value=0.5)
nn.utils.vector_to_parameters(torch.cat([t.same.flatten(), t.row]), [w, nn.Parameter(t.row)])
nn.init.constant_(w, 0.5)  nn.init.zeros_(w.data)  nn.init.ones_(w)  nn.init.eye_(w)
nn.init.dirac_(w)  nn.init.constant_(w[3], 0)  nn.init.zeros_(w.data[2:4])  nn.init.ones_(w[2:4])
nn.init.eye_(w.data.t())  torch.nested.nested_tensor([w.data, t.same]).to_padded_tensor(0.0)
shadow = t.same; shadow.lerp_(w.detach(), 0.5); w.data.copy_(shadow)
shadow = w.detach().clone(); shadow.mul_(2)  shadow = w.data.cpu(); shadow += 1
before = w.data.clone(); w.data.zero_(); w.data.add_(before)  for row in w.data: row.mul_(2)
w.to("cpu").mul_(2)
"""

WRITES_WITHOUT_GRADIENTS = """
t.same.copy_(w)  t.same.add_(w)  t.same[:4] = w[:4]
"""

VIEWS = """
w.data[3].fill_(7)  w[3].fill_(7)  w[1].data.fill_(7)  w[1:3].data[0] = 5  w.data[2:5].zero_()
w[2:4].detach().zero_()  w.data[2:6][1][0:2].fill_(7)  w.data[2:6][1][0:2] = t.row[:2]
w.data[::2][1:].mul_(2)  w.data.t().mul_(2)  w.data.t()[0].add_(t.same[:, 0])  w.data.T[1] = 0
w.data.mT.zero_()  w.data.transpose(0, 1).copy_(t.wide)  w.data.view(-1)[3] = 1
w.data.view(-1)[[3, 9]] = 1  w.data.view(3, 16)[1].zero_()  w.data.view(-1).copy_(t.same.flatten())
w.data.view_as(t.same).add_(1)  w.data.view(torch.int32).zero_()  w.data.reshape(-1)[2:4] = 0
w.data.flatten()[5] = 7  w.data.ravel()[5] = 7  w.data.chunk(2)[0].add_(1)
w.data.chunk(2, 1)[1].add_(1)  w.data.split(5)[2].add_(1)  w.data.split([5, 7])[1].zero_()
w.data.tensor_split(3)[1].zero_()  torch.hsplit(w.data, 2)[0].zero_()
torch.vsplit(w.data, 3)[0].zero_()  w.data.unbind()[3].mul_(2)  w.data.unbind(1)[3].mul_(2)
w.data.select(0, 3).fill_(7)  w.data.select(1, 3).fill_(7)  w.data.narrow(0, 2, 3).zero_()
w.data.unfold(0, 3, 3).zero_()  w.data.diagonal().fill_(7)  w.data[None].squeeze(0).zero_()
w.data.unsqueeze(1).add_(t.row)  w.data.squeeze().add_(1)  w.data.expand(12, 4).add_(1)
w.data.expand(2, 12, 4).add_(1)  w.data[3:4].expand(3, 4).fill_(1)  w.data.permute(1, 0).zero_()
w.data.movedim(0, 1)[2] = 1  w.data.swapaxes(0, 1).div_(2)  w.data.unflatten(0, (3, 4))[1].zero_()
w.data.real.zero_()  w.data.adjoint().mul_(2)  w.data.contiguous().zero_()  w.data.float().zero_()
w.data.to(torch.float32).zero_()  w.data.to(w.device).add_(1)  w.data.detach().alias().zero_()
w.data.view(12, 2, 2)[:, 0].zero_()  torch.view_as_complex(w.data.view(12, 2, 2)).mul_(2)
torch.atleast_3d(w.data).zero_()  torch.broadcast_tensors(w.data, t.same)[0].zero_()
torch.squeeze(w.data.unsqueeze(0)).add_(1)  w.data[t.ids].zero_()  w[t.ids].zero_()
w[t.mask].add_(1)  w[t.mask[:, 0]].add_(1)  w.data.clone()[3] = 0  x = w.data[3]; x += 1
x = w.data[3]; y = w.data[2:5]; x.fill_(1); y.mul_(2); z = y[1].clone(); z
x = w.data; x[3] = 1; y = x[3]; w.data.add_(1); y.tolist()
x = w[3].detach(); w.data[3] = 5; x.sum()  x = w.data.t(); x[0] += 1; x.mul_(2); w.data.sum()
a, b = w.data.chunk(2); a.copy_(b)  a, b = w.data.chunk(2); b.sub_(a)
torch.add(w.data[1:3], 1, out=w.data[3:5])  torch._foreach_add_(list(w.data.unbind()), 1)
torch._foreach_zero_([w.data[2], w.data[5:7]])  torch._foreach_mul_(w.data.chunk(2), 2)
p = nn.Parameter(w.data); p.data.mul_(2)  p = nn.Parameter(w.data[3]); p.data.mul_(2)
torch.from_numpy(w.detach().cpu().numpy()).zero_()  torch.as_tensor(w.detach()).zero_()
"""

WRITES_THAT_RAISE = """
w.data = t.square  w.data = t.same.double()  w.data = w.data.t()  w.squeeze_()  w.set_(t.same)
w.t_()  w.detach_()  w.swapaxes_(0, 1)  w.untyped_storage().data_ptr()  w.untyped_storage().fill_(0)
w.data_ptr()  w.storage()  w.share_memory_()  w.as_strided_((2, 4), (4, 1))
w.data.set_(w.data.untyped_storage(), 0, (2, 4))  torch.abs(t.same, out=w.data[2:3])
torch.add(t.same, 1, out=w.data[:3])
torch.max(t.same, 0, out=(w.data[3], torch.empty(4, dtype=torch.int64, device=w.device)))
torch._foreach_maximum_([w.data], [t.same])
nn.utils.vector_to_parameters(t.same.flatten(), [w.data])
torch.utils.swap_tensors(w, nn.Parameter(t.same))  n = w.detach().cpu().numpy(); n[3] = 1
n = np.asarray(w.detach().cpu()[3]); n += 1
"""

GRADIENTS = """
w.grad  w.grad[3], w.grad[t.ids], w.grad[2:5], w.grad[t.mask], w.grad[:, 1], w.grad[3, 1]
w.grad.clone(), w.grad.detach(), w.grad.data, w.grad.cpu(), w.grad.double(), w.grad.half()
w.grad.norm(), w.grad.norm(1), w.grad.norm(float("inf")), w.grad.norm(dim=1)
w.grad.mean(), w.grad.sum(0), w.grad.sum(), w.grad.std(), w.grad.max(), w.grad.min()
w.grad.max(0), w.grad.topk(2, 0), w.grad.argmax(), w.grad.median(), w.grad.prod(1)
w.grad.abs().sum(1).nonzero(), w.grad.ne(0).any(1), w.grad.count_nonzero(), w.grad.isnan().any()
w.grad == 0, w.grad != 0, w.grad > 1, torch.equal(w.grad, w.grad.clone())
w.grad * 2, w.grad + 1, w.grad - t.same, w.grad / 2, -w.grad, w.grad ** 2, 1 / (w.grad + 10)
w.grad * w, w.data + w.grad, w.data * w.grad, w.grad @ t.square, w.grad.t() @ t.same
w.grad.tolist(), len(w.grad), w.grad.shape, w.grad.dtype, w.grad.stride(), w.grad.is_contiguous()
np.asarray(w.grad.cpu()), w.grad.cpu().numpy(), list(w.grad), w.grad.numel(), w.grad.dim()
copy.deepcopy(w.grad), pickle.loads(pickle.dumps(w.grad)), torch.cat([w.grad, t.same])
torch.where(w.grad != 0, w.grad, t.same), torch.stack([w.grad, w.grad]), w.grad.view(-1)
w.grad.to_sparse().to_dense(), w.grad.to_dense(), torch.zeros_like(w.grad), w.grad.new_ones(2)
torch.func.vmap(lambda row: row.sum())(w.grad), torch.einsum("nd,nd->n", w.grad, w.grad)
w.grad.flatten(), w.grad.t(), w.grad.reshape(4, 12), w.grad.unbind(), w.grad.chunk(2), w.grad[None]
torch.nn.utils.parameters_to_vector([w.grad]), torch._foreach_norm([w.grad]), w.grad.unfold(0, 2, 2)
nn.utils.clip_grad_norm_([w], 1.0)
nn.utils.clip_grad_norm_([w], 1.0, float("inf"), foreach=True)
nn.utils.clip_grad_value_([w], 0.5)  nn.utils.get_total_norm([w.grad])  w.grad[3] = 0
w.grad[2] = 0  w.grad[2] = 1  w.grad[:8] = 0  w.grad[t.ids] = 0  w.grad[t.ids] = t.same[:4]
w.grad[t.mask] = 0  w.grad[t.mask[:, 0]] = 0  w.grad[:, 1] = 0  w.grad[...] = 0
w.grad[3] *= 0.5  w.grad[3].mul_(2)  w.grad[3][1:].zero_()  w.grad[1:4].zero_()
w.grad[:4][1].fill_(1)  w.grad.t()[0].zero_()  w.grad.view(-1)[4:6] = 0
w.grad.chunk(2)[0].zero_()  w.grad.select(0, 3).mul_(2)  w.grad.data[3] = 0  w.grad.data.mul_(2)
w.grad.detach().mul_(2)  w.grad.mul_(2)  w.grad.mul_(t.same[:, :1])  w.grad.mul_(t.mask)
w.grad.mul_(t.row)  w.grad.mul_(w)  w.grad.div_(2)  w.grad.div_(w.grad.norm())
w.grad.div_(t.scalar * 0)  w.grad.mul_(t.scalar * float("inf"))  w.grad / 0.0  w.grad.add_(1)
w.grad.add_(t.same)  w.grad.add_(w.grad)  w.grad.add_(w.data, alpha=0.5)
w.grad.sub_(w.grad.mean(0))  w.grad.sub_(w.grad.mean(1, keepdim=True))  w.grad.neg_()
w.grad.abs_()  w.grad.sign_()  w.grad.sqrt_()  w.grad.pow_(2)  w.grad.clamp_(-1, 1)
w.grad.clamp_(min=1)  w.grad.nan_to_num_()  w.grad.zero_()  w.grad.fill_(0.5)
w.grad.copy_(t.same)  w.grad.lerp_(t.same, 0.25)  w.grad.index_fill_(0, t.ids, 0)
w.grad.index_add_(0, t.ids, t.same[:4])  w.grad.index_copy_(0, t.ids[:2], t.same[:2])
w.grad.masked_fill_(t.mask, 0)  w.grad.scatter_(0, t.places, 0)  w.grad.renorm_(2, 0, 1.0)
w.grad.addcmul_(t.same, t.same)  w.grad.normal_().shape  w.grad.t_()  w.grad.resize_(3, 4)
w.grad.set_(t.same)  w.grad.data_ptr()  w.grad.untyped_storage().data_ptr()
w.grad.requires_grad_().is_leaf  torch.mul(w.grad, 2, out=w.grad)
torch.add(w.grad, t.same, out=t.wide.t().contiguous())  torch.add(w.data, w.grad, out=w.data)
torch.abs(w.grad, out=torch.empty(0, device=w.device))
torch.sub(w.data, w.grad, alpha=0.5, out=w.data)  F.relu(w.grad, inplace=True)
t.same.add_(w.grad, alpha=2)  t.same.copy_(w.grad)  w.grad = w.grad * 0.5
w.grad = w.grad + t.same  w.grad = t.same  w.grad = t.same * 0  w.grad = w.grad.clone()
w.grad = w.grad.to_dense()  w.grad = torch.zeros_like(w)
w.grad = torch.where(t.mask, w.grad, 0)  w.grad = w.data  w.grad = t.square
w.grad = t.same.double()  w.grad = None  w.grad += 1  w.grad *= t.same  w.grad -= w.grad.mean()
g = w.grad; w.grad = None; w.grad = g  g = w.grad; g.mul_(2); w.grad.add_(g)
g = w.grad.clone(); w.grad = None; w.grad = g * 2  g = w.grad; w.grad.zero_(); g  del w.grad
w.data.sub_(0.5 * w.grad)  w.data.add_(w.grad, alpha=-0.5)  w.data -= 0.5 * w.grad
w.data += w.grad  w.data = w.data - 0.5 * w.grad  w.data.copy_(w.grad)  w.data.mul_(w.grad)
w.data.addcmul_(w.grad, w.grad, value=-0.5)
w.data.addcdiv_(w.grad, w.grad.abs() + 1, value=-0.5)
w.data.addcdiv_(w.grad, w.grad.square().add(1).sqrt(), value=-0.5)  w.data.lerp_(w.grad, 0.25)
w.data.sub_(w.grad.sign())  w.data[w.grad.ne(0).any(1)] = 0  w.data[w.grad != 0] -= 1
w.data[3].sub_(w.grad[3])  w.data.index_add_(0, t.ids, w.grad[t.ids])
w.data.t().sub_(w.grad.t())  w.sub_(w.grad)  w.copy_(torch.where(w.grad != 0, t.same, w))
torch._foreach_add_([w], [w.grad], alpha=-0.5)
torch._foreach_add_([w.data], [w.grad], alpha=-0.5)
torch._foreach_add_([w.data, t.row], [w.grad, t.row], alpha=-0.5)
torch._foreach_sub_([w.data], [w.grad])  torch._foreach_lerp_([w.data], [w.grad], 0.5)
torch._foreach_addcmul_([w.data], [w.grad], [w.grad], -0.5)  torch._foreach_mul_([w.grad], 2)
torch._foreach_mul_([w.grad, t.row], [t.same, t.row])  torch._foreach_add_([w.grad], [t.same])
torch._foreach_zero_([w.grad])  torch._foreach_clamp_max_([w.grad], 1)
torch._foreach_copy_([w.grad], [t.same])  torch._foreach_sqrt([w.grad])
m = torch.zeros_like(w); m.mul_(0.5).add_(w.grad); w.data.sub_(m, alpha=0.5); m
m = torch.zeros_like(w.data); m.lerp_(w.grad, 0.5); w.data.add_(m, alpha=-1)
v = torch.ones_like(w); v.addcmul_(w.grad, w.grad); w.data.addcdiv_(w.grad, v.sqrt())
m = torch.empty_like(w); m.copy_(w.grad); m[3] = 0; w.data.sub_(m)
m = torch.full_like(w, 0.5); m[t.ids] += w.grad[t.ids]; w.data.sub_(m)
"""

STATE = """
w  w[3], w[t.ids], w[2:5], w[t.mask], w[:, 1], w.shape, w.dtype, w.requires_grad, w.is_leaf
w.sum(), w.mean(0), w.norm(), w.max(), w.clone(), w.cpu(), w.tolist(), copy.deepcopy(w)
w.sqrt().add(1e-10), w * t.same, t.same + w, w.t(), w.view(-1), w.double()  w[3] = 0
w[t.ids] = t.same[:4]  w[t.mask] = 1  w[2:5].fill_(2)  w[3].mul_(2)  w.mul_(0.5)  w.mul_(t.same)
w.add_(1)  w.zero_()  w.fill_(0.25)  w.copy_(t.same.abs())  w.clamp_(max=1)  w.data.mul_(2)
w.detach().zero_()  w.t().mul_(2)  w.chunk(2)[0].zero_()  w.index_fill_(0, t.ids, 0)  w += 1
w *= 0.5  w.set_(t.same)  w.grad = t.same  w.uniform_().shape  nn.init.constant_(w, 0.5)
torch.add(w, 1, out=w)  torch._foreach_mul_([w], 2)  F.relu(w, inplace=True)
w.data = t.same.abs()
"""

STATES_REPLACED = """
w["sum"] = w["sum"] * 0.5  w["sum"] = t.same.abs()  w["sum"] = w["sum"].clone()
w["sum"] = torch.ones_like(w["sum"])  w["sum"] = w["sum"].data
w["sum"], w["step"]  w["step"].fill_(5)  w["step"] += 1  w["step"] = torch.tensor(7.0)  dict(w)
w["sum"][3] = 0; w["sum"] = w["sum"] + 1  [each.shape for each in w.values()]  copy.deepcopy(w)
w.get("nothing")
"""

MODULES = """
w(t.ids)  w.weight  next(w.parameters())  w.state_dict()["weight"].float()
[name for name, _ in w.named_parameters()]  copy.deepcopy(w).weight
copy.deepcopy(w).weight.data.zero_()  w.load_state_dict({"weight": t.same})
w.load_state_dict({"weight": t.same.clone()}, assign=True); w.weight
w.requires_grad_(False).weight.requires_grad  w.zero_grad(); w.weight.grad
w.zero_grad(set_to_none=False); w.weight.grad
w.apply(lambda module: nn.init.constant_(module.weight, 0.25)).weight  w.share_memory()
w.weight = nn.Parameter(t.same); w(t.ids)  w.weight = w.weight; w(t.ids)
w.weight.data = t.same; w.weight  w.register_parameter("weight", nn.Parameter(t.same)); w(t.ids)
w.extra = w.weight; w(t.ids)  a = AveragedModel(w); a.module.weight
a = AveragedModel(w); a.update_parameters(w); a.update_parameters(w); a.module.weight
a = AveragedModel(w); a.update_parameters(w); w.weight.data += 1; a.update_parameters(w); a(t.ids)
torch.func.functional_call(w, {"weight": t.same}, (t.ids,))
torch.func.functional_call(w, dict(w.named_parameters()), (t.ids,))
torch.func.functional_call(w, {"weight": w.weight.data * 2}, (t.ids,))
torch.func.stack_module_state([w, w])[0]  F.embedding(t.ids, w.weight, w.padding_idx)
F.linear(w(t.ids).detach(), w.weight.data)  [p.numel() for p in w.parameters()]
nn.utils.parameters_to_vector(w.parameters())
nn.utils.vector_to_parameters(t.same.flatten(), w.parameters())
nn.utils.convert_parameters.parameters_to_vector(w.parameters()).mul(2)
nn.utils.clip_grad_norm_(w.parameters(), 0.5); w.weight.grad
[p.mul_(2) for p in w.parameters()]  [p.data.lerp_(t.same, 0.5) for p in w.parameters()]
{name: p.detach().clone() for name, p in w.named_parameters()}
"""

REPARAMETRIZED = """
parametrizations.weight_norm(w)(t.ids)  parametrizations.spectral_norm(w)(t.ids)
parametrizations.orthogonal(w)(t.ids)
nn.utils.parametrize.register_parametrization(w, "weight", nn.Tanh())(t.ids)
nn.utils.weight_norm(w)(t.ids)  nn.utils.spectral_norm(w)(t.ids)
prune.l1_unstructured(w, "weight", 0.5)(t.ids)
prune.random_unstructured(w, "weight", 0.0)(t.ids)  prune.identity(w, "weight")(t.ids)
prune.ln_structured(w, "weight", 0.5, 2, 0).weight
"""

"""The weight of sharded rows answers for the whole table, or raises and changes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_backends import ON_RANKS
from sharded_training import WIDTH, own_gradient
from torch import Tensor, nn, optim
from torch.nn import functional

import speedtorch
from speedtorch.parallel.shard import shard

pytestmark = ON_RANKS

ROWS = 300  # some on each rank

IDS = torch.tensor([3, 299, 150, 3])
LOOKUPS: dict[str, Callable[[Any], Tensor]] = {
    "ids": lambda weight: weight[IDS],
    "ids and columns": lambda weight: weight[IDS, 1:],
    "embedding": lambda weight: functional.embedding(IDS, weight),
    "index_select": lambda weight: torch.index_select(weight, 0, IDS),
    "row": lambda weight: weight[299],
    "negative row": lambda weight: weight[-1],
    "slice": lambda weight: weight[148:152],
    "mask": lambda weight: weight[torch.arange(ROWS) > 290],
}
WRITES: dict[str, Callable[[Any], object]] = {
    "mul_": lambda weight: weight.mul_(0.5),
    "data.mul_": lambda weight: weight.data.mul_(2),
    "operator": lambda weight: weight.data.__imul__(0.25),
    "clamp_": lambda weight: weight.clamp_(-0.5, 0.5),
    "fill_": lambda weight: weight.fill_(1.5),
    "add_": lambda weight: weight.add_(0.5),
    "zero_": lambda weight: weight.zero_(),
    "constant_": lambda weight: nn.init.constant_(weight, -2.0),
}
METADATA: dict[str, Callable[[Any], object]] = {
    "shape": lambda weight: (weight.shape, weight.size(0), len(weight), weight.numel()),
    "kind": lambda weight: (weight.dtype, weight.is_leaf, weight.requires_grad, weight.dim()),
    "strides": lambda weight: (weight.stride(), weight.is_contiguous(), weight.element_size()),
}
REFUSED: dict[str, Callable[[Any], object]] = {
    "norm": lambda weight: weight.norm(),
    "mean": lambda weight: weight.data.mean(0),
    "clone": lambda weight: weight.detach().clone(),
    "cpu": lambda weight: weight.cpu(),
    "numpy": lambda weight: weight.detach().numpy(),
    "copy_": lambda weight: weight.data.copy_(torch.ones(ROWS, WIDTH)),
    "data": lambda weight: setattr(weight, "data", torch.ones(ROWS, WIDTH)),
    "row": lambda weight: weight.data.__setitem__(5, 0.0),
    "view": lambda weight: weight.data.view(-1),
    "chunk": lambda weight: weight.data.chunk(2),
    "add_ rows": lambda weight: weight.data.add_(torch.ones(ROWS, WIDTH)),
    "sub_ mean": lambda weight: weight.data.sub_(torch.ones(1, WIDTH)),
    "by hand": lambda weight: weight.data.sub_(0.5 * weight.grad),
    "deepcopy": lambda weight: __import__("copy").deepcopy(weight),
    "broadcast": lambda weight: dist.broadcast(weight.data, 0),
    "all_reduce": lambda weight: dist.all_reduce(weight.data),
    "all_reduce of the gradient": lambda weight: dist.all_reduce(weight.grad),
    "gradient": lambda weight: weight.grad.norm(),
    "gradient row": lambda weight: weight.grad.__setitem__(5, 0.0),
    "torchs clip": lambda weight: nn.utils.clip_grad_norm_([weight], 1.0),
    "assigned gradient": lambda weight: setattr(weight, "grad", torch.ones(ROWS, WIDTH)),
    "vector": lambda weight: nn.utils.parameters_to_vector([weight]),
    "orthogonal_": lambda weight: nn.init.orthogonal_(weight),
}


def whole_rows() -> Tensor:
    return torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH) / 1000


def made(*, attached: bool = False) -> tuple[Any, Any]:
    """A sharded module after a step, and a plain one after the steps of all ranks."""
    pair: list[Any] = []
    for kind, factor in ((speedtorch.Embedding, 1), (nn.Embedding, dist.get_world_size())):
        module: Any = nn.Sequential(kind(ROWS, WIDTH))
        if not pair:
            shard(module, average=False)
        module.load_state_dict({"0.weight": whole_rows()})
        optimizer: Any = (optim.Adagrad if attached else optim.SGD)(module.parameters(), lr=0.5)
        if attached and not pair:
            speedtorch.attach(optimizer, module)
        (module[0](IDS).sum() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        (module[0](IDS).sum() * factor).backward()
        module.optimizer = optimizer  # which would be collected at another moment on each rank
        pair.append(module)
    return pair[0], pair[1]


def assert_same_rows(ours: Any, theirs: Any, name: str) -> None:
    """On the first rank."""
    with speedtorch.full_state_dict(ours):
        found = ours.state_dict()["0.weight"]
        is_same = dist.get_rank() > 0 or torch.equal(found, theirs[0].weight.detach())
    assert is_same, name


@pytest.mark.parametrize("attached", [False, True], ids=["SGD", "Adagrad"])
def test_operations_are_those_of_the_whole_table_or_raise(attached: bool) -> None:
    ours, theirs = made(attached=attached)
    weight, plain = ours[0].weight, theirs[0].weight
    for name, read in METADATA.items():
        assert read(weight) == read(plain), name
    for name, look_up in LOOKUPS.items():
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                assert torch.equal(look_up(weight), look_up(plain)), (name, grad)
        with torch.no_grad():
            assert torch.equal(look_up(weight.data), look_up(plain.data)), name
    for name, call in REFUSED.items():
        with torch.no_grad(), pytest.raises(NotImplementedError):
            call(weight)
        assert_same_rows(ours, theirs, name)
    for name, write in WRITES.items():
        with torch.no_grad():
            write(weight), write(plain)
        assert_same_rows(ours, theirs, name)
    assert own_gradient(ours[0]) is not None


@pytest.mark.parametrize("index", [5, slice(2, 4)], ids=["row", "slice"])
def test_a_write_to_a_row_or_slice_that_was_looked_up_raises(index: Any) -> None:
    ours, _ = made()
    weight = ours[0].weight
    with pytest.raises(RuntimeError, match="modified inplace"):
        weight[index].mul_(2)
    with torch.no_grad():
        for view in (weight[index], weight.data[index]):
            with pytest.raises(ValueError, match="is a copy of rows that ranks share"):
                view.mul_(2)


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_of_the_weight_are_trained_by_global_ids(name: str) -> None:
    ours, theirs = made()
    for module, factor in ((ours, 1), (theirs, dist.get_world_size())):
        optimizer = optim.SGD(module.parameters(), lr=1.0)
        optimizer.zero_grad()
        (LOOKUPS[name](module[0].weight).sum() * factor).backward()
        optimizer.step()
    assert_same_rows(ours, theirs, name)


@pytest.mark.parametrize("capacity", [None, 20])
def test_a_kept_gradient_remains_the_average_of_the_ranks(capacity: int | None) -> None:
    pair: list[Any] = []
    for module in (speedtorch.Embedding(ROWS, WIDTH, capacity=capacity), nn.Embedding(ROWS, WIDTH)):
        model: Any = nn.Sequential(module)
        if not pair:
            shard(model)
        model.load_state_dict({"0.weight": whole_rows()})
        optimizer = optim.SGD(model.parameters(), lr=0.5)
        kept: Any = None
        for number in range(3):
            model[0](IDS - number).sum().backward()
            kept = model[0].weight.grad if kept is None else kept
            kept.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        pair.append(model)
    assert_same_rows(*pair, "kept")


def test_data_of_all_ranks_is_not_assigned_to_a_gradient() -> None:
    ours, theirs = made()
    gradient = ours[0].weight.grad
    for data in (torch.ones(ROWS, WIDTH), torch.zeros_like(gradient)):
        with pytest.raises(NotImplementedError, match="needs the rows of all ranks"):
            gradient.data = data
    for module in (ours, theirs):
        module[0].weight.grad.data *= 2
        module.optimizer.step()
    assert_same_rows(ours, theirs, "data")


def test_every_function_of_torch_treats_all_elements_alike_or_raises() -> None:
    """None reads or writes the rows of one rank for those of all."""
    ours, _ = made()
    weight, before = ours[0].weight, ours[0].table["weight"].clone()
    refused, answered = 0, []
    for func, dummy in torch.overrides.get_testing_overrides().items():
        arguments = _arguments(dummy, weight)
        name = getattr(func, "__name__", "")
        if arguments is None or name in ("__get__", "__set__", "__delete__", "backward"):
            continue
        try:
            with torch.no_grad():
                result = func(*arguments)
        except NotImplementedError:
            refused += 1
        except Exception:  # the arguments are none of this function's
            pass
        else:
            if result is NotImplemented:  # an operator's way to refuse a type
                continue
            with torch.no_grad():
                leaves = torch.utils._pytree.tree_leaves(result)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            shares = [t for t in tensors if t.shape[:1] == before.shape[:1] != (ROWS,)]
            answered.append((name, bool(shares)))
            ours[0].load_state_dict({"weight": whole_rows()})
            before = ours[0].table["weight"].clone()
        assert torch.equal(ours[0].table["weight"], before), name
    assert refused > 300
    assert [name for name, shares in answered if shares] == []
    unknown = {name for name, _ in answered} - _KNOWN
    assert unknown == set(), sorted(unknown)


_NAMES = """
__deepcopy__ __format__ __getitem__ __hash__ __iadd__ __idiv__ __imul__ __isub__ __itruediv__
__len__ __repr__ abs_ add_ can_cast cauchy_ ceil_ clamp_ clamp_max_ clamp_min_ clip_ constant_
cos_ detach dim div_ divide_ element_size embedding empty_like erf_ erfinv_ exp_ exponential_
fill_ floor_ full_like geometric_ get_device has_names index_select is_coalesced is_complex
is_conj is_contiguous is_distributed is_floating_point is_inference is_neg is_pinned is_same_size
is_set_to is_shared is_signed is_tensor kaiming_uniform_ log_ log_normal_ mul_ multiply_
ndimension neg_ nelement new new_empty new_empty_strided new_full new_ones new_tensor new_zeros
normal_ numel ones_like pow_ random_ register_hook register_post_accumulate_grad_hook
requires_grad_ result_type retain_grad round_ sigmoid_ sin_ size sqrt_ square_ storage_offset
stride sub_ subtract_ tanh_ uniform_ untyped_storage zero_ zeros_like
"""
_KNOWN = set(_NAMES.split())


def _arguments(dummy: Any, weight: Any) -> list[Any] | None:
    """The weight for the first tensor of a function, and numbers for what it needs besides."""
    try:
        parameters = list(inspect.signature(dummy).parameters.values())
    except (TypeError, ValueError):
        return None
    kinds = [param.kind for param in parameters if param.default is inspect.Parameter.empty]
    if kinds[:1] in ([], [inspect.Parameter.VAR_POSITIONAL]):
        return None
    return [weight, *(1 for kind in kinds[1:] if kind is not inspect.Parameter.VAR_KEYWORD)]

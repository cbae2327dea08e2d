"""What ranks that share rows out do differently by mistake, and what each of them is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from rank_processes import own_device
from sharded_training import ROWS, WIDTH, raises
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import speedtorch
from speedtorch.nn.row_module import RowModule
from speedtorch.parallel.shard import shard

SOON = 5.0  # seconds


@contextmanager
def soon(what: str) -> Iterator[None]:
    """What is within raises long before the time of the process group is over."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < SOON, what


def made(**settings: object) -> speedtorch.Embedding:
    return speedtorch.Embedding(ROWS, WIDTH, **settings).to(own_device())  # type: ignore[arg-type]


def bags(**settings: object) -> speedtorch.EmbeddingBag:
    return speedtorch.EmbeddingBag(ROWS, WIDTH, **settings).to(own_device())  # type: ignore[arg-type]


def tables(**settings: object) -> nn.Module:
    config = speedtorch.EmbeddingBagConfig(5, 4, "a", **settings)  # type: ignore[arg-type]
    return speedtorch.EmbeddingBagCollection(tables=[config], device=own_device())


def frozen() -> RowModule:
    return made().requires_grad_(False)


def used() -> RowModule:
    module = made()
    module(torch.tensor([1]))
    return module


def named(*names: str) -> nn.Module:
    return nn.ModuleDict({name: made() for name in names})


Make = Callable[[], nn.Module]
MODELS: dict[str, tuple[Make, Make, str]] = {
    "rows": (made, lambda: speedtorch.Embedding(ROWS + 1, WIDTH), "num_embeddings=42 .* rank 0"),
    "columns": (
        made,
        lambda: speedtorch.Embedding(ROWS, 4),
        "embedding_dim=4 where rank 0 has embedding_dim=3;",
    ),
    "dtype": (made, partial(made, dtype=torch.float64), "dtype=torch.float64 where rank 0 has"),
    "class": (made, bags, "of 'm' rank 1 has class=EmbeddingBag"),
    "max_norm": (partial(made, max_norm=1.0), made, "max_norm=None where rank 0 has max_norm=1.0"),
    "norm_type": (made, partial(made, norm_type=1.0), "norm_type=1.0 where rank 0 has norm_type=2"),
    "padding": (made, partial(made, padding_idx=3), "padding_idx=3.* padding_idx=None"),
    "capacity": (partial(made, capacity=4), partial(made, capacity=5), "capacity=5 where rank 0"),
    "sparse": (partial(made, sparse=True), made, "sparse=False where rank 0 has sparse=True"),
    "mode": (bags, partial(bags, mode="sum"), "mode=sum where rank 0 has mode=mean"),
    "pooling": (tables, partial(tables, pooling="mean"), r"table 'a'=\(5, \['a'\], 'mean'\)"),
    "frozen": (made, frozen, "weight.requires_grad=False where rank 0 has weight.requires_grad=T"),
    "first values": (
        made,
        lambda: made().init_(nn.init.normal_, 0.0, 2.0),
        r"init_=\['values of digest .*'\] where rank 0",
    ),
    "names": (partial(named, "a"), partial(named, "b"), "has 'm.b' where rank 0 has 'm.a'"),
    "order": (partial(named, "a", "b"), partial(named, "b", "a"), "has 'm.b' where rank 0 has"),
    "fewer": (partial(named, "a", "b"), partial(named, "a"), "no further module where rank 0 has"),
    "more": (partial(named, "a"), partial(named, "a", "b"), "rank 1 has 'm.b' where rank 0 has no"),
}
REFUSED: dict[str, tuple[Make, type[Exception], str]] = {
    "no rows": (lambda: nn.Linear(2, 2), ValueError, "has no speedtorch.Embedding"),
    "used": (used, RuntimeError, "Embedding: its rows have been used"),
    "frequencies": (
        partial(made, scale_grad_by_freq=True),
        NotImplementedError,
        "Embedding: scale_grad_by_freq would need",
    ),
}


def check_other_models() -> None:
    """Every setting that differs raises on all ranks, which name it, and nothing changes."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for name, (others, of_last, message) in MODELS.items():
        model = nn.ModuleDict({"first": made(), "m": of_last() if is_last else others()})
        if dist.get_world_size() > 2:
            message = message.replace("rank 1", f"rank {dist.get_world_size() - 1}")
        with soon(name):
            raises(ValueError, f"shard: .*{message}", lambda model=model: shard(model))  # type: ignore[misc]
        assert model["first"].table.rows == ROWS
    with soon("average"):
        message = "of 'Embedding' rank .* has average=True where rank 0 has average=False"
        raises(ValueError, message, lambda: shard(made(), average=is_last))
    for name, (of_last, kind, message) in REFUSED.items():
        model = nn.ModuleDict({"first": made(), "m": of_last()} if is_last else {"first": made()})
        if name == "no rows" and is_last:
            model = of_last()
        if not is_last:
            message = f"rank {dist.get_world_size() - 1} raises {kind.__name__}: .*{message}"
        with soon(name):
            raises(kind if is_last else ValueError, message, lambda model=model: shard(model))  # type: ignore[misc]
    other = made().init_(nn.init.normal_, 0.0, 1.0)  # the same values by other words
    shard(other if is_last else made())


def check_meshes() -> None:
    """A mesh says how its group is got."""
    mesh = init_device_mesh(own_device().type, (dist.get_world_size(),), mesh_dim_names=("rows",))
    message = r"process_group is a DeviceMesh; pass mesh.get_group\(\).*get_group\(name\).*'rows'"
    raises(TypeError, message, lambda: shard(made(), process_group=mesh))
    shard(made(), process_group=mesh.get_group())

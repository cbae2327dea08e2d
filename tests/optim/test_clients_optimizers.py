"""Every optimizer of four libraries trains and resumes as in plain torch, or is refused by name.

Needs those libraries: make clients. The reference is the same optimizer on the touched rows of
full-size tensors, which knows nothing of our classes.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import assert_same_bytes
from torch import Tensor, nn, optim
from torch_checkpoints import through_a_file

import speedtorch

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

ROWS, WIDTH = 60, 32
LIBRARIES = ("pytorch_optimizer", "torch_optimizer", "bitsandbytes.optim", "torchao.optim")
Make = Callable[[list[nn.Parameter]], optim.Optimizer]

# Arguments without which a class cannot be built.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "BSAM": {"num_data": 10},
    "Ranger21": {"num_iterations": 100},
    **{name: {"base_optimizer": optim.Adam} for name in ("FriendlySAM", "LookSAM", "SAM")},
    **{
        f"{name}{bits}": {"lr": 0.01, "momentum": 0.9}
        for name in ("LARS", "SGD")
        for bits in ("", "32bit", "8bit")
    },
    "PytorchLARS": {"lr": 0.01, "momentum": 0.9},
}
# These ask in each group whether they orthogonalise it, and step other groups as AdamW.
MUONS = ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon")
# Not tried, and why.
LISTED = {
    "pytorch_optimizer.DeMo": "its constructor needs a weight that has rows already",
    "pytorch_optimizer.DistributedMuon": "its step needs a process group; Muon is tried",
    "torchao.CPUOffloadOptimizer": "moves dense parameters of its own to a GPU; needs one",
}


# Everybody's, which must not be refused one day without anybody's noticing.
MUST_TRAIN = {
    f"{library}.{name}"
    for library, names in {
        "pytorch_optimizer": "ADOPT AdEMAMix AdaBelief DiffGrad Grams Lion QHAdam RAdam Yogi",
        "torch_optimizer": "AdaBelief AdaBound AdaMod QHM RAdam SGDW Yogi",
        "bitsandbytes": "Adagrad Adam AdamW Lion RMSprop SGD PagedAdamW32bit",
        "torchao": "_AdamW",
    }.items()
    for name in names.split()
}


def optimizers() -> dict[str, type[optim.Optimizer]]:
    found = {}
    for library in LIBRARIES:
        try:
            module = importlib.import_module(library)
        except ImportError:
            continue
        for name, kind in sorted(vars(module).items()):
            own = inspect.isclass(kind) and issubclass(kind, optim.Optimizer)
            if own and not kind.__module__.startswith("torch."):
                found[f"{library.split('.')[0]}.{name}"] = kind
    return found


def maker(kind: type[optim.Optimizer], *, muon: bool = True) -> Make:
    """Builds an optimizer of a class, whatever it wants."""
    name = kind.__name__
    wanted = [*inspect.signature(kind).parameters]

    def make(parameters: list[nn.Parameter]) -> optim.Optimizer:
        if wanted[0] == "optimizer":
            return kind(optim.Adam(parameters, lr=0.01))  # type: ignore[arg-type]
        model = nn.Module()
        for number, parameter in enumerate(parameters):
            model.register_parameter(str(number), parameter)
        if wanted[0] == "model" and "params" not in wanted:
            return kind(model, **ARGUMENTS.get(name, {}))
        if name == "WSAM":
            return kind(model, parameters, optim.Adam)  # type: ignore[call-arg, arg-type]
        if name == "GSAM":
            schedule = SimpleNamespace(step=lambda: 0.1)
            inner = optim.Adam(parameters)
            return kind(parameters, inner, model, schedule)  # type: ignore[call-arg, arg-type]
        groups: Any = parameters
        if name in MUONS:
            groups = [{"params": parameters, "use_muon": muon}]
        return kind(groups, **ARGUMENTS.get(name, {}))

    return make


def batches(*, all_first: bool) -> list[Tensor]:
    random = torch.Generator().manual_seed(4)
    drawn = [torch.randint(ROWS, (5 + 9 * step % 31,), generator=random) for step in range(9)]
    return [torch.randperm(ROWS, generator=random), *drawn] if all_first else drawn


class Loss:
    """A loss of the looked-up rows, a trained scale, and random targets."""

    def __init__(self) -> None:
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.random = torch.Generator().manual_seed(3)

    def __call__(self, rows: Tensor) -> Tensor:
        targets = torch.randn(rows.shape, generator=self.random)
        return (rows * self.scale - targets).square().sum()


@dataclass
class Trained:
    weight: Tensor
    scale: Tensor
    fields: dict[str, Tensor] = field(default_factory=dict)


def first_weight() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def plain(make: Make, steps: list[Tensor], resume_at: int, starts: dict[str, Tensor]) -> Trained:
    """Training of full-size tensors in place; the optimizer sees the touched rows alone."""
    torch.manual_seed(0)
    loss, weight = Loss(), first_weight()
    fields: dict[str, Tensor] = {}
    held = nn.Parameter(weight[:0].clone())
    optimizer = make([held, loss.scale])
    for number, ids in enumerate(steps):
        if number == resume_at:
            state = through_a_file(optimizer.state_dict(), weights_only=False)
            held = nn.Parameter(held.detach().clone())
            loss.scale = nn.Parameter(loss.scale.detach().clone())
            optimizer = make([held, loss.scale])
            optimizer.load_state_dict(state)
        touched, local = torch.unique(ids, return_inverse=True)
        optimizer.zero_grad()
        rows = weight.index_select(0, touched).requires_grad_()
        loss(nn.functional.embedding(local, rows)).backward()
        held.data, held.grad = rows.detach(), rows.grad
        for name, each in fields.items():
            optimizer.state[held][name] = each.index_select(0, touched)
        optimizer.step()
        weight.index_copy_(0, touched, held.data)
        for name, value in optimizer.state[held].items():
            if isinstance(value, Tensor) and value.shape[:1] == touched.shape and len(touched) > 1:
                first = starts[name].to(value.dtype).expand(ROWS, *value.shape[1:]).clone()
                fields.setdefault(name, first).index_copy_(0, touched, value)
    return Trained(weight, loss.scale.detach(), fields)


def attached(make: Make, steps: list[Tensor], resume_at: int) -> tuple[Trained, dict[str, Tensor]]:
    """Training of an attached Embedding, and what the probe says each state starts from."""
    torch.manual_seed(0)
    loss = Loss()
    embedding = speedtorch.Embedding.from_pretrained(first_weight(), freeze=False)
    optimizer = make([embedding.weight, loss.scale])
    speedtorch.attach(optimizer, embedding)
    probe = embedding.trained_rows.state.probe
    for number, ids in enumerate(steps):
        if number == resume_at:
            model_state, state = through_a_file(
                [embedding.state_dict(), optimizer.state_dict()], weights_only=False
            )
            embedding = speedtorch.Embedding(ROWS, WIDTH)
            loss.scale = nn.Parameter(loss.scale.detach().clone())
            optimizer = make([embedding.weight, loss.scale])
            speedtorch.attach(optimizer, embedding)
            embedding.load_state_dict(model_state)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        loss(embedding(ids)).backward()
        optimizer.step()
    embedding.flush()
    fields = {name: embedding.trained_rows.table.field(name).clone() for name in probe.row_state}
    weight = embedding.state_dict()["weight"].clone()
    return Trained(weight, loss.scale.detach(), fields), probe.row_state


def assert_trains_as_plain(make: Make) -> dict[str, Tensor]:
    starts: dict[str, Tensor] = {}
    for all_first, resume_at in ((True, -1), (False, -1), (True, 4), (False, 6)):
        steps = batches(all_first=all_first)
        ours, starts = attached(make, steps, resume_at)
        expected = plain(make, steps, resume_at, starts)
        assert ours.fields.keys() == expected.fields.keys()
        for name, each in expected.fields.items():
            assert_same_bytes(ours.fields[name], each)
        assert_same_bytes(ours.weight, expected.weight)
        assert_same_bytes(ours.scale, expected.scale)
        assert not torch.equal(ours.weight, first_weight())
    return starts


def outcome(kind: type[optim.Optimizer], *, muon: bool = True) -> str:
    """ "trained" or the reason of its refusal; an assertion fails where it is neither."""
    make = maker(kind, muon=muon)
    embedding = speedtorch.Embedding.from_pretrained(first_weight(), freeze=False)
    try:
        optimizer = make([embedding.weight, Loss().scale])
    except RuntimeError as error:  # it copies the weight, which says what to use
        assert re.match(r"Embedding: float\(\) of its weight would need all", str(error)), error
        return str(error)
    try:
        speedtorch.attach(optimizer, embedding)
    except ValueError as error:
        assert re.match(rf"{kind.__name__} (cannot|needs)", str(error)), error
        assert list(embedding.table.fields) == ["weight"]
        assert embedding.trained_rows.state is None
        assert_same_bytes(embedding.state_dict()["weight"], first_weight())
        return str(error)
    assert_trains_as_plain(make)
    return "trained"


ALL = optimizers()


@pytest.mark.parametrize("name", ALL)
def test_it_trains_and_resumes_as_plain_or_is_refused_by_name(name: str) -> None:
    if name in LISTED:
        pytest.skip(LISTED[name])
    found = outcome(ALL[name])
    print(name, "->", found)
    assert found == "trained" or name not in MUST_TRAIN
    if ALL[name].__name__ in MUONS:
        print(name, "use_muon=False ->", outcome(ALL[name], muon=False))

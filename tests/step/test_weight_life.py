"""A weight outlives its module, and a table lives as long as its module or its weight."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import assert_same_bytes
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import speedtorch
from speedtorch.step import claimed_rows
from speedtorch.step.held_rows import HeldRows

ROWS, WIDTH = 12, 4
MODULES = [speedtorch.Embedding, speedtorch.EmbeddingBag]
IDS = torch.tensor([3, 1, 3, 11])


def first_rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def trained(make: Any, device: str, **settings: Any) -> Any:
    """A module after a step of SGD, whose rows are newer than the table's."""
    if make is speedtorch.EmbeddingBag:
        settings["mode"] = "sum"
    module = make(ROWS, WIDTH, _weight=first_rows(), device=device, **settings)
    sgd = optim.SGD(module.parameters(), lr=1.0)
    module(IDS[None].to(device)).sum().backward()
    sgd.step()
    return module


def after(steps: int) -> Tensor:
    """The rows after so many steps of SGD as trained() makes."""
    rows = first_rows()
    for _ in range(steps):
        rows -= torch.zeros_like(rows).index_add_(0, IDS, torch.ones(len(IDS), WIDTH))
    return rows


# ------------------------------------------------------------------------------------------------
# What it is without its module


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda weight: weight[IDS.to(weight.device)],
    "lookup": lambda weight: F.embedding(IDS.to(weight.device), weight),
    "all": lambda weight: weight.data[:],
    "clone": lambda weight: weight.detach().clone(),
    "numpy": lambda weight: torch.from_numpy(weight.data.cpu().numpy()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("make", MODULES)
def test_a_weight_without_its_module_has_the_tables_rows(
    device: str, make: Any, read: Callable[[Tensor], Tensor]
) -> None:
    weight = trained(make, device).weight
    assert weight.shape == (ROWS, WIDTH) and weight.numel() == ROWS * WIDTH
    assert weight.device.type == device and f"[{ROWS}, {WIDTH}]" in repr(weight)
    assert_same_bytes(read(weight).detach().cpu(), read(after(1)))
    assert_same_bytes(read(weight.data).detach().cpu(), read(after(1)))


@pytest.mark.parametrize("attached", [False, True], ids=["SGD", "Adam"])
def test_a_weight_without_its_module_is_trained(device: str, attached: bool) -> None:
    def made(of: Any) -> tuple[nn.Parameter, optim.Optimizer]:
        module = of(ROWS, WIDTH, _weight=first_rows().to(device if of is nn.Embedding else "cpu"))
        module = module.to(device)
        kind: Any = optim.SparseAdam if attached else optim.SGD
        optimizer = kind(list(module.parameters()), lr=0.1)
        if attached and of is not nn.Embedding:
            speedtorch.attach(optimizer, module)
        return module.weight, optimizer

    weights = []
    for of in (nn.Embedding, speedtorch.Embedding):
        weight, optimizer = made(of)
        for ids in (IDS, IDS - 1, IDS):
            found = F.embedding(ids.to(device), weight, sparse=attached and of is nn.Embedding)
            (found * 3).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(weight.data[:].cpu())
    torch.testing.assert_close(weights[1], weights[0])
    assert not torch.equal(weights[1], first_rows())


def test_a_gradient_from_before_the_module_went_is_stepped(device: str) -> None:
    module = speedtorch.Embedding(ROWS, WIDTH, _weight=first_rows(), device=device)
    loss, weight = module(IDS.to(device)).sum(), module.weight
    del module
    gc.collect()
    loss.backward()
    optim.SGD([weight], lr=1.0).step()
    assert_same_bytes(weight.data[:].cpu(), after(1))


def test_a_weight_of_a_module_that_is_gone_yields_to_another_module(device: str) -> None:
    table = speedtorch.HostTable(ROWS, WIDTH).fill_(1)
    weight = speedtorch.Embedding.from_pretrained(table, freeze=False, device=device).weight
    ids = IDS.to(device)
    weight[ids].sum().backward()
    optim.SGD([weight], lr=1.0).step()
    other = speedtorch.Embedding.from_pretrained(table, device=device)
    other.weight.requires_grad_(True)
    assert other(ids)[:, 0].tolist() == [-1, 0, -1, 0]
    for use in (lambda: weight[ids], lambda: weight.data.sum()):
        with pytest.raises(RuntimeError, match="another module has claimed the rows of the same"):
            use()
    assert weight.shape == (ROWS, WIDTH)


# ------------------------------------------------------------------------------------------------
# How long the table lives


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Nothing collects cycles: what they keep alive stays."""
    # The first call imports torch's compiler, which leaves frames of the call in cycles.
    optim.SGD([torch.ones(1)]).zero_grad()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class RaisingDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called in a user's mode")


class RaisingFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called in a user's mode")


def collected(values: Tensor) -> Tensor:
    gc.collect()
    return values + 1


class Collecting:
    """A sequence whose values, after its shape, torch.tensor() reads without tracing."""

    reads = 0

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: int) -> float:
        self.reads += 1
        if self.reads == 4:
            gc.collect()
        return [1.0, 2.0][place]


def collect_in(mode: Any) -> None:
    with mode:
        gc.collect()


COLLECTIONS: dict[str, Callable[[], object]] = {
    "fake tensors": lambda: collect_in(FakeTensorMode()),
    "dispatch mode": lambda: collect_in(RaisingDispatch()),
    "function mode": lambda: collect_in(RaisingFunctions()),
    "torch.jit.trace": lambda: torch.jit.trace(collected, torch.ones(1), check_trace=False),
    "constant": lambda: torch.tensor(Collecting()),
    "traced constant": lambda: torch.jit.trace(
        lambda x: x + torch.tensor(Collecting()), torch.ones(1), check_trace=False
    ),
    "make_fx": lambda: make_fx(collected, tracing_mode="symbolic")(torch.ones(1)),
    "vmap": lambda: torch.func.vmap(collected)(torch.ones(1)),
    "functionalize": lambda: torch.func.functionalize(collected)(torch.ones(1)),
    "inference mode": lambda: collect_in(torch.inference_mode()),
}


@pytest.mark.usefixtures("without_collector")
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize("collect", COLLECTIONS.values(), ids=COLLECTIONS)
def test_rows_that_the_garbage_collector_writes_back_in_any_mode_are_in_the_table(
    device: str, collect: Callable[[], object], prefetches: bool
) -> None:
    table = speedtorch.HostTable(ROWS, WIDTH).fill_(0)
    module = speedtorch.Embedding.from_pretrained(table, freeze=False, device=device)
    sgd = optim.SGD(module.parameters(), lr=1.0)
    batches = [torch.tensor([k, k + 1]) for k in range(3)]
    loop = iter(batches)
    if prefetches:
        loop = iter(speedtorch.prefetch(batches, module, ids=lambda batch: batch))
    module(next(loop)).sum().backward()
    sgd.step()
    cycle: list[Any] = [module, sgd, loop]
    cycle.append(cycle)
    del module, sgd, loop, cycle
    collect()
    assert table["weight"][:3, 0].tolist() == [-1, -1, 0]


@pytest.mark.usefixtures("without_collector")
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("ends", ["collected", "deleted", "weight deleted last"])
def test_rows_that_end_during_a_capture_are_written_back_after_it(
    device: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = speedtorch.HostTable(ROWS, WIDTH).fill_(0)
    module = speedtorch.Embedding.from_pretrained(table, freeze=False, device=device)
    sgd = optim.SGD(module.parameters(), lr=1.0)
    module(torch.tensor([0, 1], device=device)).sum().backward()
    sgd.step()
    loop = iter(speedtorch.prefetch([torch.tensor([2])] * 3, module, ids=lambda batch: batch))
    next(loop)
    kept = [module.weight] if ends == "weight deleted last" else []
    captured: list[Any] = []
    with monkeypatch.context() as capture:
        capture.setattr(HeldRows, "captures", lambda held: True)
        capture.setattr(HeldRows, "drop_prefetched", captured.append)
        capture.setattr(claimed_rows.ClaimedRows, "write_back", captured.append)
        if ends == "collected":
            module.itself = module
        del module, sgd, loop
        gc.collect()
        kept.clear()
    assert captured == []
    assert table["weight"][:3, 0].tolist() == [-1, -1, 0]
    rows = weakref.ref(speedtorch.Embedding(ROWS, WIDTH, device=device).trained_rows)
    assert rows() is None and claimed_rows._late == []


def with_optimizer(device: str, make: Any) -> list[Any]:
    module = trained(speedtorch.Embedding, device)
    optimizer = make(module.parameters(), lr=1.0)
    speedtorch.attach(optimizer, module)
    for batch in speedtorch.prefetch([IDS.to(device)] * 3, module, ids=lambda batch: batch):
        module(batch).sum().backward()
        optimizer.step()
    return [module, optimizer]


def with_capacity(device: str) -> list[Any]:
    module = trained(speedtorch.Embedding, device, capacity=3, padding_idx=0)
    return [module, module.weight]


def with_weight(device: str) -> list[Any]:
    module = trained(speedtorch.EmbeddingBag, device)
    return [module, module.weight, module.weight.data, module.weight.data.detach()]


def with_graph(device: str) -> list[Any]:
    module = trained(speedtorch.Embedding, device)
    return [module, module(IDS.to(device)).sum()]


KEEPERS: dict[str, Callable[[str], list[Any]]] = {
    "untouched": lambda device: [speedtorch.Embedding(ROWS, WIDTH, device=device)],
    "stepped": lambda device: [trained(speedtorch.Embedding, device)],
    "optimizer": lambda device: with_optimizer(device, optim.SGD),
    "state": lambda device: with_optimizer(device, optim.Adam),
    "capacity": with_capacity,
    "weight": with_weight,
    "graph": with_graph,
}


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("first", [0, -1], ids=["module-first", "module-last"])
@pytest.mark.parametrize("keepers", KEEPERS.values(), ids=KEEPERS)
def test_a_table_goes_at_once_with_its_module_and_its_weight(
    device: str, keepers: Callable[[str], list[Any]], first: int
) -> None:
    kept = keepers(device)
    table = weakref.ref(kept[0].table)
    while kept:
        assert table() is not None
        kept.pop(first)
    assert table() is None


@pytest.mark.usefixtures("without_collector")
def test_what_a_weight_was_trained_to_is_in_the_table_when_it_goes(device: str) -> None:
    """Also through memory that the caller has kept since before."""
    table = speedtorch.HostTable(ROWS, WIDTH, memory="plain" if device == "cpu" else "auto")
    table["weight"].copy_(first_rows())
    view = table["weight"]
    module = speedtorch.Embedding.from_pretrained(table, freeze=False, device=device)
    weight = module.weight
    sgd = optim.SGD([weight], lr=1.0)
    del module
    for _ in range(2):
        weight[IDS.to(device)].sum().backward()
        sgd.step()
        sgd.zero_grad()
    del weight
    assert not torch.equal(view, after(2))  # the optimizer has it yet, and the rows of the step
    del sgd
    assert_same_bytes(view, after(2))
    assert table.holder is None


# A step's frame keeps those of its callers, and what these have: they get the module in a list.
def not_attached(held: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="Call speedtorch.attach"):
        optim.Adam(held[0].parameters()).step()


def left_half_looked_up(held: list[Any]) -> None:
    optimizer = optim.SGD(held[0].parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    ids = [torch.tensor([each], device=held[0].weight.device) for each in (2, 5)]
    held[0].announce(*ids)
    held[0](ids[0]).sum().backward()
    with pytest.raises(RuntimeError, match="No row was stepped"):
        optimizer.step()


def left_by_an_exception(held: list[Any]) -> None:
    def closure() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optim.SGD(held[0].parameters(), lr=0.1).step(closure)


@pytest.mark.parametrize(
    "refused", [not_attached, left_half_looked_up, left_by_an_exception], ids=lambda f: f.__name__
)
def test_a_step_that_failed_disturbs_no_other_model_once_its_own_is_gone(
    device: str, refused: Callable[[Any], None]
) -> None:
    held = [speedtorch.Embedding(ROWS, WIDTH, device=device)]
    held[0](IDS.to(device)).sum().backward()
    refused(held)
    gone = weakref.ref(held.pop())
    other = trained(speedtorch.Embedding, device)  # its step ends the one before
    gc.collect()
    assert gone() is None
    assert_same_bytes(other.state_dict()["weight"].cpu(), after(1))

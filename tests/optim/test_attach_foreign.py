"""attach with optimizers that other libraries wrap, or that save and load in a way of their own."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from probed_optimizers import Boxed, Own
from reference import assert_same_bytes, assert_same_content
from test_attach import EVERY, IDS, Model, pair, saved, step, train
from test_attach_changes import assert_same_rows
from torch import Tensor, nn, optim

import speedtorch


class AcceleratedOptimizer(optim.Optimizer):
    """As accelerate's: of torch's kind, without its constructor, and everything is passed on."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class LightningOptimizer:
    """As Lightning's: takes on the class of what it wraps."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type(
            "Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {}
        )

    @property
    def optimizer(self) -> optim.Optimizer:
        return self._optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self._optimizer.step(closure)


class _FabricOptimizer(LightningOptimizer):
    """As Fabric's, which is made the same way."""


@pytest.mark.parametrize("wrap", [AcceleratedOptimizer, LightningOptimizer, _FabricOptimizer])
def test_an_optimizer_that_a_library_wraps_is_attached_and_detached(wrap: Any) -> None:
    (theirs, their_adam), (ours, adam) = pair()
    speedtorch.detach(adam)
    wrapped = wrap(adam)
    speedtorch.attach(wrapped, ours)
    with pytest.raises(ValueError, match="Adam is attached already"):
        speedtorch.attach(adam, ours)
    for _ in range(3):
        step(theirs, their_adam)
        step(ours, wrapped)
    assert_same_rows(ours, theirs)
    assert_same_content(wrapped.state_dict(), their_adam.state_dict())
    speedtorch.detach(wrapped)
    with pytest.raises(ValueError, match="Adam is not attached"):
        speedtorch.detach(adam)


class KeyedOptimizer(optim.Optimizer):
    """As torchrec's: reads state by names itself, and loads by writing into what is there."""

    def __init__(self, model: nn.Module) -> None:
        self.params = dict(model.named_parameters())
        self._optimizer = optim.Adam(self.params.values(), lr=0.1)
        self.state, self.param_groups = self._optimizer.state, self._optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        names = {parameter: name for name, parameter in self.params.items()}
        return {"state": {names[each]: dict(kept) for each, kept in self.state.items()}}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert self.state.keys() == {self.params[name] for name in state_dict["state"]}
        for name, entries in state_dict["state"].items():
            for key, value in entries.items():
                self.state[self.params[name]][key].copy_(value)


class CombinedOptimizer(KeyedOptimizer):
    """As torchrec's, whose step torch's hooks are called around, too."""

    def __init__(self, *optimizers: KeyedOptimizer) -> None:
        self.optimizers = self._optims = [("", optimizer) for optimizer in optimizers]
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self._patch_step_function()

    @property
    def params(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: param for _, one in self._optims for name, param in one.params.items()}

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {each: kept for _, one in self._optims for each, kept in one.state.items()}

    @property
    def param_groups(self) -> list[Any]:  # type: ignore[override]
        return [group for _, one in self._optims for group in one.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, each in self._optims:
            each.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _, each in self._optims:
            each.step(closure)


@pytest.mark.parametrize("combines", [False, True])
def test_an_optimizer_that_knows_state_by_names_knows_that_of_all_rows(combines: bool) -> None:
    def wrap(model: Model) -> Any:
        if not combines:
            return KeyedOptimizer(model)
        return CombinedOptimizer(
            *(KeyedOptimizer(nn.ModuleDict(dict([child]))) for child in model.named_children())
        )

    theirs, ours, resumed = Model(nn.Embedding), Model(), Model()
    ours.load_state_dict(theirs.state_dict())
    optimizers = [wrap(module) for module in (theirs, ours, resumed)]
    for model, optimizer in zip((ours, resumed), optimizers[1:], strict=True):
        speedtorch.attach(optimizer, model)
        with pytest.raises(ValueError, match="Adam is attached already"):
            speedtorch.attach(optimizer, model)
        with pytest.raises(TypeError, match="wrapper of an attached optimizer cannot be copied"):
            copy.deepcopy(optimizer)
    for _ in range(2):
        step(theirs, optimizers[0])
        step(ours, optimizers[1])
    assert_same_content(optimizers[1].state_dict(), optimizers[0].state_dict())
    step(resumed, optimizers[2], IDS)
    state = copy.deepcopy((ours.state_dict(), optimizers[1].state_dict()))
    resumed.load_state_dict(state[0])
    optimizers[2].load_state_dict(state[1])
    for model, optimizer in zip((theirs, resumed), optimizers[::2], strict=True):
        step(model, optimizer)
    assert_same_rows(resumed, theirs)
    assert_same_content(optimizers[2].state_dict(), optimizers[0].state_dict())
    speedtorch.detach(optimizers[2])
    with pytest.raises(ValueError, match="Adam is not attached"):
        speedtorch.detach(optimizers[2])


def test_other_wrappers_are_refused_by_name_and_nothing_changes() -> None:
    class Lookahead(AcceleratedOptimizer):
        pass

    class Engine:
        def __init__(self, optimizer: optim.Optimizer) -> None:
            self.optimizer = optimizer

    Lookahead.__mro__[1].__name__ = "Delegating"
    try:
        (_, _), (ours, adam) = pair()
        speedtorch.detach(adam)
        with pytest.raises(ValueError, match=r"Lookahead cannot be used: it wraps .*\(Adam, its"):
            speedtorch.attach(Lookahead(adam), ours)
        with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got Engine"):
            speedtorch.attach(Engine(adam), ours)  # type: ignore[arg-type]
    finally:
        AcceleratedOptimizer.__name__ = "AcceleratedOptimizer"
    speedtorch.attach(adam, ours)
    step(ours, adam)


def test_an_optimizer_that_loads_in_its_own_way_goes_on_with_the_rows_state() -> None:
    (theirs, their_opt), (ours, our_opt) = made = pair(Boxed)
    train(made)
    model_state, state = saved(ours, our_opt)
    step(theirs, their_opt)
    model = Model()
    optimizer = Boxed(model.parameters(), lr=0.5)
    speedtorch.attach(optimizer, model)
    step(model, optimizer, IDS)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1
    step(model, optimizer)
    assert_same_rows(model, theirs)
    speedtorch.detach(optimizer)
    assert "load_state_dict" not in vars(optimizer)


def test_what_it_loads_in_its_own_way_ends_what_was_announced() -> None:
    _, (ours, optimizer) = models = pair(Boxed)
    train(models)
    state = copy.deepcopy(optimizer.state_dict())
    ours.words.announce(IDS, EVERY)
    optimizer.load_state_dict(state)
    train(models, ids=IDS)
    ids, _ = IDS.sort()
    theirs = models[0][0]
    assert_same_bytes(ours.words.weight[ids], theirs.words.weight[ids])


def test_a_copy_of_an_optimizer_loads_for_itself() -> None:
    (_, _), (ours, optimizer) = pair(Boxed)
    step(ours, optimizer)
    expected = copy.deepcopy(optimizer.state_dict())
    copied = copy.deepcopy(optimizer)
    assert "load_state_dict" not in vars(copied)
    copied.load_state_dict(optimizer.state_dict() | {"state": {}})
    assert_same_content(optimizer.state_dict(), expected)


def test_the_state_of_a_table_whose_module_is_gone_is_still_that_of_all_rows() -> None:
    def trained() -> optim.Optimizer:
        embedding = speedtorch.Embedding(20, 4)
        adam = optim.Adam(embedding.parameters())
        speedtorch.attach(adam, embedding)
        step(nn.Sequential(embedding), adam, IDS)
        return adam

    assert trained().state_dict()["state"][0]["exp_avg"].shape == (20, 4)


class Wide(Own):
    """Keeps its mean in double precision, and a count for all parameters beside their state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.state["steps"] = 0  # type: ignore[index, assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["steps"] += 1  # type: ignore[index, operator]
        super().step(closure)

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "mean" not in state:
            state["mean"] = torch.zeros_like(parameter, dtype=torch.float64)
        state["mean"].lerp_(gradient.double(), 1 / self.state["steps"])  # type: ignore[index]
        parameter.sub_(state["mean"], alpha=group["lr"])


def test_state_of_another_dtype_is_saved_and_goes_on() -> None:
    (theirs, their_opt), (ours, our_opt) = made = pair(Wide)
    train(made)
    model_state, state = saved(ours, our_opt)
    assert state["state"][0]["mean"].dtype == torch.float64
    model = Model()
    optimizer = Wide(model.parameters())
    speedtorch.attach(optimizer, model)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    step(ours, our_opt)
    step(theirs, their_opt)
    assert_same_rows(ours, theirs)
    # torch gives the dense parameters' state the dtype of the parameters when it loads.
    for each in (optimizer.state[model.out.weight], optimizer.state[model.out.bias]):
        each["mean"] = each["mean"].double()
    step(model, optimizer)
    assert_same_bytes(model.state_dict()["words.weight"], ours.state_dict()["words.weight"])


def test_an_optimizer_whose_settings_refer_to_it_goes_and_is_detached() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1, momentum=0.9)
            self.defaults["scale"] = self.param_groups[0]["scale"] = self.scaled

        def scaled(self, gradient: Tensor) -> Tensor:
            return gradient

    model = Model()
    optimizer = Own(model.parameters())
    speedtorch.attach(optimizer, model)
    step(model, optimizer)
    del optimizer
    gc.collect()
    speedtorch.attach(torch.optim.Adam(model.parameters()), model)
    assert set(model.words.table.fields) == {"weight", "exp_avg", "exp_avg_sq"}


class Closed(optim.Adam):
    """Its state_dict has none of the entries that hooks complete."""

    def state_dict(self) -> dict[str, Any]:
        return {"moments": [dict(value) for value in self.state.values()]}


class Masked(Own):
    """Only its constructor makes state of all rows, at random."""

    def __init__(self, params: Any, random: Callable[[Tensor], Tensor]) -> None:
        super().__init__(params)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mask"] = random(parameter) < 0.5

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        mask = self.state[parameter].get("mask", 1.0)
        parameter.sub_(gradient * mask, alpha=group["lr"])


def adam_with(model: Model, **kept: Any) -> optim.Optimizer:
    optimizer = optim.Adam(model.parameters())
    optimizer.state[model.words.weight] = kept
    return optimizer


SOME_ROWS = {"exp_avg": torch.rand(3, 4), "exp_avg_sq": torch.rand(3, 4)}
OF_ALL_ROWS = "Masked cannot be used: its constructor makes the state 'mask' of all rows"
REFUSED: list[tuple[Callable[[Model], optim.Optimizer], str]] = [
    (lambda model: optim.Muon(model.words.parameters()), "Muon cannot"),
    (lambda model: optim.Adafactor(model.parameters()), "Adafactor cannot"),
    (lambda model: optim.LBFGS(model.parameters()), "LBFGS cannot"),
    (
        lambda model: Closed(model.parameters()),
        "Closed cannot be used: its own state_dict.* does not",
    ),
    (lambda model: Masked(model.parameters(), torch.rand_like), OF_ALL_ROWS),
    (lambda model: Masked(model.parameters(), lambda each: torch.rand(each.shape)), OF_ALL_ROWS),
    (
        lambda model: adam_with(model, step=3.0, **SOME_ROWS),
        "Adam has state of 3 rows, but Embedding has 20 rows. Build a new optimizer",
    ),
    (
        lambda model: adam_with(model, step=torch.tensor(3.0)),
        "Adam has the state 'step' of Embedding from earlier steps, but no per-row state",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_attach_cannot_use_is_refused_by_name_and_nothing_changes(
    make: Callable[[Model], optim.Optimizer], message: str
) -> None:
    model = Model()
    before, optimizer = model.words.table["weight"].clone(), make(model)
    with pytest.raises(ValueError, match=message):
        speedtorch.attach(optimizer, model)
    assert list(model.words.table.fields) == ["weight"]
    assert_same_bytes(model.words.table["weight"], before)
    assert not optimizer._optimizer_state_dict_post_hooks


class RowWise(Own):
    """Scales each row by its gradients so far, or each element where the gradient is dense.

    As dlrm's RWSAdagrad it counts in its constructor, and a flag says whether there is more state.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.is_begun = False
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.is_begun = True

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, name = self.state[parameter], "rows" if gradient.is_sparse else "elements"
        if not self.is_begun:
            made = parameter.new_zeros(len(parameter)) if name == "rows" else 0 * parameter
            state[name] = made
        state["step"] += 1
        if name == "elements":
            state[name] += gradient.square()
            parameter -= group["lr"] * gradient / (state[name].sqrt() + 1e-6)
            return
        gradient = gradient.coalesce()
        (rows,), values = gradient.indices(), gradient.values()
        state[name][rows] += values.square().mean(1)
        parameter[rows] -= group["lr"] * values / (state[name][rows].sqrt()[:, None] + 1e-6)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_a_flag_beside_the_state_goes_with_it(sparse: bool) -> None:
    theirs = nn.EmbeddingBag(20, 4, mode="sum", sparse=sparse)
    ours = speedtorch.EmbeddingBag.from_module(theirs)
    models = [(module, RowWise(module.parameters())) for module in (theirs, ours)]
    speedtorch.attach(models[1][1], ours)
    for ids in (EVERY[None], IDS[None]):
        for model, optimizer in models:
            step(model, optimizer, ids if sparse else EVERY[None])
    assert_same_bytes(ours.state_dict()["weight"], theirs.weight.detach())
    expected, found = (optimizer.state_dict()["state"] for _, optimizer in models)
    assert_same_content(found, expected)
    assert ("rows" in found[0]) is sparse


def test_loading_what_the_next_step_would_overwrite_is_refused() -> None:
    (theirs, their_opt), (ours, our_opt) = made = pair(RowWise)
    for model, optimizer in made:
        step(model, optimizer)
    model_state, state = saved(ours, our_opt)
    model = Model()
    optimizer = RowWise(model.parameters())
    speedtorch.attach(optimizer, model)
    model.load_state_dict(model_state)
    message = "RowWise: the next step would overwrite.*'is_begun' is False. Set it to True"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert optimizer.state_dict()["state"][0]["step"] == 0
    optimizer.is_begun = True
    optimizer.load_state_dict(state)
    step(model, optimizer)
    step(theirs, their_opt)
    assert_same_rows(model, theirs)

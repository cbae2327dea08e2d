"""Which optimizers the probe refuses, by name and with the reason."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from probed_optimizers import Make, Noisy, Own, probed
from torch import Tensor, nn, optim

from speedtorch.optim.probe import probe_optimizer


class TrustRatio(Own):
    """Scales each step by the norm of the whole parameter, as LAMB and LARS do."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(gradient * (parameter.norm() / gradient.norm()), alpha=group["lr"])


class Anchored(Own):
    """Remembers where each row started."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "anchor" not in state:
            state["anchor"] = parameter.clone()
        parameter.sub_(gradient, alpha=group["lr"]).lerp_(state["anchor"], 0.01)


class HiddenDict(Own):
    """Fills a dict that its state holds, but not through its state."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if parameter not in self.state:
            hidden = self.state[parameter] = {}
            hidden["mean"] = torch.zeros_like(parameter)
        parameter.sub_(self.state[parameter]["mean"].add_(gradient), alpha=group["lr"])


class OutsideState(Own):
    """Keeps a buffer of the parameter's shape in an attribute of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.buffers: dict[Tensor, Tensor] = {}

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        buffer = self.buffers.setdefault(parameter, torch.zeros_like(parameter))
        parameter.sub_(buffer.add_(gradient), alpha=group["lr"])


class LateState(Own):
    """Makes a buffer in its third step."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        if state["step"] >= 3 and "late" not in state:
            state["late"] = torch.zeros_like(parameter)
        parameter.sub_(gradient, alpha=group["lr"])


class MadeSecond(Own):
    """Says at once what it makes out of the second step's gradient."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "made" not in state:
            state["made"] = None
        elif state["made"] is None:
            state["made"] = torch.zeros_like(parameter)
        else:
            state["made"] += 1
        parameter.sub_(gradient, alpha=group["lr"])


class Forgetful(Own):
    """Replaces a row state by its sum after the first step."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "mean" not in state:
            state["mean"] = torch.zeros_like(parameter)
        elif len(state["mean"]) == len(parameter):
            state["mean"] = state["mean"].sum()
        parameter.sub_(gradient, alpha=group["lr"])


class Picky(Own):
    """Takes no gradient at all."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise RuntimeError(f"no {gradient.layout} please")


class LowRank(Own):
    """Counts in whole numbers how many rows went along with each."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "company" not in state:
            state["company"] = torch.zeros_like(parameter, dtype=torch.int64)
        state["company"] += len(parameter)
        parameter.sub_(gradient, alpha=group["lr"])


class CountsFromOne(Own):
    """Assigns its count when it has stepped already."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        parameter.sub_(gradient, alpha=group["lr"])
        state["step"] = state["step"] + 1 if "step" in state else 1


class FirstGradient(Own):
    """Follows the change of the gradient, as Adan does: the first one has no predecessor."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "before" not in state:
            state["mean"] = torch.zeros_like(parameter)
            state["before"] = gradient.clone()
        state["mean"].lerp_(2 * gradient - state["before"], 0.1)
        state["before"].copy_(gradient)
        parameter.sub_(state["mean"], alpha=group["lr"])


class SharedMean(Own):
    """Scales by a mean over all gradients so far, which it keeps where `place` says."""

    place = "state"

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.mean = 0.0
        self.param_groups[0]["mean"] = 0.0

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        places = {"state": self.state[parameter], "group": group, "attribute": vars(self)}
        kept = places[self.place]
        kept["mean"] = kept.get("mean", 0.0) + float(gradient.abs().mean())
        parameter.sub_(gradient, alpha=1e-6 * group["lr"] * kept["mean"])


class SharedInGroup(SharedMean):
    place = "group"


class SharedInAttribute(SharedMean):
    place = "attribute"


class ByPlace(Own):
    """Moves a row more the later it stands among the rows."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        first = gradient.abs().argmax() if len(gradient) < 3 else 0
        scale = torch.ones(len(gradient), 1)
        scale[int(first) % len(gradient)] = 2.0
        parameter.sub_(gradient * scale, alpha=group["lr"])


class Momenta(Own):
    """Keeps several momenta in one entry of its state, as AggMo and AdaShift do."""

    kind: Any = dict

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momenta" not in state:
            state["momenta"] = self.kind()
            entries = [(beta, torch.zeros_like(parameter)) for beta in (0.0, 0.9)]
            getattr(state["momenta"], "update" if self.kind is dict else "extend")(entries)
        momenta = state["momenta"]
        for beta, each in momenta.items() if self.kind is dict else momenta:
            parameter.sub_(each.mul_(beta).add_(gradient), alpha=group["lr"])


class MomentaInDeque(Momenta):
    kind = deque


class Transposed(Own):
    """Keeps its rows in another dimension than the first."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "both" not in state:
            state["both"] = torch.zeros(2, *parameter.shape)
        parameter.sub_(state["both"].add_(gradient)[0], alpha=group["lr"])


class HalfWhereLarge(Own):
    """Keeps fewer bits of large parameters, as 8-bit optimizers do."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "mean" not in state:
            large = parameter.numel() >= 4096 and parameter.numel() % 256 == 0
            state["mean"] = torch.zeros_like(parameter, dtype=torch.half if large else None)
        parameter.sub_(state["mean"].lerp_(gradient.to(state["mean"]), 0.1), alpha=group["lr"])


class InBlocks(Own):
    """Keeps a number for each block of elements."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "largest" not in state:
            state["largest"] = torch.zeros(parameter.numel() // 7)
        parameter.sub_(gradient, alpha=group["lr"])


class SmallOnly(Own):
    """Steps small parameters only."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if parameter.numel() > 1000:
            raise ValueError("too large")
        parameter.sub_(gradient, alpha=group["lr"])


class Marked(Tensor):
    """A tensor that keeps its numbers in another way."""

    def clone(self, *, memory_format: torch.memory_format | None = None) -> Marked:
        raise NotImplementedError("no clone")


class KeepsMarked(Own):
    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["mean"] = state.get("mean", torch.zeros_like(parameter).as_subclass(Marked))
        parameter.sub_(gradient, alpha=group["lr"])


class NamesItWeight(Own):
    """Keeps a state of a name that the rows themselves have."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "weight" not in state:
            state["weight"] = torch.zeros_like(parameter)
        parameter.sub_(state["weight"].lerp_(gradient, 0.1), alpha=group["lr"])


class OfOneLength(Own):
    """Steps as many rows as it has met first."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if self.state[parameter].setdefault("rows", len(parameter)) != len(parameter):
            raise ValueError("another number of rows")
        parameter.sub_(gradient, alpha=group["lr"])


class LargerFirst(Own):
    """Moves further where it makes its state."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        scale = 1.0 if "mean" in state else 2.0
        if "mean" not in state:
            state["mean"] = torch.zeros_like(parameter)
        parameter.sub_(state["mean"].lerp_(gradient, 0.1), alpha=scale * group["lr"])


class NoneWhereLarge(Own):
    """Keeps nothing of large parameters."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "mean" not in state:
            state["mean"] = torch.zeros_like(parameter) if parameter.numel() < 4096 else None
        parameter.sub_(gradient, alpha=group["lr"])


class TrainsNothing(Own):
    """Steps a copy of the rows."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.clone().sub_(gradient, alpha=group["lr"])


class Wrapper(Own):
    """Steps another optimizer, and keeps slow rows of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = optim.Adam(params)


NOT_SEPARATE = "does not treat rows separately"
REFUSED = [
    (optim.Muon, rf"Muon cannot be used: it {NOT_SEPARATE} \(its rows differ"),
    (lambda p: optim.Muon(p, lr=0.0), f"Muon cannot be used: it {NOT_SEPARATE}"),
    (optim.Adafactor, f"Adafactor cannot be used: it {NOT_SEPARATE}"),
    (optim.LBFGS, r"LBFGS cannot step rows separately: its step\(\) needs"),
    (TrustRatio, f"TrustRatio cannot be used: it {NOT_SEPARATE}"),
    (Noisy, f"Noisy cannot be used: it {NOT_SEPARATE}"),
    (LowRank, rf"LowRank cannot be used: it {NOT_SEPARATE} \(its state 'company'"),
    (Anchored, "Anchored cannot be used: its state 'anchor' starts from the row's own value"),
    (HiddenDict, "HiddenDict cannot be used: its step replaces optimizer.state"),
    (OutsideState, "OutsideState cannot be used: it keeps one 'buffers' for all rows"),
    (LateState, "LateState cannot be used: its first step does not create the state 'late'"),
    (MadeSecond, "MadeSecond cannot be used: .*'made'"),
    (CountsFromOne, "CountsFromOne cannot be used: its state 'step' is first assigned after an"),
    (FirstGradient, "FirstGradient cannot be used: its state 'before' starts from the first"),
    (SharedMean, "SharedMean cannot be used: it keeps one 'mean' for all rows, whose value"),
    (SharedInGroup, "SharedInGroup cannot be used: it keeps one 'mean' for all rows"),
    (SharedInAttribute, "SharedInAttribute cannot be used: it keeps one 'mean' for all rows"),
    (ByPlace, f"ByPlace cannot be used: it {NOT_SEPARATE}"),
    (Momenta, "Momenta cannot be used: its state 'momenta' is a dict of tensors of all rows"),
    (MomentaInDeque, "MomentaInDeque cannot be used: its state 'momenta' is a deque of tensors"),
    (Transposed, r"Transposed .* its state 'both' is a tensor \[2, 19, 5\] whose rows are not its"),
    (
        HalfWhereLarge,
        r"its state 'mean' is a Tensor of torch.float32, \[5\] a row with few rows and"
        r" a Tensor of torch.float16, \[5\] a row with many rows",
    ),
    (InBlocks, r"InBlocks cannot be used: its state 'largest' is of size \[13\] for 19 rows and"),
    (SmallOnly, r"SmallOnly cannot be used: its step fails with many rows \(too large"),
    (KeepsMarked, "KeepsMarked cannot be used: its state 'mean' is a Marked. Supported are"),
    (NamesItWeight, "NamesItWeight cannot be used: a state name must be .*, got 'weight'"),
    (
        OfOneLength,
        r"OfOneLength .* its step fails in a trial of several steps and numbers of rows \(another",
    ),
    (LargerFirst, "LargerFirst cannot be used: its rows after first steps differ from its rows"),
    (NoneWhereLarge, r"'mean' is a Tensor .* with few rows and a NoneType with many"),
    (TrainsNothing, "TrainsNothing cannot be used: 8 steps with random gradients change no row"),
    (Wrapper, r"Wrapper cannot be used: it wraps another optimizer \(Adam, its 'inner'\)"),
    (Forgetful, "Forgetful cannot be used: a step removes the rows of its state 'mean'"),
    (Picky, r"Picky cannot be used: .*\(no torch.strided please; no torch.sparse_coo please\)"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_does_not_treat_rows_separately_is_refused_by_name(make: Make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        probed(make)


def test_rows_that_share_a_step_are_found_out_in_half_precision_too() -> None:
    with pytest.raises(ValueError, match=NOT_SEPARATE):
        probed(TrustRatio, 4, 3, dtype=torch.bfloat16)


def test_a_parameter_that_the_optimizer_does_not_hold_is_refused() -> None:
    optimizer = optim.Adam([nn.Parameter(torch.ones(2, 3))])
    with pytest.raises(ValueError, match=r"Adam does not hold this parameter of shape \[4, 3\]"):
        probe_optimizer(optimizer, nn.Parameter(torch.ones(4, 3)))


def test_a_parameter_without_dimensions_is_refused() -> None:
    parameter = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="parameter: expected at least one dimension"):
        probe_optimizer(optim.Adam([parameter]), parameter)

"""plan_fault says why a block cannot hold a plan's rows; spoil_plan marks a plan as bad."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speedtorch.ops.functions import _ops
from speedtorch.plan.fixed_size_batch import BAD_IDS, TOO_MANY
from speedtorch.step.fixed_blocks import OTHER_MODULE, OVER_SHARE, REFUSED

CAPACITY = 5
FAULTS = [BAD_IDS, TOO_MANY, OVER_SHARE, OTHER_MODULE, REFUSED]


def plan_fault(bad: int, distinct: int) -> int:
    """The reference."""
    return BAD_IDS if bad else TOO_MANY * (distinct > CAPACITY)


def status_of(bad: int, distinct: int, device: str, fields: int) -> Tensor:
    """Of a plan; one that was compared with held rows has 12 fields."""
    return torch.tensor([bad, 3, -7, distinct, 100, 9, 9, 0, 1, 2, 3, 4][:fields], device=device)


@pytest.mark.parametrize("fields", [8, 12])
@pytest.mark.parametrize("distinct", [0, CAPACITY, CAPACITY + 1])
@pytest.mark.parametrize("bad", [0, 2])
def test_they_are_the_reference(bad: int, distinct: int, fields: int, device: str) -> None:
    status, own = status_of(bad, distinct, device, fields), plan_fault(bad, distinct)
    fault = _ops.plan_fault(status, CAPACITY)
    assert (fault.dtype, fault.device.type, fault.tolist()) == (torch.int64, device, [own])
    for agreed in [0, *FAULTS]:
        spoiled, expected = status.clone(), status.tolist()
        _ops.spoil_plan(spoiled, CAPACITY, torch.tensor([agreed], device=device))
        if agreed > own:
            expected[:2] = [1, -agreed]
        assert spoiled.tolist() == expected
    assert status.tolist() == status_of(bad, distinct, "cpu", fields).tolist()

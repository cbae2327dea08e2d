"""Ids on a GPU: a plan is used again if their tensors are known not to have changed, unread.

Ids on the CPU pass for such here, so that these tests need no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_memos import CPU, Made, check, made, memo
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from speedtorch.legacy import batch_ids, plan_memo
from speedtorch.legacy.plan_memo import PlanMemo

__all__ = ["made", "memo"]

pytestmark = pytest.mark.usefixtures("gpu_ids")


class NoReads(TorchDispatchMode):
    """Fails where a tensor's content would come to the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(read in name for read in ("_local_scalar", "equal", "aminmax")), name
        return func(*args, **(kwargs or {}))


@pytest.fixture
def gpu_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor of ids passes for one on a GPU; whether ids are good is not looked at."""
    monkeypatch.setattr(batch_ids, "on_gpu", lambda ids: isinstance(ids, Tensor))
    monkeypatch.setattr(PlanMemo, "_can_plan", lambda memo, index: True)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda ids: ids.__setitem__(0, 1),
    "add": lambda ids: ids.add_(1),
    "view": lambda ids: ids[1:].fill_(1),
    "detached": lambda ids: ids.detach().copy_(torch.tensor([1, 1, 1])),
    "numbers of the same value": lambda ids: ids.copy_(ids.clone()),
    "other memory": lambda ids: setattr(ids, "data", torch.tensor([1, 1, 1])),
    "resize": lambda ids: ids.resize_(2),
    "other shape": lambda ids: setattr(ids, "data", ids.data[:2]),
    "other layout": lambda ids: setattr(ids, "data", ids.data.as_strided((3,), (0,))),
    "other dtype": lambda ids: setattr(ids, "data", ids.data.view(torch.int32)[:3]),
    "other place": lambda ids: setattr(ids, "data", torch.tensor([1, 1, 1, 1])[1:]),
}


def test_the_same_tensors_share_a_plan(memo: PlanMemo, made: Made) -> None:
    positives, negatives = torch.tensor([[7, 2]]), torch.tensor([7])
    first = memo.find(positives, negatives, CPU, "a", 0)
    check(first, [7, 2, 7])
    with NoReads():
        for asker, step in (("b", 0), ("a", 1), ("b", 1), ("c", 1)):
            assert memo.find(positives, negatives, CPU, asker, step)[1] is first[1]
    assert len(made) == 1


def test_an_earlier_step_makes_a_new_plan_that_all_share(memo: PlanMemo, made: Made) -> None:
    ids = torch.tensor([7, 2])
    for value in (3, 4, 5):
        ids.data[0] = value  # no new version, as if a replayed graph had written it
        steps = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
        plans = [memo.find(ids, None, CPU, *step) for step in steps]
        check(plans[0], [value, 2])
        assert all(plan is plans[0][1] for _, plan in plans)
    assert made == [[3, 2], [4, 2], [5, 2]]
    assert len(memo) == 1


@pytest.mark.parametrize("steps", [(0, 0), (1, 0), (1, 1)])
def test_a_step_that_does_not_follow_makes_a_new_plan(
    memo: PlanMemo, steps: tuple[int, int]
) -> None:
    ids = torch.tensor([7, 2])
    memo.find(ids, None, CPU, "b", 0)
    memo.find(ids, None, CPU, "a", steps[0])
    ids.data[0] = 1
    check(memo.find(ids, None, CPU, "a", steps[1]), [1, 2])


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_tensor_that_was_written_to_gets_a_new_plan(
    memo: PlanMemo, write: Any, mode: Any
) -> None:
    ids = torch.tensor([7, 2, 7])
    old = memo.find(ids, None, CPU, "a", 0)[1]
    with mode():
        write(ids)
    index, plan = memo.find(ids, None, CPU, "a", 1)
    assert plan is not old
    check((index, plan), ids.tolist())


def test_replaced_memory_of_known_ids_is_kept_with_the_plan(memo: PlanMemo) -> None:
    ids = torch.tensor([7, 2])
    memo.find(ids, torch.tensor([1]), CPU, "a", 0)
    left = StorageWeakRef(ids.untyped_storage())
    ids.data = torch.tensor([3, 4])
    assert not left.expired()
    for row in (3, 4):
        memo.find([row], None, CPU, "a", 0)
    assert left.expired()


def test_another_tensor_with_the_same_ids_gets_its_own_plan(memo: PlanMemo, made: Made) -> None:
    ids = torch.tensor([7, 2, 7])
    for step, given in enumerate((ids, ids[:], ids.clone())):
        memo.find(given, None, CPU, "a", step)
    memo.find(ids[:2], ids[2:], CPU, "a", 3)
    memo.find([7, 2, 7], None, CPU, "a", 4)
    assert len(made) == 5


def test_an_inference_tensor_is_never_recognised(memo: PlanMemo, made: Made) -> None:
    with torch.inference_mode():
        ids = torch.tensor([7, 2])
    for step in (0, 1):
        check(memo.find(ids, None, CPU, "a", step), [7, 2])
        check(memo.find(torch.tensor([1]), ids, CPU, "a", step), [1, 7, 2])
    assert len(made) == 4
    assert len(memo) == 0


def test_a_batch_that_another_stream_made_is_not_used(
    memo: PlanMemo, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([7, 2])
    plans = []
    for step, stream in enumerate([1, 2, 1, 2]):
        monkeypatch.setattr(plan_memo, "_stream", lambda device, stream=stream: stream)
        plans.append(memo.find(ids, None, CPU, "a", step)[1])
    assert len(made) == 2
    assert plans[0] is plans[2]
    assert plans[1] is plans[3]

"""Ids that are recognised when they come again."""

import pytest
import torch
from conftest import NEEDS_GPU

from speedtorch.plan.planned_batch import SeenIds, SeenTensors

CPU = torch.device("cpu")


def three() -> list[torch.Tensor]:
    return [torch.arange(4) + k for k in range(3)]


@pytest.mark.parametrize("unread", [False, True])
def test_the_same_tensors_are_recognised(unread):
    tensors = three()
    seen = SeenTensors(tensors, CPU, unread=unread)
    assert seen.matches(tensors) and seen.matches([*tensors])


def test_other_tensors_of_the_same_values_are_recognised_only_where_values_are_read():
    tensors = three()
    others = [ids.clone() for ids in tensors]
    assert SeenTensors(tensors, CPU).matches(others)
    assert not SeenTensors(tensors, CPU, unread=True).matches(others)


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("which", range(3))
def test_one_that_was_written_to_is_not_recognised(unread, which):
    tensors = three()
    seen = SeenTensors(tensors, CPU, unread=unread)
    tensors[which][1] += 7
    assert not seen.matches(tensors)


def test_one_that_numpy_wrote_to_is_not_recognised_where_values_are_read():
    tensors = three()
    seen = SeenTensors(tensors, CPU)
    tensors[1].numpy()[0] = 9  # torch counts no version
    assert not seen.matches(tensors)


@pytest.mark.parametrize("make", [lambda: torch.arange(4), lambda: torch.arange(4)[:2]])
def test_one_that_left_its_memory_is_not_recognised_when_other_memory_lies_there(make):
    tensors = three()
    seen = SeenTensors(tensors, CPU, unread=True)
    places = {ids.data_ptr() for ids in tensors}
    tensors[0].data = make()
    assert not seen.matches(tensors)
    # The memory that it left is kept, so that nothing else comes to lie there.
    assert not places & {torch.arange(4).data_ptr() for _ in range(20)}


def test_another_dtype_shape_or_stride_at_the_same_place_is_not_recognised():
    ids = torch.arange(4)
    for change in (lambda x: x.view(torch.int32), lambda x: x[:2], lambda x: x[::3]):
        tensor = ids.view(4)
        seen = SeenTensors([tensor], CPU, unread=True)
        tensor.data = change(tensor)
        assert not seen.matches([tensor])


def test_tensors_of_inference_are_recognised_by_their_values_alone():
    with torch.inference_mode():
        tensors = three()
        assert SeenTensors(tensors, CPU).matches(tensors)
        assert not SeenTensors(tensors, CPU, unread=True).matches(tensors)


@NEEDS_GPU
def test_tensors_on_both_sides_each_count():
    tensors = [torch.arange(4), torch.arange(4, device="cuda")]
    seen = SeenTensors(tensors, torch.device("cuda"))
    assert seen.matches(tensors) and seen.matches([tensors[0].clone(), tensors[1]])
    assert not seen.matches([tensors[0], tensors[1].clone()])
    tensors[1] += 1
    assert not seen.matches(tensors)


def test_one_tensor_is_as_many():
    ids = torch.arange(4)
    seen = SeenIds(ids, CPU, unread=True)
    assert seen.matches(ids) and not seen.matches(ids.clone())
    ids += 1
    assert not seen.matches(ids)

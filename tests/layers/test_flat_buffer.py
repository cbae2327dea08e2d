"""FlatBuffer: layout, views of both memories, copied spans, and errors."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from offloaded_models import reloaded
from torch import Tensor, nn

from speedtorch.layers import flat_buffer
from speedtorch.layers.flat_buffer import ALIGNMENT, FlatBuffer, Memory
from speedtorch.memory.host_memory import memory_kind


def several() -> dict[str, Tensor]:
    """Tensors of many dtypes, shapes and strides; two of them share memory."""
    base = torch.arange(40.0)
    return {
        "matrix": torch.randn(5, 3),
        "transposed": torch.randn(4, 6).t(),
        "bf16": torch.randn(3, dtype=torch.bfloat16),
        "base": base,
        "gaps": base[3::2],
        "number": torch.tensor(7),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "complex": torch.randn(2, 2, dtype=torch.complex128),
        "expanded": torch.randn(3, 1).expand(3, 5),
        "row": torch.randn(1, 5),
    }


def filled(tensors: dict[str, Tensor], device: str) -> FlatBuffer:
    buffer = FlatBuffer(tensors, torch.device(device))
    for name, tensor in tensors.items():
        buffer.store(name, tensor)
    return buffer


def copied_spans(buffer: FlatBuffer, *arguments: Any) -> list[tuple[int, int]]:
    """The ranges of bytes that copy_to() copies."""
    found: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_buffer, "copy_spans", lambda _, __, spans, **___: found.extend(spans))
        buffer.copy_to(*arguments)
    return found


def fits(buffer: FlatBuffer, tensors: dict[str, Tensor]) -> bool:
    return buffer.fits(tensors, buffer.where(tensors))


@pytest.mark.parametrize("memory", Memory)
@pytest.mark.parametrize("without", [(), ("none",)], ids=["with no elements", "with elements"])
def test_a_tensor_that_is_no_view_of_the_buffer_is_found(
    without: tuple[str, ...], memory: Memory, device: str
) -> None:
    tensors = {name: tensor for name, tensor in several().items() if name not in without}
    buffer = filled(tensors, device)
    buffer.copy_to(Memory.DEVICE, [], [])
    buffer.load_stream.join()
    views = {name: buffer.view(name, memory) for name in tensors}
    assert buffer.where(views) == dict.fromkeys(tensors, memory)
    assert buffer.memory_at(views) is (memory if without else None)  # all are compared at once
    assert buffer.where(dict(reversed(views.items()))) == dict.fromkeys(tensors, memory)
    other = Memory.HOST if memory is Memory.DEVICE else Memory.DEVICE
    bits = views["matrix"].view(torch.int32)
    for name, changed, place in (
        ("matrix", views["matrix"].t(), None),
        ("matrix", bits, None),
        ("matrix", views["matrix"].view(-1), None),
        ("matrix", views["matrix"].as_strided((5, 3), (1, 5)), None),
        ("matrix", views["matrix"].clone(), None),
        ("flags", views["flags"].to_sparse(), None),
        ("base", buffer.view("base", other), other),
    ):
        assert buffer.where({**views, name: changed}) == {
            **dict.fromkeys(tensors, memory),
            name: place,
        }


def test_views_of_both_memories_are_the_tensors(device: str) -> None:
    tensors = several()
    buffer = filled(tensors, device)
    assert copied_spans(filled(tensors, device), Memory.DEVICE, [], []) == [(0, buffer.nbytes)]
    buffer.copy_to(Memory.DEVICE, [], [])
    buffer.load_stream.join()
    for memory in Memory:
        for name, tensor in tensors.items():
            view = buffer.view(name, memory)
            assert torch.equal(view.cpu(), tensor), name
            assert (view.stride(), view.dtype) == (tensor.stride(), tensor.dtype)
            assert buffer.where({name: view}) == {name: memory}
            assert buffer.where({name: tensor}) == {name: None}
            assert name == "gaps" or view.storage_offset() * view.itemsize % ALIGNMENT == 0


def test_shared_memory_is_stored_once() -> None:
    tensors = several()
    buffer = filled(tensors, "cpu")
    buffer.view("gaps", Memory.HOST).fill_(-1.0)
    assert buffer.view("base", Memory.HOST)[:6].tolist() == [0.0, 1.0, 2.0, -1.0, 4.0, -1.0]
    assert buffer.nbytes == (len(tensors) - 1) * ALIGNMENT


def test_neighbours_in_one_storage_get_segments_of_their_own() -> None:
    base = torch.arange(8.0)
    buffer = filled({"low": base[:4], "high": base[4:]}, "cpu")
    assert buffer.nbytes == 2 * ALIGNMENT
    assert buffer.view("high", Memory.HOST).tolist() == [4.0, 5.0, 6.0, 7.0]


def test_device_views_are_valid_after_empty_and_load(device: str) -> None:
    buffer = filled({"weight": torch.arange(6.0).view(2, 3)}, device)
    buffer.copy_to(Memory.DEVICE, [], [])
    kept = buffer.view("weight", Memory.DEVICE).t()
    assert buffer.empty() == buffer.nbytes and buffer.device_bytes == 0 and buffer.empty() == 0
    buffer.view("weight", Memory.HOST).add_(1)
    buffer.copy_to(Memory.DEVICE, [], [])
    buffer.load_stream.join()
    assert kept.tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]


def test_changed_tensors_are_copied_in_the_fewest_spans_around_settled_ones() -> None:
    tensors = {name: torch.zeros(3) for name in "abcdef"}
    buffer = filled(tensors, "cpu")
    buffer.copy_to(Memory.DEVICE, [], [])
    line = ALIGNMENT
    last = 3 * 4
    assert copied_spans(buffer, Memory.HOST, [], []) == []
    assert copied_spans(buffer, Memory.HOST, ["b", "e"], []) == [(line, 4 * line + last)]
    assert copied_spans(buffer, Memory.HOST, ["b", "e"], ["c"]) == [
        (line, line + last),
        (4 * line, 4 * line + last),
    ]


def test_a_saved_view_has_only_its_bytes_and_is_read_by_torch() -> None:
    tensors = {**several(), "large": torch.ones(1 << 16)}
    buffer, small = filled(tensors, "cpu"), io.BytesIO()
    torch.save(buffer.view("matrix", Memory.HOST), small)
    assert len(small.getvalue()) < 1 << 12
    views = {name: buffer.view(name, Memory.HOST) for name in tensors}
    for name, tensor in reloaded(views).items():
        assert torch.equal(tensor, tensors[name]) and tensor.dtype == tensors[name].dtype, name


def test_host_buffers_are_registered_for_a_gpu(device: str) -> None:
    buffer = FlatBuffer({"weight": torch.ones(4)}, torch.device(device))
    kind = "registered" if device == "cuda" else "plain"
    assert memory_kind(buffer.host) == memory_kind(buffer.view("weight", Memory.HOST)) == kind


def test_tensors_that_share_memory_later_need_another_layout() -> None:
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    buffer = filled(tensors, "cpu")
    tensors = {name: buffer.view(name, Memory.HOST) for name in tensors}
    assert fits(buffer, tensors) and fits(buffer, {"a": torch.zeros(4)})
    assert not fits(buffer, {"a": torch.ones(5)})
    assert not fits(buffer, {**tensors, "b": tensors["a"]})
    assert not fits(buffer, {**tensors, "c": tensors["a"][2:]})


def test_memory_behind_a_loaded_buffer_that_has_grown_is_outside() -> None:
    cpu = torch.device("cpu")
    first = FlatBuffer({"a": torch.ones(64)}, cpu)
    numbers = np.zeros(2 * first.nbytes, dtype=np.uint8)
    loaded, behind = (torch.from_numpy(half) for half in np.split(numbers, 2))
    first._storage = loaded.untyped_storage()
    new = behind.view(torch.float32)  # as an allocator may place it: next to the buffer's memory
    grown = FlatBuffer({"a": torch.ones(64), "b": new}, cpu, first)
    assert grown.where({"a": loaded.view(torch.float32), "b": new}) == {
        "a": Memory.DEVICE,
        "b": None,
    }


def test_a_larger_buffer_keeps_tensors_and_device_views() -> None:
    buffer = filled({"a": torch.ones(4)}, "cpu")
    buffer.copy_to(Memory.DEVICE, [], [])
    kept = buffer.view("a", Memory.DEVICE)
    tensors = {"b": torch.zeros(3), "a": buffer.view("a", Memory.HOST)}
    assert fits(buffer, tensors) and "b" not in buffer.places
    larger = FlatBuffer(tensors, torch.device("cpu"), buffer)
    assert set(larger.places) == {"a", "b"} and larger.nbytes == 2 * ALIGNMENT
    assert larger.view("a", Memory.HOST).tolist() == [1.0] * 4
    larger.view("a", Memory.HOST).fill_(2)
    larger.copy_to(Memory.DEVICE, [], [])
    assert kept.tolist() == [2.0] * 4 and larger.where({"a": kept}) == {"a": Memory.DEVICE}


class Subclass(Tensor):
    """A tensor of a class of its own."""


def in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2)


@pytest.mark.parametrize(
    ("tensor", "kind", "message"),
    [
        (torch.ones(2).as_subclass(Subclass), TypeError, "weight: expected a plain tensor, got"),
        (nn.UninitializedParameter(), TypeError, "UninitializedParameter"),
        (torch.ones(2, 2).to_sparse(), ValueError, "weight: expected a dense tensor"),
        (torch.ones(2, device="meta"), ValueError, "to_empty"),
        (in_inference_mode(), ValueError, "inference_mode"),
        (torch.ones(2, dtype=torch.complex64).conj(), ValueError, "resolve_conj"),
    ],
    ids=["subclass", "lazy", "sparse", "meta", "inference", "conjugated"],
)
def test_tensors_that_are_more_than_bytes_raise(
    tensor: Tensor, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        FlatBuffer({"weight": tensor}, torch.device("cpu"))

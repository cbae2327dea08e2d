"""numbers_to_host: a few numbers of a GPU are copied to pinned memory behind what made them."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_GPU

from speedtorch.ops.functions import numbers_to_host


@NEEDS_GPU
@pytest.mark.parametrize("count", [0, 1, 12, 1000])
def test_the_numbers_are_those_of_the_stream(count: int) -> None:
    host = torch.full((count,), -1).pin_memory()
    numbers = torch.zeros(count, dtype=torch.int64, device="cuda")
    torch.cuda._sleep(10_000_000)
    numbers += torch.arange(count, device="cuda")
    numbers_to_host(numbers, host)
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [*range(count)]


@pytest.mark.parametrize(
    ("numbers", "host", "message"),
    [
        (torch.zeros(3), torch.zeros(2), "host has shape .2., expected .3."),
        (torch.zeros(3), torch.zeros(3).long(), "host has dtype"),
        (torch.zeros(6)[::2], torch.zeros(3), "numbers must be contiguous"),
        (torch.zeros(3), torch.zeros(6)[::2], "host must be contiguous"),
        (torch.zeros(3), torch.zeros(3), "numbers must be on a GPU and host on the CPU, got"),
    ],
)
def test_other_arguments_raise(numbers: torch.Tensor, host: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"numbers_to_host: {message}"):
        numbers_to_host(numbers, host)

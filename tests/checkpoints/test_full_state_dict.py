"""The first rank saves the rows of all ranks where a library knows one process alone."""

from __future__ import annotations

import pytest
import torch
from rank_backends import BACKENDS, RANKS
from rank_processes import in_processes
from sharded_saved import MAKES, check_memory_refused, check_refusals, check_saved
from torch import nn

import speedtorch


@pytest.mark.dealt("collected_bytes")
@pytest.mark.parametrize("collected_bytes", [1 << 20, 50], ids=["at once", "in parts"])
@pytest.mark.parametrize("name", MAKES)
@RANKS
def test_the_first_rank_saves_all_rows_and_their_state(
    ranks: int, backend: str, name: str, collected_bytes: int
) -> None:
    in_processes(ranks, check_saved, name, collected_bytes, backend=backend)


@BACKENDS
def test_what_is_wrong_on_one_rank_raises_on_all(backend: str) -> None:
    in_processes(2, check_refusals, backend=backend)


def test_rows_of_other_ranks_have_no_local_memory() -> None:
    in_processes(2, check_memory_refused)


def test_a_model_of_one_process_does_not_change() -> None:
    model = nn.Sequential(speedtorch.Embedding(5, 2))
    with speedtorch.full_state_dict(model):
        assert torch.equal(model.state_dict()["0.weight"], model[0].table["weight"])

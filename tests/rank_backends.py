"""How many ranks a test runs on, and by which backend of torch.distributed.

The body of a test with `on_ranks`, and of each test of a module with `pytestmark = ON_RANKS`, runs
on each rank: on two of gloo, unless parameters `ranks` and `backend` have others. If a machine has
only one GPU, ranks of NCCL share it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

ON_RANKS = [pytest.mark.ranks, pytest.mark.usefixtures("ranks", "backend")]


def on_ranks(test: Callable[..., Any]) -> Callable[..., Any]:
    for mark in ON_RANKS:
        test = mark(test)
    return test


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
_BY_NCCL = pytest.param("nccl", marks=NEEDS_GPU)
BACKENDS = pytest.mark.parametrize("backend", ["gloo", _BY_NCCL])
# For the ways to look rows up: the ordinary run has some with two ranks, the others with three.
EVERY_WAY = pytest.mark.parametrize(
    "every_way", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["some", "every-way"]
)
_THREE = pytest.param(3, "gloo", marks=pytest.mark.nightly)
RANKS = pytest.mark.parametrize(
    ("ranks", "backend"), [(2, "gloo"), _THREE, pytest.param(2, "nccl", marks=NEEDS_GPU)]
)
# Where two ranks and three have tests of their own in the ordinary run.
TWO_AND_THREE_RANKS = pytest.mark.parametrize(
    ("ranks", "backend"), [(2, "gloo"), (3, "gloo"), pytest.param(2, "nccl", marks=NEEDS_GPU)]
)

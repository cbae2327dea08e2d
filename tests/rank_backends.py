"""How many ranks a test runs on, and by which backend of torch.distributed."""

from __future__ import annotations

import pytest
import torch

NEEDS_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
_BY_NCCL = pytest.param("nccl", marks=NEEDS_GPUS)
BACKENDS = pytest.mark.parametrize("backend", ["gloo", _BY_NCCL])
# For the ways to look rows up: the ordinary run has some with two ranks, the others with three.
EVERY_WAY = pytest.mark.parametrize(
    "every_way", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["some", "every-way"]
)
_THREE = pytest.param(3, "gloo", marks=pytest.mark.nightly)
RANKS = pytest.mark.parametrize(
    ("ranks", "backend"), [(2, "gloo"), _THREE, pytest.param(2, "nccl", marks=NEEDS_GPUS)]
)
# Where two ranks and three have tests of their own in the ordinary run.
TWO_AND_THREE_RANKS = pytest.mark.parametrize(
    ("ranks", "backend"), [(2, "gloo"), (3, "gloo"), pytest.param(2, "nccl", marks=NEEDS_GPUS)]
)

"""A ResNet and an LSTM train within a third of what they take, with the bits of plain training.

Those families that need a library: test_clients_families.py.
"""

from __future__ import annotations

import pytest
from offloaded_families import (
    FAMILIES,
    MODES,
    VARIANTS,
    Setting,
    assert_same_training,
    assert_same_training_at_once,
    assert_too_large_at_once,
)


@pytest.mark.usefixtures("one_thread", "deterministic")
@pytest.mark.dealt("name", "mode")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_like_resident(name: str, mode: str, variant: str, device: str) -> None:
    assert_same_training(FAMILIES[name], Setting(mode, variant, device))


@pytest.mark.usefixtures("one_thread", "deterministic")
@pytest.mark.parametrize("name", FAMILIES)
def test_all_modules_of_a_family_are_used_at_once(name: str, device: str) -> None:
    assert_same_training_at_once(FAMILIES[name], device)
    assert_too_large_at_once(FAMILIES[name], device)

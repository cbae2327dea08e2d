"""Models of transformers and diffusers train within a third of what they take, bit for bit.

Needs those libraries, and peft: make clients.
"""

from __future__ import annotations

import pytest
from client_families import FAMILIES, UNUSUAL
from offloaded_families import (
    MODES,
    VARIANTS,
    Setting,
    assert_same_training,
    assert_same_training_at_once,
    assert_too_large_at_once,
)

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


@pytest.mark.usefixtures("one_thread", "deterministic")
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


@pytest.mark.usefixtures("one_thread", "deterministic")
@pytest.mark.parametrize("mode", ["auto", "auto-step"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_what_leads_to_a_module_otherwise_has_the_same_bits(
    name: str, mode: str, device: str
) -> None:
    variant, family = UNUSUAL[name]
    assert_same_training(family, Setting(mode, variant, device))

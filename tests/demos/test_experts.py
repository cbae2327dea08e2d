"""The experts: what they learn and how they move."""

from __future__ import annotations

from pathlib import Path

from demo_commands import facts, run_demo
from safetensors.torch import load_file


def test_a_run_learns_and_equals_the_run_with_all_experts_on_the_device(
    tmp_path: Path, device: str
) -> None:
    assert run_demo("experts", tmp_path, "--compare", device=device) == 0
    found = facts(tmp_path)
    assert found["plain_torch"]["identical"] and found["training"]["steps"] == 120
    losses = found["training"]["losses"]
    assert losses[-1] < 0.8 * losses[0]
    moved = found["units"]
    assert moved["hits"] > 100 > moved["misses"] and moved["bytes_in"] > 10 * moved["host_bytes"]
    assert moved["resident_bytes"] <= moved["budget_bytes"]
    saved = load_file(tmp_path / "model.safetensors")
    assert len(saved) == 6 * 4 and saved["experts.5.2.weight"].shape == (8, 32)

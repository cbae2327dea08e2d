"""The recommender: what it learns, with and without prefetch, and `demo ncf` as a user runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from demo_commands import DEMOS, demo_ratings, facts, run_demo
from safetensors.torch import load_file

import speedtorch
from demos import ncf
from demos.loop import train
from demos.ncf import NeuMF, held_out_score
from demos.ranking import BatchStream, Candidates
from demos.ratings import Ratings, generated_ratings, leave_one_out
from speedtorch.__main__ import main
from speedtorch.files import field_blocks


@pytest.fixture(scope="module")
def ratings() -> Ratings:
    return demo_ratings()


def made(
    ratings: Ratings, device: str, lr: float = 0.01, **options: Any
) -> tuple[NeuMF, torch.optim.Optimizer]:
    """A model and its attached optimizer."""
    users, items = len(ratings.user_ids), len(ratings.item_ids)
    model = NeuMF(users, items, 8, device=device, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    speedtorch.attach(optimizer, model)
    model.draw_rows(0)
    return model, optimizer


def stream_of(ratings: Ratings, epochs: int = 1) -> BatchStream:
    return BatchStream(leave_one_out(ratings), len(ratings.item_ids), batch=256, epochs=epochs)


@pytest.mark.examples
@pytest.mark.usefixtures("one_thread")
def test_training_raises_the_hit_rate_clearly_above_chance(ratings: Ratings, device: str) -> None:
    model, optimizer = made(ratings, device)
    candidates = Candidates.draw(ratings, leave_one_out(ratings))
    before = held_out_score(model, candidates)
    outcome = train(model, optimizer, stream_of(ratings, 6))
    after = held_out_score(model, candidates)
    assert before.hit_rate < 0.15 and before.users > 500
    assert after.hit_rate > 0.3 and after.ndcg > 2 * before.ndcg
    assert outcome.finished and outcome.losses[-1] < 0.8 * outcome.losses[0]
    assert outcome.examples == 6 * (len(ratings) - 600)


def test_a_step_changes_the_rows_of_its_batch_alone(ratings: Ratings) -> None:
    model, optimizer = made(ratings, "cpu")
    held = {name: value.clone() for name, value in model.state_dict().items()}
    batch = next(iter(stream_of(ratings)))
    model.loss(batch).backward()
    optimizer.step()
    for name, ids in (("gmf_users", batch.user), ("gmf_items", batch.item)):
        now, then = model.state_dict()[f"{name}.weight"], held[f"{name}.weight"]
        changed = (now != then).any(1).nonzero().flatten()
        assert torch.equal(changed, ids.unique())


def test_layers_and_rows_depend_on_the_seed_alone(ratings: Ratings) -> None:
    torch.manual_seed(1)
    one = made(ratings, "cpu", seed=5)[0].state_dict()
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))  # the user's own numbers go on as they were
    same, other = (made(ratings, "cpu", seed=s)[0].state_dict() for s in (5, 6))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["last.weight"], other["last.weight"])


def test_the_saved_model_scores_as_the_report_says(ratings: Ratings, tmp_path: Path) -> None:
    assert run_demo("ncf", tmp_path) == 0
    model = NeuMF(600, len(ratings.item_ids), 4)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    found = held_out_score(model, Candidates.draw(ratings, leave_one_out(ratings)))
    after = facts(tmp_path)["after"]
    assert (found.hit_rate, found.ndcg) == (after["hit_rate"], after["ndcg"])


def test_rows_are_saved_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_demo("ncf", tmp_path / "whole") == 0
    monkeypatch.setattr(field_blocks, "_BLOCK_BYTES", 100)
    assert run_demo("ncf", tmp_path / "blocks") == 0
    one, other = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "blocks")
    )
    assert one == other


def test_without_a_file_ratings_are_generated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = generated_ratings(users=100, items=200, seed=3)
    monkeypatch.setattr(ncf, "generated_ratings", lambda seed: small if seed == 3 else None)
    options = ("--out", str(tmp_path), "--device", "cpu", "--seed", "3", *DEMOS["ncf"].small)
    assert main(["demo", "ncf", *options]) == 0
    assert "of 100 users" in capsys.readouterr().out and facts(tmp_path)["users"] == 100

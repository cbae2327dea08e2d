"""The GPT with n-gram tables loses no update: recomputed, in micro-batches, resumed, on ranks."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import in_processes
from test_examples import GPT, example, same_tables
from torch import Tensor

import speedtorch

pytestmark = [pytest.mark.examples, pytest.mark.usefixtures("deterministic", "one_thread")]
BYTES = 4000
ROWS_AND_STATE = [
    pytest.param(["--stored", stored, "--state", state], id=f"{stored}-{state}")
    for stored in ("float32", "bfloat16")
    for state in ("adam", "rowwise")
]

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks here have no GPU each")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of random bytes: hardly an n-gram of a micro-batch comes a third time."""
    path = tmp_path_factory.mktemp("text") / "random"
    random = torch.Generator().manual_seed(0)
    path.write_bytes(bytes(torch.randint(256, (BYTES,), generator=random).tolist()))
    return str(path)


def trained(text: str, *options: str) -> Any:
    """The model with tables; that without is not trained."""
    module = example("ngram_gpt")
    parsed = [*GPT, "--rows", "100000", "--steps", "6", "--file", text, *options]
    train = module.train

    def train_with_tables(chosen: Any, texts: Any, rows: int) -> Any:
        return train(chosen, texts, rows) if rows else module.Trained([], 0.0, {})

    module.train = train_with_tables
    return module.main(parsed)[0]


def assert_same(found: Any, expected: Any, close: float = 0) -> None:
    """The same losses and tensors: bit for bit, or so near."""
    assert found.losses == pytest.approx(expected.losses, rel=close, abs=0)
    assert found.bits == pytest.approx(expected.bits, rel=close, abs=0)
    assert same_tables(found.state, expected.state, close)


def named_rows(text: str, size: int, steps: int = 6) -> list[set[int]]:
    """The rows of each table that the samples of all steps name."""
    module = example("ngram_gpt")
    texts = module.Texts(module.text_of(Path(text)), 32, 100_000)
    parts = [part for step in texts.steps(0, steps, 1, size) for part in step]
    return [set(torch.cat([part.ids[k].flatten() for part in parts]).tolist()) for k in (0, 1)]


def changed_rows(state: dict[str, Tensor]) -> list[set[int]]:
    """The rows of each table that are zeros no more."""
    tables = [state[f"tables.{k}.weight"] for k in (0, 1)]
    return [set((table != 0).any(1).nonzero().flatten().tolist()) for table in tables]


@pytest.mark.parametrize("options", ROWS_AND_STATE)
def test_a_recomputation_gives_the_numbers_without_it(
    options: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups = []
    forward = speedtorch.Embedding.forward

    def counted(table: speedtorch.Embedding, ids: Tensor) -> Tensor:
        lookups.append(torch.is_grad_enabled())
        return forward(table, ids)

    monkeypatch.setattr(speedtorch.Embedding, "forward", counted)
    once = trained(text, *options)
    in_training, seen = sum(lookups), len(lookups)
    twice = trained(text, *options, "--recompute")
    assert_same(twice, once)
    assert in_training == 6 * 2 * 2  # steps, micro-batches and tables
    assert sum(lookups[seen:]) == 2 * in_training


@pytest.mark.parametrize("options", ROWS_AND_STATE)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_batch_in_micro_batches_loses_no_update(
    parts: int, options: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = [*options, "--parts", str(parts), "--size", str(8 // parts)]
    ahead = trained(text, *split)
    monkeypatch.setattr(speedtorch, "prefetch", lambda loader, model, ids: loader)
    assert_same(trained(text, *split), ahead)
    if "float32" in options:
        on_gpu = torch.cuda.is_available()  # last bits differ: docs/embedding.md
        assert_same(trained(text, *split, "--plain"), ahead, 1e-3 if on_gpu else 0)
    assert changed_rows(ahead.state) == named_rows(text, 8)


@pytest.mark.parametrize("options", ROWS_AND_STATE)
def test_a_saved_training_goes_on_as_if_it_had_not_ended(
    options: list[str], text: str, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved.pt")
    whole = trained(text, *options)
    first = trained(text, *options, "--steps", "3", "--save", saved)
    rest = trained(text, *options, "--resume", saved)
    assert_same(rest._replace(losses=first.losses + rest.losses), whole)
    kept = torch.load(saved)["model"]["tables.0.weight"]
    assert kept.dtype == getattr(torch, options[1])


def train_on_this_rank(out: str, *arguments: str) -> None:
    """Each rank trains; the first has all rows."""
    torch.use_deterministic_algorithms(True)
    found = trained(*arguments)
    if torch.distributed.get_rank() == 0:
        torch.save(tuple(found), out)


def on_two_ranks(out: Path, *arguments: str) -> Any:
    """What the first of two ranks gives."""
    in_processes(2, train_on_this_rank, str(out), *arguments)
    return example("ngram_gpt").Trained(*torch.load(out))


@ON_CPU
@pytest.mark.parametrize("options", ROWS_AND_STATE)
def test_two_ranks_with_a_micro_batch_each_are_one_process_with_both(
    options: list[str], text: str, tmp_path: Path
) -> None:
    # Bit for bit: a sum of two is the same in any order, and no n-gram of a part comes three times.
    options = [text, *options, "--size", "2", "--recompute"]
    two = on_two_ranks(tmp_path / "two", *options)
    assert_same(two, trained(*options))
    assert changed_rows(two.state) == named_rows(text, 4)


@ON_CPU
def test_two_ranks_with_two_micro_batches_each_are_one_process_with_four(
    text: str, tmp_path: Path
) -> None:
    options = [text, "--size", "2", "--parts", "4", "--state", "rowwise"]
    two, one = on_two_ranks(tmp_path / "two", *options), trained(*options)
    # Sums of four in other orders: Adam makes steps of last bits where a gradient is zero.
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    tables = {name: value for name, value in one.state.items() if name.startswith("tables")}
    assert same_tables({name: two.state[name] for name in tables}, tables, 1e-5)
    assert changed_rows(two.state) == named_rows(text, 8)


@ON_CPU
def test_what_two_ranks_have_saved_goes_on_in_one_process_and_on_two(
    text: str, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved.pt")
    options = [text, "--size", "2", "--stored", "bfloat16", "--state", "rowwise"]
    whole = trained(*options)
    first = on_two_ranks(tmp_path / "first", *options, "--steps", "3", "--save", saved)
    for rest in (
        trained(*options, "--resume", saved),
        on_two_ranks(tmp_path / "rest", *options, "--resume", saved),
    ):
        assert_same(rest._replace(losses=first.losses + rest.losses), whole)


def refuse_three_parts() -> None:
    """The parser ends the process and says why."""
    errors = io.StringIO()
    with redirect_stderr(errors), pytest.raises(SystemExit):
        example("ngram_gpt").main(["--parts", "3"])
    assert "--parts must be a multiple of 2 ranks, got 3" in errors.getvalue()


def test_ranks_with_unequal_numbers_of_micro_batches_are_refused() -> None:
    in_processes(2, refuse_three_parts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plain", "--stored", "bfloat16"], "--plain requires one rank and --stored float32"),
        (["--state", "sgd"], "invalid choice: 'sgd'"),
    ],
    ids=["plain-bfloat16", "unknown-state"],
)
def test_options_that_do_not_go_together_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        example("ngram_gpt").main(options)
    assert message in capsys.readouterr().err

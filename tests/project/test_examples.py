"""The examples of docs/examples train as plain torch does, on one rank or two."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from documents import PAGES, ROOT, blocks
from torch import Tensor, nn
from warm_python import output_of

FOLDER = ROOT / "docs" / "examples"
pytestmark = pytest.mark.examples


def example(name: str) -> Any:
    """The module of that file."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(page: str) -> list[list[str]]:
    """The programs and options that a page shows, in order."""
    (document,) = (known for known in PAGES if known.stem == page)
    lines = [line for block in blocks(document, "sh") for line in block.text.splitlines()]
    found = [shlex.split(line, comments=True) for line in lines]
    assert [words[:1] for words in found] == [["python"]] * len(found)
    return [words[1:] for words in found]


def run_commands(page: str, name: str, *smaller: str) -> list[Any]:
    """What the commands of a page give, with options that make them fast."""
    module = example(name)
    known = commands(page)
    assert len(known) > 1 and {file for file, *_ in known} == {f"docs/examples/{name}.py"}
    return [module.main([*options, *smaller]) for _, *options in known]


@pytest.fixture(autouse=True)
def _same_sums_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_word2vec_trains_as_torch_alone() -> None:
    options = ["--words", "20000", "--epochs", "2", "--columns", "16"]
    (losses, rows), (plain_losses, plain_rows) = (
        example("word2vec").main([*options, *more]) for more in ([], ["--plain"])
    )
    assert losses == plain_losses and torch.equal(rows, plain_rows)
    assert losses[1] < losses[0]


def test_transe_trains_as_torch_alone_and_finds_tails(tmp_path: Path) -> None:
    (hits, rows), (plain_hits, plain_rows) = (
        example("transe").main(["--epochs", "15", *more]) for more in ([], ["--plain"])
    )
    if torch.cuda.is_available():  # last bits differ: docs/embedding.md, sums of gradients
        assert abs(hits - plain_hits) < 0.02
        torch.testing.assert_close(rows, plain_rows, rtol=1e-3, atol=1e-3)
    else:
        assert hits == plain_hits and torch.equal(rows, plain_rows)
    assert hits > 0.2  # 0.017 by chance
    (tmp_path / "wrong.tsv").write_text("a\tb\tc\na b c\n")
    with pytest.raises(SystemExit, match="line 2 must have three columns"):
        example("transe").main(["--file", str(tmp_path / "wrong.tsv")])


def test_a_model_within_its_budget_trains_as_one_on_the_device() -> None:
    options = ["--width", "32", "--blocks", "6", "--steps", "4"]
    within, plain = (example("swapper").main([*options, *more]) for more in ([], ["--plain"]))
    assert within == plain


def test_two_ranks_train_and_save_the_rows_of_one_process(tmp_path: Path) -> None:
    known = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    known["CUDA_VISIBLE_DEVICES"] = ""  # two ranks need two GPUs
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for start, folder in (([sys.executable], "one"), (torchrun, "two")):
        command = [*start, FOLDER / "two_ranks.py", "--steps", "5", "--out", tmp_path / folder]
        output_of(*command, **known)
    found = []
    for folder in ("one", "two"):
        rows = {"model": {"items.weight": torch.empty(10_000, 64)}}
        checkpoint.load(rows, checkpoint_id=tmp_path / folder, no_dist=True)
        found.append(rows["model"]["items.weight"])
    assert torch.equal(*found)


CLICKS = ["--lines", "6000", "--rows", "2000", "--columns", "8", "--batch", "128"]


def same_tables(found: dict[str, Tensor], expected: dict[str, Tensor], close: float) -> bool:
    """Whether all are there; the same bits, or with `close` values that are so near."""
    for name, value in expected.items():
        torch.testing.assert_close(found[name].cpu(), value.cpu(), rtol=close, atol=close)
    return found.keys() == expected.keys()


def test_dlrm_trains_as_torch_alone_and_ranks_clicks() -> None:
    module = example("dlrm")
    (losses, auc, tables), (plain_losses, plain_auc, plain_tables) = (
        module.main([*CLICKS, *more]) for more in ([], ["--plain"])
    )
    on_gpu = torch.cuda.is_available()  # last bits differ: docs/embedding.md, sums of gradients
    assert losses == (pytest.approx(plain_losses, rel=1e-3) if on_gpu else plain_losses)
    assert auc == (pytest.approx(plain_auc, abs=0.01) if on_gpu else plain_auc)
    assert same_tables(tables, plain_tables, 1e-3 if on_gpu else 0)
    assert len(tables) == 26 and auc > 0.65


def test_dlrm_trains_as_bags_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("dlrm")

    class Bag(nn.EmbeddingBag):
        def __init__(self, rows: int, columns: int) -> None:
            super().__init__(rows, columns, mode="sum")

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids[:, None])

    class Bags(module.PlainTables):
        def __init__(self, rows: int, columns: int) -> None:
            super().__init__(rows, columns)
            self.embedding_bags = nn.ModuleDict({name: Bag(rows, columns) for name in module.NAMES})

    monkeypatch.setattr(module, "PlainTables", Bags)
    options = [*CLICKS, "--lines", "3000", "--epochs", "1"]
    (losses, _, tables), (plain_losses, _, plain_tables) = (
        module.main([*options, *more]) for more in ([], ["--plain"])
    )
    # torch sorts a batch's ids by a sort that is not stable, and adds equal ids up in its order.
    assert losses == pytest.approx(plain_losses, rel=1e-3)
    assert same_tables(tables, plain_tables, 1e-3)


def test_dlrm_reads_lines_of_criteos_format(tmp_path: Path) -> None:
    module = example("dlrm")
    line = (
        "1\t" + "\t".join(["", "-2", "7", *"0" * 10]) + "\t" + "\t".join(["68fd1e64", *[""] * 25])
    )
    (tmp_path / "train.txt").write_text(line + "\n" + "0" + "\t" * 39 + "\nbroken\n")
    labels, numbers, rows = module.read(tmp_path / "train.txt", rows=1000, lines=2)
    assert labels.tolist() == [1, 0] and numbers.shape == (2, 13) and rows.shape == (2, 26)
    assert numbers[0, :3].tolist() == pytest.approx([0, 0, torch.tensor(8.0).log().item()])
    assert rows[0, 0] == 1 + 0x68FD1E64 % 999 and not rows[0, 1:].any() and not rows[1].any()
    for wrong, message in (
        ("x", "line 1 is not in Criteo's format: 1 fields, not 40"),
        ("2" + line[1:], "the label is '2', not 0 or 1"),
        (line.replace("68fd1e64", "xyz"), "line 1 is not in Criteo's format: invalid literal"),
        ("", "the file has no lines"),
    ):
        (tmp_path / "train.txt").write_text(wrong)
        with pytest.raises(SystemExit, match=message):
            module.read(tmp_path / "train.txt", rows=1000, lines=None)


def test_dlrm_counts_equal_scores_half_in_auc() -> None:
    auc = example("dlrm").auc
    assert auc(torch.tensor([3.0, 1.0, 2.0, 1.0, 0.0]), torch.tensor([1.0, 1, 0, 0, 0])) == 0.75
    assert auc(torch.zeros(5), torch.tensor([1.0, 0, 0, 1, 0])) == 0.5


@pytest.mark.usefixtures("own_folder")
def test_the_commands_of_dlrms_page_run() -> None:
    example("dlrm").write_synthetic(Path("train.txt"), 10_000)
    default, plain, real = run_commands(
        "example_dlrm", "dlrm", "--rows", "500", "--lines", "10000", "--columns", "4"
    )
    assert torch.cuda.is_available() or default[0] == plain[0]
    assert len(real[0]) == 3  # batches of 9,000 lines, once


GPT = ["--rows", "1000", "--width", "16", "--blocks", "1", "--context", "32", "--size", "4"]


@pytest.fixture
def short_text(tmp_path: Path) -> list[str]:
    """The option that makes the GPT's text short."""
    path = tmp_path / "text"
    path.write_bytes(bytes(example("ngram_gpt").text_of(None)[:20_000].tolist()))
    return ["--file", str(path)]


def test_gpt_trains_as_torch_alone_and_goes_on_with_the_numbers_of_one_run(
    short_text: list[str], tmp_path: Path
) -> None:
    module, saved = example("ngram_gpt"), str(tmp_path / "saved.pt")
    options = [*GPT, *short_text]

    def trained(*more: str) -> Any:
        return module.main([*options, *more])

    whole, without = trained("--steps", "20")
    plain, plain_without = trained("--steps", "20", "--plain")
    (half,) = trained("--steps", "10", "--save", saved)
    (rest,) = trained("--steps", "20", "--resume", saved)
    (plain_rest,) = trained("--steps", "20", "--resume", saved, "--plain")
    on_gpu = torch.cuda.is_available()  # last bits differ: docs/embedding.md, sums of gradients
    near = 1e-3 if on_gpu else 0
    for found, expected, close in (
        (plain, whole, near),
        (rest, whole, 0),
        (plain_rest, whole, near),
        (plain_without, without, 0),
    ):
        assert found.bits == pytest.approx(expected.bits, rel=close, abs=close)
        assert same_tables(found.state, expected.state, close)
    assert half.losses + rest.losses == whole.losses
    assert on_gpu or plain.losses == whole.losses == half.losses + plain_rest.losses
    for table in ("tables.0.weight", "tables.1.weight"):  # rows of n-grams that no step had
        untouched = (whole.state[table] == 0).all(1).sum()
        assert 0 < untouched < 1000
    assert 0 < whole.bits < without.bits < 8


def test_gpts_micro_batches_give_the_gradient_of_their_samples_together(
    short_text: list[str],
) -> None:
    module = example("ngram_gpt")
    options = [*GPT, *short_text, "--steps", "4"]
    (four, _), (one, _) = (
        module.main([*options, "--parts", parts, "--size", size])
        for parts, size in (("4", "2"), ("1", "8"))
    )
    assert four.losses == pytest.approx(one.losses, rel=1e-4)  # sums of other orders


def test_gpts_ids_depend_on_the_last_bytes_alone() -> None:
    module = example("ngram_gpt")
    text = torch.tensor([*b"the cat, the hat"])
    for order in (2, 3):
        ids = module.hashed(text, order, 5000)
        assert ids.shape == text.shape and set(ids.tolist()) <= set(range(5000))
        same = (ids[:, None] == ids).nonzero()
        ends = [text[max(0, place + 1 - order) : place + 1].tolist() for place in range(len(text))]
        assert all(ends[left] == ends[right] for left, right in same.tolist())
        assert len(ids.unique()) == len({tuple(end) for end in ends})


@pytest.mark.usefixtures("own_folder")
def test_the_commands_of_gpts_page_run(short_text: list[str]) -> None:
    small = [*GPT, "--context", "16", "--size", "2", *short_text]
    (whole, _), (plain, _), (first,), (rest,), (stored, _), (disk, _), (again, _) = run_commands(
        "example_ngram_gpt", "ngram_gpt", *small
    )
    assert torch.cuda.is_available() or plain.losses == whole.losses
    assert first.losses == whole.losses and len(rest.losses) == len(first.losses)
    assert again.losses == disk.losses == whole.losses
    assert stored.state["tables.0.weight"].dtype == torch.bfloat16


def test_gpt_says_that_a_text_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("short")
    with pytest.raises(SystemExit, match="5 bytes of text are too few for a context of 64"):
        example("ngram_gpt").main(["--file", str(tmp_path / "text")])

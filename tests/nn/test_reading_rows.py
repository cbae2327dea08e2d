"""All rows of a trained module: by blocks, as a NumPy array, nearest neighbors, and as a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from reference import assert_same_bytes
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.nn import nearest, word2vec_format
from speedtorch.step.trained_rows import TrainedRows
from speedtorch.table import progress as progress_bars
from speedtorch.table.lazy_init import ShardSpec

ROWS, WIDTH = 20, 4
BATCHES = [torch.tensor(ids) for ids in ([3, 1, 3, 19], [0, 3, 7], [19, 2, 2])]
Kind = type[speedtorch.Embedding] | type[speedtorch.EmbeddingBag]
WORDS = [f"word{row}" for row in range(ROWS)]
KINDS = pytest.mark.parametrize("kind", [speedtorch.Embedding, speedtorch.EmbeddingBag])


def values(rows: int = ROWS, width: int = WIDTH, seed: int = 1) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def made(rows: Tensor, **settings: Any) -> speedtorch.Embedding:
    return speedtorch.Embedding.from_pretrained(rows, freeze=False, **settings)


def joined(module: Any, rows: int = 7) -> Tensor:
    """All rows, of blocks that must follow each other."""
    parts, end = [torch.empty(0, module.embedding_dim, dtype=module.weight.dtype)], 0
    for first, block in module.blocks(rows):
        assert first == end and 0 < len(block) <= rows and block.is_cpu
        parts.append(block)
        end += len(block)
    return torch.cat(parts)


def shared_out(module: Any) -> Any:
    """The module with the first half of its rows, as on the first of two ranks."""
    half = range(ROWS // 2)
    spec = ShardSpec(ROWS, [(half, half)], lambda seed: seed)
    module.keep_shard(spec, lambda trained, _: trained)
    return module


class Pair:
    """torch's Embedding and ours, trained on the same batches by SparseAdam."""

    def __init__(self, device: str, padding_idx: int | None = None, **settings: Any) -> None:
        self.ours = made(values(), padding_idx=padding_idx, device=device, sparse=True, **settings)
        self.theirs = nn.Embedding.from_pretrained(
            values().to(device), freeze=False, padding_idx=padding_idx, sparse=True
        )
        self._optimizers = {
            module: optim.SparseAdam(module.parameters(), lr=0.1)
            for module in (self.ours, self.theirs)
        }
        speedtorch.attach(self._optimizers[self.ours], self.ours)

    def step(self, ids: Tensor) -> None:
        for module, optimizer in self._optimizers.items():
            module(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    @property
    def expected(self) -> Tensor:
        return self.theirs.weight.detach().cpu()


# ------------------------------------------------------------------------------------------------
# Blocks


@pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "prefetch"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"capacity": 5}, {"padding_idx": 3}, {"padding_idx": 3, "capacity": 5}],
    ids=["plain", "capacity", "padding", "capacity and padding"],
)
def test_blocks_have_the_rows_after_every_step(
    settings: dict[str, Any], ahead: bool, device: str
) -> None:
    pair = Pair(device, **settings)
    batches: Any = [ids.to(device) for ids in BATCHES * 2]
    if ahead:
        batches = speedtorch.prefetch(batches, pair.ours, ids=lambda ids: ids)
    for ids in batches:
        pair.step(ids)
        assert_same_bytes(joined(pair.ours), pair.expected)


def test_reading_between_a_lookup_and_its_step_changes_no_number(device: str) -> None:
    weights = []
    for reads in (False, True):
        emb = made(values(), device=device)
        sgd = optim.SGD(emb.parameters(), lr=0.1, momentum=0.9)
        speedtorch.attach(sgd, emb)
        for ids in BATCHES:
            loss = emb(ids.to(device)).square().sum()
            if reads:
                joined(emb)
            loss.backward()
            if reads:
                joined(emb)
            sgd.step()
            sgd.zero_grad()
        weights.append(joined(emb))
    assert torch.equal(*weights) and not torch.equal(weights[0], values())


def test_a_block_has_the_rows_at_the_time_of_next(device: str) -> None:
    emb = made(torch.zeros(4, 1), device=device)
    sgd = optim.SGD(emb.parameters(), lr=1.0)
    blocks = emb.blocks(rows=2)
    _, before = next(blocks)
    emb(torch.arange(4, device=device)).sum().backward()
    sgd.step()
    _, after = next(blocks)
    assert before.tolist() == [[0.0], [0.0]]
    assert after.tolist() == [[-1.0], [-1.0]]


@pytest.mark.parametrize("state", [(), ("exp_avg",)], ids=["alone", "beside state"])
def test_a_block_is_a_contiguous_copy(state: tuple[str, ...]) -> None:
    table = speedtorch.HostTable(3, 2, state=state).fill_(1.0)
    ((_, block),) = speedtorch.Embedding.from_pretrained(table).blocks()
    table.fill_(2.0)
    assert block.is_contiguous() and bool((block == 1.0).all())


@KINDS
def test_blocks_of_rows_that_were_never_used_have_their_first_values(kind: Kind) -> None:
    module = kind(ROWS, WIDTH).init_(nn.init.constant_, 3.0)
    assert bool((joined(module) == 3.0).all())


@pytest.mark.parametrize(
    ("rows", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (6, [5]), (2**70, [5])], ids=str
)
def test_the_last_block_has_what_is_left(rows: int, sizes: list[int]) -> None:
    found = list(made(values(5)).blocks(rows))
    assert [len(block) for _, block in found] == sizes
    assert torch.equal(torch.cat([block for _, block in found]), values(5))


def test_blocks_of_a_frozen_module_have_what_another_trains() -> None:
    table = speedtorch.HostTable(3, 1)
    reader = speedtorch.Embedding.from_pretrained(table)
    trainer = speedtorch.Embedding.from_pretrained(table, freeze=False)
    sgd = optim.SGD(trainer.parameters(), lr=1.0)
    trainer(torch.tensor([1])).sum().backward()
    sgd.step()
    assert joined(reader).flatten().tolist() == [0.0, -1.0, 0.0]


def test_another_thread_waits_while_a_block_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    emb, halves = made(torch.zeros(2_000, 8)), list(torch.arange(2_000).split(1_000))
    whole, unchanged, seen = TrainedRows.memory, [], set[float]()
    sgd, done = optim.SGD(emb.parameters(), lr=1.0), threading.Event()

    def watched(rows: TrainedRows, field: str = "weight") -> Tensor:
        found = whole(rows, field)
        before = found.clone()
        time.sleep(0.02)
        unchanged.append(torch.equal(found, before))
        return found

    def train() -> None:
        for ids in cycle(halves):
            if done.is_set():
                return
            emb(ids).sum().backward()
            sgd.step()
            sgd.zero_grad()

    monkeypatch.setattr(TrainedRows, "memory", watched)
    with ThreadPoolExecutor(1) as threads:
        training = threads.submit(train)
        try:
            while len(seen) < 5 and not training.done():
                for _, block in emb.blocks(rows=1_000):
                    found = block.unique().tolist()
                    assert len(found) == 1  # no half of a step
                    seen.update(found)
        finally:
            done.set()
        training.result()
    assert len(seen) >= 5 and all(unchanged)


def test_blocks_of_a_group_of_a_collection_have_the_rows_of_its_tables() -> None:
    configs = [
        speedtorch.EmbeddingConfig(2, 2, "user", init_fn=nn.init.zeros_),
        speedtorch.EmbeddingConfig(3, 2, "item", init_fn=nn.init.ones_),
    ]
    collection = speedtorch.EmbeddingCollection(tables=configs)
    assert joined(collection.group_of("user"))[:, 0].tolist() == [0, 0, 1, 1, 1]


READS: dict[str, Callable[[Any], object]] = {
    "blocks": lambda module: module.blocks(),
    "numpy": lambda module: module.numpy(),
    "nearest": lambda module: speedtorch.nearest_neighbors(module, torch.ones(1, WIDTH)),
    "file": lambda module: speedtorch.save_word2vec_format(module, "file", WORDS),
}


@KINDS
@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_share_of_the_rows_is_not_taken_for_all(kind: Kind, read: Callable[..., object]) -> None:
    with pytest.raises(RuntimeError, match=r"state_dict\(\).*full_state_dict\(model\)"):
        read(shared_out(kind(ROWS, WIDTH)))
    assert not Path("file").exists()


def test_an_iterator_made_before_rows_are_sharded_raises() -> None:
    module = speedtorch.Embedding(ROWS, WIDTH)
    blocks = module.blocks()
    with pytest.raises(RuntimeError, match="this rank has only a shard"):
        shared_out(module)
        next(blocks)


def test_a_closed_table_has_no_blocks() -> None:
    emb = made(values())
    blocks = emb.blocks(rows=3)
    next(blocks)
    emb.table.close()
    with pytest.raises(ValueError, match="closed"):
        next(blocks)


# ------------------------------------------------------------------------------------------------
# NumPy


def test_numpy_is_a_view_of_the_table() -> None:
    emb = made(values())
    assert np.shares_memory(emb.numpy(), emb.table.numpy())


def of_neighbors(emb: Any) -> Tensor:
    """All rows, whose scores are their columns."""
    queries = torch.eye(WIDTH, device=emb.weight.device)
    scores, ids = speedtorch.nearest_neighbors(emb, queries, ROWS, metric="dot")
    return torch.zeros(WIDTH, ROWS).scatter(1, ids.cpu(), scores.cpu()).T


def of_a_file(emb: Any) -> Tensor:
    speedtorch.save_word2vec_format(emb, "file", WORDS)
    return torch.from_numpy(parsed(Path("file"), binary=True)[1])


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize(
    "read", [lambda emb: torch.from_numpy(emb.numpy()), of_neighbors, of_a_file]
)
def test_rows_are_read_after_the_last_step(read: Callable[[Any], Tensor], device: str) -> None:
    pair = Pair(device)
    for ids in BATCHES[:2]:
        pair.step(ids.to(device))
        assert torch.equal(read(pair.ours), pair.expected)


# ------------------------------------------------------------------------------------------------
# Nearest neighbors


@pytest.mark.parametrize("size", [1e20, 1e-13, 1e-30, 3e38, 1e-38, 1e300, 1e-300])
def test_rows_of_any_size_have_a_direction(size: float) -> None:
    dtype = torch.float32 if 1e-38 <= size <= 3e38 else torch.float64
    rows = torch.tensor([[3.0, 4.0], [4.0, -3.0], [0.0, 0.0]], dtype=dtype) * (size / 4)
    emb = speedtorch.EmbeddingBag.from_pretrained(rows)
    for queries in (rows, rows / size):
        scores, ids = speedtorch.nearest_neighbors(emb, queries, 1)
        assert ids.tolist() == [[0], [1], [0]]
        torch.testing.assert_close(scores, torch.tensor([[1.0], [1.0], [0.0]]))


def test_a_table_of_a_collection_is_read_as_one_of_its_own(tmp_path: Path) -> None:
    config = speedtorch.EmbeddingBagConfig
    tables = [config(3, WIDTH, "other"), config(5, WIDTH, "wanted")]
    collection = speedtorch.EmbeddingBagCollection(tables)
    collection.embedding_bags["wanted"].weight.copy_(values(5))
    table, alone = collection.embedding_bags["wanted"], made(values(5))
    queries = torch.randn(4, WIDTH)
    for found, expected in zip(
        speedtorch.nearest_neighbors(table, queries, 3),
        speedtorch.nearest_neighbors(alone, queries, 3),
        strict=True,
    ):
        assert torch.equal(found, expected)
    for name, each in (("table", table), ("alone", alone)):
        speedtorch.save_word2vec_format(each, tmp_path / name, ["a", "b", "c", "d", "e"])
    assert (tmp_path / "table").read_bytes() == (tmp_path / "alone").read_bytes()


def topk(rows: Tensor, queries: Tensor, k: int, metric: str) -> Any:
    rows, queries = rows.float(), queries.float()
    if metric == "cosine":
        rows, queries = F.normalize(rows, dim=1), F.normalize(queries, dim=1)
    return (queries @ rows.T).topk(k)


@pytest.mark.parametrize("metric", ["cosine", "dot"])
@pytest.mark.parametrize("block", [1, 7, 300, 1_000], ids="blocks of {}".format)
@pytest.mark.parametrize("k", [1, 10, 300])
def test_neighbors_are_those_of_topk(k: int, block: int, metric: str, device: str) -> None:
    rows, queries = values(300, 16), values(9, 16, seed=2)
    emb = made(rows, device=device)
    found = speedtorch.nearest_neighbors(emb, queries.to(device), k, metric=metric, rows=block)
    expected = topk(rows, queries, k, metric)
    torch.testing.assert_close(found[0].cpu(), expected.values, rtol=1e-4, atol=1e-5)
    assert torch.equal(found[1].cpu(), expected.indices)
    assert {each.device.type for each in found} == {device}


EQUAL = [[1.0], [2.0], [1.0], [2.0], [-1.0], [2.0]]


@pytest.mark.parametrize("block", [1, 2, 3, 6, 70], ids="blocks of {}".format)
@pytest.mark.parametrize(
    ("rows", "query", "metric", "ids", "scores"),
    [
        (EQUAL, [1.0], "dot", [1, 3, 5, 0, 2, 4], [2.0, 2.0, 2.0, 1.0, 1.0, -1.0]),
        (EQUAL, [-1.0], "dot", [4, 0, 2, 1, 3, 5], [1.0, -1.0, -1.0, -2.0, -2.0, -2.0]),
        (EQUAL, [0.0], "dot", [0, 1, 2, 3, 4, 5], [0.0] * 6),
        ([[-0.0, -0.0], [0.0, 0.0], [-0.0, 0.0]], [1.0, 1.0], "dot", [0, 1, 2], [0.0] * 3),
        ([[0.0, 0.0], [-1.0, 0.0], [5.0, 0.0]], [2.0, 0.0], "cosine", [2, 0, 1], [1.0, 0.0, -1.0]),
        ([[1.0]] * 600, [1.0], "cosine", [*range(200)], [1.0] * 200),
    ],
    ids=["rising", "falling", "zero", "zeros of either sign", "a row of zeros", "many"],
)
def test_of_equal_scores_the_lower_id_is_first(
    rows: Any, query: list[float], metric: str, ids: Any, scores: Any, block: int, device: str
) -> None:
    emb, queries = made(torch.tensor(rows)), torch.tensor([query], device=device)
    found = speedtorch.nearest_neighbors(emb, queries, len(ids), metric=metric, rows=block)
    assert (found[0].tolist(), found[1].tolist()) == ([scores], [ids])


@pytest.mark.parametrize("block", [3, 10], ids="blocks of {}".format)
def test_scores_are_ordered_as_topk_orders_them_to_the_ends_of_float32(
    block: int, device: str
) -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([-inf, -3e38, -1e-45, 1e-45, 3e38, inf, nan, -nan, -2.0, 2.0])[:, None]
    emb, one = made(rows), torch.ones(1, 1, device=device)
    for k in range(1, 11):
        scores, ids = speedtorch.nearest_neighbors(emb, one, k, metric="dot", rows=block)
        assert ids[0].tolist() == [6, 7, 5, 4, 9, 3, 2, 8, 1, 0][:k]
        expected = rows.T.topk(k).values
        torch.testing.assert_close(scores.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_many_queries_are_compared_in_parts() -> None:
    rows, queries = values(50, 8), values(33, 8, seed=2)
    with mock.patch.object(nearest, "_SCORES", 100):
        _, ids = speedtorch.nearest_neighbors(made(rows), queries, 4, metric="dot", rows=20)
    assert torch.equal(ids, topk(rows, queries, 4, "dot").indices)


def test_no_query_has_no_neighbors() -> None:
    scores, ids = speedtorch.nearest_neighbors(made(values()), torch.empty(0, WIDTH), 3)
    assert scores.shape == ids.shape == (0, 3) and ids.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_rows_of_another_dtype_are_compared_and_exported_in_float32(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    rows, queries = values().to(dtype), values(3, seed=2).to(dtype)
    emb = made(rows)
    assert_same_bytes(joined(emb), rows)
    scores, ids = speedtorch.nearest_neighbors(emb, queries, 5, metric="dot")
    expected = topk(rows, queries, 5, "dot")
    assert scores.dtype == torch.float32
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(scores, expected.values)
    speedtorch.save_word2vec_format(emb, tmp_path / "file", WORDS)
    assert np.array_equal(parsed(tmp_path / "file", binary=True)[1], rows.float().numpy())


def test_autocast_does_not_round_scores(device: str) -> None:
    rows, query = values(), values(1, seed=2)
    with torch.autocast(device, dtype=torch.bfloat16):
        scores, _ = speedtorch.nearest_neighbors(made(rows), query.to(device), 5, metric="dot")
    torch.testing.assert_close(scores.cpu(), topk(rows, query, 5, "dot").values)


def test_queries_that_need_gradients_get_none() -> None:
    query = torch.ones(1, WIDTH, requires_grad=True)
    scores, _ = speedtorch.nearest_neighbors(made(values()), query, 3)
    assert not scores.requires_grad and query.grad is None


QUERY = torch.ones(1, WIDTH)


EMPTY, COMPLEX = torch.zeros(0, WIDTH), torch.zeros(1, WIDTH, dtype=torch.complex64)
NOT_OURS = "emb: expected a speedtorch Embedding or EmbeddingBag, or a table .* got Embedding"
nearest_to = speedtorch.nearest_neighbors
WRONG: list[tuple[Callable[[Any], object], Tensor | None, type[Exception], str]] = [
    (lambda e: e.blocks(0), None, ValueError, "rows: expected 1 or more, the maximum .*, got 0"),
    (lambda e: e.blocks(-3), None, ValueError, "rows: expected 1 or more, .*got -3"),
    (lambda e: e.blocks(True), None, TypeError, "rows: expected an int, .*got True"),
    (lambda e: e.blocks(2.0), None, TypeError, "rows: expected an int, .*got 2.0"),
    (lambda e: e.blocks(None), None, TypeError, "rows: expected an int, .*got None"),
    (lambda e: e.numpy(), values().bfloat16(), ValueError, "NumPy has no torch.bfloat16"),
    (lambda e: nearest_to(e, QUERY), EMPTY, ValueError, "a table with rows, got an empty one"),
    (lambda e: nearest_to(e, QUERY, 21), None, ValueError, "k: .* of the table's 20 rows, got 21"),
    (lambda e: nearest_to(e, QUERY, 0), None, ValueError, "k: expected 1 to 20, .*got 0"),
    (lambda e: nearest_to(e, QUERY, 1.0), None, TypeError, "k: expected an int, .*got 1.0"),
    (lambda e: nearest_to(e, QUERY[0]), None, ValueError, r"queries: .* \[q, 4\], got \[4\]"),
    (lambda e: nearest_to(e, QUERY[:, :3]), None, ValueError, r"queries: .*, got \[1, 3\]"),
    (lambda e: nearest_to(e, QUERY.to_sparse()), None, ValueError, "dense .* of torch.sparse_coo"),
    (
        lambda e: nearest_to(e, QUERY.long()),
        None,
        TypeError,
        r"queries: .*floating-point vectors, got torch.int64.*emb\(ids\)",
    ),
    (lambda e: nearest_to(e, [[1.0] * 4]), None, TypeError, "queries: expected a tensor, got list"),
    (lambda e: nearest_to(e, QUERY, metric="l2"), None, ValueError, "'cosine' or 'dot', got 'l2'"),
    (lambda e: nearest_to(e, QUERY, rows=0), None, ValueError, "rows: expected 1 or more"),
    (lambda e: nearest_to(e, QUERY, 1), COMPLEX, TypeError, "emb: .*torch.complex64"),
    (lambda e: exported(e), COMPLEX, TypeError, "emb: .*torch.complex64"),
    (lambda _: nearest_to(nn.Embedding(1, WIDTH), QUERY), None, TypeError, NOT_OURS),
    (lambda _: exported(nn.Embedding(1, WIDTH)), None, TypeError, NOT_OURS),
]


def exported(emb: Any) -> object:
    return speedtorch.save_word2vec_format(emb, "file", ["a"])


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize(("call", "rows", "error", "message"), WRONG)
def test_wrong_arguments_raise(
    call: Callable[[Any], object], rows: Tensor | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(made(values() if rows is None else rows))
    assert not Path("file").exists()


# ------------------------------------------------------------------------------------------------
# Files of word2vec


def parsed(path: Path, *, binary: bool) -> tuple[list[str], npt.NDArray[Any]]:
    """Words and vectors of a file, read as the format says."""
    header, _, rest = path.read_bytes().partition(b"\n")
    rows, columns = map(int, header.split(b" "))
    words, vectors = [], np.empty((rows, columns), np.float32)
    for row in range(rows):
        word, _, rest = rest.partition(b" ")
        words.append(word.decode())
        if binary:
            vectors[row] = np.frombuffer(rest, "<f4", columns)
            assert rest[4 * columns : 4 * columns + 1] == b"\n"
            rest = rest[4 * columns + 1 :]
        else:
            line, _, rest = rest.partition(b"\n")
            vectors[row] = [np.float32(text) for text in line.split(b" ")]
    assert rest == b""
    return words, vectors


BINARY = pytest.mark.parametrize("binary", [True, False], ids=["binary", "text"])


class FewWords:
    """A sequence without __iter__."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: int) -> str:
        return ["a", "b"][place]


@BINARY
@pytest.mark.parametrize("block", [1, 3 * 4 * WIDTH, 1 << 20], ids="blocks of {} bytes".format)
def test_a_file_has_all_words_and_rows(
    binary: bool, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word2vec_format, "_BINARY_BLOCK" if binary else "_TEXT_BLOCK", block)
    speedtorch.save_word2vec_format(made(values()), tmp_path / "file", WORDS, binary=binary)
    words, vectors = parsed(tmp_path / "file", binary=binary)
    assert words == WORDS and np.array_equal(vectors, values().numpy())


@BINARY
def test_a_file_has_numbers_to_the_ends_of_float32(binary: bool, tmp_path: Path) -> None:
    finite = torch.finfo(torch.float32)
    numbers = [0.1, 1e-45, finite.tiny, finite.max, finite.min, float("inf"), 1 / 3, -0.0]
    emb = made(torch.tensor([numbers]))
    speedtorch.save_word2vec_format(emb, tmp_path / "file", ["a"], binary=binary)
    _, vectors = parsed(tmp_path / "file", binary=binary)
    assert vectors.tobytes() == torch.tensor([numbers]).numpy().tobytes()


@BINARY
@pytest.mark.parametrize(
    "given",
    [
        ["Straße", "中文", "a\u00a0b", "e\u0301", "\U0001f600", "</s>"],
        np.array(WORDS),
        FewWords(),
    ],
    ids=["any script", "a NumPy array", "without __iter__"],
)
def test_words_are_a_sequence_of_any_script(given: Any, binary: bool, tmp_path: Path) -> None:
    emb = made(values(len(given)))
    speedtorch.save_word2vec_format(emb, tmp_path / "file", given, binary=binary)
    assert parsed(tmp_path / "file", binary=binary)[0] == [given[n] for n in range(len(given))]


def test_a_table_without_rows_has_no_block_and_a_file_with_its_header(tmp_path: Path) -> None:
    assert list(speedtorch.Embedding(0, 3).blocks()) == []
    speedtorch.save_word2vec_format(speedtorch.Embedding(0, 3), tmp_path / "file", [])
    assert (tmp_path / "file").read_bytes() == b"0 3\n"


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["a", "b"], ValueError, "words: expected 3, one for each row, got 2"),
        (["a", "b", "c", "d"], ValueError, "words: expected 3, one for each row, got 4"),
        (["a", "", "c"], ValueError, r"words\[1\]: expected a word, got an empty one"),
        (["a", "b", "New York"], ValueError, r"words\[2\]: expected no space, .*'New York'"),
        (["a", "b\n", "c"], ValueError, r"words\[1\]: expected no space, tab .*'b\\n'"),
        (["a", "b\t", "c"], ValueError, r"words\[1\]: expected no space, tab .*'b\\t'"),
        (["a", "b", "a"], ValueError, r"words\[2\]: .* words\[0\] is 'a'"),
        (["a", "\ud800", "c"], ValueError, r"words\[1\]: .*no UTF-8 encoding.*surrogates"),
        (["a", 2, "c"], TypeError, r"words\[1\]: expected a str, got 2"),
        ("abc", TypeError, "words: expected a sequence of str, got str"),
        ({"a": 0, "b": 1, "c": 2}, TypeError, "words: expected a sequence of str, got dict"),
        (iter(["a", "b", "c"]), TypeError, "words: expected a sequence of str, got list_iterator"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_wrong_words_are_refused_before_anything_is_written(
    words: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        speedtorch.save_word2vec_format(made(values(3)), tmp_path / "file", words)
    assert list(tmp_path.iterdir()) == []


def test_an_error_half_way_keeps_the_previous_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, copied = tmp_path / "file", TrainedRows.copied
    path.write_text("before")

    def failing(self: TrainedRows, rows: slice) -> Tensor:
        if rows.start:
            raise KeyboardInterrupt
        return copied(self, rows)

    monkeypatch.setattr(word2vec_format, "_BINARY_BLOCK", 5 * 4 * WIDTH)
    monkeypatch.setattr(TrainedRows, "copied", failing)
    with pytest.raises(KeyboardInterrupt):
        speedtorch.save_word2vec_format(made(values()), path, WORDS)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------------------------------------
# Progress


BARS: dict[str, Callable[..., object]] = {
    "neighbors": lambda emb, **how: speedtorch.nearest_neighbors(emb, QUERY, rows=3, **how),
    "file": lambda emb, **how: speedtorch.save_word2vec_format(emb, "file", WORDS, **how),
}


@pytest.mark.usefixtures("own_folder", "on_a_terminal")
@pytest.mark.parametrize("work", BARS.values(), ids=BARS)
def test_a_bar_counts_rows_unless_it_is_declined(
    work: Callable[..., object],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress_bars, "_BAR_AFTER_SECONDS", 0.0)
    for progress in (None, True, False):
        work(made(values()), progress=progress)
        assert ("20.0" in capsys.readouterr().err) == (progress is not False)

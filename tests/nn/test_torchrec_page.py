"""The program of docs/from_torchrec.md runs on ranks too, and its error messages are raised."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import ROOT, blocks
from keyed_ids import Deduplicated, KeyedIds, Strided
from torch import nn, optim
from warm_python import finished, warm_python

import speedtorch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.distributed.optim's
PAGE = ROOT / "docs" / "from_torchrec.md"
RANKS = ["--standalone", "--nproc-per-node", "2"]
DATA_PARALLEL = "cannot average the gradients of rows that differ between processes"
IDS = {"user": [[3], [19]], "seen": [[1, 2], []], "bought": [[], [4]]}


class Ranker(nn.Module):
    """The model of the page, with small tables."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.tables = tables(**settings)
        self.score = nn.Linear(12, 1)

    def forward(self, features: Any) -> torch.Tensor:
        found: torch.Tensor = self.score(self.tables(features).values())
        return found


def tables(data_type: object = torch.float32, **settings: Any) -> Any:
    kind = speedtorch.EmbeddingBagConfig
    return speedtorch.EmbeddingBagCollection(
        [kind(20, 4, "user", data_type), kind(30, 4, "item", data_type, ["seen", "bought"])],
        **settings,
    )


def stepped_without_attach() -> None:
    model = Ranker()
    model(KeyedIds.of(IDS)).sum().backward()
    optim.Adam(model.tables.parameters()).step()


def stepped_in_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

    apply_optimizer_in_backward(optim.SGD, Ranker().tables.parameters(), {"lr": 0.1})


def sharded_after_a_lookup() -> None:
    model = Ranker()
    model(KeyedIds.of(IDS))
    speedtorch.shard(model)


def trained_by_data_parallel() -> None:
    nn.parallel.DistributedDataParallel(Ranker())(KeyedIds.of(IDS))


def with_ids(**changed: list[list[int]]) -> KeyedIds:
    return KeyedIds.of({**IDS, **changed})


MESSAGES: list[tuple[str, type[Exception], Callable[[], object]]] = [
    (
        "rows can be on the CPU or a GPU, got device meta",
        NotImplementedError,
        lambda: tables(device=torch.device("meta")),
    ),
    ("data_type must be one of … got", ValueError, lambda: tables(torch.int8)),
    (
        "keeps … of each row of tables … Call speedtorch.attach",
        RuntimeError,
        stepped_without_attach,
    ),
    ("view_as() of its weight would need all … rows", NotImplementedError, stepped_in_backward),
    ("object has no attribute 'fused_optimizer'", AttributeError, lambda: Ranker().fused_optimizer),
    (
        "has no 'is_leaf' … set group='user' in the table's config",
        RuntimeError,
        lambda: optim.SGD([tables().embedding_bags["user"].weight]),
    ),
    (
        "a collection looks up all its tables together",
        NotImplementedError,
        lambda: tables().embedding_bags["user"](torch.tensor([3])),
    ),
    (
        "features … are missing. The input has",
        KeyError,
        lambda: tables()(KeyedIds.of({"user": [[3]], "seen": [[1]]})),
    ),
    (
        "no table has the features",
        KeyError,
        lambda: tables()({key: torch.tensor([3]) for key in (*IDS, "word")}),
    ),
    (
        "features must have equal numbers of samples, got",
        ValueError,
        lambda: tables()(Strided.of(IDS)),
    ),
    (
        "inverse_indices are not supported",
        NotImplementedError,
        lambda: tables()(Deduplicated.of(IDS)),
    ),
    (
        "is_weighted needs a weight for each id, got None",
        ValueError,
        lambda: tables(is_weighted=True)(KeyedIds.of(IDS)),
    ),
    (
        "feature 'user': id … is out of range for table 'user' of … rows",
        IndexError,
        lambda: tables()(with_ids(user=[[3], [20]])),
    ),
    (
        "the module was converted to torch.float16, but its table remains torch.float32",
        TypeError,
        lambda: Ranker().half()(KeyedIds.of(IDS)),
    ),
    (
        "torch.export, torch.jit and ONNX cannot export a lookup",
        NotImplementedError,
        lambda: torch.export.export(
            Ranker(), ({key: torch.tensor([3]) for key in IDS},), strict=False
        ),
    ),
    (
        "EmbeddingBagCollection cannot be pickled",
        TypeError,
        lambda: torch.save(Ranker(), os.devnull),
    ),
    (
        "its rows have been used, were passed to it, or are sharded already",
        RuntimeError,
        sharded_after_a_lookup,
    ),
    (
        DATA_PARALLEL,
        NotImplementedError,
        trained_by_data_parallel,
    ),
]


def pattern(message: str) -> str:
    """Of a message in the page, where `…` stands for what differs."""
    return ".*".join(re.escape(text.strip()) for text in message.split("…"))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("message", "kind", "call"), MESSAGES, ids=[row[0] for row in MESSAGES])
def test_the_message_is_raised(
    message: str, kind: type[Exception], call: Callable[[], object]
) -> None:
    with pytest.raises(kind, match=pattern(message)):
        call()


def test_every_message_of_the_page_is_tried() -> None:
    section = PAGE.read_text().partition("## Error messages")[2]
    named = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert sorted(named) == sorted(message for message, *_ in MESSAGES)


@pytest.mark.examples
@pytest.mark.parametrize("ranks", [[], RANKS], ids=["one process", "two ranks"])
def test_the_program_trains(ranks: list[str], tmp_path: Path) -> None:
    (program,) = blocks(PAGE, "python")
    (tmp_path / "train.py").write_text(program.text)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    hidden = {} if torch.cuda.device_count() > 1 else {"CUDA_VISIBLE_DEVICES": ""}
    launcher = ["-m", "torch.distributed.run", *ranks] if ranks else []
    done = finished(
        [warm_python(), *launcher, "-m", "train"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **hidden},
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"loss (\S+), after 20 steps (\S+)", done.stdout)
    assert len(losses) == (2 if ranks else 1)
    assert all(float(last) < 0.8 * float(first) for first, last in losses)

"""The pages of docs/: examples run, links lead somewhere, and what is named is there."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documents import PAGES, README, ROOT, Block, blocks
from warm_python import run_warm

import speedtorch
from speedtorch import optim, types
from speedtorch.nn.prefetch_pace import AHEAD

prefetch_module = importlib.import_module("speedtorch.nn.prefetch")
DOCS = ROOT / "docs"
# Their examples have tests of their own, of what these print or save.
TESTED_ALONE = {"collections", "layers", "several_gpus", "streams_and_threads"}
EXAMPLES = [
    block
    for document in (README, *PAGES)
    if document.stem not in TESTED_ALONE
    for block in blocks(document, "python")
]
FIRST_READ = (README, DOCS / "quickstart.md", DOCS / "embedding.md")
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(example, marks=[] if example.document in FIRST_READ else pytest.mark.examples)
        for example in EXAMPLES
    ],
    ids=str,
)
def test_a_block_of_python_runs_by_itself(block: Block, tmp_path: Path) -> None:
    if "torch.jit" in block.text and sys.version_info >= (3, 14):
        pytest.skip("torch refuses TorchScript on Python 3.14")
    # A file, which TorchScript and spawned processes read.
    file = tmp_path / "example.py"
    file.write_text(block.text)
    run_warm(
        "-c", f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')", cwd=tmp_path
    )


def prose(document: Path) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """Of the headings of a document, as they stand in links."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [README, *PAGES], ids=lambda document: document.stem)
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    for target in (inline or below for inline, below in LINK.findall(prose(document))):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = re.findall(r"^(\w+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [page.stem for page in PAGES if page.stem != "index"]


@pytest.mark.parametrize("module", [speedtorch, types, optim], ids=lambda module: module.__name__)
def test_the_api_page_has_every_public_name_once(module: ModuleType) -> None:
    entry = rf"^\.\. auto\w+:: {re.escape(module.__name__)}\.(\w+)$"
    named = re.findall(entry, (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(module.__all__)


@pytest.mark.parametrize("module", [speedtorch, optim], ids=["speedtorch", "optim"])
def test_every_public_name_has_a_docstring(module: ModuleType) -> None:
    assert [name for name in module.__all__ if not getattr(module, name).__doc__] == []


def test_every_file_of_the_map_is_there() -> None:
    page = (DOCS / "journeys.md").read_text()
    tree = page.partition("## Map")[2].partition("```\n")[2].partition("```")[0]
    above = place = ROOT
    named = set()
    for line in tree.splitlines():
        depth, (name, *words) = len(line) - len(line.lstrip()), line.split()
        if depth > 2:  # more about the line before
            words.insert(0, name)
        else:
            above = above if depth else ROOT / name
            place = above / name if depth else above
            assert place.exists(), name
            named.add(place)
        for file in re.findall(r"\b\w+\.py\b", " ".join(words)):
            assert (place / file).exists(), f"{file} is not in {place}"
    sources = [*(ROOT / "speedtorch").rglob("*.py"), *(ROOT / "csrc").rglob("*.*")]
    assert {file.parent for file in sources} <= named


def test_every_function_of_the_ops_block_has_the_signature_shown() -> None:
    page = (DOCS / "ops.md").read_text()
    block = page.partition("## Contracts")[2].partition("```\n")[2].partition("```")[0]
    assert block.count("\n") > 5
    for line in block.splitlines():
        name, _, rest = line.partition("(")
        arguments = re.findall(r"(\w+)(?:=[^,)]*)?(?=[,)])", rest.partition(" ->")[0])
        assert list(inspect.signature(getattr(speedtorch, name)).parameters) == arguments


def test_every_error_message_that_is_explained_is_one() -> None:
    sources = [
        *(ROOT / "speedtorch").rglob("*.py"),
        *(ROOT / "csrc").rglob("*.cpp"),
        *(ROOT / "csrc").rglob("*.h"),
    ]
    # Messages stand in pieces, over several lines and with values between.
    known = "".join(re.sub(r'"\s*f?"', "", file.read_text()) for file in sources)
    page = (DOCS / "troubleshooting.md").read_text().partition("## Building")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) >= 25
    for message in messages:
        parts = [part.strip(" :,'") for part in message.split("…")]
        assert [part for part in parts if part not in known] == [], message


def defined_in(file: Path) -> set[str]:
    """The functions of a file, and the methods as `Class.method`."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            parts = [method for method in node.body if isinstance(method, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}" for method in parts}
    return found


def ways_of_an_id() -> dict[str, list[tuple[str, str]]]:
    """The files and functions that an id passes, by the kind of step."""
    section = (DOCS / "journeys.md").read_text().split("## Follow a row id by kind of step")[1]
    ways: dict[str, list[tuple[str, str]]] = {}
    kind = ""
    for line in section.split("```")[1].strip().splitlines():
        if line.startswith(" "):
            file, function = line.split()
            ways[kind].append((file, function))
        else:
            kind = line
            ways[kind] = []
    return ways


def test_the_ways_of_an_id_pass_functions_that_are_there() -> None:
    ways = ways_of_an_id()
    assert list(ways) == ["plain", "prefetched", "capacity", "collection", "shard", "graph"]
    passed = [call for way in ways.values() for call in way]
    package = DOCS.parent / "speedtorch"
    missing = [call for call in passed if call[1] not in defined_in(package / call[0])]
    assert len(passed) > 20 and missing == []


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Iterable[Any]) -> None:
    """One step for each batch."""
    for given in loop:
        optimizer.zero_grad()
        found = model(given)
        (found if isinstance(found, torch.Tensor) else found.values()).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["plain", "prefetched", "capacity", "collection", "shard"])
def test_an_id_passes_the_functions_in_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[Any] = [torch.arange(start, start + 6) for start in (0, 3, 5, 9)]
    if kind == "collection":
        configs = [speedtorch.EmbeddingBagConfig(50, 4, name) for name in ("user", "item")]
        model: Any = speedtorch.EmbeddingBagCollection(tables=configs)
        batches = [{"user": ids, "item": ids + 1} for ids in batches]
    else:
        model = speedtorch.Embedding(50, 4, capacity=8 if kind == "capacity" else None)
    if kind == "shard":
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        speedtorch.shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    speedtorch.attach(optimizer, model)
    train(model, optimizer, batches[:2])
    loop: Iterable[Any] = batches[2:3]
    if kind == "prefetched":  # on a CPU, batches are not planned ahead
        monkeypatch.setattr(prefetch_module, "pace_of", lambda modules: AHEAD)
        loop = speedtorch.prefetch(batches, model, ids=lambda ids: ids)
    package, called = f"{Path(speedtorch.__file__).parent}{os.sep}", []

    def note(frame: FrameType, event: str, _: object) -> None:
        file, code = frame.f_code.co_filename, frame.f_code
        if event == "call" and file.startswith(package):
            called.append((file.removeprefix(package), code.co_name))

    sys.setprofile(note)
    try:
        train(model, optimizer, loop)
    finally:
        sys.setprofile(None)
        if kind == "shard":
            dist.destroy_process_group()
    following = iter(called)
    for file, function in ways_of_an_id()[kind]:
        name = function.rpartition(".")[2]
        assert (file, name) in following, f"{function} is called earlier or not at all"


@pytest.mark.parametrize(
    "name", ["Embedding", "EmbeddingBag", "EmbeddingCollection", "EmbeddingBagCollection"]
)
def test_the_api_page_has_inherited_methods_and_no_helpers(name: str) -> None:
    page, kind = (DOCS / "api.md").read_text(), getattr(speedtorch, name)
    entry = page.partition(f".. autoclass:: speedtorch.{name}\n")[2].partition("\n\n")[0]
    assert ":inherited-members: Module" in entry
    hidden = entry.partition(":exclude-members: ")[2].split(", ")
    assert [name for name in hidden if not hasattr(kind, name)] == []
    assert "announce" not in hidden

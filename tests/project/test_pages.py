"""The pages of docs/: examples run, links lead somewhere, and what is named is there."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from documents import PAGES, README, ROOT, Block, blocks
from warm_python import run_warm

import speedtorch
from speedtorch import optim, types

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


def test_the_ways_of_an_id_pass_functions_that_are_there() -> None:
    section = (DOCS / "journeys.md").read_text().split("## Follow a row id by kind of step")[1]
    ways = section.split("```")[1].strip().splitlines()
    names = [line for line in ways if not line.startswith(" ")]
    assert names == ["plain", "prefetched", "capacity", "collection", "shard", "graph"]
    passed = [line.split() for line in ways if line.startswith(" ")]
    package = DOCS.parent / "speedtorch"
    missing = [call for call in passed if call[1] not in defined_in(package / call[0])]
    assert len(passed) > 20 and missing == []


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

"""Folders stand above each other: imports and includes go down, and none goes in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import speedtorch

PACKAGE = Path(speedtorch.__file__).parent
# From the ground up. Of two that know nothing of each other either may come first.
ROOMS = ["ops", "plan", "files", "memory", "table", "step", "optim", "layers", "nn", "parallel"]
ROOMS += ["checkpoints", "legacy"]
FILES = sorted(PACKAGE.rglob("*.py"))
CSRC = PACKAGE.parent / "csrc"
CSRC_ROOMS = ["core", "memory", "call", "move", "plan", "ops", "python"]
CSRC_FILES = sorted(file for file in CSRC.rglob("*") if file.is_file())


def file_of(module: str) -> Path | None:
    """The file of a module of the package, if it is one."""
    first, *parts = module.split(".")
    path = PACKAGE.joinpath(*parts)
    found = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return found if first == "speedtorch" and found.is_file() else None


def imports_of(file: Path) -> Iterator[Path]:
    """The files of the package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found = [file_of(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{file}: a relative import"
            found = [file_of(f"{node.module}.{alias.name}") for alias in node.names]
            if None in found and node.module != "speedtorch":  # where the library is
                found.append(file_of(node.module))
        else:
            continue
        yield from (path for path in found if path is not None)


def floor_of(file: Path) -> int:
    """0 for what knows nothing of ours, the rooms' own, and one above all for the other files."""
    if file.name in ("version.py", "torch_internals.py"):
        return 0
    parts = file.relative_to(PACKAGE).parts
    return ROOMS.index(parts[0]) + 1 if len(parts) > 1 else len(ROOMS) + 1


def test_every_folder_is_a_room() -> None:
    folders = {file.parent for file in FILES} - {PACKAGE}
    assert folders == {PACKAGE / room for room in ROOMS}


def test_the_tests_stand_in_the_rooms_of_what_they_test() -> None:
    folders = {file.parent.name for file in Path(__file__).parents[1].glob("*/test_*.py")}
    assert folders == {*ROOMS, "demos", "project"}


def test_the_library_alone_is_no_file_of_python() -> None:
    assert file_of("speedtorch.step.exchange") == PACKAGE / "step" / "exchange.py"
    assert file_of("speedtorch.step") == PACKAGE / "step" / "__init__.py"
    assert file_of("speedtorch._C") is None and file_of("torch.nn") is None


def test_imports_go_down_and_in_no_circle() -> None:
    imports = {file: set(imports_of(file)) for file in FILES}
    above = [(f, file) for f in FILES for file in imports[f] if floor_of(file) > floor_of(f)]
    assert above == []
    # A folder's face names what is in the folder, and is no part of it.
    graph = {file: found for file, found in imports.items() if file.name != "__init__.py"}
    order = list(TopologicalSorter(graph).static_order())
    assert order.index(PACKAGE / "step" / "row_store.py") < order.index(
        PACKAGE / "step" / "exchange.py"
    )


def test_every_folder_of_csrc_is_a_room() -> None:
    assert {file.parent for file in CSRC_FILES} == {CSRC / room for room in CSRC_ROOMS}


def test_includes_go_down() -> None:
    for file in CSRC_FILES:
        included = re.findall(r'^#include "(.+)"$', file.read_text(), re.MULTILINE)
        assert [name for name in included if not (CSRC / name).is_file()] == [], file
        own = CSRC_ROOMS.index(file.parent.name)
        rooms = [Path(name).parent.name for name in included]
        assert [room for room in rooms if CSRC_ROOMS.index(room) > own] == [], file
        if file.suffix in (".cu", ".cuh"):  # nvcc compiles them beside any torch
            assert re.findall(r"#include <(torch|ATen|c10)", file.read_text()) == [], file


# What torch's objects show of ours, what autograd keeps for a node, and what Python keeps of errors
# and finalisers.
NOT_OURS = {"grad", "data", "state", "param_groups", "load_state_dict", "atexit"}
NOT_OURS |= {"args", "filename", "strerror", "step"}


def assigned(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that are assigned to within a piece of source."""
    for statement in ast.walk(node):
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AugAssign | ast.AnnAssign):
            targets = [statement.target]
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (part for part in parts if isinstance(part, ast.Attribute))


def test_an_object_alone_writes_to_its_fields() -> None:
    for file in FILES:
        targets = list(assigned(ast.parse(file.read_text())))
        own = {target.attr for target in targets if ast.unparse(target.value) == "self"}
        foreign = {
            f"{file}: {ast.unparse(target)}, line {target.lineno}"
            for target in targets
            if ast.unparse(target.value) not in ("self", "cls", "ctx")
            and not target.attr.startswith("__")
            and target.attr not in NOT_OURS | own
        }
        assert file.name == "row_weight.py" or foreign == set()


def test_each_field_of_an_object_is_written_from_one_file() -> None:
    written: dict[str, dict[Path, set[str]]] = {}
    bases: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                own = {t.attr for t in assigned(node) if ast.unparse(t.value) == "self"}
                written[node.name] = {file: own} if own else {}
                bases[node.name] = [ast.unparse(base).partition("[")[0] for base in node.bases]

    def writers(name: str) -> dict[Path, set[str]]:
        found = dict(written.get(name, {}))
        for base in bases.get(name, []):
            for file, own in writers(base).items():
                found[file] = found.get(file, set()) | own
        return found

    for name in written:
        fields = [field for own in writers(name).values() for field in own]
        assert len(fields) == len(set(fields)), name


PUBLIC = {"HostTable", "RowModule"}
"""Classes whose methods are users' API: RowModule is the base of Embedding and EmbeddingBag."""


def test_no_internal_class_has_more_than_25_methods() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and node.name not in PUBLIC:
                methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
                assert len(methods) <= 25, f"{file}: {node.name}"

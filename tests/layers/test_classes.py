"""Classes of layers have one idea each."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from speedtorch import layers

FILES = sorted(Path(layers.__file__).parent.glob("*.py"))
MOST_METHODS = 25


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_class_has_more_than_25_methods(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            assert len(methods) <= MOST_METHODS, node.name

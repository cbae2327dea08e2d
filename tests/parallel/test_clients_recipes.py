"""accelerate, Lightning and transformers train, save and resume sharded tables, bit for bit.

Needs these libraries: make clients.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_processes import in_processes
from sharded_recipes import HOSTS, begin, check_clipping_refused, check_refused, go_on
from warm_python import finished

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

LIBRARIES = {"fabric": "lightning"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("accelerate", "Adam", {}),
    ("accelerate", "SGD", {"safe": False, "most": 0.1}),
    ("accelerate", "Adagrad", {"parts": 3}),
    ("fabric", "Adam", {}),
    ("fabric", "SGD", {"most": 0.1}),
    ("lightning", "Adam", {"most": 0.1}),
    ("lightning", "Adagrad", {}),
    ("transformers", "Adam", {"most": 0.0}),
    ("transformers", "SGD", {"most": 1.0}),
]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("host", "name", "settings"), CASES, ids=str)
def test_a_fresh_process_goes_on_with_the_bits_of_a_plain_loop(
    host: str, name: str, settings: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    pytest.importorskip(LIBRARIES.get(host, host))
    given = (host, str(tmp_path), name, settings)
    in_processes(ranks, begin, *given, timeout=60)
    in_processes(ranks, go_on, *given, timeout=60)


@pytest.mark.parametrize("host", HOSTS)
def test_a_save_of_one_ranks_rows_names_the_remedy(host: str, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES.get(host, host))
    in_processes(1, check_refused, host, str(tmp_path), timeout=60)


@pytest.mark.parametrize(
    ("host", "most"),
    [("accelerate", 1.0), ("lightning", 1.0), ("transformers", 1.0), ("transformers", 0.0)],
)
def test_the_norm_of_one_ranks_gradients_is_refused(host: str, most: float, tmp_path: Path) -> None:
    pytest.importorskip(host)
    in_processes(2, check_clipping_refused, host, str(tmp_path), most, timeout=60)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize("host", HOSTS)
def test_a_fresh_process_of_one_goes_on_with_the_bits_of_a_plain_loop(
    host: str, name: str, tmp_path: Path
) -> None:
    """Without shard(), in which full_state_dict() does nothing."""
    pytest.importorskip(LIBRARIES.get(host, host))
    for function in ("begin", "go_on"):
        given = (host, str(tmp_path), name, {})
        program = f"import sharded_recipes; sharded_recipes.{function}(*{given!r})"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = finished([sys.executable, "-c", program], env=environment)
        assert done.returncode == 0, done.stderr

"""The example with Lightning trains as plain torch does, and resumes.

Needs Lightning: make clients.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_examples import example, run_commands, same_tables

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
SMALL = ["--ratings", "4000", "--batch", "256", "--columns", "4"]


@pytest.fixture(autouse=True)
def _lightning() -> None:
    try:
        import lightning  # noqa: F401
    except ImportError:
        pytest.importorskip("pytorch_lightning")


@pytest.mark.usefixtures("deterministic")
def test_lightning_resumes_with_the_bits_of_one_run_and_of_plain_torch(tmp_path: Path) -> None:
    main = example("with_lightning").main
    one, two = (["--folder", str(tmp_path / name), *SMALL] for name in ("one", "two"))
    errors, state = main([*one, "--epochs", "4"])
    first, _ = main([*two, "--epochs", "2"])
    rest, resumed = main([*two, "--epochs", "4", "--resume"])
    assert first + rest == errors and same_tables(resumed, state, 0)
    plain_errors, plain = main([*one, "--epochs", "4", "--plain"])
    close = 1e-3 if torch.cuda.is_available() else 0
    assert same_tables(plain, state, close) and plain_errors == pytest.approx(errors, rel=close)
    # A checkpoint of either goes on in the other.
    first, _ = main([*two, "--epochs", "2", "--plain"])
    rest, resumed = main([*two, "--epochs", "4", "--resume"])
    assert same_tables(resumed, state, close)


@pytest.mark.usefixtures("own_folder")
def test_the_commands_of_its_page_run() -> None:
    (whole, state), (first, _), (rest, resumed), (plain, _) = run_commands(
        "example_lightning", "with_lightning", *SMALL
    )
    assert whole == first + rest and same_tables(resumed, state, 0)
    assert torch.cuda.is_available() or plain == whole


def test_the_error_falls(tmp_path: Path) -> None:
    errors, _ = example("with_lightning").main(["--folder", str(tmp_path), "--epochs", "3"])
    assert errors[-1] < 0.1  # 1 for a model that knows nothing

"""Faults that the random programs must find: each changes one place of the package's source."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import speedtorch

__all__ = ["MUTANTS", "Mutant", "mutated_copy"]

_PACKAGE = Path(speedtorch.__file__).parent
_TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Mutant:
    """A change of one place.

    Attributes:
        name: what is wrong then.
        file: of the package, relative to its folder.
        old: text that occurs once there.
        new: what stands there instead.
    """

    name: str
    file: str
    old: str
    new: str

    def apply(self, package: Path) -> None:
        """Changes a copy of the package.

        Raises:
            LookupError: the text is not there, or more than once: this list is out of date.
        """
        path = package / self.file
        source = path.read_text() if path.is_file() else ""
        found = source.count(self.old)
        if found != 1:
            raise LookupError(
                f"mutant {self.name!r}: expected its text once in {self.file}, found it {found}"
                f" times; tests/mutants.py must follow the source:\n{self.old}"
            )
        changed = source.replace(self.old, self.new)
        compile(changed, str(path), "exec")
        path.write_text(changed)


MUTANTS = [
    Mutant(
        "rows that join a step make the others clean",
        "swapper.py",
        "            self._dirty = dirty\n",
        "            self._dirty = False\n",
    ),
    Mutant(
        "a flush forgets that the step is over",
        "exchange.py",
        "            self._over |= self._was_written()\n",
        "",
    ),
    Mutant(
        "rows that stay in the next step count as the table's",
        "swapper.py",
        "self._hold(rows, ids, batch, newer=dirty)",
        "self._hold(rows, ids, batch, newer=False)",
    ),
    Mutant(
        "rows that arrived ahead count as the table's",
        "exchange.py",
        "self._hold(rows, batch.ids, batch, newer=True)",
        "self._hold(rows, batch.ids, batch, newer=False)",
    ),
    Mutant(
        "rows that arrived ahead are dropped, not written",
        "exchange.py",
        "        self._exchange.join()\n        self._write_coming()\n",
        "        self._exchange.join()\n",
    ),
    Mutant(
        "evaluation shortens rows of the table, not those of the step",
        "swapper.py",
        "            self._rows.index_copy_(0, places[held], rows[held])\n",
        "            pass\n",
    ),
    Mutant(
        "shortened rows of the step are not written",
        "swapper.py",
        "            self._dirty, self._version = True, self.parameter._version\n",
        "            self._version = self.parameter._version\n",
    ),
    Mutant(
        "the padding's row is shortened for the step only",
        "swapper.py",
        "            self.write_padding(rows, count)\n            self._dirty",
        "            self._dirty",
    ),
    Mutant(
        "announced rows do not join a planned batch",
        "swapper.py",
        "        if planned is not None and told:\n            self._extend(told)\n",
        "",
    ),
    Mutant(
        "zeros of zero_grad move rows",
        "held_rows.py",
        "            if not again and not values.count_nonzero():\n",
        "            if False:\n",
    ),
    Mutant(
        "a gradient stays where it was while rows join",
        "swapper.py",
        "            self._move_gradient(gradient, moved)\n",
        "",
    ),
    Mutant(
        "a load forgets the gradient of the step that goes on",
        "swapper.py",
        "            if pending and gradient is not None:\n",
        "            if False:\n",
    ),
    Mutant(
        "the padding has no place behind rows that joined",
        "planned_batch.py",
        "            places = torch.where(self.plan[0] == self._padding, len(ids), places)\n",
        "            pass\n",
    ),
    Mutant(
        "a flush writes the weight of other places",
        "held_rows.py",
        "            self._numbers = torch.arange(2 * count, device=self.device)\n",
        "            self._numbers = torch.arange(2 * count, device=self.device).flip(0)\n",
    ),
]


def mutated_copy(folder: Path, mutant: Mutant | None) -> Path:
    """A copy of package and tests, changed by the mutant, that pytest runs in."""
    skipped = shutil.ignore_patterns("__pycache__", ".hypothesis", "data")
    shutil.copytree(_PACKAGE, folder / "speedtorch", ignore=skipped)
    shutil.copytree(_TESTS, folder / "tests", ignore=skipped)
    shutil.copy(_TESTS.parent / "pyproject.toml", folder)
    if mutant is not None:
        mutant.apply(folder / "speedtorch")
    return folder

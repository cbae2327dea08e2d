"""The time that each feature has run without a fault, in a file to which all machines add."""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

__all__ = ["Figures", "Progress", "commit"]


def commit() -> str:
    """SPEEDTORCH_COMMIT, or the commit of the checkout; "" if neither is known."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    known = os.environ.get("SPEEDTORCH_COMMIT")  # of a copy without git
    return known or subprocess.run(command, capture_output=True, text=True).stdout.strip()


@dataclass
class Figures:
    """Runs of a feature on one kind of machine since its last fault.

    Attributes:
        seconds: Of all programs that used the feature.
        programs: How many there were.
        since: The date of the fault, or of the first run.
        commit: That was run then.
        fault: The seed of the program that found the fault; "" if there was none.
    """

    seconds: float = 0.0
    programs: int = 0
    since: str = ""
    commit: str = ""
    fault: str = ""


class Progress:
    """The figures of a file, by kind of machine and feature.

    Args:
        path: A JSON file, made by the first save.
        machine: "cpu" or "gpu".
    """

    def __init__(self, path: Path, machine: str) -> None:
        self.path, self.machine, self.commit = path, machine, commit()
        self._new: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)

    def read(self) -> dict[str, dict[str, Figures]]:
        if not self.path.exists():
            return {}
        return {
            machine: {name: Figures(**fields) for name, fields in features.items()}
            for machine, features in json.loads(self.path.read_text()).items()
        }

    def add(self, features: Iterable[str], seconds: float, fault: str = "") -> None:
        """Adds a program; its features begin anew if it has found a fault."""
        for name in features:
            self._new[name].append((seconds, fault))

    def save(self) -> None:
        """Adds what is new to the file."""
        every = self.read()
        mine = every.setdefault(self.machine, {})
        for name, programs in self._new.items():
            figures = mine.setdefault(name, self._begun())
            for seconds, fault in programs:
                if fault:
                    figures = mine[name] = self._begun(fault)
                else:
                    figures.seconds = round(figures.seconds + seconds, 3)
                    figures.programs += 1
        self._new.clear()
        self._write(every)

    def _write(self, every: dict[str, dict[str, Figures]]) -> None:
        text = {
            machine: {name: asdict(features[name]) for name in sorted(features)}
            for machine, features in sorted(every.items())
        }
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(text, indent=1) + "\n")
        beside.replace(self.path)

    def take(self, paths: Iterable[Path]) -> None:
        """Adds the figures of other files to this one, and removes these.

        They ran beside each other: a fault in one of them begins its features anew, with what that
        one has run since.
        """
        found = [(path, Progress(path, self.machine).read()) for path in sorted(paths)]
        every = self.read()
        added = [
            (machine, name, figures)
            for _, machines in found
            for machine, features in machines.items()
            for name, figures in features.items()
        ]
        for machine, name, figures in sorted(added, key=lambda one: bool(one[2].fault)):
            known = every.setdefault(machine, {}).setdefault(name, figures)
            if figures.fault:
                every[machine][name] = figures
            elif known is not figures:
                known.seconds = round(known.seconds + figures.seconds, 3)
                known.programs += figures.programs
        self._write(every)
        for path, _ in found:
            path.unlink()

    def _begun(self, fault: str = "") -> Figures:
        today = datetime.now(timezone.utc).date().isoformat()
        return Figures(since=today, commit=self.commit, fault=fault)

    def __str__(self) -> str:
        lines = []
        for machine, features in self.read().items():
            for name, figures in features.items():
                line = f"{machine} {name:<18}{figures.seconds / 3600:>9.3f} h"
                line += f"{figures.programs:>10,} programs since {figures.since} {figures.commit}"
                lines.append(line + (f", fault {figures.fault}" if figures.fault else ""))
        return "\n".join(lines)

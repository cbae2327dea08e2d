"""Draws faults of one line at random, and runs the nearest tests on each.

    python tests/mutations.py --seed 17001 --list
    python tests/mutations.py --seed 17001 --run

Equal numbers of faults belong to each subpackage of speedtorch; a tenth belongs to csrc, where one
file is compiled again for each. A fault is noticed if a test fails that passes without the fault.
`tests/mutants.py` lists faults by hand; this program shares its copies of the package.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from mutants import PACKAGE, Mutant, mutated_copy

__all__ = ["Fault", "Result", "draw", "judge", "nearest_tests"]

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 150  # for the tests of one fault
HANG_SECONDS = 60  # for one test: the slowest needs a third of this on two cores
WAITS = {"wait", "join", "synchronize", "settle", "follow", "record"}
WRITES = {"write", "flush", "settle", "move"}
# The tests of a folder of csrc; csrc/call and csrc/python belong to tests of several folders.
CSRC = {"ops": "ops", "plan": "ops", "move": "ops", "memory": "memory", "core": "memory"}
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
COMPARISONS |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
SWAPPED_AND_OR = {"and": "or", "or": "and"}
# Calls whose arguments are types, names or text.
LEFT_OUT_CALLS = {
    "isinstance",
    "issubclass",
    "getattr",
    "hasattr",
    "cast",
    "warn",
    "print",
    "super",
}


@dataclass(frozen=True)
class Fault:
    """A change of one line, which is counted from 1."""

    name: str  # the subpackage and the number of the draw, such as "step-2"
    kind: str
    file: str  # relative to the root
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        place = f"{self.name:12} {self.kind:10} {self.file}:{self.line}"
        return f"{place}\n    - {self.before.strip()}\n    + {self.after.strip()}"

    def mutant(self) -> Mutant:
        """The change of a text that occurs once: lines above the line are added until it does."""
        lines = (ROOT / self.file).read_text().splitlines(keepends=True)
        first, source = self.line - 1, "".join(lines)
        while source.count("".join(lines[first : self.line])) > 1:
            first -= 1
        above = "".join(lines[first : self.line - 1])
        file = self.file.removeprefix("speedtorch/")
        return Mutant(self.name, file, f"{above}{self.before}\n", f"{above}{self.after}\n")


@dataclass(frozen=True)
class Result:
    """The tests' verdict on a fault: whether they noticed, the first test that failed, seconds."""

    is_noticed: bool
    reason: str
    seconds: float


Edit = tuple[str, int, int, int, str]  # kind, line, first byte, byte after the last, new text
Found = tuple[str, int, str, str]  # kind, line, text before, text after


class _Edits(ast.NodeVisitor):
    """Collects the changes that one Python file allows."""

    def __init__(self, source: str) -> None:
        self.lines = [line.encode() for line in source.splitlines()]
        self.found: list[Edit] = []
        self.visit(ast.parse(source))

    def _text(self, line: int, start: int, stop: int) -> str:
        return self.lines[line - 1][start:stop].decode()

    def _add(self, kind: str, node: ast.expr | ast.stmt, text: str) -> None:
        if node.lineno == node.end_lineno:
            self.found.append((kind, node.lineno, node.col_offset, node.end_col_offset or 0, text))

    def _between(self, left: ast.expr, right: ast.expr, names: dict[str, str]) -> None:
        """Changes the operator between two operands of one line."""
        line, start, stop = left.end_lineno or 0, left.end_col_offset or 0, right.col_offset
        if line != right.lineno:
            return
        between = self._text(line, start, stop)
        operator = between.strip(" ()")
        if operator in names:
            new = between.replace(operator, names[operator])
            self.found.append(("comparison", line, start, stop, new))

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leaves out errors and their messages."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leaves out assertions, which narrow types."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leaves out text."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Leaves out the annotation."""
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Leaves out annotations, decorators, text for people, and the docstring."""
        if node.name in ("__repr__", "__str__", "extra_repr"):
            return
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        inner = [each for each in ast.walk(node) if isinstance(each, ast.Return | ast.Yield)]
        has_value = any(isinstance(each, ast.Yield) or each.value is not None for each in inner)
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        for number, statement in enumerate(body):
            if number and not has_value and not isinstance(statement, ast.Return | ast.Raise):
                self._add("return", statement, "return")
            self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        """Leaves out imports for type checkers, and checks of types."""
        names = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
        if "TYPE_CHECKING" in names:
            return
        if not names & {"isinstance", "type"}:
            self.visit(node.test)
        for statement in [*node.body, *node.orelse]:
            self.visit(statement)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Drops calls that wait or write."""
        if isinstance(node.value, ast.Call):
            words = set(_called(node.value).strip("_").split("_"))
            for kind, chosen in (("wait", WAITS), ("write", WRITES)):
                if words & chosen:
                    self._add(kind, node, "pass")
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Leaves out __all__."""
        if not (isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"):
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Changes an operator."""
        self._between(node.left, node.comparators[0], COMPARISONS)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Changes `and` to `or`, and the other way round."""
        self._between(node.values[0], node.values[1], SWAPPED_AND_OR)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Drops `not`."""
        if isinstance(node.op, ast.Not):
            operand = node.operand
            text = self._text(operand.lineno, operand.col_offset, operand.end_col_offset or 0)
            if operand.lineno == operand.end_lineno:
                self._add("comparison", node, f"({text})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Shifts a whole number by one."""
        if type(node.value) is int:
            self._add("shift", node, str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        """Exchanges neighbouring arguments."""
        if _called(node) in LEFT_OUT_CALLS:
            return
        named = [keyword.value for keyword in node.keywords if keyword.arg is not None]
        for values in (node.args, named):
            for left, right in itertools.pairwise(values):
                self._swap(left, right)
        self.generic_visit(node)

    def _swap(self, left: ast.expr, right: ast.expr) -> None:
        line, start, stop = left.lineno, left.col_offset, right.end_col_offset or 0
        if line != right.end_lineno or ast.Starred in (type(left), type(right)):
            return
        first = self._text(line, start, left.end_col_offset or 0)
        second = self._text(line, right.col_offset, stop)
        between = self._text(line, left.end_col_offset or 0, right.col_offset)
        if first != second:
            self.found.append(("swap", line, start, stop, second + between + first))


class _NotCompiledError(Exception):
    """The compiler refused a fault."""


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@cache
def _python_faults(path: Path) -> tuple[Found, ...]:
    return tuple(_python_changes(path))


def _python_changes(path: Path) -> Iterator[Found]:
    source = path.read_text()
    edits = _Edits(source)
    for kind, line, start, stop, text in edits.found:
        old = edits.lines[line - 1]
        new = old[:start] + text.encode() + old[stop:]
        if old != new:
            yield kind, line, old.decode(), new.decode()


def _cpp_faults(path: Path) -> Iterator[Found]:
    """Changes of a C++ file; lines with text, templates and macros are left out."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code = line.partition("//")[0].rstrip()
        if not code or '"' in code or re.match(r"\s*(#|template|static_assert|constexpr)", code):
            continue
        for found in re.finditer(r" (<=|>=|==|!=|<|>) ", code):
            new = f" {COMPARISONS[found[1]]} "
            yield "comparison", number, line, line[: found.start()] + new + line[found.end() :]
        for found in re.finditer(r"(?<![\w.'])\d+(?![\w.'])", code):
            new = str(int(found[0]) + 1)
            yield "shift", number, line, line[: found.start()] + new + line[found.end() :]
        if found := re.fullmatch(r"(\s*)[\w.:>-]*(wait|mark|note)\w*\(.*\);", code, re.IGNORECASE):
            yield "wait", number, line, f"{found[1]};"


def _draws(
    seed: int,
    group: str,
    files: list[Path],
    faults_of: Callable[[Path], Iterable[Found]],
) -> Iterator[Fault]:
    """Distinct faults of some files: first a kind is drawn, then a fault of the kind."""
    kinds = defaultdict(list)
    for path in sorted(files):
        for kind, *rest in faults_of(path):
            kinds[kind].append((str(path.relative_to(ROOT)), *rest))
    chance, number = random.Random(f"{seed}/{group}"), 0
    while kinds:
        kind = chance.choice(sorted(kinds))
        place = kinds[kind].pop(chance.randrange(len(kinds[kind])))
        if not kinds[kind]:
            del kinds[kind]
        number += 1
        yield Fault(f"{group}-{number}", kind, *place)


def draw(seed: int, count: int, replaced: frozenset[str] = frozenset()) -> list[Fault]:
    """As many faults of a seed, of which a tenth, at most four, is in csrc.

    Draws with the names `replaced` change no behaviour: the next draw of the group is taken.
    """
    groups = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    random.Random(seed).shuffle(groups)
    of_csrc = min(4, count // 10)
    draws = {
        group: _draws(seed, group, [*(PACKAGE / group).glob("*.py")], _python_faults)
        for group in groups
    }
    sources = [path for folder in CSRC for path in ROOT.glob(f"csrc/{folder}/*.cpp")]
    draws["csrc"] = _draws(seed, "csrc", sources, _cpp_faults)
    order = [groups[number % len(groups)] for number in range(count - of_csrc)]
    order += ["csrc"] * of_csrc
    return [next(each for each in draws[name] if each.name not in replaced) for name in order]


def nearest_tests(fault: Fault) -> tuple[list[str], int]:
    """The tests of a fault's subpackage, the nearest first, and how many are near.

    A file elsewhere that is named after the module belongs to them. A test file is near if its name
    has the module's name, or if it mentions names of the module.
    """
    path = ROOT / fault.file
    folder = path.parent.name
    names = {path.stem, path.stem.rstrip("s")}
    public = set(re.findall(r"^(?:class|def) ([A-Za-z]\w+)", path.read_text(), re.MULTILINE))
    scores = {}
    own = CSRC[folder] if path.suffix == ".cpp" else folder
    for file in {*ROOT.glob(f"tests/{own}/*.py"), *ROOT.glob(f"tests/*/test_{path.stem}.py")}:
        text, stem = file.read_text(), file.stem.removeprefix("test_")
        score = 100 * (stem in names) + 20 * any(name in stem for name in names)
        score += 10 * bool(re.search(rf"\b{path.stem}\b", text))
        score += len(public.intersection(re.findall(r"\w+", text)))
        scores[str(file.relative_to(ROOT))] = (-score, len(text))
    order = sorted(scores, key=scores.__getitem__)
    return order, sum(score < 0 for score, _ in scores.values())


@pytest.hookimpl(trylast=True)  # after conftest.py, which puts the longest first
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-p mutations`: the nearest files come first, and slow tests last among the near."""
    order = {ROOT / argument: number for number, argument in enumerate(config.args)}
    near = int(os.environ.get("SPEEDTORCH_NEAR", "0"))

    def place(item: pytest.Item) -> tuple[bool, bool, int]:
        number = order.get(item.path, len(order))
        return number >= near, item.get_closest_marker("slow") is not None, number

    items.sort(key=place)


def pytest_runtest_logstart(nodeid: str) -> None:
    """With `-p mutations`: notes the test that runs, for a run that is ended from outside."""
    Path("running").write_text(f"{time.time()} {nodeid}")


def _copy(folder: Path, fault: Fault | None, build: Path) -> None:
    """A copy of the tree with the fault; the other folders are links."""
    of_python = fault if fault is not None and fault.file.endswith(".py") else None
    mutated_copy(folder, of_python and of_python.mutant())
    for entry in ROOT.iterdir():
        link = folder / entry.name
        if entry.name not in ("build", ".git") and not link.exists():
            link.symlink_to(entry)
    if fault is not None and of_python is None:
        _compile(folder, fault, build)


def _compile(folder: Path, fault: Fault, build: Path) -> None:
    """Compiles the one file, with the options and the other objects of an earlier build."""
    ninja = build / f"cpp.{sysconfig.get_platform()}" / "build.ninja"  # others have sanitizers
    variables = dict(re.findall(r"^(\w+) = (.*)$", ninja.read_text(), re.MULTILINE))
    objects = {path.relative_to(ninja.parent): path for path in ninja.parent.glob("csrc/**/*.o")}
    source, made = ROOT / fault.file, folder / "fault.o"
    lines = source.read_text().splitlines()
    lines[fault.line - 1] = fault.after
    changed = folder / "fault.cpp"
    changed.write_text("\n".join(lines) + "\n")
    options = [*shlex.split(variables["cflags"]), *shlex.split(variables["post_cflags"])]
    compiler = ["c++", f"-I{source.parent}", *options, "-c", str(changed), "-o", str(made)]
    if subprocess.run(compiler).returncode:
        raise _NotCompiledError
    objects[Path(fault.file).with_suffix(".o")] = made
    include = next(text for text in options if text.endswith("torch/include"))
    torch = Path(include.removeprefix("-I")).parent
    record = Path(f"{ninja.parent}.command").read_text()
    extra = [text for text in shlex.split(record) if text.endswith((".o", ".a"))]
    library = next((folder / "speedtorch").glob("_C*.so"))
    link = ["-Wl,--exclude-libs,ALL", "-Wl,--as-needed", "-ldl", "-lrt", "-lpthread"]
    inputs = [*map(str, objects.values()), *extra, f"-L{torch / 'lib'}", "-ltorch_cpu"]
    subprocess.run(["c++", "-shared", *inputs, *link, "-o", str(library)], check=True)


def _pytest(folder: Path, near: int, *arguments: str) -> tuple[int | None, str]:
    """The exit status, None after the time limit, and the output."""
    paths = [str(folder), str(folder / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SPEEDTORCH_NEAR": str(near)}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "mutations", "--tb=line"]
    options += ["-o", f"faulthandler_timeout={HANG_SECONDS}"]
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]


def judge(fault: Fault, build: Path, known: set[str], tests: Sequence[str] = ()) -> Result:
    """Runs the nearest tests on a copy with the fault.

    Args:
        fault: the fault.
        build: the folder build/ of the library, for a fault in csrc.
        known: tests that fail without any fault; more are added.
        tests: run instead of the nearest.
    """
    files, near = (tests, 0) if tests else nearest_tests(fault)
    with tempfile.TemporaryDirectory(prefix="mutation-") as temporary:
        folder = Path(temporary) / "fault"
        try:
            _copy(folder, fault, build)
        except _NotCompiledError:
            return Result(True, "does not compile", 0.0)
        while True:
            started = time.monotonic()
            left_out = [f"--deselect={name}" for name in sorted(known)]
            status, output = _pytest(folder, near, *files, *left_out)
            seconds = time.monotonic() - started
            running = (folder / "running").read_text() if (folder / "running").exists() else "0 -"
            begun, _, test = running.partition(" ")
            if status is None:
                within = time.time() - float(begun)
                return Result(False, f"time limit, {within:.0f} s within {test}", seconds)
            if status in (0, 5):
                return Result(False, output.strip().splitlines()[-1], seconds)
            if f"Timeout (0:{HANG_SECONDS // 60:02}:{HANG_SECONDS % 60:02})!" in output:
                return Result(True, f"hangs: {test}", seconds)
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+?::\S.*?)(?: - .*)?$", output, re.MULTILINE)
            if not failed:
                tail = " / ".join(output.strip().splitlines()[-3:])
                return Result(True, f"pytest ends with {status}: {tail}", seconds)
            clean = Path(temporary) / "clean"
            if not clean.exists():
                _copy(clean, None, build)
            if _pytest(clean, 0, failed[0])[0] == 0:
                return Result(True, failed[0], seconds)
            known.add(failed[0])


def main() -> None:
    """Lists or runs the faults of a seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--replaced", nargs="*", default=[], help="draws that change no behaviour")
    parser.add_argument("--only", nargs="*", default=[], help="names of draws")
    parser.add_argument("--tests", nargs="*", default=[], help="run instead of the nearest")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="of make setup")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--list", action="store_true")
    chosen.add_argument("--run", action="store_true")
    options = parser.parse_args()
    faults = draw(options.seed, options.count, frozenset(options.replaced))
    faults = [each for each in faults if not options.only or each.name in options.only]
    noticed, known = 0, set[str]()
    for number, fault in enumerate(faults, 1):
        print(fault, flush=True)
        if options.run:
            result = judge(fault, options.build, known, options.tests)
            noticed += result.is_noticed
            verdict = "noticed" if result.is_noticed else "NOT NOTICED"
            print(f"    {verdict} ({result.seconds:.0f} s): {result.reason}", flush=True)
            print(f"    {noticed} of {number}", flush=True)


if __name__ == "__main__":
    main()

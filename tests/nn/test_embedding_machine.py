"""Random programs of everything that an Embedding can do, against plain training.

SPEEDTORCH_PROGRAMS is how many programs are run; by default 120, always the same ones, and others
each time that it is set, as `make nightly` does. Each kind of modules has a share of them and is a
test of its own. With SPEEDTORCH_SHRINK=0 one that fails is reported as it is, not made short first.
A call may be interrupted at any line of the package: then it was done, or was not, for all tables,
and every number that is seen later must be that of one of the two.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import paces
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.errors import StopTest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from interrupts import ONLY_COUNTING, PACKAGE, Lines, out_of_memory
from optimizer_cases import CASES
from paces import AHEAD, Turning
from plain_training import PlainTable, PlainTraining, differences, make_optimizer
from reference import copied
from safetensors.torch import load_file
from torch import Tensor, nn

import speedtorch
from speedtorch.nn.prefetch_pace import AT_ONCE

ROWS, WIDTH = 6, 2
PROGRAMS = int(os.environ.get("SPEEDTORCH_PROGRAMS", "120"))
IDS = [
    torch.tensor(ids)
    for ids in (
        [1],
        [1, 2],
        [3, 4],
        [1, 5],
        [5, 5, 1],
        [2, 3, 4],
        [0, 4],
        [1, 2, 3, 4, 5],
        [[2, 0], [2, 3]],
        [5],
    )
]
"""No id of these is the padding's alone, 0."""
ALL = torch.arange(ROWS)
PROGRAMS_OF_EACH = 40
"""How many programs one set of modules runs, as attaching takes longer than a program does."""


# ------------------------------------------------------------------------------------------------
# What a program begins with


@dataclass(frozen=True)
class Kind:
    """Modules and their optimizer.

    Attributes:
        optimizer: its name in CASES.
        attached: whether it keeps something of the rows.
        modules: arguments of each Embedding; with "bag" it is an EmbeddingBag that adds up, with
            "tables" a collection of two tables that share its rows.
    """

    optimizer: str
    attached: bool
    modules: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        names = (name for arguments in self.modules for name in arguments)
        return "-".join([self.optimizer, *names])


NEAREST = {"rounding": "nearest"}
"""Of random numbers an interrupted call may take some."""
STORED = {"stored": torch.float16, **NEAREST}
HALVES = {"weight": torch.float16, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.float16}
KINDS = [
    Kind("SGD", False, ({},)),
    Kind("SGD-momentum", True, ({}, {"padding_idx": 0})),
    Kind("Adam", True, ({}, {"bag": True})),
    Kind("SGD-momentum", True, ({"max_norm": 1.0}, {"bag": True, "padding_idx": 0})),
    Kind("SparseAdam", True, ({"sparse": True},)),
    Kind("Adagrad", True, ({"max_norm": 1.0, "padding_idx": 0},)),
    Kind("Adam", True, ({"tables": True}, {})),
    Kind("Adam", True, ({"capacity": ROWS}, {"capacity": ROWS, "padding_idx": 0})),
    Kind("SGD-momentum", True, ({}, {}, {"bag": True})),
    Kind("Adam", True, ({"cache": "300B"}, {"cache": "200B", "padding_idx": 0})),
    Kind("SGD-momentum", True, ({"cache": "200B", "max_norm": 1.0}, {"bag": True})),
    Kind("Adam", True, ({"capacity": ROWS, "cache": "300B"},)),
    Kind("Adam", True, ({"stored": HALVES, **NEAREST}, {"cache": "90B", **STORED})),
    Kind("SGD-momentum", True, ({"capacity": ROWS, **STORED}, {"bag": True, "padding_idx": 0})),
    Kind("Adam", True, ({"resident": "60B"}, {"resident": "100B", "padding_idx": 0})),
    Kind("SGD-momentum", True, ({"resident": "40B", "capacity": ROWS}, {"resident": "16B"})),
]


class Tables(nn.Module):
    """A collection of two tables of one group, with the interface of the Embedding of all rows."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        tables = [speedtorch.EmbeddingConfig(ROWS // 2, WIDTH, name) for name in "ab"]
        parts = dict(zip("ab", rows.chunk(2), strict=True))
        self.tables = speedtorch.EmbeddingCollection.from_pretrained(
            tables, parts, freeze=False, memory="plain"
        )
        self.register_state_dict_post_hook(Tables.join)
        self.register_load_state_dict_pre_hook(Tables.split)

    def join(self, state: dict[str, Any], prefix: str, *_: object) -> None:
        parts = [state.pop(f"{prefix}tables.embeddings.{name}.weight") for name in "ab"]
        state[f"{prefix}weight"] = torch.cat(parts)

    def split(self, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name, part in zip("ab", state.pop(f"{prefix}weight").chunk(2), strict=True):
            state[f"{prefix}tables.embeddings.{name}.weight"] = part

    def features(self, ids: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """One sample of all ids, each for the table that has its row."""
        ids = ids.flatten()
        parts = ids[ids < ROWS // 2], ids[ids >= ROWS // 2] - ROWS // 2
        return {
            n: (part, torch.tensor([0, len(part)])) for n, part in zip("ab", parts, strict=True)
        }

    def forward(self, ids: Tensor) -> Tensor:
        order = (ids.flatten() >= ROWS // 2).long().argsort(stable=True)
        rows: Tensor = self.tables(self.features(ids)).rows()
        return rows[order.argsort()].view(*ids.shape, WIDTH)

    def announce(self, *parts: Tensor) -> None:
        self.tables.announce(*map(self.features, parts))

    def __getattr__(self, name: str) -> Any:
        """The weight, the table and the methods of the one group."""
        if name in ("weight", "table", "flush", "init_"):
            return getattr(self.tables.group_of("a"), name)
        return super().__getattr__(name)


class Ours:
    """Embeddings and their optimizer, which the next program may use again."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.case = kind, CASES[kind.optimizer]
        self.folder = tempfile.TemporaryDirectory()
        self.first = [first_rows(number) for number in range(len(kind.modules))]
        made: list[nn.Module] = []
        for arguments, rows in zip(kind.modules, self.first, strict=True):
            if "tables" in arguments:
                made.append(Tables(rows))
                continue
            arguments = {"_weight": rows, "memory": "plain", **arguments}
            if "resident" in arguments:
                arguments["_weight"] = self.in_a_file(rows, arguments.pop("resident"))
                del arguments["memory"]
            if arguments.pop("bag", False):
                made.append(speedtorch.EmbeddingBag(ROWS, WIDTH, mode="sum", **arguments))
            else:
                made.append(speedtorch.Embedding(ROWS, WIDTH, **arguments))
        self.model = nn.ModuleList(made)
        self.optimizer = make_optimizer(self.case, self.model.parameters())
        if kind.attached:
            speedtorch.attach(self.optimizer, self.model)
        self.programs = 0

    def in_a_file(self, rows: Tensor, resident: str) -> speedtorch.HostTable:
        """A table with these rows and some of the optimizer's state, of which few are resident."""
        path = Path(self.folder.name, f"rows {len(os.listdir(self.folder.name))}")
        table = speedtorch.HostTable(
            ROWS, WIDTH, state=[*self.case.rows][:2], memory="file", path=path, resident=resident
        )
        table["weight"].copy_(rows)
        return table

    def attach_anew(self) -> None:
        speedtorch.detach(self.optimizer)
        speedtorch.attach(self.optimizer, self.model)

    def begin_anew(self) -> PlainTraining:
        """As if it had just been made; the reference of it."""
        self.model.train()
        for module in self.model:
            with suppress(RuntimeError):  # of a capacity, which forgets it as well
                module(torch.tensor([[1]]))
        self.optimizer.zero_grad()
        for module, rows in zip(self.model, self.first, strict=True):
            module.load_state_dict({"weight": rows})
        plain = PlainTraining.begin(self.case, self.first)
        if self.programs > 0:
            begin = {number: each for number, each in enumerate(plain.copy().state()) if each}
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": begin})
        self.programs += 1
        for table, arguments in zip(plain.tables, self.kind.modules, strict=True):
            table.padding = arguments.get("padding_idx")
            table.max_norm = arguments.get("max_norm")
            table.capacity = "capacity" in arguments
            stored = arguments.get("stored", {})
            table.stored = stored if isinstance(stored, dict) else {"weight": stored}
            table.round()
        return plain

    def numbers(self) -> list[dict[str, Any]]:
        """Rows, state and counts of every table, from the table and from the state dicts."""
        states = self.optimizer.state_dict()["state"]
        result = []
        for number, module in enumerate(self.model):
            saved = module.state_dict()["weight"]
            module.flush()
            table = module.table
            assert torch.equal(saved, table["weight"])
            found = {"weight": saved.clone().float()}
            entries = states.get(number)
            for name in self.case.rows:
                assert entries is None or torch.equal(entries[name], table[name])
                found[name] = table[name].clone().float()
            for name, make in self.case.scalars.items():
                found[name] = make() if entries is None else entries[name]
            result.append(found)
        return result


def first_rows(table: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(table))


@dataclass(eq=False)
class Lookup:
    """A lookup's result that waits for its backward."""

    table: int
    ids: Tensor
    result: Tensor
    step: int


class Programs(RuleBasedStateMachine):
    """Calls of any kind in any order.

    Attributes:
        kind: of the modules.
        made: modules that the program before has left.
    """

    kind: ClassVar[Kind]
    made: ClassVar[Ours | None] = None

    # --------------------------------------------------------------------------------------------
    # The reference: the worlds that are possible after interrupted calls

    @initialize()
    def begin(self) -> None:
        self.ours, type(self).made = self.made or Ours(self.kind), None
        if self.ours.programs == PROGRAMS_OF_EACH:
            self.ours = Ours(self.kind)
        self.worlds = [self.ours.begin_anew()]
        self.waiting: list[Lookup] = []
        self.fresh: set[int] = set()
        """Tables with a gradient that was not stepped."""
        self.loop: Iterator[Any] | None = None
        self.has_batch = False
        """Whether the loop has given a batch."""
        self.deferred: list[BaseException] = []
        self.armed: Lines | None = None
        """Interrupts the next call but so many as `calls_until` says."""
        self.calls_until = 0
        self.saved: tuple[Any, Any, PlainTraining] | None = None

    def teardown(self) -> None:
        error = sys.exc_info()[1]
        cut_short = isinstance(error, StopTest)  # by hypothesis, between two calls
        if not hasattr(self, "ours") or (error is not None and not cut_short):
            return
        self.end_loop()
        self.waiting.clear()
        if not cut_short:
            found = self.ours.numbers()
            self.see(lambda world: differences(found, world.numbers()))
        self.ours.optimizer.zero_grad()
        type(self).made = self.ours  # not after a failure

    def see(self, wrong: Callable[[PlainTraining], str]) -> None:
        """Keeps the worlds where nothing is wrong, of which there must be one."""
        found = [wrong(world) for world in self.worlds]
        if all(found):
            raise AssertionError(" / ".join(found))
        self.worlds = [w for w, each in zip(self.worlds, found, strict=True) if not each]

    def call(
        self,
        ours: Callable[[], Any],
        plain: Callable[[PlainTraining], Any] = lambda world: None,
        *more: Callable[[PlainTraining], Any],
    ) -> tuple[bool, Any]:
        """Does a call, and the same in each world; returns whether it was through, and its result.

        Args:
            ours: the call.
            plain: its effect.
            *more: what may have come of it instead, if it is interrupted, beside nothing.
        """
        lines = None
        if self.calls_until == 0:
            lines, self.armed = self.armed, None
        self.calls_until -= 1
        if lines is None:
            result = ours()
        else:
            with lines:
                result = ours()
            if lines.came_out:
                before = [world.copy() for world in self.worlds]
                for effect in (plain, *more):
                    for world in before:
                        self.worlds.append(world.copy())
                        effect(self.worlds[-1])
                return False, None
            if lines.raised is not None:
                self.deferred.append(lines.raised)
        for world in self.worlds:
            plain(world)
        return True, result

    def call_with_ids(
        self, number: int, ours: Callable[[], Any], *plain: Callable[[PlainTraining], Any]
    ) -> tuple[bool, Any]:
        """As call; rows of a capacity may be refused, and nothing of the step is used then."""
        before = [world.copy() for world in self.worlds]

        def or_refused() -> Any:
            try:
                return ours()
            except RuntimeError as error:
                if "with capacity= all lookups" not in str(error):
                    raise
                return error

        through, result = self.call(or_refused, *plain)
        if not isinstance(result, RuntimeError):
            return through, result
        assert "capacity" in self.kind.modules[number]
        tables = [world.tables[number] for world in before]
        assert any(not table.over or table.due for table in tables)
        self.worlds = before
        result = None  # its traceback has the lookup's frames
        self.end_loop()
        self.clear_gradients(to_none=True)
        return False, None

    def table(self, number: int) -> int:
        return number % len(self.ours.model)

    def ids(self, number: int, *, anew: bool = False) -> Tensor:
        return IDS[number].clone() if anew else IDS[number]

    # --------------------------------------------------------------------------------------------
    # Steps

    def look_up(self, number: int, ids: Tensor) -> bool:
        module, bag = self.ours.model[number], self.kind.modules[number].get("bag", False)
        ids = ids.view(1, -1) if bag else ids

        def plain(world: PlainTraining) -> Tensor:
            table = world.tables[number]
            rows = table.look_up(ids)
            return (
                F.embedding_bag(ids, table.weight, mode="sum", padding_idx=table.padding)
                if (bag)
                else rows
            )

        seen: list[Tensor] = []

        def forgotten(world: PlainTraining) -> None:
            plain(world)
            world.tables[number].forget()

        def as_it_was(world: PlainTraining) -> None:
            world.tables[number].look_up(ids, shortens=False)

        def ended(world: PlainTraining) -> None:
            world.tables[number].end_batch()

        def as_it_was_and_ended(world: PlainTraining) -> None:
            as_it_was(world)
            ended(world)

        through, result = self.call_with_ids(
            number,
            lambda: module(ids),
            lambda world: seen.append(plain(world)),
            *(forgotten, as_it_was, ended, as_it_was_and_ended),
        )
        if not through:
            return False
        expected = iter(seen)
        self.see(lambda world: "" if torch.equal(next(expected), result) else "values looked up")
        numbers = {world.tables[number].number for world in self.worlds}
        if "capacity" in self.kind.modules[number]:  # rows of lookups that were given up are gone
            self.waiting = [w for w in self.waiting if w.table != number or {w.step} == numbers]
        self.waiting.append(Lookup(number, ids, result, max(numbers)))
        return True

    @rule(number=st.integers(0, 1), ids=st.integers(0, len(IDS) - 1), anew=st.booleans())
    def lookup(self, number: int, ids: int, anew: bool) -> None:
        self.look_up(self.table(number), self.ids(ids, anew=anew))

    @rule(
        number=st.integers(0, 1),
        ids=st.integers(0, len(IDS) - 1),
        more=st.integers(0, len(IDS) - 1),
    )
    def announce(self, number: int, ids: int, more: int) -> None:
        number = self.table(number)
        parts = (self.ids(ids), self.ids(more))
        module = self.ours.model[number]
        self.call_with_ids(
            number,
            lambda: module.announce(*parts),
            lambda world: world.tables[number].announce(*parts),
            lambda world: world.tables[number].end_batch(),
        )

    def go_back(self, lookups: list[Lookup], factor: int) -> bool:
        """Backward of some lookups. After an interrupt nothing of the step is used any more."""
        total = torch.stack([(gradient_of(part, factor) * part.result).sum() for part in lookups])

        def plain(world: PlainTraining) -> None:
            for lookup in lookups:
                gradient = gradient_of(lookup, factor)
                if gradient.shape[:-1] != lookup.ids.shape:
                    gradient = gradient[:, None].expand(*lookup.ids.shape, WIDTH)
                world.tables[lookup.table].add_gradient(lookup.ids, gradient)

        through, _ = self.call(total.sum().backward, plain)
        self.waiting = [each for each in self.waiting if each not in lookups]
        self.fresh |= {lookup.table for lookup in lookups}
        if not through:
            tables = {lookup.table for lookup in lookups}
            del total
            lookups.clear()
            self.worlds += [
                world.keeping(kept)
                for world in self.worlds
                for count in range(len(tables))
                for kept in itertools.combinations(tables, count + 1)
            ]
            self.clear_gradients(to_none=True)
            self.ours.programs = PROGRAMS_OF_EACH  # no other program meets what torch keeps
        return through

    @precondition(lambda self: self.waiting)
    @rule(first_only=st.booleans(), factor=st.integers(0, 3))
    def backward(self, first_only: bool, factor: int) -> None:
        self.go_back(self.waiting[:1] if first_only else list(self.waiting), factor)

    @precondition(lambda self: self.fresh)
    @rule()
    def step(self) -> None:
        if any(world.is_refused() for world in self.worlds):
            return self.refused_step()
        through, _ = self.call(self.ours.optimizer.step, lambda world: world.step())
        stepped = {
            number
            for number in range(len(self.ours.model))
            if any(world.tables[number].gradient is not None for world in self.worlds)
        }
        if through:
            self.fresh.clear()
            self.waiting = [each for each in self.waiting if each.table not in stepped]
        else:
            self.waiting.clear()
            self.clear_gradients(to_none=True)

    def refused_step(self) -> None:
        """A step that has left announced ids out raises and changes nothing."""
        self.armed, raised = None, False
        try:
            self.ours.optimizer.step()
        except RuntimeError as error:
            assert "was not looked up" in str(error)
            raised = True
        self.see(lambda world: "" if world.is_refused() is raised else f"raised: {raised}")
        if raised:
            self.look_at_all()
        else:
            for world in self.worlds:
                world.step()
        self.clear_gradients(to_none=True)

    def clear_gradients(self, *, to_none: bool) -> None:
        self.waiting.clear()
        self.armed = None  # torch's own
        self.call(
            lambda: self.ours.optimizer.zero_grad(set_to_none=to_none),
            lambda world: world.zero_grad(to_none=to_none),
        )
        self.fresh.clear()

    @rule(to_none=st.booleans(), keep=st.booleans())
    def zero_grad(self, to_none: bool, keep: bool) -> None:
        """Drops the step; or keeps lookups without a backward, where there are no others."""
        new = all(table.gradient is None for world in self.worlds for table in world.tables)
        if keep and new and self.waiting:
            self.armed = None
            self.ours.optimizer.zero_grad(set_to_none=to_none)
            for world in self.worlds:
                for table in world.tables:
                    table.give_up_unless_used()
        else:
            self.clear_gradients(to_none=to_none)

    def train(
        self, number: int, ids: int, more: int | None, both: bool, factor: int, write: str, end: str
    ) -> None:
        """A whole step of a usual loop, or a part of one.

        Args:
            number: of the table.
            ids: looked up.
            more: announced beside.
            both: whether that is looked up, too.
            factor: of the gradient.
            write: what is written to after the backward, without another value.
            end: nothing, a step, or a step and a zero_grad.
        """
        if more is not None:
            self.announce(number, ids, more)
        number = self.table(number)
        if not self.look_up(number, self.ids(ids)):
            return
        if more is not None and both and not self.look_up(number, self.ids(more)):
            return
        if not self.go_back(list(self.waiting), factor):
            return
        if write == "gradients" and self.kind.optimizer != "SparseAdam":
            nn.utils.clip_grad_norm_(self.ours.model.parameters(), 1e9)
            for table in (table for world in self.worlds for table in world.tables):
                if table.gradient is None and table.zeros is None:
                    table.give_up_unless_used()  # zero_grad, too, reads a gradient of None
        if write == "rows":
            with torch.no_grad(), suppress(RuntimeError):  # or it is refused
                self.ours.model[number].weight.mul_(1.0)
        if end:
            self.step()
        if end in ("None", "zeros"):
            self.clear_gradients(to_none=end == "None")

    # More than one rule, so that most programs train several times.
    train_alone = train_between = train_anew = train_often = rule(
        number=st.integers(0, 1),
        ids=st.integers(0, len(IDS) - 1),
        more=st.sampled_from([None, None, *range(len(IDS))]),
        both=st.sampled_from([True, True, True, False]),
        factor=st.integers(0, 3),
        write=st.sampled_from(["", "", "gradients", "rows"]),
        end=st.sampled_from(["", "step", "None", "zeros"]),
    )(train)

    # --------------------------------------------------------------------------------------------
    # Beside the steps

    @rule(
        number=st.integers(0, 1),
        how=st.sampled_from(["flush", "flush", "state", "gather", "save", "numpy", "deepcopy"]),
    )
    def look(self, number: int, how: str) -> None:
        number = self.table(number)
        if how == "flush":
            self.call(self.ours.model[number].flush)
        elif how == "state":
            self.look_at_all()
        else:
            self.look_into_the_table(number, how)

    @rule(number=st.integers(0, 1), ids=st.integers(0, len(IDS) - 1), every=st.booleans())
    def read(self, number: int, ids: int, every: bool) -> None:
        """Lookups that train nothing; of every row in evaluation."""
        number = self.table(number)
        module, parts = self.ours.model[number], ALL if every else self.ids(ids)
        module.train(not every)
        bag = self.kind.modules[number].get("bag", False)
        seen: list[Tensor] = []

        def ours() -> Tensor:
            with torch.no_grad():
                return module(parts.view(-1, 1) if bag else parts)

        def plain(world: PlainTraining) -> None:
            seen.append(world.tables[number].read(parts))
            if bag and world.tables[number].padding is not None:
                seen[-1][parts == world.tables[number].padding] = 0

        through, result = self.call(ours, plain)
        module.train()
        if through:
            expected = iter(seen)
            self.see(
                lambda _: "" if torch.equal(next(expected).view_as(result), result) else "read"
            )

    def look_into_the_table(self, number: int, how: str) -> None:
        """The table's own methods see the last step, without a flush."""
        module = self.ours.model[number]

        def ours() -> dict[str, Tensor]:
            if how == "gather":
                return {name: module.table.gather(ALL, name) for name in module.table.fields}
            if how == "numpy":
                return {"weight": torch.from_numpy(module.table.numpy("weight")).clone()}
            if how == "deepcopy":
                return {"weight": copy.deepcopy(module).table["weight"]}
            with tempfile.TemporaryDirectory() as folder:
                module.table.save(f"{folder}/rows.safetensors")
                return load_file(f"{folder}/rows.safetensors")

        through, found = self.call(ours)
        if through:
            self.see(
                lambda world: "; ".join(
                    f"{how} of {name}"
                    for name, rows in found.items()
                    if not torch.equal(rows.float(), all_of(world.tables[number])[name])
                )
            )

    def look_at_all(self) -> None:
        found = self.ours.numbers()
        self.see(lambda world: differences(found, world.numbers()))

    @rule()
    def save(self) -> None:
        found = self.ours.numbers()
        self.see(lambda world: differences(found, world.numbers()))
        states = self.ours.model.state_dict(), self.ours.optimizer.state_dict()
        self.saved = (*(copied(state) for state in states), self.worlds[0].copy())

    def is_between_gradients(self) -> bool:
        """Whether no lookup waits and no gradient of a step that is over is left."""
        if self.waiting:
            return False
        left = any(
            table.over and table.gradient is not None
            for world in self.worlds
            for table in world.tables
        )
        if left and not self.fresh:
            self.clear_gradients(to_none=True)
        return not left or not self.fresh

    @precondition(lambda self: self.saved is not None)
    @rule(with_state=st.booleans())
    def load(self, with_state: bool) -> None:
        """A step that goes on keeps its gradient. An interrupted load is loaded once more."""
        if not self.is_between_gradients():
            return
        assert self.saved is not None
        model, optimizer, before = self.saved

        def ours() -> None:
            self.ours.model.load_state_dict(model)
            if with_state:
                self.ours.optimizer.load_state_dict(copied(optimizer))

        def plain(world: PlainTraining) -> None:
            for table, saved in zip(world.tables, before.tables, strict=True):
                table.give_up()
                table.weight = saved.weight.clone()
                if with_state:
                    table.fields, table.scalars = copied(saved.fields), copied(saved.scalars)

        through, _ = self.call(ours)
        if not through:
            ours()
        for world in self.worlds:
            plain(world)

    @rule(number=st.integers(0, 1), how=st.sampled_from(["fill_", "scatter", "init_", "load"]))
    def write(self, number: int, how: str) -> None:
        """Writes to the table are seen, or refused by name. The step that goes on is dropped."""
        if not self.is_between_gradients():
            return
        number = self.table(number)
        module, self.armed = self.ours.model[number], None
        values = torch.full((ROWS, WIDTH), 0.5)
        if self.kind.modules[number].get("padding_idx") == 0 and how == "init_":
            values[0] = 0.0
        ids = torch.tensor([1, 4])
        if how == "scatter":
            others = torch.tensor([0, 2, 3, 5])
        try:
            if how == "fill_":
                module.table.fill_(0.5)
            elif how == "init_":
                module.init_(nn.init.constant_, 0.5)
            elif how == "scatter":
                rows = values[ids].to(module.table["weight"].dtype)
                module.table.scatter(ids, rows, "weight")
            else:
                with tempfile.TemporaryDirectory() as folder:
                    module.table.save(f"{folder}/rows.safetensors")
                    speedtorch.HostTable.open(f"{folder}/rows.safetensors", "plain").close()
                    module.table.fill_(0.5)
                    module.table.load(f"{folder}/rows.safetensors")
                return
        except (RuntimeError, ValueError) as error:
            assert "Embedding" in str(error)
            return
        for world in self.worlds:
            weight = world.tables[number].weight
            kept = weight[others].clone() if how == "scatter" else None
            weight.copy_(values)
            if kept is not None:
                weight[others] = kept
        self.look_at_all()
        self.clear_gradients(to_none=True)

    @precondition(lambda self: self.kind.attached)
    @rule(really=st.integers(0, 7))
    def attach_anew(self, really: int) -> None:
        """The state of the rows begins anew."""
        if really or self.fresh or not self.is_between_gradients():
            return
        self.armed = None
        self.ours.attach_anew()
        for world in self.worlds:
            for number in range(len(world.tables)):
                world.forget_state(number)

    # --------------------------------------------------------------------------------------------
    # Batches whose rows are brought ahead

    @precondition(lambda self: self.loop is None)
    @rule(
        batches=st.lists(st.integers(0, len(IDS) - 1), min_size=1, max_size=6),
        with_shared=st.booleans(),
        pace=st.sampled_from([AHEAD, AT_ONCE, Turning]),
    )
    def begin_loop(self, batches: list[int], with_shared: bool, pace: Any) -> None:
        """Each batch is the ids of every table; perhaps with a part that all batches have.

        A loop at the pace AT_ONCE hands its batches through, and announces those of several parts.
        """
        # A collection's batch is one lookup.
        tables = any("tables" in arguments for arguments in self.kind.modules)
        shared = (IDS[0],) if with_shared and not tables else ()
        listed = [
            {
                module: [
                    self.shaped(number, (IDS[(batch + number) % len(IDS)])),
                    *(self.shaped(number, part) for part in shared),
                ]
                for number, module in enumerate(self.ours.model)
            }
            for batch in batches
        ]
        if pace is Turning:  # the loop reads two batches ahead
            pace = Turning(every=1)
            planned = [max(0, batch - 2) % 2 == 0 for batch in range(len(batches))]
        else:
            planned = [pace is AHEAD for _ in batches]
        paces.choose(pace)
        self.loop = iter(speedtorch.prefetch(listed, self.ours.model, ids=looked_up))
        self.has_batch, self.upcoming = False, zip(listed, planned, strict=True)

    def shaped(self, number: int, ids: Tensor) -> Tensor:
        return ids.view(1, -1) if self.kind.modules[number].get("bag", False) else ids

    @precondition(lambda self: self.loop is not None)
    @rule(skip=st.integers(0, 3), factor=st.integers(0, 3), train=st.booleans())
    def take_batch(self, skip: int, factor: int, train: bool) -> None:
        assert self.loop is not None
        loop, had_batch, self.has_batch = self.loop, self.has_batch, True
        batch, is_planned = next(self.upcoming, (None, False))
        has_several = batch is not None and any(len(parts) > 1 for parts in batch.values())
        announces = has_several and not is_planned
        before = [world.copy() for world in self.worlds]

        def taken(world: PlainTraining, tables: int | None = None) -> None:
            """The next batch, of which so many tables know."""
            if batch is None:
                return world.end_loop()
            if had_batch:
                world.go_on()
            for table, parts in [*zip(world.tables, batch.values(), strict=True)][:tables]:
                if announces:
                    table.announce(*parts)
                    table.returned = table.waiting
                elif is_planned:
                    table.due = tuple(parts)
                    table.left |= bool(table.unseen)

        def interrupted(tables: int, end: Callable[[PlainTraining], None]) -> Any:
            return lambda world: (taken(world, tables), end(world))

        effects = [*self.endings()]
        if announces:
            counts = range(1, len(self.ours.model) + 1)
            effects += [interrupted(*each) for each in itertools.product(counts, self.endings())]
        is_refused = has_failed = False
        try:
            through, given = self.call(lambda: next(loop, None), taken, *effects)
        except BaseException as error:
            has_failed, is_refused = True, not any(error is each for each in self.deferred)
            if is_refused and not (announces and "with capacity= all lookups" in str(error)):
                raise
        if has_failed:
            self.loop, self.worlds = None, []
            for world, tables in itertools.product(before, range(len(self.ours.model) + 1)):
                self.worlds.append(world.copy())
                taken(self.worlds[-1], tables)
                self.worlds[-1].end_loop()
            if is_refused:
                assert any("capacity" in arguments for arguments in self.kind.modules)
                self.clear_gradients(to_none=True)
            return
        if not through or batch is None:
            assert given is None
            self.loop = None
            return
        assert given is batch
        if skip == 0:
            return
        for number, parts in enumerate(batch.values()):
            for part in parts:
                if not self.look_up(number, part):
                    self.end_loop()  # what the batch's other parts do is not known
                    self.clear_gradients(to_none=True)
                    return
        if train and self.go_back(list(self.waiting), factor):
            self.step()
            self.clear_gradients(to_none=True)

    @precondition(lambda self: self.loop is not None)
    @rule()
    def end_loop(self) -> None:
        loop, self.loop = self.loop, None
        close = getattr(loop, "close", None)
        if close is not None and self.has_batch:
            self.call(close, PlainTraining.end_loop, *self.endings())

    def endings(self) -> Iterator[Callable[[PlainTraining], None]]:
        """What may come of an interrupted end of a loop: each table's may be half done."""

        def forget_due(table: PlainTable) -> None:
            table.due = ()

        ways = (lambda table: None, forget_due, PlainTable.go_on, PlainTable.end_loop)
        for chosen in itertools.product(ways, repeat=len(self.ours.model)):

            def end(world: PlainTraining, chosen: tuple[Any, ...] = chosen) -> None:
                for table, way in zip(world.tables, chosen, strict=True):
                    way(table)

            yield end

    @precondition(lambda self: self.armed is None)
    @rule(line=st.integers(1, 200), calls=st.integers(0, 3), memory=st.booleans())
    def interrupt_a_call_to_come(self, line: int, calls: int, memory: bool) -> None:
        self.calls_until = calls
        error = out_of_memory if memory else KeyboardInterrupt
        self.armed = Lines(PACKAGE, line, error, skip=ONLY_COUNTING)


def looked_up(batch: dict[nn.Module, list[Tensor]]) -> dict[nn.Module, Any]:
    """The ids of a batch as prefetch takes them."""
    return {
        module.tables if isinstance(module, Tables) else module: (
            module.features(parts[0]) if isinstance(module, Tables) else parts
        )
        for module, parts in batch.items()
    }


def gradient_of(lookup: Lookup, factor: int) -> Tensor:
    """Of a lookup's result; whole numbers, zeros where the factor is."""
    count = lookup.result.numel()
    return (torch.arange(count) % 3 - 1.0).view(lookup.result.shape) * factor


def all_of(table: PlainTable) -> dict[str, Tensor]:
    return {"weight": table.weight, **table.fields}


PROFILE = settings(
    max_examples=math.ceil(PROGRAMS / len(KINDS)),
    stateful_step_count=15,
    deadline=None,
    database=None,
    phases=[Phase.generate] + [Phase.shrink] * (os.environ.get("SPEEDTORCH_SHRINK") != "0"),
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("one_thread", "restless")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_programs_give_the_numbers_of_plain_training(
    kind: Kind, record_property: Callable[[str, object], None]
) -> None:
    programs = type("Programs", (Programs,), {"kind": kind})
    if "SPEEDTORCH_PROGRAMS" not in os.environ:
        programs = seed(KINDS.index(kind))(programs)
    run_state_machine_as_test(programs, settings=PROFILE)
    record_property("programs", PROFILE.max_examples)

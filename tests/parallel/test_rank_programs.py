"""Random programs of ranks that share rows, against plain training of all their batches.

SPEEDTORCH_RANK_PROGRAMS is how many are run, as "500", or which, as "500-700"; by default few,
always the same ones.

All ranks draw one program from its seed, with the ids of each rank, and each trains its own part.
The reference has whole tables and the state of each row, and steps the rows of all ranks' lookups
by torch's own optimizers. Coefficients of losses are small whole numbers, so that the sums of
gradients have no rounding and do not depend on their order: everything is compared bit for bit.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ordinary_run import programs
from rank_backends import ON_RANKS
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.optim import RowWiseAdagrad

pytestmark = ON_RANKS

FIRST, _, END = f"0-{os.environ.get('SPEEDTORCH_RANK_PROGRAMS', programs(25))}".rpartition("-")
ROWS, WIDTH = 19, 4
BAG = 2  # ids of each bag
TABLES = {"left": 7, "right": 12}
"""Rows of the collection's tables, which share a group."""


class PlainRowWise(optim.Optimizer):
    """The rule of row-wise Adagrad as written in the documentation."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad
            state["step"] = state["step"] + 1
            state["sum"].add_(gradient.square().mean(1, keepdim=True))
            divisor = state["sum"].sqrt().add(1e-10)
            parameter.addcdiv_(gradient, divisor, value=-self.param_groups[0]["lr"])


OPTIMIZERS: dict[str, tuple[Callable[[Any], optim.Optimizer], dict[str, bool]]] = {
    "SGD": (lambda p: optim.SGD(p, lr=0.25), {}),
    "momentum": (
        lambda p: optim.SGD(p, lr=0.25, momentum=0.5, weight_decay=0.125),
        {"momentum_buffer": True},
    ),
    "Adam": (lambda p: optim.Adam(p, lr=0.125), {"exp_avg": True, "exp_avg_sq": True}),
    "Adagrad": (lambda p: optim.Adagrad(p, lr=0.125), {"sum": True}),
    "RowWiseAdagrad": (lambda p: RowWiseAdagrad(p, lr=0.125), {"sum": False}),
}
"""Optimizers, and whether each state of a row has a number for each column."""


def assert_equal(found: Tensor, expected: Tensor, what: str) -> None:
    if not torch.equal(found, expected):
        rows = (found != expected).any(1)
        ids = rows.nonzero().flatten().tolist()
        raise AssertionError(f"{what}: rows {ids}: {found[rows]} for {expected[rows]}")


class Lookup(NamedTuple):
    """Of all ranks: the ids of each in its table, `[samples]` or `[samples, BAG]`, and a loss."""

    ids: list[Tensor]
    coefficients: list[Tensor]


class Plain:
    """All rows of a table with the state of each, and what the step of now has looked up."""

    def __init__(self, rows: Tensor, kind: str, padding: int | None, divisor: int) -> None:
        make, states = OPTIMIZERS[kind]
        self.make = partial(PlainRowWise, lr=0.125) if kind == "RowWiseAdagrad" else make
        self.rows, self.padding, self.divisor = rows.clone(), padding, divisor
        shapes = {name: rows.shape if wide else (len(rows), 1) for name, wide in states.items()}
        self.state = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.steps = 0
        self.give_up()

    def give_up(self) -> None:
        self.named: list[Tensor] = []
        self.gradient: Tensor | None = None

    def look_up(self, lookup: Lookup) -> None:
        self.named += [ids.flatten() for ids in lookup.ids]

    def backward(self, lookup: Lookup, scale: list[float]) -> None:
        gradient = torch.zeros_like(self.rows) if self.gradient is None else self.gradient
        for ids, coefficients, factor in zip(*lookup, scale, strict=True):
            gradients = coefficients * factor
            if ids.dim() == 2:  # of bags that are added up
                gradients = gradients[:, None].expand(*ids.shape, -1)
            gradient.index_add_(0, ids.flatten(), gradients.reshape(-1, self.rows.shape[1]))
        self.gradient = gradient

    def squares(self) -> Tensor:
        """The sum of the squares of the gradients of the rows that are trained."""
        if self.gradient is None:
            return torch.zeros(())
        gradient = self.gradient / self.divisor
        if self.padding is not None:
            gradient[self.padding] = 0
        return gradient.square().sum()

    def step(self) -> None:
        """Steps the rows that were looked up, if there is a gradient."""
        if self.gradient is None:
            return
        held = torch.cat(self.named).unique()
        held = held[held != (-1 if self.padding is None else self.padding)]
        parameter = nn.Parameter(self.rows[held])
        parameter.grad = self.gradient[held] / self.divisor
        optimizer = self.make([parameter])
        state: dict[str, Any] = {name: values[held] for name, values in self.state.items()}
        if "momentum_buffer" not in state and state:
            state["step"] = torch.tensor(float(self.steps))
        optimizer.state[parameter].update(state)
        optimizer.step()
        self.steps += 1
        self.rows[held] = parameter.detach()
        for name, values in self.state.items():
            values[held] = optimizer.state[parameter][name]

    def copy(self) -> tuple[Tensor, dict[str, Tensor], int]:
        return self.rows.clone(), {n: state.clone() for n, state in self.state.items()}, self.steps


class Program:
    """One program, which its seed draws alike on all ranks."""

    def __init__(self, seed: int) -> None:
        self.random, self.log = random.Random(seed), [f"seed {seed}"]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        draw = self.random
        self.kind, average = draw.choice(list(OPTIMIZERS)), draw.random() < 0.75
        self.capacity = draw.choice([None, None, None, 4 * ROWS])
        padding = draw.choice([None, None, 3])
        settings: dict[str, Any] = {"capacity": self.capacity, "cache": draw.choice([None, "1KiB"])}
        generator = torch.Generator().manual_seed(seed)
        first = {"rows": ROWS, "bags": ROWS, **TABLES}
        rows = {n: torch.randn(count, WIDTH, generator=generator) for n, count in first.items()}
        if padding is not None:
            rows["rows"][padding] = 0
        torch.manual_seed(seed)
        configs = [speedtorch.EmbeddingBagConfig(n, WIDTH, name) for name, n in TABLES.items()]
        every: dict[str, nn.Module] = {
            "rows": speedtorch.Embedding(ROWS, WIDTH, padding_idx=padding, **settings),
            "bags": speedtorch.EmbeddingBag(ROWS, WIDTH, mode="sum", **settings),
            "tables": speedtorch.EmbeddingBagCollection(tables=configs, **settings),
        }
        self.names = draw.sample(list(every), draw.randint(1, 3))
        self.model = nn.ModuleDict({name: every[name] for name in self.names})
        speedtorch.shard(self.model, average=average)
        self.optimizer = OPTIMIZERS[self.kind][0](self.model.parameters())
        if OPTIMIZERS[self.kind][1]:
            speedtorch.attach(self.optimizer, self.model)
        whole = {f"{n}.weight": values for n, values in rows.items() if n in self.names}
        if "tables" in self.names:
            whole |= {f"tables.embedding_bags.{n}.weight": rows[n] for n in TABLES}
        self.model.load_state_dict(whole)
        rows["tables"] = torch.cat([rows[name] for name in TABLES])
        divisor = self.ranks if average else 1
        self.plain = {
            name: Plain(rows[name], self.kind, padding if name == "rows" else None, divisor)
            for name in self.names
        }
        self.log.append(f"{self.kind} average={average} padding={padding} {settings} {self.names}")

    def say(self, what: str) -> None:
        self.log.append(what)

    # ---- lookups

    def lookup(self, name: str) -> Lookup:
        draw = self.random
        samples = [draw.choice([0, 1, 3, 6]) for _ in range(self.ranks)]
        generator = torch.Generator().manual_seed(draw.getrandbits(30))

        def some(most: int, *shape: int) -> Tensor:
            return torch.randint(most, shape, generator=generator)

        if name == "rows":
            ids = [some(ROWS, count) for count in samples]
        elif name == "bags":
            ids = [some(ROWS, count, BAG) for count in samples]
        else:  # of both tables, one after the other, as rows of the group
            left, right = TABLES.values()
            ids = [torch.cat([some(left, n, BAG), some(right, n, BAG) + left]) for n in samples]
        shapes = [(len(of_rank), WIDTH) for of_rank in ids]
        return Lookup(ids, [some(9, *shape).float() - 4 for shape in shapes])

    def given(self, name: str, lookup: Lookup) -> Any:
        """What the module is given on this rank."""
        ids = lookup.ids[self.rank]
        if name != "tables":
            return ids
        left, right = ids.chunk(2)
        return {"left": left, "right": right - TABLES["left"]}

    def found(self, name: str, given: Any) -> Tensor:
        found = self.model[name](given)
        return found if name != "tables" else torch.cat([found["left"], found["right"]])

    def check_found(self, name: str, lookup: Lookup, found: Tensor) -> None:
        expected = self.plain[name].rows[lookup.ids[self.rank]]
        if name == "rows":
            assert_equal(found.detach(), expected, f"lookup of {name}")
        else:  # whose sums torch rounds in another order
            torch.testing.assert_close(found.detach(), expected.sum(1))

    def drawn(self) -> list[tuple[str, Lookup]]:
        """The lookups of a batch."""
        names = [n for n in self.names for _ in range(self.random.choice([0, 1, 1, 2]))]
        names = names or self.names[:1]
        self.random.shuffle(names)
        return [(name, self.lookup(name)) for name in names]

    def by_module(self, batch: list[tuple[str, Lookup]]) -> dict[str, list[Any]]:
        given: dict[str, list[Any]] = {}
        for name, lookup in batch:
            given.setdefault(name, []).append(self.given(name, lookup))
        return given

    # ---- parts of a program

    def train(
        self, batch: list[tuple[str, Lookup]], inputs: dict[str, list[Any]], *, alone: bool
    ) -> None:
        """A batch, whose inputs were planned ahead unless it is `alone`."""
        draw, waiting = self.random, {name: list(parts) for name, parts in inputs.items()}
        self.optimizer.zero_grad()
        if alone and (self.capacity is not None or draw.random() < 0.5):
            self.say("announce")
            for name, parts in inputs.items():
                self.model[name].announce(*parts)
        for plain in self.plain.values():
            plain.give_up()
        losses, skips = [], draw.choice(["", "", "", "", "lookups", "step"])
        for name, lookup in batch:
            found = self.found(name, waiting[name].pop(0))
            self.check_found(name, lookup, found)
            self.plain[name].look_up(lookup)
            losses.append((found * lookup.coefficients[self.rank]).sum())
        self.say(f"train {[name for name, _ in batch]} skips={skips!r}")
        if skips == "lookups":
            return
        # A rank that skips a batch goes backward through zeros.
        scale = [0.0 if draw.random() < 0.1 else 1.0 for _ in range(self.ranks)]
        (torch.stack(losses).sum() * scale[self.rank]).backward()
        for name, lookup in batch:
            self.plain[name].backward(lookup, scale)
        if skips == "step":
            return
        if draw.random() < 0.3:
            self.clip()
        if draw.random() < 0.2:
            self.evaluate()
        self.optimizer.step()
        for plain in self.plain.values():
            plain.step()
            plain.give_up()
        self.optimizer.zero_grad(set_to_none=draw.random() < 0.75)

    def clip(self) -> None:
        self.say("clip")
        norm = speedtorch.clip_grad_norm_(self.model.parameters(), 2.0)
        squares = torch.stack([plain.squares() for plain in self.plain.values()])
        torch.testing.assert_close(norm, squares.sum().sqrt())
        factor = (2.0 / (norm + 1e-6)).clamp(max=1.0)
        for plain in self.plain.values():
            if plain.gradient is not None:  # divided before they are scaled
                plain.gradient = plain.gradient / plain.divisor * factor * plain.divisor

    def evaluate(self) -> None:
        self.say("evaluate")
        name = self.random.choice(self.names)
        lookup = self.lookup(name)
        with torch.no_grad():
            self.check_found(name, lookup, self.found(name, self.given(name, lookup)))

    def fail(self) -> None:
        """A batch whose last lookup has a bad id, or no ids, on one rank: all raise and go on."""
        draw, bad = self.random, self.random.choice([torch.tensor([ROWS]), torch.tensor([0.5])])
        before = self.drawn() if self.capacity is None else []
        name, rank = draw.choice(self.names), draw.randrange(self.ranks)
        self.say(f"fail {bad.dtype} at {name} of rank {rank} after {[n for n, _ in before]}")
        given = self.given(name, self.lookup(name))
        if rank == self.rank:
            wrong = bad if name == "rows" else bad[:, None].expand(1, BAG)
            given = {"left": given["left"], "right": wrong} if name == "tables" else wrong
        self.optimizer.zero_grad()
        for other, lookup in before:
            self.check_found(other, lookup, self.found(other, self.given(other, lookup)))
        try:
            if draw.random() < 0.5:
                self.model[name].announce(given)
            self.found(name, given)
        except (IndexError, RuntimeError, TypeError, ValueError):
            pass
        else:
            raise AssertionError("a bad id raised nothing")
        for plain in self.plain.values():
            plain.give_up()
        self.optimizer.zero_grad()

    def reload(self) -> None:
        """Loads this rank's own state, which changes nothing, and reads its own rows."""
        self.say("reload")
        own = self.model.state_dict(), self.optimizer.state_dict()
        self.model.load_state_dict(own[0])
        self.optimizer.load_state_dict(own[1])

    def loop(self) -> None:
        batches = [self.drawn() for _ in range(self.random.randint(1, 4))]
        self.say(f"loop of {len(batches)}")
        pairs = [(batch, self.by_module(batch)) for batch in batches]
        last = self.random.choice([None, None, 1])

        def ids_of(pair: Any) -> dict[nn.Module, Any]:
            return {self.model[name]: ids for name, ids in pair[1].items()}

        for number, (batch, inputs) in enumerate(
            speedtorch.prefetch(pairs, self.model, ids=ids_of)
        ):
            self.train(batch, inputs, alone=False)
            if number == last:
                self.say("break")
                break

    def save(self) -> None:
        """Gathers everything on the first rank, and loads it on all."""
        self.say("save and load")
        with speedtorch.full_state_dict(self.model):
            whole = [copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))]
            self.check(*whole[0])
        dist.broadcast_object_list(whole)
        self.train_one()
        self.say("load")
        for plain, before in zip(self.plain.values(), self.saved, strict=True):
            plain.rows, plain.state, plain.steps = before
        self.model.load_state_dict(whole[0][0])
        self.optimizer.load_state_dict(whole[0][1])

    def check(self, model: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
        self.saved = [plain.copy() for plain in self.plain.values()]
        if self.rank:
            return
        for number, (name, plain) in enumerate(self.plain.items()):
            if name == "tables":
                found = torch.cat([model[f"tables.embedding_bags.{n}.weight"] for n in TABLES])
            else:
                found = model[f"{name}.weight"]
            assert_equal(found, plain.rows, f"rows of {name}")
            state = optimizer["state"].get(number, {})
            assert bool(state) or not plain.steps or not plain.state, f"no state of {name}"
            for field, expected in plain.state.items():
                if state:
                    assert_equal(state[field], expected, f"{field} of {name}")
            if "step" in state:
                assert int(state["step"]) == plain.steps, f"step of {name}"

    def train_one(self) -> None:
        batch = self.drawn()
        self.train(batch, self.by_module(batch), alone=True)

    def run(self) -> None:
        parts = [*[self.train_one] * 4, self.evaluate, self.loop, self.loop, self.save]
        parts += [self.fail, self.reload]
        for _ in range(self.random.randint(2, 7)):
            self.random.choice(parts)()
        with speedtorch.full_state_dict(self.model):
            self.check(self.model.state_dict(), self.optimizer.state_dict())


def test_programs_train_as_one_process_does() -> None:
    for seed in range(int(FIRST.split("-")[-1]), int(END)):
        program = None
        try:
            program = Program(seed)
            program.run()
        except BaseException as error:
            log = [f"seed {seed}"] if program is None else program.log
            raise AssertionError(f"{type(error).__name__}: {error}; " + "\n".join(log)) from error

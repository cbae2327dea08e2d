"""One process trains tables and a dense parameter by a random program."""

from __future__ import annotations

import copy
import gc
import math
import random
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interrupts import ONLY_COUNTING, TRAINING, Lines, out_of_memory
from torch import Tensor, nn

import speedtorch
from speedtorch.checkpoints.generations import generations_of
from stress.mirror import RULES, Array, Fields, Mirror, differing
from stress.tables import CACHES, Input, Lookup, Owner, Part, drawn_owner

__all__ = ["Batch", "Difference", "Interrupt", "Program", "Training"]


class Difference(AssertionError):
    """A row or a result that is not the mirror's."""


class Interrupt(KeyboardInterrupt):
    """A pretended Ctrl-C."""


Batch = list[tuple[str, Lookup]]
"""Lookups in order, each by the name of its module."""


@dataclass
class Snapshot:
    """What a generation of a checkpoint must load."""

    fields: dict[str, Fields]
    dense: Fields
    count: int


class Dense(nn.Module):
    """The parameter beside the tables."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 4, device=device))


class Training:
    """Modules, their optimizer, and the mirror of each; a program calls its methods."""

    def __init__(self, seed: int, folder: Path, device: str, *, ranks: int = 0) -> None:
        self.draw, self.folder, self.device = random.Random(seed), folder, device
        self.ranks, self.rank = max(1, ranks), 0
        self.log: list[str] = []
        draw = self.draw
        self.rule_name = draw.choice(list(RULES))
        self.rule = RULES[self.rule_name]
        self.average = draw.random() < 0.5
        divisor = self.ranks if self.average else 1
        alike = draw.choice([0, 0, 0, 4])  # prefetch exchanges the rows of alike tables at once
        more = {"ranks": ranks, "divisor": divisor, "alike": alike}
        owners = self.drawn_owners(draw, self.rule, device, folder, **more)
        self.owners = {
            f"{owner.kind} {n}".replace(" ", "_"): owner for n, owner in enumerate(owners)
        }
        self.features = {feature for owner in owners for feature in owner.features}
        self.features |= {"alike tables"} if alike else set()
        kinds = [owner.kind for owner in owners if "collection" in owner.kind]
        if len(kinds) > 1:
            self.features.add("same names")
        self.dense_mirror = Mirror.of(np.ones((1, 4), np.float32), self.rule, {}, device=device)
        self.steps = 0
        self.connect()
        self.say(self.described())

    def drawn_owners(self, *given: Any, **more: Any) -> list[Owner]:
        return [drawn_owner(*given, **more) for _ in range(self.draw.choice([1, 1, 2, 3]))]

    def described(self) -> str:
        owners = [
            f"{name}: {owner.counts} x {owner.width}, {owner.memory}, {owner.settings},"
            f" padding {owner.padding}"
            for name, owner in self.owners.items()
        ]
        return f"{self.rule_name} on {self.device}; " + "; ".join(owners)

    def connect(self) -> None:
        """Makes the model and the optimizer of the modules that the owners have."""
        modules = {name: owner.module for name, owner in self.owners.items()}
        self.model = nn.ModuleDict({"dense": Dense(self.device), **modules})
        with torch.no_grad():
            self.dense.copy_(torch.from_numpy(self.dense_mirror.fields["weight"]))
        self.share()
        self.optimizer = self.rule.make(list(self.model.parameters()))
        if self.rule.state or self.draw.random() < 0.5:
            speedtorch.attach(self.optimizer, self.model)
        for owner in self.owners.values():
            if self.draw.random() < 0.5 and "alike tables" not in self.features:
                self.track(owner)

    def share(self) -> None:
        """Shares the rows out among ranks."""

    def track(self, owner: Owner) -> None:
        if owner.memory != "shared":
            owner.row_module.table.track_changes()

    @property
    def dense(self) -> nn.Parameter:
        found = self.model["dense"].weight
        assert isinstance(found, nn.Parameter)
        return found

    def mirrors(self) -> Iterator[Mirror]:
        yield from (owner.mirror for owner in self.owners.values())
        yield self.dense_mirror

    def say(self, what: str) -> None:
        self.log.append(what)

    # ---- batches

    def batch(self) -> Batch:
        names = [name for name in self.owners for _ in range(self.draw.choice([0, 1, 1, 2, 3]))]
        names = names or list(self.owners)[:1]
        self.draw.shuffle(names)
        for name in set(names):
            self.owners[name].begin_step()
        return [(name, self.owners[name].lookup(self.ranks)) for name in names]

    def inputs(self, batch: Batch) -> list[Input]:
        return [self.owners[name].input(lookup[self.rank]) for name, lookup in batch]

    def announced(self, batch: Batch, inputs: list[Input]) -> dict[nn.Module, list[Any]]:
        """What prefetch is told of a batch, by module."""
        found: dict[nn.Module, list[Any]] = {}
        for (name, _), given in zip(batch, inputs, strict=True):
            found.setdefault(self.model[name], []).append(given.announced)
        return found

    def mirror_train(self, batch: Batch) -> None:
        """Trains the mirror alone: each lookup backward once, and a step."""
        for name, lookup in batch:
            self.mirror_look_up(name, lookup)
            self.owners[name].mirror_backward(lookup)
        self.mirror_dense(1.0)
        for mirror in self.mirrors():
            mirror.step()

    def shorten(self, batch: Batch) -> None:
        """Shortens rows in the mirror, as the batch's lookups do."""
        for name, lookup in batch:
            self.owners[name].shorten(lookup[self.rank])

    def mirror_look_up(self, name: str, lookup: Lookup) -> None:
        owner = self.owners[name]
        for parts in lookup:
            owner.mirror.look_up(owner.global_ids(parts))

    def check_step(self) -> None:
        """Compares the ids and the gradient of the rows of the current step."""
        for name, owner in self.owners.items():
            module, mirror = owner.row_module, owner.mirror
            ids = module.step_ids.cpu().numpy()
            if mirror.gradient is None:
                continue
            if ids.tolist() != mirror.held().tolist():
                raise Difference(f"{name}: ids {ids.tolist()} for {mirror.held().tolist()}")
            gradient = module.weight.grad.to_dense().cpu().clone().numpy()
            self.compare(f"the gradient of {name}", gradient, mirror.whole_gradient())

    def mirror_dense(self, factor: float) -> None:
        zero = np.zeros(1, np.int64)
        self.dense_mirror.look_up(zero)
        self.dense_mirror.backward(zero, np.full((1, 4), factor, np.float32))

    # ---- calls of the modules

    def look_up(self, name: str, parts: list[Part], given: Input) -> Tensor:
        """Looks up, checks the result, and returns the loss."""
        owner = self.owners[name]
        owner.shorten(parts)
        results = owner.results(self.model[name](*given.arguments))
        for expected, found in zip(owner.expected(parts), results, strict=True):
            self.compare(f"lookup in {name}", found.detach().cpu().clone().numpy(), expected)
        return owner.loss(parts, results)

    def compare(self, what: str, found: Array, expected: Array) -> None:
        rows = differing(found, expected)
        if len(rows):
            wrong = f"{found[rows].tolist()} for {expected[rows].tolist()}"
            raise Difference(f"{what}: rows {rows.tolist()}: {wrong}")

    def read(self, how: str = "state") -> dict[str, Fields]:
        """The fields of all rows, by module."""
        state = self.optimizer.state_dict()["state"]
        numbers = {id(param): number for number, param in enumerate(self.model.parameters())}
        return {
            name: self.read_owner(owner, how, state.get(numbers[id(owner.row_module.weight)], {}))
            for name, owner in self.owners.items()
        }

    def read_owner(self, owner: Owner, how: str, state: dict[str, Any]) -> Fields:
        fields = owner.mirror.fields
        found = {"weight": self.weight(owner, how)}
        for name in self.rule.state:
            if name in state:
                found[name] = state[name].float().cpu().clone().numpy().reshape(fields[name].shape)
            else:  # which no step has made yet
                found[name] = np.zeros_like(fields[name])
        return found

    def weight(self, owner: Owner, how: str) -> Array:
        module = owner.row_module
        if how == "state" or self.ranks > 1:
            state = owner.module.state_dict()
            rows = torch.cat([state[name] for name in state if name.endswith("weight")])
        elif how == "copy":
            copied = copy.deepcopy(owner.module).state_dict()
            rows = torch.cat([copied[name] for name in copied if name.endswith("weight")])
        elif how == "parameter":
            rows = module.weight.detach()[torch.arange(module.table.rows, device=self.device)]
        elif how == "gather":
            rows = module.table.gather(torch.arange(module.table.rows), "weight").cpu()
        else:
            rows = module.table["weight"]
        return rows.float().cpu().numpy().copy()

    def check(self, how: str = "state") -> None:
        """Compares every row with the mirror."""
        for name, found in self.read(how).items():
            if wrong := self.owners[name].mirror.difference(found):
                raise Difference(f"{name}: {wrong}")
        dense = self.dense.detach().cpu().clone().numpy()
        self.compare("dense", dense, self.dense_mirror.fields["weight"])

    # ---- checkpoints

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def snapshot(self) -> Snapshot:
        fields = {name: owner.mirror.copy() for name, owner in self.owners.items()}
        return Snapshot(fields, self.dense_mirror.copy(), self.steps)

    def restore(self, saved: Snapshot) -> None:
        for name, fields in saved.fields.items():
            self.owners[name].mirror.fields = copy.deepcopy(fields)
        self.dense_mirror.fields, self.steps = copy.deepcopy(saved.dense), saved.count
        for mirror in self.mirrors():
            mirror.give_up()

    def rebuild(self) -> None:
        """Makes all modules anew, with other rows, as a program that is started again does."""
        for owner in self.owners.values():
            owner.module = owner.built()
        self.connect()


class Program(Training):
    """A random program, which its seed repeats."""

    most_actions = 12

    def __init__(self, seed: int, folder: Path, device: str, *, ranks: int = 0) -> None:
        self.saved: dict[int, Snapshot] = {}
        self.saving: tuple[futures.Future[Any], Snapshot] | None = None
        self.saves = folder / "saves"
        self.armed: Lines | None = None
        self.graph: Callable[..., Any] | None = None
        self.state: speedtorch.TrainingState | None = None
        super().__init__(seed, folder, device, ranks=ranks)

    # ---- running

    def actions(self) -> list[Callable[[], object]]:
        actions: list[Callable[[], object]] = [self.train_one] * 6
        actions += [self.loop] * 3
        actions += [
            self.evaluate,
            self.read_rows,
            self.write,
            self.fail,
            self.train_without_backward,
        ]
        actions += [self.save, self.save, self.save, self.load, self.start_again, self.follow]
        actions += [self.sleep, self.sleep, self.grow, self.change_cache]
        actions += [self.load_state, self.attach_anew]
        if self.can_graph:
            actions += [self.replay] * 4
        return actions

    @property
    def can_graph(self) -> bool:
        return self.rule.is_graphed and all(
            "capacity" in owner.settings
            and "sparse" not in owner.settings
            and ("max_norm" not in owner.settings or owner.padding is None)
            for owner in self.owners.values()
        )

    def run(self) -> None:
        for _ in range(self.draw.randint(3, self.most_actions)):
            if self.interrupts and self.draw.random() < 0.25:
                line = self.draw.randint(1, self.draw.choice([20, 100, 400]))
                error = self.draw.choice([Interrupt, out_of_memory])
                self.armed = Lines(TRAINING, line, error, skip=ONLY_COUNTING)
            self.draw.choice(self.actions())()
            self.armed = None
            if self.draw.random() < 0.5:
                self.check(self.draw.choice(["state", "gather", "view"]))
        self.wait()
        self.check()

    def end(self) -> None:
        """Waits for a save in the background, whose folder may be removed then."""
        if self.saving is not None:
            futures.wait([self.saving[0]])

    @property
    def interrupts(self) -> bool:
        # Whether an interrupted lookup has shortened its rows is not known.
        shortens = any("max_norm" in owner.settings for owner in self.owners.values())
        return self.ranks == 1 and not shortens

    def done(self, name: str, call: Callable[[], object], *, is_step: bool = False) -> bool:
        """Makes a call, which may be interrupted; whether it was completed."""
        lines, self.armed = self.armed, None
        if lines is None:
            call()
            return True
        with lines:
            call()
        if not lines.came_out:
            return True
        self.features.add("exceptions")
        self.say(f"{name} failed at {lines.where}")
        self.give_up(is_step=is_step)
        return False

    def drop(self, *, set_to_none: bool = True) -> None:
        """Ends the current step without a change."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        for mirror in self.mirrors():
            mirror.give_up()

    def give_up(self, *, is_step: bool = False) -> None:
        """Drops the current step; of an interrupted one each row is before or after it."""
        self.optimizer.zero_grad()
        if is_step:
            for name, found in self.read().items():
                if wrong := self.owners[name].mirror.adopt(found):
                    raise Difference(f"{name}: {wrong}")
            dense = self.dense.detach().cpu().clone().numpy()
            number = [id(param) for param in self.model.parameters()].index(id(self.dense))
            state = self.optimizer.state_dict()["state"].get(number, {})
            fields = self.dense_mirror.fields
            found = {
                name: state[name].float().cpu().clone().numpy() if name in state else zero
                for name, zero in ((n, np.zeros_like(fields[n])) for n in self.rule.state)
            }
            # torch's own parameter may be half done: its weight and state are taken as they are.
            self.dense_mirror.fields = {"weight": dense.copy(), **found}
        for mirror in self.mirrors():
            mirror.give_up()

    # ---- training

    def train_one(self) -> None:
        batch = self.batch()
        self.train(batch, self.inputs(batch), alone=True)

    def train(self, batch: Batch, inputs: list[Input], *, alone: bool) -> bool:
        """Trains a batch, whose inputs were planned ahead unless it is `alone`."""
        draw = self.draw
        self.drop(set_to_none=draw.random() < 0.75)
        several = any("capacity" in owner.settings for owner in self.owners.values())
        announces = alone and (several or draw.random() < 0.25)
        if announces and not self.done("announce", lambda: self.announce(batch, inputs)):
            return False
        ways = ["once", "once", "once", "apart", "twice", "no step", "no backward"]
        way = draw.choice([*ways, "by turns", "by turns", *["closure"] * (self.ranks == 1)])
        self.say(f"train {[name for name, _ in batch]} {way}")
        losses: list[Tensor] = []
        if way == "closure":
            return self.train_by_closure(batch, inputs)
        for (name, lookup), given in zip(batch, inputs, strict=True):
            self.features |= {"empty batches"} if not len(lookup[0][0].ids) else set()
            parts = lookup[self.rank]
            if not self.done("lookup", lambda: losses.append(self.look_up(name, parts, given))):  # noqa: B023
                return False
            self.mirror_look_up(name, lookup)
            if way == "by turns":  # later lookups join rows that have a gradient
                if not self.done("backward", losses.pop().backward):
                    return False
                self.owners[name].mirror_backward(lookup)
            if draw.random() < 0.05:
                self.read_rows()
        if way == "no backward":
            self.features.add("no backward")
            self.drop()
            return True
        dense = self.dense.sum()
        if not self.done("backward", lambda: self.backward(losses, dense, way)):
            return False
        factor = 2.0 if way == "twice" else 1.0
        for name, lookup in batch:
            if way != "by turns":
                self.owners[name].mirror_backward(lookup, factor)
        self.mirror_dense(factor)
        if way in ("apart", "twice"):
            self.features.add("several backwards")
        sparse = any("sparse" in owner.settings for owner in self.owners.values())
        if draw.random() < 0.15 and not sparse:  # of which torch computes no norm
            self.check_norm()
        if draw.random() < 0.3 and self.ranks == 1:
            self.check_step()
        if way == "no step":
            self.drop()
            return True
        if not self.done("step", self.optimizer.step, is_step=True):
            return False
        for mirror in self.mirrors():
            mirror.step()
        self.steps += 1
        if draw.random() < 0.75:
            self.drop()
        self.take_freed_memory()
        return True

    def train_by_closure(self, batch: Batch, inputs: list[Input]) -> bool:
        self.features.add("closures")
        self.armed = None

        def closure() -> Tensor:
            self.drop()
            losses = [self.dense.sum()]
            for (name, lookup), given in zip(batch, inputs, strict=True):
                losses.append(self.look_up(name, lookup[self.rank], given))
            loss = torch.stack(losses).sum()
            loss.backward()
            return loss

        self.optimizer.step(closure)
        self.mirror_train(batch)
        self.steps += 1
        return True

    def check_norm(self) -> None:
        """Compares the norm of all gradients, and clips them to half of it or not at all."""
        self.features.add("gradient norm")
        norm = speedtorch.clip_grad_norm_(self.model.parameters(), 1e9)
        most = float(0.5 / (1 / (norm + 1e-6)))
        if self.draw.random() < 0.5 and float(most / (norm + 1e-6)) == 0.5:  # not rounded
            speedtorch.clip_grad_norm_(self.model.parameters(), most)
            for mirror in self.mirrors():
                mirror.halve()
            norm = norm / 2  # as the mirror's is now
        expected = math.sqrt(sum(mirror.squares() for mirror in self.mirrors()))
        if not math.isclose(float(norm), expected, rel_tol=1e-5):
            raise Difference(f"the gradients' norm: {float(norm)} for {expected}")

    def take_freed_memory(self) -> None:
        """Writes into memory that the step has freed, which nothing may still read."""
        for count in (4, 16, 64, 256, 1024):
            torch.full((count,), float("nan"), device=self.device)

    def announce(self, batch: Batch, inputs: list[Input]) -> None:
        for module, given in self.announced(batch, inputs).items():
            module.announce(*given)

    @staticmethod
    def backward(losses: list[Tensor], dense: Tensor, way: str) -> None:
        if way == "apart":
            for loss in (*losses, dense):
                loss.backward()
            return
        loss = torch.stack([*losses, dense]).sum()
        if way == "twice":
            loss.backward(retain_graph=True)
        loss.backward()

    def loop(self) -> None:
        self.features.add("prefetch")
        batches = [self.batch() for _ in range(self.draw.randint(1, 5))]
        pairs = [(batch, self.inputs(batch)) for batch in batches]
        last = self.draw.choice([None, None, 1, 2])
        self.say(f"loop of {len(batches)}, left after {last}")
        loader = speedtorch.prefetch(pairs, self.model, ids=lambda pair: self.announced(*pair))
        for number, (batch, inputs) in enumerate(loader):
            trained = self.train(batch, inputs, alone=False)
            if number == last or not trained:
                break
        self.drop()

    def replay(self) -> None:
        """Steps that a CUDA graph repeats; on the CPU the step itself."""
        self.features.add("graphs")
        self.drop()
        for owner in self.owners.values():
            owner.begin_step()
        batch = [(name, owner.lookup(self.ranks)) for name, owner in self.owners.items()]
        given = {name: self.tensors(name, lookup[self.rank]) for name, lookup in batch}
        self.say("replay")
        if self.graph is None:
            self.graph = speedtorch.graphed(
                self.graphed_step, given, modules=self.model, optimizers=self.optimizer
            )
        self.graph(given)
        self.shorten(batch)
        self.mirror_train(batch)
        self.steps += 1

    def tensors(self, name: str, parts: list[Part]) -> dict[str, Any]:
        arguments = self.owners[name].input(parts).arguments
        coefficients = [torch.from_numpy(part.coefficients).to(self.device) for part in parts]
        return {"arguments": arguments, "coefficients": coefficients}

    def graphed_step(self, given: dict[str, Any]) -> Tensor:
        self.optimizer.zero_grad()
        losses = [self.dense.sum()]
        for name, table in given.items():
            results = self.owners[name].results(self.model[name](*table["arguments"]))
            pairs = zip(results, table["coefficients"], strict=True)
            losses += [(found * coefficients).sum() for found, coefficients in pairs]
        loss = torch.stack(losses).sum()
        loss.backward()
        self.optimizer.step()
        return loss

    def train_without_backward(self) -> None:
        """Many lookups in training mode of which none goes backward."""
        self.features.add("no backward")
        count = self.draw.choice([20, 30, 200] if self.ranks == 1 else [20, 30])
        before = speedtorch.memory_stats()
        self.say(f"{count} batches without a backward")
        for number in range(count):
            if number == count // 2:  # each module has made by now what it keeps
                gc.collect()  # or memory of another program would count
                before = speedtorch.memory_stats()
            batch = self.batch()
            self.drop()
            inputs = self.inputs(batch)
            self.announce(batch, inputs)
            for (name, lookup), given in zip(batch, inputs, strict=True):
                self.look_up(name, lookup[self.rank], given)
        self.drop()
        now = speedtorch.memory_stats()
        if any(now[kind] > before[kind] for kind in now):
            raise Difference(f"memory: {now} after batches without a backward, {before} before")

    # ---- rows

    def evaluate(self) -> None:
        name = self.draw.choice(list(self.owners))
        owner, lookup = self.owners[name], self.owners[name].lookup(self.ranks)
        parts = lookup[self.rank]
        weight, frozen = owner.row_module.weight, self.ranks == 1 and self.draw.random() < 0.3
        self.say(f"evaluate {name}{' frozen' if frozen else ''}")
        if frozen:
            self.features.add("frozen rows")
            self.drop()
            weight.requires_grad_(False)
        with torch.set_grad_enabled(frozen):
            self.done("evaluate", lambda: self.look_up(name, parts, owner.input(parts)))
        weight.requires_grad_()

    def attach_anew(self) -> None:
        """Detaches the optimizer, which forgets the state of all rows, and attaches it again."""
        is_shared = any(owner.memory == "shared" for owner in self.owners.values())
        if self.graph is not None or is_shared:
            return  # a shared table keeps the state that another process may train
        self.wait()
        try:
            speedtorch.detach(self.optimizer)
        except ValueError:
            return  # it was not attached
        self.features.add("detach")
        self.say("attach anew")
        self.saved = {}
        self.saves = self.folder / f"saves-{self.draw.getrandbits(40):x}"
        for owner in self.owners.values():
            owner.mirror.forget_state()
        speedtorch.attach(self.optimizer, self.model)

    def load_state(self) -> None:
        """Loads state_dict() of model and optimizer into new ones, as torch does."""
        self.wait()
        self.drop()
        self.features.add("state_dict")
        self.say("load state_dict()")
        snapshot = self.snapshot()
        model, optimizer = self.states()
        self.graph = self.state = None
        self.train_one()
        self.drop()
        self.rebuild()
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.restore(snapshot)
        self.check()

    def states(self) -> list[dict[str, Any]]:
        """A copy of state_dict() of model and optimizer."""
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])

    def read_rows(self) -> None:
        how = self.draw.choice(["state", "gather", "view", "copy", "parameter"])
        name, owner = self.draw.choice(list(self.owners.items()))
        self.say(f"read {name} by {how}")
        found = [self.weight(owner, how)]
        self.compare(f"rows of {name}", found[0], owner.mirror.fields["weight"])

    def write(self) -> None:
        """Writes rows by hand, between two steps."""
        self.drop()
        name, owner = self.draw.choice(list(self.owners.items()))
        total = sum(owner.counts)
        if not total:
            return
        ids = np.unique(owner.numbers.integers(0, total, self.draw.randint(1, 5)))
        rows = owner.numbers.integers(-16, 17, (len(ids), owner.width)).astype(np.float32) / 8
        how = self.draw.choice(["scatter", "view"])
        self.say(f"write {ids.tolist()} of {name} by {how}")
        table = owner.row_module.table
        given = torch.from_numpy(rows).to(table["weight"].dtype)
        if how == "scatter":
            table.scatter(torch.from_numpy(ids), given, "weight")
        else:
            table["weight"][torch.from_numpy(ids)] = given
        owner.mirror.write(ids, rows)

    def fail(self) -> None:
        """A batch whose last lookup has an id of no row or no ids, on one rank; all ranks raise."""
        self.features.add("exceptions")
        self.drop()
        if not any("capacity" in owner.settings for owner in self.owners.values()):
            batch = self.batch()
            for (name, lookup), given in zip(batch, self.inputs(batch), strict=True):
                self.look_up(name, lookup[self.rank], given)
        name, owner = self.draw.choice(list(self.owners.items()))
        owner.begin_step()
        parts = owner.lookup(self.ranks)[self.rank]
        bad = self.draw.choice([-1, owner.counts[-1], 1 << 40])
        is_here = self.draw.randrange(self.ranks) == self.rank
        for number, (ids, lengths, coefficients) in enumerate(parts if is_here else ()):
            ids = np.append(ids, bad if number == len(parts) - 1 else 0)
            more = np.zeros((1, owner.width), np.float32)
            parts[number] = Part(ids, np.append(lengths, 1), np.append(coefficients, more, axis=0))
        has_ids = self.draw.random() < 0.5
        self.say(f"fail with {bad if has_ids else 'floats'} in {name}")
        owner.has_no_ids = is_here and not has_ids
        given = owner.input(parts)
        owner.has_no_ids = False
        if has_ids and bad == 1 << 40 and _has_int32(given):
            return
        try:
            if self.draw.random() < 0.5:
                self.model[name].announce(given.announced)
            self.model[name](*given.arguments)
            speedtorch.synchronize()
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if has_ids and not isinstance(error, IndexError):
                raise
            self.drop()
            return
        raise Difference(f"id {bad} of {name} raised nothing")

    def grow(self) -> None:
        """Adds rows, after which earlier generations do not fit."""
        owners = [owner for owner in self.owners.values() if owner.is_growing]
        if not owners or self.graph is not None:
            return
        self.features.add("resize")
        self.wait()
        self.say("grow")
        self.drop()
        self.draw.choice(owners).grow()
        self.saved = {}
        self.saves = self.folder / f"saves-{self.draw.getrandbits(40):x}"

    def change_cache(self) -> None:
        if self.graph is not None and self.device == "cuda":
            return  # the graph uses the rows
        owner = self.draw.choice(list(self.owners.values()))
        nbytes = self.draw.choice([None, *CACHES])
        if self.device == "cuda" and not owner.row_module.table.is_in_place:
            return
        if owner.slots:
            return  # a cache needs all rows in host memory
        self.features.add("cache")
        self.say(f"cache of {nbytes}")
        self.drop()
        speedtorch.cache(owner.module, nbytes)
        owner.settings["cache"] = nbytes

    # ---- checkpoints

    def save(self) -> None:
        self.wait()
        self.drop()
        draw, base = self.draw, None
        if self.saved and draw.random() < 0.6:
            base = draw.choice(sorted(self.saved)[-2:])
            self.features.add("delta saves")
        snapshot = self.snapshot()
        given = {**self.parts(), "count": self.steps}
        behind = draw.random() < 0.5
        self.say(f"save on {base}{' in the background' if behind else ''}")
        if behind:
            self.features.add("background saves")
            how = {"max_memory": draw.choice([None, 1, 1000])}
            future = speedtorch.async_save(self.saves, keep=99, base=base, **how, **given)
            self.saving = future, snapshot
        else:
            self.features.add("saves")
            self.done("save", lambda: speedtorch.save(self.saves, keep=99, base=base, **given))
            # An interrupted one is there as a whole, or not at all.
            made = max(generations_of(str(self.saves)), default=0)
            if made > max(self.saved, default=0):
                self.saved[made] = snapshot

    def wait(self) -> None:
        if self.saving is not None:
            future, snapshot = self.saving
            self.saving = None
            self.saved[future.result(60).generation] = snapshot

    def load(self) -> None:
        self.wait()
        if not self.saved:
            return
        self.drop()
        last = max(self.saved)
        number = self.draw.choice([last, last, *self.saved])
        self.say(f"load {number}")
        wanted = None if number == last and self.draw.random() < 0.5 else number
        found = speedtorch.load(self.saves, generation=wanted, **self.parts())
        self.restore(self.saved[number])
        if found != {"count": self.steps}:
            raise Difference(f"values: {found} for {self.steps}")
        self.check()

    def follow(self) -> None:
        """Loads a generation into new modules, and then only what has changed since."""
        self.wait()
        if len(self.saved) < 2 or self.graph is not None:
            return
        self.features.add("delta loads")
        since, last = self.draw.choice(sorted(self.saved)[:-1]), max(self.saved)
        self.say(f"load {since}, and {last} since then")
        self.rebuild()
        speedtorch.load(self.saves, generation=since, **self.parts())
        speedtorch.load(self.saves, since=since, **self.parts())
        self.restore(self.saved[last])
        self.check()

    def start_again(self) -> None:
        """Loads the last generation into new modules, as after an end of the process."""
        self.wait()
        if not self.saved:
            return
        self.say("start again")
        self.graph = self.state = None
        self.rebuild()
        self.load()

    # ---- sleep

    def sleep(self) -> None:
        """Offloads the dense part between steps; saves and reads see it meanwhile."""
        self.features.add("sleep")
        self.drop()
        if self.graph is not None and self.device == "cuda":
            return  # its addresses would change
        if self.state is None:
            self.state = speedtorch.TrainingState(self.model, self.optimizer, device=self.device)
        alias = self.model.state_dict()
        parts = self.draw.choice([None, ["weights"], ["optimizer", "gradients"]])
        self.say(f"sleep {parts}")
        state = self.state
        self.done("sleep", lambda: state.sleep(parts))
        self.take_freed_memory()
        if self.draw.random() < 0.5:
            self.save()
            self.wait()
        self.check()
        state.wake()
        dense = alias["dense.weight"].cpu().clone().numpy()
        self.compare("a view of before the sleep", dense, self.dense_mirror.fields["weight"])
        self.check()


def _has_int32(given: Input) -> bool:
    announced = given.announced
    pairs = announced.values() if isinstance(announced, dict) else [(announced, None)]
    return any(ids.dtype == torch.int32 for ids, _ in pairs)

"""Modules that own tables, how a program looks them up, and the mirror of their rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import speedtorch
from speedtorch import HostTable
from speedtorch.nn.row_module import RowModule
from stress.mirror import Array, Mirror, Rule

__all__ = ["KINDS", "Input", "Lookup", "Owner", "Part", "drawn_owner", "small_numbers"]

Ids = npt.NDArray[np.int64]


class Part(NamedTuple):
    """A lookup of one table on one rank."""

    ids: Ids
    lengths: Ids  # of each sample
    coefficients: Array  # of the loss, [samples, D]


CACHES = [200, 400, 1024, 8192]
"""Sizes in bytes, which hold at least one row of each table of a module."""
Lookup = list[list[Part]]
"""By rank, the parts of each table of a module."""


class Input(NamedTuple):
    """What a module is called with, and what announces the lookup."""

    arguments: tuple[Any, ...]
    announced: Any


def small_numbers(draw: np.random.Generator, *shape: int) -> Array:
    """Numbers that float16 and bfloat16 store exactly."""
    return draw.integers(-16, 17, shape).astype(np.float32) / 8


class Owner:
    """A module with one parameter of rows, whose options are drawn.

    With `ranks` 0 the rows are not shared; `alike` is the width of plain tables without padding, or
    0 if width and options are drawn.
    """

    kind = ""
    pools = False
    counts: tuple[int, ...] = ()
    """Rows of each table."""
    of_records = False
    """Whether the module takes a HostTable."""
    has_no_ids = False
    """Whether its inputs have floats in place of ids."""

    def __init__(
        self,
        draw: random.Random,
        rule: Rule,
        device: str,
        folder: Path,
        *,
        ranks: int = 0,
        divisor: int = 1,
        alike: int = 0,
    ) -> None:
        self.draw, self.device, self.folder, self.is_sharded = draw, device, folder, ranks > 0
        self.numbers = np.random.default_rng(draw.getrandbits(60))
        self.width = alike or draw.choice([1, 2, 4, 8])
        self.counts = self.drawn_counts()
        self.features = {self.kind}
        padding = self.drawn_padding()
        self.padding = None if alike else padding
        self.settings = {} if alike else self.drawn_settings(rule)
        if not sum(self.counts):
            self.features.add("no rows")
        stored = self.settings.get("stored") or {}
        self.stored = {name: str(dtype).removeprefix("torch.") for name, dtype in stored.items()}
        self.memory = self.drawn_memory()
        self.has_state = draw.random() < 0.5
        rows = small_numbers(self.numbers, sum(self.counts), self.width)
        if self.padding is not None:
            rows[self.padding] = 0
        more = {"padding": self.padding, "divisor": divisor, "device": device}
        self.mirror = Mirror.of(rows, rule, self.stored, **more)
        self.begin_step()
        self.module = self.built()

    # ---- what is drawn

    def drawn_counts(self) -> tuple[int, ...]:
        return (self.draw.choice([0, 1, 5, 24, 24, 60]),)

    def drawn_padding(self) -> int | None:
        return None

    def drawn_settings(self, rule: Rule) -> dict[str, Any]:
        draw, settings = self.draw, dict[str, Any]()
        if draw.random() < 0.4:
            settings["cache"] = draw.choice(CACHES)
            self.features.add("cache")
        if draw.random() < 0.4:
            settings["capacity"] = 100 if self.is_sharded else draw.choice([3, 8, 100])
            self.features.add("capacity")
        if draw.random() < 0.35:
            dtype = draw.choice([torch.bfloat16, torch.float16])
            names = ["weight", *(name for name in rule.state if draw.random() < 0.5)]
            settings["stored"], settings["rounding"] = dict.fromkeys(names, dtype), "nearest"
            self.features.add("16 bits")
        return settings

    def drawn_memory(self) -> str:
        choices = ["auto", "auto"] + ["shared"] * (not self.is_sharded)
        if self.device == "cpu" or not self.settings.keys() & {"cache", "capacity"}:
            choices += ["plain"]  # which a GPU cannot read in place
            choices += ["file", "file"] if self.of_records and not self.is_sharded else []
        memory = self.draw.choice(choices)
        if memory in ("file", "shared"):
            self.features.add(f"{memory} table")
        self.slots = 0
        if memory == "file" and "cache" not in self.settings and self.draw.random() < 0.6:
            self.slots = self.draw.choice([1, 4, 20, 100])
            self.features.add("resident rows")
        return memory

    # ---- the module

    def built(self) -> nn.Module:
        """A module with the mirror's weights; with any, where ranks are to share the rows."""
        raise NotImplementedError

    def table(self, rows: Tensor) -> HostTable:
        """A table of the drawn memory with these rows, and fields for the state or none."""
        stored = self.settings.get("stored") or {}
        names = self.mirror.rule.state if self.has_state else {}
        state = {
            name: (self.width if is_wide else 1, stored.get(name, torch.float32))
            for name, is_wide in names.items()
        }
        path = self.folder / f"{self.kind}-{self.draw.getrandbits(60):x}.rows"
        widths = [self.width, *(width for width, _ in state.values())]
        table = HostTable(
            len(rows),
            self.width,
            stored.get("weight", torch.float32),
            state=state,
            memory=self.memory,  # type: ignore[arg-type]
            path=path if self.memory == "file" else None,
            resident=4 * sum(widths) * self.slots or None,  # twice as many slots, with 16 bits
        )
        table["weight"].copy_(rows)
        return table

    @property
    def row_module(self) -> RowModule:
        """The module that has the parameter."""
        (found,) = [module for module in self.module.modules() if isinstance(module, RowModule)]
        return found

    @property
    def is_growing(self) -> bool:
        """Whether resize() adds rows."""
        return self.memory in ("auto", "plain") and not self.is_sharded

    def grow(self) -> None:
        count = self.draw.choice([0, 1, 7] if self.counts[-1] else [1, 7])
        rows = small_numbers(self.numbers, count, self.width)
        total = self.counts[-1] + len(rows)
        self.module.resize(*self.resized(total), rows=torch.from_numpy(rows.copy()))
        self.mirror.grow(rows)
        self.counts = (*self.counts[:-1], total)

    def resized(self, total: int) -> tuple[Any, ...]:
        """Arguments that give the last table so many rows."""
        return (total,)

    # ---- lookups

    def shorten(self, parts: list[Part]) -> None:
        """Shortens the rows of a lookup in the mirror to `max_norm`, if there is one."""
        if (most := self.settings.get("max_norm")) is not None:
            if not len(parts[0].ids):
                return  # without ids torch raises on a GPU
            rows = torch.from_numpy(self.mirror.fields["weight"]).to(self.device)
            torch.embedding_renorm_(rows, torch.from_numpy(parts[0].ids).to(self.device), most, 2.0)
            self.mirror.fields["weight"] = rows.cpu().numpy()

    def begin_step(self) -> None:
        """Draws the rows of a step, for which the capacity has room."""
        total = sum(self.counts)
        most = min(total, self.settings.get("capacity") or total)
        self.pool = self.numbers.permutation(total)[: self.draw.randint(1, max(1, most))]

    def lookup(self, ranks: int = 1) -> Lookup:
        return [self.drawn_parts() for _ in range(ranks)]

    def drawn_parts(self) -> list[Part]:
        parts, first = [], 0
        samples = self.draw.choice([0, 1, 2, 3, 6, 12])
        for count in self.counts:
            pool = self.pool[(self.pool >= first) & (self.pool < first + count)] - first
            lengths = np.ones(samples, np.int64)
            if self.pools:
                lengths = self.numbers.integers(0, 3, samples)
            if not len(pool):  # of bags as many samples as of the other table, without ids
                lengths = lengths[: samples if self.pools else 0] * 0
            ids = self.numbers.choice(pool, lengths.sum()) if lengths.sum() else pool[:0]
            coefficients = self.numbers.integers(-4, 5, (len(lengths), self.width))
            parts.append(Part(ids, lengths, coefficients.astype(np.float32)))
            first += count
        return parts

    def ids(self, part: Part) -> Tensor:
        dtype = torch.int32 if self.draw.random() < 0.2 else torch.int64
        dtype = torch.float32 if self.has_no_ids else dtype
        device = self.device if self.draw.random() < 0.7 else "cpu"
        return torch.from_numpy(part.ids.copy()).to(device, dtype)

    def input(self, parts: list[Part]) -> Input:
        """What the module is given for a lookup."""
        raise NotImplementedError

    def results(self, result: Any) -> list[Tensor]:
        """The samples of each table, `[samples, D]`."""
        return [result]

    def loss(self, parts: list[Part], results: list[Tensor]) -> Tensor:
        losses = [
            (found * torch.from_numpy(part.coefficients).to(found.device)).sum()
            for part, found in zip(parts, results, strict=True)
        ]
        return torch.stack(losses).sum()

    # ---- the mirror

    def global_ids(self, parts: list[Part]) -> Ids:
        firsts = np.cumsum([0, *self.counts[:-1]])
        return np.concatenate(
            [part.ids + first for part, first in zip(parts, firsts, strict=True)]
        ).astype(np.int64)

    def expected(self, parts: list[Part]) -> list[Array]:
        """What the lookup must return, of at most two rows for each sample."""
        firsts, weight = np.cumsum([0, *self.counts[:-1]]), self.mirror.fields["weight"]
        found = []
        for part, first in zip(parts, firsts, strict=True):
            samples = np.repeat(np.arange(len(part.lengths)), part.lengths)
            sums = np.zeros((len(part.lengths), self.width), np.float32)
            rows = weight[part.ids + first]
            if self.pools and self.padding is not None:
                rows[part.ids == self.padding] = 0  # which may have been written by hand
            np.add.at(sums, samples, rows)
            found.append(sums / self.divisors(part))
        return found

    def divisors(self, part: Part) -> Array:
        """Of the sums of samples, `[samples, 1]`."""
        return np.ones((len(part.lengths), 1), np.float32)

    def mirror_backward(self, lookup: Lookup, factor: float = 1.0) -> None:
        for parts in lookup:
            gradients = [
                np.repeat(part.coefficients / self.divisors(part), part.lengths, axis=0)
                for part in parts
            ]
            scaled = np.concatenate(gradients) * np.float32(factor)
            self.mirror.backward(self.global_ids(parts), scaled)


class OneTable(Owner):
    of_records = True

    def drawn_settings(self, rule: Rule) -> dict[str, Any]:
        settings = super().drawn_settings(rule)
        if self.draw.random() < 0.2 and "stored" not in settings and not self.is_sharded:
            settings["max_norm"] = 2.0
            self.features.add("max_norm")
        elif self.draw.random() < 0.4 and rule.is_sparse:
            settings["sparse"] = True  # whose sums are exact only if no row was shortened
            self.features.add("sparse gradients")
        return settings

    def made_of(self, weight: Tensor | HostTable | None, **more: Any) -> nn.Module:
        raise NotImplementedError

    def built(self) -> nn.Module:
        rows, settings = torch.from_numpy(self.mirror.fields["weight"].copy()), dict(self.settings)
        if self.memory in ("file", "shared"):
            return self.made_of(self.table(rows), **settings)
        weight = None if self.is_sharded else rows
        return self.made_of(weight, memory=self.memory, **settings)


class OneEmbedding(OneTable):
    kind = "embedding"

    def drawn_padding(self) -> int | None:
        return self.draw.choice([None, None, 0]) if self.counts[0] else None

    def made_of(self, weight: Tensor | HostTable | None, **more: Any) -> nn.Module:
        return speedtorch.Embedding(
            self.counts[0],
            self.width,
            padding_idx=self.padding,
            _weight=weight,
            device=self.device,
            **more,
        )

    def input(self, parts: list[Part]) -> Input:
        ids = self.ids(parts[0])
        is_square = self.draw.random() < 0.5  # drawn alike on every rank
        if is_square and len(ids) % 2 == 0:
            ids = ids.view(2, -1)
        return Input((ids,), ids)

    def results(self, result: Any) -> list[Tensor]:
        return [result.reshape(-1, self.width)]


class OneBag(OneTable):
    kind, pools = "bag", True

    def drawn_padding(self) -> int | None:
        self.mode = self.draw.choice(["sum", "mean"])
        return self.draw.choice([None, None, 0]) if self.counts[0] else None

    def made_of(self, weight: Tensor | HostTable | None, **more: Any) -> nn.Module:
        return speedtorch.EmbeddingBag(
            self.counts[0],
            self.width,
            mode=self.mode,
            padding_idx=self.padding,
            _weight=weight,
            device=self.device,
            **more,
        )

    def input(self, parts: list[Part]) -> Input:
        ids = self.ids(parts[0])
        return Input((ids, _offsets(parts[0], ids)[:-1]), ids)

    def divisors(self, part: Part) -> Array:
        bags = np.repeat(np.arange(len(part.lengths)), part.lengths)
        counts = np.bincount(bags[part.ids != self.padding], minlength=len(part.lengths))
        lengths = np.maximum(counts, 1)[:, None].astype(np.float32)
        return lengths if self.mode == "mean" else np.ones_like(lengths)


class Tables(Owner):
    """A collection of two tables that share a group."""

    names = ("left", "right")
    config: Callable[..., Any]
    collection: Any

    def drawn_counts(self) -> tuple[int, ...]:
        return (self.draw.choice([1, 7]), self.draw.choice([1, 2, 12, 30]))

    def built(self) -> nn.Module:
        configs = [
            self.config(count, self.width, name)
            for count, name in zip(self.counts, self.names, strict=True)
        ]
        weight = torch.from_numpy(self.mirror.fields["weight"].copy())
        rows = dict(zip(self.names, weight.split(self.counts), strict=True))
        more = {"device": self.device, "memory": self.memory, **self.settings}
        made: nn.Module
        if self.is_sharded:
            made = self.collection(tables=configs, **more)
        else:
            made = self.collection.from_pretrained(configs, rows, freeze=False, **more)
        return made

    def resized(self, total: int) -> tuple[Any, ...]:
        return self.names[-1], total

    def input(self, parts: list[Part]) -> Input:
        given = {}
        for name, part in zip(self.names, parts, strict=True):
            ids = self.ids(part)
            given[name] = (ids, self.offsets(part, ids))
        return Input((given,), given)

    def offsets(self, part: Part, ids: Tensor) -> Tensor:
        return _offsets(part, ids)


class TablesOfBags(Tables):
    kind, pools = "bag collection", True
    config, collection = speedtorch.EmbeddingBagConfig, speedtorch.EmbeddingBagCollection

    def results(self, result: Any) -> list[Tensor]:
        return [result[name] for name in self.names]


class TablesOfRows(Tables):
    kind = "collection"
    config, collection = speedtorch.EmbeddingConfig, speedtorch.EmbeddingCollection

    def offsets(self, part: Part, ids: Tensor) -> Tensor:
        return torch.tensor([0, 0, len(ids)], dtype=ids.dtype, device=ids.device)

    def results(self, result: Any) -> list[Tensor]:
        return [result[name].values() for name in self.names]


KINDS: tuple[type[Owner], ...] = (OneEmbedding, OneBag, TablesOfBags, TablesOfRows)


def drawn_owner(draw: random.Random, *given: Any, **more: Any) -> Owner:
    return draw.choice(KINDS)(draw, *given, **more)


def _offsets(part: Part, ids: Tensor) -> Tensor:
    """Where each sample begins, and the end of the last one."""
    return torch.from_numpy(np.cumsum([0, *part.lengths])).to(ids.device, ids.dtype)

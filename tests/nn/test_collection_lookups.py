"""Random lookups of random collections give the rows and gradients of plain tables."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from keyed_ids import KeyedIds
from loops import sgd_step
from reference import FLOATS, assert_same_bytes
from torch import Tensor, nn

import speedtorch

Bags = list[list[int]]
MODES = [torch.enable_grad, torch.enable_grad, torch.no_grad, torch.inference_mode]
WIDE = [torch.float32, torch.float64]
"""In which gradients are exact enough to be compared."""
ROWS = 5
"""Of every table: a feature's ids may be those of another."""


class Drawn:
    """A collection of random tables, which may share features, and a copy of their rows.

    Attributes:
        uses: (feature, config of its table) by name in the result.
        weights: the rows of each table, which torch's functions look up.
    """

    def __init__(self, random: Random, kind: str, device: str) -> None:
        self.random, self.kind, self.device = random, kind, device
        name = "Embedding" if kind == "rows" else "EmbeddingBag"
        config = getattr(speedtorch, f"{name}Config")
        columns, several = random.choice([[2], [2, 3]]), FLOATS if kind != "weighted" else WIDE
        dtypes = random.choice([[torch.float32], several])
        configs = []
        for number in range(random.randint(1, 4)):
            own: dict[str, Any] = {"feature_names": random.sample("xyz", random.randint(1, 2))}
            own |= {"data_type": random.choice(dtypes), "group": random.choice(["", "", "own"])}
            own |= {"pooling": random.choice(["sum", "mean"])} if kind == "bags" else {}
            configs.append(config(ROWS, random.choice(columns), f"t{number}", **own))
        settings = {"freeze": random.random() < 0.2, "device": device}
        settings |= {"is_weighted": True} if kind == "weighted" else {}
        self.ours = getattr(speedtorch, f"{name}Collection")(configs, **settings)
        count = Counter(key for each in configs for key in each.feature_names)
        self.features = sorted(count)
        self.uses = {
            f"{key}@{each.name}" if count[key] > 1 else key: (key, each)
            for each in configs
            for key in each.feature_names
        }
        rows_of = self.ours.table_weight
        self.weights = nn.ParameterDict(
            {each.name: nn.Parameter(rows_of(each.name).to(device).clone()) for each in configs}
        ).requires_grad_(not settings["freeze"])

    def tensor(self, numbers: list[int]) -> Tensor:
        """Integers of some kind on the CPU or the device."""
        dtype, place = self.random.choice([torch.int64, torch.int32]), ["cpu", self.device]
        return torch.tensor(numbers, dtype=dtype, device=self.random.choice(place))

    def bags(self, lengths: list[int], first: int = 0) -> Bags:
        return [[first + self.random.randrange(ROWS) for _ in range(n)] for n in lengths]

    def value(self, bags: Bags, size: int | None, factors: Tensor | None) -> Any:
        """A feature of a dict: ids, bags of one size or ids with offsets, perhaps weighted."""
        ids, offsets = self.tensor([row for bag in bags for row in bag]), None
        if size is None:
            offsets = self.tensor([0, *accumulate(map(len, bags))])
        elif size != 1 or self.random.random() < 0.5:
            ids = ids.view(len(bags), size)
        if factors is not None:
            return ids, offsets, factors.view(ids.shape)
        return ids if offsets is None else self.random.choice([tuple, list])([ids, offsets])

    def given(self) -> tuple[Any, dict[str, Bags], dict[str, Tensor]]:
        """The input in a random form and order, and the bags and weights of each feature."""
        random, samples, is_even = (
            self.random,
            self.random.randint(0, 4),
            self.random.random() < 0.5,
        )
        keys, is_keyed = [*self.features], random.random() < 0.5
        keys += ["of no table", "neither"][: is_keyed * random.randint(0, 2)]
        bags, factors, values = {}, {}, {}
        for key in random.sample(keys, len(keys)):
            size = random.randint(0, 2) if is_even or random.random() < 0.3 else None
            lengths = [random.randint(0, 3) if size is None else size for _ in range(samples)]
            bags[key] = self.bags(lengths, 0 if key in self.features else 99)
            if self.kind == "weighted":
                factors[key] = torch.rand(sum(lengths), device=self.device).requires_grad_()
            values[key] = self.value(bags[key], size, factors.get(key))
        if not is_keyed:
            return values, bags, factors
        weights, place = torch.cat([*factors.values()]) if factors else None, self.tensor([])
        keyed = KeyedIds.of(bags, place.device.type, place.dtype, weights)
        return keyed, bags, factors

    def changed(self, keyed: KeyedIds, bags: dict[str, Bags]) -> tuple[KeyedIds, dict[str, Bags]]:
        """The same tensors for other keys, or with other ids and offsets."""
        keys, found = [*bags], [bag for own in bags.values() for bag in own]
        ids, offsets, samples = keyed.values(), keyed.offsets(), len(found) // len(keys)
        if found and (len(keys) > len(self.features) or self.random.random() < 0.5):
            cuts = sorted(self.random.randint(0, len(ids)) for _ in found[1:])
            found = self.bags([end - first for first, end in pairwise([0, *cuts, len(ids)])])
            other = KeyedIds.of({"": found})
            ids.copy_(other.values())
            offsets.copy_(other.offsets())
        else:
            self.random.shuffle(keys)
            keyed = KeyedIds(keys, ids, offsets)
        parts = {key: found[n * samples : (n + 1) * samples] for n, key in enumerate(keys)}
        return keyed, parts

    def expected(self, name: str, bags: Bags, factors: Tensor | None) -> Tensor:
        """torch's lookup of a feature in a table."""
        config, keyed = self.uses[name][1], KeyedIds.of({"": bags}, self.device)
        weight = self.weights[config.name]
        if self.kind == "rows":
            found: Tensor = F.embedding(keyed.values(), weight)
        else:
            factors = None if factors is None else factors.to(weight.dtype)
            found = F.embedding_bag(
                keyed.values(),
                weight,
                keyed.offsets(),
                mode=config.pooling,
                per_sample_weights=factors,
                include_last_offset=True,
            )
        return found.float() if found.element_size() == 2 else found  # as torchrec's

    def assert_close(self, name: str, found: Tensor, expected: Tensor) -> None:
        dtype, is_on_cpu = self.uses[name][1].data_type, self.device == "cpu"
        assert (found.device, found.dtype) == (expected.device, expected.dtype)
        if self.kind == "rows" or (self.kind == "bags" and is_on_cpu and dtype == torch.float32):
            assert_same_bytes(found.detach(), expected.detach())
        else:  # of 16 bits they are converted after the sum
            torch.testing.assert_close(found.to(dtype), expected.to(dtype))

    def assert_same_lookup(
        self, given: Any, bags: dict[str, Bags], factors: dict[str, Tensor], mode: Any
    ) -> None:
        """Looks features up, and trains the tables unless no gradients are made."""
        with mode():
            result = self.ours(given)
            expected = {
                name: self.expected(name, bags[key], factors.get(key))
                for name, (key, _) in self.uses.items()
            }
        assert [*result] == [*result.keys()] == [*expected]
        if self.kind == "rows":
            assert isinstance(result, dict)
            found = {name: rows.values() for name, rows in result.items()}
            for name, (key, _) in self.uses.items():
                lengths = [*map(len, bags[key])]
                assert result[name].lengths().tolist() == lengths
                assert result[name].offsets().tolist() == [0, *accumulate(lengths)]
            if len({rows.shape[1] for rows in found.values()}) == 1:
                assert_same_bytes(result.rows().detach(), torch.cat([*found.values()]).detach())
        else:
            found = dict(result.items())
            assert_same_bytes(result.values().detach(), torch.cat([*found.values()], 1).detach())
        for name, rows in expected.items():
            self.assert_close(name, found[name], rows)
            assert found[name].requires_grad == rows.requires_grad
        if any(rows.requires_grad for rows in expected.values()):
            self.assert_same_step(found, expected, [*factors.values()])

    def assert_same_step(
        self, found: dict[str, Tensor], expected: dict[str, Tensor], factors: list[Tensor]
    ) -> None:
        gradients = []
        for module, results in ((self.ours, found), (self.weights, expected)):
            losses = [rows.square().sum() * (n + 1) for n, rows in enumerate(results.values())]
            for each in factors:
                each.grad = torch.zeros_like(each)
            sgd_step(module, torch.stack([loss.double() for loss in losses]).sum())
            gradients.append([each.grad.clone() for each in factors if each.grad is not None])
        torch.testing.assert_close(*gradients)
        for name, weight in self.weights.items():
            rows = self.ours.table_weight(name)
            if weight.dtype in WIDE:
                torch.testing.assert_close(rows, weight.detach().cpu())
            weight.data.copy_(rows)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["rows", "bags", "weighted"])
def test_lookups_and_steps_are_those_of_plain_tables(kind: str, device: str) -> None:
    random = Random(kind)
    torch.manual_seed(0)
    for _ in range(40):
        drawn = Drawn(random, kind, device)
        for _ in range(3):
            given, bags, factors = drawn.given()
            drawn.assert_same_lookup(given, bags, factors, random.choice(MODES))
            if isinstance(given, KeyedIds) and not factors:
                given, bags = drawn.changed(given, bags)
            elif isinstance(given, dict):
                [each.detach().uniform_() for each in factors.values()]
            drawn.assert_same_lookup(given, bags, factors, random.choice(MODES))

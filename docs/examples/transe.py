"""TransE on a knowledge graph, with filtered hits@10.

Entities are points of a grid, and relations are moves such as "two to the right". The model learns
rows such that head + relation is near tail. The test uses one triple in ten. --file reads another
graph, with head, relation and tail separated by tabs in each line.

    python transe.py
    python transe.py --plain  # plain torch, with the same numbers on the CPU
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import speedtorch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def grid(side: int = 24) -> tuple[Tensor, int, int]:
    """Returns triples `[count, 3]` and the numbers of entities and relations."""
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    moves = torch.tensor([[1, 0], [0, 1], [2, 0], [0, 2], [1, 1], [1, -1], [3, 1], [1, 3]])
    found = []
    for relation, move in enumerate(moves):
        ends = places + move
        inside = ((ends >= 0) & (ends < side)).all(1)
        heads, tails = places[inside], ends[inside]
        ids = (heads[:, 0] * side + heads[:, 1], tails[:, 0] * side + tails[:, 1])
        found.append(torch.stack([ids[0], torch.full_like(ids[0], relation), ids[1]], 1))
    return torch.cat(found), side * side, len(moves)


def read(path: Path) -> tuple[Tensor, int, int]:
    """Reads a file; returns the same as grid()."""
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    if wrong := [number for number, line in enumerate(lines, 1) if len(line) != 3]:
        raise SystemExit(f"{path}: line {wrong[0]} must have three columns separated by tabs")
    entities = {name: n for n, name in enumerate(sorted({x for h, _, t in lines for x in (h, t)}))}
    relations = {name: n for n, name in enumerate(sorted({r for _, r, _ in lines}))}
    triples = [[entities[h], relations[r], entities[t]] for h, r, t in lines]
    return torch.tensor(triples), len(entities), len(relations)


class TransE(nn.Module):
    """Computes the distances of head + relation to tail."""

    def __init__(self, entities: int, relations: int, columns: int, plain: bool) -> None:
        super().__init__()
        if plain:
            self.entities: nn.Module = nn.Embedding(entities, columns, sparse=True, device=DEVICE)
        else:
            self.entities = speedtorch.Embedding(entities, columns, sparse=True, device=DEVICE)
        self.relations = nn.Embedding(relations, columns, device=DEVICE)
        generator = torch.Generator().manual_seed(0)
        for table, count in ((self.entities, entities), (self.relations, relations)):
            first = torch.rand(count, columns, generator=generator) - 0.5
            table.load_state_dict({"weight": first})

    def forward(self, heads: Tensor, relations: Tensor, tails: Tensor) -> Tensor:
        """Maps ids, whose shapes torch broadcasts, to distances."""
        moved = self.entities(heads) + self.relations(relations)
        return (moved - self.entities(tails)).norm(dim=-1)


def batches(
    triples: Tensor, entities: int, size: int, random: torch.Generator, wrong: int = 8
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns heads and relations `[size, 1]`, and tails `[size, 1 + wrong]`, true tail first."""
    triples = triples[torch.randperm(len(triples), generator=random)]
    negatives = torch.randint(entities, (len(triples), wrong), generator=random)
    tails = torch.cat([triples[:, 2:], negatives], 1)
    return [
        (part[:, :1].to(DEVICE), part[:, 1:2].to(DEVICE), ends.to(DEVICE))
        for part, ends in zip(triples.split(size), tails.split(size), strict=True)
    ]


@torch.no_grad()
def hits(model: TransE, test: Tensor, triples: Tensor, entities: int, most: int = 10) -> float:
    """The share of test triples whose tail is among the nearest, without other true tails."""
    right: dict[tuple[int, int], list[int]] = {}
    for head, relation, tail in triples.tolist():
        right.setdefault((head, relation), []).append(tail)
    all_entities = torch.arange(entities, device=DEVICE)
    found = 0
    for head, relation, tail in test.tolist():
        heads, relations = (torch.full_like(all_entities, id_) for id_ in (head, relation))
        distances = model(heads, relations, all_entities)
        own = distances[tail].clone()
        distances[right[head, relation]] = torch.inf
        found += int((distances < own).sum()) < most
    return found / len(test)


def main(arguments: list[str] | None = None) -> tuple[float, Tensor]:
    """Trains and tests; returns hits@10 and the entities' rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="triples; by default moves on a grid")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--plain", action="store_true", help="use torch.nn.Embedding")
    chosen = parser.parse_args(arguments)
    random = torch.Generator().manual_seed(1)
    triples, entities, relations = read(chosen.file) if chosen.file else grid()
    triples = triples[torch.randperm(len(triples), generator=random)]
    test, train = triples[: len(triples) // 10], triples[len(triples) // 10 :]
    model = TransE(entities, relations, chosen.columns, chosen.plain)
    rows = torch.optim.SparseAdam(model.entities.parameters(), lr=0.03)
    if not chosen.plain:
        speedtorch.attach(rows, model)
    dense = torch.optim.Adam(model.relations.parameters(), lr=0.03)
    for epoch in range(chosen.epochs):
        total = 0.0
        loader = batches(train, entities, 512, random)
        if not chosen.plain:
            loader = speedtorch.prefetch(
                loader, model, ids=lambda batch: {model.entities: [batch[0], batch[2]]}
            )
        for heads, relation, tails in loader:
            distances = model(heads, relation, tails)
            loss = torch.relu(3 + distances[:, :1] - distances[:, 1:]).mean()
            loss.backward()
            for optimizer in (rows, dense):
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item()
        if not epoch % 10:
            print(f"epoch {epoch}: loss {total:.3f}")
    reached = hits(model, test, triples, entities)
    print(f"filtered hits@10: {reached:.3f}, by chance {10 / entities:.3f}")
    return reached, model.entities.weight.detach().cpu()


if __name__ == "__main__":
    main()

"""DLRM on Criteo's format: 26 tables in host memory, with the AUC on held-out lines.

A line of the file has a label (0 or 1), 13 integers and 26 categories of up to 8 hexadecimal
digits, separated by tabs. Integers and categories may be missing. train.txt of Criteo's Kaggle
challenge has this format. Without --file, the example writes a small synthetic file.

    python dlrm.py
    python dlrm.py --plain  # plain torch, with the same numbers on the CPU
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedtorch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUMBERS = 13
NAMES = [f"C{number}" for number in range(1, 27)]


class Clicks(NamedTuple):
    """The lines of a file, in order."""

    labels: Tensor  # [lines], 1 after a click, else 0
    numbers: Tensor  # [lines, 13], log(1 + x) of each integer x; 0 where x is missing or negative
    rows: Tensor  # [lines, 26] int32, the row of each category in the table of its feature


class Batch(NamedTuple):
    """The lines of a step."""

    labels: Tensor  # [size]
    numbers: Tensor  # [size, 13]
    ids: dict[str, Tensor]  # [size] for each feature


def read(path: Path, rows: int, lines: int | None) -> Clicks:
    """Reads up to `lines` lines for tables of `rows` rows; row 0 is for missing categories."""
    labels, numbers, hashed = array("f"), array("f"), array("i")
    with path.open(encoding="ascii") as file:
        for number, line in enumerate(file, 1):
            if number - 1 == lines:
                break
            fields = line.rstrip("\r\n").split("\t")
            try:
                if len(fields) != 1 + NUMBERS + len(NAMES):
                    raise ValueError(f"{len(fields)} fields, not {1 + NUMBERS + len(NAMES)}")
                if fields[0] not in ("0", "1"):
                    raise ValueError(f"the label is {fields[0]!r}, not 0 or 1")
                labels.append(float(fields[0]))
                numbers.extend(max(int(text or "0"), 0) for text in fields[1 : 1 + NUMBERS])
                # Criteo's categories are 32-bit hashes, so that their remainders are evenly spread.
                hashed.extend(
                    1 + int(text, 16) % (rows - 1) if text else 0 for text in fields[1 + NUMBERS :]
                )
            except ValueError as error:
                message = f"{path}: line {number} is not in Criteo's format: {error}"
                raise SystemExit(message) from None
    if not labels:
        raise SystemExit(f"{path}: the file has no lines")
    return Clicks(
        torch.frombuffer(labels, dtype=torch.float32),
        torch.frombuffer(numbers, dtype=torch.float32).log1p_().view(-1, NUMBERS),
        torch.frombuffer(hashed, dtype=torch.int32).view(-1, len(NAMES)),
    )


def write_synthetic(path: Path, lines: int) -> None:
    """Writes a file in Criteo's format; clicks depend on categories, their pairs and integers."""
    random = torch.Generator().manual_seed(0)
    numbers = torch.randn(lines, NUMBERS, generator=random).mul(1.5).exp().long() - 1
    logits = numbers.clamp(0).float().log1p() @ torch.randn(NUMBERS, generator=random) * 0.2
    columns = [[str(number) for number in column] for column in numbers.T.tolist()]
    tastes, squares = torch.zeros(lines, 4), torch.zeros(lines)
    for size in torch.logspace(1, 3, len(NAMES)).long().tolist():
        values = (torch.rand(lines, generator=random) ** 3 * size).long()  # low values are frequent
        names = [f"{n:08x}" for n in torch.randint(2**32, (size,), generator=random).tolist()]
        columns.append([names[value] for value in values.tolist()])
        taste = torch.randn(size, 4, generator=random)[values] * 0.12
        tastes, squares = tastes + taste, squares + taste.square().sum(1)
        logits += 0.35 * torch.randn(size, generator=random)[values]
    logits += (tastes.square().sum(1) - squares) / 2  # the dot products of all pairs
    clicked = torch.rand(lines, generator=random) < torch.sigmoid(logits - logits.mean() - 1)
    missing = torch.rand(len(columns), lines, generator=random) < 0.05
    columns = [
        ["" if is_empty else text for text, is_empty in zip(column, empty, strict=True)]
        for column, empty in zip(columns, missing.tolist(), strict=True)
    ]
    labels = [str(label) for label in clicked.long().tolist()]
    with path.open("w", encoding="ascii") as file:
        file.writelines("\t".join(fields) + "\n" for fields in zip(labels, *columns, strict=True))


class PlainTables(nn.Module):
    """All tables on the device in plain torch, with the collection's state dict.

    A bag of one id is a row. torch.nn.Embedding adds the gradients of equal ids in the same order
    as the collection. torch.nn.EmbeddingBag uses another order, which changes the last bits.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.embedding_bags = nn.ModuleDict({name: nn.Embedding(rows, columns) for name in NAMES})

    def forward(self, ids: dict[str, Tensor]) -> Tensor:
        """Maps ids `[size]` of each feature to rows `[size, 26 * columns]`."""
        bags = self.embedding_bags.items()
        return torch.cat([bag(ids[name].to(DEVICE)) for name, bag in bags], 1)


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers with a ReLU between each two."""
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Predicts a click from the dot products of 26 rows and the integers' vector."""

    def __init__(self, rows: int, columns: int, plain: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        vectors = 1 + len(NAMES)
        self.bottom = perceptron(NUMBERS, 64, columns)
        self.top = perceptron(columns + vectors * (vectors - 1) // 2, 128, 64, 1)
        if plain:
            self.tables: nn.Module = PlainTables(rows, columns)
        else:
            configs = [speedtorch.EmbeddingBagConfig(rows, columns, name) for name in NAMES]
            self.tables = speedtorch.EmbeddingBagCollection(tables=configs, device=DEVICE)
        for number, name in enumerate(NAMES):
            random = torch.Generator().manual_seed(number)
            weight = self.tables.embedding_bags[name].weight
            nn.init.uniform_(weight, -(rows**-0.5), rows**-0.5, generator=random)
        self.pairs = torch.tril_indices(vectors, vectors, -1).to(DEVICE)

    def forward(self, batch: Batch) -> Tensor:
        """Maps a batch to logits `[size]`."""
        dense = self.bottom(batch.numbers.to(DEVICE))
        found = self.tables(batch.ids)
        rows = found if isinstance(found, Tensor) else found.values()
        vectors = torch.cat([dense, rows], 1).view(len(dense), -1, dense.shape[1])
        products = (vectors @ vectors.mT)[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], 1)).squeeze(1)


def batches(clicks: Clicks, size: int, order: Tensor) -> Iterator[Batch]:
    """Yields batches of `size` lines in the given order."""
    for part in order.split(size):
        labels, numbers, rows = (column[part] for column in clicks)
        yield Batch(labels, numbers, dict(zip(NAMES, rows.T.contiguous(), strict=True)))


def auc(scores: Tensor, labels: Tensor) -> float:
    """The probability that a click has a higher score than a non-click; ties count half."""
    _, places, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[places].double()  # equal scores share the mean
    clicks, non_clicks = int(labels.sum()), int((1 - labels).sum())
    return float((ranks[labels > 0].sum() - clicks * (clicks + 1) / 2) / (clicks * non_clicks))


@torch.no_grad()
def tested(model: DLRM, held: Clicks) -> tuple[float, float]:
    """Returns the loss and the AUC on held-out lines."""
    order = torch.arange(len(held.labels))
    logits = torch.cat([model(batch).cpu() for batch in batches(held, 4096, order)])
    loss = F.binary_cross_entropy_with_logits(logits, held.labels).item()
    return loss, auc(logits, held.labels)


def main(arguments: list[str] | None = None) -> tuple[list[float], float, dict[str, Tensor]]:
    """Trains and tests; returns each step's loss, the AUC and the rows of all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="Criteo's train.txt; by default a synthetic file")
    parser.add_argument("--lines", type=int, help="number of lines; 60,000 for the synthetic file")
    parser.add_argument("--rows", type=int, default=10_000, help="rows of each table")
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="use torch.nn.Embedding")
    chosen = parser.parse_args(arguments)
    if chosen.file:
        clicks = read(chosen.file, chosen.rows, chosen.lines)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "synthetic.txt"
            write_synthetic(path, chosen.lines or 60_000)
            clicks = read(path, chosen.rows, None)
    cut = len(clicks.labels) * 9 // 10  # holds out the latest tenth
    train = Clicks(*(column[:cut] for column in clicks))
    held = Clicks(*(column[cut:] for column in clicks))
    model = DLRM(chosen.rows, chosen.columns, chosen.plain).to(DEVICE)
    rows = torch.optim.Adagrad(model.tables.parameters(), lr=0.02)
    if not chosen.plain:
        speedtorch.attach(rows, model)
    dense = torch.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=1e-3)
    random, losses = torch.Generator().manual_seed(1), []
    loss, score = tested(model, held)
    print(f"before training: held out loss {loss:.4f}, AUC {score:.4f}")
    for epoch in range(chosen.epochs):
        start = len(losses)
        loader = batches(train, chosen.batch, torch.randperm(cut, generator=random))
        if not chosen.plain:
            loader = speedtorch.prefetch(loader, model.tables, ids=lambda batch: batch.ids)
        for batch in loader:
            loss = F.binary_cross_entropy_with_logits(model(batch), batch.labels.to(DEVICE))
            loss.backward()
            for optimizer in (rows, dense):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        mean = sum(losses[start:]) / len(losses[start:])
        loss, score = tested(model, held)
        print(f"epoch {epoch}: loss {mean:.4f}, held out loss {loss:.4f}, AUC {score:.4f}")
    state = model.tables.state_dict()
    return losses, score, {name: weight.cpu().clone() for name, weight in state.items()}


if __name__ == "__main__":
    main()

"""What a step sends and takes where rows are shared out among ranks: a model, no measurement.

    python -m benchmarks.ranks_model --write

Rows are expected ones (`expected_rows.py`), what travels is what `speedtorch/parallel` sends, and
the figures of links were measured on one or two GPUs, or are said to be assumed. It prints the
tables of docs/several_gpus.md, and writes them there if it is told to.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.expected_rows import Batches, expected_rows
from benchmarks.marked_text import replaced
from speedtorch.parallel.shared_memory_barrier import WORDS

PAGE = Path(__file__).parent.parent / "docs" / "several_gpus.md"
SENT, END_SENT = "<!-- sent -->", "<!-- /sent -->"
TIMES, END_TIMES = "<!-- times -->", "<!-- /times -->"

ROWS, COLUMNS, FIELDS = 100_000_000, 128, 3  # a weight and Adam's two
RANKS = (1, 2, 8, 64)
WORK = ((1 << 20, (0.0, 0.9, 1.05, 1.2)), (1 << 14, (0.0, 1.05, 1.2)))
"""Ids of a rank, and by which laws of Zipf."""


class Links(NamedTuple):
    """Figures of an H200 over PCIe 5, and of what is between several; GB/s are 1e9 bytes a second.

    Unless something else is said they were measured, on two GPUs with NVLink in one machine.
    """

    host: float = 81.0
    """GB/s of a swap of records, both ways summed, one GPU at work."""
    host_beside: float = 64.6
    """The same of each of two."""
    machine: float = 166.0
    """GB/s of all GPUs of a machine, both ways summed. Derived: four GPUs gather 193 GB/s of
    records from one table and scatter 146; doing that in turns they would swap 166. That eight
    get no more is assumed."""
    call_ms: float = 0.07
    """Of a collective in which little is sent, its launch included: 0.04 to 0.07."""
    message_ms: float = 0.003
    """More for each rank that is sent to beyond the first. Assumed."""
    read_ms: float = 0.045
    """Until the host knows the counts that have come: 0.08 to 0.15 with the call."""
    nvlink: float = 252.0
    """GB/s each way of a GPU in a collective: 133,000 rows of 512 bytes sent, and as many received,
    in 0.34 ms, a call's 0.07 included."""
    network: float = 47.0
    """GB/s each way of a GPU to other machines. Assumed: 46 to 48 is what NCCL's developers expect
    of a card of 400 Gb/s (NVIDIA/nccl-tests#290)."""
    looked_up: float = 655.0
    """GB/s of rows that are looked up and whose gradients are summed, on the GPU; with the next one
    a line through the four steps of results/embedding.json with all rows in GPU memory."""
    stepped: float = 1360.0
    """GB/s of records that the optimizer steps."""
    python_ms: float = 1.5
    """Of the host for a step of one table: half of word2vec's, of two tables, which keeps the GPU
    busy for a third of its time."""


MEASURED = Links()


class Model(NamedTuple):
    """A table that ranks train together."""

    batches: Batches
    fields: int = FIELDS
    """Of a record: the weight and what the optimizer keeps."""
    ranks_of_a_machine: int = 8
    links: Links = MEASURED

    @property
    def row_bytes(self) -> int:
        """Of float32."""
        return 4 * self.batches.columns

    @property
    def record_bytes(self) -> int:
        """In host memory."""
        return self.fields * self.row_bytes

    def sent(self) -> dict[str, Tensor]:
        """As sent()."""
        asked = expected_rows(self.batches).asked
        return sent(asked.expand(len(asked), -1), self.row_bytes)

    def times(self) -> Times:
        """Of the rank that takes the longest."""
        rows, links, ranks = expected_rows(self.batches), self.links, self.batches.ranks
        machine = self.ranks_of_a_machine
        calls = {name: call_ms(each, machine, links) for name, each in self.sent().items()}
        if ranks > 1:
            calls["counts"] += links.read_ms
            calls["meeting"] += links.read_ms
        given = rows.asked * (ranks if ranks > 1 else 0)  # looked up by their owner, too
        looked_up = (self.batches.ids + given) * self.row_bytes / links.looked_up
        stepped = rows.held * self.record_bytes / links.stepped
        return Times(
            exchange=self._exchange_ms(rows.crossing),
            calls=calls,
            gpu=float((looked_up + stepped).max()) / 1e6,
            python=links.python_ms,
        )

    def _exchange_ms(self, rows: Tensor) -> float:
        """Until so many rows have come to each rank, and as many have gone."""
        crossing, links = rows * 2 * self.record_bytes / 1e6, self.links
        machines = torch.split(crossing, self.ranks_of_a_machine)
        if len(machines[0]) == 1:
            return float(crossing.max()) / links.host
        most = max(float(each.sum()) for each in machines)
        return max(float(crossing.max()) / links.host_beside, most / links.machine)


class Times(NamedTuple):
    """Milliseconds of the parts of a step, and of the whole."""

    exchange: float
    """Records from host memory, and those of the step before back to it."""
    calls: dict[str, float]
    """Of what ranks send each other; none is beside other work."""
    gpu: float
    """Lookups, sums of gradients and the optimizer."""
    python: float
    """The host's, at best beside the GPU's work."""

    @property
    def step(self) -> float:
        """Without prefetch."""
        return max(self.exchange + self.gpu, self.python) + sum(self.calls.values())

    @property
    def beside(self) -> float:
        """What an exchange that is ahead can hide behind."""
        return max(self.gpu, self.python) + sum(self.calls.values())

    @property
    def prefetched(self) -> float:
        """A step with prefetch, whose lookup ranks compare, too."""
        return max(self.exchange, self.beside + self.calls["meeting"])


def sent(asked: Tensor, row_bytes: int) -> dict[str, Tensor]:
    """Bytes that each rank sends to each other, by the calls of a step, `[ranks, ranks]`.

    `asked` are the distinct rows that each rank asks each owner for.
    """
    others = 1 - torch.eye(len(asked), dtype=asked.dtype)
    rows = asked * others
    return {
        "counts": 8 * WORDS * others,  # which module, and how many rows
        "ids": 8 * rows,
        "rows": row_bytes * rows.t(),
        "meeting": 8 * WORDS * others,  # which backward
        "gradients": row_bytes * rows,
    }


def within_machines(ranks: int, ranks_of_a_machine: int) -> Tensor:
    """Which ranks share a machine, bool `[ranks, ranks]`."""
    machine = torch.arange(ranks) // ranks_of_a_machine
    return machine[:, None] == machine


def call_ms(bytes_sent: Tensor, ranks_of_a_machine: int, links: Links = MEASURED) -> float:
    """Milliseconds of a collective; all links are used at once, and both ways."""
    ranks = len(bytes_sent)
    if ranks == 1:
        return 0.0
    near = within_machines(ranks, ranks_of_a_machine)

    def busiest(part: Tensor) -> float:
        return max(float(part.sum(way).max()) for way in (0, 1))

    return (
        links.call_ms
        + links.message_ms * (ranks - 2)
        + max(
            busiest(bytes_sent * near) / links.nvlink,
            busiest(bytes_sent * ~near) / links.network,
        )
        / 1e6
    )


def models(ranks: Sequence[int]) -> Iterator[Model]:
    """Those of the page, where frequent rows are all over the table."""
    for ids, exponents in WORK:
        for exponent in exponents:
            for each in ranks:
                yield Model(Batches(ROWS, COLUMNS, ids, exponent, each, spread=True))


def lines_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    ruled = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("| --- ", "|---") for cells in ruled)


def work_of(batches: Batches) -> list[str]:
    """The first cells of a line."""
    return [f"{batches.ids:,}", f"{batches.exponent:g}", str(batches.ranks)]


def balance_of(batches: Batches) -> str:
    """The busiest owner's rows over the mean, of those asked for and of those held."""
    rows = expected_rows(batches)
    asked, held = (float(each.max() / each.mean()) for each in (rows.asked, rows.held))
    return f"{asked:.2f}, {held:.2f}"


def sent_table() -> str:
    """What travels, and how evenly."""
    rows = []
    for model in models([each for each in RANKS if each > 1]):
        batches, calls = model.batches, model.sent()
        expected, step = expected_rows(batches), sum(calls.values(), torch.zeros(()))
        near = within_machines(batches.ranks, model.ranks_of_a_machine)
        links = [step * near, step * ~near]
        asked, crossing = float(expected.asked.sum()), float(expected.crossing.mean())
        rows.append(
            [
                *work_of(batches),
                f"{asked:,.0f}",
                f"{asked * (1 - 1 / batches.ranks):,.0f}",
                f"{float(expected.held.mean()):,.0f}",
                f"{2 * crossing * model.record_bytes / 1e6:,.1f}",
                *(f"{float(link.sum()) / batches.ranks / 1e6:,.1f}" for link in links),
                " + ".join(str(len(calls) * int((link[0] > 0).sum())) for link in links),
                balance_of(batches),
                balance_of(batches._replace(spread=False)),
            ]
        )
    heads = [
        "ids of a rank",
        "Zipf",
        "ranks",
        "distinct rows of a rank",
        "of other ranks",
        "rows an owner holds",
        "MB, its host link",
        "MB it sends, NVLink",
        "MB it sends, network",
        "messages it sends, NVLink + network",
        "busiest / mean: asked, held",
        "frequent ids small: asked, held",
    ]
    return lines_of(heads, rows)


def times_table() -> str:
    """What takes how long, and how many times as much as one GPU ranks train."""
    rows = []
    for model in models(RANKS):
        ample = model.links._replace(machine=float("inf"))
        small = model._replace(batches=model.batches._replace(spread=False))
        times = model.times()
        rows.append(
            [
                *work_of(model.batches),
                f"{times.exchange:.2f}",
                f"{times.calls['counts'] + times.calls['ids']:.2f}",
                f"{times.calls['rows']:.2f}",
                f"{times.calls['meeting'] + times.calls['gradients']:.2f}",
                f"{times.gpu:.2f}",
                f"{times.step:.2f}",
                f"{times.prefetched:.2f}",
                *(f"{gain(each):.1f}" for each in (model, model._replace(links=ample), small)),
            ]
        )
    heads = [
        "ids of a rank",
        "Zipf",
        "ranks",
        "host exchange",
        "counts, ids",
        "rows",
        "gradients",
        "GPU's work",
        "a step",
        "with prefetch",
        "times one GPU",
        "if host memory is never short",
        "if frequent ids are small",
    ]
    return lines_of(heads, rows)


def gain(model: Model) -> float:
    """Ids a second, with prefetch, over those of one GPU that has as many ids in a step as each."""
    alone = model._replace(batches=model.batches._replace(ranks=1))
    return model.batches.ranks * alone.times().prefetched / model.times().prefetched


def main() -> None:
    """Prints both tables, and brings the page up to date if told to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks_model", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name} as well")
    write = parser.parse_args().write
    for begin, end, made in (
        (SENT, END_SENT, sent_table()),
        (TIMES, END_TIMES, times_table()),
    ):
        print(made)
        if write:
            PAGE.write_text(replaced(PAGE.read_text(), begin, end, made))


if __name__ == "__main__":
    main()

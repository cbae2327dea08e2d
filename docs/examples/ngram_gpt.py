"""A small GPT on bytes whose inputs include n-gram rows from large tables in host memory.

A byte's input is the sum of its embedding, its position's embedding, and two rows. The ids of the
rows are hashes of the last 2 and the last 3 bytes. A table adds memory but hardly any arithmetic.
The text is Python's documentation, or the file of --file. The example trains the model with and
without tables, for the same number of steps. With --save or --resume it trains only with tables.

    python ngram_gpt.py
    python ngram_gpt.py --plain  # plain torch, with the same numbers on the CPU
    python ngram_gpt.py --steps 200 --save gpt.pt
    python ngram_gpt.py --steps 400 --resume gpt.pt  # the numbers of 400 steps in one run
    python ngram_gpt.py --stored bfloat16 --state rowwise  # a fifth of the host memory
    python ngram_gpt.py --disk rows --resident 8MiB  # the same numbers, with tables in files
    python ngram_gpt.py --recompute  # the same numbers, with activations computed twice
    torchrun --nproc-per-node 2 ngram_gpt.py  # each rank has half of the rows
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import speedtorch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ORDERS = (2, 3)  # bytes of an n-gram
# The optimizer state with an entry per element of a row. RowWiseAdagrad has one entry per row.
FIELDS = {"adam": ("exp_avg", "exp_avg_sq"), "rowwise": ()}
FIELDS_OF_ROWS = {"adam": (), "rowwise": ("sum",)}


def rank_and_ranks() -> tuple[int, int]:
    """Returns the rank of this process and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sums a tensor over all ranks in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


class Part(NamedTuple):
    """A micro-batch; a step sums the gradients of several micro-batches."""

    inputs: Tensor  # [samples, context] bytes
    targets: Tensor  # [samples, context], the byte after each
    ids: list[Tensor]  # for each table: [samples, context] ids of the n-grams that end at each byte


def text_of(path: Path | None) -> Tensor:
    """Returns the bytes of a file, or of Python's documentation."""
    if path is None:
        from pydoc_data.topics import topics

        content = "\n".join(topics.values()).encode()
    else:
        content = path.read_bytes()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def hashed(text: Tensor, order: int, rows: int) -> Tensor:
    """Returns ids `[bytes]` of the n-grams that end at each byte; zeros precede the text."""
    padded = F.pad(text, (order - 1, 0))
    keys = sum(padded[order - 1 - back : len(padded) - back] << 8 * back for back in range(order))
    # Fibonacci hashing: the high bits of the product depend on all bits of the key.
    return (keys * 2654435769 % 2**32) * rows >> 32


class Texts:
    """Training and validation bytes, with the ids of their n-grams."""

    def __init__(self, text: Tensor, context: int, rows: int, ids_on: str = DEVICE) -> None:
        self.text, self.context, self.ids_on = text, context, ids_on
        self.ids = [hashed(text, order, rows) for order in ORDERS]
        self.cut = len(text) * 9 // 10  # the last tenth is for validation
        if len(text) - self.cut <= context:
            raise SystemExit(f"{len(text):,} bytes of text are too few for a context of {context}")

    def part(self, starts: Tensor) -> Part:
        """Returns the samples that begin at `starts` `[samples]`."""
        places = starts[:, None] + torch.arange(self.context)
        inputs, targets = self.text[places].to(DEVICE), self.text[places + 1].to(DEVICE)
        return Part(inputs, targets, [ids[places].to(self.ids_on) for ids in self.ids])

    def steps(self, first: int, last: int, parts: int, size: int) -> Iterator[list[Part]]:
        """Yields the micro-batches of each step that this rank trains.

        The step's number is the seed. A generator for all steps would have to be saved, and
        prefetch() requests batches from the loader before they are trained.
        """
        rank, ranks = rank_and_ranks()
        for step in range(first, last):
            random = torch.Generator().manual_seed(step)
            starts = torch.randint(self.cut - self.context, (parts, size), generator=random)
            yield [self.part(part) for part in starts[rank::ranks]]

    def validation(self, size: int = 64) -> Iterator[Part]:
        """Yields the validation bytes once."""
        starts = torch.arange(self.cut, len(self.text) - self.context, self.context)
        return (self.part(part) for part in starts.split(size))


class Block(nn.Module):
    """Causal attention and a perceptron, both with residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[samples, context, width]` to the same shape."""
        qkv = self.qkv(self.before_attention(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


def file_table(chosen: argparse.Namespace, rows: int, order: int) -> speedtorch.HostTable:
    """Returns a table in a file, of which the most used rows are in host memory."""
    dtype = getattr(torch, chosen.stored)
    state = dict.fromkeys(FIELDS[chosen.state], (chosen.width, dtype))
    state |= dict.fromkeys(FIELDS_OF_ROWS[chosen.state], (1, torch.float32))
    chosen.disk.mkdir(exist_ok=True)
    path = chosen.disk / f"rows of {order} bytes"
    return speedtorch.HostTable(
        rows, chosen.width, dtype, state, "file", path=path, resident=chosen.resident
    )


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, chosen: argparse.Namespace, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = chosen.width
        self.recompute = chosen.recompute
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(chosen.context, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(chosen.blocks))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        kind: Callable[..., nn.Embedding] = nn.Embedding if chosen.plain else speedtorch.Embedding
        settings: dict[str, Any] = {"sparse": True, "device": DEVICE}
        if chosen.stored == "bfloat16":
            settings["stored"] = dict.fromkeys(("weight", *FIELDS[chosen.state]), torch.bfloat16)
        self.tables = nn.ModuleList()
        for order in ORDERS if rows else ():
            if chosen.disk:
                settings["_weight"] = file_table(chosen, rows, order)
            self.tables.append(kind(rows, width, **settings))
        for table in self.tables:
            nn.init.zeros_(table.weight)

    def run(self, layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Runs a layer; with --recompute the backward pass recomputes its activations."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(layer, *inputs, use_reentrant=False)
        return layer(*inputs)

    def embedded(self, part: Part) -> Tensor:
        """The input of the first block; a recomputation looks up the rows of n-grams again."""
        x = self.bytes(part.inputs) + self.places.weight
        for table, ids in zip(self.tables, part.ids, strict=False):  # there may be no tables
            x = x + table(ids)
        return x

    def forward(self, part: Part) -> Tensor:
        """Returns the mean loss of a micro-batch, in nats per byte."""
        x = self.run(self.embedded, part)
        for block in self.blocks:
            x = self.run(block, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), part.targets.flatten())


@torch.no_grad()
def bits_per_byte(model: GPT, texts: Texts) -> float:
    """Returns the validation loss in bits per byte; 8 for uniform predictions."""
    total = count = 0.0
    for part in texts.validation():
        total += model(part).item() * part.targets.numel()
        count += part.targets.numel()
    return total / count / math.log(2)


class Trained(NamedTuple):
    """The results of a run."""

    losses: list[float]  # loss of each step
    bits: float  # bits per byte of the validation text
    state: dict[str, Tensor]  # state dict of the model


def train(chosen: argparse.Namespace, texts: Texts, rows: int) -> Trained:
    """Trains a model with tables of `rows` rows, or without tables if `rows` is 0."""
    model = GPT(chosen, rows).to(DEVICE)
    if rows and dist.is_initialized():  # every rank stores and trains a shard of the rows
        speedtorch.shard(model, average=False)
    dense = [param for name, param in model.named_parameters() if not name.startswith("tables")]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(dense, lr=2e-3)]
    if rows:
        # SparseAdam and RowWiseAdagrad change only the rows that a step looks up.
        tables = list(model.tables.parameters())
        if chosen.state == "adam":
            optimizers.append(torch.optim.SparseAdam(tables, lr=2e-3))
        else:
            optimizers.append(speedtorch.optim.RowWiseAdagrad(tables, lr=2e-2))
        if not chosen.plain:
            speedtorch.attach(optimizers[-1], model)
    first = 0
    if chosen.resume:  # after attach(), so that the rows' state is loaded into the tables
        saved = torch.load(chosen.resume, map_location="cpu")
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        first = saved["step"]
    loader = texts.steps(first, chosen.steps, chosen.parts, chosen.size)
    if rows and not chosen.plain:
        # For prefetch(), a batch is a step with the ids of all its micro-batches.
        loader = speedtorch.prefetch(
            loader,
            model,
            ids=lambda parts: {
                table: [part.ids[number] for part in parts]
                for number, table in enumerate(model.tables)
            },
        )
    losses = []
    for parts in loader:
        total = torch.zeros((), device=DEVICE)
        for part in parts:
            loss = model(part) / chosen.parts  # parts of all ranks, because gradients are summed
            loss.backward()
            total += loss.detach()
        for param in dense:
            if param.grad is not None:
                sum_over_ranks(param.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(sum_over_ranks(total).item())
    bits = bits_per_byte(model, texts)  # all ranks take part in each lookup
    with speedtorch.full_state_dict(model):  # gathers all rows on the first rank
        state = model.state_dict()
        if chosen.save and rank_and_ranks()[0] == 0:
            states = [optimizer.state_dict() for optimizer in optimizers]
            torch.save({"model": state, "optimizers": states, "step": chosen.steps}, chosen.save)
    return Trained(losses, bits, state)


def main(arguments: list[str] | None = None) -> list[Trained]:
    """Trains and prints the validation loss; returns the results of each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="text; by default Python's documentation")
    parser.add_argument("--steps", type=int, default=200, help="steps in total")
    parser.add_argument("--rows", type=int, default=65_536, help="rows of each table")
    parser.add_argument("--width", type=int, default=64, help="columns of tables and layers")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--context", type=int, default=64, help="bytes of a sample")
    parser.add_argument("--parts", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--size", type=int, default=16, help="samples of a micro-batch")
    parser.add_argument("--save", type=Path, help="write a checkpoint after the last step")
    parser.add_argument("--resume", type=Path, help="read a checkpoint before the first step")
    parser.add_argument("--plain", action="store_true", help="use torch.nn.Embedding")
    parser.add_argument(
        "--stored",
        choices=["float32", "bfloat16"],
        default="float32",
        help="dtype of rows and Adam's moments in the tables",
    )
    parser.add_argument("--disk", type=Path, help="a folder for files with the rows of the tables")
    parser.add_argument("--resident", default="64MiB", help="host memory of a table's used rows")
    parser.add_argument(
        "--state", choices=FIELDS, default="adam", help="SparseAdam, or RowWiseAdagrad"
    )
    parser.add_argument(
        "--recompute", action="store_true", help="recompute activations in backward"
    )
    chosen = parser.parse_args(arguments)
    rank, ranks = rank_and_ranks()
    if chosen.plain and (ranks > 1 or chosen.stored != "float32"):
        parser.error("--plain requires one rank and --stored float32")
    if chosen.disk and (chosen.plain or ranks > 1):
        parser.error("--disk requires one rank and no --plain")
    if chosen.parts % ranks:
        parser.error(f"--parts must be a multiple of {ranks} ranks, got {chosen.parts}")
    # Rows in files are read ahead if their ids are on the CPU.
    texts = Texts(
        text_of(chosen.file), chosen.context, chosen.rows, "cpu" if chosen.disk else DEVICE
    )
    both = not (chosen.save or chosen.resume)
    found = []
    for rows in (chosen.rows, 0) if both else (chosen.rows,):
        found.append(train(chosen, texts, rows))
        tables = f"{len(ORDERS)} tables of {rows:,} rows" if rows else "no tables"
        if rank == 0:
            print(f"{tables}: {found[-1].bits:.4f} bits a byte after {chosen.steps} steps")
    return found


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        main()
    else:  # started by torchrun
        if DEVICE == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
        main()
        dist.destroy_process_group()

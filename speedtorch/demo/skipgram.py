"""The skip-gram model, and its tables in host memory.

The model itself is small: its two embeddings hold only the rows that the batch at hand names. All
other rows, and all that the optimizer remembers about them, wait in two host tables.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from speedtorch.demo.pairs import Batch
from speedtorch.legacy import ModelFactory, OptimizerFactory
from speedtorch.optimizer_state import probe_optimizer
from speedtorch.table import HostTable

__all__ = ["SIDES", "HostTables", "SkipGram", "Tables"]

SIDES = ("u_embeddings", "v_embeddings")


class SkipGram(nn.Module):
    """Skip-gram with negative sampling over the rows of one batch.

    Args:
        dim: numbers per word, `D`.
        sparse: makes sparse gradients, for optimizers that want those.
        device: where the rows of a batch are trained.

    Example:
        >>> model = SkipGram(4)
        >>> one = torch.zeros(1, dtype=torch.int64)
        >>> model.v_embeddings.weight.data.zero_().shape
        torch.Size([1, 4])
        >>> round(model(one, one, one.view(1, 1)).item(), 4)  # -2 log(1 / 2)
        1.3863
    """

    def __init__(
        self, dim: int, *, sparse: bool = False, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        # One row to begin with: every batch replaces it by rows of its own.
        self.u_embeddings = nn.Embedding(1, dim, sparse=sparse, device=device)
        self.v_embeddings = nn.Embedding(1, dim, sparse=sparse, device=device)

    def forward(self, centre: Tensor, context: Tensor, negative: Tensor) -> Tensor:
        """Computes the loss, summed over the pairs.

        Args:
            centre: `[B]` positions of rows in `u_embeddings`.
            context: `[B]` positions of rows in `v_embeddings`.
            negative: `[B, K]` positions of rows in `v_embeddings`.

        Returns:
            A scalar. It is a sum, so that the step of a row does not depend on the batch's size.
        """
        word = self.u_embeddings(centre)
        true = (word * self.v_embeddings(context)).sum(1)
        false = torch.bmm(self.v_embeddings(negative), word.unsqueeze(2))
        loss: Tensor = -functional.logsigmoid(true).sum() - functional.logsigmoid(-false).sum()
        return loss


class Tables(Protocol):
    """The full-size tables behind the model; ours, and plain torch's to compare with."""

    def fetch(self, batch: Batch) -> None:
        """Brings the rows of a batch, and their optimizer state, into model and optimizer."""

    def store(self, batch: Batch) -> None:
        """Puts them back after the optimizer's step."""

    def rows(self, side: str, ids: Tensor) -> Tensor:
        """Rows `[N, D]` of one of SIDES, on the CPU, for `ids` `[N]` on the CPU."""


class HostTables:
    """Both embeddings' rows and their optimizer state, in host memory.

    Weight and state of a row are one record of a HostTable, which a ModelFactory and an
    OptimizerFactory share.

    Args:
        model: whose embeddings are exchanged.
        optimizer: any torch optimizer of the model's parameters that treats rows separately.
        words: rows of each table, `V`.
        memory: kind of the tables' memory, as for HostTable.
        seed: of the first values of u, uniform within `1 / (2 D)`; v starts as zeros.

    Raises:
        ValueError: the optimizer does not treat rows separately.
        MemoryError: too little memory for the tables.
    """

    def __init__(
        self,
        model: SkipGram,
        optimizer: torch.optim.Optimizer,
        words: int,
        *,
        memory: str = "auto",
        seed: int = 0,
    ) -> None:
        self.tables: dict[str, HostTable] = {}
        self._switchers: list[tuple[str, ModelFactory | OptimizerFactory]] = []
        for side in SIDES:
            embedding: nn.Embedding = getattr(model, side)
            dim, device = embedding.embedding_dim, embedding.weight.device
            learnt = probe_optimizer(optimizer, embedding.weight).row_state
            state = {name: (row.shape, row.dtype) for name, row in learnt.items()}
            on_gpu = device if memory == "cuda" else None
            table = HostTable(words, dim, state=state, memory=memory, device=on_gpu)
            rows = ModelFactory(embedding, words, dim, table=table)
            remembered = OptimizerFactory(optimizer, words, dim, model, side, table=table)
            remembered.optInit()
            self.tables[side] = table
            self._switchers += [(side, rows), (side, remembered)]
        bound = 0.5 / dim
        self.tables["u_embeddings"].uniform_(-bound, bound, seed=seed)
        self.tables["v_embeddings"].zeros_()

    def fetch(self, batch: Batch) -> None:
        """See Tables."""
        for side, switcher in self._switchers:
            switcher.beforeForwardPass(batch.ids(side))

    def store(self, batch: Batch) -> None:
        """See Tables."""
        for side, switcher in self._switchers:
            switcher.afterOptimizerStep(batch.ids(side))

    def rows(self, side: str, ids: Tensor) -> Tensor:
        """See Tables."""
        table = self.tables[side]
        return table.gather(ids.to(table.device), "weight").cpu()

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(table.nbytes for table in self.tables.values())

    def exchanged_bytes(self, batch: Batch) -> int:
        """Bytes that a training step on the batch moves between tables and model, both ways."""
        return 2 * sum(
            len(batch.ids(side)) * table.record_bytes for side, table in self.tables.items()
        )

"""nearest_neighbors: finds the rows of a table that are most similar to query vectors."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtorch.nn.row_reading import checked_count
from speedtorch.nn.tables import Readable, check_readable
from speedtorch.table.progress import progress_bar

__all__ = ["nearest_neighbors"]

_METRICS = ("cosine", "dot")
# Scores in memory at once: 16 MiB of float32, and ten times as much during the selection.
_SCORES = 1 << 22


def nearest_neighbors(
    emb: Readable,
    queries: Tensor,
    k: int = 10,
    *,
    metric: str = "cosine",
    rows: int = 65_536,
    progress: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Finds the `k` rows of a table that are most similar to each query.

    Rows are read in blocks by `emb.blocks(rows)` and compared in float32 on the queries' device.
    The result is torch.topk of the scores of the whole table: largest scores first, and lower ids
    first for equal scores. NaN counts as the largest score. A row that equals a query is not
    excluded. The last bits of a score may depend on the shape of the matrix product, and therefore
    on `rows` and on the number of queries.

    Args:
        emb: An Embedding or EmbeddingBag, or a table of a collection.
        queries: Floating-point vectors `[q, embedding_dim]` on any device.
        k: The number of rows to find for each query, from 1 to `emb.num_embeddings`.
        metric: "cosine", which is 0 for a vector of zeros, or "dot" for dot products.
        rows: The maximum of rows in a block. A block of float32 rows takes `rows * embedding_dim *
            4` bytes on the queries' device, and with "cosine" at least twice as many.
        progress: Show a progress bar on stderr: always (True), never (False), or if stderr is a
            terminal and the call takes longer than 2 s (None).

    Returns:
        Scores `[q, k]` in float32 and ids `[q, k]` in int64, on the queries' device.

    Raises:
        TypeError: `emb` is not an Embedding, EmbeddingBag or table of a collection, queries are
            not floating-point, the table is complex, or `k` or `rows` is not an int.
        ValueError: Queries have a wrong shape, the table has no rows or fewer than `k`, `k` or
            `rows` is less than 1, or the metric is unknown.
        RuntimeError: Ranks share the rows, or as for Embedding.blocks.

    Example:
        >>> import torch, speedtorch
        >>> emb = speedtorch.Embedding.from_pretrained(torch.eye(4))
        >>> scores, ids = speedtorch.nearest_neighbors(emb, torch.tensor([[0.0, 3.0, 4.0, 0.0]]), 2)
        >>> ids, scores
        (tensor([[2, 1]]), tensor([[0.8000, 0.6000]]))
    """
    check_readable(emb)
    if metric not in _METRICS:
        raise ValueError(f"metric: expected 'cosine' or 'dot', got {metric!r}")
    _check_queries(emb, queries)
    wanted_rows = f"a number of the table's {emb.num_embeddings:,} rows"
    if emb.num_embeddings == 0:
        raise ValueError("emb: expected a table with rows, got an empty one")
    k = checked_count("k", k, wanted_rows, emb.num_embeddings)
    blocks = emb.blocks(rows)
    wanted = queries.detach()
    wanted = _directions(wanted) if metric == "cosine" else wanted.to(torch.float32)
    scores = torch.empty(len(wanted), 0, dtype=torch.float32, device=wanted.device)
    ids = torch.empty(len(wanted), 0, dtype=torch.int64, device=wanted.device)
    with (
        torch.autocast(wanted.device.type, enabled=False),
        progress_bar(emb.num_embeddings, progress) as bar,
    ):
        for first, block in blocks:
            block = block.to(wanted.device)
            held = _directions(block) if metric == "cosine" else block.to(torch.float32)
            most = min(k, len(held))
            values = wanted.new_empty(len(wanted), most)
            places = ids.new_empty(len(wanted), most)
            # Write into existing tensors: allocations between scores would fragment the heap.
            count = max(1, _SCORES // len(held))
            for begin in range(0, len(wanted), count):
                chunk = slice(begin, begin + count)
                values[chunk], places[chunk] = _largest(wanted[chunk] @ held.T, k)
            scores = torch.cat([scores, values], dim=1)
            ids = torch.cat([ids, places + first], dim=1)
            # The stable sort puts lower ids first among equal scores, within and across blocks.
            order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
            scores, ids = scores.gather(1, order), ids.gather(1, order)
            bar.update(len(block))
    return scores, ids


def _check_queries(emb: Readable, queries: object) -> None:
    if not isinstance(queries, Tensor):
        raise TypeError(f"queries: expected a tensor, got {type(queries).__name__}")
    if not queries.dtype.is_floating_point:
        raise TypeError(
            f"queries: expected floating-point vectors, got {queries.dtype}. Convert ids to vectors"
            " with emb(ids)."
        )
    if (stored := emb.weight.dtype).is_complex:
        raise TypeError(f"emb: expected rows of real numbers, got {stored}")
    columns = emb.embedding_dim
    if queries.layout != torch.strided or queries.dim() != 2 or queries.shape[1] != columns:
        shape, layout = [*queries.shape], queries.layout
        remedy = ". For a single vector, pass queries[None]." if queries.dim() == 1 else ""
        raise ValueError(f"queries: expected dense [q, {columns}], got {shape} of {layout}{remedy}")


def _directions(vectors: Tensor) -> Tensor:
    """Scales vectors `[n, columns]` to length 1 in float32; zero vectors do not change."""
    if vectors.dtype != torch.float64:
        vectors = vectors.to(torch.float32)
    if vectors.numel():
        # Scale by a power of two first, which is exact, so that squares cannot over- or underflow.
        most = math.frexp(torch.finfo(vectors.dtype).max)[1] - 2
        exponents = torch.frexp(vectors.abs().amax(1, keepdim=True)).exponent
        vectors = torch.ldexp(vectors, -exponents.clamp(-most, most))
    return F.normalize(vectors.to(torch.float32), dim=1)


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the min(k, n) largest scores of each row `[q, n]` and their positions in the row.

    Scores are in descending order, and equal scores are in order of position. torch.topk may select
    any of equal scores, so topk runs on unique integers. Their order is the order of the scores,
    then of the positions from the end.
    """
    columns = scores.shape[1]
    # Make all NaNs one bit pattern, and both zeros one bit pattern.
    scores = scores.masked_fill_(scores.isnan(), math.nan).add_(0.0)
    bits = scores.view(torch.int32)
    # Floats are signed magnitudes, so the bits of negative floats are in reverse order.
    order = (bits ^ ((bits >> 31) & 0x7FFF_FFFF)).to(torch.int64)
    from_the_end = torch.arange(columns - 1, -1, -1, device=scores.device)
    keys = order.mul_(1 << 32).add_(from_the_end)
    places = keys.topk(min(k, columns), dim=1).indices
    return scores.gather(1, places), places

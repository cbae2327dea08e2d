"""What the library has set itself, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Target", "as_text", "targets"]

Result = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A measured ratio and the limit that it should keep."""

    work: str
    measured: float
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether it is kept."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


def _pick(result: Result, section: str, **wanted: Any) -> list[Result]:
    return [
        figure
        for figure in result["figures"]
        if figure["section"] == section
        and all(figure["parameters"].get(key) == value for key, value in wanted.items())
    ]


def _ms(figures: list[Result]) -> float:
    return float(figures[0]["median_ms"])


def _moves(name: str, result: Result, inward: bool) -> Iterator[Target]:
    share, record_share = (0.88, 0.90) if inward else (0.84, 0.90)
    section = "128 float32"
    ours = _pick(result, section, kind="managed")
    for figure in ours:
        yield Target(f"{figure['name']}, {name}", figure["share_of_bound"], share, True)
    for figure in _pick(result, section, kind="registered"):
        limit = 0.84 if inward else 0.72
        yield Target(f"{figure['name']}, {name}", figure["share_of_bound"], limit, True)
    for kind, times in (
        ("torch as SpeedTorch timed it", 12 if inward else 34),
        ("torch done well", 1.55 if inward else 2.2),
        ("CuPy", 2.8 if inward else 2.7),
    ):
        peer = _pick(result, section, kind=kind)
        if peer:
            yield Target(f"{name}: times as fast as {kind}", _ms(peer) / _ms(ours), times, True)
    for figure in _pick(result, "records of 384 float32", kind="managed"):
        work = f"records, {figure['name']}, {name}"
        yield Target(work, figure["share_of_bound"], record_share, True)
    on_gpu = {kind: _pick(result, "table on the GPU", kind=kind) for kind in ("ours", "torch")}
    ratio = _ms(on_gpu["ours"]) / _ms(on_gpu["torch"])
    yield Target(f"{name}, table on the GPU, time / torch's", ratio, 1 if inward else 2, False)
    narrow = _pick(result, "16 float32", kind="managed")
    if inward:
        yield Target("1,048,576 rows of 64 B, GB/s", narrow[0]["gigabytes_per_s"], 19, True)
    repeated = {
        kind: _ms(_pick(result, "repeated ids", kind=kind))
        for kind in ("zipf", "distinct", "uniform", "half")
    }
    zipf = repeated["zipf"] / repeated["distinct"]
    yield Target(f"{name}, Zipf batch, time / its distinct rows'", zipf, 1.15, False)
    half = repeated["half"] / repeated["uniform"]
    yield Target(f"{name}, one row half of the batch, time / uniform", half, 1, False)
    for dtype in ("float32", "bfloat16"):
        for odd in _pick(result, f"widths, {dtype}", kind="odd"):
            width = odd["parameters"]["width"]
            even = _pick(result, f"widths, {dtype}", kind="even", width=width)
            ratio = _ms(even) / odd["median_ms"]
            work = f"{name}, {width} {dtype}, rows per second / next wider"
            yield Target(work, ratio, 0.85, True)
    yield from _multiprocessors(name, result)
    if inward:
        yield from _small_calls(result)


def _multiprocessors(name: str, result: Result) -> Iterator[Target]:
    for row_bytes in (512, 1536):
        rates = {
            figure["parameters"]["sms"]: figure["gigabytes_per_s"]
            for figure in _pick(result, "multiprocessors", row_bytes=row_bytes)
        }
        best = max(rates.values())
        fewest = min(sms for sms, rate in rates.items() if rate >= 0.97 * best)
        yield Target(f"{name}, {row_bytes} B, SMs at link speed", fewest, 12, False)
        beside = _pick(result, "beside a matrix product", kind="product", row_bytes=row_bytes)
        slower = beside[0]["parameters"]["slow_down"]
        yield Target(f"{name}, {row_bytes} B, slow-down of a product beside", slower, 0.12, False)


def _small_calls(result: Result) -> Iterator[Target]:
    for count, peer, limit in (
        (1, "torch.index_select, table on the GPU", 1.25),
        (10, "torch.index_select, table on the GPU", 1.25),
        (100, "torch.index_select, table on the GPU", 1.25),
        (1000, "torch copy of contiguous pinned rows", 1.4),
    ):
        ours, theirs = (
            _ms(_pick(result, "small calls", kind=kind, batch=count))
            for kind in ("speedtorch", peer)
        )
        work = f"{count:,} rows in one call, time / {peer}"
        yield Target(work, ours / theirs, limit, False)


def _swaps(result: Result) -> Iterator[Target]:
    def pick(kind: str, size: int, overlap: float, planning: str) -> Result:
        parameters = {"kind": kind, "gibibytes": size, "overlap": overlap, "planning": planning}
        return _pick(result, "records", **parameters)[0]

    for size in (16, 48):
        for planning, limit in (("excluded", 0.78), ("included", 0.74)):
            figure = pick("managed", size, 0.0, planning)
            yield Target(f"swap, {figure['name']}", figure["share_of_bound"], limit, True)
        ratio = _ms([pick("managed", size, 0.5, "included")]) / _ms(
            [pick("managed", size, 0.0, "included")]
        )
        yield Target(f"swap, {size} GiB, half staying / none", ratio, 0.6, False)
    figure = pick("registered", 16, 0.0, "excluded")
    yield Target(f"swap, {figure['name']}", figure["share_of_bound"], 0.70, True)


def _copies(result: Result) -> Iterator[Target]:
    for section in ("to the GPU", "from the GPU"):
        for kind in ("managed", "registered"):
            figure = _pick(result, section, kind=f"speedtorch, {kind} memory")[0]
            work = f"a contiguous range {section}, {kind} memory"
            yield Target(work, figure["share_of_bound"], 0.90, True)


def _memory(result: Result) -> Iterator[Target]:
    runs = result["extra"]
    if "managed" not in runs:
        return
    for kind in ("managed", "registered"):
        beyond = runs[kind]["resident_bytes_beyond_payload"] / 2**20
        yield Target(f"{kind} table, MiB resident beyond the payload", beyond, 2, False)
        times = runs["torch pin_memory"]["seconds"] / runs[kind]["seconds"]
        yield Target(f"{kind} table, times as fast ready as torch's", times, 6, True)


def _cpu(result: Result) -> Iterator[Target]:
    threads = max(figure["parameters"]["threads"] for figure in result["figures"])
    for section in ("gather", "scatter"):
        ours, torchs = (
            _ms(_pick(result, section, kind=kind, threads=threads)) for kind in ("ours", "torch")
        )
        work = f"on the CPU, {section}, {threads} threads, times as fast as torch"
        yield Target(work, torchs / ours, 1, True)


# Zipf exponent, and most ms of a step at once and with prefetch.
_STEP_MS = {0.0: (44, 37), 0.9: (24, 17), 1.05: (13, 9), 1.2: (6.4, 4)}


def _embedding(result: Result) -> Iterator[Target]:
    for exponent, limits in _STEP_MS.items():
        for ahead, limit in zip((False, True), limits, strict=True):
            figure = _pick(
                result, f"Zipf {exponent}", kind="ours", optimizer="Adam, fused", ahead=ahead
            )
            work = f"a step, Zipf {exponent}, {figure[0]['name']}, ms"
            yield Target(work, _ms(figure), limit, False)
    for ahead, limit in ((False, 6), (True, 4)):
        figure = _pick(result, "Zipf 1.05", kind="ours", optimizer="SGD", ahead=ahead)
        yield Target(f"a step, Zipf 1.05, {figure[0]['name']}, ms", _ms(figure), limit, False)


def _word2vec(result: Result) -> Iterator[Target]:
    def best(kind: str, *optimizers: str) -> float:
        return min(
            _ms([figure])
            for optimizer in optimizers
            for figure in _pick(result, "step", kind=kind, optimizer=optimizer)
        )

    adam = best("ours", "SparseAdam", "Adam, fused")
    ratio = adam / best("torch", "SparseAdam")
    yield Target("word2vec step, time / torch's SparseAdam in GPU memory", ratio, 1.25, False)
    adamax = best("ours", "Adamax")
    for kind, times in (("torch", 3), ("CuPy", 5), ("factories", 1)):
        if _pick(result, "step", kind=kind, optimizer="Adamax"):
            work = f"word2vec step, Adamax, times as fast as {kind}"
            yield Target(work, best(kind, "Adamax") / adamax, times, True)


def _overlap(result: Result) -> Iterator[Target]:
    if "share_hidden" in result["extra"]:
        work = "share of the exchange that is hidden behind compute"
        yield Target(work, result["extra"]["share_hidden"], 0.8, True)


_TARGETS: dict[str, Callable[[Result], Iterator[Target]]] = {
    "pinned_gather": lambda result: _moves("gather", result, True),
    "pinned_scatter": lambda result: _moves("scatter", result, False),
    "optimizer_state_swap": _swaps,
    "pinned_copy": _copies,
    "host_memory": _memory,
    "cpu": _cpu,
    "embedding": _embedding,
    "word2vec": _word2vec,
    "overlap": _overlap,
}


def targets(results: dict[str, Result]) -> list[Target]:
    """Every target whose benchmark has been run."""
    return [
        each for stem, make in _TARGETS.items() if stem in results for each in make(results[stem])
    ]


def as_text(results: dict[str, Result]) -> str:
    """A line for each target."""
    return "\n".join(
        f"{'met   ' if each.met else 'MISSED'} {each.measured:8.3f} "
        f"{'>=' if each.at_least else '<='} {each.limit:6.2f}  {each.work}"
        for each in targets(results)
    )

"""What the library has set itself, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

Result: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A measured ratio and the limit that it should keep."""

    work: str
    measured: float
    limit: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        """Whether it is kept."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


_at_most = partial(Target, at_least=False)


def _pick(result: Result, section: str, **wanted: Any) -> list[Result]:
    return [
        figure
        for figure in result["figures"]
        if figure["section"] == section
        and all(figure["parameters"].get(key) == value for key, value in wanted.items())
    ]


def _ratio(
    result: Result, section: str, over: Any, under: Any, *, key: str = "kind", **both: Any
) -> float:
    """The time of one figure of a section over that of another, which differ in one parameter."""
    over, under = (
        _pick(result, section, **{key: value}, **both)[0]["median_ms"] for value in (over, under)
    )
    return float(over / under)


def _shares(
    result: Result, work: str, limit: float, section: str, **wanted: Any
) -> Iterator[Target]:
    """The share of the bound of each figure; `work` has a place for the figure's name."""
    for figure in _pick(result, section, **wanted):
        yield Target(work.format(figure["name"]), figure["share_of_bound"], limit)


# Of a gather and of a scatter: shares of the bound, and times as fast as others.
_SHARES = {"managed": (0.88, 0.84), "registered": (0.84, 0.72)}
_TIMES = {
    "torch as SpeedTorch timed it": (12, 34),
    "torch done well": (1.55, 2.2),
    "CuPy": (2.8, 2.7),
}


def _moves(name: str, result: Result) -> Iterator[Target]:
    way, section = ("gather", "scatter").index(name), "128 float32"
    for kind, shares in _SHARES.items():
        yield from _shares(result, f"{{}}, {name}", shares[way], section, kind=kind)
    for kind, limits in _TIMES.items():
        if _pick(result, section, kind=kind):
            times = _ratio(result, section, kind, "managed")
            yield Target(f"{name}: times as fast as {kind}", times, limits[way])
    work = f"records, {{}}, {name}"
    yield from _shares(result, work, 0.90, "records of 384 float32", kind="managed")
    ratio = _ratio(result, "table on the GPU", "ours", "torch")
    yield _at_most(f"{name}, table on the GPU, time / torch's", ratio, (1, 2)[way])
    if name == "gather":
        rate = _pick(result, "16 float32", kind="managed")[0]["gigabytes_per_s"]
        yield Target("1,048,576 rows of 64 B, GB/s", rate, 19)
    zipf = _ratio(result, "repeated ids", "zipf", "distinct")
    yield _at_most(f"{name}, Zipf batch, time / its distinct rows'", zipf, 1.15)
    half = _ratio(result, "repeated ids", "half", "uniform")
    yield _at_most(f"{name}, one row half of the batch, time / uniform", half, 1)
    for dtype in ("float32", "bfloat16"):
        section = f"widths, {dtype}"
        for odd in _pick(result, section, kind="odd"):
            width = odd["parameters"]["width"]
            ratio = _ratio(result, section, "even", "odd", width=width)
            yield Target(f"{name}, {width} {dtype}, rows per second / next wider", ratio, 0.85)
    for row_bytes in (512, 1536):
        yield from _multiprocessors(f"{name}, {row_bytes} B", row_bytes, result)
    if name == "gather":
        yield from _small_calls(result)


def _multiprocessors(name: str, row_bytes: int, result: Result) -> Iterator[Target]:
    rates = {
        figure["parameters"]["sms"]: figure["gigabytes_per_s"]
        for figure in _pick(result, "multiprocessors", row_bytes=row_bytes)
    }
    best = max(rates.values())
    fewest = min(sms for sms, rate in rates.items() if rate >= 0.97 * best)
    yield _at_most(f"{name}, SMs at link speed", fewest, 12)
    (beside,) = _pick(result, "beside a matrix product", kind="product", row_bytes=row_bytes)
    slower = beside["parameters"]["slow_down"]
    yield _at_most(f"{name}, slow-down of a product beside", slower, 0.12)


def _small_calls(result: Result) -> Iterator[Target]:
    on_gpu = "torch.index_select, table on the GPU"
    copy = "torch copy of contiguous pinned rows"
    limits = {1: (on_gpu, 1.25), 10: (on_gpu, 1.25), 100: (on_gpu, 1.25), 1000: (copy, 1.4)}
    for count, (peer, limit) in limits.items():
        ratio = _ratio(result, "small calls", "speedtorch", peer, batch=count)
        yield _at_most(f"{count:,} rows in one call, time / {peer}", ratio, limit)


def _swaps(result: Result) -> Iterator[Target]:
    shares = partial(_shares, result, "swap, {}", section="records", overlap=0.0)
    for size in (16, 48):
        managed = {"kind": "managed", "gibibytes": size}
        yield from shares(0.78, planning="excluded", **managed)
        yield from shares(0.74, planning="included", **managed)
        ratio = _ratio(result, "records", 0.5, 0.0, key="overlap", planning="included", **managed)
        yield _at_most(f"swap, {size} GiB, half staying / none", ratio, 0.6)
    yield from shares(0.70, kind="registered", gibibytes=16, planning="excluded")


def _copies(result: Result) -> Iterator[Target]:
    for section in ("to the GPU", "from the GPU"):
        for kind in ("managed", "registered"):
            work = f"a contiguous range {section}, {kind} memory"
            yield from _shares(result, work, 0.90, section, kind=f"speedtorch, {kind} memory")


def _memory(result: Result) -> Iterator[Target]:
    runs = result["extra"]
    if "managed" not in runs:
        return
    for kind in ("managed", "registered"):
        beyond = runs[kind]["resident_bytes_beyond_payload"] / 2**20
        yield _at_most(f"{kind} table, MiB resident beyond the payload", beyond, 2)
        times = runs["torch pin_memory"]["seconds"] / runs[kind]["seconds"]
        yield Target(f"{kind} table, times as fast ready as torch's", times, 6)


def _cpu(result: Result) -> Iterator[Target]:
    threads = max(figure["parameters"]["threads"] for figure in result["figures"])
    for section in ("gather", "scatter"):
        times = _ratio(result, section, "torch", "ours", threads=threads)
        yield Target(f"on the CPU, {section}, {threads} threads, times as fast as torch", times, 1)


# Most of what torch's own module takes for the same step.
_HOST_TIME = {"SGD": 2, "Adam": 2, "SGD, padding_idx": 2, "SGD, a dict of 26 features": 0.5}


def _host_time(result: Result) -> Iterator[Target]:
    for section, limit in _HOST_TIME.items():
        ratio = _ratio(result, section, "ours", "torch")
        yield _at_most(f"host time of a small step, {section}, time / torch's", ratio, limit)
    if not _pick(result, "SGD, 400 lookups"):  # older results lack this section
        return
    ratio = _ratio(result, "SGD, 300 lookups", "ours", "torch")
    yield _at_most("host time of a step of 300 lookups, time / torch's", ratio, 4)
    few, many = (
        _pick(result, f"SGD, {count} lookups", kind="ours")[0]["median_ms"] / count
        for count in (25, 400)
    )
    yield _at_most("a lookup of 400 in a step, time / one of 25", many / few, 1.3)


# Zipf exponent, optimizer, and most ms of a step at once and with prefetch.
_STEP_MS = (
    (0.0, "Adam, fused", (44, 37)),
    (0.9, "Adam, fused", (24, 17)),
    (1.05, "Adam, fused", (13, 9)),
    (1.2, "Adam, fused", (6.4, 4)),
    (1.05, "SGD", (6, 4)),
)


def _embedding(result: Result) -> Iterator[Target]:
    for exponent, optimizer, limits in _STEP_MS:
        steps = _pick(result, f"Zipf {exponent}", kind="ours", optimizer=optimizer)
        for figure, limit in zip(steps, limits, strict=True):
            work = f"a step, Zipf {exponent}, {figure['name']}, ms"
            yield _at_most(work, figure["median_ms"], limit)


def _word2vec(result: Result) -> Iterator[Target]:
    def best(kind: str, optimizer: str) -> float:
        steps = _pick(result, "step", kind=kind, optimizer=optimizer)
        return min(float(each["median_ms"]) for each in steps)

    ours = min(best("ours", "SparseAdam"), best("ours", "Adam, fused"))
    ratio = ours / best("torch", "SparseAdam")
    yield _at_most("word2vec step, time / torch's SparseAdam in GPU memory", ratio, 1.25)
    for kind, limit in (("torch", 3), ("CuPy", 5), ("factories", 1)):
        if _pick(result, "step", kind=kind, optimizer="Adamax"):
            times = best(kind, "Adamax") / best("ours", "Adamax")
            yield Target(f"word2vec step, Adamax, times as fast as {kind}", times, limit)


# Most milliseconds over the step alone.
_SMALL_STEP_MS = {"speedtorch": 0.9, "speedtorch, announce": 0.5, "speedtorch, prefetch": 0.45}
_SMALL_STEP_MS |= {"speedtorch, CUDA graph": 0.0, "speedtorch, CUDA graph, next_ids": -0.4}


def _small_steps(result: Result) -> Iterator[Target]:
    ways = {each["name"]: float(each["median_ms"]) for each in _pick(result, "word2vec")}
    alone = next(ms for name, ms in ways.items() if name.startswith("the step alone"))
    for name, limit in _SMALL_STEP_MS.items():
        yield _at_most(f"small word2vec step, {name}, ms over it alone", ways[name] - alone, limit)
    for name, ms in ways.items():
        if name.startswith("FBGEMM") and "managed" in name:
            for way in ("announce", "CUDA graph"):
                ratio = ways[f"speedtorch, {way}"] / ms
                yield _at_most(f"small word2vec step, {way}, time / FBGEMM's managed", ratio, 0.9)
    for section in dict.fromkeys(each["section"] for each in result["figures"]):
        if section != "word2vec":
            ms = {each["name"]: each["median_ms"] for each in _pick(result, section)}
            ratio = ms["prefetch"] / ms["plain loop"]
            yield _at_most(f"{section}, time with prefetch / without", ratio, 1.03)


def _overlap(result: Result) -> Iterator[Target]:
    if "share_hidden" in result["extra"]:
        work = "share of the exchange that is hidden behind compute"
        yield Target(work, result["extra"]["share_hidden"], 0.8)


def _training_state(result: Result) -> Iterator[Target]:
    """A tenth of a second for 4.94 GB, either way, and no more host memory than that.

    1 GiB in 4,096 tensors takes as long as memcpy of both ways at once, which is 21.5 ms.
    """
    for figure in result["figures"]:
        if figure["name"].startswith("speedtorch"):
            is_small = figure["section"].endswith("small tensors")
            how = figure["name"].partition(", ")[2]
            name = f"a training state ({how}) {figure['section']}, ms"
            yield _at_most(name, figure["median_ms"], 21.5 if is_small else 100.0)
    for name, facts in result["extra"].items():
        if name.startswith("speedtorch"):
            beyond = facts["host bytes beyond the state's"] / 2**20
            yield _at_most("a training state, MiB of host memory beyond its bytes", beyond, 2.0)


def _layers(result: Result) -> Iterator[Target]:
    """As _training_state, of a unit of 4,096 tensors."""
    sections = list(dict.fromkeys(each["section"] for each in result["figures"]))
    for section in sections:
        if section.startswith("one unit of") and section != "one unit of 16 tensors":
            for figure in _pick(result, section)[:2]:
                yield _at_most(f"{section}: {figure['name']}, ms", figure["median_ms"], 21.5)


def _state_swapper(result: Result) -> Iterator[Target]:
    """At least one budget lets a step take at most 1.1 times what the link does."""
    shares = [each["share_of_bound"] for each in _pick(result, "step", kind="ours")]
    yield Target("a step by a StateSwapper, of the link's speed", max(shares), 1 / 1.1)


def _checkpoints(result: Result) -> Iterator[Target]:
    for section, kind in (("save", "whole"), ("load", "whole")):
        for figure in _pick(result, section, kind=kind):
            yield Target(f"{figure['name']}, of the disk", figure["share_of_bound"], 0.9)
    whole, delta = (_pick(result, "save", kind=kind)[0] for kind in ("whole", "delta"))
    share = delta["median_ms"] / whole["median_ms"]
    yield _at_most("a save of 1 % of the rows, time / that of all", share, 0.03)
    noted, plain = (
        _pick(result, "a step, Zipf 1.05, Adam", kind=kind)[0]["median_ms"]
        for kind in ("noted", "plain")
    )
    yield _at_most("a step whose rows are noted, time / one without", noted / plain, 1.01)
    for figure in _pick(result, "beside a save", kind="beside"):
        alone = _pick(result, "beside a save", kind="without")[0]["median_ms"]
        work = "steps beside a save in the background, time / alone"
        yield _at_most(work, figure["median_ms"] / alone, 1.1)


def _file_tables(result: Result) -> Iterator[Target]:
    file, memory = "a file, all rows resident", "host memory"
    ratio = _ratio(result, "all rows resident", file, memory, key="way")
    yield _at_most("a file table, all rows resident, time / host memory", ratio, 1.15)
    limits = {"cold reads": 0.9, "20% of the rows resident": 1 / 1.2, "checkpoint": 0.8}
    for section, limit in limits.items():
        work = f"a file table, {section}, of the disk: {{}}"
        yield from _shares(result, work, limit, section, kind="ours")


def _sharded_transformer(result: Result) -> Iterator[Target]:
    """Of the speed of FSDP2 with all on the GPUs."""
    of = {(each["section"], each["name"]): each["median_ms"] for each in result["figures"]}
    sections = list(dict.fromkeys(section for section, _ in of))
    for section, least in zip(sections, (0.85, 0.95), strict=False):
        alone = of.get((section, "FSDP2, all on the GPUs"))
        for name, ours in ((name, of[at, name]) for at, name in of if at == section):
            if alone and name.startswith("speedtorch"):
                yield Target(f"FSDP2, {name}, {section}, of the speed", alone / ours, least)


def _ngram_tables(result: Result) -> Iterator[Target]:
    for section, facts in result["extra"].items():
        if "exposed" in facts:
            work = f"exposed of a step of a GPT, {section}, %"
            yield _at_most(work, facts["exposed"]["percent"], 0.8)


_TARGETS: dict[str, Callable[[Result], Iterator[Target]]] = {
    "pinned_gather": partial(_moves, "gather"),
    "pinned_scatter": partial(_moves, "scatter"),
    "optimizer_state_swap": _swaps,
    "pinned_copy": _copies,
    "host_memory": _memory,
    "cpu": _cpu,
    "host_time": _host_time,
    "embedding": _embedding,
    "word2vec": _word2vec,
    "small_steps": _small_steps,
    "overlap": _overlap,
    "ngram_tables": _ngram_tables,
    "sharded_transformer": _sharded_transformer,
    "layers": _layers,
    "training_state": _training_state,
    "state_swapper": _state_swapper,
    "checkpoints": _checkpoints,
    "file_tables": _file_tables,
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

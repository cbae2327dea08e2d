"""Parsers of files with changed bytes: a result that fits, or a ValueError.

SPEEDTORCH_FUZZ is how many inputs each parser gets, 20,000 by default and the same ones each time,
of manifests a quarter in the ordinary run, and 5 million in `make soak`; SPEEDTORCH_FUZZ_SEED gives
different ones. A failure prints the input.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ordinary_run import soaked
from torch import optim

import speedtorch
from speedtorch.checkpoints.saved_generation import SavedGeneration
from speedtorch.files import npy_format, safetensors_format
from speedtorch.files.file_format import ReadAt, StoredArray

pytestmark = [pytest.mark.slow, pytest.mark.soak]

PARTS = soaked(1, 16)  # for as many processes
COUNT = int(os.environ.get("SPEEDTORCH_FUZZ", soaked(20_000, 5_000_000))) // PARTS
# Of manifests, each of which is a file.
IS_ORDINARY = os.environ.keys().isdisjoint(
    {"SPEEDTORCH_FUZZ", "SPEEDTORCH_PROGRAMS", "SPEEDTORCH_SOAK"}
)
MANIFESTS = COUNT // 4 if IS_ORDINARY else COUNT
SEED = os.environ.get("SPEEDTORCH_FUZZ_SEED", "")
SECONDS, MEMORY = 10.0, 64 << 20
WORDS = [
    *(b"0", b"-1", b"1e9", b"9" * 30, b"18446744073709551615", b"2147483648", b"NaN", b"true"),
    *(b"null", b'""', b'"F32"', b"[" * 50, b"{" * 50, b"(" * 50, b"]", b"}", b")", b",", b":"),
    *(b"\\u0000", b"\\ud800", b"\x00", b"\xff\xfe", b"'<f4'", b"'|O'", b"None", b"-", b"#", b"\n"),
    *(b'"data_offsets"', b'"shape"', b'"tensor"', b'"base"', b'"rows"', b"lambda:0", b"9**9**9"),
]


def changed(chance: random.Random, corpus: list[bytes]) -> bytes:
    """One of the corpus with a few changes."""
    data = bytearray(chance.choice(corpus))
    for _ in range(chance.choice([1, 1, 1, 2, 3, 8])):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.choice([0, 1, 1, 2, 8, 30]))
        how = chance.randrange(6)
        if how == 0 and data:
            data[at - 1] ^= 1 << chance.randrange(8)
        elif how == 1:
            data[at:end] = chance.choice(WORDS)
        elif how == 2:
            del data[at:end]
        elif how == 3:
            data[at:at] = data[at:end] * chance.choice([1, 2, 20])
        elif how == 4:
            other = chance.choice(corpus)
            begin = chance.randrange(len(other) + 1)
            data[at:end] = other[begin : begin + chance.choice([1, 4, 40])]
        else:
            data[at:end] = chance.randbytes(end - at)
    return bytes(data)


def inputs(name: str, part: int, corpus: list[bytes], count: int = COUNT) -> Iterator[bytes]:
    chance = random.Random(name + SEED + (str(part) if part else ""))
    for _ in range(count):
        yield changed(chance, corpus)


def check(call: Callable[[bytes], object], given: Iterator[bytes]) -> tuple[int, int]:
    """How many inputs gave a result, and how many an error."""
    results = errors = 0
    for number, data in enumerate(given):
        looks = number % 50 == 0  # it makes all slow
        if looks:
            tracemalloc.start()
        begin = time.perf_counter()
        try:
            call(data)
            results += 1
        except ValueError:
            errors += 1
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error}, of {data!r}") from error
        finally:
            spent = time.perf_counter() - begin
            peak = tracemalloc.get_traced_memory()[1] if looks else 0
            tracemalloc.stop()
        assert spent < SECONDS, f"{spent} s for {data!r}"
        assert peak < len(data) + MEMORY, f"{peak} bytes for {data!r}"
    return results, errors


def read_of(data: bytes) -> ReadAt:
    def read(view: memoryview, offset: int) -> None:
        part = data[offset : offset + len(view)]
        if len(part) < len(view):
            raise ValueError("the file is shorter")
        view[:] = part

    return read


def check_arrays(arrays: dict[str, StoredArray], size: int) -> None:
    for each in arrays.values():
        assert all(type(n) is int and n >= 0 for n in each.shape)
        assert 0 <= each.offset <= each.offset + each.nbytes <= size


def npy_files() -> list[bytes]:
    made = [
        npy_format.npy_header(shape, dtype) + bytes(torch.Size(shape).numel() * dtype.itemsize)
        for shape in [(3,), (2, 4), (0, 5), (1, 2, 3)]
        for dtype in (torch.float32, torch.bool, torch.complex64)
    ]
    second = bytearray(made[0])
    second[6:10] = b"\x02\x00" + int.from_bytes(second[8:10], "little").to_bytes(4, "little")
    return [*made, bytes(second), b"\x93NUMPY\x01\x00\x05\x00{}   ", b""]


def safetensors_files() -> list[bytes]:
    shapes = {"weight": ((4, 2), torch.float32), "b.c": ((3,), torch.bfloat16)}
    header = safetensors_format.safetensors_header(shapes)
    text = b'{"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}  '
    other = len(text).to_bytes(8, "little") + text + b"xy"
    return [header + bytes(38), other, (2).to_bytes(8, "little") + b"{}", b""]


@pytest.mark.filterwarnings("ignore")  # of Python's parser, which NumPy gives headers to
@pytest.mark.parametrize("part", range(PARTS))
def test_npy_files(part: int) -> None:
    def call(data: bytes) -> None:
        check_arrays(npy_format.read_arrays(read_of(data), len(data)), len(data))

    results, errors = check(call, inputs("npy", part, npy_files()))
    assert min(results, errors) > COUNT / 50


@pytest.mark.parametrize("part", range(PARTS))
def test_safetensors_files(part: int) -> None:
    def call(data: bytes) -> None:
        check_arrays(safetensors_format.read_arrays(read_of(data), len(data)), len(data))

    def resized(data: bytes) -> bytes:  # most changes would be found by the first number alone
        return len(data[8:]).to_bytes(8, "little") + data[8:] if data[-1:] in (b"}", b" ") else data

    given = map(resized, inputs("safetensors", part, safetensors_files()))
    results, errors = check(call, given)
    assert errors > COUNT / 50 and results > COUNT / 200


@pytest.mark.parametrize("part", range(PARTS))
def test_manifests(tmp_path: Path, part: int) -> None:
    emb = speedtorch.Embedding(6, 2)
    optimizer = optim.Adam(emb.parameters())
    speedtorch.attach(optimizer, emb)
    emb.table.track_changes()
    emb(torch.tensor([1])).sum().backward()
    optimizer.step()
    parts = {"model": emb, "optimizer": optimizer, "more": [1, 2.5, float("inf"), b"x", None]}
    whole = speedtorch.save(tmp_path, **parts)
    emb.table.scatter(torch.tensor([2]), torch.ones(1, 2), "weight")
    delta = speedtorch.save(tmp_path, base=1, **parts)
    corpus = [(Path(each.path) / "manifest.json").read_bytes() for each in (whole, delta)]
    assert all(json.loads(each) for each in corpus)
    alone = speedtorch.save(tmp_path / "alone", **parts)
    numbers = itertools.count()

    def call(data: bytes) -> None:
        # One with a base opens that as well, which takes longer.
        saved = alone if next(numbers) % 8 else delta
        path = Path(saved.path) / "manifest.json"
        path.write_bytes(data)
        path.with_suffix(".crc32").write_text(f"{zlib.crc32(data):08x}\n")
        try:
            opened = SavedGeneration.opened(str(path.parents[1]), saved.generation)
            for name in opened.manifest["parts"]:
                opened.value(name, {}, copies=True, before_read=lambda links: None)
        except FileNotFoundError as error:  # of a file, or a base, that it names
            raise ValueError("there is none") from error

    results, errors = check(call, inputs("manifest", part, corpus, MANIFESTS))
    assert min(results, errors) > MANIFESTS / 50

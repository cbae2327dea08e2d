"""Every file, name and table that does not fit: its error, and that no file changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from file_faults import replace
from reference import assert_same_storage
from safetensors.torch import save_file
from test_table_files import filled, small

from speedtorch import DataGadget, Embedding, HostTable
from speedtorch.files import field_blocks, system_calls
from speedtorch.files.new_files import replace_files
from speedtorch.files.npy_format import npy_header
from speedtorch.files.safetensors_format import LARGEST_HEADER, safetensors_header
from speedtorch.files.table_files import open_fields, save_fields

BYTE = b'{"weight":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}'.ljust(64)
BEYOND = (0, 1 << 40, 1 << 40)


def header(text: bytes, nbytes: int | None = None) -> bytes:
    """The start of a safetensors file."""
    return (len(text) if nbytes is None else nbytes).to_bytes(8, "little") + text


FILES = {
    "a": b"0123",
    "b": b"old b",
    "empty.safetensors": b"",
    "few.safetensors": b"{}\n",
    "short.safetensors": header(b"{}      ", 9),
    "long.safetensors": header(b"{}", 1 << 40),
    "none.safetensors": header(b"{}"),
    "number.safetensors": header(BYTE) + b"x",
    "beyond.safetensors": safetensors_header({"weight": (BEYOND, torch.float32)}),
    "beyond.npy": npy_header(BEYOND, torch.float32),
    "rows.bin": b"rows",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder, with files of all kinds, which no test changes."""
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_files()
        yield folder


def make_files() -> None:
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    small(rows=5).save("rows.safetensors")
    small(dtype=torch.float64).save("double.safetensors")
    small(dim=(2, 1)).save("shape.safetensors")
    small(state=("exp_avg", "step")).save("names.safetensors")
    for name in ("cut.safetensors", "whole.safetensors"):
        small().save(name)
    os.truncate("cut.safetensors", os.path.getsize("whole.safetensors") - 1)
    for name in ("rows", "double", "shape", "cut"):
        HostTable.open(f"{'whole' if name == 'cut' else name}.safetensors").save(f"{name}.npy")
    os.truncate("cut.exp_avg.npy", os.path.getsize("cut.exp_avg.npy") - 1)
    small().save("last.npy")
    np.save("last.exp_avg.npy", np.zeros((4, 3), np.float32))
    np.save("number.npy", np.float32(3))
    np.save("mixed.npy", np.zeros((3, 2)))
    np.save("gone.field.npy", np.zeros((3, 2)))
    save_fields("parts.npy", {"a": torch.zeros(2)})
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, "lengths.safetensors")
    save_file({f"f{number}": torch.zeros(1) for number in range(50)}, "many.safetensors")
    for folder in ("folder", "inner", "removed"):
        os.mkdir(folder)
    os.mkfifo("pipe")
    for link, target in (("link", "a"), ("linked_pipe", "pipe"), ("full", "/dev/full")):
        os.symlink(target, link)
    Path("readonly").write_bytes(b"old")
    os.chmod("readonly", 0o444)


def opened(name: str, names: tuple[str, ...] | None = None) -> object:
    with open_fields(name, names) as stored:
        return stored


def loaded(name: str) -> None:
    """Loads rows into a table, which must not change."""
    table = filled(small(), seed=5)
    try:
        table.load(name)
    finally:
        assert_same_storage(table.record, filled(small(), seed=5).record)


def read(name: str) -> None:
    """Reads more than there is."""
    with system_calls.open_to_read(name) as file:
        file.read(memoryview(bytearray(8)), 0)


def replaced(*names: str) -> None:
    replace(Path(), *names)


def saved_over_its_rows(path: str, name: str, state: tuple[str, ...]) -> None:
    try:
        small(memory="file", path=path, state=state).save(name)
    finally:
        os.unlink(path)


def in_a_removed_folder() -> None:
    here = os.getcwd()
    os.chdir("removed")
    try:
        os.rmdir("../removed")
        save_fields("t.npy", {"weight": torch.zeros(2)})
    finally:
        os.mkdir(f"{here}/removed")
        os.chdir(here)


def written(*shape: int) -> None:
    with replace_files([Path("new")]) as (file,):
        field_blocks.write_blocks(file.write, b"head", [torch.zeros(shape).transpose(1, 2)])


WEIGHT = {"weight": torch.zeros(2)}
ENDING = r"ends in .safetensors or .npy"
KIND = "is a named pipe, socket or device; name"
LINKS = "files that are replaced .* without symbolic links"
MIXED = "would be read as part of this table. Remove"
OWN = "the rows of the table are in this file. Choose another"
OTHER = r"'weight' is torch.float32 \[5, 2\], but the table needs torch.float32 \[4, 2\]"
CASES: dict[type[Exception], list[tuple[Callable[[], Any], str]]] = {
    ValueError: [
        (lambda: opened("short.safetensors"), "length is 9 bytes. The file has 16 bytes"),
        (lambda: opened("long.safetensors"), "header length is 1,099,511,627,776 bytes"),
        (lambda: opened("none.safetensors"), "none.safetensors: .*has no field"),
        (lambda: opened("number.safetensors"), "need the same number of rows"),
        (lambda: opened("number.npy"), "need the same number of rows"),
        (lambda: opened("lengths.safetensors"), "need the same number of rows"),
        *(
            (call, ENDING)
            for name in ("t.pt", "t", "t.NPY", "t.npz")
            for call in (
                lambda name=name: opened(name),
                lambda name=name: save_fields(name, WEIGHT),
                lambda name=name: small().save(name),
                lambda name=name: small().load(name),
            )
        ),
        (lambda: HostTable.open("empty.safetensors"), "has at least 8 bytes, got 0"),
        (lambda: HostTable.open("few.safetensors"), "has at least 8 bytes, got 3"),
        (lambda: HostTable.open("lengths.safetensors"), "need the same number of rows"),
        *(
            (
                lambda name=name: HostTable.open(name, "plain"),
                rf"{name}: 'weight': rows of \[0, 10995.*\] span more than 2\^63 - 1 bytes",
            )
            for name in ("beyond.safetensors", "beyond.npy")
        ),
        *(
            (lambda name=f"{name}.{suffix}": loaded(name), message)
            for suffix in ("safetensors", "npy")
            for name, message in (
                ("rows", OTHER),
                ("double", r"is torch.float64 \[4, 2\], but the table needs torch.float32"),
                ("shape", r"'weight' is torch.float32 \[4, 2, 1\], but the table needs"),
                ("cut", "describes"),
            )
        ),
        (lambda: loaded("names.safetensors"), r".*'step'.*, but the table has \['exp_"),
        (lambda: loaded("last.npy"), r"t.exp_avg.npy: 'exp_avg' is torch.float32 \[4, 3\]"),
        (lambda: Embedding.from_pretrained("many.safetensors"), "f1, .*, and 30 more. Pass"),
        (lambda: DataGadget("many.safetensors"), "file's f0, f1, .*, and 30 more"),
        (lambda: save_fields("t.npy", {"w": torch.zeros(2, 3).t()}), "must be contiguous"),
        (lambda: save_fields("t.npy", {"a.b": torch.zeros(2)}), "'a.b': .* dots. Save as .s"),
        *(
            (lambda rows=rows: save_fields("t.npy", {**WEIGHT, "s": rows}), "Save as .safetensors")
            for rows in (torch.zeros(2).bfloat16(), torch.zeros(2).to(torch.float8_e5m2))
        ),
        (lambda: HostTable(3, 2, state=["m"]).save("mixed.npy"), f"mixed.npy {MIXED}"),
        (lambda: HostTable(3, 2, state=["m"]).save("gone.npy"), f"gone.field.npy {MIXED}"),
        (lambda: saved_over_its_rows("own.npy", "own.npy", ()), OWN),
        (lambda: saved_over_its_rows("own.weight.npy", "own.npy", ("m",)), f"ght.npy: {OWN}"),
        (lambda: safetensors_header({"z": ((1,), torch.complex128)}), r"\(.npy files can\)"),
        (lambda: safetensors_header({"z": ((1,), torch.complex32)}), r"x32 \(field 'z'\)$"),
        (lambda: safetensors_header({"x" * LARGEST_HEADER: ((1,), torch.int8)}), "fewer fields"),
        *(
            (lambda dtype=dtype: npy_header((2, 3), dtype), f"{dtype}. Save as .safetensors ins")
            for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
        ),
        (lambda: npy_header((2,), torch.complex32), "complex32. Convert the field"),
        (lambda: read("a"), "a: the file ends at byte 4. It was cut off"),
        (lambda: read("folder"), "is not a regular file"),
        (lambda: read("pipe"), "is not a regular file"),
        (lambda: written(4, 3, 2), r"each row, of shape \(2, 3\), must be contiguous"),
        (lambda: replaced("pipe"), KIND),
        (lambda: replaced("linked_pipe"), KIND),
        (lambda: replaced("full"), f"/dev/full: {KIND}"),
        (lambda: replaced("a", "pipe"), KIND),
        (lambda: replaced("a", "linked_pipe"), LINKS),
        (lambda: replaced("b", "link"), f"/link: {LINKS}"),
        (lambda: replaced("a", "inner/a"), "inner/a: files that are .* together .* one fol"),
    ],
    FileNotFoundError: [
        (lambda: opened("no.npy"), r"neither this file nor .*no.<field>.npy exists"),
        (lambda: loaded("no.npy"), r"no\..*npy"),
        (lambda: loaded("no.safetensors"), "no.safetensors"),
        (lambda: opened("parts.npy", ("a", "b")), "parts.b.npy"),
        (in_a_removed_folder, r"t\.npy"),
        (lambda: system_calls.map_new_file("no/a", 4), "the folder does not exist"),
        (lambda: replaced("no/a"), "the folder does not exist; create it first"),
    ],
    NotADirectoryError: [
        (lambda: replaced("a/a"), r"^\[Errno \d+\] Not a directory: '[^']*/a'$"),
    ],
    FileExistsError: [
        (lambda: small(memory="file", path="rows.bin"), "exists already, and a new file is"),
    ],
    IsADirectoryError: [
        (lambda: replaced("a", "folder"), "is a folder; name a file"),
    ],
    PermissionError: [
        (lambda: replaced("readonly"), "is read-only; make it writable, or choose"),
        (lambda: replaced("a", "readonly"), "is read-only; make it writable, or .*/re"),
    ],
}


def entries(folder: Path) -> dict[str, bytes | None]:
    """All names, and the contents of files."""
    return {e.name: e.read_bytes() if e.is_file() else None for e in folder.iterdir()}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [(call, error, message) for error, cases in CASES.items() for call, message in cases],
)
def test_what_does_not_fit_raises_and_changes_no_file(
    folder: Path, call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    before, opened = entries(folder), len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=message):
        call()
    assert entries(folder) == before
    assert len(os.listdir("/proc/self/fd")) == opened

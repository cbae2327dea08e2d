"""Saved tables that are mapped and not read: in place, read-only, cut, not aligned."""

from __future__ import annotations

import copy
import errno
import gc
import io
import json
import os
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_calls import PretendedDriver
from file_faults import fail
from safetensors.torch import load_file, save_file
from table_processes import maps, received, smaps, spawned
from torch import Tensor

import speedtorch
from speedtorch import HostTable
from speedtorch.files import table_files
from speedtorch.memory import memory_stats

READ_ONLY = r"is a read-only mapping of .*. HostTable.open\(\) without memory='mapped' loads"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A table of 50 rows with a weight of 4 columns, saved."""
    path = tmp_path / "rows.safetensors"
    HostTable(50, 4, memory="plain").normal_(seed=2).save(path)
    return path


def rows_in(path: Path) -> Tensor:
    """The weight that is saved there, read."""
    return HostTable.open(path, "plain")["weight"]


# Reading


@pytest.mark.parametrize("ending", ["safetensors", "npy"])
@pytest.mark.parametrize("state", [(), ("m",)], ids=["weight", "weight_and_state"])
def test_a_mapped_table_has_the_rows_of_its_file(
    tmp_path: Path, ending: str, state: tuple[str, ...], device: str
) -> None:
    path = tmp_path / f"t.{ending}"
    table = HostTable(50, 4, state=state, memory="plain").normal_(seed=2)
    for name in state:
        table.normal_(field=name, seed=3)
    table.save(path)
    mapped = HostTable.open(path, "mapped")
    assert (mapped.memory, mapped.writable, mapped.nbytes) == ("mapped", False, table.nbytes)
    assert mapped.fields == table.fields
    ids = torch.tensor([[7, 0], [49, 7]])
    for name in table.fields:
        assert torch.equal(mapped[name], table[name])
        assert torch.equal(mapped.gather(ids.to(device), name).cpu(), table[name][ids])
        assert np.array_equal(mapped.numpy(name), table.numpy(name))


def test_nothing_is_read_and_no_memory_taken(saved: Path) -> None:
    before = memory_stats()
    table = HostTable.open(saved, "mapped")
    assert "plain" in before and memory_stats()["plain"] == before["plain"]
    assert table["weight"].data_ptr() % 8 == 0 and "200 bytes" not in repr(table)
    assert repr(table).endswith("800 bytes, mapped)") or table.memory_reason


def test_the_record_of_a_lone_field_is_the_field(saved: Path) -> None:
    table = HostTable.open(saved, "mapped")
    assert torch.equal(table.record, rows_in(saved))
    assert torch.equal(table.gather(torch.tensor([3])), rows_in(saved)[3:4])


def test_fields_that_lie_apart_have_neither_records_nor_padding(tmp_path: Path) -> None:
    fields = {"weight": ((3,), torch.int8), "m": ((), torch.float32)}
    padded = HostTable.from_fields(5, fields, "plain").fill_(1)
    padded.save(tmp_path / "t.safetensors")
    table = HostTable.open(tmp_path / "t.safetensors", "mapped")
    with pytest.raises(ValueError, match="no records, because it stores its fields .* one"):
        table.gather(torch.tensor([0]))
    assert (padded.record_bytes, padded.nbytes) == (8, 40)
    assert (table.record_bytes, table.nbytes) == (7, 35)


def test_files_of_no_rows_and_of_other_libraries_are_mapped(tmp_path: Path) -> None:
    np.save(tmp_path / "none.npy", np.zeros((0, 3), np.float32))
    assert HostTable.open(tmp_path / "none.npy", "mapped")["weight"].shape == (0, 3)
    save_file({"a": torch.arange(6).view(3, 2)}, tmp_path / "a.safetensors")
    found = HostTable.open(tmp_path / "a.safetensors", "mapped")["a"]
    assert found.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_mapped_table_is_saved_elsewhere(saved: Path, tmp_path: Path) -> None:
    HostTable.open(saved, "mapped").save(tmp_path / "again.safetensors", rows=slice(5, 9))
    assert torch.equal(rows_in(tmp_path / "again.safetensors"), rows_in(saved)[5:9])


def test_processes_share_one_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    HostTable(1 << 16, 16, memory="plain").fill_(1).save(path)
    table = HostTable.open(path, "mapped")
    assert float(table["weight"].sum()) == 1 << 20
    with spawned(maps, str(path)) as (_, other):
        assert received(other) == 1 << 20
        found = smaps(path, "Shared_Clean", "Shared_Dirty", "Private_Clean", "Private_Dirty")
    assert found["Shared_Clean"] + found["Shared_Dirty"] >= table.nbytes
    assert found["Private_Clean"] + found["Private_Dirty"] == 0


# Writing

WRITES: dict[str, Callable[[HostTable], Any]] = {
    "scatter": lambda table: table.scatter(torch.tensor([1]), torch.ones(1, 4), "weight"),
    "fill_": lambda table: table.fill_(1),
    "init_": lambda table: table.normal_(),
    "add_": lambda table: table["weight"].add_(1),
    "of_a_view": lambda table: table["weight"][3:].t().mul_(0),
    "of_a_row": lambda table: table["weight"][3].copy_(torch.ones(4)),
    "of_an_item": lambda table: table["weight"].__setitem__((0, 0), 1.0),
    "out": lambda table: torch.add(table["weight"], 1, out=table["weight"]),
    "foreach": lambda table: torch._foreach_add_([table["weight"]], 1),
    "record": lambda table: table.record.zero_(),
    "pinned_scatter": lambda table: speedtorch.pinned_scatter(
        table["weight"], torch.tensor([0]), torch.ones(1, 4)
    ),
    "swap": lambda table: speedtorch.optimizer_state_swap(
        [table["weight"]],
        [torch.ones(1, 4)],
        torch.tensor([0]),
        [torch.ones(0, 4)],
        torch.tensor([], dtype=torch.int64),
    ),
    "copy": lambda table: copy.copy(table["weight"]).zero_(),
    "apply_": lambda table: table["weight"].apply_(lambda _: 0.0),
    "map2_": lambda table: table["weight"].map2_(table["weight"], table["weight"], max),
    "max_norm": lambda table: speedtorch.Embedding.from_pretrained(table, max_norm=0.1)(
        torch.tensor([1])
    ),
    "share_memory_": lambda table: table["weight"].share_memory_(),
    "batch_norm": lambda table: torch.nn.functional.batch_norm(
        torch.ones(2, 4), table["weight"][0], table["weight"][1], training=True
    ),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_a_write_is_refused_before_anything_happens(
    saved: Path, write: Callable[[HostTable], Any]
) -> None:
    before = saved.read_bytes()
    table = HostTable.open(saved, "mapped")
    with pytest.raises(ValueError, match=READ_ONLY):
        write(table)
    assert saved.read_bytes() == before


def test_a_table_is_not_loaded_into_a_mapped_one(saved: Path) -> None:
    with pytest.raises(ValueError, match=f"^load: the table {READ_ONLY}"):
        HostTable.open(saved, "mapped").load(saved)


def test_arrays_of_a_mapped_table_are_read_only(saved: Path) -> None:
    table = HostTable.open(saved, "mapped")
    for array in (table.numpy(), table["weight"].numpy(), np.asarray(table["weight"])):
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1
    with pytest.raises(BufferError, match="the receiver could write"):
        torch.from_dlpack(table["weight"])


def test_results_in_memory_of_their_own_are_plain_tensors(saved: Path) -> None:
    rows = HostTable.open(saved, "mapped")["weight"]
    kept = io.BytesIO()
    torch.save(rows, kept)
    kept.seek(0)
    for made in (rows + 1, rows.clone(), copy.deepcopy(rows), torch.load(kept), rows[[1, 2]]):
        assert type(made) is Tensor
        made.zero_()
    assert type(rows[3]) is type(rows.view(-1)) is type(rows)
    assert f"{rows[0, 0]:.3f}" == f"{float(rows[0, 0]):.3f}"


def test_copies_and_pickles_of_mapped_rows_are_tensors_of_their_own(saved: Path) -> None:
    """A pickle for another process does not move the file's memory to where both have it."""
    rows = HostTable.open(saved, "mapped")["weight"]
    address = rows.data_ptr()
    alone = pickle.dumps(rows[1])
    assert len(alone) < rows.nbytes
    sent = ForkingPickler.dumps(rows[1])
    for made in (copy.deepcopy(rows[1]), pickle.loads(alone), pickle.loads(sent)):
        assert torch.equal(made, rows[1])
        made.zero_()
    assert rows.data_ptr() == copy.copy(rows).data_ptr() == address


def test_sparse_and_nested_tensors_of_mapped_rows_have_values_of_their_own(saved: Path) -> None:
    rows = HostTable.open(saved, "mapped")["weight"]
    ids = torch.zeros(1, len(rows), dtype=torch.int64)
    torch.sparse_coo_tensor(ids, rows, (1, 4))._values().zero_()
    torch.sparse_csr_tensor(torch.tensor([0, 4]), torch.arange(4), rows[0]).values().zero_()
    torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 2, len(rows)])).values().zero_()
    assert rows.any()
    assert str(rows[0]) == str(rows[0].clone()) and rows[0].tolist() == rows[0].clone().tolist()


# Files that change, and files that cannot be mapped

READS: dict[str, Callable[[HostTable], Any]] = {
    "gather": lambda table: table.gather(torch.tensor([1]), "weight"),
    "field": lambda table: table["weight"],
    "record": lambda table: table.record,
    "numpy": lambda table: table.numpy(),
    "settle": lambda table: table.settle(),
    "lookup": lambda table: speedtorch.Embedding.from_pretrained(table)(torch.tensor([1])),
}


@pytest.mark.parametrize("read", READS.values(), ids=list(READS))
def test_a_file_that_was_cut_raises_at_the_next_call(
    saved: Path, read: Callable[[HostTable], Any]
) -> None:
    table = HostTable.open(saved, "mapped")
    read(table)
    size = os.path.getsize(saved)
    os.truncate(saved, 100)
    message = f"was truncated to 100 bytes, but a table maps {size:,} bytes"
    with pytest.raises(ValueError, match=message):
        read(table)
    table.close()


def test_a_cut_file_of_a_table_raises(tmp_path: Path) -> None:
    table = HostTable(10, 4, memory="file", path=tmp_path / "rows.bin")
    os.truncate(tmp_path / "rows.bin", 0)
    with pytest.raises(ValueError, match=r"was truncated to 0 bytes, but a table maps 160 bytes"):
        table.gather(torch.tensor([1]))
    with pytest.raises(ValueError, match="was truncated to 0 bytes"):
        table.close()
    assert table.closed


def test_a_file_that_another_save_has_removed_meanwhile_is_not_kept_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / "t.npy", []
    HostTable(3, 2, state=("m",), memory="plain").save(path)
    real = table_files._open_first

    def first(*arguments: Any) -> Any:
        opened.append(real(*arguments))
        if len(opened) == 2:  # all files are open
            (tmp_path / "t.m.npy").rename(tmp_path / "t.k.npy")
        return opened[-1]

    monkeypatch.setattr(table_files, "_open_first", first)
    table = HostTable.open(path, "mapped")
    assert list(table.fields) == ["weight", "k"] and len(opened) == 4
    opened.clear()
    gc.collect()
    assert smaps(tmp_path / "t.k.npy", "Size") == {"Size": 4096}


def test_a_file_that_was_replaced_does_not_change(saved: Path) -> None:
    table, before = HostTable.open(saved, "mapped"), rows_in(saved)
    HostTable(1, 4, memory="plain").save(saved)
    assert torch.equal(table["weight"], before)
    assert HostTable.open(saved, "mapped").rows == 1


def unaligned(path: Path) -> Tensor:
    """Rows that begin at an odd byte of a safetensors file."""
    rows = torch.arange(12.0).view(3, 4)
    entry = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}
    header = json.dumps({"weight": entry}).encode()
    header += b" " * (1 - len(header) % 2)
    path.write_bytes(len(header).to_bytes(8, "little") + header + rows.numpy().tobytes())
    return rows


def test_fields_that_are_not_aligned_are_read_with_a_reason(tmp_path: Path) -> None:
    rows = unaligned(path := tmp_path / "t.safetensors")
    table = HostTable.open(path, "mapped")
    assert table.memory in ("plain", "managed", "registered")
    assert "not a multiple of the 4 bytes of torch.float32. Call save(), and" in table.memory_reason
    assert "(loaded, not mapped: field 'weight' begins at byte" in repr(table)
    assert torch.equal(table.fill_(1)["weight"], torch.ones_like(rows))
    assert torch.equal(rows_in(path), rows)


def test_a_file_system_that_does_not_map_is_the_reason(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "map_to_read", code=errno.ENODEV)
    table = HostTable.open(saved, "mapped")
    assert table.memory_reason.startswith("loaded, not mapped: the file system cannot map it")
    assert torch.equal(table["weight"], rows_in(saved))


def test_a_file_call_that_fails_is_no_reason_to_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.listdir("/proc/self/fd")
    fail(monkeypatch, "map_to_read", code=errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        HostTable.open(saved, "mapped")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_file_without_a_table_raises_as_any_open(tmp_path: Path) -> None:
    (tmp_path / "t.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="has at least 8 bytes, got 0"):
        HostTable.open(tmp_path / "t.safetensors", "mapped")
    with pytest.raises(FileNotFoundError):
        HostTable.open(tmp_path / "gone.safetensors", "mapped")


def test_a_new_table_is_not_mapped(saved: Path) -> None:
    for make in (HostTable, speedtorch.Embedding):
        with pytest.raises(ValueError, match=r"memory='mapped' maps the file of a saved table"):
            make(3, 2, memory="mapped")
    with pytest.raises(ValueError, match="memory='mapped' accepts no device and no path"):
        HostTable.open(saved, "mapped", path=saved)
    with pytest.raises(ValueError, match="memory is 'mapped', but only memory="):
        HostTable.open(saved, "mapped").share()


def test_a_closed_mapped_table_lets_its_file_go(saved: Path) -> None:
    before = os.listdir("/proc/self/fd")
    table = HostTable.open(saved, "mapped")
    row = table["weight"][3]
    table.close()
    with pytest.raises(ValueError, match="this table is closed"):
        table.make_current()
    assert row.tolist() == rows_in(saved)[3].tolist()
    del table, row
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert str(saved) not in Path("/proc/self/maps").read_text()


# On a GPU, pretended or not


def test_the_file_is_registered_read_only_and_in_place(
    saved: Path, driver: PretendedDriver
) -> None:
    table = HostTable.open(saved, "mapped")
    ((count, read_only),) = driver.registered.values()
    assert (count, read_only) == (os.path.getsize(saved), True)
    assert table.is_in_place and table.memory_reason == ""
    assert torch.equal(table.gather(torch.tensor([4]), "weight"), rows_in(saved)[4:5])
    row = table["weight"][4]
    table.close()
    assert driver.registered
    del table, row
    assert not driver.registered


def test_a_file_that_cuda_does_not_register_says_so(saved: Path, driver: PretendedDriver) -> None:
    driver.fail("host_register")
    table = HostTable.open(saved, "mapped")
    assert not table.is_in_place
    assert "mapped (not registered, so that a GPU uses staged copies of its rows" in repr(table)


# Modules


@pytest.mark.parametrize("freeze", [True, False])
def test_a_module_that_only_reads_works(saved: Path, device: str, freeze: bool) -> None:
    module = speedtorch.Embedding.from_pretrained(
        saved, freeze=freeze, memory="mapped", device=device
    ).eval()
    ids = torch.tensor([3, 3, 49])
    with torch.no_grad():
        assert torch.equal(module(ids.to(device)).cpu(), rows_in(saved)[ids])
    assert module.table.memory == "mapped" and "memory=mapped" in repr(module)
    assert torch.equal(module.state_dict()["weight"], rows_in(saved))
    save_file(dict(module.state_dict()), saved.with_name("state.safetensors"))
    assert torch.equal(load_file(saved.with_name("state.safetensors"))["weight"], rows_in(saved))


def test_a_module_with_mapped_rows_is_saved_with_a_run(saved: Path, tmp_path: Path) -> None:
    mapped = speedtorch.Embedding.from_pretrained(saved, memory="mapped")
    speedtorch.save(tmp_path / "run", model=mapped)
    module = speedtorch.Embedding(50, 4)
    speedtorch.load(tmp_path / "run", model=module)
    assert torch.equal(module.table["weight"], rows_in(saved))
    with pytest.raises(ValueError, match=f"cannot load 'weight': the table {READ_ONLY}"):
        speedtorch.load(tmp_path / "run", model=mapped)


@pytest.mark.parametrize("memory", ["mapped", "plain"])
def test_one_field_of_a_models_file_is_opened_by_name(memory: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    given = {f"layers.{n}.weight": torch.randn(3 + n % 2, 4) for n in range(20_000)}
    header = {"__metadata__": {"note": "x"}}
    end = 0
    for name, each in given.items():
        entry = {"dtype": "F32", "shape": [*each.shape], "data_offsets": [end, end + each.nbytes]}
        header[name], end = entry, end + each.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    assert len(text) > 1 << 20
    data = b"".join(each.numpy().tobytes() for each in given.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    table = HostTable.open(path, memory, field="layers.7.weight")
    assert table.memory == memory and list(table.fields) == ["weight"]
    assert torch.equal(table["weight"], given["layers.7.weight"])
    with pytest.raises(ValueError, match="has no field 'weight'. Choose one of .* 19,980 more.$"):
        HostTable.open(path, memory, field="weight")


def test_all_rows_of_a_mapped_module_are_read(saved: Path) -> None:
    module, rows = speedtorch.Embedding.from_pretrained(saved, memory="mapped"), rows_in(saved)
    assert torch.equal(torch.cat([block for _, block in module.blocks()]), rows)
    assert np.array_equal(module.numpy(), rows.numpy())
    found = speedtorch.nearest_neighbors(module, rows[7:8], 1)
    assert found[1].tolist() == [[7]]


def test_a_module_that_trains_is_refused(saved: Path) -> None:
    module = speedtorch.Embedding.from_pretrained(saved, freeze=False, memory="mapped")
    ids, adam = torch.tensor([1]), torch.optim.Adam(module.parameters())
    for what, call in (
        ("^Embedding: training its rows", lambda: module(ids)),
        ("^Embedding: training its rows", lambda: speedtorch.attach(adam, module)),
        (
            "^Embedding: training its rows",
            lambda: list(speedtorch.prefetch([ids], module, ids=lambda batch: batch)),
        ),
        ("Embedding: loading 'weight'", lambda: module.load_state_dict(module.state_dict())),
        ("init_", module.reset_parameters),
    ):
        with pytest.raises(ValueError, match=f"{what}: the table {READ_ONLY}"):
            call()


def test_a_copy_of_a_module_has_rows_of_its_own(saved: Path) -> None:
    module = copy.deepcopy(speedtorch.Embedding.from_pretrained(saved, memory="mapped"))
    assert module.table.memory != "mapped"
    module.table.fill_(1)


def test_a_gadget_maps_its_file(saved: Path) -> None:
    gadget = speedtorch.DataGadget(str(saved), mapped=True)
    gadget.gadgetInit()
    assert gadget.table.memory == "mapped"
    assert torch.equal(gadget.getData([3, 1]).cpu(), rows_in(saved)[[3, 1]])
    assert torch.equal(gadget.getData(slice(4, 6)).cpu(), rows_in(saved)[4:6])
    with pytest.raises(ValueError, match=f"^insertData: the table {READ_ONLY}"):
        gadget.insertData(torch.ones(1, 4), [0])
    assert np.array_equal(gadget.getNumpyVersion(), rows_in(saved).numpy())
    os.truncate(saved, 90)
    with pytest.raises(ValueError, match="was truncated to 90 bytes"):
        gadget.getData([3])
    with pytest.raises(TypeError, match="mapped=True requires a file name"):
        speedtorch.DataGadget(np.zeros((3, 2)), mapped=True)


def test_a_gadget_maps_one_field_of_several(tmp_path: Path) -> None:
    HostTable(3, 2, state=("m",), memory="plain").fill_(4, "m").save(tmp_path / "t.safetensors")
    gadget = speedtorch.DataGadget(str(tmp_path / "t.safetensors"), field="m", mapped=True)
    assert gadget.getData([1]).tolist() == [[4, 4]]

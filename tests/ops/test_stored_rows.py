"""Exchanges of tables that store 16 bits with rows of float32, and of fields of several widths."""

from __future__ import annotations

import pytest
import reference
import torch
from conftest import Place
from reference import assert_same_bytes, some
from test_argument_errors import at_an_odd_address
from torch import Tensor

import speedtorch
from speedtorch.ops.functions import exchange_cached, exchange_rows

ROWS, PLACES = 40, 50
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Of each field its columns, and its dtypes in the table and beside it.
RECORDS = {
    "one": [(1, BF16, F32)],
    "odd": [(7, F16, F32), (3, BF16, F32)],
    "row": [(128, BF16, F32)],
    "row and sum": [(128, BF16, F32), (1, F32, F32)],
    "float32 and sum": [(128, F32, F32), (1, F32, F32)],
    "all": [(64, BF16, F32), (64, F16, F32), (64, F32, F32), (3, torch.uint8, torch.uint8)],
    "wide": [(300, F16, F32), (9, torch.int64, torch.int64)],
    "many": [(2 + k, BF16, F32) for k in range(17)],
}
RECORD = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)


def numbers(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(200, (rows, columns), generator=random).to(dtype)
    return torch.randn(rows, columns, generator=random).to(dtype)


class Exchanged:
    """A table's fields in one record, and the sides of an exchange, with what must come of it."""

    def __init__(self, record: list[tuple[int, torch.dtype, torch.dtype]], place: Place) -> None:
        fields = {f"f{k}": (columns, stored) for k, (columns, stored, _) in enumerate(record)}
        memory = "managed" if place.memory in ("torch_pinned", "pageable") else place.memory
        self.table = speedtorch.HostTable.from_fields(ROWS, fields, memory)
        self.host = [self.table.rows_of(name) for name in fields]
        self.evict, self.load = (some(25, ROWS, seed) for seed in (1, 2))
        self.places = [some(25, PLACES, seed, ascending=False) for seed in (3, 4)]
        self.leaving, self.arriving, self.expected = [], [], []
        for k, (columns, stored, dtype) in enumerate(record):
            self.host[k].copy_(numbers(ROWS, columns, stored, 10 * k))
            leaving, arriving = (numbers(PLACES, columns, dtype, 10 * k + n) for n in (1, 2))
            self.leaving.append(leaving.to(place.device))
            self.arriving.append(arriving.to(place.device))
            self.expected.append((self.host[k].cpu().clone(), leaving, arriving))
        host, *sides = map(list, zip(*self.expected, strict=True))
        reference.optimizer_state_swap(
            *(host, sides[0], self.evict, sides[1], self.load),
            **dict(zip(("evict_places", "load_places"), self.places, strict=True)),
        )
        self.lists = [
            tensor.to(place.device)
            for tensor in (self.evict, self.places[0], self.load, self.places[1])
        ]

    def check(self) -> None:
        for k, (host, _, loaded) in enumerate(self.expected):
            assert_same_bytes(self.host[k].cpu().contiguous(), host)
            assert_same_bytes(self.arriving[k].cpu(), loaded)


@RECORD
def test_rows_are_converted_on_their_way(
    record: list[tuple[int, torch.dtype, torch.dtype]], place: Place
) -> None:
    given = Exchanged(record, place)
    evict, evict_places, load, load_places = given.lists
    exchange_rows(given.host, given.leaving, evict, evict_places, given.arriving, load, load_places)
    speedtorch.synchronize()
    given.check()


@RECORD
def test_rows_of_a_cache_are_converted_as_well(
    record: list[tuple[int, torch.dtype, torch.dtype]], place: Place
) -> None:
    given = Exchanged(record, place)
    slots = some(12, ROWS, 7)
    cache = [tensor[slots].to(place.device).contiguous() for tensor in given.host]
    hot = torch.full((ROWS, 2), -1, dtype=torch.int32)
    hot[slots, 0] = torch.arange(12, dtype=torch.int32)
    evict, evict_places, load, load_places = given.lists
    exchange_cached(
        *(given.host, cache, hot.to(place.device), given.leaving, evict, evict_places),
        *(given.arriving, load, load_places),
    )
    speedtorch.synchronize()
    for own, rows in zip(given.host, cache, strict=True):
        own[slots] = rows.to(own.device)
    given.check()


@pytest.mark.parametrize("slot", [2, 2**31 - 1, -(2**31)])
def test_a_row_whose_slot_no_cache_has_is_moved_in_the_table(slot: int, device: str) -> None:
    host, slots = speedtorch.HostTable(8, 2)["weight"], torch.zeros(9, 2, device=device)
    sides = [torch.full((1, 2), float(number), device=device) for number in (1, 2)]
    hot = torch.tensor([[slot, 0]] * 8, dtype=torch.int32, device=device)
    ids = [torch.tensor([row], device=device) for row in (3, 5)]
    exchange_cached([host], [slots[:2]], hot, sides[:1], ids[0], None, sides[1:], ids[1], None)
    speedtorch.synchronize()
    assert host[3].eq(1).all() and not slots.any() and not sides[1].any()


OF_HOST = r"has dtype \w+, expected BFloat16, the dtype of host\[0\]"


@pytest.mark.parametrize(
    ("stored", "sides", "message"),
    [
        *(([BF16], [dtype, dtype], OF_HOST) for dtype in (torch.float64, torch.int16, F16)),
        ([BF16], [F32, BF16], "has dtype"),
        ([BF16], [BF16, F32], "has dtype"),
        ([BF16, F32], [F32, F32], r"host\[1\] has dtype Float, expected BFloat16, .* of host"),
    ],
    ids=str,
)
def test_no_other_dtypes_are_converted(
    stored: list[torch.dtype], sides: list[torch.dtype], message: str
) -> None:
    """Both sides have one dtype, and the tables of one exchange are stored alike."""
    hosts = [torch.zeros(4, 2, dtype=dtype) for dtype in stored]
    leaving, arriving = (torch.zeros(3, 2, dtype=dtype) for dtype in sides)
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        exchange_rows(hosts, [leaving], none, none, [arriving], none, none, len(hosts))


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_a_cache_of_another_dtype_is_an_error(dtype: torch.dtype) -> None:
    host, sides = torch.zeros(4, 2, dtype=BF16), [torch.ones(3, 2) for _ in range(2)]
    cache, hot = torch.zeros(2, 2, dtype=dtype), torch.full((4, 2), -1, dtype=torch.int32)
    ids, places = torch.tensor([1]), torch.tensor([0])
    with pytest.raises(ValueError, match=r"cache\[0\] must store rows with the dtype"):
        exchange_cached([host], [cache], hot, sides[:1], ids, places, sides[1:], ids, places)
    assert not host.any() and bool((sides[1] == 1).all())


@pytest.mark.parametrize("extra", [0, 1], ids=["aligned", "offset"])
def test_the_swap_takes_sides_of_float32(extra: int, place: Place) -> None:
    host = place.table(numbers(ROWS, 8 + extra, BF16, 1)[:, extra:])
    before = host.cpu().clone()
    leaving = numbers(6, 8, F32, 2).to(place.device)
    arriving = torch.zeros(5, 8, device=place.device)
    evict, load = place.ids([7, 3, 11, 30, 2, 4]), place.ids([1, 3, 39, 0, 5])
    speedtorch.optimizer_state_swap([host], [leaving], evict, [arriving], load)
    speedtorch.synchronize()
    expected = before.clone()
    expected[evict.cpu()] = leaving.cpu().to(BF16)
    assert_same_bytes(arriving.cpu(), expected[load.cpu()].float())
    expected[3] = before[3]
    assert_same_bytes(host.cpu().contiguous(), expected)


def test_numbers_to_convert_must_be_aligned() -> None:
    host = at_an_odd_address(torch.zeros(4, 2, dtype=BF16))
    sides, ids = [torch.ones(1, 2) for _ in range(2)], torch.tensor([1])
    with pytest.raises(ValueError, match=r"host\[0\] must begin at an address"):
        speedtorch.optimizer_state_swap([host], sides[:1], ids, sides[1:], ids)
    assert not host.any()


@pytest.mark.parametrize("stored", [BF16, F16], ids=["bfloat16", "float16"])
def test_any_bits_are_converted_as_on_the_cpu(stored: torch.dtype, place: Place) -> None:
    """NaN of every kind among them, infinities, and numbers that no step has rounded."""

    def exchanged(device: str) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(5)
        bits = torch.randint(-(2**31), 2**31, (PLACES, 72), generator=random).to(torch.int32)
        halves = torch.arange(-(2**15), 2**15, dtype=torch.int16)[: 72 * 900].view(900, 72)
        host = halves.view(stored) if device == "cpu" else place.table(halves.view(stored))
        side = bits.view(torch.float32).to(device)
        arriving = torch.zeros(900, 72, device=device)
        evict = torch.arange(0, 2 * PLACES, 2).to(device)
        load = torch.arange(900).to(device)
        every = torch.arange(PLACES).to(device)
        host = host.clone() if device == "cpu" else host
        exchange_rows([host], [side], evict, every, [arriving], load, load)
        speedtorch.synchronize()
        return host.cpu().contiguous(), arriving.cpu()

    for actual, wanted in zip(exchanged(place.device), exchanged("cpu"), strict=True):
        assert_same_bytes(actual, wanted)

"""round_rows: float32 rows become numbers that 16 bits store, the same ones on every device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from reference import assert_same_bytes
from torch import Tensor

from speedtorch.ops.functions import round_rows

BITS = {torch.bfloat16: 8, torch.float16: 5}
DTYPES = pytest.mark.parametrize("dtype", BITS, ids=lambda dtype: str(dtype)[6:])
NO_ID = 2**63 - 1


def rounded(
    rows: Tensor, dtype: torch.dtype, ids: Tensor | None = None, key: tuple[int, int] = (1, 0)
) -> Tensor:
    """The rows, rounded at random."""
    ids = torch.arange(len(rows), device=rows.device) if ids is None else ids.to(rows.device)
    result = rows.clone()
    round_rows([result], ids, torch.tensor(key, device=rows.device), [BITS[dtype]], True)
    return result


def all_kinds(dtype: torch.dtype) -> Tensor:
    """Random bits, numbers around the smallest and the largest of the dtype, infinities, NaN."""
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (500, 64), generator=random).to(torch.int32)
    numbers = torch.randn(1500, 64, generator=random)
    small, large = numbers[:1000], numbers[1000:]
    small *= 2.0 ** torch.randint(-30, 0, small.shape, generator=random)
    if dtype == torch.float16:
        small *= 2.0**-10
    large *= torch.finfo(dtype).max / 2
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 65519.0, 65520.0, 1])
    return torch.cat([bits.view(torch.float32), small, large, odd.repeat(8)[None]])


def neighbours(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The stored numbers at and around each row, towards zero and away from it."""
    down = rows.to(dtype)
    beyond = down.float().abs() > rows.abs()
    # A number of 16 bits whose bits are one less is the next one towards zero.
    down = torch.where(beyond, down.view(torch.int16) - 1, down.view(torch.int16))
    exact = down.view(dtype).float() == rows
    up = torch.where(exact, down, down + 1).view(dtype).float()
    return down.view(dtype).float(), up


# A reference in whole numbers


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10, as its paper defines it."""
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def random_words(seed: int, step: int, row: int, field: int, columns: int) -> list[int]:
    """A word of 32 bits for each column."""
    full = 2**64 - 1
    key = (seed + 0x9E3779B97F4A7C15 * step) & full
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & full
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & full
    key ^= key >> 31
    words: list[int] = []
    for group in range(-(-columns // 4)):
        high = field << 48 | group
        counter = [row & 0xFFFFFFFF, row >> 32, high & 0xFFFFFFFF, high >> 32]
        words += philox(counter, [key & 0xFFFFFFFF, key >> 32])
    return words[:columns]


def test_the_references_generator_has_the_numbers_of_its_authors() -> None:
    """Known answers of Random123."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    every = [0xFFFFFFFF] * 4
    assert philox(every, every[:2]) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@DTYPES
def test_a_number_goes_up_where_its_random_word_is_below_its_distance(
    dtype: torch.dtype, device: str
) -> None:
    random = torch.Generator().manual_seed(2)
    rows = torch.randn(20, 6, generator=random)
    ids, key = torch.randint(2**40, (20,), generator=random).sort().values, (2**62 + 5, 11)
    both = [rows.clone().to(device), rows.clone().to(device)]
    on_device = torch.tensor(key, device=device)
    round_rows(both, ids.to(device), on_device, [0, BITS[dtype]], True)
    assert_same_bytes(both[0].cpu(), rows)
    down, up = neighbours(rows, dtype)
    for row, number in enumerate(ids.tolist()):
        for column, word in enumerate(random_words(*key, number, 1, 6)):
            low, high, exact = (tensor[row, column].double() for tensor in (down, up, rows))
            share = int((exact - low) / (high - low) * 2**32)
            expected = high if word < share else low
            assert both[1][row, column].item() == expected.item()
    assert on_device.tolist() == [key[0], key[1] + 1]


# What it promises


@DTYPES
def test_to_nearest_it_rounds_as_torch_does(dtype: torch.dtype, device: str) -> None:
    rows = all_kinds(dtype)
    result, key = rows.clone().to(device), torch.tensor([1, 0], device=device)
    round_rows([result], torch.arange(len(rows), device=device), key, [BITS[dtype]], False)
    expected, is_nan = rows.to(dtype).float(), rows.isnan()
    assert torch.equal(result.isnan().cpu(), is_nan)
    assert_same_bytes(result.cpu()[~is_nan], expected[~is_nan])


@DTYPES
def test_halves_between_two_numbers_go_to_the_even_one(dtype: torch.dtype, device: str) -> None:
    """Between each two neighbours that the dtype stores, subnormal ones included."""
    below = torch.arange(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(torch.int16).item())
    numbers = below.to(torch.int16).view(dtype).double()
    above = (below + 1).to(torch.int16).view(dtype).double()
    even = torch.where(below % 2 == 0, numbers, above)
    half = ((numbers + above) / 2).float()
    assert torch.equal(half.double() * 2, numbers + above)  # exact
    infinity = torch.tensor(float("inf"))
    rows = [half, half.nextafter(-infinity), half.nextafter(infinity)]
    for sign in (1, -1):
        result = [(sign * tensor)[:, None].to(device) for tensor in rows]
        key = torch.tensor([1, 0], device=device)
        ids = torch.arange(len(below), device=device)
        round_rows(result, ids, key, [BITS[dtype]] * 3, False)
        for found, expected in zip(result, (even, numbers, above), strict=True):
            assert_same_bytes(found.cpu()[:, 0], (sign * expected).float())


@DTYPES
def test_at_random_it_returns_a_neighboring_number(dtype: torch.dtype, device: str) -> None:
    rows = all_kinds(dtype)
    result = rounded(rows.to(device), dtype).cpu()
    down, up = neighbours(rows, dtype)
    within = rows.abs() <= torch.finfo(dtype).max
    assert bool(((result == down) | (result == up))[within].all())
    assert bool((result != down)[within].any()) and bool((result != up)[within].any())
    beyond = ~within & ~rows.isnan()
    assert_same_bytes(result[beyond], rows.to(dtype).float()[beyond])
    assert bool(result[rows.isnan()].isnan().all())


@DTYPES
def test_rounded_rows_do_not_change(dtype: torch.dtype, device: str) -> None:
    once = rounded(all_kinds(dtype).to(device), dtype)
    assert_same_bytes(rounded(once, dtype, key=(9, 9)), once)


@DTYPES
def test_a_device_has_the_bits_of_the_cpu(dtype: torch.dtype, device: str) -> None:
    rows = all_kinds(dtype)
    assert_same_bytes(rounded(rows.to(device), dtype).cpu(), rounded(rows, dtype))


def draws(dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    """Numbers and the distance of the two stored ones around."""
    spacing = torch.finfo(dtype).eps
    for share in (0.125, 0.3, 0.7001):
        yield 1.0 + share * spacing, spacing
        yield -3.0 - 2 * share * spacing, 2 * spacing
        if dtype == torch.float16:
            yield (17 + share) * 2.0**-24, 2.0**-24
            yield share * 2.0**-24, 2.0**-24


@DTYPES
@pytest.mark.parametrize(
    "count", [10**6, pytest.param(10**7, marks=pytest.mark.nightly)], ids=["million", "ten-million"]
)
def test_it_is_unbiased(count: int, dtype: torch.dtype, device: str) -> None:
    """The mean error is below three standard deviations of the mean."""
    for case, (value, spacing) in enumerate(draws(dtype)):
        rows = torch.full((count // 100, 100), value, device=device)
        value = rows[0, 0].item()  # of float32
        error = (rounded(rows, dtype, key=(case, 3)).double() - value) / spacing
        share = abs(value) / spacing % 1
        assert abs(error.mean().item()) < 3 * (share * (1 - share) / rows.numel()) ** 0.5


def test_every_row_column_field_step_and_seed_has_its_own_numbers() -> None:
    value = 1.0 + 2.0**-9
    rows = torch.full((64, 256), value)
    result = rounded(rows, torch.bfloat16) > value
    draws = [
        rounded(rows, torch.bfloat16, key=(2, 0)) > value,
        rounded(rows, torch.bfloat16, key=(1, 1)) > value,
        result.roll(1, 0),
        result.roll(1, 1),
        result.roll(4, 1),
    ]
    second = [rows.clone(), rows.clone()]
    round_rows(second, torch.arange(64), torch.tensor([1, 0]), [8, 8], True)
    assert torch.equal(second[0] > value, result)
    draws.append(second[1] > value)
    for draw in draws:  # of independent draws with a share of 1/4, 5/8 are alike
        assert 0.6 < float((draw == result).double().mean()) < 0.65


def test_a_row_has_its_numbers_wherever_it_is(device: str) -> None:
    rows = torch.randn(50, 10, generator=torch.Generator().manual_seed(4)).to(device)
    ids = torch.arange(50) * 1000
    chosen = torch.tensor([3, 4, 30, 49])
    result = rounded(rows, torch.bfloat16, ids)
    assert_same_bytes(rounded(rows[chosen], torch.bfloat16, ids[chosen]), result[chosen])


def test_places_of_no_row_do_not_change(device: str) -> None:
    rows = torch.full((4, 3), 1.0 + 2.0**-9, device=device)
    result = rounded(rows, torch.bfloat16, torch.tensor([-1, 5, NO_ID]))
    assert_same_bytes(result[[0, 2, 3]], rows[[0, 2, 3]])  # and what comes after the ids
    assert bool((result[1] != rows[1]).all())


def test_no_rows_and_no_columns_count_a_step(device: str) -> None:
    key, ids = torch.tensor([1, 0], device=device), torch.arange(2, device=device)
    round_rows([torch.zeros(2, 0, device=device)], ids, key, [8], True)
    round_rows([torch.zeros(0, 3, device=device)], ids[:0], key, [8], True)
    assert key.tolist() == [1, 2]

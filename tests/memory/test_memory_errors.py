"""Every argument of host memory and of its costs that does not fit, and its error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_calls import PretendedDriver
from test_address_range import CALLS as RANGE_CALLS
from test_cost_model import COSTS

import speedtorch
from speedtorch import empty, memory_kind, pin_memory_
from speedtorch.ops.functions import _ops

SPARSE = torch.eye(2).to_sparse()
NO_SIZE = "size: expected an int or a tuple of ints, got"
NO_DTYPE = "dtype: (expected a torch.dtype|quantized dtypes)"
NO_RANGE = "address range: no range begins at address 4096"
CASES: list[tuple[Callable[[], object], type[Exception] | tuple[type[Exception], ...], str]] = [
    *(
        (lambda size=size: empty(size), ValueError, "size: expected sizes of 0 or more, got .*-")
        for size in (-1, (3, -1), (-2, -2))
    ),
    *(
        (lambda size=size: empty(size), TypeError, NO_SIZE)
        for size in (None, 1.5, "ab", True, (2, 1.0))
    ),
    (lambda: empty((0, 1 << 40, 1 << 40)), ValueError, r"size: rows of \[0, 10995.*\] span .* - 1"),
    (lambda: empty((2**32,) * 2, memory="plain"), (MemoryError, ValueError), str(2**64 * 4)),
    (lambda: empty(3, dtype=None), TypeError, NO_DTYPE),
    (lambda: empty(3, dtype="float32"), TypeError, NO_DTYPE),
    (lambda: empty(3, dtype=torch.qint8), ValueError, NO_DTYPE),
    (
        lambda: empty(3, memory="pinned"),
        ValueError,
        "'auto', 'managed', 'registered' or 'plain', got 'pinned'",
    ),
    *(
        (lambda call=call, tensor=tensor: call(tensor), error, f"{call.__name__}: .*{message}")
        for call in (pin_memory_, memory_kind)
        for tensor, error, message in (
            (None, TypeError, "expected a tensor, got NoneType"),
            ([1.0], TypeError, "expected a tensor, got list"),
            (SPARSE, ValueError, r"must be dense \(strided\), got torch.sparse_coo"),
        )
    ),
    (lambda: pin_memory_(torch.zeros(3, device="meta")), ValueError, "must be on the CPU"),
    (lambda: _ops.host_empty(-5, 0, True), ValueError, "size must not be negative, got -5"),
    *(
        (lambda kind=kind: _ops.host_empty(5, kind, True), ValueError, f"kind must .* got {kind}")
        for kind in (-1, 3, 4)
    ),
    *(
        (lambda call=call: call(4096), ValueError, NO_RANGE)
        for call in (_ops.open_range, _ops.map_range, _ops.unmap_range, _ops.range_bytes)
    ),
    *(
        (lambda count=count: _ops.reserve_range(count, 0), ValueError, f"must be .*, got {count}")
        for count in (0, -1, 2**63 - 1)
    ),
    (
        lambda: _ops.set_costs(torch.zeros(3, dtype=torch.float64)),
        ValueError,
        r"costs has shape \[3\], expected \[30\]",
    ),
    (lambda: _ops.set_costs(torch.zeros(COSTS)), ValueError, "costs must be float64 on the CPU"),
    (lambda: speedtorch.explain("gather"), ValueError, "be one of pinned_gather, .*, got 'gather'"),
    (lambda: speedtorch.explain("pinned_gather", torch.zeros(3, 1)), TypeError, "index"),
    *(
        (lambda count=count: speedtorch.set_num_sms(count), ValueError, f"or None, got {count}")
        for count in (0, -3, 10**6)
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), CASES)
def test_what_does_not_fit_raises_and_takes_no_memory(
    driver: PretendedDriver, call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
    assert driver.named("host_register", "malloc_managed", *RANGE_CALLS) == []

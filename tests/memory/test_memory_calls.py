"""Host memory: what is asked of CUDA, in which order, and what a failure leaves behind."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from cuda_calls import INVALID_VALUE, PretendedDriver, mapping_of

from speedtorch import empty, memory_kind, pin_memory_, unpin_memory_
from speedtorch.ops.functions import _ops

# What is asked of CUDA, in which order


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_managed_memory_is_advised_for_the_current_gpu_before_the_first_touch(gpus: int) -> None:
    with PretendedDriver(*[True] * gpus) as driver:
        tensor = empty(3 << 20, dtype=torch.uint8, memory="managed")
        span = (tensor.data_ptr(), 3 << 20)
        assert driver.named("malloc_managed", "advise_preferred_host", "advise_accessed_by") == [
            ("malloc_managed", 3 << 20),
            ("advise_preferred_host", *span),
            ("advise_accessed_by", *span, 0),
        ]
        assert driver.advised_untouched == [True] * 2
        assert not tensor.any()
        assert driver.named("host_register") == []
        del tensor
        assert driver.named("free_managed") == [("free_managed", span[0])]
        assert driver.nothing_left()


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_registered_memory_is_unregistered_before_it_is_unmapped(
    driver: PretendedDriver, large: bool
) -> None:
    count = 64 << 20 if large else 100
    tensor = empty(count, dtype=torch.uint8, memory="registered")
    address = tensor.data_ptr()
    assert driver.named("host_register") == [("host_register", address, count, 0)]
    del tensor
    assert driver.named("host_unregister") == [("host_unregister", address)]
    assert driver.unregistered_mapped == [True]
    assert not large or mapping_of(address) is None


def test_a_gpu_without_concurrent_access_is_refused_by_name() -> None:
    with PretendedDriver(True, False) as driver:
        message = "concurrentManagedAccess, which GPU 1 does not support.*memory='registered'"
        with pytest.raises(RuntimeError, match=message):
            empty(10, memory="managed")
        assert driver.named("malloc_managed") == []
        assert driver.nothing_left()


def machine(monkeypatch: pytest.MonkeyPatch, *gpus: bool) -> PretendedDriver:
    """GPUs that torch and the library find; for each, if it has concurrentManagedAccess."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(_ops, "built_with_cuda", lambda: True)
    return PretendedDriver(*gpus)


@pytest.mark.parametrize(
    ("gpus", "kind"), [([True], "managed"), ([False], "registered"), ([], "plain")], ids=str
)
def test_auto_is_the_first_kind_that_every_gpu_can_use(
    monkeypatch: pytest.MonkeyPatch, gpus: list[bool], kind: str
) -> None:
    with machine(monkeypatch, *gpus) as driver, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert memory_kind(empty(10)) == kind
        assert driver.nothing_left()


def test_auto_falls_back_to_plain_memory_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(monkeypatch, False) as driver:
        driver.fail("host_register")
        with pytest.warns(UserWarning) as caught:
            tensor = empty(10)
        (warning,) = caught
        text = "not pinned.* pinning 40 bytes .*pretended reason 2"
        assert re.search(text, str(warning.message))
        assert warning.filename == __file__
        assert memory_kind(tensor) == "plain"
        assert driver.nothing_left()


# Every call may fail

PINNING = (
    r"pinning 4000 bytes .*pretended reason 2 \(CUDA error 2\).*available.*Load the data into "
)

# Every call that making managed memory for two GPUs consists of: name and number.
MANAGED_CALLS = pytest.mark.parametrize(
    ("call", "number"),
    [
        ("device_count", 1),
        ("concurrent_managed_access", 1),
        ("concurrent_managed_access", 2),
        ("malloc_managed", 1),
        ("advise_preferred_host", 1),
        ("advise_accessed_by", 1),
    ],
)


@MANAGED_CALLS
def test_a_failed_managed_allocation_is_explained_and_freed(
    stats: Callable[[], dict[str, int]], call: str, number: int
) -> None:
    with PretendedDriver(True, True) as driver:
        driver.fail(call, number)
        with pytest.raises(RuntimeError) as caught:
            empty(1000, memory="managed")
        assert driver.nothing_left()
        assert set(stats().values()) == {0}
        assert memory_kind(empty(1000, memory="managed")) == "managed"
    for part in (r"\b4000 bytes", r"pretended reason 2 \(CUDA error 2\)", r"memory='registered'"):
        assert re.search(part, str(caught.value))


def test_no_call_of_the_library_escapes_the_tests_above() -> None:
    with PretendedDriver(True, True) as driver:
        empty(1000, memory="managed")
    made = {name for name, *_ in driver.calls}
    failed = {name for name, _ in MANAGED_CALLS.args[1]}
    # Whether a graph is captured: asked for where torch has CUDA, and no reason to fail.
    made -= {"get_device", "stream_is_capturing", "relax_capture"}
    assert made == failed | {"free_managed"}


def test_a_failed_registration_frees_everything(
    driver: PretendedDriver, stats: Callable[[], dict[str, int]]
) -> None:
    driver.fail("host_register", 1)
    with pytest.raises(RuntimeError, match=PINNING):
        empty(1000, memory="registered")
    assert driver.nothing_left()
    assert mapping_of(driver.named("host_register")[0][1]) is None
    assert set(stats().values()) == {0}
    assert memory_kind(empty(1000, memory="registered")) == "registered"


def test_a_failure_to_pin_does_not_change_the_tensor(
    driver: PretendedDriver, stats: Callable[[], dict[str, int]]
) -> None:
    tensor = torch.ones(1000)
    driver.fail("host_register", 1, 2)
    with pytest.raises(RuntimeError, match=PINNING):
        pin_memory_(tensor)
    assert driver.nothing_left()
    assert (memory_kind(tensor), set(stats().values())) == ("plain", {0})
    with pytest.raises(ValueError, match="not pinned with pin_memory_"):
        unpin_memory_(tensor)
    assert memory_kind(pin_memory_(tensor)) == "registered"


@pytest.mark.parametrize("call", ["pointer_kind", "relax_capture", "get_device"])
def test_a_failed_question_is_no_failure_and_is_cleared(driver: PretendedDriver, call: str) -> None:
    driver.fail(call)
    tensor = pin_memory_(torch.ones(1000))
    assert driver.pending == 0
    assert (memory_kind(tensor), memory_kind(torch.ones(3))) == ("registered", "plain")
    assert driver.pending == 0
    unpin_memory_(tensor)
    empty(1000, memory="managed")
    assert driver.pending == 0


@pytest.mark.parametrize("call", ["device_count", "concurrent_managed_access"])
def test_auto_clears_the_error_of_a_driver_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with PretendedDriver(True) as driver:
        driver.fail(call)
        assert memory_kind(empty(10)) == "plain"
        assert driver.nothing_left()


@pytest.mark.parametrize("kind", ["registered", "managed"])
def test_a_failure_to_give_back_is_cleared_and_memory_is_forgotten(
    stats: Callable[[], dict[str, int]], kind: str
) -> None:
    with PretendedDriver(True) as driver:
        tensor = empty(1000, memory=kind)
        driver.fail("free_managed", error=INVALID_VALUE)
        driver.fail("host_unregister", error=INVALID_VALUE)
        del tensor
        assert driver.pending == 0
        assert set(stats().values()) == {0}


@pytest.mark.parametrize("error", [35, 100])
@pytest.mark.parametrize("kind", ["managed", "registered"])
def test_without_a_gpu_the_message_says_so(driver: PretendedDriver, kind: str, error: int) -> None:
    driver.fail("device_count", error=error)
    driver.fail("host_register", error=error)
    with pytest.raises(RuntimeError, match="needs a GPU. No GPU or no driver.*Use memory='plain'"):
        empty(3, memory=kind)

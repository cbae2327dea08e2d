"""Each private part of torch that this package relies on is as it needs it; tests have its name."""

from __future__ import annotations

import gc
import inspect
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU
from torch import Tensor, distributed, nn
from torch.autograd import forward_ad
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from speedtorch import torch_internals
from speedtorch.nn.row_module import RowModule


class RecordingTensor(Tensor):
    """A tensor that records the functions that are called with it."""

    functions: list[object]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cls.functions.append(func)
        with torch_internals.as_plain():
            return func(*args, **(kwargs or {}))


class RecordingMode(torch_internals.TorchDispatchMode):
    """Records the ops that are called in it."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


class RecordingDispatchTensor(Tensor):
    """A tensor without memory that records the ops that are called with it."""

    ops: list[Any]

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:  # type: ignore[override]
        cls.ops.append(func)
        return torch.ones(2)


@pytest.fixture
def recording_tensor() -> Tensor:
    """A recording tensor without recorded functions."""
    RecordingTensor.functions = []
    return torch.zeros(3, 2).as_subclass(RecordingTensor)


@pytest.fixture
def without_memory() -> Tensor:
    """A tensor without memory and without recorded ops."""
    RecordingDispatchTensor.ops = []
    return torch_internals.tensor_without_memory(
        RecordingDispatchTensor, (2**50, 3), dtype=torch.float16
    )


def test_every_part_has_a_test() -> None:
    text = Path(__file__).read_text().split("\n", 1)[1]
    assert [name for name in torch_internals.__all__ if f"torch_internals.{name}" not in text] == []
    own = {name for name, value in vars(torch_internals).items() if not inspect.ismodule(value)}
    imported = {"Any", "Callable", "CodeType", "Counter", "ExitStack", "Iterable", "Iterator"}
    imported |= {"NamedTuple", "Node", "Optimizer", "OrderedDict", "Sequence", "StorageWeakRef"}
    imported |= {"Tensor", "TypeVar", "annotations", "cache", "cast", "contextmanager", "partial"}
    imported |= {"suppress", "temporarily_clear_interpreter_stack", "timedelta", "wraps"}
    assert {name for name in own if name[0] != "_"} == {*imported, *torch_internals.__all__}


def test_as_plain_and_version_getter(recording_tensor: Tensor) -> None:
    with torch_internals.as_plain():
        assert recording_tensor.shape == (3, 2) and recording_tensor + 1 is not None
    assert RecordingTensor.functions == []
    assert torch_internals.version_of(recording_tensor) == 0
    assert RecordingTensor.functions == [torch_internals.VERSION_GETTER]


CONTEXTS: dict[str, tuple[Callable[[], Any], Callable[[], Any], object, object]] = {
    "as_plain": (torch_internals.torch_function_is_on, torch_internals.as_plain, True, False),
    "profile": (
        torch_internals.is_profiling,
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        False,
        True,
    ),
    "dual_level": (torch_internals.is_forward_mode, forward_ad.dual_level, False, True),
    "saved_tensors_hooks": (
        lambda: torch_internals.top_saved_tensors_hooks(True) is None,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda given: given, lambda given: given),
        True,
        False,
    ),
    "without_autograd": (
        lambda: (torch.ones(2, requires_grad=True) * 2).requires_grad,
        torch_internals.without_autograd,
        True,
        False,
    ),
}


@pytest.mark.parametrize(("found", "context", "outside", "inside"), CONTEXTS.values(), ids=CONTEXTS)
def test_contexts(
    found: Callable[[], Any], context: Callable[[], Any], outside: object, inside: object
) -> None:
    assert found() == outside
    with context():
        assert found() == inside
    assert found() == outside


def test_version_of() -> None:
    tensor = torch.zeros(3)
    view, before = tensor[1:], torch_internals.version_of(tensor)
    view.add_(1)
    torch_internals.increment_versions((tensor,))
    assert torch_internals.version_of(tensor) == torch_internals.version_of(view) == before + 2


def test_base_of() -> None:
    tensor = torch.ones(2, 3, requires_grad=True)
    for view in (tensor.view(6), tensor.unbind()[0], tensor.view(6)[1:]):
        assert torch_internals.base_of(view) is tensor
    for other in (tensor, tensor * 2, tensor.data, tensor.detach()):
        assert torch_internals.base_of(other) is None


def test_storage_id() -> None:
    tensor = torch.zeros(4)
    number = torch_internals.storage_id(tensor.untyped_storage())
    for same in (tensor, tensor[1:], tensor.detach(), tensor.view(torch.int32)):
        assert torch_internals.storage_id(same.untyped_storage()) == number
    storage = tensor.untyped_storage()
    for nbytes in (0, 1 << 16):  # whatever memory it has
        storage.resize_(nbytes)
        assert torch_internals.storage_id(storage) == number
    assert torch_internals.storage_id(tensor.clone().untyped_storage()) != number


def test_tensor_without_memory_and_no_torch_function(
    without_memory: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, made = RecordingDispatchTensor, without_memory
    assert type(made) is kind and made.size() == (2**50, 3) and made.dtype == torch.float16
    assert made.layout == torch.strided and made.is_cpu and not made.is_meta
    with torch.inference_mode():
        assert not torch_internals.tensor_without_memory(kind, (2, 3)).is_inference()
    monkeypatch.setattr(kind, "__torch_function__", torch_internals.no_torch_function)
    assert type(torch.mul(made, 2)) is Tensor
    assert kind.ops == [torch.ops.aten.mul.Tensor]


def test_forbid_data_pointer(without_memory: Tensor) -> None:
    torch_internals.forbid_data_pointer(without_memory)
    for use in (
        lambda: without_memory.data_ptr(),
        lambda: torch.utils.dlpack.to_dlpack(without_memory),
    ):
        with pytest.raises(RuntimeError, match="data pointer"):
            use()


def test_tensor_of_class() -> None:
    class Named(Tensor):
        pass

    rows = torch.ones(3)
    made = torch_internals.tensor_of_class(Named, rows)
    assert type(made) is Named and made.data_ptr() == rows.data_ptr()


def test_written_arguments() -> None:
    of = torch_internals.written_arguments
    assert of(torch.ops.aten.add_.Tensor) == {"self": 0}
    assert of(torch.ops.aten.add.out) == {"out": 3}
    assert of(torch.ops.aten.view.default) == {}
    assert of(torch.ops.aten._foreach_add_.Scalar) == {"self": 0}
    assert of(torch.ops.c10d.broadcast_.default) == {"tensors": 0}
    assert of(torch.ops.aten.native_batch_norm.default) == {"running_mean": 3, "running_var": 4}


def test_set_versions() -> None:
    weight, other = nn.Parameter(torch.ones(3, 3)), torch.zeros(2)
    saved = weight.t()
    result = (saved * saved).sum()
    torch_internals.set_versions((weight, other), (7, 1 << 31))
    assert [torch_internals.version_of(t) for t in (weight, saved, other)] == [7, 7, 1 << 31]
    with pytest.raises(RuntimeError, match="is at version 7; expected version 0"):
        result.backward(retain_graph=True)
    torch_internals.set_versions((weight,), (0,))
    result.backward()
    assert weight.grad is not None


def test_split_with_versions() -> None:
    tensor = torch.arange(12.0).view(6, 2)
    parts = torch_internals.split_with_versions(tensor, [1, 0, 5])
    assert [len(part) for part in parts] == [1, 0, 5]
    before = [torch_internals.version_of(part) for part in (tensor, *parts)]
    parts[2].mul_(-1)
    after = [torch_internals.version_of(part) for part in (tensor, *parts)]
    assert [new - old for new, old in zip(after, before, strict=True)] == [0, 0, 0, 1]
    assert tensor[1:].max() < 0 < tensor[0].max()


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_values_and_sparse_indices(coalesced: bool) -> None:
    indices, values = torch.tensor([[2, 2 + coalesced]]), torch.ones(2, 4)
    tensor = torch.sparse_coo_tensor(
        indices, values, (5, 4), is_coalesced=coalesced, check_invariants=False
    )
    assert torch_internals.sparse_values(tensor).data_ptr() == values.data_ptr()
    assert torch_internals.sparse_indices(tensor).data_ptr() == indices.data_ptr()


def test_foreach() -> None:
    """Operations on lists, also on tensors that broadcast."""
    ones, threes = [torch.ones(2, 3), torch.ones(1)], [torch.full((2, 1), 3.0), torch.tensor([3.0])]
    for found, expected in (
        (torch_internals.foreach_add(ones, threes, alpha=2), 7),
        (torch_internals.foreach_mul(ones, threes), 3),
        (torch_internals.foreach_mul(ones, [torch.tensor(5.0), torch.tensor(5.0)]), 5),
        (torch_internals.foreach_neg(ones), -1),
        (torch_internals.foreach_sqrt([tensor + 1 for tensor in threes]), 2),
    ):
        assert [tensor.unique().tolist() for tensor in found] == [[expected]] * 2
    torch_internals.foreach_add_(ones, 1)
    torch_internals.foreach_addcdiv_(ones, [tensor * 6 for tensor in ones], threes)
    assert [tensor.unique().tolist() for tensor in ones] == [[6.0]] * 2
    torch_internals.foreach_addcdiv_(ones, [t.clone() for t in ones], threes, [-1.0, -2.0])
    assert [tensor.unique().tolist() for tensor in ones] == [[4.0], [2.0]]
    halves = [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)]
    torch_internals.foreach_copy_(halves, ones)
    assert [tensor.unique().tolist() for tensor in halves] == [[4.0], [2.0]]


@pytest.mark.parametrize("coalesced", [False, True])
def test_sparse_coo(coalesced: bool) -> None:
    """The tensor that torch.sparse_coo_tensor makes, without its warning."""
    indices, values = torch.tensor([[0, 2]]), torch.ones(2, 3)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made = torch_internals.sparse_coo(indices, values, (4, 3), is_coalesced=coalesced)
    finally:
        torch.set_warn_always(always)
    assert (made.layout, made.shape) == (torch.sparse_coo, (4, 3))
    assert made.is_coalesced() is coalesced
    assert torch_internals.sparse_values(made).data_ptr() == values.data_ptr()
    assert made.to_dense().tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3, [0.0] * 3]


def test_schema_name_and_torch_dispatch_mode_and_dispatch_modes() -> None:
    with RecordingMode() as mode, RecordingMode():
        torch.zeros(3)
        assert torch_internals.dispatch_modes() == 2
    assert list(map(torch_internals.schema_name, mode.ops)) == ["aten::zeros"]
    assert torch_internals.dispatch_modes() == 0


def test_tree_leaves_and_tree_map_and_tree_flatten() -> None:
    given = ((1, {"a": [2, None]}), 3)
    leaves, form = torch_internals.tree_flatten(given)
    assert torch_internals.tree_leaves(given) == leaves == [1, 2, None, 3]
    assert torch_internals.tree_flatten(((5, {"a": [6, 7]}), 8))[1] == form
    others = ((1, {"b": [2, None]}), 3), ((1, {"a": [2], "c": None}), 3)
    assert all(torch_internals.tree_flatten(other)[1] != form for other in others)
    twice = torch_internals.tree_map(lambda leaf: leaf and 2 * leaf, given)
    assert twice == ((2, {"a": [4, None]}), 6)


def test_tensors_are_keys_by_themselves_and_are_not_kept() -> None:
    known = torch_internals.WeakTensorKeyDictionary()
    one, like = torch.ones(2), torch.ones(2)
    known[one] = 1
    assert known.get(one) == 1 and known.get(like) is None  # type: ignore[no-untyped-call]
    del one
    gc.collect()
    assert len(known) == 0


def test_a_weak_reference_to_a_tensor_that_a_graph_alone_keeps() -> None:
    """What it gives is the object that the graph had, and lives on without the graph."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.note = "kept"  # type: ignore[attr-defined]
    loss, reference = parameter.sum(), torch_internals.TensorWeakRef(parameter)
    del parameter
    gc.collect()
    found: Any = reference()
    del loss
    assert found.note == "kept" and reference() is found
    del found
    assert reference() is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_empty_of_other_dtype(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    kept = parameter.sum()
    parameter.data = torch_internals.empty_of_other_dtype(dtype, parameter.device)
    parameter.data = torch.zeros(5, 2, dtype=dtype)
    parameter.sum().backward()
    assert parameter.grad is not None and parameter.grad.shape == (5, 2)
    del kept


def test_current_backward() -> None:
    found = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: found.append(torch_internals.current_backward()))
    for _ in range(2):
        (leaf * 2).sum().backward()
    assert torch_internals.current_backward() == -1
    assert -1 not in found and len(set(found)) == 2


def test_call_after_backward() -> None:
    found: list[object] = []
    leaf = torch.ones(1, requires_grad=True)

    def hook(_: Tensor) -> None:
        torch_internals.call_after_backward(lambda: found.append(leaf.grad))
        found.append("hook")

    with pytest.raises(RuntimeError, match="backward pass"):
        torch_internals.call_after_backward(lambda: None)
    leaf.register_hook(hook)
    (leaf * 2).sum().backward()
    assert found == ["hook", leaf.grad] and leaf.grad is not None
    leaf.detach().requires_grad_().sum().backward()
    assert len(found) == 2


def test_outside_modes_and_is_tracing() -> None:
    def function(tensor: Tensor) -> Tensor:
        with torch_internals.outside_modes():
            found.append(torch_internals.is_tracing())
            torch.ones(1)
        found.append(torch_internals.is_tracing())
        return tensor + 1

    found: list[bool] = []
    with RecordingMode() as mode, torch_internals.outside_modes():
        torch.ones(1)
    assert mode.ops == [] and not torch_internals.is_tracing()
    traced = torch.jit.trace(function, torch.ones(1), check_trace=False)
    assert found == [False, True] and "aten::ones" not in str(traced.graph)


@NEEDS_GPU
def test_current_stream() -> None:
    side = torch.cuda.Stream()
    for device in (torch.device("cuda"), torch.device("cuda", torch.cuda.current_device())):
        assert torch_internals.current_stream(device) == torch.cuda.current_stream()
        with torch.cuda.stream(side):
            assert torch_internals.current_stream(device) == side
            assert torch_internals.current_stream(device) is torch_internals.current_stream(device)


@NEEDS_GPU
def test_capturing() -> None:
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    graph, value = torch.cuda.CUDAGraph(), torch.ones(3, device="cuda")
    with torch_internals.capturing(graph, side):
        value += 1
    graph.replay()
    assert value.tolist() == [2, 2, 2]
    for fails in (lambda: side.wait_stream(other), lambda: 1 // 0):
        with (
            pytest.raises((RuntimeError, ZeroDivisionError)),
            torch_internals.capturing(torch.cuda.CUDAGraph(), side),
        ):
            fails()
        torch.cuda.MemPool()  # ends the process where the allocator is within a capture
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_storage_uses_and_storage_references() -> None:
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()
    reference = torch_internals.storage_reference(storage)
    before = torch_internals.storage_uses(storage)
    views = [tensor[1:], tensor.detach()]
    assert torch_internals.storage_uses(storage) == before + len(views)
    found = torch_internals.storage_of(reference)
    assert found is not None
    assert torch_internals.storage_id(found) == torch_internals.storage_id(storage)
    del found, views
    assert torch_internals.storage_uses(storage) == before
    del storage, tensor
    gc.collect()
    assert torch_internals.storage_of(reference) is None


def test_is_resizable() -> None:
    storage = torch.zeros(4).untyped_storage()
    assert torch_internals.is_resizable(storage)
    storage.share_memory_()
    assert storage.resizable()
    assert not torch_internals.is_resizable(storage)
    assert not torch_internals.is_resizable(torch.from_numpy(np.zeros(4)).untyped_storage())


def test_storage_at() -> None:
    owner = torch.arange(8.0)
    storage = torch_internals.storage_at(owner.data_ptr() + 8, owner.device, 16)
    assert storage.nbytes() == 16 and not storage.resizable()
    vars(storage)["host"] = owner
    view = torch.empty(0).set_(storage, 1, (3,), (1,))  # type: ignore[call-overload]
    view[0] = 77.0
    assert owner.tolist() == [0, 1, 2, 77, 4, 5, 6, 7]
    alive = weakref.ref(owner)
    del owner, storage
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.data = view
    del view
    gc.collect()
    assert alive() is not None and parameter.tolist() == [77, 4, 5]  # torch keeps the attribute
    del parameter
    gc.collect()
    assert alive() is None


def test_is_transformed_and_is_batched() -> None:
    found = []

    def function(tensor: Tensor) -> Tensor:
        found.append((torch_internals.is_transformed(), torch_internals.is_batched(tensor)))
        return tensor.sum()

    function(torch.ones(2))
    torch.func.vmap(function)(torch.ones(3, 2))
    torch.func.grad(function)(torch.ones(2))
    assert found == [(False, False), (True, True), (True, False)]


def test_unwrapped_returns_the_tensor_of_a_transform() -> None:
    given, found = torch.ones(3, 2), []

    def function(tensor: Tensor) -> Tensor:
        assert torch_internals.is_wrapped(tensor)
        while torch_internals.is_wrapped(tensor):
            tensor = torch_internals.unwrapped(tensor)
        found.append(tensor.data_ptr() == given.data_ptr())
        return given.sum()

    torch.func.vmap(function)(given)
    torch.func.grad(lambda tensor: function(tensor) + tensor.sum())(given)
    assert found == [True, True] and not torch_internals.is_wrapped(given)


def test_below_autograd() -> None:
    keys = torch_internals.below_autograd
    assert keys.has(torch._C.DispatchKey.CPU)
    assert not keys.has(torch._C.DispatchKey.AutogradCPU)


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_forward_hooks(kind: str) -> None:
    module = nn.Identity()
    assert not any(torch_internals.forward_hooks(module))
    handle = getattr(module, kind)(lambda *_: None)
    assert any(torch_internals.forward_hooks(module))
    handle.remove()
    assert not any(torch_internals.forward_hooks(module))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks(kind: str) -> None:
    parameter = nn.Parameter(torch.ones(1))
    assert not any(torch_internals.gradient_hooks(parameter))
    handle = getattr(parameter, kind)(lambda _: None)
    assert any(torch_internals.gradient_hooks(parameter))
    handle.remove()
    assert not any(torch_internals.gradient_hooks(parameter))


def test_active_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = nn.parallel.DistributedDataParallel
    assert torch_internals.active_data_parallel() is None
    wrapper = object.__new__(kind)
    with wrapper._inside_ddp_forward():
        assert torch_internals.active_data_parallel() is wrapper
    assert torch_internals.active_data_parallel() is None
    for name in ("parameters_to_ignore", "gradient_as_bucket_view"):
        assert f"self.{name} = " in inspect.getsource(kind.__init__)


@pytest.mark.usefixtures("process_group")
def test_composable_data_parallel() -> None:
    mesh = init_device_mesh("cpu", (1,))
    layers = [nn.Linear(2, 2) for _ in range(2)]
    for layer, wrap in zip(layers, (fully_shard, replicate), strict=True):
        wrap(layer, mesh=mesh)
    found = torch_internals.composable_data_parallel()  # also modules of other tests' garbage
    of_these = [(layers.index(each), *rest) for each, *rest in found if each in layers]
    assert of_these == [(0, "fully_shard", [0]), (1, "replicate", [0])]


def test_next_node_number_and_number_of_node() -> None:
    values = torch.ones(2, requires_grad=True)
    first = torch_internals.next_node_number()
    made = [values * 2, values * 3]
    numbers = [torch_internals.number_of_node(tensor.grad_fn) for tensor in made]
    assert first <= numbers[0] < numbers[1] < torch_internals.next_node_number()
    order: list[int] = []
    for tensor, number in zip(made, numbers, strict=True):
        tensor.grad_fn.register_prehook(lambda _, number=number: order.append(number))
    (made[0] + made[1]).sum().backward()
    assert order == numbers[::-1]


def test_not_compiled() -> None:
    function: Callable[[Tensor], Tensor] = torch_internals.not_compiled(lambda tensor: tensor + 1)

    def whole(tensor: Tensor) -> Tensor:
        return function(2 * tensor)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="number of rows changes"):
        torch.compile(whole, backend="eager", fullgraph=True)(torch.ones(1))
    torch.compiler.reset()
    assert torch.compile(whole, backend="eager")(torch.ones(1)) == 3
    torch.compiler.reset()  # the next call with fullgraph would find this one's compiled frame


def test_never_compiled() -> None:
    made = [
        torch_internals.never_compiled(
            lambda tensor, more=more: tensor + more, "it is asked not to"
        )
        for more in range(20)
    ]

    def whole(tensor: Tensor) -> Tensor:
        for function in made:
            tensor = function(2 * tensor)
        return tensor

    with pytest.raises(torch._dynamo.exc.Unsupported, match="it is asked not to"):
        torch.compile(whole, backend="eager", fullgraph=True)(torch.ones(1))
    torch.compiler.reset()
    assert torch.equal(torch.compile(whole, backend="eager")(torch.ones(1)), whole(torch.ones(1)))
    test_not_compiled()  # which the others leave as it is


def test_call_with_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "_queued_calls", [])
    torch_internals.call_with_first_gpu(lambda: calls.append(1))
    assert len(calls) == int(torch.cuda.is_initialized())
    assert len(torch.cuda._queued_calls) == 1 - len(calls)


def test_methods_of_modules() -> None:
    names = set(torch_internals.METHODS_OF_MODULES)
    assert names <= set(vars(RowModule))
    # torch knows these, and no other that we have by chance.
    private = {name for name in vars(RowModule) if name[0] == "_" and hasattr(nn.Module, name)}
    assert {name for name in private if name[:2] != "__"} == names - {"__prepare_scriptable__"}

    class Refuses(nn.Module):
        def __prepare_scriptable__(self) -> None:
            raise NotImplementedError

    with pytest.raises(NotImplementedError):
        torch.jit.script(Refuses())


def test_members_of() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    assert torch_internals.members_of(module) == ({}, {"0": module[0], "1": module[1]})
    parameters, modules = torch_internals.members_of(module[0])
    assert parameters["weight"] is module[0].weight
    assert parameters["bias"] is None and modules == {}


def test_buffers_of() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    module[0].register_buffer("none", None)
    names = {"running_mean", "running_var", "num_batches_tracked", "none"}
    assert torch_internals.buffers_of(module) == {}
    found = torch_internals.buffers_of(module[0])
    assert found.keys() == names and found["none"] is None
    assert found["running_mean"] is module[0].running_mean


def test_unsaved_buffers_of() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("table", torch.ones(2), persistent=False)
    assert torch_internals.unsaved_buffers_of(module) == {"table"}


@pytest.mark.usefixtures("process_group")
def test_fully_sharded() -> None:
    module = nn.Sequential(nn.Linear(2, 3))
    assert torch_internals.fully_sharded(module) == []
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    weight, bias = torch_internals.fully_sharded(module)
    for (parameter, data), of_module in zip((weight, bias), module.parameters(), strict=True):
        assert parameter is of_module
        assert data.data_ptr() == parameter.to_local().data_ptr()


def test_running_calls() -> None:
    found = []

    class Inner(nn.Module):
        def forward(self, again: int) -> None:
            found.append(torch_internals.running_calls())
            if again:
                self(again - 1)

    inner = Inner()
    inner.register_forward_pre_hook(lambda *_: None)
    outer = nn.Sequential(inner)
    outer(1)
    assert found == [{outer: 1, inner: 1}, {outer: 1, inner: 2}]
    assert not torch_internals.running_calls()


def test_is_functional_call() -> None:
    found = []

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found.append(torch_internals.is_functional_call())
            return super().forward(x)

    layer = Layer(2, 2)
    torch.func.functional_call(layer, {"bias": torch.ones(2)}, (torch.ones(2),))
    layer(torch.ones(2))
    assert found == [True, False]


def test_replace_truncated_normal() -> None:
    given: list[object] = []

    def replaced(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        given.append((*args, *kwargs.items()))
        return torch_internals.plain_truncated_normal(tensor, *args, **kwargs)

    before = nn.init._no_grad_trunc_normal_
    torch_internals.replace_truncated_normal(replaced)
    try:
        found = nn.init.trunc_normal_(torch.zeros(100), std=0.5, a=-0.1, b=0.2)
    finally:
        torch_internals.replace_truncated_normal(before)
    assert given == [(0.0, 0.5, -0.1, 0.2, ("generator", None))]
    assert -0.1 <= found.min() < found.max() <= 0.2


def test_foreach_types_are_those_that_are_clipped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Tensor):
        """A class that torch does not know."""

    calls: list[int] = []
    norm = torch._foreach_norm

    def counted(tensors: list[Tensor], *args: Any) -> list[Tensor]:
        calls.append(len(tensors))
        return norm(tensors, *args)

    monkeypatch.setattr(torch, "_foreach_norm", counted)
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for known in (False, True):
        for param in parameters:
            param.grad = torch.ones(2)
        with torch_internals.as_plain():
            parameters[0].grad = torch.ones(2).as_subclass(Own)
        if known:
            torch_internals.FOREACH_TYPES.append(Own)
        try:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        finally:
            if known:
                torch_internals.FOREACH_TYPES.remove(Own)
    assert calls == [3]


def test_is_pointwise_and_is_view() -> None:
    aten = torch.ops.aten
    assert torch_internals.is_pointwise(aten.mul_.Tensor)
    assert not torch_internals.is_pointwise(aten.sum.default)
    assert torch_internals.is_view(aten.select.int)
    assert not any(map(torch_internals.is_view, (aten.mul_.Tensor, aten.index.Tensor)))


def test_replace_step_replaces_inside_the_calls_of_hooks() -> None:
    class Base(torch.optim.Optimizer):
        """An optimizer whose steps are noted."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            calls.append("base")

    class Own(Base):
        """Calls the step of its base class."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            calls.append("own")

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any) -> Any:
            calls.append("replaced")
            return function(*args)

        return step

    calls: list[str] = []
    optimizer = Own([nn.Parameter(torch.ones(1))], {"lr": 1.0})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # keeps the function
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    assert torch_internals.step_functions(Own) == [Own, Base]
    made = torch_internals.replace_step(Own, noted)
    assert torch_internals.replace_step(Own, noted) is made
    optimizer.step()
    assert calls == ["pre", "replaced", "base", "own", "post"]
    assert torch_internals.step_without_hooks(Own) is made and scheduler is not None
    calls.clear()
    torch_internals.replace_step(Base, noted)  # of which there is no optimizer: no hooks around it
    optimizer.step()
    assert calls == ["pre", "replaced", "replaced", "base", "own", "post"]


class Seen(torch.optim.SGD):
    """Notes who steps it, with what gradient, and its attributes."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.seen: list[tuple[Any, float, set[str]]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (parameter,) = self.param_groups[0]["params"]
        stepping = torch_internals.stepping_grad_scaler()
        self.seen.append((stepping, parameter.grad.item(), set(vars(self))))


def test_set_by_grad_scaler() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = Seen([parameter], fused=True)
    before = set(vars(optimizer))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    # "_speedtorch" if a module of ours was made in this process
    assert optimizer.seen[0][2] - before - {"_speedtorch"} == {*torch_internals.SET_BY_GRAD_SCALER}


def test_host_grad_scaler_and_stepping_grad_scaler() -> None:
    parameter = nn.Parameter(torch.tensor(2.0))
    optimizer = Seen([parameter])
    scaler = torch_internals.HostGradScaler("cpu", init_scale=4.0)
    for factor in (3.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale(factor * parameter).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.step()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    stepping, infinite = torch_internals.SteppingScaler(scaler, waits=True), float("inf")
    seen = [found[:2] for found in optimizer.seen]
    assert seen == [(stepping, 3.0), (None, infinite), (None, infinite)]
    assert scaler.get_scale() == 2.0


@NEEDS_GPU
def test_stepping_grad_scaler_where_gradients_are_on_the_host() -> None:
    seen = []

    class Lucky(torch.amp.GradScaler):
        """Is taken for torch's, which may find infinite gradients where there are none."""

        def _unscale_grads_(self, optimizer: Any, factor: Tensor, found: Tensor, _: bool) -> Any:
            return super()._unscale_grads_(optimizer, factor.cpu(), found.cpu(), False)

    for device in ("cpu", "cuda"):
        for kind in (Lucky, torch_internals.HostGradScaler):
            parameter = nn.Parameter(torch.tensor(2.0, device=device))
            scaler = kind()
            scaler.scale(3.0 * parameter.cuda()).backward()
            optimizer = Seen([parameter])
            scaler.step(optimizer)
            stepping = optimizer.seen[0][0]
            seen.append(stepping is not None and stepping.waits)
    assert seen == [False, True, True, True]


def test_attributes_without_hooks_and_step_without_hooks_and_hooks() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    calls: list[object] = []
    assert torch_internals.load_hooks(optimizer) == 0
    for when in ("pre", "post"):
        for what in ("step", "state_dict", "load_state_dict"):
            getattr(optimizer, f"register_{what}_{when}_hook")(lambda *_: calls.append(_))
    assert torch_internals.load_hooks(optimizer) == 1
    assert [len(vars(optimizer)[name]) for name in torch_internals.STEP_HOOKS] == [1, 1]
    copied = object.__new__(torch.optim.SGD)
    vars(copied).update(torch_internals.attributes_without_hooks(optimizer))
    parameter.grad = torch.ones(1)
    copied.step()
    copied.load_state_dict(copied.state_dict())
    assert parameter.item() == 0 and calls == []
    torch_internals.step_without_hooks(torch.optim.SGD)(optimizer)
    assert parameter.item() == -1 and calls == []
    optimizer.step()
    assert len(calls) == 2


def test_found_inf_lets_an_optimizer_skip_a_step_where_can_skip_says_so() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    assert not torch_internals.can_skip(torch.optim.Adam([parameter], fused=False))
    optimizer = torch.optim.Adam([parameter], lr=1.0, fused=True)
    assert torch_internals.can_skip(optimizer)
    setattr(optimizer, torch_internals.FOUND_INF, torch.ones(()))
    optimizer.step()
    assert parameter.item() == 1
    delattr(optimizer, torch_internals.FOUND_INF)
    optimizer.step()
    assert parameter.item() < 1


def test_free_failed_backward_frees_the_graph(device: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise MemoryError

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor, token: object) -> torch.Tensor:
            ctx.token = token
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradient, None

    class Token:
        pass

    token = Token()
    gone = weakref.ref(token)
    values = torch.ones(2, device=device, requires_grad=True)
    loss = Kept.apply(values, token).sum() + Fails.apply(values).sum()
    with pytest.raises(MemoryError):
        loss.backward()
    del loss, token
    torch_internals.free_failed_backward(torch.device(device))
    assert gone() is None


def test_ignored_by_data_parallel() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module._ddp_params_and_buffers_to_ignore = ["0.bias"]
    torch_internals.ignored_by_data_parallel(module, ["1.weight", "0.bias"])
    assert module._ddp_params_and_buffers_to_ignore == ["0.bias", "1.weight"]


def test_timeout_of(process_group: timedelta) -> None:
    assert torch_internals.timeout_of(distributed.group.WORLD) == process_group


def test_group_like(process_group: timedelta) -> None:
    every = distributed.group.WORLD
    made = [torch_internals.group_like(every) for _ in range(2)]
    names = [group.group_name for group in made]
    assert names == [f"{every.group_name} copy {number}" for number in range(2)]
    for group in made:
        assert torch_internals.timeout_of(group) == process_group
        assert distributed.get_process_group_ranks(group) == [0]
        distributed.all_reduce(numbers := torch.ones(2), group=group)
        assert numbers.tolist() == [1.0, 1.0]


def test_current_node() -> None:
    leaf, seen = torch.ones(2, requires_grad=True), []
    leaf.register_post_accumulate_grad_hook(lambda _: seen.append(torch_internals.current_node()))
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    leaf.sum().backward()
    assert seen == [node]
    assert torch_internals.current_node() is None


@pytest.mark.usefixtures("process_group")
def test_rebuild_buckets() -> None:
    wrapper = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    assert not torch_internals.rebuild_buckets(wrapper)
    assert not torch_internals.allows_uneven_inputs(wrapper)
    with wrapper.join():
        assert torch_internals.allows_uneven_inputs(wrapper)
    wrapper(torch.ones(1, 2)).sum().backward()
    assert [torch_internals.rebuild_buckets(wrapper) for _ in range(2)] == [True, False]
    wrapper(torch.ones(1, 2)).sum().backward()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, how: str) -> Tensor:
        return given * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None


def test_apply_of() -> None:
    given = torch.ones(3, requires_grad=True)
    result = torch_internals.apply_of(Twice)(given, "so")
    assert type(result.grad_fn) is type(Twice.apply(given, "so").grad_fn)
    result.sum().backward()
    assert given.grad is not None and given.grad.tolist() == [2.0] * 3


def test_prefix_store(process_group: timedelta) -> None:
    torch_internals.prefix_store("one").set("key", "1")
    assert not torch_internals.prefix_store("other").check(["key"])
    assert torch_internals.prefix_store("one").get("key") == b"1"


def test_loads_by_own_code() -> None:
    class Own(nn.Linear):
        def _load_from_state_dict(self, *given: Any) -> None: ...

    hooked = nn.Linear(1, 1)
    hooked.register_load_state_dict_pre_hook(lambda *_: None)
    found = [nn.BatchNorm1d(1), Own(1, 1), hooked]
    assert list(map(torch_internals.loads_by_own_code, found)) == [False, True, True]

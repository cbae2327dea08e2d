"""Every private part of torch that this package relies on, under a name that says what it does.

All of them are the same in torch 2.11 and 2.13; tests/project/test_torch_internals.py fails by the
name of one that another torch lacks or has changed. What is a name in torch is a name here, and no
function around it: a step uses many of them.
"""

from __future__ import annotations

import operator
import sys
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial, wraps
from types import CodeType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

__all__ = [
    "FOREACH_TYPES",
    "FOUND_INF",
    "LENT_BY_GRAD_SCALER",
    "METHODS_OF_MODULES",
    "STEP_HOOKS",
    "VERSION_ASKED",
    "HostGradScaler",
    "SteppingScaler",
    "TensorWeakRef",
    "TorchDispatchMode",
    "WeakTensorKeyDictionary",
    "active_data_parallel",
    "apply_of",
    "as_plain",
    "attributes_without_hooks",
    "base_of",
    "below_autograd",
    "buffers_of",
    "call_after_backward",
    "call_with_first_gpu",
    "calls_under_way",
    "can_skip",
    "capturing",
    "composable_data_parallel",
    "current_backward",
    "current_node",
    "current_stream",
    "dispatch_modes",
    "foreach_add",
    "foreach_add_",
    "foreach_addcdiv_",
    "foreach_copy_",
    "foreach_mul",
    "foreach_neg",
    "foreach_sqrt",
    "forget_failed_backward",
    "fully_sharded",
    "give_no_data_pointer",
    "gradient_hooks",
    "group_like",
    "ignored_by_data_parallel",
    "is_batched",
    "is_forward_mode",
    "is_pointwise",
    "is_profiling",
    "is_tracing",
    "is_transformed",
    "is_view",
    "is_wrapped",
    "load_hooks",
    "loads_by_own_code",
    "members_of",
    "never_compiled",
    "next_node_number",
    "no_torch_function",
    "not_compiled",
    "number_of_node",
    "of_another_dtype",
    "place_buckets",
    "plain_truncated_normal",
    "prefix_store",
    "replace_step",
    "replace_truncated_normal",
    "schema_name",
    "set_versions",
    "sparse_coo",
    "sparse_indices",
    "sparse_values",
    "split_apart",
    "step_functions",
    "step_without_hooks",
    "stepping_grad_scaler",
    "storage_at",
    "storage_id",
    "storage_of",
    "storage_reference",
    "storage_uses",
    "takes_uneven_inputs",
    "tensor_of_class",
    "tensor_without_memory",
    "timeout_of",
    "top_saved_tensors_hooks",
    "torch_function_is_on",
    "tree_leaves",
    "tree_map",
    "unsaved_buffers_of",
    "unwrapped",
    "version_of",
    "without_autograd",
    "written_arguments",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# ------------------------------------------------------------------------------------------------
# Tensors

torch_function_is_on: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Whether functions ask the `__torch_function__` of a tensor's class; not so within as_plain."""

as_plain = torch._C.DisableTorchFunctionSubclass
"""Within it no function asks the `__torch_function__` of a tensor's class."""

version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
"""How often a tensor, or what shares its memory, has been written to."""

VERSION_ASKED: Any = cast(Any, Tensor._version).__get__
"""version_of(), as the `__torch_function__` of a tensor's class is told of it."""

no_torch_function = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a class whose `__torch_dispatch__` is asked alone."""

base_of: Callable[[Tensor], Tensor | None] = operator.attrgetter("_base")
"""The tensor that autograd takes a tensor for a view of; None: the tensor is no such view."""

storage_id: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""A number that all Python objects of one storage have, and no other storage that is alive."""

set_versions = torch._C._autograd._unsafe_set_version_counter
"""Makes these the numbers of a tuple of tensors, for views of them too: tuples of both."""

split_apart = torch.unsafe_split_with_sizes
"""Parts of a tensor, of these numbers of rows, in its memory; each counts versions by itself."""

tensor_without_memory = Tensor._make_wrapper_subclass
"""A tensor of a class, with a shape and a dtype and no elements."""

give_no_data_pointer: Callable[[Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""Lets a tensor without memory raise where C++ asks for the address of its elements."""

tensor_of_class = Tensor._make_subclass
"""A tensor of a class in the memory of another."""

sparse_values = Tensor._values
"""The values of a sparse tensor, coalesced or not, without a copy and without autograd."""

sparse_indices = Tensor._indices
"""Its indices likewise."""

sparse_coo: Callable[..., Tensor] = torch.ops.aten._sparse_coo_tensor_unsafe.default
"""A sparse tensor of indices, values and a shape, made as torch's own autograd makes a gradient.

torch.sparse_coo_tensor sets a flag of the whole process, which other threads see, for each call.
Before torch 2.13 it also warns of unchecked invariants, with check_invariants=False too.
"""

FOREACH_TYPES: list[type[Tensor]] = _foreach_supported_types
"""The types of tensors for which torch.nn.utils clips by functions of lists of tensors."""


@cache
def is_pointwise(operator: Any) -> bool:
    """Whether each element of an operator's result follows from the arguments' elements there."""
    return torch.Tag.pointwise in operator.tags


@cache
def is_view(operator: Any) -> bool:
    """Whether an operator's result shares the memory of an argument that it does not write to."""
    results = [each.alias_info for each in operator._schema.returns]
    return any(each is not None and not each.is_write for each in results)


schema_name: Callable[[Any], str] = operator.attrgetter("_schema.name")
"""The name of an operator that a dispatch mode is given, as "aten::add_"."""


@cache
def written_arguments(operator: Any) -> dict[str, int]:
    """Which arguments of an operator it writes to, by name, and their places.

    Some schemas do not say it: those of collectives, named as `c10d::broadcast_`, write to their
    first argument, and batch norm to its running statistics.
    """
    schema = operator._schema
    arguments = {each.name: (k, each.alias_info) for k, each in enumerate(schema.arguments)}
    written = {
        name: k
        for name, (k, alias) in arguments.items()
        if name in ("running_mean", "running_var") or (alias and alias.is_write)
    }
    if not written and schema.name.endswith("_") and not schema.name.endswith("__"):
        return {name: k for name, (k, _) in arguments.items() if k == 0}
    return written


@cache
def of_another_dtype(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a parameter's `data` is for a moment before they may become of another shape.

    Only a change of dtype makes torch drop the node that accumulates the parameter's gradient,
    which a graph may keep alive, and which refuses gradients of another shape than the first.
    """
    other = torch.float32 if dtype == torch.float64 else torch.float64
    return torch.empty(0, dtype=other, device=device)


# ------------------------------------------------------------------------------------------------
# Autograd, and what transforms or records calls

current_backward = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread, -1 outside of any."""


call_after_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Calls a function once when the backward of this thread ends; RuntimeError outside of any."""


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Its apply(), for tensors outside of torch.func's transforms, of which it looks for none.

    The function has no setup_context().
    """
    above: Any = super(torch.autograd.Function, function)
    return cast(Callable[..., Any], above.apply)


current_node: Callable[[], Node | None] = torch._C._current_autograd_node
"""The node that a backward runs in this thread, or None."""

next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of the node that autograd makes next in this thread."""

number_of_node: Callable[[Node], int] = operator.methodcaller("_sequence_nr")
"""The number of a node; of those that are ready a backward runs the highest first."""

top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""The innermost saved_tensors_hooks, or None; True as argument finds them while tracing as well."""

is_profiling = torch._C._autograd._profiler_enabled
"""Whether a profiler records what this thread does."""

is_tracing = torch._C._is_tracing
"""Whether torch.jit.trace, or an export that is made of it, records calls."""

is_transformed = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func runs."""

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of dispatch modes that see each op, such as those of fake tensors."""

is_batched = torch._C._functorch.is_batchedtensor
"""Whether a tensor is one of vmap's."""

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one of a transform of torch.func, whose memory another tensor has."""

unwrapped = torch._C._functorch.get_unwrapped
"""The tensor that a transform of torch.func has wrapped."""


without_autograd: Any = torch._C._AutoDispatchBelowAutograd
"""A context in which ops skip their autograd kernels, each of which takes microseconds."""

below_autograd = torch._C._after_autograd_keyset
"""The dispatch keys that an autograd kernel passes an op on to."""


def is_forward_mode() -> bool:
    """Whether a dual level of forward-mode differentiation has been entered; torch.compile asks."""
    return forward_ad._current_level >= 0


gradient_hooks: Callable[[Tensor], tuple[object, object]] = operator.attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)
"""The hooks of a parameter's gradient, and of its being accumulated; None or empty: no hooks."""

active_data_parallel: Callable[[], nn.parallel.DistributedDataParallel | None] = partial(
    operator.attrgetter("_active_ddp_module"), nn.parallel.DistributedDataParallel
)
"""The DistributedDataParallel whose forward runs.

It has `parameters_to_ignore`, names in its module, and `gradient_as_bucket_view`.
"""


def place_buckets(wrapper: nn.parallel.DistributedDataParallel) -> bool:
    """Lets it order what it averages as gradients have come; False before a backward, and later.

    Its forward does so otherwise. Each rank calls this.
    """
    return wrapper.reducer._rebuild_buckets()


takes_uneven_inputs: Callable[[nn.parallel.DistributedDataParallel], bool] = operator.attrgetter(
    "_join_config.enable"
)
"""Whether its join() is under way."""


def composable_data_parallel() -> list[tuple[nn.Module, str, list[int]]]:
    """The modules of fully_shard() and replicate(), with that function's name and its ranks.

    replicate() of DistributedDataParallel is none of them: active_data_parallel() returns that one.
    """
    from torch.distributed import _composable_state

    found = []
    for module, reference in list(_composable_state._module_state_mapping.items()):
        state: Any = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # one group, in older versions of torch
            group = getattr(state, "_fsdp_param_group", None)
            groups = [] if group is None else [group]
        name = "replicate" if "Replicate" in type(state).__name__ else "fully_shard"
        for group in groups:
            found.append((module, name, group.mesh_info.mesh.mesh.flatten().tolist()))
    return found


def timeout_of(group: Any) -> timedelta:
    """How long the collectives of a process group wait for the others."""
    backend = group._get_backend(group._device_types[0])
    return cast(timedelta, backend.options._timeout)


def prefix_store(prefix: str) -> Any:
    """A part of the store by which torch.distributed's processes have found each other."""
    from torch.distributed import distributed_c10d as c10d

    return c10d.PrefixStore(prefix, c10d._get_default_store())


def group_like(group: Any) -> Any:
    """Another process group of the same ranks; all of these call it, and no others.

    new_group() names such a group by the number of those that a process is in, which is not the
    same on all ranks where some are in more groups: these would wait for each other in vain.
    """
    from torch.distributed import distributed_c10d as c10d

    names = c10d._world.pg_names.values()
    number = sum(name.startswith(f"{group.group_name} copy ") for name in names)
    ranks = c10d.get_process_group_ranks(group)
    made, _ = c10d._new_process_group_helper(
        group.size(),
        group.rank(),
        ranks,
        c10d.Backend(c10d.get_backend_config(group)),
        c10d._get_default_store(),
        c10d.GroupName(f"{group.group_name} copy {number}"),
        timeout=timeout_of(group),
        device_id=group.bound_device_id,
    )
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def ignored_by_data_parallel(module: nn.Module, names: Iterable[str]) -> None:
    """Lets a DistributedDataParallel that wraps the module leave parameters alone, others as well.

    Their names are those within the module; those that were to be left alone before are so still.
    """
    before = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    every = [*before, *(name for name in names if name not in before)]
    set_names = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    set_names(module, every)  # type: ignore[no-untyped-call]


def never_compiled(function: _Function, reason: str) -> _Function:
    """Breaks a graph that torch.compile makes, as torch.compiler.disable(reason=) does.

    That one loads torch's compiler at once, this one within the first call.
    """
    broken = _disable_dynamo(function)
    vars(broken).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return cast(_Function, broken)


def not_compiled(function: _Function) -> _Function:
    """As never_compiled(), but loads torch's compiler within the first call that makes a graph.

    Torch makes a graph of each wrapper as well, of which it makes a few at most: this is for few
    objects.
    """
    broken = never_compiled(function, "the number of held rows changes from step to step")

    @wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (broken if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return cast(_Function, either)


call_with_first_gpu: Callable[[Callable[[], object]], None] = torch.cuda._lazy_call
"""Calls a function when torch first turns to a GPU, at once where it has done so."""

# ------------------------------------------------------------------------------------------------
# Modules

METHODS_OF_MODULES = (
    "__prepare_scriptable__",
    "_apply",
    "_load_from_state_dict",
    "_replicate_for_data_parallel",
    "_save_to_state_dict",
)
"""What torch calls of a module, and of which modules of ours have their own."""


plain_truncated_normal = nn.init._no_grad_trunc_normal_
"""What torch.nn.init.trunc_normal_ calls; it asks no `__torch_function__`, as others there do."""


def replace_truncated_normal(function: Callable[..., Tensor]) -> None:
    """Lets torch.nn.init.trunc_normal_ call another function."""
    setattr(nn.init, plain_truncated_normal.__name__, function)


def members_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own parameters and modules by name; of what it has not, None."""
    return module._parameters, module._modules


buffers_of: Callable[[nn.Module], dict[str, Any]] = operator.attrgetter("_buffers")
"""A module's own buffers by name; of what it has not, None."""

unsaved_buffers_of: Callable[[nn.Module], set[str]] = operator.attrgetter(
    "_non_persistent_buffers_set"
)
"""Names of a module's own buffers that state_dict() leaves out."""


def fully_sharded(module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """What fully_shard has of a module: parameters, and what an all-gather reads of each."""
    if (state_of := getattr(module, "_get_fsdp_state", None)) is None:
        return []
    groups = getattr(state := state_of(), "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    shards = [shard for group in groups for shard in group.fsdp_params]
    return [(each.sharded_param, each._sharded_param_data) for each in shards]


def calls_under_way() -> Counter[nn.Module]:
    """How many calls of each module are on this thread's stack, without those of compiled ones."""
    found: Counter[nn.Module] = Counter()
    code, frame = nn.Module._call_impl.__code__, sys._getframe().f_back
    while frame is not None:
        if frame.f_code is code:
            found[frame.f_locals["self"]] += 1
        frame = frame.f_back
    return found


# ------------------------------------------------------------------------------------------------
# Optimizers

LENT_BY_GRAD_SCALER = ("grad_scale", "found_inf")
"""Attributes that a GradScaler gives an optimizer for one step."""


class HostGradScaler(torch.amp.GradScaler):
    """As torch's, also for gradients in host memory while the scale is on a GPU.

    Torch's does not wait for the copies of its scale, and of whether a gradient is infinite, that
    it makes there (https://github.com/pytorch/pytorch/pull/176429 tells of the second).
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        with as_plain():
            every = [each for group in optimizer.param_groups for each in group["params"]]
            where = {each.grad.device.type for each in every if each.grad is not None}
        if "cpu" in where and inv_scale.device.type != "cpu":
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


class SteppingScaler(NamedTuple):
    """A GradScaler whose step() is under way, and does scale.

    Attributes:
        scaler: which one.
        waits: whether it has divided no gradient before its scale had come to where that is.
    """

    scaler: torch.amp.GradScaler
    waits: bool


def stepping_grad_scaler() -> SteppingScaler | None:
    """The GradScaler that calls an optimizer's step(), in this thread."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            scaler, known = frame.f_locals["self"], frame.f_locals.get("optimizer_state")
            if known is None:  # it is disabled
                return None
            divided = {each.type for each in known["found_inf_per_device"]}
            is_near = "cpu" not in divided or scaler._scale.device.type == "cpu"
            return SteppingScaler(scaler, is_near or isinstance(scaler, HostGradScaler))
    return None


STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer that have the hooks of its step."""


def load_hooks(optimizer: Any) -> int:
    """How many hooks see what an optimizer loads before the optimizer does."""
    return len(optimizer._optimizer_load_state_dict_pre_hooks)


def loads_by_own_code(module: Any) -> bool:
    """Whether code that is neither torch's nor ours says which keys and shapes a module loads."""
    kind = type(module)
    methods = (kind._load_from_state_dict, kind._save_to_state_dict, kind.load_state_dict)
    hooks = (
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
        module._state_dict_hooks,
        module._state_dict_pre_hooks,
    )
    known = ("torch.nn.", "speedtorch.")
    return any(hooks) or not all(each.__module__.startswith(known) for each in methods)


FOUND_INF = "found_inf"
"""The attribute by which a fused optimizer is told on its device to skip a step: 1, else 0."""


def forget_failed_backward(device: torch.device) -> None:
    """Lets go what torch keeps of a backward that has failed, on the CPU until the next one.

    On a GPU the thread of its backwards may still be about to.
    """
    if current_backward() == -1:
        with torch.enable_grad(), torch.inference_mode(False):
            for each in {torch.device("cpu"), device}:
                torch.zeros((), device=each, requires_grad=True).clone().backward()  # type: ignore[no-untyped-call]


# Operations on lists of tensors: on a GPU one kernel for many dense tensors of one shape a place,
# else one kernel for each. A name that ends in _ writes to the first list.
foreach_add: Callable[..., Any] = torch._foreach_add
foreach_add_: Callable[..., Any] = torch._foreach_add_
foreach_addcdiv_: Callable[..., Any] = torch._foreach_addcdiv_
foreach_copy_: Callable[..., Any] = torch._foreach_copy_
foreach_mul: Callable[..., Any] = torch._foreach_mul
foreach_neg: Callable[..., Any] = torch._foreach_neg
foreach_sqrt: Callable[..., Any] = torch._foreach_sqrt


def can_skip(optimizer: Optimizer) -> bool:
    """Whether an optimizer looks at that attribute."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def attributes_without_hooks(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's attributes but its hooks, which torch looks for in dicts named `*_hooks`."""
    return {
        name: OrderedDict() if name.endswith("_hooks") else value
        for name, value in vars(optimizer).items()
    }


def step_functions(kind: type[Optimizer]) -> list[type[Optimizer]]:
    """The classes that define a step() which a class has or inherits, the outermost first."""
    return [each for each in kind.__mro__ if "step" in vars(each) and each is not Optimizer]


def replace_step(
    owner: type[Optimizer], made: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Replaces the step function of a class by `made(function)`, within torch's calls of hooks.

    Torch wraps the function of a class once by one that calls all hooks, which schedulers keep: it
    stays, and calls the other function from then on. Returns that one, also if it is there already.
    """
    step: Any = vars(owner)["step"]
    cell = None
    if step.__code__.co_freevars and step.__code__.co_name == "wrapper":
        place = dict(zip(step.__code__.co_freevars, step.__closure__ or (), strict=True))
        cell = place.get("func") if step.__code__ in _codes_of_hooks() else None
    function = step if cell is None else cell.cell_contents
    if "replaces_step" in vars(function):
        return cast(Callable[..., Any], function)
    replaced = made(function)
    vars(replaced)["replaces_step"] = True
    if cell is None:
        setattr(owner, "step", replaced)  # noqa: B010
    else:
        setattr(cell, "cell_contents", replaced)  # noqa: B010
        vars(step)["__wrapped__"] = replaced
    return replaced


@cache
def _codes_of_hooks() -> frozenset[CodeType]:
    """The code of torch's wrapper of step functions, which calls the hooks."""
    codes = Optimizer.profile_hook_step.__code__.co_consts
    return frozenset(each for each in codes if isinstance(each, CodeType))


def step_without_hooks(kind: type[Optimizer]) -> Callable[[Optimizer], object]:
    """The step of a class without torch's wrapper, which calls every hook."""
    step = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


@cache
def _stream_of(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(  # type: ignore[no-untyped-call]
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """As torch.cuda.current_stream(), of a GPU that has been used, without making the object."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _stream_of(*torch._C._cuda_getCurrentStream(index))


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """As torch.cuda.graph(); if the capture fails, torch's allocator is out of it as well.

    Torch does not close the graph's pool if CUDA refuses to end the capture. A pool that is freed
    later, such as the one of AddressRange, then ends the process.
    """
    pool = torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            yield
    except BaseException:
        with suppress(RuntimeError):  # CUDA has ended the capture, and torch has closed the pool
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            torch._C._cuda_releasePool(stream.device_index, pool)
        raise


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors and Python objects have a storage."""
    uses: int = torch._C._storage_Use_Count(storage_id(storage))
    return uses


def storage_reference(storage: torch.UntypedStorage) -> Any:
    """A weak reference, for storage_of."""
    made: Any = StorageWeakRef
    return made(storage)


def storage_of(reference: Any) -> torch.UntypedStorage | None:
    """The storage of a weak reference; None: it is gone."""
    made: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return cast("torch.UntypedStorage | None", made)


def storage_at(address: int, device: torch.device, count: int) -> torch.UntypedStorage:
    """So many bytes of a device from an address on, which it does not own."""
    made: Any = torch._C._construct_storage_from_data_pointer(address, device, count)
    return cast(torch.UntypedStorage, made)

"""The private parts of torch that this package uses, under names that describe their purpose.

Everything here works with torch 2.11 and 2.13. tests/project/test_torch_internals.py names any
part that another torch version lacks or has changed. Most names are direct aliases without a
wrapper function, because a step calls many of them.
"""

from __future__ import annotations

import operator
import sys
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cache, partial, wraps
from types import CodeType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import stateless
from torch.optim import Optimizer
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

__all__ = [
    "FOREACH_TYPES",
    "FOUND_INF",
    "METHODS_OF_MODULES",
    "SET_BY_GRAD_SCALER",
    "STEP_HOOKS",
    "VERSION_GETTER",
    "HostGradScaler",
    "SteppingScaler",
    "TensorWeakRef",
    "TorchDispatchMode",
    "WeakTensorKeyDictionary",
    "active_data_parallel",
    "allows_uneven_inputs",
    "apply_of",
    "as_plain",
    "attributes_without_hooks",
    "base_of",
    "below_autograd",
    "buffers_of",
    "call_after_backward",
    "call_with_first_gpu",
    "can_skip",
    "capturing",
    "composable_data_parallel",
    "current_backward",
    "current_node",
    "current_stream",
    "dispatch_modes",
    "empty_of_other_dtype",
    "forbid_data_pointer",
    "foreach_add",
    "foreach_add_",
    "foreach_addcdiv_",
    "foreach_copy_",
    "foreach_mul",
    "foreach_neg",
    "foreach_sqrt",
    "forward_hooks",
    "free_failed_backward",
    "fully_sharded",
    "gradient_hooks",
    "group_like",
    "ignored_by_data_parallel",
    "increment_versions",
    "is_batched",
    "is_forward_mode",
    "is_functional_call",
    "is_pointwise",
    "is_profiling",
    "is_resizable",
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
    "outside_modes",
    "plain_truncated_normal",
    "prefix_store",
    "rebuild_buckets",
    "replace_step",
    "replace_truncated_normal",
    "running_calls",
    "schema_name",
    "set_versions",
    "sparse_coo",
    "sparse_indices",
    "sparse_values",
    "split_with_versions",
    "step_functions",
    "step_without_hooks",
    "stepping_grad_scaler",
    "storage_at",
    "storage_id",
    "storage_of",
    "storage_reference",
    "storage_uses",
    "tensor_of_class",
    "tensor_without_memory",
    "timeout_of",
    "top_saved_tensors_hooks",
    "torch_function_is_on",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "unsaved_buffers_of",
    "unwrapped",
    "version_of",
    "without_autograd",
    "written_arguments",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Made = TypeVar("_Made", bound=Tensor)

# ---- Tensors

torch_function_is_on: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Whether functions call the `__torch_function__` of a tensor's class; False inside as_plain."""

as_plain = torch._C.DisableTorchFunctionSubclass
"""A context in which no function calls the `__torch_function__` of a tensor's class."""

version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
"""The number of writes that torch has counted for a tensor, its base and the base's views."""

increment_versions: Callable[[Iterable[Tensor]], None] = torch._C._increment_version
"""Counts a write to each tensor, as torch.autograd.graph.increment_version() does."""

VERSION_GETTER: Any = cast(Any, Tensor._version).__get__
"""The function that `__torch_function__` receives when code reads a tensor's version."""

no_torch_function = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a class that only uses `__torch_dispatch__`."""

base_of: Callable[[Tensor], Tensor | None] = operator.attrgetter("_base")
"""The base of a tensor that autograd considers a view; None for other tensors."""

storage_id: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""A number that is equal for all Python objects of a storage and unique among live storages."""

set_versions = torch._C._autograd._unsafe_set_version_counter
"""Sets the version counters of a tuple of tensors, and their views, to a tuple of numbers."""

split_with_versions = torch.unsafe_split_with_sizes
"""Splits a tensor's rows by these sizes in the same memory; each part has its own version."""


def tensor_without_memory(kind: type[_Made], shape: Sequence[int], **settings: Any) -> _Made:
    """Creates a tensor of a class with a shape and a dtype but without elements.

    It is no inference tensor, because torch cannot detach one of a subclass.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return tensor_without_memory(kind, shape, **settings)
    made: Any = Tensor._make_wrapper_subclass(kind, shape, **settings)
    return cast(_Made, made)


forbid_data_pointer: Callable[[Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""Makes a tensor without memory raise if C++ requests the address of its elements."""

tensor_of_class = Tensor._make_subclass
"""Creates a tensor of a class that shares the memory of another tensor."""

sparse_values = Tensor._values
"""The values of a sparse tensor, coalesced or not, without a copy and without autograd."""

sparse_indices = Tensor._indices
"""The indices of a sparse tensor, coalesced or not, without a copy and without autograd."""

sparse_coo: Callable[..., Tensor] = torch.ops.aten._sparse_coo_tensor_unsafe.default
"""Creates a sparse tensor from indices, values and a shape, as torch's autograd does.

torch.sparse_coo_tensor sets a flag of the whole process at each call, which other threads see.
Before torch 2.13 it also warns about unchecked invariants, even with check_invariants=False.
"""

FOREACH_TYPES: list[type[Tensor]] = _foreach_supported_types
"""The tensor types whose gradients torch.nn.utils clips with foreach functions."""


@cache
def is_pointwise(operator: Any) -> bool:
    """Whether each element of the result depends only on the arguments' elements at its index."""
    return torch.Tag.pointwise in operator.tags


@cache
def is_view(operator: Any) -> bool:
    """Whether an operator's result may share memory with an argument that it only reads."""
    aliases = [result.alias_info for result in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


schema_name: Callable[[Any], str] = operator.attrgetter("_schema.name")
"""The name, such as "aten::add_", of an operator that a dispatch mode receives."""


@cache
def written_arguments(operator: Any) -> dict[str, int]:
    """The arguments that an operator writes to: names and positions.

    Some schemas omit this: collectives with names such as `c10d::broadcast_` write to their first
    argument, and batch norm writes to its running statistics.
    """
    schema = operator._schema
    arguments = {arg.name: (k, arg.alias_info) for k, arg in enumerate(schema.arguments)}
    written = {
        name: k
        for name, (k, alias) in arguments.items()
        if name in ("running_mean", "running_var") or (alias and alias.is_write)
    }
    if not written and schema.name.endswith("_") and not schema.name.endswith("__"):
        return {name: k for name, (k, _) in arguments.items() if k == 0}
    return written


@cache
def empty_of_other_dtype(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A temporary value for a parameter's `data` before the parameter's shape may change.

    On one device, only a change of dtype makes torch drop the node that accumulates the parameter's
    gradient. A graph may keep that node alive, and the node rejects gradients of another shape.
    """
    other = torch.float32 if dtype == torch.float64 else torch.float64
    return torch.empty(0, dtype=other, device=device)


# ---- Autograd, and code that transforms or records calls

current_backward = torch._C._current_graph_task_id
"""The number of the backward pass that runs in this thread; -1 outside of a backward pass."""


call_after_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Calls a function once when this thread's backward pass ends; RuntimeError without one."""


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The function's apply() without the check for torch.func transforms.

    Call it only outside of these transforms, for a function without setup_context().
    """
    above: Any = super(torch.autograd.Function, function)
    return cast(Callable[..., Any], above.apply)


current_node: Callable[[], Node | None] = torch._C._current_autograd_node
"""The autograd node that a backward pass runs in this thread, or None."""

next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The sequence number of the next autograd node in this thread."""

number_of_node: Callable[[Node], int] = operator.methodcaller("_sequence_nr")
"""The sequence number of a node; a backward pass runs the ready node with the highest first."""

top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""The innermost saved_tensors_hooks, or None. The argument True finds them during tracing, too."""

is_profiling = torch._C._autograd._profiler_enabled
"""Whether a profiler records this thread."""

is_tracing = torch._C._is_tracing
"""Whether torch.jit.trace, or an export that uses it, records calls."""

is_transformed = torch._C._are_functorch_transforms_active
"""Whether a torch.func transform is active."""

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of dispatch modes that see each op, such as the mode of fake tensors."""

_pre_dispatch_modes: Callable[[], int] = torch._ops._len_torch_dispatch_stack_pre_dispatch


@contextmanager
def outside_modes() -> Iterator[None]:
    """Runs a finalizer, which may begin anywhere, without the modes of the code around it.

    Examples are fake tensors, tracing, and modes of the user.
    """
    torch_c: Any = torch._C
    state, set_state = torch_c._get_tracing_state(), torch_c._set_tracing_state
    if state is not None:
        try:
            set_state(None)
        except RuntimeError:  # within an op, whose own calls the tracer does not record
            state = None
    try:
        with ExitStack() as modes:
            modes.enter_context(torch._C.DisableTorchFunction())
            # The context imports torch's compiler.
            if dispatch_modes() or _pre_dispatch_modes():
                modes.enter_context(_disable_current_modes())
            if is_transformed():
                modes.enter_context(temporarily_clear_interpreter_stack())
            yield
    finally:
        if state is not None:
            set_state(state)


is_batched = torch._C._functorch.is_batchedtensor
"""Whether a tensor is a batched tensor of vmap."""

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a torch.func transform has wrapped a tensor, whose memory another tensor owns."""

unwrapped = torch._C._functorch.get_unwrapped
"""The tensor inside the wrapper of a torch.func transform."""


without_autograd: Any = torch._C._AutoDispatchBelowAutograd
"""A context in which ops skip their autograd kernels, which cost microseconds each."""

below_autograd = torch._C._after_autograd_keyset
"""The dispatch keys with which an autograd kernel redispatches an op."""


def is_forward_mode() -> bool:
    """Whether forward-mode differentiation has entered a dual level; torch.compile can trace it."""
    return forward_ad._current_level >= 0


gradient_hooks: Callable[[Tensor], tuple[object, object]] = operator.attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)
"""The hooks of a parameter's gradient and its post-accumulate hooks; None or empty without any."""

active_data_parallel: Callable[[], nn.parallel.DistributedDataParallel | None] = partial(
    operator.attrgetter("_active_ddp_module"), nn.parallel.DistributedDataParallel
)
"""The DistributedDataParallel whose forward runs, or None.

Its `parameters_to_ignore` are names in its module; it also has `gradient_as_bucket_view`.
"""


def rebuild_buckets(wrapper: nn.parallel.DistributedDataParallel) -> bool:
    """Rebuilds the buckets in the order of ready gradients; False if already done or too early.

    Too early is before the first backward pass. Without this call, the wrapper's next forward
    rebuilds the buckets. All ranks must call this.
    """
    return wrapper.reducer._rebuild_buckets()


allows_uneven_inputs: Callable[[nn.parallel.DistributedDataParallel], bool] = operator.attrgetter(
    "_join_config.enable"
)
"""Whether the wrapper's join() context is active."""


def composable_data_parallel() -> list[tuple[nn.Module, str, list[int]]]:
    """The modules of fully_shard() and replicate(), with the function's name and its ranks.

    Excludes replicate() based on DistributedDataParallel, which active_data_parallel() returns.
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
    """The timeout of a process group's collectives."""
    backend = group._get_backend(group._device_types[0])
    return cast(timedelta, backend.options._timeout)


def prefix_store(prefix: str) -> Any:
    """A prefix of the store with which torch.distributed's processes found each other."""
    from torch.distributed import distributed_c10d as c10d

    return c10d.PrefixStore(prefix, c10d._get_default_store())


def group_like(group: Any) -> Any:
    """Creates another process group of the same ranks. All of them must call it, and no others.

    new_group() numbers such a group by the groups that a process is in. If some ranks are in more
    groups than others, the numbers differ and the ranks wait for each other in vain.
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
    """Makes a DistributedDataParallel that wraps the module ignore further parameters.

    `names` are names in the module. Parameters that were ignored before are still ignored.
    """
    before = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    ignored = [*before, *(name for name in names if name not in before)]
    set_names = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    set_names(module, ignored)  # type: ignore[no-untyped-call]


def never_compiled(function: _Function, reason: str) -> _Function:
    """Causes a graph break under torch.compile, as torch.compiler.disable(reason=) does.

    torch.compiler.disable loads torch's compiler at once, this function in its first call.
    """
    broken = _disable_dynamo(function)
    vars(broken).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return cast(_Function, broken)


def not_compiled(function: _Function) -> _Function:
    """Like never_compiled(), but loads torch's compiler only in a call under torch.compile.

    torch.compile also compiles each wrapper, but only a few at most, so use this for few objects.
    """
    broken = never_compiled(function, "the number of rows changes from step to step")

    @wraps(function)
    def uncompiled(*args: Any, **kwargs: Any) -> Any:
        """Calls `function`, with a graph break under torch.compile."""
        return (broken if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return cast(_Function, uncompiled)


call_with_first_gpu: Callable[[Callable[[], object]], None] = torch.cuda._lazy_call
"""Calls a function when torch first uses a GPU, or at once if torch has already used one."""

# ---- Modules

METHODS_OF_MODULES = (
    "__prepare_scriptable__",
    "_apply",
    "_load_from_state_dict",
    "_replicate_for_data_parallel",
    "_save_to_state_dict",
)
"""Private methods that torch calls on modules and that modules of this package override."""


plain_truncated_normal = nn.init._no_grad_trunc_normal_
"""The function behind torch.nn.init.trunc_normal_, which calls no `__torch_function__`."""


def replace_truncated_normal(function: Callable[..., Tensor]) -> None:
    """Makes torch.nn.init.trunc_normal_ call another function."""
    setattr(nn.init, plain_truncated_normal.__name__, function)


def members_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own parameters and submodules by name; None for an entry that is not set."""
    return module._parameters, module._modules


buffers_of: Callable[[nn.Module], dict[str, Any]] = operator.attrgetter("_buffers")
"""A module's own buffers by name; None for a buffer that is not set."""

unsaved_buffers_of: Callable[[nn.Module], set[str]] = operator.attrgetter(
    "_non_persistent_buffers_set"
)
"""Names of a module's own buffers that state_dict() excludes."""


def fully_sharded(module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """The parameters that fully_shard() shards in a module, each with its all-gather input."""
    if (state_of := getattr(module, "_get_fsdp_state", None)) is None:
        return []
    groups = getattr(state := state_of(), "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    shards = [shard for group in groups for shard in group.fsdp_params]
    return [(shard.sharded_param, shard._sharded_param_data) for shard in shards]


def running_calls() -> Counter[nn.Module]:
    """Counts the calls of each module on this thread's stack, except those of compiled modules."""
    found: Counter[nn.Module] = Counter()
    code, frame = nn.Module._call_impl.__code__, sys._getframe().f_back
    while frame is not None:
        if frame.f_code is code:
            found[frame.f_locals["self"]] += 1
        frame = frame.f_back
    return found


def is_functional_call() -> bool:
    """Whether torch.func.functional_call() runs on this thread's stack."""
    frame = sys._getframe().f_back
    code = stateless._functional_call.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


# ---- Optimizers

SET_BY_GRAD_SCALER = ("grad_scale", "found_inf")
"""Attributes that a GradScaler sets on an optimizer for one step."""


class HostGradScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler that supports gradients in host memory with the scale on a GPU.

    Torch's scaler copies its scale and its flag for infinite gradients to the CPU without waiting
    for the copies (https://github.com/pytorch/pytorch/pull/176429 describes the second).
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        with as_plain():
            params = [param for group in optimizer.param_groups for param in group["params"]]
            devices = {param.grad.device.type for param in params if param.grad is not None}
        if "cpu" in devices and inv_scale.device.type != "cpu":
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


class SteppingScaler(NamedTuple):
    """The enabled GradScaler whose step() this thread runs now.

    Attributes:
        scaler: The GradScaler.
        waits: False if gradients on the CPU may have been unscaled before the copy of the scale
            from the GPU was complete.
    """

    scaler: torch.amp.GradScaler
    waits: bool


def stepping_grad_scaler() -> SteppingScaler | None:
    """The GradScaler whose step() calls an optimizer's step() in this thread, or None."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            scaler, known = frame.f_locals["self"], frame.f_locals.get("optimizer_state")
            if known is None:  # the scaler is disabled
                return None
            divided = {device.type for device in known["found_inf_per_device"]}
            is_near = "cpu" not in divided or scaler._scale.device.type == "cpu"
            return SteppingScaler(scaler, is_near or isinstance(scaler, HostGradScaler))
    return None


STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer that contain the hooks of its step."""


forward_hooks: Callable[[torch.nn.Module], tuple[object, object]] = operator.attrgetter(
    "_forward_pre_hooks", "_forward_hooks"
)
"""The hooks of a module before and after its forward(); empty without any."""


def load_hooks(optimizer: Any) -> int:
    """The number of hooks that an optimizer runs on a state dict before it loads the state dict."""
    return len(optimizer._optimizer_load_state_dict_pre_hooks)


def loads_by_own_code(module: Any) -> bool:
    """Whether code outside torch and this package decides which keys and shapes a module loads."""
    kind = type(module)
    methods = (kind._load_from_state_dict, kind._save_to_state_dict, kind.load_state_dict)
    hooks = (
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
        module._state_dict_hooks,
        module._state_dict_pre_hooks,
    )
    known = ("torch.nn.", "speedtorch.")
    return any(hooks) or not all(method.__module__.startswith(known) for method in methods)


FOUND_INF = "found_inf"
"""The attribute that makes a fused optimizer skip a step on its device: 1 to skip, else 0."""


def free_failed_backward(device: torch.device) -> None:
    """Runs a tiny backward pass, so that torch frees the graph of a backward pass that failed.

    Otherwise torch keeps this graph until the next backward pass. A GPU has its own thread for
    backward passes, which may free the graph after this call returns. Within a backward pass this
    function does nothing.
    """
    if current_backward() == -1:
        with torch.enable_grad(), torch.inference_mode(False):
            for place in {torch.device("cpu"), device}:
                torch.zeros((), device=place, requires_grad=True).clone().backward()  # type: ignore[no-untyped-call]


# Operations on lists of tensors. On a GPU one kernel serves many dense tensors if shapes match at
# each place of the lists, else one kernel each. Names that end in _ write to the first list.
foreach_add: Callable[..., Any] = torch._foreach_add
foreach_add_: Callable[..., Any] = torch._foreach_add_
foreach_addcdiv_: Callable[..., Any] = torch._foreach_addcdiv_
foreach_copy_: Callable[..., Any] = torch._foreach_copy_
foreach_mul: Callable[..., Any] = torch._foreach_mul
foreach_neg: Callable[..., Any] = torch._foreach_neg
foreach_sqrt: Callable[..., Any] = torch._foreach_sqrt


def can_skip(optimizer: Optimizer) -> bool:
    """Whether an optimizer supports the attribute FOUND_INF."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def attributes_without_hooks(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's attributes, with all hooks removed; torch keeps hooks in dicts `*_hooks`."""
    return {
        name: OrderedDict() if name.endswith("_hooks") else value
        for name, value in vars(optimizer).items()
    }


def step_functions(kind: type[Optimizer]) -> list[type[Optimizer]]:
    """The classes in the MRO of `kind` that define a step(), the most derived first."""
    return [base for base in kind.__mro__ if "step" in vars(base) and base is not Optimizer]


def replace_step(
    owner: type[Optimizer], made: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Replaces a class's step function by `made(function)`, inside torch's wrapper for hooks.

    Torch wraps the function once in a wrapper that calls all hooks. Schedulers keep that wrapper,
    so it remains and calls the replacement from then on. Returns the replacement, even if an
    earlier call has installed it.
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
    """The code objects of torch's wrapper around step functions, which calls the hooks."""
    codes = Optimizer.profile_hook_step.__code__.co_consts
    return frozenset(code for code in codes if isinstance(code, CodeType))


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
    """torch.cuda.current_stream() for a GPU in use, without a new Stream object per call."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _stream_of(*torch._C._cuda_getCurrentStream(index))


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """torch.cuda.graph() that also resets the current stream and the allocator if it fails.

    If CUDA fails to end the capture, torch leaves the capture's stream current and the graph's pool
    open. The process then ends if a pool, such as AddressRange's, is freed later.
    """
    pool = torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.stream(stream), torch.cuda.graph(graph, pool=pool, stream=stream):
            yield
    except BaseException:
        with suppress(RuntimeError):  # CUDA has ended the capture, and torch has closed the pool
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            torch._C._cuda_releasePool(stream.device_index, pool)
        raise


def storage_uses(storage: torch.UntypedStorage) -> int:
    """The number of tensors and Python objects that refer to a storage."""
    uses: int = torch._C._storage_Use_Count(storage_id(storage))
    return uses


def storage_reference(storage: torch.UntypedStorage) -> Any:
    """A weak reference to a storage, for storage_of()."""
    made: Any = StorageWeakRef
    return made(storage)


def storage_of(reference: Any) -> torch.UntypedStorage | None:
    """The storage of a weak reference, or None if the storage has been freed."""
    made: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return cast("torch.UntypedStorage | None", made)


def is_resizable(storage: torch.UntypedStorage) -> bool:
    """Whether a storage may be emptied and get other memory.

    Shared memory on the CPU may not, although torch calls it resizable: resize_() from no bytes
    then ends the process.
    """
    return storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())


def storage_at(address: int, device: torch.device, count: int) -> torch.UntypedStorage:
    """A storage of `count` bytes at an address of a device, which does not own the memory."""
    made: Any = torch._C._construct_storage_from_data_pointer(address, device, count)
    return cast(torch.UntypedStorage, made)

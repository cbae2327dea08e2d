"""Embedding and EmbeddingBag: torch's modules, with their rows in host memory."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtorch.attach import watch_steps
from speedtorch.table import HostTable
from speedtorch.table_rows import TableRows

__all__ = ["Embedding", "EmbeddingBag"]

# What sum_rows adds up.
_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_Rows = Tensor | HostTable
_Source = _Rows | str | os.PathLike[str]
_Device = str | int | torch.device | None
_Self = TypeVar("_Self", bound="RowModule")  # typing.Self needs Python 3.11.

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _not_compiled(function: _Function) -> _Function:
    """Breaks a graph that torch.compile makes; costs nothing where none is made."""
    reason = "the number of held rows changes from step to step"
    broken = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]

    @wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        chosen = broken if torch.compiler.is_compiling() else function
        return chosen(*args, **kwargs)

    return cast(_Function, either)


class RowModule(nn.Module):
    """What Embedding and EmbeddingBag share: the rows, and how they come and go."""

    weight: nn.Parameter
    sparse: bool

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        source: _Rows | None,
        freeze: bool,
        device: _Device,
        dtype: torch.dtype | None,
        memory: str,
    ) -> None:
        super().__init__()
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(
                    f"padding_idx: expected {-num_embeddings} to {num_embeddings - 1} for"
                    f" {num_embeddings} rows, got {padding_idx}"
                )
            padding_idx %= num_embeddings
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        expected = (num_embeddings, embedding_dim)
        if isinstance(source, Tensor) and tuple(source.shape) != expected:
            raise ValueError(f"_weight: expected the shape {expected}, got {tuple(source.shape)}")
        initialise = None
        if isinstance(source, HostTable):
            table = source
            if tuple(table["weight"].shape) != expected:
                raise ValueError(f"_weight: expected the shape {expected}, got {table!r}")
        elif isinstance(source, Tensor):
            table = HostTable(*expected, dtype or source.dtype, memory=memory)
        else:
            table = HostTable(*expected, dtype or torch.get_default_dtype(), memory=memory)
            # The numbers are drawn at the first use; which ones is decided now.
            seed = int(torch.randint(2**63 - 1, (), device="cpu"))
            initialise = partial(self._draw, seed=seed)
        # The device that torch would take, which may be a default that the user has set.
        held = torch.empty(0, embedding_dim, dtype=table["weight"].dtype, device=device)
        self.weight = nn.Parameter(held, requires_grad=not freeze)
        self.table_rows = TableRows(
            type(self).__name__,
            table,
            self.weight,
            padding_idx,
            initialise,
            source=source if isinstance(source, Tensor) else None,
            owned=not isinstance(source, HostTable),
        )
        watch_steps(self.table_rows)

    def _draw(self, table: HostTable, seed: int | None) -> None:
        table.normal_(0, 1, seed=seed)
        if self.padding_idx is not None:
            table["weight"][self.padding_idx].zero_()

    @property
    def table(self) -> HostTable:
        """The HostTable with all rows and their state; current after flush()."""
        return self.table_rows.table

    def reset_parameters(self) -> None:
        """Draws all rows anew from N(0, 1); the padding's row becomes zero."""
        self.table_rows.swapper.let_go()
        self._draw(self.table, None)

    def announce(self, *ids: Tensor) -> None:
        """Brings all rows of the lookups to come at once.

        A step of several lookups then has one exchange. The optimizer's step changes every row that
        was announced, as if it had been looked up.

        Args:
            *ids: Of any shape, on either device; the tensors that the lookups will be given.

        Raises:
            IndexError: An id is out of range.
        """
        self._check_use()
        self.table_rows.swapper.announce(ids)

    def flush(self) -> None:
        """Brings the table up to date, for who reads it on the CPU.

        Raises:
            IndexError: An id that the GPU found out of range.
        """
        self.table_rows.swapper.flush()

    # --------------------------------------------------------------------------------------------

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and self.weight.requires_grad

    def _gives_sparse(self) -> bool:
        """Whether autograd makes a sparse gradient."""
        if self.sparse:
            return True
        # torch adds up the rows of a dense one in a tenth of the time on a GPU, but not in the same
        # order; the swapper makes it sparse when the optimizer wants that.
        exact = self.weight.is_cpu or torch.are_deterministic_algorithms_enabled()
        return exact and self.table_rows.swapper.takes_sparse

    def _rows_for(
        self, ids: Tensor, max_norm: float | None, norm_type: float
    ) -> tuple[Tensor, Tensor, int | None]:
        """Positions of the ids' rows, the rows they are in, and the padding's position."""
        swapper = self.table_rows.swapper
        if self._trains():
            local, rows = swapper.lookup(ids, max_norm, norm_type)
        else:
            batch, local, rows = swapper.borrow(ids)
            if max_norm is not None:
                with torch.no_grad():
                    torch.embedding_renorm_(rows, local, max_norm, norm_type)
                swapper.write_back(batch, rows)
        return local, rows, None if self.padding_idx is None else len(rows) - 1

    def _check_use(self) -> None:
        parameter = self.table_rows.parameter
        name = type(self).__name__
        if self._parameters.get("weight") is not parameter:
            raise RuntimeError(
                f"{name}: its weight was replaced by another parameter; write to emb.table, or use"
                " from_pretrained or load_state_dict"
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise NotImplementedError(
                f"{name}: hooks of its weight's gradient are not called, as the weight is another"
                " set of rows in each step; put a hook on the lookup's result"
            )
        active = nn.parallel.DistributedDataParallel._active_ddp_module
        if active is not None and parameter.requires_grad:
            ignored = active.parameters_to_ignore
            names = {n for n, held in active.module.named_parameters() if held is parameter}
            if names - set(ignored):
                raise NotImplementedError(
                    f"{name}: DistributedDataParallel cannot average the gradients of rows that"
                    " differ between processes; train on one GPU, or leave the weight out with"
                    " DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
                )

    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Self:
        name = type(self).__name__
        moved = fn(self.weight.detach()[:0])
        if moved.dtype != self.weight.dtype:
            raise TypeError(
                f"{name}: its table stays {self.weight.dtype}, as another dtype would need a second"
                f" table; build it with dtype={moved.dtype}, and use torch.autocast for mixed"
                " precision"
            )
        if moved.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"{name}: rows are held on the CPU or a GPU, not {moved.device}"
            )
        if moved.device != self.weight.device:
            swapper = self.table_rows.swapper
            swapper.let_go()
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            swapper.let_go()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.flush()
        destination[f"{prefix}weight"] = self.table["weight"]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}weight"
        others = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if key not in state_dict:
            return
        if key in missing_keys:
            missing_keys.remove(key)
        value, field = state_dict[key], self.table["weight"]
        if value.shape != field.shape:
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {tuple(value.shape)} from"
                f" checkpoint, the shape in current model is {tuple(field.shape)}."
            )
            return
        self.table_rows.swapper.let_go()
        self.table_rows.write("weight", value)

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        self.flush()
        made = type(self).__new__(type(self))
        nn.Module.__init__(made)
        memo[id(self)] = made
        for name, value in vars(self).items():
            if name not in ("table_rows", "_parameters"):
                vars(made)[name] = copy.deepcopy(value, memo)
        table, weight = self.table, self.table["weight"]
        kind = "auto" if table.memory == "file" else table.memory
        device = table.device if table.memory == "cuda" else None
        fields = {"weight": table.fields["weight"]}
        copied = HostTable.from_fields(table.rows, fields, kind, device=device)
        copied["weight"].copy_(weight)
        held = self.weight.detach()[:0].clone()
        made.weight = nn.Parameter(held, requires_grad=self.weight.requires_grad)
        memo[id(self.weight)] = made.weight
        made.table_rows = TableRows(type(self).__name__, copied, made.weight, self.padding_idx)
        watch_steps(made.table_rows)
        return made

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is not pickled, as its table is in this process's memory: save"
            " model.state_dict(), or emb.table.save(path)"
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__}: DataParallel would copy its rows to every GPU; use one GPU"
        )


class Embedding(RowModule):
    """torch.nn.Embedding with its rows, and what an optimizer keeps of them, in host memory.

    Arguments and results are those of torch.nn.Embedding, and so are the numbers: those that the
    same optimizer gives when it is stepped with the rows that were looked up (SparseAdam's rule,
    for every optimizer: rows that a step does not look up stay, and there is one step count).

    Each row of a step is held once on the device, from its first lookup until the lookup that
    follows the optimizer's step. A gradient that is left over then is dropped with the rows.

    Args:
        num_embeddings: Rows.
        embedding_dim: Columns.
        padding_idx: Id of a row that is never trained.
        max_norm: Rows with a larger norm are shortened when they are looked up.
        norm_type: The p of that norm.
        scale_grad_by_freq: Divide a row's gradient by how often the lookup names it.
        sparse: Give the optimizer a sparse gradient of the held rows.
        device: Where lookups give their rows; the table is in host memory.
        dtype: The elements of the rows.
        memory: The table's memory, as for HostTable.

    Attributes:
        weight: The held rows `[n, embedding_dim]`; n changes from step to step.
        table: The HostTable; current after flush().

    Raises:
        MemoryError: The machine has too little memory; nothing was taken.
        ValueError: padding_idx is no row.

    Example:
        >>> embedding = Embedding(1_000_000, 8)
        >>> embedding(torch.tensor([[4, 999_999], [4, 4]])).shape, embedding.weight.shape
        (torch.Size([2, 2, 8]), torch.Size([2, 8]))
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: _Rows | None = None,
        _freeze: bool = False,
        device: _Device = None,
        dtype: torch.dtype | None = None,
        *,
        memory: str = "auto",
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, _weight, _freeze, device, dtype, memory
        )
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse

    @_not_compiled
    def forward(self, input: Tensor) -> Tensor:
        """Looks rows up.

        Args:
            input: int32 or int64 ids of any shape, on either device.

        Returns:
            `[*input.shape, embedding_dim]` on the module's device.

        Raises:
            IndexError: An id is out of range.
        """
        self._check_use()
        swapper = self.table_rows.swapper
        if not self._trains() and self.max_norm is None:
            return swapper.read(input)
        if self._sums_by_plan():
            return swapper.look_up(input)
        local, rows, padding = self._rows_for(input, self.max_norm, self.norm_type)
        return F.embedding(
            local, rows, padding, None, 2.0, self.scale_grad_by_freq, self._gives_sparse()
        )

    def _sums_by_plan(self) -> bool:
        """Whether gradients may be added up in an order of our own."""
        exact = self.weight.is_cpu or torch.are_deterministic_algorithms_enabled()
        own = self.padding_idx is None and self.max_norm is None and not self.scale_grad_by_freq
        return own and not exact and not self.sparse and self.weight.dtype in _SUMMED

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults."""
        return _described(
            self,
            padding_idx=None,
            max_norm=None,
            norm_type=2.0,
            scale_grad_by_freq=False,
            sparse=False,
        )

    @classmethod
    def from_pretrained(
        cls,
        embeddings: _Source,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        device: _Device = None,
        memory: str = "auto",
    ) -> Embedding:
        """Makes an Embedding of rows that exist.

        Args:
            embeddings: `[rows, columns]`, copied; a HostTable, used as it is; or
                the path of a saved one (`*.safetensors`, `*.npy`), read without a second copy.
            freeze: Do not train them.
            padding_idx: As for Embedding.
            max_norm: As for Embedding.
            norm_type: As for Embedding.
            scale_grad_by_freq: As for Embedding.
            sparse: As for Embedding.
            device: As for Embedding.
            memory: As for Embedding.

        Returns:
            The Embedding.

        Raises:
            ValueError: The rows have no two dimensions, or the file is broken.
            MemoryError: As for Embedding.

        Example:
            >>> Embedding.from_pretrained(torch.eye(3))(torch.tensor([2]))
            tensor([[0., 0., 1.]])
        """
        source, shape, device = _opened(embeddings, device, memory)
        made = cls(
            *shape,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            source,
            freeze,
            device,
            memory=memory,
        )
        made.table_rows.owned |= source is not embeddings
        return made

    @classmethod
    def from_module(
        cls, module: nn.Embedding, *, device: _Device = None, memory: str = "auto"
    ) -> Embedding:
        """Makes an Embedding with the rows and arguments of torch's.

        Args:
            module: Its rows are copied.
            device: As for Embedding; by default the module's.
            memory: As for Embedding.

        Returns:
            The Embedding.

        Raises:
            MemoryError: As for Embedding.

        Example:
            >>> Embedding.from_module(torch.nn.Embedding(10, 4, padding_idx=0)).padding_idx
            0
        """
        return cls.from_pretrained(
            module.weight,
            not module.weight.requires_grad,
            module.padding_idx,
            module.max_norm,
            module.norm_type,
            module.scale_grad_by_freq,
            module.sparse,
            device=device,
            memory=memory,
        ).train(module.training)


class EmbeddingBag(RowModule):
    """torch.nn.EmbeddingBag with its rows, and what an optimizer keeps of them, in host memory.

    As Embedding in every other respect. On a GPU torch's gradient of mode="max" is not the same in
    every run.

    Args:
        num_embeddings: Rows.
        embedding_dim: Columns.
        max_norm: Rows with a larger norm are shortened when they are looked up.
        norm_type: The p of that norm.
        scale_grad_by_freq: Divide a row's gradient by how often the lookup names it.
        mode: "sum", "mean" or "max".
        sparse: Give the optimizer a sparse gradient of the held rows.
        include_last_offset: Offsets end with the number of ids.
        padding_idx: Id of a row that is left out of the bags and never trained.
        device: Where lookups give their rows; the table is in host memory.
        dtype: The elements of the rows.
        memory: The table's memory, as for HostTable.

    Attributes:
        weight: The held rows `[n, embedding_dim]`; n changes from step to step.
        table: The HostTable; current after flush().

    Raises:
        MemoryError: The machine has too little memory; nothing was taken.
        ValueError: padding_idx is no row, or there is no such mode.

    Example:
        >>> bag = EmbeddingBag(1000, 8, mode="sum")
        >>> bag(torch.tensor([4, 2, 999]), torch.tensor([0, 1])).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: _Rows | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: _Device = None,
        dtype: torch.dtype | None = None,
        *,
        memory: str = "auto",
        _freeze: bool = False,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode: expected 'sum', 'mean' or 'max', got {mode!r}")
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, _weight, _freeze, device, dtype, memory
        )
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.mode = mode
        self.sparse = sparse
        self.include_last_offset = include_last_offset

    @_not_compiled
    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Looks bags of rows up and reduces each to one.

        Args:
            input: int32 or int64 ids, `[ids]` with offsets, or `[bags, ids]`, on either device.
            offsets: Where each bag begins, `[bags]` (or one more with include_last_offset).
            per_sample_weights: A factor for each id, with mode="sum" only.

        Returns:
            `[bags, embedding_dim]` on the module's device.

        Raises:
            IndexError: An id is out of range.
            ValueError: As torch.nn.functional.embedding_bag.
        """
        self._check_use()
        local, rows, padding = self._rows_for(input, self.max_norm, self.norm_type)
        if offsets is not None:
            offsets = offsets.to(local)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(rows.device)
        return F.embedding_bag(
            local,
            rows,
            offsets,
            None,
            2.0,
            self.scale_grad_by_freq,
            self.mode,
            self._gives_sparse(),
            per_sample_weights,
            self.include_last_offset,
            padding,
        )

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults."""
        return _described(
            self,
            padding_idx=None,
            max_norm=None,
            norm_type=2.0,
            scale_grad_by_freq=False,
            sparse=False,
            mode=None,
            include_last_offset=False,
        )

    @classmethod
    def from_pretrained(
        cls,
        embeddings: _Source,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        device: _Device = None,
        memory: str = "auto",
    ) -> EmbeddingBag:
        """Makes an EmbeddingBag of rows that exist; see Embedding.from_pretrained.

        Args:
            embeddings: As for Embedding.from_pretrained.
            freeze: Do not train them.
            max_norm: As for EmbeddingBag.
            norm_type: As for EmbeddingBag.
            scale_grad_by_freq: As for EmbeddingBag.
            mode: As for EmbeddingBag.
            sparse: As for EmbeddingBag.
            include_last_offset: As for EmbeddingBag.
            padding_idx: As for EmbeddingBag.
            device: As for EmbeddingBag.
            memory: As for EmbeddingBag.

        Returns:
            The EmbeddingBag.

        Raises:
            ValueError: The rows have no two dimensions, or the file is broken.
            MemoryError: As for EmbeddingBag.

        Example:
            >>> bag = EmbeddingBag.from_pretrained(torch.eye(3), mode="sum")
            >>> bag(torch.tensor([[2, 0]]))
            tensor([[1., 0., 1.]])
        """
        source, shape, device = _opened(embeddings, device, memory)
        made = cls(
            *shape,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            source,
            include_last_offset,
            padding_idx,
            device,
            memory=memory,
            _freeze=freeze,
        )
        made.table_rows.owned |= source is not embeddings
        return made

    @classmethod
    def from_module(
        cls, module: nn.EmbeddingBag, *, device: _Device = None, memory: str = "auto"
    ) -> EmbeddingBag:
        """Makes an EmbeddingBag with the rows and arguments of torch's.

        Args:
            module: Its rows are copied.
            device: As for EmbeddingBag; by default the module's.
            memory: As for EmbeddingBag.

        Returns:
            The EmbeddingBag.

        Raises:
            MemoryError: As for EmbeddingBag.

        Example:
            >>> EmbeddingBag.from_module(torch.nn.EmbeddingBag(10, 4, mode="max")).mode
            'max'
        """
        return cls.from_pretrained(
            module.weight,
            not module.weight.requires_grad,
            module.max_norm,
            module.norm_type,
            module.scale_grad_by_freq,
            module.mode,
            module.sparse,
            module.include_last_offset,
            module.padding_idx,
            device=device,
            memory=memory,
        ).train(module.training)


def _opened(
    embeddings: _Source, device: _Device, memory: str
) -> tuple[_Rows, tuple[int, int], _Device]:
    """The rows, how many of how many columns, and where lookups give them."""
    if isinstance(embeddings, str | os.PathLike):
        embeddings = HostTable.open(embeddings, memory)
    if isinstance(embeddings, HostTable):
        shape = tuple(embeddings["weight"].shape)
    else:
        shape = tuple(embeddings.shape)
        device = embeddings.device if device is None else device
    if len(shape) != 2:
        raise ValueError(f"embeddings: expected [rows, columns], got the shape {list(shape)}")
    return embeddings, (shape[0], shape[1]), device


def _described(module: RowModule, **defaults: Any) -> str:
    said = [f"{module.num_embeddings}, {module.embedding_dim}"]
    for name, default in defaults.items():
        value = getattr(module, name)
        if value != default:
            said.append(f"{name}={value!r}")
    return ", ".join(said)

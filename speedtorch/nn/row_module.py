"""RowModule: what Embedding and EmbeddingBag share: the rows, and how they come and go."""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from speedtorch.nn.row_arguments import (
    Device,
    Rows,
    check_device,
    check_values,
    check_way,
    refuse_graph,
)
from speedtorch.ops.batch_ids import check_ids
from speedtorch.optim.step_hooks import watch_steps
from speedtorch.step.row_store import Draw, RowStore
from speedtorch.step.row_weight import as_plain
from speedtorch.step.trained_rows import TrainedRows, random_seed
from speedtorch.table.host_table import HostTable

__all__ = ["RowModule"]

_Self = TypeVar("_Self", bound="RowModule")  # typing.Self needs Python 3.11.


class RowModule(nn.Module):
    """What Embedding and EmbeddingBag share: the rows, and how they come and go."""

    weight: Any
    sparse: bool
    _wanted: torch.dtype | None = None
    """The dtype that somebody has asked the rows to have, which they do not take."""

    @torch.inference_mode(False)  # or nothing made here could ever be written to
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        source: Rows | None,
        freeze: bool,
        device: Device,
        dtype: torch.dtype | None,
        memory: str,
    ) -> None:
        nn.Module.__init__(self)
        name = type(self).__name__
        check_device(name, device)
        if padding_idx is not None:
            padding_idx = operator.index(padding_idx)
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
        if not (source is None or isinstance(source, Tensor | HostTable)):
            raise TypeError(f"_weight: expected a tensor, got {type(source).__name__}")
        if isinstance(source, Tensor):
            check_values("_weight", source)
        if isinstance(source, Tensor) and tuple(source.shape) != expected:
            raise ValueError(f"_weight: expected the shape {expected}, got {tuple(source.shape)}")
        if isinstance(source, HostTable):
            if tuple(source.fields["weight"][0]) != (embedding_dim,) or source.rows != expected[0]:
                raise ValueError(f"_weight: expected the shape {expected}, got {source!r}")
            store = RowStore(name, source)
        else:
            default = torch.get_default_dtype() if source is None else source.dtype
            first = () if source is not None else (self._drawing(nn.init.normal_, padding_idx),)
            store = RowStore(name, (*expected, dtype or default), memory, first)
        # The device that torch would take, which may be a default that the user has set.
        held = torch.empty(0, embedding_dim, dtype=store.dtype, device=device)
        self.weight = nn.Parameter(held, requires_grad=not freeze)
        self.trained_rows = TrainedRows(name, store, self.weight, padding_idx)
        if isinstance(source, Tensor):
            store.load("weight", source)
        _outlive(self)
        watch_steps()

    @property
    def table(self) -> HostTable:
        """The HostTable with all rows and their state, as they are now.

        Its methods bring held rows home first. Once it is closed, lookups raise ValueError.
        """
        return self.trained_rows.table

    def init_(
        self: _Self,
        function: Callable[..., object],
        *args: Any,
        seed: int | None = None,
        **kwargs: Any,
    ) -> _Self:
        """Gives all rows first values by a function of torch.nn.init, or one like it.

        Rows that nobody has used get them when somebody does, so that calling this right after the
        constructor costs nothing. The padding's row becomes zero. State stays as it is.

        Args:
            function: Called as HostTable.init_ calls it.
            *args: Passed on.
            seed: Makes the numbers repeatable; by default torch's generator gives one now.
            **kwargs: Passed on.

        Returns:
            The module.

        Raises:
            TypeError, ValueError: As HostTable.init_, at once or at the first use.

        Example:
            >>> import speedtorch
            >>> embedding = speedtorch.Embedding(1000, 8).init_(torch.nn.init.uniform_, -0.1, 0.1)
            >>> bool(embedding.table["weight"].abs().max() <= 0.1)
            True
        """
        draw = self._drawing(function, self.padding_idx, *args, seed=seed, **kwargs)
        self.trained_rows.store.draw(draw, anew=True)
        return self

    @staticmethod
    def _drawing(
        function: Callable[..., object],
        padding: int | None,
        *args: Any,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Draw:
        """Draws a table's rows later; which numbers is decided now."""
        if "generator" in kwargs:
            raise TypeError("generator: every block of rows has its own; give seed= instead")
        seed = random_seed() if seed is None else seed
        # One that has no arguments is known by itself: no mode of torch has to look what it does.
        given = args or kwargs
        drawn = (lambda rows: function(rows, *args, **kwargs)) if given else function
        return Draw((drawn,), seed, padding)

    def reset_parameters(self) -> None:
        """Draws all rows anew from N(0, 1); the padding's row becomes zero."""
        self.init_(nn.init.normal_)

    def announce(self, *ids: Tensor) -> None:
        """Lets the next lookup bring the rows of all lookups of its step.

        A step of several lookups then has one exchange; without it each lookup that brings new rows
        copies those that are held already. The optimizer's step changes every row that was
        announced, as if it had been looked up (a sparse gradient has it, too); a zero_grad() before
        their lookups drops none of them. With several Embeddings announce to all of them before the
        first lookup: their ids are planned while nobody waits. Where lookups train nothing
        (no_grad, frozen rows) it does nothing.

        Args:
            *ids: Of any shape, on either device; the tensors that the lookups will be given.

        Raises:
            TypeError: Ids are no tensors of integers, or as for a lookup.
            IndexError: An id is out of range; where rows are held on a GPU the next lookup says so.
        """
        with as_plain():
            self._check_use()
            for each in ids:
                check_ids(f"{type(self).__name__}.announce", each)
            if ids and self._trains():
                self.trained_rows.announce(ids)

    def flush(self) -> None:
        """Brings the table up to date, for who keeps a view of it; emb.table does so by itself.

        Raises:
            IndexError: An id that the GPU found out of range.
        """
        self.trained_rows.flush()

    # --------------------------------------------------------------------------------------------

    # Within as_plain(), all of these.

    def _check_lookup(self, ids: object) -> bool:
        """Raises what a lookup of ids would, before a row moves; else whether it is for a step."""
        name, trains = type(self).__name__, self._trains()
        check_way(name, ids, trains)
        self._check_use()
        check_ids(name, ids, RuntimeError)  # which torch raises for other numbers
        return trains

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and self.trained_rows.parameter.requires_grad

    def _gives_sparse(self) -> bool:
        """Whether autograd makes a sparse gradient."""
        if self.sparse:
            return True
        # torch adds up the rows of a dense one in a tenth of the time on a GPU, but not in the same
        # order; the step makes it sparse when the optimizer wants that.
        exact = self.trained_rows.is_on_cpu or torch.are_deterministic_algorithms_enabled()
        return exact and self.trained_rows.takes_sparse

    def _rows_for(
        self, ids: Tensor, trains: bool, max_norm: float | None, norm_type: float
    ) -> tuple[Tensor, Tensor, int | None]:
        """Positions of the ids' rows, the rows they are in, and the padding's position."""
        rows_for = self.trained_rows.rows_of if trains else self.trained_rows.borrow
        local, rows = rows_for(ids, max_norm, norm_type)
        return local, rows, None if self.padding_idx is None else len(rows) - 1

    def _check_use(self) -> None:
        parameter = self.trained_rows.parameter
        name = type(self).__name__
        if self._wanted is not None:
            raise TypeError(
                f"{name}: its table stays {self.weight.dtype}, as another dtype would need a second"
                f" table, and was asked to become {self._wanted}: call emb.to({self.weight.dtype})"
                f" again (or .float() and the like), or build it with dtype={self._wanted}, and use"
                " torch.autocast for mixed precision"
            )
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
                    " differ between processes; train on one GPU"
                )

    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Self:
        def move(tensor: Tensor) -> Tensor:
            return fn(tensor).to(tensor.dtype)

        name, dtype = type(self).__name__, self.weight.dtype
        with as_plain():
            moved = fn(self.weight.detach()[:0].to(self._wanted or dtype))
            if moved.is_cpu and moved.is_shared():  # type: ignore[no-untyped-call]
                raise NotImplementedError(
                    f"{name}: its table cannot be shared once it is there; save it with"
                    " emb.table.save(path), and open that in the other processes"
                )
            check_device(name, moved.device)
            if moved.device != self.weight.device:
                self.trained_rows.moving(lambda: nn.Module._apply(self, move, recurse))  # type: ignore[no-untyped-call]
            # torch has converted other layers by now: the next lookup says that this one is not,
            # unless it is converted back before.
            self._wanted = None if moved.dtype == dtype else moved.dtype
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with as_plain():
            super()._save_to_state_dict(destination, prefix, keep_vars)
        self.flush()
        destination[f"{prefix}weight"] = self.trained_rows.store.saved("weight")

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
        value, expected = state_dict[key], self.trained_rows.shape
        if not isinstance(value, Tensor):
            error_msgs.append(f"{key}: expected a tensor, got {type(value).__name__}.")
            return
        try:
            check_values(key, value)
        except ValueError as error:
            error_msgs.append(f"{error}.")
            return
        if value.shape != expected:
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {tuple(value.shape)} from"
                f" checkpoint, the shape in current model is {tuple(expected)}."
            )
            return
        self.trained_rows.load(value)

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        made = type(self).__new__(type(self))
        nn.Module.__init__(made)
        memo[id(self)] = made
        for name, value in vars(self).items():
            if name not in ("trained_rows", "_parameters"):
                vars(made)[name] = copy.deepcopy(value, memo)
        self.trained_rows.bring_home()
        store = self.trained_rows.store.copied()
        with as_plain():
            held = self.weight.detach()[:0].clone()
            made.weight = nn.Parameter(held, requires_grad=self.weight.requires_grad)
        memo[id(self.weight)] = made.weight
        made.trained_rows = TrainedRows(type(self).__name__, store, made.weight, self.padding_idx)
        _outlive(made)
        return made

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is not pickled, as its table is in this process's memory: save"
            " model.state_dict(), or emb.table.save(path)"
        )

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_graph(type(self).__name__)

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__}: DataParallel would copy its rows to every GPU; use one GPU"
        )


def _outlive(module: RowModule) -> None:
    """Brings rows home when a module goes, whose table may stay with who gave or asked for it."""
    weakref.finalize(module, module.trained_rows.bring_home).atexit = False

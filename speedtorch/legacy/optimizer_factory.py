"""OptimizerFactory: stores the state of all rows, and loads one batch's state into the optimizer.

A probe of the optimizer finds the state and its initial values (optim/probe.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.legacy import families
from speedtorch.legacy.batch_exchange import BatchExchange, RowShape, check_type
from speedtorch.legacy.families import Datatype
from speedtorch.legacy.switcher import Stored
from speedtorch.legacy.switcher_files import CupyFiles, MappedFiles, TorchFiles
from speedtorch.optim.optimizer_copy import snapshot
from speedtorch.optim.probe import probe_optimizer
from speedtorch.table.host_table import HostTable

__all__ = [
    "CPUPytorchOptimizerFactory",
    "GPUPytorchOptimizerFactory",
    "OptimizerFactory",
    "OptimizerFactoryMM",
    "PytorchOptimizerFactory",
]


class OptimizerSwitcher(BatchExchange):
    """The common base of the OptimizerFactory classes."""

    _how_to_start = "optInit() or a load method first"

    def _start(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: RowShape,
        model: nn.Module,
        variable_name: str,
        dtype: Datatype = torch.float32,
        *,
        table: HostTable | None = None,
    ) -> None:
        """Finds the variable, probes the optimizer and checks that all arguments fit."""
        check_type("given_optimizer", given_optimizer, Optimizer)
        check_type("model", model, nn.Module)
        self.given_optimizer = given_optimizer
        self.model = model
        self.variable_name = variable_name
        name = f"{variable_name}{type(given_optimizer).__name__}"
        self._place = replace(self._place, diskname=name)  # used if the place is a file
        parameters = dict(model.named_parameters(remove_duplicate=False))
        found = [n for n in (f"{variable_name}.weight", variable_name) if n in parameters]
        if not found:
            valid = ", ".join(sorted(param.removesuffix(".weight") for param in parameters))
            raise ValueError(
                f"variable_name must be a variable of {type(model).__name__} ({valid}), got"
                f" {variable_name!r}"
            )
        self._found: Tensor = parameters[found[0]]
        self._fit_rows(total_classes, embed_dimension, dtype, "dtype", repr(variable_name))
        self._probe = probe_optimizer(given_optimizer, self._found)
        self._given_table = table
        if table is not None:
            self._check_table(table)

    def _parameter(self) -> Tensor:
        return self._found

    def _row_fields(self) -> families.Fields:
        return {name: (row.shape, row.dtype) for name, row in self._probe.row_state.items()}

    @property
    def optVarList(self) -> list[str]:
        """The names of the optimizer state with one row per class."""
        return list(self._row_fields())

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.given_optimizer.state.get(self._found, {})
        return state

    def _set_rows(self, entries: Mapping[str, Any]) -> None:
        """Sets entries of the variable's optimizer state, and missing scalars, in one update."""
        state = self._state()
        scalars = self._probe.scalar_state.items()
        missing = {name: snapshot(value) for name, value in scalars if name not in state}
        self.given_optimizer.state.setdefault(self._found, {}).update({**missing, **entries})

    def _make(self, place: families.TablePlace) -> Stored:
        if not self._row_fields():  # plain SGD has no state to store
            return Stored(None, {})
        if self._given_table is not None:
            return self._all_of(self._given_table)
        return super()._make(place)

    def _rows(self) -> dict[str, Tensor]:
        # State from a file needs no optInit, which would overwrite it with initial values.
        if self._given_table is not None and self._given_table.was_read:
            self._store(self._stored_or_new())
        return super()._rows()

    def optInit(self) -> None:
        """Creates the table, with the optimizer's initial state for every row.

        The step count, which the optimizer keeps once for the whole variable, does not restart. For
        an optimizer without state per row (plain SGD), no table is created.
        """
        self._commit(partial(self._initialize, self._stored_or_new()))

    def _initialize(self, stored: Stored) -> None:
        if stored.table is not None:
            for name, row in self._probe.row_state.items():
                stored.table.fill_(row.cpu(), name)
        self._store(stored)

    def _trained_rows(self, name: str) -> tuple[Tensor, str]:
        trained = self._state().get(name)
        if not isinstance(trained, Tensor):
            raise RuntimeError(
                f"afterOptimizerStep: the optimizer has no state {name!r} of"
                f" {self.variable_name!r}. Call beforeForwardPass before the optimizer's step."
            )
        return trained, f"the optimizer's {name!r}"

    def getNumpyVersion(self) -> dict[str, npt.NDArray[Any]]:
        """A copy of the state of all rows as NumPy arrays by name.

        Raises TypeError for a dtype that NumPy lacks, such as bfloat16.
        """
        return self._to_numpy()

    # ---- Files contain the full state of each row. State that the optimizer keeps once (the step
    # count) is repeated for each row, so that one file, replaced atomically, is enough to resume.

    def _repeated(self) -> dict[str, Tensor]:
        """The optimizer state without rows, repeated for each row, on the CPU."""
        state = self._state()
        known = {name: state.get(name, value) for name, value in self._probe.scalar_state.items()}
        if not known and not self._probe.row_state:
            raise ValueError(
                f"{type(self.given_optimizer).__name__} with these settings keeps no state, so"
                " there is nothing to save or load"
            )
        for name, value in known.items():
            if not isinstance(value, Tensor | int | float):
                raise ValueError(
                    f"the optimizer's state {name!r} is a {type(value).__name__}, which files of"
                    " rows cannot contain. Save optimizer.state_dict() beside the table."
                )
        once = {name: torch.as_tensor(value).detach().cpu() for name, value in known.items()}
        return {name: v.expand(self.total_classes, *v.shape) for name, v in once.items()}

    def _to_save(self) -> dict[str, Tensor]:
        repeated = self._repeated()
        return self._rows() | repeated

    def _layout(self) -> families.Fields:
        repeated = self._repeated().items()
        return {**super()._layout(), **{name: (tuple(v.shape), v.dtype) for name, v in repeated}}

    def _to_load(self) -> dict[str, Tensor]:
        repeated = self._repeated().items()
        return super()._to_load() | {name: v.new_empty(v.shape) for name, v in repeated}

    def _loaded(self, content: dict[str, Tensor]) -> None:
        scalars: dict[str, Any] = {}
        for name, value in self._probe.scalar_state.items():
            if self.total_classes:
                first = content[name][0]
                is_tensor = isinstance(value, Tensor)
                scalars[name] = first.to(value.device, copy=True) if is_tensor else first.item()
        self._set_rows(scalars)


class OptimizerFactory(
    CupyFiles, OptimizerSwitcher, place=families.host_or_variable, dtype="float32"
):
    """Stores the optimizer state of all rows; the optimizer has the state of one batch.

    Replaces SpeedTorch's class of 2019. Any optimizer works that treats rows separately, including
    optimizers outside torch: SGD, SparseAdam, Adam, AdamW, Adamax, Adadelta, Adagrad, RMSprop,
    Rprop, ASGD, NAdam, RAdam and others. Other variables and groups of the optimizer do not change.

    Args:
        given_optimizer: The optimizer, built with the model's parameters.
        total_classes: Number of rows of the whole table.
        embed_dimension: Number of columns of a row, or its shape.
        model: The model with the variable.
        variable_name: The variable's name in the model, such as "u_embeddings".
        dtype: The variable's dtype, as a NumPy-style name or a torch dtype.
        CPUPinn: True keeps the table in host memory for the GPU; False on the variable's device.
        table: A HostTable with one field per state. Sharing it with ModelFactory shares the records
            and the plan of each batch.

    Raises:
        TypeError, ValueError: An argument does not fit, or the optimizer does not treat rows
            separately.

    Example:
        >>> model = torch.nn.ModuleDict({"u": torch.nn.Embedding(2, 3)})
        >>> optimizer = torch.optim.Adamax(model.parameters())
        >>> switcher = OptimizerFactory(optimizer, 1000, 3, model, "u", CPUPinn=True)
        >>> switcher.optInit()
        >>> switcher.beforeForwardPass([7, 999])
        >>> model["u"].weight.sum().backward()
        >>> optimizer.step()
        >>> switcher.afterOptimizerStep([7, 999])
        >>> switcher.getNumpyVersion()["exp_inf"][[6, 7]].tolist()
        [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """

    CUPYcorpi = property(OptimizerSwitcher._listed_variable)


class GPUPytorchOptimizerFactory(TorchFiles, OptimizerSwitcher, place=families.with_variable):
    """OptimizerFactory with the table on the variable's device, and torch's file format."""


class CPUPytorchOptimizerFactory(TorchFiles, OptimizerSwitcher, place=families.in_host_memory):
    """OptimizerFactory with the table in host memory, and torch's file format."""


class PytorchOptimizerFactory(TorchFiles, OptimizerSwitcher, place=families.of_kind):
    """OptimizerFactory with the place chosen by deviceType and pinType, and torch's files."""


class OptimizerFactoryMM(
    MappedFiles, OptimizerSwitcher, place=partial(families.in_file, ""), dtype="float32"
):
    """OptimizerFactory with the table in a memory-mapped file.

    The file's name is `<variable_name><optimizer class><number>.memmap`.
    """

"""COM: a table of counts, classes by classes, such as a co-occurrence matrix.

Five families with one implementation; families.py says what they differ in.
"""

from __future__ import annotations

import torch

from speedtorch.legacy.families import (
    Datatype,
    TablePlace,
    as_dtype,
    default_device,
    host_or_variable,
    in_file,
    in_host_memory,
    of_family,
    of_kind,
    with_variable,
)
from speedtorch.legacy.switcher import OneField
from speedtorch.legacy.switcher_files import CupyFiles, MappedFiles, TorchFiles

__all__ = ["COM", "COMMM", "CPUPytorchCOM", "GPUPytorchCOM", "PytorchCOM"]


class CountSwitcher(OneField):
    """What the COM of every family does."""

    _how_to_start = "comInit() or a load method first"

    def _start(
        self, place: TablePlace, total_classes: int, datatype: Datatype = torch.int32
    ) -> None:
        """Checks the arguments; comInit makes the table."""
        super().__init__()
        self.total_classes = total_classes
        self._place = place
        self._dtype = as_dtype(datatype, "datatype")

    def comInit(self) -> None:
        """Makes the table `[total_classes, total_classes]`, all zeros."""
        self._make(self._place)

    def _make(self, place: TablePlace) -> None:
        fields = {"weight": ((self.total_classes,), self._dtype)}
        made = place.make_table(self.total_classes, fields, default_device())
        self._use_table(made, ("weight",))

    def _layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"weight": ((self.total_classes, self.total_classes), self._dtype)}

    def _to_load(self) -> dict[str, torch.Tensor]:
        if self._stored is None:
            self.comInit()
        return super()._to_load()


@of_family(host_or_variable, datatype="uint32")
class COM(CupyFiles, CountSwitcher):
    """Counts of pairs of classes.

    After SpeedTorch's class of 2019.

    Args:
        total_classes: rows and columns.
        datatype: a NumPy-style name or a torch dtype.
        CPUPinn: True keeps the table in host memory that the GPU reaches; False on the GPU, or
            without one in ordinary memory.

    Example:
        >>> counts = COM(3, datatype="int32")
        >>> counts.comInit()
        >>> counts.getNumpyVersion().shape
        (3, 3)
    """

    def comInit(self, CPUPinn: bool = False) -> None:
        """Makes the table `[total_classes, total_classes]`, all zeros.

        Args:
            CPUPinn: True does here what it does where the object is made.
        """
        self._make(host_or_variable(True) if CPUPinn else self._place)


@of_family(with_variable)
class GPUPytorchCOM(TorchFiles, CountSwitcher):
    """COM with the table on the GPU, if there is one, and torch's files."""


@of_family(in_host_memory)
class CPUPytorchCOM(TorchFiles, CountSwitcher):
    """COM with the table in host memory, and torch's files."""


@of_family(of_kind)
class PytorchCOM(TorchFiles, CountSwitcher):
    """COM with the table where deviceType and pinType say, and torch's files."""


@of_family(in_file, diskname="COM", datatype="uint32")
class COMMM(MappedFiles, CountSwitcher):
    """COM with the table in a memory-mapped file, `<diskname><number>.memmap`."""

    def comInit(self, CPUPinn: bool = False) -> None:
        """Makes the table `[total_classes, total_classes]`, all zeros.

        Args:
            CPUPinn: without effect, as where the object is made.
        """
        self._make(in_file(self._place.diskname, CPUPinn))

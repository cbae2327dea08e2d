"""COM: a square table of counts per pair of classes, such as a co-occurrence matrix.

Switcher explains the class arguments such as `place`, and creates the constructors.
"""

from __future__ import annotations

import torch

from speedtorch.legacy import families
from speedtorch.legacy.families import Datatype
from speedtorch.legacy.switcher import OneField
from speedtorch.legacy.switcher_files import CupyFiles, MappedFiles, TorchFiles
from speedtorch.ops.shapes import row_count

__all__ = ["COM", "COMMM", "CPUPytorchCOM", "GPUPytorchCOM", "PytorchCOM"]


class CountSwitcher(OneField):
    """The common base of the COM classes."""

    _how_to_start = "comInit() or a load method first"

    def _start(self, total_classes: int, datatype: Datatype = torch.int32) -> None:
        """Stores the arguments; comInit allocates the table."""
        self.total_classes = row_count(total_classes, "total_classes")
        self._row_shape = (self.total_classes,)
        self._dtype = families.as_dtype(datatype, "datatype")

    def comInit(self) -> None:
        """Allocates the table `[total_classes, total_classes]` with zeros."""
        self._store(self._make(self._place))


class COM(CupyFiles, CountSwitcher, place=families.host_or_variable, datatype="int32"):
    """Counts of pairs of classes.

    Replaces SpeedTorch's class of 2019, whose dtype was uint32. Torch cannot add uint32.

    Args:
        total_classes: Number of rows and columns.
        datatype: A NumPy-style name or a torch dtype.
        CPUPinn: True keeps the table in host memory that the GPU can access. False keeps the table
            on the GPU, or without a GPU in ordinary memory.

    Example:
        >>> counts = COM(3)
        >>> counts.comInit()
        >>> counts.CUPYCom[0, 2] += 1
        >>> counts.getNumpyVersion()[0].tolist()
        [0, 0, 1]
    """

    CUPYCom = property(CountSwitcher._variable)

    def comInit(self, CPUPinn: bool = False) -> None:
        """Allocates the table `[total_classes, total_classes]` with zeros.

        Args:
            CPUPinn: True has the same effect as in the constructor. False keeps the constructor's
                choice.
        """
        place = families.host_or_variable(CPUPinn=True) if CPUPinn else self._place
        self._store(self._make(place))


class GPUPytorchCOM(TorchFiles, CountSwitcher, place=families.with_variable):
    """COM with the table on the GPU, if there is one, and torch's file format."""


class CPUPytorchCOM(TorchFiles, CountSwitcher, place=families.in_host_memory):
    """COM with the table in host memory, and torch's file format."""


class PytorchCOM(TorchFiles, CountSwitcher, place=families.of_kind):
    """COM with the table's place chosen by deviceType and pinType, and torch's file format."""


class COMMM(MappedFiles, CountSwitcher, place=families.in_file, diskname="COM", datatype="int32"):
    """COM with the table in a memory-mapped file, `<diskname><number>.memmap`."""

    def comInit(self, CPUPinn: bool = False) -> None:
        """Allocates the table `[total_classes, total_classes]` with zeros.

        Args:
            CPUPinn: No effect except a warning if True, as in the constructor.
        """
        self._store(self._make(families.in_file(self._place.diskname, CPUPinn)))

"""HostTable: all rows of a huge table, and what an optimizer remembers about them, as records.

The table lies in host memory that a GPU reads and writes in place. One row's weight and state are
neighbours there, so that they travel as one run of bytes; each field is an ordinary strided tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import torch

from speedtorch.files import table_files
from speedtorch.table.initialise import Initialisers
from speedtorch.table.record_layout import weight_and_state

__all__ = ["HostTable"]

_Shape = int | Sequence[int]
_Device = str | int | torch.device | None
_Path = str | os.PathLike[str]


class HostTable(Initialisers):
    """A table of records, one per row, with a weight and any number of fields beside it.

    Fields of one dtype lie side by side in the given order; with different dtypes larger items come
    first. `table["weight"]` is the weight of all rows, `[rows, *dim]`, a strided view of the
    records that shares their memory; `table.record` is everything, `[rows, columns]`.

    Rows that a module's step holds come home before any method, `table["weight"]` or `table.record`
    gives or takes rows. Who keeps a view calls `flush()` before reading it, for that reason and as
    the GPU writes to the table on its own time. In a forked child (a DataLoader worker) managed
    memory cannot be used and every method says so; memory="registered" can, and a spawned process
    opens a saved table by its name.

    Args:
        rows: Number of rows.
        dim: Columns of the weight, or the shape of one of its rows.
        dtype: The weight's elements.
        state: Names of fields like the weight, as the optimizer names its state, or a mapping of
            names to (shape, dtype).
        memory: "managed" or "registered": host memory that the GPU reads in place; "plain": any
            host memory; "auto": the fastest that this machine has. "cuda": on the GPU. "file": a
            file mapped into memory, for tables beyond the memory (a GPU reaches it by staged
            copies only: pinning would hold all of it in memory).
        device: The GPU of memory="cuda".
        path: The new file of memory="file": the records alone, without a header. Nobody may
            shorten it while the table lives.

    Attributes:
        rows: Number of rows.
        dim: Columns or shape of the weight's rows; None if there is no weight.
        dtype: The weight's elements; without a weight those that all fields share, or else None.
        memory: Where the rows are: "managed", "registered", "plain", "cuda" or "file".
        device: The device of its tensors: the CPU, or a GPU with memory="cuda".
        fields: Name to (row shape, dtype).
        record_bytes: Bytes from one record to the next.
        nbytes: Bytes of all records.
        plans: The plans of the last batches, for all SpeedTorch classes that share the table.

    Raises:
        TypeError, ValueError: Arguments of the wrong type or beyond what is allowed.
        MemoryError: The machine has too little memory; nothing was taken.
        OSError: The file exists already or cannot be made.

    Example:
        >>> table = HostTable(1000, 4, state=("exp_avg",), memory="plain").normal_(0, 1, seed=3)
        >>> table["exp_avg"].shape, table.record.shape
        (torch.Size([1000, 4]), torch.Size([1000, 8]))
        >>> torch.equal(table.gather(torch.tensor([7, 7]), "weight")[1], table["weight"][7])
        True
    """

    def __init__(
        self,
        rows: int,
        dim: _Shape,
        dtype: torch.dtype = torch.float32,
        state: Iterable[str] | Mapping[str, tuple[_Shape, torch.dtype]] = (),
        memory: str = "auto",
        *,
        device: _Device = None,
        path: _Path | None = None,
    ) -> None:
        fields = weight_and_state(dim, dtype, state)
        super().__init__(rows, fields, memory, device, path)

    @classmethod
    def from_fields(
        cls,
        rows: int,
        fields: Mapping[str, tuple[_Shape, torch.dtype]],
        memory: str = "auto",
        *,
        device: _Device = None,
        path: _Path | None = None,
    ) -> HostTable:
        """Makes a table of any fields; none of them has to be a weight.

        Args:
            rows: Number of rows.
            fields: Name to (row shape, dtype).
            memory: As for HostTable.
            device: As for HostTable.
            path: As for HostTable.

        Returns:
            The table, all zeros.

        Raises:
            TypeError, ValueError, MemoryError, OSError: As for HostTable.

        Example:
            >>> HostTable.from_fields(3, {"sum": (2, torch.float32)}, memory="plain").record_bytes
            8
        """
        table = cls.__new__(cls)
        Initialisers.__init__(table, rows, fields, memory, device, path)
        return table

    @classmethod
    def open(
        cls,
        source: _Path,
        memory: str = "auto",
        *,
        device: _Device = None,
        path: _Path | None = None,
    ) -> HostTable:
        """Makes a table with the fields and the rows of a saved one.

        The file is read, not mapped: pinning a mapped file would hold it in memory twice.

        Args:
            source: What save() was given, or a file of anyone's: `*.safetensors` whose tensors all
                have the same number of rows, or `*.npy`.
            memory: As for HostTable.
            device: As for HostTable.
            path: As for HostTable: the new file of memory="file".

        Returns:
            The table.

        Raises:
            ValueError: The file is broken or holds no table; found before memory is taken.
            MemoryError, OSError: As for HostTable, or the file cannot be read.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     HostTable(2, 1, memory="plain").fill_(7).save(f"{folder}/t.safetensors")
            ...     HostTable.open(f"{folder}/t.safetensors", "plain")["weight"].tolist()
            [[7.0], [7.0]]
        """
        with table_files.open_fields(source) as stored:
            fields = {name: (each.shape[1:], each.dtype) for name, each in stored.items()}
            rows = next(iter(stored.values())).shape[0]
            table = cls.from_fields(rows, fields, memory, device=device, path=path)
            try:
                table._read(stored)
            except BaseException:
                table._placed().remove_file()
                table.close()
                raise
        return table

    def save(self, path: _Path) -> None:
        """Saves all fields; the files appear whole or not at all, and are on the disk then.

        Rows go through a few MB of memory. What was saved there before stays until the switch.

        Args:
            path: `*.safetensors` for one file with all fields, or `*.npy` for one file per field:
                `table.weight.npy`, `table.exp_avg.npy` for `table.npy`; a table with a weight only
                goes to `table.npy` itself.

        Raises:
            ValueError: Another ending, a dtype or a name that the format cannot hold, or the
                table's own mapped file.
            OSError: The disk is full, or another file call failed.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     HostTable(2, 1, memory="plain").save(f"{folder}/rows.npy")
            ...     os.listdir(folder)
            ['rows.npy']
        """
        self.settle()
        own = self._placed().path
        if own is not None and os.path.realpath(path) == os.path.realpath(own):
            raise ValueError(f"{os.fspath(path)}: is the file that the rows are in; choose another")
        table_files.save_fields(path, {name: self[name] for name in self.fields})

    was_read = False
    """True once rows were read from a file; they are not initial values then."""

    def load(self, path: _Path) -> None:
        """Reads all fields from what save() wrote, or from files like it.

        Args:
            path: As for save().

        Raises:
            ValueError: The file is broken, or its fields' names, shapes or dtypes are not those of
                the table; no row has changed.
            OSError: A file cannot be opened (no row has changed) or read (the message says so).

        Example:
            >>> import tempfile
            >>> table = HostTable(2, 1, memory="plain")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     HostTable(2, 1, memory="plain").fill_(7).save(f"{folder}/rows.npy")
            ...     table.load(f"{folder}/rows.npy")
            >>> table["weight"].tolist()
            [[7.0], [7.0]]
        """
        self.settle()
        with table_files.open_fields(path, self.fields) as stored:
            if set(stored) != set(self.fields):
                raise ValueError(
                    f"{os.fspath(path)}: it holds the fields {sorted(stored)}, the table "
                    f"{sorted(self.fields)}"
                )
            for name, (shape, dtype) in self.fields.items():
                each = stored[name]
                if (each.shape, each.dtype) != ((self.rows, *shape), dtype):
                    raise ValueError(
                        f"{each.path}: {name!r} is {each.dtype} {list(each.shape)}, the table "
                        f"needs {dtype} {[self.rows, *shape]}"
                    )
            self._read(stored)

    def _read(self, stored: Mapping[str, table_files.StoredField]) -> None:
        for name, each in stored.items():
            each.read_into(self[name])
        self.settle()
        self.was_read = True

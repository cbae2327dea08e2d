"""Exchange: the rows that a step holds leave for their table while those of the next arrive.

A step holds each row that is asked for once, as a parameter and as the optimizer's state of it. The
first rows that are asked for after the optimizer's step begin the next step: one exchange brings
the rows of the last one back to the table while others arrive, and rows of both stay.

A step is a value and is never changed. Another one becomes current by one assignment: what comes
before that can be thrown away, what comes after it can be repeated.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from speedtorch.memory.side_stream import MemoryStream, SideStream
from speedtorch.ops.functions import carry_rows, raises_later
from speedtorch.plan.fitted_batch import FittedBatch, raises_at_once
from speedtorch.plan.joint_batch import JointBatch
from speedtorch.plan.planned_batch import PlannedBatch
from speedtorch.step.announcements import Announced, Announcements
from speedtorch.step.fixed_blocks import REFUSED, FixedBlocks, of_ranks
from speedtorch.step.gradient_sums import among_more, sparse_of_all
from speedtorch.step.row_store import Block, Fields, RowStore
from speedtorch.step.turn import Turn, alone
from speedtorch.torch_internals import (
    TensorWeakRef,
    as_plain,
    current_backward,
    forget_failed_backward,
    of_another_dtype,
    sparse_values,
    version_of,
)

__all__ = [
    "Batch",
    "Exchange",
    "HeldState",
    "OptimizerCall",
    "Placed",
    "ShownRows",
    "Step",
    "replace_rows",
]

_PATIENCE = 2.0  # seconds: a step of held rows takes milliseconds
_LOOK = 1e-3  # seconds between two looks at the step of another thread

Rows = list[Tensor]
"""Rows of every field `[n, ...]`, in the same order."""

_Made = TypeVar("_Made")

Batch: TypeAlias = PlannedBatch | FittedBatch
"""What a step holds the rows of; of the second nobody knows how many they are."""


class Coming(NamedTuple):
    """Rows that have arrived for the next batch, or are about to."""

    batch: Batch
    rows: Rows
    """Those that left the step before while they arrived are newer than the table's."""


class Placed(NamedTuple):
    """A part of a batch whose rows a step holds."""

    batch: Batch
    number: int
    """Of the batch, among the step's."""
    part: int
    positions: Tensor
    """Which held rows the ids name, in their shape."""
    has_moved: bool
    """Whether its rows may have had other positions when it was looked up first."""


class Step(NamedTuple):
    """The rows that are held, where, planned by what, and in which phase."""

    number: int
    """Counts steps: rows that a graph of an earlier one looked up have left."""
    ids: Tensor
    """Of the rows, ascending, without the padding's."""
    rows: Rows
    """The padding's is the last: it is loaded for each step and never written back."""
    places: dict[int, Tensor]
    """Where rows of batches are that were looked up after others, once somebody has asked."""
    seen: set[tuple[int, int]]
    """Which of the planned parts lookups have named, the numbers of batch and part: ever more."""
    batches: tuple[Batch, ...] = ()
    """Those whose rows these are."""
    moved: int = 0
    """How many of the batches, the first ones, were looked up before other rows joined."""
    gradient: Tensor | None = None
    """What the parameter's gradient is when the rows are first shown."""
    planned: tuple[int, ...] = ()
    """Which of the batches were announced or planned by a loop; the others are lookups."""
    planned_parts: int = 0
    """How many parts these have."""
    since: int = 0
    """The first step whose graphs may bring a gradient: no optimizer has stepped rows since."""
    awaited: Step | None = None
    """The step before, without its rows, if this one began with those of other tables and nobody
    has asked for its rows yet."""
    newer: bool = False
    """Whether rows may be newer here than in the table."""
    stale: bool = False
    """Whether rows may be newer in the table than here."""
    captured: bool = False
    """Whether a CUDA graph was captured meanwhile: outside of it nothing has happened yet."""
    over: bool = False
    """Whether an optimizer has stepped them: the next lookup begins another step."""
    ahead: bool = False
    """Whether rows of the batch that is planned after this one are to be sent for."""
    owed: Block | None = None
    """Rows of the step before that have yet to be written to the table."""
    coming: Coming | None = None

    def part(self, number: int, part: int) -> Placed:
        """A part of one of the step's batches."""
        batch = self.batches[number]
        places = self.places.get(number)  # only kept so that nobody computes them twice
        others = isinstance(batch, PlannedBatch) and batch.ids is not self.ids
        if places is None and others:  # rows of others are held among its own
            assert isinstance(batch, PlannedBatch)
            places = self.places[number] = batch.places_among(self.ids)
        return Placed(batch, number, part, batch.local(part, places), number < self.moved)

    def find(self, ids: Tensor) -> Placed | None:
        """Where the rows of ids are, if they are known to be a part of what the step holds."""
        for number, batch in enumerate(self.batches):
            if (part := batch.parts.part_of(ids)) is not None:
                return self.part(number, part)
        return None

    def unseen(self) -> list[tuple[int, int]]:
        """Planned parts that no lookup has named, nor one of equal ids."""
        if len(self.seen) == self.planned_parts:
            return []
        left = [
            (number, part)
            for number in self.planned
            for part in range(len(self.batches[number].parts))
            if (number, part) not in self.seen
        ]
        return [each for each in left if not any(self._are_same(each, seen) for seen in self.seen)]

    def _are_same(self, one: tuple[int, int], other: tuple[int, int]) -> bool:
        parts = self.batches[one[0]].parts
        return parts.is_same(one[1], self.batches[other[0]].parts, other[1])


class HeldState(Protocol):
    """The state that an attached optimizer keeps of the held rows."""

    sparse: bool
    """Whether the optimizer takes sparse gradients only."""

    @property
    def loading(self) -> object | None:
        """What complete() may have to finish."""

    def rows(self) -> Rows:
        """The state of the held rows, field by field."""

    def hold(self, rows: Sequence[Tensor]) -> None:
        """Puts the state of other rows in its place."""

    def complete(self) -> None:
        """Finishes loading all rows' state where an exception has interrupted that."""


class Kept(NamedTuple):
    """What keeps the state of the held rows, and all their fields; another where they change."""

    state: HeldState | None
    fields: Fields


class ShownRows:
    """Shows the rows of a step to who trains them, and takes them back as they are then.

    `parameter` shows them, on the device where they are held. Everything here follows from the step
    and can be set again; nothing is read back before all of it is set.
    """

    def __init__(self, name: str, parameter: torch.nn.Parameter) -> None:
        self._name = name
        self.parameter = parameter
        self._reference: Callable[[], torch.nn.Parameter | None] = lambda: None
        self.kept = Kept(None, {"weight": (tuple(parameter.shape[1:]), parameter.dtype)})
        self.rows: Rows | None = None
        """Those of the step that is shown."""
        self.version = self._pointer = 0
        """Of the parameter; one that was written to since mark() has another."""
        self._asked: tuple[Tensor, int, bool] | None = None
        """The gradient that a zero_grad() asked for, its version then, and whether it was zeros."""
        self._lent: tuple[Tensor, int] | None = None
        """The gradient that an optimizer's step() was given, and its version then."""
        self._divisor = 1
        """What the sum of gradients is divided by, once: before a step or a read of it."""
        self._is_sum = False
        """Whether the gradient, if there is one, has yet to be divided."""

    def keep_alive(self, parameter: torch.nn.Parameter | None) -> None:
        """Keeps the parameter alive, or with None no longer: the parameter keeps the rows alive."""
        if parameter is not None:
            vars(self)["parameter"] = parameter  # first: an interrupt leaves one of both classes
            self.__class__ = ShownRows
        else:
            self._reference = TensorWeakRef(self.parameter)
            self.__class__ = _WeaklyShownRows
            vars(self).pop("parameter", None)

    def keep(self, state: HeldState | None, fields: Fields) -> None:
        """Lets the state of the rows be kept by another, or by nobody."""
        self.kept = Kept(state, {"weight": self.kept.fields["weight"], **fields})

    def show(self, step: Step) -> None:
        """Makes the parameter and the optimizer see the rows of a step, if they do not."""
        if self.rows is step.rows:
            return
        parameter, state = self.parameter, self.kept.state
        parameter.grad = None
        replace_rows(parameter, step.rows[0])
        if state is not None:
            state.hold(step.rows[1:])
        parameter.grad = step.gradient
        self.mark()
        self.rows = step.rows

    def rows_of(self, step: Step) -> Rows:
        """The rows of the step, as who trains them has them now.

        Raises RuntimeError if who trains them has changed their number or thrown some away.
        """
        rows, state = [self.parameter.detach()], self.kept.state
        if state is not None:
            rows += state.rows()
        for number, (each, memory) in enumerate(zip(rows, step.rows, strict=True)):
            if each.shape != memory.shape:
                raise RuntimeError(
                    f"{self._name}: the held rows have the shape {list(each.shape)}, expected"
                    f" {list(memory.shape)}; who trains them must not resize them"
                )
            rows[number] = each.contiguous()
        return rows

    def put_back(self, step: Step) -> None:
        """Makes them those of the step again after somebody has put others in their place."""
        replace_rows(self.parameter, step.rows[0])
        if self.kept.state is not None:
            self.kept.state.hold(step.rows[1:])
        self.mark()

    def mark(self) -> None:
        """What is written to the parameter from now on is a change."""
        self.version, self._pointer = version_of(self.parameter), self.parameter.data_ptr()

    def was_written(self) -> bool:
        """Whether the parameter was written to since the mark, or given other memory."""
        parameter = self.parameter
        return version_of(parameter) != self.version or parameter.data_ptr() != self._pointer

    def note_zero_grad(self) -> None:
        """Called when a zero_grad() asks for the gradient, which it may fill with zeros then."""
        gradient = self.parameter.grad
        zeros = not self.has_gradient()
        self._asked = None if gradient is None else (gradient, version_of(gradient), zeros)

    def note_gradient(self) -> None:
        """Called when somebody has given the parameter another gradient: no zero_grad() has."""
        self._asked = None

    def summand(self, added: Tensor) -> Tensor:
        """What is to be added to the gradient for one that a lookup brings."""
        if self._divisor == 1:
            return added
        if not self._is_sum and not self.has_gradient():
            self._is_sum = True
        return added if self._is_sum else _divided(added, self._divisor)

    def divide(self) -> None:
        """Divides the gradient if it is a sum that has yet to be divided."""
        if not self._is_sum:
            return
        with as_plain():  # a read of the weight's gradient would divide it, too
            # Not zeros of zero_grad(), which stay the same tensor.
            if self.has_gradient() and (gradient := self.parameter.grad) is not None:
                self.parameter.grad = _divided(gradient, self._divisor)
                self._is_sum = False

    def divide_by(self, count: int) -> None:
        """Gives optimizers and readers gradients divided by this number, once each."""
        self._divisor = count

    def note_lent(self, gradient: Tensor | None) -> None:
        """Records the gradient before an optimizer's step(), which hides the parameter's hooks."""
        self._lent = None if gradient is None else (gradient, version_of(gradient))

    def note_left(self) -> None:
        """Detects zeros after a step() that raised: its parameter still hid zero_grad() from us."""
        lent, self._lent = self._lent, None
        gradient = self.parameter.grad
        if lent is None or gradient is not lent[0] or version_of(gradient) == lent[1]:
            return
        if not _any(gradient):
            self._asked = (gradient, version_of(gradient), True)

    def has_gradient(self) -> bool:
        """Whether there is a gradient that no zero_grad() has filled with zeros.

        Who has written to the zeros since is waited for on a GPU: clipping leaves them zeros.
        """
        if (gradient := self.parameter.grad) is None:
            return False
        if self._asked is None or self._asked[0] is not gradient:
            return True
        _, version, zeros = self._asked
        writes = version_of(gradient) - version
        if writes > 1:
            return _any(gradient)
        return writes == 0 and not zeros


class _WeaklyShownRows(ShownRows):
    """ShownRows with a weak reference to the parameter, which owns this object.

    A subclass, because __getattr__ in ShownRows would slow each of its attribute accesses.
    """

    @property
    def parameter(self) -> torch.nn.Parameter:  # type: ignore[override]
        """RuntimeError if it is gone, and nothing can train."""
        if (parameter := self._reference()) is None:
            raise RuntimeError(f"{self._name}: its weight is gone, and its module before it")
        return parameter


def _divided(gradient: Tensor, divisor: int) -> Tensor:
    # A row that is named twice in a sparse gradient is summed first.
    return (gradient.coalesce() if gradient.is_sparse else gradient) / divisor


def _any(gradient: Tensor) -> bool:
    """Whether any element is not zero. Synchronizes with the GPU."""
    return bool((sparse_values(gradient) if gradient.is_sparse else gradient).any())


def replace_rows(parameter: Tensor, rows: Tensor) -> None:
    """Makes a parameter hold other rows, not copied, and in another number perhaps.

    A gradient of another shape is dropped.
    """
    if parameter.grad is not None and parameter.grad.shape != rows.shape:
        parameter.grad = None
    if parameter.shape != rows.shape:
        # A graph that is still alive (a loss kept for logging) holds the node that accumulates the
        # gradient, and that node the old shape. Another dtype in between makes torch drop it.
        parameter.data = of_another_dtype(parameter.dtype, parameter.device)
    parameter.data = rows
    # A backward through a graph of an earlier batch would compute with these rows: let it raise.
    torch.autograd.graph.increment_version(parameter)


class OptimizerCall(Protocol):
    """A call of an optimizer's step()."""

    done: bool
    """Whether all rows have been stepped."""
    paused: bool
    """Whether a closure of the user runs within it."""
    is_idle: bool
    """Whether every learning rate is 0, so that the step may change no row."""

    def runs_elsewhere(self) -> bool:
        """Whether another thread is within it, and not in a closure of the user."""

    def show(self) -> None:
        """Makes the parameters stand for their tables again."""

    def leave(self) -> bool:
        """The next one in cleans up behind a call that an exception left; whether one did."""


class Token:
    """Lives as long as a graph may still bring a gradient of the lookups of a step."""


class Joint(Protocol):
    """What exchanges the rows of several tables together."""

    def begin(self, batch: JointBatch, asker: Exchange) -> bool:
        """Begins a step of a batch in all tables; not if one of them has to go on by itself."""

    def complete(self, *, ahead: bool = True) -> None:
        """Finishes what belongs to what the tables hold now."""

    def drop_coming(self) -> None:
        """Rows that arrived for the next batch go back."""


class Others(Protocol):
    """Other ranks, which make every lookup with this one."""

    def agree(self, fault: Tensor) -> Tensor:
        """The largest of the faults of all ranks: `[1]`, on the device; 0: none."""

    def check(self) -> None:
        """Raises RuntimeError if ranks were at different exchanges since the last lookup."""


class Exchange:
    """Steps of one table: which rows are held now, and how others take their place.

    Every method completes what an exception may have left half done, before anything else. `now` is
    the step that holds rows, on `device`; the arguments are those of TrainedRows.

    One thread at a time is within a method: each holds `turn`, or its caller does. An optimizer's
    step() does not, because the user's hooks run in it: other threads wait for it in complete().
    """

    ahead = 2
    """Batches that a loop plans ahead: one whose rows travel, one that nobody waits for then."""

    def __init__(
        self,
        name: str,
        store: RowStore,
        shown: ShownRows,
        padding: int | None,
        capacity: int | None = None,
    ) -> None:
        self.name = name
        self.turn = Turn()
        self._store = store
        self._shown = shown
        self._padding = padding
        self._padding_rows = int(padding is not None)
        self._named_rows = store.rows + (padding == store.rows)
        """What ids may name: with a padding behind the last row that, too."""
        self._joint: Joint | None = None
        """With the tables of a loop whose rows are exchanged with those of this one."""
        self._is_idle = False
        """Whether the last step that began with those of other tables was none of this one."""
        self._next_ids: Sequence[Tensor] | None = None
        """Those of the step after the one that a CUDA graph is captured of."""
        self._tokens: tuple[int, dict[int, Callable[[], Token | None]]] = (0, {})
        """Of the lookups of a step, by the thread that made them, and its number."""
        self._fixed: FixedBlocks | None = None
        """What holds the rows if the blocks have a capacity."""
        if capacity is not None:
            self._fixed = FixedBlocks(name, store, capacity, padding)
            raises_later(weakref.WeakMethod(self.raise_faults))
        self._others: Others | None = None
        self._is_agreed = False
        """Whether the others have been asked at this lookup."""
        self._announced = Announcements()
        self._checks_lookups = True
        self.batches_over = 0
        """How often a batch has ended, or may have been given up."""
        self._is_left = False
        """Whether the lookups of now may have been given up, unless they have a gradient."""
        self._call: tuple[OptimizerCall, int] | None = None
        """The last call of an optimizer's step, and the number of the step that it was for."""
        self._as_in_table: Rows | None = None
        """Copies of the held rows before a step of rate 0, while the table has the same rows."""
        self._planning, self._travel = SideStream("planning"), SideStream("exchange")
        self._due: Batch | None = None
        """The batch of a loop that the next step may take."""
        self._loop: Callable[[], object] = lambda: None
        self._hold_nothing(0)

    def _hold_nothing(self, number: int) -> None:
        self.device = self._shown.parameter.device
        self._on_gpu = self.device.type == "cuda"  # asked for several times in each step
        self._memory_stream = MemoryStream(self.device)
        if self._fixed is not None:
            self._fixed.forget()
        ids = torch.empty(0, dtype=torch.int64, device=self.device)
        self.now = Step(number, ids, self._memory(0), {}, set(), since=number, over=True)

    def _memory(self, count: int) -> Rows:
        """Memory for rows of every field."""
        rows: Rows = []
        for shape, dtype in self._shown.kept.fields.values():
            rows.append(torch.empty((count, *shape), dtype=dtype, device=self.device))
        return rows

    def _loaded(self, ids: Tensor, leaving: Block | None) -> Rows:
        """Rows as they are in the table, in new memory; others leave for it meanwhile."""
        rows = self._memory(ids.shape[0])
        self._store.exchange(self._shown.kept.fields, leaving, Block(rows, ids))
        return rows

    def _loaded_again(self, step: Step) -> Rows:
        """The rows of a step as they are in the table."""
        if self._padding is None:
            return self._loaded(step.ids, None)
        return self._loaded(torch.cat([step.ids, step.ids.new_tensor([self._padding])]), None)

    def complete(self, *, ahead: bool = True) -> None:
        """Finishes what belongs to the step of now.

        With `ahead` rows of the batch after it are sent for as well, if it is planned.
        """
        if (state := self._shown.kept.state) is not None and state.loading is not None:
            state.complete()
        if self._joint is not None:
            self._joint.complete(ahead=ahead)
        now, shown = self.now, self._shown
        if now.ids.is_cuda:
            self._memory_stream.follow(self._held_tensors)
        if shown.rows is not now.rows or now.owed is not None or (ahead and now.ahead):
            if torch.is_inference_mode_enabled():  # who holds rows next could not train them
                with torch.inference_mode(False):
                    return self.complete(ahead=ahead)
            shown.show(now)
            if now.owed is not None or (ahead and now.ahead):
                self._send(ahead)
        if self._call is not None or version_of(shown.parameter) != shown.version:
            self._settle()

    def _held_tensors(self) -> Iterator[Tensor]:
        """Memory of now that another stream than its own may come to use."""
        now = self.now
        yield from (now.ids, *now.rows, *now.places.values())
        if now.owed is not None:
            yield from (*now.owed.rows, now.owed.ids)
        if now.coming is not None:
            yield from (*now.coming.rows, *now.coming.batch.tensors())
        for batch in () if now.captured else now.batches:  # a graph keeps its own memory
            yield from batch.tensors()
        if self._fixed is not None:
            yield from self._fixed.tensors()

    def show_anew(self) -> None:
        """Reads held rows again, all fields that there are now; the table has all of them."""
        now, gradient = self.now, self._shown.parameter.grad
        ids = now.ids
        if self._fixed is not None and now.batches:
            rows, ids = self._fixed_again()
        else:
            rows = self._loaded_again(now) if now.batches else self._memory(0)
        self.now = now._replace(ids=ids, rows=rows, stale=False, gradient=gradient)
        self.complete()

    def _fixed_again(self) -> tuple[Rows, Tensor]:
        """Blocks for the fields of now with the rows that are held, read again."""
        blocks, fields = self._fixed, self._shown.kept.fields
        assert blocks is not None
        if not blocks.are_for(self.device, fields):
            blocks = blocks.with_fields(fields)
        blocks.read_again()
        self._fixed = blocks
        return list(blocks.rows), blocks.ids

    def _settle(self) -> bool:
        """Takes note of what an optimizer, or somebody else, did to the held rows.

        Returns whether an optimizer has stepped them.
        """
        self.await_step()
        now, written, stepped, left = self.now, self._shown.was_written(), False, False
        is_moved = written
        if self._call is not None:
            call, number = self._call
            if call.done:
                if type(self._shown.parameter) is torch.nn.Parameter:  # an exception has left it so
                    call.show()
                self.forget_announced()
                has_gradient = self._shown.parameter.grad is not None
                stepped = number == now.number and (has_gradient or written)
                left = True
                if stepped:
                    is_moved = self._has_moved()
                    self._tidy()
                    self.now = now._replace(newer=is_moved, over=True, stale=not is_moved)
            elif not call.paused:
                left = call.leave()
                written = is_moved = written or number == now.number
                if left and number == now.number:
                    self._shown.note_left()
                    if self._fixed is not None:
                        self._fixed.clear_others()
        if is_moved and not self.now.newer:
            self.now = self.now._replace(newer=True, stale=False)
        if written:
            self._shown.mark()
        if left:
            self._call = self._as_in_table = None
            self._shown.note_lent(None)  # releases the gradient's memory
        return stepped

    def _has_moved(self) -> bool:
        """Whether the step changed rows; always true unless every learning rate was 0.

        torch.distributed.checkpoint creates optimizer state by a step of rate 0, and then loads
        into the table's memory. Writing unchanged held rows back would overwrite the loaded rows.
        """
        before = self._as_in_table
        return before is None or not all(
            torch.equal(old.view(torch.uint8), new.view(torch.uint8))
            for old, new in zip(before, self._shown.rows_of(self.now), strict=True)
        )

    def await_step(self) -> None:
        """Waits for a step() in another thread; RuntimeError if that takes too long.

        The other thread may wait for this one, as in a hook of the optimizer that joins a thread.
        """
        if self._call is None:
            return
        call, deadline = self._call[0], time.monotonic() + _PATIENCE
        while call.runs_elsewhere():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.name}: an optimizer's step() in another thread has been changing its"
                    f" rows for {_PATIENCE:g} seconds; use a module in one thread at a time, or"
                    " hold a lock of your own around step() and around this call"
                )
            time.sleep(_LOOK)

    def check_threads(self) -> None:
        """Raises RuntimeError where an optimizer's step must wait for another thread.

        That is within a step() of the same rows, or between a lookup and its backward: this step
        would change the rows of a lookup whose gradient has yet to come. Called within a turn.
        """
        self.await_step()
        number, tokens = self._tokens
        if number != self.now.number:
            return
        for thread, token in tokens.items():
            if thread != threading.get_ident() and token() is not None:
                raise RuntimeError(
                    f"{self.name}: lookups of another thread ({thread}) still wait for their"
                    " backward; step when all threads are through with it, or look up under"
                    " torch.no_grad() what is not trained; nothing was stepped"
                )

    def _tidy(self) -> None:
        """Blocks of a fixed size hold what an optimizer made of the held rows, and zeros."""
        if self._fixed is not None:
            if self._take(stepped=True):
                self._shown.put_back(self.now)
            self._fixed.clear_others()

    def _take(self, *, stepped: bool = False) -> bool:
        """Takes the held rows to their blocks; whether they were elsewhere."""
        blocks, shown, now = self._fixed, self._shown, self.now
        assert blocks is not None
        # Where an exception has left the blocks of other fields, the table has all rows; and rows
        # that a step is not known to have changed are where a CUDA graph changes them.
        if not (blocks.are_for(self.device, shown.kept.fields) and blocks.have(now.rows)):
            return False
        taken = (stepped or now.newer) and blocks.take(shown.rows_of(now))
        if taken:
            blocks.clear_others()  # whatever an optimizer that failed has left there
        return taken

    def _send(self, ahead: bool) -> None:
        """Rows of the last step leave, those of the next batch arrive, beside what comes now."""
        now = self.now
        following: Batch | None = now.batches[0].following() if ahead and now.ahead else None
        if following is not None:
            following.parts.join()
        if self._fixed is None:
            assert not isinstance(following, FittedBatch)
            coming = self._sent(following, now.owed)
        else:
            assert not isinstance(following, PlannedBatch)
            with self._travel.after_current(self.device):
                if now.captured and self._next_ids is not None:
                    foreseen = self._step_of(self._next_ids)
                    assert isinstance(foreseen, FittedBatch)
                    self._fixed.send(foreseen, foreseen=True)
                else:
                    self._fixed.send(following)
            coming = None if following is None else Coming(following, [])
        self.now = now._replace(owed=None, ahead=now.ahead and not ahead, coming=coming)

    def _sent(self, following: PlannedBatch | None, owed: Block | None) -> Coming | None:
        """Sends rows away and for those of the batch that follows, if its ids are good."""
        coming, arriving = None, None
        if following is not None:
            try:
                load = following.arriving
            except IndexError:
                following = None  # who looks up its bad ids is told
        if following is not None or owed is not None:
            if owed is not None:
                self._travel.uses(owed.rows)
            with self._travel.after_current(self.device):
                if following is not None:  # in memory that only this stream is given again
                    coming = Coming(following, self._memory(following.held + self._padding_rows))
                    arriving = Block(coming.rows, *load)
                self._store.exchange(self._shown.kept.fields, owed, arriving)
        return coming

    def _drop_coming(self) -> None:
        """Rows that arrived for the next batch go back, as some are nowhere else."""
        if self._joint is not None:
            self._joint.drop_coming()
        now, coming = self.now, self.now.coming
        if self._travel.end is not None:
            self._travel.join()
        if coming is not None and isinstance(coming.batch, PlannedBatch):
            brings = coming.batch.brings  # the padding's row is never written back
            arrived = Block(coming.rows, *(each[:brings] for each in coming.batch.arriving))
            self._store.exchange(self._shown.kept.fields, arrived, None)
        if coming is not None or now.ahead:
            self.now = now._replace(coming=None, ahead=False)

    def _read_again(self) -> None:
        """Held rows are those of the table again, if they may have become others there."""
        if self.now.stale:
            self.show_anew()

    def hold(self, ids: Tensor) -> Placed:
        """Holds the rows that ids name from now until the step after the optimizer's begins.

        Gives where the rows of the ids, of any shape on either device, are. What was announced is
        held as well. Bad ids raise IndexError, and what is held did not change.
        """
        try:
            if self._others is None:
                found = self._look_up(ids)
            else:
                found = self._with_others(partial(self._look_up, ids))
        except BaseException:
            self._end_batch()
            raise
        if self._is_left and ids.numel() > 0:  # no ids show no batch
            self._is_left = False
        if found is None:  # not known again, or new: which of them nobody can tell
            found = self.now.part(len(self.now.batches) - 1, 0)
            found = found._replace(has_moved=self.now.moved > 0)
        return found

    def plan_announced(self, parts: Sequence[Tensor]) -> Announced | None:
        """Plans what announce() adds to it; None if the step that goes on holds all of the rows.

        Nothing waits: where a step is over, several tables can be announced to before the first of
        them counts its rows. Bad ids raise IndexError, on a GPU at the next lookup; what raises
        leaves nothing.
        """
        with self.turn:
            try:
                if self._others is None:
                    return self._announce(parts)
                return self._with_others(partial(self._announce, parts))
            except BaseException:
                self._end_batch()
                raise

    def announce(self, announced: Announced | None) -> None:
        """Lets the first lookup of announced ids bring the rows of all; see Announcements."""
        if announced is not None:
            with self.turn:
                self._announced.add(announced)

    @alone
    def give_up(self) -> None:
        """Gives up what was announced, and lookups of the step unless they have a gradient."""
        self.forget_announced()
        self._is_left = True

    def begin_with(self, others: Others) -> None:
        """Lets steps of blocks of a fixed size begin if they can on all ranks.

        Every call of hold() and announce() is one of all ranks then, which asks once whether
        something is wrong. Who finds it late does not raise it at lookups: the others do not know.
        """
        self._others = others

    def _with_others(self, hold: Callable[[], _Made]) -> _Made:
        """Holds or plans rows; what one rank cannot hold, none does."""
        self._is_agreed, before = False, self.now
        try:
            found = hold()
        except Exception:
            if not self._is_agreed:
                self._ask_others(REFUSED)
            raise
        if not self._is_agreed:
            fault = self._ask_others(0)
            # Rows that a step finds among its own are counted at once, on a GPU, too.
            found_more = len(self.now.batches) > len(before.batches)
            if raises_at_once(self.device) or (found_more and self.now.number == before.number):
                self._raise_with_others(fault)
        return found

    def _ask_others(self, fault: Tensor | int) -> Tensor:
        assert self._others is not None
        self._is_agreed = True
        if isinstance(fault, int):
            fault = torch.full((1,), fault, device=self.device)
        return self._others.agree(fault)

    def _raise_with_others(self, fault: Tensor) -> None:
        """Raises what some rank has found wrong."""
        if why := int(fault):
            self.forget_announced()
            raise of_ranks(self.name, why, "nothing has changed")

    def forget_announced(self) -> None:
        """Drops all announced ids that no lookup has used. Called within a turn."""
        self.batches_over += 1
        if self._announced.latest is not None:
            self._announced.forget()

    def _end_batch(self) -> None:
        """Called where a batch may have been given up."""
        self.batches_over += 1
        if self._announced.latest is not None:
            self._announced.end_batch()

    def _announce(self, parts: Sequence[Tensor]) -> Announced | None:
        """As plan_announced; the rows join a step that goes on at once."""
        if self._before_rows(parts) or self._was_left():
            return self._announced.planned(parts, self._step_of)
        self._read_again()
        if self._fixed is not None and self._was_over(parts):
            return self._announced.planned(parts, self._step_of)
        if any(self.now.find(part) is None for part in parts):
            self._extend(parts, are_planned=True)
        return None

    def _look_up(self, ids: Tensor) -> Placed | None:
        """Holds the rows of a lookup; where they are, if they were looked up or planned before."""
        is_over = self._before_rows([ids])
        named = announced = None
        if self._announced.latest is not None:
            named = self._announced.of(ids, self.device, self._step_of)
        if named is not None:
            announced = named[0]
        if not is_over and self._was_left():
            is_over = announced is not None or self._goes_on_without(ids)
        begun = None
        if is_over:
            begun, announced = self._begin(ids, announced)
        else:
            self._read_again()
            if self._fixed is not None and self._was_over([ids]):
                return self._look_up(ids)
        if announced is not None:
            parts = announced.parts
            if begun is not announced.batch and any(self.now.find(each) is None for each in parts):
                self._extend(parts, are_planned=True)
            self._announced.forget()
        if is_over and begun is None:
            return None
        # Ids are compared once: on the CPU that takes as long as they are many.
        if named is not None and begun is named[0].batch:
            found: Placed | None = self.now.part(0, named[1])
        else:
            found = self.now.find(ids)
        if found is None:
            self._extend([ids])
        elif found.number in self.now.planned:
            self.now.seen.add((found.number, found.part))
        return found

    def _before_rows(self, parts: Sequence[Tensor]) -> bool:
        """Completes the step of now; whether it is over, so that these ids begin another."""
        self._is_idle = False
        if self._fixed is not None or self._captures():
            self._before_lookup()
        self.complete()
        is_over = self.now.over or self.is_over()
        if self.now.awaited is not None:
            # Rows that were brought for other ids than are asked for are those of no step.
            is_over = self._taken(self.now.batches[0], parts) is None
            self.now = self.now._replace(awaited=None)
            self._is_left = False  # a joint step has had no lookup of this table yet
        return is_over

    def _was_left(self) -> bool:
        """Whether the lookups of the step may have been given up, though graphs of them are there.

        A backward through those, if one comes after all, brings the rows again: rejoin().
        """
        return self._is_left and not self._shown.has_gradient()

    def _goes_on_without(self, ids: Tensor) -> bool:
        """Whether a lookup begins a step of its own, if that of now may have been given up.

        One of the batch that a loop gives now does. One that was announced with lookups of that
        step does not; nor, in blocks, to which rows do not come back, one of ids known there.
        """
        if self._captures() or current_backward() != -1:  # where a checkpoint computes it again
            return False
        if self._due is not None and self._due.parts.part_of(ids) is not None:
            return True
        batches = self.now.batches
        if any(batches[number].parts.is_part(part, ids) for number, part in self.now.unseen()):
            return self._fixed is None and ids.numel() == 0
        return self._fixed is None or self.now.find(ids) is None

    def _announced_around(self, ids: Tensor) -> Announced | None:
        """What was announced, if it has all rows of a lookup: blocks take no more afterwards.

        The host waits for that. Not if what was announced may have been given up.
        """
        announced = self._announced.certain
        if announced is None or self._captures():
            return None
        asked = self.planned([ids], announced.batch)
        return announced if asked.brings == 0 < asked.held else None

    def holds(self, number: int) -> bool:
        """Whether rows that a step of this number has looked up are held, or can be again.

        They cannot if an optimizer has stepped rows since, nor in blocks.
        """
        now = self.now
        if number == now.number:
            return True
        return self._fixed is None and not now.over and now.since <= number < now.number

    def rejoin(self, ids: Tensor) -> None:
        """Holds rows again that were looked up before, for a backward."""
        self.complete()
        self._read_again()
        self._extend([ids])

    def leave_lookups_unchecked(self) -> None:
        """Lets check_lookups() raise nothing: ranks that exchange rows would not agree on it.

        Each of them compares the ids that it is asked for, which may be none.
        """
        self._checks_lookups = False

    def check_lookups(self) -> None:
        """Raises RuntimeError if an optimizer would change rows that were announced in vain.

        That is, if lookups have named some of the tensors that were announced together, and others
        not. A lookup of other tensors, as of a slice or of a copy on another device, may have named
        any: ids on the CPU are compared then, and those of a GPU, for which the host would wait,
        raise nothing. A step of no gradient changes no rows. Called within a turn.
        """
        now = self.now
        if now.over or now.awaited is not None or not self._checks_lookups:
            return
        if not (unseen := now.unseen()) or not self._shown.has_gradient():
            return
        looked_up = [
            (batch.parts.values(part), number in now.planned)
            for number, batch in enumerate(now.batches)
            for part in range(len(batch.parts))
            if (number, part) not in unseen
        ]
        if any(values is None and not is_planned for values, is_planned in looked_up):
            return
        named = [each.reshape(-1).long() for each, _ in looked_up if each is not None]
        others = len(now.batches) > len(now.planned)
        for number, part in unseen:
            parts = now.batches[number].parts
            if (ids := parts.values(part)) is None and others:
                continue
            if ids is not None and named and bool(torch.isin(ids, torch.cat(named)).all()):
                continue
            if parts.shape(part).numel():
                raise RuntimeError(
                    f"{self.name}: a step looks up all tensors of ids that announce() or prefetch's"
                    f" ids names for it, or none: of {len(parts)} that were named, number {part}"
                    f" (counted from 0), of shape {list(parts.shape(part))}, was not looked up, and"
                    " the step would change its rows without a gradient. Name no other tensors"
                    " (ids=lambda batch: batch[0] where a loader gives (ids, labels)), or give the"
                    " step up by zero_grad(); nothing was stepped"
                )

    def _was_over(self, parts: Sequence[Tensor]) -> bool:
        """Whether a failed backward alone kept the step from being over, which has no such rows."""
        if self._captures() or not self.expects_gradient():
            return False
        if all(self.now.find(part) is not None for part in parts):
            return False
        forget_failed_backward(self.device)  # or its lookups count until the next
        return self.is_over()

    def _captures(self) -> bool:
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def _before_lookup(self) -> None:
        """Raises what earlier steps did wrong; RuntimeError if a CUDA graph cannot hold this."""
        now, blocks = self.now, self._fixed
        if not self._captures():
            return None if self._others is not None else self.raise_faults()
        if blocks is None:
            raise RuntimeError(
                f"{self.name}: a CUDA graph cannot hold a lookup, because the number of rows"
                " changes from step to step; build it with capacity=, the most rows of a step, or"
                " capture what comes after it"
            )
        if now.captured:
            return
        is_settled = now.over and now.coming is None and now.owed is None and blocks.is_settled
        is_settled = is_settled and not (now.stale and blocks.hold_some)
        if not is_settled or not blocks.are_for(self.device, self._shown.kept.fields):
            raise RuntimeError(
                f"{self.name}: a CUDA graph begins with a step of its own: train a step or two"
                " as the graph will, then end prefetch(), and call zero_grad() and flush()"
            )

    @alone
    def stand_still(self) -> None:
        """Lets no row move until move_again(): lookups give zeros, and nothing is trained."""
        self.bring_home()
        self.raise_faults()
        blocks, fields = self._fixed, self._shown.kept.fields
        assert blocks is not None
        if not blocks.are_for(self.device, fields):
            blocks.make(self.device, fields)
        blocks.halt()

    @alone
    def move_again(self) -> None:
        """Ends stand_still()."""
        assert self._fixed is not None
        self._drop_coming()
        self._announced.forget()
        self._fixed.go_on()
        self.now = self.now._replace(over=True)

    @property
    def capacity(self) -> int | None:
        """The most rows of a step, if they are in blocks of a fixed size."""
        return None if self._fixed is None else self._fixed.capacity

    @alone
    def before_replay(self) -> None:
        """Called before a CUDA graph of a whole step of the rows is replayed."""
        self.raise_faults()
        self.complete(ahead=False)
        self._drop_coming()
        self._read_again()
        if not self.now.over:
            self.now = self.now._replace(over=True)

    @contextmanager
    def foreseeing(self, parts: Sequence[Tensor] | None) -> Iterator[None]:
        """A CUDA graph that is captured within sends for the rows of the ids of the next step.

        They are what these tensors hold at each replay; without any it sends for none.
        """
        self._next_ids = parts
        try:
            yield
        finally:
            self._next_ids = None
            try:
                self._travel.join()
            finally:
                self._travel = SideStream("exchange")  # whose last work is none of the graph's

    def refuse_if_captured(self, what: str) -> None:
        """Raises RuntimeError if a CUDA graph that is still there uses the rows' memory."""
        if self._fixed is not None and self._fixed.is_captured:
            raise RuntimeError(
                f"{self.name}: {what} would take memory away that a captured CUDA graph uses: let"
                " the graph go first (del graph)"
            )

    @property
    def halted(self) -> Tensor | None:
        """Not 0 while rows wait on the device for an error to be raised: `[1]`, if they ever do."""
        fixed = self._fixed
        return None if fixed is None or not self.now.batches else fixed.is_halted

    @alone
    def raise_faults(self) -> None:
        """Raises what was found wrong with the ids of earlier steps, if no rows but these wait."""
        if self._fixed is None:
            return
        try:
            self._fixed.check()
        except (IndexError, RuntimeError):
            self._give_up_step()
            raise
        if self._others is not None:
            self._others.check()

    def _give_up_step(self) -> None:
        """Ends a step that has moved and changed no row of the table."""
        self._drop_coming()
        self._announced.forget()
        self.now = self.now._replace(over=True, newer=False)

    def stop(self, fault: Tensor) -> None:
        """Where `fault`, `[1]` on the device, is not 0: rows go to the table, and none is stepped.

        Until resume(), which the caller calls after it has raised why. Called within a turn.
        """
        if self._fixed is not None and self.now.batches:
            self._fixed.stop(fault)

    @alone
    def resume(self) -> None:
        """Lets rows move again after stop(), in a new step."""
        assert self._fixed is not None
        self._fixed.go_on()
        self._give_up_step()

    def is_over(self) -> bool:
        """Whether the next rows that are asked for begin a step of their own."""
        now = self.now
        if now.over or (now.captured and not self._captures()):
            return True
        if now.awaited is not None or self.expects_gradient():
            return False
        return not self._shown.has_gradient()

    def expects_gradient(self) -> bool:
        """Whether a gradient of rows that were looked up in this step may still come."""
        number, tokens = self._tokens
        if number == self.now.number:
            for token in tokens.values():
                if token() is not None:
                    return True
        return False

    def token(self) -> Token:
        """What a graph keeps for as long as a gradient of this step's rows may come of it."""
        number, tokens = self._tokens
        if number != self.now.number:
            number, tokens = self._tokens = self.now.number, {}
        thread = threading.get_ident()
        reference = tokens.get(thread)
        token = None if reference is None else reference()
        if token is None:
            token = Token()
            tokens[thread] = weakref.ref(token)
        return token

    @alone
    def change(self) -> None:
        """Says that somebody is about to write to the held rows."""
        self.complete()
        self._read_again()
        if not self.now.newer:
            self.now = self.now._replace(newer=True)

    def _begin(
        self, ids: Tensor, announced: Announced | None
    ) -> tuple[Batch | None, Announced | None]:
        """Begins a step of a batch that was planned before, or of these ids alone.

        Gives the batch, and what was announced with these ids.
        """
        planned, self._due = self._due, None  # two steps of one batch take its plan once
        batch = None if planned is None else self._taken(planned, [ids])
        if self._joint is not None and self._begin_with_others(self._joint, batch):
            return batch, announced
        is_part = True
        if batch is None and announced is None and self._fixed is not None:
            announced, is_part = self._announced_around(ids), False
        told = batch or (None if announced is None else announced.batch)
        begun = told or self._step_of([ids])
        seen = {(0, 0)} if is_part and told is not None and len(told.parts) == 1 else set()
        begun.count()  # bad ids change nothing
        if isinstance(begun, FittedBatch):
            self._begin_fixed(begun, seen, is_told=told is not None, ahead=batch is not None)
            return told, announced
        coming, owed, newer = self.now.coming, None, True
        if coming is not None and coming.batch is begun:
            rows = coming.rows
            owed = self._completed(coming)
        else:
            self._drop_coming()
            newer = self.now.newer  # rows that stay have not been in the table in between
            leaving = Block(self._shown.rows_of(self.now), self.now.ids) if newer else None
            rows = self._loaded(begun.loaded, leaving)
        self.now = Step(
            self.now.number + 1,
            begun.ids,
            rows,
            {},
            seen,
            (begun,),
            planned=() if told is None else (0,),
            planned_parts=0 if told is None else len(told.parts),
            since=self.now.number + 1 if self.now.over else self.now.since,
            newer=newer,
            ahead=batch is not None,
            owed=owed,
        )
        self.complete()
        return told, announced

    def _begin_with_others(self, joint: Joint, batch: Batch | None) -> bool:
        """Whether a step of a batch has begun in all tables that it was planned with."""
        planned = batch.joint if isinstance(batch, PlannedBatch) else None
        return isinstance(planned, JointBatch) and joint.begin(planned, self)

    def layout(self) -> Hashable:
        """What exchanges that can be joined have in common; None if this one cannot be."""
        if self._fixed is not None or self._padding is not None or not self._can_join():
            return None
        return None if self._joint is not None else (self.device, *self.fields.items())

    def _can_join(self) -> bool:
        """Whether this trains the rows, and the device reaches them."""
        store = self._store
        trains = self._shown.parameter.requires_grad and not store.was_replaced
        return trains and store.is_mapped(self.device)

    @property
    def fields(self) -> Fields:
        """Of the rows that are exchanged, the weight first."""
        return self._shown.kept.fields

    @property
    def rows(self) -> int:
        """Of the table."""
        return self._store.rows

    def reach(self, fields: Fields) -> list[Tensor]:
        """All rows of the table."""
        return self._store.reach(fields)

    def join(self, joint: Joint | None) -> None:
        """Exchanges rows with those of other tables from now on, or no more."""
        self._joint = joint

    def may_begin(self, batch: PlannedBatch, fields: Fields, *, asked: bool) -> bool:
        """Whether a step of a batch may begin, before its own first lookup unless that asks."""
        self.complete(ahead=False)
        is_due = asked or (self._due is batch and self._announced.latest is None and self.is_over())
        is_due = is_due and not self._is_idle
        alike = self.fields is fields and self.device == batch.device
        return is_due and alike and self._can_join()

    def trained(self) -> Rows:
        """The held rows as who trains them has them now."""
        return self._shown.rows_of(self.now)

    def begun_with_others(
        self, batch: PlannedBatch, rows: Rows, nothing: Rows, *, asked: bool, newer: bool
    ) -> Step:
        """The step of a batch whose rows are these, for take(); `nothing` are none of every field.

        The step before is kept without its rows, until somebody has asked for those of the batch.
        """
        batch.count()
        before = None
        if not asked:
            gradient = self._shown.parameter.grad
            before = self.now._replace(rows=nothing, gradient=gradient)
        return Step(
            self.now.number + 1,
            batch.ids,
            rows,
            {},
            {(0, 0)} if len(batch.parts) == 1 else set(),
            (batch,),
            planned=(0,),
            planned_parts=len(batch.parts),
            since=self.now.number + 1 if self.now.over else self.now.since,
            newer=newer,
            awaited=before,
        )

    def take(self, step: Step) -> None:
        """Begins a step of begun_with_others()."""
        self._due = None
        self.now = step
        self._shown.show(step)

    def _begin_fixed(
        self, batch: FittedBatch, seen: set[tuple[int, int]], *, is_told: bool, ahead: bool
    ) -> None:
        """Begins a step of a batch in blocks of a fixed size."""
        blocks, now, fields = self._fixed, self.now, self._shown.kept.fields
        assert blocks is not None
        if self._others is not None:
            fault = self._ask_others(own := batch.fault())
            if raises_at_once(self.device):
                self._raise_with_others(fault)
            batch.spoil(fault, own)
        come: bool | None = now.coming is not None and now.coming.batch is batch
        if not come:
            self._drop_coming()
        elif self._travel.end is not None:
            self._travel.join()
        captured = self._captures()
        if captured and self._next_ids is not None:
            come = None
        if captured:
            blocks.watch_graph()
        if not blocks.are_for(self.device, fields):
            blocks.make(self.device, fields)
        elif now.stale:
            if not captured:  # where none is held; a replay would lose those that it holds
                blocks.hold_none()  # the table has them, and perhaps newer ones
        elif now.batches and self._take():
            self._shown.put_back(now)  # or they would be taken again, if this is interrupted
        blocks.begin(batch, come=come)
        owed = None if come is False else Block((), blocks.ids)
        self.now = Step(
            now.number + 1,
            blocks.ids,
            list(blocks.rows),
            {},
            seen,
            (batch,),
            planned=(0,) if is_told else (),
            planned_parts=len(batch.parts) if is_told else 0,
            since=now.number + 1 if now.over else now.since,
            captured=captured,
            newer=True,
            ahead=ahead,
            owed=owed,
        )
        self.complete()

    def planned(self, parts: Sequence[Tensor], after: Batch | Tensor | None = None) -> PlannedBatch:
        """A batch of these ids whose rows can be counted; see PlannedBatch."""
        rows, device, padding = self._named_rows, self.device, self._padding
        return PlannedBatch(parts, rows, device, padding, after=after, name=self.name)

    def _step_of(self, parts: Sequence[Tensor], after: Batch | None = None) -> Batch:
        """A batch of these ids for a step."""
        rows, device, padding = self._named_rows, self.device, self._padding
        if self._fixed is None:  # not by planned(): this is every step's
            return PlannedBatch(parts, rows, device, padding, after=after, name=self.name)
        assert not isinstance(after, PlannedBatch)
        size = self._fixed.capacity
        return FittedBatch(parts, rows, device, padding, size, after=after, name=self.name)

    def _taken(self, batch: Batch, parts: Sequence[Tensor]) -> Batch | None:
        """The planned batch, if these are its ids, or parts of what it was planned with."""
        if batch.device != self.device:  # the rows were moved
            return None
        batch.parts.join()
        if self._memory_stream.has_changed:  # planned beside a stream that is no longer current
            self._memory_stream.record(batch.tensors())
        if isinstance(batch, PlannedBatch) and batch.joint is not None and not batch.joint.count():
            return None  # ids of some table are bad
        batch.count()
        if any(batch.parts.part_of(part) is None for part in parts):
            if isinstance(batch, FittedBatch):
                return None
            asked = self.planned(parts, batch.ids)
            asked.count()
            if asked.held != batch.held or asked.brings:
                return None  # a step holds the rows that its lookups name, and no others
        return batch

    def _completed(self, coming: Coming) -> Block | None:
        """Puts those that stay beside rows that have arrived; gives the others, which leave."""
        now, (batch, rows) = self.now, coming
        assert isinstance(batch, PlannedBatch)
        self._travel.join()
        old = self._shown.rows_of(now)
        places, taken_from = batch.staying
        carry_rows(rows, places, old, taken_from)
        leaving = Block(old, *batch.leaving)
        return leaving if now.newer and len(leaving.ids) > 0 else None

    def _extend(self, parts: Sequence[Tensor], *, are_planned: bool = False) -> None:
        """Holds more rows beside those that are held already.

        Where `are_planned`, lookups of them are still to come.
        """
        if self._fixed is not None:
            return self._extend_fixed(parts, are_planned=are_planned)
        batch = self.planned(parts, self.now.ids)
        if batch.brings == 0:
            self.now = self._beside(batch, are_planned=are_planned)
            return
        self._drop_coming()
        now, load = self.now, batch.arriving[0][: batch.brings]
        ids, _ = torch.sort(torch.cat([now.ids, load]))
        count, before = len(ids), torch.searchsorted(ids, now.ids)
        if self._padding_rows:  # the last row before and now
            before = torch.cat([before, before.new_tensor([count])])
        rows = self._memory(count + self._padding_rows)
        for new, each in zip(rows, self._shown.rows_of(now), strict=True):
            new.index_copy_(0, before, each)
        arriving = Block(rows, load, torch.searchsorted(ids, load))
        self._store.exchange(self._shown.kept.fields, None, arriving)
        gradient = self._shown.parameter.grad if self._shown.has_gradient() else None
        self.now = self._beside(batch, are_planned=are_planned)._replace(
            ids=ids,
            rows=rows,
            places={},
            moved=len(now.batches),
            gradient=None if gradient is None else among_more(gradient, before, len(rows[0])),
        )
        self.complete()

    def _beside(self, batch: PlannedBatch, *, are_planned: bool) -> Step:
        """The step of now with a batch beside, all of whose rows it holds."""
        now = self.now
        beside = now._replace(batches=(*now.batches, batch))
        if not are_planned:
            return beside
        return beside._replace(
            planned=(*now.planned, len(now.batches)),
            planned_parts=now.planned_parts + len(batch.parts),
        )

    def _extend_fixed(self, parts: Sequence[Tensor], *, are_planned: bool) -> None:
        """Finds rows among those that are held already: no others fit."""
        remedy = (
            f"{self.name}: with capacity all lookups of a step are announced before the first of"
            " them, by announce(), prefetch() or in one lookup; this one"
        )
        if self._captures():
            raise RuntimeError(f"{remedy} was not, and a CUDA graph cannot look what it names")
        batch = self.planned(parts, self.now.batches[0])
        if more := batch.brings:
            raise RuntimeError(f"{remedy} brings {more} new rows; nothing has changed")
        self.now = self._beside(batch, are_planned=are_planned)

    @alone
    def bring_home(self, *, changes: bool = True) -> None:
        """Writes the rows that are newer here to the table; they stay held.

        With `changes` who asks may change the table: held rows are read again before they are used.
        """
        self.complete(ahead=False)
        self._drop_coming()
        now = self.now
        if self._fixed is not None:
            if now.batches:
                # With a gradient that is left an optimizer steps them once more; a CUDA graph does
                # not know that the table has changed, and reads what it holds by itself.
                captured = self._fixed.is_captured
                stay = not self.is_over() or (not captured and self._shown.has_gradient())
                if not now.stale:
                    self._take()
                    self._fixed.go_home(stay=stay)
                if captured and not stay:
                    if now.stale:
                        self._fixed.hold_none()
                    self.now = now._replace(rows=[*now.rows], newer=False, stale=False)
                else:
                    # Without them the optimizer's state of now may be another's, or gone.
                    self.now = now._replace(newer=False, stale=now.stale or changes)
            return
        if now.newer and now.ids.shape[0]:  # nothing goes home to a table without first values
            leaving = Block(self._shown.rows_of(now), now.ids)
            self._store.exchange(self._shown.kept.fields, leaving, None)
        if now.newer or (changes and not now.stale):
            self.now = now._replace(newer=False, stale=now.stale or changes)

    @alone
    def moving(self, move: Callable[[], object]) -> None:
        """Holds no row while the parameter is moved to another device."""
        self.refuse_if_captured("moving it")
        self.raise_faults()
        for step in (lambda: None, move):
            self.bring_home()
            step()
            self._hold_nothing(self.now.number + 1)
            self.complete()

    def before_optimizer(self, call: OptimizerCall) -> None:
        """Called before an optimizer steps the held rows, within a turn."""
        self.complete()
        self.note_gradient_asked()
        as_in_table = None
        if self.now.stale:
            is_idle = call.is_idle and not self._captures()
            self.show_anew()
            if is_idle:
                as_in_table = [each.clone() for each in self._shown.rows_of(self.now)]
        self._as_in_table = as_in_table
        parameter = self._shown.parameter
        gradient = parameter.grad
        if gradient is not None and not self._shown.has_gradient():
            # zero_grad(set_to_none=False) leaves zeros, with which most optimizers move rows.
            gradient = parameter.grad = None
        if gradient is not None:
            self._shown.divide()
            gradient = parameter.grad
        state = self._shown.kept.state
        if state is not None and state.sparse and gradient is not None:
            gradient = parameter.grad = sparse_of_all(
                gradient, self._store.numbers(self.now.rows[0])
            )
        self._shown.note_lent(gradient)
        self._call = (call, self.now.number)

    def after_optimizer(self) -> None:
        """Called after it, within a turn."""
        if self._settle():
            # A backward through what used these rows would compute with other ones.
            torch.autograd.graph.increment_version(self.now.rows[0])

    @alone
    def plan_ahead(self, parts: Sequence[Tensor], after: Batch | None) -> Batch:
        """Plans a batch of a loop: its ids, of any shape, and the batch before it."""
        with self._planning.after_current(self.device):
            batch = self._step_of(parts, after)
        batch.parts.planned_until(self._planning.end)
        return batch

    @alone
    def start_loop(self, loop: object) -> None:
        """Lets a loop plan batches ahead while it lives; RuntimeError if another has not ended."""
        if self._loop() not in (None, loop):
            gc.collect()  # it may have ended by an exception, whose traceback has its frames
        if self._loop() not in (None, loop):
            raise RuntimeError(
                f"{self.name}: its rows are prefetched by another loop, which must end first"
                " (close its generator, or let it run to its end)"
            )
        self._loop = weakref.ref(loop)

    @alone
    def end_loop(self, loop: object) -> None:
        """Ends a loop: forgets what was planned; rows that have arrived for it go back."""
        if self._loop() is not loop:
            return
        self._loop = lambda: None
        self.expect(None)
        self.complete(ahead=False)
        self._drop_coming()
        self._joint = None

    @alone
    def expect(self, batch: Batch | None) -> None:
        """Says which planned batch the next step may take."""
        self._due = batch
        if batch is not None and (self.now.awaited is not None or self.now.unseen()):
            self._is_left = True  # no step of the batch before, of which lookups are missing
        if self.now.awaited is not None:
            self._is_idle = True
            self._give_back()

    def note_zero_grad(self) -> None:
        """Called when a zero_grad() asks for the gradient, which it may fill with zeros then."""
        self._shown.note_zero_grad()
        self._is_left = True
        self._end_batch()
        before = self.now.awaited
        if before is not None and before.gradient is not None:
            self.now = self.now._replace(awaited=before._replace(gradient=None))

    def note_gradient_asked(self) -> None:
        """Called before somebody else reads the gradient, or sets it."""
        if self.now.awaited is not None and self.now.awaited.gradient is not None:
            self._give_back()

    def _give_back(self) -> None:
        """Holds the rows again that were held before a step that nobody has asked for."""
        self.bring_home(changes=False)
        before = self.now.awaited
        if before is None:
            return
        rows, number = self._loaded_again(before), self.now.number + 1
        self.now = before._replace(number=number, rows=rows, newer=False)
        self.complete()

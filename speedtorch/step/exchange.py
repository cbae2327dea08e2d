"""Exchange: the rows that a step holds leave for their table while those of the next arrive.

A step holds each row that is asked for once, as a parameter and as the optimizer's state of it. The
first rows that are asked for after the optimizer's step begin the next step: one exchange brings
the rows of the last one back to the table while others arrive, and rows of both stay.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from speedtorch.step.gradient_sums import among_more, sparse_of_all
from speedtorch.step.planned_batch import PlannedBatch
from speedtorch.step.row_store import RowStore
from speedtorch.step.shown_rows import ShownRows
from speedtorch.step.side_stream import SideStream
from speedtorch.step.step import Coming, Owed, Placed, Step, place_of, placed, without_padding

__all__ = ["Exchange", "OptimizerCall", "Requester"]


class Requester(Protocol):
    """Who asks for rows in front of the step, and brings the gradients of them, summed.

    It gives ids of rows to Exchange.hold(), gets their positions among the held rows, and later
    hands Exchange.add_gradient() a gradient of held rows. Where the ids come from, and whether who
    asked holds any rows itself, is its own affair.
    """

    def expects_gradient(self) -> bool:
        """Whether a gradient of rows that it asked for may still come."""


class OptimizerCall(Protocol):
    """A call of an optimizer's step()."""

    done: bool
    """Whether all rows have been stepped."""
    paused: bool
    """Whether a closure of the user runs within it."""

    def leave(self) -> bool:
        """Called by the next one in: cleans up behind a call that was left by an exception.

        Returns:
            Whether it was.
        """


class Exchange:
    """Steps of one table: which rows are held now, and how others take their place.

    Every method completes what an exception may have left half done, before anything else.

    Args:
        name: what errors call it.
        store: where the rows come from.
        shown: shows those that are held.
        padding: id of a row that is never trained, or None.
        requester: asks for them; kept by who made it.
    """

    def __init__(
        self,
        name: str,
        store: RowStore,
        shown: ShownRows,
        padding: int | None,
        requester: Requester,
    ) -> None:
        self._name = name
        self._store = store
        self._shown = shown
        self._padding = padding
        self._requester: Requester = weakref.proxy(requester)
        self._call: tuple[OptimizerCall, int] | None = None
        """The last call of an optimizer's step, and the number of the step that it was for."""
        self._planning, self._travel = SideStream("planning"), SideStream("exchange")
        self._due: PlannedBatch | None = None
        """The batch of a loop that the next step may take."""
        self._loop: weakref.ref[object] | None = None
        self.device = shown.parameter.device
        """Where rows are held."""
        self._fields: tuple[tuple[str, ...], list[tuple[tuple[int, ...], torch.dtype]]] = ((), [])
        """Names of the fields that are held, and the shapes and dtypes of their rows."""
        self.now = self._nothing(0)
        """The step that holds rows."""

    def _nothing(self, number: int) -> Step:
        return Step.of_nothing(number, self._memory(0), self.device)

    def _memory(self, count: int) -> list[Tensor]:
        """Memory for rows of every field; behind those of the weight is place for the padding."""
        names, device = self._shown.names, self.device
        if self._fields[0] is not names:
            self._fields = (names, [self._store.row_of(name) for name in names])
        (shape, dtype), *state = self._fields[1]
        padded = count if self._padding is None else count + 1
        weight = torch.empty((padded, *shape), dtype=dtype, device=device)
        return [
            weight,
            *(torch.empty((count, *row), dtype=kind, device=device) for row, kind in state),
        ]

    def _no_rows(self) -> list[Tensor]:
        """No row of any field."""
        return without_padding(self._memory(0), 0)

    def _fetch_padding(self, rows: list[Tensor], count: int) -> None:
        if self._padding is not None:
            self._store.read(torch.tensor([self._padding]), rows[0][count : count + 1])

    # --------------------------------------------------------------------------------------------
    # Completion

    def complete(self, *, ahead: bool = True) -> Step:
        """Finishes what belongs to the step of now.

        Args:
            ahead: rows of the batch after it are sent for as well, if it is planned.

        Returns:
            The step.
        """
        now, shown = self.now, self._shown
        if not shown.shows(now) or now.owed is not None or (ahead and now.ahead):
            if torch.is_inference_mode_enabled():  # who holds rows next could not train them
                with torch.inference_mode(False):
                    return self.complete(ahead=ahead)
            self.show()
            if now.owed is not None or (ahead and now.ahead):
                self._send(ahead)
        if self._call is not None or shown.was_changed():
            self._settle()
        return self.now

    def show(self) -> None:
        """Makes torch's objects show the step of now, if they do not."""
        if not self._shown.shows(self.now):
            self._shown.show(self.now)

    def show_anew(self) -> None:
        """Reads held rows again, all fields that there are now; the table has all of them."""
        now = self.now
        gradient = self._shown.parameter.grad
        self.now = now._replace(rows=self._load(now.ids), stale=False, gradient=gradient)
        self.complete()

    def _settle(self) -> bool:
        """Takes note of what an optimizer, or somebody else, did to the held rows.

        Returns:
            Whether an optimizer has stepped them.
        """
        now, written, stepped = self.now, self._shown.was_written(), False
        left = False
        if self._call is not None:
            call, number = self._call
            if call.done:
                has_gradient = self._shown.parameter.grad is not None
                stepped = number == now.number and (has_gradient or written)
                left = True
                if stepped:
                    self.now = now._replace(newer=True, over=True, stale=False)
            elif not call.paused:
                left = call.leave()
                written = written or number == now.number
        if written:
            if not self.now.newer:
                self.now = self.now._replace(newer=True, stale=False)
            self._shown.mark()
        if left:
            self._call = None
        return stepped

    def _send(self, ahead: bool) -> None:
        """Rows of the last step leave, those of the next batch arrive, beside what comes now."""
        now = self.now
        owed = now.owed or Owed(self._no_rows(), now.ids[:0], now.ids[:0])
        following = None
        if ahead and now.ahead and now.whole is not None:
            following = now.whole.following
        load, load_places, arriving, rows = owed.ids[:0], owed.places[:0], self._no_rows(), None
        if following is not None:
            self._planning.join()
            try:
                load, load_places = following.arriving
            except IndexError:
                following = None  # who looks up its bad ids is told
        if following is not None or owed.ids.shape[0] > 0:
            self._travel.uses(owed.rows)
            with self._travel.after_current(self.device):
                if following is not None:  # in memory that only this stream is given again
                    rows = self._memory(following.held)
                    arriving = without_padding(rows, following.held)
                self._store.exchange(
                    self._shown.names,
                    owed.rows,
                    owed.ids,
                    arriving,
                    load,
                    owed.places,
                    load_places,
                )
        coming = None if following is None or rows is None else Coming(following, rows)
        self.now = now._replace(owed=None, ahead=now.ahead and not ahead, coming=coming)

    def _drop_coming(self) -> None:
        """Rows that arrived for the next batch go back, as some are nowhere else."""
        coming = self.now.coming
        self._travel.join()
        if coming is not None:
            ids, places = coming.batch.arriving
            rows = without_padding(coming.rows, coming.batch.held)
            nothing = self._no_rows()
            self._store.exchange(self._shown.names, rows, ids, nothing, ids[:0], places)
        if coming is not None or self.now.ahead:
            self.now = self.now._replace(coming=None, ahead=False)

    def _read_again(self) -> Step:
        """Held rows are those of the table again, if they may have become others there."""
        if self.now.stale:
            self.show_anew()
        return self.now

    def _load(self, ids: Tensor) -> list[Tensor]:
        """Rows of all fields as they are in the table, in new memory."""
        count = ids.shape[0]
        rows = self._memory(count)
        if count > 0:
            arriving = without_padding(rows, count)
            self._store.exchange(self._shown.names, self._no_rows(), ids[:0], arriving, ids)
            self._fetch_padding(rows, count)
        return rows

    # --------------------------------------------------------------------------------------------
    # Rows of a step

    def hold(
        self,
        parts: Sequence[Tensor],
        told: Sequence[Tensor] = (),
        plan: PlannedBatch | None = None,
    ) -> list[Placed]:
        """Holds the rows that ids name from now until the step after the optimizer's begins.

        Args:
            parts: ids of any shape, on either device.
            told: ids that were announced for the step, which holds them as well.
            plan: their plan.

        Returns:
            For each part where its rows are.

        Raises:
            IndexError: an id is out of range; what is held did not change.
        """
        self._refuse_capture()
        self.complete()
        if self.is_over():
            self._begin(parts, told, plan)
        else:
            self._read_again()
            if any(place_of(self.now, part) is None for part in told):
                self._extend(told)
        found = [place_of(self.now, part) for part in parts]
        if any(each is None for each in found):
            self._extend(parts)
            last = len(self.now.batches) - 1
            found = [placed(self.now, last, part) for part in range(len(parts))]
        return [each for each in found if each is not None]

    def is_over(self) -> bool:
        """Whether the next rows that are asked for begin a step of their own."""
        now = self.now
        if now.over:
            return True
        if now.announced or self._requester.expects_gradient():
            return False
        return not self._shown.has_gradient()

    def announce(
        self,
        parts: Sequence[Tensor],
        told: Sequence[Tensor] = (),
        plan: PlannedBatch | None = None,
    ) -> bool:
        """As hold(), for lookups that are still to come, where a step has begun or may now.

        Returns:
            Whether they are held; if not, the ids are to be given with the step that begins next.
        """
        self._refuse_capture()
        self.complete()
        if self._due is None and self.is_over():
            return False
        self.hold(parts, told, plan)
        self.now = self.now._replace(announced=True)
        return True

    def looked_up(self) -> None:
        """Says that lookups have come which were announced."""
        if self.now.announced:
            self.now = self.now._replace(announced=False)

    def change(self) -> Step:
        """Says that somebody is about to write to the held rows."""
        self.complete()
        self._read_again()
        if not self.now.newer:
            self.now = self.now._replace(newer=True)
        return self.now

    def _begin(
        self, parts: Sequence[Tensor], told: Sequence[Tensor], plan: PlannedBatch | None
    ) -> None:
        planned, self._due = self._due, None  # two steps of one batch take its plan once
        batch = None if planned is None else self._taken(planned, parts)
        coming = self.now.coming
        if batch is not None and coming is not None and coming.batch is batch:
            self._advance(coming)
        else:
            begun = batch or plan or self.planned(told or parts)
            begun.count()  # bad ids change nothing
            self._replace(begun, ahead=batch is not None)
        if batch is not None and told:
            self._extend(told)

    def planned(
        self, parts: Sequence[Tensor], after: PlannedBatch | Tensor | None = None
    ) -> PlannedBatch:
        """A batch of these ids; see PlannedBatch."""
        rows, device, padding = self._store.rows, self.device, self._padding
        return PlannedBatch(parts, rows, device, padding, after=after, name=self._name)

    def _taken(self, batch: PlannedBatch, parts: Sequence[Tensor]) -> PlannedBatch | None:
        """The planned batch, if these are its ids, or parts of what it was planned with."""
        self._planning.join()
        batch.count()
        if any(batch.part_of(part) is None for part in parts):
            asked = self.planned(parts, batch.ids)
            if asked.held != batch.held or len(asked.arriving[0]):
                return None  # a step holds the rows that its lookups name, and no others
        return batch

    def _replace(self, batch: PlannedBatch, *, ahead: bool) -> None:
        """The rows of the last step leave while those of the batch arrive."""
        self._drop_coming()
        now, ids, count = self.now, batch.ids, batch.held
        rows = self._memory(count)
        leaving = self._shown.rows_of(now) if now.newer else self._no_rows()
        evict = now.ids if now.newer else ids[:0]
        self._store.exchange(self._shown.names, leaving, evict, without_padding(rows, count), ids)
        self._fetch_padding(rows, count)
        # Rows that stay have not been in the table in between.
        self.now = Step(
            now.number + 1, ids, rows, {}, (batch,), whole=batch, newer=now.newer, ahead=ahead
        )
        self.complete()

    def _advance(self, coming: Coming) -> None:
        """Rows that have arrived are held now, with those that stay; the others leave meanwhile."""
        now, (batch, rows) = self.now, coming
        self._travel.join()
        old = self._shown.rows_of(now)
        places, taken_from = batch.staying
        for new, each in zip(rows, old, strict=True):
            new.index_copy_(0, places, each.index_select(0, taken_from))
        self._fetch_padding(rows, batch.held)
        owed = Owed(old, *batch.leaving) if now.newer else None
        self.now = Step(
            now.number + 1,
            batch.ids,
            rows,
            {},
            (batch,),
            whole=batch,
            newer=True,
            ahead=True,
            owed=owed,
        )
        self.complete()

    def _extend(self, parts: Sequence[Tensor]) -> None:
        """Holds more rows beside those that are held already."""
        batch = self.planned(parts, self.now.ids)
        load, _ = batch.arriving
        if len(load) == 0:
            self.now = self.now._replace(batches=(*self.now.batches, batch))
            return
        self._drop_coming()
        now = self.now
        ids, _ = torch.sort(torch.cat([now.ids, load]))
        count, before = len(ids), torch.searchsorted(ids, now.ids)
        rows = self._memory(count)
        for new, each in zip(rows, self._shown.rows_of(now), strict=True):
            new.index_copy_(0, before, each)
        nothing = self._no_rows()
        places = torch.searchsorted(ids, load)
        arriving = without_padding(rows, count)
        self._store.exchange(self._shown.names, nothing, load[:0], arriving, load, None, places)
        self._fetch_padding(rows, count)
        gradient = self._shown.parameter.grad if self._shown.has_gradient() else None
        self.now = now._replace(
            ids=ids,
            rows=rows,
            places={},
            batches=(*now.batches, batch),
            moved=len(now.batches),
            whole=None,
            gradient=None if gradient is None else among_more(gradient, before, count),
        )
        self.complete()

    # --------------------------------------------------------------------------------------------
    # The table

    def bring_home(self, *, changes: bool = True) -> None:
        """Writes the rows that are newer here to the table; they stay held.

        Args:
            changes: who asks may change the table: held rows are read again before they are used.
        """
        self.complete(ahead=False)
        if self.now.coming is not None or self.now.ahead:
            self._drop_coming()
        now = self.now
        if now.newer:
            nothing = self._no_rows()
            self._store.exchange(
                self._shown.names, self._shown.rows_of(now), now.ids, nothing, now.ids[:0]
            )
        if now.newer or (changes and not now.stale):
            self.now = now._replace(newer=False, stale=now.stale or changes)

    def moving(self, move: Callable[[], object]) -> None:
        """Holds no row while the parameter is moved to another device."""
        for step in (lambda: None, move):
            self.bring_home()
            step()
            self.device = self._shown.parameter.device
            self.now = self._nothing(self.now.number + 1)
            self.complete()

    # --------------------------------------------------------------------------------------------
    # Gradients and the optimizer's step

    def add_gradient(self, gradient: Tensor, number: int) -> None:
        """Gives the held rows a gradient.

        Args:
            gradient: summed over all who asked, of all held rows `[n, ...]`.
            number: that of the step.

        Raises:
            RuntimeError: the rows of that step have left.
        """
        self.refuse_earlier(number)
        self._shown.set_gradient(gradient)

    def refuse_earlier(self, number: int) -> None:
        """Raises RuntimeError if the rows of that step have left."""
        if number != self.now.number:
            raise RuntimeError(
                f"{self._name}: backward through a lookup of an earlier step, whose rows have gone"
                " back to the table: call backward before the lookup that follows the optimizer's"
                " step"
            )

    def before_optimizer(self, call: OptimizerCall) -> None:
        """Called before an optimizer steps the held rows."""
        self.complete()
        now, parameter = self._read_again(), self._shown.parameter
        gradient = parameter.grad
        if gradient is not None and not self._shown.has_gradient():
            # zero_grad(set_to_none=False) leaves zeros, with which most optimizers move rows.
            gradient = parameter.grad = None
        state = self._shown.state
        if state is not None and state.sparse and gradient is not None:
            parameter.grad = sparse_of_all(gradient, self._store.numbers(now.ids))
        self._call = (call, now.number)

    def after_optimizer(self) -> bool:
        """Called after it.

        Returns:
            Whether there was something to step.
        """
        stepped = self._settle()
        if stepped:
            # A backward through what used these rows would compute with other ones.
            torch.autograd.graph.increment_version(self.now.rows[0])
        return stepped

    # --------------------------------------------------------------------------------------------
    # Batches that are planned ahead

    def plan_ahead(self, parts: Sequence[Tensor], after: PlannedBatch | None) -> PlannedBatch:
        """Plans a batch of a loop.

        Args:
            parts: its ids, of any shape, on either device.
            after: the batch before it.
        """
        with self._planning.after_current(self.device):
            batch = self.planned(parts, after)
        if after is not None:
            after.following = batch
        return batch

    def start_loop(self, loop: object) -> None:
        """Lets a loop plan batches ahead, for as long as it lives.

        Raises:
            RuntimeError: another one has not ended.
        """
        if self._loop is not None and self._loop() not in (None, loop):
            gc.collect()  # it may have ended by an exception, whose traceback has its frames
        if self._loop is not None and self._loop() not in (None, loop):
            raise RuntimeError(
                f"{self._name}: its rows are prefetched by another loop, which must end first"
                " (close its generator, or let it run to its end)"
            )
        self._loop = weakref.ref(loop)

    def end_loop(self, loop: object) -> None:
        """Ends a loop: forgets what was planned; rows that have arrived for it go back."""
        if self._loop is None or self._loop() is not loop:
            return
        self._loop = self._due = None
        self.complete(ahead=False)
        self._drop_coming()

    def expect(self, batch: PlannedBatch | None) -> None:
        """Says which planned batch the next step may take."""
        self._due = batch

    def _refuse_capture(self) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self._name}: a CUDA graph cannot hold a lookup, because the number of rows"
                " changes from step to step; capture what comes after it"
            )

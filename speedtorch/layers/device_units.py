"""DeviceUnits: which units have device memory, and how many bytes of the budget each takes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor
from torch.optim import Optimizer

from speedtorch.layers.unit import Unit
from speedtorch.layers.uses import Need, Uses
from speedtorch.memory.byte_count import text_of

__all__ = ["DeviceUnits"]


class DeviceUnits:
    """Units that may have device memory, the least recently used first, and their bytes.

    `first_state` returns the bytes of state that an optimizer's first step makes for a parameter.
    """

    def __init__(
        self,
        budget: int | None,
        first_state: Mapping[Optimizer, Callable[[Tensor], int]],
        uses: Uses,
    ) -> None:
        self.budget, self._first_state, self._uses = budget, first_state, uses
        self.by_last_use: OrderedDict[Unit, None] = OrderedDict()
        self._others: dict[Unit, int] = {}
        """Bytes beside those of the unit's flat buffers."""

    @property
    def present(self) -> list[Unit]:
        """Units with device memory, the least recently used first."""
        return [unit for unit in self.by_last_use if self.bytes_of(unit)]

    def bytes_of(self, unit: Unit) -> int:
        """Bytes of a unit's device memory."""
        return unit.packs.device_bytes + self._others.get(unit, 0)

    def total_bytes(self) -> int:
        """Bytes of the device memory of all units."""
        return sum(map(self.bytes_of, self.by_last_use))

    def count(self, unit: Unit, need: Need | None = None) -> None:
        """Counts a unit's other bytes anew, with those that `need` may add."""
        count = unit.packs.other_bytes()
        if need is not None and self.budget is not None:
            if need.gradients:
                count += unit.tensors.missing_gradients()
            if need.state:
                count += self._new_state(unit)
        self._others[unit] = count

    def forget_others(self, unit: Unit) -> int:
        """Returns the other bytes of an evicted unit, and counts them no longer."""
        return self._others.pop(unit, 0)

    def use_last(self, unit: Unit) -> None:
        """Makes a unit the most recently used one."""
        self.by_last_use[unit] = None
        self.by_last_use.move_to_end(unit)

    def clear(self) -> None:
        """Forgets all units."""
        self.by_last_use.clear()
        self._others.clear()

    def expected_bytes(self) -> int:
        """Bytes that units in use will need if these uses have the needs of the last ones."""
        count = 0
        for unit, need in self._uses.needs().items():
            if (last := self._uses.last_need(unit)) is None:
                continue
            if last.gradients and not need.gradients:
                count += unit.tensors.missing_gradients()
            if last.state and not need.state:
                count += unit.packs.missing_bytes(state=True)
        return count

    def check_room_to_step(self, units: Iterable[Unit]) -> None:
        """Raises RuntimeError if the budget is too small for the step of one of the units."""
        if self.budget is None:
            return
        needs = self._uses.needs()
        for unit in units:
            used = [each for each in self.by_last_use if each in needs and each is not unit]
            needed = unit.packs.needed_bytes + self._new_state(unit)
            needed += sum(self.bytes_of(each) for each in used)
            if needed > self.budget:
                raise RuntimeError(
                    f"budget: {text_of(self.budget)} are {text_of(needed - self.budget)} too"
                    f" little to step unit {unit.name!r}, with its state and gradients, beside the"
                    f" units in use, {[each.name for each in used]}; no unit has been stepped: give"
                    " more"
                )

    def _new_state(self, unit: Unit) -> int:
        """Bytes of state that a first step of a unit makes."""
        return sum(self._first_state[by](each) for by, each in unit.tensors.without_state())

"""Layers on the fly: a module's tensors as one unit, in host memory or on the device."""

from speedtorch.layers.host_init import host_init
from speedtorch.layers.offloaded_module import OffloadedModule
from speedtorch.layers.pack import Pack
from speedtorch.layers.slab import Memory, Slab
from speedtorch.layers.state_swapper import StateSwapper
from speedtorch.layers.swapper import Swapper
from speedtorch.layers.training_state import SleepReport, TrainingState
from speedtorch.layers.transfer_stats import Freed, StateReport, SwapReport

__all__ = [
    "Freed",
    "Memory",
    "OffloadedModule",
    "Pack",
    "Slab",
    "SleepReport",
    "StateReport",
    "StateSwapper",
    "SwapReport",
    "Swapper",
    "TrainingState",
    "host_init",
]

"""Layer offload: modules and training state in host memory or on the device."""

from speedtorch.layers.host_init import host_init
from speedtorch.layers.offloaded_module import OffloadedModule
from speedtorch.layers.state_swapper import StateSwapper
from speedtorch.layers.swapper import Swapper
from speedtorch.layers.training_state import SleepReport, TrainingState
from speedtorch.layers.transfer_stats import Freed, Memory, StateReport, SwapReport

__all__ = [
    "Freed",
    "Memory",
    "OffloadedModule",
    "SleepReport",
    "StateReport",
    "StateSwapper",
    "SwapReport",
    "Swapper",
    "TrainingState",
    "host_init",
]

"""Layer offload: modules and training state in host memory or on the device."""

from speedtorch.layers.flat_buffer import FlatBuffer, Memory
from speedtorch.layers.host_init import host_init
from speedtorch.layers.offloaded_module import OffloadedModule
from speedtorch.layers.state_swapper import StateSwapper
from speedtorch.layers.swapper import Swapper
from speedtorch.layers.tensor_group import TensorGroup
from speedtorch.layers.training_state import SleepReport, TrainingState
from speedtorch.layers.transfer_stats import Freed, StateReport, SwapReport

__all__ = [
    "FlatBuffer",
    "Freed",
    "Memory",
    "OffloadedModule",
    "SleepReport",
    "StateReport",
    "StateSwapper",
    "SwapReport",
    "Swapper",
    "TensorGroup",
    "TrainingState",
    "host_init",
]

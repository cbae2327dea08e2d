"""Types of arguments and results, for annotations: `def run(step: types.GraphedStep)`.

The functions that take or return these types document them.
"""

from speedtorch.checkpoints.save import Saved
from speedtorch.info import Info
from speedtorch.layers.auto import AutoOffload
from speedtorch.layers.state_tensors import StatePart
from speedtorch.layers.training_state import SleepReport
from speedtorch.layers.transfer_stats import Freed, StateReport, SwapReport
from speedtorch.memory.cost_model import Explanation
from speedtorch.memory.host_memory import HostMemoryKind
from speedtorch.memory.placement import MemoryKind
from speedtorch.nn.embedding_bag import BagMode
from speedtorch.nn.graphed import GraphedStep
from speedtorch.nn.jagged import JaggedRows, KeyedFeatures, RowsByFeature
from speedtorch.nn.prefetch import Prefetch
from speedtorch.step.hot_rows import CacheReport
from speedtorch.step.rounding import RoundingMode, StoredAs
from speedtorch.table.resident_rows import ResidentReport
from speedtorch.table.table_handle import TableHandle

__all__ = [
    "AutoOffload",
    "BagMode",
    "CacheReport",
    "Explanation",
    "Freed",
    "GraphedStep",
    "HostMemoryKind",
    "Info",
    "JaggedRows",
    "KeyedFeatures",
    "MemoryKind",
    "Prefetch",
    "ResidentReport",
    "RoundingMode",
    "RowsByFeature",
    "Saved",
    "SleepReport",
    "StatePart",
    "StateReport",
    "StoredAs",
    "SwapReport",
    "TableHandle",
]

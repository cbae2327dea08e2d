"""Train on rows that live in host memory: tables larger than the GPU, at the speed of its link."""

import sys

from speedtorch import optim as optim
from speedtorch.checkpoints.full_state_dict import full_state_dict
from speedtorch.checkpoints.load import load
from speedtorch.checkpoints.save import async_save, save
from speedtorch.info import info
from speedtorch.layers.host_init import host_init
from speedtorch.layers.state_swapper import StateSwapper
from speedtorch.layers.swapper import Swapper
from speedtorch.layers.training_state import TrainingState
from speedtorch.legacy.com import COM, COMMM, CPUPytorchCOM, GPUPytorchCOM, PytorchCOM
from speedtorch.legacy.data_gadget import (
    CPUPytorchDataGadget,
    DataGadget,
    DataGadgetMM,
    GPUPytorchDataGadget,
    PytorchDataGadget,
)
from speedtorch.legacy.model_factory import (
    CPUPytorchModelFactory,
    GPUPytorchModelFactory,
    ModelFactory,
    ModelFactoryMM,
    PytorchModelFactory,
)
from speedtorch.legacy.optimizer_factory import (
    CPUPytorchOptimizerFactory,
    GPUPytorchOptimizerFactory,
    OptimizerFactory,
    OptimizerFactoryMM,
    PytorchOptimizerFactory,
)
from speedtorch.memory import empty, memory_kind, memory_stats, pin_memory_, unpin_memory_
from speedtorch.memory.calibration import calibrate, load_costs_with_first_gpu
from speedtorch.memory.cost_model import explain, get_num_sms, set_num_sms
from speedtorch.nn.cache import cache
from speedtorch.nn.collection import EmbeddingBagCollection, EmbeddingCollection
from speedtorch.nn.embedding import Embedding
from speedtorch.nn.embedding_bag import EmbeddingBag
from speedtorch.nn.graphed import graphed
from speedtorch.nn.nearest import nearest_neighbors
from speedtorch.nn.prefetch import prefetch
from speedtorch.nn.table_config import EmbeddingBagConfig, EmbeddingConfig
from speedtorch.nn.word2vec_format import save_word2vec_format
from speedtorch.ops.functions import (
    optimizer_state_swap,
    pinned_copy,
    pinned_gather,
    pinned_scatter,
    plan_rows,
    pool_rows,
    sum_rows,
    synchronize,
    table_ids,
)
from speedtorch.ops.log_switches import LOGS_CALLS, MAX_DUMPED_CALLS, REPORTS_ALIVE
from speedtorch.optim.attach import attach, detach
from speedtorch.parallel.clip import clip_grad_norm_
from speedtorch.parallel.grad_scaler import GradScaler
from speedtorch.parallel.row_parameters import row_parameters
from speedtorch.parallel.shard import shard
from speedtorch.table import HostTable
from speedtorch.version import __version__ as __version__

# A literal list, because type checkers read it.
__all__ = [
    "COM",
    "COMMM",
    "CPUPytorchCOM",
    "CPUPytorchDataGadget",
    "CPUPytorchModelFactory",
    "CPUPytorchOptimizerFactory",
    "DataGadget",
    "DataGadgetMM",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "GPUPytorchCOM",
    "GPUPytorchDataGadget",
    "GPUPytorchModelFactory",
    "GPUPytorchOptimizerFactory",
    "GradScaler",
    "HostTable",
    "ModelFactory",
    "ModelFactoryMM",
    "OptimizerFactory",
    "OptimizerFactoryMM",
    "PytorchCOM",
    "PytorchDataGadget",
    "PytorchModelFactory",
    "PytorchOptimizerFactory",
    "StateSwapper",
    "Swapper",
    "TrainingState",
    "async_save",
    "attach",
    "cache",
    "calibrate",
    "clip_grad_norm_",
    "detach",
    "empty",
    "explain",
    "full_state_dict",
    "get_num_sms",
    "graphed",
    "host_init",
    "info",
    "load",
    "memory_kind",
    "memory_stats",
    "nearest_neighbors",
    "optimizer_state_swap",
    "pin_memory_",
    "pinned_copy",
    "pinned_gather",
    "pinned_scatter",
    "plan_rows",
    "pool_rows",
    "prefetch",
    "row_parameters",
    "save",
    "save_word2vec_format",
    "set_num_sms",
    "shard",
    "sum_rows",
    "synchronize",
    "table_ids",
    "unpin_memory_",
]

load_costs_with_first_gpu()

if LOGS_CALLS:
    from speedtorch.ops.call_log import log_calls

    log_calls(sys.modules[__name__], optim)
if MAX_DUMPED_CALLS:
    from speedtorch.dump_file import write_dump
    from speedtorch.ops.op_dump import write_by

    write_by(write_dump)
if REPORTS_ALIVE:
    from speedtorch.alive_report import report_at_exit

    report_at_exit()

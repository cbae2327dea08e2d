"""The classes of SpeedTorch's 2019 interface, over HostTable and the ops of this package."""

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

__all__ = [
    "COM",
    "COMMM",
    "CPUPytorchCOM",
    "CPUPytorchDataGadget",
    "CPUPytorchModelFactory",
    "CPUPytorchOptimizerFactory",
    "DataGadget",
    "DataGadgetMM",
    "GPUPytorchCOM",
    "GPUPytorchDataGadget",
    "GPUPytorchModelFactory",
    "GPUPytorchOptimizerFactory",
    "ModelFactory",
    "ModelFactoryMM",
    "OptimizerFactory",
    "OptimizerFactoryMM",
    "PytorchCOM",
    "PytorchDataGadget",
    "PytorchModelFactory",
    "PytorchOptimizerFactory",
]

"""The classes of SpeedTorch's 2019 interface, over HostTable and the ops of this package."""

from speedtorch.legacy import com, data_gadget, model_factory, optimizer_factory
from speedtorch.legacy.com import *  # noqa: F403
from speedtorch.legacy.data_gadget import *  # noqa: F403
from speedtorch.legacy.model_factory import *  # noqa: F403
from speedtorch.legacy.optimizer_factory import *  # noqa: F403

__all__ = [
    *com.__all__,
    *data_gadget.__all__,
    *model_factory.__all__,
    *optimizer_factory.__all__,
]

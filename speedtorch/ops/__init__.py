"""The ops as Python functions, with checks of ids and shapes, fake kernels and gradients."""

from speedtorch.ops import functions
from speedtorch.ops.functions import *  # noqa: F403

__all__ = functions.__all__

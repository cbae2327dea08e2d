"""Layers on the fly: a module's tensors as one unit, in host memory or on the device."""

from speedtorch.layers.pack import Pack
from speedtorch.layers.slab import Memory, Slab
from speedtorch.layers.unit import Unit

__all__ = ["Memory", "Pack", "Slab", "Unit"]

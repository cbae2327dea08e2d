"""The version of speedtorch."""

__all__ = ["__version__"]

__version__ = "1.0.0"

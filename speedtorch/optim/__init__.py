"""Support for torch optimizers on embedding rows: per-row state in the tables, and step hooks.

The public names are speedtorch's own optimizers, in `__all__`.
"""

from speedtorch.optim.row_wise_adagrad import RowWiseAdagrad

__all__ = ["RowWiseAdagrad"]

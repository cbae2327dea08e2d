"""Any optimizer of torch on held rows: its state beside them, hooks around its steps.

What is public is in `__all__`: optimizers of our own.
"""

from speedtorch.optim.row_wise_adagrad import RowWiseAdagrad

__all__ = ["RowWiseAdagrad"]

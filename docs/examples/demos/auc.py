"""The area under the ROC curve (AUC) of a classifier."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["auc"]


def auc(true: npt.NDArray[Any], false: npt.NDArray[Any]) -> float:
    """The probability that a random true example has a larger value than a random false one.

    Both arrays are `[N]` with at least one value; ties count half.

    Example:
        >>> auc(np.array([3.0, 1.0]), np.array([2.0, 1.0, 0.0]))
        0.75
    """
    values = np.concatenate([true, false])
    _, kind, counts = np.unique(values, return_inverse=True, return_counts=True)
    # Equal values share the mean of their ranks.
    ranks = np.cumsum(counts) - (counts - 1) / 2
    size = len(true)
    return float((ranks[kind[:size]].sum() - size * (size + 1) / 2) / (size * len(false)))

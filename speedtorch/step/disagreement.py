"""DisagreementError: ranks that share rows have made different calls."""

from __future__ import annotations

__all__ = ["DisagreementError"]


class DisagreementError(RuntimeError):
    """Raised on all ranks if their calls differ, such as a lookup on one and a step on another."""

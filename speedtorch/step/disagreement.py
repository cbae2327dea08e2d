"""DisagreementError: ranks that share rows are at different exchanges of them."""

from __future__ import annotations

__all__ = ["DisagreementError"]


class DisagreementError(RuntimeError):
    """Ranks are at different exchanges; all of them raise it."""

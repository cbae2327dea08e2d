"""DisagreementError: ranks that share rows are at different exchanges."""

from __future__ import annotations

__all__ = ["DisagreementError"]


class DisagreementError(RuntimeError):
    """Raised on all ranks if they are at different exchanges."""

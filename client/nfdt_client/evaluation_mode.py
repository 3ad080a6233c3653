"""The option ``evaluate``: whether the cluster carries out ``evaluate`` and ``predict``."""

from __future__ import annotations

from typing import Any

from nfdt.core.errors import UsageError

MODES = ("auto", "true", "false")


def check_mode(value: Any) -> str:
    """Return ``value`` as one of :data:`MODES`.

    Raises:
        UsageError: it is neither one of them nor a boolean.
    """
    mode = str(value).lower()
    if mode not in MODES:
        raise UsageError(f"evaluate: expected one of auto, True, False. Received: {value!r}.")
    return mode

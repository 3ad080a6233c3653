"""Plain asynchronous SGD: every gradient is applied as it arrives (and what ``bsp`` and ``ssp`` use)."""

from __future__ import annotations

from nfdt.update_rules.base import IdentityRule


class Plain(IdentityRule):
    """The identity in every moment: ``w <- w - eta * g`` with the user's own optimizer."""

    name = "plain"

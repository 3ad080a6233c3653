"""Plain asynchronous SGD: every gradient is applied as it arrives. Also the rule of ``bsp`` and ``ssp``."""

from __future__ import annotations

from nfdt.update_rules.base import IdentityRule


class Plain(IdentityRule):
    """The identity in every moment: ``w <- w - eta * g`` with the user's own optimizer."""

    name = "plain"

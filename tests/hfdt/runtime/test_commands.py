from __future__ import annotations

import pytest

from hfdt.runtime.commands import Order


@pytest.mark.parametrize(
    "order",
    [Order("quit"), Order("job", {"spec": "{}"}), Order("do", {"learning_rate": 0.5}, b"\x00reply", b"state\xff")],
    ids=lambda order: order.kind,
)
def test_an_order_arrives_as_it_was_sent(order):
    assert Order.decode(order.encode()) == order

from __future__ import annotations

import pytest

pytest.importorskip("horovod")

from hfdt.runtime.ring import Command


@pytest.mark.parametrize(
    "command",
    [
        Command("quit"),
        Command("job", {"spec": "{}"}),
        Command("do", {"learning_rate": 0.5}, b"\x00reply", b"state\xff"),
    ],
    ids=lambda command: command.kind,
)
def test_a_command_arrives_as_it_was_sent(command):
    assert Command.decode(command.encode()) == command

"""Messages during start-up: withheld, and shown when the start fails."""

from __future__ import annotations

import os

import pytest

from nfdt.core.host.startup import quiet_start


def start(*, broken: bool) -> None:
    os.write(2, b"from C++\n")
    if broken:
        raise ImportError("no such library")


def test_noise_of_a_start_that_works_is_dropped(capfd):
    with quiet_start():
        start(broken=False)
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "afterwards\n"


def test_noise_is_shown_at_level_debug(capfd, caplog):
    caplog.set_level("DEBUG")
    with quiet_start():
        start(broken=False)
    assert capfd.readouterr().err == "from C++\n"


def test_noise_of_a_start_that_fails_is_shown(capfd):
    with pytest.raises(ImportError), quiet_start():
        start(broken=True)
    assert capfd.readouterr().err == "from C++\n"

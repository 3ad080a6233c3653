"""Tables of the command line."""

from __future__ import annotations

import pytest

from nfdt.cli.table import format_bytes, render, worker_table

WORKERS = {
    "worker-1": {"samples": 30, "seconds": 0.0, "steps": 1, "staleness": {}, "bytes_sent": 0, "bytes_received": 0},
    "worker-0": {
        "samples": 100,
        "seconds": 2.0,
        "steps": 4,
        "staleness": {"0": 1, "2": 3},
        "bytes_sent": 1_500_000,
        "bytes_received": 999,
        "codec": "identity",
        "batch_sizes": {"25": 4},
    },
}


def test_one_line_per_worker_in_order_of_name():
    lines = worker_table(WORKERS).splitlines()
    assert lines[0].split() == ["worker", "samples", "steps", "samples/s", "staleness", "max", "sent", "received"]
    assert lines[1].split() == ["worker-0", "100", "4", "50", "1.50", "2", "1.5", "MB", "999", "B"]
    assert lines[2].split()[:6] == ["worker-1", "30", "1", "-", "-", "-"]


def test_columns_line_up():
    assert render(("name", "n"), [("a", "10"), ("long name", "1")]) == "name        n\na          10\nlong name   1"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2.5e9, "2.5 GB"), (3e12, "3.0 TB")]
)
def test_bytes_are_printed_in_decimal_units(count, text):
    assert format_bytes(count) == text


def test_what_horovod_does_not_count_is_no_number():
    row = worker_table({"worker-0": {"samples": 8, "steps": 1}}).splitlines()[-1].split()
    assert row[-2:] == ["-", "-"]

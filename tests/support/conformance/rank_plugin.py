"""Plugin of pytest on a rank: each outcome is a line of a JSON file in the folder ``CONFORMANCE_OUT``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.conformance.outcome_file import write_collected, write_outcome


class RankOutcomes:
    """Outcomes of the tests on this rank.

    Args:
        out: File for them.
    """

    def __init__(self, out: Path) -> None:
        self._out = out

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        write_collected(self._out, [item.nodeid for item in session.items])

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            write_outcome(self._out, report)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        write_outcome(self._out, report)


def pytest_configure(config: pytest.Config) -> None:
    """Register the outcomes of this rank."""
    name = f"{os.environ.get('OMPI_COMM_WORLD_RANK', 0)}.jsonl"
    config.pluginmanager.register(RankOutcomes(Path(os.environ["CONFORMANCE_OUT"]) / name))

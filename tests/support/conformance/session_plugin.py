"""Plugin of pytest: the tests that call ``fit`` run plain, or inside NFDT sessions; outcomes are lines of a JSON file.

Environment: ``CONFORMANCE_OUT`` names the file, ``CONFORMANCE_WORKERS`` the number of workers (0: plain),
``CONFORMANCE_OPTIONS`` further options of the sessions as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from nfdt_client.embedded import EmbeddedServer
from nfdt_client.job import Submission
from nfdt_client.options import resolve
from nfdt_client.patch import FitPatch
from nfdt_client.session import Session

from nfdt.core.wire.jobs_pb2 import SubmitReply
from tests.support.conformance.fit_calls import find_fitting_tests
from tests.support.conformance.outcome_file import write_collected, write_outcome

MARKERS = ("requires_trainable_backend", "multi_device")


def trainer_class() -> Any:
    """Return the class from which ``keras.Model`` has ``fit``; Keras' tests mix it into layers."""
    import keras

    return next(one for one in keras.Model.__mro__ if one is not keras.Model and "fit" in vars(one))


class CountingSession(Session):
    """Session that counts the jobs that it submits, those that fail among them.

    Attributes:
        jobs: Number of jobs.
    """

    jobs = 0

    def send(self, submission: Submission) -> SubmitReply:
        """Submit a job."""
        self.jobs += 1
        return super().send(submission)


class Sessions:
    """One server for all tests of this process, and a session for each of them.

    Args:
        workers: Number of workers; 0: tests run plain.
        options: Further options of the sessions.
        out: File for the outcomes.
    """

    def __init__(self, workers: int, options: Mapping[str, Any], out: Path) -> None:
        self._out, self._fits = out, 0
        given = {"workers": workers, "algorithm": "bsp", **options}
        self._options = resolve(given, default_algorithm="bsp") if workers else None
        self._server = EmbeddedServer(workers, 1) if workers else None

    @pytest.hookimpl
    def pytest_sessionstart(self) -> None:
        if self._server is not None:
            FitPatch().install(trainer_class())
            self._server.start()

    @pytest.hookimpl
    def pytest_sessionfinish(self) -> None:
        if self._server is not None:
            self._server.stop()

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        fitting = functools.cache(lambda file: find_fitting_tests(file.read_text(encoding="utf-8")))
        items[:] = [item for item in items if written_name(item) in fitting(item.path)]

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        write_collected(self._out, [item.nodeid for item in session.items])

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            write_outcome(self._out, report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        session = CountingSession(self._options, self._server) if self._options else None
        try:
            with session or contextlib.nullcontext():
                return (yield)
        finally:
            self._fits = session.jobs if session is not None else 0

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        write_outcome(self._out, report, self._fits)


def written_name(item: pytest.Item) -> str:
    """Return the name of a test's function in its file; parameters that decorators add are no part of it."""
    return str(inspect.unwrap(item.obj).__code__.co_name)  # type: ignore[attr-defined]


def skip_if_backend(name: str, reason: str) -> Callable[[Any], Any]:
    """Return the mark of a test that a backend of Keras does not pass."""
    import keras

    return pytest.mark.skipif(keras.backend.backend() == name, reason=reason)


def state_without_pytest(test: unittest.TestCase) -> dict[str, Any]:
    """Return what a test case sends to workers: its attributes, without the run of pytest that it belongs to."""
    return {name: value for name, value in vars(test).items() if name != "_outcome"}


def _add_conftest() -> None:
    """Add the module ``conftest`` of Keras' repository, which its tests import and its package lacks."""
    module = ModuleType("conftest")
    module.skip_if_backend = skip_if_backend  # type: ignore[attr-defined]
    sys.modules["conftest"] = module


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers of Keras' tests, what they import, and the sessions."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    _add_conftest()
    unittest.TestCase.__getstate__ = state_without_pytest  # type: ignore[assignment]
    options = json.loads(os.environ["CONFORMANCE_OPTIONS"])
    sessions = Sessions(int(os.environ["CONFORMANCE_WORKERS"]), options, Path(os.environ["CONFORMANCE_OUT"]))
    config.pluginmanager.register(sessions)

"""Settings of Hypothesis and pytest for all tests, and fixtures that several rooms use."""

import gc
import os
import shutil
import signal
import tempfile
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.machines import Rig
from tests.support.needs import REASONS, lacking

RUNTIME_DIR = pytest.StashKey[str]()

# A loaded machine makes any single example slow; the limit on the whole test remains.
settings.register_profile("nfdt", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
# Where CI is set, the examples are fewer, and the same in every run: a failure comes from the change under test.
settings.register_profile("ci", settings.get_profile("nfdt"), derandomize=True, max_examples=25)
# scripts/mutation tries thousands of mutants and needs only their failures, not the smallest examples.
settings.register_profile(
    "mutation", settings.get_profile("ci"), max_examples=15, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("ci" if os.environ.get("CI") else "nfdt")


def pytest_configure(config):
    """Restore the handler of Ctrl-C, which a shell's background processes and their children ignore.

    Servers that the tests start describe themselves in a folder of this process: commands without ``--server`` find
    neither those of other test processes nor the user's. The runs of the tests are kept there, too.
    """
    os.environ["XDG_RUNTIME_DIR"] = config.stash[RUNTIME_DIR] = tempfile.mkdtemp(prefix="nfdt-tests-")
    os.environ["XDG_STATE_HOME"] = os.path.join(config.stash[RUNTIME_DIR], "state")
    config.addinivalue_line("markers", "long: takes minutes and rarely breaks; run by ./scripts/test --all -m long")
    config.addinivalue_line("markers", "feature(*names, area, status, note): what it proves; see scripts/features")
    config.addinivalue_line("markers", "processes: needs other programs, or minutes; run by ./scripts/test --all")
    config.addinivalue_line("markers", "machines: needs several machines, made of network namespaces")
    config.addinivalue_line("markers", "slurm: needs the programs of Slurm and several machines")
    config.addinivalue_line("markers", "ssh: needs sshd and several machines")
    config.addinivalue_line("markers", "horovod: needs Horovod")
    config.addinivalue_line("markers", "mpi: needs mpirun")
    config.addinivalue_line("markers", "browser: needs Chromium and its driver")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))


class FailuresAtOnce:
    """Plugin that prints each failure when it happens: a run that is ended from outside has no summary."""

    def __init__(self, config):
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        """Print the name of a test that has failed, and its error."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            terminal = self._config.get_terminal_writer()
            terminal.line(f"\nFAILED in {report.when}: {report.nodeid}\n{crash or report.longreprtext[-1000:]}")


def pytest_unconfigure(config):
    """Remove that folder."""
    shutil.rmtree(config.stash[RUNTIME_DIR], ignore_errors=True)


def pytest_collection_finish():
    """Exclude all imported modules from garbage collection: each one would traverse TensorFlow's objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def quick_restarts(monkeypatch):
    """Restart slots of this process's launchers without the pauses that grow from half a second to many."""
    monkeypatch.setattr("nfdt.launch.processes.RESTART_S", 0.01)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests that make machines, and with ``processes`` all that need programs, before marks select tests."""
    for item in items:
        if "machines" in item.fixturenames:
            item.add_marker("machines")
        if any(item.get_closest_marker(need) for need in REASONS):
            item.add_marker("processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Leave out a test that needs what this machine lacks; with CI set, let it fail."""
    for need in REASONS:
        if item.get_closest_marker(need) and (reason := lacking(need)):
            (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def pytest_terminal_summary(terminalreporter):
    """Name the tests that were left out for want of programs, as no other run of them makes up for it."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if isinstance(r.longrepr, tuple)]
    for need in REASONS:
        left_out = {r.nodeid: r.longrepr[2] for r in skipped if r.longrepr[2].startswith(f"Skipped: {need}: ")}
        if left_out:
            reason = next(iter(left_out.values())).removeprefix("Skipped: ")
            terminalreporter.write_line(f"{len(left_out)} tests were not run. They need {reason}")
            for name in sorted(left_out):
                terminalreporter.write_line(f"  {name}")


@pytest.fixture
def machines():
    """Return a function that makes a rig as :class:`Rig` does, and removes it at the end of the test."""
    with ExitStack() as rigs:
        yield lambda *args, **kwargs: rigs.enter_context(Rig(*args, **kwargs))

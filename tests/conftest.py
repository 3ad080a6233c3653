"""Settings of Hypothesis and pytest for all tests, and fixtures that several rooms use."""

import gc
import os
import shutil
import signal
import tempfile
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.machines import Rig, unavailable
from tests.support.slurm import missing_packages

RUNTIME_DIR = pytest.StashKey[str]()
NAMESPACES, SLURM = "network namespaces are needed", "Slurm is needed"

# A loaded machine makes any single example slow; the limit on the whole test remains.
settings.register_profile("nfdt", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
# Where CI is set, the examples are the same in every run, so that a failure comes from the change under test.
settings.register_profile("ci", settings.get_profile("nfdt"), derandomize=True)
# scripts/mutation tries thousands of mutants and needs only their failures, not the smallest examples.
settings.register_profile(
    "mutation", settings.get_profile("ci"), max_examples=15, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("ci" if os.environ.get("CI") else "nfdt")


def pytest_configure(config):
    """Restore the handler of Ctrl-C, which a shell's background processes and their children ignore.

    Servers that the tests start describe themselves in a folder of this process: commands without ``--server`` find
    neither those of other test processes nor the user's.
    """
    os.environ["XDG_RUNTIME_DIR"] = config.stash[RUNTIME_DIR] = tempfile.mkdtemp(prefix="nfdt-tests-")
    config.addinivalue_line("markers", "long: takes minutes and rarely breaks; run by ./scripts/test -m long")
    config.addinivalue_line("markers", "feature(*names, area, status, note): what it proves; see scripts/features")
    config.addinivalue_line("markers", "machines: needs several machines, made of network namespaces")
    config.addinivalue_line("markers", "slurm: needs the programs of Slurm and several machines")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
def pytest_runtest_setup(item):
    """Leave out tests that need several machines where these cannot be made; with CI set, let them fail."""
    slurm = item.get_closest_marker("slurm") is not None
    if not slurm and "machines" not in item.fixturenames and item.get_closest_marker("machines") is None:
        return
    for needed, reason in {NAMESPACES: unavailable(), SLURM: missing_packages() if slurm else ""}.items():
        if reason:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{needed}: {reason}")


def pytest_terminal_summary(terminalreporter):
    """Name the tests that were left out for want of namespaces or Slurm, as no other run of them makes up for it."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if isinstance(r.longrepr, tuple)]
    for what, needed in {"network namespaces": NAMESPACES, "Slurm": SLURM}.items():
        left_out = {r.nodeid: r.longrepr[2].partition(f"{needed}: ")[2] for r in skipped if needed in r.longrepr[2]}
        if left_out:
            reason = next(iter(left_out.values()))
            terminalreporter.write_line(f"{len(left_out)} tests were not run: they need {what} ({reason})")
            for name in sorted(left_out):
                terminalreporter.write_line(f"  {name}")


@pytest.fixture
def machines():
    """Return a function that makes a rig as :class:`Rig` does, and removes it at the end of the test."""
    with ExitStack() as rigs:
        yield lambda *args, **kwargs: rigs.enter_context(Rig(*args, **kwargs))

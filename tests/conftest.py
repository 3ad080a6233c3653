"""Settings of Hypothesis and pytest for all tests, and fixtures that several rooms use."""

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, Phase, settings

# A loaded machine makes any single example slow; the limit on the whole test remains.
settings.register_profile("nfdt", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
# Where CI is set, the examples are the same in every run, so that a failure comes from the change under test.
settings.register_profile("ci", settings.get_profile("nfdt"), derandomize=True)
# scripts/mutation tries thousands of mutants and needs only their failures, not the smallest examples.
settings.register_profile(
    "mutation", settings.get_profile("ci"), max_examples=15, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("ci" if os.environ.get("CI") else "nfdt")


def pytest_configure():
    """Restore the handler of Ctrl-C, which a shell's background processes and their children ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """Exclude all imported modules from garbage collection: each one would traverse TensorFlow's objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def quick_restarts(monkeypatch):
    """Restart slots of this process's launchers without the pauses that grow from half a second to many."""
    monkeypatch.setattr("nfdt.launch.processes.RESTART_S", 0.01)

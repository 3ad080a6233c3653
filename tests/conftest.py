"""What all tests share."""

import gc
import os
import signal

from hypothesis import HealthCheck, Phase, settings

# A loaded machine makes any single example slow; the limit on the whole test remains. Where CI is set, the examples
# follow from the tests: a run says something of the change that it checks, new examples are looked for elsewhere.
settings.register_profile("nfdt", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("nfdt"), derandomize=True)
# Thousands of mutants are tried (scripts/mutation), and of each only the failure counts, not its smallest example.
settings.register_profile(
    "mutation", settings.get_profile("ci"), max_examples=15, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("ci" if os.environ.get("CI") else "nfdt")


def pytest_configure():
    """Let tests interrupt scripts: what a shell starts in the background ignores Ctrl-C, and so do its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """Keep what is imported out of garbage collections, which would go through all of TensorFlow each time."""
    gc.collect()
    gc.freeze()

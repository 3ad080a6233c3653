"""What all tests share."""

import signal

from hypothesis import settings

# A loaded machine makes any single example slow; the limit on the whole test remains.
settings.register_profile("nfdt", deadline=None)
settings.load_profile("nfdt")


def pytest_configure():
    """Let tests interrupt scripts: what a shell starts in the background ignores Ctrl-C, and so do its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

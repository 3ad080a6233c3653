"""Fake slot as a process, started as a launcher starts a real one."""

import argparse
import logging
import os
import signal

from nfdt.core.host.child_process import die_with_parent
from tests.support.fakes import FakeSlot

parser = argparse.ArgumentParser()
for name in ("--server", "--role", "--name", "--host"):
    parser.add_argument(name)
parser.add_argument("--watch-stdin", action="store_true")
options = parser.parse_args()
die_with_parent()
logging.basicConfig(level="INFO")
slot = FakeSlot(options.server, options.role, options.name, token=os.environ.pop("NFDT_TOKEN"))
signal.pause()

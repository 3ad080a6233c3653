"""Requirements of a rig, and an attempt to make one."""

from __future__ import annotations

import functools
import os
import shutil
import sys

from tests.support.machines.plan import RigError
from tests.support.machines.rig import Rig

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "ss": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
PACKAGES |= {"setpriv": "util-linux", "mount": "mount"}


@functools.cache
def unavailable() -> str:
    """Return why no rig can be made here, after an attempt to make one; the text is empty if one can."""
    if sys.platform != "linux":
        return f"Linux is needed, this is {sys.platform}"
    if os.geteuid() != 0:
        return "root is needed"
    missing = sorted({package for tool, package in PACKAGES.items() if shutil.which(tool) is None})
    if missing:
        return f"missing packages: {' '.join(missing)}"
    try:
        with Rig(1, rate_mbit=1000):
            return ""
    except RigError as error:
        return str(error)

"""A script in ``distribute``: ``python -m benchmarks.peers.distributed SCRIPT``."""

from __future__ import annotations

import runpy
import sys

from nfdt import distribute


@distribute(workers=2)
def main() -> None:
    """Run the script; every fit in it trains on two workers."""
    runpy.run_path(sys.argv[1], run_name="__main__")


if __name__ == "__main__":
    main()

"""Command line of the peers of one benchmark, which defines the same work for each of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.workloads.models import CASES


def work_options(description: str | None) -> argparse.Namespace:
    """Parse ``case``, ``data``, ``batch``, ``epochs``, and ``result``, the file for the measurements."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    return parser.parse_args()

"""Rows and ratios of a benchmark: the table on the terminal and the JSON file."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from nfdt.cli.table import render


@dataclass(frozen=True)
class Row:
    """One peer on one case: the value of every run, and their median."""

    case: str
    peer: str
    unit: str
    runs: list[float]

    @property
    def value(self) -> float:
        """Median of the runs."""
        return statistics.median(self.runs)


@dataclass
class Report:
    """Results of one benchmark, for the terminal and for a JSON file.

    Attributes:
        also: Versions of packages that only a peer uses, as ``name==version``.
        notes: Remarks for the reader, such as rows that were left out.
    """

    bench: str
    seeds: list[int]
    also: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    ratios: dict[str, Any] = field(default_factory=dict)

    def add(self, case: str, peer: str, unit: str, value: float) -> None:
        """Add the value of a run to its row."""
        for row in self.rows:
            if (row.case, row.peer, row.unit) == (case, peer, unit):
                row.runs.append(value)
                return
        self.rows.append(Row(case, peer, unit, [value]))

    def runs(self, case: str, peer: str, unit: str) -> list[float]:
        """Return all runs of a row."""
        return next((r.runs for r in self.rows if (r.case, r.peer, r.unit) == (case, peer, unit)), [])

    def to_json(self) -> dict[str, Any]:
        """Return the report in the format described in docs/benchmarks.md."""
        return {
            "bench": self.bench,
            "versions": {**versions(), **({"peers": ", ".join(self.also)} if self.also else {})},
            "machine": machine(),
            "seeds": self.seeds,
            "rows": [_finite({**asdict(row), "value": row.value}) for row in self.rows],
            "ratios": _finite(self.ratios),
            **({"notes": self.notes} if self.notes else {}),
        }

    def finish(self, json_file: Path | None) -> None:
        """Print the table, and write the JSON file if one is given."""
        rows = [(r.case, r.peer, f"{r.value:.4g}", r.unit, str(len(r.runs))) for r in self.rows]
        print(render(("case", "peer", "median", "unit", "runs"), rows, left=2))
        for name, ratio in self.ratios.items():
            print(f"{name}: {ratio:.3f}" if isinstance(ratio, float) else f"{name}: {ratio}")
        print(", ".join(f"{name} {value}" for name, value in {**machine(), **versions()}.items()))
        for note in self.notes:
            print(note)
        if self.also:
            print(f"peers: {', '.join(self.also)}")
        if json_file:
            self.write(json_file)

    def write(self, json_file: Path) -> None:
        """Write the current results."""
        json_file.write_text(json.dumps(self.to_json(), indent=2) + "\n")


def _finite(value: Any) -> Any:
    """Replace infinity, which JSON does not support, by None."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def versions() -> dict[str, str]:
    """Return the versions of all packages that affect speed."""
    found = {"python": platform.python_version()}
    for name in ("nfdt", "keras", "tensorflow", "tensorflow-cpu", "horovod", "numpy", "grpcio", "protobuf"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Describe the machine."""
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--quick", action="store_true", help="less work, within a minute")
    parser.add_argument("--data-dir", type=Path, help="folder with fashion-mnist/*.gz")
    return parser

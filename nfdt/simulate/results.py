"""The results of a simulated job as JSON and CSV, independent of the machine that simulates."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from nfdt.planning.limits import lower_bound, of_lower_bound, sum_of_speeds
from nfdt.simulate.cluster import ClusterDescription
from nfdt.simulate.job import SimulatedJob
from nfdt.simulate.machines import Machine

NOISES = (1, 10, 100)
DIGITS = 9  # of virtual seconds


def described_limits(cluster: ClusterDescription, batch_size: int) -> dict[str, Any]:
    """Return the sum of the workers' own speeds, and the known lower time bound of asynchronous methods.

    Speeds are the described ones, without drift, pauses and failures.
    """
    seconds = _gradient_s(cluster, batch_size)
    bounds = {str(noise): lower_bound(seconds, noise) for noise in NOISES}
    return {
        "samples_per_s": sum_of_speeds([batch_size / s for s in seconds]),
        "lower_bound": {noise: {"seconds": b.seconds, "workers": b.workers} for noise, b in bounds.items()},
    }


def _gradient_s(cluster: ClusterDescription, batch_size: int) -> list[float]:
    machines = [Machine(i, w, batch_size, cluster.seed) for i, w in enumerate(cluster.each())]
    return [machine.step.seconds(batch_size) for machine in machines]


def result_of(
    job: SimulatedJob, algorithm: str, cluster: ClusterDescription, workers: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the results of one ended job.

    Args:
        job: The job.
        algorithm: Name of its algorithm.
        cluster: The cluster it ran on.
        workers: ``history.nfdt`` of its fit.
    """
    record, batch = job.record, job.spec.fit.batch_size
    limits, seconds = described_limits(cluster, batch), record.seconds
    speed = record.samples / seconds if seconds else 0.0
    under_way = max(cluster.count, 1 + record.mean_staleness)  # more than one per machine with overlap
    return {
        "algorithm": algorithm,
        "virtual_s": round(seconds, DIGITS),
        "samples": record.samples,
        "samples_per_s": speed,
        "limits": limits,
        "of_limit": speed / limits["samples_per_s"],
        "of_lower_bound": {
            str(noise): of_lower_bound(_gradient_s(cluster, batch), noise, speed / batch, under_way) for noise in NOISES
        },
        "staleness": {str(tau): count for tau, count in sorted(record.staleness.items())},
        "mean_staleness": record.mean_staleness,
        "most_staleness": record.most_staleness,
        "dropped": record.dropped,
        "groups": [{"at_s": round(at_s, DIGITS), **groups} for at_s, groups in record.groups],
        "bytes_sent": sum(int(w.get("bytes_sent", 0)) for w in workers.values()),
        "bytes_received": sum(int(w.get("bytes_received", 0)) for w in workers.values()),
        "machines": [
            {
                "machine": number,
                "samples": use.samples,
                "steps": use.steps,
                "utilisation": use.busy_s / seconds if seconds else 0.0,
            }
            for number, use in sorted(record.machines.items())
        ],
        "workers": dict(workers),
        "curve": [
            {
                "at_s": round(point.at_s, DIGITS),
                "samples": point.samples,
                "epoch": point.epoch,
                "ends_epoch": point.ends_epoch,
                "logs": dict(point.logs),
            }
            for point in record.points
        ],
    }


def to_json(results: Sequence[Mapping[str, Any]]) -> str:
    """Format all results of a command as JSON; the same run gives the same text."""
    return json.dumps({"results": list(results)}, indent=1, sort_keys=True) + "\n"


def curves_csv(results: Sequence[Mapping[str, Any]]) -> str:
    """Format the curves as CSV, one line per point of every curve."""
    names = sorted({name for r in results for point in r["curve"] for name in point["logs"]})
    rows = [
        [r["algorithm"], r["fit"], p["at_s"], p["samples"], p["epoch"], int(p["ends_epoch"])]
        + [p["logs"].get(name, "") for name in names]
        for r in results
        for p in r["curve"]
    ]
    return _csv(["algorithm", "fit", "virtual_s", "samples", "epoch", "ends_epoch", *names], rows)


def staleness_csv(results: Sequence[Mapping[str, Any]]) -> str:
    """Format as CSV the number of gradients by the number of updates they missed."""
    rows = [[r["algorithm"], r["fit"], tau, count] for r in results for tau, count in r["staleness"].items()]
    return _csv(["algorithm", "fit", "staleness", "gradients"], rows)


def machines_csv(results: Sequence[Mapping[str, Any]]) -> str:
    """Format the work of each machine as CSV."""
    columns = ("machine", "samples", "steps", "utilisation")
    rows = [[r["algorithm"], r["fit"], *(m[name] for name in columns)] for r in results for m in r["machines"]]
    return _csv(["algorithm", "fit", *columns], rows)


def _csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()

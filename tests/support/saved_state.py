"""State of shards as their client stores it, loaded again."""

import tempfile
from dataclasses import replace
from pathlib import Path

from nfdt.core.arrays.safetensors_io import dump_arrays, load_arrays
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.jobserver.incoming_state import Rest
from nfdt.jobserver.shard_clients import ShardSnapshot
from nfdt.model.program.state import dump_state_parts, load_state


def saved(clients, **options):
    """Return the state of all shards."""
    with tempfile.TemporaryDirectory() as folder:
        artifacts = ArtifactStore(Path(folder))
        return load_state(artifacts.path(clients.save(artifacts, Rest(), **options)))


def snapshot_of(clients, copied=lambda: None):
    """Return a snapshot with its state and records in place of their artifacts."""
    with tempfile.TemporaryDirectory() as folder:
        artifacts = ArtifactStore(Path(folder))
        found = clients.snapshot(copied, artifacts, Rest())
        state, records = load_state(artifacts.path(found.state)), load_arrays(artifacts.path(found.records))
        return replace(found, state=state, records=records)


def store_state(artifacts, weights, rest):
    """Store a state without optimizer variables; return the artifact."""
    parts = dump_state_parts(weights, {}, dict(enumerate(rest.untrained)), rest.metrics)
    return artifacts.put(*parts)


def store_snapshot(artifacts, weights, rest, records, tasks, closed_rounds):
    """Store a state without optimizer variables, and records, as a snapshot."""
    stored = store_state(artifacts, weights, rest), artifacts.put(dump_arrays(records))
    return ShardSnapshot(*stored, tasks, closed_rounds)

"""State of a job as one artifact: weights from the shards, merged untrained state from the coordinator."""

from __future__ import annotations

import threading

from nfdt.coordinator.untrained import StateMerger
from nfdt.core.errors import ProtocolError
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.jobserver.shard_clients import ShardClients
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import dump_state_parts, load_state


def merger_of(manifest: Manifest, artifacts: ArtifactStore) -> StateMerger:
    """Return the merger with the initial untrained state of a program.

    Raises:
        ProtocolError: The program's state lacks an untrained variable that the program names.
    """
    entries = manifest.untrained
    if not entries:
        return StateMerger()
    found = load_state(artifacts.path(manifest.state)).untrained
    missing = [entry.get("path", i) for i, entry in enumerate(entries) if i not in found]
    if missing:
        raise ProtocolError(f"The program's state lacks {len(missing)} untrained variables, first {missing[0]!r}.")
    return StateMerger(manifest.untrained_rules, [found[i] for i in range(len(entries))])


class StateComposer:
    """Writer of the state of a job, which it can also replace; the same moment is written once.

    Args:
        shards: Client of the job's shards.
        merger: Merger of the untrained state.
        artifacts: Store of files.
    """

    def __init__(self, shards: ShardClients, merger: StateMerger, artifacts: ArtifactStore) -> None:
        self._shards, self._merger, self._artifacts = shards, merger, artifacts
        self._lock = threading.Lock()
        self._moment: object = None
        self._artifact = ""

    def compose(self, moment: object) -> str:
        """Return the artifact of the state at this moment; equal moments give the same one without reading shards."""
        with self._lock:
            if moment != self._moment or not self._artifacts.has(self._artifact):
                state = self._shards.read()
                untrained = dict(enumerate(self._merger.current))
                parts = dump_state_parts(state.weights, state.optimizer, untrained, self._merger.metrics)
                self._artifact = self._artifacts.put(*parts)
                self._moment = moment
            return self._artifact

    def replace(self, artifact: str) -> None:
        """Replace the job's state by an artifact that a client uploaded.

        Raises:
            ProtocolError: The artifact is no state, or the state of another model.
        """
        with self._lock:
            state = load_state(self._artifacts.path(artifact))
            if state.untrained:
                self._merger.check(state.untrained)
            self._shards.write(state)
            if state.untrained:
                self._merger.replace([state.untrained[i] for i in range(len(state.untrained))])
            self._moment = None

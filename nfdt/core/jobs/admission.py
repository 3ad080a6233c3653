"""Admission of jobs to a server: all checks that can refuse a job, made before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nfdt.core.errors import PolicyRefused, UsageError, VersionMismatch
from nfdt.core.host.keras_backend import TENSORFLOW
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.rights import Holder
from nfdt.core.specs.job import JobSpec
from nfdt.core.work.artifacts import artifact_names
from nfdt.model.program.manifest import Manifest

MAX_MANIFEST_BYTES = 64 * 2**20
_MUST_MATCH = ("python", "keras", "backend")


@dataclass(frozen=True)
class Limits:
    """Limits of one client's use of a server."""

    jobs_per_token: int = 64
    artifact_bytes: int = 2**38
    state_dir_bytes: int = 2**40


def check_quotas(spec: JobSpec, active: int, holder: Holder, limits: Limits) -> None:
    """Refuse a job that the quotas of its owner never admit; one that they do not admit now waits.

    Args:
        spec: The new job.
        active: Number of the owner's jobs that have not ended.
        holder: Holder of the token that came with the job.
        limits: Limits of every owner.

    Raises:
        PolicyRefused: The owner has as many jobs as allowed, or the job's workers would be too many.
    """
    if active >= limits.jobs_per_token:
        raise PolicyRefused(
            f"This token has {active} jobs that have not ended. Expected: at most {limits.jobs_per_token}. "
            "Wait for one, or cancel one with `nfdt jobs cancel ID`."
        )
    if holder.jobs == 0 or (holder.workers is not None and spec.cluster.workers > holder.workers):
        most = 0 if holder.jobs == 0 else holder.workers
        raise PolicyRefused(
            f"workers={spec.cluster.workers}: expected at most {most}, the quota of {holder.name}. Ask for fewer."
        )


def version_conflict(client: Mapping[str, str], worker: Mapping[str, str]) -> str | None:
    """Return the version differences that break pickled code, or None if there are none."""
    names = (*_MUST_MATCH, backend_of(client))  # a backend's name is also the name of its library
    different = [n for n in names if client.get(n) and worker.get(n) and client[n] != worker[n]]
    if not different:
        return None
    return "; ".join(f"{name}: client {client[name]}, worker {worker[name]}" for name in different)


def backend_of(versions: Mapping[str, str]) -> str:
    """Return the backend of Keras that these versions state; TensorFlow where they state none."""
    return versions.get("backend") or TENSORFLOW


def check_versions(spec: JobSpec, slots: Iterable[Mapping[str, str]]) -> None:
    """Refuse a code job that no attending worker slot could unpickle safely.

    Raises:
        VersionMismatch: slots attend, and every one runs another Python, Keras or backend.
    """
    conflicts = [version_conflict(spec.versions, versions) for versions in slots] if spec.code else []
    if conflicts and all(conflicts):
        raise VersionMismatch(
            f"The job carries code, and no attending worker runs the versions it was packed with ({conflicts[0]}). "
            "Install the same versions on both sides."
        )


def check_artifacts(spec: JobSpec, artifacts: ArtifactStore) -> None:
    """Raise UsageError when an artifact that the job names is not complete on this server."""
    missing = sorted(name for name in artifact_names(spec) if not artifacts.has(name))
    if missing:
        raise UsageError(
            f"{len(missing)} artifacts of the job are not on this server, first {missing[0]}. Upload them."
        )


def read_manifest(spec: JobSpec, artifacts: ArtifactStore) -> Manifest:
    """Return the program's manifest, checked as far as possible without Keras.

    Raises:
        UsageError: the program is not a JSON object, or too large.
    """
    path = artifacts.path(spec.program)  # its size is checked first, as parsing takes several times as much memory
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise UsageError(f"Program: expected at most {MAX_MANIFEST_BYTES} bytes. Received: {path.stat().st_size}.")
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"Program {spec.program}: expected JSON. Received something else: {error}.") from None
    if not isinstance(manifest, dict):
        raise UsageError(f"Program {spec.program}: expected a JSON object. Received: {type(manifest).__name__}.")
    return Manifest(manifest)


def check_code(spec: JobSpec, manifest: Manifest, *, allow_code: bool) -> None:
    """Refuse code where it is not allowed, including code that the specification does not declare.

    Raises:
        PolicyRefused: the job carries pickled code.
    """
    carries = spec.code or manifest.carries_code or (spec.callbacks is not None and spec.callbacks.code)
    if carries and not allow_code:
        raise PolicyRefused(
            "The job carries code of the script (custom layers, losses, functions), and this server takes none. "
            "Start the server with --allow-code if you trust everybody who has its token, or use Keras' own parts."
        )
    if carries and not spec.code:
        raise PolicyRefused("The program carries code but the job's specification says it does not.")

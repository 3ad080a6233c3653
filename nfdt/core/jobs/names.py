"""Names of jobs. A script that runs again finds its job by name, provided that both are the same program."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from nfdt.core.errors import UsageError
from nfdt.core.specs.callbacks import CallbacksSpec
from nfdt.core.specs.job import DataSpec, JobSpec
from nfdt.model.program.manifest import Manifest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

Identity = Mapping[str, Any]

_FIT = ("epochs", "batch_size", "shuffle", "steps_per_epoch", "validation_freq", "validation_batch_size")
_DESCRIBED = ("model", "loss and metrics", "optimizer", "code", "training data", "validation data", "callbacks")
_FIRST_EPOCH = "initial_epoch"  # a script that restores a backup begins later
_DATA = ("kind", "structure", "arrays", "samples", "batches", "rows", "split")  # not the pickled code of a source


def check_name(name: str) -> str:
    """Return a valid name of a job.

    Raises:
        UsageError: it is not valid.
    """
    if not NAME.fullmatch(name):
        raise UsageError(
            "job: expected a name of at most 100 letters, digits, dots, hyphens and underscores, which begins with a "
            f"letter or a digit. Received: {name[:120]!r}."
        )
    return name


def identity_of(spec: JobSpec, manifest: Manifest) -> dict[str, Any]:
    """Return what two submissions of one program have in common: not initial weights, seeds or the cluster."""
    fit, algorithm = spec.fit.model_dump(), spec.algorithm.model_dump()
    return {
        "model": _digest(manifest.architecture()),
        "loss and metrics": _digest(manifest.compilation()),
        "optimizer": _digest(manifest.optimizer),
        "code": _digest(manifest.sources),
        "training data": _data_digest(spec.train),
        "validation data": None if spec.validation is None else _data_digest(spec.validation),
        "callbacks": None if spec.callbacks is None else _callbacks_digest(spec.callbacks),
        **{name: fit[name] for name in (*_FIT, _FIRST_EPOCH)},
        **{name: value for name, value in algorithm.items() if value is not None},
    }


def differences(job: Identity, script: Identity) -> list[str]:
    """Return descriptions of what differs between the program of a job and that of a script."""
    found = []
    for key in sorted({*job, *script}):
        ours, theirs = job.get(key), script.get(key)
        if ours == theirs or (key == _FIRST_EPOCH and ours is not None and theirs is not None and ours < theirs):
            continue
        described = key in _DESCRIBED
        found.append(f"the {key}" if described else f"{key} ({ours!r} in the job, {theirs!r} in the script)")
    return found


def other_program(name: str, job_id: str, state: str, found: list[str]) -> UsageError:
    """Return the error for a script whose job of this name runs, or has run, another program."""
    free = "nfdt jobs delete" if state == "succeeded" else "nfdt jobs cancel"
    return UsageError(
        f"job={name!r}: expected the program of {job_id}, which has this name and is {state}. Received: another one; "
        f"these differ: {', '.join(found)}. Choose another name, or free this one with `{free} {job_id}`."
    )


def _data_digest(data: DataSpec) -> str:
    dumped = data.model_dump(mode="json")
    return _digest({key: dumped[key] for key in _DATA})


def _callbacks_digest(callbacks: CallbacksSpec) -> str:
    return _digest([[(one.kind, one.sources) for one in callbacks.members], callbacks.state])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(_portable(value), sort_keys=True).encode()).hexdigest()


def _portable(value: Any) -> Any:
    """Return a JSON value without the numbers of objects, which differ between processes."""
    if isinstance(value, Mapping):
        return {key: _portable(item) for key, item in value.items() if key != "shared_object_id"}
    return [_portable(item) for item in value] if isinstance(value, list) else value

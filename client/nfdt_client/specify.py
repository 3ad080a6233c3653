"""Converts a captured ``fit``, or a call of ``evaluate`` or ``predict``, to a job specification and its artifacts."""

from __future__ import annotations

import getpass
import os
import random
import secrets
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
from pydantic import ValidationError

from nfdt.core.errors import UsageError
from nfdt.core.host.machine import versions
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec
from nfdt.model.keras_internals import data as keras_data
from nfdt.model.program.local_optimizers import stepping_parts
from nfdt.model.program.pack import PackedProgram
from nfdt_client.capture import Capture
from nfdt_client.job import Submission
from nfdt_client.options import Options
from nfdt_client.program_checks import algorithm_for
from nfdt_client.training_data import Arrays, Indexed, Stream, TrainingData
from nfdt_client.upload import Blob, array_blob


def specify(
    captured: Capture,
    packed: PackedProgram,
    options: Options,
    *,
    cluster: ClusterSpec,
    initial_epoch: int,
    interactive: bool = True,
) -> Submission:
    """Return the job specification of a captured ``fit`` and its artifacts.

    Raises:
        UsageError: an argument of ``fit`` that is invalid in a job.
    """
    callbacks, validation = captured.callbacks, captured.validation
    blobs = {blob.sha256: blob for blob in (callbacks.blobs if callbacks is not None else ())}
    with _refused_as_usage():
        train = _data_spec(captured.train, captured.choice.reason, blobs)
        return _submission(
            packed,
            blobs,
            options,
            name=printable(str(captured.model.name))[:200],
            code=packed.code or captured.ships_code,
            cluster=cluster,
            fit=_fit_spec(captured, options, initial_epoch, _updates_before(captured, packed, train, initial_epoch)),
            train=train,
            validation=_data_spec(validation, "", blobs) if validation is not None else None,
            callbacks=callbacks.spec if callbacks is not None else None,
            forecast=options.forecast,
            attended=interactive,  # the stored field keeps its name
        )


def specify_evaluation(
    model: Any, data: Arrays, method: str, packed: PackedProgram, options: Options, cluster: ClusterSpec
) -> Submission:
    """Return the job specification of ``evaluate`` or ``predict`` and its artifacts.

    Algorithm and cluster are those of the fits, so that slots keep what they have built.

    Raises:
        UsageError: an argument that is invalid in a job.
    """
    blobs: dict[str, Blob] = {}
    rows = _data_spec(data, "arrays are uploaded once", blobs)
    with _refused_as_usage():
        return _submission(
            packed,
            blobs,
            options,
            name=printable(f"{model.name}.{method}")[:200],
            code=packed.code,
            cluster=cluster,
            fit=FitSpec(epochs=1, batch_size=data.batch_size, shuffle=False),
            train=rows,
            validation=rows,
            method=method,
        )


@contextmanager
def _refused_as_usage() -> Iterator[None]:
    """Raise UsageError for an argument that the specification refuses."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"fit: {name}: {first['msg']}. Received: {first.get('input')!r}.") from None


def _submission(packed: PackedProgram, blobs: dict[str, Blob], options: Options, **fields: Any) -> Submission:
    """Return the submission of a program; ``fields`` are those of its specification that depend on the call."""
    state = Blob(*packed.state_parts, sha256=packed.manifest.state)
    (program, *_) = _add([Blob(packed.manifest.to_bytes()), state, *map(Blob, packed.files.values())], blobs)
    stored = {table.state for table in packed.manifest.made.values() if table.state}
    spec = JobSpec(
        user=printable(_user())[:100],
        script=printable(Path(sys.argv[0] if sys.argv else "").name)[:200],  # without its folder and its arguments
        program=program,
        artifacts=tuple(sorted({*blobs, *stored})),
        versions=versions(),
        algorithm=algorithm_for(packed.manifest, options.algorithm),
        start_timeout_s=options.start_timeout_s,
        step_timeout_s=options.step_timeout_s,
        priority=options.priority,
        **fields,
    )
    return Submission(spec, blobs)


def printable(text: str) -> str:
    """Return the text without control characters."""
    return "".join(one for one in text if unicodedata.category(one) != "Cc")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without an entry for its user
        return str(os.getuid())


def _updates_before(captured: Capture, packed: PackedProgram, train: DataSpec, initial_epoch: int) -> int:
    """Return the updates before pass 0 of an optimizer that steps on the workers, as if it had made all passes."""
    optimizers = stepping_parts(captured.model, packed.manifest)
    if not optimizers or train.planned is None:
        return 0
    steps = -(-train.planned // (captured.train.batch_size if train.sized else 1))
    return int(optimizers[0].iterations) - steps * (0 if captured.arguments["steps_per_epoch"] else initial_epoch)


def _fit_spec(captured: Capture, options: Options, initial_epoch: int, updates: int) -> FitSpec:
    arguments = captured.arguments
    frequency = arguments["validation_freq"]
    return FitSpec(
        epochs=captured.epochs,
        initial_epoch=initial_epoch,
        batch_size=captured.train.batch_size,
        **_order(captured),
        updates=updates,
        steps_per_epoch=captured.steps_of_job(options),
        validation_freq=int(frequency) if np.ndim(frequency) == 0 else tuple(int(e) for e in frequency),
        validation_batch_size=captured.validation.batch_size if captured.validation is not None else None,
        validation_steps=None,  # the data are already cut to that many rows
    )


def _order(captured: Capture) -> dict[str, Any]:
    """Return the fields of the fit's specification on the order of the samples.

    The seed is that of Keras' own shuffle: TensorFlow's for arrays, Python's for other data.
    ``keras.utils.set_random_seed`` sets both.
    """
    shuffle, data = captured.arguments["shuffle"], captured.train
    if not shuffle or not isinstance(data, Arrays):
        scripts = random.Random()  # a copy: what the script draws later is what it draws in Keras
        scripts.setstate(random.getstate())
        return {"shuffle": bool(shuffle), "seed": scripts.getrandbits(31)}
    in_batches = shuffle == "batch"  # each batch has the rows that it has without shuffle, in another order
    seed = keras_data.shuffle_seed()
    if seed is None:
        return {"shuffle": not in_batches, "seed": _seed()}
    return {"shuffle": True, "seed": seed, "block": data.batch_size if in_batches else data.samples}


def _seed() -> int:
    """Return the seed of the orders that are not those of Keras: repeatable on backends that shuffle with NumPy."""
    return secrets.randbits(31) if keras.backend.backend() == "tensorflow" else int(np.random.randint(2**31 - 1))


def _data_spec(data: TrainingData, reason: str, blobs: dict[str, Blob]) -> DataSpec:
    """Describe data of a job, and add what is uploaded of them to ``blobs``."""
    reason = reason[:1000]
    if isinstance(data, Stream):
        return DataSpec(kind="stream", batches=data.batches, reason=reason)
    if isinstance(data, Arrays):
        structure, made = data.blobs
        return DataSpec(
            kind="arrays", structure=structure, arrays=_add(made, blobs), samples=data.samples, reason=reason
        )
    if isinstance(data, Indexed):
        (code,) = _add([Blob(data.shipped.code)], blobs)
        arrays = _add(map(array_blob, data.shipped.arrays), blobs)
        return DataSpec(kind="indexed", batches=data.batches, arrays=arrays, code=code, reason=reason)
    shipped = data.shipped
    (code,) = _add([Blob(shipped.graph.to_bytes())], blobs)
    return DataSpec(
        kind="dataset",
        batches=shipped.batches,
        arrays=_add(map(array_blob, shipped.arrays), blobs),
        code=code,
        rows=shipped.rows,
        split=shipped.split,
        reason=reason,
    )


def _add(made: Iterable[Blob], blobs: dict[str, Blob]) -> tuple[str, ...]:
    """Add blobs, and return their names."""
    added = list(made)
    blobs.update({blob.sha256: blob for blob in added})
    return tuple(blob.sha256 for blob in added)  # equal arrays have one blob, and each its name

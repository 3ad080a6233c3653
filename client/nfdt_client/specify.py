"""Conversion of a captured ``fit`` to a job specification, its name, and the artifacts it names."""

from __future__ import annotations

import getpass
import itertools
import os
import random
import secrets
import sys
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from nfdt.core.errors import UsageError
from nfdt.core.host.machine import versions
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec
from nfdt_client.captured import Capture
from nfdt_client.options import Options
from nfdt_client.placement import Choice
from nfdt_client.program_checks import algorithm_for
from nfdt_client.training_data import Arrays, GraphData, Indexed, Stream
from nfdt_client.upload import Blob, array_blob

if TYPE_CHECKING:
    from nfdt.model.program.pack import PackedProgram  # imports Keras


@dataclass(frozen=True)
class Submission:
    """A job's specification, all artifacts it names, and the name by which a later script finds it ("": none)."""

    spec: JobSpec
    blobs: dict[str, Blob]
    name: str = ""


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
    callbacks = captured.callbacks
    blobs = {blob.sha256: blob for blob in (callbacks.blobs if callbacks is not None else ())}
    train = _data_spec(captured.choice, blobs)
    validation = _data_spec(Choice(captured.validation, ""), blobs) if captured.validation is not None else None
    return _submission(
        packed,
        blobs,
        options,
        lambda: {
            "name": str(captured.model.name)[:200],
            "code": packed.code or captured.ships_code,
            "algorithm": algorithm_for(packed.manifest, options.algorithm),
            "cluster": cluster,
            "fit": _fit_spec(captured, options, initial_epoch),
            "train": train,
            "validation": validation,
            "callbacks": callbacks.spec if callbacks is not None else None,
            "forecast": options.forecast,
            "attended": interactive,  # the stored field keeps its name
        },
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
    rows = _data_spec(Choice(data, "arrays are uploaded once"), blobs)
    return _submission(
        packed,
        blobs,
        options,
        lambda: {
            "name": f"{model.name}.{method}"[:200],
            "code": packed.code,
            "algorithm": algorithm_for(packed.manifest, options.algorithm),
            "cluster": cluster,
            "fit": FitSpec(epochs=1, batch_size=data.batch_size, shuffle=False),
            "train": rows,
            "validation": rows,
            "method": method,
        },
    )


def _submission(
    packed: PackedProgram, blobs: dict[str, Blob], options: Options, fields: Callable[[], dict[str, Any]]
) -> Submission:
    """Return a submission; ``fields`` makes those fields of the specification that depend on the call."""
    program = Blob(packed.manifest.to_bytes())
    blobs |= {blob.sha256: blob for blob in (program, *map(Blob, packed.artifacts.values()))}
    try:
        spec = JobSpec(
            user=printable(_user())[:100],
            script=printable(_script())[:200],
            program=program.sha256,
            artifacts=tuple(sorted(blobs)),
            versions=versions(),
            start_timeout_s=options.start_timeout_s,
            step_timeout_s=options.step_timeout_s,
            **fields(),
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"fit: {name}: {first['msg']}. Received: {first.get('input')!r}.") from None
    return Submission(spec, blobs)


def printable(text: str) -> str:
    """Return the text without control characters."""
    return "".join(one for one in text if unicodedata.category(one) != "Cc")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without an entry for its user
        return str(os.getuid())


def _script() -> str:
    """Return the name of the running program, without its folder and its arguments."""
    return Path(sys.argv[0] if sys.argv else "").name


def _fit_spec(captured: Capture, options: Options, initial_epoch: int) -> FitSpec:
    arguments = captured.arguments
    frequency = arguments["validation_freq"]
    return FitSpec(
        epochs=captured.epochs,
        initial_epoch=initial_epoch,
        batch_size=captured.batch_size,
        **_order(captured),
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
    from nfdt.model.keras_internals import data as keras_data

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
    import keras
    import numpy as np

    return secrets.randbits(31) if keras.backend.backend() == "tensorflow" else int(np.random.randint(2**31 - 1))


def _data_spec(choice: Choice, blobs: dict[str, Blob]) -> DataSpec:
    data, reason = choice.data, choice.reason[:1000]
    if isinstance(data, Stream):
        return DataSpec(kind="stream", batches=data.batches, reason=reason)
    if isinstance(data, Indexed):
        code = Blob(data.shipped.code)
        blobs[code.sha256] = code
        arrays = _add(map(array_blob, data.shipped.arrays), blobs)
        return DataSpec(kind="indexed", batches=data.batches, arrays=arrays, code=code.sha256, reason=reason)
    if isinstance(data, GraphData):
        shipped = data.shipped
        graph = Blob(shipped.graph.to_bytes())
        blobs[graph.sha256] = graph
        return DataSpec(
            kind="dataset",
            batches=shipped.batches,
            arrays=_add(map(array_blob, shipped.arrays), blobs),
            code=graph.sha256,
            rows=shipped.rows,
            split=shipped.split,
            reason=reason,
        )
    structure, made = data.blobs
    arrays = _add(made, blobs)
    return DataSpec(kind="arrays", structure=structure, arrays=arrays, samples=data.samples, reason=reason)


def _add(made: Iterable[Blob], blobs: dict[str, Blob]) -> tuple[str, ...]:
    """Add blobs, and return their names."""
    added = list(made)
    blobs.update({blob.sha256: blob for blob in added})
    return tuple(blob.sha256 for blob in added)  # equal arrays have one blob, and each its name


class JobNames:
    """Names of the jobs of successive fits: NAME, NAME-2, NAME-3 and so on.

    Args:
        name: The first name; None: the jobs have no names.
    """

    def __init__(self, name: str | None) -> None:
        self._name, self._numbers = name, itertools.count(1)

    def next(self) -> str:
        """Return the name of the next job; "" for none."""
        number = next(self._numbers)
        return "" if self._name is None else self._name if number == 1 else f"{self._name}-{number}"

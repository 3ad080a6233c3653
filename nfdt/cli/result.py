"""Writing a job's result to a file: a Keras model, or its arrays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from nfdt_client.handle import JobResult

from nfdt.cli.quiet import quiet_start
from nfdt.core.errors import UsageError
from nfdt.core.program.manifest import Manifest

SUFFIXES = (".keras", ".npz")


def check_output(path: Path) -> None:
    """Raise UsageError unless ``path`` can become a result file."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--output: expected a name that ends in {' or '.join(SUFFIXES)}. Received: {path}.")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"--output: the directory {path.resolve().parent} does not exist.")


def save(result: JobResult, path: Path, read: Callable[[str], bytes]) -> None:
    """Write the result to ``path``: the whole model (``.keras``) or the trainable variables by name (``.npz``).

    Args:
        result: Result of the job.
        path: The file; see :func:`check_output`.
        read: Returns an artifact of the job's server by its name.

    Raises:
        PolicyRefused: a ``.keras`` file of a job that carries code; data from a server are never unpickled here.
    """
    if path.suffix == ".keras":
        rebuild(result, read).save(path)
        return
    layout = Manifest(result.manifest).layout
    named: dict[str, Any] = {slot.name: array for slot, array in zip(layout.slots, result.weights, strict=True)}
    with path.open("wb") as file:
        np.savez(file, **named)


def rebuild(result: JobResult, read: Callable[[str], bytes]) -> Any:
    """Rebuild the job's Keras model with its trained weights, optimizer and untrained state."""
    with quiet_start():
        from nfdt.core.program.unpack import unpack

    model = unpack(Manifest(result.manifest), read, allow_code=False)
    if model.optimizer is not None:
        model.optimizer.build(model.trainable_variables)
    result.apply_to(model)
    return model

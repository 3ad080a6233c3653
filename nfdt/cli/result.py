"""Save what a job trained as a file: a Keras model, or its arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from nfdt_client.handle import JobResult

from nfdt.core.arrays import ParameterLayout
from nfdt.core.errors import UsageError
from nfdt.core.program.state import dump_state

SUFFIXES = (".keras", ".npz")


def check_output(path: Path) -> None:
    """Raise UsageError unless ``path`` can become a result file."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--output: expected a name that ends in {' or '.join(SUFFIXES)}. Received: {path}.")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"--output: the directory {path.resolve().parent} does not exist.")


def save(result: JobResult, path: Path) -> None:
    """Write the result to ``path``: the whole model (``.keras``) or the trainable variables by name (``.npz``).

    Raises:
        PolicyRefused: a ``.keras`` file of a job that carries code; nothing a server sends is unpickled here.
    """
    if path.suffix == ".keras":
        _save_model(result, path)
        return
    layout = ParameterLayout.from_json(result.manifest["layout"])
    named: dict[str, Any] = {slot.name: array for slot, array in zip(layout.slots, result.weights, strict=True)}
    with path.open("wb") as file:
        np.savez(file, **named)


def _save_model(result: JobResult, path: Path) -> None:
    from nfdt.core.program.unpack import unpack

    state = result.state
    trained = dump_state(state.weights, state.optimizer, state.untrained)
    model = unpack(result.manifest, lambda _name: trained, allow_code=False)
    result.apply_to(model)
    model.save(path)

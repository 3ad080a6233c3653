"""The backend of Keras, determined without importing Keras."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nfdt.core.errors import CaptureError

TENSORFLOW = "tensorflow"
TORCH = "torch"
TRAINING = (TENSORFLOW, "jax", TORCH)
"""Backends on which workers train; shards run on TensorFlow."""
VARIABLE = "KERAS_BACKEND"


@dataclass(frozen=True)
class Backend:
    """A backend of Keras, and where it is set."""

    name: str
    origin: str


def configured_backend(environ: Mapping[str, str]) -> Backend:
    """Return the backend that Keras loads, by the environment, keras.json or its default; in this order."""
    if name := environ.get(VARIABLE):
        return Backend(name, f"{VARIABLE} in the environment")
    path = _directory(environ) / "keras.json"
    try:
        name = json.loads(path.read_text(encoding="utf-8"))["backend"]
    except (OSError, ValueError, LookupError, TypeError):
        return Backend(TENSORFLOW, "Keras' default")
    return Backend(str(name), str(path))


def _directory(environ: Mapping[str, str]) -> Path:
    # As Keras determines it.
    if home := environ.get("KERAS_HOME"):
        return Path(home).expanduser()
    base = Path("~").expanduser()
    return (base if os.access(base, os.W_OK) else Path("/tmp")) / ".keras"


def loaded_backend() -> Backend | None:
    """Return the backend that Keras has loaded; None before it is imported."""
    # A module that is still being imported may lack attributes.
    backend = getattr(getattr(sys.modules.get("keras"), "config", None), "backend", None)
    return None if backend is None else Backend(str(backend()), "loaded when Keras was imported")


def current_backend() -> Backend:
    """Return the backend that Keras has loaded, or will load."""
    return loaded_backend() or configured_backend(os.environ)


def require_backend(expected: Sequence[str] = TRAINING, computes: str = "workers compute") -> None:
    """Check that Keras runs, or will run, on one of the expected backends.

    Args:
        expected: Names of backends.
        computes: Subject and verb of the reason: the part that needs one of them.

    Raises:
        CaptureError: it runs on another backend.
    """
    found = current_backend()
    if found.name not in expected:
        names = " or ".join(map(repr, expected))
        raise CaptureError(
            f"Keras on another backend cannot be distributed: {computes} with {names}. Expected: {names}. "
            f"Received: {found.name!r} ({found.origin}). Set {VARIABLE}={TENSORFLOW} in the environment before the "
            "script, or the notebook's kernel, is started."
        )


def require_tensorflow(computes: str) -> None:
    """Check that Keras runs, or will run, on TensorFlow; see :func:`require_backend`."""
    require_backend((TENSORFLOW,), computes)


def ignored_backend() -> str | None:
    """Return the backend that the environment names since Keras has loaded another one; None if there is none."""
    name, loaded = os.environ.get(VARIABLE), loaded_backend()
    return name if name and loaded is not None and name != loaded.name else None

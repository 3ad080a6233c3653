"""Backend of Keras, found without importing Keras; only TensorFlow trains on a cluster."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from nfdt.core.errors import CaptureError

TENSORFLOW = "tensorflow"
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
    if home := environ.get("KERAS_HOME"):
        return Path(home).expanduser()
    base = Path("~").expanduser()
    return (base if os.access(base, os.W_OK) else Path("/tmp")) / ".keras"


def loaded_backend(modules: Mapping[str, ModuleType]) -> Backend | None:
    """Return the backend that Keras has loaded; None before it is imported."""
    backend = getattr(getattr(modules.get("keras"), "config", None), "backend", None)
    return None if backend is None else Backend(str(backend()), "loaded when Keras was imported")


def require_tensorflow(
    environ: Mapping[str, str] | None = None, modules: Mapping[str, ModuleType] | None = None
) -> None:
    """Check that Keras runs, or will run, on TensorFlow.

    Args:
        environ: The environment; default: that of the process.
        modules: The loaded modules; default: those of the process.

    Raises:
        CaptureError: it runs on another backend.
    """
    environ = os.environ if environ is None else environ
    found = loaded_backend(sys.modules if modules is None else modules) or configured_backend(environ)
    if found.name != TENSORFLOW:
        raise CaptureError(
            f"Keras on another backend cannot be distributed: workers compute with TensorFlow. Expected: "
            f"{TENSORFLOW!r}. Received: {found.name!r} ({found.origin}). Set {VARIABLE}={TENSORFLOW} in the "
            "environment before the script, or the notebook's kernel, is started."
        )


def ignored_backend(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the backend that the environment names since Keras has loaded another one; None if there is none."""
    name = (os.environ if environ is None else environ).get(VARIABLE)
    loaded = loaded_backend(sys.modules)
    return name if name and loaded is not None and name != loaded.name else None

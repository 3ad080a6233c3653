"""Environment of peers that need Keras 2: tf_keras on the installed version of TensorFlow."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

INSTALL_S = 900


def _tensorflow() -> str:
    """Return the installed version of TensorFlow."""
    for name in ("tensorflow-cpu", "tensorflow"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise RuntimeError("TensorFlow is not installed: ./scripts/setup")


def packages() -> list[str]:
    """Return the pinned packages of the environment."""
    version = _tensorflow()
    return [f"tensorflow-cpu=={version}", f"tf_keras=={'.'.join(version.split('.')[:2])}.*"]


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "nfdt" / "venvs" / f"tf_keras-{_tensorflow()}-{sys.implementation.cache_tag}"


def python_of_keras2(*, install: bool) -> Path | None:
    """Return the environment's Python; None if it does not exist or cannot be created.

    Args:
        install: Create a missing environment: about 300 MB from the package index, once.
    """
    folder = _folder()
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists() or not install:
        return python if complete.exists() else None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            print(f"bench: installing {' '.join(packages())} into {folder}", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=INSTALL_S)
                install_them = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages()]
                subprocess.run(install_them, check=True, timeout=INSTALL_S)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                print(f"bench: no peers of Keras 2: {error}", file=sys.stderr)
                return None
            complete.touch()
    return python

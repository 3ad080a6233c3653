"""Files that a script wrote, and what must be equal in those of two runs: names, and forms without values."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

OF_A_RUN = re.compile(r"\d{6,}(\.[\w.-]+?\.\d+)?")  # times, and a host with a process behind them
UNREADABLE = "cannot be read"


def written(folder: Path, original: Path) -> dict[str, str]:
    """Return the forms of files in ``folder`` that are not in ``original``, or have another content there.

    Args:
        folder: Copy of the original in which a script has run.
        original: Folder of the script.

    Returns:
        Forms by path relative to the folder; times and numbers of processes in a path are left out.
    """
    found = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    names = {path: path.relative_to(folder) for path in found}
    new = {name: path for path, name in names.items() if _is_new(path, original / name)}
    return {OF_A_RUN.sub("N", name.as_posix()): form(path) for name, path in new.items()}


def _is_new(path: Path, before: Path) -> bool:
    return not before.is_file() or path.read_bytes() != before.read_bytes()


def form(path: Path) -> str:
    """Return what two files have in common that differ in values only; "": nothing is known of this kind of file."""
    read = next((read for ending, read in FORMS.items() if path.name.endswith(ending)), None)
    try:
        return read(path) if read is not None else ""
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return UNREADABLE


def _lines(path: Path) -> str:
    first, *rest = path.read_text(encoding="utf-8").splitlines() or [""]
    return f"{len(rest)} lines below {first!r}"


def _members(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        return ", ".join(sorted(archive.namelist()))


def _array(path: Path) -> str:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    return f"{array.shape} {array.dtype}"


def _datasets(path: Path) -> str:
    import h5py

    found: list[str] = []
    with h5py.File(path) as file:
        file.visititems(lambda name, one: found.append(f"{name} {one.shape}") if hasattr(one, "shape") else None)
    return ", ".join(found)


FORMS: dict[str, Callable[[Path], str]] = {
    **{".csv": _lines, ".npy": _array, ".h5": _datasets, ".hdf5": _datasets},
    **dict.fromkeys((".keras", ".zip", ".npz"), _members),
}


def difference(expected: dict[str, str], received: dict[str, str]) -> str:
    """Return how the files of a distributed script differ from those of the plain one; "": they do not."""
    for name in sorted(expected.keys() | received.keys()):
        one, other = expected.get(name), received.get(name)
        if one is None or other is None:
            return f"{name}: written {'only distributed' if one is None else 'only plain'}"
        if one != other:
            return f"{name}: {one} plain, {other} distributed"
    return ""

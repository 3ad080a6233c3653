"""A data source of the user's script, pickled by value, and loaded where its batches are read.

Large arrays in the source are separate artifacts, so that all processes of a machine map the same file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.pytree import KINDS
from nfdt.core.errors import UnreadableData
from nfdt.model.program.by_value import ObjectPickler, ObjectUnpickler
from nfdt.model.program.own_modules import own_modules_by_value

LARGE_BYTES = 2**20


@dataclass(frozen=True)
class ShippedSource:
    """A pickled source.

    Attributes:
        code: The pickled object; references to large arrays are numbers.
        arrays: The large arrays, by these numbers.
    """

    code: bytes
    arrays: list[Array]


class _SourcePickler(ObjectPickler):
    """Pickler of a source.

    Args:
        file: Writable binary file.
        known: Numbers of the large arrays by their ``id``, the only ones that are references; None: number all.
    """

    def __init__(self, file: Any, known: Mapping[int, int] | None = None) -> None:
        super().__init__(file)
        self.arrays: list[Array] = []
        self._places, self._numbers_all = dict(known or {}), known is None

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not np.ndarray or obj.nbytes < LARGE_BYTES or obj.dtype.kind not in KINDS:
            return super().persistent_id(obj)
        if id(obj) not in self._places:
            if not self._numbers_all:
                return None
            self._places[id(obj)] = len(self.arrays)
            self.arrays.append(obj)
        return str(self._places[id(obj)])


def dump_source(source: Any) -> ShippedSource:
    """Pickle a source, with the modules of the user's own program that it needs.

    Raises:
        UnreadableData: it cannot be pickled.
    """
    return ShippedSource(*_dump(source, None))


def dump_changed(source: Any, before: ShippedSource, unchanged: Callable[[Array], bool]) -> bytes:
    """Pickle a source again, such that :func:`load_source` finds unchanged arrays among the earlier ones.

    Args:
        source: The source.
        before: What :func:`dump_source` made of it.
        unchanged: Whether a large array is as it was then; all others become a part of the pickle.

    Raises:
        UnreadableData: it cannot be pickled any more.
    """
    kept = {id(array): number for number, array in enumerate(before.arrays) if unchanged(array)}
    return _dump(source, kept)[0]


def _dump(source: Any, known: Mapping[int, int] | None) -> tuple[bytes, list[Array]]:
    file = io.BytesIO()
    pickler = _SourcePickler(file, known)
    with own_modules_by_value():
        try:
            pickler.dump_all(source)
        except Exception as error:  # any exception of the user's __getstate__ or __reduce__
            raise UnreadableData(f"the dataset cannot be pickled ({type(error).__name__}: {error})") from error
    return file.getvalue(), pickler.arrays


def load_source(code: bytes | memoryview, arrays: Sequence[str], open_array: Callable[[str], Array]) -> Any:
    """Return the source that :func:`dump_source` pickled.

    Args:
        code: The pickled object.
        arrays: Artifacts of its large arrays.
        open_array: Returns an artifact that is a ``.npy`` file as an array.

    Raises:
        UnreadableData: it cannot be loaded on this machine.
    """

    @cache
    def opened(number: int) -> Array:
        return private(open_array(arrays[number]))

    try:
        return ObjectUnpickler(io.BytesIO(code), lambda number: opened(int(number))).load_all()
    except Exception as error:  # any exception of the user's __setstate__, or a package that is missing here
        raise UnreadableData(f"it cannot be loaded there ({type(error).__name__}: {error})") from error


def private(array: Array) -> Array:
    """Return an array that may be written to: a memory-mapped one is copied page by page when it is."""
    if isinstance(array, np.memmap) and array.filename is not None:
        return np.load(array.filename, mmap_mode="c", allow_pickle=False).view(np.ndarray)
    return array if array.flags.writeable else np.array(array)

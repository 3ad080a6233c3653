"""Detection of changes that a script makes to an object after it was sent, without pickling it again.

A fingerprint is a digest of the object's structure and values. Large arrays and long lists contribute their identity
and a sample. All elements of large arrays are compared as well, but only as often as takes :data:`SHARE` of the time:
hashing them takes 0.1 s per 100 MB (decision 65).
"""

from __future__ import annotations

import contextlib
import dis
import hashlib
import pickle
import time
import types
import zlib
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

import cloudpickle
import keras
import numpy as np

from nfdt.model.backends.contract import current
from nfdt.model.backends.variables import values_of
from nfdt.model.keras_internals.models import backend_choice, unwrapped
from nfdt.model.program.by_value import attributes_of, is_recorded
from nfdt.model.program.own_modules import own_module_names

LARGE_BYTES = 2**16
SAMPLED = 64  # blocks of a large array, elements of a long list
BLOCK_BYTES = 2**7
LONG = 2**10
SHARE = 0.01


class SourceWatch:
    """Detects changes to an object that was sent to other processes.

    Args:
        root: The object; it is kept.
        clock: Returns a time in seconds.
    """

    def __init__(self, root: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._own = own_module_names()
        self._quick = b""
        self._arrays: dict[int, tuple[Any, int | None]] = {}  # large arrays by their ``id``, each with its checksum
        self._check_s, self._checked_at = 0.0, 0.0
        self.changed()
        self.record_checksums()
        self._first = self._arrays

    def changed(self) -> bool:
        """Whether the object has changed since the last call, except in parts of large arrays beside the sample."""
        before = self._quick
        pickler = _Fingerprint(self._own)
        try:
            pickler.dump(_shortened(self._root))
            self._quick = pickler.digest()
        except Exception:  # the script has added something that cannot be pickled
            self._quick = b""
        known = self._arrays
        self._arrays = {key: known.get(key, (array, None)) for key, array in pickler.arrays.items()}
        return self._quick != before

    def changed_in_place(self) -> bool:
        """Whether elements of large arrays have changed since they were recorded; False if the check is not due yet."""
        if self._clock() - self._checked_at < self._check_s / SHARE:
            return False
        before = self._arrays
        self.record_checksums()
        return any(checksum != before[key][1] for key, (_, checksum) in self._arrays.items())

    def record_checksums(self) -> None:
        """Record the elements of large arrays, which :meth:`changed_in_place` compares with later ones."""
        began = self._clock()
        self._arrays = {key: (array, _checksum(array)) for key, (array, _) in self._arrays.items()}
        self._checked_at = self._clock()
        self._check_s = self._checked_at - began

    def unchanged(self, array: Any) -> bool:
        """Whether a large array was there at the beginning, with the elements that it has now."""
        held, before = self._first.get(id(array), (None, None))
        return held is array and before == _checksum(array)


def reaches(root: Any, wanted: Collection[Any]) -> bool:
    """Whether code or objects of the script refer to one of these objects, and may therefore change it.

    Args:
        root: Where to look, such as callbacks; layers and arrays are not looked into.
        wanted: Objects; a variable of a backend is also met in the ``keras.Variable`` that holds it.
    """
    search = _Search(own_module_names(), wanted)
    with contextlib.suppress(Exception):  # of the user's __reduce__ or __getstate__
        search.dump(root)
    return search.found


class _Fingerprint(cloudpickle.Pickler):
    """Pickler that computes a digest instead of writing; large arrays contribute a sample.

    Args:
        own: Names of the modules whose functions and classes are looked into.
    """

    def __init__(self, own: Collection[str]) -> None:
        self._own = own
        self._hash = hashlib.blake2b(digest_size=16)
        super().__init__(self)
        self.arrays: dict[int, Any] = {}

    def write(self, data: Any) -> int:
        """Add to the digest."""
        self._hash.update(data)
        return len(data)

    def digest(self) -> bytes:
        """Return the digest of what has been pickled."""
        return self._hash.digest()

    def reducer_override(self, obj: Any) -> Any:
        """Return the form of which the digest is made."""
        if obj is _of:
            return _of.__name__
        if isinstance(obj, type | types.FunctionType | types.ModuleType):
            return _of, ("code", id(obj)), self._content(obj)
        if type(obj) is np.ndarray and obj.nbytes >= LARGE_BYTES and obj.dtype != object:
            self.arrays[id(obj)] = obj
            return _of, ("array", id(obj), obj.ctypes.data, obj.shape, obj.dtype.str, _sample(obj))
        if isinstance(obj, keras.Variable):
            return _of, ("variable", values_of([obj])[0])
        if is_recorded(obj):
            return _of, ("object", type(obj)), attributes_of(obj)
        if isinstance(obj, keras.optimizers.Optimizer) or backend_choice(obj) is not None:
            return _of, ("object", id(obj))
        if (plain := unwrapped(obj)) is not obj:
            return _of, ("container", plain)
        if (reduced := current().reduce(obj)) is not None:
            return reduced
        return super().reducer_override(obj)

    def _content(self, obj: Any) -> Any:
        """Return what a function, a class or a module of the script refers to; None of others."""
        name = obj.__name__ if isinstance(obj, types.ModuleType) else obj.__module__
        if name not in self._own and "<locals>" not in getattr(obj, "__qualname__", ""):
            return None
        if isinstance(obj, types.FunctionType):
            return id(obj.__code__), globals_of(obj), obj.__defaults__, obj.__kwdefaults__, vars(obj)
        base = obj.__bases__ if isinstance(obj, type) else None
        return base, {key: value for key, value in vars(obj).items() if key not in _OF_PYTHON}


class _Search(_Fingerprint):
    """Walks over everything that an object refers to, also over what cannot be pickled."""

    def __init__(self, own: Collection[str], wanted: Collection[Any]) -> None:
        super().__init__(own)
        self._wanted = {id(obj) for obj in wanted}
        self.found = False

    def reducer_override(self, obj: Any) -> Any:
        """Return what an object refers to."""
        held = obj.value if isinstance(obj, keras.Variable) else obj
        if id(obj) in self._wanted or id(held) in self._wanted:
            self.found = True
        if isinstance(obj, keras.Layer | keras.Variable | np.ndarray):
            return _of, ()
        found = super().reducer_override(obj)
        if found is not NotImplemented or type(obj) in self.dispatch_table:
            return found
        try:
            return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception:
            return _of, (), list(getattr(obj, "__dict__", {}).values())


_OF_PYTHON = ("__dict__", "__weakref__", "_abc_impl", "__builtins__", "__loader__", "__spec__", "__cached__")


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the global and enclosing variables that a function reads, and functions inside of it, by name."""
    names = sorted(_names_in(function.__code__) & function.__globals__.keys())
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    enclosing = {name: _content_of(cell) for name, cell in cells}
    return {**{name: function.__globals__[name] for name in names}, **enclosing}


@lru_cache(maxsize=2**12)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of the globals that a code object reads, and those inside of it."""
    own = {str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(own).union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _of(*_: Any) -> None:
    return None


def _shortened(root: Any) -> Any:
    """Return the object with long lists in its attributes replaced by the identities of all elements, and a sample."""
    if isinstance(root, tuple):
        return tuple(map(_shortened, root))
    if not isinstance(root, keras.utils.PyDataset):
        return root
    return type(root), {name: _short(value) for name, value in vars(root).items()}


def _short(value: Any) -> Any:
    if type(value) not in (list, tuple, dict) or len(value) < LONG:
        return value
    held = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    identities = np.fromiter(map(id, held), np.uint64, len(held))
    return len(held), zlib.crc32(identities.data), [held[i] for i in np.linspace(0, len(held) - 1, SAMPLED, dtype=int)]


def _sample(array: Any) -> bytes:
    """Return a digest of evenly spaced blocks of an array's memory."""
    if not array.flags.c_contiguous:
        flat = array.flat
        step = max(1, array.size // (SAMPLED * 16))
        return np.asarray(flat[::step]).tobytes()
    memory = array.reshape(-1).view(np.uint8)
    places = np.linspace(0, memory.size - BLOCK_BYTES, SAMPLED, dtype=int)
    return b"".join(memory[place : place + BLOCK_BYTES].tobytes() for place in places)


def _checksum(array: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

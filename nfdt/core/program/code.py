"""A program's own classes and functions, pickled by value and loaded.

They are pickled together with the modules of the user's own program (all that are not installed). Where they refer to
the model that is trained, or to a layer of it, the worker gets a reference to *its* model; every other Keras object
is sent as configuration and values.
"""

from __future__ import annotations

import collections
import io
import pickle
import platform
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import keras

from nfdt.core.errors import CaptureError, PolicyRefused, ProtocolError, VersionMismatch
from nfdt.core.keras_internals import KerasSaveable, flatten_layers, serialization_lib, tracking
from nfdt.core.program.collect import CustomObjects, collecting
from nfdt.core.program.manifest import Manifest
from nfdt.core.program.untrained import values_of

# Containers that Keras substitutes for a model's own.
_TRACKED = {
    list: tracking.TrackedList,
    collections.OrderedDict: tracking.TrackedOrderedDict,
    dict: tracking.TrackedDict,
    set: tracking.TrackedSet,
}
_OURS = ("nfdt", "nfdt_client", "hfdt")
_INSTALLED = ("/site-packages/", "/dist-packages/")  # also those of other installations in PYTHONPATH or .pth files


class LayerReference:
    """Placeholder of the model, or of a layer of it, in code that was loaded before the model was built."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._layer: Any = None

    def bind(self, layers: list[Any]) -> None:
        """Resolve the placeholder to its layer; ``layers`` are those of the model as Keras flattens it."""
        self._layer = layers[self._index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or vars(self).get("_layer") is None:
            raise AttributeError(f"{name!r} of the model is asked for before the model is built")
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer."""
        return self._layer(*args, **kwargs)


@dataclass(frozen=True)
class LoadedCode:
    """A program's objects by registered name, and the placeholders of parts of the model in them."""

    objects: dict[str, Any]
    references: tuple[LayerReference, ...] = ()


class ProgramPickler(cloudpickle.Pickler):
    """Pickler of code that may refer to Keras objects.

    Args:
        file: Writable binary file.
        layers: Index of each object, by its ``id``, that becomes a persistent reference.
    """

    def __init__(self, file: Any, layers: Mapping[int, int]) -> None:
        super().__init__(file)
        self._layers = layers

    def persistent_id(self, obj: Any) -> Any:
        """Return the reference that replaces an object; None to pickle it."""
        return self._layers.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        """Return the form in which a Keras object is pickled."""
        if isinstance(obj, KerasSaveable):
            return _revive, _describe(obj)
        if isinstance(obj, keras.Variable):
            return _make_variable, (values_of([obj])[0], str(obj.dtype), bool(obj.trainable), obj.name)
        for plain, tracked in _TRACKED.items():
            if isinstance(obj, tracked):
                return plain, (plain(obj.items()) if issubclass(plain, dict) else list(obj),)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.references: list[LayerReference] = []

    def persistent_load(self, pid: Any) -> Any:
        self.references.append(LayerReference(int(pid)))
        return self.references[-1]


def _describe(obj: Any) -> tuple[dict[str, Any], Any, list[Any]]:
    found = CustomObjects()
    with collecting(found):
        config = serialization_lib.serialize_keras_object(obj)
    config.pop("compile_config", None)
    is_built_layer = isinstance(obj, keras.Layer) and obj.built
    return found.by_name, config, values_of(obj.variables) if is_built_layer else []


def _make_variable(value: Any, dtype: str, trainable: bool, name: str) -> Any:
    return keras.Variable(value, dtype=dtype, trainable=trainable, name=name)


def _revive(objects: dict[str, Any], config: Any, values: list[Any]) -> Any:
    with keras.saving.custom_object_scope(objects), serialization_lib.ObjectSharingScope():
        obj = serialization_lib.deserialize_keras_object(config, safe_mode=False)
    for variable, value in zip(obj.variables, values, strict=True) if values else ():
        variable.assign(value)
    return obj


def dump_custom_objects(objects: Mapping[str, Any], model: Any = None) -> bytes:
    """Pickle objects by value, with the modules of the user's own program that define them.

    Args:
        objects: Objects by registered name.
        model: Their model; references to it and its layers are kept as references.

    Raises:
        CaptureError: an object cannot be pickled; the message names it.
    """
    flat = flatten_layers(model) if model is not None else []
    layers = {id(layer): index for index, layer in enumerate(flat)}
    with own_modules_by_value():
        try:
            return _dump(dict(objects), layers)
        except CaptureError:
            raise
        except Exception as error:
            _name_culprit(objects, layers, error)
            raise CaptureError(f"The script's classes and functions cannot be pickled: {error}.") from error


def _dump(obj: Any, layers: Mapping[int, int]) -> bytes:
    file = io.BytesIO()
    ProgramPickler(file, layers).dump(obj)
    return file.getvalue()


def _name_culprit(objects: Mapping[str, Any], layers: Mapping[int, int], cause: Exception) -> None:
    for name, obj in objects.items():
        try:
            _dump(obj, layers)
        except Exception as error:
            raise CaptureError(
                f"{name.removeprefix('job>')!r} cannot be sent to the workers: {type(error).__name__}: {error}. It "
                "refers to something that lives in this process only (a lock, an open file, a session, a generator). "
                "Create that inside the function, or hand it over as a constructor argument."
            ) from cause


@contextmanager
def own_modules_by_value() -> Iterator[None]:
    """Pickle the modules of the user's own program by value inside the block."""
    registered = []
    installed = _installed_roots()
    already = cloudpickle.list_registry_pickle_by_value()
    for name, module in sys.modules.copy().items():  # copied atomically: other threads may import
        if name not in already and isinstance(module, types.ModuleType) and _is_users_own(name, module, installed):
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _is_users_own(name: str, module: types.ModuleType, installed: set[Path]) -> bool:
    """Return whether a module belongs to the user's program: its file or folders are not part of an installation."""
    if name != module.__name__ or name.partition(".")[0] in (*_OURS, "__main__", "__mp_main__"):
        return False
    file = getattr(module, "__file__", None)
    places = [file] if file else list(getattr(module, "__path__", ()))  # a package without __init__.py has no file
    return bool(places) and not any(_is_installed(place, installed) for place in places)


def _is_installed(place: str, installed: set[Path]) -> bool:
    if place.startswith(tuple(f"{root}/" for root in installed)):  # thousands of modules: avoids disk access
        return True
    if any(part in f"{place}/" for part in _INSTALLED):
        return True
    return any(Path(place).resolve().is_relative_to(root) for root in installed)


def _installed_roots() -> set[Path]:
    paths = sysconfig.get_paths()
    roots = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    return {Path(root).resolve() for root in (*roots, *site.getsitepackages(), site.getusersitepackages())}


def load_code(manifest: Manifest, read: Callable[[str], bytes], *, allow_code: bool) -> LoadedCode:
    """Load the program's own classes and functions; none for a config job.

    Raises:
        PolicyRefused: the program carries code and ``allow_code`` is False.
        VersionMismatch: the code was pickled by another minor version of Python.
        ProtocolError: the code cannot be unpickled here.
    """
    if manifest.is_plain:
        return LoadedCode({})
    if not allow_code:
        raise PolicyRefused(
            "This program carries Python code (custom classes or functions), which this server does not run. "
            "Start the server with --allow-code if you trust its users, or use only what Keras has."
        )
    if not manifest.code:
        return LoadedCode({})
    theirs, ours = manifest.python_version, ".".join(platform.python_version_tuple()[:2])
    if theirs != ours:
        raise VersionMismatch(f"Code pickled by Python {theirs} needs Python {theirs} here. Received: Python {ours}.")
    unpickler = _Unpickler(io.BytesIO(read(manifest.code)))
    try:
        return LoadedCode(dict(unpickler.load()), tuple(unpickler.references))
    except Exception as error:
        raise ProtocolError(
            f"The script's classes and functions cannot be loaded here: {type(error).__name__}: {error}. Install the "
            "packages the script imports on the workers too."
        ) from error

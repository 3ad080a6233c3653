"""Pickling by value of a program's own classes, functions and models, and loading.

The modules of the user's own program, those that are not installed, are part of the pickles. There are two: the custom
objects that the configuration of the optimizer names, which shards load as well, and the model.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import io
import logging
import pickle
import platform
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from nfdt.core.errors import CaptureError, PolicyRefused, ProtocolError, VersionMismatch
from nfdt.model.program.by_value import ObjectPickler, ObjectUnpickler, attributes_of
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.own_modules import own_modules_by_value, packages_of
from nfdt.model.program.policy import check_policy

logger = logging.getLogger(__name__)

_REMEDY = (
    ". It refers to something that lives in this process only (a lock, an open file, a session, a generator). Create "
    "that inside the function that uses it, or in the constructor of a class whose get_config() returns all arguments "
    "of its constructor: a worker then makes it again."
)

_LACKING = (
    "It is part of the package {package}, which the script has: install it here too, or put its folder into PYTHONPATH "
    "before the workers start."
)

Missing = dict[int, tuple[tuple[str, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Pickled:
    """An object that :func:`dump_objects` has pickled.

    Attributes:
        data: The pickle, after one of the packages that it needs.
        code: The script's own functions and classes in it.
        variables: The variables in it, in an order that :func:`load_with_variables` keeps.
    """

    data: bytes
    code: list[Any]
    variables: list[Any]


def digest_sources(code: Collection[Any]) -> dict[str, str]:
    """Return a digest of the source texts of functions and classes by their name; pickles differ between processes."""
    texts: dict[str, list[str]] = {}
    for obj in code:
        texts.setdefault(obj.__qualname__, []).append(_source(obj))
    return {name: hashlib.sha256("".join(sorted(texts[name])).encode()).hexdigest() for name in sorted(texts)}


def _source(obj: Any) -> str:
    try:
        return inspect.getsource(obj)
    except (OSError, TypeError):
        return ""


def dump_objects(root: Any, references: Mapping[int, str] | None = None, valueless: Collection[int] = ()) -> Pickled:
    """Pickle an object by value, with the modules of the user's own program that define it.

    Args:
        root: The object.
        references: Name of each object, by its ``id``, that :func:`load_objects` gets by this name.
        valueless: ``id`` of each Keras variable that is sent without its value.

    Raises:
        CaptureError: a part cannot be pickled; the message names it.
    """
    with own_modules_by_value():
        missing: Missing = {}
        while True:  # again after each failure, without the attributes that were found to be the cause
            file = io.BytesIO()
            pickler = ObjectPickler(file, references, valueless, missing)
            try:
                pickler.dump_all(root)
            except CaptureError:
                raise
            except Exception as error:  # any exception of the user's __reduce__ or __getstate__
                found = _unsendable(pickler.met, root, references or {}, missing)
                if not found:
                    raise CaptureError(f"The script's classes and functions cannot be pickled: {error}.") from error
                missing = {**missing, **found}
                continue
            own = {*cloudpickle.list_registry_pickle_by_value(), "__main__", "__mp_main__"}
            code = [obj for obj in pickler.code.values() if obj.__module__ in own]
            packages = pickle.dumps(packages_of(pickler.modules - own))
            return Pickled(packages + file.getvalue(), code, pickler.variables)


def _unsendable(met: Sequence[Any], root: Any, references: Mapping[int, str], known: Missing) -> Missing:
    """Return the attributes of Keras objects that cannot be pickled, by the ``id`` of their object.

    Raises:
        CaptureError: there is one, and the object's configuration, from which a worker would make it, is no help.
    """
    found: Missing = {}
    for obj in met:
        before = known.get(id(obj), ((), {}))[0]
        reasons = {name: _why_not(value, references) for name, value in attributes_of(obj).items()}
        names = tuple(name for name, reason in reasons.items() if reason and name not in before)
        if names:
            found[id(obj)] = ((*before, *names), _configuration(obj, names, reasons[names[0]]))
    if isinstance(root, Mapping) and not found:
        for name, value in root.items():
            if reason := _why_not(value, references):
                raise CaptureError(f"{name.removeprefix('job>')!r} cannot be sent to the workers: {reason}{_REMEDY}")
    return found


def _why_not(value: Any, references: Mapping[int, str]) -> str:
    """Return why a value cannot be pickled, with the function in which that was found; "" if it can."""
    pickler = ObjectPickler(io.BytesIO(), references)
    try:
        pickler.dump(value)
    except Exception as error:
        functions = [obj for obj in pickler.code.values() if isinstance(obj, types.FunctionType)]
        code = [obj for obj in functions if not str(obj.__module__).startswith(("cloudpickle", "nfdt."))]
        inside = [obj.__qualname__.rpartition(".")[2] for obj in code]
        return f"{type(error).__name__}: {error}" + (f" (in {inside[-1]!r})" if inside else "")
    return ""


def _configuration(obj: Any, names: tuple[str, ...], reason: str) -> dict[str, Any]:
    """Return the configuration from which a new object gets these attributes."""
    try:
        config: dict[str, Any] = obj.get_config()
        made = vars(type(obj).from_config(copy.deepcopy(config)))
        lacking = [name for name in names if type(made.get(name)) is not type(vars(obj)[name])]
    except Exception as error:
        logger.debug("%s cannot be made again: %s", described(obj), error)
        lacking = list(names)
    if lacking:
        raise CaptureError(
            f"{described(obj)}: its attribute {lacking[0]!r} cannot be sent to the workers: {reason}{_REMEDY}"
        )
    return config


def described(obj: Any) -> str:
    """Return class and name of a Keras object for a message."""
    name = getattr(obj, "path", None) or getattr(obj, "name", None)
    return f"{type(obj).__name__} {name!r}" if isinstance(name, str) else type(obj).__name__


def load_code(manifest: Manifest, read: Callable[[str], bytes | memoryview], *, allow_code: bool) -> dict[str, Any]:
    """Load the custom objects that configurations of the program name; none for a config job, which is checked.

    Raises:
        PolicyRefused: the program carries code and ``allow_code`` is False, or it is a config job with something that
            is not on the list of :mod:`nfdt.model.program.policy`.
        VersionMismatch: the code was pickled by another minor version of Python.
        ProtocolError: the code cannot be unpickled here.
    """
    if manifest.is_plain:
        check_policy(manifest)
        return {}
    if not allow_code:
        raise PolicyRefused(
            "This program carries Python code (custom classes or functions), which this server does not run. "
            "Start the server with --allow-code if you trust its users, or use only what Keras has."
        )
    return dict(load_objects(manifest, manifest.code, read, {})) if manifest.code else {}


def load_objects(
    manifest: Manifest, artifact: str, read: Callable[[str], bytes | memoryview], references: Mapping[str, Any]
) -> Any:
    """Inverse of :func:`dump_objects`; see :func:`load_with_variables`."""
    return load_with_variables(manifest, artifact, read, references)[0]


def load_with_variables(
    manifest: Manifest, artifact: str, read: Callable[[str], bytes | memoryview], references: Mapping[str, Any]
) -> tuple[Any, list[Any]]:
    """Return an object that was pickled, and the variables in its pickle; the caller has checked that code is allowed.

    Raises:
        VersionMismatch: the objects were pickled by another minor version of Python.
        ProtocolError: they cannot be unpickled here.
    """
    theirs, ours = manifest.python_version, ".".join(platform.python_version_tuple()[:2])
    if theirs != ours:
        raise VersionMismatch(f"Code pickled by Python {theirs} needs Python {theirs} here. Received: Python {ours}.")
    packages: Mapping[str, str] = {}
    try:
        file = io.BytesIO(read(artifact))
        packages = pickle.load(file)
        unpickler = ObjectUnpickler(file, references.__getitem__)
        return unpickler.load_all(), unpickler.variables
    except ProtocolError:
        raise
    except Exception as error:
        module = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        package = packages.get(module.partition(".")[0])
        raise ProtocolError(
            f"The script's classes and functions cannot be loaded here: {type(error).__name__}: {error}. "
            + (_LACKING.format(package=package) if package else "Install the packages the script imports here too.")
        ) from error

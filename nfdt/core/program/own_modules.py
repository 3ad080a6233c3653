"""Modules of the user's own program, which no worker has installed."""

from __future__ import annotations

import site
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import cloudpickle

_OURS = ("nfdt", "nfdt_client", "hfdt")
_INSTALLED = ("/site-packages/", "/dist-packages/")  # also those of other installations in PYTHONPATH or .pth files


@contextmanager
def own_modules_by_value() -> Iterator[None]:
    """Pickle the modules of the user's own program by value inside the block."""
    with pickled_by_value(own_modules()):
        yield


def own_modules() -> list[types.ModuleType]:
    """Return the modules of the user's own program; looks at every loaded module, which takes tens of milliseconds."""
    installed = _installed_roots()
    loaded = sys.modules.copy().items()  # copied atomically: other threads may import
    return [m for name, m in loaded if isinstance(m, types.ModuleType) and _is_users_own(name, m, installed)]


@contextmanager
def pickled_by_value(modules: Sequence[types.ModuleType]) -> Iterator[None]:
    """Pickle these modules by value inside the block."""
    already = cloudpickle.list_registry_pickle_by_value()
    registered = [module for module in modules if module.__name__ not in already]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
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

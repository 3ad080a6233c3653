"""Tells the modules of the user's own program, which workers lack, from installed ones, and finds their packages."""

from __future__ import annotations

import site
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path

import cloudpickle

_OURS = ("nfdt", "nfdt_client", "hfdt")
_SCRIPT = ("__main__", "__mp_main__")
_ON_EVERY_WORKER = (*_OURS, "cloudpickle", "keras", "numpy", "tensorflow", *sys.stdlib_module_names)
_INSTALLED = ("/site-packages/", "/dist-packages/")  # also those of other installations in PYTHONPATH or .pth files


@contextmanager
def own_modules_by_value() -> Iterator[None]:
    """Pickle the modules of the user's own program by value inside the block."""
    already = cloudpickle.list_registry_pickle_by_value()
    registered = [module for module in own_modules() if module.__name__ not in already]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def own_modules() -> list[types.ModuleType]:
    """Return the modules of the user's own program; looks at every loaded module, which takes tens of milliseconds."""
    installed, recorded = _installed_roots(), cache(_recorded)
    loaded = sys.modules.copy().items()  # copied atomically: other threads may import
    return [m for name, m in loaded if isinstance(m, types.ModuleType) and _is_users_own(name, m, installed, recorded)]


def own_module_names() -> set[str]:
    """Return the names of :func:`own_modules`, and those of the script itself."""
    return {*_SCRIPT, *(module.__name__ for module in own_modules())}


def is_installed_file(file: str) -> bool:
    """Return whether a source file belongs to an installation, and not to the user's program."""
    return _is_installed(file, _installed_roots())


def packages_of(modules: Collection[str]) -> dict[str, str]:
    """Return name and version of the package of each module by the first part of its name, if workers may lack it."""
    names = {module.partition(".")[0] for module in modules}
    found = {module: _package(module) for module in sorted(names.difference(_ON_EVERY_WORKER))}
    return {module: package for module, package in found.items() if package}


def _package(module: str) -> str:
    """Return name and version of the package that has installed a module; "" if none has."""
    try:
        found = metadata.distribution(module)
    except metadata.PackageNotFoundError:  # a package may have another name than its modules
        names = metadata.packages_distributions().get(module, ())
        if not names:
            return ""
        found = metadata.distribution(names[0])
    return f"{found.name} {found.version}"


def _is_users_own(
    name: str, module: types.ModuleType, installed: set[Path], recorded: Callable[[Path], Collection[str]]
) -> bool:
    """Return whether a module belongs to the user's program: its file or folders are not part of an installation."""
    first, *rest = name.split(".")
    if name != module.__name__ or first in (*_OURS, *_SCRIPT):
        return False
    file = getattr(module, "__file__", None)
    places = [file] if file else list(getattr(module, "__path__", ()))  # a package without __init__.py has no file
    if not places or any(_is_installed(place, installed) for place in places):
        return False
    path = Path(places[0])
    above = path.parents[len(rest) + (path.stem == "__init__") :]
    return not above or first not in recorded(above[0])


def _recorded(folder: Path) -> set[str]:
    """Return the modules that ``pip install --target`` has installed into a folder: they are in its records."""
    found = [one.files for one in metadata.distributions(path=[str(folder)]) if one.read_text("RECORD")]
    return {file.parts[0].partition(".")[0] for files in found for file in files or ()}


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

"""Execution of a user's program inside this process, as ``python FILE ARGS`` or ``python -m MODULE ARGS`` would."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path

from nfdt.core.errors import NfdtError, UsageError
from nfdt.core.host import keras_backend

INTERRUPTED = 130
NOTEBOOK = ".ipynb"


@dataclass(frozen=True)
class Script:
    """A script as given on Python's command line.

    Attributes:
        name: A file, or the name of a module.
        args: Arguments after the name.
        is_module: Whether ``-m`` precedes the name.
    """

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @classmethod
    def from_words(cls, words: Sequence[str]) -> Script:
        """Return the script that :attr:`words` stand for; its name is empty if there is none after ``-m``."""
        is_module = words[0] == "-m"
        name, *args = words[is_module:] or [""]
        return cls(name, tuple(args), is_module)

    @property
    def words(self) -> list[str]:
        """The script on Python's command line."""
        return [*(["-m"] if self.is_module else []), self.name, *self.args]

    def __str__(self) -> str:
        return f"-m {self.name}" if self.is_module else self.name

    @property
    def directory(self) -> str:
        """First entry of ``sys.path``: folder of the file, links followed; for a module the working directory."""
        return os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.name))


def check_script(script: Script) -> None:
    """Compile ``script`` without running any of it; a module inside of a package is compiled when it runs.

    Raises:
        SyntaxError: it cannot be compiled.
        UsageError: the module does not exist, or the file is a notebook.
    """
    if not script.is_module:
        if script.name.endswith(NOTEBOOK):  # often valid Python, which only makes a dictionary
            raise UsageError(
                f"{script.name}: expected a Python script. Received: a notebook. Convert it by "
                f"`jupyter nbconvert --to script {script.name}`, or train in its cells with nfdt.session."
            )
        _compile_file(script.name)
        return
    path = sys.path
    try:
        sys.path = path if sys.flags.safe_path else [script.directory, *path[1:]]
        package = _find(script.name.partition(".")[0])
        if package is None:
            raise _missing_module(script.name)
        is_plain = package.submodule_search_locations is None and package.name == script.name
        if is_plain and (get_code := getattr(package.loader, "get_code", None)) is not None:
            get_code(package.name)
    finally:
        sys.path = path


def run_script(script: Script) -> None:
    """Execute ``script`` as ``__main__``; its exceptions, SystemExit included, propagate.

    Raises:
        UsageError: the module does not exist.
    """
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={}, __package__=None, __cached__=None)
    with _process_of(script, main):
        if script.is_module:
            code = _load_module(script.name, main)
        else:
            code, loader = _compile_file(script.name)
            vars(main).update(__file__=loader.path, __loader__=loader)
        exec(code, vars(main))


@contextmanager
def _process_of(script: Script, main: types.ModuleType) -> Iterator[None]:
    """Set ``sys.argv``, ``sys.path`` and ``__main__`` as the script expects them; restore all afterwards."""
    argv, path, ours = sys.argv, sys.path, sys.modules["__main__"]
    sys.argv = ["-m" if script.is_module else script.name, *script.args]
    if not sys.flags.safe_path:  # then path[0] is the directory of the program that Python started
        sys.path = [script.directory, *path[1:]]
    sys.modules["__main__"] = main
    try:
        yield
    finally:
        sys.argv, sys.path, sys.modules["__main__"] = argv, path, ours


def _compile_file(name: str) -> tuple[types.CodeType, SourceFileLoader]:
    path = os.path.join(os.getcwd(), name)
    loader = SourceFileLoader("__main__", path)
    code: types.CodeType = loader.source_to_code(loader.get_data(path), path)
    return code, loader


def _load_module(name: str, main: types.ModuleType) -> types.CodeType:
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:  # a package
        spec = _find(f"{name}.__main__")
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    if spec is None or get_code is None:
        raise _missing_module(name)
    vars(main).update(
        __file__=spec.origin, __loader__=spec.loader, __spec__=spec, __package__=spec.parent, __cached__=spec.cached
    )
    sys.argv[0] = str(spec.origin)
    code: types.CodeType = get_code(spec.name)
    return code


def _missing_module(name: str) -> UsageError:
    return UsageError(
        f"-m: expected the name of a module, or of a package with a __main__, as in -m package.module. "
        f"Received: {name!r}, which is not found from {os.getcwd()}."
    )


def _find(name: str) -> ModuleSpec | None:
    """Return a module's spec, or None; imports its parent packages, as Python does."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise  # a package of the user misses another module


def exit_code_of(error: BaseException) -> int:
    """Return the exit code, as listed in docs/troubleshooting.md, for the exception that ended a script.

    An NFDT error counts when it was raised itself or is the explicit cause (``raise ... from``) of the
    raised exception. Any other exception is the script's own failure: 1.
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, NfdtError):
        seen = seen.__cause__
    return 1 if seen is None else seen.exit_code


def _is_import(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith("<frozen importlib")


def describe_failure(error: BaseException) -> str:
    """Return the text for stderr: Python's traceback from the script's first line on.

    The text is "Interrupted." for an interrupt, and empty for a plain exit code. An NFDT error raised
    before the script's first line ran gives its message alone.
    """
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted."
    if isinstance(error, SystemExit):
        return "" if error.code is None or isinstance(error.code, int) else str(error.code)
    report = traceback.TracebackException.from_exception(error)
    ours = [index for index, frame in enumerate(report.stack) if frame.filename == __file__]
    script = [frame for frame in report.stack[ours[-1] + 1 :] if not _is_import(frame)] if ours else []
    if not script and isinstance(error, NfdtError):
        return f"Error: {error}"
    if ours and not script:  # the script could not be compiled
        return "".join(report.format_exception_only()).rstrip("\n")
    report.stack = traceback.StackSummary.from_list(script or report.stack)
    return "".join(report.format()).rstrip("\n")


def set_backend_of(script: Script, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set KERAS_BACKEND as the first statements of a file do, which name it in text; a module is not read.

    ``os.environ["KERAS_BACKEND"] = "jax"`` and ``os.environ.setdefault("KERAS_BACKEND", "jax")`` are found outside of
    functions and classes.
    """
    if script.is_module:
        return
    try:
        tree = ast.parse(Path(script.name).read_bytes())
    except (OSError, SyntaxError, ValueError):  # the script's own run reports it
        return
    for name, is_default in _settings(tree):
        if not (is_default and environ.get(keras_backend.VARIABLE)):
            environ[keras_backend.VARIABLE] = name


def _settings(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield the backends that a file names, and whether an inherited one comes first."""
    for statement in tree.body:
        match statement:
            case ast.Assign(
                targets=[
                    ast.Subscript(
                        value=ast.Name("environ") | ast.Attribute(attr="environ"),
                        slice=ast.Constant(keras_backend.VARIABLE),
                    )
                ],
                value=ast.Constant(str(name)),
            ):
                yield name, False
            case ast.Expr(
                ast.Call(
                    func=ast.Attribute(ast.Name("environ") | ast.Attribute(attr="environ"), "setdefault"),
                    args=[ast.Constant(keras_backend.VARIABLE), ast.Constant(str(name))],
                )
            ):
                yield name, True

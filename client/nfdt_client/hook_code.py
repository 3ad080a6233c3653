"""Inspection of callbacks: which hooks are not Keras' own, and whether train-batch hooks read anything."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from nfdt.model.keras_internals import training as keras_training
from nfdt.model.program.own_modules import is_installed_file

HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF")
_MODEL = ("model", "_model")


def reads_batches(callback: Any) -> bool:
    """Whether a train-batch hook of the script's own code reads its arguments, or the model.

    Followed are methods and properties of the callback, functions that the code names, and the same hook of a base
    class. A hook without Python code counts as one that reads. Hooks of Keras and of installed packages do not:
    their loggers and progress bars show what is newest.
    """
    seen: set[int] = set()
    return any(_reads(callback, function, is_method, seen) for function, is_method in _hooks(callback))


def has_own_hook(callback: Any, hooks: Iterable[str]) -> bool:
    """Whether a callback has one of these hooks, and Keras did not write it."""
    methods = [getattr(callback, hook) for hook in hooks]
    return any(not _is_of_keras(method) and not keras_training.is_default_hook(method) for method in methods)


def _is_of_keras(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("keras.")


def _hooks(callback: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the hooks of the callback and of its bases, and whether their first argument is the callback."""
    for hook in HOOKS:
        own = vars(callback).get(hook)
        held = [(own, isinstance(own, types.MethodType))] if own is not None else []
        held += [(vars(kind)[hook], True) for kind in type(callback).__mro__ if hook in vars(kind)]
        for function, is_method in held:
            if not keras_training.is_default_hook(function) and not _is_of_a_package(function):
                yield function, is_method


def _is_of_a_package(function: Any) -> bool:
    code = _code(function)
    return _is_of_keras(function) or (code is not None and is_installed_file(code.co_filename))


def _code(function: Any) -> types.CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)


def _reads(callback: Any, function: Any, is_method: bool, seen: set[int]) -> bool:
    """Whether a hook reads its arguments, or leads to the model."""
    code = _code(function)
    if code is None:
        return True
    flags = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = code.co_varnames[int(is_method) : code.co_argcount + code.co_kwonlyargcount + flags]
    return _loads(code, set(names)) or _leads_to_model(callback, function, seen)


def _loads(code: types.CodeType, names: set[str]) -> bool:
    """Whether code loads one of its arguments, except to pass it to the same hook of a base class."""
    of_base = passes = False
    for instruction in dis.get_instructions(code):
        name, operation = instruction.argval, instruction.opname
        if name == "super":
            of_base = True
        elif of_base and name in HOOKS:
            passes = True
        elif operation.startswith(_LOADS):
            if not passes and names & set(name if isinstance(name, tuple) else (name,)):
                return True
        elif operation in ("POP_TOP", "RETURN_VALUE") or operation.startswith("STORE"):
            of_base = passes = False
    return any(_loads(inner, names) for inner in code.co_consts if isinstance(inner, types.CodeType))


def _leads_to_model(callback: Any, function: Any, seen: set[int]) -> bool:
    """Whether code names the model, an object of Keras that learns, or a function that does."""
    code = _code(function)
    if code is None or id(code) in seen or _is_of_a_package(function):
        return False
    seen.add(id(code))
    names = set(_names(code))
    if names & set(_MODEL):
        return True
    function = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    cells = zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False)
    scope = {**getattr(function, "__globals__", {}), **{name: cell for name, cell in cells}}
    values = [_held(scope[name]) for name in names if name in scope]
    values += [inspect.getattr_static(callback, name, None) for name in names]
    return any(_is_of_model(callback, value, seen) for value in values)


def _held(value: Any) -> Any:
    """Return what a cell of a closure holds, None while it is empty; other values unchanged."""
    if not isinstance(value, types.CellType):
        return value
    try:
        return value.cell_contents
    except ValueError:
        return None


def _is_of_model(callback: Any, value: Any, seen: set[int]) -> bool:
    value = value.fget if isinstance(value, property) else value
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return _leads_to_model(callback, value, seen)
    return isinstance(value, keras.Layer | keras.Optimizer | keras.Variable)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the attributes, globals and variables of outer functions that code names, that of inner functions too."""
    yield from (*code.co_names, *code.co_freevars)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)

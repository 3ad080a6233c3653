"""Decides whether the code of a callback can reach the model, so that training need not send it where it cannot.

The code is not run: what it names is looked up, and what that leads to. Everything that is not known to be harmless
counts as a way to the model.
"""

from __future__ import annotations

import dis
import functools
import io
import logging
import numbers
import pathlib
import sys
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))
_MOST = 2000  # objects that are looked at
_PLAIN = (
    type(None), bool, numbers.Number, str, bytes, range, slice, type(Ellipsis),
    np.ndarray, np.generic, np.random.Generator,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType,
    pathlib.PurePath, io.IOBase, logging.Logger, type(threading.Lock()), type(threading.RLock()), threading.Event,
)  # fmt: skip
_CONTAINERS = (list, tuple, set, frozenset, deque)
# They lead to objects that the code does not name.
_SEES_ALL = {
    "eval",
    "exec",
    "getattr",
    "vars",
    "globals",
    "locals",
    "dir",
    "gc",
    "__import__",
    "inspect",
    "ctypes",
    "__dict__",
    "_getframe",
}
_WAYS = {"model", "_model", "set_model", "optimizer"}
_HARMLESS_CHAINS = (("model", "stop_training"), ("model", "optimizer", "learning_rate"))
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER")
_NAMING = (
    *_ATTRIBUTES,
    "LOAD_GLOBAL",
    "LOAD_NAME",
    "STORE_GLOBAL",
    "STORE_NAME",
    "IMPORT_NAME",
    "LOAD_DEREF",
    "LOAD_CLASSDEREF",
)
_HARMLESS_MODULES = (sys.stdlib_module_names - {"__main__"}) | {
    "numpy",
    "pandas",
    "tqdm",
    "psutil",
    "rich",
    "matplotlib",
}


def reaches_model(callback: Any, hooks: Iterable[str] = (), *, rate_is_known: bool = False) -> bool:
    """Return whether a hook of a callback, or what its code leads to, may read or change a model or its optimizer.

    Args:
        callback: The callback.
        hooks: Names of the hooks; default: all.
        rate_is_known: Whether ``model.optimizer.learning_rate`` does not count, as ``model.stop_training``.
    """
    harmless = _HARMLESS_CHAINS if rate_is_known else _HARMLESS_CHAINS[:1]
    return CodeSearch(callback, harmless).finds(_functions(callback, hooks or _HOOKS))


def _functions(callback: Any, hooks: Iterable[str]) -> Iterator[Any]:
    """Yield the functions of the hooks, those that are set on the callback itself among them."""
    for name in hooks:
        if name in vars(callback):
            yield vars(callback)[name]
        for kind in type(callback).__mro__:
            if name in vars(kind) and not kind.__module__.startswith("keras."):
                yield vars(kind)[name]


class CodeSearch:
    """Search through what code names.

    Args:
        callback: The callback; its attributes count where code names them.
        harmless: Chains of attributes that do not count.
    """

    def __init__(self, callback: Any, harmless: Sequence[tuple[str, ...]] = ()) -> None:
        self._callback, self._harmless = callback, harmless
        self._seen: dict[int, Any] = {}  # keeps what is looked at alive, so that no id is used twice

    def finds(self, found: Iterable[Any]) -> bool:
        """Return whether one of these leads to a model."""
        return any(map(self._leads, found))

    def _leads(self, value: Any) -> bool:
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        if len(self._seen) > _MOST:
            return True
        if any(value is own for own in (self._callback, *type(self._callback).__mro__)):
            return False  # their attributes that code names are looked at
        if isinstance(value, dict):
            return self.finds([*value.keys(), *value.values()])
        if isinstance(value, _CONTAINERS):
            return self.finds(value)
        if isinstance(value, types.ModuleType):
            return value.__name__.partition(".")[0] not in _HARMLESS_MODULES
        if isinstance(value, functools.partial):
            return self.finds([value.func, *value.args, *value.keywords.values()])
        if isinstance(value, property):
            return self.finds(filter(None, [value.fget, value.fset]))
        if isinstance(value, staticmethod | classmethod):
            return self._leads(value.__func__)
        if isinstance(value, types.MethodType | types.BuiltinFunctionType):
            return self.finds([value.__self__, getattr(value, "__func__", None)])
        if isinstance(value, types.FunctionType):
            return self._function_leads(value)
        return self._object_leads(value)

    def _object_leads(self, value: Any) -> bool:
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__.partition(".")[0] in (*_HARMLESS_MODULES, "builtins"):
            # An object of a library may hold anything that it was given.
            return not isinstance(value, type) and self._state_leads(value)
        if issubclass(kind, keras.callbacks.Callback | keras.Layer | keras.Optimizer | keras.Variable):
            return True
        if not hasattr(kind, "__dict__") or kind.__module__.startswith(("keras", "tensorflow", "jax", "torch")):
            return True
        members = [member for cls in kind.__mro__ if cls is not object for member in vars(cls).values()]
        return self.finds(members) or (value is not kind and self._state_leads(value))

    def _state_leads(self, value: Any) -> bool:
        state = getattr(value, "__dict__", None)
        return state is None or self._leads(dict(state))

    def _passes_self(self, function: types.FunctionType) -> bool:
        """Return whether a method of the callback passes the callback to something else."""
        name = function.__code__.co_varnames[:1]
        kinds = type(self._callback).__mro__
        is_method = any(member is function for kind in kinds for member in vars(kind).values())
        return is_method and _passes_on(function.__code__, *name)

    def _names_of(self, code: types.CodeType) -> set[str]:
        """Return the attributes, globals and variables of outer functions that code names, without harmless chains.

        Those of functions within it count as well.
        """
        inner = [self._names_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
        found, steps = set(code.co_freevars), list(dis.get_instructions(code))
        attributes = [_attribute(step) for step in steps]
        while steps:
            length = next((len(c) for c in self._harmless if tuple(attributes[: len(c)]) == c), 0)
            if not length and isinstance(steps[0].argval, str) and steps[0].opname.startswith(_NAMING):
                found.add(steps[0].argval)
            if steps[0].opname == "IMPORT_NAME" and str(steps[0].argval).partition(".")[0] not in _HARMLESS_MODULES:
                found.add("__import__")
            del steps[: length or 1], attributes[: length or 1]
        return found.union(*inner)

    def _function_leads(self, function: types.FunctionType) -> bool:
        if _is_of(function, _HARMLESS_MODULES):
            return False
        names = self._names_of(function.__code__)
        if names & (_WAYS | _SEES_ALL) or self._passes_self(function):
            return True
        scope = {**function.__globals__, **_cells(function)}
        values = [scope[name] for name in names if name in scope]
        holders = [vars(self._callback), *map(vars, type(self._callback).__mro__)]
        values += [holder[name] for holder in holders for name in names if name in holder]
        return self.finds([*values, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])


def _attribute(step: dis.Instruction) -> str:
    """Return the name of the attribute that an instruction reads or sets; "" for other instructions."""
    return str(step.argval) if step.opname.startswith(_ATTRIBUTES) else ""


def _is_of(function: types.FunctionType, modules: Iterable[str]) -> bool:
    return str(function.__module__).partition(".")[0] in modules


def _cells(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # still empty
            found[name] = keras.Layer  # unknown
    return found


def _passes_on(code: types.CodeType, name: str) -> bool:
    """Return whether code, or a function in it, uses this variable in another way than for attributes."""
    if any(_passes_on(c, name) for c in code.co_consts if isinstance(c, types.CodeType) and name in c.co_freevars):
        return True
    steps = list(dis.get_instructions(code))
    for number, step in enumerate(steps):
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and name in names:
            # `self.count += 1` copies it; `super()` has it as its second argument.
            after = [other for other in steps[number + 1 : number + 3] if not other.opname.startswith(("COPY", "DUP"))]
            of_super = number > 0 and steps[number - 1].argval == "__class__"
            if names[-1] != name or not (of_super or (after and _attribute(after[0]))):
                return True
    return False

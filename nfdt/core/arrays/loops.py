"""Loops over arrays that Numba compiles to machine code: at their first call, then from a cache on disk.

Modules with such loops are imported where they are first needed, because importing Numba takes half a second.
Loops run without the interpreter lock, and read and write the arrays of their arguments only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

REORDERED = frozenset({"reassoc", "contract", "nsz"})


def compiled(function: Callable[..., Any]) -> Any:
    """Return ``function`` compiled, with the operations and rounding that its lines state.

    No multiplication and addition are contracted, so that two machines compute the same bits.
    """
    return _compiled(function, False)


def compiled_part(function: Callable[..., Any]) -> Any:
    """Return ``function`` compiled as with :func:`compiled`, for calls by compiled functions of the same file only.

    Python cannot call it: without this, compiling takes half the time.
    """
    only_inside = {"forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(nogil=True, error_model="numpy", **only_inside)(function)


def reordered(function: Callable[..., Any]) -> Any:
    """Return ``function`` compiled, whose sums may be taken in another order and contracted, which is faster."""
    return _compiled(function, set(REORDERED))


def _compiled(function: Callable[..., Any], fastmath: Any) -> Any:
    options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return numba.njit(**options)(function)

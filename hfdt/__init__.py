"""The Horovod framework: unmodified Keras 3 scripts on allreduce. Importing this package imports no TensorFlow.

``distribute``, ``session`` and ``submit`` are those of ``nfdt``, except that the default preset is allreduce.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nfdt_client.decorator import distribute, session, submit
    from nfdt_client.handle import JobHandle, attach

__all__ = ["JobHandle", "attach", "distribute", "session", "submit"]

DEFAULT_ALGORITHM = "allreduce"
_OURS = ("distribute", "session", "submit")


def __getattr__(name: str) -> Any:
    import functools
    import importlib

    if name in __all__:
        importlib.import_module("nfdt.core.host.startup").quiet_grpc()
    if name in _OURS:
        entrance = getattr(importlib.import_module("nfdt_client.decorator"), name)
        bound = functools.partial(entrance, default_algorithm=DEFAULT_ALGORITHM)
        return functools.update_wrapper(bound, entrance)
    if name in __all__:
        return getattr(importlib.import_module("nfdt_client.handle"), name)
    raise AttributeError(f"module 'hfdt' has no attribute {name!r}. Expected one of: {', '.join(__all__)}.")


def __dir__() -> list[str]:
    return sorted(__all__)

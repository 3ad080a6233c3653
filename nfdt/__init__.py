"""Train an unmodified Keras 3 script on a cluster; importing this package imports no TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nfdt_client.decorator import distribute, session, submit
    from nfdt_client.handle import JobHandle, attach
    from nfdt_client.local_cluster import LocalCluster
    from nfdt_client.table_files import load_tables, save_tables
    from nfdt_client.tables import Embedding

__version__ = "0.1.0"
__all__ = [
    "Embedding",
    "JobHandle",
    "LocalCluster",
    "attach",
    "distribute",
    "errors",
    "load_tables",
    "save_tables",
    "session",
    "submit",
]

_HOMES = {
    "distribute": "nfdt_client.decorator",
    "session": "nfdt_client.decorator",
    "submit": "nfdt_client.decorator",
    "attach": "nfdt_client.handle",
    "JobHandle": "nfdt_client.handle",
    "LocalCluster": "nfdt_client.local_cluster",
    "Embedding": "nfdt_client.tables",
    "load_tables": "nfdt_client.table_files",
    "save_tables": "nfdt_client.table_files",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "errors":
        return importlib.import_module("nfdt.core.errors")
    if name in _HOMES:
        importlib.import_module("nfdt.core.host.startup").quiet_grpc()
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'nfdt' has no attribute {name!r}. Expected one of: {', '.join(__all__)}.")


def __dir__() -> list[str]:
    return sorted(__all__)

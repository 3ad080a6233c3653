"""Checks for packages that servers and slots need, and clients that only submit jobs do not."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from nfdt.core.errors import NotInstalled

PAGE_PACKAGES = {"prometheus_client": "prometheus-client", "starlette": "starlette", "uvicorn": "uvicorn"}
SERVER_PACKAGES = {
    "cryptography": "cryptography",
    "grpc_health": "grpcio-health-checking",
    "numba": "numba",
    "psutil": "psutil",
}


def require_server_packages(what: str) -> None:
    """Check that the packages of a server are installed.

    Args:
        what: Part that needs them, for the message.

    Raises:
        NotInstalled: Some of them are missing.
    """
    remedy = "pip install '.[server]'. To train on a server elsewhere, name it: --server HOST:PORT"
    _require(what, "a server", SERVER_PACKAGES, remedy)


def require_page_packages(what: str) -> None:
    """Check that the packages of the page for browsers are installed; see :func:`require_server_packages`."""
    _require(what, "the page", PAGE_PACKAGES, "pip install '.[ui]'")


def require_board_packages(what: str) -> None:
    """Check that TensorBoard is installed; see :func:`require_server_packages`."""
    _require(what, "TensorBoard", {"tensorboard": "tensorboard"}, "pip install '.[tensorboard]'")


def _require(what: str, user: str, packages: Mapping[str, str], remedy: str) -> None:
    if missing := [name for module, name in packages.items() if find_spec(module) is None]:
        raise NotInstalled(
            f"{what} needs the packages of {user}. Expected: {', '.join(packages.values())}. Missing: "
            f"{', '.join(missing)}. Install them, in NFDT's checkout: {remedy}"
        )

"""Packages of a server and its slots, which a client that only submits jobs can do without."""

from __future__ import annotations

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
        what: What needs them, for the message.

    Raises:
        NotInstalled: Some of them are missing.
    """
    if missing := [name for module, name in SERVER_PACKAGES.items() if find_spec(module) is None]:
        raise NotInstalled(
            f"{what} needs the packages of a server. Expected: {', '.join(SERVER_PACKAGES.values())}. Missing: "
            f"{', '.join(missing)}. Install them, in NFDT's checkout: pip install '.[server]'. To train on a server "
            "elsewhere, name it: --server HOST:PORT"
        )


def require_page_packages(what: str) -> None:
    """Check that the packages of the page are installed.

    Args:
        what: What needs them, for the message.

    Raises:
        NotInstalled: Some of them are missing.
    """
    if missing := [name for module, name in PAGE_PACKAGES.items() if find_spec(module) is None]:
        raise NotInstalled(
            f"{what} needs the packages of the page. Expected: {', '.join(PAGE_PACKAGES.values())}. Missing: "
            f"{', '.join(missing)}. Install them, in NFDT's checkout: pip install '.[ui]'"
        )

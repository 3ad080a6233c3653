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
BACKEND_PACKAGES = {"tensorflow": "tensorflow-cpu", "jax": "jax", "torch": "torch"}


def install(extra: str) -> str:
    """Return the command that adds the packages of an extra, to a wheel and to a checkout alike."""
    return f"pip install 'nfdt[{extra}]'"


def require_server_packages(what: str, backend: str = "") -> None:
    """Check that the packages of a server are installed.

    Args:
        what: Part that needs them, for the message.
        backend: Backend of Keras that the workers of the server need as well; "": none of them is on this machine.

    Raises:
        NotInstalled: Some of them are missing; the message names all of them.
    """
    of_backend = {backend: BACKEND_PACKAGES[backend]} if backend in BACKEND_PACKAGES else {}
    extra = {"": "server", "tensorflow": "cpu"}.get(backend, backend) if of_backend else "server"
    gpus = ", with GPUs " + install("tensorflow") if extra == "cpu" else ""
    remedy = f"{install(extra)}{gpus}. To train on a server elsewhere, name it: --server HOST:PORT"
    _require(what, "a server", {**SERVER_PACKAGES, **of_backend}, remedy)


def require_page_packages(what: str) -> None:
    """Check that the packages of the page for browsers are installed; see :func:`require_server_packages`."""
    _require(what, "the page", PAGE_PACKAGES, install("ui"))


def require_board_packages(what: str) -> None:
    """Check that TensorBoard is installed; see :func:`require_server_packages`."""
    _require(what, "TensorBoard", {"tensorboard": "tensorboard"}, install("tensorboard"))


def _require(what: str, user: str, packages: Mapping[str, str], remedy: str) -> None:
    if missing := [name for module, name in packages.items() if find_spec(module) is None]:
        raise NotInstalled(
            f"{what} needs the packages of {user}. Expected: {', '.join(packages.values())}. Missing: "
            f"{', '.join(missing)}. Install them: {remedy}"
        )

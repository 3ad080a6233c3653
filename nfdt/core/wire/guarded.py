"""A gRPC server whose connections a doorkeeper watches while it serves."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import grpc

from nfdt.core.wire.doorkeeper import Doorkeeper


class GuardedServer(grpc.Server):
    """A ``grpc.Server`` that starts and stops the doorkeeper and passes it the ports."""

    def __init__(self, server: Any, doorkeeper: Doorkeeper) -> None:
        self._server, self._doorkeeper = server, doorkeeper

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """See ``grpc.Server``."""
        self._server.add_generic_rpc_handlers(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """See ``grpc.Server``."""
        self._server.add_registered_method_handlers(service_name, method_handlers)

    def add_insecure_port(self, address: str) -> int:
        """See ``grpc.Server``."""
        return self._added(self._server.add_insecure_port(address))

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """See ``grpc.Server``."""
        return self._added(self._server.add_secure_port(address, server_credentials))

    def _added(self, port: int) -> int:
        self._doorkeeper.ports.add(port)
        return port

    def start(self) -> None:
        """See ``grpc.Server``."""
        self._server.start()
        self._doorkeeper.start()

    def stop(self, grace: float | None = None) -> threading.Event:
        """See ``grpc.Server``."""
        self._doorkeeper.stop()
        stopped: threading.Event = self._server.stop(grace)
        return stopped

    def wait_for_termination(self, timeout: float | None = None) -> bool:
        """See ``grpc.Server``."""
        return bool(self._server.wait_for_termination(timeout))

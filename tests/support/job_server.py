"""Job server in this process, with fake slots and clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nfdt.jobserver.main import RunningServer, ServerOptions, serve
from tests.support.fakes import TOKEN, Client, FakeSlot


class LocalJobServer:
    """Job server in this process, with fake slots and clients."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.slots: list[FakeSlot] = []
        self.clients: list[Client] = []
        self.server: RunningServer | None = None

    def start(self, *, workers: int = 0, shards: int = 0, tokens: Sequence[str] = (TOKEN,), **options) -> Client:
        """Start the server and slots; returns a client."""
        self.server = serve(ServerOptions(self.state_dir, tokens, slot_command=(), **options))
        self.add("shard", shards)
        self.add("worker", workers)
        return self.client()

    def client(self, token: str = TOKEN) -> Client:
        client = Client(self.server.address, token)
        self.clients.append(client)
        return client

    def add(self, role: str, count: int = 1, **options) -> list[FakeSlot]:
        names = [f"{role}-slot-{len(self.slots) + i}" for i in range(count)]
        added = [FakeSlot(self.server.address, role, name, **options) for name in names]
        self.slots += added
        return added

    def stop(self) -> None:
        for slot in self.slots:
            slot.close()
        for client in self.clients:
            client.close()
        if self.server:
            self.server.stop()
        self.slots, self.clients, self.server = [], [], None

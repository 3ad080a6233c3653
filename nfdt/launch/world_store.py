"""Key-value stores in which the ranks of a ring find each other; each exists only while its ring forms.

Ranks reach a store through the job server's own service, so that its token and its TLS protect it.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field

from nfdt.core.errors import AuthenticationFailed, ProtocolError
from nfdt.core.wire.channel import same_token

WAIT_S = 1.0  # time for which a read waits for its key
MOST_KEY = 300  # characters
KEYS_PER_RANK = 16  # name and address in six communicators of Horovod, and four to spare
BYTES_PER_RANK = 512  # a rank stores its address for every other one
SPARE_BYTES = 4096


@dataclass
class WorldStore:
    """Store of one ring; any thread may call.

    Attributes:
        size: Number of ranks, which limits the number and the size of the values.
        secret: Secret of the ring.
    """

    size: int
    secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    _values: dict[str, bytes] = field(default_factory=dict, init=False, repr=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False, repr=False)
    _closed: bool = field(default=False, init=False)

    def put(self, key: str, value: bytes) -> None:
        """Store a value.

        Raises:
            ProtocolError: The value or its key is too large, or there are too many.
        """
        most = BYTES_PER_RANK * self.size + SPARE_BYTES
        if not 0 < len(key) <= MOST_KEY or len(value) > most:
            raise ProtocolError(
                f"Rendezvous: expected a key of at most {MOST_KEY} characters and a value of at most {most} bytes. "
                f"Received: {len(key)} characters, {len(value)} bytes."
            )
        with self._changed:
            if key not in self._values and len(self._values) >= KEYS_PER_RANK * self.size:
                raise ProtocolError(f"Rendezvous: expected at most {KEYS_PER_RANK * self.size} keys.")
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float = WAIT_S) -> bytes | None:
        """Return a value, after waiting for it; None if there is none in time, or the store is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or key in self._values, timeout_s)
            return self._values.get(key)

    def close(self) -> None:
        """Drop all values, and end the waiting of reads."""
        with self._changed:
            self._closed = True
            self._values.clear()
            self._changed.notify_all()


class WorldStores:
    """Stores of the rings that are forming, by the ring's name; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: dict[str, WorldStore] = {}

    def open(self, ring: str, size: int) -> WorldStore:
        """Return a new store for a ring."""
        with self._lock:
            store = self._stores[ring] = WorldStore(size)
            return store

    def close(self, ring: str) -> None:
        """Close the store of a ring, if it has one."""
        with self._lock:
            store = self._stores.pop(ring, None)
        if store is not None:
            store.close()

    def find(self, ring: str, secret: str) -> WorldStore:
        """Return the store of a ring.

        Raises:
            AuthenticationFailed: No ring of this name is forming, or it has another secret.
        """
        with self._lock:
            store = self._stores.get(ring)
        if store is None or not same_token(store.secret, secret):
            raise AuthenticationFailed(
                f"Rendezvous of {ring[:80]!r}: expected the name and the secret of a ring that is forming. "
                "Received: others, or the ring has formed."
            )
        return store

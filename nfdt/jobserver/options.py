"""Options of a job server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nfdt.core.jobs.admission import Limits
from nfdt.core.wire.channel import split_address
from nfdt.launch.horovod_command import RingShape
from nfdt.launch.machine import reachable_host


@dataclass(frozen=True)
class ServerOptions:
    """Options of a job server.

    Attributes:
        state_dir: Directory of database, artifacts and logs; created with mode 0700. One server at a time.
        tokens: Secrets of clients and slots; any of them is accepted.
        listen: ``host:port``; port 0 takes a free one.
        tls_cert: PEM certificate chain; it enables TLS.
        tls_key: PEM private key.
        client_ca: PEM certificates; clients must present one signed by them.
        insecure: Whether a non-loopback address without TLS is allowed.
        allow_code: Whether jobs with pickled code are accepted.
        embedded: Whether it serves one script: without checkpoints, and jobs end with their client.
        workers: Number of worker slots to start on this machine; 0: all are external.
        shards: Number of shard slots to start at once; more are started when a job needs them.
        rings: Horovod rings to start at once, for the first job that requests rings of the same shape.
        advertise: Host name at which workers reach this machine's shards; "": it is detected.
        limits: Limits for one client.
        attend_timeout_s: Seconds for which an interactive job's client may be gone.
        slot_command: Command that starts a slot; None: the default one; empty: no slots are started.
    """

    state_dir: Path
    tokens: Sequence[str] = field(repr=False)
    listen: str = "127.0.0.1:0"
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None
    insecure: bool = False
    allow_code: bool = False
    embedded: bool = False
    workers: int = 0
    shards: int = 1
    rings: Sequence[RingShape] = ()
    advertise: str = ""
    limits: Limits = Limits()
    attend_timeout_s: float = 60.0
    slot_command: Sequence[str] | None = None


def shard_host(options: ServerOptions) -> str:
    """Return the address on which this machine's shards listen, as it is sent to workers."""
    return options.advertise or reachable_host(split_address(options.listen)[0])

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
        state_dir: Database, artifacts, logs; made with mode 0700. One server at a time.
        tokens: Secrets of clients and slots; any of them is accepted.
        listen: ``host:port``; port 0 takes a free one.
        tls_cert: PEM certificate chain; TLS is used when it is given.
        tls_key: PEM private key.
        client_ca: PEM certificates; clients must show one signed by them.
        insecure: Allow a non-loopback address without TLS.
        allow_code: Take jobs that carry pickled code.
        embedded: Whether it serves one script: no checkpoints, jobs end with their client.
        workers: Worker slots to start on this machine; 0: all come from elsewhere.
        shards: Shard slots to start at once; more are started when a job wants them.
        rings: Horovod rings to start at once, warm for the first job that wants ones like them.
        advertise: Host name under which workers reach this machine's shards; "" finds one.
        limits: Limits for one client.
        attend_timeout_s: Seconds that an interactive job's client may be gone.
        slot_command: Command that starts a slot; None: the default one. An empty one starts none.
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
    """Address on which this machine's shards listen, and which workers get."""
    return options.advertise or reachable_host(split_address(options.listen)[0])

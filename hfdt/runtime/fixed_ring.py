"""One rank of a ring with a fixed set of ranks: rank 0 leads, the others follow."""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hfdt.keras.horovod_api import is_broken_world
from hfdt.runtime.artifacts import OpenArtifacts, share
from hfdt.runtime.communicator import Communicator
from hfdt.runtime.execution import Follower
from hfdt.runtime.leader import GroupLeader, Leader
from hfdt.runtime.slot_connection import LOOK_S, ROLES, FailureWatch, SlotConnection, failure_of, leave_failure
from nfdt.core.work.spans import SpanRing

logger = logging.getLogger(__name__)

LINGER_S = 10.0
BLAME_S = 3.0


def take_part(communicator: Communicator, options: argparse.Namespace) -> None:
    """Run as a rank until the end."""
    ring = str(options.ring).encode() if communicator.rank == 0 else None
    directory = Path(communicator.broadcast(ring).decode())
    if communicator.rank == 0:
        lead(communicator, options.server, directory, options.members)
    else:
        follow(communicator, directory, lingers=options.watch_stdin)


def lead(communicator: Communicator, server: str, directory: Path, members: Sequence[int] = ()) -> None:
    """Run as rank 0, of a ring or of the group with these members."""
    token = (directory / "token").read_text().strip()
    connection = SlotConnection(server, token, directory.name, roles_of(members))
    leader = make_leader(communicator, connection, partial(share, communicator), members)
    watch = FailureWatch(directory, connection)
    try:
        leader.run()
    except Exception as error:
        logger.exception("rank 0 failed")
        if is_broken_world(error):
            watch.reported.wait(BLAME_S)  # another rank has the reason; otherwise the launcher's log has it
        elif connection.job_id and not connection.stopped.is_set():
            leave_failure(directory, 0, error)
            connection.send("worker", failed=failure_of(connection.job_id, error, 0))
        connection.stopped.wait(BLAME_S)
        raise
    connection.close()


def roles_of(members: Sequence[int]) -> tuple[str, ...]:
    """Return the roles of the slots that rank 0 registers."""
    return (GroupLeader.role,) if members else ROLES


def make_leader(
    communicator: Communicator,
    connection: SlotConnection,
    artifacts: OpenArtifacts,
    members: Sequence[int],
    spans: SpanRing | None = None,
) -> Leader:
    """Return rank 0 of a ring, or of the group with these members; ``spans`` takes what it does."""
    if members:
        return GroupLeader(communicator, connection, artifacts, members, spans)
    return Leader(communicator, connection, artifacts, spans)


def follow(communicator: Communicator, directory: Path, *, lingers: bool) -> None:
    """Run as a rank other than 0.

    Args:
        communicator: All ranks.
        directory: Directory of the ring.
        lingers: Whether the end of this rank would end rank 0's script before it has read the failure.
    """
    try:
        Follower(communicator, partial(share, communicator)).run()
    except Exception as error:
        logger.exception("rank %d failed", communicator.rank)
        if not is_broken_world(error):
            leave_failure(directory, communicator.rank, error)
        if lingers:
            _await_removal(directory)
        raise


def _await_removal(directory: Path) -> None:
    """Wait until the server and its directory are gone, up to a deadline."""
    pause = threading.Event()
    for _ in range(round(LINGER_S / LOOK_S)):
        if not directory.exists() or pause.wait(LOOK_S):
            return

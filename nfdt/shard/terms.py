"""Requests that a job allows its workers; other requests from the network are errors or attacks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from nfdt.core.errors import ProtocolError
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.wire.job_token import TASK_TICKET_BYTES, is_task_ticket
from nfdt.core.wire.shards_pb2 import Frame

LEAST_PARTS, PARTS_PER_WORKER = 16, 4  # of a round whose batches are sized by speed, with bounds: it may have some more
ROUNDING = 1e-5
MOST_NAMED = 4  # tasks in a message
MOST_DENOMINATOR = 1e20  # gradients of usual length remain finite times this


@dataclass(frozen=True)
class Terms:
    """Limits for the frames of one job.

    Attributes:
        rounds: Whether every push is a part of a synchronous round; otherwise none is.
        most_parts: Largest number of parts of a round.
        most_rate: Largest learning-rate factor; 1: only a factor of 1.
        overlap: Number of requests that may be unanswered while another one is sent.
        key: Key of the tickets that pushes present; empty: nobody leases tasks, and pushes need no tickets.
    """

    rounds: bool
    most_parts: int
    most_rate: float
    overlap: int
    key: bytes = b""
    _newest: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, algorithm: AlgorithmSpec, workers: int, key: str = "") -> Terms:
        """Return the terms of a job with this number of workers; their relative batch sizes sum to that number."""
        grouped = algorithm.topology_facts.grouped or algorithm.plan == "topology"
        cut = algorithm.batch_facts.follows_speed
        most_parts = max(LEAST_PARTS, PARTS_PER_WORKER * workers) if cut else workers
        most_rate = workers * (1 + ROUNDING) if cut or grouped else 1.0
        return cls(algorithm.consistency_facts.synchronous, most_parts, most_rate, algorithm.overlap, key.encode())

    def check_order(self, worker: str, sequence: int, before: int | None) -> None:
        """Raise ProtocolError unless the request follows the one ``before`` it on its stream.

        A stream that replaces a broken one begins with the first unanswered request, or after it.
        """
        newest = self._newest.get(worker, 0)
        least, most = (1, newest + self.overlap + 2) if before is None else (before + 1, before + 1)
        if not least <= sequence <= most:
            raise ProtocolError(
                f"Request of worker {worker}: expected number {least if least == most else f'{least} to {most}'}, as "
                f"its requests are numbered in order. Received: {sequence}."
            )
        self._newest[worker] = max(newest, sequence)

    def check_push(self, worker: str, push: Frame, closed_round: int) -> None:
        """Raise ProtocolError unless the job allows the push; ``closed_round`` is the newest round that was applied."""
        if not self.rounds and (push.round or push.part or push.parts > 1):
            raise ProtocolError(
                f"Push from worker {worker}: expected an asynchronous one, as the job has no rounds. Received: part "
                f"{push.part} of {push.parts}, round {push.round}."
            )
        if self.rounds and not (0 < push.round <= closed_round + 1 and 0 < push.parts <= self.most_parts):
            raise ProtocolError(
                f"Push from worker {worker}: expected a part of round {closed_round + 1}, which has at most "
                f"{self.most_parts} parts. Received: part {push.part} of {push.parts}, round {push.round}."
            )
        if not (0.0 <= push.denominator <= MOST_DENOMINATOR or push.denominator == math.inf):
            raise ProtocolError(
                f"Push from worker {worker}: expected a denominator of at most {MOST_DENOMINATOR:g}, infinity for a "
                f"sum, or 0 for the number of samples. Received: {push.denominator}."
            )
        rate = push.rate or 1.0
        if not (rate == 1.0 or (math.isfinite(rate) and 0.0 < rate <= self.most_rate and self.most_rate > 1.0)):
            allowed = f"above 0, at most {self.most_rate:g}" if self.most_rate > 1.0 else "of 1"
            raise ProtocolError(
                f"Push from worker {worker}: expected a factor of the learning rate {allowed}. Received: {rate}."
            )
        if self.key:
            self._check_tickets(worker, push)

    def _check_tickets(self, worker: str, push: Frame) -> None:
        """Raise ProtocolError unless the tasks of the push were leased to the worker."""
        tickets, size, name = push.tickets, TASK_TICKET_BYTES, worker.encode()
        shown = [tickets[start : start + size] for start in range(0, len(tickets), size)]
        leased = len(shown) == len(push.tasks) and all(
            is_task_ticket(ticket, self.key, name, task, push.round, push.part)
            for task, ticket in zip(push.tasks, shown, strict=True)
        )
        if not push.tasks or not leased:
            tasks = ", ".join(map(str, push.tasks[:MOST_NAMED])) or "none"
            raise ProtocolError(
                f"Push from worker {worker}: expected the gradient of tasks that are leased to it, with their tickets. "
                f"Received: tasks {tasks} with {len(shown)} tickets, which are not those of its leases. Ask the job "
                "server for work, and push what it leases."
            )

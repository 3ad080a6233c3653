"""The rank that speaks for an elastic ring: what it had begun when ranks were lost, it goes on with."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from hfdt.runtime.attendance import Attendance
from hfdt.runtime.commands import Order
from hfdt.runtime.elastic.state import RingState
from hfdt.runtime.state_service import StateService
from nfdt.core.specs.horovod_options import NEWS
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.heartbeat import Heartbeat
from nfdt.core.work.messages import read_instruction, to_request

logger = logging.getLogger(__name__)


class ElasticLeader:
    """Between the job server and the ring; :meth:`run` is called again in every new world.

    Args:
        state: The ring's.
        attendance: At the job server.
        wait_s: The ranks hear from the leader at least that often.
    """

    def __init__(self, state: RingState, attendance: Attendance, wait_s: float) -> None:
        self._state, self._attendance, self._wait_s = state, attendance, wait_s
        self._dismissed = False
        self._begun: pb.ShardAssignment | None = None
        self._service: StateService | None = None
        self._worker = ""
        self._order: Order | None = None  # told, and not yet done by everybody
        self._answer: ins.Report | None = None

    def run(self) -> None:
        """Serve jobs until dismissed; raises when ranks come or go."""
        self._answer = self._pending()
        while not (self._dismissed and self._begun is None):
            self._go_on()
        self._tell(Order("quit"))

    def _pending(self) -> ins.Report | None:
        return self._state.job.pending if self._state.job is not None and self._order is None else None

    def _go_on(self) -> None:
        """Do the next thing that is due."""
        if self._order is not None:
            self._carry_out(self._order)
        elif self._begun is None:
            self._on_free(self._next_assignment())
        elif self._service is None:
            self._engage(self._begun)
        elif self._attendance.stopped.is_set():
            self._release()
        elif not self._worker:
            self._on_engaged(self._next_assignment())
        else:
            self._exchange(self._state.job)

    def _next_assignment(self) -> pb.Assignment | None:
        assignment = self._attendance.next_assignment(self._wait_s)
        if assignment is None:
            self._tell(Order("idle"))
        return assignment

    def _tell(self, order: Order) -> ins.Report:
        self._state.world.broadcast(order.encode())
        return self._state.obey(order)

    def _carry_out(self, order: Order) -> None:
        """Have an order done; it is told again where ranks come or go meanwhile."""
        self._order = order
        self._answer = self._tell(order)
        self._order = None
        if self._service is not None and self._state.job is not None:
            self._service.version = self._state.job.steps

    def _on_free(self, assignment: pb.Assignment | None) -> None:
        kind = assignment.WhichOneof("assignment") if assignment else None
        self._dismissed |= kind == "dismiss"
        if assignment is not None and kind == "shard":
            self._begun = assignment.shard
            self._attendance.begin(assignment.shard.job_id)

    def _engage(self, begun: pb.ShardAssignment) -> None:
        """Build the job, unless this ring has it, and serve its state."""
        values = {"id": begun.job_id, "spec": begun.spec_json, "artifacts": begun.artifact_dir}
        if not self._state.has(begun.job_id):
            self._carry_out(Order("job", values))
        assert self._state.job is not None
        self._answer = self._pending()
        self._service = StateService(self._state.job.step, begun.job_token)
        self._attendance.say("shard", ready=pb.SlotReady(job_id=begun.job_id, address=self._service.address))

    def _on_engaged(self, assignment: pb.Assignment | None) -> None:
        kind = assignment.WhichOneof("assignment") if assignment else None
        self._dismissed |= kind == "dismiss"
        if assignment is not None and kind == "worker" and assignment.worker.job_id == self._attendance.job_id:
            self._worker = assignment.worker.worker
            self._beat()
            self._attendance.say("worker", ready=pb.SlotReady(job_id=self._attendance.job_id))

    def _beat(self) -> None:
        """The server hears from this worker as its job advances."""
        job, busy = self._state.job, pb.NextRequest(job_id=self._attendance.job_id, worker=self._worker, busy=True)
        assert job is not None
        job.advanced = Heartbeat(lambda: self._attendance.ask(busy), job.spec.heartbeat_s)

    def _exchange(self, job: Any) -> None:
        request = to_request(self._answer or ins.Report())
        request.job_id, request.worker, request.wait_s = self._attendance.job_id, self._worker, self._wait_s
        request.statistics_json = self._statistics(job)
        reply = self._attendance.ask(request)
        self._answer = None
        instruction = read_instruction(reply)
        if isinstance(instruction, ins.Leave):
            self._attendance.stopped.wait(self._wait_s)
            self._tell(Order("idle"))
        elif isinstance(instruction, ins.Wait):
            self._tell(Order("idle"))
        elif isinstance(instruction, ins.Summarise):
            self._answer = job.summarise(instruction)
        else:
            assert self._service is not None
            rate, state = self._service.take_changes()
            values: dict[str, Any] = {} if rate is None else {"learning_rate": rate}
            self._carry_out(Order("do", values, reply.SerializeToString(), state))
            self._tell(Order("idle"))

    def _release(self) -> None:
        if self._service is not None:
            self._service.stop()
        job_id = self._attendance.job_id
        self._carry_out(Order("release"))
        self._begun, self._service, self._worker, self._answer = None, None, "", None
        for role in ("worker", "shard"):
            self._attendance.say(role, finished=pb.SlotFinished(job_id=job_id))

    def _statistics(self, job: Any) -> str:
        state = self._state
        return json.dumps(
            {
                "samples": job.samples,
                "steps": job.steps,
                "seconds": round(job.compute_s, 6),
                "compute_s": round(job.compute_s, 6),
                "ranks": state.world.size,
                "resets": state.resets,
                "redone_steps": state.redone,
                "codec": job.spec.algorithm.codec,
            }
        )

    def tell_news(self) -> None:
        """Write down, for the job's events, who is there now."""
        state = self._state
        if state.resets:
            done = f"; {state.redone} steps in all were done again" if state.redone else ""
            logger.warning("%sranks came or went: %d are there now%s", NEWS, state.world.size, done)
        else:
            logger.info("%d ranks, process %d leads", state.world.size, os.getpid())

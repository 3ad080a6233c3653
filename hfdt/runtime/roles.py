"""What the ranks of a ring do once their world is up: rank 0 leads, the others follow.

Rank 0 attends the job server, as the ring's worker and as its shard, and passes every instruction on; all ranks carry
it out together. The other ranks speak to nobody but their world.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hfdt.keras.horovod_api import is_broken_world
from hfdt.runtime.artifacts import share
from hfdt.runtime.attendance import Attendance, failure_of
from hfdt.runtime.commands import Order
from hfdt.runtime.communicator import World
from hfdt.runtime.failures import LOOK_S, FailureWatch, leave_failure
from hfdt.runtime.job import RingJob
from hfdt.runtime.state_service import StateService
from nfdt.core.program.state import load_state
from nfdt.core.specs.job import JobSpec, parse_job
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.heartbeat import Heartbeat
from nfdt.core.work.messages import read_instruction, to_request

logger = logging.getLogger(__name__)

WAIT_S = 10.0  # the ranks hear from rank 0 at least that often
LINGER_S = 10.0
BLAME_S = 3.0


class Follower:
    """A rank other than 0: does what it is told until it is told to quit."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._job: RingJob | None = None

    def run(self) -> None:
        """Follow orders."""
        while (order := Order.decode(self._world.broadcast())).kind != "quit":
            if order.kind == "job":
                self._job = build(self._world, order)
            elif order.kind == "release":
                self._job = None
            elif order.kind == "do" and self._job is not None:
                obey(self._job, order, loads_state=True)


def build(world: World, order: Order, connect: Any = None) -> RingJob:
    """The job of an order, on this rank; collective. ``connect``: rank 0 of a group reaches the shards by it."""
    spec = parse_job(order.values["spec"])
    artifacts = share(world, order.values["artifacts"], artifact_names(spec))
    if members := order.values.get("members"):
        from hfdt.runtime.group_job import GroupJob

        job = GroupJob(spec, world, artifacts, members, connect)
        job.measure()
        return job
    return RingJob(spec, world, artifacts)


def artifact_names(spec: JobSpec) -> set[str]:
    """Every artifact of a job."""
    validation = spec.validation.arrays if spec.validation else ()
    return {spec.program, *spec.artifacts, *spec.train.arrays, *validation}


def obey(job: RingJob, order: Order, *, loads_state: bool) -> ins.Report:
    """Take changes of learning rate and state over, then carry the instruction out; collective."""
    if order.state and loads_state:
        job.step.load(load_state(order.state))
    if (rate := order.values.get("learning_rate")) is not None:
        job.step.set_learning_rate(rate)
    return job.execute(read_instruction(pb.NextReply.FromString(order.reply)))


class Leader:
    """Rank 0: between the job server and the world."""

    role = "shard"  # the assignment that a job begins with

    def __init__(self, world: World, attendance: Attendance) -> None:
        self._world, self._attendance = world, attendance
        self._wait_s = min(WAIT_S, stall_warning_s(os.environ) / 2)
        self._dismissed = False

    def run(self) -> None:
        """Serve jobs until dismissed."""
        while not self._dismissed:
            assignment = self._next_assignment()
            kind = assignment.WhichOneof("assignment")
            self._dismissed |= kind == "dismiss"
            if kind == self.role:
                self._serve(getattr(assignment, self.role))
        self._tell(Order("quit"))

    def _next_assignment(self) -> pb.Assignment:
        while (assignment := self._attendance.next_assignment(self._wait_s)) is None:
            self._tell(Order("idle"))
        return assignment

    def _tell(self, order: Order) -> Order:
        self._world.broadcast(order.encode())
        return order

    def _serve(self, assignment: Any) -> None:
        job_id = assignment.job_id
        self._attendance.begin(job_id)
        values = {"spec": assignment.spec_json, "artifacts": assignment.artifact_dir}
        job = build(self._world, self._tell(Order("job", values)))
        service = StateService(job.step, assignment.job_token)
        try:
            self._attendance.say("shard", ready=pb.SlotReady(job_id=job_id, address=service.address))
            name = self._await_worker(job_id)
            if name is not None:
                self._attendance.say("worker", ready=pb.SlotReady(job_id=job_id))
                self._work(job, job_id, name, service)
                # The coordinator reads the state after the last step: the job is over when it says so.
                while not self._attendance.stopped.wait(self._wait_s):
                    self._tell(Order("idle"))
        finally:
            service.stop()
        self._tell(Order("release"))
        for role in ("worker", "shard"):
            self._attendance.say(role, finished=pb.SlotFinished(job_id=job_id))

    def _await_worker(self, job_id: str) -> str | None:
        """The ring's name as a worker; None when the job is over before it has one."""
        while True:
            assignment = self._next_assignment()
            kind = assignment.WhichOneof("assignment")
            if kind == "worker" and assignment.worker.job_id == job_id:
                return assignment.worker.worker
            self._dismissed |= kind == "dismiss"
            if self._attendance.stopped.is_set():
                return None

    def _work(self, job: Any, job_id: str, name: str, service: StateService | None = None) -> None:
        report, busy = ins.Report(), pb.NextRequest(job_id=job_id, worker=name, busy=True)
        job.advanced = Heartbeat(lambda: self._attendance.ask(busy), job.spec.heartbeat_s)
        while not self._attendance.stopped.is_set():
            request = to_request(report)
            request.job_id, request.worker, request.wait_s = job_id, name, self._wait_s
            request.statistics_json = self._statistics(job)
            reply = self._attendance.ask(request)
            instruction = read_instruction(reply)
            if isinstance(instruction, ins.Leave):
                return
            if isinstance(instruction, ins.Wait):
                self._tell(Order("idle"))
                report = ins.Report()
            elif isinstance(instruction, ins.Summarise):
                report = job.summarise(instruction)
            else:
                report = self._together(job, reply, service)

    def _together(self, job: Any, reply: pb.NextReply, service: StateService | None) -> ins.Report:
        assert service is not None
        rate, state = service.take_changes()
        values: dict[str, Any] = {} if rate is None else {"learning_rate": rate}
        order = self._tell(Order("do", values, reply.SerializeToString(), state))
        report = obey(job, order, loads_state=False)
        service.version = job.steps
        return report

    def _statistics(self, job: Any) -> str:
        return json.dumps(
            {
                "samples": job.samples,
                "steps": job.steps,
                "seconds": round(job.compute_s, 6),
                "compute_s": round(job.compute_s, 6),
                "ranks": self._world.size,
                "codec": job.spec.algorithm.codec,
            }
        )


def stall_warning_s(environment: Mapping[str, str]) -> float:
    """After how long Horovod warns of ranks that keep others waiting."""
    text = environment.get("HOROVOD_STALL_CHECK_TIME_SECONDS", "")
    return float(text) if text.isdigit() and int(text) else 60.0


def lead(world: World, server: str, directory: Path, members: Sequence[int] = (), ca_file: str | None = None) -> None:
    """Be rank 0, of a ring or of the group with these members."""
    token = (directory / "token").read_text().strip()
    if members:
        from hfdt.runtime.group_job import GroupLeader

        attendance = Attendance(server, token, directory.name, roles=(GroupLeader.role,))
        leader: Leader = GroupLeader(world, attendance, members, ca_file)
    else:
        attendance = Attendance(server, token, directory.name)
        leader = Leader(world, attendance)
    watch = FailureWatch(directory, attendance)
    try:
        leader.run()
    except Exception as error:
        logger.exception("rank 0 failed")
        if is_broken_world(error):
            watch.told.wait(BLAME_S)  # another rank knows why; where none does, the launcher's log will
        elif attendance.job_id and not attendance.stopped.is_set():
            leave_failure(directory, 0, error)
            attendance.say("worker", failed=failure_of(attendance.job_id, error, 0))
        attendance.stopped.wait(BLAME_S)
        raise
    attendance.close()


def follow(world: World, directory: Path, *, lingers: bool) -> None:
    """Be another rank; ``lingers``: its end would end rank 0's script, so what went wrong is told first."""
    try:
        Follower(world).run()
    except Exception as error:
        logger.exception("rank %d failed", world.rank)
        if not is_broken_world(error):
            leave_failure(directory, world.rank, error)
        if lingers:
            _await_removal(directory)
        raise


def _await_removal(directory: Path) -> None:
    """Wait until the server is gone with its directory, up to a deadline."""
    pause = threading.Event()
    for _ in range(round(LINGER_S / LOOK_S)):
        if not directory.exists() or pause.wait(LOOK_S):
            return


def prepare(world: World, neighbours: int = 0) -> None:
    """Give this rank its share of the machine, which ``neighbours`` of other worlds use too: cores, and one GPU."""
    import tensorflow as tf

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // (world.local_size + neighbours))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    # Operations of Horovod wait for other ranks: without a second thread nothing else would run meanwhile.
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[world.local_rank % len(gpus)], "GPU")


def take_part(world: World, options: argparse.Namespace) -> None:
    """Be a rank of a world that stays as it is."""
    directory = Path(world.broadcast(str(options.ring).encode() if world.rank == 0 else None).decode())
    if world.rank == 0:
        lead(world, options.server, directory, options.members, options.ca_file)
    else:
        follow(world, directory, lingers=options.watch_stdin)

"""Real slots: their shards are restored elsewhere, and their processes are asked to end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import threading

import numpy as np
import pytest

from nfdt.core.errors import NfdtError
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.job_token import worker_token
from nfdt.launch.fork_client import ForkServerClient
from nfdt.model.program.state import dump_state, load_state
from nfdt.shard.servicer import start_shard
from nfdt.transport.stream import StreamClient
from tests.support.scripted_worker import Job, work
from tests.support.slot_server import DEADLINE_S, SlotServer


def configured(module, name, **config):
    return {"module": module, "class_name": name, "config": config, "registered_name": None}


FROM_FILE = {"filepath": "/etc/hostname", "call_endpoint": "serve"}
HOSTILE = {
    "a Lambda as optimizer": {"optimizer": configured("keras.layers", "Lambda", function="x")},
    "a SavedModel as optimizer": {"optimizer": configured("keras.layers", "TFSMLayer", **FROM_FILE)},
    "a layer as optimizer": {"optimizer": configured("keras.layers", "Dense", units=1)},
    "a file of words": {"optimizer": configured("keras.layers", "TextVectorization", vocabulary="/etc/hostname")},
    "a layer as schedule": {
        "optimizer": configured("keras.optimizers", "SGD", learning_rate=configured("keras.layers", "Dense", units=1))
    },
    "a layer as constraint": {"constraints": [configured("keras.layers", "Activation", activation="tanh")]},
    "code as attribute": {"optimizer_attributes": {"x": {"class_name": "__lambda__", "config": {"value": "AAAA"}}}},
}
ONES = np.ones((4, 1), np.float32)
JOB = "job-1"
WAIT = pb.NextReply(wait=pb.Wait())


@pytest.fixture(scope="module")
def job():
    return Job(ONES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def fork_server(folder):
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    started = ForkServerClient.start(environment, folder / "fork-server.log")
    yield started
    started.stop()


@pytest.fixture
def start(job, fork_server, folder):
    """Start a slot: ``start(role, *options)`` returns its server and its process."""
    with contextlib.ExitStack() as stack:

        def start(role, *options):
            server = SlotServer(job.blobs)
            stack.callback(server.stop)
            process = server.start(fork_server, folder / "slots.log", role, *options)
            stack.callback(process.wait, DEADLINE_S)
            stack.callback(process.stdin.close)
            return server, process

        yield start


def shard_assignment(job, key, **fields):
    spec = job.spec.model_dump_json()
    return pb.ShardAssignment(job_id=JOB, spec_json=spec, shards=1, job_token=key, **fields)


def client_of(job, address, key):
    return StreamClient([address], job.manifest.layout, "w", worker_token(key, "w"), timeout_s=DEADLINE_S)


def weights_at(job, address, key):
    client = client_of(job, address, key)
    try:
        return np.array(client.pull().weights)
    finally:
        client.close()


@pytest.mark.parametrize("what", HOSTILE)
def test_a_shard_gives_keras_only_what_a_job_without_code_may_use(job, start, what):
    program = job.manifest.replaced(**HOSTILE[what]).to_bytes()
    name = hashlib.sha256(program).hexdigest()
    job.blobs[name] = program
    server, _ = start("shard")
    spec = job.spec.model_copy(update={"program": name}).model_dump_json()
    server.assign(shard=pb.ShardAssignment(job_id=JOB, spec_json=spec, shards=1, job_token="key"))
    failed = server.message().failed
    assert failed.exception_type == "PolicyRefused", failed
    assert re.search("not on the list|may not have|not a file", failed.message)


def test_a_shard_s_newer_assignment_of_the_job_supersedes_the_one_before(job, start):
    state = load_state(job.blobs[job.manifest.state])
    later = dump_state(state.weights + 1, state.optimizer, state.untrained)
    name = hashlib.sha256(later).hexdigest()
    job.blobs[name] = later
    server, _ = start("shard")
    server.assign(shard=shard_assignment(job, "first"))
    first = server.message().ready
    assert np.array_equal(weights_at(job, first.address, "first"), state.weights)

    server.assign(shard=shard_assignment(job, "second", state=name))
    second = server.message().ready  # and no message about the end of the first
    assert (first.job_id, second.job_id) == (JOB, JOB)
    assert np.array_equal(weights_at(job, second.address, "second"), state.weights + 1)
    with pytest.raises(NfdtError):
        weights_at(job, first.address, "first")

    server.assign(shard=shard_assignment(job, "third", state=name))
    server.assign(shard=shard_assignment(job, "fourth"))  # while the third one may be starting
    server.assign(release=pb.Release(job_id=JOB))
    ends = []
    while not ends:
        message = server.message()
        kind = message.WhichOneof("message")
        assert kind in ("ready", "finished"), message
        ends += [message.finished.job_id] if kind == "finished" else []
    assert ends == [JOB]

    server.assign(shard=shard_assignment(job, "fifth"))
    assert np.array_equal(weights_at(job, server.message().ready.address, "fifth"), state.weights)


def test_a_worker_moves_to_the_shards_that_its_slot_is_sent(job, start):
    state = load_state(job.blobs[job.manifest.state])

    def start_it(key):
        return start_shard(job.manifest, state, job.spec.algorithm, 0, 1, workers=1, token=key, leased=False)

    shards = [start_it("first"), start_it("second")]
    assignment = pb.WorkerAssignment(
        job_id=JOB,
        spec_json=job.spec.model_dump_json(),
        worker="worker-0",
        shards=[shards[0].address],
        job_token="of-the-calls",
        shard_token=worker_token("first", "worker-0"),
    )
    moved = pb.MoveShards(
        job_id=JOB,
        incarnation=1,
        shards=[shards[1].address],
        shard_token=worker_token("second", "worker-0"),
    )
    server, _ = start("worker")
    server.assign(worker=assignment)
    assert server.message().ready.job_id == JOB
    first = server.request()
    assert (first.incarnation, first.job_token) == (0, "of-the-calls")
    server.reply(job.begin())
    server.request()
    server.reply(work(0))
    assert [done.task for done in server.request().finished] == [0]

    shards[0].stop(0)
    server.reply(work(1))  # its push waits for the shard
    server.assign(move_shards=pb.MoveShards(job_id="another", incarnation=9))
    server.assign(move_shards=moved)
    report = server.request()
    assert (report.incarnation, list(report.finished)) == (1, [])
    server.reply(work(0))
    done = server.request().finished
    assert [one.task for one in done] == [0]
    assert shards[1].store.version == 1
    server.reply(pb.NextReply(leave=pb.Leave(reason="done")))
    assert server.message().finished.job_id == JOB
    shards[1].stop(0)


def ends_in_order(process, server, *expected):
    """Check the remaining messages of a slot and its exit code."""
    kinds = []
    while (message := server.message()) is not None:
        kinds.append(message.WhichOneof("message"))
    assert kinds == list(expected)
    assert process.wait(DEADLINE_S) == 0


def test_a_free_slot_that_is_terminated_with_its_fork_server_leaves(fork_server, start):
    server, process = start("shard", "--grace", "1000")
    server.wait_for_slot()
    os.kill(fork_server.pid, signal.SIGTERM)
    process.terminate()
    ends_in_order(process, server, "draining", "leaving")


def test_a_worker_that_is_terminated_finishes_its_step_reports_it_and_leaves(job, start):
    shard = start_shard(
        job.manifest,
        load_state(job.blobs[job.manifest.state]),
        job.spec.algorithm,
        0,
        1,
        workers=1,
        token="key",
        leased=False,
    )
    pushing, answered, push = threading.Event(), threading.Event(), shard.store.push

    def push_slowly(*arguments, **options):
        pushing.set()
        assert answered.wait(DEADLINE_S)
        return push(*arguments, **options)

    shard.store.push = push_slowly
    server, process = start("worker", "--grace", "1000")
    server.assign(
        worker=pb.WorkerAssignment(
            job_id=JOB,
            spec_json=job.spec.model_dump_json(),
            worker="worker-0",
            shards=[shard.address],
            job_token=worker_token("key", "worker-0"),
            shard_token=worker_token("key", "worker-0"),
        )
    )
    assert server.message().HasField("ready")
    server.request()
    server.reply(job.begin())
    server.request()
    server.reply(pb.NextReply(work=pb.Work(tasks=[pb.Task(task=i, stop=1, parts=1) for i in range(3)])))
    assert pushing.wait(DEADLINE_S)
    process.terminate()
    assert server.message().draining.grace_s == 1000.0
    answered.set()
    report = server.request()
    assert [done.task for done in report.finished] == [0]
    assert not report.in_flight
    server.reply(work(1))
    ends_in_order(process, server, "finished", "leaving")
    assert shard.store.version == 1
    shard.stop(0)


def test_a_shard_that_its_launcher_ends_serves_until_it_is_released(job, start):
    server, process = start("shard", "--grace", "1000")
    server.assign(shard=shard_assignment(job, "key"))
    address = server.message().ready.address
    process.stdin.write(b"\n")
    assert server.message().HasField("draining")
    process.terminate()  # as a scheduler does, which signals the launcher and the slot
    weights_at(job, address, "key")
    server.assign(release=pb.Release(job_id=JOB))
    ends_in_order(process, server, "finished", "leaving")


def test_the_end_of_the_grace_ends_a_slot(job, start):
    server, process = start("shard", "--grace", "0.1")
    server.assign(shard=shard_assignment(job, "key"))
    assert server.message().HasField("ready")
    process.terminate()
    assert process.wait(DEADLINE_S) == 143


def test_a_second_sigterm_ends_a_slot_at_once(job, start):
    server, process = start("shard", "--grace", "1000")
    server.assign(shard=shard_assignment(job, "key"))
    assert server.message().HasField("ready")
    process.terminate()
    assert server.message().HasField("draining")
    process.terminate()
    assert process.wait(DEADLINE_S) == 143


@pytest.mark.parametrize("code", [{}, {"code_user": 3}], ids=["no code", "code"])
def test_a_slot_that_ran_code_ends_when_its_server_has_restarted(start, code):
    server, process = start("worker")
    server.wait_for_slot()
    server.assign(worker=pb.WorkerAssignment(job_id=JOB, spec_json="no specification"), **code)
    assert server.message().HasField("failed")
    server.assign(welcome=pb.Welcome())  # of a server that does not know whose code it was
    if code:
        assert server.message().HasField("draining")
        assert process.wait(DEADLINE_S) == 0
    else:
        server.assign(worker=pb.WorkerAssignment(job_id=JOB, spec_json="no specification"))
        assert server.message().HasField("failed")

import asyncio
import logging
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nfdt.core.errors import (
    AuthenticationFailed,
    NfdtError,
    PolicyRefused,
    ProtocolError,
    Refused,
    ServerUnreachable,
    UsageError,
    VersionMismatch,
)
from nfdt.core.wire import jobs_pb2, jobs_pb2_grpc
from nfdt.core.wire.channel import is_loopback, make_server, open_channel, same_token, split_address, token_of
from nfdt.core.wire.loop_server import GRPCIO_LOG, LoopContext, rpc_loop
from nfdt.core.wire.status import answering, translated

DEADLINE_S = 120.0


class Answers(jobs_pb2_grpc.JobsServicer):
    """Service that raises the error that the test selects by the job's name."""

    raises: Exception | None = None

    @answering
    def Show(self, request, context):
        if self.raises:
            raise self.raises
        return jobs_pb2.JobDescription(name=token_of(context.invocation_metadata()))

    @answering
    def Watch(self, request, context):
        yield jobs_pb2.JobEvent(cursor=1)
        if self.raises:
            raise self.raises

    @answering
    def Upload(self, request_iterator, context):
        return jobs_pb2.UploadReceipt(total_bytes=sum(len(chunk.data) for chunk in request_iterator))


@pytest.fixture
def servicer() -> Answers:
    return Answers()


every_server = pytest.mark.parametrize("most_calls", [None, 64], ids=["threads", "loop"])


@pytest.fixture(params=[None, 64], ids=["threads", "loop"])
def address(request, servicer: Answers) -> Iterator[str]:
    """Provide the address of a server whose calls have a thread each, and of one on an event loop."""
    server, bound = make_server(
        "127.0.0.1:0", authenticate=lambda method, token: same_token("secret", token), most_calls=request.param
    )
    jobs_pb2_grpc.add_JobsServicer_to_server(servicer, server)
    server.start()
    yield bound
    server.stop(None).wait()


def call(address: str, token: str = "secret", **kwargs) -> jobs_pb2.JobDescription:
    with open_channel(address, token, **kwargs) as channel, translated(address):
        return jobs_pb2_grpc.JobsStub(channel).Show(jobs_pb2.JobRef(job_id="x"), timeout=10)


def test_a_process_that_has_run_a_loop_of_its_own_may_have_servers():
    program = """
import asyncio
from nfdt.core.wire.channel import make_server

asyncio.run(asyncio.sleep(0))  # leaves this thread without a loop
server, address = make_server("127.0.0.1:0", authenticate=lambda method, token: True, most_calls=64)
server.start()
server.stop(None).wait()
print("served", address)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.startswith("served 127.0.0.1:"), done.stderr


def test_the_token_reaches_the_server(address):
    assert call(address).name == "secret"


@pytest.mark.parametrize("token", ["wrong", ""])
def test_a_wrong_or_missing_token_is_refused(address, token):
    with pytest.raises(AuthenticationFailed, match="token"):
        call(address, token)


def test_a_stream_without_a_valid_token_is_refused(address):
    with open_channel(address, "wrong") as channel, pytest.raises(AuthenticationFailed), translated(address):
        jobs_pb2_grpc.JobsStub(channel).Upload(iter([jobs_pb2.Chunk(data=b"x")]), timeout=10)


def test_the_traceback_of_a_failed_call_shows_nothing_of_grpc():
    with pytest.raises(ServerUnreachable) as caught:
        call("127.0.0.1:1")
    shown = "".join(traceback.format_exception(caught.value))
    assert "No answer from 127.0.0.1:1" in shown
    assert "RPC that terminated" not in shown


class LeavingUploads(Answers):
    """Service that reports the end of an upload."""

    def __init__(self) -> None:
        self.begun, self.left = threading.Event(), threading.Event()

    def Upload(self, request_iterator, context):
        try:
            return super().Upload(self._noted(request_iterator), context)
        finally:
            self.left.set()

    def _noted(self, chunks):
        for chunk in chunks:
            self.begun.set()
            yield chunk


@every_server
def test_a_client_that_leaves_during_a_call_is_no_failure_of_the_server(most_calls, caplog):
    servicer = LeavingUploads()
    server, address = make_server("127.0.0.1:0", authenticate=lambda method, token: True, most_calls=most_calls)
    jobs_pb2_grpc.add_JobsServicer_to_server(servicer, server)
    server.start()
    chunks: queue.SimpleQueue[jobs_pb2.Chunk | None] = queue.SimpleQueue()
    chunks.put(jobs_pb2.Chunk(data=b"x"))
    with open_channel(address, "") as channel:
        upload = jobs_pb2_grpc.JobsStub(channel).Upload.future(iter(chunks.get, None))
        assert servicer.begun.wait(DEADLINE_S)
        upload.cancel()
        assert servicer.left.wait(DEADLINE_S)
    chunks.put(None)
    server.stop(None).wait()
    assert "failed" not in caplog.text


def test_health_needs_no_token(address):
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    "error",
    [UsageError("a"), PolicyRefused("b"), VersionMismatch("c ünïcode"), ProtocolError("d"), NfdtError("e")],
    ids=lambda e: type(e).__name__,
)
def test_an_error_arrives_as_the_class_it_was(address, servicer, error):
    servicer.raises = error
    with pytest.raises(NfdtError) as caught:
        call(address)
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)


def test_an_error_in_the_middle_of_a_stream_arrives_too(address, servicer):
    servicer.raises = PolicyRefused("no")
    with open_channel(address, "secret") as channel:
        events = jobs_pb2_grpc.JobsStub(channel).Watch(jobs_pb2.WatchRequest(), timeout=10)
        assert next(events).cursor == 1
        with pytest.raises(PolicyRefused, match="no"), translated(address):
            next(events)


def test_an_unexpected_exception_is_named(address, servicer):
    servicer.raises = KeyError("surprise")
    with pytest.raises(ProtocolError, match="Show failed on the server: KeyError: 'surprise'"):
        call(address)


def test_a_long_message_is_cut_not_lost(address, servicer):
    servicer.raises = UsageError("x" * 100_000)
    with pytest.raises(UsageError, match="x{4000}"):
        call(address)


@every_server
def test_no_listening_server_is_server_unreachable(most_calls):
    server, bound = make_server("127.0.0.1:0", authenticate=lambda method, token: True, most_calls=most_calls)
    server.start()
    server.stop(None).wait()
    with pytest.raises(ServerUnreachable, match=bound):
        call(bound)


class Stops(jobs_pb2_grpc.JobsServicer):
    """Service whose calls end as those of a server that stops."""

    def Show(self, request, context):
        context.abort(grpc.StatusCode.CANCELLED, "Cancelling all calls")


def test_a_call_that_a_stopping_server_cancels_cancels_no_job():
    """Regression: a job ended as cancelled when one of its shards was started again during a call."""
    server, bound = make_server("127.0.0.1:0", authenticate=lambda method, token: True)
    jobs_pb2_grpc.add_JobsServicer_to_server(Stops(), server)
    server.start()
    with pytest.raises(ServerUnreachable, match=f"{bound} was closed: Cancelling all calls"):
        call(bound)
    server.stop(None)


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_call_after_the_close_fails(address, made):
    """Regression: such a call read freed memory, which ended the process."""
    channel = open_channel(address, "secret")
    stub = jobs_pb2_grpc.JobsStub(channel)
    channel.close()
    if made == "after":
        stub = jobs_pb2_grpc.JobsStub(channel)
    for _ in range(100):
        with pytest.raises(ServerUnreachable, match="was closed"), translated(address):
            stub.Show(jobs_pb2.JobRef(job_id="x"), timeout=10)
        with pytest.raises(ServerUnreachable, match="was closed"), translated(address):
            list(stub.Watch(jobs_pb2.WatchRequest(job_id="x"), timeout=10))
        with pytest.raises(ServerUnreachable, match="was closed"), translated(address):
            stub.Upload(iter([jobs_pb2.Chunk()]), timeout=10)


@every_server
def test_a_message_over_the_limit_is_refused(most_calls):
    server, bound = make_server(
        "127.0.0.1:0", authenticate=lambda m, t: True, max_message_bytes=1000, most_calls=most_calls
    )
    jobs_pb2_grpc.add_JobsServicer_to_server(Answers(), server)
    server.start()
    with open_channel(bound, "t") as channel, pytest.raises(Refused, match="limit"), translated(bound):
        jobs_pb2_grpc.JobsStub(channel).Upload(iter([jobs_pb2.Chunk(data=bytes(2000))]), timeout=10)
    server.stop(None).wait()


class Coroutines(jobs_pb2_grpc.JobsServicer):
    """Service of coroutines, which note the end of their calls."""

    def __init__(self) -> None:
        self.begun, self.ended = queue.SimpleQueue[str](), queue.SimpleQueue[str]()
        self.release = asyncio.Event()

    @answering
    async def Show(self, request, context):
        if not request.job_id:
            raise UsageError("Show: expected a job.")
        self.begun.put(request.job_id)
        assert context.add_callback(lambda: self.ended.put(request.job_id))
        await self.release.wait()
        return jobs_pb2.JobDescription(name=request.job_id).SerializeToString()

    @answering
    async def Feed(self, request_iterator, context):
        async for batch in request_iterator:
            await context.write(jobs_pb2.FeedCredit(epoch=batch.epoch))


@pytest.fixture
def coroutines() -> Iterator[tuple[Coroutines, str]]:
    servicer = Coroutines()
    server, bound = make_server("127.0.0.1:0", authenticate=lambda method, token: True, max_threads=1, most_calls=64)
    jobs_pb2_grpc.add_JobsServicer_to_server(servicer, server)
    server.start()
    yield servicer, bound
    server.stop(None).wait()


def test_calls_that_wait_on_the_loop_occupy_no_thread(coroutines):
    servicer, bound = coroutines
    with open_channel(bound, "t") as channel:
        stub, before = jobs_pb2_grpc.JobsStub(channel), threading.active_count()
        shown = [stub.Show.future(jobs_pb2.JobRef(job_id=str(n)), timeout=DEADLINE_S) for n in range(50)]
        credits = stub.Feed(iter([jobs_pb2.FedBatch(epoch=7)]), timeout=DEADLINE_S)
        assert [credit.epoch for credit in credits] == [7]
        assert threading.active_count() - before < 5
        rpc_loop().call_soon_threadsafe(servicer.release.set)
        assert [one.result().name for one in shown] == [str(n) for n in range(50)]


def test_a_coroutine_s_error_arrives_as_the_class_it_was(coroutines):
    _, bound = coroutines
    with open_channel(bound, "t") as channel, pytest.raises(UsageError, match="expected a job"), translated(bound):
        jobs_pb2_grpc.JobsStub(channel).Show(jobs_pb2.JobRef(), timeout=DEADLINE_S)


def test_a_coroutine_ends_when_nobody_awaits_its_answer(coroutines):
    servicer, bound = coroutines
    with open_channel(bound, "t") as channel:
        call = jobs_pb2_grpc.JobsStub(channel).Show.future(jobs_pb2.JobRef(job_id="left"), timeout=DEADLINE_S)
        assert servicer.begun.get(timeout=DEADLINE_S) == "left"
        call.cancel()
        assert servicer.ended.get(timeout=DEADLINE_S) == "left"


@pytest.mark.parametrize("address", ["0.0.0.0:0", "192.0.2.1:80", "example.org:80", "[::]:0"])
def test_an_open_network_without_tls_is_refused(address):
    with pytest.raises(Refused, match="--insecure"):
        make_server(address, authenticate=lambda method, token: True)


def test_insecure_must_be_explicit():
    server, bound = make_server("0.0.0.0:0", authenticate=lambda method, token: True, insecure=True)
    assert split_address(bound)[1] > 0
    server.stop(None).wait()


@pytest.mark.parametrize("address", ["0.0.0.0:1", "192.0.2.1:80", "example.org:80", "[::]:1"])
def test_a_token_leaves_this_machine_without_tls_only_if_somebody_insists(address):
    with pytest.raises(Refused, match="--insecure"):
        open_channel(address, "secret")
    open_channel(address, "secret", insecure=True).close()
    open_channel(address, "").close()  # a health check has none


def test_a_port_in_use_is_a_usage_error(address):
    with pytest.raises(UsageError, match="Cannot listen"):
        make_server(address, authenticate=lambda method, token: True)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True), ("10.0.0.1", False)],
)
def test_loopback_is_recognised(host, expected):
    assert is_loopback(host) is expected


@pytest.mark.parametrize("address", ["nohost", "host:port", "host:70000", ":80", ""])
def test_a_bad_address_is_a_usage_error(address):
    with pytest.raises(UsageError, match="HOST:PORT"):
        split_address(address)


def test_an_empty_token_never_matches():
    assert not same_token("", "")


def test_the_status_of_a_call_whose_client_is_gone_is_no_exception():
    class Gone:
        """Context of grpcio whose call has ended."""

        def peer(self):
            return "ipv4:127.0.0.1:1"

        def invocation_metadata(self):
            return ()

        async def abort(self, code, details, trailing):
            raise grpc.aio.InternalError("execute_batch")

    asyncio.run(LoopContext(Gone()).end())


def test_a_reply_whose_client_is_gone_leaves_no_traceback_in_the_log(coroutines, caplog):
    assert cygrpc._LOGGER.name == GRPCIO_LOG
    for error in (cygrpc.ExecuteBatchError("execute_batch", ()), ValueError("of a servicer")):
        logging.getLogger(GRPCIO_LOG).error("Unexpected [%s] raised", type(error).__name__, exc_info=error)
    assert [record.args[0] for record in caplog.records] == ["ValueError"]

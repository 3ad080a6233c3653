"""Requests that are no messages: refused by the call's status, without leftovers, with one line logged."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nfdt.core.wire import jobs_pb2, jobs_pb2_grpc
from nfdt.core.wire.channel import make_server, open_channel, same_token
from nfdt.core.wire.parsing import Seldom
from nfdt.core.wire.status import answering

GARBAGE = b"\xff\xff\xff"
TOKEN = "secret"


class Jobs(jobs_pb2_grpc.JobsServicer):
    @answering
    def Show(self, request, context):
        return jobs_pb2.JobDescription(name=request.job_id)

    @answering
    def Upload(self, request_iterator, context):
        return jobs_pb2.UploadReceipt(total_bytes=sum(len(chunk.data) for chunk in request_iterator))


@pytest.fixture(params=[None, 64], ids=["threads", "loop"])
def address(request) -> Iterator[str]:
    """Provide the address of a server whose calls have a thread each, and of one on an event loop."""
    server, address = make_server(
        "127.0.0.1:0", authenticate=lambda method, token: same_token(TOKEN, token), most_calls=request.param
    )
    jobs_pb2_grpc.add_JobsServicer_to_server(Jobs(), server)
    server.start()
    yield address
    server.stop(None).wait()


@pytest.fixture
def channel(address) -> Iterator[grpc.Channel]:
    with open_channel(address, TOKEN) as channel:
        yield channel


def refused(call, request=GARBAGE) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=30)
    return caught.value


@pytest.mark.parametrize("method", ["/nfdt.v1.Jobs/Show", "/grpc.health.v1.Health/Check"])
def test_a_malformed_request_is_an_invalid_argument_that_names_the_method(channel, method):
    error = refused(channel.unary_unary(method))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert method in error.details()


def test_a_malformed_message_of_a_stream_is_an_invalid_argument_too(channel):
    good = jobs_pb2.Chunk(data=b"x").SerializeToString()
    error = refused(channel.stream_unary("/nfdt.v1.Jobs/Upload"), iter([good, GARBAGE]))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_nothing_is_kept_of_malformed_requests(channel):
    call, calls = channel.unary_unary("/grpc.health.v1.Health/Check"), 300
    for _ in range(calls):
        refused(call)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(calls):
        refused(call)
    gc.collect()
    grown = len(gc.get_objects()) - before
    assert grown < calls  # less than one object for each call


def test_many_malformed_requests_are_one_line_of_the_log(channel, caplog):
    for _ in range(20):
        refused(channel.unary_unary("/nfdt.v1.Jobs/Show"))
    assert [record.name for record in caplog.records] == ["nfdt.core.wire.parsing"]


def test_a_request_that_can_be_parsed_reaches_its_method(channel):
    stub = jobs_pb2_grpc.JobsStub(channel)
    assert stub.Show(jobs_pb2.JobRef(job_id="x"), timeout=30).name == "x"
    assert stub.Upload(iter([jobs_pb2.Chunk(data=b"abc")] * 2), timeout=30).total_bytes == 6


def test_a_stranger_checks_the_health_but_does_not_watch_it(address):
    request = health_pb2.HealthCheckRequest()
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(request, timeout=30).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Watch(request, timeout=30))
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_the_health_is_watched_with_a_token(channel):
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


def test_warnings_that_were_left_out_are_counted(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("nfdt.core.wire.parsing.time.monotonic", lambda: now[0])
    warnings = Seldom(logging.getLogger("test"), every_s=10.0)
    for at in (100.0, 101.0, 109.0, 111.0):
        now[0] = at
        warnings.warn("at %d", at)
    assert [record.getMessage() for record in caplog.records] == ["at 100", "at 111 (3 such since the last line)"]

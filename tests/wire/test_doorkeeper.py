"""Connections without a token: limited in number and time, while others proceed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from nfdt.core.wire import jobs_pb2, jobs_pb2_grpc
from nfdt.core.wire.channel import make_server, open_channel, same_token
from nfdt.core.wire.doorkeeper import ConnectionLimits, _peer
from nfdt.core.wire.status import answering
from tests.support.strangers import DEADLINE_S, Strangers

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the doorkeeper looks at Linux's /proc")

TOKEN = "secret"
LATE = ConnectionLimits(total=100, strangers=20, strangers_of_one=10, stranger_s=3600.0)
SOON = ConnectionLimits(total=100, stranger_s=0.5)


class Jobs(jobs_pb2_grpc.JobsServicer):
    """Service that sends one event for each batch that is fed."""

    @answering
    def Show(self, request, context):
        return jobs_pb2.JobDescription(name=request.job_id)

    @answering
    def Feed(self, request_iterator, context):
        for batch in request_iterator:
            yield jobs_pb2.FeedCredit(epoch=batch.epoch)


@pytest.fixture(params=[None, 64], ids=["threads", "loop"])
def serve(request) -> Iterator:
    servers = []

    def start(limits: ConnectionLimits) -> str:
        server, address = make_server(
            "127.0.0.1:0",
            authenticate=lambda method, token: same_token(TOKEN, token),
            limits=limits,
            most_calls=request.param,
        )
        servers.append(server)
        jobs_pb2_grpc.add_JobsServicer_to_server(Jobs(), server)
        server.start()
        return address

    yield start
    for server in servers:
        server.stop(None).wait()


@pytest.fixture
def strangers() -> Iterator:
    made = []

    def make(address: str) -> Strangers:
        made.append(Strangers(address))
        return made[-1]

    yield make
    for one in made:
        one.close()


def show(address: str, **kwargs) -> str:
    with open_channel(address, TOKEN) as channel:
        return jobs_pb2_grpc.JobsStub(channel).Show(jobs_pb2.JobRef(job_id="x"), timeout=DEADLINE_S, **kwargs).name


def test_one_address_may_hold_a_few_connections_without_a_token(serve, strangers):
    address = serve(LATE)
    crowd, other = strangers(address), strangers(address)
    other.connect(5, source="127.0.0.2")
    crowd.connect(40)
    crowd.until(10)
    assert show(address, wait_for_ready=True) == "x"
    assert len(crowd.open) + len(other.open) == 15


def test_all_strangers_together_may_hold_some_more(serve, strangers):
    crowd = strangers(serve(LATE))
    for host in range(1, 9):
        crowd.connect(8, source=f"127.0.0.{host}")
    crowd.until(20)


def test_a_connection_that_shows_no_token_in_time_is_closed_also_with_a_preface(serve, strangers):
    idle = strangers(serve(SOON))
    idle.connect(2)
    idle.open[0].sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    idle.until(0)


def test_a_connection_that_has_shown_a_token_stays_however_long_it_is_silent(serve, strangers):
    address = serve(SOON)
    events: list[grpc.ChannelConnectivity] = []
    with open_channel(address, TOKEN) as channel:
        channel.subscribe(events.append)
        stub = jobs_pb2_grpc.JobsStub(channel)
        stub.Show(jobs_pb2.JobRef(job_id="x"), timeout=DEADLINE_S)
        others = strangers(address)
        others.connect(3)
        others.until(0)  # so long
        others.connect(3)
        others.until(0)
        stub.Show(jobs_pb2.JobRef(job_id="x"), timeout=DEADLINE_S)
        assert events.count(grpc.ChannelConnectivity.READY) == 1


def test_a_stream_goes_on_while_strangers_are_closed(serve, strangers):
    address = serve(LATE)
    with open_channel(address, TOKEN) as channel:
        batches = [jobs_pb2.FedBatch(epoch=1)]
        more = iter(lambda: batches.pop() if batches else None, None)
        crowd = strangers(address)

        def feed():
            yield next(more)
            crowd.connect(80)
            crowd.until(10)
            yield jobs_pb2.FedBatch(epoch=2)

        credits_ = jobs_pb2_grpc.JobsStub(channel).Feed(feed(), timeout=DEADLINE_S)
        assert [credit.epoch for credit in credits_] == [1, 2]


def test_a_server_raises_its_limit_of_descriptors_and_keeps_some_from_strangers(tmp_path, strangers):
    limits = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 400))"
    program = (
        f"{limits}; from nfdt.jobserver.main import main; main(['--state-dir', {str(tmp_path)!r}, '--shards', '0'])"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        address = json.loads(process.stdout.readline())["address"]
        token = (tmp_path / "token").read_text().strip()
        crowd = strangers(address)
        crowd.connect(350)
        with open_channel(address, token) as channel:
            stub = jobs_pb2_grpc.JobsStub(channel)
            stub.Describe(jobs_pb2.DescribeRequest(), timeout=DEADLINE_S, wait_for_ready=True)
            assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (400, 400)
            assert len(os.listdir(f"/proc/{process.pid}/fd")) < 300
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("ipv4:1.2.3.4:5", ("1.2.3.4", 5)),
        ("ipv6:%5B::1%5D:5", ("::1", 5)),
        ("ipv6:%5B::ffff:1.2.3.4%5D:5", ("1.2.3.4", 5)),
        ("ipv6:%5Bfe80::1%25eth0%5D:5", ("fe80::1", 5)),
        ("unix:/tmp/socket", None),
        ("", None),
    ],
)
def test_an_address_of_grpcio_is_that_of_the_socket(name, peer):
    assert _peer(name) == peer

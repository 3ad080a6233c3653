"""Hundreds of connections to the page that say nothing valid: everyone else goes on."""

from __future__ import annotations

import functools
import os
import re
import resource
import secrets
import ssl
import subprocess
import sys
import threading
import tracemalloc
from contextlib import ExitStack, closing
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import keras
import numpy as np
import psutil
import pytest
from nfdt_client.connection import JobsClient

import nfdt
from nfdt.cli.runs_page import NoRunner
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.rights import AuditLog, Holders
from nfdt.core.jobs.store import JobStore
from nfdt.web.pages import PageSource
from nfdt.web.server import PageAddress, PageServer
from tests.support.browser import Browser
from tests.support.certificates import self_signed
from tests.support.eventually import eventually
from tests.support.scripts import NFDT, environment, stop
from tests.support.strangers import Strangers

DESCRIPTORS = 900  # hard limit of the server
CROWD = 700
OF_ONE = 64  # connections without a token that one address may have
EPOCHS = 3
LOG_BYTES = 100_000
BEGINS = {"plain": b"GET / HTTP/1.1\r\nHost: x\r\nX-a: ", "tls": b""}  # half a head; half a handshake

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the doorkeeper looks at Linux's /proc")


@pytest.fixture(params=BEGINS)
def server(request, tmp_path, monkeypatch):
    tls = []
    if request.param == "tls":
        files = tmp_path / "certs"
        subprocess.run([*NFDT, "certs", "--host", "localhost", "--dir", str(files)], check=True, capture_output=True)
        tls = ["--tls-cert", str(files / "server.pem"), "--tls-key", str(files / "server.key")]
        monkeypatch.setenv("NFDT_CA_FILE", str(files / "ca.pem"))
        monkeypatch.setenv("SSL_CERT_FILE", str(files / "ca.pem"))
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(16))
    token.chmod(0o600)
    command = (
        f"import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, (64, {DESCRIPTORS})); "
        "runpy.run_module('nfdt.cli', run_name='__main__')"
    )
    arguments = ["server", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state"), "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", command, *arguments, "--token-file", str(token), "--ui", "127.0.0.1:0", *tls],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "server.log").open("w"),
        text=True,
    )
    address = process.stdout.readline().split()[-1]
    yield process, address, token, tmp_path / "server.log", request.param
    stop(process)


@pytest.fixture
def descriptors():
    """Let this process open as many connections as the test needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * CROWD)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Attack(keras.callbacks.Callback):
    """Callback that reads the job's stream, and floods the page from the end of the first epoch on."""

    def __init__(self, process, address: str, token: Path, browser: Browser, crowd: Strangers) -> None:
        super().__init__()
        self._process, self._address, self._token = process, address, token
        self._browser, self._crowd = browser, crowd
        self.names: list[str] = []

    def on_epoch_end(self, epoch, logs=None):
        if epoch != 0:
            return
        (job,) = self._browser.json("api/jobs")
        messages = self._browser.messages(job["job_id"])
        self.names.append(next(messages)[0])
        self.reader = threading.Thread(target=lambda: self.names.extend(name for name, _ in messages))
        self.reader.start()
        before = self._descriptors()
        self._crowd.connect(CROWD)
        self._crowd.until(OF_ONE)
        self.held = len(self._crowd.open)
        # The server closes its own side a moment after the crowd's; while it has no room, it refuses everybody.
        assert eventually(lambda: self._descriptors() < before + 2 * OF_ONE)
        assert self._browser.status("metrics") == 200
        tls = {"ca_file": os.environ.get("NFDT_CA_FILE")}
        client = JobsClient(self._address, self._token.read_text(), **tls)
        assert client.describe().slots == 2
        client.close()

    def _descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))


@pytest.mark.processes
def test_a_job_and_other_requests_go_on_while_hundreds_of_connections_are_half_open(server, descriptors):
    process, address, token, log, kind = server
    (url,) = re.findall(r"page: (\S+)", log.read_text())
    browser = Browser(url, token.read_text())
    crowd = Strangers(url.split("/")[2], BEGINS[kind])
    attack = Attack(process, address, token, browser, crowd)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with nfdt.session(server=address, token_file=str(token), workers=2):
        ones = np.ones((640, 4), "float32")
        history = model.fit(ones, ones[:, :1], batch_size=8, epochs=EPOCHS, verbose=0, callbacks=[attack])
    attack.reader.join(60)
    crowd.close()
    assert len(history.history["loss"]) == EPOCHS
    assert attack.held > 0  # they were held while the others were answered
    assert attack.names[-1] == "end"  # a stream that is older than all of them was not ended for them
    assert log.stat().st_size < LOG_BYTES
    assert psutil.Process(process.pid).is_running()


class OwnPage(NamedTuple):
    """Page of a server without slots in this process, and a connection to it."""

    server: PageServer
    connection: HTTPConnection


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def page(request, tmp_path):
    pair = self_signed(tmp_path, "page")
    files = {"cert": str(pair.cert), "key": str(pair.key)} if request.param else {}
    holders, audit = Holders([secrets.token_hex(16)]), AuditLog(tmp_path / "audit")
    with closing(JobStore(tmp_path / "jobs.sqlite")) as store, ExitStack() as undo:
        source = PageSource(store, ArtifactStore(tmp_path / "artifacts"), cast(Any, NoRunner()), holders, audit)
        server = PageServer(PageAddress("127.0.0.1:0", **files), source)
        server.start()
        undo.callback(server.stop)
        address = urlsplit(server.url)
        trusted = ssl.create_default_context(cafile=pair.cert)
        kind = functools.partial(HTTPSConnection, context=trusted) if request.param else HTTPConnection
        connection = undo.enter_context(closing(kind(address.hostname, address.port, timeout=60)))
        connection.connect()
        yield OwnPage(server, connection)


def test_a_read_takes_no_more_memory_than_its_buffer(page):
    taken = [_peak_of_a_request(page.connection) for _ in range(3)]
    # asyncio's own reads take 256 KiB each, between which glibc's heap grows without an end.
    assert taken[-1] < 128 * 1024


def test_a_request_that_turns_out_wrong_is_answered_once(page, caplog):
    page.connection.sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n")
    answer = page.connection.sock.recv(2**16)
    while more := page.connection.sock.recv(2**16):
        answer += more
    page.server.stop()  # waits for what is under way
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert "Exception in ASGI" not in caplog.text


def _peak_of_a_request(connection: HTTPConnection) -> int:
    """Return the most bytes that this process takes meanwhile."""
    tracemalloc.start()
    try:
        connection.request("GET", "/api/jobs")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 401
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

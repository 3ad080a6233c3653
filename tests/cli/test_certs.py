"""``nfdt certs``, and a cluster over TLS whose certificate names only one of its hosts."""

from __future__ import annotations

import ssl
import stat
import subprocess

import pytest
from click.testing import CliRunner

from nfdt.cli import cli
from nfdt.core.wire.certificates import hosts_of
from nfdt.core.wire.connection import client_tls, server_tls
from nfdt.launch.machine import reachable_host
from tests.support.scripts import DEADLINE_S, DIGITS, NFDT, environment, start_server, start_workers, stop

pytestmark = pytest.mark.processes

FILES = {"ca.pem": 0o644, "server.pem": 0o644, "server.key": 0o600, "client.pem": 0o644, "client.key": 0o600}


def make(folder, *hosts):
    return CliRunner().invoke(cli, ["certs", "--dir", str(folder), *(f"--host={host}" for host in hosts)])


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certs") / "new"
    done = make(folder, "train.example", "10.1.2.3")
    assert done.exit_code == 0, done.output
    return folder


def test_keys_are_private(certs):
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in certs.iterdir()} == FILES


def test_existing_files_are_not_replaced(certs):
    before = (certs / "server.key").read_bytes()
    done = make(certs, "other.example")
    assert done.exit_code == 2
    assert "which has ca.pem" in done.output
    assert (certs / "server.key").read_bytes() == before


@pytest.mark.parametrize(
    ("host", "trusted"),
    [("train.example", True), ("10.1.2.3", True), ("localhost", True), ("other.example", False), ("10.1.2.4", False)],
)
def test_a_server_is_trusted_under_its_names_only(certs, host, trusted):
    client = client_tls(certs / "ca.pem", certs / "client.pem", certs / "client.key")
    server = server_tls(certs / "server.pem", certs / "server.key", certs / "ca.pem")
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server, server_hostname=host), server.wrap_bio(to_server, to_client, True)]

    def shake():
        for _ in range(4):
            for end in ends:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        return ends[1].getpeercert() is not None

    if trusted:
        assert shake()
    else:
        with pytest.raises(ssl.SSLCertVerificationError):
            shake()


TRAIN = DIGITS + "build().fit(x[:640], y[:640], batch_size=32, epochs=1, verbose=0)\n"


def test_a_certificate_for_one_name_serves_a_cluster_on_every_address(tmp_path):
    assert make(tmp_path, "localhost").exit_code == 0
    assert hosts_of((tmp_path / "server.pem").read_bytes()) == ("localhost", "127.0.0.1")
    tls = ("--tls-cert", tmp_path / "server.pem", "--tls-key", tmp_path / "server.key")
    cluster = start_server(tmp_path, "--listen", "0.0.0.0:0", *map(str, tls))
    cluster.address = f"localhost:{cluster.address.rpartition(':')[2]}"
    trusted = ("--ca-file", str(tmp_path / "ca.pem"))
    workers = start_workers(cluster, 2, *trusted)
    (tmp_path / "train.py").write_text(TRAIN)
    try:
        done = subprocess.run(
            [*NFDT, "run", "--workers", "2", *trusted, str(tmp_path / "train.py")],
            env=environment(**cluster.env()),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    finally:
        stop(workers, cluster.process)
    assert done.returncode == 0, done.stderr[-4000:]
    log = (tmp_path / "server.log").read_text()
    assert f"workers are sent to {reachable_host('0.0.0.0')} for shards" in log
    assert f"is valid for localhost, 127.0.0.1, not for {reachable_host('0.0.0.0')}" in log


def test_a_server_that_asks_for_certificates_serves_those_who_present_one(tmp_path):
    assert make(tmp_path, "localhost").exit_code == 0
    tls = (
        "--tls-cert",
        tmp_path / "server.pem",
        "--tls-key",
        tmp_path / "server.key",
        "--client-ca",
        tmp_path / "ca.pem",
    )
    cluster = start_server(tmp_path, *map(str, tls))
    trusted = {"NFDT_CA_FILE": str(tmp_path / "ca.pem")}
    own = {"NFDT_CERT_FILE": str(tmp_path / "client.pem"), "NFDT_KEY_FILE": str(tmp_path / "client.key")}
    workers = start_workers(cluster, 1, **trusted, **own)
    (tmp_path / "train.py").write_text(TRAIN)

    def nfdt(*arguments, **variables):
        known = {**cluster.env(), **trusted, **variables}
        return subprocess.run(
            [*NFDT, *arguments], env=environment(**known), capture_output=True, text=True, timeout=DEADLINE_S
        )

    try:
        assert nfdt("workers").returncode == 4
        done = nfdt("run", "--workers", "1", str(tmp_path / "train.py"), **own)
    finally:
        stop(workers, cluster.process)
    assert done.returncode == 0, done.stderr[-4000:]

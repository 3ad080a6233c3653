"""``nfdt server`` and ``nfdt worker`` as processes: what they refuse, and the reason when slots cannot run."""

from __future__ import annotations

import re
import subprocess
from contextlib import closing

import pytest
from nfdt_client.connection import JobsClient
from nfdt_client.connection_options import read_token

from nfdt.core.errors import PolicyRefused
from tests.support.certificates import self_signed
from tests.support.fakes import Client
from tests.support.scripts import DEADLINE_S, NFDT, environment, start_server, stop

BROKEN = "raise ImportError('libcudart.so.12: cannot open shared object file')"


@pytest.fixture
def without_tensorflow(tmp_path) -> dict[str, str]:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "tensorflow.py").write_text(BROKEN)
    return {"PYTHONPATH": str(folder)}


def test_a_server_without_tensorflow_stops_starting_slots_and_fails_jobs_with_the_reason(tmp_path, without_tensorflow):
    cluster = start_server(tmp_path, "--workers", "1", **without_tensorflow)
    access = (cluster.address, cluster.token_file.read_text())
    client, watcher = Client(*access), JobsClient(*access)
    try:
        *_, end = watcher.watch(client.submit(client.spec(workers=1)))
        reason = end.data["reason"]
    finally:
        watcher.close()
        client.close()
        stop(cluster.process)
    assert "3 times in a row" in reason
    assert "libcudart.so.12: cannot open" in reason
    assert "pip install 'nfdt[cpu]'" in reason
    log = (tmp_path / "server.log").read_text()
    assert log.count("ERROR nfdt.launch.processes 3 times in a row") == 1
    assert log.count("worker slot local-worker-0") <= 3
    assert len(re.findall("(?:worker|shard) slot local-", log)) >= 3


def test_workers_without_tensorflow_end_with_the_reason(tmp_path, without_tensorflow):
    cluster = start_server(tmp_path)
    try:
        done = subprocess.run(
            [*NFDT, "worker", "--server", cluster.address, "--log-dir", str(tmp_path / "logs")],
            env=environment(NFDT_TOKEN_FILE=str(cluster.token_file), **without_tensorflow),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    finally:
        stop(cluster.process)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert "libcudart.so.12: cannot open" in done.stderr.splitlines()[-1]


def serving(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*NFDT, "server", "--listen", "127.0.0.1:0", *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        (["--state-dir", "file"], "--state-dir", "File exists"),
        (["--state-dir", "file/below"], "--state-dir", "Not a directory"),
        (["--state-dir", "/proc/nfdt"], "--state-dir", "No such file"),
        (["--state-dir", "broken"], "SQLite", "not a database"),
        (["--state-dir", "state", "--token-file", "missing/token"], "Token file", "No such file"),
        (["--state-dir", "state", "--token-file", "folder"], "Token file", "Is a directory"),
        (["--state-dir", "state", "--token-file", "file"], "Token file", "0600"),
        (["--state-dir", "state", "--tls-cert", "file"], "private key", "a certificate only"),
        (["--state-dir", "state", "--tls-cert", "file", "--tls-key", "file"], "private key", "pem lib"),
        (["--state-dir", "state", "--tls-cert", "a.pem", "--tls-key", "b.key"], "private key", "key values mismatch"),
        (["--state-dir", "state", "--tls-key", "a.key"], "--tls-cert", "only --tls-key"),
    ],
)
def test_a_path_that_cannot_be_used_is_refused_in_one_message(tmp_path, monkeypatch, options, name, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    (tmp_path / "file").chmod(0o644)
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "jobs.sqlite").write_text("no database " * 100)
    for pair in ("a", "b"):
        self_signed(tmp_path, pair)
    done = serving(*options)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (message,) = done.stderr.strip().splitlines()
    assert name in message
    assert reason in message
    assert "xpected" in message


def test_a_server_makes_a_token_for_workers_beside_its_own(tmp_path):
    cluster = start_server(tmp_path)
    try:
        file = cluster.state_dir / "worker-token"
        assert file.stat().st_mode & 0o777 == 0o600
        with closing(JobsClient(cluster.address, read_token(file))) as thief:
            with pytest.raises(PolicyRefused, match="whose role is work"):
                thief.list()
    finally:
        stop(cluster.process)


def test_a_log_dir_that_cannot_be_used_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    done = subprocess.run(
        [*NFDT, "worker", "--server", "127.0.0.1:1", "--log-dir", str(tmp_path / "file")],
        env=environment(NFDT_TOKEN="secret-token"),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("Error: --log-dir: expected a directory")

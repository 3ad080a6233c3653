"""The server as a process, and slots that it starts itself."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nfdt.core.errors import UsageError
from nfdt.core.jobs.tokens import ensure_token_file, read_tokens
from nfdt.core.wire import jobs_pb2
from nfdt.launch.machine import find_gpus
from nfdt.server import ServerOptions, serve, shard_host
from tests.server.fakes import DEADLINE_S, TOKEN, Client, of

ROOT = Path(__file__).parents[2]
SLOT = (sys.executable, "-m", "tests.server.slot_process")


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = ServerOptions(tmp_path, (TOKEN,), embedded=True, workers=2, shards=1, slot_command=SLOT)
    server = serve(options)
    yield server
    server.stop()


@pytest.fixture
def client(server):
    client = Client(server.address)
    yield client
    client.close()


def children():
    return [p for p in psutil.Process().children(recursive=True) if "slot_process" in " ".join(p.cmdline())]


def test_a_server_starts_its_slots_and_takes_them_down(server, client):
    events = client.finish(client.submit())
    assert events[-1][1]["state"] == "succeeded", events[-1]
    processes = children()
    assert len(processes) == 3
    assert not any(TOKEN in " ".join(p.cmdline()) for p in processes)
    server.stop()
    assert not psutil.wait_procs(processes, timeout=DEADLINE_S)[1]


def test_a_killed_slot_process_is_replaced_in_the_running_job(server, client):
    job = client.submit(client.spec(epochs=1_000_000, workers=2))
    pid = client.until(job, "worker_joined", index=1)["pid"]
    os.kill(pid, 9)
    assert client.until(job, "worker_lost")["worker"] == "worker-1"
    assert client.until(job, "worker_joined", index=2)["worker"] == "worker-2"
    client.control(job, cancel=jobs_pb2.Cancel())
    assert client.finish(job)[-1][1]["state"] == "cancelled"


def test_a_killed_shard_process_fails_the_job_at_once(server, client):
    job = client.submit(client.spec(epochs=1_000_000, workers=1))
    client.until(job, "epoch_end", epoch=0)
    shard = next(p for p in children() if "shard" in p.cmdline())
    shard.kill()
    assert "shard-0" in client.finish(job)[-1][1]["reason"]


def test_more_slots_are_started_when_a_job_wants_them(server, client):
    spec = client.spec(epochs=1, cluster={"workers": 3, "shards": 2})
    events = client.finish(client.submit(spec))
    assert len(of(events, "worker_joined")) == 3
    assert events[-1][1]["state"] == "succeeded"


def test_slots_that_cannot_start_fail_the_job_and_name_the_log(tmp_path):
    options = ServerOptions(tmp_path, (TOKEN,), slot_command=(sys.executable, "-c", "raise SystemExit(3)"))
    server = serve(options)
    client = Client(server.address)
    try:
        reason = client.finish(client.submit())[-1][1]["reason"]
        assert str(tmp_path / "logs") in reason
    finally:
        client.close()
        server.stop()


def start_embedded(tmp_path, *arguments):
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "nfdt.server", "--embedded", "--state-dir", str(tmp_path / "state"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_embedded_server_lives_as_long_as_its_standard_input(tmp_path):
    process = start_embedded(tmp_path, "--workers", "0", "--shards", "0")
    process.stdin.write(TOKEN + "\n")
    process.stdin.flush()
    address = json.loads(process.stdout.readline())["address"]
    client = Client(address)
    assert client.call("Describe", jobs_pb2.DescribeRequest()).allow_code
    client.close()
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert TOKEN not in out + err


def test_an_embedded_server_without_a_token_is_a_usage_error(tmp_path):
    process = start_embedded(tmp_path)
    _, err = process.communicate("\n", timeout=DEADLINE_S)
    assert process.returncode == 2
    assert "token" in err


def test_sigterm_ends_the_server_orderly(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "nfdt.server", "--state-dir", str(tmp_path), "--shards", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert json.loads(process.stdout.readline())["address"]
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    process.stdout.close()


def test_the_server_process_loads_no_keras_and_unpickles_nothing(tmp_path):
    program = f"""
import sys
from pathlib import Path
from nfdt.server import ServerOptions, serve
from tests.server.fakes import TOKEN, Client, FakeSlot
server = serve(ServerOptions(Path({str(tmp_path)!r}), (TOKEN,), slot_command=()))
slots = [FakeSlot(server.address, role, role) for role in ("shard", "worker")]
client = Client(server.address)
state = client.finish(client.submit(client.spec(workers=1)))[-1][1]["state"]
for slot in slots:
    slot.close()
client.close()
server.stop()
print(state, sorted({{"tensorflow", "keras", "cloudpickle", "horovod"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT)
    assert done.stdout.strip() == "succeeded []", done.stderr


def test_a_token_file_is_made_private_and_read_again(tmp_path):
    tokens = ensure_token_file(tmp_path / "token")
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert ensure_token_file(tmp_path / "token") == tokens


@pytest.mark.parametrize(("text", "mode", "needle"), [("long-enough-token", 0o644, "0600"), ("short", 0o600, "8")])
def test_a_bad_token_file_is_refused(tmp_path, text, mode, needle):
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(UsageError, match=needle):
        read_tokens(path)


def test_gpus_are_found_in_the_environment_or_the_driver(tmp_path):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert find_gpus({}, tmp_path) == ("0", "1")
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == ("1",)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == ()
    assert find_gpus({}, tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [("127.0.0.1:0", "", "127.0.0.1"), ("10.1.2.3:5", "", "10.1.2.3"), ("0.0.0.0:5", "head.example", "head.example")],
)
def test_shards_listen_where_workers_reach_them(tmp_path, listen, advertise, expected):
    assert shard_host(ServerOptions(tmp_path, (TOKEN,), listen=listen, advertise=advertise)) == expected

"""Server as a process, with slots that it starts itself."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nfdt.core.errors import UsageError
from nfdt.core.host.machine import find_gpus, is_own_address, share_gpus
from nfdt.core.wire import jobs_pb2
from nfdt.jobserver.main import ServerOptions, serve
from nfdt.jobserver.server_parts import shard_host
from nfdt.launch.machine import reachable_host
from tests.support.fakes import DEADLINE_S, TOKEN, Client, of

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SLOT = (sys.executable, "-m", "tests.support.slot_process")


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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


def test_only_its_owner_reads_what_a_server_keeps(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    before = os.umask(0)
    try:
        server = serve(ServerOptions(tmp_path / "state", (TOKEN,), workers=1, shards=1, slot_command=SLOT))
        client = Client(server.address)
        assert client.finish(client.submit(client.spec(workers=1)))[-1][1]["state"] == "succeeded"
        found = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state").rglob("*")}
        client.close()
        server.stop()
    finally:
        os.umask(before)
    assert {"jobs.sqlite", "lock", "artifacts", "logs"} <= {path.name for path in found}
    assert {path: mode for path, mode in found.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}


def test_a_killed_slot_process_is_replaced_in_the_running_job(server, client):
    job = client.submit(client.spec(epochs=1_000_000, workers=2))
    pid = client.until(job, "worker_joined", index=1)["pid"]
    os.kill(pid, 9)
    assert client.until(job, "worker_lost")["worker"] == "worker-1"
    assert client.until(job, "worker_joined", index=2)["worker"] == "worker-2"
    client.control(job, cancel=jobs_pb2.Cancel())
    assert client.finish(job)[-1][1]["state"] == "cancelled"


def test_workers_killed_as_fast_as_they_come_fail_the_job_with_signal_and_log(server, client):
    job = client.submit(client.spec(epochs=1_000_000, workers=1))
    for index in range(3):
        os.kill(client.until(job, "worker_joined", index=index)["pid"], signal.SIGKILL)
    events = client.finish(job)
    assert all("SIGKILL (usually the kernel's out-of-memory" in lost["reason"] for lost in of(events, "worker_lost"))
    reason = events[-1][1]["reason"]
    assert reason.startswith("worker-2 is lost: its process was ended by SIGKILL")
    server.stop()
    assert Path(re.search(r"log: (\S+\.log)", reason)[1]).is_file(), "the log outlives the server"


def test_a_killed_shard_process_is_named_and_replaced(server, client):
    job = client.submit(client.spec(epochs=1_000_000, workers=1))
    client.until(job, "epoch_end", epoch=0)
    shard = next(p for p in children() if "shard" in p.cmdline())
    shard.kill()
    found = next(data for kind, data in client.watch(job) if "shard-0" in str(data.get("reason")))
    assert "SIGKILL" in found["reason"]
    client.until(job, "epoch_end", epoch=1)
    client.control(job, cancel=jobs_pb2.Cancel())
    assert client.finish(job)[-1][1]["state"] == "cancelled"


def test_a_shard_killed_twice_without_progress_ends_the_job_with_its_memory_and_the_remedy(server, client):
    job = client.submit(client.spec(workers=1, attended=True))  # it waits for its client, so that no sample is trained
    for kills in range(2):
        found = client.watch(job)
        for _ in range(kills + 1):  # it serves: first when its worker has joined, then when it is restored
            next(data for kind, data in found if kind in ("worker_joined", "shards_restored"))
        next(p for p in children() if "shard" in p.cmdline()).kill()
    reason = client.finish(job)[-1][1]["reason"]
    assert re.match(r"Shards were killed 2 times without progress .*, last shard-0 \(its .* by SIGKILL", reason)
    assert re.search(r"a shard takes up to [\d.]+ GB of memory, .* machine, which has [\d.]+ GB", reason)
    assert "fewer shards or workers on this machine" in reason
    assert client.show(job).state == "failed"


def test_more_slots_are_started_when_a_job_wants_them(server, client):
    spec = client.spec(epochs=1, cluster={"workers": 3, "shards": 2})
    events = client.finish(client.submit(spec))
    assert len(of(events, "worker_joined")) == 3
    assert events[-1][1]["state"] == "succeeded"


def test_a_server_that_offers_some_workers_refuses_a_job_for_more_and_starts_no_more(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    server = serve(ServerOptions(tmp_path, (TOKEN,), workers=1, shards=1, slot_command=SLOT))
    client = Client(server.address)
    try:
        with pytest.raises(UsageError, match="workers=12: expected at most 1.*--slots 11"):
            client.submit(client.spec(workers=12))
        assert client.finish(client.submit(client.spec(workers=1)))[-1][1]["state"] == "succeeded"
        assert len(children()) == 2
    finally:
        client.close()
        server.stop()


def test_slots_that_cannot_start_fail_the_job_and_name_the_log(tmp_path, quick_restarts):
    options = ServerOptions(tmp_path, (TOKEN,), slot_command=(sys.executable, "-c", "raise SystemExit(3)"))
    server = serve(options)
    client = Client(server.address)
    try:
        reason = client.finish(client.submit())[-1][1]["reason"]
        assert str(tmp_path / "logs") in reason
    finally:
        client.close()
        server.stop()


def test_a_running_job_logs_once_why_its_worker_is_not_replaced(tmp_path, quick_restarts, server, client):
    job = client.submit(client.spec(epochs=1_000_000, workers=2))
    pid = client.until(job, "worker_joined", index=1)["pid"]
    (tmp_path / "logs").rename(tmp_path / "away")
    os.kill(pid, 9)
    warning = client.until(job, "log", level="warning")["text"]
    assert "not replaced" in warning
    assert str(tmp_path / "logs") in warning
    (tmp_path / "away").rename(tmp_path / "logs")
    assert client.until(job, "worker_joined", index=2)["worker"] == "worker-2"
    client.control(job, cancel=jobs_pb2.Cancel())
    events = client.finish(job)
    assert len([one for one in of(events, "log") if one["level"] == "warning"]) == 1
    assert events[-1][1]["state"] == "cancelled"


SERVER = (sys.executable, "-P", "-m", "nfdt.jobserver.main")


def start_embedded(tmp_path, *arguments):
    return subprocess.Popen(
        [*SERVER, "--embedded", "--state-dir", str(tmp_path / "state"), *arguments],
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


def start_in_folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "server.log").touch()
    process = start_embedded(folder, "--workers", "0", "--shards", "0", "--folder", str(folder))
    process.stdin.write(TOKEN + "\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["address"]
    return process, folder


def test_an_embedded_server_whose_parent_has_ended_removes_its_folder(tmp_path):
    process, folder = start_in_folder(tmp_path)
    assert (folder / "state" / "jobs.sqlite").exists()
    process.communicate(timeout=DEADLINE_S)
    assert not folder.exists()


def test_an_embedded_server_that_is_terminated_leaves_its_parent_the_log_but_no_data(tmp_path):
    process, folder = start_in_folder(tmp_path)
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    assert [path.name for path in folder.iterdir()] == ["server.log"]
    process.communicate()


def test_an_embedded_server_ends_with_its_parent_though_a_fork_of_that_holds_its_standard_input(tmp_path):
    command = [sys.executable, "-P", "-m", "nfdt.jobserver.main", "--embedded", "--workers", "0", "--shards", "0"]
    program = f"""
import os, signal, subprocess
server = subprocess.Popen({[*command, "--state-dir", str(tmp_path / "state")]!r}, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE)
server.stdin.write({TOKEN!r}.encode() + b"\\n")
server.stdin.flush()
server.stdout.readline()
fork = os.fork()
if fork:
    print(server.pid, fork, flush=True)
signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    server, fork = (psutil.Process(int(pid)) for pid in parent.stdout.readline().split())
    parent.kill()
    parent.wait()
    try:
        assert not psutil.wait_procs([server], timeout=DEADLINE_S)[1]
    finally:
        fork.kill()
        parent.stdout.close()


def test_an_embedded_server_without_a_token_is_a_usage_error(tmp_path):
    process = start_embedded(tmp_path)
    _, err = process.communicate("\n", timeout=DEADLINE_S)
    assert process.returncode == 2
    assert "token" in err


def test_sigterm_ends_the_server_orderly(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "nfdt.jobserver.main", "--state-dir", str(tmp_path), "--shards", "0"],
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
from nfdt.jobserver.main import ServerOptions, serve
from tests.support.fakes import TOKEN, Client, FakeSlot
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


def test_gpus_are_found_in_the_environment_or_the_driver(tmp_path):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert find_gpus({}, tmp_path) == ("0", "1")
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == ("1",)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == ()
    assert find_gpus({}, tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (0, ("a,b,c,d",)),
        (1, ("a,b,c,d",)),
        (2, ("a,b", "c,d")),
        (3, tuple("abcd")),
        (4, tuple("abcd")),
        (9, tuple("abcd")),
    ],
)
def test_the_slots_of_a_machine_get_equally_many_gpus(slots, expected):
    assert share_gpus(("a", "b", "c", "d"), slots) == expected
    assert share_gpus((), slots) == ()


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [("127.0.0.1:0", "", "127.0.0.1"), ("10.1.2.3:5", "", "10.1.2.3"), ("0.0.0.0:5", "localhost", "localhost")],
)
def test_shards_listen_where_workers_reach_them(tmp_path, listen, advertise, expected):
    assert shard_host(ServerOptions(tmp_path, (TOKEN,), listen=listen, advertise=advertise)) == expected


def test_a_name_to_advertise_must_belong_to_this_machine(tmp_path):
    with pytest.raises(UsageError, match="--advertise.*203.0.113.7"):
        shard_host(ServerOptions(tmp_path, (TOKEN,), listen="0.0.0.0:5", advertise="203.0.113.7"))


def test_behind_a_wildcard_the_certificate_names_the_host_unless_it_is_loopback_or_elsewhere():
    own = reachable_host("0.0.0.0")
    assert reachable_host("0.0.0.0", ["*.example", "127.0.0.1", "localhost", "203.0.113.7", "no such name"]) == own
    assert not is_own_address(own, loopback=True)
    assert reachable_host("::", ["localhost", own]) == own

"""Code of jobs on a server of root: it trains, and the kernel keeps from it what is not its own."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from nfdt_client.connection import JobsClient

from nfdt.chaos.processes import find_slots
from nfdt.core.host.code_user import COUNT, FIRST
from tests.support.scripts import DEADLINE_S, DIGITS, NFDT, environment, start_server, start_workers, stop, submitted

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(3 * DEADLINE_S),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user"),
]

FOUND = "found by the layer: "
# Its layer looks about when a worker traces the model.
HOSTILE = """
import os

CLIENT = os.getpid()


def attempt(action, *arguments):
    try:
        action(*arguments)
    except OSError as error:
        return type(error).__name__
    return "done"


@keras.saving.register_keras_serializable("hostile")
class Looks(keras.layers.Layer):
    def call(self, inputs):
        if os.getpid() != CLIENT:
            found = {path: attempt(open, path, "rb") for path in PATHS}
            found |= {f"change {path}": attempt(open, path, "ab") for path in PATHS}
            found |= {f"list {path}": attempt(os.listdir, path) for path in FOLDERS}
            found |= {f"signal {process}": attempt(os.kill, process, 0) for process in PROCESSES}
            found["be root again"] = attempt(os.setuid, 0)
            ids = {os.getuid(), os.geteuid(), os.getgid(), os.getegid(), *os.getgroups()}
            own = {path: attempt(open, path, "ab") for path in ("mine", os.path.expanduser("~/mine"))}
            print(MARK + json.dumps({"found": found, "ids": sorted(ids), "own": own}))
        return inputs


model = build()
model.add(Looks())
model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=32, epochs=2, verbose=0)
print(json.dumps(history.history))
"""


VICTIM = """
model = build()
model.add(keras.layers.Lambda(lambda t: t))
model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
model.fit(x, y, batch_size=32, epochs=100_000, verbose=0)
"""


@pytest.mark.parametrize("started_by", ["server", pytest.param("worker", marks=pytest.mark.long)])
def test_the_kernel_keeps_secrets_and_other_jobs_from_a_hostile_job(tmp_path, started_by):
    workers = ["--workers", "2"] if started_by == "server" else []
    server = start_server(tmp_path, "--allow-code", *workers)
    launcher = server.process
    started, logs = [server.process], server.state_dir / "logs"
    try:
        if started_by == "worker":
            logs = tmp_path / "worker-logs"
            launcher = start_workers(server, 2, "--log-dir", str(logs))
            started.insert(0, launcher)
        victim, hostile = tmp_path / "victim.py", tmp_path / "hostile.py"
        victim.write_text(DIGITS + VICTIM)
        with submitted(server, "--workers", "1", str(victim)) as job:
            with closing(JobsClient(server.address, server.token_file.read_text())) as connection:
                next(event for event in connection.watch(job) if event.kind == "progress")
        slots = [one.process.pid for one in find_slots(psutil.Process(launcher.pid)) if one.role == "worker"]
        users = {pid: psutil.Process(pid).uids().real for pid in slots}
        theirs = [pid for pid, user in users.items() if user]
        assert len(theirs) == 1, "a slot without a job has not changed its user"
        home = Path(f"/proc/{theirs[0]}/cwd").resolve()
        paths = [
            *(server.token_file, server.state_dir / "worker-token", server.state_dir / "jobs.sqlite"),
            *(server.state_dir / "audit.log", *(server.state_dir / "artifacts").iterdir(), *logs.glob("*.log")),
            *(one for one in home.rglob("*") if one.is_file()),
            *(Path(f"/proc/{pid}/{name}") for pid in (launcher.pid, *theirs) for name in ("environ", "mem", "maps")),
        ]
        names = {
            "MARK": FOUND,
            "PATHS": sorted({str(path) for path in paths}),
            "FOLDERS": [str(one) for one in (server.state_dir, logs, home, home.parent, f"/proc/{theirs[0]}/fd")],
            "PROCESSES": [server.process.pid, launcher.pid, *theirs],
        }
        hostile.write_text(DIGITS + "".join(f"{name} = {value!r}\n" for name, value in names.items()) + HOSTILE)
        done = subprocess.run(
            [*NFDT, "run", "--workers", "1", str(hostile)],
            env=environment(**server.env()),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        reports = "".join(log.read_text(errors="replace") for log in logs.glob("*worker*.log"))
    finally:
        stop(*started)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["accuracy"][-1] > 0.8
    report = json.loads(next(line for line in reports.splitlines() if line.startswith(FOUND)).removeprefix(FOUND))
    assert {what: outcome for what, outcome in report["found"].items() if outcome != "PermissionError"} == {}
    assert len(report["found"]) > 2 * len(theirs) + 10
    (user,) = report["ids"]
    assert user in range(FIRST, FIRST + COUNT)
    assert user not in users.values(), "each session has a user of its own"
    assert set(report["own"].values()) == {"done"}
    assert not home.parent.exists()

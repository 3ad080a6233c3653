"""``nfdt chaos`` as a user runs it: a script trains on a real cluster while faults are injected."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.scripts import DIGITS, NFDT, environment

pytestmark = pytest.mark.processes

HANG_S = 600
SCRIPT = DIGITS + "build().fit(x, y, batch_size=32, epochs=4, verbose=0)"
SCHEDULE = """
seed = 3
[cluster]
workers = 2
options = { "emulate.step_ms" = 60 }
[[fault]]
kind = "kill"
role = "worker"
at_step = 30
[[fault]]
kind = "stall"
role = "worker"
seconds = 1
at_step = 60
[[fault]]
kind = "cut"
role = "worker"
seconds = 1
at_step = 90
"""


@pytest.mark.long
@pytest.mark.timeout(HANG_S)
def test_training_survives_a_killed_a_stalled_and_a_cut_off_worker(tmp_path):
    schedule, script, report = tmp_path / "schedule.toml", tmp_path / "script.py", tmp_path / "report.json"
    schedule.write_text(SCHEDULE)
    script.write_text(SCRIPT)
    done = subprocess.run(
        [*NFDT, "chaos", "--json", str(report), "--logs", str(tmp_path / "logs"), str(schedule), str(script)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert [(fault["kind"], fault["survived"]) for fault in found["faults"]] == [
        ("kill", True),
        ("stall", True),
        ("cut", True),
    ]
    assert found["samples"]["never"] == 0
    assert found["samples"]["once"] == 4 * 1797
    assert found["counted"]["once"] >= 2 * 1536
    assert (found["counted"]["again"], found["counted"]["never"]) == (0, 0)
    assert found["leftovers"] == []


@pytest.mark.parametrize(
    ("schedule", "logs", "message"),
    [
        ('[[fault]]\nkind = "clock"\nrole = "server"\nat_s = 1\n', "new", "clock: the wall clock belongs to the whole"),
        ("", ".", "--logs: expected a folder that does not exist"),
    ],
)
def test_what_is_refused_starts_nothing(tmp_path, schedule, logs, message):
    (tmp_path / "schedule.toml").write_text(schedule)
    (tmp_path / "script.py").write_text("print('it ran')")
    done = subprocess.run(
        [*NFDT, "chaos", "--logs", logs, "schedule.toml", "script.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""

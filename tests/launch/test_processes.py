import logging.handlers
import os
import queue
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from nfdt.core.work.slot_connection import REGISTERED
from nfdt.launch.fork_client import COMMAND
from nfdt.launch.processes import CRASHES, FAILED_STARTS, LocalLauncher
from nfdt.launch.slot_process import SLOT, SlotOptions, shared_environment, slot_arguments, slot_environment

DEADLINE_S = 30
# A stand-in for a slot: it reports its start through a pipe and ends when its standard input does.
STAND_IN = "import os, sys; os.write({fd}, b'%d\\n' % os.getpid()); sys.stdin.read()"
STUBBORN = (
    "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "os.write({fd}, b'%d\\n' % os.getpid()); signal.pause()"
)


class Announcements:
    """Reader of the process ids that stand-ins write into a fifo."""

    def __init__(self, path):
        os.mkfifo(path)
        self.path = path
        self._fd = os.open(path, os.O_RDWR)
        self._file = os.fdopen(self._fd, "rb", buffering=0)

    def next(self) -> int:
        return int(self._file.readline())


@pytest.fixture
def announcements(tmp_path):
    return Announcements(tmp_path / "fifo")


def options(tmp_path, announcements, body=STAND_IN, **kwargs):
    code = f"import os; fd = os.open({str(announcements.path)!r}, os.O_WRONLY); " + body.format(fd="fd")
    return SlotOptions("127.0.0.1:1", "secret", tmp_path / "logs", command=(sys.executable, "-c", code), **kwargs)


def ended(*pids):
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(processes, timeout=DEADLINE_S)[1]


@pytest.fixture
def launcher(tmp_path, announcements):
    launcher = LocalLauncher(options(tmp_path, announcements))
    yield launcher
    launcher.stop()


def test_the_token_is_in_the_environment_and_never_in_argv(tmp_path):
    chosen = SlotOptions("h:1", "secret", tmp_path)
    assert "secret" not in " ".join(slot_arguments(chosen, "worker", "w"))
    assert "secret" not in str(shared_environment(chosen, {}))
    assert "secret" not in repr(chosen)
    assert slot_environment(chosen, "worker", 0, {})["NFDT_TOKEN"] == "secret"


def test_workers_share_the_gpus_and_shards_take_none(tmp_path):
    chosen = SlotOptions("h:1", "t", tmp_path, gpus=("0", "1"))
    seen = [slot_environment(chosen, "worker", i, {})["CUDA_VISIBLE_DEVICES"] for i in range(3)]
    assert seen == ["0", "1", "0"]
    assert "CUDA_VISIBLE_DEVICES" not in slot_environment(chosen, "shard", 0, {})


def test_slots_are_started_and_all_end_with_stop(launcher, announcements):
    launcher.ensure("worker", 2)
    launcher.ensure("shard", 1)
    pids = {announcements.next() for _ in range(3)}
    assert set(launcher.pids) == pids
    launcher.stop()
    assert ended(*pids)


def test_a_slot_that_dies_is_replaced(launcher, announcements):
    launcher.ensure("worker", 1)
    first = announcements.next()
    os.kill(first, signal.SIGKILL)
    assert announcements.next() != first


def test_a_slot_that_ignores_the_end_is_killed(tmp_path, announcements, monkeypatch):
    monkeypatch.setattr("nfdt.launch.processes.TERMINATE_S", 0.1)
    launcher = LocalLauncher(options(tmp_path, announcements, STUBBORN))
    launcher.ensure("worker", 1)
    pid = announcements.next()
    launcher.stop()
    assert ended(pid)


def test_drained_slots_end_by_themselves_and_are_not_replaced(tmp_path, announcements):
    body = "os.write({fd}, b'%d\\n' % os.getpid()); os._exit(3 if os.read(0, 10) == b'\\n' else 4)"
    launcher = LocalLauncher(options(tmp_path, announcements, body, grace_s=120.0))
    launcher.ensure("worker", 2)
    launcher.ensure("shard", 1)
    pids = {announcements.next() for _ in range(3)}
    names = [name for name in slot_names(tmp_path) if launcher.end_of(name, 0) is None]
    launcher.drain()
    assert ended(*pids)
    assert launcher.pids == []
    assert {launcher.end_of(name, 0).returncode for name in names} == {3}
    launcher.stop()
    assert len(slot_names(tmp_path)) == 3


def test_slots_that_do_not_hand_over_in_time_are_left_to_stop(tmp_path, announcements, monkeypatch):
    monkeypatch.setattr("nfdt.launch.processes.TERMINATE_S", 0.1)
    launcher = LocalLauncher(options(tmp_path, announcements, STUBBORN, grace_s=0.1))
    launcher.ensure("worker", 1)
    pid = announcements.next()
    launcher.drain()
    assert launcher.pids == [pid]
    launcher.stop()
    assert ended(pid)


def slot_names(tmp_path):
    return [log.stem for log in (tmp_path / "logs").glob("*.log")]


def test_slots_that_crash_at_once_are_given_up(tmp_path, announcements, quick_restarts):
    launcher = LocalLauncher(options(tmp_path, announcements, "os.write({fd}, b'1\\n'); os._exit(1)"))
    launcher.ensure("worker", 1)
    for _ in range(CRASHES):
        announcements.next()
    assert launcher.given_up.wait(DEADLINE_S)
    launcher.stop()
    assert str(tmp_path) in launcher.failure


def test_slots_that_crash_after_their_registration_are_started_again(tmp_path, announcements, quick_restarts):
    registered = f"os.write(2, b'a slot {REGISTERED} 127.0.0.1:1\\n'); "
    launcher = LocalLauncher(options(tmp_path, announcements, registered + "os.write({fd}, b'1\\n'); os._exit(1)"))
    launcher.ensure("worker", 1)
    for _ in range(CRASHES + 2):
        announcements.next()
    assert not launcher.given_up.is_set()
    launcher.stop()


@pytest.fixture
def failed_starts(quick_restarts):
    """Provide the log messages of a launcher about failed starts, as they are written."""
    handler = logging.handlers.QueueHandler(queue.SimpleQueue())
    handler.addFilter(lambda record: "cannot be started" in record.getMessage())
    logging.getLogger("nfdt.launch.processes").addHandler(handler)
    yield handler.queue
    logging.getLogger("nfdt.launch.processes").removeHandler(handler)


def test_a_slot_that_cannot_be_started_leaves_the_others_alive_and_is_tried_again(
    tmp_path, launcher, announcements, failed_starts
):
    launcher.ensure("worker", 2)
    killed, other = announcements.next(), announcements.next()
    (tmp_path / "logs").rename(tmp_path / "away")  # no log can be opened, as with a full disk or too many files
    os.kill(killed, signal.SIGKILL)
    for _ in range(FAILED_STARTS):
        failed_starts.get(timeout=DEADLINE_S)
    assert launcher.pids == [other]
    assert "worker slot" in launcher.failure
    assert str(tmp_path / "logs") in launcher.failure

    (tmp_path / "away").rename(tmp_path / "logs")
    replacement = announcements.next()
    assert replacement not in (killed, other)
    assert set(launcher.pids) == {other, replacement}
    assert launcher.failure is None


def test_slots_end_when_the_parent_is_killed(tmp_path, announcements):
    slot = (
        "import os, signal; from nfdt.core.host.child_process import die_with_parent; die_with_parent(); "
        f"os.write(os.open({str(announcements.path)!r}, os.O_WRONLY), b'%d\\n' % os.getpid()); signal.pause()"
    )
    program = f"""
import sys, signal
from pathlib import Path
from nfdt.launch.processes import LocalLauncher
from nfdt.launch.slot_process import SlotOptions
command = (sys.executable, "-c", {slot!r})
launcher = LocalLauncher(SlotOptions("h:1", "t", Path({str(tmp_path / "logs")!r}), command=command))
launcher.ensure("worker", 2)
signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    pids = [announcements.next(), announcements.next()]
    parent.kill()
    parent.wait(DEADLINE_S)
    assert ended(*pids)


def test_stop_is_idempotent_and_leaves_no_thread(tmp_path, announcements):
    before = threading.active_count()
    launcher = LocalLauncher(options(tmp_path, announcements))
    launcher.stop()
    launcher.stop()
    assert threading.active_count() == before


def test_how_a_slot_ended_is_known_by_its_name(tmp_path, announcements):
    launcher = LocalLauncher(options(tmp_path, announcements))
    try:
        launcher.ensure("worker", 1)
        pid = announcements.next()
        (log,) = (tmp_path / "logs").glob("worker-0-*.log")
        while launcher.pids != [pid]:
            pass  # it has reported this before the launcher notices
        assert launcher.end_of(log.stem, 0.0) is None, "it lives"
        os.kill(pid, signal.SIGKILL)
        end = launcher.end_of(log.stem, DEADLINE_S)
        assert (end.returncode, end.log) == (-signal.SIGKILL, log)
        assert launcher.end_of("another-slot", DEADLINE_S) is None
    finally:
        launcher.stop()


@pytest.mark.parametrize("command", [SLOT, COMMAND], ids=["slot", "fork server"])
def test_a_file_where_the_user_is_shadows_no_module_of_ours(tmp_path, command):
    (tmp_path / "queue.py").write_text("raise RuntimeError('the user has a file of this name')")
    python = command[: command.index("-m")]
    subprocess.run([*python, "-c", "import queue"], cwd=tmp_path, check=True, timeout=DEADLINE_S)

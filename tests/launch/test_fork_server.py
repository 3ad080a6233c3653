"""Fork server alone, with programs that import almost nothing in place of slots."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from nfdt.launch.fork_client import NOT_FORKED, ForkServerClient

DEADLINE_S = 30
# A fork server whose slots run the code in their argument.
PROGRAM = """
import os, socket, numpy
from nfdt.launch.fork_server import ForkServer
{before}
arguments = ForkServer(socket.socket(fileno=os.dup(0))).serve()
if arguments:
    exec(arguments[0])
"""
WAIT = "import sys; sys.stdin.read()"


class Yard:
    """Fork server with the logs of its slots."""

    def __init__(self, directory, before="", **environment):
        self.directory = directory
        self.environment = {**os.environ, **environment}
        program = [sys.executable, "-c", PROGRAM.format(before=before)]
        self.fork_server = ForkServerClient.start(self.environment, directory / "fork-server.log", command=program)
        self.slots = []

    def fork(self, code, **changes):
        """Start a slot; return it and the path of its output."""
        path = self.directory / f"{len(self.slots)}.log"
        environment = {k: v for k, v in {**self.environment, **changes}.items() if v is not None}
        with path.open("w") as log:
            self.slots.append(self.fork_server.fork([code], "nfdt slot 1", environment, log.fileno()))
        return self.slots[-1], path

    def output_of(self, code, **changes):
        """Return the output of a slot that runs ``code`` to its end."""
        slot, path = self.fork(code, **changes)
        assert slot.wait(DEADLINE_S) == 0, path.read_text()
        return path.read_text().strip()

    def close(self):
        for slot in self.slots:
            slot.terminate()
            slot.stdin.close()
        self.fork_server.stop()


@pytest.fixture
def yard(tmp_path):
    yard = Yard(tmp_path, GONE="1", OLD="1")
    yield yard
    yard.close()


def ended(*pids):
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return not psutil.wait_procs(processes, timeout=DEADLINE_S)[1]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("raise ValueError", 1),
    ],
)
def test_the_exit_code_is_that_of_popen(yard, code, expected):
    slot, _ = yard.fork(code)
    assert slot.wait(DEADLINE_S) == slot.poll() == slot.returncode == expected
    assert slot.pid > 0
    assert ended(slot.pid)  # no zombie remains


def test_a_slot_has_its_own_environment(yard):
    names = ("GONE", "OLD", "NEW", "OPENBLAS_NUM_THREADS")
    code = f"import os; print([os.environ.get(n) for n in {names}])"
    assert yard.output_of(code, GONE=None, OLD="2", NEW="3") == "[None, '2', '3', None]"
    assert yard.output_of(code) == "['1', '1', None, None]"


def test_the_fork_server_never_has_what_only_slots_get(yard):
    yard.output_of("pass", NFDT_TOKEN="secret")
    fork_server = psutil.Process(yard.fork_server.pid)
    assert "secret" not in str(fork_server.environ()) + str(fork_server.cmdline())


def test_slots_draw_different_random_numbers(yard):
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    first, second = yard.output_of(code).split(), yard.output_of(code).split()
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_slot_inherits_no_descriptor_but_its_own_three(yard):
    yard.fork(WAIT)
    code = "import os; print([n for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')])"
    inherited = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert yard.output_of(code) == inherited.stdout.strip() == "['0', '1', '2']"


def test_a_slot_leads_its_own_session_and_handles_signals_as_a_new_process(yard):
    code = (
        "import os, signal; print(os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, "
        "signal.set_wakeup_fd(-1), open('/proc/self/comm').read().strip())"
    )
    assert yard.output_of(code) == "True True -1 nfdt slot 1"


def test_a_slot_reads_its_own_standard_input(yard):
    first, _ = yard.fork(WAIT)
    second, _ = yard.fork(WAIT)
    second.stdin.close()
    assert second.wait(DEADLINE_S) == 0
    assert first.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.01)
    first.stdin.close()
    assert first.wait(DEADLINE_S) == 0


def test_terminate_ends_a_slot_by_sigterm(yard):
    slot, _ = yard.fork(WAIT)
    while slot.pid is None:
        slot.poll()
    slot.terminate()
    assert slot.wait(DEADLINE_S) == -signal.SIGTERM
    slot.terminate()


def test_the_fork_server_outlives_a_sigterm_to_all_processes_and_its_slots_take_theirs(yard):
    first, _ = yard.fork(WAIT)
    while first.pid is None:
        first.poll()
    os.kill(yard.fork_server.pid, signal.SIGTERM)
    assert yard.output_of("print('alive')") == "alive"
    assert first.poll() is None
    first.terminate()
    assert first.wait(DEADLINE_S) == -signal.SIGTERM


def test_a_slot_that_is_terminated_before_it_exists_does_not_remain(tmp_path):
    os.mkfifo(tmp_path / "gate")
    yard = Yard(tmp_path, before=f"open({str(tmp_path / 'gate')!r}).read()")
    try:
        unborn, _ = yard.fork(WAIT)
        assert unborn.poll() is None
        unborn.terminate()
        assert unborn.wait(DEADLINE_S) == -signal.SIGTERM
        (tmp_path / "gate").write_text("open")
        assert yard.output_of("print('alive')") == "alive"
        assert ended(*(child.pid for child in psutil.Process(yard.fork_server.pid).children()))
    finally:
        yard.close()


def test_a_fork_server_that_is_killed_takes_its_slots_along(yard):
    slots = [yard.fork(WAIT)[0] for _ in range(2)]
    while any(slot.poll() is None and slot.pid is None for slot in slots):
        pass
    os.kill(yard.fork_server.pid, signal.SIGKILL)
    assert [slot.wait(DEADLINE_S) for slot in slots] == [-signal.SIGKILL] * 2
    assert ended(*(slot.pid for slot in slots))
    assert yard.fork_server.ready
    assert yard.fork_server._process.wait(DEADLINE_S) == yard.fork_server.returncode == -signal.SIGKILL
    with pytest.raises(OSError, match="Broken pipe"):
        yard.fork(WAIT)


def test_a_process_with_threads_does_not_fork(tmp_path):
    before = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    yard = Yard(tmp_path, before=before)
    slot, _ = yard.fork("pass")
    assert slot.wait(DEADLINE_S) == NOT_FORKED
    assert slot.pid is None
    assert not yard.fork_server.ready
    assert "one thread" in yard.fork_server.log.read_text()
    yard.close()


def test_a_fork_that_fails_is_one_slot_s_crash(tmp_path):
    before = """
def fork(forks=[OSError(11, "no memory for it"), os.fork]):
    found = forks.pop(0)
    if isinstance(found, OSError):
        raise found
    return found()

os.fork, real = fork, os.fork
"""
    yard = Yard(tmp_path, before=before)
    slot, _ = yard.fork("pass")
    assert slot.wait(DEADLINE_S) == NOT_FORKED
    assert slot.pid is None
    assert yard.output_of("print('next')") == "next"
    assert "no memory for it" in yard.fork_server.log.read_text()
    yard.close()

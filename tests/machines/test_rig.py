"""Machines of a rig: what is theirs alone, what their links carry, and what pausing and killing reaches."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.support.machine_programs import ECHO, SPEAK, Conversation, listening, python, transfer_mbit
from tests.support.machines import RigError
from tests.support.machines import rig as rig_module

WHO = "import os, socket; print(socket.gethostname(), open('/proc/sys/kernel/random/boot_id').read(), end='')"
BUSY = """
import time
end = time.monotonic() + 1
while time.monotonic() < end:
    pass
print(time.process_time())
"""
FAMILY = "sleep 1000 & setsid sleep 1000 & wait"
SILENCE_S = 0.5


def test_machines_differ_in_name_and_not_in_boot_id(machines):
    rig = machines(2)
    (name0, boot0), (name1, boot1) = (machine.run(python(WHO)).stdout.split() for machine in rig)
    assert (name0, name1) == ("node0", "node1")
    assert boot0 == boot1


def test_machines_may_be_named(machines):
    rig = machines(["server", "gpu"])
    assert rig["gpu"].run(["hostname"]).stdout == "gpu\n"
    assert rig["server"].run(["getent", "hosts", "gpu"]).stdout.split() == [rig[1].address, "gpu"]


def test_shared_memory_and_own_folders_are_separate(machines, tmp_path):
    private = tmp_path / "private"
    private.mkdir()
    rig = machines(2, private=[private])
    folders = ["/dev/shm", "$HOME", "$XDG_CACHE_HOME", "$XDG_RUNTIME_DIR", "$TMPDIR", str(private)]
    listing = ["sh", "-c", f"ls -d {' '.join(f'{folder}/*' for folder in folders)} | wc -l"]
    rig[0].run(["sh", "-ec", "; ".join(f"echo zero > {folder}/file" for folder in folders)])
    assert [int(machine.run(listing, check=False).stdout) for machine in rig] == [6, 0]
    assert rig[0].from_outside(rig[0].home / "file").read_text() == "zero\n"
    assert not (private / "file").exists()


def test_the_file_system_is_shared_otherwise(machines, tmp_path):
    rig = machines(2)
    rig[0].run(["sh", "-c", "echo shared > file"], cwd=tmp_path)
    assert rig[1].run(["cat", tmp_path / "file"]).stdout == "shared\n"
    assert rig[1].run(["pwd"]).stdout.strip() == str(Path.cwd())


def test_memory_of_the_older_kind_is_separate(machines):
    rig = machines(2)
    rig[0].run(["ipcmk", "-M", "4096"])
    segments = [machine.run(["ipcs", "-m"]).stdout.count("0x") for machine in rig]
    assert segments == [1, 0]


def test_machines_reach_each_other_and_themselves(machines):
    one, two = machines(2)
    for near, far in ((one, two), (two, one), (one, one)):
        talk = Conversation(near, far)
        talk.say("hello")
        assert talk.answer() == "hello"


def test_rigs_side_by_side_do_not_meet(machines):
    first, second = machines(2), machines(1)
    assert first[0].address == second[0].address
    _, port = listening(first[1], ECHO)
    alone = second[0].run(python(SPEAK, first[1].address, port), check=False)
    assert "No route to host" in alone.stderr
    talk = Conversation(first[0], first[1])
    talk.say("still here")
    assert talk.answer() == "still here"


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)], ids=["towards the switch", "from the switch"])
def test_links_carry_their_rate_in_both_directions(machines, source, target):
    rig = machines(2)
    rig[0].set_rate(80)
    assert transfer_mbit(rig[source], rig[target], 6_000_000) == pytest.approx(80, rel=0.25)


def test_the_rate_of_all_links_is_set_at_the_start_and_changes_later(machines):
    one, two = machines(2, rate_mbit=40)
    assert transfer_mbit(one, two, 3_000_000) == pytest.approx(40, rel=0.25)
    for machine in (one, two):
        machine.set_rate(None)
    assert transfer_mbit(one, two, 30_000_000) > 100


def test_a_limit_of_processors_holds(machines):
    (machine,) = machines(1, cpus=0.2)
    assert 0 < float(machine.run(python(BUSY)).stdout) < 0.4


def test_a_limit_of_processors_without_control_groups_is_refused(machines, monkeypatch, tmp_path):
    monkeypatch.setattr(rig_module, "CGROUPS", (tmp_path,))
    with pytest.raises(RigError, match="control group"):
        machines(1, cpus=0.5)
    machines(1)


def test_a_cut_link_carries_nothing_and_a_mended_one_goes_on(machines):
    one, two = machines(2)
    talk = Conversation(one, two)
    talk.say("before")
    assert talk.answer() == "before"
    two.cut()
    talk.say("meanwhile")
    assert talk.answer(SILENCE_S) == ""
    two.mend()
    assert talk.answer() == "meanwhile"


def test_pausing_stops_one_machine_only(machines):
    one, two, three = machines(3)
    far, near = Conversation(one, two), Conversation(one, three)
    two.pause()
    assert {psutil.Process(pid).status() for pid in two.processes()} == {psutil.STATUS_STOPPED}
    for talk in (far, near):
        talk.say("hello")
    assert near.answer() == "hello"
    assert far.answer(SILENCE_S) == ""
    two.resume()
    assert far.answer() == "hello"


def test_killing_ends_all_processes_of_one_machine_only(machines):
    one, two = machines(2)
    mine, theirs = (machine.popen(["sh", "-c", FAMILY]) for machine in (one, two))
    one.kill()
    assert one.processes() == []
    assert mine.wait(10) == -signal.SIGKILL
    assert theirs.poll() is None
    assert theirs.pid in two.processes()
    assert one.run(["hostname"]).stdout == "node0\n"


def test_output_goes_to_files(machines, tmp_path):
    (machine,) = machines(1, logs=tmp_path)
    process = machine.popen(["sh", "-c", "echo out; echo err >&2"])
    assert process.wait(10) == 0
    assert (process.output(), process.error_output()) == ("out\n", "err\n")
    assert process.out.parent == tmp_path


def test_a_command_that_fails_is_named_with_its_output(machines):
    (machine,) = machines(1)
    with pytest.raises(RigError, match="node0: 'sh -c echo why; exit 3' ended with 3\nwhy"):
        machine.run(["sh", "-c", "echo why; exit 3"])
    assert machine.run(["sh", "-c", "exit 3"], check=False).returncode == 3


@pytest.mark.parametrize("names", [0, 251, ["same", "same"]])
def test_impossible_machines_are_refused(machines, names):
    with pytest.raises(RigError, match="1 to 250 machines"):
        machines(names)

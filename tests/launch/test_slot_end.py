"""Messages about slot processes that have ended."""

import os
import signal

import pytest

from nfdt.core.work.slot_connection import REGISTERED
from nfdt.launch.slot_process import LOG_BYTES, MOST_KEPT, SlotEnd, keep_log


@pytest.mark.parametrize(
    ("returncode", "needle"),
    [
        (-signal.SIGKILL, "was ended by SIGKILL (usually the kernel's out-of-memory killer"),
        (-signal.SIGSEGV, "was ended by SIGSEGV (a crash in native code"),
        (-signal.SIGUSR1, "was ended by SIGUSR1;"),
        (-(signal.SIGRTMIN + 3), f"was ended by signal {signal.SIGRTMIN + 3};"),
        (3, "exited with code 3;"),
    ],
)
def test_an_end_names_signal_cause_and_log(tmp_path, returncode, needle):
    text = str(SlotEnd(returncode, tmp_path / "slot.log"))
    assert needle in text
    assert text.endswith(f"log: {tmp_path / 'slot.log'}")


def test_an_end_contains_the_last_line_of_the_log_of_a_process_that_failed_by_itself(tmp_path):
    log = tmp_path / "slot.log"
    log.write_text("Traceback\n2026-11-22 20:29:12,077 ERROR nfdt.worker.slot 127.0.0.1:1 does not answer.\n")
    assert str(SlotEnd.read(4, log)) == f"its process exited with code 4: 127.0.0.1:1 does not answer; log: {log}"
    assert "does not answer" not in str(SlotEnd.read(-signal.SIGKILL, log))
    assert not SlotEnd.read(4, log).registered


def test_an_end_knows_from_a_long_log_whether_the_slot_was_registered(tmp_path):
    log = tmp_path / "slot.log"
    log.write_text(f"worker-0 {REGISTERED} 127.0.0.1:1\n" + "x" * (3 * LOG_BYTES) + "\nthe reason\n")
    end = SlotEnd.read(1, log)
    assert end.registered
    assert end.reason == "the reason"
    assert SlotEnd.read(1, tmp_path / "no.log") == SlotEnd(1, tmp_path / "no.log")


def test_the_newest_logs_are_kept_and_no_other_file_is_touched(tmp_path):
    folder, log = tmp_path / "kept", tmp_path / "local-worker-0-new.log"
    folder.mkdir()
    log.write_text("the end")
    for number in range(MOST_KEPT):
        (folder / f"local-worker-0-{number}.log").touch()
        os.utime(folder / f"local-worker-0-{number}.log", (number, number))
    (folder / "elsewhere-worker-0.log").touch()
    os.utime(folder / "elsewhere-worker-0.log", (0, 0))
    assert keep_log(log, folder).read_text() == "the end"
    names = {path.name for path in folder.iterdir()}
    assert len(names) == MOST_KEPT + 1
    assert "local-worker-0-0.log" not in names
    assert "elsewhere-worker-0.log" in names


def test_a_log_that_cannot_be_kept_is_named_where_it_is(tmp_path):
    (tmp_path / "file").touch()
    log = tmp_path / "local-worker-0.log"
    log.touch()
    assert keep_log(log, tmp_path / "file") == log

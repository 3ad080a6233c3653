from __future__ import annotations

import pytest

from nfdt.core.specs.horovod_options import NEWS
from nfdt.launch.horovod_log import GrowingFile, RingMessages, StallReader, describe, lost_machine

WARNING = (
    "[2026-11-20 21:06:49.4: W /build/horovod/common/stall_inspector.cc:107] One or more tensors were submitted to be "
    "reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 7 "
    "seconds. This may indicate that different ranks are trying to submit different tensors or that only subset of "
    "ranks is submitting tensors, which will cause deadlock. "
)
LINES = [WARNING, "Missing ranks:", "1: [hfdt_gradient]", "12!: [hfdt_gradient, hfdt_order ...]"]


@pytest.mark.parametrize("source", ["", "[1,0]<stderr>:", "[0]<stderr>:"], ids=["world", "mpirun", "horovodrun"])
def test_a_warning_names_the_missing_ranks_and_their_tensors(source):
    (stall,) = StallReader().read([source + line for line in LINES])
    assert stall.missing == {1: ("hfdt_gradient",), 12: ("hfdt_gradient", "hfdt_order")}
    assert describe(stall) == {
        "waiting_for": ["rank 1", "rank 12"],
        "since_s": 7.0,
        "tensors": ["hfdt_gradient", "hfdt_order"],
    }


def test_two_warnings_and_lines_of_other_ranks_between_them_are_kept_apart():
    own = [f"[1,0]<stderr>:{line}" for line in LINES[:3]]
    other = "[1,1]<stderr>:1: [no warning of ours]"
    found = StallReader().read([own[0], other, *own[1:], *own, "[1,0]<stderr>:something else"])
    assert [stall.missing for stall in found] == [{1: ("hfdt_gradient",)}] * 2


def test_a_warning_that_is_read_in_two_parts_is_still_one():
    reader = StallReader()
    assert reader.read(LINES[:2]) == []
    assert [stall.since_s for stall in reader.read(LINES[2:])] == [7.0]


def test_a_warning_that_was_written_in_pieces_is_put_together():
    source = "[1,0]<stderr>:"
    pieces = [source + line.replace(" ", f" {source}") for line in LINES]
    (stall,) = StallReader().read(pieces)
    assert sorted(stall.missing) == [1, 12]


def test_other_lines_are_no_news():
    assert StallReader().read(["Epoch 1", "1: [2, 3]", "Missing ranks:"]) == []


def test_a_growing_file_gives_whole_lines_once(tmp_path):
    path = tmp_path / "log"
    file = GrowingFile(path)
    assert file.lines() == []
    path.write_text("one\ntw")
    assert file.lines() == ["one"]
    assert file.lines() == []
    path.write_text("one\ntwo\n")
    assert file.lines() == ["two"]


def test_news_are_reported_once(tmp_path):
    log = tmp_path / "log"
    news = RingMessages(log)
    log.write_text("\n".join(LINES) + "\n")
    stalls, texts = news.read()
    assert len(stalls) == 1
    assert texts == []
    with log.open("a") as file:
        file.write(f"[1]<stderr>:2026-11-20 WARNING hfdt.runtime.elastic.rank {NEWS}ranks came or went\n")
    assert news.read() == ([], ["ranks came or went"])
    assert news.read() == ([], [])


@pytest.mark.parametrize(
    "line",
    [
        "[2]<stderr>:Timeout, server node2 not responding.\r",
        "  Remote daemon: [[30190,0],2] on node node2",
    ],
    ids=["ssh", "mpirun"],
)
def test_the_machine_that_a_launcher_has_lost_is_known_from_its_log(line):
    assert lost_machine(["rank 0 failed", line]) == "node2"
    assert lost_machine(["rank 0 failed"]) == ""

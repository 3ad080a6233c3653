"""Timelines: one whose writer was killed becomes valid JSON; a finished one keeps its bytes."""

from __future__ import annotations

import json

import pytest

from nfdt.launch.horovod_log import finish_timeline, timelines

WHOLE = (
    '[\n{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":17}},\n'
    '{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},\n'
    '{"ph": "B", "name": "ALLREDUCE", "ts": 38791, "pid": 1},{"ph": "X", "name": "0", "ts": 39, "pid": 1, "dur": 0},'
    '{"ph": "E", "ts": 38792, "pid": 1, "args": {"dtype": "float32", "shape": "[10]"}}]'
)
EVENTS = json.loads(WHOLE)


def test_a_finished_timeline_is_left_alone(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(WHOLE)
    assert not finish_timeline(path)
    assert path.read_text() == WHOLE


def first_whole_event(text: str) -> int:
    return text.index("}}") + 2


@pytest.mark.parametrize("cut", range(first_whole_event(WHOLE) + len(',\n{"ph'), len(WHOLE), 7))
def test_a_timeline_that_was_cut_off_keeps_its_whole_events(tmp_path, cut):
    path = tmp_path / "t.json"
    path.write_text(WHOLE[:cut])
    finish_timeline(path)
    events = json.loads(path.read_text())
    assert events == EVENTS[: len(events)]
    assert len(events) >= 1


def test_what_is_no_timeline_stays_as_it_is(tmp_path):
    path = tmp_path / "t.json"
    assert not finish_timeline(path)
    path.write_text("a text of another program")
    assert not finish_timeline(path)
    assert path.read_text() == "a text of another program"


def test_an_elastic_ring_s_later_timelines_are_found(tmp_path):
    for name in ("t.json", "t.1.json", "t.2.json", "t.x.json", "u.1.json"):
        (tmp_path / name).write_text("")
    assert [path.name for path in timelines(tmp_path / "t.json")] == ["t.json", "t.1.json", "t.2.json"]

import pytest

from nfdt.core.errors import UsageError
from nfdt.schedulers.throughput import StepTime
from nfdt.simulate.cluster import parse_cluster, read_cluster

TEXT = """
seed = 7

[shards]
count = 2
apply_ms = 0.5
bandwidth_mbit = 10_000

[links.rack]
bandwidth_mbit = 1000
latency_ms = 0.2

[[workers]]
count = 3
step_ms = 50
jitter = 0.1
link = "rack"

[[workers]]
step_ms = 200
overhead_ms = 20
drift = [{ at_s = 60, slowdown = 2 }]
pauses = [{ at_s = 10, seconds = 5 }]
fails_at_s = 100
returns_after_s = 30
"""


def test_a_description_is_read_from_a_file(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(TEXT)
    found = read_cluster(path)
    assert (found.seed, found.count, found.shards.count) == (7, 4, 2)
    assert [w.step_ms for w in found.each()] == [50, 50, 50, 200]
    assert found.each()[0].link == "rack"
    assert found.each()[3].drift[0].slowdown == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "workers"),
        ({"workers": []}, "workers"),
        ({"workers": [{"step_ms": -1}]}, "workers.0.step_ms"),
        ({"workers": [{"step_ms": 1, "stepms": 2}]}, "workers.0.stepms"),
        ({"workers": [{"step_ms": 1, "overhead_ms": 2}]}, "less than step_ms=1"),
        ({"workers": [{"count": 2}]}, "step_ms, speed: expected one of them"),
        ({"workers": [{"step_ms": 1, "speed": 1}]}, "step_ms, speed: expected one of them"),
        ({"workers": [{"speed": 1, "overhead_ms": 1}]}, "expected step_ms with it"),
        ({"workers": [{"speed": 0}]}, "workers.0.speed"),
        ({"workers": [{"step_ms": 1, "link": "rack"}]}, r"a name under \[links\]: none is described"),
        ({"workers": [{"step_ms": 1, "returns_after_s": 2}]}, "fails_at_s"),
        ({"workers": [{"step_ms": 1, "drift": [{"at_s": 2, "slowdown": 1}, {"at_s": 1, "slowdown": 1}]}]}, "order"),
        ({"workers": [{"step_ms": 1, "count": 9000}, {"step_ms": 1, "count": 9000}]}, "at most 16384"),
        ({"workers": [{"step_ms": 1}], "shards": {"count": 0}}, "shards.count"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(given, message):
    with pytest.raises(UsageError, match=message):
        parse_cluster(given, "c.toml")


def test_a_cluster_has_up_to_sixteen_thousand_workers():
    described = parse_cluster({"workers": [{"step_ms": 1, "count": 8192}, {"step_ms": 2, "count": 8192}]})
    assert len(described.each()) == described.count == 16_384


def test_a_file_that_is_no_toml_or_not_there_is_reported(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text("workers = [")
    with pytest.raises(UsageError, match="expected TOML"):
        read_cluster(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_cluster(tmp_path / "other.toml")


@pytest.mark.parametrize(("apply_ms", "expected_s"), [(None, 0.002), (0.5, 0.0005)])
def test_speeds_become_step_times_of_the_machine_that_was_measured(apply_ms, expected_s):
    workers = [{"count": 2, "speed": 1}, {"speed": 0.25, "jitter": 0.1}, {"step_ms": 7}]
    relative = parse_cluster({"workers": workers, "shards": {"count": 2, "apply_ms": apply_ms}})
    assert relative.is_relative
    found = relative.measured(StepTime(0.01, 0.001), 30, 0.004)
    assert not found.is_relative
    assert [(w.step_ms, w.overhead_ms) for w in found.each()] == [(40, 10), (40, 10), (160, 40), (7, 0)]
    assert found.each()[2].jitter == 0.1
    assert found.shards.apply_s == expected_s


@pytest.mark.parametrize(
    ("more", "linked"),
    [
        ({}, False),
        ({"links": {"rack": {}}, "shards": {"apply_ms": 1}}, False),
        ({"links": {"rack": {"latency_ms": 1}}}, True),
        ({"shards": {"bandwidth_mbit": 100}}, True),
    ],
)
def test_a_cluster_knows_whether_bytes_take_time(more, linked):
    assert parse_cluster({"workers": [{"step_ms": 1}], **more}).has_links is linked

import pytest

from nfdt.core.errors import UsageError
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
    ("given", "told"),
    [
        ({}, "workers"),
        ({"workers": []}, "workers"),
        ({"workers": [{"step_ms": -1}]}, "workers.0.step_ms"),
        ({"workers": [{"step_ms": 1, "stepms": 2}]}, "workers.0.stepms"),
        ({"workers": [{"step_ms": 1, "overhead_ms": 2}]}, "less than step_ms=1"),
        ({"workers": [{"step_ms": 1, "link": "rack"}]}, r"a name under \[links\]: none is described"),
        ({"workers": [{"step_ms": 1, "returns_after_s": 2}]}, "fails_at_s"),
        ({"workers": [{"step_ms": 1, "drift": [{"at_s": 2, "slowdown": 1}, {"at_s": 1, "slowdown": 1}]}]}, "order"),
        ({"workers": [{"step_ms": 1, "count": 4000}, {"step_ms": 1, "count": 4000}]}, "at most 4096"),
        ({"workers": [{"step_ms": 1}], "shards": {"count": 0}}, "shards.count"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(given, told):
    with pytest.raises(UsageError, match=told):
        parse_cluster(given, "c.toml")


def test_a_file_that_is_no_toml_or_not_there_is_told(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text("workers = [")
    with pytest.raises(UsageError, match="expected TOML"):
        read_cluster(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_cluster(tmp_path / "other.toml")

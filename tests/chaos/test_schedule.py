"""Schedules: what they accept, what they refuse, and the faults that they plan."""

from __future__ import annotations

import pytest

from nfdt.chaos.schedule import KINDS, ROLES, parse_schedule, plan_faults, read_schedule
from nfdt.core.errors import UsageError

WHOLE = """
seed = 7
[cluster]
workers = 3
shards = 2
tls = true
options = { algorithm = "ssp", staleness_bound = 2 }
[[fault]]
kind = "kill"
role = "server"
seconds = 5
at_s = 2.5
[[fault]]
kind = "slow"
role = "worker"
target = 2
seconds = 4
mbit = 1.5
at_step = 40
[[fault]]
kind = "corrupt"
role = "client"
random = { every_s = [1, 3], count = 4 }
"""


def fault(**fields) -> str:
    """Return a schedule with one fault, by default a kill of a worker."""
    chosen = {"kind": '"kill"', "role": '"worker"', "at_s": "1", **fields}
    rows = "\n".join(f"{name} = {value}" for name, value in chosen.items() if value)
    return f"[[fault]]\n{rows}\n"


def test_a_schedule_has_a_cluster_and_faults():
    schedule = parse_schedule(WHOLE)
    assert (schedule.seed, schedule.cluster.workers, schedule.cluster.shards) == (7, 3, 2)
    assert schedule.cluster.options == {"algorithm": "ssp", "staleness_bound": 2}
    assert [row.kind for row in schedule.fault] == ["kill", "slow", "corrupt"]
    assert schedule.fault[0].target == "random"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (fault(kind='"explode"'), r"fault\.1\.kind: .*'kill', 'stall', .* Received: 'explode'"),
        (fault(role='"disk"'), r"fault\.1\.role: .*'worker', 'shard', 'server' or 'client'"),
        (fault(colour="1"), r"fault\.1\.colour: unknown. Expected one of: kind, role, target, "),
        ("speed = 1", r"speed: unknown. Expected one of: seed, cluster, fault"),
        ("[cluster]\nmachines = 2", r"cluster\.machines: unknown. Expected one of: workers, shards, tls, options"),
        (fault(kind='"clock"'), "clock: the wall clock belongs to the whole machine"),
        (fault(kind='"cut"', role='"shard"', seconds="1"), "cut: expected role worker or client"),
        (fault(kind='"fill_disk"', seconds="1"), "fill_disk: expected role server"),
        (fault(kind='"stall"'), "stall: expected seconds"),
        (fault(kind='"slow"', seconds="1"), "slow: expected mbit or delay_ms"),
        (fault(seconds="1"), "kill of a worker: expected no seconds"),
        (fault(mbit="1"), "kill: expected no mbit"),
        (fault(at_step="1"), "expected one of at_s, at_step and random"),
        (fault(at_s=""), "expected one of at_s, at_step and random"),
        (fault(target="2"), "target: expected less than 2, the number of workers"),
        (fault(role='"server"', target="1"), "target: expected an index from 0 on; there is one server"),
        (fault(kind='"corrupt"'), "corrupt: expected tls = true"),
        (fault(at_s="", random="{ every_s = [3, 1], count = 1 }"), "least <= most"),
        ("[[fault]", "expected TOML"),
    ],
)
def test_a_refusal_names_what_is_allowed(text, message):
    with pytest.raises(UsageError, match=message):
        parse_schedule(text)


def test_a_refusal_names_the_file(tmp_path):
    with pytest.raises(UsageError, match=r"nothing\.toml: expected a file that can be read"):
        read_schedule(tmp_path / "nothing.toml")
    (tmp_path / "bad.toml").write_text("speed = 1")
    with pytest.raises(UsageError, match=r"bad\.toml: speed: unknown"):
        read_schedule(tmp_path / "bad.toml")


@pytest.mark.parametrize(("kind", "role"), [(kind, role) for kind in KINDS for role in ROLES])
def test_the_table_decides_which_faults_a_role_can_have(kind, role):
    facts = KINDS[kind]
    amounts = {name: "1" for name in facts.needs} | ({facts.takes[0]: "1"} if facts.one_of else {})
    text = "[cluster]\ntls = true\n" + fault(kind=f'"{kind}"', role=f'"{role}"', **amounts)
    if role in facts.roles:
        assert parse_schedule(text).fault[0].role == role
    else:
        with pytest.raises(UsageError, match="expected role"):
            parse_schedule(text)


def test_the_same_seed_plans_the_same_faults():
    planned = plan_faults(parse_schedule(WHOLE))
    assert planned == plan_faults(parse_schedule(WHOLE))
    assert planned != plan_faults(parse_schedule(WHOLE.replace("seed = 7", "seed = 8")))


def test_random_times_follow_each_other():
    times = [one.at_s for one in plan_faults(parse_schedule(WHOLE)) if one.row.kind == "corrupt"]
    assert len(times) == 4
    assert all(1 <= later - earlier <= 3 for earlier, later in zip([0.0, *times], times, strict=False))


def test_faults_are_planned_by_their_times_and_then_by_steps():
    planned = plan_faults(parse_schedule(WHOLE))
    assert [one.number for one in planned] == list(range(1, 7))
    assert [one.at_s for one in planned[:-1]] == sorted(one.at_s for one in planned[:-1])
    assert planned[-1].at_step == 40


def test_a_fault_is_due_by_time_or_by_steps():
    *timed, stepped = plan_faults(parse_schedule(WHOLE))
    kill = next(one for one in timed if one.row.kind == "kill")
    assert not kill.is_due(2.4, 1000)
    assert kill.is_due(2.5, 0)
    assert not stepped.is_due(1000.0, 39)
    assert stepped.is_due(0.0, 40)


def test_the_draw_chooses_among_all_candidates():
    draws = plan_faults(parse_schedule(fault(at_s="", random="{ every_s = [1, 1], count = 60 }")))
    assert {one.choose("abc") for one in draws} == {"a", "b", "c"}

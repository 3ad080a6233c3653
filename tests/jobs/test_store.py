import sqlite3
import stat
import threading

import pytest

from nfdt.core.errors import NfdtError, UsageError
from nfdt.core.jobs.store import JobStore


@pytest.fixture
def store(tmp_path):
    store = JobStore(tmp_path / "jobs.sqlite", now=lambda: 7.0)
    store.add("a", "{}", session="s", owner="me")
    yield store
    store.close()


def states(store, job="a"):
    return [e.data["state"] for e in store.events(job) if e.kind == "state"]


def test_the_file_is_private(store, tmp_path):
    assert stat.S_IMODE((tmp_path / "jobs.sqlite").stat().st_mode) == 0o600


def test_a_new_job_is_queued_and_reports_it(store):
    assert store.get("a").state == "queued"
    assert states(store) == ["queued"]


@pytest.mark.parametrize(
    ("change", "durable"),
    [
        (lambda store: store.add("b", "{}", session="", owner=""), True),
        (lambda store: store.transition("a", "starting"), True),
        (lambda store: store.update("a", checkpoint_artifact="0" * 64, checkpoint_epochs=1), True),
        (lambda store: store.update("a", epoch=1), False),
        (lambda store: store.append("a", "log", {"text": "x"}), False),
    ],
    ids=["new job", "state", "checkpoint", "epoch", "event"],
)
def test_states_and_checkpoints_are_on_the_disk_before_others_learn_of_them(store, change, durable):
    modes = []

    def note(statement):
        if statement.startswith("PRAGMA synchronous="):
            modes.append(statement.rpartition("=")[2])
        elif statement == "COMMIT":
            modes.append("commit")

    store._database.set_trace_callback(note)
    change(store)
    assert modes == (["FULL", "commit", "NORMAL"] if durable else ["commit"])


def test_the_latest_events_of_a_kind_come_in_order(store):
    for number in range(4):
        store.append("a", "log", {"text": number})
        store.append("a", "epoch_begin", {"epoch": number, "steps": None})
    assert [event.data["text"] for event in store.latest("a", ["log"], 3)] == [1, 2, 3]
    assert [event.kind for event in store.latest("a", ["log", "epoch_begin"], 3)] == [
        "epoch_begin",
        "log",
        "epoch_begin",
    ]


def test_events_are_numbered_within_their_job(store):
    store.add("b", "{}", session="", owner="")
    store.append("a", "log", {"text": "x"})
    assert [e.cursor for e in store.events("a")] == [1, 2]
    assert [e.cursor for e in store.events("b")] == [1]
    assert [e.data for e in store.events("a", after=1)] == [{"text": "x"}]


def test_a_transition_is_reported_with_reason_and_error(store):
    store.transition("a", "failed", reason="why", error={"message": "m"})
    assert store.events("a")[-1].data == {"state": "failed", "reason": "why", "error": {"message": "m"}}
    assert store.get("a").ended_at == 7.0


def test_a_refused_transition_leaves_no_trace(store):
    with pytest.raises(UsageError):
        store.transition("a", "succeeded")
    assert states(store) == ["queued"]
    assert store.get("a").state == "queued"


def test_an_unknown_job_is_a_usage_error(store):
    with pytest.raises(UsageError, match="nfdt jobs list"):
        store.get("zzz")


def test_facts_are_kept(store):
    store.update("a", epoch=3, result_artifact="f")
    assert (store.get("a").epoch, store.get("a").result_artifact) == (3, "f")
    with pytest.raises(UsageError, match="spec_json"):
        store.update("a", spec_json="x")


def test_a_waiter_is_woken_by_an_event(store):
    found = []
    thread = threading.Thread(target=lambda: found.extend(store.wait("a", 1, 30.0)))
    thread.start()
    store.append("a", "log", {})
    thread.join(30)
    # Another thread's event may have come before the wait began; either way it is found.
    assert [e.cursor for e in found] == [2]


def test_old_progress_is_thinned_to_the_last_of_each_epoch(store):
    for epoch in range(4):
        for step in range(3):
            store.append("a", "progress", {"epoch": epoch, "steps": step})
        store.append("a", "epoch_end", {"epoch": epoch})
    kept = [(e.data["epoch"], e.data["steps"]) for e in store.events("a") if e.kind == "progress"]
    assert kept == [(0, 2), (1, 2), (2, 2), (3, 0), (3, 1), (3, 2)]


def test_active_jobs_are_found_by_owner(store):
    store.add("b", "{}", session="", owner="me")
    store.transition("b", "cancelled")
    assert [job.job_id for job in store.active_of("me")] == ["a"]
    assert store.active_of("you") == []


def test_a_job_is_queued_again_and_its_restarts_are_counted_until_an_epoch_ends(store):
    for spec in ("", '{"epochs": 2}'):
        store.transition("a", "starting")
        store.requeue("a", "server restarted; from the beginning", spec)
    record = store.get("a")
    assert (record.state, record.started_at, record.spec_json) == ("queued", None, '{"epochs": 2}')
    assert store.restarts("a") == 2
    store.append("a", "epoch_end", {"epoch": 0})
    assert store.restarts("a") == 0


def test_a_full_disk_is_an_error_of_its_own_and_the_store_continues_when_there_is_room(store, tmp_path):
    store._database.execute("PRAGMA max_page_count=1")  # SQLite takes the number of pages there are
    with pytest.raises(NfdtError, match=r"jobs\.sqlite.* full.*Make room"):
        store.append("a", "log", {"text": "x" * 100_000})
    assert store.events("a", 1) == []
    store._database.execute("PRAGMA max_page_count=1000000")
    store.append("a", "log", {"text": "x"})
    assert [event.data for event in store.events("a", 1)] == [{"text": "x"}]


def test_a_commit_that_fails_leaves_no_transaction_open(store):
    class Full(sqlite3.Connection):
        full = False

        def execute(self, sql, *values):
            if self.full and sql == "COMMIT":
                raise sqlite3.OperationalError("disk I/O error")
            return super().execute(sql, *values)

    path = store._path
    store._database.close()
    store._database = sqlite3.connect(path, isolation_level=None, factory=Full)
    store._database.row_factory = sqlite3.Row
    store._database.full = True
    with pytest.raises(NfdtError, match="disk I/O error"):
        store.append("a", "log", {"text": "lost"})
    store._database.full = False
    store.append("a", "log", {"text": "kept"})
    assert [event.data for event in store.events("a", 1)] == [{"text": "kept"}]

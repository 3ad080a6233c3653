import json

import pytest

from nfdt.core.errors import ProtocolError
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.messages import MAX_LOGS, read_instruction, to_reply, to_report, to_request
from nfdt.core.work.tasks import Task


def summary(value):
    return to_report(pb.NextRequest(worker="worker-0", summary_json=json.dumps(value))).summary


def test_a_summary_holds_numbers_and_nested_lists_of_them():
    found = summary({"logs": {"loss": 1, "f1": [0.5, [2, 3]]}, "val_logs": {"f1": []}})
    assert (found.logs, found.val_logs) == ({"loss": 1.0, "f1": [0.5, [2.0, 3.0]]}, {"f1": []})
    assert summary({"logs": {}}).val_logs is None


@pytest.mark.parametrize("change", [{"kept": ["much"]}, {"kept": 1}, {"learning_rate": "much"}, {"restored": []}])
def test_a_decision_of_anything_else_is_refused(change):
    decision = {**vars(ins.CallbackDecision("{}")), **change}
    with pytest.raises(ProtocolError, match="Summary: expected"):
        summary({"logs": {}, "decision": decision})


@pytest.mark.parametrize("value", ["much", [1.0, "much"], {"nested": 1.0}, [[None]], None])
def test_a_summary_of_anything_else_is_refused(value):
    with pytest.raises(ProtocolError, match="number or list"):
        summary({"logs": {"loss": value}})


TASKS = (Task(3, 0, 8, pass_index=1, round=2, part=1, parts=4, samples=8), Task(4, 0, 2, data=b"batch", samples=2))

INSTRUCTIONS = [
    ins.Wait(),
    ins.Work(1, TASKS, budget_s=0.5, overlap=2, untrained=b"u", pull=True, no_weights=True, look_ahead=True),
    ins.BeginEpoch(2, b"u", 7),
    ins.BeginEpoch(2, b"u", 7, ins.StepShare((3, 1), 0.5)),
    ins.CollectState(3),
    ins.Evaluate(4, TASKS, b"u"),
    ins.Summarise(5, b"m", b"v", {"loss": 0.5}),
    ins.Summarise(5, b"m", b"v", {"loss": 0.5}, steps=7, callbacks="{}"),
    ins.Leave("done"),
    ins.MoveShards("job", 2, ("a:1", "b:2"), "token", b"PEM"),
]

REPORTS = [
    ins.Report(),
    ins.Report(busy=True),
    ins.Report(
        finished=(4, 3),
        epoch=2,
        logs={"loss": 0.5},
        times={3: ins.TaskTime(0.5, 0.25)},
        in_flight=frozenset({7, 5}),
        samples={3: 8, 4: 2},
    ),
    ins.Report(finished=(4, 3), metrics=b"m", counted=frozenset({5}), apart={4: b"one"}),
    ins.Report(epoch_state=ins.EpochState(1, b"u", b"m", 9)),
    ins.Report(evaluated=ins.Evaluated(1, (0, 2), b"m")),
    ins.Report(summary=ins.Summary({"loss": 1.0, "f1": [0.5, [2.0]]}, {"loss": 2.0})),
    ins.Report(summary=ins.Summary({"loss": 1.0})),
    ins.Report(summary=ins.Summary({"loss": 1.0}, decision=ins.CallbackDecision("{}"))),
    ins.Report(summary=ins.Summary({}, decision=ins.CallbackDecision("{}", 0.5, True, (1, 4), 1, ("stopped",)))),
]


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda value: type(value).__name__)
def test_a_worker_reads_the_instruction_that_the_server_wrote(instruction):
    assert read_instruction(to_reply(instruction)) == instruction


def test_no_log_shows_the_token_of_restored_shards():
    assert "secret" not in repr(ins.MoveShards("job", 2, ("a:1",), "secret", b"secret"))


def test_an_empty_reply_is_the_instruction_to_wait():
    assert read_instruction(pb.NextReply()) == ins.Wait()


@pytest.mark.parametrize("report", REPORTS, ids=range(len(REPORTS)))
def test_the_server_reads_the_report_that_a_worker_wrote(report):
    assert to_report(to_request(report)) == report


def test_a_model_with_more_metrics_than_a_report_may_have_reports_the_first_of_them():
    logs = {f"metric_{number}": float(number) for number in range(MAX_LOGS + 200)}
    report = to_report(to_request(ins.Report(logs=logs)))
    assert report.logs == dict(list(logs.items())[:MAX_LOGS])

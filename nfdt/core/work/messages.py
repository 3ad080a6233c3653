"""Conversion between protobuf messages of the Workers service and plain values, in both directions.

=========================  ====================================================
side                       functions
=========================  ====================================================
the server                 :func:`to_report` reads, :func:`to_reply` writes
a worker                   :func:`read_instruction` reads, :func:`to_request` writes
=========================  ====================================================
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from nfdt.core.errors import ProtocolError
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.tasks import Task

MAX_LOGS = 1000
MAX_TASK_S = 1e6
_UNMEASURED = ins.TaskTime(0.0)
MOST_LINES = 1000  # of one assignment
MOST_CHARACTERS = 2000  # of one line
LEVELS = ("info", "warning", "error")
_REPLY_FIELDS = {field.message_type.name: field.name for field in pb.NextReply.DESCRIPTOR.fields if field.message_type}
_Value = TypeVar("_Value")


def to_report(request: pb.NextRequest) -> ins.Report:
    """Return the report of a worker, checked.

    Raises:
        ProtocolError: a summary that is no JSON of the agreed form, or too many logs.
    """
    if len(request.logs) > MAX_LOGS:
        raise ProtocolError(f"Logs of {request.worker}: expected at most {MAX_LOGS}. Received: {len(request.logs)}.")
    evaluated = request.evaluated
    return ins.Report(
        finished=tuple(done.task for done in request.finished),
        epoch=request.epoch,
        logs=dict(request.logs),
        epoch_state=_read(ins.EpochState, request.epoch_state) if request.HasField("epoch_state") else None,
        evaluated=_read(ins.Evaluated, evaluated, tasks=tuple(evaluated.tasks))
        if request.HasField("evaluated")
        else None,
        summary=_to_summary(request.summary_json) if request.summary_json else None,
        in_flight=frozenset(request.in_flight),
        early=request.early,
        busy=request.busy,
        times={done.task: time for done in request.finished if (time := _to_time(done)) is not None},
        samples={done.task: done.samples for done in request.finished if done.samples},
        supply=_read(ins.Supply, request.supply) if request.HasField("supply") else None,
        metrics=request.metrics,
        counted=frozenset(request.counted),
        apart={done.task: done.metrics for done in request.finished if done.metrics},
    )


def _to_time(done: pb.Finished) -> ins.TaskTime | None:
    """Return the duration of a task, or None where it was not measured or is impossible."""
    times = ins.TaskTime(done.compute_s, done.exchange_s, done.push_s)
    total_s = times.compute_s + times.exchange_s
    sensible = times.compute_s >= 0 and times.exchange_s >= 0 and 0 < total_s <= MAX_TASK_S
    return times if sensible and 0 <= times.push_s <= MAX_TASK_S else None


def _to_summary(text: str) -> ins.Summary:
    try:
        value = json.loads(text)
        validation = value.get("val_logs")
        decided = value.get("decision")
        decision = None if decided is None else _to_decision(decided)
        return ins.Summary(_numbers(value["logs"]), None if validation is None else _numbers(validation), decision)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(
            f"Summary: expected {{'logs': {{name: number or list}}}}. Received: {text[:200]!r}."
        ) from error


def _to_decision(value: Mapping[str, Any]) -> ins.CallbackDecision:
    rate, restored = value["learning_rate"], value["restored"]
    return ins.CallbackDecision(
        state=str(value["state"]),
        learning_rate=None if rate is None else float(rate),
        stop=bool(value["stop"]),
        kept=tuple(map(int, value["kept"])),
        restored=None if restored is None else int(restored),
        messages=tuple(map(str, value["messages"])),
    )


def _numbers(logs: Mapping[str, Any]) -> dict[str, ins.LogValue]:
    return {str(name): _number(value) for name, value in logs.items()}


def _number(value: Any) -> ins.LogValue:
    return [_number(element) for element in value] if isinstance(value, list) else float(value)


def _to_task(task: Task) -> pb.Task:
    fields = vars(task).copy()
    # The message has no field for the number of samples. A streamed batch has no row numbers, so its range states it.
    samples = fields.pop("samples")
    if task.stop <= task.start:
        fields["stop"] = task.start + samples
    fields["pass"] = fields.pop("pass_index")
    return pb.Task(**fields)


def to_reply(instruction: ins.Instruction) -> pb.NextReply:
    """Return an instruction as the answer to Next: the message of the same name, with fields of the same names."""
    fields = vars(instruction)
    match instruction:
        case ins.Work() | ins.Evaluate():
            fields = fields | {"tasks": map(_to_task, instruction.tasks)}
        case ins.BeginEpoch(share=ins.StepShare()):
            fields = fields | {"share": vars(instruction.share)}
    name = type(instruction).__name__
    return pb.NextReply(**{_REPLY_FIELDS[name]: getattr(pb, name)(**fields)})


# ---- a worker's side


def read_instruction(reply: pb.NextReply) -> ins.Instruction:
    """Return the instruction in the answer to Next; :class:`~nfdt.core.work.instructions.Wait` for an empty one."""
    match reply.WhichOneof("instruction"):
        case "work":
            return _read(ins.Work, reply.work, tasks=tuple(map(_read_task, reply.work.tasks)))
        case "begin_epoch":
            begin = reply.begin_epoch
            share = _read(ins.StepShare, begin.share, rows=tuple(begin.share.rows)) if begin.HasField("share") else None
            return _read(ins.BeginEpoch, begin, share=share)
        case "collect_state":
            return _read(ins.CollectState, reply.collect_state)
        case "evaluate":
            return _read(ins.Evaluate, reply.evaluate, tasks=tuple(map(_read_task, reply.evaluate.tasks)))
        case "summarise":
            return _read(ins.Summarise, reply.summarise, logs=dict(reply.summarise.logs))
        case "leave":
            return _read(ins.Leave, reply.leave)
        case "move_shards":
            return read_move(reply.move_shards)
    return ins.Wait()


def read_move(move: pb.MoveShards) -> ins.MoveShards:
    """Return where the shards of a job serve, from the answer to Next or from an assignment."""
    return _read(ins.MoveShards, move, shards=tuple(move.shards))


def _read_task(message: pb.Task) -> Task:
    number_of_pass = getattr(message, "pass")  # a Python keyword
    return _read(Task, message, pass_index=number_of_pass, samples=message.stop - message.start)


def _read(kind: type[_Value], message: Any, **fields: Any) -> _Value:
    """Return a value with these fields, and with those of the same names of the message for all others."""
    for name in kind.__dataclass_fields__:  # type: ignore[attr-defined]
        if name not in fields:
            fields[name] = getattr(message, name)
    return kind(**fields)


def to_request(report: ins.Report) -> pb.NextRequest:
    """Inverse of :func:`to_report`; job, worker, waiting time and statistics are left to the caller."""
    names = ("epoch_state", "evaluated", "supply")
    answers: dict[str, Any] = {name: vars(answer) for name in names if (answer := getattr(report, name)) is not None}
    request = pb.NextRequest(
        finished=[_write_finished(report, task) for task in report.finished],
        epoch=report.epoch,
        logs=dict(itertools.islice(report.logs.items(), MAX_LOGS)),  # of the progress bar; metrics have no limit
        in_flight=sorted(report.in_flight),
        early=report.early,
        busy=report.busy,
        metrics=report.metrics,
        counted=sorted(report.counted),
        **answers,
    )
    if (summary := report.summary) is not None:
        decision = summary.decision and vars(summary.decision)
        request.summary_json = json.dumps({"logs": summary.logs, "val_logs": summary.val_logs, "decision": decision})
    return request


def _write_finished(report: ins.Report, task: int) -> pb.Finished:
    time = report.times.get(task, _UNMEASURED)
    return pb.Finished(
        task=task, samples=report.samples.get(task, 0), metrics=report.apart.get(task, b""), **vars(time)
    )


def readable_lines(lines: Iterable[pb.OutputLine]) -> list[tuple[str, str]]:
    """Return level and text of received lines, without control characters of terminals and without empty lines."""
    found = []
    for line in lines:
        text = line.text[:MOST_CHARACTERS]
        shown = "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        if shown.strip():
            found.append((line.level if line.level in LEVELS else "info", shown))
    return found

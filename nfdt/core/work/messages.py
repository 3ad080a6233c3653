"""Protobuf messages of the Workers service <-> the coordinator's plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nfdt.core.errors import ProtocolError
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.tasks import Task

MAX_LOGS = 1000
MAX_TASK_S = 1e6


def to_report(request: pb.NextRequest) -> ins.Report:
    """What a worker reports, checked.

    Raises:
        ProtocolError: a summary that is no JSON of the agreed form, or too many logs.
    """
    if len(request.logs) > MAX_LOGS:
        raise ProtocolError(f"Logs of {request.worker}: expected at most {MAX_LOGS}. Received: {len(request.logs)}.")
    state, evaluated = request.epoch_state, request.evaluated
    return ins.Report(
        finished=tuple(done.task for done in request.finished),
        epoch=request.epoch,
        logs=dict(request.logs),
        epoch_state=ins.EpochState(state.epoch, state.untrained, state.metrics, state.steps)
        if request.HasField("epoch_state")
        else None,
        evaluated=ins.Evaluated(evaluated.epoch, tuple(evaluated.tasks), evaluated.metrics)
        if request.HasField("evaluated")
        else None,
        summary=_to_summary(request.summary_json) if request.summary_json else None,
        in_flight=frozenset(request.in_flight),
        busy=request.busy,
        times={done.task: time for done in request.finished if (time := _to_time(done)) is not None},
    )


def _to_time(done: pb.Finished) -> ins.TaskTime | None:
    """What a task took; None where the worker did not say, or what cannot be."""
    compute_s, exchange_s = done.compute_s, done.exchange_s
    sensible = compute_s >= 0 and exchange_s >= 0 and 0 < compute_s + exchange_s <= MAX_TASK_S
    return ins.TaskTime(compute_s, exchange_s) if sensible else None


def _to_summary(text: str) -> ins.Summary:
    try:
        value = json.loads(text)
        validation = value.get("val_logs")
        return ins.Summary(_numbers(value["logs"]), None if validation is None else _numbers(validation))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(
            f"Summary: expected {{'logs': {{name: number or list}}}}. Received: {text[:200]!r}."
        ) from error


def _numbers(logs: Mapping[str, Any]) -> dict[str, ins.LogValue]:
    return {str(name): _number(value) for name, value in logs.items()}


def _number(value: Any) -> ins.LogValue:
    return [_number(element) for element in value] if isinstance(value, list) else float(value)


def to_task(task: Task) -> pb.Task:
    """A task as a message."""
    message = pb.Task(
        task=task.task,
        start=task.start,
        # A fed batch has no rows of its own: its length is told all the same.
        stop=task.stop if task.stop > task.start else task.start + task.samples,
        round=task.round,
        part=task.part,
        parts=task.parts,
        data=task.data,
    )
    setattr(message, "pass", task.pass_index)
    return message


def to_reply(instruction: ins.Instruction) -> pb.NextReply:
    """An instruction as the answer to Next."""
    match instruction:
        case ins.Work(epoch, tasks, budget_s, overlap, untrained, pull, no_weights):
            work = pb.Work(epoch=epoch, tasks=map(to_task, tasks), budget_s=budget_s, overlap=overlap)
            work.untrained, work.pull, work.no_weights = untrained, pull, no_weights
            return pb.NextReply(work=work)
        case ins.BeginEpoch(epoch, untrained, crc):
            return pb.NextReply(begin_epoch=pb.BeginEpoch(epoch=epoch, untrained=untrained, order_crc=crc))
        case ins.CollectState(epoch):
            return pb.NextReply(collect_state=pb.CollectState(epoch=epoch))
        case ins.Evaluate(epoch, tasks, untrained):
            return pb.NextReply(evaluate=pb.Evaluate(epoch=epoch, tasks=map(to_task, tasks), untrained=untrained))
        case ins.Summarise(epoch, metrics, validation, logs):
            return pb.NextReply(
                summarise=pb.Summarise(epoch=epoch, metrics=metrics, validation_metrics=validation, logs=logs)
            )
        case ins.Leave(reason):
            return pb.NextReply(leave=pb.Leave(reason=reason))
        case _:
            return pb.NextReply(wait=pb.Wait())

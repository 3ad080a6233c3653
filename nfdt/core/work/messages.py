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
from typing import Any

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


def to_report(request: pb.NextRequest) -> ins.Report:
    """Return the report of a worker, checked.

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
        samples={done.task: done.samples for done in request.finished if done.samples},
        supply=ins.Supply(request.supply.iteration, request.supply.waiting, request.supply.over)
        if request.HasField("supply")
        else None,
    )


def _to_time(done: pb.Finished) -> ins.TaskTime | None:
    """Return the duration of a task, or None where it was not measured or is impossible."""
    compute_s, exchange_s = done.compute_s, done.exchange_s
    sensible = compute_s >= 0 and exchange_s >= 0 and 0 < compute_s + exchange_s <= MAX_TASK_S
    return ins.TaskTime(compute_s, exchange_s) if sensible else None


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


def to_task(task: Task) -> pb.Task:
    """Return a task as a message."""
    message = pb.Task(
        task=task.task,
        start=task.start,
        # A streamed batch has no row numbers, only a length.
        stop=task.stop if task.stop > task.start else task.start + task.samples,
        round=task.round,
        part=task.part,
        parts=task.parts,
        round_samples=task.round_samples,
        data=task.data,
        ticket=task.ticket,
    )
    setattr(message, "pass", task.pass_index)
    return message


def to_reply(instruction: ins.Instruction) -> pb.NextReply:
    """Return an instruction as the answer to Next."""
    match instruction:
        case ins.Work(epoch, tasks, budget_s, overlap, untrained, pull, no_weights, look_ahead):
            work = pb.Work(epoch=epoch, tasks=map(to_task, tasks), budget_s=budget_s, overlap=overlap)
            work.untrained, work.pull, work.no_weights, work.look_ahead = untrained, pull, no_weights, look_ahead
            return pb.NextReply(work=work)
        case ins.BeginEpoch(epoch, untrained, crc, share, iteration):
            begin = pb.BeginEpoch(epoch=epoch, untrained=untrained, order_crc=crc, iteration=iteration)
            if share is not None:
                begin.share.CopyFrom(_write_share(share))
            return pb.NextReply(begin_epoch=begin)
        case ins.CollectState(epoch, over):
            return pb.NextReply(collect_state=pb.CollectState(epoch=epoch, over=over))
        case ins.Evaluate(epoch, tasks, untrained):
            return pb.NextReply(evaluate=pb.Evaluate(epoch=epoch, tasks=map(to_task, tasks), untrained=untrained))
        case ins.Summarise(epoch, metrics, validation, logs, steps, callbacks):
            merged = pb.Summarise(epoch=epoch, metrics=metrics, validation_metrics=validation, logs=logs)
            merged.steps, merged.callbacks = steps, callbacks
            return pb.NextReply(summarise=merged)
        case ins.Leave(reason):
            return pb.NextReply(leave=pb.Leave(reason=reason))
        case ins.MoveShards(job_id, incarnation, shards, token, authority):
            move = pb.MoveShards(job_id=job_id, incarnation=incarnation, shards=shards, shard_token=token)
            move.shard_ca = authority
            return pb.NextReply(move_shards=move)
        case _:
            return pb.NextReply(wait=pb.Wait())


def _write_share(share: ins.StepShare) -> pb.GroupShare:
    return pb.GroupShare(
        rows=share.rows, rate=share.rate, local_steps=share.local_steps, learning_rate=share.learning_rate
    )


# ---- a worker's side


def read_instruction(reply: pb.NextReply) -> ins.Instruction:
    """Return the instruction in the answer to Next; :class:`~nfdt.core.work.instructions.Wait` for an empty one."""
    match reply.WhichOneof("instruction"):
        case "work":
            return _read_work(reply.work)
        case "begin_epoch":
            begin = reply.begin_epoch
            share = _read_share(begin.share) if begin.HasField("share") else None
            return ins.BeginEpoch(begin.epoch, begin.untrained, begin.order_crc, share, begin.iteration)
        case "collect_state":
            return ins.CollectState(reply.collect_state.epoch, reply.collect_state.over)
        case "evaluate":
            evaluate = reply.evaluate
            return ins.Evaluate(evaluate.epoch, tuple(map(read_task, evaluate.tasks)), evaluate.untrained)
        case "summarise":
            merged = reply.summarise
            logs = dict(merged.logs)
            return ins.Summarise(
                merged.epoch, merged.metrics, merged.validation_metrics, logs, merged.steps, merged.callbacks
            )
        case "leave":
            return ins.Leave(reply.leave.reason)
        case "move_shards":
            return read_move(reply.move_shards)
    return ins.Wait()


def read_move(move: pb.MoveShards) -> ins.MoveShards:
    """Return where the shards of a job serve, from the answer to Next or from an assignment."""
    return ins.MoveShards(move.job_id, move.incarnation, tuple(move.shards), move.shard_token, move.shard_ca)


def _read_work(work: pb.Work) -> ins.Work:
    return ins.Work(
        epoch=work.epoch,
        tasks=tuple(map(read_task, work.tasks)),
        budget_s=work.budget_s,
        overlap=work.overlap,
        untrained=work.untrained,
        pull=work.pull,
        no_weights=work.no_weights,
        look_ahead=work.look_ahead,
    )


def read_task(message: pb.Task) -> Task:
    """Inverse of :func:`to_task`; the number of samples is the length of the range."""
    return Task(
        task=message.task,
        start=message.start,
        stop=message.stop,
        pass_index=getattr(message, "pass"),  # a Python keyword
        round=message.round,
        part=message.part,
        parts=message.parts,
        data=message.data,
        ticket=message.ticket,
        samples=message.stop - message.start,
        round_samples=message.round_samples,
    )


def _read_share(share: pb.GroupShare) -> ins.StepShare:
    learning_rate = share.learning_rate if share.HasField("learning_rate") else None
    return ins.StepShare(tuple(share.rows), share.rate, share.local_steps, learning_rate)


def to_request(report: ins.Report) -> pb.NextRequest:
    """Inverse of :func:`to_report`; job, worker, waiting time and statistics are left to the caller."""
    request = pb.NextRequest(
        finished=[_write_finished(report, task) for task in report.finished],
        epoch=report.epoch,
        logs=dict(itertools.islice(report.logs.items(), MAX_LOGS)),  # of the progress bar; metrics have no limit
        in_flight=sorted(report.in_flight),
        busy=report.busy,
    )
    if (state := report.epoch_state) is not None:
        request.epoch_state.CopyFrom(
            pb.EpochState(epoch=state.epoch, untrained=state.untrained, metrics=state.metrics, steps=state.steps)
        )
    if (evaluated := report.evaluated) is not None:
        request.evaluated.CopyFrom(
            pb.Evaluated(epoch=evaluated.epoch, tasks=evaluated.tasks, metrics=evaluated.metrics)
        )
    if (summary := report.summary) is not None:
        decision = None if summary.decision is None else vars(summary.decision)
        request.summary_json = json.dumps({"logs": summary.logs, "val_logs": summary.val_logs, "decision": decision})
    if (supply := report.supply) is not None:
        request.supply.CopyFrom(pb.Supply(iteration=supply.iteration, waiting=supply.waiting, over=supply.over))
    return request


def _write_finished(report: ins.Report, task: int) -> pb.Finished:
    time = report.times.get(task, _UNMEASURED)
    done = pb.Finished(task=task, compute_s=time.compute_s, exchange_s=time.exchange_s)
    done.samples = report.samples.get(task, 0)
    return done


def readable_lines(lines: Iterable[pb.OutputLine]) -> list[tuple[str, str]]:
    """Return level and text of received lines, without what controls terminals; empty lines are left out."""
    found = []
    for line in lines:
        text = line.text[:MOST_CHARACTERS]
        shown = "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        if shown.strip():
            found.append((line.level if line.level in LEVELS else "info", shown))
    return found

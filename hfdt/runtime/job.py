"""One job on one rank: what every rank does when rank 0 passes an instruction of the coordinator on."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np

from hfdt.runtime.artifacts import RankArtifacts
from hfdt.runtime.batch_split import learning_rate_factor, split_rows, weight_of
from hfdt.runtime.communicator import World
from hfdt.runtime.step import AllreduceStep
from nfdt.core.arrays.layout import Array
from nfdt.core.errors import ProtocolError
from nfdt.core.order import order_crc, sample_order
from nfdt.core.program import unpack
from nfdt.core.program.manifest import Manifest
from nfdt.core.program.state import State, load_state
from nfdt.core.specs.job import DataSpec, JobSpec
from nfdt.core.training import data, merge, untrained_state
from nfdt.core.training.direct_call import as_tensors
from nfdt.core.training.gradient_step import in_graph, numbers, step_logs
from nfdt.core.training.metric_states import merge_metric_states
from nfdt.core.training.metrics import ModelMetrics
from nfdt.core.wire import workers_pb2 as pb

logger = logging.getLogger(__name__)

Answer = pb.NextRequest


class RingJob:
    """The ring's work for one job. All public methods are collective unless they say otherwise.

    Args:
        spec: The job, with the batch of one rank in ``fit.batch_size``.
        world: The ranks.
        artifacts: Of the job.
        number: This rank's among the job's workers, where that is not its rank: its seeds, and what ``emulate`` says.

    Attributes:
        advanced: Called after each step and each batch of the validation; rank 0 tells the job server by it.
    """

    def __init__(self, spec: JobSpec, world: World, artifacts: RankArtifacts, *, number: int | None = None) -> None:
        self.spec, self._world = spec, world
        self._number = world.rank if number is None else number
        manifest = Manifest.from_bytes(artifacts.read(spec.program))
        self._rules = manifest.untrained_rules
        self._model = unpack.unpack(manifest, artifacts.read, allow_code=spec.code)
        self._untrained = untrained_state.UntrainedState(self._model, self._rules, worker=self._number)
        self.step = self._make_step(manifest, load_state(artifacts.path(manifest.state)))
        self._test: Any = in_graph(lambda batch: step_logs(self._model.test_step(batch), "test_step"), self._model)
        self._metrics = ModelMetrics(self._model)
        self._train = _source(spec.train, artifacts)
        self._validation = _source(spec.validation, artifacts)
        self._order = lru_cache(maxsize=2)(self._sample_order)
        self._base: list[Array] = []
        self._logs: Mapping[str, Any] = {}
        self._epoch_samples = self._epoch_steps = self.steps = 0
        self.compute_s = 0.0
        self.samples = 0
        self.advanced: Callable[[], None] = lambda: None

    def _make_step(self, manifest: Manifest, state: State) -> Any:
        scaled = self.spec.algorithm.scale_lr is not None
        return AllreduceStep(
            self._model, manifest, state, self._world.reducer(self.spec.algorithm.codec), scales=scaled
        )

    def do(self, reply: pb.NextReply) -> Answer:
        """Carry an instruction out together; rank 0's answer goes to the coordinator."""
        kind = reply.WhichOneof("instruction")
        handlers: dict[str | None, Callable[[Any], Answer]] = {
            "work": self._on_work,
            "begin_epoch": self._on_begin_epoch,
            "collect_state": self._on_collect_state,
            "evaluate": self._on_evaluate,
        }
        return handlers[kind](getattr(reply, str(kind)))

    def _on_begin_epoch(self, begin: pb.BeginEpoch) -> Answer:
        if self.spec.train.samples and begin.order_crc != order_crc(self._order(0)):
            raise ProtocolError(
                f"rank {self._world.rank}: this machine's NumPy {np.__version__} draws another sample order than the "
                "server's. Install the same NumPy version on both."
            )
        self._epoch_samples = self._epoch_steps = 0
        self._logs = {}
        self._metrics.reset()
        self._take_untrained(begin.untrained)
        self._base = self._untrained.read()
        return Answer()

    def _on_work(self, work: pb.Work) -> Answer:
        answer = Answer()
        if work.untrained:
            self._take_untrained(work.untrained)
            self._base, self._epoch_steps = self._untrained.read(), 0
        for tasks in self._steps_of(work):
            began = time.perf_counter()
            self._train_on(tasks)
            self.compute_s += time.perf_counter() - began
            self.advanced()
        for task in work.tasks:
            answer.finished.add(task=task.task, samples=task.stop - task.start)
        for name, value in self._running_logs().items():
            answer.logs[name] = value
        return answer

    def _steps_of(self, work: pb.Work) -> list[list[pb.Task]]:
        return global_batches(work.tasks)

    def _train_on(self, tasks: list[pb.Task]) -> None:
        total = sum(task.stop - task.start for task in tasks)
        if self.spec.algorithm.scale_lr:
            self.step.set_factor(self._factor())
        batch, rows = self._own_part(tasks, self._train)
        logs = self._step_on(tasks, batch, rows, total)
        self.steps += 1
        self.samples += total
        if rows:
            self._logs = logs
            self._metrics.stepped(rows, logs)
            self._epoch_samples += rows
            self._epoch_steps += 1

    def _step_on(self, tasks: list[pb.Task], batch: Any, rows: int, total: int) -> Mapping[str, Any]:
        """Train on this rank's rows of a step of ``total``; the logs of ``train_step``, none without rows."""
        return self.step(batch, weight_of(rows, total), partial(self._pause, rows) if self._emulates else None)

    def _own_part(self, tasks: list[pb.Task], source: data.ArraySource | None) -> tuple[Any, int]:
        """This rank's rows of a global batch, and how many they are."""
        if tasks[0].data:
            return self._fed_part(tasks)
        if source is None:
            raise ProtocolError(f"rank {self._world.rank}: task {tasks[0].task} names rows, but the job has no arrays.")
        start, stop = self._split(tasks[0].start, tasks[-1].stop)
        if start == stop:
            return None, 0
        if source is self._validation or not self.spec.fit.shuffle:
            return source.batch(slice(start, stop)), stop - start
        return source.batch(self._order(getattr(tasks[0], "pass"))[start:stop]), stop - start

    def _fed_part(self, tasks: list[pb.Task]) -> tuple[Any, int]:
        """A batch per rank, as the client fed them."""
        rank = self._world.rank
        if rank >= len(tasks):
            return None, 0
        return data.decode_batch(tasks[rank].data), tasks[rank].stop - tasks[rank].start

    def _split(self, start: int, stop: int) -> tuple[int, int]:
        """Which of the rows ``[start, stop)`` this rank computes."""
        return split_rows(start, stop, self._world.size, self._world.rank)

    def _running_logs(self) -> dict[str, float]:
        """The running logs of the epoch: those of all ranks, weighted by their samples."""
        own = {"samples": self._epoch_samples, "logs": numbers(self._logs)}
        reports = [json.loads(text) for text in self._world.gather(json.dumps(own).encode())]
        found: dict[str, list[tuple[float, int]]] = {}
        for report in reports:
            for name, value in report["logs"].items():
                found.setdefault(name, []).append((value, report["samples"]))
        return {name: sum(v * n for v, n in pairs) / (sum(n for _, n in pairs) or 1) for name, pairs in found.items()}

    def _on_collect_state(self, collect: pb.CollectState) -> Answer:
        self._require_equal_weights()
        own = merge.encode_arrays([np.int64(self._epoch_steps)])
        parts = self._world.gather(own)
        steps = [int(merge.decode_arrays(part)[0]) for part in parts]
        untrained = [merge.decode_arrays(part) for part in self._gather(self._untrained.read())]
        metrics = self._epoch_metrics()
        if not self._world.leads:
            return Answer()
        states = [(rank, steps[rank], arrays) for rank, arrays in enumerate(untrained)]
        merged = merge.merge_untrained(self._rules, self._base, states) if self._rules else []
        state = pb.EpochState(
            epoch=collect.epoch,
            steps=max(steps),
            untrained=merge.encode_arrays(merged),
            metrics=merge_metric_states(metrics),
        )
        return Answer(epoch_state=state)

    def _epoch_metrics(self) -> list[bytes]:
        return self._world.gather(self._metrics.collect())

    def _gather(self, arrays: list[Array]) -> list[bytes]:
        return self._world.gather(merge.encode_arrays(arrays))

    def _on_evaluate(self, request: pb.Evaluate) -> Answer:
        self._take_untrained(request.untrained)
        self._metrics.reset()
        for task in request.tasks:
            batch, rows = self._own_part([task], self._validation)
            if batch is not None:
                self._test(as_tensors(batch))
                self._metrics.stepped(rows)
            self.advanced()
        merged = merge_metric_states(self._world.gather(self._metrics.collect()))
        return Answer(
            evaluated=pb.Evaluated(epoch=request.epoch, tasks=[t.task for t in request.tasks], metrics=merged)
        )

    def summarise(self, request: pb.Summarise) -> Answer:
        """Turn merged metrics into logs. Rank 0 alone does it."""
        summary = self._metrics.summary(request.metrics, request.validation_metrics, dict(request.logs))
        return Answer(summary_json=json.dumps(summary))

    def _require_equal_weights(self) -> None:
        """Every rank has applied the same updates: if their weights differ, somebody's result is wrong.

        Raises:
            ProtocolError: they differ.
        """
        state = self.step.read()
        crc = zlib.crc32(state.weights.data)
        for array in state.optimizer.values():
            crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
        sums = [int(text) for text in self._world.gather(str(crc).encode())]
        different = [rank for rank, other in enumerate(sums) if other != sums[0]]
        if different:
            raise ProtocolError(
                f"Weights after {self.steps} steps: expected the same on all ranks. Received: others than rank 0's on "
                f"ranks {different}. A train_step that assigns weights by itself, or ranks whose processors "
                "compute differently, do that."
            )

    def _take_untrained(self, encoded: bytes) -> None:
        if encoded:
            self._untrained.write(merge.decode_arrays(encoded))

    def _sample_order(self, pass_index: int) -> Array:
        fit = self.spec.fit
        return sample_order(self.spec.train.samples or 0, fit.shuffle, fit.seed, pass_index)

    def _factor(self) -> float:
        algorithm, fit, size = self.spec.algorithm, self.spec.fit, self._world.size
        rows = self.spec.train.samples
        per_epoch = fit.steps_per_epoch or self.spec.train.batches or -(-(rows or 0) // (size * fit.batch_size))
        warmup = round(algorithm.warmup_epochs * per_epoch)
        return learning_rate_factor(algorithm.scale_lr, size, self.steps, warmup)

    @property
    def _emulates(self) -> bool:
        return bool(self.spec.cluster.emulate.model_dump(exclude_defaults=True))

    def _pause(self, rows: int, seconds: float) -> None:
        """Behave like the rank that ``emulate`` describes: slower, or killed at a scripted step."""
        emulate, rank = self.spec.cluster.emulate, self._number
        if self._is_killed():
            logger.warning("rank %d is killed at its step %d, as emulate.fail asks", rank, self.steps + 1)
            os.kill(os.getpid(), signal.SIGKILL)
        wanted = emulate.step_s(rank, seconds, self.spec.batch_share(rows))
        time.sleep(wanted - seconds)

    def _is_killed(self) -> bool:
        fail = self.spec.cluster.emulate.fail
        return bool(fail) and f"{self._number}@{self.steps + 1}" in str(fail).split(",")


def global_batches(tasks: Any) -> list[list[pb.Task]]:
    """Tasks grouped into steps: each its own, or the fed batches of one round together."""
    groups: list[list[pb.Task]] = []
    for task in tasks:
        if task.part and groups and groups[-1][0].round == task.round:
            groups[-1].append(task)
        else:
            groups.append([task])
    return groups


def _source(spec: DataSpec | None, artifacts: RankArtifacts) -> data.ArraySource | None:
    if spec is None or spec.kind != "arrays":
        return None
    return data.ArraySource(spec.structure, [artifacts.open_array(name) for name in spec.arrays])

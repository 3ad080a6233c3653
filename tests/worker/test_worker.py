"""Execution of one instruction by a worker: the weights it computes on, its pushes and its reports.

The model is ``w * x`` with a squared error, so that gradients and losses reveal the weight they were computed on.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hashlib
import threading
from collections.abc import Callable

import keras
import numpy as np
import pytest

from nfdt.core.arrays.pytree import flatten_structure
from nfdt.core.arrays.safetensors_io import load_arrays
from nfdt.core.errors import ProtocolError
from nfdt.core.order import order_crc, sample_order
from nfdt.core.program.pack import pack
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.core.wire import workers_pb2 as pb
from nfdt.transport.base import Pulled, Pushed
from nfdt.worker.worker import Worker

CODED = 0.25  # change of the weights by a codec


class Shards:
    """Client whose weights rise by one with every push, also with those of other workers."""

    codecs: dict = {}
    bytes_sent = bytes_received = 0

    def __init__(self, size):
        self.size, self.version = size, 0
        self.pulls, self.pushes, self.unanswered = 0, [], 0

    @property
    def _weights(self):
        return np.full(self.size, self.version, np.float32)

    def pull(self, min_version=0, *, exact=True):
        assert not self.unanswered, "a pull while pushes are unanswered"
        self.pulls += 1
        return Pulled(self._weights + (0 if exact else CODED), (self.version,))

    def begin_push(self, gradient, **options):
        self.pushes.append((np.array(gradient), options))
        self.version += 1
        self.unanswered += 1
        weights = self._weights if options["want_weights"] else None
        return Answer(self, Pushed(weights, (self.version,), 0, True))


class Answer:
    """Answer that has arrived."""

    arrived = True

    def __init__(self, shards, pushed):
        self.shards, self.pushed = shards, pushed

    def result(self):
        self.shards.unanswered -= 1
        return self.pushed


class Job:
    """A worker, its shards and its instructions; ``moved``: number of updates of others before an instruction."""

    def __init__(self, x, y=None, *, algorithm="ssp", shards=1, batch_size=1, timeout_s=600.0, **overrides):
        y = np.zeros((len(x), 1), np.float32) if y is None else y
        model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        packed = pack(model, (x[:1], y[:1]))
        self.blobs = dict(packed.artifacts)
        structure, arrays = flatten_structure((x, y))
        names = [self._put(array.tobytes()) for array in arrays]
        self.arrays = dict(zip(names, arrays, strict=True))
        data = DataSpec(kind="arrays", structure=structure, arrays=tuple(names), samples=len(x))
        self.spec = JobSpec(
            program=self._put(packed.manifest_bytes()),
            algorithm=resolve_algorithm(algorithm, **overrides),
            cluster=ClusterSpec(workers=1, shards=shards),
            fit=FitSpec(epochs=1, batch_size=batch_size, shuffle=False),
            train=data,
            validation=data,
            step_timeout_s=timeout_s,
        )
        self.manifest = packed.manifest
        self.shards = Shards(self.manifest.layout.size)

    def _put(self, content):
        name = hashlib.sha256(content).hexdigest()
        self.blobs[name] = content
        return name

    def run(self, *actions: pb.NextReply | Callable[[], None]) -> list[pb.NextRequest]:
        """Send the worker these instructions and call the functions among them; return a report per instruction."""
        reports, script = [], list(actions)

        def ask(request):
            reports.append(pb.NextRequest.FromString(request.SerializeToString()))
            if request.busy:
                return pb.NextReply(wait=pb.Wait())
            while script and not isinstance(script[0], pb.NextReply):
                script.pop(0)()
            return script.pop(0) if script else pb.NextReply(leave=pb.Leave(reason="done"))

        Worker(
            self.spec,
            "worker-0",
            0,
            self.manifest,
            read=self.blobs.__getitem__,
            open_array=self.arrays.__getitem__,
            client=self.shards,
            ask=ask,
            stopped=threading.Event(),
        ).run()
        return reports[1:]

    def others_push(self):
        self.shards.version += 10

    def begin(self, epoch=0, crc=None):
        samples = self.spec.train.samples
        crc = order_crc(sample_order(samples, False, 0, 0)) if crc is None else crc
        return pb.NextReply(begin_epoch=pb.BeginEpoch(epoch=epoch, order_crc=crc))

    @property
    def computed_on(self):
        """Return the weight that each gradient was computed on: d/dw (w x)^2 = 2 w for x = 1."""
        return [float(gradient[0]) / 2 for gradient, _ in self.shards.pushes]


def work(task, stop=None, **options):
    return pb.NextReply(work=pb.Work(tasks=[pb.Task(task=task, start=0, stop=stop or 1, parts=1)], **options))


def evaluate(epoch=0, tasks=1):
    rows = [pb.Task(task=i, start=i, stop=i + 1) for i in range(tasks)]
    return pb.NextReply(evaluate=pb.Evaluate(epoch=epoch, tasks=rows))


def loss_of(report):
    """Return the loss from the metric variables (sum, count)."""
    metrics = load_arrays(report.evaluated.metrics)
    total, count = float(metrics["sum/0"]), float(metrics["sum/1"])
    return total / count


ONES = np.ones((4, 1), np.float32)


def test_a_gradient_is_computed_on_the_answer_to_the_last_push():
    job = Job(ONES)
    job.run(job.begin(), work(0), job.others_push, work(1))
    assert job.computed_on == [CODED, 1.0]


def test_after_a_required_pull_a_worker_computes_on_the_current_weights():
    job = Job(ONES)
    job.run(job.begin(), work(0), job.others_push, work(1, pull=True))
    assert job.computed_on == [CODED, 11.0 + CODED]


def test_without_use_for_answers_a_worker_requests_no_weights_and_pulls():
    job = Job(ONES)
    job.run(job.begin(), work(0, no_weights=True), job.others_push, work(1))
    assert job.computed_on == [CODED, 11.0 + CODED]
    assert [options["want_weights"] for _, options in job.shards.pushes] == [False, True]


def test_before_a_required_pull_a_worker_takes_and_reports_the_answers_in_flight():
    job = Job(ONES, overlap=2)
    lease = work(1, overlap=1, pull=True)
    reports = job.run(job.begin(), work(0, overlap=1), job.others_push, lease, pb.NextReply(wait=pb.Wait()))
    assert job.computed_on == [CODED, 11.0 + CODED]
    assert [[done.task for done in report.finished] for report in reports] == [[], [], [0], [1]]


def test_an_epoch_begins_with_the_weights_of_its_beginning():
    job = Job(ONES)
    job.run(job.begin(0), work(0), job.others_push, job.begin(1), work(1))
    assert job.computed_on == [CODED, 11.0 + CODED]


def test_validation_is_on_the_exact_weights_of_the_epoch_s_end():
    job = Job(ONES)
    reports = job.run(job.begin(), work(0), job.others_push, evaluate())
    assert loss_of(reports[-1]) == 11.0**2


def test_the_weights_of_a_validation_are_pulled_once():
    job = Job(ONES)
    job.run(job.begin(), evaluate(), evaluate(), evaluate())
    assert job.shards.pulls == 1


def test_the_next_epoch_s_validation_is_on_its_own_weights():
    job = Job(ONES)
    reports = job.run(job.begin(0), evaluate(0), job.others_push, job.begin(1), evaluate(1))
    assert [loss_of(report) for report in reports if report.HasField("evaluated")] == [0.0, 100.0]


def test_a_worker_sends_heartbeats_as_its_validation_advances():
    job = Job(ONES, timeout_s=1e-6)
    reports = job.run(job.begin(), evaluate(tasks=3))
    assert [(report.busy, report.HasField("evaluated")) for report in reports[1:]] == [(True, False)] * 3 + [
        (False, True)
    ]


def test_a_worker_sends_no_more_than_it_must_while_it_validates():
    job = Job(ONES)
    reports = job.run(job.begin(), evaluate(tasks=3))
    assert not any(report.busy for report in reports)


def test_with_dbs_a_gradient_s_rate_is_its_share_of_the_batch_of_fit():
    job = Job(ONES, algorithm="dbs-sgd", batch_size=2)
    job.run(job.begin(), work(0, 1), work(1, 2), work(2, 4))
    assert [options["rate"] for _, options in job.shards.pushes] == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(("shards", "not_finite"), [(1, [False, True]), (2, [True, True])])
def test_all_of_several_shards_drop_a_gradient_of_which_a_part_is_not_finite(shards, not_finite):
    x = np.array([[1.0, 1e30]], np.float32)
    job = Job(x, shards=shards)
    job.shards.version = 1
    job.run(job.begin(), work(0))
    ((gradient, _),) = job.shards.pushes
    assert list(~np.isfinite(gradient)) == not_finite


def test_a_worker_that_draws_another_sample_order_refuses_to_train():
    job = Job(ONES)
    with pytest.raises(ProtocolError, match="another sample order"):
        job.run(job.begin(crc=1), work(0))
    assert job.shards.pushes == []

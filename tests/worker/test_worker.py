"""Execution of one instruction by a worker: the weights it computes on, its pushes and its reports."""

from __future__ import annotations

import numpy as np
import pytest

from nfdt.core.errors import ProtocolError
from nfdt.core.wire import workers_pb2 as pb
from tests.support.scripted_worker import CODED, Job, evaluate, loss_of, work

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

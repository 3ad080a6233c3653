"""Step times of emulated workers."""

import pytest

from nfdt.core.specs.emulation import Emulation
from nfdt.core.specs.job import DataSpec, FitSpec, JobSpec, resolve_algorithm, resolve_cluster


def job(train: DataSpec) -> JobSpec:
    return JobSpec(
        program="0" * 64, algorithm=resolve_algorithm("asgd"), fit=FitSpec(epochs=1, batch_size=64), train=train
    )


def test_a_step_is_lengthened_to_the_emulated_time_and_never_shortened():
    emulate = Emulation(step_ms=(20, 5))
    assert emulate.step_s(0, 0.004, 1.0) == pytest.approx(0.02)
    assert emulate.step_s(1, 0.008, 1.0) == 0.008
    assert emulate.step_s(2, 0.004, 1.0) == 0.004


@pytest.mark.parametrize("worker", [0, 1, 7])
def test_one_value_is_for_every_worker(worker):
    emulate = Emulation(step_ms=20, slowdown=3, bandwidth_mbit=100, latency_ms=5)
    assert emulate.step_s(worker, 0.001, 1.0) == pytest.approx(0.02)
    assert emulate.step_s(worker, 0.01, 1.0) == pytest.approx(0.03)
    assert emulate.link_of(worker) == (100, 5)


@pytest.mark.parametrize("name", ["slowdown", "step_ms", "bandwidth_mbit", "latency_ms", "devices"])
def test_a_list_has_one_value_or_one_for_each_worker(name):
    for values in ([5], [5, 5, 5], [5, 5, 5, 5]):
        Emulation(**{name: values}).check_counts(3)
    with pytest.raises(ValueError, match=f"emulate.{name}: expected one value.*each of 3. Received: 2 values"):
        Emulation(**{name: [5, 5]}).check_counts(3)


def test_a_job_has_emulated_values_for_each_of_its_workers():
    with pytest.raises(ValueError, match=r"each of 3\. Received: 2 values"):
        JobSpec(
            program="0" * 64,
            algorithm=resolve_algorithm("asgd"),
            cluster=resolve_cluster(workers=3, emulate={"step_ms": (1, 2)}),
            fit=FitSpec(epochs=1),
            train=DataSpec(kind="stream"),
        )


def test_slowdown_multiplies_what_the_step_took():
    emulate = Emulation(slowdown=(1, 4), step_ms=(0, 30))
    assert emulate.step_s(1, 0.01, 1.0) == pytest.approx(0.04)
    assert emulate.step_s(1, 0.001, 1.0) == pytest.approx(0.03)
    assert emulate.step_s(0, 0.01, 1.0) == 0.01


@pytest.mark.parametrize(("samples", "seconds"), [(16, 0.02), (64, 0.08), (128, 0.16)])
def test_the_emulated_time_follows_the_samples_of_the_batch(samples, seconds):
    share = job(DataSpec(kind="arrays", samples=640)).batch_share(samples)
    assert Emulation(step_ms=(80,)).step_s(0, 0.001, share) == pytest.approx(seconds)


def test_a_batch_that_the_client_feeds_takes_the_whole_time():
    assert job(DataSpec(kind="stream")).batch_share(16) == 1.0


def test_the_processor_of_a_worker_is_this_number_of_devices():
    assert [Emulation(devices=(4, 1)).devices_of(worker) for worker in range(3)] == [4, 1, None]
    assert [Emulation(devices=2).devices_of(worker) for worker in range(3)] == [2, 2, 2]
    assert Emulation().devices_of(0) is None
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Emulation(devices=0)

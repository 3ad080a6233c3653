"""Benchmarks: they run and write the results that docs/benchmarks.md describes; speed is not asserted."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from benchmarks.peers.hetero_jobs import batches_per_update
from benchmarks.peers.horovod_world import run_gloo, this_machine
from benchmarks.peers.keras2 import python_of_keras2
from benchmarks.peers.processes import PeerFailed, run_together, tensorflow_cluster
from benchmarks.reports.report import Report, Row
from benchmarks.run import (
    accuracy,
    control,
    forecast,
    gpu,
    hetero,
    hfdt,
    link,
    machines,
    memory,
    overhead,
    reality,
    recommender,
    scale,
    simulate,
    snapshots,
    update,
    wire,
)
from benchmarks.workloads import embedding, gpt_script, gradient_ways, pipelines
from benchmarks.workloads.bucket_rank import PEERS
from benchmarks.workloads.emulated import Training
from benchmarks.workloads.epochs import Work, measured
from benchmarks.workloads.images import read_images, training_images
from benchmarks.workloads.models import build
from benchmarks.workloads.recommender import ON_SHARDS, ON_WORKERS, PLAIN, Recommendation, Trained
from benchmarks.workloads.timed_epochs import EpochTimer, Goal, seconds_to, throughput
from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.specs.presets import PRESETS
from nfdt.core.work.spans import APPLY, COMPUTE, EXCHANGE, SPAN

ROOT = Path(__file__).parents[1]


def written(report: Report, folder: Path) -> dict:
    report.finish(folder / "report.json")
    return json.loads((folder / "report.json").read_text())


def peers_of(got: dict) -> set[str]:
    return {row["peer"] for row in got["rows"]}


def test_gpu_names_what_no_time_was_left_for(tmp_path, capsys):
    bench = gpu.GpuBench(Report("gpu", [0]), ends=0.0, run_s=1.0, small=True, devices=2)
    gpu.run(bench, gpu.CASES, list(bench.ways))
    got = written(bench.report, tmp_path)
    assert got["rows"] == []
    plain = {f"{case}, {gpu.PLAIN}: left out, no time was left" for case in gpu.CASES}
    assert plain < set(got["notes"]), "the ways of workers need the number of steps of plain Keras"
    assert len(got["notes"]) == len(gpu.CASES) + len({"nfdt doctor", gpu.SIMULATED})


@pytest.mark.long
def test_gpu_compares_workers_with_plain_fit(tmp_path, capsys):
    bench = gpu.GpuBench(Report("gpu", [0]), time.monotonic() + 480, run_s=200, small=True, epoch_s=0.1)
    for way in (gpu.PLAIN, "1 worker"):
        bench.train(gpu.CASES[0], way)
    got = written(bench.report, tmp_path)
    units = {row["unit"] for row in got["rows"] if row["peer"] == "1 worker"}
    assert units == {*gpu.SPEED, "ms of a step", "ms of it for the exchange", "ms of an update"}
    assert all(row["value"] > 0 for row in got["rows"])
    assert got["ratios"].keys() == {f"1 worker/plain@{gpu.CASES[0]}"}


def test_control_measures_workers_that_only_speak_the_protocol(tmp_path, capsys):
    report = Report("control", [])
    control.measure(report, 20, idle_s=0.2, lease_s=0.5)
    got = written(report, tmp_path)
    assert got.get("notes", []) == []
    values = {row["unit"]: row["value"] for row in got["rows"]}
    assert values["threads of the server"] < 20 + 20, "each worker has a thread"
    assert values["leases/s"] > 0
    assert values["leases per s of processor"] > 0


@pytest.mark.long
def test_snapshots_compares_intervals(tmp_path, capsys):
    report = Report("snapshots", [0])
    snapshots.run(report, None, {"mlp": Work(samples=512, epochs=2, runs=1)})
    assert set(report.ratios) == {"10 s@mlp", "1 s@mlp"}


def test_update_compares_loops_with_xla_and_a_copy(tmp_path, capsys):
    report = Report("update", [0])
    update.run(report, {"tiny": (40, 30)}, 1, ["int8"])
    got = written(report, tmp_path)
    peers = {"np.copyto", "sgd, loops", "sgd, XLA", "adamw, loops", "adamw, XLA"}
    assert peers_of(got) == peers | {"encode", "encode with feedback", "decode"}
    names = {"sgd/copy@tiny", "adamw/copy@tiny", "XLA/loops sgd@tiny", "XLA/loops adamw@tiny"}
    assert set(got["ratios"]) == names
    assert all(row["value"] > 0 for row in got["rows"] if row["peer"] != "np.copyto")


@pytest.mark.long
def test_overhead_compares_one_worker_with_plain_fit(tmp_path, capsys):
    report = Report("overhead", [0])
    overhead.run(report, None, {"mlp": Work(samples=512, epochs=2, runs=1)})
    got = written(report, tmp_path)
    assert set(got) == {"bench", "versions", "machine", "seeds", "rows", "ratios"}
    assert set(got["ratios"]) == {"nfdt/plain@mlp", "nfdt-overlap/plain@mlp", "startup_s"}
    assert {(row["case"], row["peer"]) for row in got["rows"]} == {("mlp", peer) for peer in overhead.OPTIONS}
    assert "nfdt/plain@mlp" in capsys.readouterr().out


@pytest.mark.long
def test_a_recommender_is_trained_with_tables_here_and_there(tmp_path):
    report = Report("recommender", [1])
    recommender.run(report, Recommendation(table_mb=4, samples=1024, batch=256, epochs=3), 1, KERAS2)
    got = written(report, tmp_path)
    assert peers_of(got) >= {PLAIN, ON_WORKERS, ON_SHARDS}
    assert {row["unit"] for row in got["rows"]} == {"samples/s", "MB of a worker at its peak"}
    assert all(row["value"] > 0 for row in got["rows"])
    assert got["ratios"]["memory shards/workers@4 MB, 2 shards"] < 1


def test_a_recommender_leaves_out_peers_whose_tables_do_not_fit(monkeypatch):
    measured = []

    def measure(peer, training, keras2):
        measured.append((peer, training.table_mb))
        return Trained(2.0, [100.0])

    monkeypatch.setattr(recommender, "measure", measure)
    monkeypatch.setattr(recommender, "memory", lambda: 24_000.0)
    report = Report("recommender", [1])
    for table_mb in (1024, 10_240):
        recommender.run(report, Recommendation(table_mb, samples=1000), 1, KERAS2)
    assert measured[:3] == [(PLAIN, 1024), (ON_WORKERS, 1024), (ON_SHARDS, 1024)]
    assert [peer for peer, table_mb in measured if table_mb > 1024] == [ON_SHARDS]
    assert any("10240 MB of tables, adagrad, 1 workers, 2 shards: plain fit is left out" in n for n in report.notes)


@pytest.mark.long
def test_forecasts_are_compared_with_what_happens(tmp_path, capsys):
    report = Report("forecast", [0])
    forecast.run(report, forecast.JOBS[:1], samples=640)
    got = written(report, tmp_path)
    assert got["ratios"]["within a tenth"] in ("0 of 1", "1 of 1")
    figures = {row["unit"]: row["value"] for row in got["rows"]}
    assert figures["% off"] == pytest.approx(100 * (figures["samples/s planned"] / figures["samples/s measured"] - 1))
    assert figures["staleness planned"] == 3


@pytest.mark.long
def test_reality_compares_a_simulated_job_with_real_workers(tmp_path, capsys):
    report = Report("reality", [0])
    reality.compare(report, ["ddc-asgd"], [reality.Cluster("2 equal", (20.0, 20.0), 100.0)], epochs=3)
    got = written(report, tmp_path)
    figures = {row["unit"]: row["value"] for row in got["rows"]}
    assert figures["s per epoch simulated"] == pytest.approx(figures["s per epoch planned"], rel=0.1)
    assert figures["s per epoch real"] > 0.9 * figures["s per epoch simulated"]
    assert min(figures["% accuracy real"], figures["% accuracy simulated"]) > 50
    assert set(got["ratios"]) == {"throughput agrees", "staleness agrees", "accuracy agrees"}


def test_the_overhead_of_a_step_is_read_from_its_spans():
    rng = np.random.default_rng(0)
    cycles = 0.103 + 0.001 * rng.normal(size=1000)
    cycles[[0, 300, 600]] = 0.5  # a start, and ends of epochs
    spans = np.zeros(1002, SPAN)
    spans["start"][:1001], spans["seconds"] = np.cumsum([0.0, *cycles]), 0.1
    spans["kind"] = [COMPUTE] * 1001 + [EXCHANGE]
    shard = np.zeros(3, SPAN)
    shard["seconds"], shard["kind"] = [0.0005, 0.0005, 0.1], [APPLY, APPLY, COMPUTE]
    overhead = reality.overhead_of([spans, spans], [shard])
    assert overhead.exchange_ms == pytest.approx(3, abs=0.1)
    assert overhead.apply_ms == pytest.approx(0.5)
    assert overhead.spread_ms == pytest.approx(1, abs=0.1)


def test_figures_of_a_comparison_add_up_its_seeds():
    compared = reality.Comparison(planned_s=4.0)
    compared.real = [reality.Outcome(5.0, {1: 3, 2: 1}, 90.0), reality.Outcome(5.0, {1: 1, 2: 3}, 92.0)]
    compared.virtual = [reality.Outcome(4.0, {1: 4}, 91.0), reality.Outcome(4.0, {1: 4}, 91.5)]
    figures = compared.figures()
    assert figures["% throughput off, simulated"] == figures["% throughput off, planned"] == pytest.approx(25.0)
    assert figures["distance of staleness"] == pytest.approx(0.5)
    assert (figures["points between them"], figures["points between seeds"]) == (0.25, 2.0)


def test_the_ten_jobs_of_the_forecasts_are_those_of_the_documentation():
    assert len(forecast.JOBS) == 10
    assert len({(job.name, job.algorithm) for job in forecast.JOBS}) == 10


@pytest.mark.long
def test_accuracy_compares_the_algorithms_on_the_same_seeds(monkeypatch, tmp_path):
    monkeypatch.setattr(accuracy, "ALGORITHMS", ("ddc-asgd",))
    monkeypatch.setattr(accuracy, "WORKERS", 2)
    report = Report("accuracy", [0])
    accuracy.run(report, epochs=2, rates=(0.1,), step_ms=1.0)
    got = written(report, tmp_path)
    assert peers_of(got) == {"plain fit", "ddc-asgd"}
    assert "accuracy@lr 0.1@ddc-asgd" in got["ratios"]


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
@pytest.mark.long
def test_hfdt_compares_a_script_with_loops_written_by_hand(monkeypatch, tmp_path):
    monkeypatch.setattr(hfdt, "LAUNCHERS", ("mpirun",))
    report = Report("hfdt", [0])
    hfdt.run(report, None, {"mlp": Work(samples=1024, epochs=2, runs=1)}, None)
    got = written(report, tmp_path)
    assert set(got["ratios"]) == {"hfdt/handwritten@mpirun", "hfdt/handwritten@mpirun@mlp"}
    assert peers_of(got) == {"by hand", "by hand, XLA", "hfdt"}


KERAS2 = python_of_keras2(install=False)
needs_keras2 = pytest.mark.skipif(KERAS2 is None, reason="no environment with tf_keras: scripts/bench hfdt makes it")


@needs_keras2
def test_two_workers_of_tf_keras_train_the_same_data(tmp_path):
    work = Work(samples=1024, epochs=2, runs=1)
    training_images(work.samples, None).save(tmp_path / "mlp.npz")
    found = hfdt.Peers(tmp_path, "mlp", work, KERAS2).mirrored()
    assert found[hfdt.MIRRORED].samples_per_s > 0


def test_the_ratio_is_taken_against_the_faster_loop_of_each_run():
    report = Report("hfdt", [0])
    for launcher in hfdt.LAUNCHERS:
        for peer, speeds in {"by hand": [10, 40], "by hand, XLA": [20, 20], "hfdt": [10, 20]}.items():
            for speed in speeds:
                report.add(f"mlp {launcher}", peer, "samples/s", speed)
    report.add("mlp", hfdt.MIRRORED, "samples/s", 5)
    hfdt._add_ratios(report, ["mlp"])
    assert report.ratios["hfdt/handwritten@mpirun"] == 0.5
    assert report.ratios["hfdt/mwms"] == 2.0


def test_the_first_epoch_counts_as_start_up_and_the_last_one_not_at_all():
    got = measured([10.0, 15.0, 17.0, 19.0], samples=100, began=8.0)
    assert got.samples_per_s == 50.0
    assert got.startup_s == 5.0


TINY = hetero.Plan({"1,1,4,4": (0.1, 0.4)}, (), samples=128, goal=Goal(0.01, 2, 2, 60.0))


@pytest.mark.long
def test_hetero_trains_presets_on_emulated_workers(tmp_path):
    report = Report("hetero", [0])
    hetero.run(report, dataclasses.replace(TINY, peers=("asgd", "bsp", hetero.PSS)), None, None)
    got = written(report, tmp_path)
    assert peers_of(got) == {"asgd", "bsp"}
    assert {"throughput/limit@asgd", "throughput/limit@bsp"} == set(got["ratios"])
    assert any(hetero.PSS in note for note in got["notes"]), "what is left out is named"


@needs_keras2
@pytest.mark.parametrize("peer", [hetero.PSS, hetero.MWMS])
def test_hetero_trains_strategies_of_tf_keras_on_emulated_workers(tmp_path, peer):
    report = Report("hetero", [0])
    hetero.run(report, dataclasses.replace(TINY, peers=(peer,)), None, KERAS2)
    assert 0.0 < written(report, tmp_path)["ratios"][f"throughput/limit@{peer}"] <= 1.0


def test_hetero_leaves_no_preset_out():
    assert set(hetero.all_peers()) == {*PRESETS, hetero.PSS, hetero.MWMS}


def test_a_short_run_names_the_rows_it_has_no_time_for(tmp_path):
    report = Report("hetero", [0])
    bench = hetero.Bench(report, dataclasses.replace(TINY, budget_s=1.0), tmp_path, None)
    bench._run(None, "1,1,4,4", "asgd", None)
    assert report.rows == []
    assert "asgd" in report.notes[0]


def test_sooner_names_runs_that_never_reached_the_target(tmp_path):
    report = Report("hetero", [0])
    for peer, seconds in {"allreduce": 60.0, "asgd": 20.0, "bsp": float("inf")}.items():
        report.add("1,1,4,4", peer, "of the limit", 0.5)
        report.add("1,1,4,4", peer, "s to 0.8", seconds)
    hetero.add_ratios(report, ["1,1,4,4"], 0.8)
    assert report.ratios["sooner-than-allreduce@asgd"] == 3.0
    assert report.ratios["sooner-than-allreduce@bsp"] == 0.0
    assert written(report, tmp_path)["rows"][-1]["value"] is None


def test_the_mean_over_seeds_is_that_of_the_seconds():
    report = Report("hetero", [0, 1])
    for peer, runs in {"allreduce": (60.0, 80.0), "asgd": (20.0, 50.0), "bsp": (20.0, float("inf"))}.items():
        for seconds in runs:
            report.add("1,1,4,4", peer, "of the limit", 0.5)
            report.add("1,1,4,4", peer, "s to 0.8", seconds)
    hetero.add_ratios(report, ["1,1,4,4"], 0.8)
    assert report.ratios["mean-sooner-than-allreduce@asgd"] == 2.0
    assert report.ratios["mean-sooner-than-allreduce@bsp"] == 0.0


def test_hetero_trains_every_peer_with_every_seed():
    trained = []

    class Recorded(hetero.Bench):
        def _run(self, cluster, name, peer, training):
            trained.append((training.seed, peer))

    plan = dataclasses.replace(TINY, clusters={"one": (0.1,)}, peers=("asgd", "bsp"), seeds=(1, 2))
    Recorded(Report("hetero", [1, 2]), plan, ROOT, None).run()
    assert trained == [(1, "asgd"), (1, "bsp"), (2, "asgd"), (2, "bsp")]


def test_the_target_is_reached_between_two_epochs():
    epochs = [(9.0, 0.5), (2.0, 0.7), (4.0, 0.9)]
    assert throughput(epochs, samples=300) == 100.0
    assert seconds_to(0.8, epochs) == pytest.approx(3.0 + 2.0 + 2.0)  # the first epoch counts as the others' median
    assert seconds_to(0.95, epochs) is None


def test_a_training_ends_at_its_target_or_at_its_last_epoch():
    accuracies = iter([0.9, 0.9, 0.1, 0.2, 0.3])
    clock = EpochTimer(Goal(0.8, least_epochs=2, most_epochs=3, limit_s=60.0), lambda: next(accuracies))
    clock.begin()
    assert [clock.end(), clock.end()] == [False, True]
    slow = EpochTimer(Goal(0.8, least_epochs=2, most_epochs=3, limit_s=60.0), lambda: next(accuracies))
    slow.begin()
    assert [slow.end(), slow.end(), slow.end()] == [False, False, True]


@pytest.mark.parametrize(("preset", "batches"), [("bsp", 4), ("allreduce", 4), ("asgd", 1), ("n-softsync", 4)])
def test_a_merge_of_batches_into_an_update_multiplies_the_rate(preset, batches):
    assert batches_per_update(resolve_algorithm(preset), workers=4) == batches


def test_a_training_is_the_same_after_it_was_written_down(tmp_path):
    training = Training(tmp_path / "a.npz", tmp_path / "b.npz", 128, (0.1, 0.4), Goal(0.5, 1, 2, 3.0))
    training.save(tmp_path / "training.json")
    assert Training.load(tmp_path / "training.json") == training
    assert training.limit == pytest.approx(32 / 0.1 + 32 / 0.4)


def test_a_peer_that_fails_is_named_with_its_output():
    with pytest.raises(PeerFailed, match=r"exit code 3(?s:.*)out of order"):
        run_together([[sys.executable, "-c", "print('out of order'); raise SystemExit(3)"]])


def test_a_peer_that_hangs_is_ended():
    with pytest.raises(PeerFailed, match="did not end within 0 s"):
        run_together([[sys.executable, "-c", "import time; time.sleep(600)"]], limit_s=0.2)


def test_processes_that_serve_are_ended_with_those_they_serve():
    serves = [sys.executable, "-c", "import time; time.sleep(600)"]
    run_together([[sys.executable, "-c", ""], serves], [{}, {}], needed=1, limit_s=60)


def test_every_process_of_a_tensorflow_cluster_has_its_own_port():
    tasks = [json.loads(each["TF_CONFIG"]) for each in tensorflow_cluster(chief=1, worker=2)]
    assert [(task["task"]["type"], task["task"]["index"]) for task in tasks] == [
        ("chief", 0),
        ("worker", 0),
        ("worker", 1),
    ]
    assert len({address for own in tasks[0]["cluster"].values() for address in own}) == 3


@pytest.mark.long
def test_wire_compares_transports_with_tensorflow_s_parameter_server(tmp_path):
    report = Report("wire", [wire.SEED])
    wire.run(report, {"tiny": 1000}, seconds=0.01, runs=1)
    got = written(report, tmp_path)
    assert set(got["ratios"]) == {f"{name}@tiny" for name in wire.RATIOS}
    assert {row["peer"] for row in got["rows"]} == set(wire.PEERS)


@pytest.mark.long
def test_wire_compares_an_embedding_by_rows_with_a_dense_one():
    report = Report("wire", [embedding.SEED])
    embedding.run(report, 2000, seconds=0.0, runs=1, transports=("shm",))
    assert {row.peer for row in report.rows} == {"shm, rows", "shm, dense"}
    assert report.ratios["bytes dense/rows@shm"] > 30


@pytest.mark.long
def test_buckets_are_timed_against_one_reduction():
    program = [sys.executable, "-m", "benchmarks.workloads.bucket_rank", "mlp", "--batch", "8", "--steps", "1"]
    found = run_gloo(this_machine(2), [*program, "--runs", "2"])
    assert set(found) == set(PEERS)
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found.values())


@pytest.mark.long
def test_wire_reports_the_gain_of_codecs_on_slow_links(tmp_path):
    report = Report("wire", [wire.SEED])
    wire.run_linked(report, 50_000, seconds=0.01, runs=1)
    ratios = written(report, tmp_path)["ratios"]
    assert set(ratios) == {"int8/identity@1Gbit", "int4/identity@100Mbit"}
    assert min(ratios.values()) > 0


@pytest.mark.long
def test_link_compares_codecs_and_what_is_learnt_with_adaptive(monkeypatch, tmp_path):
    monkeypatch.setattr(link, "learnt", lambda work, codec, mbit: [90.0 if codec == "identity" else 89.5])
    work = link.Work(size=1000, compute_s=0.001, learn=5, steps=5, runs=1, seeds=(0,), epochs=1)
    report = Report("link", [link.SEED])
    link.run(report, work, {"100Mbit": 100.0}, ["identity", "int8", "adaptive"], {"100Mbit": 100.0})
    got = written(report, tmp_path)
    assert got["ratios"]["adaptive/best-fixed@100Mbit"] > 0
    assert got["ratios"]["points over identity@100Mbit"] == -0.5
    assert {"identity", "int8", "adaptive", "adaptive, 100Mbit"} == peers_of(got)


@pytest.mark.long
def test_scale_adds_workers_and_shards(tmp_path):
    report = Report("scale", [scale.SEED])
    scale.run(report, {"tiny": 1000}, seconds=0.01, runs=1, workers=(1, 2), shards=(1,))
    got = written(report, tmp_path)
    assert set(got["ratios"]) == {"workers2/workers1@tiny", "shards1/shards1@tiny", "leases_per_s"}
    assert got["ratios"]["leases_per_s"] > 0


def test_simulate_reports_the_time_of_the_simulator(tmp_path):
    report = Report("simulate", [simulate.SEED])
    simulate.run(report, workers=6, steps=1, rows=("asgd",))
    got = written(report, tmp_path)
    assert set(got["ratios"]) == {"overhead@asgd"}
    assert {"ms gradient", "ms shard", "ms simulator", "ms per step", "steps"} == {row["unit"] for row in got["rows"]}


def test_gradients_computed_together_are_those_computed_one_by_one(monkeypatch):
    monkeypatch.setattr(gradient_ways, "WORKERS", 2)
    images = read_images(None).take(gradient_ways.SAMPLES)
    ways = gradient_ways.Ways(lambda: simulate.build(1, 0.01, 1), images, 4).all()
    expected = ways["one by one"]()
    assert np.abs(expected).max() > 0
    for compute in ways.values():
        np.testing.assert_allclose(compute(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.long
@pytest.mark.machines
@pytest.mark.timeout(900)
def test_machines_compares_rates_of_shard_machines(tmp_path):
    report = Report("machines", [0])
    machines.run(report, dataclasses.replace(machines.QUICK, steps=2, shards=(1, 2)), None, ["shards"])
    got = written(report, tmp_path)
    assert peers_of(got) == {"1 shards", "2 shards"}
    assert set(got["ratios"]) == {
        "shards: pushes/s, 2 shards / 1 shards",
        "shards: pushes/s, 2 shards / 1 shards, of the target 1.8",
    }


@pytest.mark.long
def test_memory_compares_each_process_with_the_formula(tmp_path):
    report = Report("memory", [1])
    memory.run(report, [memory.Case("tiny", "adamw", link="tcp")])
    got = written(report, tmp_path)
    roles = {f"{role}, {kind}" for role in memory.ROLES for kind in ("steady", "peak")}
    assert {row["peer"] for row in got["rows"] if row["unit"] == "vectors"} == roles | {f"{r}, formula" for r in roles}
    base = {row["peer"]: row["value"] for row in got["rows"] if row["unit"] == "MB"}
    assert set(base) == set(memory.ROLES)
    assert min(base.values()) > 10


@pytest.mark.parametrize(("name", "size"), [("30M", 30e6), ("124M", 124e6), ("350M", 350e6)])
def test_the_gpt_models_have_the_sizes_they_are_named_for(name, size):
    shape = gpt_script.SIZES[name]
    blocks = shape.layers * 12 * shape.width**2
    assert shape.vocabulary * shape.width + blocks == pytest.approx(size, rel=0.03)


def test_records_hold_a_label_and_the_planes_of_an_image(tmp_path):
    pixels = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 32, 32, 3)
    np.savez(tmp_path / "cifar10-train-part1.npz", x_train=pixels, y_train=np.array([[7], [3]], np.uint8))
    files = [tmp_path / "one", tmp_path / "two"]
    assert pipelines.write_records(files, 4, tmp_path) == "cifar10"
    records = np.fromfile(files[0], np.uint8).reshape(2, pipelines.RECORD_BYTES)
    assert records[:, 0].tolist() == [7, 3]
    np.testing.assert_array_equal(records[1, 1:].reshape(3, 32, 32).transpose(1, 2, 0), pixels[1])
    images, labels = next(iter(pipelines.augmented([str(file) for file in files], 4)))
    assert images.shape == (4, 32, 32, 3)
    assert sorted(labels.numpy()) == [3, 3, 7, 7]


def test_images_of_the_shape_of_cifar10_are_made_where_it_is_absent(tmp_path):
    assert pipelines.write_records([tmp_path / "records"], 5, None) == "noise of CIFAR-10's shape"
    assert (tmp_path / "records").stat().st_size == 5 * pipelines.RECORD_BYTES


def test_a_row_s_value_is_the_median_of_its_runs():
    assert Row("case", "peer", "s", [3.0, 1.0, 2.0]).value == 2.0


@pytest.mark.parametrize(("case", "size"), [("mlp", 0.1e6), ("cnn", 1e6), ("10M", 10e6)])
def test_the_models_have_the_sizes_they_are_named_for(case, size):
    assert build(case, keras).count_params() == pytest.approx(size, rel=0.05)


def test_bench_without_a_name_lists_the_benchmarks():
    done = subprocess.run([ROOT / "scripts" / "bench"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "overhead: " in done.stderr
    assert "accuracy: " in done.stderr
    assert "hetero: " in done.stderr
    assert "link: " in done.stderr


def test_every_file_of_run_is_a_benchmark():
    files = [path for path in (ROOT / "benchmarks" / "run").glob("*.py") if path.name != "__init__.py"]
    assert [path.name for path in files if "\ndef main(" not in path.read_text()] == []


def test_the_package_of_the_benchmarks_holds_rooms_only():
    assert [path.name for path in (ROOT / "benchmarks").glob("*.py")] == ["__init__.py"]

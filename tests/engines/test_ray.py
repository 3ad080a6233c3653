"""Workers as actors on a Ray cluster of several nodes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner
from nfdt_client.embedded import EmbeddedServer

from nfdt.cli import cli
from nfdt.core.errors import JobFailed
from nfdt.core.wire.certificates import CertificateAuthority
from nfdt.engines.ray_cluster import RayCluster, SlotResources
from nfdt.engines.ray_slot import RaySlotAccess
from tests.support.ray_cluster import ray_cluster
from tests.support.scripts import DIGITS, NFDT, answer, environment

DEADLINE_S = 600  # every slot loads TensorFlow on its own
pytestmark = [pytest.mark.timeout(2 * DEADLINE_S), pytest.mark.processes]

ONE_FIT = """
import os, psutil

class Look(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        names = [" ".join(process.cmdline()) for process in psutil.Process(os.getpid()).children(recursive=True)]
        self.local = [name for name in names if "nfdt shard" in name or "nfdt.worker.slot" in name]

look = Look()
history = build().fit(x[:1500], y[:1500], batch_size=30, verbose=0, callbacks=[look])
workers = {name: worker["samples"] for name, worker in history.nfdt.items()}
print(json.dumps(dict(workers=workers, local=look.local)))
"""

TWO_FITS = """
import pathlib, time

class Lose(keras.callbacks.Callback):
    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 1 and not pathlib.Path("trains").exists():
            pathlib.Path("trains").touch()
            while not pathlib.Path("lost").exists():
                time.sleep(0.05)

def fit(epochs, *callbacks):
    model = build()
    history = model.fit(x[:1500], y[:1500], batch_size=30, epochs=epochs, verbose=0, callbacks=callbacks)
    workers = {name: worker["samples"] for name, worker in history.nfdt.items()}
    return dict(loss=history.history["loss"], iterations=int(model.optimizer.iterations), workers=workers)

print(json.dumps([fit(3, Lose()), fit(1)]))
"""


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(nodes=2, cpus=2) as running:
        yield running


def on_ray(cluster, *options: str) -> list[str]:
    return [*NFDT, "run", "--on", "ray", "--address", cluster.address, *options]


def await_file(path, process):
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def test_more_workers_than_there_is_room_for_are_refused_with_what_there_is(cluster, tmp_path):
    (tmp_path / "script.py").write_text("print('ran')")
    command = on_ray(cluster, "--workers", "5", "--set", "start_timeout_s=3", str(tmp_path / "script.py"))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 3
    assert "room for 5 slots with 1 CPU, 0 GPU each" in done.stderr
    assert "has 2 CPU, 0 GPU" in done.stderr
    assert "4 CPU, 0 GPU" in done.stderr
    assert "ran" not in done.stdout


def test_slots_that_the_server_refuses_end_the_session_with_the_reason(cluster, tmp_path):
    authority, failed = CertificateAuthority("test"), threading.Event()
    pair = authority.issue(["127.0.0.1"])
    (tmp_path / "cert.pem").write_bytes(pair.cert)
    (tmp_path / "key.pem").write_bytes(pair.key)
    tls = ["--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]
    server = EmbeddedServer(0, 0, network=tls)
    ray = RayCluster(cluster.address)
    try:
        server.start()
        ray.reserve(1, 0, SlotResources(1.0), DEADLINE_S)
        ray.start(RaySlotAccess(server.address(), "a wrong token", authority.cert), failed.set)
        ray.check()
        assert failed.wait(DEADLINE_S)
        with pytest.raises(JobFailed, match="does not accept this token"):
            ray.check()
    finally:
        ray.close()
        server.stop()


@pytest.mark.long
@pytest.mark.horovod
@pytest.mark.parametrize(
    "options", [["allreduce"], ["group-sync", "--set", "groups=1"]], ids=lambda options: options[0]
)
def test_ranks_of_a_ring_are_slots_on_ray(cluster, tmp_path, options):
    (tmp_path / "script.py").write_text(DIGITS + ONE_FIT)
    started = ["--workers", "2", "--set", "start_timeout_s=500", "--algorithm", *options]
    command = on_ray(cluster, *started, "script.py")
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S)
    got = answer(done)
    assert sum(got["workers"].values()) == 1500
    assert len(got["workers"]) == 1  # one ring or group of both slots


@pytest.mark.feature("Ray", area="Launchers and environments")
@pytest.mark.long
def test_several_shards_are_on_the_nodes_too(cluster, tmp_path):
    (tmp_path / "script.py").write_text(DIGITS + ONE_FIT)
    command = on_ray(cluster, "--workers", "2", "--set", "shards=2", "--set", "start_timeout_s=500", "script.py")
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S)
    got = answer(done)
    assert sum(got["workers"].values()) == 1500
    assert got["local"] == [], "the server has started no shard itself"


@pytest.mark.long
def test_a_job_outlives_a_node_whose_slots_come_back_elsewhere(cluster, tmp_path):
    """The last test of this module: it removes a node."""
    (tmp_path / "script.py").write_text(DIGITS + TWO_FITS)
    options = ("--workers", "2", "--set", "emulate.step_ms=20", "--set", "start_timeout_s=500")
    process = subprocess.Popen(
        on_ray(cluster, *options, "script.py"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        await_file(tmp_path / "trains", process)
        cluster.remove_node()
        (tmp_path / "lost").touch()
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    with_loss, after = answer(subprocess.CompletedProcess([], process.returncode, stdout, stderr))
    assert len(stdout.splitlines()) == 1, "Ray writes no lines of its own"
    assert "slot on Ray is lost" in stderr
    assert 150 <= with_loss["iterations"] <= 160, "what a lost worker had not reported is done again"
    assert with_loss["loss"][2] < with_loss["loss"][0]
    assert "is lost" in stderr
    assert after["iterations"] == 50
    assert len(after["workers"]) == 2, "a fit waits for all its workers"
    assert sum(after["workers"].values()) == 1500


def test_without_ray_the_error_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "script.py").touch()
    done = CliRunner().invoke(cli, ["run", "--on", "ray", str(tmp_path / "script.py")])
    assert done.exit_code == 2
    assert "pip install 'nfdt[ray]'" in done.output


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (("--slot-gpus", "1"), "--on ray"),
        (("--on", "ray", "--server", "127.0.0.1:1"), "--server"),
        (("--on", "ray", "--algorithm", "allreduce", "--set", "launcher=horovodrun"), "the slots that Ray starts"),
        (("--insecure-allreduce",), "--on ray"),
        (("--on", "ray", "--address", "ray://127.0.0.1:10001"), "ray job submit"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, needle, tmp_path):
    (tmp_path / "script.py").touch()
    done = CliRunner().invoke(cli, ["run", *arguments, str(tmp_path / "script.py")])
    assert done.exit_code == 2
    assert needle in done.output

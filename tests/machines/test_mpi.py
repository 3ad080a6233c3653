"""``mpirun nfdt mpi`` on two machines: the plain command, with TLS of its own."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.scripts import DIGITS, environment

NFDT = Path(sys.executable).with_name("nfdt")
TRAIN = (
    DIGITS
    + """
model = build()
history = model.fit(x[:1500], y[:1500], batch_size=32, epochs=2, verbose=0)
workers = history.nfdt
groups = sorted(w["group"] for w in workers.values() if w.get("group"))
samples = [w["samples"] for w in workers.values()]
ranks = [w.get("ranks") for w in workers.values()]
print(json.dumps(dict(loss=history.history["loss"], samples=samples, groups=groups, ranks=ranks)))
"""
)


def remote_shell(rig, folder):
    """Write a command that runs another one on a machine, as ssh does, and return its path."""
    cases = "\n".join(f'{m.name}) exec {shlex.join(m.command(["sh", "-c"], folder))} "$*" ;;' for m in rig)
    path = folder / "remote_shell"
    path.write_text(f'#!/bin/sh\nhost=$1\nshift\necho "$host" >> entered\ncase $host in\n{cases}\nesac\n')
    path.chmod(0o700)
    return path


def launch(rig, folder, ranks, *options):
    """Run the script under mpirun on the machines and return its answer.

    The folder of the rendezvous is shared, as a home directory would be.
    """
    script, rendezvous = folder / "train.py", folder / "rendezvous"
    script.write_text(TRAIN)
    hosts = ",".join(f"{machine.name}:{ranks}" for machine in rig)
    launcher = ["mpirun", "--allow-run-as-root", "-np", str(ranks), "--host", hosts, "--bind-to", "none"]
    launcher += ["--mca", "plm_rsh_agent", remote_shell(rig, folder), "-x", "NFDT_RENDEZVOUS_DIR", "-x", "PATH"]
    launcher += ["--map-by", "node"]
    path = f"{NFDT.parent}:{os.environ['PATH']}"
    done = rig[0].run(
        [*launcher, "nfdt", "mpi", "--log-level", "info", *options, script],
        env=environment(NFDT_RENDEZVOUS_DIR=str(rendezvous), PATH=path),
        cwd=folder,
        timeout=540,
    )
    assert (folder / "entered").read_text().split() == ["node1"]
    assert list(rendezvous.iterdir()) == []
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


@pytest.mark.long
@pytest.mark.feature("`mpirun ... nfdt mpi`", area="Launchers and environments")
def test_mpirun_trains_on_two_machines(machines, tmp_path):
    got = launch(machines(2), tmp_path, 3)
    assert len(got["samples"]) == 2
    assert sum(got["samples"]) == 3000
    assert got["loss"][1] < got["loss"][0]


@pytest.mark.long
@pytest.mark.horovod
@pytest.mark.timeout(600)
def test_groups_of_an_mpi_launch_stay_on_their_machines(machines, tmp_path):
    got = launch(machines(2), tmp_path, 5, "--algorithm", "group-sync", "--set", "groups=2")
    assert sorted(member for group in got["groups"] for member in group) == [0, 1, 2, 3]
    assert sorted(map(len, got["groups"])) == [2, 2]  # two workers on each machine
    assert sum(got["samples"]) == 3000
    assert got["loss"][1] < got["loss"][0]


@pytest.mark.long
@pytest.mark.horovod
@pytest.mark.timeout(600)
def test_an_allreduce_of_an_mpi_launch_spans_its_machines(machines, tmp_path):
    got = launch(machines(2), tmp_path, 4, "--algorithm", "allreduce", "--insecure-allreduce")
    assert got["ranks"] == [3]
    assert sum(got["samples"]) == 3000
    assert got["loss"][1] < got["loss"][0]

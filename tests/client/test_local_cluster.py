"""A cluster of this machine with several fits."""

from __future__ import annotations

import subprocess

import keras
import numpy as np
import psutil
import pytest

import nfdt
from nfdt.core.errors import UsageError
from nfdt.core.host.local_servers import find_servers, servers_folder
from tests.support.scripts import DEADLINE_S, NFDT, environment

X, Y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")


def fitted():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model.fit(X, Y, batch_size=8, epochs=1, verbose=0)


@pytest.fixture(scope="module")
def cluster():
    with nfdt.LocalCluster(workers=2, ui=True, warm=False) as cluster:
        yield cluster


def processes_of(history) -> set[int]:
    return {worker["pid"] for worker in history.nfdt.values()}


def test_several_fits_train_on_the_same_processes(cluster):
    with cluster.session():
        first = fitted()
    second = cluster.distribute(fitted)()
    with cluster.session(algorithm="bsp"):
        third = fitted()
    assert len(processes_of(first)) == 2
    assert processes_of(first) == processes_of(second) == processes_of(third)


def test_commands_find_it_and_notebooks_show_its_page(cluster):
    assert cluster.address in [server.address for server in find_servers(servers_folder())]
    assert f"serves at {cluster.address}" in repr(cluster)
    assert 'href="http://127.0.0.1:' in cluster._repr_html_()


def nfdt_jobs(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    command = [*NFDT, "jobs", "list", *arguments]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=DEADLINE_S)


def test_commands_need_no_server_where_one_script_trains(cluster):
    with cluster.session():
        fitted()
    listed = nfdt_jobs()
    assert listed.returncode == 0, listed.stderr
    assert "ddc-asgd" in listed.stdout
    assert nfdt_jobs("--server", cluster.address).stdout == listed.stdout  # and no token either


def test_health_needs_no_server_either(cluster):
    done = subprocess.run([*NFDT, "health"], env=environment(), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout == f"{cluster.address} serves\n", done.stderr


def test_commands_name_the_servers_where_several_scripts_train(cluster):
    with nfdt.LocalCluster(workers=1, warm=False) as other:
        addresses = cluster.address, other.address
        done = nfdt_jobs()
        assert done.returncode == 2
        assert all(address in done.stderr for address in addresses)


def test_commands_need_a_server_where_no_script_trains(tmp_path):
    done = nfdt_jobs(XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 2
    assert "scripts train at none" in done.stderr


def test_an_algorithm_for_other_processes_is_refused(cluster):
    with pytest.raises(UsageError, match="topology 'flat'"):
        cluster.session(algorithm="allreduce")


def test_a_server_is_refused():
    with pytest.raises(UsageError, match="expected no server"):
        nfdt.LocalCluster(server="127.0.0.1:1")


def test_a_closed_cluster_has_no_processes_and_says_so():
    cluster = nfdt.LocalCluster(workers=1, warm=False)
    address = cluster.address
    (server,) = [one for one in find_servers(servers_folder()) if one.address == address]
    cluster.close()
    cluster.close()
    assert not psutil.pid_exists(server.pid)
    assert address not in [one.address for one in find_servers(servers_folder())]
    assert "closed" in repr(cluster)
    with pytest.raises(UsageError, match="closed"):
        cluster.session()

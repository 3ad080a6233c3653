"""Patches of Horovod's elastic driver, without processes."""

from __future__ import annotations

import socket
import threading

import pytest

from hfdt.horovodrun import LostHosts, order_hosts
from nfdt.core.host.launcher_rank import local_names, one_name_per_slot, slot_of
from nfdt.core.host.link_probes import LinkProbes

horovod = pytest.importorskip("horovod.runner.elastic.driver")


def test_every_slot_of_this_machine_has_a_name_that_leads_here():
    names = local_names(4)
    assert len(set(names)) == 4
    assert {socket.gethostbyname(name) for name in names} == {"127.0.0.1"}
    assert [slot_of(name) for name in names] == [0, 1, 2, 3]
    assert slot_of("10.0.0.1") is None


def test_slots_of_this_machine_are_spread_and_other_hosts_stay():
    assert one_name_per_slot({"localhost": 1, "b": 4, "127.0.0.1": 1}) == {"127.0.0.1": 1, "127.0.0.01": 1, "b": 4}


@pytest.fixture
def mended(monkeypatch):
    from horovod.runner import gloo_run
    from horovod.runner.elastic import discovery
    from horovod.runner.util import remote

    from hfdt.horovodrun import patch_horovod

    patched = {
        gloo_run: ("ElasticDriver", "_exec_command_fn"),
        remote: ("SSH_COMMAND_PREFIX",),
        discovery.HostDiscoveryScript: ("find_available_hosts_and_slots",),
        discovery.FixedHosts: ("find_available_hosts_and_slots",),
        discovery.HostManager: ("order_available_hosts",),
    }
    for place, names in patched.items():
        for name in names:
            monkeypatch.setattr(place, name, vars(place)[name])
    patch_horovod(only_here=True, probes=LinkProbes(2, 3))
    return gloo_run


class Rendezvous:
    def init(self, plan):
        pass

    def stop(self):
        pass


def test_a_host_that_died_and_is_back_before_the_next_world_gets_a_new_rank(mended):
    from horovod.runner.elastic.discovery import FixedHosts

    started: list[str] = []
    ended = threading.Event()

    def run(slot, events):
        started.append(slot.hostname)
        ended.wait(60)
        return 0, 0.0

    hosts = FixedHosts({"127.0.0.1": 1, "127.0.0.01": 1})
    driver = mended.ElasticDriver(Rendezvous(), hosts, 2, 2, timeout=30, cooldown_range=(1, 2))
    try:
        driver.wait_for_available_slots(2)
        driver.start(2, run)
        registry = driver._worker_registry
        threads = [
            threading.Thread(target=registry.record_ready, args=("127.0.0.1", 0), daemon=True),
            threading.Thread(target=registry.record_failure, args=("127.0.0.01", 0), daemon=True),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(started) == ["127.0.0.01", "127.0.0.01", "127.0.0.1"]
    finally:
        ended.set()
        driver.stop()


def test_on_loopback_the_error_of_a_script_that_names_another_machine_names_what_is_missing(mended, tmp_path):
    from horovod.runner.elastic.discovery import HostDiscoveryScript

    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:2\necho elsewhere:2\n")
    script.chmod(0o700)
    with pytest.raises(RuntimeError, match="network_interfaces"):
        HostDiscoveryScript(str(script), 1).find_available_hosts_and_slots()


def test_ssh_ends_when_its_machine_has_lost_its_power(mended):
    from horovod.runner.util.remote import get_remote_command

    command = get_remote_command("true", "b").split()
    assert {"ServerAliveInterval=2", "ServerAliveCountMax=3", "ConnectTimeout=8"} <= set(command)
    assert command[-2:] == ["b", "true"]


def test_this_machine_has_the_lowest_ranks_and_earlier_hosts_keep_theirs():
    assert order_hosts({"b", "127.0.0.01", "a", "127.0.0.1"}, []) == ["127.0.0.01", "127.0.0.1", "a", "b"]
    assert order_hosts({"b", "127.0.0.1", "a"}, ["b", "c"]) == ["b", "127.0.0.1", "a"]


def test_a_lost_host_is_left_out_until_a_login_reaches_it():
    asked, answers, back = threading.Event(), threading.Event(), threading.Event()

    class Hosts(LostHosts):
        def _await(self, host):
            super()._await(host)
            back.set()

    def reaches(host: str) -> bool:
        asked.set()
        return answers.wait(30)

    hosts = Hosts(reaches)
    found = {"127.0.0.1": 1, "b": 2}
    hosts.add("127.0.0.1")
    hosts.add("b")
    assert asked.wait(30)
    assert hosts.without(found) == {"127.0.0.1": 1}
    answers.set()
    assert back.wait(30)
    assert hosts.without(found) == found

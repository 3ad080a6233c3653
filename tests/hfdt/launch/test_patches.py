"""Patches of Horovod's elastic driver, without processes."""

from __future__ import annotations

import socket
import threading

import pytest

from nfdt.core.host.launcher_rank import local_names, one_name_per_slot, slot_of

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

    from hfdt.horovodrun import patch_horovod

    monkeypatch.setattr(gloo_run, "ElasticDriver", gloo_run.ElasticDriver)
    monkeypatch.setattr(
        discovery.HostDiscoveryScript,
        "find_available_hosts_and_slots",
        discovery.HostDiscoveryScript.find_available_hosts_and_slots,
    )
    patch_horovod(only_here=True)
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

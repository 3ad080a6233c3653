"""Emulated links take their configured time on every transport."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from nfdt.core.specs.emulation import Emulation
from nfdt.core.wire.job_token import worker_token
from nfdt.transport.choice import make_choice
from nfdt.transport.emulated_link import EmulatedLink, make_link
from nfdt.transport.stream import StreamClient
from tests.support.shard_cluster import rule_spec
from tests.support.streams import LARGE, TOKEN, serve

MBIT_S = 1e6 / 8  # bytes


def timed(call, *arguments):
    began = time.monotonic()
    call(*arguments)
    return time.monotonic() - began


class Waits:
    """Stand-in for the event that ends waits: it records the time that one would wait."""

    def __init__(self):
        self.seconds = []

    def wait(self, seconds):
        self.seconds.append(round(seconds, 9))


def link(bandwidth_mbit, latency_ms, now=100.0):
    waits = Waits()
    return EmulatedLink(bandwidth_mbit, latency_ms, waits, clock=lambda: now), waits.seconds


def test_a_message_takes_its_latency_and_the_time_of_its_bytes():
    made, waits = link(8.0, 10.0)
    made.send(50_000, 100.0)
    made.receive(0, 100.0)
    assert waits == [0.06, 0.01]
    made, waits = link(None, 20.0)
    made.send(10**9, 100.0)
    assert waits == [0.02]


def test_messages_of_one_direction_go_one_after_the_other():
    made, waits = link(8.0, 10.0)
    for _ in range(3):
        made.send(30_000, 100.0)
    made.receive(30_000, 100.0)
    assert waits == [0.04, 0.07, 0.10, 0.04]


def test_time_that_has_passed_already_is_not_waited_for():
    made, waits = link(8.0, 10.0)
    made.send(30_000, 99.98)
    made.send(0, 90.0)  # behind the first
    made.receive(30_000, 90.0)
    assert waits == [0.02, 0.02, 0.0]


def test_the_end_of_the_job_ends_a_wait():
    stopped = threading.Event()
    link = EmulatedLink(0.001, 0.0, stopped)
    waiting = threading.Thread(target=link.send, args=(10**9, time.monotonic()))
    waiting.start()
    stopped.set()
    waiting.join(5)
    assert not waiting.is_alive()


@pytest.mark.parametrize("share_memory", [False, True])
def test_pushes_and_answers_wait_for_the_link_over_every_transport(share_memory):
    running = serve(LARGE)
    seconds = {}
    for codec in ("identity", "int8"):
        algorithm = rule_spec("plain", codec=codec)
        link = EmulatedLink(800.0, 5.0, threading.Event())
        options = {"share_memory": share_memory, "choice": make_choice(algorithm, LARGE.size), "emulated": link}
        client = StreamClient(
            [r.address for r in running], LARGE, codec, worker_token(TOKEN, codec), timeout_s=60, **options
        )
        client.pull()
        gradient = np.ones(LARGE.size, np.float32)
        client.push(gradient, samples=1)
        seconds[codec] = min(timed(lambda: client.push(gradient, samples=1)) for _ in range(3))  # noqa: B023
        client.close()
    [r.stop(0) for r in running]
    one_way = LARGE.size * 4 / (800 * MBIT_S) + 0.005
    assert seconds["identity"] >= 2 * one_way
    assert seconds["int8"] >= 2 * (LARGE.size / (800 * MBIT_S) + 0.005)


def test_what_computation_overlaps_with_a_slow_link():
    running = serve(LARGE, overlap=1)[0]
    link = EmulatedLink(None, 200.0, threading.Event())
    client = StreamClient(
        [running.address], LARGE, "w", worker_token(TOKEN, "w"), timeout_s=60, overlap=1, emulated=link
    )
    held, gradient = client.pull(), np.zeros(LARGE.size, np.float32)
    began = time.monotonic()
    pending = [client.begin_push(gradient, samples=1, computed_on=held.sequence) for _ in range(2)]
    assert not pending[0].arrived, "the worker goes on while the link carries"
    assert all(p.result().applied for p in pending)
    assert time.monotonic() - began >= 0.4
    client.close()
    running.stop(0)


@pytest.mark.parametrize(
    ("options", "links"),
    [
        ({"bandwidth_mbit": 100}, [(100.0, 0.0)] * 3),
        ({"bandwidth_mbit": "100", "latency_ms": ("5",)}, [(100.0, 5.0)] * 3),
        ({"bandwidth_mbit": (10, 20), "latency_ms": (0, 0, 7)}, [(10.0, 0.0), (20.0, 0.0), (None, 7.0)]),
        ({}, [(None, 0.0)] * 3),
    ],
)
def test_one_value_is_for_all_workers_and_a_list_is_one_each(options, links):
    emulate = Emulation(**options)
    assert [emulate.link_of(worker) for worker in range(3)] == links
    made = [make_link(emulate, worker, threading.Event()) for worker in range(3)]
    assert [link is not None for link in made] == [bool(bandwidth or latency) for bandwidth, latency in links]


@pytest.mark.parametrize("options", [{"bandwidth_mbit": 0}, {"bandwidth_mbit": (1, -1)}, {"latency_ms": -1}])
def test_links_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match="greater than"):
        Emulation(**options)

"""Adaptive choice of codecs on known links: synthetic measurements in, decisions out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from nfdt.codecs import WIDTHS
from nfdt.codecs.adaptive import HYSTERESIS, AdaptiveWidth, CodecLoss, LinkEstimate
from nfdt.transport.choice import AdaptiveCodecs

SIZE = 10**6
ERRORS = {"bf16": 3e-6, "int8": 6e-5, "int4": 0.02}


def losses(coding_s):
    """Return the losses of codecs that take so long to encode and to decode."""
    return {name: CodecLoss(error, coding_s, coding_s) for name, error in ERRORS.items()}


BYTES = {codec.name: codec.encoded_bytes(SIZE) for codec in WIDTHS}


class Cluster:
    """One worker on a link of this speed (Mbit/s, up and down), with noise on its times."""

    def __init__(self, *, up, down=None, compute_s=0.1, latency_s=0.001, noise=0.2, seed=0, coding_s=0.001, **options):
        self.width = AdaptiveWidth(WIDTHS, SIZE, **{"error_budget": 0.05, "pipelined": False, **options})
        self.up, self.down = up, down or up
        self.compute_s, self.latency_s, self.noise = compute_s, latency_s, noise
        self.random = np.random.default_rng(seed)
        self.losses = {"identity": CodecLoss(0, 0, 0), **losses(coding_s)}
        self.width.lost_in_pushes(losses(coding_s))
        self.width.lost_in_replies(losses(coding_s))
        self.decisions = []
        self.spent_s = 0.0  # without noise

    def run(self, pushes):
        for _ in range(pushes):
            decision = self.width.choose()
            if decision:
                self.decisions.append((decision.push, decision.reply))
            sent, received = BYTES[self.width.push], BYTES[self.width.reply]
            self.spent_s += self.seconds(self.width.push, self.width.reply)
            seconds = self.latency_s + 8e-6 * (sent / self.up + received / self.down)
            self.width.computed(self.compute_s * (1 + self.noise * self.random.random()))
            self.width.exchanged(sent, received, seconds * (1 + self.noise * self.random.exponential()))
        return self

    @property
    def last(self):
        return self.decisions[-1] if self.decisions else ("identity", "identity")

    def seconds(self, push, reply):
        exchange = self.latency_s + 8e-6 * (BYTES[push] / self.up + BYTES[reply] / self.down)
        coding = sum(each.encode_s + 2 * each.decode_s for each in (self.losses[push], self.losses[reply]))
        return self.compute_s + exchange + coding

    def cost(self, push, reply):
        return self.seconds(push, reply) * (1 + self.losses[push].error) * (1 + self.losses[reply].error)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_a_slow_link_gets_few_bits_and_a_fast_one_all_of_them(noise):
    assert Cluster(up=50, noise=noise).run(100).last == ("int4", "int4")
    assert Cluster(up=1e6, noise=noise).run(100).decisions == []


@pytest.mark.parametrize(("up", "compute_s"), list(itertools.product([20, 200, 2000, 20000], [0.01, 0.1, 1.0])))
def test_the_choice_costs_little_more_than_the_best(up, compute_s):
    cluster = Cluster(up=up, compute_s=compute_s, noise=0.1).run(150)
    best = min(cluster.cost(*pair) for pair in itertools.product(BYTES, BYTES))
    assert cluster.cost(*cluster.last) <= best / (1 - HYSTERESIS) * 1.03


@pytest.mark.parametrize(("up", "coding_s"), list(itertools.product([20, 200, 2000, 20000], [0.001, 0.01, 0.1, 1.0])))
def test_a_codec_never_takes_longer_than_it_saves(up, coding_s):
    cluster = Cluster(up=up, coding_s=coding_s, noise=0).run(100)
    assert cluster.seconds(*cluster.last) <= cluster.seconds("identity", "identity")
    assert cluster.cost(*cluster.last) <= min(cluster.cost(*pair) for pair in itertools.product(BYTES, BYTES)) * 1.06


def test_coding_is_not_hidden_by_the_computation_it_shares_a_thread_with():
    quick, slow = (Cluster(up=400, compute_s=0.15, coding_s=s, pipelined=True, noise=0) for s in (0.001, 0.03))
    assert quick.run(100).last != ("identity", "identity")  # 0.16 s on the link against 0.15
    assert slow.run(100).last == ("identity", "identity")


class SlowClock:
    """Clock of which each reading takes ``seconds``."""

    def __init__(self, seconds):
        self.now, self.seconds = 0.0, seconds

    def __call__(self):
        self.now += self.seconds
        return self.now


@pytest.mark.parametrize(("coding_s", "changed"), [(1e-6, True), (1.0, False)])
def test_how_long_codecs_take_is_measured(coding_s, changed):
    width = AdaptiveWidth(WIDTHS, SIZE, error_budget=0.05, pipelined=False)
    choice = AdaptiveCodecs(width, clock=SlowClock(coding_s))
    random, weights = np.random.default_rng(0), np.zeros(SIZE, np.float32)
    for _ in range(60):
        choice.pushes(random.normal(size=SIZE).astype(np.float32), np.zeros(SIZE, np.float32), 0.1)
        sent, received = BYTES[choice.push.name], BYTES[choice.reply.name]
        choice.exchanged(sent, received, 0.001 + 8e-6 * (sent + received) / 100)
        choice.received(weights, weights + 1)
    assert bool(choice.decisions()) == changed


@pytest.mark.parametrize("seed", range(5))
def test_the_two_directions_are_chosen_apart(seed):
    assert Cluster(up=50, down=1e5, coding_s=0.02, seed=seed).run(150).last == ("int4", "identity")


@pytest.mark.parametrize(("up", "compute_s"), list(itertools.product([50, 100, 1000], [0.02, 0.1])))
def test_learning_a_link_and_watching_it_take_little_time(up, compute_s):
    cluster = Cluster(up=up, compute_s=compute_s, coding_s=0.002, noise=0.05).run(60)
    began, steps = cluster.spent_s, 200
    cluster.run(steps)
    best = min(cluster.seconds(name, name) for name in BYTES)
    assert cluster.spent_s - began <= 1.05 * steps * best


def test_latency_is_not_taken_for_bandwidth():
    assert Cluster(up=1e5, latency_s=0.5).run(150).decisions == []


def test_a_link_that_changes_is_followed_within_a_few_pushes():
    cluster = Cluster(up=1e5).run(80)
    assert cluster.decisions == []
    cluster.up = cluster.down = 20
    assert cluster.run(25).last == ("int4", "int4")
    cluster.up = cluster.down = 1e5
    assert cluster.run(25).last == ("identity", "identity")


def test_what_computation_hides_costs_nothing():
    assert Cluster(up=100, compute_s=2.0, pipelined=True).run(100).decisions == []
    assert Cluster(up=100, compute_s=0.1, pipelined=True).run(100).last == ("int4", "int4")


def test_computation_that_has_become_longer_hides_more():
    cluster = Cluster(up=100, compute_s=0.1, pipelined=True).run(100)
    cluster.compute_s = 2.0
    assert cluster.run(40).last == ("identity", "identity")


def test_probes_change_one_direction_the_other_and_both_by_turns():
    width = AdaptiveWidth(WIDTHS, SIZE, error_budget=0.05, pipelined=False)
    width.lost_in_pushes(losses(0.001))
    width.lost_in_replies(losses(0.001))
    seen = []
    for _ in range(36):
        width.choose()
        seen.append((width.push != "identity", width.reply != "identity"))
    assert seen[::2] == [(False, False)] * 18
    assert sorted(seen[1::2]) == [(False, True)] * 6 + [(True, False)] * 6 + [(True, True)] * 6


COARSE = {"noise": 0, "coding_s": 1e-4, "error_budget": 0.3}


def coarse(cluster, loss=0.2):
    """Run a cluster for which 4 bits save a seventh of the time and lose a sixth of the step."""
    cluster.width.lost_in_pushes({"int4": CodecLoss(loss, 1e-4, 1e-4)})
    cluster.width.lost_in_replies({"int4": CodecLoss(loss, 1e-4, 1e-4)})
    return cluster.run(100)


def test_a_step_on_a_coarser_gradient_or_weights_is_worth_less():
    assert coarse(Cluster(up=200, down=1e6, **COARSE)).last[0] == "int8"
    assert coarse(Cluster(up=1e6, down=200, **COARSE)).last[1] == "int8"


@pytest.mark.parametrize(
    ("options", "loss", "used"),
    [
        ({"up": 20}, 0.02, {"int4", "int8", "bf16"}),
        ({"up": 200, "down": 1e6}, 0.2, {"int8", "int4"}),
        ({"up": 20, "error_budget": 0.01}, 0.02, {"int8", "bf16"}),  # narrower ones lose too much
    ],
    ids=["the narrowest", "between", "the narrowest that may be used"],
)
def test_probes_are_narrower_where_there_is_one_that_may_be_used(options, loss, used):
    cluster = coarse(Cluster(**{**COARSE, **options}), loss)
    pushed = set()
    for _ in range(400):
        cluster.run(1)
        pushed.add(cluster.width.push)
    assert pushed == used


def test_no_codec_loses_more_than_the_budget():
    assert Cluster(up=20, error_budget=0.01).run(100).last == ("int8", "int8")
    assert Cluster(up=20, error_budget=ERRORS["int8"]).run(100).last == ("int8", "int8")
    assert Cluster(up=20, error_budget=1e-9).run(100).decisions == []


@pytest.mark.parametrize("seed", range(5))
def test_decisions_do_not_flap(seed):
    # Between two widths: either costs about the same.
    assert len(Cluster(up=700, noise=0.3, seed=seed).run(400).decisions) <= 3


def test_one_slow_exchange_changes_nothing():
    cluster = Cluster(up=1e5, noise=0).run(60)
    for _ in range(2):
        cluster.width.exchanged(BYTES["identity"], BYTES["identity"], 5.0)
    assert cluster.run(60).decisions == []


def test_what_an_answer_cannot_show_is_not_believed():
    cluster = Cluster(up=20).run(60)
    assert cluster.last == ("int4", "int4")
    much = CodecLoss(0.9, 0.0, 0.0)
    cluster.width.lost_in_replies(dict.fromkeys(("identity", "bf16", "int8", "int4"), much))  # the state after int4
    assert cluster.run(20).decisions == [("int4", "int4")]
    cluster.up = cluster.down = 1e5
    assert cluster.run(25).last == ("identity", "identity")


def test_what_an_answer_shows_of_narrower_codecs_is_believed():
    cluster = Cluster(up=20)
    cluster.width.lost_in_replies({"int4": CodecLoss(0.9, 0.0, 0.0)})
    assert cluster.run(60).last == ("int4", "int8")


def test_a_narrow_start_begins_with_the_narrowest_codec_that_the_budget_allows():
    assert Cluster(up=20, narrow=True).run(1).width._chosen == ("int4", "int4")
    strict = Cluster(up=20, narrow=True, error_budget=(ERRORS["int4"] + ERRORS["int8"]) / 2)
    assert strict.run(1).width._chosen == ("int8", "int8")


@pytest.mark.parametrize("up", [20, 200, 2000])
def test_a_narrow_start_ends_where_it_costs_little_more_than_the_best(up):
    cluster = Cluster(up=up, noise=0, narrow=True).run(100)
    best = min(cluster.cost(*pair) for pair in itertools.product(BYTES, BYTES))
    assert cluster.cost(*cluster.width._chosen) <= best / (1 - HYSTERESIS) * 1.03


def test_a_narrow_start_stays_narrow_on_links_of_any_speed():
    assert set(Cluster(up=1e6, narrow=True).run(100).width._chosen) <= {"int8", "int4"}


def test_until_replies_have_been_measured_they_lose_as_much_as_pushes():
    width = AdaptiveWidth(WIDTHS, SIZE, error_budget=0.05, pipelined=False, narrow=True)
    width.lost_in_pushes(losses(0.001))
    width.lost_in_replies({name: CodecLoss(0.0, 0.001, 0.001) for name in ERRORS})  # they were encoded before
    assert width._reply_losses["int4"].error == ERRORS["int4"]


def test_nothing_is_decided_before_anything_is_known():
    width = AdaptiveWidth(WIDTHS, SIZE, error_budget=0.05, pipelined=False)
    assert [width.choose() for _ in range(50)] == [None] * 50
    for _ in range(50):
        width.exchanged(BYTES["identity"], BYTES["identity"], 1.0)
    assert width.choose() is None


def test_an_empty_model_has_nothing_to_choose():
    width = AdaptiveWidth(WIDTHS, 0, error_budget=0.05, pipelined=False)
    for _ in range(50):
        width.computed(0.1)
        width.exchanged(0, 0, 0.01)
        assert width.choose() is None


def test_three_strange_exchanges_in_a_row_are_another_link():
    estimate = LinkEstimate(4 * SIZE)
    for seconds in [0.02] * 40 + [0.5, 0.5, 0.02] * 5:
        estimate.exchanged(SIZE, SIZE, seconds)
    assert estimate.known
    for seconds in [5.0] * 3:
        estimate.exchanged(SIZE, SIZE, seconds)
    assert not estimate.known  # it is measured again


def test_latency_and_both_bandwidths_are_found():
    estimate, random = LinkEstimate(4 * SIZE), np.random.default_rng(0)
    for _ in range(60):
        sent, received = random.integers(0, 4 * SIZE, 2)
        estimate.exchanged(sent, received, 0.02 + sent * 4e-8 + received * 1e-8)
    link = estimate.link()
    assert (link.latency_s, link.send_s_per_byte, link.receive_s_per_byte) == pytest.approx(
        (0.02, 4e-8, 1e-8), rel=0.05
    )


def test_exchanges_of_one_size_promise_no_gain():
    estimate, random = LinkEstimate(4 * SIZE), np.random.default_rng(0)
    for _ in range(60):
        estimate.exchanged(4 * SIZE, 4 * SIZE, 0.02 * (1 + 0.2 * random.random()))
    link = estimate.link()
    assert (link.send_s_per_byte, link.receive_s_per_byte) == (0.0, 0.0)

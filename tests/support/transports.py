"""Transports between a worker and its shards, with one interface for the contract suites."""

from __future__ import annotations

from nfdt.consistency import make_policy
from nfdt.core.wire.job_token import worker_token
from nfdt.model.program.state import State
from nfdt.shard.building import mode_for
from nfdt.shard.in_process import InProcessClient
from nfdt.shard.servicer import start_shard
from nfdt.transport.stream import StreamClient
from tests.support.shard_cluster import LAYOUT, Cluster, rule_spec

TOKEN = "token"


class InProcessShards:
    def __init__(self, reference, shards, rule, overlap, codec="identity", **row):
        self.overlap = overlap
        mode = mode_for(make_policy(rule_spec(rule, **row)), 3)
        self.stores = Cluster(reference, shards=shards, rule=rule, mode=mode, overlap=overlap).stores

    def client(self, worker, **options):
        return InProcessClient(self.stores, LAYOUT, worker, overlap=self.overlap, **options)

    def stop(self):
        pass


class StreamedShards:
    share_memory = False

    def __init__(self, reference, shards, rule, overlap, codec="identity", **row):
        self.overlap = overlap
        state = State(reference.weights, reference.state)
        arguments = (reference.manifest(), state, rule_spec(rule, overlap=overlap, codec=codec, **row))
        self.running = [start_shard(*arguments, i, shards, workers=3, token=TOKEN, leased=False) for i in range(shards)]
        self.stores = [running.store for running in self.running]

    def client(self, worker, **options):
        addresses = [r.address for r in self.running]
        options |= {"timeout_s": 20, "overlap": self.overlap, "share_memory": self.share_memory}
        return StreamClient(addresses, LAYOUT, worker, worker_token(TOKEN, worker), **options)

    def stop(self):
        [running.stop(0) for running in self.running]


class SharedMemoryShards(StreamedShards):
    share_memory = True

"""Shards that serve streams, and a relay between them and a client that loses, shifts and refuses frames."""

from __future__ import annotations

import contextlib
import threading
from concurrent import futures
from dataclasses import replace

import grpc
import keras

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.wire.frame_stream import payload_bytes
from nfdt.core.wire.job_token import worker_token
from nfdt.core.wire.shards_pb2 import OpenReply
from nfdt.model.program.state import State
from nfdt.shard.listener import ShardListener
from nfdt.shard.servicer import start_shard
from nfdt.transport.link import ShardConnector
from tests.support import raw_stream
from tests.support.shard_cluster import LAYOUT, Reference, rule_spec, start_weights

TOKEN = "job-token"
WORKER_TOKEN = worker_token(TOKEN, "w")
RATE = 0.1
LARGE = replace(ParameterLayout.of([("a", (700, 1000)), ("b", (500_000,)), ("c", (7,))]), divisible=True)


def serve(layout=LAYOUT, shards=1, optimizer=None, rule="plain", weights=None, overlap=0, codec="identity"):
    weights = start_weights(layout) if weights is None else weights
    reference = Reference(optimizer or keras.optimizers.SGD(RATE), layout=layout, weights=weights)
    state = State(weights, reference.state)
    algorithm = rule_spec(rule, overlap=overlap, codec=codec)
    return [
        start_shard(reference.manifest(), state, algorithm, i, shards, workers=2, token=TOKEN, leased=False)
        for i in range(shards)
    ]


def exchange(address, frames):
    return raw_stream.exchange(address, WORKER_TOKEN, frames)


class FrameRelay:
    """Relay between a client and a shard, which forwards frames and breaks streams at chosen ones."""

    def __init__(self, address, worker="w"):
        self.shard = ShardConnector(address, worker_token(TOKEN, worker), 20)
        self.lose_answers_to = set()
        self.streams = 0
        self.silent = False
        self.refusals = 0
        self.shift = 0  # added to the sequence numbers of answers
        self.on_request = lambda: None
        self.listener = ShardListener(self.serve, "127.0.0.1", 8)
        self.server = grpc.server(futures.ThreadPoolExecutor(8))
        handler = grpc.unary_unary_rpc_method_handler(self.open, None, OpenReply.SerializeToString)
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("nfdt.v1.Shard", {"Open": handler}),)
        )
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def open(self, request, context):
        if self.refusals:
            self.refusals -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "cut off")
        return OpenReply(port=self.listener.port, ticket=self.listener.ticket("w"))

    def serve(self, worker, name):
        self.streams += 1
        if self.silent:
            while worker.receive_header(patiently=True):  # until the client gives up
                self.on_request()
            return
        shard = self.shard.open()
        back = threading.Thread(target=self.answer, args=(shard, worker))
        back.start()
        self.copy(worker, shard, lambda header: True)
        shard.close()
        back.join()

    def answer(self, shard, worker):
        with contextlib.suppress(OSError, EOFError):
            self.copy(shard, worker, self.passes)
        worker.close()

    def passes(self, header):
        lost = header.sequence in self.lose_answers_to
        header.sequence += self.shift
        self.lose_answers_to.discard(header.sequence)
        return not lost

    @staticmethod
    def copy(source, target, passes):
        while (header := source.receive_header(patiently=True)) and passes(header):
            target.send(header, source.receive_bytes(payload_bytes(header)))

    def stop(self):
        self.listener.stop(0)
        self.server.stop(0).wait()
        self.shard.close()

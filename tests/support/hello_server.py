"""Job server that accepts the hellos of slots and gives them no work."""

import queue

from nfdt.core.wire import workers_pb2_grpc
from nfdt.core.wire.channel import make_server, same_token

TOKEN = "secret-token"
DEADLINE_S = 60


class HelloServer(workers_pb2_grpc.WorkersServicer):
    """Service of slots at ``address``, until it is stopped."""

    def __init__(self):
        self._hellos = queue.SimpleQueue()
        self._server, self.address = make_server(
            "127.0.0.1:0", authenticate=lambda method, token: same_token(TOKEN, token)
        )
        workers_pb2_grpc.add_WorkersServicer_to_server(self, self._server)
        self._server.start()

    def Attend(self, messages, context):
        self._hellos.put(next(messages).hello)
        for _ in messages:
            pass
        return iter(())

    def next(self):
        """Wait for the next slot and return its hello."""
        return self._hellos.get(timeout=DEADLINE_S)

    def stop(self):
        self._server.stop(None).wait()

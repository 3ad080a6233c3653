"""A gRPC server on an event loop: a call that waits there is a coroutine and no thread.

Methods that are coroutine functions run on the loop, all others on threads, as those of a ``grpc.Server`` do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, NoReturn

import grpc

from nfdt.core.errors import NfdtError, UsageError
from nfdt.core.wire.parsing import Admit, RequestParser
from nfdt.core.wire.status import abort

Refusal = Callable[[str, Any], NfdtError | None]
"""Takes the name of a method and the metadata of a call; returns why the call is refused, or None."""
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
GRPCIO_LOG = "grpc._cython.cygrpc"  # name of its logger


@functools.cache
def rpc_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all servers of this process, on a thread of its own; grpcio supports no second one."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)  # the caller's thread may have none
        # Else the end of the last server closes what the loop still reads.
        grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]
        loop.run_forever()

    logging.getLogger(GRPCIO_LOG).addFilter(_is_no_lost_client)
    threading.Thread(target=run, name="rpc loop", daemon=True).start()
    return loop


def _is_no_lost_client(record: logging.LogRecord) -> bool:
    """Return whether a record is another one than grpcio's traceback for a reply whose client is gone."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, grpc.aio.InternalError)


class _Aborted(Exception):
    """End of a call with an error status, on its way to the loop."""


class LoopContext:
    """Context of one call, with those methods of ``grpc.ServicerContext`` that servicers use; any thread may call.

    Coroutines also read requests (:meth:`requests`) and write replies (:meth:`write`) with it.

    Args:
        context: Context of grpcio, of which only the loop may use more than the writing of replies.
    """

    def __init__(self, context: Any) -> None:
        self._context, self._peer = context, context.peer()
        self._metadata = context.invocation_metadata()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._active = True
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._trailing: Any = ()

    def peer(self) -> str:
        """Return grpcio's name of the peer."""
        return str(self._peer)

    def invocation_metadata(self) -> Any:
        """Return the metadata of the call."""
        return self._metadata

    def is_active(self) -> bool:
        """Whether the call has not ended."""
        return self._active

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call a function at the end of the call; return False if it has ended."""
        with self._lock:
            if self._active:
                self._callbacks.append(callback)
            return self._active

    def code(self) -> grpc.StatusCode | None:
        """Return the status with which the call was aborted; None: it was not."""
        return self._status[0] if self._status else None

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Set the metadata of the status."""
        self._trailing = metadata

    def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the call with an error status, by an exception."""
        self._status = code, details
        raise _Aborted

    async def write(self, reply: Any) -> None:
        """Send a reply."""
        await self._context.write(reply)

    def send(self, reply: Any) -> None:
        """Send a reply from a thread."""
        asyncio.run_coroutine_threadsafe(self._context.write(reply), rpc_loop()).result()

    async def requests(self, parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        """Yield the requests of a stream."""
        while (data := await self._context.read()) is not _EOF:
            yield parse(data)

    def receive(self, parse: Callable[[bytes], Any]) -> Iterator[Any]:
        """Yield the requests of a stream on a thread."""
        loop = rpc_loop()
        while (data := asyncio.run_coroutine_threadsafe(self._context.read(), loop).result()) is not _EOF:
            yield parse(data)

    async def end(self) -> None:
        """Send the status of a call that was aborted, unless the client is gone."""
        code, details = self._status or (grpc.StatusCode.UNKNOWN, "")
        with contextlib.suppress(grpc.aio.InternalError):  # grpcio then ends the call when its handler returns
            await self._context.abort(code, details, tuple(self._trailing))

    def close(self) -> None:
        """Record the end of the call, and call what waits for it."""
        with self._lock:
            self._active = False
        for callback in self._callbacks:
            callback()


class LoopGate(grpc.aio.ServerInterceptor):
    """Refuses calls, parses the requests of all others, and runs handlers that are no coroutines on threads.

    Args:
        refusal: Decides which calls are refused.
        admit: Called with the context of each call that needs a token; returns nothing.
        is_open: Returns whether a method needs no token.
        threads: Number of threads.
    """

    def __init__(self, refusal: Refusal, admit: Admit, is_open: Callable[[str], bool], threads: int) -> None:
        self._refusal, self._admit, self._is_open = refusal, admit, is_open
        self._parser, self._handlers = RequestParser(), dict[str, Any]()
        self._threads = futures.ThreadPoolExecutor(threads, thread_name_prefix="rpc")

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the handler of a call."""
        method = handler_call_details.method
        if (refused := self._refusal(method, handler_call_details.invocation_metadata)) is not None:
            return grpc.stream_stream_rpc_method_handler(_refusing(refused))
        if (known := self._handlers.get(method)) is None and (found := await continuation(handler_call_details)):
            known = self._handlers[method] = self._adapted(found, method)
        return known

    def _adapted(self, handler: Any, method: str) -> Any:
        """Return the handler with a coroutine function that takes bytes, or grpcio's iterator of them."""
        parse = functools.partial(self._parser.parse, handler.request_deserializer or bytes, method)
        admit = (lambda call: None) if self._is_open(method) else self._admit
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        kind = next(kind for kind in kinds if getattr(handler, kind))
        behavior, streams = getattr(handler, kind), handler.request_streaming
        run = self._run_here if inspect.iscoroutinefunction(behavior) else self._run_on_thread
        on_thread = run == self._run_on_thread

        async def answer(data: Any, context: Any) -> Any:
            call = LoopContext(context)
            try:
                admit(call)
                try:
                    request = (call.receive if on_thread else call.requests)(parse) if streams else parse(data)
                except UsageError as error:
                    abort(call, error)  # type: ignore[arg-type]
                return await run(behavior, request, call, replies=handler.response_streaming)
            except _Aborted:
                await call.end()
            finally:
                call.close()

        return handler._replace(
            request_deserializer=None,
            response_serializer=functools.partial(_serialized, handler.response_serializer or bytes),
            **{kind: answer},
        )

    async def _run_here(self, behavior: Any, request: Any, call: LoopContext, *, replies: bool) -> Any:
        return await behavior(request, call)

    async def _run_on_thread(self, behavior: Any, request: Any, call: LoopContext, *, replies: bool) -> Any:
        run = _send_all if replies else _called
        return await asyncio.get_running_loop().run_in_executor(self._threads, run, behavior, request, call)


def _called(behavior: Any, request: Any, call: LoopContext) -> Any:
    return behavior(request, call)


def _send_all(behavior: Any, request: Any, call: LoopContext) -> None:
    """Send what a generator yields, until the call ends."""
    with contextlib.closing(behavior(request, call)) as replies:
        for reply in replies:
            if not call.is_active():
                return
            call.send(reply)


def _serialized(serialize: Callable[[Any], bytes], reply: Any) -> bytes:
    return reply if isinstance(reply, bytes) else serialize(reply)


def _refusing(refusal: NfdtError) -> Any:
    async def refuse(_requests: Any, context: Any) -> None:
        call = LoopContext(context)
        with contextlib.suppress(_Aborted):
            abort(call, refusal)  # type: ignore[arg-type]
        await call.end()

    return refuse


class LoopServer:
    """A ``grpc.aio.Server`` on :func:`rpc_loop`, with the methods of a ``grpc.Server``; any thread may call them.

    Args:
        gate: Interceptor of all calls.
        options: Options of grpcio.
        most_calls: Calls that can be open at once; further ones are refused as RESOURCE_EXHAUSTED.
    """

    def __init__(self, gate: LoopGate, options: Sequence[tuple[str, Any]], most_calls: int) -> None:
        async def make() -> Any:
            return grpc.aio.server(interceptors=[gate], options=options, maximum_concurrent_rpcs=most_calls)

        self._server = asyncio.run_coroutine_threadsafe(make(), rpc_loop()).result()

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Add the methods of a servicer."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Do nothing: the methods are found without, and each that is registered costs every call some time."""

    def add_insecure_port(self, address: str) -> int:
        """Listen in plain text; return the port."""
        return int(self._server.add_insecure_port(address))

    def add_secure_port(self, address: str, credentials: grpc.ServerCredentials) -> int:
        """Listen with TLS; return the port."""
        return int(self._server.add_secure_port(address, credentials))

    def start(self) -> None:
        """Accept calls."""
        asyncio.run_coroutine_threadsafe(self._server.start(), rpc_loop()).result()

    def stop(self, grace: float | None = None) -> threading.Event:
        """Refuse new calls, and end the others after ``grace`` seconds; return an event that is set after the last."""
        stopped = threading.Event()
        ended = asyncio.run_coroutine_threadsafe(self._server.stop(grace), rpc_loop())
        ended.add_done_callback(lambda _: stopped.set())
        return stopped

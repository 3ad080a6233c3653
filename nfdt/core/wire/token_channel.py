"""A channel that sends a token with every call, and whose calls after its close raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc


def _prepared(kind: str) -> Any:
    """Return the method of a channel that prepares a gRPC method of this kind."""

    def prepare(
        self: TokenChannel,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> _Calls:
        calls = getattr(self.channel, kind)(method, request_serializer, response_deserializer)
        return _Calls(calls, self)

    return prepare


class TokenChannel(grpc.Channel):
    """Add one entry to the metadata of every call of another channel.

    ``grpc.intercept_channel`` looks up a method's registered handle at every call. That is not thread-safe, and it
    reads freed memory once the channel is closed (seen with grpcio 1.85). Here each method is prepared once, without a
    registered handle. A call after ``close`` fails as CANCELLED, like one that was open when the channel closed.

    Args:
        channel: The wrapped channel; closed with this one.
        entry: (key, value) of the metadata.

    Attributes:
        closed: Whether :meth:`close` has been called.
    """

    def __init__(self, channel: grpc.Channel, entry: tuple[str, str]) -> None:
        self.channel, self.entry = channel, entry
        self.closed = False

    unary_unary = _prepared("unary_unary")
    unary_stream = _prepared("unary_stream")
    stream_unary = _prepared("stream_unary")
    stream_stream = _prepared("stream_stream")

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        """Call ``callback`` at each change of the connection's state."""
        self.channel.subscribe(callback, try_to_connect=bool(try_to_connect))

    def unsubscribe(self, callback: Any) -> None:
        """End the subscription of a callback."""
        self.channel.unsubscribe(callback)

    def close(self) -> None:
        """Close the channel; its open calls end as CANCELLED."""
        self.closed = True
        self.channel.close()

    def __enter__(self) -> TokenChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ChannelClosed(grpc.RpcError):
    """Error of calls on a closed channel; calls that were open when it closed raise the same."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        return "The channel is closed."


class _Calls:
    """The calls of one method, each with the entry in its metadata."""

    def __init__(self, calls: Any, channel: TokenChannel) -> None:
        self._calls, self._channel = calls, channel

    def __call__(self, *request: Any, **more: Any) -> Any:
        return self._call(self._calls, *request, **more)

    def with_call(self, *request: Any, **more: Any) -> Any:
        return self._call(self._calls.with_call, *request, **more)

    def future(self, *request: Any, **more: Any) -> Any:
        return self._call(self._calls.future, *request, **more)

    def _call(
        self, call: Callable[..., Any], request: Any, timeout: float | None = None, metadata: Any = None, **more: Any
    ) -> Any:
        try:
            return call(request, timeout, (*(metadata or ()), self._channel.entry), **more)
        except ValueError as error:  # grpc raises nothing more specific for a closed channel
            if self._channel.closed:
                raise _ChannelClosed from error
            raise

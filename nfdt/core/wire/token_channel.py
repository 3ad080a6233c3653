"""A channel that sends a token with every call; calls after its close raise instead of crashing the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc


class TokenChannel(grpc.Channel):
    """Add one entry to the metadata of every call of another channel.

    ``grpc.intercept_channel`` looks a method's registered handle up at every call. This is not thread-safe and reads
    freed memory once the channel is closed (seen with grpcio 1.85). Here each method is prepared once, unregistered: a
    call after ``close`` fails as CANCELLED, as an open one does.

    Args:
        channel: The wrapped channel; closed with this one.
        entry: (key, value) of the metadata.
    """

    def __init__(self, channel: grpc.Channel, entry: tuple[str, str]) -> None:
        self._channel, self._entry = channel, entry

    def _prepared(self, kind: Callable[..., Any], method: str, serializer: Any, deserializer: Any) -> _Calls:
        return _Calls(kind(method, serializer, deserializer), self._entry)

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """Return a callable for a method with one request and one response."""
        return self._prepared(self._channel.unary_unary, method, request_serializer, response_deserializer)

    def unary_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """Return a callable for a method with one request and a stream of responses."""
        return self._prepared(self._channel.unary_stream, method, request_serializer, response_deserializer)

    def stream_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """Return a callable for a method with a stream of requests and one response."""
        return self._prepared(self._channel.stream_unary, method, request_serializer, response_deserializer)

    def stream_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """Return a callable for a method with streams in both directions."""
        return self._prepared(self._channel.stream_stream, method, request_serializer, response_deserializer)

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        """Call ``callback`` at each change of the connection's state."""
        self._channel.subscribe(callback, try_to_connect=bool(try_to_connect))

    def unsubscribe(self, callback: Any) -> None:
        """End the subscription of a callback."""
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        """Close the channel; its open calls end as CANCELLED."""
        self._channel.close()

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

    def __init__(self, calls: Any, entry: tuple[str, str]) -> None:
        self._calls, self._entry = calls, (entry,)

    def __call__(self, *request: Any, **more: Any) -> Any:
        return self._begun(self._calls, *request, **more)

    def with_call(self, *request: Any, **more: Any) -> Any:
        return self._begun(self._calls.with_call, *request, **more)

    def future(self, *request: Any, **more: Any) -> Any:
        return self._begun(self._calls.future, *request, **more)

    def _begun(
        self, call: Callable[..., Any], request: Any, timeout: float | None = None, metadata: Any = None, **more: Any
    ) -> Any:
        try:
            return call(request, timeout, (*(metadata or ()), *self._entry), **more)
        except ValueError as error:  # grpc raises only this for a closed channel
            raise _ChannelClosed from error

"""Relay: a process that passes bytes between a role's processes and the server, and damages them on request.

``python -m nfdt.chaos.relay HOST:PORT`` prints the port at which it listens.
Each line of its standard input is a :class:`Rule` as JSON with a number, which replaces the rule of that number.
It ends when its standard input closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import psutil

from nfdt.core.errors import NfdtError

CHUNK = 65536
QUEUED = 64  # chunks that wait in one direction
_Due = tuple[float, bytes]
ANSWER_S = 60.0
COMMAND = (sys.executable, "-P", "-m", "nfdt.chaos.relay")


class Relay:
    """Relay process between the processes of one role and the server.

    Args:
        target: ``HOST:PORT`` of the server.
        environment: Environment of the process.

    Attributes:
        address: ``HOST:PORT`` at which it listens.
    """

    def __init__(self, target: str, environment: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([*COMMAND, target], env=dict(environment), stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.address = f"127.0.0.1:{self._read_answer()}"

    def set_rule(self, number: int, rule: Rule | None) -> None:
        """Replace the rule of this number, or remove it; return when it holds.

        Raises:
            NfdtError: The process has ended, or does not answer.
        """
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the answer shows
            self._input.write(json.dumps({"number": number, "rule": rule and asdict(rule)}) + "\n")
            self._input.flush()
        self._read_answer()

    def stop(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._process.kill()
        self._process.wait()
        self._output.close()

    def _read_answer(self) -> str:
        """Return the process's next line."""
        readable, _, _ = select.select([self._output], [], [], ANSWER_S)
        line = self._output.readline() if readable else ""
        if not line:
            raise NfdtError(f"The relay of process {self._process.pid} gave no answer within {ANSWER_S:.0f} s.")
        return line.strip()


@dataclass(frozen=True)
class Rule:
    """Damage to the connections of some processes.

    Attributes:
        pids: The processes.
        cut: Whether their connections end, and new ones are refused.
        mbit: Bandwidth in each direction, in Mbit/s; None: unlimited.
        delay_ms: Delay in each direction.
        flip: Position of the bit to flip in the next bytes for the server, as a fraction; None: no bit.
    """

    pids: Sequence[int]
    cut: bool = False
    mbit: float | None = None
    delay_ms: float = 0.0
    flip: float | None = None

    def ports(self) -> set[int]:
        """Return the local ports of the processes: by these the relay tells the connections of processes apart."""
        found: set[int] = set()
        for pid in self.pids:
            with contextlib.suppress(psutil.Error):
                found |= {one.laddr.port for one in psutil.Process(pid).net_connections("tcp") if one.laddr}
        return found


@dataclass(eq=False)
class Passage:
    """One connection through the relay.

    Attributes:
        port: Port of the process at its end.
        near: Stream to the process.
        far: Stream to the server.
        rules: Rules that apply, by their numbers.
    """

    port: int
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    rules: dict[int, Rule] = field(default_factory=dict)

    def cut(self) -> None:
        """End the connection on both sides at once."""
        for side in (self.near, self.far):
            side.transport.abort()

    def pop_flip(self) -> float | None:
        """Return the position of the bit to flip now, once; None: no bit."""
        for number, rule in list(self.rules.items()):
            if rule.flip is not None:
                del self.rules[number]
                return rule.flip
        return None


class Passages:
    """All connections of one relay.

    Args:
        host: Host of the server.
        port: Its port.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._passages: set[Passage] = set()
        self._rules: dict[int, Rule] = {}

    async def accept(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        """Pass on what arrives on one connection until either side ends."""
        try:
            answers, far = await asyncio.open_connection(self._host, self._port)
        except OSError:
            near.transport.abort()
            return
        port = near.get_extra_info("peername")[1]
        rules = {n: r for n, r in self._rules.items() if port in r.ports()}
        passage = Passage(port, near, far, rules)
        if any(rule.cut for rule in rules.values()):
            passage.cut()
            return
        self._passages.add(passage)
        up, down = asyncio.Queue[_Due](QUEUED), asyncio.Queue[_Due](QUEUED)
        with contextlib.suppress(ExceptionGroup):  # either side has ended the connection
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_receive(passage, reader, up, to_server=True))
                tasks.create_task(_receive(passage, answers, down, to_server=False))
                tasks.create_task(_send(up, far))
                tasks.create_task(_send(down, near))
        self._passages.discard(passage)
        near.close()
        far.close()

    def set_rule(self, number: int, rule: Rule | None) -> None:
        """Replace the rule of this number, or remove it."""
        self._rules.pop(number, None)
        if rule is not None and rule.flip is None:  # a flip is for the connections that exist
            self._rules[number] = rule
        ports = rule.ports() if rule is not None else set[int]()
        for passage in list(self._passages):
            passage.rules.pop(number, None)
            if rule is not None and passage.port in ports:
                passage.rules[number] = rule
                if rule.cut:
                    passage.cut()


async def _receive(
    passage: Passage, source: asyncio.StreamReader, queue: asyncio.Queue[_Due], *, to_server: bool
) -> None:
    """Queue each chunk with the time at which it is due; an empty one is the last."""
    now, free_at = asyncio.get_running_loop().time, 0.0
    data = b"-"
    while data:
        data = await source.read(CHUNK)
        if data and to_server and (flip := passage.pop_flip()) is not None:
            data = flipped(data, flip)
        mbit = min((rule.mbit for rule in passage.rules.values() if rule.mbit is not None), default=None)
        free_at = max(now(), free_at) + (8e-6 * len(data) / mbit if mbit else 0.0)
        delay_s = 1e-3 * max((rule.delay_ms for rule in passage.rules.values()), default=0.0)
        await queue.put((free_at + delay_s, data))


async def _send(queue: asyncio.Queue[_Due], sink: asyncio.StreamWriter) -> None:
    """Write each chunk when it is due; raise ConnectionResetError after the last one."""
    now = asyncio.get_running_loop().time
    while True:
        due, data = await queue.get()
        if (wait_s := due - now()) > 0:
            await asyncio.sleep(wait_s)
        if not data:
            raise ConnectionResetError
        sink.write(data)
        await sink.drain()


def flipped(data: bytes, position: float) -> bytes:
    """Return a copy with one bit flipped, at this position as a fraction in [0, 1)."""
    bit = int(position * 8 * len(data))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


async def _relay(target: str) -> None:
    host, _, port = target.rpartition(":")
    relay = Passages(host, int(port))
    server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        message = json.loads(line)
        relay.set_rule(message["number"], message["rule"] and Rule(**message["rule"]))
        print(message["number"], flush=True)


if __name__ == "__main__":
    asyncio.run(_relay(sys.argv[1]))

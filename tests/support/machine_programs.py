"""Small programs that tests run in the machines of a rig, with the calls that use them."""

from __future__ import annotations

import select
import subprocess
import sys

from tests.support.machines import Machine, MachineProcess

DEADLINE_S = 30
ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
while data := connection.recv(65536):
    connection.sendall(data)
"""
SPEAK = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30)
for line in sys.stdin:
    connection.sendall(line.encode())
    print(connection.recv(100).decode(), end="", flush=True)
"""
RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
connection.recv(65536)
start, count = time.monotonic(), 0
while data := connection.recv(65536):
    count += len(data)
print(count / (time.monotonic() - start), flush=True)
"""
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30)
connection.sendall(bytes(int(sys.argv[3])))
"""


def python(program: str, *arguments: object) -> list[str]:
    """Return the command that runs a program."""
    return [sys.executable, "-c", program, *map(str, arguments)]


def listening(machine: Machine, program: str) -> tuple[MachineProcess, int]:
    """Start a program that listens on its machine's address; return it and its port."""
    server = machine.popen(python(program, machine.address), stdout=subprocess.PIPE)
    return server, int(line(server))


def line(process: MachineProcess, deadline_s: float = DEADLINE_S) -> str:
    """Return the next line that a process prints; it is empty if none comes in time."""
    ready, _, _ = select.select([process.stdout], [], [], deadline_s)
    return process.stdout.readline().decode() if ready else ""


class Conversation:
    """Connection from one machine to another that sends back each line."""

    def __init__(self, near: Machine, far: Machine) -> None:
        self.server, port = listening(far, ECHO)
        self.client = near.popen(python(SPEAK, far.address, port), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def say(self, text: str) -> None:
        self.client.stdin.write(f"{text}\n".encode())
        self.client.stdin.flush()

    def answer(self, deadline_s: float = DEADLINE_S) -> str:
        return line(self.client, deadline_s).strip()


def transfer_mbit(source: Machine, target: Machine, size: int) -> float:
    """Send bytes over one connection and return the rate at which they arrive, in Mbit/s."""
    receiver, port = listening(target, RECEIVE)
    source.run(python(SEND, target.address, port, size))
    return float(line(receiver)) * 8 / 1e6

"""The TCP connections of mlx's ring to this rank's neighbours: how long they may be silent, and which one is gone.

mlx notices a process that ends, since the kernel closes its connections. A machine that has lost its network or its
power closes nothing, and mlx would wait for it for ever.
"""

import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROBE_AFTER, PROBE_EVERY, PROBES = 4, 2, 3  # seconds, seconds, count
SILENT_SECONDS = PROBE_AFTER + PROBE_EVERY * PROBES
# Of a connection that waits for nothing, and of one whose data is not acknowledged; Linux, then macOS.
OPTIONS = {
    "TCP_KEEPIDLE": PROBE_AFTER,
    "TCP_KEEPALIVE": PROBE_AFTER,
    "TCP_KEEPINTVL": PROBE_EVERY,
    "TCP_KEEPCNT": PROBES,
    "TCP_USER_TIMEOUT": SILENT_SECONDS * 1000,
}
TCP_RXT_CONNDROPTIME = 0x80  # macOS, seconds; not in Python's socket


@dataclass(frozen=True)
class Peer:
    """A neighbour in the ring, and one connection to it."""

    rank: int
    address: str
    connection: socket.socket

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.address})"

    @property
    def gone(self) -> bool:
        """Whether the connection is over; data that waits to be read stays where it is."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def neighbours(rank: int, size: int) -> tuple[Peer, ...]:
    """Whom mlx has connected this process to. The kernel now gives up those that are silent for SILENT_SECONDS.

    Each rank calls its right neighbour at an address of the hostfile, and is called by its left one. Nobody is found
    where mlx uses something else than its ring, such as MPI.
    """
    hosts = os.environ.get("MLX_HOSTFILE")
    if not hosts:
        return ()
    right = (rank + 1) % size
    ports = {int(address.rpartition(":")[2]) for address in json.loads(Path(hosts).read_text())[right]}
    found = []
    for fd in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # the folder's own fd, which is closed; what is no socket
            connection = socket.socket(fileno=os.dup(fd))
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                connection.close()
                continue
            address, port, *_ = connection.getpeername()
            _limit(connection)
            found.append(Peer(right if port in ports else (rank - 1) % size, address, connection))
    return tuple(found)


def _limit(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in OPTIONS.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, TCP_RXT_CONNDROPTIME, SILENT_SECONDS)

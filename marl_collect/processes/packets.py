"""The packets between the fork server and the processes that request workers.

A request is one packet with file descriptors, sent to the server's control socket: the
worker's ends of its command and status sockets, then its stdout and stderr. Every other
packet is one byte for the kind and a payload.
"""

import array
from typing import Final

FORK: Final = b"F"  # requester to server: fork a worker
IMPORT: Final = b"I"  # worker to server: import before the next fork; names
READY: Final = b"R"  # control socket, to the trainer: everything is imported
BROKEN: Final = b"B"  # control socket, to the trainer: a preload failed; text
STARTED: Final = b"S"  # status socket: process id, with a process descriptor
REFUSED: Final = b"N"  # status socket: no worker was started; number of the error
ENDED: Final = b"E"  # status socket: exit code
PACKET_BYTES: Final = 65536


def encode(kind: bytes, number: int) -> bytes:
    """Return a packet with a number."""
    return kind + array.array("q", [number]).tobytes()


def decode(packet: bytes) -> int:
    """Return the number in a packet."""
    return array.array("q", packet[1:])[0]

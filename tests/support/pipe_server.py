"""A federation's server in a process of its own, whose sites are behind its standard input and output.

`python tests/support/pipe_server.py FEDERATION.toml RUN-DIR SITES`. What a parcel is: a site's number, a ticket's, and a
length, four bytes each, and the bytes of a message.
"""

import os
import queue
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

HEAD = struct.Struct(">III")


def write_parcel(pipe: BinaryIO, node: int, message_id: int, data: bytes) -> None:
    pipe.write(HEAD.pack(node, message_id, len(data)) + data)
    pipe.flush()


def read_parcel(pipe: BinaryIO) -> tuple[int, int, bytes] | None:
    """Return the next parcel, None where there will be none."""
    head = pipe.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    node, message_id, length = HEAD.unpack(head)
    return node, message_id, pipe.read(length)


class PipeTransport:
    """A `halfmoon.federation.server.connection.Transport` over two pipes."""

    def __init__(self, sites: int, into: BinaryIO, out: BinaryIO) -> None:
        self.sites = sites
        self.into = into
        self.out = out
        self.count = 0
        self.come: queue.SimpleQueue[tuple[int, int, bytes]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while (reply := read_parcel(self.into)) is not None:
            self.come.put(reply)

    def nodes(self) -> Sequence[int]:
        return range(self.sites)

    def key_owners(self) -> None:
        return None

    def send(self, mail: Mapping[int, bytes], seconds: float, asks: bool) -> Mapping[int, str]:
        message_ids = {}
        for node, data in mail.items():
            self.count += 1
            message_ids[node] = str(self.count)
            write_parcel(self.out, node, self.count, data)
        return message_ids

    def collect(self, message_ids: Sequence[str]) -> Sequence[tuple[str, bytes, str]]:
        found = []
        while not self.come.empty():
            _, message_id, data = self.come.get()
            found.append((str(message_id), data, ""))
        return found


def main() -> None:
    """Serve a federation."""
    from halfmoon.federation.server.plan import load_plan
    from halfmoon.federation.server.server import FederationServer

    host = FederationServer(load_plan(Path(sys.argv[1])), Path(sys.argv[2]))
    host.prepare()
    host.serve(PipeTransport(int(sys.argv[3]), sys.stdin.buffer, sys.stdout.buffer))
    os._exit(0)  # a thread waits for standard input, and Python would wait for the thread


if __name__ == "__main__":
    main()

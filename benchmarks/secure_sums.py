"""Measure the cost of a masked sum against plain uploads: processor seconds and bytes, by sites and by parameters.

    OMP_NUM_THREADS=1 python benchmarks/secure_sums.py [--sites 3 10 30] [--out results/secure_sums]

Sites and server are those of the library (`halfmoon.federation.site.secure_sum.SumParticipant`,
`halfmoon.federation.server.secure_sum.MaskedSum`), in one process and without a network; their messages are the bytes that
a federation sends. No model is trained: the updates are random numbers. Seconds are those of the processor, which other
work on the machine affects less than the clock; they do not include the time of a disk to flush a site's notes. "Plain" is a
request and a reply with the same update, read and averaged. Bytes are those of one site in one round.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "results"))

import records
import torch

from halfmoon.api.uploads import Upload, stack
from halfmoon.core.tree import Tree
from halfmoon.federation.protocol.messages import Reply, Request, read_message, write_message
from halfmoon.federation.protocol.tree_spec import make_tree_spec
from halfmoon.federation.server.secure_sum import MaskedSum, sum_layout, sum_spec
from halfmoon.federation.site.runtime import EMPTY_RESULT
from halfmoon.federation.site.secure_sum import SUMS_FOLDER, SumParticipant
from halfmoon.federation.site.site_keys import KeyFiles, KnownKeys
from halfmoon.methods.averaging import average_uploads
from halfmoon.storage import atomic_io

FEDERATION = "f" * 64
RUN = "0" * 32
VERSION = "0.1.0"


@dataclass
class Row:
    """One measurement; seconds of the processor and bytes are those of one site, and of the server, in one round."""

    sites: int
    parameters: int
    dropped: int
    site_seconds: float = 0.0
    server_seconds: float = 0.0
    plain_site_seconds: float = 0.0
    plain_server_seconds: float = 0.0
    up: float = 0.0
    down: float = 0.0
    plain_up: float = 0.0
    plain_down: float = 0.0
    notes: float = 0.0  # bytes that a site stores of the round


@dataclass
class Transport:
    """Pass requests to sites and replies back, and count bytes and the seconds of the sites."""

    folder: Path
    sites: int
    up: Tree
    dropped: set[int] = field(default_factory=set)
    sent: int = 0
    received: int = 0
    seconds: float = 0.0

    def participant(self, k: int) -> SumParticipant:
        state_folder = self.folder / f"site-{k}"
        state_folder.mkdir(parents=True, exist_ok=True)
        known = KnownKeys([f"site-{at}" for at in range(self.sites)], state_folder)
        return SumParticipant(KeyFiles().load(state_folder), state_folder / RUN, k, known, False)

    def send_requests(self, requests: Mapping[str, Request], pattern: Any, what: str) -> dict[str, Reply]:
        replies = {}
        for name, request in requests.items():
            k = int(name.removeprefix("site-"))
            if request.client_update and k in self.dropped:
                continue
            data = write_message(request)
            self.sent += len(data)
            participant = self.participant(k)
            start = time.process_time()
            received = read_message(data, Request)

            def reply_to(request: Request) -> Reply:
                plain = Reply.from_result(request, VERSION, EMPTY_RESULT)
                return replace(plain, upload=self.up) if request.client_update else plain

            reply = write_message(participant.reply_to(received, reply_to) if received.masks else reply_to(received))
            self.seconds += time.process_time() - start
            self.received += len(reply)
            replies[name] = read_message(reply, Reply)
        return replies


def measure(sites: int, parameters: int, dropped: int, folder: Path) -> Row:
    """Send one request with masks, and one without."""
    g = torch.Generator().manual_seed(0)
    broadcast: Tree = {"params": {"w": torch.zeros(parameters)}}
    moved = {"params": {"w": torch.randn(parameters, generator=g)}}
    upload = Upload(moved, torch.tensor(7.0, dtype=torch.float64)).tree
    request = Request(FEDERATION, VERSION, RUN, 0, 0, 0, "train", download=broadcast)
    names = [f"site-{k}" for k in range(sites)]
    row = Row(sites, parameters, dropped)
    remaining = sites - dropped

    plain = Transport(folder, sites, upload, set(range(dropped)))
    start = time.process_time()
    replies = plain.send_requests(dict.fromkeys(names, request), {}, "")
    average_uploads(stack([Upload.from_tree(reply.upload) for reply in replies.values()]))
    spent = time.process_time() - start
    row.plain_site_seconds = plain.seconds / remaining
    row.plain_server_seconds = spent - plain.seconds
    row.plain_up = plain.received / remaining
    row.plain_down = plain.sent / remaining

    transport = Transport(folder, sites, upload, set(range(dropped)))
    keys = {}
    for k, name in enumerate(names):
        keys[name] = transport.participant(k).public_key
    start = time.process_time()
    sum = MaskedSum(
        dict.fromkeys(names, request), {name: k for k, name in enumerate(names)}, keys, transport.send_requests, "it"
    )
    sum.total(transport.send_requests(sum.start(), sum_spec(sum_layout(make_tree_spec(upload))), "it"))
    spent = time.process_time() - start
    row.site_seconds = transport.seconds / remaining
    row.server_seconds = spent - transport.seconds
    row.up = transport.received / remaining
    row.down = transport.sent / remaining
    row.notes = len(next((folder / names[-1] / RUN / SUMS_FOLDER).glob("*.json")).read_bytes())
    return row


def format_table(rows: list[Row]) -> str:
    """Return the table."""
    lines = [
        "| sites | parameters | dropped out | a site, s | plain, s | the server, s | plain, s | up, kB | plain, kB "
        "| down, kB | plain, kB | notes, kB |",
        "|" + "---|" * 12,
    ]
    for each in rows:
        cells = [
            f"{each.sites}", f"{each.parameters:,}", f"{each.dropped}", f"{each.site_seconds:.3f}",
            f"{each.plain_site_seconds:.3f}", f"{each.server_seconds:.3f}", f"{each.plain_server_seconds:.3f}",
            *(f"{count / 1000:,.1f}" for count in (each.up, each.plain_up, each.down, each.plain_down, each.notes)),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, nargs="+", default=[3, 10, 30])
    parser.add_argument("--parameters", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--out", type=Path, default=Path("results/secure_sums"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as warm:  # the first call loads libraries
        measure(3, 10, 0, Path(warm))
    rows = []
    for parameters in options.parameters:
        for sites in options.sites:
            for dropped in [0] if sites < 4 else [0, sites // 10]:
                with tempfile.TemporaryDirectory() as folder:
                    rows.append(measure(sites, parameters, dropped, Path(folder)))
                print(rows[-1], flush=True)
    atomic_io.write_atomically(
        options.out.with_suffix(".json"), (json.dumps([asdict(row) for row in rows], indent=1) + "\n").encode()
    )
    head = f"# The cost of a masked sum\n\n{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}."
    records.replace_table(options.out.with_suffix(".md"), format_table(rows), head)


if __name__ == "__main__":
    main()

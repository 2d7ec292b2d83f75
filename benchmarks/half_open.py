"""Ten thousand connections of one address that never finish their handshake, while a site works behind the same nginx.

    python benchmarks/half_open.py [--connections 10000] [--seconds 60] [--out results/half_open.md]

The real nginx, with the configuration that `halfmoon federation init` writes, before a stand-in for the SuperLink, all
on one machine. The attacker connects, sends the first bytes of a TLS handshake on every second connection and nothing
on the others, and connects again whenever it is cut off. The site makes a TLS connection of its own for each call.
"""

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "sites"))

import test_pki_nginx as doors
from test_pki_nginx import Door, Link

from halfmoon.sites.keys.make import create_keys

HELLO = bytes.fromhex("1603010200010001fc0303")
"""The first bytes of a ClientHello whose rest never comes."""


async def attack(port: int, count: int, seconds: float) -> tuple[int, int]:
    """Hold as many connections open as can be; return the most at once, and how often one was cut off."""
    loop, end = asyncio.get_running_loop(), time.monotonic() + seconds
    held = most = cuts = 0

    async def one(number: int) -> None:
        nonlocal held, most, cuts
        while time.monotonic() < end:
            link = socket.socket()
            link.setblocking(False)
            try:
                await asyncio.wait_for(loop.sock_connect(link, ("127.0.0.1", port)), 20)
                held += 1
                most = max(most, held)
                try:
                    if number % 2:
                        await loop.sock_sendall(link, HELLO)
                    await asyncio.wait_for(loop.sock_recv(link, 1), max(0.1, end - time.monotonic()))
                    cuts += 1
                finally:
                    held -= 1
            except (OSError, TimeoutError):
                await asyncio.sleep(0.2)
            finally:
                link.close()

    await asyncio.gather(*(one(number) for number in range(count)))
    return most, cuts


def play(count: int, seconds: float, folder: Path) -> dict[str, float]:
    """Return what the attacker held, and how the site's calls fared meanwhile."""
    port, listen = doors.free_port(), doors.free_port()
    create_keys(folder, ["north"], ["localhost"], port=port, listen=listen)
    link = Link()
    server = link.serve(port, folder)
    subprocess.run([str(doors.NGINX), "-c", folder / "nginx.conf"], check=True, capture_output=True)
    door = Door(folder, listen, link)
    try:
        code = f"import asyncio, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import half_open; "
        code += f"print(*asyncio.run(half_open.attack({listen}, {count}, {seconds})))"
        attacker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        took, failed = [], 0
        while attacker.poll() is None:
            began = time.monotonic()
            try:
                failed += door.ask("POST", "/v1/fleet/pull-messages", b"x" * 1000)[0] != 200
            except OSError:
                failed += 1
            took.append(time.monotonic() - began)
            time.sleep(0.2)
        most, cuts = map(int, attacker.communicate()[0].split())
    finally:
        subprocess.run([str(doors.NGINX), "-c", folder / "nginx.conf", "-s", "stop"], check=False)
        server.shutdown()
    return {
        "held": most, "cut": cuts, "calls": len(took), "failed": failed, "median": statistics.median(took),
        "longest": max(took),
    }  # fmt: skip


def main() -> None:
    """Play it, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = play(given.connections, given.seconds, Path(folder) / "access")
    words = (
        f"{given.connections:,} half-open connections of one address for {given.seconds:g} s: {found['held']:,.0f} "
        f"held at once, {found['cut']:,.0f} cut off by the proxy; {found['calls']:.0f} calls of a site, "
        f"{found['failed']:.0f} failed, median {1000 * found['median']:.0f} ms, longest {found['longest']:.2f} s."
    )
    print(words)
    if given.out:
        head = "# Half-open connections\n\n    python benchmarks/half_open.py"
        given.out.write_text(f"{head} --connections {given.connections} --seconds {given.seconds:g}\n\n{words}\n")


if __name__ == "__main__":
    main()

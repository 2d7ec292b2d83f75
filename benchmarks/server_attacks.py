"""Attack the address of a federation's server: idle connections, and a foreign app at its address.

    python benchmarks/server_attacks.py half-open [--connections 10000] [--seconds 60]
    python benchmarks/server_attacks.py foreign-app

half-open: ten thousand connections of one address that never finish their TLS handshake, while a site works behind the same
nginx. The real nginx, with the configuration of `halfmoon federation init`, in front of a stand-in for the SuperLink, all
on one machine. The attacker connects, sends the first bytes of a TLS handshake on every second connection and no bytes on
the other ones, and reconnects when a connection is closed. The site opens a new TLS connection for each request.

foreign-app: a plain SuperLink with the true server's certificate, on its port, sends an app of its own, before a site has
joined any run and after one. The client half of the app writes a file when it is loaded. Needs `flower`, and Linux.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from fake_transport import free_port
from nginx_proxy import NGINX, NginxProxy, StandInServer
from toy_federation import JOIN, ToyFederation, wait_until

from halfmoon.federation.protocol import bundle
from halfmoon.federation.transport.contact import Address, ServerUnreachable, check_server
from halfmoon.federation.transport.processes import ENVIRONMENT
from halfmoon.sites.keys.make import create_keys

# half-open

CLIENT_HELLO = bytes.fromhex("1603010200010001fc0303")
"""The first bytes of a ClientHello whose rest is never sent."""


async def open_connections(port: int, count: int, seconds: float) -> tuple[int, int]:
    """Keep up to `count` connections open; return the largest number at once, and how many were closed by the proxy."""
    loop = asyncio.get_running_loop()
    end = time.monotonic() + seconds
    current = largest = closed = 0

    async def connect_repeatedly(number: int) -> None:
        nonlocal current, largest, closed
        while time.monotonic() < end:
            connection = socket.socket()
            connection.setblocking(False)
            try:
                await asyncio.wait_for(loop.sock_connect(connection, ("127.0.0.1", port)), 20)
                current += 1
                largest = max(largest, current)
                try:
                    if number % 2:
                        await loop.sock_sendall(connection, CLIENT_HELLO)
                    await asyncio.wait_for(loop.sock_recv(connection, 1), max(0.1, end - time.monotonic()))
                    closed += 1
                finally:
                    current -= 1
            except (OSError, TimeoutError):
                await asyncio.sleep(0.2)
            finally:
                connection.close()

    await asyncio.gather(*(connect_repeatedly(number) for number in range(count)))
    return largest, closed


def attack_with_connections(options: argparse.Namespace) -> None:
    """Attack in a separate process, time a site's requests meanwhile, and print the figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "access"
        port = free_port()
        listen = free_port()
        create_keys(folder, ["north"], ["localhost"], port=port, listen=listen)
        server = StandInServer()
        listener = server.serve(port, folder)
        subprocess.run([str(NGINX), "-c", folder / "nginx.conf"], check=True, capture_output=True)
        proxy = NginxProxy(folder, listen, server)
        try:
            command = [sys.executable, __file__, "half-open", "--port", str(listen)]
            command += ["--connections", str(options.connections), "--seconds", str(options.seconds)]
            attacker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            seconds: list[float] = []
            failed = 0
            while attacker.poll() is None:
                start = time.monotonic()
                try:
                    failed += proxy.request("POST", "/v1/fleet/pull-messages", b"x" * 1000)[0] != 200
                except OSError:
                    failed += 1
                seconds.append(time.monotonic() - start)
                time.sleep(0.2)
            largest, closed = map(int, attacker.communicate()[0].split())
        finally:
            subprocess.run([str(NGINX), "-c", folder / "nginx.conf", "-s", "stop"], check=False)
            listener.shutdown()
    print(
        f"{options.connections:,} half-open connections of one address for {options.seconds:g} s: {largest:,} open at "
        f"once, {closed:,} closed by the proxy; {len(seconds)} requests of a site, {failed} failed, median "
        f"{1000 * statistics.median(seconds):.0f} ms, longest {max(seconds):.2f} s."
    )


# foreign-app

REFUSED = "refused: the server wants another program executed here than the agreed one"
MOMENTS = ("before the first run", "after the run")
"""When the foreign app is sent; the true server runs a federation between them."""

FOREIGN_APP = {
    "pyproject.toml": bundle.render_project(("evil_server:app", "evil_client:app")),
    "evil_client.py": """
from pathlib import Path
from flwr.clientapp import ClientApp
Path({loaded!r}).write_text("loaded")
app = ClientApp()
""",
    "evil_server.py": """
import time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    replies, sent, last = [], [], 0.0
    while not replies:
        if time.monotonic() > last + 5:  # a node that has disconnected never replies
            messages = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
            sent, last = [*sent, *grid.push_messages(messages)], time.monotonic()
        time.sleep(0.1)
        replies = list(grid.pull_messages(sent)) if sent else []
    Path({reply!r}).write_text(str(replies[0].error.code if replies[0].has_error() else "no error"))
""",
}


@contextmanager
def run_foreign_server(toys: ToyFederation) -> Iterator[Path]:
    """Run a plain SuperLink on the server's port, with a run of a foreign app; yield the file with the site's reply."""
    foreign_folder = toys.folder / f"foreign-{time.monotonic_ns()}"
    loaded = foreign_folder / "loaded"
    reply = foreign_folder / "reply"
    (foreign_folder / "app").mkdir(parents=True)
    for name, template in FOREIGN_APP.items():
        text = template.replace("{loaded!r}", repr(str(loaded))).replace("{reply!r}", repr(str(reply)))
        (foreign_folder / "app" / name).write_text(text)
    address = f"127.0.0.1:{toys.port}"
    (foreign_folder / "config.toml").write_text(
        f'[superlink]\ndefault = "x"\n[superlink.x]\naddress = "{address}"\nroot-certificates = "{toys.files["ca"]}"\n'
    )
    environment = {**os.environ, **ENVIRONMENT, "FLWR_HOME": str(foreign_folder)}
    flags = ("--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile")
    arguments = [str(word) for pair in zip(flags, toys.files.values(), strict=True) for word in pair]
    arguments += ["--disable-runtime-dependency-installation"]
    scripts = Path(sysconfig.get_path("scripts"))
    command = [str(scripts / "flower-superlink"), "--host", "127.0.0.1", "--port", str(toys.port), *arguments]
    with (foreign_folder / "log").open("wb") as log:
        superlink = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=foreign_folder, start_new_session=True
        )  # fmt: skip
    try:
        wait_until(lambda: server_replies(toys.port, toys.files["ca"]))
        run = [str(scripts / "flwr"), "run", str(foreign_folder / "app"), "x"]
        subprocess.run(run, env=environment, cwd=foreign_folder, capture_output=True, check=True)
        wait_until(reply.exists)
        yield reply
        assert not loaded.exists(), "the site has loaded the app of the server"
    finally:
        os.killpg(superlink.pid, signal.SIGKILL)
        superlink.wait()


def server_replies(port: int, ca: Path) -> bool:
    """Return whether a server of a federation replies at a port."""
    try:
        check_server(Address("127.0.0.1", port), ca)
    except ServerUnreachable:
        return False
    return True


def send_foreign_app(options: argparse.Namespace) -> None:
    """Send the foreign app at both moments, and print the site's replies."""
    with tempfile.TemporaryDirectory() as name:
        toys = ToyFederation(Path(name), rounds=1)
        try:
            (toys.folder / "ward").mkdir()
            site = toys.start(JOIN, "j", toys.port, toys.folder / "ward", toys.files["ca"])
            for moment in MOMENTS:
                before = toys.read_output("j").count(REFUSED)
                start = time.monotonic()
                with run_foreign_server(toys) as reply:
                    code = reply.read_text()
                    # The site writes this line after its reply.
                    wait_until(lambda before=before: toys.read_output("j").count(REFUSED) > before)
                assert code == "7", f"{moment}: the server received {code}"
                lines = toys.read_output("j").count(REFUSED) - before
                seconds = time.monotonic() - start
                print(f"{moment}: error {code}, {lines} line in the log, nothing loaded, {seconds:.0f} s")
                assert site.poll() is None
                if moment == MOMENTS[0] and len(MOMENTS) > 1:
                    assert toys.start_server("s").wait(120) == 0, toys.read_output("s")
                    (row,) = [json.loads(line) for line in (toys.run / "metrics.jsonl").read_text().splitlines()]
                    print(f"the run: round {row['round'] + 1} was trained by {row['site']}")
            print(toys.read_output("j"))
        finally:
            toys.kill_all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    half_open = commands.add_parser("half-open")
    half_open.set_defaults(attack=attack_with_connections)
    half_open.add_argument("--connections", type=int, default=10_000)
    half_open.add_argument("--seconds", type=float, default=60.0)
    half_open.add_argument("--port", type=int, help="only attack this port, and print two counts")
    foreign_app = commands.add_parser("foreign-app")
    foreign_app.set_defaults(attack=send_foreign_app)
    options = parser.parse_args()
    if getattr(options, "port", None):
        print(*asyncio.run(open_connections(options.port, options.connections, options.seconds)))
    else:
        options.attack(options)


if __name__ == "__main__":
    main()

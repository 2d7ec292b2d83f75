"""Run a federation of real processes with toy apps instead of halfmoon's.

Used by tests/federation/test_flower_launch.py and by benchmarks/server_attacks.py.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from fake_transport import free_port

from halfmoon.federation.transport import processes
from halfmoon.federation.transport.processes import ProcessFolder
from halfmoon.sites.keys import certificates


def create_authority(folder: Path) -> dict[str, Path]:
    """Write the certificate of an authority, and the certificate and key of a server that it signed; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC)
    # Valid for 2 days and for 1: an authority must outlive the certificates that it signs.
    signer = certificates.create_authority(2, now)
    server = certificates.create_server_certificate(signer, (), 1, now)
    files = {name: folder / f"{name}.pem" for name in ("ca", "certificate", "key")}
    for path, data in zip(files.values(), (signer.certificate, server.certificate, server.key), strict=True):
        path.write_bytes(data)
    return files


def wait_until(condition: Callable[[], object], seconds: float = 90.0) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.05)


APPS = """
import json, time
from pathlib import Path
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from halfmoon.federation.transport.records import unwrap_message, wrap_message
from halfmoon.storage.events import EventLog

server = ServerApp()
client = ClientApp()

@server.main()
def main(grid: Grid, context: Context) -> None:
    run, metrics = Path(context.run_config["run-dir"]), Path(context.run_config["run-dir"], "metrics.jsonl")
    rounds = json.loads(Path(context.run_config["federation"]).read_text())["rounds"]
    log = EventLog(run / "serve.log")
    done = metrics.read_text().count("\\n") if metrics.exists() else 0
    log.record("resumed", f"goes on after round {done}")
    for number in range(done, rounds):
        content, asked, replies = wrap_message(str(number).encode()), {}, []
        while not replies:
            for node in set(grid.get_node_ids()) - asked.keys():  # one that is gone counts as connected for a minute
                (asked[node],) = grid.push_messages([Message(content, node, "query")])
            time.sleep(0.1)
            replies = [reply for reply in grid.pull_messages(asked.values()) if not reply.has_error()]
        with metrics.open("a") as file:
            file.write(json.dumps({"round": number, "site": unwrap_message(replies[0].content).decode()}) + "\\n")
        log.record("round_finished", f"round {number + 1} is over")
    (run / "model.safetensors").write_bytes(b"")
    (run / "summary.json").write_text("{}")

def open_client(options: dict[str, str]) -> "ToyClient":
    return ToyClient(options)

class ToyClient:
    def __init__(self, options: dict[str, str]) -> None:
        self.options = options

    def reply_to(self, data: bytes) -> bytes:
        EventLog(Path(self.options["home"]) / "join.log").record("note", f"asked for {data.decode()}")
        return self.options["name"].encode()
"""

SERVE = """
import sys
from pathlib import Path
from halfmoon.cli.commands.base import event_printer
from halfmoon.federation.transport.launch import ServerOptions, serve
from halfmoon.federation.transport.processes import interruptible
config, run, port, *files = sys.argv[1:]
with interruptible():
    apps = ("toys:server", "toys:client")
    serve(ServerOptions(Path(config), Path(run), "127.0.0.1", int(port), *map(Path, files), apps=apps), event_printer(False))
"""

JOIN = """
import sys
from pathlib import Path
from halfmoon.cli.commands.base import event_printer
from halfmoon.federation.transport.contact import Address
from halfmoon.federation.transport.site_process import SiteOptions, join_federation
from halfmoon.federation.transport.processes import interruptible
port, folder, ca = sys.argv[1:]
server, folder = Address("127.0.0.1", int(port)), Path(folder)
site = SiteOptions(server, "site-00", folder, 3, 2, folder / "home", Path(ca), apps=("toys:server", "toys:client"))
with interruptible():
    join_federation(site, event_printer(False))
"""


class ToyFederation:
    """A folder with toy apps, and the processes that are started in it."""

    def __init__(self, folder: Path, rounds: int = 3) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.port = free_port()
        (folder / "toys.py").write_text(APPS)
        (folder / "f.toml").write_text(json.dumps({"rounds": rounds}))
        self.files = create_authority(folder)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, code: str, name: str, *arguments: object) -> subprocess.Popen[bytes]:
        """Start a program whose output goes to the file `name`."""
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self.folder}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / name).open("wb") as log:
            command = [sys.executable, "-c", code, *map(str, arguments)]
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, env=environment)
        self.started.append(process)
        return process

    def start_server(self, name: str) -> subprocess.Popen[bytes]:
        """Start the server; its output goes to the file `name`."""
        return self.start(SERVE, name, self.folder / "f.toml", self.run, self.port, *self.files.values())

    def read_output(self, name: str) -> str:
        return (self.folder / name).read_text()

    def kill_all(self) -> None:
        """Kill every process that was started, and those that they left behind."""
        for process in self.started:
            process.kill()
            process.wait()
        for folder in (self.run / "flower", self.folder / "ward" / "home" / "flower"):
            ProcessFolder(folder).kill_all()

    def list_processes(self, subfolder: str = "") -> list[str]:
        """Return the command lines of processes whose folder is this one, or a subfolder, whoever started them."""
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            try:
                # By an environment variable, which children inherit: a process that was left behind has another parent.
                if f"{processes.FOLDER_VARIABLE}={self.folder / subfolder}".encode() in (each / "environ").read_bytes():
                    found.append((each / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # the process has ended, or belongs to another user
                continue
        return found

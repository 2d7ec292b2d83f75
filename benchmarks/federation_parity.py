"""Train the same federation in the simulator and over Flower in three ways, and compare the final weights bit by bit.

    python benchmarks/federation_parity.py [--methods feddure ...] [--rounds 3] [--out results/federation_parity]

`halfmoon site export digits` writes three sites; each method is then trained (a) by
`halfmoon.runs.runner.run_in_folder`, as in `halfmoon run`, (b) over an in-process grid
(`halfmoon.federation.transport.local.rehearse`), (c) on Flower's simulation engine, by a SuperLink with --simulation and
`flwr run` (Ray; needs `flwr[simulation]`), and (d) over real processes on loopback: three `halfmoon site join` and one
`halfmoon serve`. Each way uses separate copies of the sites, so that none finds memories of another one. A hash is the
SHA-256 of the names, types, shapes and bytes of all tensors of model.safetensors, sorted by name.
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from halfmoon.cli import main as cli
from halfmoon.config import schema as settings
from halfmoon.federation.protocol.bundle import APPS
from halfmoon.federation.transport.contact import Address, check_server
from halfmoon.federation.transport.local import rehearse
from halfmoon.federation.transport.processes import ENVIRONMENT, interruptible
from halfmoon.runs import runner

METHODS = {"feddure": "clients", "fedloke": "clients", "semifl": "server", "feddb": "clients", "fedmatch": "clients"}
"""The methods that are compared, and where their federation has its labels."""

RUN_VARIABLE = "HALFMOON_BENCHMARK"
"""An environment variable that identifies all processes of this run, whoever started them."""

DESCRIPTION = """\
Three sites of `halfmoon site export digits` train {rounds} rounds, all of them in each. The labels are at the sites (4 of each
class at each site on average), and for SemiFL at the server. A cell is the beginning of the SHA-256 of the final
model's tensors (names, types, shapes, bytes). The columns:

- simulator: `halfmoon run`
- in-process grid: Flower's two apps in one process
- Flower on Ray: Flower's simulation engine (`flwr run`)
- real processes: three `halfmoon site join` and one `halfmoon serve` on loopback
"""

TIMEOUT = 600.0
"""Seconds until a federation counts as stuck."""


class FederationTimeout(Exception):
    """A federation did not finish; the message has the ends of its logs."""


@dataclass(frozen=True)
class BenchmarkProcesses:
    """The processes of a benchmark.

    Attributes:
        folder: a temporary folder for their files.
        run_id: the value of `RUN_VARIABLE` in their environment.
        more: other environment variables.
    """

    folder: Path
    run_id: str
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of every process."""
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
        return {
            **os.environ,
            **ENVIRONMENT,
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            RUN_VARIABLE: self.run_id,
            "PATH": path,
            "OMP_NUM_THREADS": "1",
            **self.more,
        }

    def run(self, *arguments: str | Path) -> str:
        """Run a command, and return its output; raise FederationTimeout with the output if it fails."""
        command = [str(argument) for argument in arguments]
        done = subprocess.run(command, capture_output=True, env=self.environment, timeout=TIMEOUT)
        output = (done.stdout + done.stderr).decode(errors="replace")
        if done.returncode:
            raise FederationTimeout(
                f"{' '.join(map(str, arguments[:3]))} ended with {done.returncode}: {output[-2000:]}"
            )
        return done.stdout.decode()

    def start(self, *arguments: str | Path, log: Path) -> subprocess.Popen[bytes]:
        """Start a command in a new session; its output goes to `log`."""
        with log.open("ab") as file:
            return subprocess.Popen(
                [str(argument) for argument in arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )

    def running(self) -> list[int]:
        """Return the ids of the processes of this run, except this process."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if (
                    f"{RUN_VARIABLE}={self.run_id}\0".encode() in path.read_bytes()
                    and int(path.parent.name) != os.getpid()
                ):
                    found.append(int(path.parent.name))
        return found

    def clear(self) -> None:
        """End every process of this run."""
        for sent in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
            for number in self.running():
                with suppress(ProcessLookupError):
                    os.kill(number, sent)
            end = time.monotonic() + 5
            while self.running() and time.monotonic() < end:
                time.sleep(0.1)


@contextmanager
def open_processes(where: Path | None = None) -> Iterator[BenchmarkProcesses]:
    """Yield a new `BenchmarkProcesses`, and end its processes afterwards."""
    with tempfile.TemporaryDirectory(prefix="federation-", dir=where, ignore_cleanup_errors=True) as folder:
        here = BenchmarkProcesses(Path(folder), uuid.uuid4().hex)
        try:
            with interruptible():
                yield here
        finally:
            here.clear()


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def script(name: str) -> Path:
    """Return a command that is installed with this Python."""
    return Path(sysconfig.get_path("scripts"), name)


def halfmoon(*arguments: str | Path) -> list[str | Path]:
    """Return a halfmoon command."""
    return [script("halfmoon"), *arguments]


def export(*arguments: str, out: Path) -> None:
    """Run `halfmoon site export` in this process; raise FederationTimeout if it fails."""
    if cli.main([*arguments, "--out", str(out)]):
        raise FederationTimeout(f"halfmoon {' '.join(arguments)} failed")


def written(sites: Path, options: Mapping[str, Any]) -> Path:
    """Replace options of an exported federation.toml; return its path."""
    path = sites / "federation.toml"
    lines = [line for line in path.read_text().splitlines() if line.split(" = ")[0] not in options]
    path.write_text("\n".join([*(f"{name} = {json.dumps(value)}" for name, value in options.items()), *lines]) + "\n")
    return path


def digest(run: Path) -> str:
    """Return the SHA-256 of the tensors of a run's model."""
    found = hashlib.sha256()
    for name, leaf in sorted(load_file(run / "model.safetensors").items()):
        found.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
        found.update(leaf.tobytes())
    return found.hexdigest()


def names(sites: Path) -> list[str]:
    """Return the names of the exported sites."""
    return sorted(path.name for path in sites.glob("site-*") if path.is_dir())


def train_simulated(here: BenchmarkProcesses, file: Path, run: Path) -> None:
    """Train in the simulator."""
    runner.run_in_folder(settings.resolve(settings.load_file(file), {}), run)


def train_rehearsed(here: BenchmarkProcesses, file: Path, run: Path) -> None:
    """Train over the in-process grid."""
    rehearse(file, run, file.parent)


def train_on_ray(here: BenchmarkProcesses, file: Path, run: Path) -> None:
    """Train on Flower's simulation engine."""
    app_folder = run.with_name(f"{run.name}-flower")
    (app_folder / "app").mkdir(parents=True)
    address = Address("127.0.0.1", free_port())
    config = {"federation": str(file), "run-dir": str(run), "sites": str(file.parent), "patience": TIMEOUT}
    (app_folder / "app/pyproject.toml").write_text(project(APPS, config))
    (app_folder / "config.toml").write_text(connection(address))
    # Otherwise Ray kills workers if other processes use up the memory of the machine.
    more = {"FLWR_HOME": str(app_folder), "RAY_TMPDIR": str(here.folder), "RAY_memory_monitor_refresh_ms": "0"}
    here = replace(here, more=more)
    with superlink(here, address, app_folder, "--simulation"):
        count = f"num-supernodes={len(names(file.parent))} client-resources-num-cpus=1"
        here.run(script("flwr"), "run", app_folder / "app", "here", "--federation-config", count)
        wait(lambda: (run / "summary.json").exists(), app_folder / "superlink.log", run / "serve.log")
    here.clear()


def project(apps: Sequence[str], config: Mapping[str, Any]) -> str:
    """Return the pyproject.toml of a Flower app that only refers to installed code."""
    server, client = apps
    lines = [
        "[build-system]", 'requires = ["hatchling"]', 'build-backend = "hatchling.build"',
        "[project]", 'name = "benchmark"', 'version = "1.0.0"', 'description = "A benchmark"', 'license = "Apache-2.0"',
        f'dependencies = ["flwr>={metadata.version("flwr")}"]',
        "[tool.flwr.app]", 'publisher = "halfmoon"', f'flwr-version-target = "{metadata.version("flwr")}"',
        "[tool.flwr.app.components]", f'serverapp = "{server}"', f'clientapp = "{client}"',
        "[tool.flwr.app.config]", *(f"{name} = {json.dumps(value)}" for name, value in config.items()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def connection(address: Address) -> str:
    """Return the config.toml with the address of a SuperLink for `flwr`."""
    return f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'


@contextmanager
def superlink(here: BenchmarkProcesses, address: Address, app_folder: Path, *more: str) -> Iterator[None]:
    """Run a SuperLink, with its log in `app_folder`."""
    arguments = ["--insecure", "--host", address.host, "--port", str(address.port)]
    arguments += ["--disable-runtime-dependency-installation", *more]
    log = app_folder / "superlink.log"
    process = here.start(script("flower-superlink"), *arguments, log=log)
    try:
        wait(lambda: is_reachable(address), log)
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)


def is_reachable(address: Address) -> bool:
    """Return whether a SuperLink replies."""
    with suppress(Exception):
        check_server(address, None)
        return True
    return False


def wait(condition: Callable[[], bool], *logs: Path) -> None:
    """Wait until a condition is true; raise FederationTimeout with the ends of logs after `TIMEOUT`."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > end or any(log.exists() and "stopped: " in log.read_text() for log in logs):
            raise FederationTimeout("\n".join(log.read_text()[-2000:] for log in logs if log.exists()))
        time.sleep(0.1)


def train_over_processes(here: BenchmarkProcesses, file: Path, run: Path) -> None:
    """Train over real processes on loopback."""
    port = free_port()
    with joined(here, file.parent, port):
        here.run(*halfmoon("serve", file, "--run-dir", run, "--port", str(port)))
    here.clear()


@contextmanager
def joined(
    here: BenchmarkProcesses, sites: Path, port: int, command: Sequence[str | Path] | None = None
) -> Iterator[None]:
    """Join every site, by `halfmoon site join` or another `command` with the same flags."""
    join = halfmoon("site", "join") if command is None else command
    nodes = []
    try:
        for name in names(sites):
            log = sites / f"{name}.log"
            flags = ("--server", f"127.0.0.1:{port}", "--site", sites / name, "--name", name, "--terms", "any")
            nodes.append(here.start(*join, *flags, log=log))
        yield
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            with suppress(subprocess.TimeoutExpired):
                node.wait(20)


WAYS: dict[str, Callable[[BenchmarkProcesses, Path, Path], None]] = {
    "simulator": train_simulated,
    "in-process grid": train_rehearsed,
    "Flower on Ray": train_on_ray,
    "real processes": train_over_processes,
}


def exported(here: BenchmarkProcesses, labels: str) -> Path:
    """Write three sites once, for every copy; return their folder."""
    out = here.folder / f"sites-{labels}"
    if not out.exists():
        export("site", "export", "digits", "--sites", "3", "--labels-per-class", "4", "--labels-at", labels, out=out)
    return out


def machine() -> dict[str, Any]:
    """Describe this machine, and the versions of the packages."""
    named = (line.split(":")[1].strip() for line in cpu_lines() if line.startswith("model name"))
    model = next(named, platform.machine())
    versions = {}
    for name in ("halfmoon", "torch", "flwr", "ray", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"processor": model, "cores": os.cpu_count(), "python": platform.python_version(), "versions": versions}


def cpu_lines() -> list[str]:
    """Return the lines of /proc/cpuinfo if it exists."""
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def about(record: Mapping[str, Any]) -> str:
    """Describe the machine in a sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"{record['cores']} cores of an {record['processor']}, Python {record['python']}, {versions}."


def compare_ways(here: BenchmarkProcesses, method: str, rounds: int, ways: Sequence[str]) -> dict[str, Any]:
    """Train one method in every way; return its hashes and seconds."""
    sites = exported(here, METHODS.get(method, "clients"))
    hashes: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for number, way in enumerate(ways):
        copy = here.folder / f"{method}-{number}"
        shutil.copytree(sites, copy)
        file = written(copy, {"method": method, "rounds": rounds, "cohort": 3})
        start = time.perf_counter()
        WAYS[way](here, file, copy / "run")
        seconds[way] = round(time.perf_counter() - start, 1)
        hashes[way] = digest(copy / "run")
        sys.stderr.write(f"{method}, {way}: {hashes[way][:8]} in {seconds[way]} s\n")
    return {"method": method, "hashes": hashes, "equal": len(set(hashes.values())) == 1, "seconds": seconds}


def table(rows: Sequence[Mapping[str, Any]], record: Mapping[str, Any], command: str, rounds: int) -> str:
    """Return the results as a page."""
    ways = list(rows[0]["hashes"])
    equal = sum(row["equal"] for row in rows)
    lines = [
        "# The same weights in the simulator and over the network",
        "",
        f"{equal} of {len(rows)} methods end with bit-identical weights in all {len(ways)} ways of running a federation.",
        "",
        f"    {command}",
        "",
        DESCRIPTION.format(rounds=rounds),
        about(record),
        "",
        f"| method | {' | '.join(ways)} | equal |",
        f"|---{'|---' * len(ways)}|---|",
    ]
    for row in rows:
        cells = " | ".join(f"`{row['hashes'][way][:8]}`" for way in ways)
        lines.append(f"| {row['method']} | {cells} | {'yes' if row['equal'] else 'no'} |")
    return "\n".join(lines) + "\n"


def save(out: Path, page: str, record: Mapping[str, Any]) -> None:
    """Write the results as OUT.md and OUT.json."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(f"{out.name}.md").write_text(page)
    out.with_name(f"{out.name}.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the weights of federations that are trained in several ways.")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/federation_parity"))
    options = parser.parse_args()
    command = shlex.join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]])
    record = machine()
    with open_processes() as here:
        rows = [compare_ways(here, method, options.rounds, options.ways) for method in options.methods]
    page = table(rows, record, command, options.rounds)
    save(options.out, page, {"command": command, "machine": record, "rounds": options.rounds, "methods": rows})
    sys.stdout.write(page)
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Play the same federation in the simulator and over Flower in three ways, and compare the final weights, bit by bit.

    python benchmarks/federation_parity.py [--methods feddure ...] [--rounds 3] [--out results/federation_parity]

Three sites are written with `halfmoon site export digits`; each method is then played (a) by
`halfmoon.runs.runner.run_in_folder`, as `halfmoon run` does, (b) over an in-process grid
(`halfmoon.federation.transport.local.rehearse`), (c) on Flower's simulation engine, by a SuperLink with --simulation and
`flwr run` (Ray; needs `flwr[simulation]`), and (d) over real processes on loopback: three `halfmoon site join` and one
`halfmoon serve`. Every way has its own copies of the sites, so that none finds what another one's sites remember. A
hash is the SHA-256 of the names, types, shapes and bytes of all tensors of model.safetensors, by name. Nothing is left
behind but the results.
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

MARK = "HALFMOON_BENCHMARK"
"""A variable of the environment by which all processes of this run are found again, whoever started them."""

SCENE = """\
Three sites of `halfmoon site export digits`, {rounds} rounds with all of them: labels at the sites (4 of each class a
site on average), for SemiFL at the server. Each cell is the beginning of the SHA-256 of the final model's tensors
(names, types, shapes, bytes): from `halfmoon run`'s simulator, from Flower's two apps in one process, from Flower's
simulation engine (`flwr run`, Ray), and from three `halfmoon site join` and one `halfmoon serve` on loopback.
"""

PATIENCE = 600.0
"""Seconds until one way of playing a federation counts as stuck."""


class Stuck(Exception):
    """A federation that did not come to its end; the words say what its logs said last."""


@dataclass(frozen=True)
class Place:
    """Where the processes of a benchmark live: a folder that is thrown away, and the mark that they carry.

    `more` is added to the environment of every process.
    """

    folder: Path
    mark: str
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of every process."""
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
        return {
            **os.environ,
            **ENVIRONMENT,
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            MARK: self.mark,
            "PATH": path,
            "OMP_NUM_THREADS": "1",
            **self.more,
        }

    def run(self, *words: str | Path) -> str:
        """Run a command to its end and return what it printed; raise Stuck with its words where it fails."""
        command = [str(word) for word in words]
        done = subprocess.run(command, capture_output=True, env=self.environment, timeout=PATIENCE)
        said = (done.stdout + done.stderr).decode(errors="replace")
        if done.returncode:
            raise Stuck(f"{' '.join(map(str, words[:3]))} ended with {done.returncode}: {said[-2000:]}")
        return done.stdout.decode()

    def start(self, *words: str | Path, log: Path) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own; what it prints goes to `log`."""
        with log.open("ab") as file:
            return subprocess.Popen(
                [str(word) for word in words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )

    def left(self) -> list[int]:
        """Return the numbers of the processes with our mark, but this one."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"{MARK}={self.mark}\0".encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
        return found

    def clear(self) -> None:
        """End every process with our mark."""
        for sent in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
            for number in self.left():
                with suppress(ProcessLookupError):
                    os.kill(number, sent)
            end = time.monotonic() + 5
            while self.left() and time.monotonic() < end:
                time.sleep(0.1)


@contextmanager
def place(where: Path | None = None) -> Iterator[Place]:
    """Give a place, and end all that is left in it."""
    with tempfile.TemporaryDirectory(prefix="federation-", dir=where, ignore_cleanup_errors=True) as folder:
        here = Place(Path(folder), uuid.uuid4().hex)
        try:
            with interruptible():
                yield here
        finally:
            here.clear()


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def script(name: str) -> Path:
    """Return a command that is installed beside this Python."""
    return Path(sysconfig.get_path("scripts"), name)


def halfmoon(*words: str | Path) -> list[str | Path]:
    """Return a command of halfmoon's."""
    return [script("halfmoon"), *words]


def export(*words: str, out: Path) -> None:
    """Write the sites of a `halfmoon site export`, by the command in this process; raise Stuck where it fails."""
    if cli.main([*words, "--out", str(out)]):
        raise Stuck(f"halfmoon {' '.join(words)} failed")


def written(sites: Path, options: Mapping[str, Any]) -> Path:
    """Put options in place of those of an exported federation.toml; return its path."""
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


def simulated(here: Place, file: Path, run: Path) -> None:
    """Play in the simulator."""
    runner.run_in_folder(settings.resolve(settings.load_file(file), {}), run)


def rehearsed(here: Place, file: Path, run: Path) -> None:
    """Play over the in-process grid."""
    rehearse(file, run, file.parent)


def on_ray(here: Place, file: Path, run: Path) -> None:
    """Play on Flower's simulation engine."""
    home = run.with_name(f"{run.name}-flower")
    (home / "app").mkdir(parents=True)
    address = Address("127.0.0.1", free_port())
    config = {"federation": str(file), "run-dir": str(run), "sites": str(file.parent), "patience": PATIENCE}
    (home / "app/pyproject.toml").write_text(project(APPS, config))
    (home / "config.toml").write_text(connection(address))
    # Ray kills workers where the whole machine runs out of memory, whoever has it.
    more = {"FLWR_HOME": str(home), "RAY_TMPDIR": str(here.folder), "RAY_memory_monitor_refresh_ms": "0"}
    here = replace(here, more=more)
    with superlink(here, address, home, "--simulation"):
        count = f"num-supernodes={len(names(file.parent))} client-resources-num-cpus=1"
        here.run(script("flwr"), "run", home / "app", "here", "--federation-config", count)
        wait(lambda: (run / "summary.json").exists(), home / "superlink.log", run / "serve.log")
    here.clear()


def project(apps: Sequence[str], config: Mapping[str, Any]) -> str:
    """Return the pyproject.toml of an app of Flower's without code of its own."""
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
    """Return the config.toml by which `flwr` finds a SuperLink."""
    return f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'


@contextmanager
def superlink(here: Place, address: Address, home: Path, *more: str) -> Iterator[None]:
    """Let a SuperLink run, with its log in `home`."""
    words = ["--insecure", "--host", address.host, "--port", str(address.port)]
    words += ["--disable-runtime-dependency-installation", *more]
    log = home / "superlink.log"
    process = here.start(script("flower-superlink"), *words, log=log)
    try:
        wait(lambda: answers(address), log)
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)


def answers(address: Address) -> bool:
    """Say whether a SuperLink is there."""
    with suppress(Exception):
        check_server(address, None)
        return True
    return False


def wait(condition: Callable[[], bool], *logs: Path) -> None:
    """Wait until something is so; raise Stuck with the ends of logs where it takes too long."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end or any(log.exists() and "stopped: " in log.read_text() for log in logs):
            raise Stuck("\n".join(log.read_text()[-2000:] for log in logs if log.exists()))
        time.sleep(0.1)


def over_processes(here: Place, file: Path, run: Path) -> None:
    """Play over real processes on loopback."""
    port = free_port()
    with joined(here, file.parent, port):
        here.run(*halfmoon("serve", file, "--run-dir", run, "--port", str(port)))
    here.clear()


@contextmanager
def joined(here: Place, sites: Path, port: int, command: Sequence[str | Path] | None = None) -> Iterator[None]:
    """Let every site take part, by `halfmoon site join` or another `command` with the same flags."""
    words = halfmoon("site", "join") if command is None else command
    nodes = []
    try:
        for name in names(sites):
            log = sites / f"{name}.log"
            flags = ("--server", f"127.0.0.1:{port}", "--site", sites / name, "--name", name, "--terms", "any")
            nodes.append(here.start(*words, *flags, log=log))
        yield
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            with suppress(subprocess.TimeoutExpired):
                node.wait(20)


WAYS: dict[str, Callable[[Place, Path, Path], None]] = {
    "simulator": simulated,
    "in-process grid": rehearsed,
    "Flower on Ray": on_ray,
    "real processes": over_processes,
}


def exported(here: Place, labels: str) -> Path:
    """Write three sites and decode their images once, for every copy; return their folder."""
    out = here.folder / f"sites-{labels}"
    if not out.exists():
        export("site", "export", "digits", "--sites", "3", "--labels-per-class", "4", "--labels-at", labels, out=out)
    return out


def machine() -> dict[str, Any]:
    """Return what this machine is, and the versions of what ran."""
    named = (line.split(":")[1].strip() for line in cpu_lines() if line.startswith("model name"))
    model = next(named, platform.machine())
    versions = {}
    for name in ("halfmoon", "torch", "flwr", "ray", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"processor": model, "cores": os.cpu_count(), "python": platform.python_version(), "versions": versions}


def cpu_lines() -> list[str]:
    """Return the lines of /proc/cpuinfo, none where there is none."""
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def about(facts: Mapping[str, Any]) -> str:
    """Return the machine in a sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"{facts['cores']} cores of an {facts['processor']}, Python {facts['python']}, {versions}."


def play(here: Place, method: str, rounds: int, ways: Sequence[str]) -> dict[str, Any]:
    """Play one method in every way; return its hashes and seconds."""
    sites = exported(here, METHODS.get(method, "clients"))
    hashes: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for number, way in enumerate(ways):
        copy = here.folder / f"{method}-{number}"
        shutil.copytree(sites, copy)
        file = written(copy, {"method": method, "rounds": rounds, "cohort": 3})
        began = time.perf_counter()
        WAYS[way](here, file, copy / "run")
        seconds[way] = round(time.perf_counter() - began, 1)
        hashes[way] = digest(copy / "run")
        sys.stderr.write(f"{method}, {way}: {hashes[way][:8]} in {seconds[way]} s\n")
    return {"method": method, "hashes": hashes, "equal": len(set(hashes.values())) == 1, "seconds": seconds}


def table(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], command: str, rounds: int) -> str:
    """Return the results as a page."""
    ways = list(rows[0]["hashes"])
    lines = [
        "# The same weights wherever a federation is played",
        "",
        f"    {command}",
        "",
        SCENE.format(rounds=rounds),
        about(facts),
        "",
        f"| method | {' | '.join(ways)} | equal |",
        f"|---{'|---' * len(ways)}|---|",
    ]
    for row in rows:
        cells = " | ".join(f"`{row['hashes'][way][:8]}`" for way in ways)
        lines.append(f"| {row['method']} | {cells} | {'yes' if row['equal'] else 'no'} |")
    return "\n".join(lines) + "\n"


def save(out: Path, page: str, facts: Mapping[str, Any]) -> None:
    """Write the results as OUT.md and OUT.json."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(f"{out.name}.md").write_text(page)
    out.with_name(f"{out.name}.json").write_text(json.dumps(facts, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the weights of federations that are played in several ways.")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/federation_parity"))
    options = parser.parse_args()
    command = shlex.join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]])
    facts = machine()
    with place() as here:
        rows = [play(here, method, options.rounds, options.ways) for method in options.methods]
    page = table(rows, facts, command, options.rounds)
    save(options.out, page, {"command": command, "machine": facts, "rounds": options.rounds, "methods": rows})
    sys.stdout.write(page)
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

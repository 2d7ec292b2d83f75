"""Inject one fault into each run of a federation of real processes, and compare the weights with an undisturbed run.

    python benchmarks/federation_faults.py [--only NAME ...] [--out results/federation_faults]

Three sites with digits and a server train four rounds; the fault happens in the second one while a site trains. Writes a
table (.md) and all measurements (.json.gz); with --only the other rows remain unchanged. Sites that misbehave join by the
normal command with `misbehaving/` in PYTHONPATH. Only Linux; a full disk needs root (mount).
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "results"))

import records
from disturbed import LATE, SITES, TIMEOUT, VICTIM, EventTimeout, Federation
from federation_parity import export
from safetensors.numpy import load_file

from halfmoon.federation.transport.processes import SERVER_APP, SUPERLINK, SUPERNODE, WORKER, interruptible
from halfmoon.storage import atomic_io

EXPORT = ("site", "export", "digits", "--sites", "3", "--labels-per-class", "4")
OPTIONS = {"rounds": 4, "steps": 60, "labeled_batch": 8, "unlabeled_batch": 16, "width": 8}


# The faults


def no_fault(fed: Federation) -> None:
    """Do nothing."""


def kill_while_training(who: str, *scripts: str, restart: bool = False) -> Callable[[Federation], None]:
    """Return a fault that kills processes while a site trains, and then restarts the command if `restart`."""

    def disturb(fed: Federation) -> None:
        fed.training()
        fed.kill(who, *scripts)
        if restart:
            fed.start(who)

    return disturb


def restart_all(fed: Federation) -> None:
    """Kill all processes, and restart all commands."""
    fed.training()
    fed.cut()
    for who in ("serve", *SITES):
        fed.start(who)


def fill_disk(fed: Federation) -> None:
    """Fill the victim's disk until the second round has ended."""
    assert fed.home is not None
    filler = fed.home / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 512)
    fed.until(lambda: "round 2 of 4" in fed.log(), "the second round")
    filler.unlink()


@dataclass(frozen=True)
class Fault:
    """A run with a fault.

    Attributes:
        what: description of the fault.
        disturb: injects it.
        same: whether the run must end with the weights of the undisturbed one.
        sign: text that the server's log must contain.
        spoil: the kind of misbehavior of the victim, or "".
        rules: lines added to federation.toml.
        method: the method.
        small: whether the state folder of the victim is on a small disk.
    """

    what: str
    disturb: Callable[[Federation], None] = no_fault
    same: bool = True
    sign: str = ""
    spoil: str = ""
    rules: str = ""
    method: str = "fedloke"
    small: bool = False


UNDISTURBED = {"fedloke": "undisturbed", "feddure": "undisturbed-feddure"}
FAULTS: dict[str, Fault] = {
    "undisturbed": Fault("nothing"),
    "kill-serve": Fault(
        "kill -9 of `halfmoon serve`; restarted by hand", kill_while_training("serve", restart=True), sign="going on after round"
    ),
    "kill-serverapp": Fault("kill -9 of the ServerApp", kill_while_training("serve", SERVER_APP), sign="s program died"),
    "kill-superlink": Fault("kill -9 of the SuperLink", kill_while_training("serve", SUPERLINK), sign="the SuperLink died"),
    "kill-join": Fault(
        "kill -9 of a site's `site join`; restarted by hand", kill_while_training(VICTIM, restart=True), sign="site-01 is there again"
    ),
    "kill-supernode": Fault("kill -9 of a site's SuperNode", kill_while_training(VICTIM, SUPERNODE), sign="site-01 is there again"),
    "kill-clientapp": Fault("kill -9 of a site's ClientApp", kill_while_training(VICTIM, WORKER), sign="site-01 did not"),
    "power-cut": Fault("kill -9 of all processes at once; restarted by hand", restart_all, sign="going on after round"),
    "gone": Fault(
        "kill -9 of a site's `site join`, not restarted (absence = 15)",
        kill_while_training(VICTIM), same=False, rules="absence = 15.0", sign="it was not connected for 15 s",
    ),
    "nan": Fault("a site sends NaN", same=False, spoil="nan", sign="values that are not finite"),
    "nan-again": Fault(
        "the same with min_replies = 3", spoil="nan", rules="min_replies = 3", sign="round 2 is repeated, attempt 2"
    ),
    "shape": Fault("a site sends a wrong shape", same=False, spoil="shape", sign="has the shape"),
    "huge": Fault("a site sends weights moved by 10^6", same=False, spoil="huge", sign="times the cohort's median"),
    "version": Fault(
        "a site has another version in one round", same=False, spoil="version", sign="this site has to upgrade to"
    ),
    "stranger": Fault(
        "a site has another version from the start",
        same=False, spoil="stranger", rules="absence = 10.0", sign="a site does not join: this site runs",
    ),
    "late": Fault(
        f"a site sleeps {LATE:.0f} s before its reply, with a limit of {TIMEOUT:.0f} s",
        same=False, spoil="late", rules=f"round_timeout = {TIMEOUT}", sign="s too late: discarded",
    ),
    "old": Fault("a site replies with its reply of round 1", same=False, spoil="old", sign="it answers round 1, trip 1"),
    "twice": Fault("a site sends every reply twice", spoil="twice"),
    "cut": Fault("kill -9 of a site's SuperNode while it sends its reply", spoil="cut", sign="did not answer round 2"),
    "disk-full": Fault("a site's disk is full", fill_disk, same=False, sign="its disk: No space left on device", small=True),
    "undisturbed-feddure": Fault("nothing (FedDure)", method="feddure"),
    "power-cut-feddure": Fault(
        "kill -9 of all processes at once (FedDure); restarted by hand",
        restart_all, sign="going on after round", method="feddure",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class FaultOutcome:
    """The outcome of a run; `weights` and `memories` are digests, `seconds` those from the end of round 1 to the end."""

    what: str
    method: str
    log: list[str]
    site_log: list[str]
    rounds: list[int]
    cohorts: list[list[int]]
    accuracy: float
    weights: str
    memories: dict[str, str]
    seconds: float


def run_with_fault(name: str, exported: Path, folder: Path) -> FaultOutcome:
    """Run a federation with a fault; raise EventTimeout if it does not finish or the log lacks the expected text."""
    fault = FAULTS[name]
    shutil.copytree(exported, folder / "sites")
    _write(folder / "sites" / "federation.toml", fault)
    fed = Federation(folder, fault.spoil, folder / "disk" if fault.small else None)
    with suppress(FileExistsError):
        (folder / "disk").mkdir()
    if fault.small:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder / "disk")], check=True)
    try:
        fed.begin()
        start = time.monotonic()
        fault.disturb(fed)
        fed.until(lambda: "finished: the model is" in fed.log(), "the end")
        seconds = time.monotonic() - start
        fed.until(lambda: fed.running["serve"].poll() == 0, "the server's end")
        if fault.spoil in ("twice", "cut") and not (fed.of(VICTIM) / f"sent-{fault.spoil}").exists():
            raise EventTimeout("the site did not misbehave")
        return _outcome(fed, fault, seconds)
    finally:
        fed.end()
        if fault.small:
            subprocess.run(["umount", str(folder / "disk")], check=True)


def _write(path: Path, fault: Fault) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("method = ")]
    options = [f"{name} = {json.dumps(value)}" for name, value in {"method": fault.method, **OPTIONS}.items()]
    path.write_text("\n".join([*options, *lines, fault.rules]) + "\n")


def _outcome(fed: Federation, fault: Fault, seconds: float) -> FaultOutcome:
    lines = read_log_lines(fed, "serve")
    if not re.search(re.escape(fault.sign), "\n".join(lines)):
        raise EventTimeout(f"the server's log does not contain {fault.sign!r}: {lines}")
    rows = atomic_io.read_rows(fed.run / "metrics.jsonl")
    summary = atomic_io.read_json(fed.run / "summary.json") or {}
    folders = {who: fed.of(who).parent / "federations" for who in SITES}
    stored = {who: sorted(path.stem for path in folder.rglob("memory-*")) for who, folder in folders.items()}
    return FaultOutcome(
        what=fault.what,
        method=fault.method,
        log=lines,
        site_log=read_log_lines(fed, VICTIM),
        rounds=[row["round"] for row in rows],
        cohorts=[row["cohort"] for row in rows],
        accuracy=summary["accuracy"]["last"],
        weights=_digest(fed.run / "model.safetensors"),
        memories={who: names[-1].rpartition("-")[2] if names else "none" for who, names in stored.items()},
        seconds=round(seconds, 1),
    )


def read_log_lines(fed: Federation, who: str) -> list[str]:
    """Return a log's lines without the time of day and without folders of this machine."""
    plain = fed.log(who).replace(str(fed.folder), "...")
    return [line.split("  ", 1)[-1] for line in plain.splitlines()]


def _digest(path: Path) -> str:
    leaves = load_file(path)
    parts = [f"{name} {leaf.dtype} {leaf.shape}".encode() + leaf.tobytes() for name, leaf in sorted(leaves.items())]
    return sha256(b"".join(parts)).hexdigest()


# What is written

NOTES = f"""## Setup

Three sites with digits (`halfmoon {" ".join(EXPORT)}`), all of them in every cohort,
{OPTIONS["rounds"]} rounds of {OPTIONS["steps"]} steps. The method is FedLoKe, whose sites store a local model, or FedDure
where it is named, whose sites store a regulator and its optimizer. The fault happens in round 2, to {VICTIM} or to the
server. A process is killed when the site has computed half of its local update.

- "Restarted by hand": the command itself was killed, and entered a second time. halfmoon restarts all other processes.
- Sites that misbehave use `halfmoon site join` with `benchmarks/misbehaving` in PYTHONPATH. Its `sitecustomize.py`
  changes the replies of the site's process, or what its SuperNode sends (every reply twice).
- The full disk is a tmpfs of 4 MB with the site's state folder, filled to the last byte until round 2 is over.

## How to read the table

- "Equal to the bit": the cohort was the same in every round. The final weights and the newest memory file of every site
  have the bytes of the undisturbed run.
- Otherwise {VICTIM} missed a round or more. The cell has the accuracy on 360 test images, and in parentheses that of the
  undisturbed run. All runs in which {VICTIM} missed only round 2 have equal bytes. A wrong, late or lost reply therefore
  has no effect on the server or the site.
- Seconds lost: from the end of round 1 to the end of the run, minus those of the undisturbed run. There is one run of each, on a
  machine with other work, so the numbers are uncertain by about 30 s. A kill costs a local update, and the import of Flower
  and PyTorch if processes restart.
- Log messages: those that the undisturbed run does not have, ignoring numbers. The .json.gz file has all of them.

## What costs time

- Flower needs one minute to detect that a ClientApp is dead, and three minutes to detect that a site will not send an announced
  reply. During these three minutes the server's program receives no other reply (`pull_messages` waits), and no time limit applies.
- A site that is away costs `absence` seconds in every round that selects it.
- If a site sends a reply twice, the server receives one, because Flower stores the first only.
"""


def new_log_lines(outcome: FaultOutcome, undisturbed: FaultOutcome) -> list[str]:
    """Return the lines of the server's log that the undisturbed run does not have; of lines that differ in numbers, the first."""

    def without_numbers(line: str) -> str:
        return re.sub(r"[\d.]+", "#", line)

    usual = set(map(without_numbers, undisturbed.log))
    found: dict[str, list[str]] = {}
    for line in dict.fromkeys(outcome.log):
        if without_numbers(line) not in usual:
            found.setdefault(without_numbers(line), []).append(line)
    return [lines[0] + (f" (and {len(lines) - 1} more)" if len(lines) > 1 else "") for lines in found.values()]


def like(outcome: FaultOutcome) -> tuple[str, list[list[int]]]:
    """Return the properties that determine the final weights: runs that agree in them have equal bytes."""
    return outcome.method, outcome.cohorts


def table(outcomes: dict[str, FaultOutcome]) -> str:
    """Return the table of all faults."""
    lines = ["| fault | new messages in the server's log | rounds | result | seconds lost |", "|---|---|---|---|---|"]
    for name, outcome in outcomes.items():
        undisturbed = outcomes.get(UNDISTURBED[outcome.method])
        if undisturbed is None or name in UNDISTURBED.values():
            continue
        same = outcome.weights == undisturbed.weights
        memories = "and memories " if outcome.memories == undisturbed.memories else ""
        equal_runs = sum(like(outcome) == like(each) for each in outcomes.values())
        ending = f"accuracy {outcome.accuracy:.1%} ({undisturbed.accuracy:.1%})"
        ending += f", equal to the bit in {equal_runs} runs with these cohorts" if equal_runs > 1 else ""
        if same:
            ending = f"weights {memories}equal to the bit"
        text = " / ".join(new_log_lines(outcome, undisturbed)).replace("|", "\\|") or "none"
        cells = [FAULTS[name].what, text, f"{len(set(outcome.rounds))} of {OPTIONS['rounds']}", ending]
        lines.append(f"| {' | '.join(cells)} | {round(outcome.seconds - undisturbed.seconds)} |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Return what the numbers were measured with."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    versions = {name: metadata.version(name) for name in ("halfmoon", "torch", "flwr")}
    return {
        "cpu": model[1].strip() if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(each, 1) for each in os.getloadavg()],
        "python": platform.python_version(),
        **versions,
    }


def format_page(record: dict[str, Any], outcomes: dict[str, FaultOutcome]) -> str:
    """Return the page of results."""
    machine_ = record["machine"]
    undisturbed = [
        f"{each.accuracy:.1%} with {each.method} in {each.seconds:.0f} s after round 1"
        for name, each in outcomes.items()
        if name in UNDISTURBED.values()
    ]
    disturbed = {name: each for name, each in outcomes.items() if name not in UNDISTURBED.values()}
    equal = sum(each.weights == outcomes[UNDISTURBED[each.method]].weights for each in disturbed.values())
    complete = sum(len(set(each.rounds)) == OPTIONS["rounds"] for each in disturbed.values())
    return f"""# Faults in a running federation

A federation finished all its rounds in {complete} of {len(disturbed)} runs with a fault. In {equal} of them the final
weights are bit-identical to those of an undisturbed run. In the rest, a site missed one or more rounds.

    {record["command"]}
{record.get("note", "")}
{table(outcomes)}

Undisturbed: {"; ".join(undisturbed)}.
{machine_["cores"]} cores of an {machine_["cpu"]}, shared with other work (load {machine_["load"][0]}); Python {machine_["python"]},
torch {machine_["torch"]}, Flower {machine_["flwr"]}, halfmoon {machine_["halfmoon"]}. Messages and
seconds are those of this version.

{NOTES}"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Disturb a federation of real processes in every way there is.")
    parser.add_argument(
        "--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME", help=" ".join(FAULTS)
    )
    parser.add_argument("--out", type=Path, default=Path("results/federation_faults"))
    options = parser.parse_args()
    file = options.out.with_suffix(".json.gz")
    written = options.out.with_suffix(".md")
    before = records.read_json(file) or {"faults": {}}
    outcomes = {name: FaultOutcome(**row) for name, row in before["faults"].items() if name in FAULTS}
    command = f"python benchmarks/{Path(__file__).name}"
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="halfmoon-faults-") as folder, interruptible():
        exported = Path(folder, "exported")
        export(*EXPORT, out=exported)
        for name in options.only:
            try:
                outcomes[name] = run_with_fault(name, exported, Path(folder, name))
            except EventTimeout as error:
                failed[name] = str(error).replace(folder, "...")
            sys.stderr.write(f"{name}: {failed.get(name) or outcomes[name]}\n")
            outcomes = {each: outcomes[each] for each in FAULTS if each in outcomes}
            record = {"command": command, "machine": machine()}
            rows = {each: asdict(outcome) for each, outcome in outcomes.items()}
            records.write_text(file, json.dumps({**record, "faults": rows}, indent=1) + "\n")
            written.write_text(format_page(record, outcomes))
    failed |= _unequal(outcomes)
    if failed:
        sys.exit("\n".join(f"{name}: {reason}" for name, reason in failed.items()))


def _unequal(outcomes: dict[str, FaultOutcome]) -> dict[str, str]:
    """Return the runs that should have ended as the undisturbed one and did not."""
    found: dict[str, str] = {}
    for name, outcome in outcomes.items():
        undisturbed = outcomes.get(UNDISTURBED[outcome.method])
        if undisturbed is not None and FAULTS[name].same and outcome.weights != undisturbed.weights:
            found[name] = "the weights are not those of the undisturbed run"
        if FAULTS[name].same and "none" in outcome.memories.values():
            found[name] = "a site has no memory"
        if undisturbed is not None and FAULTS[name].same and outcome.memories != undisturbed.memories:
            found[name] = "the sites do not remember what they do in the undisturbed run"
        equal_runs = [each for each in outcomes.values() if like(each) == like(outcome)]
        if any((each.weights, each.memories) != (outcome.weights, outcome.memories) for each in equal_runs):
            found[name] = "it does not end as another run with the same cohorts"
    return found


if __name__ == "__main__":
    main()

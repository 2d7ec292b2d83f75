"""What a federation survives: real processes on this machine, a fault a run, the weights beside an undisturbed run's.

    python benchmarks/federation_faults.py [--only NAME ...] [--out results/federation_faults]

Three sites with digits and a server play four rounds; in the second one something happens while a site trains. Writes a
table (.md) and all that was measured (.json.gz); with --only the other rows stay as the files have them. Sites that
misbehave are joined by the plain command with `misbehaving/` in PYTHONPATH. Only Linux; a full disk needs root (mount).
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
from disturbed import LATE, SITES, TIMEOUT, VICTIM, Federation, Stuck
from federation_parity import export
from safetensors.numpy import load_file

from halfmoon.federation.transport.processes import SERVER_APP, SUPERLINK, SUPERNODE, WORKER, interruptible
from halfmoon.storage import atomic_io

EXPORT = ("site", "export", "digits", "--sites", "3", "--labels-per-class", "4")
OPTIONS = {"rounds": 4, "steps": 60, "labeled_batch": 8, "unlabeled_batch": 16, "width": 8}


# The faults


def nothing(fed: Federation) -> None:
    """Disturb nobody."""


def killing(who: str, *scripts: str, again: bool = False) -> Callable[[Federation], None]:
    """Kill processes while a site trains; `again`: start the command again."""

    def disturb(fed: Federation) -> None:
        fed.training()
        fed.kill(who, *scripts)
        if again:
            fed.start(who)

    return disturb


def everything(fed: Federation) -> None:
    """Kill all, and start all again."""
    fed.training()
    fed.cut()
    for who in ("serve", *SITES):
        fed.start(who)


def fill(fed: Federation) -> None:
    """Fill the victim's disk until the second round is over."""
    assert fed.home is not None
    filler = fed.home / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 512)
    fed.until(lambda: "round 2 of 4" in fed.log(), "the second round")
    filler.unlink()


@dataclass(frozen=True)
class Fault:
    """One run: what happens, and what the server's log has to say (`sign`); `same`: it ends as the undisturbed one."""

    what: str
    disturb: Callable[[Federation], None] = nothing
    same: bool = True
    sign: str = ""
    spoil: str = ""
    rules: str = ""
    method: str = "fedloke"
    small: bool = False  # the victim's home is a small disk


UNDISTURBED = {"fedloke": "undisturbed", "feddure": "undisturbed-feddure"}
FAULTS: dict[str, Fault] = {
    "undisturbed": Fault("nothing"),
    "kill-serve": Fault(
        "kill -9 of `halfmoon serve`; by hand again", killing("serve", again=True), sign="going on after round"
    ),
    "kill-serverapp": Fault("kill -9 of the ServerApp", killing("serve", SERVER_APP), sign="s program died"),
    "kill-superlink": Fault("kill -9 of the SuperLink", killing("serve", SUPERLINK), sign="the SuperLink died"),
    "kill-join": Fault(
        "kill -9 of a site's `site join`; by hand again", killing(VICTIM, again=True), sign="site-01 is there again"
    ),
    "kill-supernode": Fault("kill -9 of a site's node", killing(VICTIM, SUPERNODE), sign="site-01 is there again"),
    "kill-clientapp": Fault("kill -9 of a site's worker", killing(VICTIM, WORKER), sign="site-01 did not"),
    "power-cut": Fault("kill -9 of all processes at once; by hand again", everything, sign="going on after round"),
    "gone": Fault(
        "kill -9 of a site's `site join`; never again (absence = 15)",
        killing(VICTIM), same=False, rules="absence = 15.0", sign="it was not connected for 15 s",
    ),
    "nan": Fault("a site answers NaN", same=False, spoil="nan", sign="values that are not finite"),
    "nan-again": Fault(
        "the same with min_replies = 3", spoil="nan", rules="min_replies = 3", sign="round 2 is played again, attempt 2"
    ),
    "shape": Fault("a site answers a wrong shape", same=False, spoil="shape", sign="has the shape"),
    "huge": Fault("a site answers weights moved by 10^6", same=False, spoil="huge", sign="times the cohort's median"),
    "version": Fault(
        "a site has another version in one round", same=False, spoil="version", sign="this site has to upgrade to"
    ),
    "stranger": Fault(
        "a site has another version from the start",
        same=False, spoil="stranger", rules="absence = 10.0", sign="a site does not join: this site runs",
    ),
    "late": Fault(
        f"a site sleeps {LATE:.0f} s over its answer, and may take {TIMEOUT:.0f} s",
        same=False, spoil="late", rules=f"round_timeout = {TIMEOUT}", sign="s too late: discarded",
    ),
    "old": Fault("a site answers with round 1's answer", same=False, spoil="old", sign="it answers round 1, trip 1"),
    "twice": Fault("a site sends every answer twice", spoil="twice"),
    "cut": Fault("kill -9 of a site's SuperNode while it sends its answer", spoil="cut", sign="did not answer round 2"),
    "disk-full": Fault("a site's disk is full", fill, same=False, sign="its disk: No space left on device", small=True),
    "undisturbed-feddure": Fault("nothing (FedDure)", method="feddure"),
    "power-cut-feddure": Fault(
        "kill -9 of all processes at once (FedDure); by hand again",
        everything, sign="going on after round", method="feddure",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What came of a run; `weights` and `memories` are digests, `seconds` are those from round 1's end to the run's."""

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


def play(name: str, exported: Path, folder: Path) -> Outcome:
    """Play a federation with a fault; raise Stuck where it does not finish or the log does not say what it should."""
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
        began = time.monotonic()
        fault.disturb(fed)
        fed.until(lambda: "finished: the model is" in fed.log(), "the end")
        seconds = time.monotonic() - began
        fed.until(lambda: fed.running["serve"].poll() == 0, "the server's end")
        if fault.spoil in ("twice", "cut") and not (fed.of(VICTIM) / f"sent-{fault.spoil}").exists():
            raise Stuck("the site did not misbehave")
        return _outcome(fed, fault, seconds)
    finally:
        fed.end()
        if fault.small:
            subprocess.run(["umount", str(folder / "disk")], check=True)


def _write(path: Path, fault: Fault) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("method = ")]
    given = [f"{name} = {json.dumps(value)}" for name, value in {"method": fault.method, **OPTIONS}.items()]
    path.write_text("\n".join([*given, *lines, fault.rules]) + "\n")


def _outcome(fed: Federation, fault: Fault, seconds: float) -> Outcome:
    lines = _said(fed, "serve")
    if not re.search(re.escape(fault.sign), "\n".join(lines)):
        raise Stuck(f"the server's log does not say {fault.sign!r}: {lines}")
    rows = atomic_io.read_rows(fed.run / "metrics.jsonl")
    summary = atomic_io.read_json(fed.run / "summary.json") or {}
    places = {who: fed.of(who).parent / "federations" for who in SITES}
    kept = {who: sorted(path.stem for path in place.rglob("memory-*")) for who, place in places.items()}
    return Outcome(
        what=fault.what,
        method=fault.method,
        log=lines,
        site_log=_said(fed, VICTIM),
        rounds=[row["round"] for row in rows],
        cohorts=[row["cohort"] for row in rows],
        accuracy=summary["accuracy"]["last"],
        weights=_digest(fed.run / "model.safetensors"),
        memories={who: names[-1].rpartition("-")[2] if names else "none" for who, names in kept.items()},
        seconds=round(seconds, 1),
    )


def _said(fed: Federation, who: str) -> list[str]:
    """Return a log's lines without the time of day and without folders of this machine."""
    plain = fed.log(who).replace(str(fed.folder), "...")
    return [line.split("  ", 1)[-1] for line in plain.splitlines()]


def _digest(path: Path) -> str:
    leaves = load_file(path)
    parts = [f"{name} {leaf.dtype} {leaf.shape}".encode() + leaf.tobytes() for name, leaf in sorted(leaves.items())]
    return sha256(b"".join(parts)).hexdigest()


# What is written

NOTES = f"""Three sites with digits (`halfmoon {" ".join(EXPORT)}`), all of
them in every cohort, {OPTIONS["rounds"]} rounds of {OPTIONS["steps"]} steps;
FedLoKe, whose sites keep a model of their own, and FedDure where it is named, whose sites keep a regulator and its
optimizer. What happens, happens in round 2 to {VICTIM} or the server; a kill comes when the site's process has
computed for half of its visit.

- "Equal to the bit": the cohort was the same in every round; the final weights, and the newest memory file of every
  site, are the bytes of the undisturbed run. Otherwise a round or more went on without {VICTIM}, and the accuracy on
  360 test images stands before that of the undisturbed run. All runs that miss it in round 2 alone end with the same
  bytes, whatever the reason was: nothing of a spoiled, late or lost answer is left, at the server or at the site.
- "By hand again": it is the command itself that was killed, and it was given once more. The rest halfmoon does itself.
- Sites that misbehave are joined by `halfmoon site join` with `benchmarks/misbehaving` in PYTHONPATH: Python imports a
  `sitecustomize.py` from there, which spoils what the site's process answers (for "twice": what its SuperNode sends).
- The full disk is a tmpfs of 4 MB with the site's home in it, filled to the last byte until round 2 is over.
- Of an answer that is sent twice the server hears once: Flower keeps the first.
- Flower finds out after a minute that a ClientApp is dead, and after three that a site which has announced an answer
  will not send it; in these three the server's program hears nobody else (`pull_messages` waits), and no time limit
  counts. Both cost time alone. A site that is gone costs `absence` in every round that draws it.
- Seconds lost: from the end of round 1 to the end of the run, beyond those of the undisturbed run. One run each, on a
  machine with other work: +-30 s. A kill costs a visit, and importing Flower and PyTorch where processes start again.
- The log's lines are those that the undisturbed run does not have, whatever their numbers; the .json.gz has all.
"""


def told(outcome: Outcome, calm: Outcome) -> list[str]:
    """Return the lines of the server's log that the undisturbed run does not have, whatever their numbers."""
    usual = {re.sub(r"[\d.]+", "#", line) for line in calm.log}
    return list(dict.fromkeys(line for line in outcome.log if re.sub(r"[\d.]+", "#", line) not in usual))


def like(outcome: Outcome) -> tuple[str, list[list[int]]]:
    """Return what decides how a run ends: runs that are alike in this end alike, to the bit."""
    return outcome.method, outcome.cohorts


def table(outcomes: dict[str, Outcome]) -> str:
    """Return the table of all faults."""
    lines = ["| fault | what the server's log said | rounds | the end | seconds lost |", "|---|---|---|---|---|"]
    for name, outcome in outcomes.items():
        calm = outcomes.get(UNDISTURBED[outcome.method])
        if calm is None or name in UNDISTURBED.values():
            continue
        same = outcome.weights == calm.weights
        memories = "and memories " if outcome.memories == calm.memories else ""
        alike = sum(like(outcome) == like(each) for each in outcomes.values())
        ending = f"accuracy {outcome.accuracy:.1%} ({calm.accuracy:.1%})"
        ending += f", equal to the bit in {alike} runs with these cohorts" if alike > 1 else ""
        if same:
            ending = f"weights {memories}equal to the bit"
        words = " / ".join(told(outcome, calm)).replace("|", "\\|") or "nothing"
        cells = [outcome.what, words, f"{len(set(outcome.rounds))} of {OPTIONS['rounds']}", ending]
        lines.append(f"| {' | '.join(cells)} | {round(outcome.seconds - calm.seconds)} |")
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


def page(facts: dict[str, Any], outcomes: dict[str, Outcome]) -> str:
    """Return the page of results."""
    held = facts["machine"]
    calm = [
        f"{each.accuracy:.1%} with {each.method} in {each.seconds:.0f} s after round 1"
        for name, each in outcomes.items()
        if name in UNDISTURBED.values()
    ]
    return f"""# What a federation survives

    {facts["command"]}

{table(outcomes)}

Undisturbed: {"; ".join(calm)}.
{held["cores"]} cores of an {held["cpu"]}, shared with other work (load {held["load"][0]}); Python {held["python"]},
torch {held["torch"]}, Flower {held["flwr"]}, halfmoon {held["halfmoon"]}.

{NOTES}"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Disturb a federation of real processes in every way there is.")
    parser.add_argument(
        "--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME", help=" ".join(FAULTS)
    )
    parser.add_argument("--out", type=Path, default=Path("results/federation_faults"))
    options = parser.parse_args()
    file, written = options.out.with_suffix(".json.gz"), options.out.with_suffix(".md")
    before = records.read_json(file) or {"faults": {}}
    outcomes = {name: Outcome(**row) for name, row in before["faults"].items() if name in FAULTS}
    command = f"python benchmarks/{Path(__file__).name}"
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="halfmoon-faults-") as folder, interruptible():
        exported = Path(folder, "exported")
        export(*EXPORT, out=exported)
        for name in options.only:
            try:
                outcomes[name] = play(name, exported, Path(folder, name))
            except Stuck as error:
                failed[name] = str(error).replace(folder, "...")
            sys.stderr.write(f"{name}: {failed.get(name) or outcomes[name]}\n")
            outcomes = {each: outcomes[each] for each in FAULTS if each in outcomes}
            facts = {"command": command, "machine": machine()}
            rows = {each: asdict(outcome) for each, outcome in outcomes.items()}
            records.write_text(file, json.dumps({**facts, "faults": rows}, indent=1) + "\n")
            written.write_text(page(facts, outcomes))
    failed |= _unequal(outcomes)
    if failed:
        sys.exit("\n".join(f"{name}: {reason}" for name, reason in failed.items()))


def _unequal(outcomes: dict[str, Outcome]) -> dict[str, str]:
    """Return the runs that should have ended as the undisturbed one and did not."""
    found: dict[str, str] = {}
    for name, outcome in outcomes.items():
        calm = outcomes.get(UNDISTURBED[outcome.method])
        if calm is not None and FAULTS[name].same and outcome.weights != calm.weights:
            found[name] = "the weights are not those of the undisturbed run"
        if FAULTS[name].same and "none" in outcome.memories.values():
            found[name] = "a site remembers nothing"
        if calm is not None and FAULTS[name].same and outcome.memories != calm.memories:
            found[name] = "the sites do not remember what they do in the undisturbed run"
        twins = [each for each in outcomes.values() if like(each) == like(outcome)]
        if any((each.weights, each.memories) != (outcome.weights, outcome.memories) for each in twins):
            found[name] = "it does not end as another run with the same cohorts"
    return found


if __name__ == "__main__":
    main()

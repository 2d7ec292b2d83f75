"""Attack a federation of real processes behind nginx, one attack a run, and compare the weights.

    python benchmarks/federation_attacks.py [--only NAME ...] [--out results/federation_attacks]

Three sites with digits and a server train four rounds, and an attack happens meanwhile. Writes a table (.md) and all
measurements (.json.gz); with --only the other rows remain unchanged. The attacks are those of
`tests/support/attackers.py`, of which `tests/federation/test_attacks.py` runs most at once. Only Linux, with nginx.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "results"))

import attackers  # pyright: ignore[reportMissingImports]
import records
from attackers import (  # pyright: ignore[reportMissingImports]
    ATTACKS,
    EXPORT_COMMAND,
    FEDERATION_OPTIONS,
    MALLORY,
    NGINX,
    RUN_OPTIONS,
    SITES,
    Attack,
    AttackedFederation,
    AttackNotRefused,
)
from federation_faults import machine
from federation_parity import export

from halfmoon.federation.transport.processes import interruptible
from halfmoon.sites.keys import Access, make
from halfmoon.storage import atomic_io

UNDISTURBED = "undisturbed"
RUNS = {UNDISTURBED: Attack("nothing", ()), **ATTACKS}


@dataclass(frozen=True)
class AttackOutcome:
    """The outcome of a run: the messages, each with its log, the rounds, and the digest of the weights."""

    what: str
    said: list[tuple[str, str]]
    read_log: list[str]
    rounds: int
    weights: str
    together: int  # attacks in the run
    seconds: float


def run_attacks(names: list[str], fed: AttackedFederation) -> dict[str, AttackOutcome]:
    """Run a federation with attacks; raise AttackNotRefused if a log lacks the message of a refusal."""
    attacks = {name: RUNS[name] for name in names}
    fed.site_attack = " ".join(attack.site_attack for attack in attacks.values() if attack.site_attack)
    before = set(fed.running)
    start = time.monotonic()
    fed.serve(names[0] if len(names) == 1 else "at-once")
    try:
        for who in SITES:
            if who not in fed.running or fed.running[who].poll() is not None:  # the program of a site ends with a run
                fed.join(who)
        fed.wait_until(lambda: "round 1 of" in fed.read_log("serve.log"), "the first round")
        for attack in attacks.values():
            attack.run(fed)
        said = {
            name: [(where, fed.wait_for_log(where, pattern)) for where, pattern in attack.log_patterns]
            for name, attack in attacks.items()
        }
        fed.hold_last_reply(False)
        fed.wait_until(lambda: fed.running["serve"].poll() == 0, "the end")
    finally:
        for who in set(fed.running) - before - set(SITES):
            fed.stop(who)
        if MALLORY not in Access.open(fed.access).sites:
            make.add_site(fed.access, MALLORY)
    if attackers.list_executed_pickles(fed):
        raise AttackNotRefused("a pickle was executed")
    log = [line.split("  ", 1)[-1].replace(str(fed.folder), "...") for line in fed.read_log("serve.log").splitlines()]
    rounds = len(atomic_io.read_rows(fed.run / "metrics.jsonl"))
    weights = atomic_io.sha256((fed.run / "model.safetensors").read_bytes())
    seconds = round(time.monotonic() - start, 1)
    return {
        name: AttackOutcome(attack.description, said[name], log, rounds, weights, len(names), seconds)
        for name, attack in attacks.items()
    }


WHERE = {"serve.log": "serve.log", "nginx": "nginx's access.log", "caller": "the attacker's terminal"}


def table(outcomes: dict[str, AttackOutcome]) -> str:
    """Format the table of all attacks."""
    lines = ["| attack | refused with (and the log) | rounds | weights |", "|---|---|---|---|"]
    undisturbed = outcomes.get(UNDISTURBED)
    for name, each in outcomes.items():
        if name == UNDISTURBED or undisturbed is None:
            continue
        where, message = each.said[0]
        message = shorten(message, 90, placeholder=" ...").replace("|", "\\|")
        log = WHERE.get(where, "the log of that site")
        same = "equal" if each.weights == undisturbed.weights else "OTHERS"
        lines.append(f"| {each.what} | `{message}` ({log}) | {each.rounds} of {RUN_OPTIONS['rounds']} | {same} |")
    return "\n".join(lines)


RULED = ", ".join(f"{key} = {value}" for key, value in FEDERATION_OPTIONS.items())
NOTES = f"""Three sites with digits (`halfmoon {" ".join(EXPORT_COMMAND)}`) with a key each,
`halfmoon serve --access`, and nginx with the configuration of `halfmoon federation init` in front of it; everything on
one machine, over TLS.
{RUN_OPTIONS["rounds"]} rounds of FedAvg with {RULED}: a round without a usable answer of each site is
played again. An attack begins when round 1 is over; the run ends by itself.

- "Weights": the SHA-256 of `model.safetensors` beside that of the run that nobody attacks, `WEIGHTS`.
- "The log of that site": what `halfmoon site join` shows the attacker, and writes into its join.log (what begins with
  `halfmoon:` it only shows). Whom Flower turns away because of a key does not stand in serve.log; the run's
  flower/superlink.log has a line for each, with the key.
- The site whose answers attack is one of the three, with its key; its program is halfmoon's, spoiled by
  `tests/support/attacking/sitecustomize.py`. It is honest when it is asked again: otherwise the weights could not be
  compared.
- Every pickle would create a file where somebody unpickled it. None was created.
- A table cell has the first words; federation_attacks.json.gz has all of them, and the other places where they stand.
- The last round waits until the attack has been refused (one of the sites holds its answer back).
- TOGETHER
- The sites join anew for each run, with the same folders.
"""


def format_page(record: dict[str, Any], outcomes: dict[str, AttackOutcome]) -> str:
    """Return the page of results."""
    held = record["machine"]
    undisturbed = outcomes.get(UNDISTURBED)
    most = max((each.together for each in outcomes.values()), default=1)
    together = "Each attack had a run of its own." if most == 1 else f"{most} attacks were played at once, in one run."
    return f"""# What attacks on a federation come to

    {record["command"]}

{table(outcomes)}

{held["cores"]} cores of an {held["cpu"]}, shared with other work (load {held["load"][0]}); Python {held["python"]},
torch {held["torch"]}, Flower {held["flwr"]}, halfmoon {held["halfmoon"]}, {record["nginx"]}.

{NOTES.replace("WEIGHTS", undisturbed.weights[:16] if undisturbed else "none").replace("TOGETHER", together)}"""


def groups(names: list[str], together: bool) -> list[list[str]]:
    """Return the runs with their attacks; the attack that removes a key is the last one."""
    if not together:
        return [[name] for name in names]
    attacks = sorted((name for name in names if name != UNDISTURBED), key=lambda name: name == attackers.FINAL_ATTACK)
    return [each for each in ([UNDISTURBED] if UNDISTURBED in names else [], attacks) if each]


def main() -> None:
    parser = argparse.ArgumentParser(description="Attack a federation of real processes.")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME", help=" ".join(RUNS))
    parser.add_argument("--out", type=Path, default=Path("results/federation_attacks"))
    parser.add_argument("--at-once", action="store_true", help="all attacks in one run, after one without attacks")
    options = parser.parse_args()
    file, written = options.out.with_suffix(".json.gz"), options.out.with_suffix(".md")
    before = records.read_json(file) or {"attacks": {}}
    outcomes = {name: AttackOutcome(**row) for name, row in before["attacks"].items() if name in RUNS}
    version = subprocess.run([str(NGINX), "-v"], capture_output=True, text=True, check=True).stderr.strip()
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="halfmoon-attacks-") as folder, interruptible():
        exported = Path(folder, "sites")
        export(*EXPORT_COMMAND, out=exported)
        attackers.write_federation_file(exported)
        fed = AttackedFederation(Path(folder, "fed"), exported)
        try:
            fed.create_keys_and_proxy()
            for names in groups(options.only, options.at_once):
                try:
                    outcomes |= run_attacks(names, fed)
                except AttackNotRefused as error:
                    failed |= dict.fromkeys(names, str(error).replace(folder, "..."))
                sys.stderr.write("".join(f"{name}: {failed.get(name) or outcomes[name]}\n" for name in names))
                outcomes = {each: outcomes[each] for each in RUNS if each in outcomes}
                command = f"python benchmarks/{Path(__file__).name}" + " --at-once" * options.at_once
                record = {"command": command, "machine": machine(), "nginx": version.partition(": ")[2]}
                rows = {each: asdict(outcome) for each, outcome in outcomes.items()}
                records.write_text(file, json.dumps({**record, "attacks": rows}, indent=1) + "\n")
                written.write_text(format_page(record, outcomes))
        finally:
            fed.stop_all()
    undisturbed = outcomes.get(UNDISTURBED)
    other = {
        name: "other weights" for name, each in outcomes.items() if undisturbed and each.weights != undisturbed.weights
    }
    failed = other | failed
    if failed:
        sys.exit("\n".join(f"{name}: {reason}" for name, reason in failed.items()))


if __name__ == "__main__":
    main()

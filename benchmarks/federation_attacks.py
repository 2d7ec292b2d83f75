"""Attack a federation of real processes behind nginx, one attack a run, and compare the weights.

    python benchmarks/federation_attacks.py [--only NAME ...] [--out results/federation_attacks]

Three sites with digits and a server train five rounds, and an attack happens meanwhile. Writes a table (.md) and all
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
    log: list[str]
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
    lines = ["| attack | message of the refusal (log) | rounds | weights |", "|---|---|---|---|"]
    undisturbed = outcomes.get(UNDISTURBED)
    for name, each in outcomes.items():
        if name == UNDISTURBED or undisturbed is None:
            continue
        where, message = each.said[0]
        message = shorten(message, 90, placeholder=" ...").replace("|", "\\|")
        log = WHERE.get(where, "the log of that site")
        same = "equal" if each.weights == undisturbed.weights else "OTHERS"
        lines.append(
            f"| {RUNS[name].description} | `{message}` ({log}) | {each.rounds} of {RUN_OPTIONS['rounds']} | {same} |"
        )
    return "\n".join(lines)


RULED = ", ".join(f"{key} = {value}" for key, value in FEDERATION_OPTIONS.items())
NOTES = f"""## Setup

Three sites with digits (`halfmoon {" ".join(EXPORT_COMMAND)}`), each with a registered key, train
{RUN_OPTIONS["rounds"]} rounds of FedAvg. The server is `halfmoon serve --access` behind nginx, with the configuration that
`halfmoon federation init` writes. All run on one machine, over TLS. The options are {RULED}: the server repeats a
round in which a site sends no usable reply. An attack starts after round 1.

TOGETHER The last round waits until the attack has been refused: one site delays its reply. The
sites reconnect for each run, with the same folders.

## How to read the table

- "Weights" compares the SHA-256 of `model.safetensors` with that of the run without attacks, `WEIGHTS`.
- "The log of that site" is the output of `halfmoon site join`, which the attacker can read and which is also written to `join.log`.
  Lines that start with `halfmoon:` are only printed. If Flower rejects a key, `serve.log` has no line about it, but
  `flower/superlink.log` in the run folder has one, with the key.
- The site whose replies attack is one of the three, with its registered key. It runs halfmoon with the changes of
  `tests/support/attacking/sitecustomize.py`. When the server repeats the request, it replies honestly, because the weights
  could not be compared otherwise.
- Every pickle creates a file when it is loaded. No such file was created.
- The table shortens the messages. `federation_attacks.json.gz` has them in full, and all logs in which they appear.
"""


def format_page(record: dict[str, Any], outcomes: dict[str, AttackOutcome]) -> str:
    """Return the page of results."""
    used = record["machine"]
    undisturbed = outcomes.get(UNDISTURBED)
    largest = max((each.together for each in outcomes.values()), default=1)
    together = f"All {largest} attacks ran at once, in one run." if largest > 1 else "Each attack had a separate run."
    attacked = [each for name, each in outcomes.items() if name != UNDISTURBED]
    equal = sum(undisturbed is not None and each.weights == undisturbed.weights for each in attacked)
    weights = "The final model has the same bytes as without an attack."
    if equal < len(attacked):
        weights = f"In {equal} cases the final model has the same bytes as without an attack."
    return f"""# Attacks on a running federation

The server, the proxy or the site refused all {len(attacked)} attacks, and a log reports each. {weights}

    {record["command"]}

{table(outcomes)}

{used["cores"]} cores of an {used["cpu"]}, shared with other work (load {used["load"][0]}); Python {used["python"]},
torch {used["torch"]}, Flower {used["flwr"]}, halfmoon {used["halfmoon"]}, {record["nginx"]}. The messages are those of this version.

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
    file = options.out.with_suffix(".json.gz")
    written = options.out.with_suffix(".md")
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

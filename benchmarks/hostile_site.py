"""One site of five flips the sign of its update, times four: real processes, the default rule and a mean.

    python benchmarks/hostile_site.py [--rounds 12] [--out results/hostile_site]

Each federation runs once, with digits, ten labels a site and soft labels: without a hostile site, with one, and with one
under a plain mean. Writes .md: the accuracies, and in how many rounds the log names the site. Only Linux.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from disturbed import VICTIM, Federation
from federation_faults import machine
from federation_parity import export, written

from halfmoon.config.validation import DEFAULT_DEFENSES
from halfmoon.federation.transport.processes import interruptible
from halfmoon.storage import atomic_io

SITES = tuple(f"site-{number:02}" for number in range(5))
EXPORT = ("site", "export", "digits", "--sites", "5", "--labels-per-class", "1", "--setting", "iid-dir")
OPTIONS = {"method": "fedavg-soft-labels", "steps": 6}
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "calm": ("no hostile site, default rule", "", {}),
    "hostile": ("a hostile site, default rule", "turned", {}),
    "hostile-mean": ("a hostile site, mean", "turned", {"aggregation": "mean"}),
}
"""Description, misbehavior of the hostile site, and options."""


def run_federation(folder: Path, spoil: str, options: dict[str, Any]) -> tuple[float, int, list[str]]:
    """Return the accuracy in percent, the number of rounds that left the victim out, and other sites that were left out."""
    export(*EXPORT, out=folder / "sites")
    file = written(folder / "sites", options)
    file.write_text(file.read_text() + f"min_replies = {len(SITES)}\n")
    fed = Federation(folder, spoil=spoil, sites=SITES)
    try:
        for who in ("serve", *SITES):
            fed.start(who)
        fed.until(lambda: fed.running["serve"].poll() == 0, "the end")
    finally:
        fed.end()
    log = fed.log()
    others = [site for site in SITES if site != VICTIM and f"{site} was left out" in log]
    accuracy = atomic_io.read_json(fed.run / "summary.json")["accuracy"]["last"]
    return 100 * accuracy, log.count(f"{VICTIM} was left out"), others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path("results/hostile_site"))
    options = parser.parse_args()
    start = time.monotonic()
    lines = [
        "| federation | accuracy (%) | rounds that left the site out | other sites left out |",
        "|---|--:|--:|---|",
    ]
    results: dict[str, str] = {}
    for way in options.only:
        name, spoil, own = WAYS[way]
        with tempfile.TemporaryDirectory(prefix="halfmoon-hostile-") as folder, interruptible():
            accuracy, count, others = run_federation(Path(folder), spoil, {**OPTIONS, **own, "rounds": options.rounds})
        lines.append(f"| {name} | {accuracy:.1f} | {count} of {options.rounds} | {', '.join(others) or 'none'} |")
        results[way] = f"{accuracy:.1f}"
        print(lines[-1], flush=True)
    finding = ", ".join(f"{accuracy} % ({WAYS[way][0]})" for way, accuracy in results.items())
    where = ", ".join(f"{name} {value}" for name, value in machine().items())
    page = f"""# A hostile site among real processes

The default rule of aggregation detects a hostile site of five over real processes. The accuracies are {finding}.

    {" ".join(["python benchmarks/hostile_site.py", *sys.argv[1:]])}

Five sites of `halfmoon site join` with ten labels each, and `halfmoon serve`. The method is soft labels. {VICTIM} flips
the sign of its update and multiplies it by four, in every round. The default rule is `{DEFAULT_DEFENSES[0]}`. Each federation
ran once, so the table shows that the rule works, and not how much it costs. [Attacks](attacks.md) has more seeds.

{chr(10).join(lines)}

{time.monotonic() - start:.0f} s; {where}.
"""
    options.out.with_suffix(".md").write_text(page)


if __name__ == "__main__":
    main()

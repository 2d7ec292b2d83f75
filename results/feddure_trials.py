"""One line of evidence for each of FedDure's options: short runs on digits, compared on validation images.

    python results/feddure_trials.py run --runs RUNS [--seeds 100 101 102]
    python results/feddure_trials.py report

The recipe is that of digits in evidence.py, for 40 rounds; a fifth of the training images is set aside, no test image
is looked at, and seeds and splits are of no reported run. `run` trains and appends a line to feddure_trials.jsonl.gz for each run
that is over, `report` writes the table into feddure_trials.md. Each option is changed alone, against labels of the
received model, centered logits, a bias of 0 and a rate of 5e-5 of F-reg.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import evidence
import records

HERE = Path(__file__).parent
LINES = HERE / "feddure_trials.jsonl.gz"
PAGE = HERE / "feddure_trials.md"
BEGIN = "<!-- table: options -->\n"
ROUNDS = 40
SHARE = 0.2
LATE = 10

TRIALS: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("fixmatch-received", {}),
    ("feddure-received", {}),
    ("feddure-received", {"regulator_bias": -2.0}),
    ("feddure-received", {"regulator_bias": -4.0}),
    ("feddure-received", {"regulator_lr": 5e-4}),
    ("feddure-received", {"regulator_lr": 5e-4, "regulator_bias": -4.0}),
    ("feddure-received", {"regulator_input": "logits"}),
    ("feddure-received", {"judge_prior": True}),
    ("feddure-received", {"reward_baseline": 0.9}),
    ("feddure-received", {"reward_bound": 0.05}),
    ("feddure-received", {"coarse_step": "plain"}),
    ("feddure-received", {"regulator_start": "client"}),
    ("feddure-received", {"labeled_first": 2}),
]


def configured(row: str, options: dict[str, Any], seed: int) -> Any:
    """Return the configuration of a trial."""
    from dataclasses import replace

    base = evidence.configured("digits", row, seed, None)
    return replace(base, rounds=ROUNDS, validation_share=SHARE, options={**base.options, **options})


def train_missing(runs: Path, seeds: list[int]) -> None:
    """Train the missing runs."""
    from halfmoon.runs import runner

    done = [(line["row"], line["options"], line["seed"]) for line in records.read_lines(LINES)]
    for row, options in TRIALS:
        for seed in seeds:
            if (row, options, seed) in done:
                continue
            folder = runs / "-".join([row, str(seed), *(f"{name}={value}" for name, value in options.items())])
            runner.run_in_folder(configured(row, options, seed), folder, tests=False)
            line = {"row": row, "options": options, "seed": seed, **read_figures(folder)}
            records.append_line(LINES, line)
            print(json.dumps(line), flush=True)


def read_figures(folder: Path) -> dict[str, float | None]:
    """Return the last round's accuracy on validation images, and means over the last ten rounds."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    late = rows[-LATE:]
    held = [row["validation"]["accuracy"] for row in rows if "validation" in row]

    def mean(values: list[float]) -> float | None:
        return statistics.fmean(values) if values else None

    seen = {name: mean([row["train"][name] for row in late if name in row["train"]]) for name in ("m", "mean_logit")}
    right = mean([row["pseudo"]["accuracy"] for row in late if row.get("pseudo")])
    return {"held": held[-1], "m_first": rows[0]["train"].get("m"), **seen, "pseudo": right}


def report() -> None:
    """Write the table."""
    found = records.read_lines(LINES)
    floor = {line["seed"]: line["held"] for line in found if line["row"] == "fedavg"}
    base = {line["seed"]: line["held"] for line in found if line["row"] == "feddure-received" and not line["options"]}
    names = ["trial", "accuracy %", "minus labels only", "minus FedDure (seed by seed)", "m, round 1", "m, late"]
    names += ["mean logit, late", "correct pseudo-labels %"]
    head = f"| {' | '.join(names)} |\n|---|{'--:|' * (len(names) - 1)}\n"
    rows = []
    for row, options in TRIALS:
        runs_of_row = sorted((line for line in found if (line["row"], line["options"]) == (row, options)), key=_seed)
        if not runs_of_row:
            continue
        name = evidence.ROWS[row]["title"] if not options else _title(options)
        each = " ".join(f"{100 * (line['held'] - base[line['seed']]):+.1f}" for line in runs_of_row) if options else ""
        over = 100 * statistics.fmean(line["held"] - floor[line["seed"]] for line in runs_of_row)
        cells = [
            name,
            f"{100 * statistics.fmean(line['held'] for line in runs_of_row):.1f}",
            "" if row == "fedavg" else f"{over:+.1f}",
            f"{statistics.fmean(100 * (x['held'] - base[x['seed']]) for x in runs_of_row):+.1f} ({each})"
            if each
            else "",
            _mean(runs_of_row, "m_first", 2),
            _mean(runs_of_row, "m", 2),
            _mean(runs_of_row, "mean_logit", 1),
            _mean(runs_of_row, "pseudo", 1, 100),
        ]
        rows.append("| " + " | ".join(cells) + " |\n")
    PAGE.write_text(evidence.renewed(PAGE.read_text(), BEGIN, f"{head}{''.join(rows)}"))


def _seed(line: dict[str, Any]) -> int:
    return line["seed"]


def _title(options: dict[str, Any]) -> str:
    return ", ".join(f"`{name} = {json.dumps(value)}`" for name, value in options.items())


def _mean(runs_of_row: list[dict[str, Any]], name: str, digits: int, times: float = 1) -> str:
    values = [times * line[name] for line in runs_of_row if line[name] is not None]
    return f"{statistics.fmean(values):.{digits}f}" if values else ""


def main() -> None:
    """Run a subcommand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run_command = commands.add_parser("run")
    run_command.add_argument("--runs", type=Path, required=True)
    run_command.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102])
    commands.add_parser("report")
    given = parser.parse_args()
    if given.command == "report":
        report()
    else:
        train_missing(given.runs, given.seeds)


if __name__ == "__main__":
    main()

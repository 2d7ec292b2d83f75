"""`halfmoon privacy`: compute epsilon of a planned run, or the noise for an epsilon, without training."""

import argparse
from typing import Any

from halfmoon.cli.commands.base import add_command, print_json, print_text
from halfmoon.config.option_types import parse_value
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.core.ranges import POSITIVE

INTEGER_FLAGS = {"clients": "number of clients", "cohort": "number of clients in a round", "rounds": "number of rounds"}
NUMBER_FLAGS = {
    "noise": "dp_noise: standard deviation of the noise on the sum of updates, in units of dp_clip",
    "delta": f"dp_delta: delta at which epsilon is counted (default: {Config.dp_delta})",
    "epsilon": "upper limit of epsilon; the command prints the noise that it needs",
}


def add(commands: Any) -> None:
    """Add the command's parser."""
    about = "compute epsilon of a planned run, or the noise that an epsilon needs"
    parser = add_command(
        commands, "privacy", about, "--clients N --cohort K --rounds T (--noise Z | --epsilon E) ", run
    )
    for names, metavar in ((INTEGER_FLAGS, "N"), (NUMBER_FLAGS, "X")):
        for name, about in names.items():
            parser.add_argument(f"--{name}", metavar=metavar, help=about)


def run(args: argparse.Namespace) -> int:
    """Run `halfmoon privacy`: print the privacy loss of a planned run, or the noise that keeps it within a target.

    The loss is (epsilon, delta) differential privacy. With `--noise` epsilon is computed, with `--epsilon` the noise.
    """
    from halfmoon.aggregation.privacy import accounting

    plan = {name: _number(args, name, int) for name in INTEGER_FLAGS}
    missing = [name for name, value in plan.items() if value is None]
    if missing:
        raise UserError(f"--{missing[0]} is missing: give the {INTEGER_FLAGS[missing[0]]}.")
    clients = int(plan["clients"] or 0)
    cohort = int(plan["cohort"] or 0)
    rounds = int(plan["rounds"] or 0)
    if cohort > clients:
        raise UserError(f"--cohort is {cohort}, but --clients is {clients}: it must be at most {clients}.")
    noise = _number(args, "noise", float)
    target_epsilon = _number(args, "epsilon", float)
    delta = _number(args, "delta", float) or Config.dp_delta
    if delta >= 1:
        raise UserError(f"--delta is {delta:g}: it must be above 0 and below 1.")
    if (noise is None) == (target_epsilon is None):
        raise UserError("give one of --noise and --epsilon: the other one is computed.")
    if noise is None:
        noise = accounting.find_noise(float(target_epsilon or 0), cohort, clients, rounds, delta)
    epsilon = accounting.compute_planned_epsilon(cohort, clients, rounds, noise, delta)
    result = {
        "clients": clients,
        "cohort": cohort,
        "rounds": rounds,
        "noise": noise,
        "delta": delta,
        "epsilon": epsilon,
    }
    if args.json:
        print_json(result)
        return 0
    print_text(
        f"{rounds} rounds with {cohort} of {clients} clients and dp_noise {noise:g}: epsilon {epsilon:.4g} at delta "
        f"{delta:g}, for each client's data as a whole",
    )
    return 0


def _number(args: argparse.Namespace, name: str, kind: type[int] | type[float]) -> float | None:
    """Parse the value of a flag, a number above 0; None if the flag is not given."""
    text = getattr(args, name)
    if text is None:
        return None
    value = parse_value(f"--{name}", kind, text)
    POSITIVE.check(f"--{name}", value)
    return value

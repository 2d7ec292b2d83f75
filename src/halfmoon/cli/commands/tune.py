"""`halfmoon tune`: search options of a run by validation images."""

import argparse

from halfmoon.cli.commands.base import layers, print_json
from halfmoon.config import schema as settings
from halfmoon.core.errors import UserError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Let the command take what a search needs beside the options of a run."""
    about = "an option to search: NAME=LOW..HIGH or NAME=VALUE,VALUE (METHOD.NAME of a method's own); may be repeated"
    parser.add_argument("--knob", metavar="NAME=VALUES", action="append", default=[], help=about)
    parser.add_argument("--trials", metavar="N", type=int, default=20, help="trials in all (default: 20)")
    about = "seeds that each trial is played with (default: 100; leave those that you report out)"
    parser.add_argument("--seeds", metavar="N", type=int, nargs="+", default=[100], help=about)


def tune(args: argparse.Namespace) -> int:
    """Search, and say what came out."""
    from rich.console import Console

    from halfmoon.cli.console import say, show
    from halfmoon.sweeps.tuning import BEST, KNOBS, TABLE, Knob
    from halfmoon.sweeps.tuning import tune as search

    if args.trials < 1 or min(args.seeds) < 0:
        raise UserError("--trials must be at least 1, and --seeds whole numbers from 0.")
    values, flags, file = layers(args)
    knobs = [Knob.parse(words) for words in args.knob or KNOBS]
    config = settings.resolve(values, flags, file)
    folder = config.run_dir or settings.free_folder(config, "tune")
    console = Console(stderr=True)
    trials = search(config, knobs, args.trials, args.seeds, folder, lambda words: say(console, words))
    if args.json:
        rows = [{"trial": each.number, "validation_accuracy": each.accuracy, "values": each.values} for each in trials]
        print_json({"folder": str(folder), "best": str(folder / BEST), "trials": rows})
        return 0
    names = [knob.name for knob in knobs]
    cells = [
        [
            str(each.number),
            "diverged" if each.accuracy is None else f"{100 * each.accuracy:.2f}",
            *(f"{value:.3g}" if isinstance(value := each.values[name], float) else str(value) for name in names),
        ]
        for each in trials[:10]
    ]
    show(Console(), ["trial", "validation %", *names], cells)
    if config.budget != "none" and not (config.reference or config.steps or "steps" in names):
        words = f"Budget: what {config.method} takes by its own rule. compare gives every method the largest budget: "
        say(Console(), words + "to search for a comparison, name the method that takes most with --reference.")
    say(Console(), f"all trials: {folder / TABLE}\nthe best: halfmoon run --config {folder / BEST}")
    return 0

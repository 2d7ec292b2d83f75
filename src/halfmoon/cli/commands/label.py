"""`halfmoon site label`: a page that shows the most useful unlabeled images, and writes labels.csv."""

import argparse
from pathlib import Path
from typing import Any

from halfmoon.cli.commands.base import complain, print_json, progress
from halfmoon.cli.commands.paged import loader, place, served, tell
from halfmoon.cli.commands.serve import whole
from halfmoon.cli.commands.trained import from_outside, on_device
from halfmoon.core.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the action."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="images, and perhaps labels.csv and classes.txt")
    about = "the folder of a finished run, or its model.safetensors: what it is unsure of comes early (default: random)"
    parser.add_argument("--model", metavar="RUN", type=Path, help=about)
    about = "the classes, in their order, where there is no classes.txt yet: it is written"
    parser.add_argument("--classes", metavar="NAME", nargs="+", default=(), help=about)
    about = "also write who answered and when; without NAME the page asks"
    parser.add_argument("--by", metavar="NAME", nargs="?", const="", help=about)
    about = "label as a second reader, into a file of your own, without a look at the labels (see site agreement)"
    parser.add_argument("--reader", metavar="NAME", help=about)
    about = "show no page: print the first N images that it would show"
    parser.add_argument("--list", metavar="N", help=about)
    parser.add_argument("--seed", metavar="N", default="0", help="the seed of the order (default: 0)")
    about = "the values of black and white in images of more than 8 bits (default: the file's own)"
    parser.add_argument("--window", metavar=("LOW", "HIGH"), nargs=2, type=float, help=about)
    from_outside(parser)
    on_device(parser)
    served(parser)


def run(args: argparse.Namespace) -> int:
    """Serve the page until interrupted, then return 130; with --list print the order and return 0."""
    from halfmoon.data.preparation import checked_window
    from halfmoon.pages.label import Options, open_folder
    from halfmoon.pages.label import run as label

    seed = whole("--seed", args.seed, 0, 2**32 - 1)
    count = None if args.list is None else whole("--list", args.list, 1, 10**9)
    port = place(args) if count is None else None
    if args.by is not None and (len(args.by) > 100 or any(ord(letter) < 32 for letter in args.by)):
        raise UserError("--by is no short name of one line.")
    site = open_folder(args.folder, args.classes)
    load = None if args.model is None else loader(args.model, args.device, args.network)
    classes: tuple[str, ...] = ()
    if load is not None and not site.classes:
        model = load()
        classes, load = model.classes, lambda: model
    if count is not None:
        return _list(args, count, seed, site, load)
    if args.model is not None and not args.model.exists():
        raise UserError(f"{args.model}: there is no such file or folder; give the folder of a finished run.")
    try:
        options = Options(args.by, seed, checked_window(args.window), args.reader)
        label(site, load, classes, options, port, not args.no_browser, tell)
    except KeyboardInterrupt:
        if args.debug:
            raise
        return complain("the page is closed.", 130)
    return 0


def _list(args: argparse.Namespace, count: int, seed: int, site: Any, load: Any) -> int:
    from halfmoon.pages.book import Book
    from halfmoon.pages.choice import ranks
    from halfmoon.pages.label import ranked

    guesses, names = None, ()
    if load is not None:
        from halfmoon.pages.guesses import guess

        model = load()
        guesses, names = guess(model, site.folder, site.paths, progress()), model.classes
    rows = ranked(guesses, names, Book(site, site.classes or names), seed)
    rank = ranks(guesses.uncertainty[rows]).tolist() if guesses is not None else []
    rows = rows[:count]
    if not args.json:
        for row in rows:
            tell(site.paths[row])
        return 0
    facts: list[dict[str, Any]] = [{"path": site.paths[row]} for row in rows]
    if guesses is not None:
        for row, fact, place in zip(rows, facts, rank, strict=False):
            known = bool(guesses.known[row])
            fact["predicted"] = names[guesses.predicted[row]] if known else None
            fact["uncertainty"] = float(guesses.uncertainty[row]) if known else None
            fact["uncertainty_rank"] = place or None
    print_json({"folder": str(site.folder), "images": facts})
    return 0

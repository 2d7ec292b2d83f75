"""The commands that serve a page to this machine's browser: `halfmoon site label` and `halfmoon watch`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import (
    add_command,
    exit_on_interrupt,
    image_progress,
    line_writer,
    parse_int,
    print_json,
)
from halfmoon.config import schema as settings
from halfmoon.core.errors import UserError

if TYPE_CHECKING:
    from halfmoon.sites.inference import InferenceModel


def served(parser: argparse.ArgumentParser) -> None:
    about = "the port of the page, which only this machine can open (default: a free one)"
    parser.add_argument("--port", metavar="N", help=about)
    parser.add_argument("--no-browser", action="store_true", help="print the page's address, and open no browser")


def from_outside(parser: argparse.ArgumentParser) -> None:
    about = "the model's network, if it is not halfmoon's own: a model file alone never loads code"
    parser.add_argument("--network", metavar="MODULE:MAKE", help=about)


def on_device(parser: argparse.ArgumentParser) -> None:
    about = "where to compute (default: auto)"
    parser.add_argument("--device", metavar="auto|cpu|cuda", default="auto", help=about)


def place(args: argparse.Namespace) -> int | None:
    """Return the port that was given, None for a free one; raise UserError where no page can be served."""
    from halfmoon.pages.server import require_pages

    port = None if args.port is None else parse_int("--port", args.port, 1, 2**16 - 1)
    if args.json:
        raise UserError(
            "--json goes with --list, which prints: a page is looked at." if "list" in args else "a page has no --json."
        )
    require_pages()
    return port


def loader(path: Path, device: str, network: str | None) -> Callable[[], InferenceModel]:
    """Return what loads a model: slow, so it is done where nobody waits."""
    where = settings.parse_option("device", device)

    def load() -> InferenceModel:
        from halfmoon.runs.factory import device as chosen
        from halfmoon.sites.inference import load_model

        return load_model(path, chosen(settings.Config(device=where)), network)

    return load


def label_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the action."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="images, and perhaps labels.csv and classes.txt")
    about = "the folder of a finished run, or its model.safetensors: what it is unsure of comes early (default: random)"
    parser.add_argument("--model", metavar="RUN", type=Path, help=about)
    about = "the classes, in their order, where there is no classes.txt yet: it is written"
    parser.add_argument("--classes", metavar="NAME", nargs="+", default=(), help=about)
    about = "also write who answered and when; without NAME the page asks"
    parser.add_argument("--by", metavar="NAME", nargs="?", const="", help=about)
    about = "label as a second reader, into a file of your own, without a look at the labels"
    parser.add_argument("--reader", metavar="NAME", help=about)
    about = "show no page: print the first N images that it would show"
    parser.add_argument("--list", metavar="N", help=about)
    parser.add_argument("--seed", metavar="N", default="0", help="the seed of the order (default: 0)")
    about = "the values of black and white in images of more than 8 bits (default: the file's own)"
    parser.add_argument("--window", metavar=("LOW", "HIGH"), nargs=2, type=float, help=about)
    from_outside(parser)
    on_device(parser)
    served(parser)


def run_label(args: argparse.Namespace) -> int:
    """Serve the page until interrupted; with --list print the order."""
    from halfmoon.data.preparation import parse_window
    from halfmoon.pages.label import LabelOptions, open_site_to_label
    from halfmoon.pages.label import serve_label_page as label

    seed = parse_int("--seed", args.seed, 0, 2**32 - 1)
    count = None if args.list is None else parse_int("--list", args.list, 1, 10**9)
    if count is not None and args.reader is not None:
        raise UserError("--list is the first reader's order: leave --reader out, or open the page.")
    port = place(args) if count is None else None
    if args.by is not None and (len(args.by) > 100 or any(ord(letter) < 32 for letter in args.by)):
        raise UserError("--by is no short name of one line.")
    site = open_site_to_label(args.folder, args.classes)
    load = None if args.model is None else loader(args.model, args.device, args.network)
    classes: tuple[str, ...] = ()
    if load is not None and not site.classes:
        model = load()
        classes, load = model.classes, lambda: model
    if count is not None:
        return _list(args, count, seed, site, load)
    if args.model is not None and not args.model.exists():
        raise UserError(f"{args.model}: there is no such file or folder; give the folder of a finished run.")
    options = LabelOptions(args.by, seed, parse_window(args.window), args.reader)
    with exit_on_interrupt("the page is closed."):
        label(site, load, classes, options, port, not args.no_browser, line_writer(False))
    return 0


def _list(args: argparse.Namespace, count: int, seed: int, site: Any, load: Any) -> int:
    from halfmoon.pages.label import order_unlabeled
    from halfmoon.pages.label_order import rank_descending
    from halfmoon.pages.label_store import LabelStore

    guesses, names = None, ()
    if load is not None:
        from halfmoon.pages.background_prediction import predict_images

        model = load()
        guesses, names = predict_images(model, site.folder, site.paths, image_progress()), model.classes
    rows = order_unlabeled(guesses, LabelStore(site, site.classes or names), seed)
    rank = rank_descending(guesses.uncertainty[rows]).tolist() if guesses is not None else []
    rows = rows[:count]
    if not args.json:
        show = line_writer(False)
        for row in rows:
            show(site.paths[row])
        return 0
    facts: list[dict[str, Any]] = [{"path": site.paths[row]} for row in rows]
    if guesses is not None:
        for row, fact, place in zip(rows, facts, rank, strict=False):
            guess_exists = bool(guesses.mask[row])
            fact["predicted"] = names[guesses.predicted[row]] if guess_exists else None
            fact["uncertainty"] = float(guesses.uncertainty[row]) if guess_exists else None
            fact["uncertainty_rank"] = place or None
    print_json({"folder": str(site.folder), "images": facts})
    return 0


def add_watch(commands: Any) -> None:
    """Add the command's parser."""
    about = "follow a run, a comparison, a sweep, a federation or a site's part in the browser"
    parser = add_command(commands, "watch", about, "FOLDER ", _watch)
    about = "the folder of a run, a comparison, a sweep, or a server's run; or a site's folder"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=about)
    served(parser)


def _watch(args: argparse.Namespace) -> int:
    from halfmoon.pages.watch import serve_watch_page as watch

    port = place(args)
    with exit_on_interrupt("the page is closed; what it showed goes on."):
        watch(args.folder, port, not args.no_browser, line_writer(False))
    return 0

"""Commands that serve a page to the browser of this machine: `halfmoon site label` and `halfmoon watch`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import (
    MAX_PORT,
    add_command,
    event_printer,
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


def add_page_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command that serves a page."""
    about = "the port of the page, which only this machine can open (default: a free one)"
    parser.add_argument("--port", metavar="N", help=about)
    parser.add_argument("--no-browser", action="store_true", help="print the page's address, and open no browser")


def add_network_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--network`, the code of a model whose network is not part of halfmoon."""
    about = "the model's network, if it is not part of halfmoon: a model file never loads code by itself"
    parser.add_argument("--network", metavar="MODULE:MAKE", help=about)


def check_network_flag(network: str | None) -> None:
    """Raise UserError if the value of `--network` is not MODULE:MAKE."""
    if network is not None and not all(network.partition(":")):
        raise UserError(f"--network is {network!r}: it must be MODULE:MAKE, or be left out for a network of halfmoon.")


def add_device_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--device`."""
    about = "where to compute (default: auto)"
    parser.add_argument("--device", metavar="auto|cpu|cuda", default="auto", help=about)


def parse_page_port(args: argparse.Namespace) -> int | None:
    """Return the port of the page, or None for a free one.

    Raises:
        UserError: the port is not valid, `--json` is given, or the extra for pages is not installed.
    """
    from halfmoon.pages.server import require_pages

    port = None if args.port is None else parse_int("--port", args.port, 1, MAX_PORT)
    if args.json:
        raise UserError("--json needs --list: a page prints nothing." if "list" in args else "a page has no --json.")
    require_pages()
    return port


def model_loader(path: Path, device: str, network: str | None) -> Callable[[], InferenceModel]:
    """Check the options of a model, and return a function that loads it.

    Loading is slow, so the pages for labeling and reviewing call the function in the background.
    """
    device_option = settings.parse_option("device", device)
    check_network_flag(network)

    def load() -> InferenceModel:
        from halfmoon.runs.factory import select_device
        from halfmoon.sites.inference import load_model

        torch_device = select_device(settings.Config(device=device_option))
        return load_model(path, torch_device, network)

    return load


def add_label_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `halfmoon site label`."""
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="images, optionally with labels.csv and classes.txt"
    )
    about = "the folder of a finished run, or its model.safetensors: images with uncertain predictions come first (default: random)"
    parser.add_argument("--model", metavar="RUN", type=Path, help=about)
    about = "the classes in their order, to write to classes.txt if the folder has none"
    parser.add_argument("--classes", metavar="NAME", nargs="+", default=(), help=about)
    about = "also record who labeled each image and when; without NAME the page asks for it"
    parser.add_argument("--by", metavar="NAME", nargs="?", const="", help=about)
    about = "label as a second reader, into a separate file, without seeing the existing labels"
    parser.add_argument("--reader", metavar="NAME", help=about)
    about = "print the first N images that the page would show, instead of serving it"
    parser.add_argument("--list", metavar="N", help=about)
    parser.add_argument("--seed", metavar="N", default="0", help="the seed of the order (default: 0)")
    about = "the values of black and white in images of more than 8 bits (default: those of the file)"
    parser.add_argument("--window", metavar=("LOW", "HIGH"), nargs=2, type=float, help=about)
    add_network_flag(parser)
    add_device_flag(parser)
    add_page_flags(parser)


def run_label(args: argparse.Namespace) -> int:
    """Run `halfmoon site label`: serve a page for labeling a folder's images in the browser, until interrupted.

    With `--model` the images whose predictions are uncertain come first. With `--list N` the first N images are printed
    instead of serving the page.
    """
    from halfmoon.data.preparation import Preparation, parse_window
    from halfmoon.data.readers.decode import refuse_unused_options
    from halfmoon.pages.label import LabelOptions, open_site_to_label, serve_label_page

    seed = parse_int("--seed", args.seed, 0, 2**32 - 1)
    count = None if args.list is None else parse_int("--list", args.list, 1, 10**9)
    if count is not None and args.reader is not None:
        raise UserError(
            "{list} prints the first reader's order: leave {reader} out, or open the page.", option=("list", "reader")
        )
    _refuse_model_flags(args)
    port = parse_page_port(args) if count is None else None
    if args.by is not None and (len(args.by) > 100 or any(ord(letter) < 32 for letter in args.by)):
        raise UserError("{by} must be one line of at most 100 characters.", option="by")
    site = open_site_to_label(args.folder, args.classes)
    load = None if args.model is None else model_loader(args.model, args.device, args.network)
    classes: tuple[str, ...] = ()
    if load is not None and not site.classes:
        # The page needs the names of the classes at once, so the model is loaded now instead of in the background.
        model = load()
        classes = model.classes
        load = lambda: model  # noqa: E731
    if count is not None:
        return _print_order(args, count, seed, site, load)
    # The page may load the model later, in the background, so a missing one is reported now.
    if args.model is not None and not args.model.exists():
        raise UserError(f"{args.model}: there is no such file or folder; give the folder of a finished run.")
    window = parse_window(args.window)
    refuse_unused_options((site.folder / path for path in site.paths), Preparation(window=window), args.folder)
    options = LabelOptions(args.by, seed, window, args.reader)
    with exit_on_interrupt("the page is closed."):
        serve_label_page(site, load, classes, options, port, not args.no_browser, event_printer(False))
    return 0


def _refuse_model_flags(args: argparse.Namespace) -> None:
    """Raise UserError for flags of a model without `--model`."""
    flags = {"network": args.network is not None, "device": args.device != "auto"}
    for name, is_given in flags.items():
        if is_given and args.model is None:
            raise UserError(
                f"{{{name}}} needs {{model=RUN}}: without a model nothing is computed.", option=(name, "model")
            )


def _print_order(args: argparse.Namespace, count: int, seed: int, site: Any, load: Any) -> int:
    """Print the paths of the first images in the order in which the page would show them for labeling.

    Args:
        args: the parsed command line.
        count: the number of images.
        seed: the seed of the order of images without a prediction.
        site: the folder of images, with the labels that it has.
        load: loads the model whose uncertain predictions come first; None for a random order. JSON then has each image's
            predicted class, its uncertainty, and its rank by it, from 1; null where the image has no prediction.
    """
    from halfmoon.pages.label import order_unlabeled
    from halfmoon.pages.label_order import rank_descending
    from halfmoon.pages.label_store import LabelStore

    predictions = None
    names: tuple[str, ...] = ()
    if load is not None:
        from halfmoon.pages.background_prediction import predict_images

        model = load()
        predictions = predict_images(model, site.folder, site.paths, image_progress())
        names = model.classes
    rows = order_unlabeled(predictions, LabelStore(site, site.classes or names), seed)
    # Rank 1 is the most uncertain image, and 0 means that an image has no prediction, as it is unreadable.
    ranks = rank_descending(predictions.uncertainty[rows]).tolist() if predictions is not None else []
    rows = rows[:count]
    if not args.json:
        write_line = line_writer(False)
        for row in rows:
            write_line(site.paths[row])
        return 0
    images: list[dict[str, Any]] = [{"path": site.paths[row]} for row in rows]
    if predictions is not None:
        # `ranks` has the ranks of all images, of which the first `count` are printed.
        for row, image, rank in zip(rows, images, ranks, strict=False):
            has_prediction = bool(predictions.mask[row])
            image["predicted"] = names[predictions.predicted[row]] if has_prediction else None
            image["uncertainty"] = float(predictions.uncertainty[row]) if has_prediction else None
            image["uncertainty_rank"] = rank or None
    print_json({"folder": str(site.folder), "images": images})
    return 0


def add_watch(commands: Any) -> None:
    """Add the command's parser."""
    about = "follow a run, a comparison, a sweep, a federation or a site in the browser"
    parser = add_command(commands, "watch", about, "FOLDER ", _watch)
    about = "the folder of a run, a comparison, a sweep, or a server's run; or a site's folder"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=about)
    add_page_flags(parser)


def _watch(args: argparse.Namespace) -> int:
    """Run `watch`: serve a page that follows runs."""
    from halfmoon.pages.watch import serve_watch_page as watch

    port = parse_page_port(args)
    with exit_on_interrupt("the page is closed; the run continues."):
        watch(args.folder, port, not args.no_browser, event_printer(False))
    return 0

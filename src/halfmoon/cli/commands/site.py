"""`halfmoon site`: check and prepare a site's folder of images, join a federation, export data sets as folders."""

from __future__ import annotations

import argparse
import json
import re
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from halfmoon.cli.commands.base import (
    CommandExit,
    add_actions,
    add_command,
    add_option,
    event_printer,
    exit_on_interrupt,
    image_progress,
    parse_int,
    print_json,
    print_table,
    print_text,
    print_warning,
    refuse_windows,
    requested_options,
)
from halfmoon.cli.commands.paged import add_label_flags, run_label
from halfmoon.config import schema as settings
from halfmoon.config.schema import PARTITION_OPTIONS, Config
from halfmoon.core import weight_files
from halfmoon.core.errors import UserError, suggest
from halfmoon.storage.events import EventPrinter
from halfmoon.storage.output_paths import check_output_folder

if TYPE_CHECKING:
    from halfmoon.sites.folders import Survey


EXPORT_OPTIONS = (
    *("data_dir", "cache", "data_share", "unknown_classes", "image_size", "shrink", *settings.IMAGE_OPTIONS),
    *(name for name in PARTITION_OPTIONS if name != "clients"),
    "split",
)
"""Options of a run that `site export` has; its `--sites` sets the number of clients."""

SHOWN_SIZES = 8
"""Image sizes that `site check` lists."""


def add(commands: Any) -> None:
    """Add the command's parser and those of its actions."""
    about = "check, label and prepare a site's folder of images, join a federation, or write a data set as such folders"
    group = add_actions(commands, "site", about)
    about = "check the contents of a site folder, and whether it can take part"
    check = add_command(group, "check", about, "FOLDER ", _check)
    check.add_argument("folder", metavar="FOLDER", type=Path, help="images, labels.csv and optionally classes.txt")
    check.add_argument("--classes", metavar="NAME", nargs="+", default=[], help="the classes of a federation")
    about = "a folder of test images; check that none of them is in the site folder"
    check.add_argument("--test", metavar="FOLDER", type=Path, help=about)

    prepare = add_command(group, "prepare", "decode the images of a site folder once", "FOLDER ", _prepare)
    prepare.add_argument("folder", metavar="FOLDER", type=Path, help="images, labels.csv and optionally classes.txt")
    _add_image_flags(prepare)
    about = "a folder for the decoded images (default: FOLDER/.halfmoon)"
    prepare.add_argument("--out", metavar="DIR", type=Path, help=about)

    about = "label images in the browser, the most useful first"
    add_label_flags(add_command(group, "label", about, "FOLDER ", run_label))

    about = "print the terms that the sites of a federation are asked to accept"
    about_terms = add_command(group, "terms", about, "CONFIG.toml ", _terms)
    about = "the server's file: options of a run, and a table [federation]"
    about_terms.add_argument("config", metavar="CONFIG.toml", type=Path, help=about)

    about = "take part in a federation; no image leaves the folder"
    add_join_flags(add_command(group, "join", about, "--server HOST:PORT --site FOLDER --name NAME ", _join))

    about = "write a data set as the folders of several sites, split as a run splits it"
    export = add_command(group, "export", about, "DATASET --sites K --out FOLDER ", _export)
    export.add_argument("data", metavar="DATASET", help=settings.option_helps()["data"])
    export.add_argument("--sites", metavar="K", required=True, help="how many site folders")
    about = "the folder for all sites: new, empty, or with an unfinished export of the same sites"
    export.add_argument("--out", metavar="FOLDER", type=Path, required=True, help=about)
    export.add_argument("--config", metavar="FILE", type=Path, help="a TOML file of options; flags override it")
    for name in EXPORT_OPTIONS:
        add_option(export, name)


def _add_image_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how images are decoded."""
    parser.add_argument(
        "--size",
        metavar="HxW",
        help="height and width of all images (default: that of the images, if it is the same for all)",
    )
    parser.add_argument("--channels", metavar="1|3", help="1: gray, 3: RGB (default: 1 if all images are gray)")
    about = "keep the aspect ratio, and crop the image to its center"
    parser.add_argument("--crop", action="store_true", help=about)
    about = "values that are black and white in images of 12 and 16 bits (default: the extremes of each image)"
    parser.add_argument("--window", metavar=("LOW", "HIGH"), nargs=2, type=float, help=about)


def _check(args: argparse.Namespace) -> int:
    """Run `site check`: print what is in a site's folder, and whether it can take part."""
    from halfmoon.sites.folders import check_site

    result = check_site(args.folder, image_progress(), classes=args.classes, tests=args.test)
    if args.json:
        print_json(result.as_json())
    else:
        _print_survey(result)
    return 0 if result.can_take_part else 1


def _print_survey(result: Survey) -> None:
    """Print the contents of a site folder, its faults, and the methods that it can take part in."""
    from rich.console import Console

    from halfmoon.cli.console import wrap_text
    from halfmoon.core.label_locations import LABEL_LOCATIONS

    labeled_share = f" ({result.labeled / result.readable:.1%})" if result.readable else ""
    print_text(
        f"{result.folder}: {result.images:,} images, {result.readable:,} readable, {result.labeled:,} labeled{labeled_share}, "
        f"{len(result.class_counts)} classes",
    )
    if result.labeled:
        rows = [[name, f"{count:,}", f"{count / result.labeled:.1%}"] for name, count in result.class_counts.items()]
        print_table(["class", "labeled", "share"], rows)
    if result.sizes:
        rows = [[f"{height}x{width}", mode, f"{count:,}"] for (height, width, mode), count in result.sizes.items()]
        visible_rows = rows[:SHOWN_SIZES]
        if len(rows) > SHOWN_SIZES:
            images = sum(list(result.sizes.values())[SHOWN_SIZES:])
            visible_rows.append([f"{len(rows) - SHOWN_SIZES} more sizes", "", f"{images:,}"])
        print_text("")
        print_table(["height x width", "mode", "images"], visible_rows)
    for finding in result.findings:
        _print_finding(finding)
    if not result.can_take_part:
        faults = [finding.kind for finding in result.findings if finding.blocks]
        why = f"repair this first: {'; '.join(faults)}" if faults else "no image can be read"
        print_text(f"\nThis folder cannot take part: {why}.")
        return
    print_text("\nThis folder can take part in a federation with labels at")
    for location, methods in result.methods.items():
        print_text(wrap_text(Console(), f"{LABEL_LOCATIONS[location]}: {', '.join(methods)}"))


def _print_finding(finding: Any) -> None:
    """Print a kind of fault, its remedy, and the first images that have it."""
    lines = finding.describe_images()
    print_text(f"\n{finding.kind} ({len(lines):,}): {finding.remedy}")
    for line in _shorten(lines):
        print_text(f"  {line}")


def _shorten(lines: list[str]) -> list[str]:
    """Leave out the end of a long list of lines, and add a line with their number."""
    from halfmoon.sites.folders.site_folder import MAX_LISTED_NAMES

    more = (
        [f"... and {len(lines) - MAX_LISTED_NAMES:,} more (--json lists all)"] if len(lines) > MAX_LISTED_NAMES else []
    )
    return [*lines[:MAX_LISTED_NAMES], *more]


def _prepare(args: argparse.Namespace) -> int:
    """Run `site prepare`: decode a site's images and store them."""
    from halfmoon.data.preparation import Preparation, parse_window
    from halfmoon.data.readers.decode import refuse_unused_options
    from halfmoon.sites.folders import prepare_site, read_site

    size = _parse_size(args.size)
    channels = _parse_channels(args.channels)
    window = parse_window(args.window)
    site = read_site(args.folder)
    # Without a size, images may get that of the last time, so that cropping has an effect.
    preparation = Preparation(size, channels, args.crop and size is not None, window)
    refuse_unused_options((site.folder / path for path in site.paths), preparation, args.folder)
    result = prepare_site(
        args.folder,
        size=size,
        channels=channels,
        out=args.out,
        progress=image_progress(),
        crop=args.crop,
        window=window,
    )
    assert result.site.images is not None
    count, height, width, channels = result.site.images.shape
    if args.json:
        left_out = [{"path": path, "reason": reason} for path, reason in result.left_out.items()]
        print_json(
            {
                "folder": str(args.folder),
                "home": str(result.state_folder),
                "shape": [count, height, width, channels],
                "written": result.written,
                "decoded": result.decoded,
                "left_out": left_out,
            }
        )
        return 0
    labeled = int((result.site.labels >= 0).sum())
    change = f"{result.decoded:,} decoded now" if result.written else "nothing had changed"
    lines = [f"{path}: {reason}" for path, reason in result.left_out.items()]
    print_text(
        f"{result.state_folder}: {count:,} images as {height}x{width} with {channels} channel(s), {labeled:,} labeled; {change}",
    )
    if lines:
        print_text("\n  ".join([f"left out ({len(lines):,}):", *_shorten(lines)]))
    return 0


def _parse_size(text: str | None) -> tuple[int, int] | None:
    """Parse `--size HxW` to height and width in pixels."""
    if text is None:
        return None
    # At most six digits: larger numbers are typing errors, and would use up the memory.
    sides = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    if not sides:
        raise UserError(f"--size is {text!r}: it must be height x width in pixels, such as 32x32.")
    return int(sides[1]), int(sides[2])


def _parse_channels(text: str | None) -> int | None:
    """Parse `--channels`."""
    if text not in (None, "1", "3"):
        raise UserError(f"--channels is {text!r}: it must be 1 (gray) or 3 (RGB).")
    return text and int(text)


def _export(args: argparse.Namespace) -> int:
    """Run `site export`: write a data set as folders of sites."""
    from halfmoon.runs.factory import get_split, load_source_for_network
    from halfmoon.sites.folders import export_sites
    from halfmoon.sites.folders.export import FEDERATION_FILE

    config, sites = _export_config(args)
    check_output_folder(args.out, "out")
    images = load_source_for_network(config)
    split = get_split(config, images)
    if split.clients != sites:
        raise UserError(
            f"--sites is {sites}, but {config.split} is a split among {split.clients} clients: give --sites {split.clients}."
        )
    written = export_sites(config, images, split, args.out, EventPrinter(sys.stderr, prefix="halfmoon: "))
    file = args.out / FEDERATION_FILE
    if args.json:
        print_json({"folder": str(args.out), "federation": str(file), "written": written, "sites": sites})
        return 0
    if not written:
        print_text(f"{args.out} has the same sites already; no file was written.")
    print_text(f"the same split in the simulator: halfmoon run --config {file}", wrap=False)
    return 0


def _export_config(args: argparse.Namespace) -> tuple[Config, int]:
    """Build the configuration of an export, and return it with the number of sites."""
    sites = parse_int("--sites", args.sites, 1)
    flags = requested_options(args, EXPORT_OPTIONS)
    file_options = settings.load_file(args.config) if args.config else {}
    # The cohort does not matter here, but a default of more than all clients would be refused.
    flags |= {"data": args.data, "cohort": 1}
    if "split" not in {**file_options, **flags}:
        flags["clients"] = sites
    config = settings.resolve(
        file_options, settings.resolve_paths(flags, Path()), args.config or "the file", check_catalog=False
    )
    return config, sites


DEVICES = ("auto", "cpu", "cuda")


def add_join_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `halfmoon site join`."""
    required = parser.add_argument_group("required")
    required.add_argument("--server", metavar="HOST:PORT", required=True, help="the address of the federation's server")
    about = "the site folder: images, labels.csv and optionally classes.txt"
    required.add_argument("--site", metavar="FOLDER", type=Path, required=True, help=about)
    required.add_argument("--name", metavar="NAME", required=True, help="the site's name in the federation's file")
    about = "a folder for decoded images and the state between rounds (default: FOLDER/.halfmoon)"
    parser.add_argument("--home", metavar="DIR", type=Path, help=about)
    parser.add_argument("--ca", metavar="FILE", type=Path, help="the authority that signed the server's certificate")
    parser.add_argument("--insecure", action="store_true", help="join a server on another machine without TLS")
    parser.add_argument("--key", metavar="FILE", type=Path, help="the site's private key, if the server requires one")
    about = "the public keys of all sites, for masked sums (default: the first key that each site sends is stored)"
    parser.add_argument("--site-keys", metavar="FILE", type=Path, help=about)
    about = f"where to train: {', '.join(DEVICES)} (default: auto)"
    parser.add_argument("--device", metavar="DEVICE", default=DEVICES[0], help=about)
    about = "a folder of labeled images that models are tested on, and never trained on (default: none)"
    parser.add_argument("--test", metavar="FOLDER", type=Path, help=about)
    about = "a folder of labeled images that select the round of the stored model, and are never trained on"
    parser.add_argument("--validation", metavar="FOLDER", type=Path, help=f"{about} (default: none)")
    about = "let the server publish the accuracy on your --test images next to the mean of all sites"
    parser.add_argument("--share-accuracy", action="store_true", help=about)
    about = "the terms to accept: the hash that halfmoon site terms prints, or at least its first 8 digits; or any"
    parser.add_argument("--terms", metavar="HASH|any", default="", help=f"{about} (default: the command asks)")
    about = "the methods to take part with (default: all)"
    parser.add_argument("--accept", metavar="METHOD", nargs="+", default=(), help=about)
    about = "plugins (my_module:Name) that a federation may make this site load (default: none)"
    parser.add_argument("--trust", metavar="PART", nargs="+", default=(), help=about)
    about = "your copy of the weights that the federation starts from (default: none)"
    parser.add_argument("--weights", metavar="FILE", nargs="+", type=Path, default=(), help=about)
    about = (
        "leave out any number of images that cannot be read; otherwise the site does not join if more than 5 %% cannot"
    )
    parser.add_argument("--skip-unreadable", action="store_true", help=about)
    about = "print all options of the terms before asking, instead of ten lines"
    parser.add_argument("--all", action="store_true", help=about)


def _join(args: argparse.Namespace) -> int:
    """Run `site join`: take part in a federation as a site, until it is finished."""
    from halfmoon.data.readers.class_folders import describe_unsupported_formats
    from halfmoon.federation.site import consent
    from halfmoon.federation.transport.contact import Address
    from halfmoon.federation.transport.processes import interruptible, require_flower
    from halfmoon.federation.transport.site_process import Declined, SiteFinished, SiteOptions, join_federation
    from halfmoon.sites.folders.prepare import STATE_FOLDER
    from halfmoon.sites.folders.site_folder import describe_ignored, read_site

    refuse_windows()
    server = Address.parse(args.server)
    if args.device not in DEVICES:
        raise UserError(f"--device is {args.device!r}: it must be one of {', '.join(DEVICES)}.")
    if args.share_accuracy and args.test is None:
        raise UserError("--share-accuracy needs --test FOLDER: the accuracy is that on its images.")
    if args.all and args.terms:
        raise UserError("--all shows the terms before the command asks, but --terms answers already: leave one out.")
    require_flower()
    _check_methods(args.accept)
    for path in args.weights:
        weight_files.register(path)  # raises now if the file cannot be read
    # All folders are read before the network is used: a site with a fault must not appear to the server.
    result = read_site(args.site)
    formats = describe_unsupported_formats(args.site)
    for note in (*describe_ignored(args.site), *([formats] if formats else [])):
        print_warning(f"{args.site}: {note}.")
    for flag, folder in {"--test": args.test, "--validation": args.validation}.items():
        if folder is not None and not (read_site(folder).labels >= 0).any():
            raise UserError(f"{flag} {folder} has no labeled image: label some in its labels.csv.")
    site = SiteOptions(
        server,
        args.name,
        args.site,
        images=len(result),
        labeled=int((result.labels >= 0).sum()),
        state_folder=args.home or args.site / STATE_FOLDER,
        ca=args.ca,
        insecure=args.insecure,
        key=args.key,
        device=args.device,
        tests=args.test,
        validations=args.validation,
        terms=args.terms.lower(),
        methods=tuple(args.accept),
        trusted=tuple(args.trust),
        weights=tuple(args.weights),
        site_keys=args.site_keys,
        all=args.all,
        skip_unreadable=args.skip_unreadable,
    )
    consent.set_accuracy_sharing(site.state_folder, args.share_accuracy)
    message = f"{args.name} has left; the same command joins again, with its stored state."
    try:
        with exit_on_interrupt(message), interruptible():
            join_federation(site, event_printer(args.json), None if args.json else terminal())
    except SiteFinished as finished:
        # A code other than 0 means that the server refuses the site for good, so retrying is no use.
        if finished.code:
            message = f"{finished} Waiting cannot change this: {args.name} does not join."
            raise CommandExit(message, finished.code) from finished
        if not args.json:
            print_text(str(finished))
        return 0
    except Declined as error:
        raise CommandExit(f"{error} The same command asks again.") from error
    return 0


def _check_methods(names: Sequence[str]) -> None:
    """Raise UserError if `--accept` names an unknown method."""
    if not names:
        return
    from halfmoon.methods import registry  # slow to import: it loads torch

    for name in names:
        if name not in registry.names():
            raise UserError(f"--accept names the unknown method {name!r}: {suggest(name, registry.names())}")


class Terminal:
    """A terminal on which a person answers yes or no.

    Attributes:
        keys: the stream of typed lines.
        screen: the stream to print on.
    """

    def __init__(self, keys: TextIO, screen: TextIO) -> None:
        self.keys = keys
        self.screen = screen

    def ask(self, question: str) -> None:
        self.screen.write(question)
        self.screen.flush()

    def answer(self) -> bool | None:
        """Return True for a typed yes, False for another line or the end of the input, and None without a line."""
        # Poll: the process has to answer the server's messages while the person reads the question.
        if not select.select([self.keys], [], [], 0)[0]:
            return None
        return self.keys.readline().strip().lower() in ("y", "yes")


def terminal() -> Terminal | None:
    """Return the terminal of this process, or None if it has none."""
    keys = sys.stdin
    screen = sys.stdout
    # Without a terminal no person can answer: the terms have to be accepted by a flag.
    return None if keys is None or not (keys.isatty() and screen.isatty()) else Terminal(keys, screen)


def _terms(args: argparse.Namespace) -> int:
    """Run `site terms`: print the terms of a federation's file, as sites see them."""
    from halfmoon.federation.server.plan import load_plan

    terms = load_plan(args.config).terms
    summary = terms.summary()
    if args.json:
        print_json(
            {
                "hash": summary.hash,
                "said": summary.sentence,
                "terms": json.loads(terms.text),
                "brief": summary.brief,
                "tensors": summary.tensors,
            }
        )
        return 0
    print_text(f"{summary.sentence}\n")
    print_table(["option", "value", "meaning"], summary.rows)
    print_text("")
    print_table(["sent", "size", "what it tells about a single image"], summary.tensors)
    print_text(f"\nhash: {summary.hash}")
    return 0

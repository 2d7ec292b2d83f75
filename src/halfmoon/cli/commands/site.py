"""`halfmoon site`: a site's folder of images, the federations that it takes part in, data sets as such folders."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands import join, label, terms
from halfmoon.cli.commands.base import actions, command, option, print_json, progress, requested, say, show
from halfmoon.config import schema as settings
from halfmoon.config.schema import SCENARIO, Config
from halfmoon.core.errors import UserError

if TYPE_CHECKING:
    from halfmoon.sites.folders import Survey

OPTIONS = (
    *("data_dir", "cache", "data_share", "image_size", "shrink", *settings.IMAGES),
    *(name for name in SCENARIO if name != "clients"),
    "split",
)
"""What export takes of a run's options; how many clients there are is said by --sites."""

SHOWN_SIZES = 8


def add(commands: Any) -> None:
    """Add the command's parser and those of its actions."""
    about = "check, label and prepare a site's folder of images, join a federation, or write a data set as such folders"
    group = actions(commands, "site", about)
    about = "say what is in a site folder, and whether it can take part"
    check = command(group, "check", about, "FOLDER ", _check)
    check.add_argument("folder", metavar="FOLDER", type=Path, help="images, labels.csv and perhaps classes.txt")
    check.add_argument("--classes", metavar="NAME", nargs="+", default=[], help="the classes of a federation")
    about = "a folder of test images, none of which may be in this one"
    check.add_argument("--test", metavar="FOLDER", type=Path, help=about)
    about = "write a picture of up to 96 images as a network will see them"
    check.add_argument("--sheet", metavar="FILE.png", type=Path, help=about)
    _forming(check)

    prepare = command(group, "prepare", "decode the images of a site folder once", "FOLDER ", _prepare)
    prepare.add_argument("folder", metavar="FOLDER", type=Path, help="images, labels.csv and perhaps classes.txt")
    _forming(prepare)
    about = "a folder for the decoded images (default: FOLDER/.halfmoon)"
    prepare.add_argument("--out", metavar="DIR", type=Path, help=about)

    about = "label images in the browser, the most useful first"
    label.add(command(group, "label", about, "FOLDER ", label.run))

    about = "compare the readers of a site: where they disagree, and Cohen's kappa"
    agreement = command(group, "agreement", about, "FOLDER ", _agreement)
    agreement.add_argument("folder", metavar="FOLDER", type=Path, help="a folder that two readers have labeled")

    about = "say what the sites of a federation are asked to take part in"
    terms.add(command(group, "terms", about, "CONFIG.toml ", terms.run))

    about = "take part in a federation; no image leaves the folder"
    join.add(command(group, "join", about, "--server HOST:PORT --site FOLDER --name NAME ", join.run))

    about = "write a data set as the folders of several sites, split as a run splits it"
    export = command(group, "export", about, "DATASET --sites K --out FOLDER ", _export)
    export.add_argument("data", metavar="DATASET", help=settings.helps()["data"])
    export.add_argument("--sites", metavar="K", required=True, help="how many site folders")
    about = "the folder for all of them, new or empty, or with an unfinished export of the same sites"
    export.add_argument("--out", metavar="FOLDER", type=Path, required=True, help=about)
    export.add_argument("--config", metavar="FILE", type=Path, help="a TOML file of options; flags override it")
    for name in OPTIONS:
        option(export, name)


def _forming(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", metavar="HxW", help="height and width of all images (default: their own, if one)")
    parser.add_argument("--channels", metavar="1|3", help="1: gray, 3: RGB (default: 1 where all images are gray)")
    about = "keep the sides in proportion, and cut off what is beyond the middle"
    parser.add_argument("--crop", action="store_true", help=about)
    about = "values that are black and white in images of 12 and 16 bits (default: the extremes of each image)"
    parser.add_argument("--window", metavar=("LOW", "HIGH"), nargs=2, type=float, help=about)


# Check


def _check(args: argparse.Namespace) -> int:
    from halfmoon.data.preparation import Preparation, checked_window
    from halfmoon.sites.folders import check, look
    from halfmoon.sites.folders.check import ContactSheet

    how = Preparation(_size(args.size), _channels(args.channels), args.crop, checked_window(args.window))
    sheet = None if args.sheet is None else ContactSheet(len(look(args.folder)[0]), how)
    seen = None if sheet is None else sheet.add
    result = check(args.folder, progress(), classes=args.classes, tests=args.test, seen=seen)
    if sheet is not None and args.sheet is not None:
        count = sheet.write(args.sheet)
        sys.stderr.write(f"halfmoon: {args.sheet} shows {count} images\n")
    if args.json:
        print_json(result.as_json())
    else:
        _show(result)
    return 0 if result.can_take_part else 1


def _show(result: Survey) -> None:
    from halfmoon.api.requirements import PLACES

    share = f" ({result.labeled / result.readable:.1%})" if result.readable else ""
    say(
        f"{result.folder}: {result.images:,} images, {result.readable:,} readable, {result.labeled:,} labeled{share}, "
        f"{len(result.mix)} classes",
    )
    if result.labeled:
        rows = [[name, f"{count:,}", f"{count / result.labeled:.1%}"] for name, count in result.mix.items()]
        show(["class", "labeled", "share"], rows)
    if result.sizes:
        rows = [[f"{h}x{w}", mode, f"{count:,}"] for (h, w, mode), count in result.sizes.items()]
        more = sum(list(result.sizes.values())[SHOWN_SIZES:])
        rest = [[f"{len(rows) - SHOWN_SIZES} others", "", f"{more:,}"]] if more else []
        say("")
        show(["height x width", "mode", "images"], rows[:SHOWN_SIZES] + rest)
    for each in result.findings:
        _show_finding(each)
    if not result.can_take_part:
        faults = [each.kind for each in result.findings if each.blocks]
        why = f"mend this first: {'; '.join(faults)}" if faults else "no image can be read"
        say(f"\nThis folder cannot take part: {why}.")
        return
    say("\nThis folder can take part, where a federation has its labels at")
    for place, methods in result.methods.items():
        say(f"  {PLACES[place]}: {', '.join(methods)}")


def _show_finding(finding: Any) -> None:
    from halfmoon.sites.folders.site_folder import SHOWN

    lines = finding.lines()
    more = [f"... and {len(lines) - SHOWN:,} more (--json lists all)"] if len(lines) > SHOWN else []
    count = f" ({len(lines):,})"
    say(f"\n{finding.kind}{count}: {finding.remedy}")
    for line in [*lines[:SHOWN], *more]:
        say(f"  {line}")


def _agreement(args: argparse.Namespace) -> int:
    from halfmoon.sites.folders.agreement import agreements

    found = agreements(args.folder)
    if not found:
        raise UserError(f"{args.folder}: no image has two readers; label some with --reader NAME (site label).")
    if args.json:
        print_json([vars(each) for each in found])
        return 0
    for each in found:
        one, other = each.readers
        kappa = "no kappa: both gave one class alone" if each.kappa is None else f"kappa {each.kappa:.2f}"
        say(f"{one} and {other}: {each.images:,} images, {each.agreement:.1%} agree, {kappa}")
        for path, *said in each.differing:
            say(f"  {path}: {' / '.join(said)}")
    return 0


# Prepare


def _prepare(args: argparse.Namespace) -> int:
    from halfmoon.data.preparation import checked_window
    from halfmoon.sites.folders import prepare

    how = (args.crop, checked_window(args.window))
    done = prepare(args.folder, _size(args.size), _channels(args.channels), args.out, progress(), *how)
    assert done.site.images is not None
    count, height, width, channels = done.site.images.shape
    if args.json:
        left_out = [{"path": path, "reason": reason} for path, reason in done.left_out.items()]
        facts = {"folder": str(args.folder), "home": str(done.home), "shape": [count, height, width, channels]}
        print_json(facts | {"written": done.fresh, "decoded": done.decoded, "left_out": left_out})
        return 0
    from halfmoon.sites.folders.site_folder import SHOWN

    labeled = int((done.site.labels >= 0).sum())
    what = f"{done.decoded:,} decoded now" if done.fresh else "nothing had changed"
    lines = [f"{path}: {reason}" for path, reason in done.left_out.items()]
    say(
        f"{done.home}: {count:,} images as {height}x{width} with {channels} channel(s), {labeled:,} labeled; {what}",
    )
    if lines:
        more = [f"... and {len(lines) - SHOWN:,} more (--json lists all)"] if len(lines) > SHOWN else []
        say("\n  ".join([f"left out ({len(lines):,}):", *lines[:SHOWN], *more]))
    return 0


def _size(words: str | None) -> tuple[int, int] | None:
    if words is None:
        return None
    sides = re.fullmatch(r"(\d{1,6})x(\d{1,6})", words)
    if not sides:
        raise UserError(f"--size is {words!r}: it must be height x width in pixels, such as 32x32.")
    return int(sides[1]), int(sides[2])


def _channels(words: str | None) -> int | None:
    if words not in (None, "1", "3"):
        raise UserError(f"--channels is {words!r}: it must be 1 (gray) or 3 (RGB).")
    return words and int(words)


# Export


def _export(args: argparse.Namespace) -> int:
    from halfmoon.runs.factory import source, split_of
    from halfmoon.sites.folders import export
    from halfmoon.sites.folders.export import FEDERATION

    config, sites = _config(args)
    images = source(config)
    split = split_of(config, images)
    if split.clients != sites:
        raise UserError(f"--sites is {sites}, but {config.split} is a split among {split.clients} clients; say that.")
    written = export(config, images, split, args.out, _tell)
    file = args.out / FEDERATION
    if args.json:
        print_json({"folder": str(args.out), "federation": str(file), "written": written, "sites": sites})
        return 0
    if not written:
        say(f"{args.out} has these very sites already; nothing was written.")
    say(f"the same split in the simulator: halfmoon run --config {file}")
    return 0


def _tell(words: str) -> None:
    sys.stderr.write(f"halfmoon: {words}\n")


def _config(args: argparse.Namespace) -> tuple[Config, int]:
    """Return the configuration that export's options make, and how many sites there are."""
    if not args.sites.isdecimal() or not int(args.sites):
        raise UserError(f"--sites is {args.sites!r}: it must be a whole number from 1.")
    sites = int(args.sites)
    flags = requested(args, OPTIONS)
    values = settings.load(args.config) if args.config else {}
    # Which clients train in a round is decided later.
    flags |= {"data": args.data, "cohort": 1}
    if "split" not in {**values, **flags}:
        flags["clients"] = sites
    return settings.merge(values, settings.anchored(flags, Path()), args.config or "the file"), sites

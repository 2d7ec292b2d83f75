"""`halfmoon data [NAME ...]`: print the contents of data sets and their distribution over clients."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import add_command, add_options, print_json, print_table, print_text, read_options
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.storage.output_paths import check_output_file

if TYPE_CHECKING:
    from halfmoon.data import Source, Split
    from halfmoon.studies.scan_folder import FolderContents

SPLIT_OPTIONS = (
    *(
        "data_dir",
        "cache",
        *settings.IMAGE_OPTIONS,
        *settings.PIXEL_OPTIONS,
        "flip",
        "shrink",
        "image_size",
        "data_share",
        "unknown_classes",
        "skip_unreadable",
    ),
    *("validation_share", "validation_part", *settings.PARTITION_OPTIONS, "split"),
)
SHOWN_CLIENTS = 20
"""Rows of a table of clients."""

SHOWN_CLASSES = 12
"""Classes up to which a table of clients has a column for each."""


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "data", "show the contents of data sets and splits", "[NAME ...] ", run)
    parser.add_argument("names", nargs="*", metavar="NAME", help="data sets (default: digits)")
    parser.add_argument(
        "--png",
        metavar="FILE",
        type=Path,
        help="write a chart of clients and classes, with a bubble for each number of images",
    )
    parser.add_argument("--save", metavar="FILE", type=Path, help="save the split as parquet")
    add_options(parser, ["data", *SPLIT_OPTIONS], method_options=False)


def run(args: argparse.Namespace) -> int:
    """Run `halfmoon data`: print data sets and splits, and write the files of `--png` and `--save`."""
    file_options, flags, file = read_options(args)
    names = args.names
    if names and "data" in flags:
        raise UserError("data sets are given twice: name them either before the flags or with --data.")
    if len(names) > 1 and (args.png or args.save or "split" in flags):
        flag = "--png" if args.png else "--save" if args.save else "--split"
        raise UserError(f"{flag} needs one data set, but {len(names)} are given.")
    # The cohort does not matter here, but a default of more than all clients would be refused.
    flags["cohort"] = 1
    if names:
        requests = [settings.resolve_paths({**flags, "data": name}, Path()) for name in names]
    else:
        requests = [flags]
    if args.png is not None:
        from halfmoon.report.figures import check_figure_suffix

        check_output_file(args.png, "png")
        check_figure_suffix(args.png)
    if args.save is not None:
        check_output_file(args.save, "save", makes_folder=True)
    descriptions = [_describe_data(args, file_options, request, file) for request in requests]
    if args.json:
        print_json({"data": descriptions})
        return 0
    for description in descriptions:
        print_data(description)
    return 0


def _describe_data(
    args: argparse.Namespace, file_options: Mapping[str, Any], flags: Mapping[str, Any], file: Path | str
) -> dict[str, Any]:
    """Describe a data set and its split among clients, or a site's folder, as fields of the JSON output.

    A site's folder has a labels.csv, which lists the labeled images; it is the data of one client and is not split. Class
    folders are a data set of the user, with a label for each image.

    Args:
        args: the parsed command line, with the files to write.
        file_options: the options of the configuration file.
        flags: the options of the command line, which override them.
        file: the name of the file, for errors.
    """
    contents = _contents({**file_options, **flags})  # None for the name of a data set
    if contents is not None:
        flags = {**_image_options(contents), **flags}
    if contents is not None and contents.site:
        _refuse_split_options({**flags, "png": args.png, "save": args.save}, contents)
        return {"name": contents.folder.name, **_describe_contents(contents)}
    config = settings.resolve(file_options, flags, file, check_catalog=False)
    if config.split is not None and "data" not in {**file_options, **flags}:
        from halfmoon.data import Split

        # A split file names its data set.
        config = replace(config, data=Split.load(config.split).origin.source or config.data)
    # The default number of clients may be too large for a folder; a number or split of the user is kept.
    fit_clients = Path(config.data).is_dir() and not {"clients", "split"} & {*file_options, *flags}
    return {**_describe_split(config, args, fit_clients), **_describe_contents(contents)}


def _refuse_split_options(requested: Mapping[str, Any], contents: FolderContents) -> None:
    """Raise UserError if the user requests a split of a site's folder, whose labels.csv says which images are labeled."""
    for name in ("data_share", "unknown_classes", *settings.PARTITION_OPTIONS, "split", "png", "save"):
        if requested.get(name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')} needs a split, but {contents.folder} is a site's folder, "
                "whose table says which images are labeled: it is not split, so leave the option out."
            )


def _contents(values: Mapping[str, Any]) -> FolderContents | None:
    """Scan the folder that `data` names; None if it is the name of a data set."""
    if not Path(name := values.get("data", Config.data)).is_dir():
        return None
    from halfmoon.studies.scan_folder import scan_folder

    return scan_folder(Path(name), values.get("group_pattern"))


def _image_options(contents: FolderContents) -> dict[str, Any]:
    """Choose the size and channels to which a folder's images are converted for training."""
    from halfmoon.core.hubs import is_installed
    from halfmoon.studies.plan import PRETRAINED, image_options

    return image_options(contents, is_installed(PRETRAINED))


def _describe_contents(contents: FolderContents | None) -> dict[str, Any]:
    """Describe a folder's images and labels as fields of the JSON output; {} for a data set."""
    if contents is None:
        return {}
    label_counts = {name: int((contents.labels == label).sum()) for label, name in enumerate(contents.classes)}
    return {"holds": contents.sentence, "labels": label_counts, "trained_on": _image_options(contents)}


def _fitting_split(config: Config, source: Source) -> Split:
    """Split images over the most clients, up to those of the configuration, for which they suffice.

    Raises:
        UserError: the images suffice for no number of clients; the error is that of the configuration's own number.
    """
    from halfmoon.runs.factory import get_split

    try:
        return get_split(config, source)
    except UserError as error:
        for clients in range(config.clients - 1, 0, -1):
            try:
                return get_split(replace(config, clients=clients), source)
            except UserError:
                continue
        raise error


def _describe_split(config: Config, args: argparse.Namespace, fit_clients: bool) -> dict[str, Any]:
    """Load a data set and its split, write the requested files, and describe both as fields of the JSON output.

    Args:
        config: the configuration.
        args: the command's arguments.
        fit_clients: use fewer clients if the images do not suffice for those of the configuration.
    """
    from halfmoon.data import pad_source, shrink, summarize
    from halfmoon.runs.checks import check_image_options
    from halfmoon.runs.factory import channel_values, get_split, load_images

    check_image_options(config)
    source = shrink(load_images(config), config.shrink)
    source = source if config.image_size is None else pad_source(source, config.image_size)
    split = _fitting_split(config, source) if fit_clients else get_split(config, source)
    description = summarize(split, source.train.labels, source.classes)
    if args.png:
        from halfmoon.report.diagrams import draw_split

        draw_split(description, args.png)
    if args.save:
        split.save(args.save)
    labels = range(len(source.classes))
    return {
        "name": source.name,
        "train": len(source.train),
        "test": len(source.test),
        "shape": list(source.train.images.shape[1:]),
        "classes": list(source.classes),
        "train_classes": [int((source.train.labels == label).sum()) for label in labels],
        "test_classes": [int((source.test.labels == label).sum()) for label in labels],
        "remark": source.selection_note,
        "notes": list(source.notes),
        "pixel_mean": list(channel_values(config, "pixel_mean", source.mean)),
        "pixel_std": list(channel_values(config, "pixel_std", source.std)),
        "flip": source.mirror if config.flip is None else config.flip,
        "scenario": split.origin.scenario,
        "split": description,
        "png": args.png and str(args.png),
        "saved": args.save and str(args.save),
    }


def print_data(description: Mapping[str, Any]) -> None:
    """Print the contents of a data set and its split, from the fields that `halfmoon data --json` prints.

    Args:
        description: the fields. "holds", "labels" and "trained_on" describe a folder of images, and the others a data
            set; "split" has the statistics of `halfmoon.data.summarize`, and is missing for a site's folder.
    """
    if "holds" in description:
        print_text(f"{description['holds']}.")
        size = description["trained_on"].get("resize", "as it is")
        channels = description["trained_on"].get("channels", "as it is")
        print_text(
            f"run --data would train on: size {size}, channels {channels}; see run --data FOLDER --plan for more"
        )
    if "split" not in description:
        print_table(["class", "labels"], [[name, f"{count:,}"] for name, count in description["labels"].items()])
        return
    split = description["split"]
    scenario = description["scenario"]
    height, width, channels = description["shape"]
    print_text(
        f"{description['name']}: {description['train']:,} training and {description['test']:,} test images, {height}x{width}, "
        f"{channels} channel(s), {len(description['classes'])} classes",
    )
    if description["remark"]:
        print_text(f"{description['remark']}.")
    for note in description["notes"]:
        print_text(f"{note}.")
    rows = zip(description["classes"], description["train_classes"], description["test_classes"], strict=True)
    print_table(["class", "train", "test"], [[name, f"{train:,}", f"{test:,}"] for name, train, test in rows])
    mean, std = (", ".join(f"{value:.3g}" for value in description[name]) for name in ("pixel_mean", "pixel_std"))
    mirrored = "images are" if description["flip"] else "no image is"
    print_text(f"normalized by mean {mean} and standard deviation {std} of pixels; {mirrored} mirrored at random")
    print_text(f"\n{_split_line(scenario, split)}")
    if len(split["stages"]) > 1:
        counts = ", ".join(f"{count:,}" for count in split["stages"])
        print_text(f"unlabeled images seen in {len(split['stages'])} stages, one after the other: {counts}")
    # Total variation, 0 to 1: internal, between a client's labeled and unlabeled images; external, between a client's
    # and all clients' images.
    imbalances = {
        "internal imbalance": split["internal"],
        "external imbalance, labeled": split["external"]["labeled"],
        "external imbalance, unlabeled": split["external"]["unlabeled"],
    }
    cells = [
        [name, _share(distance["mean"]), _share(distance["min"]), _share(distance["max"])]
        for name, distance in imbalances.items()
    ]
    print_table(["total variation of class mixes", "mean", "min", "max"], cells)
    print_text("")
    _print_clients(description)
    for name in ("png", "saved"):
        if description[name]:
            print_text(f"{name}: {description[name]}")


def _split_line(scenario: Mapping[str, Any], split: Mapping[str, Any]) -> str:
    """Describe a split in one line: its rule, the clients, and the numbers of images.

    Args:
        scenario: the rule that the split was drawn by, and its parameters; empty for a split of another program.
        split: the statistics of the split, as `halfmoon.data.summarize` returns them: "counts" of images, "server", None
            unless the server has the labels, and "each", the counts of each client.
    """
    counts = split["counts"]
    setting = scenario.get("setting", "custom")
    rule = setting
    # Settings with a Dirichlet distribution, and those that deal out shards of one class each, have a parameter.
    if "dir" in setting or "fedloke" in setting:
        rule += f" (alpha {scenario['dirichlet_alpha']:g})"
    elif "shards" in setting:
        rule += f" ({scenario['classes_per_client']} shards a client)"
    seed = f", seed {scenario['seed']}" if "seed" in scenario else ""
    labeled = f"{counts['labeled']:,} labeled"
    labeled_clients = sum(client["labeled"] > 0 for client in split["each"])
    if split["server"]:
        labeled += " (at the server)"
    elif labeled_clients < counts["clients"]:
        labeled += f" (at {labeled_clients} {'client' if labeled_clients == 1 else 'clients'})"
    unassigned = f"; {counts['nobody']:,} assigned to no client" if counts["nobody"] else ""
    return (
        f"split: {rule}{seed}: {counts['clients']} clients, {labeled} and {counts['unlabeled']:,} unlabeled "
        f"images{unassigned}"
    )


def _print_clients(description: Mapping[str, Any]) -> None:
    """Print a row for the server and each client: its images, imbalance, and labeled+unlabeled images per class.

    The imbalance "internal" is the total variation between the classes of a client's labeled and unlabeled images.

    Args:
        description: the fields of `halfmoon data --json`, of which "split" has the statistics of the split.
    """
    clients = description["split"]["each"]
    server = description["split"]["server"]
    # A table of many classes would be too wide: it has no column for each.
    classes = description["classes"] if len(description["classes"]) <= SHOWN_CLASSES else []
    named_counts = [(str(number), client) for number, client in enumerate(clients[:SHOWN_CLIENTS])]
    if server:  # it has labeled images only
        no_unlabeled = {"unlabeled": 0, "unlabeled_classes": [0] * len(description["classes"])}
        named_counts.insert(0, ("server", {**server, **no_unlabeled}))
    rows = []
    for name, client in named_counts:
        pairs = zip(client["labeled_classes"], client["unlabeled_classes"], strict=True)
        cells = [f"{labeled}+{unlabeled}" for labeled, unlabeled in pairs] if classes else []
        rows.append([name, str(client["labeled"]), str(client["unlabeled"]), _share(client["tv"]), *cells])
    print_table(["client", "labeled", "unlabeled", "internal", *classes], rows)
    if len(clients) > SHOWN_CLIENTS:
        print_text(f"... and {len(clients) - SHOWN_CLIENTS} more clients: --json and --png show them")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

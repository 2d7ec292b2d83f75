"""`halfmoon data [NAME ...]`: the images of data sets, and who holds them under a split."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import add_command, add_options, print_json, print_table, print_text, read_layers
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError

if TYPE_CHECKING:
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
    ),
    *("validation_share", "validation_part", *settings.PARTITION_OPTIONS, "split"),
)
SHOWN_CLIENTS, SHOWN_CLASSES = 20, 12  # rows and columns of a table of clients


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "data", "show what data sets and splits hold", "[NAME ...] ", run)
    parser.add_argument("names", nargs="*", metavar="NAME", help="data sets (default: digits)")
    parser.add_argument("--png", metavar="FILE", type=Path, help="draw clients and classes as bubbles")
    parser.add_argument("--save", metavar="FILE", type=Path, help="save the split as parquet")
    add_options(parser, ["data", *SPLIT_OPTIONS], own=False)


def run(args: argparse.Namespace) -> int:
    """Show data sets and splits, and write the files that are asked for."""
    values, flags, file = read_layers(args)
    names = args.names
    if names and "data" in flags:
        raise UserError("data sets are given twice: name them either before the flags or by --data.")
    if len(names) > 1 and (args.png or args.save or "split" in flags):
        one = "--png" if args.png else "--save" if args.save else "--split"
        raise UserError(f"{one} goes with one data set, not with {len(names)}.")
    # How many clients train in a round is nobody's business here.
    named = [settings.resolve_paths({**flags, "cohort": 1, "data": name}, Path()) for name in names]
    facts_of_sets = []
    for layer in named or [{**flags, "cohort": 1}]:
        contents = _contents({**values, **layer})
        if contents is not None:
            layer = {**_image_options(contents), **layer}
        if contents is not None and contents.site:
            requested = {**layer, "png": args.png, "save": args.save}
            for each in ("data_share", *settings.PARTITION_OPTIONS, "split", "png", "save"):
                if requested.get(each) is not None:
                    raise UserError(
                        f"--{each.replace('_', '-')} needs a split, but {contents.folder} is a site's folder, with "
                        "labels.csv, which stays whole: leave it out."
                    )
            facts_of_sets.append({"name": contents.folder.name, **_holds(contents)})
            continue
        config = settings.merge(values, layer, file)
        if config.split is not None and "data" not in {**values, **layer}:
            from halfmoon.data import Split

            config = replace(config, data=Split.load(config.split).origin.source or config.data)
        facts_of_sets.append({**_facts(config, args), **_holds(contents)})
    if args.json:
        print_json({"data": facts_of_sets})
        return 0

    for facts in facts_of_sets:
        show_data(facts)
    return 0


def _contents(values: Mapping[str, Any]) -> FolderContents | None:
    if not Path(name := values.get("data", Config.data)).is_dir():
        return None
    from halfmoon.studies.scan_folder import scan_folder

    return scan_folder(Path(name), values.get("group_pattern"))


def _image_options(contents: FolderContents) -> dict[str, Any]:
    from halfmoon.core.hubs import is_installed
    from halfmoon.studies.plan import PRETRAINED, image_options

    return image_options(contents, is_installed(PRETRAINED))


def _holds(contents: FolderContents | None) -> dict[str, Any]:
    if contents is None:
        return {}
    rows = [[name, int((contents.labels == k).sum())] for k, name in enumerate(contents.classes)]
    return {"holds": contents.sentence, "labels": dict(rows), "trained_on": _image_options(contents)}


def _facts(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    from halfmoon.data import pad_source, shrink, summarize
    from halfmoon.runs.factory import images, split_of

    source = shrink(images(config), config.shrink)
    source = source if config.image_size is None else pad_source(source, config.image_size)
    split = split_of(config, source)
    facts = summarize(split, source.train.labels, source.classes)
    if args.png:
        from halfmoon.report.diagrams import draw_split

        draw_split(facts, args.png)
    if args.save:
        split.save(args.save)
    numbers = range(len(source.classes))
    return {
        "name": source.name,
        "train": len(source.train),
        "test": len(source.test),
        "shape": list(source.train.images.shape[1:]),
        "classes": list(source.classes),
        "train_classes": [int((source.train.labels == k).sum()) for k in numbers],
        "test_classes": [int((source.test.labels == k).sum()) for k in numbers],
        "remark": source.remark,
        "scenario": split.origin.scenario,
        "split": facts,
        "png": args.png and str(args.png),
        "saved": args.save and str(args.save),
    }


def show_data(facts: Mapping[str, Any]) -> None:
    """Print what a data set and its split hold; `facts` is what `halfmoon data --json` prints of it."""
    if "holds" in facts:
        print_text(f"{facts['holds']}.")
        form = [f"{facts['trained_on'].get(name, 'as it is')}" for name in ("resize", "channels")]
        print_text(
            f"run --data would train on: size {form[0]}, channels {form[1]}; run --data FOLDER --plan says the rest"
        )
    if "split" not in facts:
        print_table(["class", "labels"], [[name, f"{count:,}"] for name, count in facts["labels"].items()])
        return
    split, scenario = facts["split"], facts["scenario"]
    height, width, channels = facts["shape"]
    print_text(
        f"{facts['name']}: {facts['train']:,} training and {facts['test']:,} test images, {height}x{width}, "
        f"{channels} channel(s), {len(facts['classes'])} classes",
    )
    if facts["remark"]:
        print_text(f"{facts['remark']}.")
    rows = zip(facts["classes"], facts["train_classes"], facts["test_classes"], strict=True)
    print_table(["class", "train", "test"], [[name, f"{a:,}", f"{b:,}"] for name, a, b in rows])
    print_text(f"\n{_split_line(scenario, split)}")
    if len(split["stages"]) > 1:
        parts = ", ".join(f"{count:,}" for count in split["stages"])
        print_text(f"unlabeled images seen in {len(split['stages'])} stages, one after the other: {parts}")
    named = {
        "internal imbalance": split["internal"],
        "external imbalance, labeled": split["external"]["labeled"],
        "external imbalance, unlabeled": split["external"]["unlabeled"],
    }
    spans = [[name, *(_share(span[key]) for key in ("mean", "min", "max"))] for name, span in named.items()]
    print_table(["total variation of class mixes", "mean", "min", "max"], spans)
    print_text("")
    _show_clients(facts)
    for name in ("png", "saved"):
        if facts[name]:
            print_text(f"{name}: {facts[name]}")


def _split_line(scenario: Mapping[str, Any], split: Mapping[str, Any]) -> str:
    counts, setting = split["counts"], scenario.get("setting", "of your own")
    rule = setting
    if "dir" in setting or "fedloke" in setting:
        rule += f" (alpha {scenario['dirichlet_alpha']:g})"
    elif "shards" in setting:
        rule += f" ({scenario['classes_per_client']} shards a client)"
    seed = f", seed {scenario['seed']}" if "seed" in scenario else ""
    labeled = f"{counts['labeled']:,} labeled"
    holders = sum(client["labeled"] > 0 for client in split["each"])
    if split["server"]:
        labeled += " (at the server)"
    elif holders < counts["clients"]:
        labeled += f" (at {holders} {'client' if holders == 1 else 'clients'})"
    nobody = f"; {counts['nobody']:,} left to nobody" if counts["nobody"] else ""
    return (
        f"split: {rule}{seed}: {counts['clients']} clients, {labeled} and {counts['unlabeled']:,} unlabeled "
        f"images{nobody}"
    )


def _show_clients(facts: Mapping[str, Any]) -> None:
    """Print a row a client: its images, its imbalance, and labeled+unlabeled images of each class; a server's first."""
    each, server = facts["split"]["each"], facts["split"]["server"]
    classes = facts["classes"] if len(facts["classes"]) <= SHOWN_CLASSES else []
    named = [(str(number), client) for number, client in enumerate(each[:SHOWN_CLIENTS])]
    if server:
        none = {"unlabeled": 0, "unlabeled_classes": [0] * len(facts["classes"])}
        named.insert(0, ("server", {**server, **none}))
    rows = []
    for name, client in named:
        pairs = zip(client["labeled_classes"], client["unlabeled_classes"], strict=True)
        cells = [f"{labeled}+{unlabeled}" for labeled, unlabeled in pairs] if classes else []
        rows.append([name, str(client["labeled"]), str(client["unlabeled"]), _share(client["tv"]), *cells])
    print_table(["client", "labeled", "unlabeled", "internal", *classes], rows)
    if len(each) > SHOWN_CLIENTS:
        print_text(f"... and {len(each) - SHOWN_CLIENTS} more clients: --json and --png show them")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

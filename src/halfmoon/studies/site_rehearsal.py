"""Rehearse a federation with the sites' real folders on one machine, before anybody is asked to join.

The folders become a data set and its natural split: each folder is a client. A third of each site's labeled images of
each class is held out, and all models are tested on all of these. With `validation_share` that share of each site's
other labels of each class chooses the round, and nobody trains on it. The rows answer a manager's questions: each site
alone, all labels together, a federation with the labels alone, with the
images without a label as well, and with fewer labels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from halfmoon.config.schema import Config
from halfmoon.core import hubs
from halfmoon.core.errors import UserError
from halfmoon.data.groups import apart
from halfmoon.data.images import UNKNOWN
from halfmoon.data.partition.primitives import Sides, stream
from halfmoon.data.partition.split import Split
from halfmoon.data.readers.decode import prepared
from halfmoon.data.readers.parquet import png, write
from halfmoon.engine.loop import Row
from halfmoon.methods.analytic import RidgeHead
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback, RunInfo
from halfmoon.runs.factory import preparation
from halfmoon.runs.runner import cell
from halfmoon.sites.folders import SiteFolder, read_site
from halfmoon.studies.decision import FOLDS, JOINING, REPEATS, UNLABELED, Decision, Fold, decide, folds, right, solved
from halfmoon.studies.label_selection import FolderFeatures, folder_features, problem
from halfmoon.studies.plan import PRETRAINED

HELD_OUT = 3
"""One of so many labeled images of each class and site is a test image."""

FEDERATION = "the federation"
"""What decides of all sites together."""

SHARES = (0.25, 0.5)
"""The shares of the labels that the curve is played with, beside all."""


@dataclass(frozen=True)
class ResultRow:
    """One row of the table: what was trained on how many labels, and how often it is right on how many images."""

    name: str
    labels: int
    accuracy: float
    tests: int


@dataclass(frozen=True)
class _Rows:
    """The training rows of all sites."""

    client: np.ndarray  # (N,) int64
    labels: np.ndarray  # (N,) int64, UNKNOWN where there is none
    labeled: np.ndarray  # (N,) bool
    names: tuple[str, ...]  # of the sites
    tests: int  # images that are held out

    def split(self, keep: np.ndarray | None = None, site: int | None = None) -> Split:
        """Return the split with these labels alone (others belong to nobody), or with one site's rows as one client."""
        labeled = self.labeled if keep is None else self.labeled & keep
        client = np.where(self.labeled & ~labeled, -1, self.client)
        if site is None:
            return Split(client, labeled, len(self.names))
        return Split(np.where(client == site, 0, -1), labeled & (client == site), 1)


class _Titled:
    """Tell another callback of a run under the name of its row."""

    def __init__(self, watch: Callback, name: str) -> None:
        self.watch, self.name = watch, name

    def begin(self, run: RunInfo) -> None:
        self.watch.begin(replace(run, title=self.name))

    def round(self, run: RunInfo, row: Row) -> None:
        self.watch.round(replace(run, title=self.name), row)

    def end(self, run: RunInfo, summary: Row) -> None:
        self.watch.end(replace(run, title=self.name), summary)

    def say(self, words: str) -> None:
        self.watch.say(words)


def rehearse(config: Config, folders: Sequence[Path], root: Path, watch: Callback = NULL_CALLBACK) -> list[ResultRow]:
    """Play all rows in the folder `root`, or go on there, and return the table.

    `config.method` is the one with semi-supervision, and `watch` is told of each run under its row's name.
    Raise `UserError` where the folders cannot be read, where their images need a size (--resize) or channels, or where
    too few are labeled.
    """
    rows = _written(config, folders, root / "data", watch.say)
    base = replace(config, data=str(root / "data"), cache=root / "cache", baselines=(), image_size=config.image_size)
    base = replace(base, clients=len(folders), cohort=min(config.cohort, len(folders)), resize=None, channels=None)
    base = replace(base, crop=False, window=None, reference=config.reference or config.method)
    base = replace(base, validation_share=0.0, validation_part=config.validation_share > 0)
    table: list[ResultRow] = []

    def play(name: str, word: str, method: str, split: Split) -> None:
        path = root / "splits" / f"{word}.parquet"
        split.save(path)
        one = replace(base, method=method, split=path, clients=split.clients, cohort=min(base.cohort, split.clients))
        options = one.options if method == config.method else {}
        summary = cell(replace(one, options=options), root / word, _Titled(watch, name))
        right = summary["accuracy"]["chosen" if base.validation_part else "last"]
        table.append(ResultRow(name, int((split.labeled & (split.client >= 0)).sum()), right, rows.tests))

    for number, name in enumerate(rows.names):
        if rows.labeled[rows.client == number].any():
            play(f"{name} alone", f"alone-{number}", "partially-supervised", rows.split(site=number))
    play("all labels in one place", "together", "partially-supervised", rows.split())
    play("federation, labels only", "labels-only", "fedavg", rows.split())
    for share in SHARES:
        part = _share(rows, share)
        play(
            f"federation, {config.method}, {share:.0%} of the labels", f"share-{share}", config.method, rows.split(part)
        )
    play(f"federation, {config.method}, all labels", "all-labels", config.method, rows.split())
    return table


def gains(folders: Sequence[Path], pattern: str | None = None, watch: Callback = NULL_CALLBACK) -> dict[str, Decision]:
    """Return by site whether joining helps it, and of the federation whether unlabeled images do.

    Heads on a pretrained network's features are solved anew on every split of a repeated cross-validation: a federation
    has the same head as all images in one place. Each site is tested on its own images. Return {} where the network's
    package is missing. Raise UserError where none of a folder's images can be read, or only one class has labels.
    """
    if not hubs.installed(PRETRAINED):
        return {}
    sites, own = [read_site(folder) for folder in folders], list[FolderFeatures]()
    classes, labels, client, groups = _classes(sites), list[int](), list[int](), list[str]()
    for number, site in enumerate(sites):
        watch.say(f"features of {len(site):,} images of {site.folder.resolve().name}, kept for the next time")
        mine = folder_features(site.folder, site.paths, lambda *_: None)
        owners = site.image_groups(pattern) or [""] * len(site)
        for row in mine.rows.tolist():
            labels.append(classes.index(site.classes[site.labels[row]]) if site.labels[row] >= 0 else -1)
            groups.append(f"{number} {owners[row]}" if owners[row] else "")
        client += [number] * len(mine.rows)
        own.append(mine)
    values = torch.cat([each.values for each in own])
    head = problem(replace(own[0], values=values, rows=np.arange(len(values))), np.array(labels), classes)
    data, holder, marks = head.data, np.array(client), head.data.labels.numpy()
    pairs: dict[str, list[tuple[float, ...]]] = {}
    for fold in folds(np.where(marks >= 0, marks * len(sites) + holder, -1), groups):
        together, base = (solved(method, head.task, data, fold) for method in (head.method, RidgeHead()))
        both = tuple(right(head.task, model, data, fold.test) for model in (together, base))
        pairs.setdefault(FEDERATION, []).append(both)
        for number, site in enumerate(sites):
            mine = Fold(*(rows[holder[rows] == number] for rows in fold))
            if len(mine.labeled) and len(mine.test):
                alone = solved(head.method, head.task, data, mine)
                both = tuple(right(head.task, model, data, mine.test) for model in (together, alone))
                pairs.setdefault(site.folder.resolve().name, []).append(both)
        watch.say(f"split {len(pairs[FEDERATION])} of {FOLDS * REPEATS}")
    counts = {site.folder.resolve().name: int((site.labels >= 0).sum()) for site in sites}
    counts[FEDERATION] = sum(counts.values())
    decisions: dict[str, Decision] = {}
    for name, each in pairs.items():
        if len(each) > 1:
            ours, base = zip(*each, strict=True)
            words = UNLABELED if name == FEDERATION else JOINING
            decisions[name] = decide(ours, base, 1 / (FOLDS - 1), counts[name], words)
    return decisions


def _share(rows: _Rows, share: float) -> np.ndarray:
    """Return which labels are kept: of every site and class the same share, at least one."""
    keep = np.zeros(len(rows.client), bool)
    for site in range(len(rows.names)):
        for label in np.unique(rows.labels[rows.labeled]):
            of = np.flatnonzero((rows.client == site) & (rows.labels == label) & rows.labeled)
            order = stream(0, "own sites", str(site), str(label)).permutation(of)
            keep[order[: max(1, round(share * len(of)))] if len(of) else []] = True
    return keep


def _written(config: Config, folders: Sequence[Path], place: Path, say: Callable[[str], None]) -> _Rows:
    """Decode the folders' images into train.parquet and test.parquet, and return who holds which rows."""
    if len(folders) < 2 or len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError(
            "--sites needs the folders of two sites or more, each once; one alone is `halfmoon run --data FOLDER`."
        )
    sites = [read_site(folder) for folder in folders]
    classes = _classes(sites)
    how = preparation(config)
    channels = how.channels or 3
    parts: dict[str, list[tuple[bytes, int | None]]] = {"train": [], "test": [], "validation": []}
    client, labeled = list[int](), list[bool]()
    for number, site in enumerate(sites):
        if not (site.labels >= 0).any():
            check = f"`halfmoon site check {site.folder}`"
            say(f"{site.folder.name}: no image has a label; {check} says which folders look like classes.")
        part = _parts(site, config.validation_share, config.group_pattern)
        if (part == "").any():
            count = int((part == "").sum())
            say(f"{site.folder.name}: {count:,} images without a label are left out: their patients are test patients.")
        for row, path in enumerate(site.paths):
            if not part[row]:
                continue
            label = int(site.labels[row])
            named = classes.index(site.classes[label]) if label >= 0 else None
            try:
                data = png(prepared((site.folder / path).read_bytes(), path, replace(how, channels=channels)))
            except (UserError, OSError) as error:
                say(f"{site.folder.name}: left out: {error}")
                continue
            parts[part[row]].append((data, named))
            if part[row] == "train":
                client.append(number)
                labeled.append(label >= 0)
    if not parts["test"] or not any(labeled):
        raise UserError(
            f"too few images have labels: each site needs {HELD_OUT} or more of a class to be tested on one."
        )
    if config.validation_share and not parts["validation"]:
        raise UserError(
            f"validation_share {config.validation_share:g} leaves no validation image; choose a larger one."
        )
    for name, rows in parts.items():
        if rows:
            write(place / f"{name}.parquet", rows, classes)
    labels = np.array([UNKNOWN if label is None else label for _, label in parts["train"]], np.int64)
    names = tuple(site.folder.resolve().name for site in sites)
    return _Rows(np.array(client, np.int64), labels, np.array(labeled, bool), names, len(parts["test"]))


def _classes(sites: Sequence[SiteFolder]) -> tuple[str, ...]:
    """Return the classes of all sites: those of the first with a classes.txt that has them all, else sorted."""
    every = {name for site in sites for name in site.classes}
    return next((site.classes for site in sites if set(site.classes) == every), tuple(sorted(every)))


def _parts(site: SiteFolder, share: float, pattern: str | None = None) -> np.ndarray:
    """Return of which part each image of a site is, the same every time: "test", "validation", "train" or "".

    A patient or group is in one part; unlabeled images of one who is no patient of the training are in none.
    `share` of the labeled images of a class that are not test images are for validation, if one is left to train on.
    """
    part = np.full(len(site), "train", dtype="<U10")
    groups = site.image_groups(pattern) or [""] * len(site)
    tests, validations = Sides(), Sides()
    for label in np.unique(site.labels[site.labels >= 0]):
        of = stream(0, "own sites", "test", str(label)).permutation(np.flatnonzero(site.labels == label))
        test_rows = tests.draw(of, groups, len(of) // HELD_OUT)
        rest = of[~np.isin(of, test_rows)]
        part[test_rows] = "test"
        part[validations.draw(rest, groups, min(round(share * len(rest)), len(rest) - 1))] = "validation"
    bare = np.flatnonzero(site.labels < 0)
    part[np.setdiff1d(bare, apart(bare, np.flatnonzero(part != "train"), groups))] = ""
    return part

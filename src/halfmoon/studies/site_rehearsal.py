"""Rehearse a federation with the sites' image folders on one machine, before any site joins.

The folders become a data set and its natural partition: each folder is a client. A third of each site's labeled images
of each class is held out, and all models are tested on all of these. With `validation_share` that share of each site's
other labels of each class chooses the round and is not trained on. The table has a row for each site by itself, all
labels in one place, a federation with labels only, with unlabeled images as well, and with fewer labels.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from halfmoon.config.schema import Config
from halfmoon.core import hubs
from halfmoon.core.errors import UserError
from halfmoon.data.class_names import find_near_equal, sort_class_names
from halfmoon.data.groups import drop_shared_groups, merge_equal_images
from halfmoon.data.images import UNKNOWN
from halfmoon.data.partition.primitives import GroupHoldout, named_generator
from halfmoon.data.partition.split import Split
from halfmoon.data.readers.decode import decode_prepared, refuse_unused_options
from halfmoon.data.readers.parquet import encode_png, write_parquet
from halfmoon.engine.loop import Row
from halfmoon.methods.analytic import RidgeHead
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback, RunInfo
from halfmoon.runs.factory import image_preparation
from halfmoon.runs.runner import run_in_folder
from halfmoon.sites.folders import SiteFolder, read_site
from halfmoon.storage.events import EventRecorder
from halfmoon.studies.decision import (
    JOINING_VERDICTS,
    UNLABELED_VERDICTS,
    Decision,
    decide,
    model_accuracy,
    solve_head,
    solve_heads,
)
from halfmoon.studies.folds import FOLDS, Fold, cross_validation_folds
from halfmoon.studies.label_selection import FolderFeatures, HeadProblem, folder_features, head_problem
from halfmoon.studies.plan import PRETRAINED

REPEATS = 3
"""Repetitions of the cross-validation of a federation, whose sites are solved one by one."""

TEST_STRIDE = 3
"""One of so many labeled images of each class and site is a test image."""

FEDERATION = "the federation"
"""The name under which the decision about all sites is returned."""

LABEL_SHARES = (0.25, 0.5)
"""Shares of the labels with which the federation is trained as well."""


@dataclass(frozen=True)
class RehearsalRow:
    """One row of the table: a model, the number of labels it was trained on, its accuracy, and the test images."""

    name: str
    labels: int
    accuracy: float
    tests: int


@dataclass(frozen=True)
class _TrainingRows:
    """The training images of all sites.

    Attributes:
        client: the site of each image, int64 (N,).
        labels: int64 (N,), `UNKNOWN` for an unlabeled one.
        labeled: bool (N,).
        names: the sites' names.
        tests: the number of images that are held out.
    """

    client: np.ndarray
    labels: np.ndarray
    labeled: np.ndarray
    names: tuple[str, ...]
    tests: int

    def make_split(self, used_labels: np.ndarray | None = None, site: int | None = None) -> Split:
        """Split the images of all sites among clients: each site is a client, or one site is the only one.

        Args:
            used_labels: bool (N,), the labels to train on; other labeled images are not used, not even as unlabeled
                ones. None for all labels.
            site: the number of the site to train by itself, as client 0; None for all sites.
        """
        labeled = self.labeled if used_labels is None else self.labeled & used_labels
        unused = -1  # the client of an image that is not trained on
        client = np.where(self.labeled & ~labeled, unused, self.client)
        if site is None:
            return Split(client=client, labeled=labeled, clients=len(self.names))
        is_site = client == site
        return Split(client=np.where(is_site, 0, unused), labeled=labeled & is_site, clients=1)


class _RenamedRuns:
    """Forward the events of a run to another callback, under the name of its row, as one of the runs in `group`."""

    def __init__(self, watch: Callback, name: str, group: Path) -> None:
        self.watch = watch
        self.name = name
        self.group = group

    def begin(self, run: RunInfo) -> None:
        """Forward the start of a run."""
        self.watch.begin(replace(run, title=self.name, group=self.group))

    def round(self, run: RunInfo, row: Row) -> None:
        """Forward a round."""
        self.watch.round(replace(run, title=self.name, group=self.group), row)

    def end(self, run: RunInfo, summary: Row) -> None:
        """Forward the end of a run."""
        self.watch.end(replace(run, title=self.name, group=self.group), summary)

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        """Forward an event."""
        self.watch.record(name, text, **fields)


def rehearse(
    config: Config, folders: Sequence[Path], root: Path, watch: Callback = NULL_CALLBACK
) -> list[RehearsalRow]:
    """Train all models of the table in the folder `root`, or resume there.

    Args:
        config: its method is the semi-supervised one.
        folders: the sites' folders.
        root: the folder of the runs.
        watch: receives the progress of each run under its row's name.

    Raises:
        UserError: folders are unreadable, their images need a size (--resize) or channels, or too few are labeled.
    """
    if not root.exists():
        paths = (folder / path for folder in folders for path in read_site(folder).paths)
        refuse_unused_options(paths, image_preparation(config), ", ".join(map(str, folders)))
    rows = _write_data_set(config, folders, root / "data", watch)
    base = replace(
        config,
        data=str(root / "data"),
        cache=root / "cache",
        baselines=(),
        image_size=config.image_size,
        clients=len(folders),
        cohort=min(config.cohort, len(folders)),
        # The images of `root / "data"` are prepared already.
        resize=None,
        channels=None,
        crop=False,
        window=None,
        reference=config.reference or config.method,
        # The validation images are in a separate file there, not drawn from the training images.
        validation_share=0.0,
        validation_part=config.validation_share > 0,
    )
    table: list[RehearsalRow] = []

    def run_row(name: str, folder_name: str, method: str, split: Split) -> None:
        split_path = root / "splits" / f"{folder_name}.parquet"
        split.save(split_path)
        row_config = replace(
            base,
            method=method,
            split=split_path,
            clients=split.clients,
            cohort=min(base.cohort, split.clients),
            options=base.options if method == config.method else {},
        )
        summary = run_in_folder(row_config, root / folder_name, _RenamedRuns(watch, name, root))
        accuracy = summary["accuracy"]["chosen" if base.validation_part else "last"]
        label_count = int((split.labeled & (split.client >= 0)).sum())
        table.append(RehearsalRow(name, label_count, accuracy, rows.tests))

    for number, name in enumerate(rows.names):
        if rows.labeled[rows.client == number].any():
            run_row(f"{name} alone", f"alone-{number}", "partially-supervised", rows.make_split(site=number))
    run_row("all labels in one place", "together", "partially-supervised", rows.make_split())
    run_row("federation, labels only", "labels-only", "fedavg", rows.make_split())
    for share in LABEL_SHARES:
        row_name = f"federation, {config.method}, {share:.0%} of the labels"
        split = rows.make_split(_select_labels(rows, share))
        run_row(row_name, f"share-{share}", config.method, split)
    run_row(f"federation, {config.method}, all labels", "all-labels", config.method, rows.make_split())
    return table


def estimate_gains(
    folders: Sequence[Path], group_pattern: str | None = None, watch: Callback = NULL_CALLBACK
) -> dict[str, Decision]:
    """Estimate each site's gain from joining, and the federation's gain from unlabeled images.

    Heads on a pretrained network's features are solved on every split of a repeated cross-validation: the head of a
    federation equals the head of all images in one place. Each site is tested on its own images.

    Args:
        folders: the sites' folders.
        group_pattern: a regular expression that finds an image's patient or group in its name.
        watch: receives messages about the progress.

    Returns:
        Decisions by the site's name, and under `FEDERATION`; {} if the network's package is not installed.

    Raises:
        UserError: none of a folder's images is readable, or only one class has labels.
    """
    if not hubs.is_installed(PRETRAINED):
        return {}
    sites = [read_site(folder) for folder in folders]
    names = [site.folder.resolve().name for site in sites]
    problem, client, groups = _pool_features(sites, group_pattern, watch)
    labels = problem.data.labels.numpy()
    # Folds are stratified by class and site: each pair of them is a stratum.
    strata = np.where(labels >= 0, labels * len(sites) + client, -1)
    results: dict[str, list[tuple[float, float]]] = {}
    for fold in cross_validation_folds(strata, groups, repeats=REPEATS):
        federation_model, labels_only_model = solve_heads(
            [problem.method, RidgeHead()], problem.task, problem.data, fold
        )
        federation_accuracies = (
            model_accuracy(problem.task, federation_model, problem.data, fold.test),
            model_accuracy(problem.task, labels_only_model, problem.data, fold.test),
        )
        results.setdefault(FEDERATION, []).append(federation_accuracies)
        for number, name in enumerate(names):
            site_fold = Fold(*(rows[client[rows] == number] for rows in fold))
            if len(site_fold.labeled) == 0 or len(site_fold.test) == 0:
                continue
            site_model = solve_head(problem.method, problem.task, problem.data, site_fold)
            site_accuracies = (
                model_accuracy(problem.task, federation_model, problem.data, site_fold.test),
                model_accuracy(problem.task, site_model, problem.data, site_fold.test),
            )
            results.setdefault(name, []).append(site_accuracies)
        number = len(results[FEDERATION])
        watch.record("fold_finished", f"split {number} of {FOLDS * REPEATS}", fold=number, folds=FOLDS * REPEATS)
    label_counts = {name: int((site.labels >= 0).sum()) for name, site in zip(names, sites, strict=True)}
    label_counts[FEDERATION] = sum(label_counts.values())
    decisions: dict[str, Decision] = {}
    for name, accuracies in results.items():
        if len(accuracies) > 1:
            federation_result, baseline = zip(*accuracies, strict=True)
            verdicts = UNLABELED_VERDICTS if name == FEDERATION else JOINING_VERDICTS
            decisions[name] = decide(federation_result, baseline, 1 / (FOLDS - 1), label_counts[name], verdicts)
    return decisions


def _pool_features(
    sites: Sequence[SiteFolder], group_pattern: str | None, watch: Callback
) -> tuple[HeadProblem, np.ndarray, list[str]]:
    """Compute the features of all sites' images.

    Returns:
        The head's problem on all of them, the site of each image, int64 (n,), and its patient or group ("" for none).
    """
    classes = _merge_classes(sites)
    site_features: list[FolderFeatures] = []
    labels: list[int] = []
    client: list[int] = []
    groups: list[str] = []
    hashes: list[bytes] = []
    for number, site in enumerate(sites):
        name = site.folder.resolve().name
        text = f"features of {len(site):,} images of {name}, stored for the next time"
        watch.record("features_started", text, site=name, images=len(site))
        folder = folder_features(site.folder, site.paths, lambda *_: None)
        site_groups = site.image_groups(group_pattern) or [""] * len(site)
        for row in folder.rows.tolist():
            label = int(site.labels[row])
            labels.append(classes.index(site.classes[label]) if label >= 0 else -1)
            # Patients of two sites may have one number: they are different patients.
            groups.append(f"{number} {site_groups[row]}" if site_groups[row] else "")
            content = (site.folder / site.paths[row]).read_bytes()
            hashes.append(hashlib.blake2b(content, digest_size=16).digest())
        client += [number] * len(folder.rows)
        site_features.append(folder)
    values = torch.cat([folder.values for folder in site_features])
    pooled = replace(site_features[0], values=values, rows=np.arange(len(values)))
    # Copies at several sites are one group, so that no head is tested on an image that it was solved for.
    groups = merge_equal_images(groups, hashes) or groups
    return head_problem(pooled, np.array(labels), classes), np.array(client), groups


def _select_labels(rows: _TrainingRows, share: float) -> np.ndarray:
    """Select a share of the labels of each site and class, at least one.

    The rehearsal trains on these only, to show the accuracy of a federation that has fewer labels.

    Args:
        rows: the training images of all sites, N of them.
        share: the share of their labels to keep, 0 to 1.

    Returns:
        Whether the label of an image is kept, bool (N,).
    """
    selected = np.zeros(len(rows.client), bool)
    for site in range(len(rows.names)):
        for label in np.unique(rows.labels[rows.labeled]):
            is_candidate = (rows.client == site) & (rows.labels == label) & rows.labeled
            candidates = np.flatnonzero(is_candidate)
            if len(candidates) == 0:
                continue
            # Every call keeps the same labels. The name of the random stream decides which: it must not change.
            order = named_generator(0, "own sites", str(site), str(label)).permutation(candidates)
            selected[order[: max(1, round(share * len(candidates)))]] = True
    return selected


def _write_data_set(config: Config, folders: Sequence[Path], folder: Path, display: EventRecorder) -> _TrainingRows:
    """Decode the sites' images into train.parquet, test.parquet and, if requested, validation.parquet."""
    if len(folders) < 2 or len({path.resolve() for path in folders}) < len(folders):
        raise UserError(
            "--sites needs the folders of two sites or more, each once; one alone is `halfmoon run --data FOLDER`."
        )
    sites = [read_site(path) for path in folders]
    classes = _merge_classes(sites)
    decoding = image_preparation(config)
    decoding = replace(decoding, channels=decoding.channels or 3)
    decoded: list[_EncodedImage] = []
    for number, site in enumerate(sites):
        if not (site.labels >= 0).any():
            check = f"`halfmoon site check {site.folder}`"
            text = f"{site.folder.name}: no image has a label; {check} lists the folders that look like classes."
            display.record("labels_missing", text, site=site.folder.name)
        subsets = _assign_subsets(site, config.validation_share, config.group_pattern)
        left_out = int((subsets == "").sum())
        if left_out:
            text = (
                f"{site.folder.name}: {left_out:,} images without a label are left out: their patients are test "
                "patients."
            )
            display.record("images_left_out", text, site=site.folder.name, images=left_out)
        for row, path in enumerate(site.paths):
            if not subsets[row]:
                continue
            label = int(site.labels[row])
            class_number = classes.index(site.classes[label]) if label >= 0 else None
            try:
                png = encode_png(decode_prepared((site.folder / path).read_bytes(), path, decoding))
            except (UserError, OSError) as error:
                text = f"{site.folder.name}: left out: {error}"
                display.record("image_left_out", text, site=site.folder.name, image=str(path))
                continue
            decoded.append(_EncodedImage(number, str(subsets[row]), png, class_number))
    names = tuple(site.folder.resolve().name for site in sites)
    used = _leave_out_copies(decoded, names, display)
    encoded: dict[str, list[tuple[bytes, int | None]]] = {"train": [], "test": [], "validation": []}
    for image in used:
        encoded[image.subset].append((image.png, image.label))
    training = [image for image in used if image.subset == "train"]
    client = [image.site for image in training]
    labeled = [image.label is not None for image in training]
    if not encoded["test"] or not any(labeled):
        raise UserError(
            f"too few images have labels: each site needs {TEST_STRIDE} or more of a class to be tested on one."
        )
    if config.validation_share and not encoded["validation"]:
        raise UserError(
            f"validation_share {config.validation_share:g} leaves no validation image; choose a larger one."
        )
    for name, rows in encoded.items():
        if rows:
            write_parquet(folder / f"{name}.parquet", rows, classes)
    labels = np.array([UNKNOWN if label is None else label for _, label in encoded["train"]], np.int64)
    return _TrainingRows(
        client=np.array(client, np.int64),
        labels=labels,
        labeled=np.array(labeled, bool),
        names=names,
        tests=len(encoded["test"]),
    )


class _EncodedImage(NamedTuple):
    """An image of a site; equal pixels have equal PNG files."""

    site: int
    subset: str  # "train", "test" or "validation"
    png: bytes
    label: int | None  # None for an unlabeled image


def _leave_out_copies(
    images: Sequence[_EncodedImage], names: Sequence[str], display: EventRecorder
) -> list[_EncodedImage]:
    """Leave out training and validation images that are copies of test images, and training ones of validation images.

    Args:
        images: the images of all sites.
        names: the names of the sites.
        display: receives an event about copies at several sites, and one for each site with images that are left out.
    """
    sites_by_image: dict[bytes, set[int]] = {}
    for image in images:
        sites_by_image.setdefault(image.png, set()).add(image.site)
    shared_count = sum(len(sites) > 1 for sites in sites_by_image.values())
    if shared_count:
        have = "image is" if shared_count == 1 else "images are"
        text = f"{shared_count:,} {have} at more than one site (equal pixels)."
        display.record("copies_found", text, images=shared_count)
    tests = {image.png for image in images if image.subset == "test"}
    validation = {image.png for image in images if image.subset == "validation"}
    used: list[_EncodedImage] = []
    left_out: Counter[int] = Counter()
    for image in images:
        is_copy_of_test = image.subset != "test" and image.png in tests
        is_copy_of_validation = image.subset == "train" and image.png in validation
        if is_copy_of_test or is_copy_of_validation:
            left_out[image.site] += 1
        else:
            used.append(image)
    for site, count in sorted(left_out.items()):
        copies = "image is" if count == 1 else "images are"
        text = f"{names[site]}: {count:,} {copies} left out: copies of images to test on (equal pixels)."
        display.record("images_left_out", text, site=names[site], images=count)
    return used


def _merge_classes(sites: Sequence[SiteFolder]) -> tuple[str, ...]:
    """List the classes of all sites: in the order of the first site whose classes.txt has them all, or sorted.

    Raises:
        UserError: names of two sites are nearly equal, so that they may mean one class.
    """
    all_classes = {name for site in sites for name in site.classes}
    for site in sites:
        if set(site.classes) == all_classes:
            return site.classes
    for group in find_near_equal(sorted(all_classes)):
        holders = [next(site.folder.name for site in sites if name in site.classes) for name in group]
        names = " and ".join(f"{name!r} in {holder}" for name, holder in zip(group, holders, strict=True))
        raise UserError(
            f"the classes {names} differ only in case, blanks, dashes, underscores or the form of a number: correct "
            "the labels of one site; if both are meant, name all classes in the classes.txt of a site."
        )
    return tuple(sort_class_names(all_classes))


def _assign_subsets(site: SiteFolder, validation_share: float, group_pattern: str | None = None) -> np.ndarray:
    """Assign each image of a site to "test", "validation" or "train", or to "" if it is left out; the same every time.

    Of the labeled images of each class, one of `TEST_STRIDE` is a test image. A patient or group is in one subset: with a
    drawn image all images of its patient move there, of later classes too (`GroupHoldout` remembers them). An unlabeled
    image whose patient is in test or validation is left out.

    Args:
        site: the site's folder.
        validation_share: the share of the other labeled images of each class that is for validation; at least one
            remains to train on.
        group_pattern: a regular expression that finds the patient or group in FOLDER/NAME, or None.
    """
    subsets = np.full(len(site), "train", dtype="<U10")
    groups = site.image_groups(group_pattern) or [""] * len(site)  # "": the image is its own group
    test_side = GroupHoldout()
    validation_side = GroupHoldout()
    for label in np.unique(site.labels[site.labels >= 0]):
        # The name of the random stream decides which images are drawn: it must not change.
        rows = named_generator(0, "own sites", "test", str(label)).permutation(np.flatnonzero(site.labels == label))
        test_rows = test_side.draw(rows, groups, len(rows) // TEST_STRIDE)
        other_rows = rows[~np.isin(rows, test_rows)]
        subsets[test_rows] = "test"
        validation_count = min(round(validation_share * len(other_rows)), len(other_rows) - 1)
        subsets[validation_side.draw(other_rows, groups, validation_count)] = "validation"
    unlabeled = np.flatnonzero(site.labels < 0)
    usable = drop_shared_groups(unlabeled, np.flatnonzero(subsets != "train"), groups)
    subsets[np.setdiff1d(unlabeled, usable)] = ""
    return subsets

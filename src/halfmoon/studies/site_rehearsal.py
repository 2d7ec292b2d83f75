"""Rehearse a federation with the sites' image folders on one machine, before any site joins.

The folders become a data set and its natural partition: each folder is a client. A third of each site's labeled images
of each class is held out, and all models are tested on all of these. With `validation_share` that share of each site's
other labels of each class chooses the round and is not trained on. The table has a row for each site by itself, all
labels in one place, a federation with labels only, with unlabeled images as well, and with fewer labels.
"""

import hashlib
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from halfmoon.config.schema import Config, check_effects, check_methods
from halfmoon.core import hubs
from halfmoon.core.errors import UserError
from halfmoon.data.class_names import find_near_equal, sort_class_names
from halfmoon.data.groups import drop_shared_groups, hash_pixels, merge_equal_images
from halfmoon.data.images import UNKNOWN, SkippedImage
from halfmoon.data.near_duplicates import MIN_SIDE, describe_near_duplicates, find_near_duplicates, join_near_duplicates
from halfmoon.data.partition.primitives import GroupHoldout, named_generator
from halfmoon.data.partition.split import Split
from halfmoon.data.preparation import Preparation
from halfmoon.data.readers.decode import check_skipped, decode_prepared, refuse_unused_options
from halfmoon.data.readers.parquet import encode_png, write_parquet
from halfmoon.engine.loop import Row
from halfmoon.methods.analytic import RidgeHead
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback, RunInfo, feature_progress
from halfmoon.runs.checks import check_jobs
from halfmoon.runs.factory import Problem, build_problem, image_preparation
from halfmoon.runs.jobs import Job
from halfmoon.runs.runner import check_same_run, finished_summary, run_in_folder
from halfmoon.sites.folders import SiteFolder, read_site
from halfmoon.storage import atomic_io
from halfmoon.storage.events import EventRecorder
from halfmoon.storage.folder_writer import advise_for_parent
from halfmoon.storage.output_paths import check_output_folder
from halfmoon.storage.run_folder import RunFolder
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

COMPARED_IMAGES = Preparation((64, 64), channels=3)
"""How images of several sites are decoded to find copies among them."""

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
    existed = root.exists()
    _check_folders(config, folders, root)
    if not existed:
        paths = (folder / path for folder in folders for path in read_site(folder).paths)
        refuse_unused_options(paths, image_preparation(config), ", ".join(map(str, folders)))
    try:
        rows = _write_data_set(config, folders, root / "data", watch)
        planned_rows = _plan_rows(config, rows, root)
        shared = _load_and_check(planned_rows, rows, root, watch)
    except UserError:
        if not existed:
            shutil.rmtree(root, ignore_errors=True)
        raise
    table: list[RehearsalRow] = []
    for row in planned_rows:
        problem = None if shared is None else replace(shared, split=row.split)
        with advise_for_parent(root, resumable=False):
            summary = run_in_folder(row.config, root / row.folder, _RenamedRuns(watch, row.name, root), problem=problem)
        accuracy = summary["accuracy"]["chosen" if row.config.validation_part else "last"]
        label_count = int((row.split.labeled & (row.split.client >= 0)).sum())
        table.append(RehearsalRow(row.name, label_count, accuracy, rows.tests))
    return table


class _PlannedRow(NamedTuple):
    """A run of the table: its name, its folder in that of the rehearsal, its configuration and its split."""

    name: str
    folder: str
    config: Config
    split: Split


def _plan_rows(config: Config, rows: _TrainingRows, root: Path) -> list[_PlannedRow]:
    """Plan the runs of the table, and save their splits.

    Args:
        config: the configuration of the rehearsal.
        rows: the training images of all sites.
        root: the folder of the runs.
    """
    base = replace(
        config,
        data=str(root / "data"),
        cache=root / "cache",
        baselines=(),
        image_size=config.image_size,
        clients=len(rows.names),
        cohort=min(config.cohort, len(rows.names)),
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
    planned: list[_PlannedRow] = []

    def add_row(name: str, folder: str, method: str, split: Split) -> None:
        split_path = root / "splits" / f"{folder}.parquet"
        split.save(split_path)
        row_config = replace(
            base,
            method=method,
            split=split_path,
            clients=split.clients,
            cohort=min(base.cohort, split.clients),
            options=base.options if method == config.method else {},
        )
        planned.append(_PlannedRow(name, folder, row_config, split))

    for number, name in enumerate(rows.names):
        if rows.labeled[rows.client == number].any():
            add_row(f"{name} alone", f"alone-{number}", "partially-supervised", rows.make_split(site=number))
    add_row("all labels in one place", "together", "partially-supervised", rows.make_split())
    add_row("federation, labels only", "labels-only", "fedavg", rows.make_split())
    for share in LABEL_SHARES:
        row_name = f"federation, {config.method}, {share:.0%} of the labels"
        add_row(row_name, f"share-{share}", config.method, rows.make_split(_select_labels(rows, share)))
    add_row(f"federation, {config.method}, all labels", "all-labels", config.method, rows.make_split())
    return planned


def _load_and_check(
    planned_rows: Sequence[_PlannedRow], rows: _TrainingRows, root: Path, watch: Callback
) -> Problem | None:
    """Load the data of all runs, and check that each of them can run, before the first one trains.

    Args:
        planned_rows: the runs.
        rows: the training images of all sites.
        root: the folder of the runs.
        watch: receives the progress of features, and notes about the data.

    Returns:
        The data, with the split of the last run; None if all runs are finished.

    Raises:
        UserError: a run cannot train on its images, or a folder has another run.
    """
    unfinished = [row for row in planned_rows if finished_summary(root / row.folder) is None]
    for row in planned_rows:
        check_same_run(root / row.folder, row.config)
        check_methods(row.config)
        if not RunFolder.exists(root / row.folder):
            check_effects(row.config, row.config.method)
    if not unfinished:
        return None
    last = planned_rows[-1]
    methods = tuple(dict.fromkeys(row.config.method for row in planned_rows))
    shared = build_problem(last.config, last.split, methods=methods, progress=feature_progress(watch))
    for note in shared.source.notes:
        watch.record("data_note", note)
    for row in unfinished:
        is_federation = row.split.clients == len(rows.names)
        # A site's own run has one client, whose images the run of all sites has, too.
        names = rows.names if is_federation else ()
        check_jobs([Job(".", row.config)], replace(shared, split=row.split), NULL_CALLBACK, sites=names)
    return shared


def _check_folders(config: Config, folders: Sequence[Path], root: Path) -> None:
    """Raise UserError unless the folders are those of several sites with different names, and runs fit into `root`.

    Args:
        config: the configuration of the rehearsal.
        folders: the sites' folders.
        root: the folder of the runs.
    """
    if len(folders) < 2 or len({path.resolve() for path in folders}) < len(folders):
        raise UserError(
            "--sites needs the folders of two sites or more, each once; one alone is `halfmoon run --data FOLDER`."
        )
    folders_by_name: dict[str, Path] = {}
    for folder in folders:
        first = folders_by_name.setdefault(folder.resolve().name, folder)
        if first != folder:
            raise UserError(
                f"{first} and {folder} have one name, by which the results of sites are listed; rename one of them."
            )
    check_output_folder(root, "run_dir")
    if config.patience is not None and not config.validation_share:
        raise UserError(
            "patience needs images of the sites to stop by: set {validation_share}, or leave {patience} out.",
            option=("patience", "validation_share"),
        )
    if root.exists() and any(root.iterdir()) and not (root / "data").is_dir():
        raise UserError(
            f"{root} is not empty and holds no rehearsal of sites", option="run_dir", hint="choose another {run_dir}."
        )


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
    images: list[np.ndarray] = []
    smallest_side = MIN_SIDE
    for number, site in enumerate(sites):
        name = site.folder.resolve().name
        text = f"features of {len(site):,} images of {name}, stored for the next time"
        watch.record("features_started", text, site=name, images=len(site))
        folder = folder_features(site.folder, site.paths, lambda *_: None)
        smallest_side = min([smallest_side, *(side for size in folder.contents.sizes for side in size)])
        site_groups = site.image_groups(group_pattern) or [""] * len(site)
        for row in folder.rows.tolist():
            label = int(site.labels[row])
            labels.append(classes.index(site.classes[label]) if label >= 0 else -1)
            # Patients of two sites may have one number: they are different patients.
            groups.append(f"{number} {site_groups[row]}" if site_groups[row] else "")
            content = (site.folder / site.paths[row]).read_bytes()
            images.append(decode_prepared(content, site.paths[row], COMPARED_IMAGES))
        client += [number] * len(folder.rows)
        site_features.append(folder)
    values = torch.cat([folder.values for folder in site_features])
    pooled = replace(site_features[0], values=values, rows=np.arange(len(values)))
    # Copies at several sites are one group, so that no head is tested on an image that it was solved for.
    hashes = hash_pixels(np.stack(images))
    if smallest_side >= MIN_SIDE:  # smaller images were enlarged: different ones may look like copies
        hashes = join_near_duplicates(find_near_duplicates([np.stack(images)], hashes), hashes)
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
    """Decode the sites' images into train.parquet, test.parquet and, if requested, validation.parquet.

    Raises:
        UserError: the images cannot be trained on, or `folder` has other ones; nothing has been written.
    """
    sites = [read_site(path) for path in folders]
    names = tuple(site.folder.resolve().name for site in sites)
    classes = _merge_classes(sites)
    decoding = image_preparation(config)
    decoding = replace(decoding, channels=decoding.channels or 3)
    images: list[_SiteImage] = []
    for number, site in enumerate(sites):
        images += _decode_site(site, number, classes, config, decoding, display)
    _check_sizes(images, names)
    used = _leave_out_copies(images, names, display)
    _check_labels(used, classes, config.validation_share)
    _report_foreign_classes(used, classes, names, display)
    # Of pixels, not of files: another version of the PNG encoder may write other bytes.
    content = hashlib.sha256(repr((names, classes)).encode())
    for image in used:
        content.update(repr((image.site, image.subset, image.label, image.pixel_hash)).encode())
    stored_content = atomic_io.read(folder / CONTENT_FILE)
    if stored_content not in (None, content.hexdigest().encode()):
        raise UserError(
            f"{folder.parent} holds a rehearsal of other images or labels: the folders are others, or have changed since",
            option="run_dir",
            hint="choose another {run_dir}.",
        )
    encoded: dict[str, list[tuple[bytes, int | None]]] = {"train": [], "test": [], "validation": []}
    for image in used:
        encoded[image.subset].append((encode_png(image.pixels), image.label))
    try:
        for name, rows in encoded.items():
            if rows:
                write_parquet(folder / f"{name}.parquet", rows, classes)
        atomic_io.write_atomically(folder / CONTENT_FILE, content.hexdigest().encode())
    except OSError as error:
        raise UserError(
            f"{folder}: it cannot be written ({atomic_io.error_reason(error)})",
            option="run_dir",
            hint="choose another {run_dir}.",
        ) from error
    training = [image for image in used if image.subset == "train"]
    return _TrainingRows(
        client=np.array([image.site for image in training], np.int64),
        labels=np.array([UNKNOWN if image.label is None else image.label for image in training], np.int64),
        labeled=np.array([image.label is not None for image in training], bool),
        names=names,
        tests=len(encoded["test"]),
    )


CONTENT_FILE = "content.sha256"
"""File with a hash of the images, labels and subsets of a rehearsal, next to them."""


class _SiteImage(NamedTuple):
    """A decoded image of a site."""

    site: int
    path: str
    subset: str  # "train", "test" or "validation"
    pixels: np.ndarray  # uint8 (H, W, C)
    pixel_hash: bytes
    label: int | None  # None for an unlabeled image


def _decode_site(
    site: SiteFolder,
    number: int,
    classes: Sequence[str],
    config: Config,
    decoding: Preparation,
    display: EventRecorder,
) -> list[_SiteImage]:
    """Decode the images of a site, and assign each to a subset; unreadable ones are left out.

    Args:
        site: the site's folder.
        number: its number.
        classes: the classes of all sites.
        config: the configuration of the rehearsal.
        decoding: how images are decoded.
        display: receives an event about images that are left out, and about a site without labels.

    Raises:
        UserError: more images are unreadable than `decoding` permits.
    """
    name = site.folder.resolve().name
    if not (site.labels >= 0).any():
        check = f"`halfmoon site check {site.folder}`"
        text = f"{name}: no image has a label; {check} lists the folders that look like classes."
        display.record("labels_missing", text, site=name)
    subsets = _assign_subsets(site, config.validation_share, config.group_pattern)
    left_out = int((subsets == "").sum())
    if left_out:
        text = f"{name}: {left_out:,} images without a label are left out: their patients are test patients."
        display.record("images_left_out", text, site=name, images=left_out)
    images: list[_SiteImage] = []
    unreadable: list[SkippedImage] = []
    for row, path in enumerate(site.paths):
        if not subsets[row]:
            continue
        label = int(site.labels[row])
        try:
            pixels = decode_prepared((site.folder / path).read_bytes(), path, decoding)
        except (UserError, OSError) as error:
            unreadable.append(SkippedImage(row, f"{name}/{path}", str(error).removeprefix(f"{path}: ")))
            continue
        (pixel_hash,) = hash_pixels(pixels[None])
        class_number = classes.index(site.classes[label]) if label >= 0 else None
        images.append(_SiteImage(number, path, str(subsets[row]), pixels, pixel_hash, class_number))
    check_skipped(unreadable, len(images) + len(unreadable), decoding)
    for image in unreadable:
        display.record("image_left_out", f"left out: {image.path}: {image.reason}", site=name, image=image.path)
    return images


def _check_sizes(images: Sequence[_SiteImage], names: Sequence[str]) -> None:
    """Raise UserError if images differ in size; the message names one of each of two sizes."""
    first = images[0]
    for image in images:
        if image.pixels.shape != first.pixels.shape:
            (height, width, _), (other_height, other_width, _) = first.pixels.shape, image.pixels.shape
            raise UserError(
                f"the images of the sites have several sizes, such as {width}x{height} ({names[first.site]}/{first.path}) "
                f"and {other_width}x{other_height} ({names[image.site]}/{image.path}); give one by {{resize=N}}.",
                option="resize",
            )


def _check_labels(images: Sequence[_SiteImage], classes: Sequence[str], validation_share: float) -> None:
    """Raise UserError if there are too few labeled images to train on, to test on or to validate on.

    Args:
        images: the images of all sites that are used.
        classes: the class names.
        validation_share: the share of the labeled images that is for validation.
    """
    trained_classes = {image.label for image in images if image.subset == "train"} - {None}
    subsets = {image.subset for image in images}
    if "test" not in subsets or not trained_classes:
        raise UserError(
            f"too few images have labels: each site needs {TEST_STRIDE} or more of a class to be tested on one."
        )
    if len(trained_classes) == 1:
        (label,) = trained_classes
        raise UserError(
            f"all labels of the sites are {classes[label or 0]!r}, so there is nothing to tell apart; label images of "
            "another class, too."
        )
    if validation_share and "validation" not in subsets:
        raise UserError(f"validation_share {validation_share:g} leaves no validation image; choose a larger one.")


def _report_foreign_classes(
    images: Sequence[_SiteImage], classes: Sequence[str], names: Sequence[str], display: EventRecorder
) -> None:
    """Report each site whose labels have no class in common with those of the other sites."""
    labels_by_site: dict[int, set[int]] = {}
    for image in images:
        if image.label is not None:
            labels_by_site.setdefault(image.site, set()).add(image.label)
    for site, labels in labels_by_site.items():
        others = set[int]().union(*(other for number, other in labels_by_site.items() if number != site))
        if others and not labels & others:
            listed = ", ".join(classes[label] for label in sorted(labels))
            text = f"{names[site]}: no other site has an image of its classes ({listed})."
            display.record("classes_differ", text, site=names[site])


def _leave_out_copies(images: Sequence[_SiteImage], names: Sequence[str], display: EventRecorder) -> list[_SiteImage]:
    """Leave out training and validation images that are copies of test images, and training ones of validation images.

    Copies have equal pixels, or are near-duplicates: the same picture at another compression, for one.

    Args:
        images: the images of all sites, of one size.
        names: the names of the sites.
        display: receives an event about copies at several sites, and one for each site with images that are left out.
    """
    pixel_hashes = [image.pixel_hash for image in images]
    shared_count = _count_shared(images, pixel_hashes)
    if shared_count:
        have = "image is" if shared_count == 1 else "images are"
        text = f"{shared_count:,} {have} at more than one site (equal pixels)."
        display.record("copies_found", text, images=shared_count)
    pairs = find_near_duplicates([np.stack([image.pixels for image in images])], pixel_hashes)
    pictures = join_near_duplicates(pairs, pixel_hashes)  # one hash for each group of copies
    near_count = _count_shared(images, pictures) - shared_count
    if near_count > 0:
        have = "picture is" if near_count == 1 else "pictures are"
        text = f"{near_count:,} {have} at more than one site as near-duplicates, such as at another compression."
        display.record("near_duplicates_found", text, images=near_count)
    elif pictures == pixel_hashes:
        # Too many near-duplicates to be copies of single pictures, such as frames of a video.
        for note in describe_near_duplicates(pairs, len(images)):
            display.record("data_note", f"{note}.")
    tests = {picture for image, picture in zip(images, pictures, strict=True) if image.subset == "test"}
    validation = {picture for image, picture in zip(images, pictures, strict=True) if image.subset == "validation"}
    used: list[_SiteImage] = []
    left_out: Counter[int] = Counter()
    for image, picture in zip(images, pictures, strict=True):
        is_copy_of_test = image.subset != "test" and picture in tests
        is_copy_of_validation = image.subset == "train" and picture in validation
        if is_copy_of_test or is_copy_of_validation:
            left_out[image.site] += 1
        else:
            used.append(image)
    how = "equal pixels" if pictures == pixel_hashes else "equal pixels or near-duplicates"
    for site, count in sorted(left_out.items()):
        copies = "image is" if count == 1 else "images are"
        text = f"{names[site]}: {count:,} {copies} left out: copies of images to test on ({how})."
        display.record("images_left_out", text, site=names[site], images=count)
    return used


def _count_shared(images: Sequence[_SiteImage], hashes: Sequence[bytes]) -> int:
    """Count the different hashes that images of more than one site have."""
    sites_by_hash: dict[bytes, set[int]] = {}
    for image, image_hash in zip(images, hashes, strict=True):
        sites_by_hash.setdefault(image_hash, set()).add(image.site)
    return sum(len(sites) > 1 for sites in sites_by_hash.values())


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

"""Features of a frozen backbone, computed once for several augmented views of each image.

They are stored in a cache folder, (N, views, 1, F) in half precision, and memory-mapped. A file is named by the hash of
the weights, the augmentations and the pixels. The views and features of an image depend on its pixels only, so that a
site computes those of the simulation.
"""

import hashlib
import io
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from halfmoon.api.types import Task
from halfmoon.config.schema import Config, method_options
from halfmoon.core import hubs, rng, tree
from halfmoon.core.errors import UserError
from halfmoon.core.memory import retain_freed_memory
from halfmoon.core.normalize import Normalize
from halfmoon.core.user_cache import is_private, trim
from halfmoon.data.views import Plain, View
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.executors.pools import available_processors
from halfmoon.engine.sampling import Views
from halfmoon.methods import registry
from halfmoon.models.finetuned import FeatureHead, FirstView, feature_head
from halfmoon.models.modules import ModuleNetwork, feature_function
from halfmoon.storage import atomic_io

Progress = Callable[[int, int], None]
Chunk = Callable[[int], tuple[int, np.ndarray]]

CHUNK = 16
"""Images in a batch of the backbone: more exceed a processor's cache. Constant, because rounding depends on it."""

CHECKSUM_SUFFIX = ".sha256"
"""Suffix of the file with the checksum of an entry of the cache."""

DRAWS = {"labeled": 2, "weak": 2, "strong": 2}
"""Number of cached views of an image for each augmentation; a step draws one of them.

Four strong ones gained nothing over two (`results/features.md`)."""


@dataclass(frozen=True)
class CachedView:
    """An augmentation that draws one of `count` cached views of an image, which begin at index `first`."""

    first: int
    count: int

    def draw(self, n: int, shape: tuple[int, int, int], generator: torch.Generator) -> dict[str, Tensor]:
        """Draw the view of each of n rows, (n,)."""
        return {"view": torch.randint(self.count, (n,), generator=generator)}

    def apply(self, images: Tensor, draws: dict[str, Tensor], normalize: Normalize) -> Tensor:
        """Select the features of the drawn views, (n, F), float32."""
        views = self.first + draws["view"].to(images.device)
        return images[torch.arange(len(images), device=images.device), views, 0].float()


def make_cached_augmentations(cached_names: Sequence[str], labeled: str = "labeled") -> Views:
    """Create augmentations that, instead of transforming an image, draw the features of one of its precomputed views.

    Args:
        cached_names: names of the cached augmentations, such as "weak" and "strong", in the order of the file.
        labeled: the augmentation of labeled images; plain views if it is not cached.
    """
    # The cache file has, along its second dimension, one plain view and then DRAWS[name] views of each name.
    views: dict[str, View] = {"plain": CachedView(first=0, count=1)}
    first = 1
    for name in cached_names:
        views[name] = CachedView(first=first, count=DRAWS[name])
        first += DRAWS[name]
    return Views(views.get(labeled, views["plain"]), views)


@dataclass(frozen=True)
class Inputs:
    """The task and views of a run, and functions that convert training and test images to the network's inputs."""

    task: Task
    views: Views
    prepare_training: Callable[[Examples], Examples] = lambda images: images
    prepare_test: Callable[[Examples], Examples] = lambda images: images


def select_inputs(
    config: Config,
    task: Task,
    views: Views,
    folder: Path,
    methods: Sequence[str] = (),
    progress: Progress = lambda *_: None,
) -> Inputs:
    """Select the inputs of a run: images, or cached features of a frozen backbone if the configuration has them.

    Args:
        config: the configuration.
        task: the task on images.
        views: the augmentations of images.
        folder: the cache folder.
        methods: all methods that run; views that none of them needs are not computed. (): the configuration's.
        progress: receives the number of images that have features, and the number of all images.
    """
    use_head = config.features or (config.features is None and config.network in hubs.PRETRAINED)
    head = feature_head(task.network) if use_head else None
    if head is None:
        return Inputs(task, views)
    compute_features = partial(load_or_compute_features, head, views, task.normalize, folder, progress=progress)
    # If labeled images have the same augmentation as weak views, the cache stores it once.
    labeled = "weak" if views.labeled == views.unlabeled.get("weak") else "labeled"
    view_names = _find_needed_views(config, task, methods or (config.method,), labeled=labeled, views=views)
    cached_names = [name for name in DRAWS if name in view_names]
    # Only the head is trained. Test images have one view, the plain one, which `FirstView` selects.
    task_on_head = replace(task, network=head, normalize=FirstView())
    cached_augmentations = make_cached_augmentations(cached_names, labeled)
    return Inputs(
        task_on_head, cached_augmentations, partial(compute_features, cached_names=cached_names), compute_features
    )


def _find_needed_views(config: Config, task: Task, methods: Sequence[str], labeled: str, views: Views) -> set[str]:
    """Find the names of the views that the client updates of these methods need.

    Args:
        config: the configuration, with the options of methods.
        task: the task on images.
        methods: the methods.
        labeled: the name of the view of labeled images.
        views: the augmentations; labeled images without one need no view.
    """
    view_names = set[str]()
    for name in methods:
        for update in (
            registry.make(name, method_options(config, name, with_preset=False)).client_updates(task).values()
        ):
            requirements = update.requirements
            required_views = (
                *requirements.views,
                *requirements.labeled_views,
                *requirements.second_batch,
                *requirements.precomputed_views,
            )
            # "weak2" is a second draw of "weak", from the same cached views.
            view_names |= {view.rstrip("0123456789") for view in required_views}
            if requirements.trains and not isinstance(views.labeled, Plain):
                view_names.add(labeled)
    return view_names


def load_or_compute_features(
    head: FeatureHead,
    views: Views,
    normalize: Normalize,
    folder: Path,
    examples: Examples,
    cached_names: Sequence[str] = (),
    progress: Progress = lambda *_: None,
) -> Examples:
    """Load or compute the features of images, (N, views, 1, F).

    Args:
        head: the network's head, which knows its backbone.
        views: the augmentations of images.
        normalize: the normalization of pixels.
        folder: the cache folder.
        examples: the images.
        cached_names: augmentations to cache besides the plain view: names in `DRAWS`.
        progress: receives the number of images that have features, and the number of all images.

    Raises:
        UserError: the cache folder cannot be written, or its disk is full.
    """
    augmentations: Mapping[str, View] = {"labeled": views.labeled, **views.unlabeled}
    # The augmentation of each view, in the order in which the file has them.
    recipes: dict[str, View] = {"plain": Plain()}
    for name in cached_names:
        for k in range(DRAWS[name]):
            recipes[f"{name} {k}"] = augmentations[name]
    images = examples.images
    network = head.inner.inner
    # Networks with the same weights may have different features.
    network_name = network.name if isinstance(network, ModuleNetwork) else type(network).__name__
    # Images of another shape may have the same bytes.
    shape = tuple(images.shape)
    # "5": the version of the computation.
    recipe_text = f"5 {head.inner.sha256} {network_name} {network.head} {recipes} {normalize} {shape}"
    digest = hashlib.sha256(recipe_text.encode())
    # In chunks, so that only one of them is copied from a GPU at a time.
    for image_chunk in images.split(4096):
        digest.update(image_chunk.contiguous().cpu().numpy().data)
    path = folder / f"{digest.hexdigest()[:32]}.npy"
    try:
        if not _is_intact(path):
            _write(path, _make_chunk_function(head, images, recipes, normalize), len(images), progress)
        os.utime(path)  # `trim` removes the files that were not used for the longest time
        values = torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    except OSError as error:
        raise UserError(
            f"{path.parent}: the cache of features cannot be used ({atomic_io.error_reason(error)}); free space on its disk, "
            "or let XDG_CACHE_HOME name a folder elsewhere."
        ) from error
    return Examples(values.to(images.device), examples.labels)


def _is_intact(path: Path) -> bool:
    """Check that a file of cached features exists, has its stored checksum and is this user's; warn if it is not so.

    Another user who can write to the folder could plant features with the right checksum.
    """
    if not path.is_file():
        return False
    stored = atomic_io.read(path.with_suffix(CHECKSUM_SUFFIX))
    if stored is None:
        fault = "has no checksum"
    elif not (is_private(path) and is_private(path.with_suffix(CHECKSUM_SUFFIX))):
        fault = "can be written by other users"
    else:
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if stored.strip() == actual.encode():
            return True
        fault = "is damaged"
    warnings.warn(f"{path} {fault}: its features are computed again.", RuntimeWarning, stacklevel=2)
    return False


def _write(path: Path, compute_chunk: Chunk, count: int, progress: Progress) -> None:
    """Write the features of all images as a NumPy file and their checksum, chunk by chunk on all processors.

    The number of processors does not change the bytes. The file is written with `write` and not as a memory map: there a
    full disk would end the process by a signal, and not by an exception. It gets its name only when it is complete.

    Args:
        path: the file, in a cache folder that only this user may read.
        compute_chunk: a function of a chunk's first row, which returns the row and the features of `CHUNK` images.
        count: the number of images.
        progress: receives the number of images that are written, and `count`.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_mode & 0o077:  # features reveal images
        path.parent.chmod(0o700)
    _remove_partial_files(path.parent)
    _, first = compute_chunk(0)  # only for the shape of an image's features
    header = io.BytesIO()
    # "<f2": float16, little-endian.
    description = {"descr": "<f2", "fortran_order": False, "shape": (count, *first.shape[1:])}
    np.lib.format.write_array_header_1_0(header, description)
    digest = hashlib.sha256()
    temporary_path = path.with_name(f".{path.name}-{os.getpid()}")
    temporary_path.unlink(missing_ok=True)  # an existing file would retain its mode
    try:
        with (
            atomic_io.open_file(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as handle,
            ThreadPoolExecutor(len(available_processors())) as threads,
        ):
            atomic_io.flock(handle)  # until it is closed, so that no other process removes it as a remainder

            def write(data: bytes) -> None:
                digest.update(data)
                atomic_io.write_all(handle, data)

            write(header.getvalue())
            try:
                for number, (_, values) in enumerate(threads.map(compute_chunk, range(0, count, CHUNK)), start=1):
                    write(np.ascontiguousarray(values, np.dtype("<f2")).tobytes())
                    progress(min(count, number * CHUNK), count)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)  # the end of the block would compute them all
                raise
            os.fsync(handle)
        os.replace(temporary_path, path)
    except BaseException:
        temporary_path.unlink(missing_ok=True)
        raise
    atomic_io.write_atomically(path.with_suffix(CHECKSUM_SUFFIX), digest.hexdigest().encode() + b"\n", private=True)
    trim(path.parent, path.stem)  # deletes the oldest files of a cache that is too large, but not this one


def _remove_partial_files(folder: Path) -> None:
    """Remove the files of processes that were killed while they computed features: nobody holds a lock on them."""
    for path in folder.glob(".*.npy-*"):
        with suppress(OSError), atomic_io.open_file(path, os.O_RDWR) as handle:  # OSError: it is locked, or gone
            if atomic_io.flock(handle):
                path.unlink()


def measure_seconds_per_image(head: FeatureHead, images: Tensor, normalize: Normalize) -> float:
    """Measure how long the features of an image take on all processors, to predict the time before a run.

    Each processor computes two batches of images that are not augmented.

    Args:
        head: the network's head, which knows its backbone.
        images: uint8 (N, C, H, W), repeated if there are too few.
        normalize: the normalization of pixels.

    Returns:
        Seconds per image and view.
    """
    processors = len(available_processors())
    needed = 2 * CHUNK * processors
    repeats = math.ceil(needed / len(images))
    images = images.repeat(repeats, 1, 1, 1)[:needed]
    compute_chunk = _make_chunk_function(head, images, {"plain": Plain()}, normalize)
    start_time = time.perf_counter()
    with ThreadPoolExecutor(processors) as threads:
        list(threads.map(compute_chunk, range(0, len(images), CHUNK)))  # `list` waits for all results
    return (time.perf_counter() - start_time) / len(images)


def _make_chunk_function(
    head: FeatureHead, images: Tensor, augmentations: Mapping[str, View], normalize: Normalize
) -> Chunk:
    """Create a function that computes the features of `CHUNK` consecutive images.

    Features are the outputs of the frozen backbone, from which the head is trained.

    Args:
        head: the network's head, which knows its backbone. Its weights have no effect on features.
        images: uint8 (N, C, H, W).
        augmentations: the augmentation of every view to compute by the view's name, in the order of the file.
        normalize: the normalization of pixels.

    Returns:
        A function of the first row, which returns this row and the features (n, views, 1, F), n <= CHUNK. It returns the
        row because several chunks are computed at the same time.
    """
    retain_freed_memory()
    with torch.device("meta"):
        shapes = head.init(torch.Generator())
    # Zeros, because random weights of the whole network would be drawn for a head that is not used.
    model = tree.map(lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype), shapes)
    extract_features = feature_function(*head.full_model(model))
    shape = (images.shape[1], images.shape[2], images.shape[3])

    def compute_chunk(start: int) -> tuple[int, np.ndarray]:
        """Compute the features of the images from row `start` on."""
        # The last chunk is filled up with copies of the last image, because rounding depends on the size of a batch.
        rows = torch.arange(start, start + CHUNK).clamp_max(len(images) - 1)
        pixels = images[rows.to(images.device)]
        # Random numbers are seeded by the pixels, so that an image has the same views at a site and in a simulation.
        image_hashes = [hashlib.sha256(image.contiguous().cpu().numpy().data).hexdigest() for image in pixels]
        view_features = []
        with torch.no_grad():
            for view, augmentation in augmentations.items():
                draws = [
                    augmentation.draw(1, shape, rng.generator(0, "features", view, image_hash))
                    for image_hash in image_hashes
                ]
                batched_draws = {name: torch.cat([image_draws[name] for image_draws in draws]) for name in draws[0]}
                view_features.append(extract_features(augmentation.apply(pixels, batched_draws, normalize)))
        # Drop the copies of the last image, and insert an axis, because features are stored like images of one pixel.
        features = torch.stack(view_features, 1)[: len(images) - start, :, None]
        return start, features.half().cpu().numpy()

    return compute_chunk

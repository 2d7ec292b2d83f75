"""Features of a frozen backbone, computed once for several augmented views of each image.

They are stored in a cache folder, (N, views, 1, F) in half precision, and memory-mapped. A file is named by the hash of
the weights, the augmentations and the pixels. The views and features of an image depend on its pixels only, so that a
site computes those of the simulation.
"""

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from halfmoon.api.types import Task
from halfmoon.config.schema import Config, explicit_method_options
from halfmoon.core import hubs, rng
from halfmoon.core.memory import retain_freed_memory
from halfmoon.core.user_cache import trim
from halfmoon.data.views import Plain, View
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.sampling import Views
from halfmoon.methods import registry
from halfmoon.models.finetuned import FeatureHead, FirstView, feature_head
from halfmoon.models.modules import feature_function
from halfmoon.models.network import Normalize
from halfmoon.runs.pools import processors

Progress = Callable[[int, int], None]
Chunk = Callable[[int], tuple[int, np.ndarray]]

CHUNK = 16
"""Images in a batch of the backbone: more exceed a processor's cache. Constant, because rounding depends on it."""

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


def cached_views(used: Sequence[str], labeled: str = "labeled") -> Views:
    """Create the augmentations that draw cached views.

    Args:
        used: names of the cached augmentations, in the order of the file.
        labeled: the augmentation of labeled images; plain views if it is not cached.
    """
    views: dict[str, View] = {"plain": CachedView(0, 1)}
    first = 1
    for name in used:
        views[name] = CachedView(first, DRAWS[name])
        first += DRAWS[name]
    return Views(views.get(labeled, views["plain"]), views)


@dataclass(frozen=True)
class Inputs:
    """The task and views of a run, and functions that convert training and test images to the network's inputs."""

    task: Task
    views: Views
    prepare_training: Callable[[Examples], Examples] = lambda images: images
    prepare_test: Callable[[Examples], Examples] = lambda images: images


def inputs(
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
    of = partial(features, head, views, task.normalize, folder, progress=progress)
    view_names = set[str]()
    labeled = "weak" if views.labeled == views.unlabeled.get("weak") else "labeled"  # the same recipe, once
    for name in methods or (config.method,):
        for update in registry.make(name, explicit_method_options(config, name)).client_updates(task).values():
            requirements = update.requirements
            named = (
                *requirements.views,
                *requirements.labeled_views,
                *requirements.second_batch,
                *requirements.precomputed_views,
            )
            view_names |= {view.rstrip("0123456789") for view in named}
            if requirements.trains and not isinstance(views.labeled, Plain):
                view_names.add(labeled)
    used = [name for name in DRAWS if name in view_names]
    on_head, own = replace(task, network=head, normalize=FirstView()), cached_views(used, labeled)
    return Inputs(on_head, own, partial(of, used=used), of)


def features(
    head: FeatureHead,
    views: Views,
    normalize: Normalize,
    folder: Path,
    examples: Examples,
    used: Sequence[str] = (),
    progress: Progress = lambda *_: None,
) -> Examples:
    """Load or compute the features of images, (N, views, 1, F).

    Args:
        head: the network's head, which knows its backbone.
        views: the augmentations of images.
        normalize: the normalization of pixels.
        folder: the cache folder.
        examples: the images.
        used: augmentations to cache besides the plain view: names in `DRAWS`.
        progress: receives the number of images that have features, and the number of all images.

    Raises:
        OSError: the cache folder cannot be written.
    """
    named: Mapping[str, View] = {"labeled": views.labeled, **views.unlabeled}
    recipes = {"plain": Plain(), **{f"{name} {k}": named[name] for name in used for k in range(DRAWS[name])}}
    images = examples.images
    words = f"4 {head.inner.sha256} {type(head.inner.inner).__name__} {head.inner.inner.head} {recipes} {normalize}"
    digest = hashlib.sha256(words.encode())
    for part in images.split(4096):
        digest.update(part.contiguous().cpu().numpy().tobytes())
    path = folder / f"{digest.hexdigest()[:32]}.npy"
    if not path.is_file():
        _write(path, _chunks(head, images, recipes, normalize), len(images), progress)
    os.utime(path)
    values = torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
    return Examples(values.to(images.device), examples.labels)


def _write(path: Path, chunk: Chunk, count: int, progress: Progress) -> None:
    """Write the features of all images, batch by batch on all processors; their number does not change the bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _, first = chunk(0)
    partial = path.with_name(f".{path.name}-{os.getpid()}")
    out = np.lib.format.open_memmap(partial, "w+", np.float16, (count, *first.shape[1:]))
    with ThreadPoolExecutor(len(processors())) as pool:
        for number, (start, values) in enumerate(pool.map(chunk, range(0, count, CHUNK)), start=1):
            out[start : start + CHUNK] = values
            progress(min(count, number * CHUNK), count)
    out.flush()
    os.replace(partial, path)
    trim(path.parent, path.stem)


def measure_seconds_per_image(head: FeatureHead, images: Tensor, normalize: Normalize) -> float:
    """Measure the seconds per image of the plain view on all processors, with two batches for each processor.

    Args:
        head: the network's head, which knows its backbone.
        images: uint8 (N, C, H, W), repeated if there are too few.
        normalize: the normalization of pixels.
    """
    count = len(processors())
    images = images.repeat(-(-2 * CHUNK * count // len(images)), 1, 1, 1)[: 2 * CHUNK * count]
    chunk = _chunks(head, images, {"plain": Plain()}, normalize)
    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(chunk, range(0, len(images), CHUNK)))
    return (time.perf_counter() - began) / len(images)


def _chunks(head: FeatureHead, images: Tensor, recipes: Mapping[str, View], normalize: Normalize) -> Chunk:
    """Create a function that computes the features (n, views, 1, F) of `CHUNK` images from a row on.

    It returns the row as well, because several batches are computed at the same time.
    """
    retain_freed_memory()
    represent = feature_function(*head.full_model(head.init(torch.Generator().manual_seed(0))))
    shape = (images.shape[1], images.shape[2], images.shape[3])

    def chunk(start: int) -> tuple[int, np.ndarray]:
        rows = torch.arange(start, start + CHUNK).clamp_max(len(images) - 1)
        pixels = images[rows.to(images.device)]
        names = [hashlib.sha256(image.contiguous().cpu().numpy().tobytes()).hexdigest() for image in pixels]
        parts = []
        with torch.no_grad():
            for view, recipe in recipes.items():
                draws = [recipe.draw(1, shape, rng.generator(0, "features", view, name)) for name in names]
                numbers = {each: torch.cat([own[each] for own in draws]) for each in draws[0]}
                parts.append(represent(recipe.apply(pixels, numbers, normalize)))
        return start, torch.stack(parts, 1)[: len(images) - start, :, None].half().cpu().numpy()

    return chunk

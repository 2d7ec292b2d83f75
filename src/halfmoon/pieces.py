"""From a configuration to what its methods share: data, split, task, views and batch rule."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from halfmoon import catalog
from halfmoon.augment import Labeled, Normalize, Plain, Shared, Strong, StrongFedLoKe, StrongSemiFL, View, Weak
from halfmoon.budget import Budget
from halfmoon.config import Config, method_options
from halfmoon.data import Images, Scenario, Source, Split, fit, shrink, subset
from halfmoon.data import load as load_source
from halfmoon.data.draw import Batching, Views
from halfmoon.errors import UserError
from halfmoon.evaluate import Examples
from halfmoon.ground import Executor
from halfmoon.guards import Guard, clipping
from halfmoon.guards.fixed import Sums
from halfmoon.guards.ledger import LEDGER, Ledger
from halfmoon.guards.private import Private, Promise
from halfmoon.guards.robust import Finite, Robust
from halfmoon.models import NETWORKS, Network
from halfmoon.optim import SGD, Adam, Clipped, Constant, Cosine, Optimizer, Schedule, Steps
from halfmoon.types import Method, Task


@dataclass(frozen=True)
class Form:
    """What the images of a federation are like when they are trained on; `Source` says what `mirror` to `std` mean."""

    image: tuple[int, int, int]  # channels, height, width
    classes: tuple[str, ...]
    mirror: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, source: Source) -> Form:
        """Return the form of a data set."""
        height, width, channels = source.train.images.shape[1:]
        return cls((channels, height, width), source.classes, source.mirror, source.mean, source.std)


@dataclass(frozen=True)
class World:
    """What the methods of a comparison share: data, split, task, views and batch rule."""

    source: Source
    split: Split
    train: Examples
    test: Examples
    task: Task
    views: Views
    batching: Batching
    serving: Batching  # the batch rule of the server's own training
    taken: tuple[int, int]  # height and width of the images before anything was done to them


def world(config: Config, split: Split | None = None) -> World:
    """Return data, split, task, views and batch rule of a configuration; raises `UserError` where they do not fit."""
    found = images(config)
    data = fitted(config, found)
    if split is None:
        split = split_of(config, data)
    else:
        split.check(data)
    place, form = device(config), Form.of(data)
    batching, serving = batch_rules(config)
    train, test = examples(data.train, place), examples(data.test, place)
    _, height, width, _ = found.train.images.shape
    return World(data, split, train, test, task(config, form), views(config, form), batching, serving, (height, width))


def task(config: Config, form: Form) -> Task:
    """Return what all methods of a configuration share; raises `UserError` where the network cannot take the images."""
    return Task(
        network=_network(config, form),
        optimizer=_optimizer(config),
        normalize=Normalize(form.mean, form.std),
        statistics=config.statistics,
        labeling=config.labeling,
        rounds=config.rounds,
        schedule=_schedule(config),
    )


def method(config: Config) -> Method:
    """Return the method of a configuration with its options; raises `UserError` where what guards it does not fit."""
    made = catalog.make(config.method, method_options(config, config.method))
    entry = replace(catalog.entry(config.method), method=made)
    singles = entry.unsummed(config.norm)
    if config.aggregation != "mean" and (why := entry.unrobust(config.aggregation, config.norm)):
        raise UserError(f"aggregation {config.aggregation!r} cannot be used with method {config.method}: {why}.")
    for option in ("secure_aggregation", "dp_clip"):
        if getattr(config, option) and singles:
            raise UserError(
                f"{option} cannot be used with method {config.method}: {singles}. The server would have to see more "
                "than a sum."
            )
    return made if config.dp_clip is None else clipping.Clipped(made, config.dp_clip)


def guards(config: Config, secret: bytes, folder: Path, summed: bool = False) -> tuple[Guard, ...]:
    """Return what stands between the uploads and the method of a configuration.

    `secret` is what noise is drawn from, known to the server alone; `folder` is the run's. `summed` says that masked
    uploads were added up before they come here.
    """
    found: list[Guard] = []
    if config.aggregation != "mean":
        found.append(Robust(config.aggregation, config.byzantine))
    elif config.attack != "none":  # else nothing comes here that is not finite
        found.append(Finite(robust=not config.secure_aggregation and config.dp_clip is None))
    if config.secure_aggregation:
        found.append(Sums(even=config.dp_clip is not None, done=summed))
    if config.dp_clip is not None:
        found.append(_private(config, secret, folder))
    return tuple(found)


def _private(config: Config, secret: bytes, folder: Path) -> Private:
    """Return the noise on the sums of a configuration, and their price so far."""
    assert config.dp_clip is not None, "asked before"
    assert config.dp_noise is not None, "checked with the configuration"
    clients = config.clients if config.split is None else Split.load(config.split).clients
    promise = Promise(config.dp_clip, config.dp_noise, config.dp_delta, config.dp_epsilon, config.cohort, clients)
    return Private(promise, secret, Ledger(folder / LEDGER))


def budget(config: Config, task: Task) -> Budget:
    """Return what the visits of a configuration's method are measured by."""
    name = config.reference or config.method
    return Budget(config.budget, next(iter(catalog.make(name).works(task).values())), catalog.entry(name).all_labels)


def images(config: Config) -> Source:
    """Return the images of a configuration as they are, of the training images the share that it wants."""
    return subset(load_source(config.data, config.data_dir, cache=config.cache), config.data_share)


def source(config: Config) -> Source:
    """Return the images of a configuration, shrunk and padded as it says and as its network needs."""
    return fitted(config, images(config))


def fitted(config: Config, found: Source) -> Source:
    """Return images shrunk and padded as a configuration says and as its network needs."""
    found = shrink(found, config.shrink)
    _, height, width, _ = found.train.images.shape
    size = padded(config, height, width)
    return fit(found, size) if size is not None and (height, width) != (size, size) else found


def padded(config: Config, height: int, width: int) -> int | None:
    """Return the size to which images are padded as a configuration says or its network needs; None: they stay."""
    least, multiple = {"resnet9": (16, 8), "wrn": (8, 4)}.get(network_name(config), (1, 1))
    if config.image_size is not None or multiple == 1:
        return config.image_size
    return max(least, -(-max(height, width) // multiple) * multiple)


def batch_rules(config: Config) -> tuple[Batching, Batching]:
    """Return the batch rule of the clients, and that of the server's own training."""
    batching = Batching(config.labeled_batch, config.unlabeled_batch, config.epochs, config.epoch, config.steps)
    serving = replace(
        batching,
        labeled=batching.labeled if config.server_batch is None else config.server_batch,
        epochs=config.epochs if config.server_epochs is None else config.server_epochs,
        steps=None,
    )
    return batching, serving


def scenario(config: Config) -> Scenario:
    """Return the rule of the split."""
    return Scenario(
        setting=config.setting,
        clients=config.clients,
        gamma=config.gamma,
        labels_per_class=config.labels_per_class,
        label_ratio=config.label_ratio,
        labels=config.labels,
        labels_at=config.labels_at,
        labeled_clients=config.labeled_clients,
        classes_per_client=config.classes_per_client,
        stages=config.stages,
        unlabeled_share=config.unlabeled_share,
        min_size=config.min_size,
        seed=config.split_seed,
    )


def split_of(config: Config, data: Source) -> Split:
    """Return the split of a configuration: the saved one it names, or a new one."""
    if config.split is not None:
        if not config.split.is_file():
            raise UserError(f"{config.split}: there is no such file; save a split with halfmoon data --save.")
        split = Split.load(config.split)
        split.check(data)
        return split
    return scenario(config).split(data.train.labels, data.classes, data.name)


def examples(images: Images, device: torch.device) -> Examples:
    """Return images as tensors (N, C, H, W) on a device."""
    pixels = torch.from_numpy(images.images).permute(0, 3, 1, 2).contiguous()
    return Examples(pixels.to(device), torch.from_numpy(images.labels).to(device))


def network_name(config: Config) -> str:
    """Return the name of the network, chosen by the data where the configuration leaves it open."""
    if config.network != "auto":
        return config.network
    return "small" if config.data == "digits" else "resnet9"


def _network(config: Config, form: Form) -> Network:
    make = partial(NETWORKS[network_name(config)], channels=form.image[0], classes=len(form.classes), norm=config.norm)
    network = make() if config.width is None else make(width=config.width)
    network.check(form.image)
    return network


def views(config: Config, form: Form) -> Views:
    """Return how labeled and unlabeled images are augmented."""
    flip = form.mirror if config.flip is None else config.flip
    labeled: View = {"cutout": Labeled(flip=flip), "weak": Weak(flip=flip), "plain": Plain()}[config.labeled_view]
    strong = {"feddure": Strong, "semifl": StrongSemiFL, "fedloke": StrongFedLoKe}[config.strong_view](flip=flip)
    unlabeled: dict[str, View] = {"plain": Plain(), "weak": Weak(flip=flip), "strong": strong}
    if config.shared_views:
        assert isinstance(config.labeled_batch, int), "checked with the configuration"
        assert isinstance(config.unlabeled_batch, int), "checked with the configuration"
        labeled = Shared(labeled, config.labeled_batch)
        unlabeled = {name: Shared(view, config.unlabeled_batch) for name, view in unlabeled.items()}
    return Views(labeled, unlabeled)


def _optimizer(config: Config) -> Optimizer:
    if config.optimizer == "adam":
        optimizer: Optimizer = Adam(config.lr, weight_decay=config.weight_decay)
    else:
        optimizer = SGD(config.lr, config.momentum, config.weight_decay, config.nesterov)
    if config.clip_norm is None and config.clip_value is None:
        return optimizer
    return Clipped(optimizer, config.clip_norm, config.clip_value)


def _schedule(config: Config) -> Schedule:
    return {"constant": Constant(), "cosine": Cosine(), "step": Steps()}[config.schedule]


def device(config: Config) -> torch.device:
    """Return where to compute; raises `UserError` where there is no such device."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda', but this PyTorch sees no GPU; use device = 'auto' or 'cpu'.")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def executor(config: Config) -> Executor:
    """Return how the clients of a cohort are run."""
    if config.executor != "auto":
        return config.executor
    return "vmap" if device(config).type == "cuda" else "loop"


def threads(config: Config) -> int:
    """Return with how many processor threads a run computes."""
    wanted = config.threads
    if wanted is None and network_name(config) == "small" and device(config).type == "cpu":
        wanted = 1  # its convolutions are smaller than the cost of waking a second thread
    # More threads than processors only cost, and thousands crash the process.
    return min(wanted, os.cpu_count() or 1) if wanted else torch.get_num_threads()


@contextmanager
def computing(config: Config) -> Iterator[None]:
    """Compute with as many processor threads as the configuration says, and leave PyTorch as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads(config))
    try:
        yield
    finally:
        torch.set_num_threads(before)

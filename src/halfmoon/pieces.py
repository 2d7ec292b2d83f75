"""From a configuration to what its methods share: data, split, task, views and batch rule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from halfmoon.augment import Labeled, Normalize, Plain, Strong, Weak
from halfmoon.config import Config
from halfmoon.data import Images, Scenario, Source, Split, fit, shrink
from halfmoon.data import load as load_source
from halfmoon.data.draw import Batching, Views
from halfmoon.errors import UserError
from halfmoon.evaluate import Examples
from halfmoon.models import NETWORKS, Network
from halfmoon.optim import SGD, Adam, Optimizer
from halfmoon.types import Task


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


def world(config: Config, split: Split | None = None) -> World:
    """Return data, split, task, views and batch rule of a configuration; raises `UserError` where they do not fit."""
    data = source(config)
    if split is None:
        split = split_of(config, data)
    else:
        split.check(data)
    place = device(config)
    task = Task(
        network=_network(config, data),
        optimizer=_optimizer(config),
        normalize=Normalize(data.mean, data.std),
        statistics=config.statistics,
        labeling=config.labeling,
        rounds=config.rounds,
    )
    flip = data.mirror if config.flip is None else config.flip
    labeled = {"cutout": Labeled(flip=flip), "weak": Weak(flip=flip), "plain": Plain()}[config.labeled_view]
    views = Views(labeled, {"plain": Plain(), "weak": Weak(flip=flip), "strong": Strong(flip=flip)})
    batching = Batching(config.labeled_batch, config.unlabeled_batch, config.epochs, config.epoch, config.steps)
    return World(data, split, _examples(data.train, place), _examples(data.test, place), task, views, batching)


def source(config: Config) -> Source:
    """Return the images of a configuration, shrunk and padded as it says and as its network needs."""
    found = load_source(config.data, config.data_dir, cache=config.cache)
    found = shrink(found, config.shrink)
    size = config.image_size
    _, height, width, _ = found.train.images.shape
    if size is None and network_name(config) == "resnet9":
        size = max(16, -(-max(height, width) // 8) * 8)
    return fit(found, size) if size is not None and (height, width) != (size, size) else found


def scenario(config: Config) -> Scenario:
    """Return the rule of the split."""
    return Scenario(
        setting=config.setting,
        clients=config.clients,
        gamma=config.gamma,
        labels_per_class=config.labels_per_class,
        label_ratio=config.label_ratio,
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


def _examples(images: Images, device: torch.device) -> Examples:
    pixels = torch.from_numpy(images.images).permute(0, 3, 1, 2).contiguous()
    return Examples(pixels.to(device), torch.from_numpy(images.labels).to(device))


def network_name(config: Config) -> str:
    """Return the name of the network, chosen by the data where the configuration leaves it open."""
    if config.network != "auto":
        return config.network
    return "small" if config.data == "digits" else "resnet9"


def _network(config: Config, data: Source) -> Network:
    _, height, width, channels = data.train.images.shape
    make = partial(NETWORKS[network_name(config)], channels=channels, classes=len(data.classes))
    network = make() if config.width is None else make(width=config.width)
    network.check((channels, height, width))
    return network


def _optimizer(config: Config) -> Optimizer:
    if config.optimizer == "adam":
        return Adam(config.lr, weight_decay=config.weight_decay)
    return SGD(config.lr, config.momentum, config.weight_decay)


def device(config: Config) -> torch.device:
    """Return where to compute; raises `UserError` where there is no such device."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda', but this PyTorch sees no GPU; use device = 'auto' or 'cpu'.")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)

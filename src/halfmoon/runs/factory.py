"""From a configuration to what its methods share: data, split, task, views and batch rule."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from halfmoon.aggregation import Aggregator
from halfmoon.aggregation.privacy import clipping
from halfmoon.aggregation.privacy.dp import PrivacyPlan, Private
from halfmoon.aggregation.privacy.ledger import LEDGER, Ledger
from halfmoon.aggregation.robust import Finite, Robust
from halfmoon.aggregation.secure.fixed_point import Sums
from halfmoon.aggregation.weights import WeightCap
from halfmoon.api.split_options import SplitOptions
from halfmoon.api.types import Method, Task
from halfmoon.config.schema import Config, count_rounds, initial_weights, method_options
from halfmoon.config.sections import BatchOptions, DataOptions, MachineOptions, PartitionOptions
from halfmoon.config.validation import effective_norm
from halfmoon.core import hubs, tree, weight_files
from halfmoon.core.errors import UserError
from halfmoon.core.hubs import frozen_layers
from halfmoon.core.optim import (
    SGD,
    Adam,
    ConstantSchedule,
    CosineSchedule,
    GradientClipping,
    LayerwiseLearningRate,
    Optimizer,
    StepSchedule,
)
from halfmoon.core.user_cache import user_cache
from halfmoon.data import Images, Scenario, Source, Split, hold_out, pad_source, shrink, take_share
from halfmoon.data import load as load_source
from halfmoon.data.images import UNKNOWN
from halfmoon.data.preparation import Preparation
from halfmoon.data.views import Labeled, Plain, Shared, Strong, StrongFedLoKe, StrongSemiFL, View, Weak
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.local_clients import Executor
from halfmoon.engine.sampling import Batching, Views
from halfmoon.methods import registry
from halfmoon.models import Network
from halfmoon.models import registry as networks
from halfmoon.models.efficientnet import MEAN, STD
from halfmoon.models.finetuned import backbone_paths, feature_head, fine_tune
from halfmoon.models.hubs import weights_file as published
from halfmoon.models.network import Normalize
from halfmoon.models.weights import read as read_weights
from halfmoon.runs.features import Progress, inputs

TINY = 500_000
"""Products an image up to which clients in one program take less of a processor's time than one by one."""

CHUNK = 20
"""Clients in one program on a processor: more save no more, and other programs can be computed beside it."""


@dataclass(frozen=True)
class ImageSpec:
    """What the images of a federation are like when they are trained on; `Source` says what `mirror` to `std` mean."""

    image: tuple[int, int, int]  # channels, height, width
    classes: tuple[str, ...]
    mirror: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, source: Source) -> "ImageSpec":
        height, width, channels = source.train.images.shape[1:]
        return cls((channels, height, width), source.classes, source.mirror, source.mean, source.std)


@dataclass(frozen=True)
class Problem:
    """What the methods of a comparison share: data, split, task, views and batch rule."""

    source: Source  # the data set as it was read
    split: Split  # who holds what
    train: Examples  # uint8 (N, C, H, W), with labels
    test: Examples | None  # None: nobody looks at test images
    task: Task  # the network, the optimizer and the rules that methods share
    views: Views  # the recipes of augmented images, by name
    batching: Batching  # how clients draw minibatches
    serving: Batching  # the batch rule of the server's own training
    input_size: tuple[int, int]  # height and width of the images before anything was done to them
    validation: Examples | None = None  # training images that nobody trains on

    def __repr__(self) -> str:
        return f"{self.source}\n{self.split}"


def problem(
    config: Config,
    split: Split | None = None,
    methods: Sequence[str] = (),
    raw: Source | None = None,
    progress: Progress = lambda *_: None,
) -> Problem:
    """Return data, split, task, views and batch rule of `config`.

    Args:
        config: what to play.
        split: one that was drawn before.
        methods: all that play on it; where none of them takes steps, features are those of the plain views alone.
        raw: the data set, where it was read before.
        progress: is told how many images of how many have features.

    Raises:
        UserError: they do not fit.
    """
    raw = images(config) if raw is None else raw
    data = fit_to_network(config, raw)
    split = split_of(config, data, split)
    place, form = device(config), ImageSpec.of(data)
    batching, serving = batch_rules(config)
    train, test = examples(data.train, place), examples(data.test, place)
    _, height, width, _ = raw.train.images.shape
    validation = None if data.validation is None else examples(data.validation, place)
    own = inputs(config, task(config, form), views(config, form), user_cache("features"), methods, progress)
    train, test = own.prepare_training(train), own.prepare_test(test)
    validation = None if validation is None else own.prepare_test(validation)
    return Problem(data, split, train, test, own.task, own.views, batching, serving, (height, width), validation)


def task(config: Config, form: ImageSpec) -> Task:
    """Return what all methods of a configuration share; raises `UserError` where the network cannot take the images."""
    network = _network(config, form)
    if config.features and feature_head(network) is None:
        raise UserError("features needs a frozen backbone: set tune to 'head', or leave features out.")
    return Task(
        network=network,
        optimizer=_optimizer(config, network),
        normalize=Normalize(form.mean, form.std),
        statistics=config.statistics,
        labeling=config.labeling,
        testing=config.test_statistics,
        upload_precision=config.upload_precision,
        rounds=count_rounds(config),
        schedule={"constant": ConstantSchedule(), "cosine": CosineSchedule(), "step": StepSchedule()}[config.schedule],
    )


def method(config: Config) -> Method:
    """Return the method of a configuration with its options; raises `UserError` where aggregators do not fit it."""
    instance = registry.make(config.method, method_options(config, config.method))
    entry = replace(registry.entry(config.method), method=instance)
    norm = effective_norm(config)
    singles = entry.individual_upload_reason(norm)
    if config.aggregation != "mean" and (why := entry.robust_rule_conflict(config.aggregation, norm)):
        raise UserError(f"aggregation {config.aggregation!r} cannot be used with method {config.method}: {why}.")
    for option in ("secure_aggregation", "dp_clip"):
        if getattr(config, option) and singles:
            raise UserError(
                f"{option} cannot be used with method {config.method}: {singles}. The server would have to see more "
                "than a sum."
            )
    return instance if config.dp_clip is None else clipping.ClippedMethod(instance, config.dp_clip)


def aggregators(config: Config, secret: bytes, folder: Path, summed: bool = False) -> tuple[Aggregator, ...]:
    """Return what stands between the uploads and the method of a configuration.

    `secret` is what noise is drawn from, known to the server alone; `folder` is the run's. `summed` says that masked
    uploads were added up before they come here.
    """
    stages: list[Aggregator] = []
    if config.weight_cap:
        stages.append(WeightCap(config.weight_cap))
    if config.aggregation != "mean":
        stages.append(Robust(config.aggregation, config.byzantine))
    elif config.attack != "none":  # else nothing comes here that is not finite
        stages.append(Finite(robust=not config.secure_aggregation and config.dp_clip is None))
    if config.secure_aggregation:
        stages.append(Sums(even=config.dp_clip is not None, means=summed))
    if config.dp_clip is not None:
        stages.append(_private(config, secret, folder))
    return tuple(stages)


def _private(config: Config, secret: bytes, folder: Path) -> Private:
    """Return the noise on the sums of a configuration, and their price so far."""
    assert config.dp_clip is not None, "asked before"
    assert config.dp_noise is not None, "checked with the configuration"
    clients = config.clients if config.split is None else Split.load(config.split).clients
    privacy_plan = PrivacyPlan(
        config.dp_clip, config.dp_noise, config.dp_delta, config.dp_epsilon, config.cohort, clients
    )
    return Private(privacy_plan, secret, Ledger(folder / LEDGER))


def images(config: DataOptions) -> Source:
    """Return the images of a configuration as they are, of the training images the share that it wants.

    A part of these is set aside for validation, or the data set's own validation part is read, if it says so. Raise
    UserError where it says both.
    """
    if config.validation_part and config.validation_share:
        raise UserError("validation_part and validation_share both say what chooses a round; leave one of them out.")
    load = partial(load_source, config.data, config.data_dir, cache=config.cache, how=preparation(config))
    data = take_share(load(), config.data_share)
    if config.validation_part and data.remark:
        raise UserError(f"validation_part needs images apart from the test, but {data.remark}.")
    if config.validation_part:
        return replace(data, validation=load(test="validation").test)
    return hold_out(data, config.validation_share)


def preparation(config: DataOptions) -> Preparation:
    """Return how the images of a configuration are brought to one form while they are decoded."""
    size = None if config.resize is None else (config.resize, config.resize)
    window = None if config.window is None else (config.window[0], config.window[1])
    return Preparation(size, config.channels, config.crop, window, config.group_pattern)


def source(config: Config) -> Source:
    return fit_to_network(config, images(config))


def fit_to_network(config: Config, data: Source) -> Source:
    """Return images shrunk and padded as a configuration says and as its network needs, with its constants."""
    data = shrink(data, config.shrink)
    _, height, width, _ = data.train.images.shape
    size = padded(config, height, width)
    if network_name(config) in hubs.PRETRAINED:
        data = replace(data, mean=MEAN[: len(data.mean)], std=STD[: len(data.std)])
    data = pad_source(data, size) if size is not None and (height, width) != (size, size) else data
    return replace(data, mean=_pixels(config, "pixel_mean", data.mean), std=_pixels(config, "pixel_std", data.std))


def _pixels(config: Config, name: str, own: tuple[float, ...]) -> tuple[float, ...]:
    """Return a constant of normalization for every channel: what a configuration says, or the data's `own`."""
    values = getattr(config, name)
    if values is None or len(values) == len(own):
        return values or own
    if len(values) > 1:
        raise UserError(f"{name} has {len(values)} numbers, but the images have {len(own)} channels; give one each.")
    return values * len(own)


def padded(config: Config, height: int, width: int) -> int | None:
    """Return the size to which images are padded as a configuration says or its network needs; None: they stay."""
    needs = {"resnet8": (8, 4), "resnet9": (16, 8), "vit": (4, 4), "wrn": (8, 4)}
    least, multiple = needs.get(network_name(config), (1, 1))
    if config.image_size is not None or multiple == 1:
        return config.image_size
    return max(least, -(-max(height, width) // multiple) * multiple)


def batch_rules(config: BatchOptions) -> tuple[Batching, Batching]:
    """Return the batch rule of the clients, and that of the server's own training."""
    batching = Batching(config.labeled_batch, config.unlabeled_batch, config.epochs, config.epoch, config.steps)
    serving = replace(
        batching,
        labeled=batching.labeled if config.server_batch is None else config.server_batch,
        epochs=config.epochs if config.server_epochs is None else config.server_epochs,
        steps=None,
    )
    return batching, serving


def scenario(config: PartitionOptions) -> Scenario:
    return Scenario(**{each.name: getattr(config, each.name) for each in fields(SplitOptions)}, seed=config.split_seed)


def split_of(config: Config, data: Source, split: Split | None = None) -> Split:
    """Return the split of a configuration: the `split` that was drawn before, the saved one it names, or a new one."""
    if split is None and config.split is not None:
        if not config.split.is_file():
            raise UserError(f"{config.split}: there is no such file; save a split with halfmoon data --save.")
        split = Split.load(config.split)
    if split is not None:
        split.check(data)
        return split
    unknown = int((data.train.labels == UNKNOWN).sum())
    if unknown:
        raise UserError(
            f"{data.name}: {unknown:,} training images have no label, which no split rule can deal; say who holds them "
            "with --split."
        )
    return scenario(config).split(data.train.labels, data.classes, data.name)


def examples(images: Images, device: torch.device) -> Examples:
    """Return images as tensors (N, C, H, W) on a device; those that are mapped into memory stay where they are."""
    if isinstance(images.images, np.memmap):
        pixels = torch.from_numpy(images.images).permute(0, 3, 1, 2)
    else:  # a copy: arrays that lie in the bytes of a file cannot be written to, and PyTorch warns of them
        pixels = torch.from_numpy(np.array(images.images.transpose(0, 3, 1, 2), order="C"))
    return Examples(pixels.to(device), torch.from_numpy(images.labels).to(device))


def network_name(config: Config) -> str:
    if config.network != "auto":
        return config.network
    return "small" if config.data == "digits" else "resnet9"


def _network(config: Config, form: ImageSpec) -> Network:
    channels, height, width = form.image
    size = (height, width)
    network = networks.make(network_name(config), channels, len(form.classes), size, config.norm, config.width)
    network.check(form.image)
    network = replace(network, precision=config.precision)
    start = initial_weights(config)
    if config.network in hubs.PRETRAINED and (own := published(config.network)) is not None:
        weight_files.register(own)  # the terms of a federation name it by its hash
    if start is None:
        if frozen_layers(config):
            raise UserError("freeze needs weights: layers that stay at random values learn nothing.")
        return network
    network = fine_tune(network, read_weights(start), frozen_layers(config), form.classes)
    if config.dp_clip is not None and network.norm == "batch":
        raise UserError(
            "dp_clip needs a network that tracks no statistics of batches in its trained part: they would leave the "
            "clients without noise; freeze the backbone, or set norm to 'group' or 'none'."
        )
    return network


def views(config: Config, form: ImageSpec) -> Views:
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


def _optimizer(config: Config, network: Network) -> Optimizer:
    if config.optimizer == "adam":
        optimizer: Optimizer = Adam(config.lr, weight_decay=config.weight_decay)
    else:
        optimizer = SGD(config.lr, config.momentum, config.weight_decay, config.nesterov)
    if config.clip_norm is not None or config.clip_value is not None:
        optimizer = GradientClipping(optimizer, config.clip_norm, config.clip_value)
    if config.backbone_lr == 1:
        return optimizer
    with torch.device("meta"):
        every = network.init(torch.Generator())["params"]
    return LayerwiseLearningRate(optimizer, config.backbone_lr, backbone_paths(network, tree.flatten(every)))


def device(config: MachineOptions) -> torch.device:
    """Return where to compute; raises `UserError` where there is no such device."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda', but this PyTorch sees no GPU; use device = 'auto' or 'cpu'.")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def executor(config: Config) -> Executor:
    """Return the executor of a cohort's clients; "auto" is vmap on a GPU and the loop on a CPU."""
    if config.executor != "auto":
        return config.executor
    return "vmap" if device(config).type == "cuda" else "loop"


def choose_executor(config: Config, network: Network, image: tuple[int, int, int]) -> Config:
    """Return the configuration of a new run: on a processor tiny networks take vmap, where nobody has said what to do.

    `image` is (C, H, W). How tiny is measured (`results/peers.md`) and fixed, so that a run does not depend on how busy
    a machine is.
    """
    if config.executor != "auto" or device(config).type != "cpu":
        return config
    products = network.count_products(image)
    return config if products is None or products > TINY else replace(config, executor="vmap")


def max_vmapped_clients(config: Config) -> int | None:
    """Return how many clients vmap lifts at most as one program; None: as many as there are."""
    return CHUNK if device(config).type == "cpu" else None


def threads(config: Config) -> int:
    """Return with how many processor threads a client of a simulation trains.

    One, where nobody says how many, on a processor: convolutions add in another order with each number of threads, so
    a run would depend on the machine. Processors are used by training several clients (`halfmoon.runs.workers`). A
    method that has all rows in one place has one client: all.
    """
    if config.threads is None and device(config).type == "cpu" and not registry.entry(config.method).pooled:
        return 1
    return site_threads(config)


def site_threads(config: Config) -> int:
    """Return with how many processor threads a site, or the server of a federation, computes."""
    number = config.threads
    if number is None and network_name(config) == "small" and device(config).type == "cpu":
        number = 1  # its convolutions are smaller than the cost of waking a second thread
    # More threads than processors only cost, and thousands crash the process.
    return min(number, os.cpu_count() or 1) if number else torch.get_num_threads()


@contextmanager
def use_threads(number: int) -> Iterator[None]:
    """Compute with so many processor threads, and leave PyTorch as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)

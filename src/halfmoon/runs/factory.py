"""Build data, split, task, views, batch rules, methods and aggregators from a configuration."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from halfmoon.aggregation import Aggregator
from halfmoon.aggregation.privacy import clipping
from halfmoon.aggregation.privacy.dp import DifferentialPrivacy, PrivacyPlan
from halfmoon.aggregation.robust import FiniteCheck, RobustAggregator
from halfmoon.aggregation.secure.fixed_point import FixedPointMean
from halfmoon.aggregation.weights import WeightCap
from halfmoon.api.types import Method, Task
from halfmoon.config.schema import Config, count_rounds, initial_weights, method_options
from halfmoon.config.sections import BatchOptions, DataOptions, MachineOptions, PartitionOptions
from halfmoon.config.validation import effective_norm
from halfmoon.core import hubs, tree, weight_files
from halfmoon.core.arithmetic import gpu_arithmetic
from halfmoon.core.errors import UserError
from halfmoon.core.hubs import frozen_layers
from halfmoon.core.normalize import Normalize
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
from halfmoon.core.split_options import SplitOptions
from halfmoon.core.user_cache import user_cache
from halfmoon.data import (
    Images,
    Scenario,
    Source,
    Split,
    hide_last_classes,
    hold_out,
    memory,
    pad_source,
    shrink,
    take_share,
)
from halfmoon.data import load as load_source
from halfmoon.data.images import UNKNOWN
from halfmoon.data.preparation import Preparation
from halfmoon.data.views import Labeled, Plain, Shared, Strong, StrongFedLoKe, StrongSemiFL, View, Weak
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.sampling import Batching, Views
from halfmoon.methods import registry
from halfmoon.models import Network
from halfmoon.models import registry as networks
from halfmoon.models.efficientnet import MEAN, STD
from halfmoon.models.finetuned import backbone_paths, feature_head, fine_tune
from halfmoon.models.hubs import weights_file as published_weights_file
from halfmoon.models.weights import read_weights_file as read_weights
from halfmoon.runs.features import Progress, select_inputs
from halfmoon.runs.privacy_ledger import LEDGER, Ledger

MAX_VMAP_PRODUCTS = 500_000
"""Largest number of multiplications per image of a network for which vmap is faster on a CPU than the loop."""

MAX_VMAPPED_CLIENTS_ON_CPU = 20
"""Clients that vmap batches on a CPU: more are not faster, and leave no work for other processes."""


@dataclass(frozen=True)
class ImageSpec:
    """The images of a federation as networks receive them.

    Attributes:
        image: channels, height and width.
        classes: names of the classes.
        mirror, mean, std: those of `halfmoon.data.Source`.
    """

    image: tuple[int, int, int]
    classes: tuple[str, ...]
    mirror: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, source: Source) -> "ImageSpec":
        """Describe the images of a data set."""
        height, width, channels = source.train.images.shape[1:]
        return cls((channels, height, width), source.classes, source.mirror, source.mean, source.std)


@dataclass(frozen=True)
class Problem:
    """Everything that the methods of a comparison share.

    Attributes:
        source: the data set.
        split: the client of each image, and which images are labeled.
        train: training images, uint8 (N, C, H, W), or cached features, with labels.
        test: the same for test images; None if no test image may be used.
        task: the network, the optimizer and the rules that methods share.
        views: the augmentations by name.
        batching: the batch rule of clients.
        server_batching: the batch rule of training at the server.
        input_size: height and width of the images before they were shrunk and padded.
        validation: validation images, which no client trains on.

    Examples:
        >>> problem = halfmoon.problem(data=(X, y), clients=5)
        >>> problem.split.clients
        5
    """

    source: Source
    split: Split
    train: Examples
    test: Examples | None
    task: Task
    views: Views
    batching: Batching
    server_batching: Batching
    input_size: tuple[int, int]
    validation: Examples | None = None

    def __repr__(self) -> str:
        return f"{self.source}\n{self.split}"


def build_problem(
    config: Config,
    split: Split | None = None,
    methods: Sequence[str] = (),
    raw: Source | None = None,
    progress: Progress = lambda *_: None,
) -> Problem:
    """Build data, split, task, views and batch rules of a configuration.

    Args:
        config: the configuration.
        split: a split to use instead of that of the configuration.
        methods: all methods that will run; views that none of them needs are left out of cached features.
        raw: the data set, if it is already loaded.
        progress: receives the number of images that have features, and the number of all images.

    Raises:
        UserError: the data, the split or the network do not fit.
    """
    # The raw data set has the images as they were decoded; `data` has them shrunk and padded for the network.
    raw = load_images(config) if raw is None else raw
    data = fit_to_network(config, raw)
    split = get_split(config, data, split)
    compute_device = select_device(config)
    image_spec = ImageSpec.of(data)
    batching, server_batching = build_batch_rules(config)
    train = to_examples(data.train, compute_device)
    test = to_examples(data.test, compute_device)
    validation = None if data.validation is None else to_examples(data.validation, compute_device)
    _, height, width, _ = raw.train.images.shape
    # With a frozen backbone, clients train on cached features instead of images.
    model_inputs = select_inputs(
        config,
        build_task(config, image_spec),
        build_views(config, image_spec),
        user_cache("features"),
        methods=methods,
        progress=progress,
    )
    return Problem(
        source=data,
        split=split,
        train=model_inputs.prepare_training(train),
        test=model_inputs.prepare_test(test),
        task=model_inputs.task,
        views=model_inputs.views,
        batching=batching,
        server_batching=server_batching,
        input_size=(height, width),
        validation=None if validation is None else model_inputs.prepare_test(validation),
    )


def build_task(config: Config, image_spec: ImageSpec) -> Task:
    """Build the task of a configuration: the network, its optimizer, and the options that all methods share.

    Args:
        config: the configuration.
        image_spec: the shape, classes and statistics of the images.

    Raises:
        UserError: the images do not fit the network, or options contradict each other.
    """
    # Of the learning rate, over the rounds.
    schedules = {"constant": ConstantSchedule(), "cosine": CosineSchedule(), "step": StepSchedule()}
    network = _build_network(config, image_spec)
    # With the option `features` clients train the head on cached outputs of the backbone, which must not change then.
    if config.features and feature_head(network) is None:
        raise UserError("features needs a frozen backbone: set tune to 'head', or leave features out.")
    return Task(
        network=network,
        optimizer=_build_optimizer(config, network),
        normalize=Normalize(image_spec.mean, image_spec.std),
        # Of batch normalization: whether labeled and unlabeled images share a forward pass, and whether pseudo-labels
        # and tests use the statistics of the batch or the running ones.
        statistics=config.statistics,
        labeling=config.labeling,
        testing=config.test_statistics,
        upload_precision=config.upload_precision,
        rounds=count_rounds(config),
        schedule=schedules[config.schedule],
    )


def build_method(config: Config) -> Method:
    """Build the method of a configuration, and check that its other options can be combined with the method.

    Raises:
        UserError: the aggregation rule, class weights, secure aggregation or differential privacy do not fit the method.
    """
    entry = registry.entry(config.method)
    instance = registry.with_options(entry.method, method_options(config, config.method))
    # The checks below depend on the method's options, which the entry of the catalog does not have.
    entry = replace(entry, method=instance)
    norm = effective_norm(config)  # of the trained layers: "batch", "group" or "none"
    # Why the server needs the upload of every client, and not only their sum; "" if the sum is enough.
    individual_reason = entry.individual_upload_reason(norm)
    conflict = None if config.aggregation == "mean" else entry.robust_rule_conflict(config.aggregation, norm)
    if conflict:
        raise UserError(f"aggregation {config.aggregation!r} cannot be used with method {config.method}: {conflict}.")
    # `core` is the part of the method with its loss: the objective of FedAvg, otherwise the method itself.
    if config.class_weights != "none" and not _uses_class_weights(registry.core(instance)):
        raise UserError(
            f"class_weights has no effect on method {config.method}, whose loss of labeled images is no weighted "
            "cross-entropy: leave it out."
        )
    for option in ("secure_aggregation", "dp_clip"):
        if getattr(config, option) and individual_reason:
            raise UserError(
                f"{option} cannot be used with method {config.method}: {individual_reason}. The server would have to see more "
                "than a sum."
            )
    if config.dp_clip is None:
        return instance
    return clipping.ClippedMethod(instance, config.dp_clip)


def _uses_class_weights(method: Any) -> bool:
    """Check whether a method, its objective, or the method that it extends weights its supervised loss by class."""
    if getattr(method, "uses_class_weights", False):
        return True
    inner = [getattr(method, name, None) for name in ("objective", "method")]
    return any(_uses_class_weights(part) for part in inner if part is not None)


def balanced_weights(labels: np.ndarray, classes: int) -> tuple[float, ...]:
    """Compute the weights n / (classes * count) of classes, by which all classes count the same in a loss.

    Args:
        labels: the n labels, int64 (n,).
        classes: the number of classes. A class without labels has the weight 1.
    """
    counts = np.bincount(labels, minlength=classes)
    weights = np.divide(len(labels), classes * counts, out=np.ones(classes), where=counts > 0)
    return tuple(float(weight) for weight in weights)


def build_aggregators(config: Config, secret: bytes, folder: Path, summed: bool = False) -> tuple[Aggregator, ...]:
    """Create the aggregators of a configuration, the stages that uploads pass one after the other.

    The order is fixed: weights are capped, then uploads that are hostile or not finite are handled, and then the secure
    sum is computed, to which differential privacy adds noise.

    Args:
        config: the configuration.
        secret: the seed of the privacy noise, known to the server only.
        folder: the run folder, for the ledger of the privacy that all rounds have spent.
        summed: masked uploads were summed before they reach the aggregators, as in a federation. In a simulation the
            aggregator itself sums them.

    Returns:
        The aggregators in their order; () if the plain mean of uploads is enough.
    """
    stages: list[Aggregator] = []
    if config.weight_cap:
        stages.append(WeightCap(config.weight_cap))
    if config.aggregation != "mean":
        stages.append(RobustAggregator(config.aggregation, config.byzantine))
    elif config.attack != "none":
        # Without attacks uploads are finite: local training raises `Diverged` otherwise.
        # The error may advise a robust rule, except where secure sums hide single uploads or noise needs a plain mean.
        can_advise_rule = not config.secure_aggregation and config.dp_clip is None
        stages.append(FiniteCheck(robust=can_advise_rule))
    if config.secure_aggregation:
        # Differential privacy bounds what one client can change, so all clients have the same weight there ("even").
        # `means`: the uploads are the mean of the sum already, and are only passed on.
        stages.append(FixedPointMean(even=config.dp_clip is not None, means=summed))
    if config.dp_clip is not None:
        stages.append(_build_privacy(config, secret, folder))
    return tuple(stages)


def _build_privacy(config: Config, secret: bytes, folder: Path) -> DifferentialPrivacy:
    """Create the aggregator of differential privacy, which replaces the clipped updates by their mean with noise.

    The ledger in the run folder lists the rounds so far, from which the privacy that they have spent is computed.
    """
    assert config.dp_clip is not None, "called with dp_clip only"
    assert config.dp_noise is not None, "checked with the configuration"
    clients = config.clients if config.split is None else Split.load(config.split).clients
    privacy_plan = PrivacyPlan(
        clip=config.dp_clip,  # the largest norm of a client's update
        noise=config.dp_noise,  # standard deviation in units of the clip
        delta=config.dp_delta,
        budget=config.dp_epsilon,  # the epsilon at which training stops; None: no limit
        cohort=config.cohort,
        clients=clients,
    )
    return DifferentialPrivacy(privacy_plan, secret, Ledger(folder / LEDGER))


def load_images(config: DataOptions) -> Source:
    """Load the images of a configuration: the share `data_share` of the training images, test and validation images.

    Validation images are a share of the training images, or the validation part of the data set. Images of the last
    `unknown_classes` classes get no label, as images of classes that the model does not know.

    Raises:
        UserError: the data cannot be read, or both kinds of validation images are configured.
    """
    if config.validation_part and config.validation_share:
        raise UserError("validation_part and validation_share both select validation images; leave one of them out.")
    # `preparation`: size, channels and window of gray values to which images are converted when they are decoded.
    load = partial(load_source, config.data, config.data_dir, cache=config.cache, preparation=image_preparation(config))
    data = hide_last_classes(take_share(load(), config.data_share), config.unknown_classes)
    # A note means that the files define no test images, and others, maybe validation images, were selected.
    if config.validation_part and data.selection_note:
        raise UserError(f"validation_part needs images apart from the test, but {data.selection_note}.")
    if config.validation_part:
        validation = hide_last_classes(load(test="validation"), config.unknown_classes).test
        return replace(data, validation=validation)
    return hold_out(data, config.validation_share)


def image_preparation(config: DataOptions) -> Preparation:
    """Build the rule by which image files are decoded: size, channels, crop, intensity window and groups."""
    size = None if config.resize is None else (config.resize, config.resize)
    window = None if config.window is None else (config.window[0], config.window[1])
    return Preparation(size, config.channels, config.crop, window, config.group_pattern, config.skip_unreadable)


def load_source_for_network(config: Config) -> Source:
    """Load the images of a configuration, shrunk and padded for its network."""
    return fit_to_network(config, load_images(config))


def fit_to_network(config: Config, data: Source) -> Source:
    """Shrink and pad images for the network of a configuration, and set their mean and standard deviation."""
    data = shrink(data, config.shrink)
    height, width = data.train.images.shape[1:3]
    size = padded_side(config, height, width)  # of the square that the network takes; None: any size
    # Pretrained networks need the constants with which they were trained.
    if network_name(config) in hubs.PRETRAINED:
        data = replace(data, mean=MEAN[: len(data.mean)], std=STD[: len(data.std)])
    if size is not None and (height, width) != (size, size):
        data = pad_source(data, size)
    mean = channel_values(config, "pixel_mean", data.mean)
    std = channel_values(config, "pixel_std", data.std)
    return replace(data, mean=mean, std=std)


def channel_values(config: Config, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    """Return one value of normalization for each channel: those of an option, or the data set's `default`.

    A single value in the option is for all channels.

    Args:
        config: the configuration.
        name: the option, "pixel_mean" or "pixel_std".
        default: the values of the data set, one a channel.

    Raises:
        UserError: the option has another number of values than the images have channels.
    """
    values = getattr(config, name)
    channels = len(default)
    if values is None:
        return default
    if len(values) == 1:
        return values * channels
    if len(values) != channels:
        raise UserError(f"{name} has {len(values)} numbers, but the images have {channels} channels; give one each.")
    return values


def padded_side(config: Config, height: int, width: int) -> int | None:
    """Compute the side in pixels to which images are padded, by option or for the network; None: no padding."""
    # The smallest side that a network accepts, and the factor by which its strides divide the side.
    needs = {"resnet8": (8, 4), "resnet9": (16, 8), "vit": (4, 4), "wrn": (8, 4)}
    min_side, multiple = needs.get(network_name(config), (1, 1))
    if config.image_size is not None or multiple == 1:
        return config.image_size
    # The larger side, rounded up to a multiple.
    return max(min_side, -(-max(height, width) // multiple) * multiple)


def build_batch_rules(config: BatchOptions) -> tuple[Batching, Batching]:
    """Build the rules of batch sizes and epochs: that of clients, and that of training at the server.

    The server trains in some methods, on labeled images only.
    """
    client_rule = Batching(
        labeled=config.labeled_batch,
        unlabeled=config.unlabeled_batch,
        epochs=config.epochs,
        epoch=config.epoch,  # the set, labeled or unlabeled, of which an epoch is a pass
        steps=config.steps,
    )
    # Options of the server default to those of clients.
    server_rule = replace(
        client_rule,
        labeled=config.labeled_batch if config.server_batch is None else config.server_batch,
        epochs=config.epochs if config.server_epochs is None else config.server_epochs,
        steps=None,  # a fixed number of steps is that of clients; the server always trains by epochs
    )
    return client_rule, server_rule


def build_scenario(config: PartitionOptions) -> Scenario:
    """Build the rule by which images and labels are distributed over clients."""
    return Scenario(
        **{field.name: getattr(config, field.name) for field in fields(SplitOptions)}, seed=config.split_seed
    )


def get_split(config: Config, data: Source, split: Split | None = None) -> Split:
    """Check `split`, or load the split file that the configuration names, or draw a new split.

    A split assigns each training image to a client, with or without its label.

    Args:
        config: the configuration, with the rule (`setting`) and the seed of a new split.
        data: the data set that is split.
        split: a split of its training images, if there is one already.

    Raises:
        UserError: the split does not fit the data, or training images without labels need a split file.
    """
    if split is None and config.split is not None:
        if not config.split.is_file():
            raise UserError(f"{config.split}: there is no such file; save a split with `halfmoon data --save`.")
        split = Split.load(config.split)
    if split is not None:
        split.check(data)
        return split
    # The scenario is the rule of the split. An open set has images of unknown classes, which are at clients without a label.
    if config.unknown_classes:
        return build_scenario(config).split_open_set(data.train.labels, data.classes, data.name)
    if memory.is_memory_name(config.data):
        # Data that a Python program passes as arrays may have known clients, and images without a label.
        return build_scenario(config).split_partially_labeled(
            data.train.labels, data.classes, data.name, client=data.train.clients
        )
    unknown_labels = int((data.train.labels == UNKNOWN).sum())
    if unknown_labels:
        # `UserError` shows {split} as the flag --split on the command line, and as the keyword split in Python.
        raise UserError(
            f"{data.name}: {unknown_labels:,} training images have no label, which no split rule can deal; say who holds them "
            "with {split}.",
            option="split",
        )
    return build_scenario(config).split(data.train.labels, data.classes, data.name)


def to_examples(images: Images, device: torch.device) -> Examples:
    """Convert images to tensors (N, C, H, W) on a device; memory-mapped images are not copied."""
    if isinstance(images.images, np.memmap):
        pixels = torch.from_numpy(images.images).permute(0, 3, 1, 2)
    else:
        # A copy, because PyTorch warns of arrays that cannot be written to, as those over the bytes of a file.
        pixels = torch.from_numpy(np.array(images.images.transpose(0, 3, 1, 2), order="C"))
    return Examples(pixels.to(device), torch.from_numpy(images.labels).to(device))


def network_name(config: Config) -> str:
    """Return the name of the network; "auto" is "small" for the digits and "resnet9" for other data."""
    if config.network != "auto":
        return config.network
    return "small" if config.data == "digits" else "resnet9"


def _build_network(config: Config, image_spec: ImageSpec) -> Network:
    """Build the network of a configuration, with its initial weights and frozen layers if it has some.

    Args:
        config: the configuration.
        image_spec: the shape and the classes of the images.

    Raises:
        UserError: the network does not fit the images, or its options contradict each other.
    """
    channels, height, width = image_spec.image
    classes = len(image_spec.classes)
    network = networks.make(network_name(config), channels, classes, (height, width), config.norm, config.width)
    network.check(image_spec.image)
    network = replace(network, precision=config.precision)
    # A path, or "sha256:..." in a federation, where every site has the file in another folder.
    weights_name = initial_weights(config)
    published_path = published_weights_file(config.network) if config.network in hubs.PRETRAINED else None
    if published_path is not None:
        # So that this process finds the file by its hash, by which the terms of a federation name it.
        weight_files.register(published_path)
    # Without weights the network is random, and all of it is trained.
    if weights_name is None:
        if frozen_layers(config):
            raise UserError("freeze needs weights: layers that stay at random values learn nothing.")
        return network
    network = fine_tune(
        network,
        weights=read_weights(weights_name),
        patterns=frozen_layers(config),  # names of the layers that are not trained, with wildcards
        classes=image_spec.classes,
    )
    if config.dp_clip is not None and network.norm == "batch":
        raise UserError(
            "dp_clip needs a network that tracks no statistics of batches in its trained part: they would leave the "
            "clients without noise; freeze the backbone, or set norm to 'group' or 'none'."
        )
    return network


def build_views(config: Config, image_spec: ImageSpec) -> Views:
    """Build the augmentations ("views") of labeled and unlabeled images.

    Labeled images have one view. Of unlabeled images a method asks for several by name, such as "weak" for the
    pseudo-labels and "strong" for training. The strong views are those of published methods (FedDure, SemiFL, FedLoKe).

    Args:
        config: the configuration.
        image_spec: states whether a mirrored image has the same class, the default of the option `flip`.
    """
    flip = image_spec.mirror if config.flip is None else config.flip
    # "cutout" is cropped, mirrored and has a box of zeros; "weak" is cropped and mirrored; "plain" is not changed.
    labeled_views: dict[str, View] = {"cutout": Labeled(flip=flip), "weak": Weak(flip=flip), "plain": Plain()}
    strong_views = {"feddure": Strong, "semifl": StrongSemiFL, "fedloke": StrongFedLoKe}
    labeled = labeled_views[config.labeled_view]
    strong = strong_views[config.strong_view](flip=flip)
    unlabeled: dict[str, View] = {"plain": Plain(), "weak": Weak(flip=flip), "strong": strong}
    if config.shared_views:
        # All images of a batch get the same random draw, so the batch needs a fixed size.
        assert isinstance(config.labeled_batch, int), "checked with the configuration"
        assert isinstance(config.unlabeled_batch, int), "checked with the configuration"
        labeled = Shared(labeled, config.labeled_batch)
        unlabeled = {name: Shared(view, config.unlabeled_batch) for name, view in unlabeled.items()}
    return Views(labeled, unlabeled)


def _build_optimizer(config: Config, network: Network) -> Optimizer:
    """Build the clients' optimizer, with gradient clipping and another learning rate for the backbone if configured.

    The option `backbone_lr` is a factor on `lr`; 1 trains backbone and head at the same rate.
    """
    if config.optimizer == "adam":
        optimizer: Optimizer = Adam(lr=config.lr, weight_decay=config.weight_decay)
    else:
        optimizer = SGD(
            lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, nesterov=config.nesterov
        )
    if config.clip_norm is not None or config.clip_value is not None:
        optimizer = GradientClipping(optimizer, norm=config.clip_norm, value=config.clip_value)
    if config.backbone_lr == 1:
        return optimizer
    with torch.device("meta"):
        # Only the names are needed; tensors on the device "meta" have no memory.
        params = network.init(torch.Generator())["params"]
    paths = backbone_paths(network, tree.flatten(params))
    return LayerwiseLearningRate(optimizer, factor=config.backbone_lr, paths=paths)


def select_device(config: MachineOptions) -> torch.device:
    """Select the device of a configuration; raise `UserError` if it is a GPU that does not exist."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda', but this PyTorch sees no GPU; use device = 'auto' or 'cpu'.")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def select_executor(config: Config) -> Literal["loop", "vmap"]:
    """Select the executor of a cohort's clients.

    "auto" remains in the files of runs that started without a choice: it is vmap on a GPU and the loop on a CPU.
    """
    if config.executor != "auto":
        return config.executor
    return "vmap" if select_device(config).type == "cuda" else "loop"


def choose_executor(config: Config, network: Network, image: tuple[int, int, int]) -> Config:
    """Choose how the clients of a simulation are trained, if the option is "auto": by vmap for tiny networks on a CPU.

    With the executor "vmap" all clients of a cohort take their steps in one vectorized computation; with "loop" one
    client is trained after the other.

    The limit is measured (`results/peers.md`) and fixed, so that a run does not depend on the load of a machine.

    Args:
        config: the configuration.
        network: the network.
        image: channels, height and width.

    Returns:
        The configuration, whose `executor` is changed to "vmap" or remains "auto", which is "loop" on a CPU.
    """
    if config.executor != "auto" or select_device(config).type != "cpu":
        return config
    products = network.count_products(image)  # multiplications of a forward pass; None if they are not known
    if products is None or products > MAX_VMAP_PRODUCTS:
        return config
    return replace(config, executor="vmap")


def max_vmapped_clients(config: Config) -> int | None:
    """Return the largest number of clients that vmap batches; None: no limit."""
    return MAX_VMAPPED_CLIENTS_ON_CPU if select_device(config).type == "cpu" else None


def count_threads(config: Config) -> int:
    """Choose the number of threads with which a client of a simulation trains.

    By default it is one on a CPU: convolutions add in another order with each number of threads, so a run would depend
    on the machine. Several clients train at the same time instead (`halfmoon.runs.workers`). A centralized method has
    one client, which uses all threads.
    """
    is_centralized = registry.entry(config.method).pooled
    if config.threads is None and select_device(config).type == "cpu" and not is_centralized:
        return 1
    return count_site_threads(config)


def count_site_threads(config: Config) -> int:
    """Choose the number of threads of a site, or of the server of a federation."""
    number = config.threads
    if number is None and network_name(config) == "small" and select_device(config).type == "cpu":
        # Waking a second thread takes longer than a convolution of this network.
        number = 1
    # More threads than processors only cost, and thousands crash the process.
    return min(number, os.cpu_count() or 1) if number else torch.get_num_threads()


@contextmanager
def apply_compute_settings(config: Config, threads: int) -> Iterator[None]:
    """Set PyTorch's threads and the arithmetic of a GPU for a run, and restore both at the end."""
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with gpu_arithmetic(config.precision, config.deterministic):
            yield
    finally:
        torch.set_num_threads(previous_threads)

"""The sections of a configuration. They declare each option once, with its type, range, default and help.

`Config` inherits from all sections. Code that needs only some options is typed with their section.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from halfmoon.core.ranges import BELOW_HALF, BELOW_ONE, BETWEEN, POSITIVE, PROBABILITY, SHARE, minimum
from halfmoon.core.split_options import SplitOptions

Scalar = bool | int | float | str
Options = Mapping[str, Scalar | Mapping[str, Scalar]]


@dataclass(frozen=True)
class MethodOptions:
    """The method of a run, the baselines trained with it, and their options."""

    method: Annotated[str, "the method to train (see halfmoon methods); recommended: by who has labels"] = "feddure"
    baselines: Annotated[tuple[str, ...], "more methods to train on the same split and cohorts, for comparison"] = ()
    preset: Annotated[Literal["none", "paper"], "paper: set options that you leave out to the paper's values"] = "none"
    protocol: Annotated[
        Literal["none", "few-labels", "sage", "fedloke", "fedmatch"],
        "sets options that you leave out: few-labels, for your images; or the values of a paper: sage (20 clients, "
        "8 a round), fedloke (50, 20), fedmatch (100, 5)",
    ] = "none"
    options: Annotated[
        Options, "options of the method; a table named after a method has the options of that method"
    ] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class DataOptions:
    """The images, and how they are read."""

    data: Annotated[str, "a data set: its name, its folder, or owner/name on the Hugging Face hub"] = "digits"
    data_dir: Annotated[Path | None, "the folder of named data sets; none: the Hugging Face hub"] = None
    cache: Annotated[Path | None, "a folder for decoded images, or off; none: the user's cache, for large sets"] = None
    data_share: Annotated[float, "share of the training images of each class that is used", SHARE] = 1.0
    unknown_classes: Annotated[
        int,
        "open set: the last N classes have no labels; their images are unlabeled (unknown_share) and not tested",
        minimum(0),
    ] = 0
    validation_share: Annotated[
        float, "share of the training images of each class held out to choose a round by; 0: none", BELOW_ONE
    ] = 0.0
    validation_part: Annotated[
        bool, "choose a round by the validation images of the data set: validation*.parquet or validation/CLASS"
    ] = False
    resize: Annotated[
        int | None,
        "resample all images to this size while they are decoded; none: leave sizes as they are",
        minimum(1),
    ] = None
    channels: Annotated[int | None, "1: convert all images to gray, 3: to RGB; none: leave them as they are"] = None
    crop: Annotated[bool, "with resize: preserve proportions, and crop the longer side to its middle"] = False
    window: Annotated[
        tuple[float, ...] | None, "values for black and white in images of 12 and 16 bits; none: each image's extremes"
    ] = None
    group_pattern: Annotated[
        str | None, "a regular expression that finds the patient or object in FOLDER/NAME; none: DICOM's patients"
    ] = None
    skip_unreadable: Annotated[
        bool, "leave out any number of images that cannot be read; otherwise more than 5 % of them stop the run"
    ] = False
    image_size: Annotated[
        int | None, "pad images with zeros to this size; none: what the network needs", minimum(1)
    ] = None
    pixel_mean: Annotated[
        tuple[float, ...] | None, "mean to subtract from pixels (0 to 1), one or one a channel; none: the data's"
    ] = None
    pixel_std: Annotated[
        tuple[float, ...] | None, "standard deviation to divide pixels by, in the same form; none: the data's"
    ] = None
    shrink: Annotated[int, "average-pool the images by this factor", minimum(1)] = 1


@dataclass(frozen=True)
class PartitionOptions(SplitOptions):
    """The partition: the images of each client, and which of them are labeled."""

    split_seed: Annotated[int, "seed of the split; the seed of training does not change it", minimum(0)] = 0
    split: Annotated[Path | None, "a saved split to load instead of making one"] = None


@dataclass(frozen=True)
class RoundOptions:
    """The number of rounds, and of clients in a round."""

    cohort: Annotated[int, "clients that train in a round; all if there are fewer", minimum(1)] = 5
    rounds: Annotated[int, "rounds to train", minimum(1)] = 40
    seed: Annotated[int, "seed of the first model, the cohorts, batches and views", minimum(0)] = 0
    client_dropout: Annotated[float, "probability that a client of the cohort drops out of a round", BELOW_ONE] = 0.0


@dataclass(frozen=True)
class BatchOptions:
    """The batches of a step, the length of local training, and the budget that all methods share."""

    labeled_batch: Annotated[
        int | Literal["all"], "labeled images in a step; all: every labeled image of the client", minimum(1)
    ] = 10
    unlabeled_batch: Annotated[
        int | Literal["rest"],
        "unlabeled images in a step; rest: all, spread over one pass of the labeled ones",
        minimum(1),
    ] = 10
    epochs: Annotated[int, "local epochs in a round", minimum(1)] = 1
    epoch: Annotated[
        Literal["auto", "labeled", "unlabeled", "larger"],
        "the images an epoch passes over once; auto: labeled with unlabeled_batch rest, else unlabeled; "
        "larger: those that take a client more steps",
    ] = "auto"
    steps: Annotated[int | None, "local steps in a round instead of epochs", minimum(1)] = None
    server_batch: Annotated[
        int | None, "images in a step of training on the server; none: labeled_batch", minimum(1)
    ] = None
    server_epochs: Annotated[int | None, "epochs of training on the server in a round; none: epochs", minimum(1)] = None
    statistics: Annotated[
        Literal["joint", "separate"],
        "whether all views share a forward pass (joint), and so their batch statistics, or not",
    ] = "joint"
    labeling: Annotated[
        Literal["batch", "running"],
        "statistics that normalize images to pseudo-label: the batch's, or the model's running ones",
    ] = "batch"
    reuse_labeled: Annotated[
        bool, "add a client's labeled images to its unlabeled ones, without their labels (FedDB)"
    ] = False
    budget: Annotated[
        Literal["none", "labeled-steps", "forwards"],
        "the amount of training that is equal for all methods of a comparison",
    ] = "labeled-steps"
    reference: Annotated[
        str | None, "the method that sets the shared budget; none: the main one, in compare the one that trains longest"
    ] = None


@dataclass(frozen=True)
class NetworkOptions:
    """The network."""

    network: Annotated[
        str,
        "the network (auto: small for digits, else resnet9), my_module:make that returns an nn.Module, or "
        "transformers:FOLDER, torchvision:NAME, timm:NAME",
    ] = "auto"
    width: Annotated[int | None, "width of the network (2 is WRN-28-2); none: its default", minimum(1)] = None
    norm: Annotated[Literal["batch", "group", "none"], "how the network normalizes"] = "batch"
    precision: Annotated[
        Literal["float32", "float32-ieee", "tf32", "bf16"],
        "number format of matrix products in training; float32 is PyTorch's default, with TF32 convolutions on a GPU; "
        "float32-ieee never rounds to TF32, tf32 always; with bf16 evaluation is float32",
    ] = "float32"
    weights: Annotated[
        str | None,
        "a safetensors file of weights to start from; the head is initialized at random if its classes differ",
    ] = None
    freeze: Annotated[
        tuple[str, ...], "layers that are neither trained nor sent, by name (* and ?); backbone: all but the head"
    ] = ()
    tune: Annotated[
        Literal["auto", "head", "last", "all"],
        "instead of freeze, the part to train; auto: the head of a pretrained network, all of other networks",
    ] = "auto"
    features: Annotated[
        bool | None,
        "compute the features of a frozen backbone once, and train on them; none: for pretrained networks",
    ] = None
    backbone_lr: Annotated[float, "learning rate of all layers but the head, in units of lr", POSITIVE] = 1.0


@dataclass(frozen=True)
class OptimizerOptions:
    """The clients' optimizer, and the server's average of models over rounds."""

    optimizer: Annotated[Literal["adam", "sgd"], "the clients' optimizer"] = "adam"
    lr: Annotated[float, "the clients' learning rate", POSITIVE] = 3e-3
    momentum: Annotated[float, "momentum of sgd", minimum(0)] = 0.0
    nesterov: Annotated[bool, "Nesterov momentum in sgd"] = False
    weight_decay: Annotated[float, "weight decay of the clients' optimizer", minimum(0)] = 0.0
    clip_norm: Annotated[float | None, "largest Euclidean norm of a gradient; none: no clipping", POSITIVE] = None
    clip_value: Annotated[float | None, "largest absolute value in a gradient; none: no clipping", POSITIVE] = None
    class_weights: Annotated[
        Literal["none", "balanced"],
        "weights of the classes in the loss of labeled images; balanced: labels / (classes * labels of the class), "
        "counted over all clients",
    ] = "none"
    schedule: Annotated[
        Literal["constant", "cosine", "step"], "the learning rate over the rounds; step: a tenth at 1/2 and at 3/4"
    ] = "cosine"
    server_ema: Annotated[
        float,
        "decay of an exponential moving average of the server's models, which is evaluated; 0: no average",
        BELOW_ONE,
    ] = 0.0


@dataclass(frozen=True)
class ViewOptions:
    """The augmentation of images."""

    labeled_view: Annotated[
        Literal["cutout", "weak", "plain"], "how labeled images are augmented: weak with cutout, weak, or not at all"
    ] = "weak"
    strong_view: Annotated[
        Literal["feddure", "semifl", "fedloke"],
        "the paper whose RandAugment makes the strong views (FedDB uses SemiFL's)",
    ] = "feddure"
    shared_views: Annotated[bool, "draw one augmentation for all images of a step, as FedLoKe's code does"] = False
    flip: Annotated[bool | None, "mirror images at random; none: if the data set allows it"] = None


@dataclass(frozen=True)
class EvaluationOptions:
    """The measurements, and how often they are made."""

    confidence_threshold: Annotated[
        float, "confidence from which the diagnostics call a pseudo-label confident", PROBABILITY
    ] = 0.95
    test_statistics: Annotated[
        Literal["running", "batch"],
        "statistics that normalize test images; batch: those of 250 test images (FedDB's code)",
    ] = "running"
    evaluate_every: Annotated[
        int | None,
        "rounds between evaluations on the test images; none: so many that they are at most a tenth of a run's work",
        minimum(1),
    ] = None
    patience: Annotated[
        int | None,
        "evaluations in a row without a better validation accuracy (for equal ones: loss) after which training stops; "
        "none: train all rounds",
        minimum(1),
    ] = None
    client_models: Annotated[
        int,
        "clients of a round whose local models are measured as well, and the averaged model on their images",
        minimum(0),
    ] = 0


@dataclass(frozen=True)
class AggregationOptions:
    """Aggregation of uploads by the server, and attacks of hostile clients in a simulation."""

    aggregation: Annotated[
        Literal["mean", "clip", "cosine", "cosine-nnm", "cosine-trimmed", "median", "trimmed", "krum"],
        "how the server aggregates uploads; clip: to the cohort's median norm; cosine: also leave out updates that "
        "point away from the others; cosine-trimmed: also trim coordinates; cosine-nnm: also average each with its "
        "neighbors and clamp coordinates, the default of a federation",
    ] = "mean"
    byzantine: Annotated[
        float, "share of a cohort that trimmed, cosine-trimmed, cosine-nnm and krum expect to be hostile", BELOW_HALF
    ] = 0.2
    upload_precision: Annotated[
        Literal["float32", "float16", "int8"],
        "number format of updates that clients send; float16 needs half the bytes, int8 a quarter",
    ] = "float32"
    secure_aggregation: Annotated[bool, "the server learns only the sum of a cohort's uploads"] = False
    attack: Annotated[
        Literal["none", "sign-flip", "noise", "label-flip", "stale", "nan", "false-counts", "sign-flip-false-counts"],
        "what hostile clients of a simulation do",
    ] = "none"
    attackers: Annotated[float, "share of the clients that is hostile", BELOW_HALF] = 0.0
    attack_factor: Annotated[float, "length of a flipped update, relative to the true one", POSITIVE] = 1.0
    weight_cap: Annotated[
        float, "largest weight of a simulated upload, in its cohort's medians; 0: no cap", minimum(0)
    ] = 0.0


@dataclass(frozen=True)
class PrivacyOptions:
    """Client-level differential privacy."""

    dp_clip: Annotated[
        float | None, "client-level differential privacy: largest norm of a client's update; none: no privacy", POSITIVE
    ] = None
    dp_noise: Annotated[
        float | None, "standard deviation of the noise on the sum of updates, in units of dp_clip", POSITIVE
    ] = None
    dp_epsilon: Annotated[float | None, "epsilon at which training stops; none: epsilon is only computed", POSITIVE] = (
        None
    )
    dp_delta: Annotated[float, "delta for which epsilon is computed", BETWEEN] = 1e-5


@dataclass(frozen=True)
class MachineOptions:
    """Device, processes and folders of a run. They do not change its numbers."""

    device: Annotated[Literal["auto", "cpu", "cuda"], "where to compute"] = "auto"
    executor: Annotated[
        Literal["auto", "loop", "vmap"],
        "loop: clients one by one, vmap: batched; auto: the faster one on a GPU, else vmap for tiny networks; [federation]: loop",
    ] = "auto"
    deterministic: Annotated[
        bool,
        "only algorithms that give the same bits every time: on a GPU a resumed run equals a straight one, but is slower",
    ] = False
    threads: Annotated[
        int | None,
        "processor threads of each process; none: 1, or all for a centralized method",
        minimum(1),
    ] = None
    workers: Annotated[
        int | Literal["auto", "ray"],
        "processes in which the clients of a cohort train; auto: one a processor for large networks; ray: a cluster",
        minimum(1),
    ] = "auto"
    processes: Annotated[
        int | Literal["auto"],
        "runs that train at the same time; auto: one for each processor (default on the command line: auto)",
        minimum(1),
    ] = 1
    memory_cap: Annotated[int, "MB of client memory that stay in RAM; the rest is stored on disk", minimum(1)] = 2048
    checkpoint_every: Annotated[int, "rounds between checkpoints", minimum(1)] = 1
    run_dir: Annotated[Path | None, "the run folder; none: the next free runs/<data>-<method>-seed<seed>-<n>"] = None


SECTIONS: dict[str, type] = {
    "method": MethodOptions,
    "data": DataOptions,
    "clients and labels": PartitionOptions,
    "rounds": RoundOptions,
    "batches": BatchOptions,
    "network": NetworkOptions,
    "optimizer": OptimizerOptions,
    "views": ViewOptions,
    "evaluation": EvaluationOptions,
    "aggregation and attacks": AggregationOptions,
    "privacy": PrivacyOptions,
    "machine and run folder": MachineOptions,
}
"""The sections by their titles on help pages, in the order of these pages."""

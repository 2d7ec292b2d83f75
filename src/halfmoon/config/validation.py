"""Check combinations of options, and values that no range (`halfmoon.core.ranges`) can describe."""

import math
from collections.abc import Callable
from typing import Any

from halfmoon.core import hubs, toml
from halfmoon.core.errors import UserError

DEFAULT_DEFENSES = ("cosine-nnm", "cosine")
"""The aggregation of a federation whose file does not set one: the first rule that its method can be combined with."""

MIN_COHORT_FOR_DEFENSE = 4
"""The smallest cohort in which a robust aggregation can help."""

MEASURED_COHORT = 5
"""The smallest cohort in which the losses under the default rule were measured to be small."""


def default_aggregation(config: Any, method_entry: Callable[[str], Any]) -> str:
    """Choose the aggregation of a federation whose file does not set one: a robust rule if possible, else the mean.

    A robust rule limits the influence of hostile sites.

    Args:
        config: the federation's configuration.
        method_entry: returns the entry of a method in the catalog by its name.
    """
    # Robust rules compare single uploads, and the noise of differential privacy is calibrated for a mean.
    hides_uploads = config.secure_aggregation or config.dp_clip is not None
    # In smaller cohorts a robust rule cannot help.
    if hides_uploads or config.cohort < MIN_COHORT_FOR_DEFENSE:
        return "mean"
    entry = method_entry(config.method)
    norm = effective_norm(config)
    possible_rules = [rule for rule in DEFAULT_DEFENSES if not entry.robust_rule_conflict(rule, norm)]
    return possible_rules[0] if possible_rules else "mean"


def effective_norm(config: Any) -> str:
    """Return the normalization of the trained part of the network: "none" if only a head is trained."""
    # A frozen backbone has no batch statistics to train or to average.
    return "none" if "backbone" in hubs.frozen_layers(config) and config.norm == "batch" else config.norm


def check_combinations(config: Any) -> None:
    """Raise UserError for the first impossible value or combination of options."""
    if config.momentum >= 1:
        raise UserError(f"momentum is {toml.format_text(config.momentum)}: it must be below 1.")
    _check_images(config)
    _check_exclusive_options(config)
    _check_network(config)
    _check_privacy_and_attacks(config)


def _check_images(config: Any) -> None:
    """Raise UserError for invalid options of decoding and normalizing images."""
    if config.channels not in (None, 1, 3):
        raise UserError(f"channels is {config.channels}: it must be 1 (gray) or 3 (RGB).")
    # Pixels are divided by the standard deviation, so it must not be 0.
    for name, minimum in (("pixel_mean", 0), ("pixel_std", 1e-9)):
        values = getattr(config, name)
        if values is None:
            continue
        if not values or not all(minimum <= value < math.inf for value in values):
            bound = "at least 0" if minimum == 0 else "above 0"
            raise UserError(f"{name} is {toml.format_text(values)}: it must be numbers {bound}.")
    window = config.window
    if window is not None and not (len(window) == 2 and -math.inf < window[0] < window[1] < math.inf):
        raise UserError(
            f"window is {toml.format_text(window)}: it must be two numbers, the value of black and a larger one of white."
        )


def _check_exclusive_options(config: Any) -> None:
    """Raise UserError for options that exclude each other, or need another option that is not set."""
    label_amounts = ("labels_per_class", "label_ratio", "labels")
    set_amounts = [name for name in label_amounts if getattr(config, name) is not None]
    if len(set_amounts) > 1:
        raise UserError(f"{set_amounts[0]} and {set_amounts[1]} exclude each other: give one of them.")
    if config.labeled_clients is not None and config.labels_at != "some":
        raise UserError(
            f"labeled_clients is {config.labeled_clients}, but labels_at is {config.labels_at!r}: set it to 'some'."
        )
    if config.unknown_share and not config.unknown_classes:
        raise UserError(
            f"unknown_share is {toml.format_text(config.unknown_share)}, but unknown_classes is 0, so that no image is of "
            "an unknown class: set unknown_classes, or leave unknown_share out."
        )
    # With a saved split, its file has the number of clients, and `clients` is not used.
    if config.split is None:
        check_cohort(config.cohort, config.clients)
    _check_batches(config)
    if config.steps is not None and (config.epochs != 1 or config.epoch != "auto"):
        other = "epochs" if config.epochs != 1 else "epoch"
        raise UserError(f"steps and {other} exclude each other: both set how long a client trains.")
    if config.nesterov and not config.momentum:
        raise UserError("nesterov needs a momentum above 0: set momentum, or leave nesterov out.")
    if config.shared_views:
        for name, value in (("unlabeled_batch", "rest"), ("labeled_batch", "all")):
            if getattr(config, name) == value:
                raise UserError(f"shared_views needs a number as {name}: {value!r} differs from client to client.")
    if config.momentum and config.optimizer != "sgd":
        raise UserError(
            f"momentum is {toml.format_text(config.momentum)}, but {config.optimizer} has none: use optimizer 'sgd'."
        )
    methods = (config.method, *config.baselines)
    repeated = [name for name in methods if methods.count(name) > 1]
    if repeated:
        raise UserError(f"method {repeated[0]} is named twice in method and baselines: name it once.")


def _check_batches(config: Any) -> None:
    """Raise UserError for batch sizes that do not fit the normalization, or the definition of an epoch."""
    for name in ("labeled_batch", "unlabeled_batch"):
        # Batch normalization needs two images. With joint statistics a single unlabeled image is normalized together
        # with the labeled ones.
        may_be_normalized_alone = name == "labeled_batch" or config.statistics == "separate"
        size = getattr(config, name)  # a number or a rule, such as "rest"
        if size == 1 and config.norm == "batch" and may_be_normalized_alone:
            raise UserError(f"{name} is 1: a batch of one image has no variance to normalize by; use at least 2.")
    if config.unlabeled_batch == "rest" and config.epoch == "unlabeled":
        raise UserError(
            "epoch 'unlabeled' needs a number as unlabeled_batch: with 'rest' the size of a step follows from one pass "
            "over the labeled images."
        )


def check_cohort(cohort: int, clients: int) -> None:
    """Raise UserError if the cohort is larger than the number of clients, or there are no clients."""
    if clients < 1:
        raise UserError(f"clients is {clients}: it must be at least 1.")
    if cohort > clients:
        raise UserError(f"cohort is {cohort}, but clients is {clients}: it must be at most {clients}.")


def _check_network(config: Any) -> None:
    """Raise UserError for contradictory options of the network and its initial weights."""
    has_weights = (
        config.weights is not None
        or config.network in hubs.PRETRAINED
        or config.network.partition(":")[0] == "transformers"
    )
    freezes_layers = config.freeze or config.tune in ("head", "last")
    if freezes_layers and not has_weights:
        option = "freeze" if config.freeze else f"tune {config.tune!r}"
        raise UserError(f"{option} needs weights: layers that stay at random values learn nothing.")
    if config.freeze and config.tune != "auto":
        raise UserError(f"tune {config.tune!r} and freeze both set what is trained: leave one of them out.")
    if config.tune == "last" and config.network not in hubs.PRETRAINED:
        raise UserError(f"tune 'last' is for {', '.join(hubs.PRETRAINED)}; name the layers that stay with freeze.")
    if config.backbone_lr != 1 and "backbone" in hubs.frozen_layers(config):
        raise UserError(
            "backbone_lr and freeze 'backbone' contradict each other: a frozen backbone has no learning rate."
        )


def _check_privacy_and_attacks(config: Any) -> None:
    """Raise UserError for contradictory options of privacy, robust and secure aggregation, and simulated attacks."""
    _check_privacy(config)
    _check_secure_aggregation(config)
    # Rounded first: 0.29 of 100 clients is 28.999999999999996 in floating point, and means 29.
    hostile = math.floor(round(config.byzantine * config.cohort, 9))
    # Krum needs n >= 2f + 3 (Blanchard et al. 2017).
    if config.aggregation == "krum" and config.cohort < 2 * hostile + 3:
        raise UserError(
            f"krum cannot find {hostile} hostile clients among {config.cohort}: it needs a cohort of "
            f"{2 * hostile + 3} or more; choose a larger cohort or a smaller byzantine."
        )
    # Either both are set or neither: an attack without attackers would silently do nothing.
    if (config.attack == "none") != (config.attackers == 0):
        raise UserError("attack and attackers need each other: set what hostile clients do, and how many there are.")


def _check_privacy(config: Any) -> None:
    """Raise UserError for options of differential privacy that contradict each other or the aggregation."""
    private = config.dp_clip is not None  # clipped and noised updates
    if private != (config.dp_noise is not None):
        present, missing = ("dp_clip", "dp_noise") if private else ("dp_noise", "dp_clip")
        raise UserError(
            f"{present} needs {missing}: differential privacy clips updates and adds noise in units of the clip."
        )
    if config.dp_epsilon is not None and not private:
        raise UserError("dp_epsilon needs dp_clip and dp_noise: without them nothing is private.")
    if private and config.aggregation != "mean":
        raise UserError(
            f"dp_clip and aggregation {config.aggregation!r} exclude each other: the noise is calibrated for a mean."
        )
    sends_batch_statistics = config.norm == "batch" and "backbone" not in hubs.frozen_layers(config)
    if private and sends_batch_statistics:
        raise UserError("dp_clip needs norm 'group' or 'none': batch statistics would leave the clients without noise.")


def _check_secure_aggregation(config: Any) -> None:
    """Raise UserError for options that secure aggregation excludes."""
    if not config.secure_aggregation:
        return
    if config.aggregation != "mean":
        raise UserError(
            f"secure_aggregation and aggregation {config.aggregation!r} exclude each other: the rule needs single "
            "uploads, which secure aggregation hides."
        )
    if config.upload_precision != "float32":
        raise UserError(
            "secure_aggregation and upload_precision exclude each other: masked sums are of whole numbers of 64 bits."
        )
    if config.cohort < 3:
        raise UserError(
            f"secure_aggregation needs a cohort of 3 or more, not {config.cohort}: a sum of fewer uploads hides none."
        )

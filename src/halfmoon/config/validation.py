"""Options that exclude each other, and values that no range can tell (`halfmoon.api.ranges`)."""

import math
from collections.abc import Callable
from typing import Any

from halfmoon.core import hubs
from halfmoon.core.errors import UserError
from halfmoon.storage import toml

DEFENSE, DEFENDED = "cosine", 4
"""How a federation aggregates where its file does not say, and the smallest cohort for which a rule can help."""


def defense(c: Any, entry: Callable[[str], Any]) -> str:
    """Return how a federation aggregates whose file does not say: the mean where no rule can help or stand."""
    summed = c.secure_aggregation or c.dp_clip is not None
    alone = summed or c.cohort < DEFENDED or entry(c.method).unrobust(DEFENSE, normalization(c))
    return "mean" if alone else DEFENSE


def normalization(c: Any) -> str:
    """Return how the trained part of a configuration's network normalizes; a head alone does not."""
    return "none" if "backbone" in hubs.frozen(c) and c.norm == "batch" else c.norm


def check(c: Any) -> None:
    """Raise UserError for the first impossible value or combination; ranges are declared with the options."""
    if c.momentum >= 1:
        raise UserError(f"momentum is {toml.text(c.momentum)}: it must be below 1.")
    _check_images(c)
    _check_together(c)
    _check_network(c)
    _check_guards(c)


def _check_images(c: Any) -> None:
    if c.channels not in (None, 1, 3):
        raise UserError(f"channels is {c.channels}: it must be 1 (gray) or 3 (RGB).")
    _check_pixels(c)
    if c.window is not None and not (len(c.window) == 2 and -math.inf < c.window[0] < c.window[1] < math.inf):
        raise UserError(f"window is {toml.text(c.window)}: it must be two numbers, of black and, larger, of white.")


def _check_pixels(c: Any) -> None:
    for name in ("pixel_mean", "pixel_std"):
        values, least = getattr(c, name), (0 if name == "pixel_mean" else 1e-9)
        if values is not None and not (values and all(least <= value < math.inf for value in values)):
            raise UserError(f"{name} is {toml.text(values)}: it must be numbers from 0, of a deviation above it.")


def _check_together(c: Any) -> None:
    amounts = [name for name in ("labels_per_class", "label_ratio", "labels") if getattr(c, name) is not None]
    if len(amounts) > 1:
        raise UserError(f"{amounts[0]} and {amounts[1]} exclude each other: give one of them.")
    if c.labeled_clients is not None and c.labels_at != "some":
        raise UserError(f"labeled_clients is {c.labeled_clients}, but labels_at is {c.labels_at!r}: set it to 'some'.")
    if c.split is None:
        check_cohort(c.cohort, c.clients)
    for name, size in (("labeled_batch", c.labeled_batch), ("unlabeled_batch", c.unlabeled_batch)):
        if size == 1 and c.norm == "batch" and (name == "labeled_batch" or c.statistics == "separate"):
            raise UserError(f"{name} is 1: a batch of one image has no variance to normalize by: use at least 2.")
    if c.unlabeled_batch == "rest" and c.epoch == "unlabeled":
        raise UserError(
            "epoch 'unlabeled' needs a number as unlabeled_batch: 'rest' is what one pass over the labeled "
            "images leaves to each step."
        )
    if c.steps is not None and (c.epochs != 1 or c.epoch != "auto"):
        other = "epochs" if c.epochs != 1 else "epoch"
        raise UserError(f"steps and {other} exclude each other: both say how long a client trains.")
    if c.nesterov and not c.momentum:
        raise UserError("nesterov needs a momentum above 0: set momentum, or leave nesterov out.")
    if c.shared_views and c.unlabeled_batch == "rest":
        raise UserError("shared_views needs a number as unlabeled_batch: 'rest' differs from client to client.")
    if c.shared_views and c.labeled_batch == "all":
        raise UserError("shared_views needs a number as labeled_batch: 'all' differs from client to client.")
    if c.momentum and c.optimizer != "sgd":
        raise UserError(f"momentum is {toml.text(c.momentum)}, but {c.optimizer} has none: use optimizer 'sgd'.")
    methods = (c.method, *c.baselines)
    twice = [name for name in methods if methods.count(name) > 1]
    if twice:
        raise UserError(f"method {twice[0]} is named twice in method and baselines: name it once.")


def check_cohort(cohort: int, clients: int) -> None:
    if cohort > clients:
        raise UserError(f"cohort is {cohort}, but clients is {clients}: it must be at most {clients}.")


def _check_network(c: Any) -> None:
    named = c.network.partition(":")[0] == "transformers" or c.network in hubs.PRETRAINED
    if (c.freeze or c.tune in ("head", "last")) and c.weights is None and not named:
        word = "freeze" if c.freeze else f"tune {c.tune!r}"
        raise UserError(f"{word} needs weights: layers that stay at random values learn nothing.")
    if c.freeze and c.tune != "auto":
        raise UserError(f"tune {c.tune!r} and freeze both say what is trained: leave one of them out.")
    if c.tune == "last" and c.network not in hubs.PRETRAINED:
        raise UserError(f"tune 'last' is for {', '.join(hubs.PRETRAINED)}; name the layers that stay with freeze.")
    if c.backbone_lr != 1 and "backbone" in hubs.frozen(c):
        raise UserError(
            "backbone_lr and freeze 'backbone' contradict each other: a frozen backbone has no learning rate."
        )


def _check_guards(c: Any) -> None:
    private = c.dp_clip is not None
    if private != (c.dp_noise is not None):
        there, missing = ("dp_clip", "dp_noise") if private else ("dp_noise", "dp_clip")
        raise UserError(f"{there} needs {missing}: differential privacy is a clipped update and noise in units of it.")
    if c.dp_epsilon is not None and not private:
        raise UserError("dp_epsilon needs dp_clip and dp_noise: without them nothing is private.")
    for name, active in (("dp_clip", private), ("secure_aggregation", c.secure_aggregation)):
        if active and c.aggregation != "mean":
            raise UserError(
                f"{name} and aggregation {c.aggregation!r} exclude each other: "
                f"{'its noise is measured by a mean' if private else 'it hides what the other has to look at'}."
            )
    if c.secure_aggregation and c.upload_precision != "float32":
        raise UserError(
            "secure_aggregation and upload_precision exclude each other: masked sums are of whole numbers of 64 bits."
        )
    if c.secure_aggregation and c.cohort < 3:
        raise UserError(f"secure_aggregation needs a cohort of 3 or more, not {c.cohort}: fewer hide nothing.")
    if private and c.norm == "batch" and "backbone" not in hubs.frozen(c):
        raise UserError(
            "dp_clip needs norm 'group' or 'none': statistics of batches would leave the clients without noise."
        )
    hostile = math.floor(round(c.byzantine * c.cohort, 9))
    if c.aggregation == "krum" and c.cohort < 2 * hostile + 3:
        raise UserError(
            f"krum cannot tell {hostile} hostile of {c.cohort} clients from the others: it needs a cohort of "
            f"{2 * hostile + 3} or more; choose a larger cohort or a smaller byzantine."
        )
    if (c.attack == "none") != (c.attackers == 0):
        raise UserError("attack and attackers go together: say what hostile clients do, and how many there are.")

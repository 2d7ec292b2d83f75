"""What values a configuration may have: ranges of single options, and options that exclude each other."""

from __future__ import annotations

import math
from typing import Any

from halfmoon import toml
from halfmoon.errors import UserError

LARGEST = 10**100
"""The largest whole number of an option: more digits are no number that anybody meant, and no float holds them all."""


def check(c: Any) -> None:
    """Raise UserError for the first value out of its range and the first impossible combination."""
    least = {
        "image_size": 1, "shrink": 1, "clients": 1, "min_size": 0, "split_seed": 0, "cohort": 1, "rounds": 1,
        "seed": 0, "labeled_batch": 1, "unlabeled_batch": 1, "epochs": 1, "steps": 1, "width": 1, "threads": 1,
        "evaluate_every": 1, "checkpoint_every": 1, "momentum": 0, "weight_decay": 0, "labels": 1,
        "labeled_clients": 1, "classes_per_client": 1, "stages": 1, "server_batch": 1, "server_epochs": 1,
        "memory_cap": 1,
    }  # fmt: skip
    for name, bound in least.items():
        value = getattr(c, name)
        if isinstance(value, int | float) and not bound <= value < math.inf:
            raise UserError(f"{name} is {toml.shown(value)}: it must be at least {bound}.")
        if isinstance(value, int) and value > LARGEST:
            raise UserError(f"{name} is {toml.shown(value)[:40]}...: it must be at most 10^100.")
    for name in ("gamma", "labels_per_class", "lr", "clip_norm", "clip_value", "dp_clip", "dp_noise", "dp_epsilon"):
        value = getattr(c, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name} is {toml.shown(value)}: it must be a number above 0.")
    if c.label_ratio is not None and not 0 < c.label_ratio <= 1:
        raise UserError(f"label_ratio is {toml.shown(c.label_ratio)}: it must be above 0 and at most 1.")
    for name in ("data_share", "unlabeled_share"):
        value = getattr(c, name)
        if not 0 < value <= 1:
            raise UserError(f"{name} is {toml.shown(value)}: it must be above 0 and at most 1.")
    if not 0 <= c.confident <= 1:
        raise UserError(f"confident is {toml.shown(c.confident)}: it must be from 0 to 1.")
    if not 0 <= c.silent < 1:
        raise UserError(f"silent is {toml.shown(c.silent)}: it must be from 0 to below 1.")
    for name in ("byzantine", "attackers"):
        value = getattr(c, name)
        if not 0 <= value < 0.5:
            raise UserError(f"{name} is {toml.shown(value)}: it must be from 0 to below 0.5.")
    if not 0 < c.dp_delta < 1:
        raise UserError(f"dp_delta is {toml.shown(c.dp_delta)}: it must be above 0 and below 1.")
    if c.momentum >= 1:
        raise UserError(f"momentum is {toml.shown(c.momentum)}: it must be below 1.")
    _check_together(c)
    _check_guards(c)


def _check_together(c: Any) -> None:
    said = [name for name in ("labels_per_class", "label_ratio", "labels") if getattr(c, name) is not None]
    if len(said) > 1:
        raise UserError(f"{said[0]} and {said[1]} exclude each other: give one of them.")
    if c.labeled_clients is not None and c.labels_at != "some":
        raise UserError(f"labeled_clients is {c.labeled_clients}, but labels_at is {c.labels_at!r}: set it to 'some'.")
    if c.split is None and c.cohort > c.clients:
        raise UserError(f"cohort is {c.cohort}, but clients is {c.clients}: it must be at most {c.clients}.")
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
        raise UserError(f"momentum is {toml.shown(c.momentum)}, but {c.optimizer} has none: use optimizer 'sgd'.")
    methods = (c.method, *c.beside)
    twice = [name for name in methods if methods.count(name) > 1]
    if twice:
        raise UserError(f"method {twice[0]} is named twice in method and beside: name it once.")


def _check_guards(c: Any) -> None:
    private = c.dp_clip is not None
    if private != (c.dp_noise is not None):
        there, missing = ("dp_clip", "dp_noise") if private else ("dp_noise", "dp_clip")
        raise UserError(f"{there} needs {missing}: differential privacy is a clipped update and noise in units of it.")
    if c.dp_epsilon is not None and not private:
        raise UserError("dp_epsilon needs dp_clip and dp_noise: without them nothing is private.")
    for name, wanted in (("dp_clip", private), ("secure_aggregation", c.secure_aggregation)):
        if wanted and c.aggregation != "mean":
            raise UserError(
                f"{name} and aggregation {c.aggregation!r} exclude each other: "
                f"{'its noise is measured by a mean' if private else 'it hides what the other has to look at'}."
            )
    if c.secure_aggregation and c.cohort < 3:
        raise UserError(f"secure_aggregation needs a cohort of 3 or more, not {c.cohort}: fewer hide nothing.")
    if private and c.norm == "batch":
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

"""What is said of a finished run: the card of its model."""

from __future__ import annotations

from halfmoon.config.schema import Config, text
from halfmoon.core.tree import Tree
from halfmoon.engine.calibration import fitted
from halfmoon.runs.factory import Problem, preparation
from halfmoon.runs.model_card import Card


def card(config: Config, shared: Problem, model: Tree) -> Card:
    """Return what the file of a run's `model` = {"params", "stats"} says of itself.

    Where there are validation images, and the model is used as it was tested, its temperature is fitted on them.
    """
    found, task = 1.0, shared.task
    if shared.validation is not None and config.test_statistics == "running":
        found = fitted(task.network, model, task.normalize, shared.validation)
    channels, height, width = shared.train.images.shape[1:]
    return Card(
        classes=shared.source.classes,
        image=(channels, height, width),
        taken=shared.taken,
        shrink=config.shrink,
        mean=shared.source.mean,
        std=shared.source.std,
        network=task.network.whole(model)[0],
        method=config.method,
        config=text(config),
        crop=config.crop,
        window=preparation(config).window,
        temperature=found,
    )

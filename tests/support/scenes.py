"""The small federation of the contract (`halfmoon.contract.scene`), under the name by which the tests know it."""

from halfmoon.contract.scene import (
    ADAM,
    CLASSES,
    NETWORK,
    SIZES,
    Snapshot,
    begin,
    dataset,
    examples,
    furthest,
    play,
    same,
    simulate,
    split,
    task,
)

__all__ = [
    "ADAM",
    "CLASSES",
    "NETWORK",
    "SIZES",
    "Snapshot",
    "begin",
    "dataset",
    "examples",
    "furthest",
    "play",
    "same",
    "simulate",
    "split",
    "task",
]

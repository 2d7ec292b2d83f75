"""The seeds of one method, played in lockstep: which runs of a comparison are alike, and how these are played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from halfmoon.config.schema import Config, text
from halfmoon.core.errors import UserError
from halfmoon.engine.lockstep import lockstep
from halfmoon.engine.spread import Spread
from halfmoon.runs.factory import computing, executor, threads, together

Value = TypeVar("Value")


def units_of(configs: Sequence[Config], left: Sequence[bool]) -> list[tuple[int, ...]]:
    """Return the numbers of the runs that are played together, in the order of their first ones.

    Together are those that say so, differ in nothing but their seeds, and have something `left` to play.
    """
    found: dict[object, list[int]] = {}
    for number, (config, playing) in enumerate(zip(configs, left, strict=True)):
        joins = playing and config.seeds_together and executor(config) == "vmap"  # of a run begun elsewhere it may not
        alike = text(replace(config, seed=0, split_seed=0)) if joins else number
        found.setdefault(alike, []).append(number)
    return [tuple(numbers) for numbers in found.values()]


def check_together(config: Config, seeds: int) -> None:
    """Raise UserError where the clients of so many seeds do not train as one program."""
    if seeds < 2:
        raise UserError("seeds_together needs two seeds or more: halfmoon compare takes them, --seeds 0 1 2.")
    if executor(config) == "loop":
        raise UserError(
            "seeds_together trains clients as one program, but here they train one by one (executor 'loop'), which "
            "takes less time for all but tiny networks on a processor: leave it out, or say executor 'vmap'."
        )
    if config.workers not in (1, "auto"):
        raise UserError(
            f"seeds_together trains all clients in one process, but workers is {config.workers!r}: leave one of them "
            "out."
        )


def in_lockstep(plays: Sequence[Callable[[Spread], Value]], config: Config) -> list[Value]:
    """Play runs of equal configurations, whatever their seeds, and return what they return (`lockstep`)."""
    with computing(threads(config)):
        return lockstep(plays, together(config))

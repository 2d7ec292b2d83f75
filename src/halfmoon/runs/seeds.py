"""The seeds of one method, played in lockstep: which runs are alike, what they share, and how they are played."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from halfmoon.config.schema import Config, to_toml
from halfmoon.core.errors import UserError
from halfmoon.data import Split
from halfmoon.engine.evaluation import Spread
from halfmoon.engine.lockstep import lockstep
from halfmoon.runs.factory import Problem, computing, executor, problem, split_of, threads, together

Value = TypeVar("Value")


def units_of(configs: Sequence[Config], left: Sequence[bool]) -> list[tuple[int, ...]]:
    """Return the numbers of the runs that are played together, in the order of their first ones.

    Together are those that say so, differ in nothing but their seeds, and have something `left` to play.
    """
    groups: dict[object, list[int]] = {}
    for number, (config, playing) in enumerate(zip(configs, left, strict=True)):
        alike = to_toml(replace(config, seed=0, split_seed=0)) if config.seeds_together and playing else number
        groups.setdefault(alike, []).append(number)
    return [tuple(numbers) for numbers in groups.values()]


class Seat(NamedTuple):
    """The place of a run among others that are alike but for their seeds."""

    spread: Spread  # trains its clients
    problem: Callable[[Config, Split | None], Problem]  # as `factory.problem`, but images are read once for all


def needs_seeds(seeds: int) -> None:
    if seeds < 2:
        raise UserError("seeds_together needs two seeds or more: halfmoon compare takes them, --seeds 0 1 2.")


def check_together(config: Config) -> None:
    """Raise UserError where seeds are to be played together, but clients do not train as one program."""
    if not config.seeds_together:
        return
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


def in_lockstep(plays: Sequence[Callable[[Seat], Value]], config: Config) -> list[Value]:
    """Play runs of equal configurations, whatever their seeds, and return what they return (`lockstep`)."""
    first: Problem | None = None

    def same_images(config: Config, split: Split | None) -> Problem:
        nonlocal first
        if first is None:
            first = problem(config, split)
            return first
        return replace(first, split=split_of(config, first.source, split))

    def seated(play: Callable[[Seat], Value], spread: Spread) -> Value:
        return play(Seat(spread, same_images))

    with computing(threads(config)):
        return lockstep([partial(seated, play) for play in plays], together(config))

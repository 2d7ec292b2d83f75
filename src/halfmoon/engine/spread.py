"""Where independent parts of a round are computed: one by one here, or in several processes at once."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Spread(Protocol):
    """What applies a function to items, as the built-in `map` does, which is the one that spreads nothing.

    Results come in the order of the items, and do not depend on where they were computed.
    """

    def __call__(self, function: Callable[[Item], Result], items: Iterable[Item], /) -> Iterator[Result]:
        """Return an iterator of function(item)."""
        ...

"""Which clients of very many train in a round: drawn in the time and memory of the cohort."""

import torch
from torch import Tensor

from halfmoon.core import rng

WORD = 2**32


def cohort(clients: int, size: int, seed: int, *path: int | str) -> Tensor:
    """Return `size` of `clients` (all, where there are fewer), int64, in the order in which they are drawn."""
    return first_of_permutation(clients, size, rng.generator(seed, *path))


def first_of_permutation(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Return torch.randperm(count)[:size], number by number, without the rest of the permutation.

    Fisher and Yates' shuffle as PyTorch does it: the i-th number changes places with the one that lies a 32-bit random
    number modulo count - i after it. What has not been moved stands where it stood, so that a few entries are enough.
    Raise ValueError for 2^32 / 20 numbers and more, of which PyTorch draws otherwise.
    """
    if count >= WORD // 20:
        raise ValueError(f"a cohort is drawn of fewer than {WORD // 20} clients, not {count}")
    size = min(size, count)
    pairs = torch.empty((size + 1) // 2, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    moved: dict[int, int] = {}
    chosen: list[int] = []
    for place in range(size):
        pair = int(pairs[place // 2])
        word = (pair >> 32 if place % 2 == 0 else pair) % WORD  # the first of a pair of words is the higher one
        other = place + word % (count - place)
        chosen.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return torch.tensor(chosen, dtype=torch.int64)


def answering(asked: Tensor, dropout: float, seed: int, round: int) -> Tensor:
    """Return the places in `asked` of those who answer in a round, each with probability 1 - `dropout`.

    At least one does.
    """
    if not dropout:
        return torch.arange(len(asked))
    draws = [float(torch.rand((), generator=rng.generator(seed, "silent", round, int(k)))) for k in asked]
    there = [place for place, drawn in enumerate(draws) if drawn >= dropout]
    return torch.tensor(there or [max(range(len(draws)), key=draws.__getitem__)])

"""Random generators by name: every random number is a function of (seed, *path), never of a shared stream."""

import hashlib

import torch


def derive_seed(seed: int, *path: int | str) -> int:
    """Derive a seed of 63 bits from a seed and a path, the same on every machine."""
    text = repr((int(seed), *path)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(seed: int, *path: int | str) -> torch.Generator:
    """Make a generator with the seed of a path."""
    return torch.Generator().manual_seed(derive_seed(seed, *path))

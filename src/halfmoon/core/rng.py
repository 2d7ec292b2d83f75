"""Named generators: every random number of a run comes from (seed, *path), never from a shared stream."""

import hashlib

import torch


def derive_seed(seed: int, *path: int | str) -> int:
    """Return 63 bits that depend on `seed` and every part of `path`, the same on every machine."""
    text = repr((int(seed), *path)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(seed: int, *path: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, *path))

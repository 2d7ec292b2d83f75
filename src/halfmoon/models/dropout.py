"""Dropout as a pure function: masks follow from a key, so that loop, vmap, sites and resumed runs drop the same entries.

PyTorch draws dropout masks from a global generator, whose state depends on everything that was drawn before. Here each
step of a client has a key, drawn from the client's named generator. A mask is a hash of the key, the number of the
dropout in the pass, and the position of the entry. All passes of a step share their masks. Passes outside of steps
(evaluation, pseudo-labels that are made before the first step) have no dropout.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

KEY = "dropout"
"""Name of a step's key in `Batch.mixing`."""

KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""The supported layers. `nn.Dropout` drops entries, the other layers drop entire channels."""

_LOCAL = threading.local()


@contextmanager
def dropout_key(key: Tensor | None) -> Iterator[None]:
    """Set the key from which this thread's dropout masks are computed inside of the block.

    Args:
        key: () int64, another one in each training step; None disables dropout.
    """
    previous_key = current_key()
    _LOCAL.key = key
    try:
        yield
    finally:
        _LOCAL.key = previous_key


def current_key() -> Tensor | None:
    """Return the key of the innermost `dropout_key`."""
    return getattr(_LOCAL, "key", None)


def drop(z: Tensor, p: float, by_channel: bool, key: Tensor, call: int, real: Tensor | None, images: int) -> Tensor:
    """Apply dropout: set entries of z to 0 with probability p, and divide the remaining ones by 1 - p.

    The mask is a hash of `key`, `call` and the position of the entry, instead of random draws: it is then the same for
    one client in a loop and for several under vmap.

    Args:
        z: activations (R, ...), where R is a multiple of the images of the pass.
        p: the probability.
        by_channel: drop entire channels (R, C) instead of entries.
        key: the key of the step, () int64.
        call: the number of earlier dropouts in this pass.
        real: (images,) bool, False for padding; None: all are real.
        images: the number of images in the pass.
    """
    if p >= 1:
        return z * 0.0
    dropped_shape = z.shape[:2] if by_channel else z.shape  # of what is dropped: channels or entries
    # An image is numbered among the real ones: padding between groups of images does not change the masks.
    if real is None:
        numbers = torch.arange(images, device=z.device)
    else:
        numbers = (real.cumsum(0) - 1).clamp_min(0)
    per_image = dropped_shape.numel() // images
    positions = numbers[:, None] * per_image + torch.arange(per_image, device=z.device)
    is_retained = _hash_to_uniform(positions, key, call) >= p
    factors = is_retained.reshape(dropped_shape).to(z.dtype) / (1 - p)
    return z * factors.reshape(*dropped_shape, *[1] * (z.dim() - len(dropped_shape)))


def _hash_to_uniform(positions: Tensor, key: Tensor, call: int) -> Tensor:
    """Hash positions, with the key of the step and the number of the dropout, to uniform numbers in [0, 1)."""
    # SplitMix64: numbers at equal distances (the golden ratio times 2^64), each of them scrambled.
    start = _scramble(key + _signed(_GOLDEN * (call + 1) % 2**64))
    bits = _scramble(start + _GOLDEN * positions)
    return ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53  # the upper 53 bits


def _signed(number: int) -> int:
    """Convert a 64-bit number to the signed integer of the same bits."""
    return number - 2**64 if number >= 2**63 else number


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _scramble(z: Tensor) -> Tensor:
    """Scramble int64 numbers by the finalizer of SplitMix64 (Steele et al. 2014), modulo 2^64."""
    # Shifts of negative numbers insert ones, which the masks remove.
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _FIRST
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _SECOND
    return z ^ ((z >> 31) & (2**33 - 1))

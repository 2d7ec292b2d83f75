"""What server and sites both know of a masked sum: its stages, the tensors of each, and rows of bytes as tensors."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from halfmoon.aggregation.secure.masking import PUBLIC, SEALED, Scene
from halfmoon.aggregation.secure.signing import POINT, SIGNATURE
from halfmoon.federation.protocol.messages import Request

KEYS, DEAL, MASK, REVEAL = "keys", "deal", "mask", "reveal"
"""The stages of a sum: a request's masks have one of them as their only name at the top."""

SESSION = 32
"""Bytes by which a server tells a sum from one of the same query that it had to begin anew."""

SITES = {
    "sites": ((), torch.int64),
    "keys": ((PUBLIC,), torch.uint8),
    "signatures": ((SIGNATURE,), torch.uint8),
    "lasting": ((POINT,), torch.uint8),
}
LEAVES: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {
    KEYS: {"session": ((), torch.uint8)},
    DEAL: {"asked": ((), torch.int64), **SITES},
    MASK: {"sites": ((), torch.int64)},
    REVEAL: {"survived": ((), torch.int64), "shares": ((SEALED,), torch.uint8)},
}
"""The tensors of each stage by name: their shape without the first dimension (the sites), and their type."""


def scene_of(request: Request, session: str) -> Scene:
    return Scene(request.federation, request.run, request.round, request.attempt, request.query, session)


def to_rows(rows: Sequence[bytes]) -> Tensor:
    """Return byte strings of one length as a tensor, uint8 (rows, length)."""
    return torch.from_numpy(np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1).copy())


def from_rows(leaf: Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in leaf]

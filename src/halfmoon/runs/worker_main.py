"""A worker process: reads functions and items from its standard input, and writes what they come to.

Everything travels as frames, eight bytes of length and a pickle, from the process that started this one and back to it
alone. Tensors go as their plain bytes: PyTorch's own pickles cost more than a small network's step.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfmoon.core.allocator import keep_memory
from halfmoon.core.errors import UserError

LENGTH = struct.Struct("<Q")


class Answer(NamedTuple):
    """What a function came to: a value, or the error that it raised."""

    value: Any = None
    error: BaseException | None = None


class _Pickler(pickle.Pickler):
    """A pickler that writes tensors of the processor as arrays."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to make a tensor again."""
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.dtype == torch.bfloat16 or obj.requires_grad:
            return NotImplemented
        return _tensor, (np.ascontiguousarray(obj.numpy()).reshape(obj.shape),)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array)


def packed(value: Any) -> bytes:
    """Return a value as bytes, for `unpacked` in a process of the same program."""
    into = io.BytesIO()
    _Pickler(into, protocol=5).dump(value)
    return into.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the value that `packed` was given; tensors are laid out plainly."""
    return pickle.loads(data)


def answered(function: Callable[[Any], Any], item: bytes) -> bytes:
    """Return the packed `Answer` of function(item)."""
    try:
        return packed(Answer(function(unpacked(item))))
    except Exception as error:  # whatever it is, the process that asked raises it
        with suppress(Exception):
            unpacked(data := packed(Answer(error=error)))
            return data
        return packed(Answer(error=RuntimeError(f"{type(error).__name__}: {error}")))


def known(data: bytes) -> Callable[[Any], Any]:
    """Return a function; where it cannot be had in this process, one that says so of each item."""
    try:
        return unpacked(data)
    except Exception as error:  # whatever a module does that is imported
        why = f"{type(error).__name__}: {error}"

    def impossible(item: Any) -> Any:
        raise UserError(
            f"clients cannot train in processes of their own, where the method is not known ({why}): put it into a "
            "module that can be imported, or choose --workers 1."
        )

    return impossible


def send(stream: BinaryIO, *parts: bytes) -> None:
    """Write frames."""
    for part in parts:
        stream.write(LENGTH.pack(len(part)))
        stream.write(part)
    stream.flush()


def receive(stream: BinaryIO) -> bytes | None:
    """Return the next frame, None where the stream has ended."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


def settle(threads: int, processors: tuple[int, ...] = ()) -> None:
    """Compute with so many threads, on these processors alone where any are named and the system can do it."""
    torch.set_num_threads(threads)
    keep_memory()
    if processors and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, processors)


def main() -> None:
    """Answer until the standard input ends: a function before the items that it is for, an empty frame before it."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a method prints is no answer
    questions = sys.stdin.buffer
    settings = receive(questions)
    if settings is None:
        return
    settle(*unpacked(settings))
    function: Any = None
    while (frame := receive(questions)) is not None:
        if not frame:
            data = receive(questions)
            if data is None:
                return
            function = known(data)
            continue
        try:
            send(answers, answered(function, frame))
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()

"""One checkpoint on disk: its tensors, and a JSON that says what they are and carries the checksum of both."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from halfmoon.core.tree import Tree
from halfmoon.storage import atomic_io, integrity
from halfmoon.storage.manifest import Commit, Contents, Damaged, verify
from halfmoon.storage.serialization import unpack

CLIENTS = "clients"
"""The folder, in that of the run, of what clients keep."""


def read(folder: Path, round: int) -> tuple[dict[str, Any], Tree, Contents]:
    """Return what the checkpoint of a round says, its state, and what the clients keep; raise `Damaged`."""
    unparsed, data = (
        atomic_io.read(folder / f"{name(round)}.json"),
        atomic_io.read(folder / f"{name(round)}.safetensors"),
    )
    if unparsed is None:
        raise Damaged("it was not completed: the .json is missing")
    if data is None:
        raise Damaged("its .safetensors is missing")
    try:
        note = integrity.unseal(unparsed)
    except integrity.Unsealed as error:
        raise Damaged(f"its .json cannot be used: {error}") from error
    if atomic_io.digest(data) != note.get("tensors"):
        raise Damaged("checksum differs")
    if "clients" not in note:
        raise Damaged("an older halfmoon wrote it, which kept the clients elsewhere")
    mark = _checked(note, round)
    try:
        state = unpack(data, note["shape"])
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise Damaged("its tensors are not those that its .json names") from error
    return note, state, verify(folder / CLIENTS, mark)


def _checked(note: dict[str, Any], round: int) -> Commit:
    """Return the mark of a note of that round; raise `Damaged` where a value is missing or of another type."""
    kinds = {"shape": dict, "metrics": int, "metrics_sha256": str, "meta": dict, **dict.fromkeys(versions(), str)}
    wrong = [name for name, kind in kinds.items() if type(note.get(name)) is not kind]
    if wrong or note.get("round") != round or note["metrics"] < 0:
        raise Damaged(f"its .json has no usable {wrong[0] if wrong else 'round and metrics'}")
    mark = note["clients"]
    if not isinstance(mark, dict) or set(mark) != set(Commit._fields):
        raise Damaged("its .json does not say what the clients keep")
    if type(mark["length"]) is not int or mark["length"] < 0 or type(mark["chain"]) is not str:
        raise Damaged("its .json does not say what the clients keep")
    return Commit(**mark)


def versions() -> dict[str, str]:
    return {"halfmoon": _own(), "torch": torch.__version__}


@cache
def _own() -> str:
    # Looked up once: finding and parsing a package's metadata takes as long as all the rest of a small checkpoint.
    try:
        return version("halfmoon")
    except PackageNotFoundError:  # run from its source
        return "unknown"


def name(round: int) -> str:
    """Return what the files of a round's checkpoint are called, without their suffixes."""
    return f"checkpoint-{round:06d}"

"""A public data set as site folders, so that a federation can be rehearsed and compared with the simulator."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from halfmoon.config.schema import FEDERATION_TABLE, PARTITION_OPTIONS, PIXEL_OPTIONS, Config
from halfmoon.core.errors import UserError
from halfmoon.data.images import Images, Source
from halfmoon.data.partition.split import SERVER, Split
from halfmoon.sites.folders.site_folder import CLASSES_FILE, LABELS_FILE
from halfmoon.storage import atomic_io, locks, toml

if TYPE_CHECKING:
    from halfmoon.api.requirements import LabelLocation

FEDERATION_FILE, SPLIT, MARK = "federation.toml", "split.parquet", ".halfmoon-export"


@dataclass(frozen=True, eq=False)
class _Part:
    """One folder to write: rows of `images`, and which of them show their labels."""

    name: str
    images: Images
    rows: np.ndarray
    labeled: np.ndarray


def export_sites(config: Config, source: Source, split: Split, out: Path, tell: Callable[[str], object] = str) -> bool:
    """Write a data set as site folders, `server` where it holds labels, `test`, and federation.toml.

    Images are PNGs named by their row. A folder appears when it is whole, and another call makes those that are
    missing: a mark tells an unfinished export of these sites, federation.toml a finished one. Return whether anything
    was left to write. Raise UserError where a folder cannot hold it, or cannot be written.
    """
    parts = _parts(source, split)
    words = render_federation_file(config, source, split)
    _check(source, split, parts, out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        _claim(out, _mark(words, split))
        with locks.hold(out / MARK):
            if (out / FEDERATION_FILE).exists():
                return False
            for part in parts:
                if (out / part.name).exists():
                    tell(f"{part.name}: there already")
                    continue
                _write_part(source, part, out)
                tell(f"{part.name}: {len(part.rows):,} images, {int(part.labeled.sum()):,} with a label")
            if config.split is not None:
                split.save(out / SPLIT)
            atomic_io.replace(out / FEDERATION_FILE, words.encode())
    except locks.Conflict as error:
        words = f"{out} is being written by another process; wait for it ({atomic_io.reason(error)})."
        raise UserError(words) from error
    except OSError as error:
        raise UserError(
            f"{out} cannot be written ({atomic_io.reason(error)}); mend that, then export again."
        ) from error
    return True


def render_federation_file(config: Config, source: Source, split: Split) -> str:
    """Return the options of `halfmoon run`, as TOML, that make the same images and the same split."""
    from halfmoon.methods import registry  # slow to import: it brings torch

    height, width, channels = source.train.images.shape[1:]
    options = {
        name: getattr(config, name)
        for name in ("data", "data_dir", "data_share", "image_size", "shrink", *PIXEL_OPTIONS)
    }
    if config.split is not None:
        options["split"] = SPLIT
    else:
        options |= {name: getattr(config, name) for name in PARTITION_OPTIONS}
    if height == width:  # whatever the network, the simulator then pads to what the sites hold
        options["image_size"] = height
    usable = registry.names_at(find_labels_at(split) if config.split is not None else config.labels_at)
    options["method"] = Config.method if Config.method in usable else usable[0]
    options["cohort"] = min(Config.cohort, split.clients)
    lines = [f"{name} = {toml.value(value)}" for name, value in options.items() if value is not None]
    about = "# Written by halfmoon site export. The same split in the simulator: halfmoon run --config federation.toml"
    parts = clients_by_folder(split)
    folders = {"test": "test", **({"server": "server"} if "server" in parts else {})}
    table = {
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip("-._") or "exported",
        "sites": [name for name, k in parts.items() if k != SERVER],
        "classes": source.classes,
        "image": (channels, height, width),
        "mirror": source.mirror,
        "mean": source.mean,
        "std": source.std,
        **folders,
    }
    served = [f"{name} = {toml.value(value)}" for name, value in table.items()]
    why = "# What halfmoon serve needs to know beside; a simulation does not look at it."
    return "\n".join([about, *lines, "", why, f"[{FEDERATION_TABLE}]", *served]) + "\n"


def clients_by_folder(split: Split) -> dict[str, int]:
    digits = max(2, len(str(split.clients - 1)))
    named = {f"site-{k:0{digits}}": k for k in range(split.clients)}
    return named | ({"server": SERVER} if split.rows(SERVER, True).size else {})


def find_labels_at(split: Split) -> LabelLocation:
    if split.rows(SERVER, True).size:
        return "server"
    return "clients" if all(split.rows(k, True).size for k in range(split.clients)) else "some"


def _parts(source: Source, split: Split) -> list[_Part]:
    parts = [
        _Part(name, source.train, rows, split.labeled[rows])
        for name, k in clients_by_folder(split).items()
        for rows in [np.sort(np.concatenate([split.rows(k, True), split.rows(k, False)]))]
    ]
    count = len(source.test)
    return [*parts, _Part("test", source.test, np.arange(count), np.ones(count, bool))]


def _check(source: Source, split: Split, parts: Sequence[_Part], out: Path) -> None:
    if split.stages > 1:
        raise UserError(f"the split has {split.stages} stages, but a folder of images has no time; set stages to 1.")
    for part in parts:
        if not part.rows.size:
            raise UserError(f"{part.name} would have no image; ask for fewer sites or another split.")
    for name in source.classes:
        if name != " ".join(name.split(" ")).strip() or not name.isprintable() or source.classes.count(name) > 1:
            raise UserError(
                f"class name {name!r} cannot stand in {CLASSES_FILE}: names need to differ and be one line each."
            )
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give a folder that is empty or not there.")


def _mark(words: str, split: Split) -> str:
    assignment = split.client.tobytes() + split.labeled.tobytes()
    return atomic_io.digest(f"{words}{split.origin.labels_sha256}{atomic_io.digest(assignment)}".encode())


def _claim(out: Path, mark: str) -> None:
    """Mark an empty folder as this export's; raise UserError where it holds anything else."""
    content = atomic_io.read(out / MARK)
    if content is not None and content.decode(errors="replace").strip() == mark:
        return
    if content:
        raise UserError(f"{out} holds an export with other options; give another folder.")
    if content is None and any(each.name != f".{MARK}{atomic_io.PARTIAL}" for each in out.iterdir()):
        raise UserError(f"{out} is not empty, and nothing is overwritten; give another folder.")
    atomic_io.replace(out / MARK, f"{mark}\n".encode())


def _write_part(source: Source, part: _Part, out: Path) -> None:
    """Write one folder under another name until it is whole."""
    partial = out / f".{part.name}{atomic_io.PARTIAL}"
    if partial.exists():  # a kill's leftover, in a folder marked as ours
        shutil.rmtree(partial)
    (partial / "images").mkdir(parents=True)
    digits = max(2, len(str(len(part.images) - 1)))
    names = [f"images/{row:0{digits}}.png" for row in part.rows]
    for row, name in zip(part.rows, names, strict=True):
        pixels = part.images.images[row]
        Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(partial / name)
    table = io.StringIO()
    lines = csv.writer(table, lineterminator="\n")
    lines.writerow(["path", "label"])
    for row, name, labeled in zip(part.rows, names, part.labeled, strict=True):
        if labeled:
            lines.writerow([name, source.classes[part.images.labels[row]]])
    atomic_io.replace(partial / LABELS_FILE, table.getvalue().encode())
    atomic_io.replace(partial / CLASSES_FILE, "".join(f"{name}\n" for name in source.classes).encode())
    os.rename(partial, out / part.name)

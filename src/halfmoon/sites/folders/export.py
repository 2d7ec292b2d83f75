"""Write a data set as folders of sites, to rehearse a federation and compare it with the simulator."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from halfmoon.config.schema import (
    ADDED_OPTIONS,
    FEDERATION_TABLE,
    PARTITION_OPTIONS,
    PIXEL_OPTIONS,
    Config,
    list_methods_at,
)
from halfmoon.core import toml
from halfmoon.core.errors import UserError
from halfmoon.core.spreadsheet import protect_cell
from halfmoon.data.images import Images, Source
from halfmoon.data.partition.split import SERVER, Split
from halfmoon.sites.folders.site_folder import CLASSES_FILE, LABELS_FILE
from halfmoon.storage import atomic_io, locks
from halfmoon.storage.events import EventRecorder, NullRecorder

if TYPE_CHECKING:
    from halfmoon.core.label_locations import LabelLocation

FEDERATION_FILE = "federation.toml"

SPLIT_FILE = "split.parquet"

EXPORT_ID_FILE = ".halfmoon-export"
"""Contains a hash of the options and the split, by which an unfinished export is continued."""


@dataclass(frozen=True, eq=False)
class _FolderContents:
    """One folder to write.

    Attributes:
        name: the folder's name.
        images: the data set.
        rows: the rows of `images` to write.
        labeled: whether the label of each of `rows` is written, bool.
    """

    name: str
    images: Images
    rows: np.ndarray
    labeled: np.ndarray


def export_sites(
    config: Config,
    source: Source,
    split: Split,
    out: Path,
    display: EventRecorder = NullRecorder(),  # noqa: B008
) -> bool:
    """Write a data set as folders of sites, a folder "test", and federation.toml, to rehearse a federation.

    If the server has labels, a folder "server" is written as well. Images are PNG files named by their row. Each folder
    is complete when it appears, and a repeated call writes those that are missing.

    Args:
        config: the options of the data set and the split.
        source: the data set.
        split: the images of each client.
        out: a folder that is new, empty, or has an unfinished export of the same sites.
        display: receives an event for each folder.

    Returns:
        Whether the export was unfinished before this call.

    Raises:
        UserError: the split cannot be expressed as folders, or `out` cannot be written.
    """
    folders = _folder_contents(source, split)
    federation_text = render_federation_file(config, source, split)
    _check_exportable(source, split, folders, out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        _claim_folder(out, _export_id(federation_text, split))
        with locks.hold(out / EXPORT_ID_FILE):
            if (out / FEDERATION_FILE).exists():
                return False
            for folder in folders:
                if (out / folder.name).exists():
                    display.record("folder_exists", f"{folder.name}: exists already", folder=folder.name)
                    continue
                _write_folder(source, folder, out)
                labeled = int(folder.labeled.sum())
                images = len(folder.rows)
                text = f"{folder.name}: {images:,} images, {labeled:,} with a label"
                display.record("folder_written", text, folder=folder.name, images=images, labeled=labeled)
            if config.split is not None:
                split.save(out / SPLIT_FILE)
            atomic_io.write_atomically(out / FEDERATION_FILE, federation_text.encode())
    except locks.LockConflict as error:
        raise UserError(
            f"{out} is being written by another process; wait for it ({atomic_io.error_reason(error)})."
        ) from error
    except OSError as error:
        raise UserError(
            f"{out} cannot be written ({atomic_io.error_reason(error)}); resolve that, then export again."
        ) from error
    return True


def render_federation_file(config: Config, source: Source, split: Split) -> str:
    """Render federation.toml: the options of a federation whose sites are the exported folders.

    `halfmoon run` simulates it with the same images and the same split; `halfmoon serve` runs it.

    Args:
        config: the options of the data set and the split.
        source: the data set.
        split: the images of each client.
    """
    height, width, channels = source.train.images.shape[1:]
    options = {
        name: getattr(config, name)
        for name in ("data", "data_dir", "data_share", "unknown_classes", "image_size", "shrink", *PIXEL_OPTIONS)
    }
    if config.split is not None:
        options["split"] = SPLIT_FILE
    else:
        options |= {name: getattr(config, name) for name in PARTITION_OPTIONS}
    # Options of later versions are written only where they are set, so that older versions read the file.
    options = {
        name: value for name, value in options.items() if name not in ADDED_OPTIONS or value != getattr(Config, name)
    }
    if height == width:  # with any network, the simulator then pads images to the size that the sites have
        options["image_size"] = height
    labels_at = find_labels_at(split) if config.split is not None else config.labels_at
    methods = list_methods_at(labels_at)
    options["method"] = Config.method if Config.method in methods else methods[0]
    options["cohort"] = min(Config.cohort, split.clients)
    clients = clients_by_folder(split)
    federation_options = {
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip("-._") or "exported",
        "sites": [name for name, client in clients.items() if client != SERVER],
        "classes": source.classes,
        "image": (channels, height, width),
        "mirror": source.mirror,
        "mean": source.mean,
        "std": source.std,
        "test": "test",
    }
    if "server" in clients:
        federation_options["server"] = "server"
    lines = [
        "# Written by halfmoon site export. The same split in the simulator: halfmoon run --config federation.toml",
        *(f"{name} = {toml.format_value(value)}" for name, value in options.items() if value is not None),
        "",
        "# Further options of halfmoon serve; a simulation ignores them.",
        f"[{FEDERATION_TABLE}]",
        *(f"{name} = {toml.format_value(value)}" for name, value in federation_options.items()),
    ]
    return "\n".join(lines) + "\n"


def clients_by_folder(split: Split) -> dict[str, int]:
    """Map the names of the folders to client numbers, and "server" to `SERVER` if the server has labels."""
    digits = max(2, len(str(split.clients - 1)))
    clients = {f"site-{client:0{digits}}": client for client in range(split.clients)}
    if split.rows(SERVER, True).size:
        clients["server"] = SERVER
    return clients


def find_labels_at(split: Split) -> LabelLocation:
    """Determine the location of a split's labels: "server", all "clients", or "some" clients."""
    if split.rows(SERVER, True).size:
        return "server"
    return "clients" if all(split.rows(client, True).size for client in range(split.clients)) else "some"


def _folder_contents(source: Source, split: Split) -> list[_FolderContents]:
    folders = []
    for name, client in clients_by_folder(split).items():
        rows = np.sort(np.concatenate([split.rows(client, True), split.rows(client, False)]))
        folders.append(_FolderContents(name, source.train, rows, split.labeled[rows]))
    count = len(source.test)
    folders.append(_FolderContents("test", source.test, np.arange(count), np.ones(count, bool)))
    return folders


def _check_exportable(source: Source, split: Split, folders: Sequence[_FolderContents], out: Path) -> None:
    """Check that a data set and its split can be written as folders of images with files of labels.

    A split with several stages gives a client other images as the rounds go on, which a folder cannot express.

    Args:
        source: the data set.
        split: the images of each client.
        folders: the folders to write: one for each site, the test set, and perhaps the server.
        out: the folder that is going to contain them. `_claim_folder` checks later that it is empty.

    Raises:
        UserError: they cannot be, or `out` is a file.
    """
    if split.stages > 1:
        raise UserError(f"the split has {split.stages} stages, but a folder of images has no time; set stages to 1.")
    for folder in folders:
        if not folder.rows.size:
            raise UserError(f"{folder.name} would have no image; ask for fewer sites or another split.")
    for name in source.classes:
        # The file has one name on each line, and readers strip the white space around it.
        if name != name.strip() or not name.isprintable() or source.classes.count(name) > 1:
            raise UserError(
                f"class name {name!r} cannot be written into {CLASSES_FILE}: names need to differ and be one line each."
            )
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give a folder that is empty or does not exist.")


def _export_id(federation_text: str, split: Split) -> str:
    """Hash the options and the split."""
    split_hash = atomic_io.sha256(split.client.tobytes() + split.labeled.tobytes())
    return atomic_io.sha256(f"{federation_text}{split.origin.labels_sha256}{split_hash}".encode())


def _claim_folder(out: Path, export_id: str) -> None:
    """Write the id of an export into its folder, so that only the same export can be continued there.

    An export may be killed and repeated. The id is therefore written first: other files in the folder are those of this
    export if the folder has its id, and the user's if the folder has no id.

    Args:
        out: an existing folder.
        export_id: a hash of the options and the split.

    Raises:
        UserError: the folder has an export with other options, or other contents.
    """
    content = atomic_io.read(out / EXPORT_ID_FILE)
    if content is not None and content.decode(errors="replace").strip() == export_id:
        return
    if content:
        raise UserError(f"{out} contains an export with other options; give another folder.")
    # The temporary file of `write_atomically`, which remains if the process was killed while it wrote the id.
    partial = f".{EXPORT_ID_FILE}{atomic_io.PARTIAL}"
    if content is None and any(path.name != partial for path in out.iterdir()):
        raise UserError(f"{out} is not empty, and nothing is overwritten; give another folder.")
    atomic_io.write_atomically(out / EXPORT_ID_FILE, f"{export_id}\n".encode())


def _write_folder(source: Source, folder: _FolderContents, out: Path) -> None:
    """Write the images, labels.csv and classes.txt of one site.

    The folder is written under a temporary name, and renamed when it is complete. Images are named by their row in the
    data set, so that a site's images can be found in it.

    Args:
        source: the data set, which names the classes.
        folder: the name, the images (of the training or test set), and which rows are written with a label.
        out: the folder that contains all sites.
    """
    partial = out / f".{folder.name}{atomic_io.PARTIAL}"
    if partial.exists():  # from an export that was killed; `_claim_folder` has checked that it is this one
        shutil.rmtree(partial)
    (partial / "images").mkdir(parents=True)
    digits = max(2, len(str(len(folder.images) - 1)))  # of the largest row
    names = [f"images/{row:0{digits}}.png" for row in folder.rows]
    for row, name in zip(folder.rows, names, strict=True):
        pixels = folder.images.images[row]
        if pixels.shape[2] == 1:
            pixels = pixels[:, :, 0]  # Pillow expects gray images without a dimension of channels
        Image.fromarray(pixels).save(partial / name)
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["path", "label"])
    for row, name, labeled in zip(folder.rows, names, folder.labeled, strict=True):
        if labeled:
            class_name = source.classes[folder.images.labels[row]]
            writer.writerow([name, protect_cell(class_name)])  # no spreadsheet program executes it as a formula
    classes_text = "".join(f"{name}\n" for name in source.classes)
    atomic_io.write_atomically(partial / LABELS_FILE, table.getvalue().encode())
    atomic_io.write_atomically(partial / CLASSES_FILE, classes_text.encode())
    os.rename(partial, out / folder.name)

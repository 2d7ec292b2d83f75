"""A site's images decoded once, into a memory-mapped array beside an index that tells whether it is still true."""

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data.preparation import Preparation
from halfmoon.data.readers.cache import npy_head
from halfmoon.data.readers.decode import fitted, header
from halfmoon.sites.folders.labels import STATE_FOLDER
from halfmoon.sites.folders.site_folder import Progress, SiteFolder, join_names, read_image_bytes, read_site
from halfmoon.storage import atomic_io, locks

INDEX_FILE, LOCK_FILE = "index.json", "lock"
INDEX_VERSION = 3  # of the index; raise it when decoding starts to give other pixels
MAX_SIDE_PIXELS = 4096  # pixels of a side at most

_ARRAY = re.compile(rf"images-[0-9a-f]{{16}}\.npy|\.images-[0-9a-f]{{16}}\.npy{re.escape(atomic_io.PARTIAL)}")
"""The arrays that are this module's own, whole or not."""

Stamp = tuple[int, int]  # a file's bytes and its time of change in ns


@dataclass(frozen=True)
class PreparedSite:
    """The result of `prepare`: the site, how many images it decoded and left out, and whether anything was written."""

    site: SiteFolder
    state_folder: Path
    written: bool
    decoded: int
    left_out: Mapping[str, str]


def prepare_site(
    folder: Path,
    size: tuple[int, int] | None = None,
    channels: int | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
    crop: bool = False,
    window: tuple[float, float] | None = None,
) -> PreparedSite:
    """Decode a site's images into one array, uint8 (N, H, W, channels), in its own home or `out`.

    Without `size` (H, W) and `channels` they stay as before, or as all images are. Files of known size and time are not
    decoded again, and a kill leaves the old state or the new one. Raise UserError where nothing can be read, sizes
    differ and none is given, or the place cannot be written.
    """
    site, home = read_site(folder), out or folder / STATE_FOLDER
    if size is not None and not all(1 <= side <= MAX_SIDE_PIXELS for side in size):
        raise UserError(f"the size is {size[0]}x{size[1]}; each side must be from 1 to {MAX_SIDE_PIXELS} pixels.")
    if channels not in (None, 1, 3):
        raise UserError(f"channels is {channels}; it must be 1 (gray) or 3 (RGB).")
    stamps = _stamps(site)
    old = _load(home)
    shape, how = _shape(site, old, size, channels), Preparation(crop=crop, window=window)
    old = old if old is not None and old.form == how.form else None
    if old is not None and old.shape[1:] == shape and old.stamps == stamps and old.open() is not None:
        return _unchanged(site, home, old)
    with _lock_state_folder(home):
        index, count = _decode(site, stamps, shape, how, home, old, progress)
    return PreparedSite(_opened(site, index), home, True, count, index.left_out)


def open_prepared_site(folder: Path, out: Path | None = None, form: str | None = None) -> SiteFolder:
    """Return a prepared site, memory-mapped, without unreadable images; `form` is that of its `Preparation`.

    Raise UserError where it was not prepared like this, or has changed since.
    """
    site, home = read_site(folder), out or folder / STATE_FOLDER
    again = f"run halfmoon site prepare {folder}{f' --out {out}' if out is not None else ''}"
    index = _load(home)
    if index is None:
        raise UserError(f"{folder} is not prepared: {again}.")
    if form is not None and index.form != form:
        raise UserError(f"{folder} is prepared in another way: {again} again.")
    stamps = _stamps(site)
    changed = sorted(path for path in stamps.keys() | index.stamps.keys() if stamps.get(path) != index.stamps.get(path))
    if changed:
        raise UserError(f"{folder} has changed since it was prepared ({join_names(changed, 3)}): {again} again.")
    if index.classes != site.classes or index.labels != _labels(site, index.left_out):
        raise UserError(f"{folder}: labels or classes have changed since it was prepared: {again} again.")
    if index.open() is None:
        raise UserError(f"{home / index.images} is missing or damaged: {again} again.")
    return _opened(site, index)


@dataclass(frozen=True)
class _Index:
    """What index.json says."""

    home: Path
    images: str  # the array's file
    shape: tuple[int, int, int, int]
    classes: tuple[str, ...]
    labels: dict[str, int]  # of the images in the array, by path, in the order of its rows
    stamps: dict[str, Stamp]  # of all images, those left out too
    left_out: dict[str, str]
    form: str = ""  # of the `Preparation`, beside size and channels

    def open(self) -> np.ndarray | None:
        """Return the array, None where it is not as the index says."""
        try:
            array = np.load(self.home / self.images, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return array if array.shape == self.shape and array.dtype == np.uint8 else None

    def write(self) -> None:

        def row(path: str, **facts: Any) -> dict[str, Any]:
            size, changed = self.stamps[path]
            return {"path": path, **facts, "bytes": size, "mtime": changed}

        files = [row(path, label=label) for path, label in self.labels.items()]
        left_out = [row(path, reason=reason) for path, reason in self.left_out.items()]
        value = {
            "version": INDEX_VERSION,
            "images": self.images,
            "shape": list(self.shape),
            "classes": list(self.classes),
        }
        value |= {"form": self.form, "files": files, "left_out": left_out}
        atomic_io.replace(self.home / INDEX_FILE, (json.dumps(value) + "\n").encode())


def _load(home: Path) -> _Index | None:
    value: Any = atomic_io.read_json(home / INDEX_FILE)
    try:
        if value["version"] != INDEX_VERSION:
            return None
        files = value["files"]
        stamps = {each["path"]: (each["bytes"], each["mtime"]) for each in [*files, *value["left_out"]]}
        n, height, width, channels = value["shape"]
        index = _Index(
            home,
            Path(value["images"]).name,
            (n, height, width, channels),
            tuple(value["classes"]),
            {each["path"]: each["label"] for each in files},
            stamps,
            {each["path"]: each["reason"] for each in value["left_out"]},
            value["form"],
        )
    except (KeyError, TypeError, ValueError):
        return None
    numbers = [*index.shape, *index.labels.values(), *(number for stamp in stamps.values() for number in stamp)]
    words = [*index.classes, *stamps, *index.left_out.values(), index.form]
    plain = all(type(each) is int for each in numbers) and all(isinstance(each, str) for each in words)
    return index if plain and n >= 0 and height > 0 and width > 0 and channels in (1, 3) else None


def _labels(site: SiteFolder, left_out: Mapping[str, str]) -> dict[str, int]:
    return {path: int(label) for path, label in zip(site.paths, site.labels, strict=True) if path not in left_out}


def _opened(site: SiteFolder, index: _Index) -> SiteFolder:
    labels = np.array(list(index.labels.values()), np.int64)
    return replace(site, paths=tuple(index.labels), labels=labels, images=index.open())


def _unchanged(site: SiteFolder, home: Path, old: _Index) -> PreparedSite:
    """Return what lies there already; labels need no decoding, so only the index is written where they changed."""
    new = replace(old, labels=_labels(site, old.left_out), classes=site.classes)
    if new != old:
        with _lock_state_folder(home):
            new.write()
    return PreparedSite(_opened(site, new), home, new != old, 0, old.left_out)


def _stamps(site: SiteFolder) -> dict[str, Stamp]:
    stamps = {}
    for path in site.paths:
        try:
            facts = os.stat(os.path.join(site.folder, path))
            stamps[path] = (facts.st_size, facts.st_mtime_ns)
        except OSError:  # it has just gone, and is among those that cannot be read
            stamps[path] = (-1, -1)
    return stamps


def _shape(
    site: SiteFolder, old: _Index | None, size: tuple[int, int] | None, channels: int | None
) -> tuple[int, int, int]:
    if size is not None and channels is not None:
        return (*size, channels)
    if old is not None:
        _, height, width, depth = old.shape
        return (*(size or (height, width)), channels or depth)
    sizes: Counter[tuple[int, int]] = Counter()
    gray = True
    for path in site.paths:
        form = header(site.folder / path)
        if form is not None:
            sizes[form[:2]] += 1
            gray = gray and form[2]
    if not sizes:
        raise UserError(f"{site.folder}: none of its {len(site):,} images can be read; see halfmoon site check.")
    if size is None and len(sizes) > 1:
        (height, width), count = sizes.most_common(1)[0]
        raise UserError(
            f"{site.folder}: its images have {len(sizes):,} sizes, most of them ({count:,}) {height}x{width}; give one "
            f"by --size HxW."
        )
    return (*(size or next(iter(sizes))), channels or (1 if gray else 3))


@contextmanager
def _lock_state_folder(home: Path) -> Iterator[None]:
    """Hold the place for one process; what the system refuses becomes a sentence."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with locks.hold(home / LOCK_FILE):
            yield
    except locks.Conflict as error:
        words = f"{home} is being prepared by another process; wait for it ({atomic_io.reason(error)})."
        raise UserError(words) from error
    except OSError as error:
        raise UserError(
            f"{home} cannot be written ({atomic_io.reason(error)}); give another folder by --out."
        ) from error


def _decode(
    site: SiteFolder,
    stamps: Mapping[str, Stamp],
    shape: tuple[int, int, int],
    how: Preparation,
    home: Path,
    old: _Index | None,
    progress: Progress | None,
) -> tuple[_Index, int]:
    """Write the array and its index, and return that and how many images were decoded."""
    needed, free = len(site) * int(np.prod(shape)), shutil.disk_usage(home).free
    if needed > free:
        raise UserError(
            f"{home} has room for {free:,} bytes, but the decoded images need {needed:,}; give another folder by --out "
            "or a smaller --size."
        )
    reusable = _reusable(old, stamps, shape)
    name = f"images-{hashlib.sha256(json.dumps([shape, how.form, stamps]).encode()).hexdigest()[:16]}.npy"
    partial = home / f".{name}{atomic_io.PARTIAL}"
    left_out: dict[str, str] = {}
    count = 0
    try:
        with partial.open("wb") as file:
            file.write(npy_head((len(site), *shape)))  # numpy leaves room in it for any number of rows
            for row, path in enumerate(site.paths):
                pixels = reusable.get(path)
                try:
                    if pixels is None:
                        count += 1
                        pixels = fitted(read_image_bytes(site.folder, path), path, *shape, how.crop, how.window)
                    file.write(pixels.tobytes())
                except UserError as error:
                    left_out[path] = str(error).removeprefix(f"{path}: ")
                if progress is not None:
                    progress(row + 1, len(site))
            if len(left_out) == len(site):
                raise UserError(f"{site.folder}: none of its {len(site):,} images can be read.")
            file.seek(0)
            labels = _labels(site, left_out)
            file.write(npy_head((len(labels), *shape)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, home / name)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    index = _Index(home, name, (len(labels), *shape), site.classes, labels, dict(stamps), left_out, how.form)
    index.write()
    for each in home.iterdir():
        if _ARRAY.fullmatch(each.name) and each.name != name:
            with suppress(OSError):  # Windows keeps files that someone has open
                each.unlink(missing_ok=True)
    return index, count


def _reusable(old: _Index | None, stamps: Mapping[str, Stamp], shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
    images = old.open() if old is not None and old.shape[1:] == shape else None
    if old is None or images is None:
        return {}
    rows = np.asarray(images)
    return {path: rows[row] for row, path in enumerate(old.labels) if old.stamps[path] == stamps.get(path)}

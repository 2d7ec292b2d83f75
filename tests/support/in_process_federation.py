"""Whole federations of three small sites in one process, and all that crossed the grid on the way."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from safetensors.numpy import load_file

from halfmoon.api.uploads import Upload
from halfmoon.config import schema as settings
from halfmoon.data import Images, sources
from halfmoon.federation.protocol.messages import (
    Acceptance,
    FinalModel,
    Offer,
    Receipt,
    Refusal,
    Reply,
    Request,
    read_message,
)
from halfmoon.federation.server import sessions
from halfmoon.federation.server.plan import load_plan
from halfmoon.federation.transport import client_app, local
from halfmoon.federation.transport.grid import GridTransport, unwrap_message
from halfmoon.methods import registry
from halfmoon.runs.factory import ImageSpec, get_split, load_source_for_network
from halfmoon.sites.folders import export_sites
from halfmoon.sites.folders.prepare import open_prepared_site

EXPORT_OPTIONS = {"data": "digits", "data_share": 0.03, "clients": 3, "setting": "iid-dir", "label_ratio": 0.4}
LABEL_LAYOUTS: dict[str, dict[str, Any]] = {
    "clients": {"method": "fedavg"},
    "some": {"method": "fedavg", "labels_at": "some", "labeled_clients": 2},
    "server": {"method": "semifl", "labels_at": "server"},
    "all": {"method": "fedavg-sl", "label_ratio": 1.0},
}
"""Where labels lie; "all": every image of every site has one."""

SECRET_FOLDER = "ward-7-b41"
"""The name of the folder that all folders of a federation lie in: it is in every path of a site and of the server."""

CLASSES = tuple(f"diagnosis-{k}" for k in range(10))
"""What a federation calls the ten digits."""

SHORT_RUN = {"rounds": 2, "cohort": 2, "width": 4, "labeled_batch": 4, "unlabeled_batch": 4}
EAGER_OPTIONS = {"threshold": 0.12, "delta": 3.0, "ramp_rounds": 2, "interval": 2, "min_class_images": 1}
"""Options under which methods use pseudo-labels from the start (one of ten classes has at most ln 10 = 2.3 nats), and sites
may have one label in a class."""


@dataclass(frozen=True)
class Exchange:
    """A message to the site `node`, and what that answered."""

    node: int
    message: Message
    reply: Message

    @property
    def asked(self) -> Offer | Request | FinalModel:
        return read_message(unwrap_message(self.message.content), Offer, Request, FinalModel)

    @property
    def said(self) -> Acceptance | Reply | Refusal | Receipt:
        return read_message(unwrap_message(self.reply.content), Acceptance, Reply, Refusal, Receipt)


@dataclass(eq=False)
class SiteFolders:
    """Three sites, and a folder for the test images and one for the server's own, below `folder`."""

    folder: Path
    words: str  # of federation.toml
    runs: Path
    _count: list[int] = field(default_factory=list)

    @cached_property
    def image_spec(self) -> ImageSpec:
        return load_plan(self.folder / "federation.toml").terms.image_spec

    @property
    def names(self) -> list[str]:
        return sorted(each.name for each in self.folder.glob("site-*"))

    def images(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a folder's images, uint8 (N, 8, 8, 1), and their labels, int64 (N,), -1 where there is none."""
        home = self.folder / name / ".halfmoon"
        baselines = home / "8x8x1"  # where the server decodes
        found = open_prepared_site(self.folder / name, baselines if baselines.exists() else home)
        assert found.images is not None
        return np.array(found.images), found.labels

    def write(self, method: str, table: str = "", **options: Any) -> Path:
        """Return a federation.toml, written without what is None; `table` is added to its table [federation]."""
        given = {"method": method, **SHORT_RUN, **options}
        own = given.pop("options", {})
        kept = [line for line in self.words.splitlines() if line.split(" = ")[0] not in given]
        at = kept.index("[federation]")
        lines = [f"{name} = {json.dumps(value)}" for name, value in given.items() if value is not None]
        mine = ["[options]", *(f"{name} = {json.dumps(value)}" for name, value in own.items())]
        self._count.append(1)
        path = self.folder / f"{method}-{len(self._count)}.toml"
        path.write_text("\n".join([*lines, *kept[:at], *mine, *kept[at:], table]) + "\n")
        return path

    def play(self, file: Path, name: str = "") -> Path:
        """Play a federation as far as it goes, through Flower's two apps; return its run folder."""
        run = self.runs / (name or file.stem)
        local.rehearse(file, run, self.folder)
        return run

    def forget(self) -> None:
        """Have all sites forget what they remember, and their processes end."""
        client_app._open_client.cache_clear()
        for name in self.names:
            shutil.rmtree(self.folder / name / ".halfmoon" / "federations", ignore_errors=True)


def export_small_sites(place: str, folder: Path, clients: int | None = None) -> SiteFolders:
    """Write sites, three by default, with labels at this place."""
    count = {} if clients is None else {"clients": clients}
    config = settings.resolve({**EXPORT_OPTIONS, **SHORT_RUN, **LABEL_LAYOUTS[place], **count}, {})
    data = load_source_for_network(config)
    split = get_split(config, data)
    # Of other names: "0" to "9" are everywhere.
    out = folder / SECRET_FOLDER / place
    export_sites(config, replace(data, classes=CLASSES), split, out)
    return SiteFolders(out, (out / "federation.toml").read_text(), folder / SECRET_FOLDER / "runs" / place)


@contextmanager
def speed_up_rehearsals() -> Iterator[None]:
    """Do without what a rehearsal need not wait for: a disk that survives the machine's fall, a look every 0.1 s, and
    all of the digits' test images but 60."""
    digits = sources._load_digits

    def few() -> tuple[Images, Images, tuple[str, ...]]:
        train, test, classes = digits()
        return train, Images(test.images[:60], test.labels[:60]), classes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_load_digits", few)
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(sessions, "MIN_PAUSE_SECONDS", 0.001)
        yield


@contextmanager
def record_exchanges() -> Iterator[list[Exchange]]:
    """Give a list that takes in all that crosses the grid, both ways."""
    letters: list[Exchange] = []
    original = local.LocalGrid._reply

    def answered(self: local.LocalGrid, message: Message) -> Message:
        reply = original(self, message)
        letters.append(Exchange(message.metadata.dst_node_id, message, reply))
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.LocalGrid, "_reply", answered)
        yield letters


class ServerStopped(BaseException):
    """What ends a server's process in a test: nothing catches it."""


def select_eager_options(method: str) -> dict[str, Any]:
    """Return the options of `EAGER_OPTIONS` that a method has."""
    return {name: value for name, value in EAGER_OPTIONS.items() if name in registry.options(method)}


def get_round_and_query(asked: Request) -> tuple[int, int]:
    return asked.round, asked.query


@contextmanager
def stop_server_at(visit, after=False, place=get_round_and_query):
    """Stop the server at a `visit`, which is the `place` of a request: before it is sent, or `after` it is done."""
    original = GridTransport.send

    def send(self: GridTransport, mail: Mapping[int, bytes], seconds: float, asks: bool) -> Any:
        here = not asks and visit in [place(read_message(data, Request)) for data in mail.values()]
        if here and not after:
            raise ServerStopped
        message_ids = original(self, mail, seconds, asks)
        if here:
            raise ServerStopped
        return message_ids

    with pytest.MonkeyPatch.context() as patch, suppress(ServerStopped):
        patch.setattr(GridTransport, "send", send)
        yield
        raise AssertionError("it was not stopped")


@contextmanager
def call_before_each_message(do: Callable[[], None]) -> Iterator[None]:
    """Call `do` before every message to a site."""
    original = local.LocalGrid._reply

    def answered(self: local.LocalGrid, message: Message) -> Message:
        do()
        return original(self, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.LocalGrid, "_reply", answered)
        yield


def read_model_bytes(run: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the tensors of a run's model as bytes."""
    leaves = load_file(run / "model.safetensors")
    return {name: (str(leaf.dtype), leaf.shape, leaf.tobytes()) for name, leaf in leaves.items()}


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def list_upload_parts(upload: dict[str, Any]) -> set[str]:
    return set(Upload.from_tree(upload).parts)


def list_pixel_rows(images: np.ndarray, mean: float, std: float) -> set[bytes]:
    """Return every row of pixels of images, uint8 (N, H, W, 1), as its bytes, and as numbers in 0..1 and normalized.
    Rows of few different values are left out: zeros are everywhere."""
    lines = images[..., 0].reshape(-1, images.shape[2])
    lines = np.array([line for line in lines if len(set(line.tolist()) - {0}) >= 4])
    assert len(lines) >= len(images)
    shares = lines / 255
    forms = [lines, *(each.astype(kind) for each in (shares, (shares - mean) / std) for kind in ("f4", "f8"))]
    # As a network normalizes: in float32 from the start.
    single = lines.astype("f4") / np.float32(255)
    forms += [single, (single - np.float32(mean)) / np.float32(std)]
    return {line.tobytes() for form in forms for line in form}

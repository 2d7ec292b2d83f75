"""Run whole federations of a few small sites in one process, and record or interrupt the messages between them."""

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
from halfmoon.federation.transport.grid import GridTransport
from halfmoon.federation.transport.records import unwrap_message
from halfmoon.methods import registry
from halfmoon.runs.factory import ImageSpec, get_split, load_source_for_network
from halfmoon.sites.folders import export_sites
from halfmoon.sites.folders.prepare import open_prepared_site

# About 43 of 1,437 training images, so that a whole federation takes about a second.
EXPORT_OPTIONS = {"data": "digits", "data_share": 0.03, "clients": 3, "setting": "iid-dir", "label_ratio": 0.4}
LABEL_LAYOUTS: dict[str, dict[str, Any]] = {
    "clients": {"method": "fedavg"},
    "some": {"method": "fedavg", "labels_at": "some", "labeled_clients": 2},
    "server": {"method": "semifl", "labels_at": "server"},
    "all": {"method": "fedavg-sl", "label_ratio": 1.0},
}
"""Options by location of the labels. "some": at two sites of three; "all": every image of every site is labeled."""

SECRET_FOLDER = "ward-7-b41"
"""The folder that contains all others: its name is in every local path, and must not be in any message."""

CLASSES = tuple(f"diagnosis-{k}" for k in range(10))
"""Class names of the ten digits. Unlike "0" to "9" they do not appear by chance."""

SHORT_RUN = {"rounds": 2, "cohort": 2, "width": 4, "labeled_batch": 4, "unlabeled_batch": 4}
EAGER_OPTIONS = {"threshold": 0.12, "delta": 3.0, "ramp_rounds": 2, "interval": 2, "min_class_images": 1}
"""Options under which methods use pseudo-labels from the start (one of ten classes has at most ln 10 = 2.3 nats), and sites
may have one label in a class."""


@dataclass(frozen=True)
class Exchange:
    """A message to the site `node` and its reply."""

    node: int
    message: Message
    reply: Message

    @property
    def request(self) -> Offer | Request | FinalModel:
        return read_message(unwrap_message(self.message.content), Offer, Request, FinalModel)

    @property
    def response(self) -> Acceptance | Reply | Refusal | Receipt:
        return read_message(unwrap_message(self.reply.content), Acceptance, Reply, Refusal, Receipt)


@dataclass(eq=False)
class LocalFederation:
    """The exported folders of a federation.

    Attributes:
        folder: contains a folder for each site, one for the test images and one for the server's images.
        template: the text of the exported federation.toml.
        runs: where the run folders are written.
    """

    folder: Path
    template: str
    runs: Path
    _count: list[int] = field(default_factory=list)

    @cached_property
    def image_spec(self) -> ImageSpec:
        return load_plan(self.folder / "federation.toml").terms.image_spec

    @property
    def names(self) -> list[str]:
        return sorted(each.name for each in self.folder.glob("site-*"))

    def load_images(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a folder's images, uint8 (N, 8, 8, 1), and their labels, int64 (N,), -1 for unlabeled images."""
        state_folder = self.folder / name / ".halfmoon"
        server_folder = state_folder / "8x8x1"  # the server prepares its images in a subfolder
        site = open_prepared_site(self.folder / name, server_folder if server_folder.exists() else state_folder)
        assert site.images is not None
        return np.array(site.images), site.labels

    def write_plan(self, method: str, table: str = "", **options: Any) -> Path:
        """Write a federation.toml and return its path.

        Args:
            method: name of the method.
            table: lines to append to the table [federation].
            options: options of the run, without those that are None; "options" are the options of the method.
        """
        run_options = {"method": method, **SHORT_RUN, **options}
        method_options = run_options.pop("options", {})
        template_lines = [line for line in self.template.splitlines() if line.split(" = ")[0] not in run_options]
        # In TOML, options without a table must come before the first table.
        at = template_lines.index("[federation]")
        lines = [f"{name} = {json.dumps(value)}" for name, value in run_options.items() if value is not None]
        method_table = ["[options]", *(f"{name} = {json.dumps(value)}" for name, value in method_options.items())]
        self._count.append(1)
        path = self.folder / f"{method}-{len(self._count)}.toml"
        path.write_text("\n".join([*lines, *template_lines[:at], *method_table, *template_lines[at:], table]) + "\n")
        return path

    def run(self, file: Path, name: str = "") -> Path:
        """Run a federation through Flower's two apps until it ends, and return its run folder."""
        run = self.runs / (name or file.stem)
        local.rehearse(file, run, self.folder)
        return run

    def delete_client_memory(self) -> None:
        """Delete the memory that sites store between rounds, and drop the open clients."""
        client_app._open_cached_client.cache_clear()
        for name in self.names:
            shutil.rmtree(self.folder / name / ".halfmoon" / "federations", ignore_errors=True)


def export_small_sites(label_layout: str, folder: Path, clients: int | None = None) -> LocalFederation:
    """Export sites, three by default, with one of the layouts of `LABEL_LAYOUTS`."""
    count = {} if clients is None else {"clients": clients}
    config = settings.resolve({**EXPORT_OPTIONS, **SHORT_RUN, **LABEL_LAYOUTS[label_layout], **count}, {})
    data = load_source_for_network(config)
    split = get_split(config, data)
    out = folder / SECRET_FOLDER / label_layout
    export_sites(config, replace(data, classes=CLASSES), split, out)
    return LocalFederation(out, (out / "federation.toml").read_text(), folder / SECRET_FOLDER / "runs" / label_layout)


@contextmanager
def speed_up_rehearsals() -> Iterator[None]:
    """Skip disk flushes, poll every millisecond, and evaluate on 60 test images only."""
    digits = sources._load_digits

    def load_few_digits() -> tuple[Images, Images, tuple[str, ...]]:
        train, test, classes = digits()
        # 60 images have all classes, and take a sixth of the time of all 360.
        return train, Images(test.images[:60], test.labels[:60]), classes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_load_digits", load_few_digits)
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(sessions, "MIN_PAUSE_SECONDS", 0.001)
        yield


@contextmanager
def record_exchanges() -> Iterator[list[Exchange]]:
    """Yield a list to which every message to a site is appended with its reply."""
    exchanges: list[Exchange] = []
    original = local.LocalGrid._reply

    def reply_and_record(self: local.LocalGrid, message: Message) -> Message:
        reply = original(self, message)
        exchanges.append(Exchange(message.metadata.dst_node_id, message, reply))
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.LocalGrid, "_reply", reply_and_record)
        yield exchanges


class ServerStopped(BaseException):
    """The server's process ended. Derives from BaseException so that no handler catches it."""


def select_eager_options(method: str) -> dict[str, Any]:
    """Return the options of `EAGER_OPTIONS` that a method has and that have an effect in it."""
    options = {name: value for name, value in EAGER_OPTIONS.items() if name in registry.options(method)}
    unused = registry.unused_options(registry.make(method, options))
    return {name: value for name, value in options.items() if name not in unused}


def get_round_and_query(request: Request) -> tuple[int, int]:
    return request.round, request.query


@contextmanager
def stop_server_at(
    position: object, after: bool = False, locate: Callable[[Request], object] = get_round_and_query
) -> Iterator[None]:
    """Stop the server before it sends a request, or `after` it has sent it.

    Args:
        position: stop at the request for which `locate` returns this value.
        after: whether to send the request first.
        locate: returns the position of a request, by default its round and query.
    """
    original = GridTransport.send

    def send(self: GridTransport, mail: Mapping[int, bytes], seconds: float, is_offer: bool) -> Any:
        reached = not is_offer and position in [locate(read_message(data, Request)) for data in mail.values()]
        if reached and not after:
            raise ServerStopped
        message_ids = original(self, mail, seconds, is_offer)
        if reached:
            raise ServerStopped
        return message_ids

    with pytest.MonkeyPatch.context() as patch, suppress(ServerStopped):
        patch.setattr(GridTransport, "send", send)
        yield
        raise AssertionError("the server was not stopped")


@contextmanager
def call_before_each_message(callback: Callable[[], None]) -> Iterator[None]:
    """Run the block with a callback that is called before every message to a site."""
    original = local.LocalGrid._reply

    def call_and_reply(self: local.LocalGrid, message: Message) -> Message:
        callback()
        return original(self, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.LocalGrid, "_reply", call_and_reply)
        yield


def read_model_bytes(run: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the dtype, shape and bytes of each tensor of a run's model."""
    leaves = load_file(run / "model.safetensors")
    return {name: (str(leaf.dtype), leaf.shape, leaf.tobytes()) for name, leaf in leaves.items()}


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def list_upload_parts(upload: dict[str, Any]) -> set[str]:
    return set(Upload.from_tree(upload).parts)


def list_pixel_rows(images: np.ndarray, mean: float, std: float) -> set[bytes]:
    """Return the bytes of every pixel row of images in each encoding in which a message could leak it.

    The encodings are uint8, and float32 and float64 in 0..1 and normalized. Rows with fewer than four different values
    are left out, because they occur by chance.

    Args:
        images: uint8 (N, H, W, 1).
        mean: mean of the normalization.
        std: standard deviation of the normalization.
    """
    rows = images[..., 0].reshape(-1, images.shape[2])
    rows = np.array([line for line in rows if len(set(line.tolist()) - {0}) >= 4])
    assert len(rows) >= len(images)
    shares = rows / 255
    encodings = [rows, *(each.astype(kind) for each in (shares, (shares - mean) / std) for kind in ("f4", "f8"))]
    # As a network normalizes: in float32 from the start.
    single = rows.astype("f4") / np.float32(255)
    encodings += [single, (single - np.float32(mean)) / np.float32(std)]
    return {line.tobytes() for form in encodings for line in form}

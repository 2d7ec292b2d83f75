"""The program of a federation, which its terms name: halfmoon's version, the app bundle that Flower carries, plugins.

The bundle has no code: one file, `pyproject.toml`, names what is installed at a server and at a site. Whatever differs
between two servers reaches Flower beside it, so the bundle of one version is always the same.
"""

import hashlib
import io
import json
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Any

from halfmoon.storage import toml

APPS = ("halfmoon.federation.transport.server_app:app", "halfmoon.federation.transport.client_app:app")
"""The ServerApp and the ClientApp of every federation."""

MIN_FLOWER_VERSION = "1.41.0"  # the oldest Flower that plays the bundle

PROJECT_FILE, CONTENT_FILE = "pyproject.toml", ".info/CONTENT"
"""The files of a bundle: ours, and Flower's list of them."""

MAX_BUNDLE_BYTES = 2**16  # bytes of a bundle, and of a file in it, at most: ours has less than one kilobyte


class ForeignBundle(ValueError):
    """A bundle that is not the one of the terms; nothing of it was unpacked or executed."""


def render_project(apps: Sequence[str] = APPS) -> str:
    """Return the pyproject.toml of the bundle, the same at every server: `flwr run --run-config` has the paths."""
    server_app, client_app = map(toml.value, apps)
    return f"""[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "federation"
version = "1.0.0"
description = "A federation of halfmoon"
license = "Apache-2.0"
dependencies = ["flwr>={MIN_FLOWER_VERSION}"]

[tool.flwr.app]
publisher = "halfmoon"
flwr-version-target = "{MIN_FLOWER_VERSION}"

[tool.flwr.app.components]
serverapp = {server_app}
clientapp = {client_app}

[tool.flwr.app.config]
federation = ""
run-dir = ""
keys = ""
"""


@cache
def expected_digest(apps: tuple[str, ...] = APPS) -> str:
    """Return the SHA-256 of the bundle's facts; Flower may pack the same facts in another way."""
    return _digest(tomllib.loads(render_project(apps)))


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def compute_digest(content: bytes) -> str:
    """Return the digest of a bundle (a zip file in memory); raise `Foreign` where it can be none of ours."""
    if len(content) > MAX_BUNDLE_BYTES:
        raise ForeignBundle(f"it has {len(content):,} bytes")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            members = bundle.infolist()
            more = sorted({member.filename for member in members} - {PROJECT_FILE, CONTENT_FILE})
            if more or len(members) != 2:
                raise ForeignBundle(f"it holds {more[0][:80]!r}" if more else "a file is missing or there twice")
            if max(member.file_size for member in members) > MAX_BUNDLE_BYTES:
                raise ForeignBundle("it unpacks to more than it may")
            return _digest(tomllib.loads(bundle.read(PROJECT_FILE).decode()))
    except ForeignBundle:
        raise
    except Exception as error:  # whatever zipfile and tomllib make of forged bytes
        raise ForeignBundle(f"it cannot be read ({type(error).__name__})") from error


def check_bundle(content: bytes, apps: tuple[str, ...] = APPS) -> None:
    if compute_digest(content) != expected_digest(apps):
        raise ForeignBundle("it names another program")


def describe_program(plugins: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what runs at the server and at the sites; `plugins` has the hash of each that the terms need, by name."""
    return {"halfmoon": metadata.version("halfmoon"), "bundle": expected_digest(), "plugins": dict(plugins or {})}


def describe_difference(theirs: Any) -> str | None:
    """Return in words how a program, plugins apart, differs from the one here; None where it does not."""
    mine = describe_program()
    if not isinstance(theirs, dict) or set(theirs) != set(mine):
        return "it does not say what it runs"
    if theirs["halfmoon"] != mine["halfmoon"]:
        return f"halfmoon {str(theirs['halfmoon'])[:40]}, and here is {mine['halfmoon']}"
    return None if theirs["bundle"] == mine["bundle"] else "its app bundle is another one"

"""The program that a federation runs: halfmoon's version, the app bundle that Flower sends to sites, and plugins.

The bundle contains no code. Its single file, `pyproject.toml`, names the two Flower apps, which are installed at the
server and at the sites. Settings that differ between servers reach Flower separately, so every server that runs the
same version of halfmoon has the same bundle, and a site can refuse any other.
"""

import hashlib
import io
import json
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from halfmoon.core import toml
from halfmoon.core.versions import installed_version

APPS = ("halfmoon.federation.transport.server_app:app", "halfmoon.federation.transport.client_app:app")
"""The import paths of the ServerApp and the ClientApp of every federation."""

MIN_FLOWER_VERSION = "1.41.0"  # the oldest Flower that runs the bundle

PROJECT_FILE = "pyproject.toml"
CONTENT_FILE = ".info/CONTENT"  # Flower's list of the bundle's files

MAX_BUNDLE_BYTES = 2**16
"""Largest bundle, packed or unpacked. The real one has less than one kilobyte."""


MAX_VERSION_LENGTH = 40  # characters of a server's version in a message


class ForeignBundle(ValueError):
    """A bundle that differs from the one in the terms. It was neither unpacked nor executed."""


def render_project(apps: Sequence[str] = APPS) -> str:
    """Render the pyproject.toml of a Flower app bundle, which names the ServerApp and the ClientApp.

    Every server has the same bundle, so that a site can recognize it by its hash. So the options that differ between
    servers, such as paths, are empty here; `flwr run --run-config` sets them.

    Args:
        apps: the ServerApp and the ClientApp, as module:attribute.
    """
    server_app, client_app = map(toml.format_value, apps)
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
    """Compute the SHA-256 of the bundle's settings. Flower may pack equal settings into different bytes."""
    return _hash_project(tomllib.loads(render_project(apps)))


def _hash_project(project: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(project, sort_keys=True).encode()).hexdigest()


def compute_digest(content: bytes) -> str:
    """Compute the digest of an app bundle, which a Flower server sends to the sites before they run it.

    A bundle may contain Python files. Those of this library contain none, so a bundle with any other file than
    pyproject.toml and Flower's list of files (`CONTENT_FILE`) is not accepted. The digest is that of the parsed
    settings, not of the bytes, because Flower may pack equal settings into different bytes.

    Args:
        content: the bundle, a zip file in memory. It may be hostile.

    Returns:
        The SHA-256 of the settings in its pyproject.toml.

    Raises:
        ForeignBundle: the bundle is too large, contains other files, or cannot be read.
    """
    if len(content) > MAX_BUNDLE_BYTES:
        raise ForeignBundle(f"it has {len(content):,} bytes")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            members = bundle.infolist()
            unexpected = sorted({member.filename for member in members} - {PROJECT_FILE, CONTENT_FILE})
            if unexpected:
                raise ForeignBundle(f"it contains {unexpected[0][:80]!r}")
            # A zip file may have two members of one name, of which another reader may take the other one.
            if len(members) != 2:
                raise ForeignBundle("a file is missing or occurs twice")
            if max(member.file_size for member in members) > MAX_BUNDLE_BYTES:
                raise ForeignBundle(f"a file in it has more than {MAX_BUNDLE_BYTES:,} bytes")
            return _hash_project(tomllib.loads(bundle.read(PROJECT_FILE).decode()))
    except ForeignBundle:
        raise
    except Exception as error:  # zipfile and tomllib raise many kinds of errors for forged bytes
        raise ForeignBundle(f"it cannot be read ({type(error).__name__})") from error


def check_bundle(content: bytes, apps: tuple[str, ...] = APPS) -> None:
    """Check that a bundle (a zip file in memory) starts these apps and no other ones; raise `ForeignBundle` if not."""
    if compute_digest(content) != expected_digest(apps):
        raise ForeignBundle("it starts a different program")


def describe_program(plugins: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Describe the program that the server and the sites run.

    The server's description is part of its terms, the configuration that the sites agree to. A site compares it with
    its description, and does not join a server that runs other code.

    Args:
        plugins: SHA-256 of each plugin (Python file with a method of the user) that the terms need, by name.

    Returns:
        {"halfmoon": version, "bundle": digest, "plugins": `plugins`}.
    """
    return {"halfmoon": installed_version("halfmoon"), "bundle": expected_digest(), "plugins": dict(plugins or {})}


def describe_difference(server_program: Any) -> str | None:
    """Describe how the server's program differs from that of this site; None if it does not.

    Plugins are left out: which of them a site needs is known only once the server's terms are parsed.

    Args:
        server_program: {"halfmoon": version, "bundle": digest, "plugins": digests} from the server, which may be hostile.
    """
    local_program = describe_program()
    if not isinstance(server_program, dict) or set(server_program) != set(local_program):
        return "the server does not state its version, bundle and plugins"
    local_version = local_program["halfmoon"]
    server_version = server_program["halfmoon"]
    if server_version != local_version:
        return f"the server runs halfmoon {str(server_version)[:MAX_VERSION_LENGTH]}, this site runs {local_version}"
    if server_program["bundle"] != local_program["bundle"]:
        return "the app bundle differs"
    return None

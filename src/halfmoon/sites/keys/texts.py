"""Render the texts that lie beside the keys: nginx's configuration, and commands for the people of server and sites."""

import re
import shlex
import socket
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from halfmoon.core.errors import UserError
from halfmoon.sites.keys.key_folder import Record
from halfmoon.sites.keys.paths import CA, CERTIFICATE, KEY, LOGS, PROXY, SITE_KEYS, SUPERLINK

_NGINX = {"body": "6m", "connections": 16384, "files": 32768, "backlog": 4096, "handshake": 5}
"""nginx's limits: a body (Flower sends 5 MiB and a few hundred bytes), connections of a worker, open files, connections
in its queue, and seconds for TLS and a header."""

HALF_OPEN = 256
"""New connections of one address that a firewall in front of the proxy lets through at once."""

_UNSAFE = re.compile(r'["\\$\x00-\x1f\x7f]')


def proxy(folder: Path, record: Record) -> str:
    """Return nginx's configuration, which lets sites through to the SuperLink alone; raise UserError."""
    if _UNSAFE.search(str(folder)):
        raise UserError(
            f"{str(folder)!r} cannot stand in nginx's configuration: choose a path without quotes, \\ and $."
        )
    files = {"ca": folder / CA, "certificate": folder / CERTIFICATE, "key": folder / KEY, "logs": folder / LOGS}
    return _render(PROXY, **_NGINX, **files, record=record, nginx=nginx(folder), ipv6=speaks_ipv6())


def nginx(folder: Path) -> str:
    """Return the command that starts nginx; with other words behind, it sends nginx a signal."""
    return f"nginx -c {shlex.quote(str(folder / PROXY))}"


def superlink(folder: Path, record: Record) -> str:
    paths = {"folder": folder, "ca": folder / CA, "certificate": folder / CERTIFICATE, "key": folder / KEY}
    quoted = {name: shlex.quote(str(path)) for name, path in paths.items()}
    return _render(SUPERLINK, **quoted, record=record, nginx=nginx(folder), half_open=HALF_OPEN)


def join(name: str, record: Record, here: bool) -> str:
    return _render("join.txt", name=name, key=f"{name}.key", record=record, site_keys=SITE_KEYS, here=here)


@cache
def _environment() -> Environment:
    loader = PackageLoader("halfmoon.sites.keys")
    return Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


def speaks_ipv6() -> bool:
    """Return whether this machine speaks IPv6: if not, nginx would not start with an address of it."""
    try:
        socket.socket(socket.AF_INET6).close()
    except OSError:
        return False
    return True

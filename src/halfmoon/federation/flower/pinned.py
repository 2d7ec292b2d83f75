"""A site executes its own program and nothing that a server sends: Flower's bundles are compared, never unpacked.

Flower downloads an app bundle with each run, unpacks it at the site, puts its folder first on Python's path and loads
what it names, whoever sent it. Two places are closed here, each of which is enough: the SuperNode refuses a run with
another bundle than the agreed one (`halfmoon.federation.protocol.bundle`) before it stores it, and the process that
answers messages unpacks no bundle at all and loads the installed app, whatever a bundle says. A Flower in which one of
these places is not found is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from halfmoon.federation.flower import internals
from halfmoon.federation.protocol.bundle import APPS
from halfmoon.federation.protocol.log import EventLog
from halfmoon.storage import atomic_io

APPS_FILE, LOG = "apps.json", "join.log"
"""In the folder of a site's processes: the apps that are installed for it. Above it: the site's log."""

Say = Callable[[str], None]


def write(folder: Path, apps: Sequence[str]) -> None:
    """Put down which apps a site's processes are for."""
    atomic_io.replace(folder / APPS_FILE, atomic_io.render({"apps": list(apps)}))


def apps_of(folder: Path) -> tuple[str, ...]:
    """Return the apps that were put down, those of every federation where none were."""
    return tuple((atomic_io.read_json(folder / APPS_FILE) or {}).get("apps", APPS))


def sayer(folder: Path) -> Say:
    """Return what writes into the log of the site whose processes live in `folder`."""

    def say(words: str) -> None:
        with suppress(OSError):  # a full disk: it is refused all the same
            EventLog(folder.parent / LOG).say(words)

    return say


def aggregator(module: ModuleType, folder: Path) -> None:
    """Let the loop of a SuperNode refuse runs of another program; the server is told by Flower's error for that.

    Raise UserError for a Flower whose loop is another one.
    """
    internals.refuse_foreign(module, apps_of(folder), sayer(folder))


def only_installed(module: ModuleType, folder: Path) -> None:
    """Let the process that answers a message load the installed app alone; raise UserError for another Flower."""
    internals.load_installed(module, apps_of(folder), sayer(folder))

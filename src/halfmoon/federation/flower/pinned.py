"""A site executes its own program and nothing that a server sends: Flower's bundles are compared, never unpacked.

Flower downloads an app bundle with each run, unpacks it at the site, puts its folder first on Python's path and loads
what it names, whoever sent it. Two places are closed here, each of which is enough: the SuperNode refuses a run with
another bundle than the agreed one (`halfmoon.federation.protocol.bundle`) before it stores it, and the process that
answers messages unpacks no bundle at all and loads the installed app, whatever a bundle says. A Flower in which one of
these places is not found is not used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from halfmoon.core.errors import UserError
from halfmoon.federation.protocol import bundle
from halfmoon.federation.protocol.bundle import APPS, Foreign
from halfmoon.federation.protocol.log import EventLog
from halfmoon.storage import atomic_io

APPS_FILE, LOG = "apps.json", "join.log"
"""In the folder of a site's processes: the apps that are installed for it. Above it: the site's log."""

ANSWERING = "flwr.supernode.runtime.run_clientapp"
"""The module of Flower that answers a message at a site."""

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


class _Verdict(dict[str, str]):
    """Flower's table of trusted entities, empty: where it counts as given, a bundle without their word is refused."""

    foreign = False

    def __bool__(self) -> bool:
        return self.foreign


def aggregator(module: ModuleType, folder: Path) -> None:
    """Let the loop of a SuperNode refuse runs of another program; the server is told by Flower's error for that.

    Raise UserError for a Flower whose loop is another one.
    """
    pull = _found(module, "_pull_and_store_message")
    apps, say, said = apps_of(folder), sayer(folder), set[str]()

    def checked(given: dict[str, Any]) -> Any:
        verdict = _Verdict()

        def refuse(why: str) -> None:
            verdict.foreign = True
            if why not in said:
                said.add(why)
                say(f"refused: the server wants another program executed here than the agreed one: {why}")

        def get_run(number: int) -> Any:
            run = given["get_run"](number)
            if "agent" in str(getattr(run, "primary_task_type", "")).lower():
                refuse("an agent of Flower")
            return run

        def get_fab(hash: str, number: int) -> Any:
            fab = given["get_fab"](hash, number)
            try:
                bundle.check(fab.content, apps)
            except Foreign as error:
                refuse(f"{error} (bundle {str(hash)[:16]})")
            # Without a word of anybody for it: a foreign one can be vouched for by nobody.
            return type(fab)(fab.hash_str, b"" if verdict.foreign else fab.content, {})

        return pull(**{**given, "get_run": get_run, "get_fab": get_fab, "trusted_entities": verdict})

    vars(module)["_pull_and_store_message"] = lambda **given: checked(given)


def only_installed(module: ModuleType, folder: Path) -> None:
    """Let the process that answers a message load the installed app alone; raise UserError for another Flower."""
    for name in ("install_from_fab", "get_load_client_app_fn", "install_app_dependencies"):
        _found(module, name)
    apps, say = apps_of(folder), sayer(folder)

    def install(content: Any, *_: Any, **__: Any) -> None:
        """Unpack nothing."""
        try:
            bundle.check(content if isinstance(content, bytes) else b"", apps)
        except Foreign as error:
            say(f"refused: a message of another program than the agreed one: {error}")
            raise

    def refuse(*_: Any, **__: Any) -> None:
        raise Foreign("nothing is installed at a site because a server asks for it")

    def loader(*_: Any, **__: Any) -> Callable[..., Any]:
        module, attribute = apps[1].split(":")
        return lambda *_args, **_given: getattr(importlib.import_module(module), attribute)

    vars(module).update(install_from_fab=install, get_load_client_app_fn=loader, install_app_dependencies=refuse)


def _found(module: ModuleType, name: str) -> Any:
    if not callable(vars(module).get(name)):
        raise UserError(
            f"this version of Flower ({module.__name__} without {name}) loads programs in a way that halfmoon does not "
            "know: a site cannot be protected from a server's. Install a version that constraints.txt names."
        )
    return vars(module)[name]

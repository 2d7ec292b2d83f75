"""`halfmoon watch`: runs, sweeps, federations and a site's own part, followed on the disk while they go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.core.errors import UserError
from halfmoon.pages import federation_events
from halfmoon.pages.follow import FollowedRun, Follower, find_ceiling_alarms
from halfmoon.pages.server import build_app, serve_page
from halfmoon.report.styles import line_styles as styles_of
from halfmoon.report.styles import style_to_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp


class WatchPage:
    """The page's memory: what has been read of the folder so far. It writes nothing."""

    def __init__(self, root: Path) -> None:
        """Watch a folder; raise UserError where there is nothing in it to watch, and nothing will be."""
        if not root.is_dir():
            raise UserError(
                f"{root}: there is no such folder; give the folder of a run, a sweep, a federation or a site."
            )
        self.root = root
        self.follower = Follower(root)
        self.follower.update()
        self._site = federation_events.find_state_folder(root)
        served = federation_events.last_event_time(root) is not None
        if not self.follower.runs and self._site is None and not served and any(root.iterdir()):
            raise UserError(f"{root} holds no run, no sweep, no federation and no site that has joined one.")
        self._lock = threading.Lock()
        self._titles: dict[str, str] = {}
        self._ceilings: set[str] = set()
        self._floors: set[str] = set()

    def learn(self) -> None:
        """Find out what methods are called and which are bounds: slow, as it brings torch."""
        try:
            from halfmoon.methods import registry
        except ImportError:
            return
        entries = [registry.entry(name) for name in registry.names()]
        titles = {each.name: each.title for each in entries}
        self._ceilings = {each.name for each in entries if each.all_labels}
        self._floors = {each.name for each in entries if each.title.endswith("(labeled only)")}
        self._titles = titles

    def data(self, request: Request) -> dict[str, Any]:
        """Return the state of all runs; lines and rows only of those that the page does not have yet.

        ?have=NAME:VERSION,... says which it has.
        """
        have = dict(part.rsplit(":", 1) for part in request.query_params.get("have", "").split(",") if ":" in part)
        with self._lock:
            self.follower.update()
            runs = list(self.follower.runs.values())
            now = time.time()
            names = name_variants(runs)
            kinds = list(dict.fromkeys(names))
            styles = dict(zip(kinds, styles_of(kinds), strict=True))
            facts = []
            for number, run in enumerate(runs):
                fact = run.facts(now) | {"id": number}
                fact["title"] = self._titles.get(run.method, fact["title"])
                fact["look"] = style_to_json(styles[names[number]])
                if have.get(str(number)) != str(run.version):
                    fact |= run.plot()
                facts.append(fact)
            rows = next((run.metrics.rows for run in runs if run.path == self.root.resolve()), ())
            bounds = find_ceiling_alarms(runs, self._ceilings, self._floors)
            return {
                "runs": facts,
                "planned": self.follower.planned(),
                "left_out": self.follower.left_out,
                "alarms": [each._asdict() for each in bounds],
                "federation": federation_events.federation_view(self.root, rows),
                "site": federation_events.site_view(self.root),
            }

    def app(self) -> ASGIApp:
        return build_app("watch", self.root.resolve().name, {"/data": self.data}, {})


def name_variants(runs: Sequence[FollowedRun]) -> list[str]:
    """Return a name for how each run is drawn: its method, and a number where one was played with several options.

    Runs that differ in their seed alone are drawn alike: a method keeps its look.
    """
    by_method: dict[str, list[str]] = {}
    names = []
    for each in runs:
        own = repr(sorted((key, str(value)) for key, value in each.options.items() if key not in ("seed", "run_dir")))
        kinds = by_method.setdefault(each.method, [])
        if own not in kinds:
            kinds.append(own)
        number = kinds.index(own)
        names.append(f"{each.method} ({number + 1})" if number else each.method)
    return names


def serve_watch_page(root: Path, port: int | None, browser: bool, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C, which raises KeyboardInterrupt.

    Raise UserError where there is nothing to watch or the port is taken.
    """
    watching = WatchPage(root)
    threading.Thread(target=watching.learn, daemon=True).start()
    serve_page(watching.app(), f"watch {root}", port, browser, say)

"""The page of `halfmoon watch`: runs, sweeps, federations and sites, read from the disk while they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.core.errors import UserError
from halfmoon.pages import federation_events
from halfmoon.pages.follow import FollowedRun, Follower, find_ceiling_alarms
from halfmoon.pages.server import build_app, serve_page
from halfmoon.report.styles import line_styles, style_to_json
from halfmoon.storage import atomic_io
from halfmoon.storage.events import EventRecorder

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp


class WatchPage:
    """The state and the endpoint of the watch page. It writes no files.

    Attributes:
        root: the watched folder.
        follower: the runs in the folder.
    """

    def __init__(self, root: Path) -> None:
        """Open a folder of runs to follow them, or an empty folder in which a run may start.

        Raises:
            UserError: the folder does not exist, or has other contents.
        """
        try:
            is_empty = not any(root.iterdir())
        except PermissionError as error:
            raise UserError(
                f"{root} cannot be read (permission denied): change its rights, or watch as its owner."
            ) from error
        except OSError as error:
            raise UserError(
                f"{root}: there is no such folder; give the folder of a run, a sweep, a federation or a site."
            ) from error
        self.root = root
        self.follower = Follower(root)
        self.follower.update()
        is_site = federation_events.find_state_folder(root) is not None
        is_server = federation_events.last_event_time(root) is not None
        if not self.follower.runs and not is_site and not is_server and not is_empty:
            raise UserError(
                f"{root} has no run, no sweep, no federation and no site that has joined one; give the folder of one."
            )
        self._lock = threading.Lock()
        # Filled by `load_methods`: titles of methods by name, and names of the upper bounds (methods with all labels)
        # and lower bounds (labels only).
        self._titles: dict[str, str] = {}
        self._ceilings: set[str] = set()
        self._floors: set[str] = set()

    def load_methods(self) -> None:
        """Load the titles of the methods, and which are upper bounds (all labels) and lower bounds (labels only).

        The registry of methods imports torch, which is slow. Without torch nothing is loaded: the page then shows the
        titles that runs recorded.
        """
        try:
            from halfmoon.methods import registry
        except ImportError:
            return
        entries = [registry.entry(name) for name in registry.names()]
        titles = {entry.name: entry.title for entry in entries}
        self._ceilings = {entry.name for entry in entries if entry.all_labels}
        # The registry has no flag for lower bounds, but all of their titles end like "FedAvg (labeled only)".
        self._floors = {entry.name for entry in entries if entry.title.endswith("(labeled only)")}
        self._titles = titles

    def get_data(self, request: Request) -> dict[str, Any]:
        """Build the JSON of the state of all runs, which the page asks for again and again.

        Curves and rows are sent only for runs that the page does not have in their latest version, as listed in
        ?versions=NUMBER:VERSION,...

        Returns:
            "runs": the state of each run, with its curves; "planned": number of planned runs of a sweep or comparison;
            "left_out": number of runs that are too many to follow; "alarms": upper bounds with a lower accuracy than
            lower bounds; "federation" and "site": the views of a server's and of a site's folder, None for others.
        """
        versions = dict(
            item.rsplit(":", 1) for item in request.query_params.get("versions", "").split(",") if ":" in item
        )
        with self._lock:
            self.follower.update()
            runs = list(self.follower.runs.values())
            now = time.time()
            # Runs of the same method and options have the same name, and so the same line style.
            variants = name_variants(runs)
            names = list(dict.fromkeys(variants))
            styles = dict(zip(names, line_styles(names), strict=True))
            run_views = []
            for number, run in enumerate(runs):
                view = run.describe(now) | {"id": number}
                view["title"] = self._titles.get(run.method, view["title"])
                view["style"] = style_to_json(styles[variants[number]])
                if versions.get(str(number)) != str(run.version):
                    view |= run.collect_plot_data()
                run_views.append(view)
            # A server is its own run; its rows have the cohorts.
            rows = next((run.metrics.rows for run in runs if run.path == self.root.resolve()), ())
            alarms = find_ceiling_alarms(runs, self._ceilings, self._floors)
            data = {
                "runs": run_views,
                "planned": self.follower.planned(),
                "left_out": self.follower.left_out,
                "alarms": [alarm.to_json() for alarm in alarms],
                "federation": federation_events.federation_view(self.root, rows),
                "site": federation_events.site_view(self.root),
            }
            # JSON has neither nan nor infinity, which a damaged file or one of another program may have.
            return atomic_io.replace_nonfinite(data)

    def app(self) -> ASGIApp:
        """Build the app of the page."""
        return build_app("watch", self.root.resolve().name, {"/data": self.get_data}, {})


def name_variants(runs: Sequence[FollowedRun]) -> list[str]:
    """Name each run by its method, as "feddure", or "feddure (2)" for the second variant of the method's options.

    Runs that differ only in their seed have one name, and therefore one line style.
    """
    variants_by_method: dict[str, list[str]] = {}
    names = []
    for run in runs:
        # Text of all options that may differ.
        variant = repr(
            sorted((key, str(value)) for key, value in run.options.items() if key not in ("seed", "run_dir"))
        )
        variants = variants_by_method.setdefault(run.method, [])
        if variant not in variants:
            variants.append(variant)
        number = variants.index(variant)
        names.append(f"{run.method} ({number + 1})" if number else run.method)
    return names


def serve_watch_page(root: Path, port: int | None, open_browser: bool, display: EventRecorder) -> None:
    """Serve the page on which a person follows the runs in a folder while they train, until Ctrl-C.

    Args:
        root: the folder to watch.
        port: the port, None for a free one.
        open_browser: whether to open the page in a browser.
        display: shows messages on the terminal.

    Raises:
        UserError: there is nothing to watch, or the port is not available.
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    page = WatchPage(root)
    threading.Thread(target=page.load_methods, daemon=True).start()
    serve_page(page.app(), f"watch {root}", port, open_browser, display)

"""Views of a federation for pages, from the event records that its server and its sites write."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from halfmoon.core import toml
from halfmoon.sites.folders.labels import STATE_FOLDER
from halfmoon.storage import atomic_io
from halfmoon.storage.events import EVENTS_FILE, SERVER_LOG, SITE_LOG, Event, read_events

MAX_LOG_LINES = 150
"""Number of log lines, and of rounds, that a page shows."""

STATES = {
    "site_joined": "connected",
    "site_disconnected": "disconnected",
    "site_key_removed": "disconnected",
    "site_absent": "disconnected",
    "reply_late": "late",
    "reply_failed": "no reply",
    "site_skipped": "refused",
    "reply_rejected": "refused",
    "site_quarantined": "set aside",
}
"""State of a site after an event with the field "site", by the event's name."""

COUNTED_STATES = ("late", "no reply", "refused", "left out")
"""States whose number of occurrences a page shows for each site."""

IMAGE_COUNTS = ("labeled", "unlabeled")
"""Numbers of images that a site declares when it joins."""

WAITING_EVENTS = ("waiting_for_sites", "waiting_for_replies")
"""Events that a server repeats while it waits."""

OLDER_VERSION = "This folder is from an older version of halfmoon, whose log cannot be read by this page: see "
"""Beginning of the message for folders without event records."""


def last_event_time(folder: Path) -> float | None:
    """Find the time of the last event of a server, in seconds since 1970; None for other folders."""
    for name in (EVENTS_FILE, SERVER_LOG):
        try:
            return (folder / name).stat().st_mtime
        except OSError:
            continue
    return None


def describe_wait(folder: Path) -> str:
    """Describe for whom a federation's server waits and since when, as of its latest events; "" if it does not wait.

    A waiting server repeats an event of `WAITING_EVENTS` with the fields "whom", such as "sites", and "detail". So the
    wait started with the first of the equal events at the end of the log, and its latest detail is the valid one.
    """
    since = ""
    whom = ""
    detail = ""
    for event in reversed(read_events(folder)):
        event_whom = str(event.fields.get("whom"))
        if event.name in WAITING_EVENTS and whom in ("", event_whom):
            since = event.time
            whom = event_whom
            detail = detail or str(event.fields.get("detail", ""))
        # A site may come or go without an end of the wait.
        elif event.name in WAITING_EVENTS or event.name not in STATES:
            break
    return f"waiting for {whom} since {since}: {detail}" if detail else ""


def federation_view(folder: Path, rows: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any] | None:
    """Build what a page shows of a federation: the state of each site and the log, from the events of its server.

    "round_finished" has the fields "round", "cohort" (names of the sites in it) and "left_out" (reason by site). The
    events in `STATES` have the field "site" and set its state; "site_joined" also has the numbers of its images.

    Args:
        folder: any folder; that of a server has the file of its events.
        rows: the rounds of its metrics.jsonl, for events of earlier versions, which do not name the sites of a round.

    Returns:
        "sites": of each site the state, the last contact (event or round with this site), the numbers of images with
        and without a label that it declared, the text of its last event, and counts; "log": the latest lines (time,
        text). None for folders that are not a server's.
    """
    events = read_events(folder)
    if not events:
        if not os.path.exists(folder / SERVER_LOG):
            return None
        return {"sites": [], "log": [["", f"{OLDER_VERSION}{SERVER_LOG}."]]}
    names = _read_site_names(folder)
    sites = {name: _new_site(name) for name in names}
    cohorts = {row["round"]: row.get("cohort") or () for row in rows}
    for event in events:
        # Events of another version may lack fields, or have other ones.
        with suppress(LookupError, TypeError, AttributeError):
            _apply_server_event(event, sites, names, cohorts)
    return {"sites": list(sites.values()), "log": _format_log(events)}


def _apply_server_event(
    event: Event, sites: dict[str, dict[str, Any]], names: Sequence[str], cohorts: Mapping[int, Sequence[int]]
) -> None:
    """Update the states of a federation's sites by an event of its server.

    Args:
        event: the event.
        sites: the states by name, which are changed.
        names: the names of the sites by number.
        cohorts: the numbers of the sites of each round, as far as metrics.jsonl has them.
    """
    if event.name == "round_finished":
        members = event.fields.get("cohort")
        # Events of earlier versions have no cohort; metrics.jsonl has it as numbers of sites.
        if not isinstance(members, list):
            members = [names[k] for k in cohorts.get(event.fields["round"], ()) if k < len(names)]
        for name, site in sites.items():
            if name in members:
                site["last_contact"] = event.time
            # An outlier is left out of the aggregation of one round only.
            if name in members or site["state"] == "left out":
                site["state"] = "connected"
        for name, reason in (event.fields.get("left_out") or {}).items():
            _update_site(sites, str(name), "left out", event.time, str(reason))
    elif event.name in STATES and "site" in event.fields:
        name = str(event.fields["site"])
        # The text of this event has the numbers of images, which the page shows in columns.
        text = "joined" if event.name == "site_joined" else event.text
        _update_site(sites, name, STATES[event.name], event.time, text)
        for kind in IMAGE_COUNTS:
            if kind in event.fields:
                sites[name][kind] = event.fields[kind]


def _new_site(name: str) -> dict[str, Any]:
    counts = {**dict.fromkeys(IMAGE_COUNTS), **dict.fromkeys(COUNTED_STATES, 0)}
    return {"name": name, "state": "not connected yet", "last_contact": "", "last_event": "", **counts}


def _update_site(sites: dict[str, dict[str, Any]], name: str, state: str, time: str, text: str) -> None:
    site = sites.setdefault(name, _new_site(name))
    site |= {"state": state, "last_contact": time, "last_event": text}
    site[state] = site.get(state, 0) + 1


def _format_log(events: Sequence[Event]) -> list[list[str]]:
    return [[event.time, event.text] for event in events[-MAX_LOG_LINES:]]


def _read_site_names(folder: Path) -> Sequence[str]:
    """Read the names of a federation's sites in the order of their numbers; [] if the folder has none."""
    # The files that a server has written, the latest first; before the first one the configuration has the names.
    for name in ("summary.json", "terms.json"):
        names = (atomic_io.read_json(folder / name) or {}).get("sites")
        if isinstance(names, list) and all(isinstance(site, str) for site in names):
            return names
    try:
        text = (atomic_io.read(folder / "config.toml") or b"").decode("utf-8", "replace")
    except OSError:
        return []
    names = (toml.parse_or_empty(text).get("federation") or {}).get("sites")
    return [str(name) for name in names] if isinstance(names, list) else []


def find_state_folder(folder: Path) -> Path | None:
    """Find the folder with a site's log: the folder itself, or its hidden state folder; None if there is none."""
    candidates = (folder, folder / STATE_FOLDER)
    # False, and no error, for a folder that this user may not read.
    return next((candidate for candidate in candidates if os.path.isfile(candidate / SITE_LOG)), None)


def site_view(folder: Path) -> dict[str, Any] | None:
    """Build the view that a site's people have of their federation; None for folders that are not a site's.

    Returns:
        "federation", "method", "rounds" of the terms; "round": the last round with this site; "needs_consent": whether
        the site is invited and its consent is missing; "is_finished"; "accuracy" of the latest model on the site's
        test images, in percent; "rounds_with_site": their number; "rows": the latest of these; "evaluations":
        [rounds, accuracy] of each evaluated model; "sentence"; "log".
    """
    state_folder = find_state_folder(folder)
    if state_folder is None:
        return None
    events = read_events(state_folder)
    view: dict[str, Any] = {
        "federation": "",
        "method": "",
        "rounds": 0,
        "round": 0,
        "needs_consent": False,
        "accuracy": None,
    }
    view["is_finished"] = False
    rounds: dict[int, dict[str, Any]] = {}
    evaluations: list[list[float]] = []
    for event in events:
        # Events of another version may lack fields, or have other ones.
        with suppress(LookupError, TypeError, ValueError):
            _apply_site_event(event, view, rounds, evaluations)
    latest = [rounds[number] for number in sorted(rounds)][-MAX_LOG_LINES:]
    view |= {"rounds_with_site": len(rounds), "rows": latest, "evaluations": evaluations}
    view["sentence"] = describe_participation(view) if events else f"{OLDER_VERSION}{SITE_LOG}."
    return view | {"log": _format_log(events)}


def _apply_site_event(
    event: Event, view: dict[str, Any], rounds: dict[int, dict[str, Any]], evaluations: list[list[float]]
) -> None:
    """Update a site's view of its federation by an event of its log.

    Args:
        event: the event.
        view: the view of `site_view`, which is changed.
        rounds: what the site did in each round, which is changed.
        evaluations: [rounds, accuracy] of each evaluated model, to which one may be added.
    """
    fields = event.fields
    if event.name in ("terms_offered", "joined"):
        if fields["federation"] != view["federation"]:  # the rounds of another federation start at 1
            rounds.clear()
            evaluations.clear()
            view |= {"round": 0, "accuracy": None, "is_finished": False}
        view |= {name: fields[name] for name in ("federation", "method", "rounds")}
        view["needs_consent"] = event.name == "terms_offered"
    elif event.name == "trained":
        number = int(fields["round"])
        rounds[number] = {
            "round": number,
            "time": event.time,
            "received": fields["received"],
            "work": fields["work"],
            "sent": fields["sent"],
            "loss": fields["loss"],
        }
        view["round"] = max(view["round"], number)
    elif event.name == "evaluated" and fields["images"] == "test":
        view["accuracy"] = 100 * float(fields["accuracy"])
        count = view["rounds"] if fields["rounds"] is None else fields["rounds"]
        evaluations.append([count, view["accuracy"]])
    elif event.name == "finished":
        view["is_finished"] = True
        if fields["accuracy"] is not None:
            view["accuracy"] = 100 * float(fields["accuracy"])
            evaluations.append([view["rounds"], view["accuracy"]])


def describe_participation(view: dict[str, Any]) -> str:
    """Describe the participation of a site in one line, for its people.

    Args:
        view: the keys that `site_view` sets: "federation", its name, "" before the site has joined one;
            "needs_consent", whether the site is invited and its consent is missing; "round" of "rounds";
            "rounds_with_site", their number; "is_finished"; "accuracy" on the site's test images in percent, None if
            unknown.
    """
    if view["needs_consent"]:
        return f"You are asked to take part in {view['federation']}; no training has been done yet."
    if not view["federation"]:
        return "This site has not joined a federation yet."
    accuracy = (
        "" if view["accuracy"] is None else f", the model is right on {view['accuracy']:.0f} % of your test images"
    )
    if view["is_finished"]:
        return f"The federation is over: your images helped in {view['rounds_with_site']} of {view['rounds']} rounds{accuracy}."
    return f"Round {view['round']} of {view['rounds']}: your images helped in {view['rounds_with_site']}{accuracy}."

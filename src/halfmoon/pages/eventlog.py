"""What a federation's log tells of its sites, and a site's log of its part: sentences, read back as far as known."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from halfmoon.sites.folders.labels import STATE_FOLDER
from halfmoon.storage import atomic_io, toml

SERVER_LOG, SITE_LOG = "serve.log", "join.log"
LIMIT = 150
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  (.*)")
_SITE = r"(?P<site>[A-Za-z0-9._-]+)"

_WAITING = re.compile(r"(waiting for (?:sites|[\w., -]+)): (.*)")
_OUTSIDE = re.compile(rf"; ({_SITE} was left out: its [^;]*)")

_EVENTS = (
    (re.compile(rf"{_SITE} is (?:back|there)\b.*?: ([\d,]+) images with a label"), "here"),
    (re.compile(rf"{_SITE} is no longer connected"), "away"),
    (re.compile(rf"{_SITE} is not listened to any more"), "away"),
    (re.compile(rf"{_SITE} answered .* too late"), "late"),
    (re.compile(rf"{_SITE} did not answer"), "silent"),
    (re.compile(rf"{_SITE} has no part in round \d+: it was not connected"), "away"),
    (re.compile(rf"{_SITE} has no part in round"), "refused"),
    (re.compile(rf"refused in round \d+: the answer of {_SITE}:"), "refused"),
    (re.compile(rf"{_SITE} is (?:set aside|quarantined)"), "set aside"),
    (re.compile(rf"{_SITE} is let back"), "here"),
)


def lines(path: Path) -> list[tuple[str, str]]:
    """Return (time, words) of the lines at the end of a log; [] where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 2**20))  # the end is enough
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    matches = (_LINE.fullmatch(line) for line in text.splitlines())
    return [(match[1], match[2]) for match in matches if match]


def last_event_time(folder: Path) -> float | None:
    """Return when a server's log was last written, in seconds since 1970; None for other folders."""
    try:
        return (folder / SERVER_LOG).stat().st_mtime
    except OSError:
        return None


def describe_wait(folder: Path) -> str:
    """Return for whom a federation waits and since when, as the end of its log has it; "" if it goes on."""
    since = whom = text = ""
    for when, words in reversed(lines(folder / SERVER_LOG)):
        if (match := _WAITING.match(words)) and match[1] == (whom or match[1]):
            since, whom, text = when, match[1], text or match[2]
        elif match or not any(pattern.match(words) for pattern, _ in _EVENTS):
            break
    return f"{whom} since {since}: {text}" if text else ""


def federation_view(folder: Path, rows: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any] | None:
    """Return the sites of a server's run folder with their last news, and the log's end; None for other folders.

    `rows` of its rounds say who took part in one, and so is there.
    """
    entries = lines(folder / SERVER_LOG)
    if not entries:
        return None
    names = _sites(folder)
    sites: dict[str, dict[str, Any]] = {name: _fresh(name) for name in names}
    cohorts = {row["round"]: row.get("cohort") or () for row in rows}
    for when, words in entries:
        if match := re.match(r"round (\d+) of", words):
            there = {names[k] for k in cohorts.get(int(match[1]), ()) if k < len(names)}
            for name, site_view in sites.items():
                site_view["state"] = "here" if name in there or site_view["state"] == "left out" else site_view["state"]
        events = [(match["site"], "left out", match[1]) for match in _OUTSIDE.finditer(words)]
        matches = ((pattern.match(words), state) for pattern, state in _EVENTS)
        events += [(match["site"], state, words) for match, state in matches if match][:1]
        for name, state, about in events:
            site_view = sites.setdefault(name, _fresh(name))
            site_view |= {"state": state, "when": when, "words": about}
            site_view[state] = site_view.get(state, 0) + 1
    return {"sites": list(sites.values()), "log": [list(each) for each in entries[-LIMIT:]]}


def _fresh(name: str) -> dict[str, Any]:
    counts = dict.fromkeys(("late", "silent", "refused", "left out"), 0)
    return {"name": name, "state": "not yet there", "when": "", "words": "", **counts}


def _sites(folder: Path) -> Sequence[str]:
    """Return the names of a federation's sites as its terms say, [] where there are none."""
    for name in ("summary.json", "terms.json"):
        names = (atomic_io.read_json(folder / name) or {}).get("sites")
        if isinstance(names, list) and all(isinstance(each, str) for each in names):
            return names
    text = (atomic_io.read(folder / "config.toml") or b"").decode("utf-8", "replace")
    names = (toml.parse_or_empty(text).get("federation") or {}).get("sites")
    return [str(each) for each in names] if isinstance(names, list) else []


def site_home(folder: Path) -> Path | None:
    """Return where a site keeps its log: the folder itself, or its .halfmoon; None where there is none."""
    return next((home for home in (folder, folder / STATE_FOLDER) if (home / SITE_LOG).is_file()), None)


_TRAINED = re.compile(r"round (\d+)(?: \(attempt \d+\))?, [\w-]+: received ([\d.]+ \w+); (.*); sends (.*)")
_OF = re.compile(r"federation (\S+) \(\w+\): (.+?) for (\d+) rounds")
_RIGHT = re.compile(r"(the model before round \d+|the last model) is right on ([\d.]+)% of the test images")
_OVER = re.compile(r"finished: (?:.* is right on ([\d.]+)% of your test images)?")
_LOSS = re.compile(r"mean loss ([\d.]+)")


def site_view(folder: Path) -> dict[str, Any] | None:
    """Return a site's own view of its federation from its log; None for a folder that is no site's."""
    home = site_home(folder)
    if home is None:
        return None
    entries = lines(home / SITE_LOG)
    view: dict[str, Any] = {"federation": "", "method": "", "rounds": 0, "round": 0, "asked": False, "right": None}
    view["over"] = False
    helped: dict[int, dict[str, Any]] = {}
    tests: list[list[float]] = []
    for when, words in entries:
        if match := _OF.search(words):
            # Another federation begins its rounds anew.
            if match[1] != view["federation"]:
                helped, tests = {}, []
                view |= {"round": 0, "right": None, "over": False}
            view |= {"federation": match[1], "method": match[2], "rounds": int(match[3])}
            view["asked"] = words.startswith("asked to take part")
        elif match := _TRAINED.match(words):
            number = int(match[1])
            loss = _LOSS.search(match[3])
            helped[number] = {"round": number, "when": when, "received": match[2], "did": match[3], "sends": match[4]}
            helped[number]["loss"] = float(loss[1]) if loss else None
            view["round"] = max(view["round"], number)
        elif match := _RIGHT.match(words):
            view["right"] = float(match[2])
            before = re.search(r"\d+", match[1])
            tests.append([int(before[0]) - 1 if before else view["rounds"], float(match[2])])
        elif match := _OVER.match(words):
            view["over"] = True
            if match[1]:
                view["right"] = float(match[1])
                tests.append([view["rounds"], float(match[1])])
    view |= {"helped": len(helped), "rows": [helped[n] for n in sorted(helped)][-LIMIT:], "tests": tests}
    return view | {"sentence": describe_part(view), "log": [list(each) for each in entries[-LIMIT:]]}


def describe_part(view: dict[str, Any]) -> str:
    """Return a site's part in a line that anybody understands."""
    if view["asked"]:
        return f"You are asked to take part in {view['federation']}; nothing has been done yet."
    if not view["federation"]:
        return "This site has not joined a federation yet."
    right = "" if view["right"] is None else f", the model is right on {view['right']:.0f} % of your test images"
    if view["over"]:
        rounds = f"{view['helped']} of {view['rounds']} rounds"
        return f"The federation is over: your images helped in {rounds}{right}."
    return f"Round {view['round']} of {view['rounds']}: your images helped in {view['helped']}{right}."

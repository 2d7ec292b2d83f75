"""What somebody should look at in a run: rules on its rows, each with a sentence."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

QUIET = 5
"""Rounds in a row without a pseudo-label in use that are worth a word."""

WORSE = 0.05
"""How far below its best an accuracy is where a growing loss is bad news: some methods weigh more and more rows."""

FALL = 0.15
"""How far below its best an accuracy may be before it is worth a word."""


class Alarm(NamedTuple):
    """Something odd: which rule, and what it saw."""

    kind: str
    words: str


def alarms(rows: Sequence[Mapping[str, Any]], state: str, age: float, command: str = "resume") -> list[Alarm]:
    """Return what is odd about a run's rows; `state` and `age` (seconds since its last word) are those of its files.

    `command` goes on with it where it was stopped."""
    return [*_diverged(rows), *_nobody(rows), *_fallen(rows), *_stopped(state, age, command)]


def _diverged(rows: Sequence[Mapping[str, Any]]) -> Iterator[Alarm]:
    """The loss is no number any more, or has stayed far above where it began while the accuracy fell."""
    losses = [row["train"]["loss"] for row in rows if isinstance(row.get("train"), dict) and "loss" in row["train"]]
    if not losses:
        return
    number = rows[-1]["round"]
    if losses[-1] is None:
        yield Alarm("diverged", f"diverged: the loss of round {number} is no number; try a smaller lr or clip_norm")
        return
    finite = [loss for loss in losses if loss is not None]
    tested = _tested(rows)
    worse = not tested or tested[-1] < max(tested) - WORSE
    if len(finite) >= 6 and worse and min(finite[-3:]) > 3 * max(finite[:3]) + 1:
        yield Alarm("diverged", f"the loss rose from {finite[0]:.2f} to {finite[-1]:.2f}: it is diverging")


def _nobody(rows: Sequence[Mapping[str, Any]]) -> Iterator[Alarm]:
    """No pseudo-label was used for several rounds."""
    shares = [(row.get("pseudo") or {}).get("share_used") for row in rows[-QUIET:]]
    if len(shares) == QUIET and all(share is not None and share < 0.005 for share in shares):
        words = f"unlabeled images teach nothing: in {QUIET} rounds under 0.5 % of the pseudo-labels were used"
        yield Alarm("none used", words)


def _fallen(rows: Sequence[Mapping[str, Any]]) -> Iterator[Alarm]:
    """The accuracy has fallen far below its best for two evaluations."""
    tested = _tested(rows)
    if len(tested) < 4:
        return
    best = max(tested)
    if max(tested[-2:]) < best - FALL:
        yield Alarm("fallen", f"the accuracy fell from {100 * best:.1f} to {100 * tested[-1]:.1f} %")


def _tested(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [row["test"]["accuracy"] for row in rows if (row.get("test") or {}).get("accuracy") is not None]


def _stopped(state: str, age: float, command: str) -> Iterator[Alarm]:
    if state == "stopped":
        minutes = round(age / 60)
        ago = f"{minutes} minutes" if minutes < 120 else f"{minutes // 60} hours"
        yield Alarm("stopped", f"no word for {ago}: it was stopped, or its machine sleeps (halfmoon {command} goes on)")

"""What a run has told of its clients so far: a line a release, on the disk before anybody sees the release.

A line's seal is the SHA-256 of the seal before it and of the line itself, so that a line that was changed or taken out
is found. The last lines could be cut off unseen; but a round that was played has its line, and that is checked.
"""

from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from halfmoon.aggregation.privacy.accounting import Sampled
from halfmoon.core.errors import UserError
from halfmoon.storage import atomic_io

LEDGER = "privacy.jsonl"


class Release(NamedTuple):
    """One noised sum: of which question, how its cohort was drawn (None: not at random), with how much noise.

    `mark` tells it from any other sum, and says nothing of the sum to whom does not know the server's secret.
    """

    round: int  # from 0
    attempt: int
    query: int
    sampled: Sampled | None
    noise: float
    mark: str


class Ledger:
    """The releases of a run, in the file `path`; one that was written down already is not written again.

    Raises UserError where the file was damaged, and where it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seal = ""
        self.releases: list[Release] = []
        try:
            data = atomic_io.read(path) or b""
            whole = data.rfind(b"\n") + 1
            # A last line without its end is of a release that a kill has stopped: nobody has seen that.
            atomic_io.truncate(path, whole)
        except OSError as error:
            raise UserError(
                f"{path}: it cannot be read ({atomic_io.error_reason(error)}); make it readable."
            ) from error
        for number, line in enumerate(data[:whole].splitlines(keepends=True), start=1):
            self._take(number, line)

    def __contains__(self, release: Release) -> bool:
        return any(release.mark == each.mark for each in self.releases)

    def add(self, release: Release) -> None:
        """Write a release down; it is on the disk when this returns."""
        entry = _entry(release)
        seal = _sealed(self._seal, entry)
        try:
            atomic_io.append(self.path, atomic_io.json_line({**entry, "seal": seal}))
            atomic_io.flush_and_measure(self.path)
        except OSError as error:
            raise UserError(
                f"{self.path}: it cannot be written ({atomic_io.error_reason(error)}); nothing was released that it does not "
                "hold: mend that, and go on with the run."
            ) from error
        self._seal = seal
        self.releases.append(release)

    def check(self, rounds: int) -> None:
        """Raise UserError where one of the first `rounds` rounds, which were played, has no line."""
        numbers = {release.round for release in self.releases}
        missing = next((number for number in range(rounds) if number not in numbers), None)
        if missing is not None:
            raise UserError(
                f"{self.path} has no line of round {missing + 1}, but the run has played {rounds}: restore the file, "
                "or start the run again in another --run-dir; without it epsilon is not known."
            )

    def _take(self, number: int, line: bytes) -> None:
        """Take over a line of the file."""
        try:
            entry = atomic_io.parse_json(line)
            seal = entry.pop("seal")
            release = _release(entry)
        except (ValueError, LookupError, TypeError, AttributeError):
            seal, release, entry = "", None, {}
        if (
            release is None
            or seal != _sealed(self._seal, entry)
            or atomic_io.json_line({**entry, "seal": seal}) != line
        ):
            raise UserError(
                f"{self.path}, line {number}: it was changed or damaged: restore the file, or start the run again in "
                "another --run-dir; without it epsilon is not known."
            )
        self._seal = seal
        self.releases.append(release)


def _entry(release: Release) -> dict[str, Any]:
    """Return what a line says of a release; rounds count from 1, as in metrics.jsonl."""
    sampled = None if release.sampled is None else list(release.sampled)
    return {
        "round": release.round + 1,
        "attempt": release.attempt,
        "query": release.query,
        "drawn": sampled,
        "noise": release.noise,
        "mark": release.mark,
    }


def _release(entry: dict[str, Any]) -> Release:
    sampled = None if entry["drawn"] is None else Sampled(*entry["drawn"])
    return Release(entry["round"] - 1, entry["attempt"], entry["query"], sampled, entry["noise"], entry["mark"])


def _sealed(before: str, entry: dict[str, Any]) -> str:
    return sha256(before.encode() + atomic_io.json_line(entry)).hexdigest()

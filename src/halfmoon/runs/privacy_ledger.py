"""The privacy ledger: a file with one line for each noised sum of a run, on disk before the sum is used.

The lines are a hash chain: each has a hash ("seal"), the SHA-256 of the previous line's hash and of the line, so that a
changed or removed line is detected. Lines missing at the end of the file have no successor to reveal this;
`Ledger.check` detects them by comparison with the number of completed rounds.
"""

from hashlib import sha256
from pathlib import Path
from typing import Any

from halfmoon.aggregation.privacy.accounting import CohortDraw
from halfmoon.aggregation.privacy.releases import Release
from halfmoon.core.errors import UserError
from halfmoon.storage import atomic_io

LEDGER = "privacy.jsonl"
"""Name of the ledger's file in a run folder."""


class Ledger:
    """The noised sums of a run, loaded from and appended to a file: a `ReleaseLog` that survives a kill.

    Args:
        path: The file; it may not exist yet.

    Raises:
        UserError: If the file is damaged, or cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        """Load the ledger from its file, and verify the hash chain of its lines.

        Args:
            path: The file; it may not exist yet.

        Raises:
            UserError: If the file is damaged, or cannot be read or written.
        """
        self.path = path
        self._last_hash = ""  # of the last line
        self.releases: list[Release] = []
        try:
            data = atomic_io.read(path) or b""
            complete_bytes = data.rfind(b"\n") + 1
            # An incomplete last line is from a process that was killed before it used the sum. Remove the line.
            atomic_io.truncate(path, complete_bytes)
        except OSError as error:
            raise UserError(
                f"{path}: it cannot be read ({atomic_io.error_reason(error)}); make it readable."
            ) from error
        for number, line in enumerate(data[:complete_bytes].splitlines(keepends=True), start=1):
            self._load_line(number, line)

    def __contains__(self, release: Release) -> bool:
        return any(release.mark == recorded.mark for recorded in self.releases)

    def add(self, release: Release) -> None:
        """Append a release to the file and flush it to disk, before its noised sum is used.

        Args:
            release: The noised sum that the server is about to use.

        Raises:
            UserError: If the file cannot be written.
        """
        entry = _to_entry(release)
        line_hash = _chain_hash(self._last_hash, entry)
        try:
            atomic_io.append(self.path, atomic_io.json_line({**entry, "seal": line_hash}))
            atomic_io.flush_and_measure(self.path)
        except OSError as error:
            raise UserError(
                f"{self.path}: it cannot be written ({atomic_io.error_reason(error)}); no sum was used that is not "
                "recorded there: make it writable, and resume the run."
            ) from error
        self._last_hash = line_hash
        self.releases.append(release)

    def check(self, rounds: int) -> None:
        """Check that each completed round has a line in this ledger: epsilon would not count a round without one.

        The hash chain reveals lines that were changed or removed, except at the end of the file.

        Args:
            rounds: The number of completed rounds.

        Raises:
            UserError: If a line is missing.
        """
        numbers = {release.round for release in self.releases}
        missing = next((number for number in range(rounds) if number not in numbers), None)
        if missing is not None:
            # UserError writes {run_dir} as a flag or as a Python keyword.
            raise UserError(
                f"{self.path} has no line of round {missing + 1}, but the run has completed {rounds}: restore the "
                "file, or restart the run in another {run_dir}; without it epsilon is not known.",
                option="run_dir",
            )

    def _load_line(self, number: int, line: bytes) -> None:
        """Verify the hash of one line of the file, and add its release: a noised sum that the server used.

        A line's hash, in its field "seal", is the SHA-256 of the previous line's hash and of its other fields.

        Args:
            number: The number of the line, from 1.
            line: The line, with its line feed.

        Raises:
            UserError: If the line was changed or damaged.
        """
        try:
            entry = atomic_io.parse_json(line)
            line_hash = entry.pop("seal")
            release = _from_entry(entry)
        except (ValueError, LookupError, TypeError, AttributeError):
            line_hash = ""
            release = None
            entry = {}
        if (
            release is None
            or line_hash != _chain_hash(self._last_hash, entry)
            # The hash covers the parsed values only: a line with the same values in another spelling was changed too.
            or atomic_io.json_line({**entry, "seal": line_hash}) != line
        ):
            # UserError writes {run_dir} as a flag or as a Python keyword.
            raise UserError(
                f"{self.path}, line {number}: it was changed or damaged: restore the file, or restart the run in "
                "another {run_dir}; without it epsilon is not known.",
                option="run_dir",
            )
        self._last_hash = line_hash
        self.releases.append(release)


def _to_entry(release: Release) -> dict[str, Any]:
    """Convert a release, a noised sum that the server used, to the fields of its line in the ledger's file.

    Rounds count from 1 there, as in metrics.jsonl. The file has two names of its format: "drawn" is the random draw of
    the cohort, [cohort, clients] or null; "mark" is the keyed hash that identifies the sum.
    """
    sampled = None if release.sampled is None else list(release.sampled)
    return {
        "round": release.round + 1,
        "attempt": release.attempt,
        "query": release.query,
        "drawn": sampled,
        "noise": release.noise,
        "mark": release.mark,
    }


def _from_entry(entry: dict[str, Any]) -> Release:
    """Convert the fields of a line of the ledger's file to a release; the inverse of `_to_entry`."""
    sampled = None if entry["drawn"] is None else CohortDraw(*entry["drawn"])
    return Release(
        round=entry["round"] - 1,  # from 0, in the file from 1
        attempt=entry["attempt"],
        query=entry["query"],
        sampled=sampled,
        noise=entry["noise"],
        mark=entry["mark"],
    )


def _chain_hash(previous_hash: str, entry: dict[str, Any]) -> str:
    """Compute the hash that chains a line to all lines before it."""
    return sha256(previous_hash.encode() + atomic_io.json_line(entry)).hexdigest()

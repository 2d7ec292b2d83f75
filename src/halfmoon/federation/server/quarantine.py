"""The register of unusable replies: how many of each site, and why last. It outlives the server's process."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from halfmoon.core.errors import UserError, nearest
from halfmoon.storage import atomic_io


class Refusals(NamedTuple):
    """The unusable replies of one site; `round` (from 0) and `reason` are those of the last one, if any."""

    name: str
    count: int = 0
    round: int | None = None
    reason: str = ""
    quarantined: bool = False


class Quarantine:
    """The refusals of the sites in `names`, counted over the whole federation, across restarts.

    A site is in quarantine when its count reaches `limit` (0: never). A good reply does not take the count back: a site
    that spoils every other round would never get there; `readmit` does. With a `path` every change is there before the
    method returns. Raises UserError for a negative limit, and where the file in `path` cannot be read, or holds no
    register; sites in it that are not in `names` are ignored.
    """

    def __init__(self, names: Sequence[str], limit: int, path: Path | None) -> None:
        if limit < 0:
            raise UserError(f"the limit of refused replies is {limit}: give 1 or more, or 0 to set no site aside.")
        self.limit, self.path = limit, path
        before = {} if path is None else _read(path)
        self._refusals = {name: before.get(name, Refusals(name)) for name in names}

    @property
    def sites(self) -> frozenset[str]:
        return frozenset(row.name for row in self.rows() if row.quarantined)

    def refuse(self, name: str, round: int, reason: str) -> bool:
        """Count a reply that was refused in `round` (from 0); return whether the site is in quarantine from now on.

        Raises UserError for an unknown site, and where the register cannot be written; then nothing is counted.
        """
        self._check(name)
        count = self._refusals[name].count + 1
        self._change(Refusals(name, count, round, reason))
        return count == self.limit

    def readmit(self, name: str) -> None:
        """Set a site's count back to 0, so that it takes part again.

        Raises UserError for an unknown site, and where the register cannot be written.
        """
        self._check(name)
        self._change(Refusals(name))

    def rows(self) -> list[Refusals]:
        """Return the refusals of each site, in the order of the names."""
        return [row._replace(quarantined=0 < self.limit <= row.count) for row in self._refusals.values()]

    def _check(self, name: str) -> None:
        if name not in self._refusals:
            raise UserError(f"there is no site {name!r} in this federation: {nearest(name, self._refusals)}")

    def _change(self, new: Refusals) -> None:
        refusals = {**self._refusals, new.name: new}
        if self.path is not None:
            _write(self.path, refusals)
        self._refusals = refusals


def _write(path: Path, refusals: dict[str, Refusals]) -> None:
    rows = {
        name: {"count": row.count, "round": row.round, "reason": row.reason}
        for name, row in refusals.items()
        if row.count
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_io.replace(path, (json.dumps({"sites": rows}, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(
            f"{path}: the list of refused replies cannot be written ({atomic_io.reason(error)}); mend that, and go on."
        ) from error


def _read(path: Path) -> dict[str, Refusals]:
    try:
        data = atomic_io.read(path)
        if data is None:
            return {}
        return {name: _row(name, facts) for name, facts in json.loads(data)["sites"].items()}
    except OSError as error:
        raise UserError(
            f"{path}: the register of refused replies cannot be read ({atomic_io.reason(error)}); mend that, and go on."
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} holds no register of refused replies ({type(error).__name__}); restore it, or remove it to count "
            "from 0 again."
        ) from error


def _row(name: str, facts: dict[str, Any]) -> Refusals:
    count, round, reason = facts["count"], facts["round"], facts["reason"]
    if type(count) is not int or type(round) is not int or type(reason) is not str or count < 1 or round < 0:
        raise TypeError(f"the row of {name!r} is not a count, a round and a reason")
    return Refusals(name, count, round, reason)

"""The configuration that a run folder contains, and the jobs of a comparison."""

import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon.config import retired
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config, resolve, to_toml
from halfmoon.core.errors import UserError
from halfmoon.storage import integrity, toml
from halfmoon.storage.folder_writer import CONFIG

COMPARISON = "comparison.json"


@dataclass(frozen=True)
class Job:
    """One method to play, in a folder below the root."""

    folder: str
    config: Config


def parse_config(words: str, root: Path) -> Config:
    """Return the configuration that a run folder holds; raise UserError where a federation's server has made it."""
    try:
        values = toml.parse(words)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{root / CONFIG} is not valid TOML: {error}; restore it, or start a new run.") from error
    if settings.FEDERATION_TABLE in values:
        going = shlex.join(["halfmoon", "serve", "CONFIG.toml", "--run-dir", str(root)])
        raise UserError(
            f"{root} is the run of a federation: `{going}` goes on with it, from the file it was begun with."
        )
    return resolve(values, {"run_dir": str(root)}, root / CONFIG)


def render(jobs: Sequence[Job]) -> bytes:
    return integrity.seal({"jobs": [{"folder": job.folder, "config": to_toml(job.config)} for job in jobs]})


def is_same_plan(stored: bytes | None, plan: bytes) -> bool:
    """Check whether a `comparison.json`, perhaps of an earlier version, holds the same jobs as `plan` of this version."""
    if stored is None or stored == plan:
        return stored == plan
    try:
        return _without_retired_options(stored) == _without_retired_options(plan)
    except (ValueError, LookupError, TypeError):
        return False


def _without_retired_options(plan: bytes) -> list[tuple[str, str]]:
    jobs = integrity.unseal(plan)["jobs"]
    return [(str(job["folder"]), retired.strip_ignored_lines(str(job["config"]))) for job in jobs]


def parse(plan: bytes, root: Path) -> list[Job]:
    """Return the jobs of a `comparison.json`."""
    try:
        facts = integrity.unseal(plan)
        jobs = [Job(_inside(each["folder"]), parse_config(str(each["config"]), root)) for each in facts["jobs"]]
        if not jobs:
            raise ValueError("it names no run")
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{root / COMPARISON} was changed or damaged ({error}); restore it, or start the comparison again in "
            "another --run-dir."
        ) from error
    return jobs


def _inside(folder: Any) -> str:
    parts = Path(folder).parts if isinstance(folder, str) and folder.isprintable() else ("..",)
    if ".." in parts or Path(folder).is_absolute():
        raise ValueError(f"{str(folder)[:40]!r} is no folder in it")
    return folder

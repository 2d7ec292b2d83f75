"""Jobs of a run or comparison, and the files that store them: config.toml and comparison.json."""

import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon.config import retired
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config, resolve, to_toml
from halfmoon.core import toml
from halfmoon.core.errors import UserError
from halfmoon.storage import integrity
from halfmoon.storage.folder_writer import CONFIG

COMPARISON = "comparison.json"
"""The file with the jobs of a comparison, in its folder."""


@dataclass(frozen=True)
class Job:
    """One method with one seed to train.

    Attributes:
        folder: the run folder, relative to the folder of the whole run or comparison.
        config: the configuration.
    """

    folder: str
    config: Config


def parse_config(text: str, root: Path) -> Config:
    """Parse the config.toml of a run folder.

    Args:
        text: the file.
        root: the folder; it becomes `run_dir`, and is named in messages.

    Raises:
        UserError: the file is not valid, or the folder is that of a federation's server.
    """
    try:
        values = toml.parse(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{root / CONFIG} is not valid TOML: {error}; restore it, or start a new run.") from error
    if settings.FEDERATION_TABLE in values:
        command = shlex.join(["halfmoon", "serve", "CONFIG.toml", "--run-dir", str(root)])
        raise UserError(
            f"{root} is the run of a federation: `{command}` continues it, with the file that it was started with."
        )
    return resolve(values, {"run_dir": str(root)}, root / CONFIG)


def render_jobs(jobs: Sequence[Job]) -> bytes:
    """Write jobs as a comparison.json with a checksum; `parse_jobs` reads it."""
    return integrity.format_checked({"jobs": [{"folder": job.folder, "config": to_toml(job.config)} for job in jobs]})


def is_same_plan(stored: bytes | None, plan: bytes) -> bool:
    """Check whether two comparison.json files plan the same jobs, so that a comparison is resumed and not refused.

    Args:
        stored: the file in a folder, perhaps of an earlier version with options that no longer exist; None if there is
            no file.
        plan: the file of this version.
    """
    if stored is None or stored == plan:
        return stored == plan
    try:
        return _without_retired_options(stored) == _without_retired_options(plan)
    except (ValueError, LookupError, TypeError):
        return False


def _without_retired_options(plan: bytes) -> list[tuple[str, str]]:
    jobs = integrity.parse_checked(plan)["jobs"]
    return [(str(job["folder"]), retired.strip_ignored_lines(str(job["config"]))) for job in jobs]


def parse_jobs(plan: bytes, root: Path) -> list[Job]:
    """Parse the list of jobs (folder and configuration of each run) in a comparison.json.

    Args:
        plan: the file.
        root: the folder of the comparison.

    Raises:
        UserError: the file was changed or damaged, or names a folder that is not below `root`.
    """
    try:
        jobs = []
        for stored_job in integrity.parse_checked(plan)["jobs"]:
            config = parse_config(str(stored_job["config"]), root)
            jobs.append(Job(_check_folder(stored_job["folder"]), config))
        if not jobs:
            raise ValueError("it names no run")
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{root / COMPARISON} was changed or damaged ({error}); restore it, or start the comparison again in "
            "another {run_dir}.",
            option="run_dir",
        ) from error
    return jobs


def _check_folder(folder: Any) -> str:
    """Return a folder's name; raise `ValueError` if it is no path below the folder of the comparison."""
    is_text = isinstance(folder, str) and folder.isprintable()
    if not is_text or ".." in Path(folder).parts or Path(folder).is_absolute():
        raise ValueError(f"{str(folder)[:40]!r} is no folder in it")
    return folder

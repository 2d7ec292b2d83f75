"""The configuration that a run folder contains, and the jobs of a comparison."""

import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon.config import schema as settings
from halfmoon.config.schema import Config, explicit_method_options, resolve, to_toml
from halfmoon.core.errors import UserError
from halfmoon.storage import integrity, toml
from halfmoon.storage.folder_writer import CONFIG

COMPARISON = "comparison.json"


@dataclass(frozen=True)
class Job:
    """One method to play, in a folder below the root."""

    folder: str
    config: Config


def parsed(words: str, root: Path) -> Config:
    """Return the configuration that a run folder holds; raise UserError where a federation's server has made it."""
    try:
        values = toml.loads(words)
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


def parse(plan: bytes, root: Path) -> list[Job]:
    """Return the jobs of a `comparison.json`."""
    try:
        facts = integrity.unseal(plan)
        jobs = [Job(_inside(each["folder"]), parsed(str(each["config"]), root)) for each in facts["jobs"]]
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


def start_of(config: Config) -> Job | None:
    """Return the job that plays the start of a run, None where it has none; runs of one seed share it."""
    if config.start == "none":
        return None
    alone = {"method": config.start, "baselines": (), "preset": "none", "reference": config.start, "client_models": 0}
    spent = {"rounds": config.start_rounds, "lr": config.start_lr or config.lr, "start": "none"}
    options = explicit_method_options(config, config.start)
    return Job(f"{START}{config.seed}", replace(config, **alone, **spent, options=options))


def starts_of(jobs: Sequence[Job]) -> list[Job]:
    """Return the different starts of jobs."""
    starts = filter(None, (start_of(job.config) for job in jobs))
    return list({start.folder: start for start in starts}.values())


def backbone(root: Path, config: Config, network: Network) -> Mapping[str, Tensor]:
    """Return what the start of a run has trained, by path, without the head; nothing where it has no start."""
    start = start_of(config)
    if start is None:
        return {}
    tensors = read(str(root / start.folder / MODEL)).tensors
    return {path: leaf for path, leaf in tensors.items() if not of_head(network, path.removeprefix("params/"))}


def spent(root: Path, config: Config) -> Row:
    """Return what a summary says of the start of a run, by "start"; nothing where it has none."""
    start = start_of(config)
    if start is None:
        return {}
    summary = integrity.summary(root / start.folder) or {}
    return {"start": {"method": config.start, "rounds": config.start_rounds, "cost": summary.get("cost")}}


def sentence(root: Path, start: Job) -> str:
    """Return in a sentence what a start has cost."""
    cost, title = (integrity.summary(root / start.folder) or {})["cost"], registry.entry(start.config.method).title
    traffic = (cost["bytes_down"] + cost["bytes_up"]) / 1e6
    return (
        f"start: {title} took {start.config.rounds} rounds, {cost['labeled_steps']:,} steps of clients and "
        f"{traffic:,.1f} MB of traffic, before the rounds of the methods."
    )

"""A start without labels: the job that trains a network for other jobs, and the backbone that these take from it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from halfmoon.config.schema import Config, own_options
from halfmoon.engine.loop import Row
from halfmoon.methods import registry
from halfmoon.models import Network
from halfmoon.models.weights import of_head, read
from halfmoon.runs.jobs import Job
from halfmoon.storage import integrity
from halfmoon.storage.folder_writer import START
from halfmoon.storage.run_folder import MODEL


def start_of(config: Config) -> Job | None:
    """Return the job that plays the start of a run, None where it has none; runs of one seed share it."""
    if config.start == "none":
        return None
    alone = {"method": config.start, "baselines": (), "preset": "none", "reference": config.start, "client_models": 0}
    spent = {"rounds": config.start_rounds, "lr": config.start_lr or config.lr, "start": "none"}
    options = own_options(config, config.start)
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

"""What every run is made of and leaves, simulated or with sites: experiment, split, summary, card, picture, tables."""

import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon.api.types import Task
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config, count_rounds
from halfmoon.core.errors import UserError
from halfmoon.data import Source, Split
from halfmoon.data import summarize as portrait
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.loop import Experiment, Row
from halfmoon.engine.runtime import ServerRuntime
from halfmoon.methods import registry
from halfmoon.models import Network
from halfmoon.report.remarks import list_remarks, summarize_pseudo_labels
from halfmoon.report.run_reader import StoredRun
from halfmoon.report.tables import comparison_table
from halfmoon.runs.factory import ImageSpec, preparation
from halfmoon.runs.model_card import Card
from halfmoon.storage import atomic_io, integrity
from halfmoon.storage.checkpoints import TIMINGS
from halfmoon.storage.folder_writer import WriteError, resume_command
from halfmoon.storage.run_folder import RunFolder


def build_experiment(
    config: Config, task: Task, runtime: ServerRuntime, test: Examples | None, validation: Examples | None = None
) -> Experiment:
    """Return what is played: a method on a task, by a runtime that asks clients, and what it is tested on."""
    how = (config.seed, config.evaluate_every or 1, config.checkpoint_every, validation, config.server_ema)
    return Experiment(runtime.method, task, runtime, test, *how)


def summary_header(config: Config, place: Mapping[str, Any]) -> Row:
    """Return what a summary says before anything is played; `place` says where: on which split, or with which sites."""
    return {
        "method": config.method,
        "title": registry.entry(config.method).title,
        "data": config.data,
        **place,
        "seed": config.seed,
        "rounds": count_rounds(config),
        "budget": {"rule": config.budget, "reference": registry.entry(config.reference or config.method).title},
    }


def build_summary(
    config: Config, place: Mapping[str, Any], classes: Sequence[str], folder: RunFolder, results: Mapping[str, Any]
) -> Row:
    """Return summary.json of a run that has played, as `summary_header` begins it."""
    seconds = sum(seconds for _, seconds in atomic_io.read_number_pairs(folder.path / TIMINGS, "round", "seconds"))
    used = summarize_pseudo_labels(folder.rows())
    pseudo_labels = {"pseudo_labels": {"used": used["used"]}, "most_used": used["most_used"]} if used else {}
    return {
        **summary_header(config, place),
        "accuracy": results["accuracy"],
        **({"measured": results["measured"]} if results["measured"] else {}),
        **pseudo_labels,
        "cost": results["cost"],
        "classes": list(classes),
        "confusion": results["confusion"],
        **({} if results["correct"] is None else {"correct": base64.b64encode(results["correct"]).decode()}),
        "seconds": round(seconds, 1),
        **({"defenses": defenses} if (defenses := settings.security_options(config)) else {}),
        **{name: results[name] for name in ("aggregation", "ended") if results[name] is not None},
        "finished": True,
    }


def build_card(
    config: Config,
    form: ImageSpec,
    network: Network,
    words: str,
    input_size: tuple[int, int] | None = None,
    temperature: float = 1.0,
) -> Card:
    """Return what the file of a run's model says of itself; `words` is the run's config.toml.

    `input_size` is height and width of the images before anything was done to them, where they are not those of `form`.
    """
    return Card(
        classes=form.classes,
        image=form.image,
        input_size=input_size or form.image[1:],
        shrink=config.shrink if input_size else 1,
        mean=form.mean,
        std=form.std,
        network=network,
        method=config.method,
        config=words,
        crop=config.crop,
        window=preparation(config).window,
        temperature=temperature,
    )


SPLIT, HOLDINGS = "split.parquet", "split.json"


def save_split(path: Path, split: Split, data: Source) -> None:
    """Write the split and what it holds; the parquet last, as a run that goes on looks for it."""
    counts = portrait(split, data.train.labels, data.classes)
    try:
        atomic_io.write_atomically(path / HOLDINGS, (json.dumps(counts) + "\n").encode())
    except OSError as error:
        raise WriteError(
            f"{path}: {HOLDINGS} cannot be written ({atomic_io.error_reason(error)}). "
            f"First mend that, then go on with: {resume_command(path)}"
        ) from error
    split.save(path / SPLIT)


def record_split_checksums(path: Path) -> None:
    """Write down the checksums of a split, where a kill has left it without them."""
    if SPLIT in integrity.read_checksums(path):
        return
    try:
        integrity.record_files(path, HOLDINGS, SPLIT)
    except OSError as error:
        raise WriteError(
            f"{path}: {integrity.CHECKSUMS} cannot be written ({atomic_io.error_reason(error)}). "
            f"First mend that, then go on with: {resume_command(path)}"
        ) from error


CURVES, CSV, MARKDOWN = "curves.png", "table.csv", "table.md"


@dataclass(frozen=True)
class RunResult:
    """What is left when all jobs are through; `summaries` and `runs` are in the order of the jobs."""

    folder: Path
    summaries: list[Row]
    curves: Path
    runs: list[Path]
    tables: list[Path]


def show(outcome: RunResult) -> None:
    """Write the picture and the tables of what came out; each is there whole or not at all."""
    from halfmoon.report.curves import draw_curves  # Matplotlib is slow to import, and workers draw nothing

    table = comparison_table(outcome.summaries)
    notes = "".join(f"\n{each}\n" for each in list_remarks(outcome.summaries, registry.ceilings()))
    staged = outcome.curves.with_name(f".{CURVES}{atomic_io.PARTIAL}")
    try:
        for path, words in zip(outcome.tables, (table.as_csv(), table.as_markdown() + notes), strict=True):
            atomic_io.write_atomically(path, words.encode())
        draw_curves([StoredRun.read(path) for path in outcome.runs], staged)
        staged.replace(outcome.curves)
    except OSError as error:
        raise UserError(
            f"{outcome.folder}: tables and curves cannot be written ({atomic_io.error_reason(error)}); "
            f"the runs are finished: first mend that, then: {resume_command(outcome.folder)}"
        ) from error
    finally:
        with suppress(OSError):
            staged.unlink(missing_ok=True)

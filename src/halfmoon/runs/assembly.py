"""Build the experiment of a run, and write its split, summary, model card, figure and tables.

Simulations and federations use the same functions.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon.api.types import Task
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config, count_rounds
from halfmoon.core.errors import UserError
from halfmoon.data import Source, Split
from halfmoon.data import summarize as summarize_split
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.loop import Experiment, Row
from halfmoon.engine.runtime import ServerRuntime
from halfmoon.methods import registry
from halfmoon.models import Network
from halfmoon.models.model_card import Card
from halfmoon.report.remarks import list_remarks, summarize_pseudo_labels
from halfmoon.report.run_reader import StoredRun
from halfmoon.report.tables import comparison_table
from halfmoon.runs.factory import ImageSpec, image_preparation
from halfmoon.storage import atomic_io, integrity
from halfmoon.storage.checkpoints import TIMINGS
from halfmoon.storage.folder_writer import RESUME_ADVICE, WriteError
from halfmoon.storage.run_folder import RunFolder

SPLIT = "split.parquet"
SPLIT_COUNTS = "split.json"
CURVES = "curves.png"
CSV = "table.csv"
MARKDOWN = "table.md"


def build_experiment(
    config: Config, task: Task, runtime: ServerRuntime, test: Examples | None, validation: Examples | None = None
) -> Experiment:
    """Combine a runtime with the images and options that the round loop needs.

    Args:
        config: the configuration.
        task: the network, the optimizer and the number of rounds.
        runtime: the federation, simulated or over the network, with its method.
        test: test images of the server, if it has any.
        validation: validation images of the server, if it has any.
    """
    return Experiment(
        method=runtime.method,
        task=task,
        runtime=runtime,
        test=test,
        seed=config.seed,
        evaluate_every=config.evaluate_every or 1,  # in rounds
        checkpoint_every=config.checkpoint_every,  # in rounds
        validation=validation,
        ema=config.server_ema,  # decay of the moving average of the server's models, which is evaluated; 0: none
        patience=config.patience,  # validations without a better score after which training stops; None: never
    )


def summary_header(config: Config, setting: Mapping[str, Any]) -> Row:
    """Build the fields of a run's summary.json that are known before training.

    "budget" states how the training lengths of compared methods are made equal: the "rule" counts a cost such as
    labeled steps, and every method may spend what the "reference" method spends by its batch sizes and epochs.

    Args:
        config: the configuration.
        setting: the keys that describe the split of a simulation or the sites of a federation.
    """
    reference = registry.entry(config.reference or config.method)
    return {
        "method": config.method,
        # The method's name in tables.
        "title": registry.entry(config.method).title,
        "data": config.data,
        **setting,
        "seed": config.seed,
        # Fewer than configured for a method that is solved in closed form.
        "rounds": count_rounds(config),
        "budget": {"rule": config.budget, "reference": reference.title},
    }


def build_summary(
    config: Config, setting: Mapping[str, Any], classes: Sequence[str], folder: RunFolder, results: Mapping[str, Any]
) -> Row:
    """Build the summary.json of a run whose rounds are finished.

    Args:
        config: the configuration.
        setting: the keys that describe the split of a simulation or the sites of a federation.
        classes: names of the classes.
        folder: the run's folder, with its metrics and timings.
        results: the result of `halfmoon.engine.loop.run_rounds`, whose keys are copied; "measured" are means of
            pseudo-label metrics, "correct" packs one bit for each test image.
    """
    summary = summary_header(config, setting)
    summary["accuracy"] = results["accuracy"]
    if results["measured"]:
        summary["measured"] = results["measured"]
    # Over all rounds: the share of pseudo-labels that was used, and the largest such share of a round.
    shares = summarize_pseudo_labels(folder.rows())
    if shares:
        summary["pseudo_labels"] = {"used": shares["used"]}
        summary["most_used"] = shares["most_used"]
    summary["cost"] = results["cost"]
    summary["classes"] = list(classes)
    summary["confusion"] = results["confusion"]
    if results["correct"] is not None:
        # Comparisons pair the runs of two methods by test image.
        summary["correct"] = base64.b64encode(results["correct"]).decode()
    # The time of all rounds, also of those before the run was resumed.
    timings = atomic_io.read_number_pairs(folder.path / TIMINGS, "round", "seconds")
    summary["seconds"] = round(sum(seconds for _, seconds in timings), 1)
    defenses = settings.security_options(config)
    if defenses:
        summary["defenses"] = defenses
    # What robust or private aggregation did, the accuracy at each client, why training ended early: not in all runs.
    for name in ("aggregation", "client_accuracy", "ended"):
        if results.get(name) is not None:
            summary[name] = results[name]
    summary["finished"] = True
    return summary


def build_card(
    config: Config,
    image_spec: ImageSpec,
    network: Network,
    config_text: str,
    input_size: tuple[int, int] | None = None,
    temperature: float = 1.0,
) -> Card:
    """Build the metadata of a run's model file, with which a program can prepare images as in training.

    Args:
        config: the configuration.
        image_spec: the images on which the network was trained.
        network: the whole network: also if only its head was trained, with the backbone.
        config_text: the run's config.toml.
        input_size: height and width of the images before they were shrunk and padded; None if they were neither, so
            that they are those of `image_spec`.
        temperature: the divisor of the logits that calibrates the probabilities; 1 leaves them as they are.
    """
    return Card(
        classes=image_spec.classes,
        image=image_spec.image,
        input_size=input_size or image_spec.image[1:],
        shrink=config.shrink if input_size else 1,
        mean=image_spec.mean,
        std=image_spec.std,
        network=network,
        method=config.method,
        config=config_text,
        crop=config.crop,
        window=image_preparation(config).window,  # the values of black and white in images of more than 8 bits
        temperature=temperature,
    )


def save_split(path: Path, split: Split, data: Source) -> None:
    """Write a split into a run folder, and the number of labeled and unlabeled images by client and class.

    Args:
        path: the run folder.
        split: the client of each training image, and which images keep their labels.
        data: the data set of the split.

    Raises:
        WriteError: the folder cannot be written.
    """
    counts = summarize_split(split, data.train.labels, data.classes)
    try:
        atomic_io.write_atomically(path / SPLIT_COUNTS, (json.dumps(counts) + "\n").encode())
        # Last, because a run that resumes takes this file as the sign that both are there.
        split.save(path / SPLIT)
    except (OSError, UserError) as caught:
        error = atomic_io.find_os_error(caught)
        if error is None:
            raise
        raise WriteError(
            f"{path}: the split cannot be written ({atomic_io.error_reason(error)}). "
            f"First {atomic_io.write_remedy(error)}, then {RESUME_ADVICE}",
            resume=path,
        ) from error


def record_split_checksums(path: Path) -> None:
    """Record the checksums of a split's files, unless they are recorded.

    They may be missing in a run folder whose process was killed after it wrote the files.

    Raises:
        WriteError: the folder cannot be written.
    """
    if SPLIT in integrity.read_checksums(path):
        return
    try:
        integrity.record_files(path, SPLIT_COUNTS, SPLIT)
    except OSError as error:
        raise WriteError(
            f"{path}: {integrity.CHECKSUMS} cannot be written ({atomic_io.error_reason(error)}). "
            f"First {atomic_io.write_remedy(error)}, then {RESUME_ADVICE}",
            resume=path,
        ) from error


@dataclass(frozen=True)
class RunResult:
    """The files and summaries of a finished run or comparison.

    Attributes:
        folder: the folder of the run or comparison.
        summaries: the summary of each job, in order.
        curves: the figure of the learning curves.
        runs: the run folder of each job, in order.
        tables: the tables as CSV and Markdown.
    """

    folder: Path
    summaries: list[Row]
    curves: Path
    runs: list[Path]
    tables: list[Path]


def write_comparison(outcome: RunResult) -> None:
    """Write the learning curves of a run or comparison as a PNG, and its table as CSV and Markdown, each atomically.

    Args:
        outcome: the finished runs, their summaries, and the paths of the three files.

    Raises:
        UserError: the folder cannot be written.
    """
    from halfmoon.report.curves import draw_curves  # Matplotlib is slow to import, and workers draw nothing

    table = comparison_table(outcome.summaries)
    # Upper bounds ("ceilings") are the methods that train with all labels.
    remarks = list_remarks(outcome.summaries, ceilings=registry.ceilings())
    markdown = table.as_markdown() + "".join(f"\n{remark}\n" for remark in remarks)
    try:
        for path, text in zip(outcome.tables, (table.as_csv(), markdown), strict=True):
            atomic_io.write_atomically(path, text.encode())
        draw_curves([StoredRun.read(path) for path in outcome.runs], outcome.curves)
    except (OSError, UserError) as caught:
        error = atomic_io.find_os_error(caught)
        if error is None:
            raise
        raise UserError(
            f"{outcome.folder}: tables and curves cannot be written ({atomic_io.error_reason(error)})",
            # `UserError` fills in {resume}.
            hint=f"first {atomic_io.write_remedy(error)}, then {RESUME_ADVICE}",
            resume=outcome.folder,
        ) from error

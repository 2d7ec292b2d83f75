"""Read and validate run folders; `halfmoon.storage.run_folder` describes their files."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from halfmoon.core import toml
from halfmoon.core.errors import UserError
from halfmoon.storage import integrity
from halfmoon.storage.atomic_io import parse_json, read_json, read_number_pairs, read_rows
from halfmoon.storage.folder_writer import START

FiniteNumber = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**63)]

# The classes below describe the fields that a report reads. Other fields are allowed and not checked.


class _Measures(BaseModel):
    loss: FiniteNumber | None = None
    epsilon: FiniteNumber | None = None
    accuracy: FiniteNumber | None = None
    accuracy_above: FiniteNumber | None = None
    share_above: FiniteNumber | None = None
    share_used: FiniteNumber | None = None
    auc_confidence: FiniteNumber | None = None
    auc_weight: FiniteNumber | None = None
    m: FiniteNumber | None = None
    m_spread: FiniteNumber | None = None
    d: FiniteNumber | None = None
    per_class: list[FiniteNumber | None] | None = None


class _Prior(BaseModel):
    accuracy: list[FiniteNumber] | None = None
    app_u: list[FiniteNumber] | None = None
    labeled: list[FiniteNumber] | None = None
    unlabeled: list[FiniteNumber] | None = None
    js_app_u: FiniteNumber | None = None
    js_labeled: FiniteNumber | None = None


class _Evaluation(BaseModel):
    accuracy: FiniteNumber | None = None
    round: Count


class _Cost(BaseModel):
    labeled_steps: Count = 0
    forward: Count = 0
    backward: Count = 0
    bytes_down: Count = 0
    bytes_up: Count = 0
    stored_client: Count | None = None
    stored_server: Count | None = None


class _Accuracy(BaseModel):
    last: FiniteNumber
    best: FiniteNumber | None = None
    best_round: Count | None = None


class _Row(BaseModel):
    round: Count
    test: _Measures | None = None
    train: _Measures | None = None
    evaluation: _Evaluation | None = None  # by a federation's sites, of the model of an earlier round
    aggregation: _Measures | None = None
    pseudo: _Measures | None = None
    prior: _Prior | None = None
    cost: _Cost | None = None


class _ClientAccuracy(BaseModel):
    mean: FiniteNumber
    deviation: FiniteNumber
    worst: FiniteNumber
    each: dict[str, FiniteNumber] = {}


class _PseudoLabels(BaseModel):
    used: FiniteNumber | None = None


class _Summary(BaseModel):
    title: str
    seed: Annotated[int, Field(le=2**63, ge=-(2**63))]
    accuracy: _Accuracy | None = None
    cost: _Cost = _Cost()
    classes: list[str] = []
    confusion: list[list[Count]] | None = None
    seconds: FiniteNumber | None = None
    client_accuracy: _ClientAccuracy | None = None
    pseudo_labels: _PseudoLabels | None = None


class _FinalCost(BaseModel):
    labeled_steps: Count
    forward: Count
    backward: Count
    bytes_down: Count
    bytes_up: Count


class _Final(BaseModel):
    title: str
    seed: Count
    accuracy: _Accuracy | None
    cost: _FinalCost


class _Counts(BaseModel):
    labeled: Count
    unlabeled: Count
    clients: Count
    classes: list[str | int]


class _Server(BaseModel):
    labeled_classes: list[Count]


class _Client(_Server):
    unlabeled_classes: list[Count]


class _Split(BaseModel):
    counts: _Counts
    each: list[_Client]
    server: _Server | None = None


@dataclass(frozen=True)
class StoredRun:
    """A run folder, of a finished or unfinished run.

    Attributes:
        path: the folder.
        config: the text of config.toml.
        rows: the rows of metrics.jsonl, one for each round.
        summary: the contents of summary.json; None until the run is finished.
    """

    path: Path
    config: str
    rows: list[dict[str, Any]]
    summary: dict[str, Any] | None

    @classmethod
    def read(cls, path: Path) -> "StoredRun":
        """Read a run folder; raise `UserError` if it is not one, or a file is damaged."""
        try:
            config = (path / "config.toml").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not a run folder: its config.toml cannot be read ({error}).") from error
        integrity.check_run(path)
        rows = check_type(list[_Row], read_rows(path / "metrics.jsonl"), path / "metrics.jsonl")
        return cls(path, config, rows, _read_summary(path / "summary.json"))

    @property
    def title(self) -> str:
        if self.summary is not None:
            return str(self.summary["title"])
        return read_title(self.path) or str(self.options.get("method", self.path.name))

    def series(self, group: str, name: str) -> dict[int, float]:
        """Collect a metric by round, without rounds that do not have it.

        Args:
            group: a group of metrics in metrics.jsonl, such as "test".
            name: the name of a metric in this group.
        """
        values = [(row["round"], (row.get(group) or {}).get(name)) for row in self.rows]
        return {round: float(value) for round, value in values if value is not None}

    @property
    def options(self) -> dict[str, Any]:
        return toml.parse_or_empty(self.config)

    @property
    def head(self) -> dict[str, Any]:
        """Contents of run.json: identity, and the versions of halfmoon and torch; {} without this file."""
        return integrity.read_object(self.path / "run.json") or {}

    @property
    def split(self) -> dict[str, Any] | None:
        """Summary of the split (`heterogeneity.summarize`) from split.json; None if an older version made the run."""
        path = self.path / "split.json"
        if path.exists():
            integrity.check_files(self.path, path.name)
        value = read_json(path)
        return None if value is None else check_type(_Split, value, path)

    @property
    def federated(self) -> bool:
        return "federation" in self.options

    def seconds(self) -> dict[int, float]:
        """Read the duration of each round from timings.jsonl; for a repeated round that of the last time."""
        return dict(read_number_pairs(self.path / "timings.jsonl", "round", "seconds"))


def read_title(folder: Path) -> str:
    """Read the title of a run's method, which its folder has from the start; "" for folders of earlier versions."""
    head = read_json(folder / "run.json")
    return str(head.get("title", "")) if isinstance(head, dict) else ""


def read_runs(root: Path) -> list[StoredRun]:
    """Read all runs in a folder and below it, the highest folders first; raise `UserError` if there is none.

    Of a plan for a folder of images, these are the runs of its methods, and not those that only compare them on splits.
    """
    folders = {file.parent for file in root.rglob("run.json")}
    if (root / "plan.json").exists():
        folders = {path for path in folders if path == root or path.parent == root / "baselines"}
    # Versions up to 0.2 stored pretrained weights in folders with this prefix, which are not separate runs.
    paths = sorted(
        (path for path in folders if path == root or not path.name.startswith(START)),
        key=lambda path: (len(path.parts), path),
    )
    if not paths:
        raise UserError(f"{root} has no run; give the folder of a run or of a comparison.")
    return [StoredRun.read(path) for path in paths]


MEMORY_PREFIX = "memory:"
"""Beginning of the option `data` of images in memory, as `halfmoon.data.memory` names them."""


def dataset_name(value: object, parts: int = 1) -> str:
    """Shorten a data set to its name, a folder to the end of its path, or images in memory to these words.

    Args:
        value: a data set's name, the path of a folder on any system, or `MEMORY_PREFIX` with a hash.
        parts: number of parts of the path. With more than one, images in memory keep their hash.
    """
    text = str(value).rstrip("/\\")
    if text.startswith(MEMORY_PREFIX):
        image_hash = text.removeprefix(MEMORY_PREFIX)
        return "images in memory" if parts == 1 else f"images in memory {image_hash}"
    return "/".join(PurePath(text.replace("\\", "/")).parts[-parts:]) or text


def _read_summary(path: Path) -> dict[str, Any] | None:
    """Read a run's summary.json and check its fields; None if the run has not finished, so that there is no file.

    Raises:
        UserError: the file cannot be read or is damaged.
    """
    if not path.exists():
        return None
    try:
        value = check_type(_Summary, parse_json(path.read_bytes()), path)
        confusion = value.get("confusion") or []
        class_count = len(value.get("classes") or [])
        is_square = all(len(row) == len(confusion) for row in confusion)
        if not is_square or (confusion and class_count not in (0, len(confusion))):
            raise ValueError("its confusion does not have a row and a column for each class")
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a summary ({error}); restore it, or resume the run.") from error
    return value


def check_finished(summary: dict[str, Any], path: Path) -> dict[str, Any]:
    """Check that the summary of a finished run has valid results (`_Summary`) and all of them (`_Final`).

    Args:
        summary: contents of a summary.json.
        path: the file, for error messages.

    Returns:
        The summary, unchanged.

    Raises:
        UserError: the summary is damaged, or that of an unfinished run.
    """
    return check_type(_Final, check_type(_Summary, summary, path), path)


def check_type(expected_type: Any, value: Any, path: Path) -> Any:
    """Check that the parsed contents of a file have a type, and return them unchanged.

    Args:
        expected_type: a pydantic model of the fields, or a type such as a list of them.
        value: the parsed contents.
        path: the file, for error messages.

    Raises:
        UserError: the contents have another type.
    """
    try:
        _adapter(expected_type).validate_python(value, strict=True)
    except ValidationError as error:
        raise damage_error(error, path) from error
    return value


def damage_error(error: ValidationError, path: Path) -> UserError:
    """Convert a validation error to an error that names the file and its first damaged field."""
    first = error.errors(include_url=False, include_input=False)[0]
    location = ".".join(str(key)[:40] for key in first["loc"])
    at_location = f" at {location}" if location else ""
    return UserError(f"{path} is damaged{at_location} ({first['msg']}); restore it.")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)

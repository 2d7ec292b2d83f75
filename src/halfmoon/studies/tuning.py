"""A small search over named options of a run, judged by validation images alone; a stopped one goes on.

Optuna proposes the trials and keeps its journal in the folder; each trial is a run (or one a seed) in a folder named
after its values, so that a trial that was stopped goes on from its checkpoint. The test images of the data set have no
part in it: the runs have none.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.config import retired
from halfmoon.config import schema as settings
from halfmoon.config.option_types import union_members
from halfmoon.config.schema import Config
from halfmoon.core import rng
from halfmoon.core.errors import UserError, install_command
from halfmoon.engine.driver import Diverged
from halfmoon.report.spreadsheet import escape_formula
from halfmoon.runs import runner
from halfmoon.storage import atomic_io

if TYPE_CHECKING:
    import optuna

JOURNAL, TABLE, BEST = "journal.log", "trials.csv", "best.toml"
SHARE = 0.2
"""The validation share where the configuration sets none aside."""

KNOBS = ("lr=3e-4..1e-2", "labeled_view=cutout,weak,plain", "server_ema=0,0.9")
"""What is searched where nothing is named."""


@dataclass(frozen=True)
class Knob:
    """An option that is searched: one of `choices`, as words, or a number from `low` to `high`.

    A range of real numbers of a factor of ten or more is searched by its logarithm.
    """

    name: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False

    @classmethod
    def parse(cls, words: str) -> Knob:
        """Return the knob that NAME=LOW..HIGH or NAME=VALUE,VALUE,... spells; raise UserError for any other words."""
        name, sign, text = words.partition("=")
        method, dot, option = name.rpartition(".")
        name = f"{method}{dot}{option.replace('-', '_')}"
        if not sign or not text:
            raise UserError(f"--knob {words!r} is not NAME=LOW..HIGH or NAME=VALUE,VALUE: write lr=1e-4..1e-2.")
        own = "." in name
        if not own and name not in settings.option_types():
            raise settings.unknown_option(name, None)
        if name in _FIXED:
            raise UserError(f"--knob {name}: it cannot be searched, for it says what the search is.")
        low, dots, high = text.partition("..")
        if not dots:
            choices = tuple(text.split(","))
            for choice in choices if not own else ():
                settings.parse_option(name, choice)
            return cls(name, choices)
        try:
            ends = float(low), float(high)
        except ValueError as error:
            raise UserError(f"--knob {words!r}: {text!r} is no range of numbers, such as 1e-4..1e-2.") from error
        if not ends[0] < ends[1] or not all(map(math.isfinite, ends)):
            raise UserError(f"--knob {words!r}: a range goes from a smaller to a larger number.")
        kinds = () if own else union_members(settings.option_types()[name])
        if not own and not {int, float} & set(kinds):
            raise UserError(f"--knob {words!r}: {name} is no number; name its values: {name}=A,B.")
        return cls(name, (), *ends, whole=int in kinds and float not in kinds)

    def ask(self, trial: optuna.Trial) -> Any:
        """Return the value that a trial gives it."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        if self.whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high))
        return trial.suggest_float(self.name, self.low, self.high, log=self.low > 0 and self.high >= 10 * self.low)


_FIXED = {
    *("data", "data_dir", "cache", "method", "baselines", "seed", "split_seed", "split"),
    *("validation_share", "validation_part", "run_dir"),
}


@dataclass(frozen=True)
class Trial:
    """One that was played: its values, and the accuracy on validation images, a share; None where it diverged."""

    number: int
    values: Mapping[str, Any]
    accuracy: float | None


def tune(
    config: Config,
    knobs: Sequence[Knob],
    trials: int,
    seeds: Sequence[int],
    folder: Path,
    say: Callable[[str], None] = lambda words: None,
) -> list[Trial]:
    """Play trials until there are so many in the folder, and return all of them, the best first.

    A trial's accuracy is that of the chosen round on the validation images, in the mean over `seeds`. Raise UserError
    where the extra "tune" is not installed, a knob cannot be what it is to be, or the folder holds another search.
    """
    optuna = _optuna()
    if not (config.validation_share or config.validation_part):
        config = replace(config, validation_share=SHARE)
    marks = json.dumps([settings.to_toml(replace(config, run_dir=None)), [str(knob) for knob in knobs], list(seeds)])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        store = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL)))
    except OSError as error:
        raise UserError(f"{folder}: it cannot be written ({atomic_io.error_reason(error)}); choose another.") from error
    study = optuna.create_study(storage=store, study_name="halfmoon", direction="maximize", load_if_exists=True)
    # A search that goes on draws other values than it has drawn.
    number = rng.derive_seed(config.seed, "tune", len(study.get_trials(deepcopy=False)))
    study.sampler = optuna.samplers.TPESampler(seed=number % 2**32)
    if _without_retired_options(study.user_attrs.setdefault("search", marks)) != _without_retired_options(marks):
        raise UserError(f"{folder} holds another search (other options, knobs or seeds); choose another --run-dir.")
    study.set_user_attr("search", marks)
    for running in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        study.tell(running.number, state=optuna.trial.TrialState.FAIL)  # stopped: its values come first now
        study.enqueue_trial(running.params)
    while len(finished := _finished(study)) < trials:
        trial = study.ask()
        values = {knob.name: knob.ask(trial) for knob in knobs}
        accuracy = _accuracy(config, values, seeds, folder)
        trial.set_user_attr("diverged", accuracy is None)
        study.tell(trial, 0.0 if accuracy is None else accuracy)
        outcome = "diverged" if accuracy is None else f"{100 * accuracy:.2f} %"
        say(f"trial {len(finished) + 1} of {trials}: {outcome} with {_words(values)}")
        _write(folder, config, _finished(study), knobs)
    _write(folder, config, finished, knobs)
    return sorted(finished, key=lambda trial: -1.0 if trial.accuracy is None else trial.accuracy, reverse=True)


def _without_retired_options(marks: str) -> list[Any]:
    """Parse the description of a search; options that were removed since it was written are left out."""
    config, *rest = json.loads(marks)
    return [retired.strip_ignored_lines(config), *rest]


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UserError(f"halfmoon tune needs optuna: {install_command('tune')}.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _finished(study: optuna.Study) -> list[Trial]:
    return [
        Trial(trial.number, dict(trial.params), None if trial.user_attrs.get("diverged") else trial.value)
        for trial in study.get_trials(deepcopy=False)
        if trial.value is not None
    ]


def applied(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with the knobs at these values; raise UserError where they do not fit together."""
    changes: dict[str, Any] = {}
    options: dict[str, Any] = dict(config.options)
    for name, value in values.items():
        if "." in name:
            method, own = name.split(".", 1)
            options[method] = {**dict(options.get(method) or {}), own: _value(value)}
        else:
            changes[name] = settings.parse_option(name, value) if isinstance(value, str) else value
    changed = replace(config, **changes, options=options)
    settings.check_methods(changed)
    return changed


def _value(text: Any) -> Any:
    """Return a method's option: a number, true or false where the words are one."""
    if not isinstance(text, str):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text


def _accuracy(config: Config, values: Mapping[str, Any], seeds: Sequence[int], folder: Path) -> float | None:
    """Return the accuracy on validation images with these values, None where a loss was no number."""
    changed = applied(config, values)
    name = hashlib.sha256(json.dumps(dict(values), sort_keys=True).encode()).hexdigest()[:12]
    accuracies = []
    for seed in seeds:
        path = folder / f"trial-{name}" / f"seed-{seed}"
        try:
            if runner.finished_summary(path) is None:
                runner.run_in_folder(replace(changed, seed=seed, run_dir=None), path, tests=False)
        except Diverged:
            return None
        rows = [row["validation"] for row in atomic_io.read_rows(path / "metrics.jsonl") if "validation" in row]
        accuracies.append(max(row["accuracy"] for row in rows))
    return statistics.fmean(accuracies)


def _write(folder: Path, config: Config, finished: Sequence[Trial], knobs: Sequence[Knob]) -> None:
    """Write the log of trials as CSV, and the configuration with the best values."""
    text = io.StringIO()
    names = [knob.name for knob in knobs]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "validation_accuracy", *names])
    for trial in finished:
        accuracy = "" if trial.accuracy is None else repr(trial.accuracy)
        values = [trial.values[name] for name in names]
        words = [escape_formula(value) if isinstance(_value(value), str) else value for value in values]
        writer.writerow([trial.number, accuracy, *words])
    files = {TABLE: text.getvalue()}
    good = [trial for trial in finished if trial.accuracy is not None]
    if good:
        best = max(good, key=lambda trial: trial.accuracy or 0.0)
        files[BEST] = settings.to_toml(applied(config, best.values))
    try:
        for name, words in files.items():
            atomic_io.write_atomically(folder / name, words.encode())
    except OSError as error:
        raise UserError(
            f"{folder}: it cannot be written ({atomic_io.error_reason(error)}); go on when it can."
        ) from error


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )

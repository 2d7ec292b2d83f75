"""A small hyperparameter search over options of a run, by its accuracy on validation images.

Optuna proposes the trials and stores its journal in the folder. Each trial is a run (or one for each seed) in a folder
named after its values, so that a trial that was stopped resumes from its checkpoint. Runs of a search have no test
images, so they cannot influence it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.config import retired
from halfmoon.config import schema as settings
from halfmoon.config.option_types import union_members
from halfmoon.config.schema import Config
from halfmoon.core import rng
from halfmoon.core.errors import Diverged, UserError, install_command
from halfmoon.core.spreadsheet import escape_formula
from halfmoon.runs import checks, runner
from halfmoon.storage import atomic_io
from halfmoon.storage.events import EventRecorder, NullRecorder
from halfmoon.storage.folder_writer import advise_for_parent
from halfmoon.storage.output_paths import check_output_folder

if TYPE_CHECKING:
    import optuna

JOURNAL_FILE = "journal.log"
"""Name of Optuna's journal in the folder of a search."""

TABLE = "trials.csv"
"""Name of the table of trials."""

BEST = "best.toml"
"""Name of the configuration with the best values."""

DEFAULT_VALIDATION_SHARE = 0.2
"""The validation share if the configuration has no validation images."""

DEFAULT_KNOBS = ("lr=3e-4..1e-2", "labeled_view=cutout,weak,plain", "server_ema=0,0.9")
"""The options that are searched if none is named."""

MAX_CHECKED_RUNS = 64
"""Largest number of combinations of values that are all checked before the first trial."""

LOG_SCALE_FACTOR = 10
"""Ranges whose ends differ by this factor or more are searched on a logarithmic scale."""


@dataclass(frozen=True)
class Knob:
    """An option that is searched. The journal identifies a search by the text of its knobs, so fields keep their names.

    Attributes:
        name: The option: "NAME", or "METHOD.NAME" for an option of a method.
        choices: The values to choose from, as texts. If empty, the option is a number.
        low: The smallest number.
        high: The largest number.
        whole: The number is an integer.
    """

    name: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False

    @classmethod
    def parse(cls, text: str) -> Knob:
        """Parse the option `--knob`: NAME=LOW..HIGH, or NAME=VALUE,VALUE,...

        Raises:
            UserError: If the text has another form, or the option is unknown or cannot be searched.
        """
        name, equal_sign, values = text.partition("=")
        method, dot, option = name.rpartition(".")
        name = f"{method}{dot}{option.replace('-', '_')}"
        if not equal_sign or not values:
            raise UserError(f"--knob {text!r} is not NAME=LOW..HIGH or NAME=VALUE,VALUE: write lr=1e-4..1e-2.")
        # The types of a method's options are not known here; `apply_values` checks their values.
        is_method_option = "." in name
        if not is_method_option and name not in settings.option_types():
            raise settings.unknown_option(name, None)
        if name in _FIXED_OPTIONS:
            raise UserError(f"--knob {name}: it cannot be searched, because it defines the search.")
        if ".." in values:
            return cls._parse_range(name, values, text)
        choices = tuple(values.split(","))
        if not is_method_option:
            for choice in choices:
                settings.parse_option(name, choice)
        if len(set(choices)) < len(choices) or len(choices) < 2:
            raise UserError(
                f"--knob {text!r}: a search needs two or more different values, or a range such as 1e-4..1e-2; to set "
                "one value, give the option itself."
            )
        return cls(name, choices)

    @classmethod
    def _parse_range(cls, name: str, values: str, text: str) -> Knob:
        """Parse LOW..HIGH, the values of the option `name`; `text` is the whole value of `--knob`, for messages."""
        low_text, _, high_text = values.partition("..")
        try:
            low = float(low_text)
            high = float(high_text)
        except ValueError as error:
            raise UserError(f"--knob {text!r}: {values!r} is no range of numbers, such as 1e-4..1e-2.") from error
        if not low < high or not math.isfinite(low) or not math.isfinite(high):
            raise UserError(f"--knob {text!r}: a range goes from a smaller to a larger number.")
        if "." in name:  # an option of a method, whose type is not known here
            return cls(name, choices=(), low=low, high=high)
        types = union_members(settings.option_types()[name])
        if int not in types and float not in types:
            raise UserError(f"--knob {text!r}: {name} is no number; name its values: {name}=A,B.")
        return cls(name, choices=(), low=low, high=high, whole=float not in types)

    @property
    def extreme_values(self) -> tuple[Any, ...]:
        """The values to choose from, or both ends of the range."""
        if self.choices:
            return self.choices
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)

    def sample(self, trial: optuna.Trial) -> Any:
        """Sample the option's value for a trial."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        if self.whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high))
        log_scale = self.low > 0 and self.high >= LOG_SCALE_FACTOR * self.low
        return trial.suggest_float(self.name, self.low, self.high, log=log_scale)


_FIXED_OPTIONS = {
    *("data", "data_dir", "cache", "method", "baselines", "seed", "split_seed", "split"),
    *("validation_share", "validation_part", "run_dir"),
}
"""Options that define the search, so that they cannot be searched."""


@dataclass(frozen=True)
class Trial:
    """A finished trial.

    Attributes:
        number: Optuna's number of the trial.
        values: The values of the knobs by name.
        accuracy: The accuracy on validation images, from 0 to 1; None if the training diverged.
    """

    number: int
    values: Mapping[str, Any]
    accuracy: float | None


def tune(
    config: Config,
    knobs: Sequence[Knob],
    trials: int,
    seeds: Sequence[int],
    folder: Path,
    display: EventRecorder = NullRecorder(),  # noqa: B008 (it has no state)
) -> list[Trial]:
    """Train trials until the folder has the requested number; a search that was stopped resumes.

    Args:
        config: The configuration of all runs.
        knobs: The options that are searched.
        trials: The number of trials, including those that the folder has; at most the number of different ones.
        seeds: The seeds of every trial. Its accuracy is the mean over seeds of the best validation accuracy.
        folder: The folder of the search.
        display: Receives an event for every finished trial.

    Returns:
        All trials in the folder, the best first.

    Raises:
        UserError: If the extra "tune" is not installed, a value is invalid for its option, or the folder contains
            another search.
    """
    optuna = _import_optuna()
    if not (config.validation_share or config.validation_part):
        config = replace(config, validation_share=DEFAULT_VALIDATION_SHARE)
    search_id = json.dumps(
        [settings.to_toml(replace(config, run_dir=None)), [str(knob) for knob in knobs], list(seeds)]
    )
    if not (folder / JOURNAL_FILE).exists():
        # Before the journal is written: it would refuse the same search with corrected options.
        _check_values(config, knobs)
        check_output_folder(folder, "run_dir")
    try:
        return _search(optuna, config, knobs, trials, seeds, folder, search_id, display)
    except OSError as error:
        raise UserError(
            f"{folder}: it cannot be written ({atomic_io.error_reason(error)}); when it can, run the search again to resume."
        ) from error


def _search(
    optuna: Any,
    config: Config,
    knobs: Sequence[Knob],
    trials: int,
    seeds: Sequence[int],
    folder: Path,
    search_id: str,
    display: EventRecorder,
) -> list[Trial]:
    """Train the trials of a search that its folder does not have, as `tune`.

    Args:
        optuna: The module.
        config: The configuration of all runs.
        knobs: The options that are searched.
        trials: The number of trials.
        seeds: The seeds of every trial.
        folder: The folder of the search.
        search_id: A text that identifies the search by its options, knobs and seeds.
        display: Receives an event for every finished trial.
    """
    study = _open_study(optuna, folder)
    # TPE starts from its seed in every process: with the same seed, a resumed search would repeat its first
    # proposals. The number of trials in the journal makes the seed a new one.
    seed = rng.derive_seed(config.seed, "tune", len(study.get_trials(deepcopy=False)))
    study.sampler = optuna.samplers.TPESampler(seed=seed % 2**32)
    stored_id = study.user_attrs.setdefault("search", search_id)
    if _without_retired_options(stored_id) != _without_retired_options(search_id):
        raise UserError(
            f"{folder} contains another search (other options, knobs or seeds)",
            option="run_dir",
            hint="choose another {run_dir}.",
        )
    study.set_user_attr("search", search_id)
    # Optuna cannot resume a trial. Trials that were stopped count as failed, and their values are next in the queue:
    # the new trial has the same values, hence the same run folder, and its run resumes from the checkpoint.
    for stopped in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        study.tell(stopped.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(stopped.params)
    combinations: list[dict[str, str]] = []  # of all values, if each knob has a list of them
    if all(knob.choices for knob in knobs):
        names = [knob.name for knob in knobs]
        combinations = [dict(zip(names, each, strict=True)) for each in product(*(knob.choices for knob in knobs))]
        trials = min(trials, len(combinations))
    while len(finished := _finished_trials(study)) < trials:
        trial = study.ask()
        values = {knob.name: knob.sample(trial) for knob in knobs}
        finished_params = [each.values for each in finished]
        if combinations and trial.params in finished_params:
            # Its result is known. Without this, a short list of values would be tried over and over.
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            study.enqueue_trial(next(each for each in combinations if each not in finished_params))
            continue
        accuracy = _train_trial(config, values, seeds, folder)
        trial.set_user_attr("diverged", accuracy is None)
        # The sampler needs a number to learn from, so a trial that diverged counts as 0.
        study.tell(trial, 0.0 if accuracy is None else accuracy)
        outcome = "diverged" if accuracy is None else f"{100 * accuracy:.2f} %"
        number = len(finished) + 1
        text = f"trial {number} of {trials}: {outcome} with {_format_values(values)}"
        display.record("trial_finished", text, trial=number, trials=trials, accuracy=accuracy)
        _write_results(folder, config, _finished_trials(study), knobs)
    _write_results(folder, config, finished, knobs)
    return sorted(finished, key=lambda trial: -1.0 if trial.accuracy is None else trial.accuracy, reverse=True)


def _check_values(config: Config, knobs: Sequence[Knob]) -> None:
    """Raise UserError if a run with some values of the knobs could not start.

    All combinations are checked if each knob has a list of values and there are at most `MAX_CHECKED_RUNS`. Otherwise
    each value, or both ends of a range, is checked with the first values of the other knobs.
    """
    for knob in knobs:
        method = knob.name.partition(".")[0]
        if "." in knob.name and method not in (config.method, config.reference):
            raise UserError(
                f"--knob {knob.name}: it has no effect, because the search trains {config.method}; search an option of that "
                "method, or of a run."
            )
    values_by_name = {knob.name: knob.extreme_values for knob in knobs}
    combinations = [
        dict(zip(values_by_name, each, strict=True))
        for each in islice(product(*values_by_name.values()), MAX_CHECKED_RUNS + 1)
    ]
    if len(combinations) > MAX_CHECKED_RUNS:
        first = {name: values[0] for name, values in values_by_name.items()}
        combinations = [{**first, name: value} for name, values in values_by_name.items() for value in values]
    configs: list[Config] = []
    for values in combinations:
        try:
            configs.append(apply_values(config, values))
        except UserError as error:
            raise _add_values(error, values) from error
    errors = checks.find_errors(configs)
    if len(errors) == len(configs) and len({str(error) for error in errors.values()}) == 1:
        raise errors[0]  # the values do not matter, but the data or another option
    for index, error in errors.items():
        raise _add_values(error, combinations[index]) from error


def _add_values(error: UserError, values: Mapping[str, Any]) -> UserError:
    """Return an error of a run, with the values of the knobs that it would have."""
    message = error.message
    if error.options and error.value is not None:
        message = f"{{{error.options[0]}}} is {error.value}: {message}"
    return UserError(f"with {_format_values(values)}: {message}", option=error.options, hint=error.hint)


def _open_study(optuna: Any, folder: Path) -> optuna.Study:
    """Open Optuna's study in a folder, to continue its search, or create it.

    Raises:
        UserError: If the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        backend = optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL_FILE))
        storage = optuna.storages.JournalStorage(backend)
    except OSError as error:
        raise UserError(f"{folder}: it cannot be written ({atomic_io.error_reason(error)}); choose another.") from error
    return optuna.create_study(storage=storage, study_name="halfmoon", direction="maximize", load_if_exists=True)


def _without_retired_options(search_id: str) -> list[Any]:
    """Parse the description of a search, without options that halfmoon has removed since it was written."""
    config, *rest = json.loads(search_id)
    return [retired.strip_ignored_lines(config), *rest]


def _import_optuna() -> Any:
    """Import Optuna, which is an optional dependency."""
    try:
        import optuna
    except ImportError as error:
        raise UserError(f"halfmoon tune needs optuna: {install_command('tune')}.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _finished_trials(study: optuna.Study) -> list[Trial]:
    """Return the finished trials of a study, in their order."""
    finished: list[Trial] = []
    for trial in study.get_trials(deepcopy=False):
        if trial.value is not None:
            accuracy = None if trial.user_attrs.get("diverged") else trial.value
            finished.append(Trial(trial.number, dict(trial.params), accuracy))
    return finished


def apply_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Set the options that a search varies (knobs) in a configuration.

    Args:
        config: The configuration.
        values: The values by the names of knobs: an option, or METHOD.OPTION for an option of a method.

    Raises:
        UserError: If a value is invalid, or the values do not fit together.
    """
    changes: dict[str, Any] = {}
    method_options: dict[str, Any] = dict(config.options)
    for name, value in values.items():
        if "." in name:
            method, option = name.split(".", 1)
            method_options[method] = {**dict(method_options.get(method) or {}), option: _parse_value(value)}
        else:
            changes[name] = settings.parse_option(name, value) if isinstance(value, str) else value
    changed = replace(config, **changes, options=method_options)
    settings.check_methods(changed)
    return changed


def _parse_value(text: Any) -> Any:
    """Parse the value of a method's option: a number, true or false if the text is one, else the text."""
    if not isinstance(text, str):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text


def _train_trial(config: Config, values: Mapping[str, Any], seeds: Sequence[int], folder: Path) -> float | None:
    """Train a trial with each seed, unless that run has finished earlier, and score it.

    Args:
        config: The configuration that the trial changes.
        values: The values of the options that the search varies, by name.
        seeds: The seeds.
        folder: The folder of the search; a trial with the same values has the same subfolder.

    Returns:
        The mean over seeds of the best validation accuracy; None if a run diverged.
    """
    changed = apply_values(config, values)
    # Sorted keys: the folder of a trial must not depend on the order of the options.
    name = hashlib.sha256(json.dumps(dict(values), sort_keys=True).encode()).hexdigest()[:12]
    accuracies = []
    for seed in seeds:
        path = folder / f"trial-{name}" / f"seed-{seed}"
        try:
            if runner.finished_summary(path) is None:
                # Without tests: a search must not see the test images.
                with advise_for_parent(folder, resumable=False):
                    runner.run_in_folder(replace(changed, seed=seed, run_dir=None), path, tests=False)
        except Diverged:
            return None
        rows = [row["validation"] for row in atomic_io.read_rows(path / "metrics.jsonl") if "validation" in row]
        accuracies.append(max(row["accuracy"] for row in rows))
    return statistics.fmean(accuracies)


def _write_results(folder: Path, config: Config, finished: Sequence[Trial], knobs: Sequence[Knob]) -> None:
    """Write the table of trials as CSV, and the configuration with the best values."""
    table = io.StringIO()
    names = [knob.name for knob in knobs]
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["trial", "validation_accuracy", *names])
    for trial in finished:
        accuracy = "" if trial.accuracy is None else repr(trial.accuracy)
        columns = []
        for name in names:
            value = trial.values[name]
            # Texts that a spreadsheet would execute as formulas are escaped; numbers stay numbers, "-1" for one.
            columns.append(escape_formula(value) if isinstance(_parse_value(value), str) else value)
        writer.writerow([trial.number, accuracy, *columns])
    files = {TABLE: table.getvalue()}
    converged = [trial for trial in finished if trial.accuracy is not None]
    if converged:
        best = max(converged, key=lambda trial: trial.accuracy or 0.0)
        files[BEST] = settings.to_toml(apply_values(config, best.values))
    try:
        for name, text in files.items():
            atomic_io.write_atomically(folder / name, text.encode())
    except OSError as error:
        raise UserError(
            f"{folder}: it cannot be written ({atomic_io.error_reason(error)}); when it can, run the search again to resume."
        ) from error


def _format_values(values: Mapping[str, Any]) -> str:
    """Format the values of a trial for a line of progress."""
    texts = [f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()]
    return ", ".join(texts)

"""Plan to try training from scratch next to heads on features: which methods, at which size, for how many rounds.

Features of a pretrained network are best for photographs and for few labels. On small images that are unlike
photographs, such as drawn digits, a small network that is trained from scratch may be ahead. So where the minutes
suffice, a plan with heads also trains from scratch, on the same folds, and the cross-validation chooses.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.methods import registry
from halfmoon.runs import factory
from halfmoon.studies.cost import RoundCost, reference_decoding_seconds
from halfmoon.studies.folds import FOLDS
from halfmoon.studies.scan_folder import FolderContents

LABELS_ONLY = "fedavg"
"""The method from scratch without unlabeled images."""

TRIAL_METHODS = (LABELS_ONLY, "fedavg-control", "fedavg-soft-labels")
"""The methods of a trial: labels only, its control, and one with unlabeled images."""

MAX_SIDE = 64
"""Pixels of the longer side up to which images are small enough to train from scratch."""

MIN_LABELS = 10
"""Labels a class from which on training from scratch may win."""

MIN_ROUNDS = 60
"""Rounds below which a model from scratch says little about the method."""

MAX_ROUNDS = 200
"""Rounds of a trial where the minutes allow more."""

MIN_AVERAGED_ROUNDS = 100
"""Rounds from which on the moving average of the server's models is used."""


@dataclass(frozen=True)
class ScratchTrial:
    """Training from scratch that is tried next to heads on features.

    Attributes:
        config: the configuration of all runs; its method and baselines are those that are tried.
        splits: the number of splits.
        site: whether the images are a site's folder. Its splits are folds, and a method that wins is trained again on
            all labels. Of class folders the first split is the run itself.
    """

    config: Config
    splits: int
    site: bool

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the methods."""
        return (self.config.method, *self.config.baselines)

    @property
    def runs(self) -> int:
        """The largest number of runs."""
        return count_runs(len(self.methods), self.splits, self.site)


class TrialChoice(NamedTuple):
    """Whether a plan tries training from scratch, and why.

    Attributes:
        trial: the trial; None for none.
        reason: the reason, as text for the plan.
        seconds: the expected seconds of the trial on this computer.
    """

    trial: ScratchTrial | None
    reason: str
    seconds: float


def count_runs(methods: int, splits: int, site: bool) -> int:
    """Count the runs of a trial: each method on each split, and on a site's folder the best one on all labels."""
    return methods * splits + int(site)


def choose_trial(
    config: Config,
    contents: FolderContents,
    check: Callable[[Config], None],
    measure: Callable[[Config], RoundCost],
    seconds_left: float,
    labels_per_class: float,
    requested: bool | None = None,
) -> TrialChoice:
    """Choose whether a plan with heads also tries training from scratch, and for how many rounds.

    Small images (`MAX_SIDE`), `MIN_LABELS` labels a class and `MIN_ROUNDS` rounds within the time make it likely enough
    that a model from scratch wins. The rounds follow from the costs on the reference computer, so that the same command
    gives the same model on any computer.

    Args:
        config: the configuration of the runs from scratch; its method and baselines are those to try. Its rounds and
            its average of the server's models are replaced.
        contents: the scanned folder.
        check: raises UserError if the images do not suffice to train from scratch.
        measure: measures the cost of a round of a configuration's method.
        seconds_left: the time limit without the time of the heads, on the reference computer.
        labels_per_class: the mean number of labels a class.
        requested: whether the user wants a trial; None to decide.

    Raises:
        UserError: a trial is requested, and the images do not suffice.
    """
    hint = "--scratch-trial tries it"
    if requested is False:
        return TrialChoice(None, "not tried, as you said", 0.0)
    if requested is None and contents.side > MAX_SIDE:
        reason = f"not tried: images of more than {MAX_SIDE} pixels are mostly better on features ({hint})"
        return TrialChoice(None, reason, 0.0)
    if requested is None and labels_per_class < MIN_LABELS:
        reason = f"not tried: below {MIN_LABELS} labels a class features are better ({hint})"
        return TrialChoice(None, reason, 0.0)
    try:
        check(config)
    except UserError as error:
        if requested:
            raise
        return TrialChoice(None, f"not tried: {error}", 0.0)
    methods = (config.method, *config.baselines)
    costs = {name: measure(replace(config, method=name, baselines=())) for name in methods}
    files = len(contents.paths) + contents.tests
    seconds_left -= files * reference_decoding_seconds(contents.sizes)
    reference = [cost.reference_seconds for cost in costs.values()]
    # Each split trains all methods. Of a site's folder the best one, at most the costliest, is trained on all labels, too.
    seconds_per_round = FOLDS * sum(reference) + contents.site * max(reference)
    rounds = int(seconds_left / seconds_per_round) // 10 * 10
    if rounds < MIN_ROUNDS and requested is None:
        missing_minutes = (MIN_ROUNDS * seconds_per_round - seconds_left) / 60
        reason = f"not tried: it needs about {math.ceil(missing_minutes)} more minutes (--minutes; {hint})"
        return TrialChoice(None, reason, 0.0)
    rounds = min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)
    # The moving average of the server's models lags behind in a short training.
    server_ema = config.server_ema if rounds >= MIN_AVERAGED_ROUNDS else 0.0
    trial = ScratchTrial(
        config=replace(config, rounds=rounds, evaluate_every=rounds, server_ema=server_ema),
        splits=FOLDS,
        site=contents.site,
    )
    seconds = [cost.run_seconds(rounds, rounds) for cost in costs.values()]
    trial_seconds = FOLDS * sum(seconds) + contents.site * max(seconds)
    titles = ", ".join(registry.entry(name).title for name in methods)
    side = config.resize or contents.side
    splits = f"{FOLDS} folds of the same cross-validation" if contents.site else f"{FOLDS} draws of the labels"
    reason = (
        f"tried as well, on {splits} that also judge the heads: {titles}; {factory.network_name(config)} for {rounds} "
        f"rounds at {side} x {side} pixels; at most {trial_seconds / 60:.1f} minutes, less if one side is soon ahead; the "
        f"better model is used (--no-scratch-trial leaves this out)"
    )
    return TrialChoice(trial, reason, trial_seconds)

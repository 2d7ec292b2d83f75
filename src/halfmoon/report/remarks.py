"""Remarks for the table of a comparison: the budget, the gain, and problems that make methods incomparable."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from halfmoon.report.tables import is_tie, mean_and_deviation

LABELS_ONLY = "fedavg"
"""Name of the method that trains on labeled images only."""

CONTROL = "fedavg-control"
"""Name of the method that trains on labeled images only, with all images in batch normalization.

Gains are reported against it where it was run: the gain over labels only mixes the effect of pseudo-labels with that of
unlabeled images in batch normalization.
"""

NO_UPPER_BOUND = "no upper bound here: more rounds or another learning rate would be needed"
"""Description of a run with all labels that is worse than another method."""

UNUSED_SHARE = 0.01
"""Largest share of used pseudo-labels in any round at which they count as unused."""


def summarize_pseudo_labels(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Summarize the share of a run's pseudo-labels that its loss used, because they were confident enough.

    Args:
        rows: the rounds of metrics.jsonl.

    Returns:
        "used": mean of the share over rounds, and "most_used": its maximum, both from 0 to 1; {} if no pseudo-label was
        computed.
    """
    pseudo = [row["pseudo"] for row in rows if isinstance(row.get("pseudo"), dict)]
    shares = [entry["share_used"] for entry in pseudo if isinstance(entry.get("share_used"), float)]
    return {"used": statistics.fmean(shares), "most_used": max(shares)} if shares else {}


def list_remarks(summaries: Sequence[Mapping[str, Any]], ceilings: Collection[str]) -> list[str]:
    """List what a reader of the table of several runs should know to interpret it, in a sentence each.

    Args:
        summaries: summary.json of each run.
        ceilings: names of the methods that train with all labels.
    """
    # Budgets and upper bounds matter only where methods are compared.
    if len({summary["method"] for summary in summaries}) < 2:
        return [*_find_untrained(summaries), *_find_unused_pseudo_labels(summaries)]
    return [
        *_describe_budget(summaries),
        *_find_low_upper_bounds(summaries, ceilings),
        *_find_untrained(summaries),
        *_find_unused_pseudo_labels(summaries),
    ]


def _describe_budget(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe in a sentence how long the methods of a table trained relative to each other; [] if no run records it.

    With the rule "none" each method trains as long as its batch sizes and epochs give. With another rule all get the
    amount of the reference method: of steps on labeled images, or of images in forward passes.
    """
    budgets = {
        (summary["budget"]["rule"], summary["budget"]["reference"]) for summary in summaries if "budget" in summary
    }
    # Without a rule the reference has no effect, so it may differ.
    if len(budgets) > 1 and {rule for rule, _ in budgets} != {"none"}:
        return ["Budget: it differs between the runs."]
    for rule, reference in budgets:
        if rule == "none":
            return ["Budget: each method trained for the steps that its batch rule gives."]
        unit = {"labeled-steps": "labeled steps", "forwards": "images through the classifier"}[rule]
        return [f"Budget: each method has as many {unit} as {reference} by its batch rule."]
    return []


def _find_low_upper_bounds(summaries: Sequence[Mapping[str, Any]], ceilings: Collection[str]) -> list[str]:
    """Remark on upper bounds, methods that train with all labels, that are not above the method with labels only.

    Args:
        summaries: summary.json of each run.
        ceilings: names of the methods that train with all labels.
    """
    floor = _mean_final_accuracy([summary for summary in summaries if summary["method"] == LABELS_ONLY])
    sentences = []
    for runs in _group_by_method([summary for summary in summaries if summary["method"] in ceilings]):
        top = _mean_final_accuracy(runs)
        if floor is not None and top is not None and top <= floor:
            sentences.append(
                f"{runs[0]['title']} has {100 * top:.1f} %, not more than labels only ({100 * floor:.1f} %): unlabeled "
                "images have no possible gain here, so methods cannot be compared. First train all labels better: more "
                "rounds, a larger or a decaying learning rate (schedule cosine), a wider network."
            )
    return sentences


def _find_untrained(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Remark on methods that are not better than always predicting the most frequent class of the test images."""
    sentences = []
    for runs in _group_by_method(summaries):
        end = _mean_final_accuracy(runs)
        counts = [sum(row) for row in runs[0].get("confusion") or []]  # test images of each true class
        chance = max(counts) / sum(counts) if any(counts) else 0.0
        if end is not None and end <= chance:
            sentences.append(
                f"{runs[0]['title']} is right on {100 * end:.1f} % of the test images; always predicting the most "
                f"frequent class is right on {100 * chance:.1f} %. Train longer, or label more images."
            )
    return sentences


def _find_unused_pseudo_labels(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the methods of which hardly any pseudo-label was used in any round of any seed."""
    sentences = []
    for runs in _group_by_method(summaries):
        shares = [summary["most_used"] for summary in runs if summary.get("most_used") is not None]
        # A method without pseudo-labels, a run that did not measure them, or one that used some.
        if not shares or len(shares) < len(runs) or max(shares) > UNUSED_SHARE:
            continue
        if max(shares) > 0:
            passed = f"at most {100 * max(shares):.1f} % of the pseudo-labels of a round passed"
        else:
            passed = "no pseudo-label passed"
        sentences.append(
            f"{runs[0]['title']}: {passed} the confidence threshold, so its loss was that of labels only. Any gain over "
            f"labels only is due to batch normalization (compare with {CONTROL}). Lower the threshold, let it follow "
            "the model (thresholding), or train longer."
        )
    return sentences


def _group_by_method(summaries: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for summary in summaries:
        groups.setdefault(summary["method"], []).append(summary)
    return [*groups.values()]


def _mean_final_accuracy(summaries: Sequence[Mapping[str, Any]]) -> float | None:
    ends = [summary["accuracy"]["last"] for summary in summaries if summary["accuracy"] is not None]
    return mean_and_deviation(ends).mean if ends else None


def describe_gain(summaries: Sequence[Mapping[str, Any]], ceilings: Collection[str]) -> str | None:
    """Describe the gain of the first method with unlabeled images, relative to the gain of all labels.

    The gain is that of the last round, in the mean over seeds, over the control if it was run, otherwise over labels
    only. If both were run, a second sentence reports the gain of the control over labels only.

    Args:
        summaries: summary.json of each run.
        ceilings: names of the methods that train with all labels.

    Returns:
        The sentences; None if one of these methods was not run, or all labels are not better than the reference.
    """
    accuracies: dict[str, list[float]] = {}
    titles = {summary["method"]: summary["title"] for summary in summaries}
    for summary in summaries:
        accuracy = summary["accuracy"]
        if accuracy is not None:
            accuracies.setdefault(summary["method"], []).append(100 * accuracy["last"])
    means = {name: mean_and_deviation(values).mean for name, values in accuracies.items()}  # in the order of the runs
    top = next((name for name in means if name in ceilings), None)
    is_compared = (name for name in means if name not in (LABELS_ONLY, CONTROL) and name not in ceilings)
    name = next(is_compared, None)  # the first method with unlabeled images
    base = CONTROL if CONTROL in means else LABELS_ONLY
    if base not in means or top is None or name is None:
        return None
    possible_gain = means[top] - means[base]
    gain = means[name] - means[base]
    if possible_gain <= 0:
        return None
    seeds = f", in the mean of {len(accuracies[name])} seeds" if len(accuracies[name]) > 1 else ""
    if is_tie(means[name], means[base]):
        sentence = f"{titles[name]} has the same accuracy as {titles[base]}{seeds}."
    elif gain < 0:
        sentence = f"{titles[name]} is {-gain:.1f} points below {titles[base]}{seeds}."
    elif gain > possible_gain:
        above_top = f"{gain - possible_gain:.1f} above {titles[top]}{seeds}"
        sentence = f"{titles[name]} is {gain:.1f} points above {titles[base]} and {above_top}. All labels are {NO_UPPER_BOUND}."
    else:
        sentence = (
            f"{titles[name]} gained {gain:.1f} of the {possible_gain:.1f} points between {titles[base]} and "
            f"{titles[top]}{seeds}."
        )
    return f"{sentence}{_describe_control(means, titles)}"


def _describe_control(means: Mapping[str, float], titles: Mapping[str, str]) -> str:
    """Describe the gain of the control over labels only; "" if one of them was not run."""
    if CONTROL not in means or LABELS_ONLY not in means:
        return ""
    effect = "this is the effect of unlabeled images in batch normalization."
    if is_tie(means[CONTROL], means[LABELS_ONLY]):
        return f" {titles[CONTROL]} has the same accuracy as {titles[LABELS_ONLY]}: {effect}"
    gain = means[CONTROL] - means[LABELS_ONLY]
    return f" {titles[CONTROL]} is {abs(gain):.1f} points {'above' if gain > 0 else 'below'} {titles[LABELS_ONLY]}: {effect}"

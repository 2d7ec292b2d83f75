"""What a comparison has to say beside its numbers: whose budget it had, what was won, what keeps it from being one."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from halfmoon.report.tables import mean_and_deviation

LABELS_ONLY = "fedavg"
"""Name of the method that trains on labeled images only."""
CONTROL = "fedavg-control"
"""Name of the method that trains on labeled images only, with all images in batch normalization.

Gains are reported against it where it was run: the gain over labels only mixes the effect of pseudo-labels with that of
unlabeled images in batch normalization.
"""
NO_UPPER_BOUND = "no upper bound here: more rounds or another rate would be needed"
"""What all labels are where something ends above them."""
UNUSED_SHARE = 0.01
"""Nobody passes a threshold that this share of the images, at most, has passed in every round."""


def summarize_pseudo_labels(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Summarize the share of a run's pseudo-labels that its loss used.

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
    """Return a sentence for each thing that a reader of several runs' table has to know.

    `ceilings` are the names of methods that have all labels.
    """
    if len({summary["method"] for summary in summaries}) < 2:
        return [*_find_untrained(summaries), *_find_unused_pseudo_labels(summaries)]
    return [
        *_describe_budget(summaries),
        *_find_low_upper_bounds(summaries, ceilings),
        *_find_untrained(summaries),
        *_find_unused_pseudo_labels(summaries),
    ]


def _describe_budget(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    budgets = {
        (summary["budget"]["rule"], summary["budget"]["reference"]) for summary in summaries if "budget" in summary
    }
    if len(budgets) > 1 and {rule for rule, _ in budgets} != {"none"}:
        return ["Budget: the runs had different ones."]
    for rule, reference in budgets:
        if rule == "none":
            return ["Budget: each method took what the batch rule gives it."]
        what = {"labeled-steps": "labeled steps", "forwards": "images through the classifier"}[rule]
        return [f"Budget: as many {what} for all as {reference} takes by its own rule."]
    return []


def _find_low_upper_bounds(summaries: Sequence[Mapping[str, Any]], ceilings: Collection[str]) -> list[str]:
    """Say where all labels end below labels alone."""
    floor = _mean_final_accuracy([summary for summary in summaries if summary["method"] == LABELS_ONLY])
    sentences = []
    for runs in _group_by_method([summary for summary in summaries if summary["method"] in ceilings]):
        top = _mean_final_accuracy(runs)
        if floor is not None and top is not None and top <= floor:
            sentences.append(
                f"{runs[0]['title']} ends at {100 * top:.1f} %, not above labels alone ({100 * floor:.1f} %): there is "
                "nothing for unlabeled images to win here, and no method can be judged. First make all labels learn: "
                "more rounds, a larger or a decaying learning rate (schedule cosine), a wider network."
            )
    return sentences


def _find_untrained(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say which methods are not above what the commonest class of the test images alone would give."""
    sentences = []
    for runs in _group_by_method(summaries):
        end = _mean_final_accuracy(runs)
        counts = [sum(row) for row in runs[0].get("confusion") or []]
        chance = max(counts) / sum(counts) if any(counts) else 0.0
        if end is not None and end <= chance:
            sentences.append(
                f"{runs[0]['title']} is right on {100 * end:.1f} % of the test images; always naming the commonest "
                f"class would be on {100 * chance:.1f} %. Train longer, or label more images."
            )
    return sentences


def _find_unused_pseudo_labels(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the methods of which hardly any pseudo-label was used in any round of any seed."""
    sentences = []
    for runs in _group_by_method(summaries):
        shares = [summary["most_used"] for summary in runs if summary.get("most_used") is not None]
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
    """Describe the gain of the first method with unlabeled images, as a part of the way to all labels.

    The gain is that of the last round, in the mean over seeds, and starts at the control if it was run, otherwise at
    labels only. If both were run, a second sentence reports the gain of the control over labels only.

    Args:
        summaries: summary.json of each run.
        ceilings: names of the methods that train with all labels.

    Returns:
        The sentences; None if the start, the method or all labels were not run, or all labels end below the start.
    """
    accuracies: dict[str, list[float]] = {}
    titles = {summary["method"]: summary["title"] for summary in summaries}
    for summary in summaries:
        accuracy = summary["accuracy"]
        if accuracy is not None:
            accuracies.setdefault(summary["method"], []).append(100 * accuracy["last"])
    means = {name: mean_and_deviation(values).mean for name, values in accuracies.items()}
    tops = [name for name in means if name in ceilings]
    others = [name for name in means if name not in (LABELS_ONLY, CONTROL) and name not in ceilings]
    base = CONTROL if CONTROL in means else LABELS_ONLY
    if base not in means or not tops or not others:
        return None
    top = tops[0]
    name = others[0]
    possible_gain = means[top] - means[base]
    gain = means[name] - means[base]
    if possible_gain <= 0:
        return None
    seeds = f", in the mean of {len(accuracies[name])} seeds" if len(accuracies[name]) > 1 else ""
    if gain < 0:
        sentence = f"{titles[name]} ended {-gain:.1f} points below {titles[base]}{seeds}."
    elif gain > possible_gain:
        above_top = f"{gain - possible_gain:.1f} above {titles[top]}{seeds}"
        sentence = f"{titles[name]} ended {gain:.1f} points above {titles[base]} and {above_top}. All labels are {NO_UPPER_BOUND}."
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
    gain = means[CONTROL] - means[LABELS_ONLY]
    return (
        f" {titles[CONTROL]} ended {abs(gain):.1f} points {'above' if gain >= 0 else 'below'} {titles[LABELS_ONLY]}: "
        "that is the effect of unlabeled images in batch normalization."
    )

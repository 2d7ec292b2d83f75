"""What a comparison has to say beside its numbers: whose budget it had, what was won, what keeps it from being one."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from halfmoon.report.tables import mean_and_deviation

LABELS_ONLY = "fedavg"
"""The method that learns from labels alone."""
NO_UPPER_BOUND = "no upper bound here: more rounds or another rate would be needed"
"""What all labels are where something ends above them."""
UNUSED_SHARE = 0.01
"""Nobody passes a threshold that this share of the images, at most, has passed in every round."""


def max_share_used(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the largest share of pseudo-labels that counted in a round; None of a method without any."""
    pseudo = [row["pseudo"] for row in rows if isinstance(row.get("pseudo"), dict)]
    shares = [row["share_used"] for row in pseudo if isinstance(row.get("share_used"), float)]
    return max(shares, default=None)


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
    """Say of which methods hardly a pseudo-label has counted in any round of any seed."""
    sentences = []
    for runs in _group_by_method(summaries):
        shares = [summary["most_used"] for summary in runs if summary.get("most_used") is not None]
        if shares and len(shares) == len(runs) and max(shares) <= UNUSED_SHARE:
            most = max(shares)
            passed = (
                f"at most {100 * most:.1f} % of the pseudo-labels of a round passed"
                if most
                else "no pseudo-label passed"
            )
            sentences.append(
                f"{runs[0]['title']}: {passed} the confidence threshold, so it learned from labels alone: lower its "
                "threshold, let it follow the model (thresholding), or train longer."
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
    """Return what the first other method won between labels alone and all labels, in the mean over its seeds.

    `ceilings` are the names of methods that have all labels. It is said of the last round. None where one of the three
    was not played, or all labels end below labels alone.
    """
    ends: dict[str, list[float]] = {}
    titles = {summary["method"]: summary["title"] for summary in summaries}
    for summary in summaries:
        accuracy = summary["accuracy"]
        if accuracy is not None:
            ends.setdefault(summary["method"], []).append(100 * accuracy["last"])
    means = {name: mean_and_deviation(values).mean for name, values in ends.items()}
    tops = [name for name in means if name in ceilings]
    others = [name for name in means if name != LABELS_ONLY and name not in ceilings]
    if LABELS_ONLY not in means or not tops or not others:
        return None
    top, name = tops[0], others[0]
    whole, won = means[top] - means[LABELS_ONLY], means[name] - means[LABELS_ONLY]
    if whole <= 0:
        return None
    over = f", in the mean of {len(ends[name])} seeds" if len(ends[name]) > 1 else ""
    if won < 0:
        return f"{titles[name]} ended {-won:.1f} points below {titles[LABELS_ONLY]}{over}."
    if won > whole:
        above = f"{won:.1f} points above {titles[LABELS_ONLY]} and {won - whole:.1f} above {titles[top]}{over}"
        return f"{titles[name]} ended {above}. All labels are {NO_UPPER_BOUND}."
    return (
        f"{titles[name]} won {won:.1f} of the {whole:.1f} points between {titles[LABELS_ONLY]} and {titles[top]}{over}."
    )

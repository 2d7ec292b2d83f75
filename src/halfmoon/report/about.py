"""What runs were made on, in words: the data set by its name, the split, how many labels, which seeds."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from halfmoon.report.run_reader import Run


def data_name(value: object, parts: int = 1) -> str:
    """Return the name of a data set: of a folder its last `parts`, never the whole path of a machine."""
    words = str(value).rstrip("/\\")
    return "/".join(PurePath(words.replace("\\", "/")).parts[-parts:]) or words


def split_words(options: Mapping[str, Any]) -> str:
    """Return how a split was made: its setting, clients and concentration, as far as the options say."""
    setting = str(options.get("setting", ""))
    alpha = options.get("dirichlet_alpha")
    parts = [setting] if setting else []
    if alpha is not None and ("dir" in setting or "fedloke" in setting):
        parts[-1:] = [f"{setting} (\N{GREEK SMALL LETTER ALPHA} = {alpha:g})"]
    if isinstance(options.get("clients"), int):
        parts.append(f"{options['clients']} clients")
    return ", ".join(parts)


def label_words(runs: Iterable[Run]) -> str:
    """Return how many labels there are, "" where no run says it, or they differ."""
    counts = {(run.split or {}).get("counts", {}).get("labeled") for run in runs}
    (count,) = counts if len(counts) == 1 else (None,)
    return "" if count is None else f"{count:,} labels"


def seed_words(runs: Iterable[Run]) -> str:
    """Return the seeds, the first few by number."""
    numbers = {run.options.get("seed", 0) for run in runs}
    seeds = sorted(n for n in numbers if isinstance(n, int))
    if len(seeds) > 1 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}" if seeds else ""


def described(runs: Sequence[Run]) -> str:
    """Return a line for a picture's head: data, split, labels and seeds, as far as all runs share them."""
    first, *others = [run.options for run in runs]
    shared = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    parts = [data_name(shared["data"]) if shared.get("data") else "", split_words(shared)]
    return " \N{MIDDLE DOT} ".join(part for part in [*parts, label_words(runs), seed_words(runs)] if part)

"""The leaderboard: the summaries of committed sweeps as one Markdown page, every number beside the published one."""

from __future__ import annotations

from pathlib import Path

from halfmoon.core.errors import UserError
from halfmoon.report.scores import Mark, Score, final, order
from halfmoon.report.study import SWEEP, Column, Study, read_sweep, scale_words
from halfmoon.report.tables import Spread
from halfmoon.storage import atomic_io

SWEEPS = "sweeps"
"""The folder below `results` that holds a sweep.json, and perhaps a note, of every committed sweep."""

JUDGED = ("difference", "within 2 sd")
"""What only an experiment of the paper's size is told."""

HEAD = """# Results beside the published ones

Test accuracy in percent: the last round and the best one, mean ± sample standard deviation over seeds. `within 2 sd`
says whether the mean of the last rounds lies within two standard deviations of the published mean, the two deviations
taken together. A sweep with a **scale** is not the paper's experiment: its numbers cannot be compared with the
published ones, only its order can.
Written by `halfmoon leaderboard` from `results/sweeps`; a test demands that both agree.
"""


def add(folder: Path, results: Path) -> Path:
    """Copy the summaries of a sweep's folder into `results`, and return the new file.

    Raise UserError where the folder holds no sweep, or none of its runs is finished, or the file cannot be written.
    """
    if not (folder / SWEEP).is_file():
        raise UserError(f"{folder} is not the folder of a sweep: it has no {SWEEP}; give what halfmoon sweep printed.")
    study = read_sweep(folder / SWEEP)
    if not any(study.finished()):
        raise UserError(f"{folder}: none of its runs is finished; run the sweep first.")
    target = results / SWEEPS / f"{folder.resolve().name}.json"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_io.replace(target, atomic_io.read(folder / SWEEP) or b"")
    except OSError as error:
        raise UserError(
            f"{target}: it cannot be written ({atomic_io.reason(error)}); choose another --results."
        ) from error
    return target


def board(results: Path) -> str:
    """Return the page of all sweeps in a folder `results`, those of one paper together.

    A file NAME.md beside NAME.json is what its makers say of it. Raise UserError where there is no sweep, or where one
    cannot be read.
    """
    files = sorted((results / SWEEPS).glob("*.json"))
    if not files:
        raise UserError(f"{results / SWEEPS} holds no sweep; add one with halfmoon leaderboard --add SWEEP.")
    studies = sorted(((read_sweep(file), file) for file in files), key=lambda each: (each[0].sweep.paper, each[1].name))
    parts = [HEAD]
    for study, file in studies:
        note = file.with_suffix(".md")
        parts.append(_section(study, note.read_text(encoding="utf-8") if note.exists() else ""))
    return "\n".join(parts)


def _section(study: Study, note: str) -> str:
    sweep, score = study.sweep, final(study)
    lines = [f"## {sweep.title}{f' ({sweep.scale.name})' if sweep.scale else ''}", "", f"{_sentence(sweep.about)}", ""]
    if sweep.scale:
        lines += [f"**{scale_words(sweep.scale)}**", ""]
    if sweep.reading:
        lines += [f"Reading: {sweep.reading}", ""]
    for column in study.columns:
        lines += _column(study, score, column)
    if note:
        lines += [note.strip(), ""]
    lines += ["```console", *(f"$ {line}" for line in sweep.command.splitlines()), "```", "", _machine(study), ""]
    return "\n".join(lines)


def _column(study: Study, score: Score, column: Column) -> list[str]:
    rows = [(value.title, score.mark(value.name, column)) for value in study.row_values]
    rows = [(title, mark) for title, mark in rows if mark.last or mark.planned]
    if not rows:
        return []
    lines = [f"### {study.column_title(column)}", ""] if column else []
    full = study.sweep.scale is None
    heads = [study.sweep.rows, "last %", "best %", "published %", *(JUDGED if full else ()), "seeds"]
    lines += [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    lines += [f"| {' | '.join([_cell(title), *_cells(mark, full)])} |" for title, mark in rows]
    found = order(study, score, column)
    if len(found.published) > 1:
        tau = "" if found.tau is None else f" (Kendall's tau {found.tau:.2f})"
        lines += ["", f"Published order: {' > '.join(found.published)}.", ""]
        lines += [f"Measured order{tau}: {' > '.join(found.measured)}."]
    return [*lines, ""]


def _cells(mark: Mark, full: bool) -> list[str]:
    published = Spread(mark.published.mean, mark.published.deviation) if mark.published else None
    judged = mark.verdict
    word = "" if judged is None or judged.within is None else "yes" if judged.within else "no"
    verdict = ["" if judged is None else f"{judged.difference:+.2f}", word] if full else []
    return [*map(_spread, (mark.last, mark.best, published)), *verdict, f"{mark.seeds} of {mark.planned}"]


def _spread(value: Spread | None) -> str:
    if value is None:
        return ""
    return f"{value.mean:.2f}" if value.deviation is None else f"{value.mean:.2f} ± {value.deviation:.2f}"


def _machine(study: Study) -> str:
    machine, versions = study.sweep.machine, study.sweep.versions
    seconds = [entry.seconds for _, entry in study.finished() if entry.seconds is not None]
    cores = machine.get("cores", "?")
    parts = [f"{cores} {'core' if cores == 1 else 'cores'} of {machine.get('cpu') or 'an unknown processor'}"]
    parts += [str(machine["gpu"])] if machine.get("gpu") else ["no GPU"]
    parts += [f"{name} {version}" for name, version in versions.items()]
    took = f"; {len(seconds)} runs, {sum(seconds) / 60:.0f} minutes in all" if seconds else ""
    return f"Machine: {', '.join(parts)}{took}."


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


def _cell(words: str) -> str:
    return words.replace("|", "\\|")

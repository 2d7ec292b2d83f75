"""The leaderboard: the summaries of committed sweeps as one Markdown page, every number beside the published one."""

from pathlib import Path

from halfmoon.core.errors import UserError
from halfmoon.report.scores import Mark, Score, final, order
from halfmoon.report.study import SWEEP, Column, Study, read_sweep, scale_words
from halfmoon.report.tables import plus_minus
from halfmoon.storage import atomic_io

BAR = "\\|"
SWEEPS = "sweeps"
"""The folder below `results` that holds a sweep.json, and perhaps a note, of every committed sweep."""

VERDICT = ("difference", "within 2 sd")
"""The columns that only an experiment of the paper's size has."""

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
        raise UserError(
            f"{results / SWEEPS} holds no sweep; play one with halfmoon sweep, or give its folder as --add."
        )
    studies = sorted(((read_sweep(file), file) for file in files), key=lambda pair: (pair[0].sweep.paper, pair[1].name))
    parts = [HEAD]
    for study, file in studies:
        note = file.with_suffix(".md")
        try:
            words = note.read_text(encoding="utf-8") if note.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{note} cannot be read ({error}): save it as a text file in UTF-8.") from error
        parts.append(_section(study, words))
    return "\n".join(parts)


def _section(study: Study, note: str) -> str:
    sweep, score = study.sweep, final(study)
    sentence = f"{sweep.about[:1].upper()}{sweep.about[1:].rstrip('.')}."
    lines = [f"## {sweep.title}{f' ({sweep.scale.name})' if sweep.scale else ''}", "", sentence, ""]
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
    heads = [study.sweep.rows, "last %", "best %", "published %", *(VERDICT if full else ()), "seeds"]
    lines += [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for title, mark in rows:
        lines.append(f"| {' | '.join([title.replace('|', BAR), *_cells(mark, full)])} |")
    ranking = order(study, score, column)
    if len(ranking.published) > 1:
        kendall = f" (Kendall's tau {ranking.agreement})" if ranking.agreement else ""
        lines += ["", f"Published order: {' > '.join(ranking.published)}.", ""]
        lines += [f"Measured order{kendall}: {' > '.join(ranking.measured)}."]
    return [*lines, ""]


def _cells(mark: Mark, full: bool) -> list[str]:
    words = ["", ""]
    if mark.verdict:
        words = [f"{mark.verdict.difference:+.2f}", {True: "yes", False: "no", None: ""}[mark.verdict.within]]
    numbers = [plus_minus(value) for value in (mark.last, mark.best, mark.published)]
    return [*numbers, *(words if full else ()), f"{mark.seeds} of {mark.planned}"]


def _machine(study: Study) -> str:
    machine, versions = study.sweep.machine, study.sweep.versions
    seconds = [entry.seconds for _, entry in study.finished() if entry.seconds is not None]
    cores = machine.get("cores", "?")
    parts = [f"{cores} {'core' if cores == 1 else 'cores'} of {machine.get('cpu') or 'an unknown processor'}"]
    parts += [str(machine["gpu"])] if machine.get("gpu") else ["no GPU"]
    parts += [f"{name} {version}" for name, version in versions.items()]
    took = f"; {len(seconds)} runs, {sum(seconds) / 60:.0f} minutes in all" if seconds else ""
    return f"Machine: {', '.join(parts)}{took}."

"""Write results/published.md: the committed sweeps next to the published numbers.

python tools/leaderboard.py --add runs/feddure-table1-small   # copy the summary of a sweep, then write the page
python tools/leaderboard.py --check                           # exit with 1 if page and summaries differ
"""

import argparse
import gzip
import sys
import tempfile
from pathlib import Path

from halfmoon.core.errors import UserError
from halfmoon.report.scores import CellScore, ScoreTable, compare_order, final_scores
from halfmoon.report.study import SWEEP_FILE, Column, Study, describe_scale, read_sweep
from halfmoon.report.tables import format_mean
from halfmoon.storage import atomic_io

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PAGE = RESULTS / "published.md"
SWEEPS = "sweeps"
"""Folder in `results` with NAME.json.gz, a copy of sweep.json, and an optional note NAME.md of every committed sweep."""

VERDICT = ("difference", "within 2 sd")
"""Columns that are shown only for experiments of the paper's size."""

HEAD = """# Results next to the published ones

Small versions of five papers' tables show few of the published gains of semi-supervised methods. Only in SemiFL's
Table 2 is the order of the methods the published one. The runs have far fewer rounds, images and labels than those of
the papers, so they do not refute the published numbers.

The tables show test accuracy in percent in the last round and in the best one, mean ± sample standard deviation over
seeds. `within 2 sd` is "yes" if the mean of the last rounds is within two standard deviations of the published mean;
the standard deviation is that of the difference of both means. A table with a **scale** is not the paper's experiment:
compare only the order of its methods with the published order, not its numbers. Kendall's tau is 1 if both orders are
equal and -1 if one is the reverse of the other.

This page is written by `tools/leaderboard.py` from `results/sweeps`, and a test compares both.
"""

INTERPRETATION = "Interpretation of the paper: "
"""Start of the paragraph on details that the paper leaves open. A note that starts with it replaces the sweep's text."""


def add(folder: Path, results: Path) -> Path:
    """Copy the sweep.json of a sweep's folder into `results`, compressed, and return the new file.

    Raises:
        UserError: if the folder contains no sweep, no run is finished, or the file cannot be written.
    """
    if not (folder / SWEEP_FILE).is_file():
        raise UserError(
            f"{folder} is not the folder of a sweep: it has no {SWEEP_FILE}; give the folder that halfmoon sweep "
            "printed."
        )
    study = read_sweep(folder / SWEEP_FILE)
    if not any(study.finished()):
        raise UserError(f"{folder}: none of its runs is finished; run the sweep first.")
    target = results / SWEEPS / f"{folder.resolve().name}.json.gz"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        content = atomic_io.read(folder / SWEEP_FILE) or b""
        atomic_io.write_atomically(target, gzip.compress(content, mtime=0))
    except OSError as error:
        raise UserError(f"{target} cannot be written ({atomic_io.error_reason(error)}).") from error
    return target


def read_compressed_sweep(file: Path) -> Study:
    """Read a NAME.json.gz.

    Raises:
        UserError: if it cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.stem
        try:
            copy.write_bytes(gzip.decompress(file.read_bytes()))
        except (OSError, EOFError) as error:
            raise UserError(f"{file} cannot be read ({error}).") from error
        return read_sweep(copy)


def format_page(results: Path) -> str:
    """Format all sweeps in a folder `results` as one Markdown page, sorted by paper.

    A file NAME.md next to NAME.json.gz is appended to the section of that sweep. Its first paragraph replaces the
    sweep's interpretation of the paper if it starts with `INTERPRETATION`.

    Raises:
        UserError: if there is no sweep, or one cannot be read.
    """
    files = sorted((results / SWEEPS).glob("*.json.gz"))
    if not files:
        raise UserError(f"{results / SWEEPS} contains no sweep; give the folder of one as --add.")
    studies = sorted(
        ((read_compressed_sweep(file), file) for file in files), key=lambda pair: (pair[0].sweep.paper, pair[1].name)
    )
    parts = [HEAD]
    for study, file in studies:
        note = file.with_name(file.name.replace(".json.gz", ".md"))
        try:
            note_text = note.read_text(encoding="utf-8") if note.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{note} cannot be read ({error}): save it as a text file in UTF-8.") from error
        parts.append(_format_sweep(study, note_text))
    return "\n".join(parts)


def _format_sweep(study: Study, note: str) -> str:
    sweep = study.sweep
    score = final_scores(study)
    sentence = f"{sweep.about[:1].upper()}{sweep.about[1:].rstrip('.')}."
    lines = [f"## {sweep.title}{f' ({sweep.scale.name})' if sweep.scale else ''}", "", sentence, ""]
    if sweep.scale:
        lines += [f"**{describe_scale(sweep.scale)}**", ""]
    interpretation = f"{INTERPRETATION}{sweep.reading}" if sweep.reading else ""
    if note.startswith(INTERPRETATION):
        interpretation, _, note = note.partition("\n\n")
    if interpretation:
        lines += [interpretation, ""]
    for column in study.columns:
        lines += _format_column(study, score, column)
    if note:
        lines += [note.strip(), ""]
    lines += [
        "```console",
        *(f"$ {line}" for line in sweep.command.splitlines()),
        "```",
        "",
        _describe_machine(study),
        "",
    ]
    return "\n".join(lines)


def _format_column(study: Study, score: ScoreTable, column: Column) -> list[str]:
    rows = [(value.title, score.get(value.name, column)) for value in study.row_values]
    rows = [(title, mark) for title, mark in rows if mark.last or mark.planned]
    if not rows:
        return []
    lines = [f"### {study.column_title(column)}", ""] if column else []
    full = study.sweep.scale is None
    heads = [study.sweep.rows, "last %", "best %", "published %", *(VERDICT if full else ()), "seeds"]
    lines += [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for title, mark in rows:
        lines.append(f"| {' | '.join([escape_bars(title), *_format_numbers(mark, full)])} |")
    ranking = compare_order(study, score, column)
    if len(ranking.published) > 1:
        kendall = f" (Kendall's tau {ranking.agreement})" if ranking.agreement else ""
        lines += ["", f"Published order: {' > '.join(ranking.published)}.", ""]
        lines += [f"Measured order{kendall}: {' > '.join(ranking.measured)}."]
    return [*lines, ""]


def escape_bars(text: str) -> str:
    """Escape `|`, which would end a cell of a Markdown table."""
    return text.replace("|", "\\|")


def _format_numbers(mark: CellScore, full: bool) -> list[str]:
    numbers = [format_mean(mark.last), format_mean(mark.best), format_mean(mark.published)]
    comparison = []
    if full and mark.verdict:
        within = {True: "yes", False: "no", None: ""}[mark.verdict.within]
        comparison = [f"{mark.verdict.difference:+.2f}", within]
    elif full:
        comparison = ["", ""]
    return [*numbers, *comparison, f"{mark.seeds} of {mark.planned}"]


def _describe_machine(study: Study) -> str:
    machine = study.sweep.machine
    seconds = [entry.seconds for _, entry in study.finished() if entry.seconds is not None]
    cores = machine.get("cores", "?")
    parts = [f"{cores} {'core' if cores == 1 else 'cores'} of {machine.get('cpu') or 'an unknown processor'}"]
    parts += [str(machine["gpu"])] if machine.get("gpu") else ["no GPU"]
    parts += [f"{name} {version}" for name, version in study.sweep.versions.items()]
    took = f"; {len(seconds)} runs, {sum(seconds) / 60:.0f} minutes in all" if seconds else ""
    return f"Machine: {', '.join(parts)}{took}."


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description="Write the page of committed results.")
    parser.add_argument(
        "--add", metavar="SWEEP", nargs="+", type=Path, default=[], help="folders of sweeps to copy into the results"
    )
    parser.add_argument("--results", metavar="DIR", type=Path, default=RESULTS, help="folder of committed results")
    parser.add_argument("--out", metavar="FILE", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if page and results differ")
    args = parser.parse_args(arguments)
    if args.check and args.add:
        parser.error("--check writes nothing, so it cannot --add: give one of them")
    try:
        for folder in args.add:
            print(f"added: {add(folder, args.results)}")
        page = format_page(args.results).encode()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if args.check:
        if atomic_io.read(args.out) == page:
            return 0
        print(f"{args.out} differs from {args.results}; run tools/leaderboard.py", file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    atomic_io.write_atomically(args.out, page)
    print(f"page: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

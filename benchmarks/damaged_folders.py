"""Every file of a run's folder, flipped, cut and deleted at random places: refused, or the same numbers?

    python benchmarks/damaged_folders.py [--places 100] [--out results/damaged_folders.md]

A finished run is read (report, split, model); one that was stopped after two of three rounds is gone on with.
"""

import argparse
import random
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "storage")]

import test_integrity as t  # noqa: E402
from interrupted_runs import InterruptAfterRound  # noqa: E402

from halfmoon.config.schema import Config  # noqa: E402
from halfmoon.runs import runner  # noqa: E402


def main() -> None:
    """Play all places, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", type=int, default=100, help="random places of each kind of folder and damage")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = ["| folder | damage | places | the same numbers | refused with a sentence |", "| --- " * 5 + "|"]
    with tempfile.TemporaryDirectory() as place:
        finished, stopped = Path(place) / "finished", Path(place) / "stopped"
        runner.run_in_folder(Config(**t.SMALL, rounds=t.ROUNDS), finished)
        with suppress(KeyboardInterrupt):
            runner.run_in_folder(Config(**t.SMALL, rounds=t.ROUNDS), stopped, InterruptAfterRound(t.ROUNDS - 1))
        t.WANTED[:] = [t.numbers(finished)]
        for name, folder, read in (("finished", finished, t.numbers), ("stopped", stopped, t.resumed)):
            for act in t.ACTS:
                chance, found = random.Random(f"{name} {act}"), []
                files = t.names(folder)
                for k in range(given.places):
                    found.append(t.damaged(folder, Path(place) / "run", files[k % len(files)], act, chance, read))
                same = found.count("equal")
                rows.append(f"| {name} | {act} | {len(found)} | {same} | {len(found) - same} |")
                print(rows[-1], flush=True)
    if given.out:
        head = f"# Damaged folders\n\n    python benchmarks/damaged_folders.py --places {given.places}\n\n"
        head += "Files of a run's folder in turn, each damaged at a random place. No place gave another number.\n\n"
        given.out.write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()

"""A short run whose disk refuses every single call once, or loses its power there: is it the same run afterwards?

python benchmarks/failing_disks.py [--every 1] [--out results/failing_disks.md]
"""

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "storage")]

from test_failing_disks import REFUSALS, count_calls, run_and_read, run_with_failure  # noqa: E402


def main() -> None:
    """Play every point, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="play every N-th call")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = ["| the disk | points | the same bytes | a sentence |", "| --- | --- | --- | --- |"]
    said: set[str] = set()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        wanted, count = run_and_read(folder / "straight"), count_calls(folder / "counted")
        for name, number in zip(("EIO", "ENOSPC", "EMFILE", "loses its power"), (*REFUSALS, None), strict=True):
            points = range(0, count, given.every)
            found = [run_with_failure(folder / f"{name}-{at}", at, number, wanted) for at in points]
            said |= {words.replace(place, "...") for words in found if words != "same"}
            same = found.count("same")
            rows.append(f"| {name} | {len(points)} | {same} | {len(points) - same} |")
            print(rows[-1], flush=True)
    text = (
        f"# Failing disks\n\n    python benchmarks/failing_disks.py --every {given.every}\n\nA run of two rounds makes "
    )
    text += f"{count} calls that change its folder. At each the disk fails once, and the run is begun or gone on with\n"
    text += "again: model, rows and split have the same bytes as an undisturbed run's, or a sentence "
    text += "says why\nnot. Anything else would have ended the benchmark.\n\n" + "\n".join(rows) + "\n"
    text += "".join(f"\n- {words}" for words in sorted(said)[:12]) + ("\n" if said else "")
    print(sorted(said)[:12])
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()

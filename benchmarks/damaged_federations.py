"""Every file of a federation's folder and of the sites' memories, flipped, cut and deleted at random places.

    python benchmarks/damaged_federations.py [--places 100] [--out results/damaged_federations.md]

Three sites play FedLoKe, which remembers a model at each of them, and are stopped in round 4 of 5. One file is damaged,
and the federation goes on, in one process and through Flower's two apps. "Equal": the model and the metrics have the
bytes of a federation that was never stopped. "Refused": it ends with a sentence. "Said": other numbers, and the log of
the server or of the site names the file. Anything else ends the benchmark with an error.
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "storage")]

import test_integrity as t  # noqa: E402
from in_process_federation import (  # noqa: E402
    LocalFederation,
    export_small_sites,
    select_eager_options,
    speed_up_rehearsals,
    stop_server_at,
)

from halfmoon.core.errors import UserError  # noqa: E402
from halfmoon.federation.transport import client_app  # noqa: E402

METHOD, ROUNDS, AT = "fedloke", 5, (3, 0)
MEMORY = Path(".halfmoon", "federations")
SAID = ("damaged", "missing", "was changed", "cannot be read")


def logs(federation: LocalFederation) -> list[Path]:
    """Return the sites' logs."""
    return sorted(federation.folder.glob("site-*/**/join.log"))


def outcome(federation: LocalFederation, file: Path, kept: Path, name: str, act: str, chance: random.Random) -> str:
    """Damage one file of a copy of the stopped federation, go on, and say what came of it."""
    client_app._open_client.cache_clear()
    run = federation.runs / "played"
    for at, whole in (
        (run, kept / "run"),
        *((federation.folder / site / MEMORY, kept / site) for site in federation.names),
    ):
        shutil.rmtree(at, ignore_errors=True)
        shutil.copytree(whole, at)
    first, _, rest = name.partition("/")
    path = run / rest if first == "run" else federation.folder / first / MEMORY / rest
    data = t.ACTS[act](path.read_bytes(), chance)
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    for log in logs(federation):
        log.unlink()
    before = len((run / "serve.log").read_bytes()) if (run / "serve.log").exists() else 0
    try:
        federation.run(file, "played")
    except UserError:
        return "refused"
    whole = federation.runs / "straight"
    if all((run / part).read_bytes() == (whole / part).read_bytes() for part in ("model.safetensors", "metrics.jsonl")):
        return "equal"
    told = (run / "serve.log").read_text(errors="replace")[before:] + "".join(
        log.read_text() for log in logs(federation)
    )
    assert any(word in told for word in SAID), f"{name}, {act}: other numbers, and nothing is said"
    return "said"


def main() -> None:
    """Play all places, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", type=int, default=100, help="random places of each kind of folder")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = ["| folder | damage | places | equal | refused with a sentence | said, other numbers |", "| --- " * 6 + "|"]
    with tempfile.TemporaryDirectory() as place, speed_up_rehearsals():
        federation = export_small_sites("clients", Path(place))
        file = federation.write_plan(
            METHOD, rounds=ROUNDS, steps=2, checkpoint_every=2, options=select_eager_options(METHOD)
        )
        federation.delete_client_memory()
        federation.run(file, "straight")
        federation.delete_client_memory()
        with stop_server_at(AT, after=True):
            federation.run(file, "stopped")
        kept = Path(place) / "kept"
        shutil.copytree(federation.runs / "stopped", kept / "run")
        for site in federation.names:
            shutil.copytree(federation.folder / site / MEMORY, kept / site)
        names = t.names(kept)
        for folder, mine in (
            ("the federation's, at its server", [name for name in names if name.startswith("run/")]),
            ("the sites' memories", [name for name in names if not name.startswith("run/")]),
        ):
            chance, results = random.Random(folder), Counter[tuple[str, str]]()
            for k in range(given.places):
                act = list(t.ACTS)[k % 3]
                name = chance.choice(mine)
                result = outcome(federation, file, kept, name, act, chance)
                results[act, result] += 1
                print(k, name, act, result, flush=True)
            for act in t.ACTS:
                counts = [results[act, result] for result in ("equal", "refused", "said")]
                rows.append(f"| {folder} | {act} | {sum(counts)} | " + " | ".join(map(str, counts)) + " |")
    print("\n".join(rows))
    if given.out:
        head = f"# Damaged federations\n\n    python benchmarks/damaged_federations.py --places {given.places}\n\n"
        _, _, below = (given.out.read_text() if given.out.exists() else "").partition("|\n\n")  # what people wrote
        given.out.write_text(head + "\n".join(rows) + "\n" + (f"\n{below}" if below else ""))


if __name__ == "__main__":
    main()

"""Damage files of a federation's run folder and of the sites' memories, and resume the federation.

    python benchmarks/damaged_federations.py [--trials 100] [--out results/damaged_federations.md]

Three sites train FedLoKe, which stores a model at each site, in one process through Flower's two apps. The federation is
stopped in round 4 of 5, one bit of a file is flipped, or the file is truncated or deleted, and the federation resumes.
"Equal": the model and the metrics have the bytes of a federation that was never stopped. "Refused": it ends with an error
message. "Logged": other numbers, and the log of the server or of a site reports a damaged or missing file. Anything else
ends this script with an error.
"""

import argparse
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS / "support"))

from damaged_folders import DAMAGES, damage_file, list_files  # noqa: E402
from in_process_federation import (  # noqa: E402
    LocalFederation,
    export_small_sites,
    select_eager_options,
    speed_up_rehearsals,
    stop_server_at,
)

from halfmoon.core.errors import UserError  # noqa: E402
from halfmoon.federation.transport import client_app  # noqa: E402

METHOD = "fedloke"
ROUNDS = 5
STOP_AT = (3, 0)
"""Round, from 0, and request of that round."""
MEMORY = Path(".halfmoon", "federations")
"""The memories of a site, in its folder."""
REPORTED = ("damaged", "missing", "was changed", "cannot be read")


def list_site_logs(federation: LocalFederation) -> list[Path]:
    return sorted(federation.folder.glob("site-*/**/join.log"))


def resume_damaged(
    federation: LocalFederation, file: Path, stopped: Path, name: str, damage: str, generator: random.Random
) -> str:
    """Damage one file in a copy of the stopped federation, resume it, and return the outcome.

    Args:
        federation: where the copy is made and resumed.
        file: the federation file.
        stopped: a folder with the run folder ("run") and the memories of each site of the stopped federation.
        name: the file to damage, relative to `stopped`.
        damage: a key of `DAMAGES`.
        generator: chooses where the file is damaged.
    """
    client_app._open_cached_client.cache_clear()
    run = federation.runs / "resumed"
    for target, source in (
        (run, stopped / "run"),
        *((federation.folder / site / MEMORY, stopped / site) for site in federation.names),
    ):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
    first, _, rest = name.partition("/")
    path = run / rest if first == "run" else federation.folder / first / MEMORY / rest
    damage_file(path, damage, generator)
    for log in list_site_logs(federation):
        log.unlink()
    before = len((run / "serve.log").read_bytes()) if (run / "serve.log").exists() else 0
    try:
        federation.run(file, "resumed")
    except UserError:
        return "refused"
    straight = federation.runs / "straight"
    if all(
        (run / each).read_bytes() == (straight / each).read_bytes() for each in ("model.safetensors", "metrics.jsonl")
    ):
        return "equal"
    logged = (run / "serve.log").read_text(errors="replace")[before:] + "".join(
        log.read_text() for log in list_site_logs(federation)
    )
    assert any(word in logged for word in REPORTED), f"{name}, {damage}: other numbers without a line in a log"
    return "logged"


def main() -> None:
    """Run all trials, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="of each kind of folder")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = ["| folder | damage | trials | equal | refused | other numbers, logged |", "| --- " * 6 + "|"]
    with tempfile.TemporaryDirectory() as name, speed_up_rehearsals():
        federation = export_small_sites("clients", Path(name))
        file = federation.write_plan(
            METHOD, rounds=ROUNDS, steps=2, checkpoint_every=2, options=select_eager_options(METHOD)
        )
        federation.delete_client_memory()
        federation.run(file, "straight")
        federation.delete_client_memory()
        with stop_server_at(STOP_AT, after=True):
            federation.run(file, "stopped")
        stopped = Path(name) / "stopped"
        shutil.copytree(federation.runs / "stopped", stopped / "run")
        for site in federation.names:
            shutil.copytree(federation.folder / site / MEMORY, stopped / site)
        names = list_files(stopped)
        for folder, candidates in (
            ("run folder of the server", [name for name in names if name.startswith("run/")]),
            ("memories of the sites", [name for name in names if not name.startswith("run/")]),
        ):
            generator = random.Random(folder)
            outcomes = Counter[tuple[str, str]]()
            for k in range(options.trials):
                damage = list(DAMAGES)[k % 3]
                damaged = generator.choice(candidates)
                outcome = resume_damaged(federation, file, stopped, damaged, damage, generator)
                outcomes[damage, outcome] += 1
                print(k, damaged, damage, outcome, flush=True)
            for damage in DAMAGES:
                counts = [outcomes[damage, outcome] for outcome in ("equal", "refused", "logged")]
                rows.append(f"| {folder} | {damage} | {sum(counts)} | " + " | ".join(map(str, counts)) + " |")
    print("\n".join(rows))
    if options.out:
        table = "\n".join(rows) + "\n"
        command = f"python benchmarks/damaged_federations.py --trials {options.trials}"
        page = options.out.read_text() if options.out.exists() else f"# Damaged federations\n\n    {command}\n\n|\n"
        # Keep the text around the table.
        options.out.write_text(re.sub(r"(?:^\|.*\n)+", lambda _: table, page, count=1, flags=re.MULTILINE))


if __name__ == "__main__":
    main()

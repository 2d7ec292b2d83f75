"""Write the provenance of a release's files, and a requirements line with which pip installs exactly this wheel.

    python3 .ci/provenance.py dist

`provenance.json`: the commit from which the files were built, the builder's Python, and each file's SHA-256.
`halfmoon.txt`: for `pip install --require-hashes --no-deps -r halfmoon.txt`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from pathlib import Path


def git(*words: str) -> str:
    """Return what git says, nothing where it says nothing."""
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def main(dist: Path) -> None:
    """Write both files."""
    files = sorted([*dist.glob("*.whl"), *dist.glob("*.tar.gz"), *dist.glob("sbom.json")])
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    facts = {
        "commit": git("rev-parse", "HEAD"),
        "tree": git("rev-parse", "HEAD^{tree}"),
        "committed": git("log", "-1", "--format=%cI"),
        "python": platform.python_version(),
        "files": digests,
    }
    (dist / "provenance.json").write_text(json.dumps(facts, indent=1) + "\n")
    wheel = next(path.name for path in files if path.suffix == ".whl")
    version = wheel.split("-")[1]
    hashes = " ".join(f"--hash=sha256:{digests[name]}" for name in digests if name != "sbom.json")
    (dist / "halfmoon.txt").write_text(f"halfmoon=={version} {hashes}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

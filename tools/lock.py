"""Write requirements/ci.txt, every version and checksum that CI installs, and release.txt, the same for the build tools.

    python tools/lock.py

The list holds what the extra `dev` needs on Python 3.11 and later, and what PyTorch needs. PyTorch itself is in
requirements/torch.txt, with the checksums of its builds on PyPI and of the wheels in PIP_FIND_LINKS: CPU builds of
another index. Needs uv, PyPI and a package index.
"""

import hashlib
import json
import os
import re
import subprocess
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "ci.txt"
HEADER = """\
# Every version and checksum that CI installs; written by `python tools/lock.py`, do not edit.
# PyTorch is in torch.txt.
"""
RELEASE = """\
# Every version and checksum of the tools of .ci/release; written by `python tools/lock.py`, do not edit.
"""
RELEASE_TOOLS = ("build", "cyclonedx-bom>=7", "hatchling", "pip-audit")
"""Programs that build, list and audit a release. hatchling is the build backend of pyproject.toml."""

TORCH = """\
# The builds of PyTorch that CI may install; written by `python tools/lock.py`, do not edit.
# pip install --require-hashes --no-deps -r requirements/torch.txt
"""


def wanted(extra: str = "dev") -> list[Requirement]:
    """Return the requirements of the package with an extra, with those of the extras that it names in turn."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting, found = [*project["dependencies"], *project["optional-dependencies"][extra]], []
    while waiting:
        requirement = Requirement(waiting.pop(0))
        if requirement.name == project["name"]:
            waiting += [line for each in sorted(requirement.extras) for line in project["optional-dependencies"][each]]
        elif requirement.name != "torch":
            found.append(requirement)
    return found


def of_torch() -> list[Requirement]:
    """Return what the installed PyTorch needs beside its builds' own libraries."""
    needed = [Requirement(line) for line in metadata.requires("torch") or ()]
    return [
        each for each in needed if "extra" not in str(each.marker) and not re.match("nvidia|triton|cuda", each.name)
    ]


def torch() -> str:
    """Return the line that takes PyTorch of constraints.txt by its checksums: CPython, Linux, macOS and Windows."""
    (pin,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    request = urllib.request.Request("https://pypi.org/simple/torch/")
    request.add_header("Accept", "application/vnd.pypi.simple.v1+json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    version = pin.partition("==")[2]
    found = {file["hashes"]["sha256"] for file in files if file["filename"].startswith(f"torch-{version}-")}
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        for wheel in Path(folder).glob(f"torch-{version}[-+]*.whl"):
            found.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    return " \\\n    ".join([pin, *(f"--hash=sha256:{each}" for each in sorted(found))]) + "\n"


def main() -> None:
    """Write the files."""
    LOCK.parent.mkdir(exist_ok=True)
    LOCK.with_name("torch.txt").write_text(TORCH + torch(), encoding="utf-8")
    LOCK.write_text(HEADER + resolve([*wanted(), *of_torch()]), encoding="utf-8")
    LOCK.with_name("release.txt").write_text(RELEASE + resolve(RELEASE_TOOLS), encoding="utf-8")


def resolve(requirements: Iterable[object]) -> str:
    """Resolve requirements for every platform and Python 3.11 and later at once; return the lines with checksums."""
    with tempfile.TemporaryDirectory() as folder:
        listed, locked = Path(folder) / "listed.in", Path(folder) / "locked.txt"
        listed.write_text("\n".join(str(each) for each in requirements), encoding="utf-8")
        without = Path(folder) / "without.txt"  # other packages may need PyTorch, too
        without.write_text("torch ; python_version < '3'\n", encoding="utf-8")
        how = ["--overrides", str(without), "--quiet", "--universal", "--python-version", "3.11"]
        how += ["--generate-hashes", "--no-header", "--no-annotate"]
        subprocess.run(["uv", "pip", "compile", *how, "--output-file", str(locked), str(listed)], check=True)
        return locked.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()

"""Write requirements/ci.txt, with every version and checksum that CI installs, and release.txt for the build tools.

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


def package_requirements(extra: str = "dev") -> list[Requirement]:
    """List the requirements of the package with an extra, and of the extras that this one includes; without PyTorch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting = [*project["dependencies"], *project["optional-dependencies"][extra]]
    requirements = []
    while waiting:
        requirement = Requirement(waiting.pop(0))
        if requirement.name == project["name"]:
            for name in sorted(requirement.extras):
                waiting += project["optional-dependencies"][name]
        elif requirement.name != "torch":
            requirements.append(requirement)
    return requirements


def torch_requirements() -> list[Requirement]:
    """List the requirements of the installed PyTorch, without extras and without the libraries of CUDA."""
    requirements = [Requirement(line) for line in metadata.requires("torch") or ()]
    without_extras = [one for one in requirements if "extra" not in str(one.marker)]
    return [one for one in without_extras if not re.match("nvidia|triton|cuda", one.name)]


def pin_torch() -> str:
    """Write the requirement of the version in constraints.txt, with the checksums of its wheels for all platforms."""
    (pin,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    request = urllib.request.Request("https://pypi.org/simple/torch/")
    request.add_header("Accept", "application/vnd.pypi.simple.v1+json")
    with urllib.request.urlopen(request, timeout=60) as response:
        files = json.load(response)["files"]
    version = pin.partition("==")[2]
    checksums = {file["hashes"]["sha256"] for file in files if file["filename"].startswith(f"torch-{version}-")}
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        for wheel in Path(folder).glob(f"torch-{version}[-+]*.whl"):
            checksums.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    return " \\\n    ".join([pin, *(f"--hash=sha256:{checksum}" for checksum in sorted(checksums))]) + "\n"


def main() -> None:
    """Write requirements/ci.txt, torch.txt and release.txt."""
    LOCK.parent.mkdir(exist_ok=True)
    LOCK.with_name("torch.txt").write_text(TORCH + pin_torch(), encoding="utf-8")
    LOCK.write_text(HEADER + resolve([*package_requirements(), *torch_requirements()]), encoding="utf-8")
    LOCK.with_name("release.txt").write_text(RELEASE + resolve(RELEASE_TOOLS), encoding="utf-8")


def resolve(requirements: Iterable[object]) -> str:
    """Resolve requirements for all platforms and Python 3.11 and later; return the lines with versions and checksums."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "listed.in"
        locked = Path(folder) / "locked.txt"
        listed.write_text("\n".join(str(requirement) for requirement in requirements), encoding="utf-8")
        # Other packages may need PyTorch, too: an override with an impossible marker leaves it out.
        overrides = Path(folder) / "overrides.txt"
        overrides.write_text("torch ; python_version < '3'\n", encoding="utf-8")
        options = ["--overrides", str(overrides), "--quiet", "--universal", "--python-version", "3.11"]
        options += ["--generate-hashes", "--no-header", "--no-annotate"]
        subprocess.run(["uv", "pip", "compile", *options, "--output-file", str(locked), str(listed)], check=True)
        return locked.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()

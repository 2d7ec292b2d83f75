"""The bundle of Observable Plot in the pages: its checksum, its versions and licenses, and its size. No test needs node."""

import hashlib
import json
import re
import tomllib
from pathlib import Path

from halfmoon.report.templates import read_web_file

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools" / "charts"
BUNDLE = ROOT / "src" / "halfmoon" / "report" / "web" / "plot.js"
LOCKED = json.loads((TOOLS / "package-lock.json").read_text(encoding="utf-8"))["packages"]


def test_the_bundle_is_the_one_that_was_built() -> None:
    checksum, name = (TOOLS / "bundle.sha256").read_text().split()
    assert ROOT / name == BUNDLE
    assert hashlib.sha256(BUNDLE.read_bytes()).hexdigest() == checksum, "run npm run build in tools/charts"
    assert BUNDLE.stat().st_size < 200_000


def test_every_package_is_pinned_with_its_checksum() -> None:
    pinned = json.loads((TOOLS / "package.json").read_text(encoding="utf-8"))
    for name, version in {**pinned["dependencies"], **pinned["devDependencies"]}.items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
        assert LOCKED[f"node_modules/{name}"]["version"] == version
    assert all(each["integrity"].startswith("sha512-") for path, each in LOCKED.items() if path)


def test_the_notice_names_every_bundled_package_and_its_license() -> None:
    """Every copy of the code has the license: the bundle, and so each report; the wheel has it as a file, too."""
    notice = read_web_file("halfmoon.report", "plot.js").split("*/")[0]
    bundled = re.findall(r"^(@?[\w/-]+) ([\d.]+): Copyright .+$", notice, re.MULTILINE)
    assert len(bundled) > 8
    for name, version in bundled:
        locked = LOCKED[f"node_modules/{name}"]
        assert (locked["version"], locked["license"]) == (version, "ISC")
    assert "this permission notice appear in all copies" in notice
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "THIRD-PARTY.txt" in project["license-files"]
    assert (ROOT / "THIRD-PARTY.txt").read_text(encoding="utf-8").strip() in notice


def test_the_bundle_needs_no_permission_of_a_content_security_policy() -> None:
    """No code from texts, which needs unsafe-eval, and nothing that ends the script element of a report."""
    text = BUNDLE.read_text(encoding="utf-8")
    for word in ("eval(", "new Function", "import(", "fetch(", "XMLHttpRequest", "</script", "<!--"):
        assert word not in text, word

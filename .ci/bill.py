"""Check a bill of materials, and write it as requirements/dependencies.md; a part of .ci/release.

    python .ci/bill.py SBOM REPORT [--write]

SBOM is CycloneDX JSON of an environment, from which this machine's folders are removed. REPORT is the output of pip's
--report for the same environment. The check fails for a package that was yanked, has no checksum, is missing in the bill,
or has a license that is neither accepted by name nor reviewed (`REVIEWED`).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "requirements" / "dependencies.md"

ACCEPTED = re.compile(
    r"\b(MIT|MIT-0|MIT-CMU|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|Python-2\.0|CNRI-Python|HPND|zlib|Zlib"
    r"|Unlicense|CC0|Boost|BSL-1\.0|Expat)\b|BSD-\d|Apache-2|PSF-2|MPL-2\.0|Mozilla Public License 2\.0"
)
"""Licenses that are permissive, and MPL-2.0, whose conditions stay with its own files."""

COPYLEFT = re.compile(r"\b[AL]?GPL|General Public License|EUPL|CC-BY-NC|CC-BY-SA|Proprietary|NVIDIA", re.IGNORECASE)

REVIEWED = {
    "dp-accounting": "Apache-2.0 (its metadata: Apache 2.0)",
    "protobuf": "BSD-3-Clause (its metadata: 3-Clause BSD License)",
    "ray": "Apache-2.0 (its metadata: Apache 2.0)",
}
"""Packages whose license is in no field that the bill reads, with what was found by looking."""


def main(words: list[str]) -> int:
    """Print what is wrong, and return 1 where anything is."""
    write = "--write" in words
    bill, report = (json.loads(Path(word).read_text()) for word in words if word != "--write")
    forget_places(bill["components"])
    bill["components"] += bundled()
    Path(words[0]).write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")
    parts = {plain(each["name"]): each for each in bill["components"]}
    faults = [*unfit(parts, report)]
    rows = [(each["name"], each["version"], license(each)) for _, each in sorted(parts.items())]
    rows = [row for row in rows if plain(row[0]) != "halfmoon"]
    for name, version, said in rows:
        if plain(name) in REVIEWED:
            continue
        if not ACCEPTED.search(said) or COPYLEFT.search(said):
            faults.append(
                f"{name} {version}: its license is {said or 'not said'}: look at it, and write down in REVIEWED"
            )
    if write:
        PAGE.write_text(page(rows, bill), encoding="utf-8")
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{len(rows)} packages on the bill, {len(faults)} to look at")
    return 1 if faults else 0


def forget_places(components: list[dict[str, Any]]) -> None:
    """Take out where files lay on the machine that made the bill."""
    for each in components:
        held = [one for one in each.pop("externalReferences", []) if not one["url"].startswith("file:")]
        if held:
            each["externalReferences"] = held


def bundled() -> list[dict[str, Any]]:
    """Return the JavaScript packages inside the wheel, as components: THIRD-PARTY.txt names each with its version."""
    text = (ROOT / "THIRD-PARTY.txt").read_text(encoding="utf-8")
    return [
        {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:npm/{name.replace('@', '%40')}@{version}",
            "licenses": [{"license": {"id": "ISC"}}],
        }
        for name, version in re.findall(r"^(@?[\w/-]+) ([\d.]+): Copyright", text, re.MULTILINE)
    ]


def unfit(parts: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """Return what pip's report says against packages."""
    found = []
    for each in report["install"]:
        name, facts = plain(each["metadata"]["name"]), each["download_info"]
        if each.get("is_yanked"):
            found.append(f"{name} {each['metadata']['version']} was yanked by its authors")
        if name != "halfmoon" and not facts.get("archive_info", {}).get("hashes", {}).get("sha256"):
            found.append(f"{name} came without a SHA-256")
        if name not in parts:
            found.append(f"{name} was installed, but is not on the bill")
    return found


def license(component: dict[str, Any]) -> str:
    """Return a component's licenses in a line: expressions and identifiers before names, no texts."""
    said = []
    for each in component.get("licenses", []):
        held = each.get("license", {})
        words = each.get("expression") or held.get("id") or held.get("name") or ""
        words = words.removeprefix("License :: ").removeprefix("OSI Approved :: ")
        if words and len(words) < 100 and not words.startswith("declared license") and words not in said:
            said.append(words)
    return "; ".join(said)


def page(rows: list[tuple[str, str, str]], bill: dict[str, Any]) -> str:
    """Return the list in Markdown."""
    listed = "\n".join(f"| {name} | {version} | {cell(name, said)} |" for name, version, said in rows)
    return f"""# What halfmoon stands on

<!-- written by `.ci/release --write`; do not edit -->
All {len(rows)} packages of a fresh environment with every extra for run time, and of the charts of its pages, and the
licenses that they state.
`sbom.json` of a release (CycloneDX {bill["specVersion"]}) has the same; [a release](../CONTRIBUTING.md#a-release)
makes it.

| package | version | license |
| --- | --- | --- |
{listed}
"""


def cell(name: str, said: str) -> str:
    """Return a license as a cell of the table."""
    return (REVIEWED.get(plain(name)) or said).replace("|", "\\|")


def plain(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The program of a federation: what a site accepts as its app bundle, what its terms say of it, who is refused."""

import io
import json
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from fake_transport import make_terms

from halfmoon.core.errors import UserError
from halfmoon.federation.protocol import bundle
from halfmoon.federation.protocol.bundle import ForeignBundle
from halfmoon.federation.protocol.terms import Terms

TOYS = ("toys:server", "toys:client")


def zipped(files: dict[str, str], more: tuple[str, ...] = ()) -> bytes:
    """Return a zip file with these files; those of `more` are written again."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for name in (*files, *more):
            made.writestr(name, files[name])
    return out.getvalue()


FILES = {bundle.PROJECT_FILE: bundle.render_project(), bundle.CONTENT_FILE: "-"}


def test_bundle_is_identified_by_content_not_by_compression():
    """Flower writes the file anew: the order of its lines, and how it is compressed, are not part of the program."""
    bundle.check_bundle(zipped(FILES))
    text = bundle.render_project().replace('serverapp = "', 'zz = 1\nserverapp = "').replace("zz = 1\n", "")
    bundle.check_bundle(zipped({bundle.CONTENT_FILE: "other", bundle.PROJECT_FILE: "# a comment\n" + text}))
    bundle.check_bundle(zipped({**FILES, bundle.PROJECT_FILE: bundle.render_project(TOYS)}), TOYS)
    assert bundle.expected_digest() != bundle.expected_digest(TOYS)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (zipped({**FILES, "evil.py": "import os"}), "it contains 'evil.py'"),
        (zipped({**FILES, "../../x": ""}), "it contains '../../x'"),
        (zipped({**FILES, bundle.PROJECT_FILE: bundle.render_project(TOYS)}), "it starts a different program"),
        (
            zipped({**FILES, bundle.PROJECT_FILE: bundle.render_project() + 'x = "y"\n'}),
            "it starts a different program",
        ),
        (zipped({bundle.PROJECT_FILE: bundle.render_project()}), "a file is missing or occurs twice"),
        (
            zipped({**FILES, bundle.PROJECT_FILE: "#" + "a" * bundle.MAX_BUNDLE_BYTES}),
            "a file in it has more than 65,536 bytes",
        ),
        (b"PK no zip file", "it cannot be read"),
        (b"", "it cannot be read"),
        (bytes(bundle.MAX_BUNDLE_BYTES + 1), "it has 65,537 bytes"),
        (zipped({**FILES, bundle.PROJECT_FILE: "x = ["}), "it cannot be read"),
    ],
)
def test_a_foreign_bundle_is_refused_without_being_unpacked(content: bytes, why: str):
    with pytest.raises(ForeignBundle, match=why.replace(".", r"\.")):
        bundle.check_bundle(content)


def test_a_duplicate_file_is_refused():
    """Two readers of a zip file may take two different ones."""
    with pytest.warns(UserWarning, match="Duplicate"), pytest.raises(ForeignBundle, match="twice"):
        bundle.check_bundle(zipped(FILES, (bundle.PROJECT_FILE,)))


def test_flower_packs_the_bundle_that_sites_accept(tmp_path: Path):
    """What `flwr run` makes of the folder that `halfmoon serve` writes."""
    pytest.importorskip("flwr")
    from flwr.cli.build import build_fab_from_disk

    (tmp_path / bundle.PROJECT_FILE).write_text(bundle.render_project())
    bundle.check_bundle(build_fab_from_disk(tmp_path))
    (tmp_path / "evil.py").write_text("")
    with pytest.raises(ForeignBundle, match="evil"):
        bundle.check_bundle(build_fab_from_disk(tmp_path))


def test_the_terms_name_the_program_and_another_one_is_refused():
    """Version, bundle and plugins are in the text that is hashed, and are shown to the people at a site."""
    known = make_terms()
    description = json.loads(known.text)
    assert description["program"] == {
        "halfmoon": metadata.version("halfmoon"),
        "bundle": bundle.expected_digest(),
        "plugins": {},
    }
    assert Terms.parse(known.text).hash == known.hash
    rows = {name: value for name, value, _ in known.summary().rows}
    assert rows["bundle"] == bundle.expected_digest()[:16]
    assert rows["halfmoon"] == bundle.describe_program()["halfmoon"]
    for change, why in [
        ({"halfmoon": "9.9"}, "halfmoon 9.9, this site"), ({"bundle": "0" * 64}, "the app bundle differs"),
        ({"plugins": {"x:Y": "0" * 64}}, "its plugins differ"), ({"more": 1}, "does not state"),
    ]:  # fmt: skip
        other = json.dumps({**description, "program": {**description["program"], **change}})
        with pytest.raises(UserError, match=why):
            Terms.parse(other)
    with pytest.raises(UserError, match="cannot be read"):
        Terms.parse(json.dumps({name: value for name, value in description.items() if name != "program"}))


class Fleet:
    """A connection that knows the bundles of runs; None is an agent of Flower's."""

    def __init__(self, bundles: dict[int, bytes | None]) -> None:
        self.bundles = bundles

    def bundle(self, run: int) -> bytes:
        content = self.bundles[run]
        if content is None:
            raise ForeignBundle("an agent of Flower")
        return content


def test_a_site_refuses_the_runs_of_other_bundles(tmp_path: Path):
    pytest.importorskip("flwr")
    from halfmoon.federation.transport.node import BundleChecker
    from halfmoon.storage.events import EventLog

    evil = zipped({**FILES, "evil.py": ""})
    fleet: Any = Fleet({1: zipped(FILES), 2: evil, 3: evil, 4: None})
    checker = BundleChecker(bundle.APPS, EventLog(tmp_path / "join.log"))
    faults = [checker.find_fault(fleet, run) for run in (1, 2, 2, 3, 4)]
    assert faults == [None, *["it contains 'evil.py'"] * 3, "an agent of Flower"]
    log = (tmp_path / "join.log").read_text()
    assert log.count("refused: the server wants another program executed here than the agreed one") == 2
    assert log.count("it contains 'evil.py'") == 1


def test_what_the_bundle_names_is_what_is_installed():
    pytest.importorskip("flwr")
    import importlib

    for each in tomllib.loads(bundle.render_project())["tool"]["flwr"]["app"]["components"].values():
        name, _, attribute = each.partition(":")
        assert hasattr(importlib.import_module(name), attribute)


def test_no_module_is_imported_because_a_server_names_it(tmp_path: Path):
    """A site's people have to name it themselves; what a server says is refused before anything of it is loaded."""
    from halfmoon.federation.protocol.messages import Offer, Refusal, read_message, write_message
    from halfmoon.federation.site.client import SiteClient

    description = json.loads(make_terms().text)
    description["config"]["method"] = "evil_of_a_server:Method"
    (tmp_path / "evil_of_a_server.py").write_text("raise SystemExit('executed')")
    site = SiteClient.from_folder(tmp_path, "north", tmp_path / "home")
    sys.path.insert(0, str(tmp_path))
    try:
        text = read_message(site.reply_to(write_message(Offer(site.version, json.dumps(description)))), Refusal)
    finally:
        sys.path.remove(str(tmp_path))
    assert isinstance(text, Refusal)
    assert "which is not loaded because a file or a server names it" in text.reason
    assert "evil_of_a_server" not in sys.modules

"""A plain SuperLink in the server's place sends an app of its own, before a site has joined any run and after one.

    python benchmarks/foreign_app.py

Over real processes and TLS, with the certificate of the true server (whoever has its machine has that). The test of
tests/federation/test_flower_launch.py plays the same in the midst of a run. It fails where the app's module was loaded
at the site, where the server was not told (Flower's error 7), or where the site's log does not say that it refused.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "federation")]

import test_flower_launch as t  # noqa: E402

from halfmoon.federation.flower.processes import Home  # noqa: E402

REFUSED = "refused: the server wants another program executed here than the agreed one"


def main() -> None:
    """Play both, and print what was heard."""
    with tempfile.TemporaryDirectory() as place:
        scene = t.Stage(Path(place), rounds=1)
        try:
            (scene.folder / "ward").mkdir()
            site = scene.start(t.JOIN, "j", scene.port, scene.folder / "ward", scene.files["ca"])
            for when in ("before the first run", "after the run"):
                before, began = scene.said("j").count(REFUSED), time.monotonic()
                with scene.foreign() as heard:  # ends with an error where the app was loaded
                    code = heard.read_text()
                assert code == "7", f"{when}: the server heard {code}"
                refused = scene.said("j").count(REFUSED) - before
                print(
                    f"{when}: error {code}, {refused} line in the log, nothing loaded, {time.monotonic() - began:.0f} s"
                )
                assert site.poll() is None
                if when.startswith("before"):
                    assert scene.serve("s").wait(120) == 0, scene.said("s")
                    (row,) = [json.loads(line) for line in (scene.run / "metrics.jsonl").read_text().splitlines()]
                    print(f"the run: round {row['round'] + 1} was played by {row['site']}")
            print(scene.said("j"))
        finally:
            for process in scene.started:
                process.kill()
                process.wait()
            for folder in (scene.run / "flower", scene.folder / "ward" / "home" / "flower"):
                Home(folder).kill()


if __name__ == "__main__":
    main()

"""A plain SuperLink in the server's place sends an app of its own, before a site has joined any run and after one.

    python benchmarks/foreign_app.py

Over real processes and TLS, with the certificate of the true server (whoever has its machine has that);
tests/federation/test_bundle.py plays the same without processes. It fails where the app's module was loaded
at the site, where the server was not told (Flower's error 7), or where the site's log does not say that it refused.
"""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "federation")]

import test_flower_launch as t  # noqa: E402

from halfmoon.federation.protocol import bundle  # noqa: E402
from halfmoon.federation.transport.contact import Address, ServerUnreachable, check_server  # noqa: E402
from halfmoon.federation.transport.processes import ENVIRONMENT, ProcessFolder  # noqa: E402

REFUSED = "refused: the server wants another program executed here than the agreed one"

MOMENTS = ("before the first run", "after the run")
"""When the foreign app comes; between them the true server plays a run."""

EVIL = {
    "pyproject.toml": bundle.render_project(("evil_server:app", "evil_client:app")),
    "evil_client.py": """
from pathlib import Path
from flwr.clientapp import ClientApp
Path({pwned!r}).write_text("executed")
app = ClientApp()
""",
    "evil_server.py": """
import time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    replies, asked, last = [], [], 0.0
    while not replies:
        if time.monotonic() > last + 5:  # a node that has gone meanwhile never answers
            messages = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
            asked, last = [*asked, *grid.push_messages(messages)], time.monotonic()
        time.sleep(0.1)
        replies = list(grid.pull_messages(asked)) if asked else []
    Path({heard!r}).write_text(str(replies[0].error.code if replies[0].has_error() else "it answers"))
""",
}
"""An app of whoever has taken the server's place: its client's half writes a file as soon as it is loaded."""


@contextmanager
def foreign(scene: t.Stage) -> Iterator[Path]:
    """Let a plain SuperLink have the server's port, with a run of a foreign app; give what it has heard of it."""
    home = scene.folder / f"foreign-{time.monotonic_ns()}"
    pwned, heard = home / "pwned", home / "heard"
    (home / "app").mkdir(parents=True)
    for name, text in EVIL.items():
        words = text.replace("{pwned!r}", repr(str(pwned))).replace("{heard!r}", repr(str(heard)))
        (home / "app" / name).write_text(words)
    address = f"127.0.0.1:{scene.port}"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "x"\n[superlink.x]\naddress = "{address}"\nroot-certificates = "{scene.files["ca"]}"\n'
    )
    environment = {**os.environ, **ENVIRONMENT, "FLWR_HOME": str(home)}
    flags = ("--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile")
    given = [str(word) for pair in zip(flags, scene.files.values(), strict=True) for word in pair]
    scripts = Path(sysconfig.get_path("scripts"))
    given += ["--disable-runtime-dependency-installation"]
    command = [str(scripts / "flower-superlink"), "--host", "127.0.0.1", "--port", str(scene.port), *given]
    with (home / "log").open("wb") as log:
        link = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=home, start_new_session=True
        )  # fmt: skip
    try:
        t.wait(lambda: _answers(scene.port, scene.files["ca"]))
        words = [str(scripts / "flwr"), "run", str(home / "app"), "x"]
        subprocess.run(words, env=environment, cwd=home, capture_output=True, check=True)
        t.wait(heard.exists)
        yield heard
        assert not pwned.exists(), "a site has executed what a server has sent"
    finally:
        os.killpg(link.pid, signal.SIGKILL)
        link.wait()


def _answers(port: int, ca: Path) -> bool:
    try:
        check_server(Address("127.0.0.1", port), ca)
    except ServerUnreachable:
        return False
    return True


def main() -> None:
    """Play both, and print what was heard."""
    with tempfile.TemporaryDirectory() as place:
        scene = t.Stage(Path(place), rounds=1)
        try:
            (scene.folder / "ward").mkdir()
            site = scene.start(t.JOIN, "j", scene.port, scene.folder / "ward", scene.files["ca"])
            for when in MOMENTS:
                before, began = scene.said("j").count(REFUSED), time.monotonic()
                with foreign(scene) as heard:  # ends with an error where the app was loaded
                    code = heard.read_text()
                    # It writes that when it has answered.
                    t.wait(lambda before=before: scene.said("j").count(REFUSED) > before)
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
                ProcessFolder(folder).kill_all()


if __name__ == "__main__":
    main()

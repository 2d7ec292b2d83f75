"""A federation of real processes behind a real nginx, and who attacks it; also for benchmarks/federation_attacks.py.

Three honest sites have keys; `MALLORY` has one as well, but is none of the federation. An attack says what is done, and
what has to stand in which log afterwards. Nothing here is quicker or safer than what a stranger with a laptop does.
"""

import http.client
import json
import os
import pickle
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sysconfig
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from attacking.sitecustomize import Creates
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fake_transport import free_port

from halfmoon.federation.transport.grid import read_key_owners
from halfmoon.federation.transport.processes import ProcessFolder
from halfmoon.sites.keys import make
from halfmoon.storage import atomic_io

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
HALFMOON = str(Path(sysconfig.get_path("scripts"), "halfmoon"))
SITES = ("site-00", "site-01", "site-02")
MALLORY = "mallory"
"""A site with a key that is none of the federation. Of its own sites the last one attacks where an attack says so."""
PATIENCE = 900.0
"""Seconds until something counts as not happening."""
LOOKS = 0.2
"""Seconds between two looks at the logs, which take time from the processes that are watched."""

EXPORT = ("site", "export", "digits", "--sites", "3", "--labels-per-class", "4")
FILE = "attacked.toml"
OPTIONS: dict[str, Any] = {
    "method": "fedavg", "network": "small", "width": 4, "rounds": 5, "steps": 4, "labeled_batch": 8,
    "unlabeled_batch": 8, "cohort": 3, "seed": 7,
}  # fmt: skip
RULES = {"min_replies": 3, "strikes": 0}
"""A round without all three is played again: whatever is refused, the weights are those of the undisturbed run."""


class Stuck(AssertionError):
    """Something that has to happen does not."""


def write(exported: Path, rounds: int = OPTIONS["rounds"], sites: int = len(SITES)) -> Path:
    """Write the federation's file beside exported sites, and return it."""
    kept = [
        line for line in (exported / "federation.toml").read_text().splitlines() if line.split(" = ")[0] not in OPTIONS
    ]
    given = [f"{name} = {json.dumps(value)}" for name, value in {**OPTIONS, "rounds": rounds, "cohort": sites}.items()]
    rules = [f"{name} = {value}" for name, value in {**RULES, "min_replies": sites}.items()]
    path = exported / FILE
    path.write_text("\n".join([*given, *kept, *rules]) + "\n")
    return path


@dataclass
class Besieged:
    """A federation under way in `folder`; `sites` has the folders of images, `evil` what its last site answers.

    It may be served several times, one run after the other: `serve` begins the next one."""

    folder: Path
    sites: Path
    evil: str = ""
    rounds: int = OPTIONS["rounds"]
    names: tuple[str, ...] = SITES  # the last one is evil
    run: Path = field(init=False)
    port: int = field(default_factory=free_port)
    listen: int = field(default_factory=free_port)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    nginx: list[Path] = field(default_factory=list)
    since: dict[str, int] = field(default_factory=dict)  # where this run's part of a log begins

    @property
    def access(self) -> Path:
        return self.folder / "access"

    def home(self, who: str) -> Path:
        return self.folder / "homes" / who

    def key(self, name: str) -> Path:
        return self.access / "sites" / name / f"{name}.key"

    def prepare(self) -> None:
        make.create_keys(self.access, [*self.names, MALLORY], ["localhost"], port=self.port, listen=self.listen)
        self.proxy(self.access)

    def proxy(self, access: Path) -> None:
        assert NGINX is not None
        done = subprocess.run([NGINX, "-c", access / "nginx.conf"], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        self.nginx.append(access)

    def serve(self, run: str = "run") -> None:
        """Begin a run."""
        self.run = self.folder / run
        self.hold(True)
        self.since = {where: len(self._whole(where)) for where in ("nginx", "caller")}
        words = [str(self.sites / FILE), "--run-dir", str(self.run), "--access", str(self.access)]
        self.start("serve", "serve", *words)

    def hold(self, last: bool) -> None:
        """Have the last round wait for its last answer, or wait no more: no attack comes too late."""
        held = f" hold:{self.rounds - 1}" if last else ""
        atomic_io.write_atomically(self.folder / "evil", (self.evil + held).encode())

    def begin(self) -> None:
        self.prepare()
        self.serve()
        for name in self.names:
            self.join(name)

    def start(self, who: str, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        self.home(who).mkdir(parents=True, exist_ok=True)
        held = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        with self.output(who).open("ab") as out:
            self.running[who] = subprocess.Popen([HALFMOON, *words], stdout=out, stderr=out, env=held)
        return self.running[who]

    def join(
        self, who: str, *, name: str = "", key: Path | str | None = "", ca: Path | None = None, host: str = "localhost",
        listen: int = 0, insecure: bool = False,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """Let somebody join, honestly where nothing else is said; `key` None: without one."""
        name = name or who
        key = self.key(name) if key == "" else key
        words = ["site", "join", "--server", f"{host}:{listen or self.listen}", "--name", name]
        words += [
            "--site",
            str(self.sites / (name if name in self.names else self.names[0])),
            "--home",
            str(self.home(who)),
        ]
        words += ["--terms", "any", *(["--insecure"] if insecure else ["--ca", str(ca or self.access / "ca.crt")])]
        words += [] if key is None or insecure else ["--key", str(key)]
        environment: dict[str, str] = {}
        if who == self.names[-1]:
            paths = [str(Path(__file__).parent / "attacking"), os.environ.get("PYTHONPATH", "")]
            environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "ATTACK": str(self.folder / "evil")}
        return self.start(who, *words, **environment)

    def output(self, who: str) -> Path:
        return self.folder / f"{who}.out"

    def log(self, where: str) -> str:
        """Return what a log says of this run: serve.log, nginx's, what a command printed or a caller was answered."""
        return self._whole(where)[self.since.get(where, 0) :]

    def _whole(self, where: str) -> str:
        places = {
            "serve.log": self.run / "serve.log",
            "nginx": self.access / "nginx" / "access.log",
            "caller": self.folder / "caller",
        }
        path = places.get(where) or self.output(where)
        return re.sub(r"\x1b\[\d*m", "", (atomic_io.read(path) or b"").decode(errors="replace"))

    def answered(self, words: str) -> None:
        atomic_io.append(self.folder / "caller", f"{words}\n".encode())

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until something is so; raise Stuck where it takes too long, or the server ends badly."""
        end = time.monotonic() + PATIENCE
        while not condition():
            code = self.running["serve"].poll() if "serve" in self.running else None
            if time.monotonic() > end or code not in (None, 0):
                raise Stuck(f"waited in vain for {what}; the server's log ends: {self.log('serve.log')[-1500:]}")
            time.sleep(LOOKS)

    def says(self, where: str, pattern: str) -> str:
        """Wait until a log has a line with a pattern, and return that line without the time of day."""
        self.until(lambda: re.search(pattern, self.log(where)), f"{pattern!r} in {where}: {self.log(where)[-800:]!r}")
        (line, *_) = (line for line in self.log(where).splitlines() if re.search(pattern, line))
        return re.sub(r"^[\d-]+ [\d:]+  ", "", line).replace(str(self.folder), "...")

    def call(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> int:
        """Send a body straight to the proxy, with the right authority, and return the answer's status."""
        from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

        trusted = ssl.create_default_context(cafile=self.access / "ca.crt")
        link = http.client.HTTPSConnection("localhost", self.listen, timeout=30, context=trusted)
        sent = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE, **(headers or {})}
        try:
            link.request("POST", path, body, sent)
            answer = link.getresponse()
            text = answer.read()[:300].decode(errors="replace")
            self.answered(f"{answer.status} {path}: {' '.join(text.split())}")
            return answer.status
        finally:
            link.close()

    def signed(self, key: Path | ec.EllipticCurvePrivateKey) -> dict[str, str]:
        """Return the headers by which Flower knows a site's key."""
        from flwr.common.constant import TIMESTAMP_HEADER
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER

        private = serialization.load_ssh_private_key(key.read_bytes(), None) if isinstance(key, Path) else key
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        moment = datetime.now(UTC).isoformat()
        return {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public(private)).decode(),
            TIMESTAMP_HEADER: moment,
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(private.sign(moment.encode(), ec.ECDSA(hashes.SHA256()))).decode(),
        }

    def stop(self, who: str) -> None:
        """Press Ctrl-C."""
        process = self.running.pop(who)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
        process.kill()
        process.wait()

    def end(self) -> None:
        """End all processes, and what a killed one has left behind."""
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        names = list(self.running)
        for who in names:
            self.stop(who)
        runs = [path.parent for path in self.folder.glob("*/flower/run.toml")]
        for folder in (*runs, *(self.home(who) / "flower" for who in names)):
            ProcessFolder(folder).kill_all()
        for access in self.nginx:
            subprocess.run([str(NGINX), "-c", access / "nginx.conf", "-s", "stop"], capture_output=True, check=False)


def public(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a key's public half as Flower sends it."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form)


def nothing(fed: Besieged) -> None:
    """Attack nobody."""


def stranger(fed: Besieged) -> None:
    """Join with a key that nobody has registered."""
    other = fed.folder / "elsewhere"
    make.create_keys(other, ["site-00"])
    fed.join("stranger", name="site-00", key=other / "sites" / "site-00" / "site-00.key")


def keyless(fed: Besieged) -> None:
    """Join without a key."""
    fed.join("keyless", name="site-00", key=None)


def wrong_authority(fed: Besieged) -> None:
    """Join with the certificate of another authority: the site must refuse the server."""
    other = fed.folder / "other"
    make.create_keys(other, [])
    fed.join("wrong-ca", name="site-00", ca=other / "ca.crt")


def expired(fed: Besieged) -> None:
    old = fed.folder / "run-out"
    listen = free_port()
    make.create_keys(
        old, [], ["localhost"], days=365, port=fed.port, listen=listen, now=datetime.now(UTC) - timedelta(days=400)
    )
    fed.proxy(old)
    fed.join("expired", name="site-00", ca=old / "ca.crt", listen=listen)


def other_host(fed: Besieged) -> None:
    """Let a site call the server by an address that its certificate does not name."""
    fed.join("other-host", name="site-00", host="127.0.0.2")


def twice(fed: Besieged) -> None:
    fed.join("twice", name="site-00")


def insecure(fed: Besieged) -> None:
    """Join without TLS."""
    fed.join("insecure", name="site-00", insecure=True)


def plain(fed: Besieged) -> None:
    """Speak plain HTTP to the port, by hand."""
    with socket.create_connection(("localhost", fed.listen), timeout=10) as link:
        link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        heard = b""
        while part := link.recv(4096):
            heard += part
    fed.answered(f"plain: {heard.decode().splitlines()[0]}")


CONTROL = ("list-runs", "start-run", "register-node", "list-nodes", "stop-run")
DETOURS = (
    "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "//v1/control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs", "/V1/control/list-runs", "/v1/fleet/./../control/list-runs",
)  # fmt: skip
INSIDE = ("/v1/runtime/pull-app-messages", "/v1/runtime/push-app-messages", "/docs", "/openapi.json", "/")


def operator(fed: Besieged) -> None:
    """Call Flower's Control API through the proxy, as its command line does: list and start runs, register a node."""
    for path in (*(f"/v1/control/{call}" for call in CONTROL), *DETOURS):
        status = fed.call(path, b"", fed.signed(fed.key(MALLORY)))
        # A path that nginx does not pass on as it is may end among the sites' calls, where there is no such one.
        if status not in (403, 404):
            raise Stuck(f"{path} was answered with {status}")


def inside(fed: Besieged) -> None:
    """Call the Runtime API, which is for programs on the server's machine, and whatever else there is."""
    for path in INSIDE:
        if (status := fed.call(path, b"", fed.signed(fed.key(MALLORY)))) != 403:
            raise Stuck(f"{path} was answered with {status}")


def registers_itself(fed: Besieged) -> None:
    """Register a key by the call that SuperNodes without a key use."""
    from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest

    key = ec.generate_private_key(ec.SECP384R1())
    body = RegisterNodeFleetRequest(public_key=public(key)).SerializeToString()
    if (status := fed.call("/v1/fleet/register-node", body, fed.signed(key))) != 412:
        raise Stuck(f"registering was answered with {status}")


def pulls_for_another(fed: Besieged) -> None:
    """Ask, with a key that may come in, for the messages of another site, whose number the attacker knows."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.proto.node_pb2 import Node

    numbers = {who.name: number for number, who in read_key_owners(fed.run / "flower" / "keys.json").items()}
    body = PullMessagesRequest(node=Node(node_id=numbers["site-00"])).SerializeToString()
    if (status := fed.call("/v1/fleet/pull-messages", body, fed.signed(fed.key(MALLORY)))) != 401:
        raise Stuck(f"the messages of another were answered with {status}")


def removed(fed: Besieged) -> None:
    """Take the name of another site with a key that may come in; then the key is removed, of which there is a copy."""
    key = fed.folder / "copy.key"
    key.touch(0o600)
    key.write_bytes(fed.key(MALLORY).read_bytes())
    fed.join("removed", name="site-01", key=key)
    fed.says("serve.log", TAKES_NAME)
    make.remove_site(fed.access, MALLORY)


def oversized(fed: Besieged) -> None:
    """Send a body of 20 MB straight to the proxy."""
    with suppress(ConnectionError, ssl.SSLError):  # it does not listen to the end
        fed.call("/v1/fleet/push-object", bytes(20_000_000), fed.signed(fed.key(MALLORY)))


def malformed(fed: Besieged) -> None:
    """Send a pickle, and bytes without a meaning, in place of a message: with a key that may come in, and without."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest

    bomb = pickle.dumps(Creates(fed.folder / "pwned"))
    bodies = {"pickle": bomb, "garbage": os.urandom(10_000), "nothing": PushMessagesRequest().SerializeToString()}
    for what, body in bodies.items():
        for headers in (fed.signed(fed.key(MALLORY)), {}):
            status = fed.call("/v1/fleet/push-messages", body, headers)
            if not 400 <= status < 500:
                raise Stuck(f"{what} was answered with {status}")


@dataclass(frozen=True)
class Attack:
    """What is done, beside a federation or by its last site, and what has to stand where: log and pattern."""

    what: str
    signs: tuple[tuple[str, str], ...]
    act: Callable[[Besieged], None] = nothing
    evil: str = ""


TAKES_NAME = "the site with the key of mallory calls itself 'site-01': it does not join under a name that"
NOT_IN = "the connection ended: the server does not let this site's key in"
UNTRUSTED = "the certificate of .* is not to be trusted"
ATTACKS: dict[str, Attack] = {
    "unknown-key": Attack("a site with a key that nobody registered", (("stranger", NOT_IN),), stranger),
    "no-key": Attack("a site without a key", (("keyless", "the server wants sites with a key"),), keyless),
    "wrong-ca": Attack(
        "a site with the certificate of another authority", (("wrong-ca", UNTRUSTED),), wrong_authority
    ),
    "expired": Attack("a server whose certificate has run out", (("expired", f"{UNTRUSTED}.*expired"),), expired),
    "other-host": Attack(
        "a server that is called by a name which its certificate does not have",
        (("other-host", f"{UNTRUSTED}.*mismatch"),), other_host,
    ),
    "same-key": Attack("a second process with the key of a site that takes part", (("twice", NOT_IN),), twice),
    "insecure": Attack("a site that speaks plain text", (("insecure", "speaks TLS only"),), insecure),
    "plain": Attack("plain HTTP by hand", (("caller", "plain: HTTP/1.1 400"), ("nginx", ' 400 "')), plain),
    "control": Attack(
        "calls of Flower's Control API (list runs, start one, register a node), straight and by detours",
        (("nginx", ' 403 "POST /v1/control/start-run'), ("caller", "403 /v1/control/register-node")), operator,
    ),
    "runtime": Attack(
        "calls of Flower's Runtime API, and of its own pages",
        (("nginx", ' 403 "POST /v1/runtime/'), ("caller", "403 /docs")), inside,
    ),
    "self-registration": Attack(
        "a node that registers itself",
        (("nginx", ' 412 "POST /v1/fleet/register-node'), ("caller", "must be registered")), registers_itself,
    ),
    "others-messages": Attack(
        "a site with a key that asks for the messages of another",
        (("nginx", ' 401 "POST /v1/fleet/pull-messages'), ("caller", "Invalid SuperNode authentication")),
        pulls_for_another,
    ),
    "removed": Attack(
        "a site with a key that takes the name of another; then its key is removed, and it tries to come back",
        (
            ("serve.log", TAKES_NAME),
            ("serve.log", "mallory may not come in any more: its key is removed"),
            ("removed", NOT_IN),
        ),
        removed,
    ),
    "oversized-body": Attack(
        "a body of 20 MB, straight at the proxy", (("nginx", ' 413 "POST /v1/fleet/push-object'),), oversized
    ),
    "malformed-body": Attack(
        "a pickle, or bytes without a meaning, in place of a message of Flower",
        (("nginx", ' 4.. "POST /v1/fleet/push-messages'),), malformed,
    ),
    "replay": Attack(
        "a site that answers with its answer of the round before",
        (("serve.log", "refused in round 2: the answer of site-02: it answers round 1"),), evil="replay:1",
    ),
    "pickle": Attack(
        "a site that answers with a pickle", (("serve.log", "refused in round 3: the answer of site-02: a message"),),
        evil="pickle:2",
    ),
    "garbage": Attack(
        "a site that answers with bytes without a meaning",
        (("serve.log", "refused in round 1: the answer of site-02: a message"),), evil="garbage:0",
    ),
    "large": Attack(
        "a site that answers with 300 MB",
        (("serve.log", "refused in round 4: the answer of site-02: "),), evil="large:3",
    ),
}  # fmt: skip
LAST = "removed"
"""Takes away the key that other attacks use, so it comes last where all come at once."""


def executed(fed: Besieged) -> list[Path]:
    return sorted(fed.folder.rglob("pwned"))

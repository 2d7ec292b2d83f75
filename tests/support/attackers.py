"""Run a federation of real processes behind nginx, and attack it. Also used by benchmarks/federation_attacks.py.

The sites have keys. `MALLORY` has a key too, but is not a member of the federation. An `Attack` runs against the
federation and names the log lines that must show its refusal. Attacks use only what an outsider could use.
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

from attacking.sitecustomize import CreateFileOnUnpickle
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
"""A site with a key that is not a member of the federation. The last member attacks too, with `Attack.site_attack`."""
WAIT_SECONDS = 900.0
"""Seconds after which waiting for an event fails."""
POLL_SECONDS = 0.2
"""Seconds between two reads of the logs, which slow down the processes."""

EXPORT_COMMAND = ("site", "export", "digits", "--sites", "3", "--labels-per-class", "4")
FEDERATION_FILE = "attacked.toml"
RUN_OPTIONS: dict[str, Any] = {
    "method": "fedavg", "network": "small", "width": 4, "rounds": 5, "steps": 4, "labeled_batch": 8,
    "unlabeled_batch": 8, "cohort": 3, "seed": 7,
}  # fmt: skip
FEDERATION_OPTIONS = {"min_replies": 3, "strikes": 0}
"""A round without a reply of each site is repeated, so that the weights equal those of a run without attacks."""


class AttackNotRefused(AssertionError):
    """An expected event did not happen, or a request was not refused."""


def write_federation_file(exported: Path, rounds: int = RUN_OPTIONS["rounds"], sites: int = len(SITES)) -> Path:
    """Write the federation's file to the folder of exported sites, and return it."""
    exported_lines = [
        line
        for line in (exported / "federation.toml").read_text().splitlines()
        if line.split(" = ")[0] not in RUN_OPTIONS
    ]
    run_lines = [
        f"{name} = {json.dumps(value)}" for name, value in {**RUN_OPTIONS, "rounds": rounds, "cohort": sites}.items()
    ]
    federation_lines = [f"{name} = {value}" for name, value in {**FEDERATION_OPTIONS, "min_replies": sites}.items()]
    path = exported / FEDERATION_FILE
    path.write_text("\n".join([*run_lines, *exported_lines, *federation_lines]) + "\n")
    return path


@dataclass
class AttackedFederation:
    """A running federation of real processes. It can serve several runs, one after the other.

    Attributes:
        folder: contains everything that is written.
        sites: the folders of images.
        site_attack: attacks of the last site, as `attacking/sitecustomize.py` reads them.
        rounds: number of rounds.
        site_names: the members. The last one attacks.
        run: folder of the current run.
        port: port of the server.
        proxy_port: port of nginx.
        running: processes by name.
        nginx: configuration folder of each nginx.
        log_starts: offset in each log at which the current run starts.
    """

    folder: Path
    sites: Path
    site_attack: str = ""
    rounds: int = RUN_OPTIONS["rounds"]
    site_names: tuple[str, ...] = SITES
    run: Path = field(init=False)
    port: int = field(default_factory=free_port)
    proxy_port: int = field(default_factory=free_port)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    nginx: list[Path] = field(default_factory=list)
    log_starts: dict[str, int] = field(default_factory=dict)

    @property
    def access(self) -> Path:
        """Return the folder of keys and certificates."""
        return self.folder / "access"

    def get_client_folder(self, process_name: str) -> Path:
        """Return the folder in which a process of a site stores its state."""
        return self.folder / "homes" / process_name

    def get_key_file(self, name: str) -> Path:
        """Return the private key of a site."""
        return self.access / "sites" / name / f"{name}.key"

    def create_keys_and_proxy(self) -> None:
        """Create the keys of all sites and start nginx."""
        make.create_keys(
            self.access, [*self.site_names, MALLORY], ["localhost"], port=self.port, listen=self.proxy_port
        )
        self.start_proxy(self.access)

    def start_proxy(self, access: Path) -> None:
        """Start nginx with the configuration in a folder."""
        assert NGINX is not None
        completed = subprocess.run([NGINX, "-c", access / "nginx.conf"], capture_output=True, check=False)
        assert completed.returncode == 0, completed.stderr.decode()
        self.nginx.append(access)

    def serve(self, run: str = "run") -> None:
        """Start the server of a new run."""
        self.run = self.folder / run
        self.hold_last_reply(True)
        self.log_starts = {log: len(self._read_whole_log(log)) for log in ("nginx", "caller")}
        arguments = [str(self.sites / FEDERATION_FILE), "--run-dir", str(self.run), "--access", str(self.access)]
        self.start_command("serve", ["serve", *arguments], {})

    def hold_last_reply(self, held: bool) -> None:
        """Let the attacking site delay its reply in the last round, so that the run outlasts the attacks, or release it."""
        hold = f" hold:{self.rounds - 1}" if held else ""
        atomic_io.write_atomically(self.folder / "evil", (self.site_attack + hold).encode())

    def start_all(self) -> None:
        """Start nginx, the server and all sites."""
        self.create_keys_and_proxy()
        self.serve()
        for name in self.site_names:
            self.join(name)

    def start_command(
        self, process_name: str, arguments: list[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start `halfmoon` with arguments and environment variables."""
        self.get_client_folder(process_name).mkdir(parents=True, exist_ok=True)
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        with self.get_output_file(process_name).open("ab") as out:
            self.running[process_name] = subprocess.Popen([HALFMOON, *arguments], stdout=out, stderr=out, env=variables)
        return self.running[process_name]

    def join(
        self, process_name: str, *, name: str = "", key: Path | str | None = "", ca: Path | None = None, host: str = "localhost",
        proxy_port: int = 0, insecure: bool = False,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """Start a site, by default with correct arguments.

        Args:
            process_name: name of the process.
            name: name of the site, by default the name of the process.
            key: private key, by default the site's; None for none.
            ca: certificate of the authority, by default the server's.
            host: address of the server.
            proxy_port: port of the server, by default that of nginx.
            insecure: whether to connect without TLS.
        """
        name = name or process_name
        key = self.get_key_file(name) if key == "" else key
        arguments = ["site", "join", "--server", f"{host}:{proxy_port or self.proxy_port}", "--name", name]
        arguments += [
            "--site",
            str(self.sites / (name if name in self.site_names else self.site_names[0])),
            "--home",
            str(self.get_client_folder(process_name)),
        ]
        arguments += ["--terms", "any", *([] if insecure else ["--ca", str(ca or self.access / "ca.crt")])]
        arguments += [] if key is None or insecure else ["--key", str(key)]
        environment: dict[str, str] = {}
        if process_name == self.site_names[-1]:
            paths = [str(Path(__file__).parent / "attacking"), os.environ.get("PYTHONPATH", "")]
            environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "ATTACK": str(self.folder / "evil")}
        return self.start_command(process_name, arguments, environment)

    def get_output_file(self, process_name: str) -> Path:
        """Return the file with the output of a process."""
        return self.folder / f"{process_name}.out"

    def read_log(self, log: str) -> str:
        """Return the text of a log since the start of this run.

        Args:
            log: "serve.log", "nginx", "caller" (responses to `send_request`), or the name of a process.
        """
        return self._read_whole_log(log)[self.log_starts.get(log, 0) :]

    def _read_whole_log(self, log: str) -> str:
        paths = {
            "serve.log": self.run / "serve.log",
            "nginx": self.access / "nginx" / "access.log",
            "caller": self.folder / "caller",
        }
        path = paths.get(log) or self.get_output_file(log)
        return re.sub(r"\x1b\[\d*m", "", (atomic_io.read(path) or b"").decode(errors="replace"))

    def record_response(self, text: str) -> None:
        """Append a line to the log "caller"."""
        atomic_io.append(self.folder / "caller", f"{text}\n".encode())

    def wait_until(self, condition: Callable[[], object], description: str) -> None:
        """Wait for a condition; raise AttackNotRefused if it takes too long or the server fails."""
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            code = self.running["serve"].poll() if "serve" in self.running else None
            if time.monotonic() > end or code not in (None, 0):
                raise AttackNotRefused(
                    f"waited in vain for {description}; the server's log ends: {self.read_log('serve.log')[-1500:]}"
                )
            time.sleep(POLL_SECONDS)

    def wait_for_log(self, log: str, pattern: str) -> str:
        """Wait until a line of a log matches a pattern, and return that line without its time."""
        self.wait_until(
            lambda: re.search(pattern, self.read_log(log)), f"{pattern!r} in {log}: {self.read_log(log)[-800:]!r}"
        )
        (line, *_) = (line for line in self.read_log(log).splitlines() if re.search(pattern, line))
        return re.sub(r"^[\d-]+ [\d:]+  ", "", line).replace(str(self.folder), "...")

    def send_request(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> int:
        """Post a body directly to nginx over TLS, and return the status of the response."""
        from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

        context = ssl.create_default_context(cafile=self.access / "ca.crt")
        connection = http.client.HTTPSConnection("localhost", self.proxy_port, timeout=30, context=context)
        all_headers = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE, **(headers or {})}
        try:
            connection.request("POST", path, body, all_headers)
            response = connection.getresponse()
            text = response.read()[:300].decode(errors="replace")
            self.record_response(f"{response.status} {path}: {' '.join(text.split())}")
            return response.status
        finally:
            connection.close()

    def sign_headers(self, key: Path | ec.EllipticCurvePrivateKey) -> dict[str, str]:
        """Return the headers with which a site authenticates to Flower."""
        from flwr.common.constant import TIMESTAMP_HEADER
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER

        private = serialization.load_ssh_private_key(key.read_bytes(), None) if isinstance(key, Path) else key
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        moment = datetime.now(UTC).isoformat()
        return {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(encode_public_key(private)).decode(),
            TIMESTAMP_HEADER: moment,
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(private.sign(moment.encode(), ec.ECDSA(hashes.SHA256()))).decode(),
        }

    def stop(self, process_name: str) -> None:
        """Interrupt a process, and kill it if it does not end."""
        process = self.running.pop(process_name)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
        process.kill()
        process.wait()

    def stop_all(self) -> None:
        """Stop all processes, nginx, and the child processes of those that were killed."""
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        names = list(self.running)
        for process_name in names:
            self.stop(process_name)
        runs = [path.parent for path in self.folder.glob("*/flower/run.toml")]
        for folder in (*runs, *(self.get_client_folder(process_name) / "flower" for process_name in names)):
            ProcessFolder(folder).kill_all()
        for access in self.nginx:
            subprocess.run([str(NGINX), "-c", access / "nginx.conf", "-s", "stop"], capture_output=True, check=False)


def encode_public_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Encode the public key as Flower sends it."""
    key_format = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, key_format)


def do_nothing(fed: AttackedFederation) -> None:
    """Run no attack from outside."""


def join_with_unknown_key(fed: AttackedFederation) -> None:
    """Join with a key that is not registered."""
    other_access = fed.folder / "elsewhere"
    make.create_keys(other_access, ["site-00"])
    fed.join("stranger", name="site-00", key=other_access / "sites" / "site-00" / "site-00.key")


def join_without_key(fed: AttackedFederation) -> None:
    """Join without a key."""
    fed.join("keyless", name="site-00", key=None)


def join_with_wrong_authority(fed: AttackedFederation) -> None:
    """Join with the certificate of another authority: the site must refuse the server."""
    other_access = fed.folder / "other"
    make.create_keys(other_access, [])
    fed.join("wrong-ca", name="site-00", ca=other_access / "ca.crt")


def join_expired_server(fed: AttackedFederation) -> None:
    """Join a server whose certificate has expired: the site must refuse it."""
    expired_access = fed.folder / "run-out"
    listen = free_port()
    make.create_keys(
        expired_access,
        [],
        ["localhost"],
        days=365,
        port=fed.port,
        listen=listen,
        now=datetime.now(UTC) - timedelta(days=400),
    )
    fed.start_proxy(expired_access)
    fed.join("expired", name="site-00", ca=expired_access / "ca.crt", proxy_port=listen)


def join_by_other_address(fed: AttackedFederation) -> None:
    """Join by an address that is not in the server's certificate: the site must refuse it."""
    fed.join("other-host", name="site-00", host="127.0.0.2")


def join_twice(fed: AttackedFederation) -> None:
    """Start a second process with the key of a site."""
    fed.join("twice", name="site-00")


def join_without_tls(fed: AttackedFederation) -> None:
    """Join without TLS."""
    fed.join("insecure", name="site-00", insecure=True)


def send_plain_http(fed: AttackedFederation) -> None:
    """Send a plain HTTP request to the TLS port."""
    with socket.create_connection(("localhost", fed.proxy_port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        response = b""
        while chunk := connection.recv(4096):
            response += chunk
    fed.record_response(f"plain: {response.decode().splitlines()[0]}")


CONTROL_CALLS = ("list-runs", "start-run", "register-node", "list-nodes", "stop-run")
CONTROL_DETOURS = (
    "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "//v1/control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs", "/V1/control/list-runs", "/v1/fleet/./../control/list-runs",
)  # fmt: skip
INTERNAL_PATHS = ("/v1/runtime/pull-app-messages", "/v1/runtime/push-app-messages", "/docs", "/openapi.json", "/")


def call_control_api(fed: AttackedFederation) -> None:
    """Call Flower's Control API through the proxy, as its command line does: list and start runs, register a node."""
    for path in (*(f"/v1/control/{call}" for call in CONTROL_CALLS), *CONTROL_DETOURS):
        status = fed.send_request(path, b"", fed.sign_headers(fed.get_key_file(MALLORY)))
        # nginx may normalize a path to one of the calls for sites, which then does not exist.
        if status not in (403, 404):
            raise AttackNotRefused(f"{path} was answered with {status}")


def call_runtime_api(fed: AttackedFederation) -> None:
    """Call the Runtime API, which is only for programs on the server's machine, and other paths."""
    for path in INTERNAL_PATHS:
        if (status := fed.send_request(path, b"", fed.sign_headers(fed.get_key_file(MALLORY)))) != 403:
            raise AttackNotRefused(f"{path} was answered with {status}")


def register_node(fed: AttackedFederation) -> None:
    """Register a new key with the call that is meant for SuperNodes without a registered key."""
    from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest

    key = ec.generate_private_key(ec.SECP384R1())
    body = RegisterNodeFleetRequest(public_key=encode_public_key(key)).SerializeToString()
    if (status := fed.send_request("/v1/fleet/register-node", body, fed.sign_headers(key))) != 412:
        raise AttackNotRefused(f"registering was answered with {status}")


def pull_messages_of_another_site(fed: AttackedFederation) -> None:
    """Request the messages of another site by its node id, with a registered key."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.proto.node_pb2 import Node

    numbers = {owner.name: number for number, owner in read_key_owners(fed.run / "flower" / "keys.json").items()}
    body = PullMessagesRequest(node=Node(node_id=numbers["site-00"])).SerializeToString()
    if (
        status := fed.send_request("/v1/fleet/pull-messages", body, fed.sign_headers(fed.get_key_file(MALLORY)))
    ) != 401:
        raise AttackNotRefused(f"the messages of another were answered with {status}")


def use_and_remove_key(fed: AttackedFederation) -> None:
    """Join with a registered key under the name of another site, then remove the key. The site joins with a copy."""
    key = fed.folder / "copy.key"
    key.touch(0o600)
    key.write_bytes(fed.get_key_file(MALLORY).read_bytes())
    fed.join("removed", name="site-01", key=key)
    fed.wait_for_log("serve.log", WRONG_NAME)
    make.remove_site(fed.access, MALLORY)


def send_oversized_body(fed: AttackedFederation) -> None:
    """Send a body of 20 MB directly to nginx."""
    with suppress(ConnectionError, ssl.SSLError):  # nginx closes the connection before the end of the body
        fed.send_request("/v1/fleet/push-object", bytes(20_000_000), fed.sign_headers(fed.get_key_file(MALLORY)))


def send_malformed_bodies(fed: AttackedFederation) -> None:
    """Send a pickle, random bytes and an empty message, each with a registered key and without a key."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest

    bomb = pickle.dumps(CreateFileOnUnpickle(fed.folder / "pwned"))
    bodies = {"pickle": bomb, "garbage": os.urandom(10_000), "nothing": PushMessagesRequest().SerializeToString()}
    for kind, body in bodies.items():
        for headers in (fed.sign_headers(fed.get_key_file(MALLORY)), {}):
            status = fed.send_request("/v1/fleet/push-messages", body, headers)
            if not 400 <= status < 500:
                raise AttackNotRefused(f"{kind} was answered with {status}")


@dataclass(frozen=True)
class Attack:
    """An attack on a running federation.

    Attributes:
        description: for the table of results.
        log_patterns: (log, pattern) of the lines that must show the refusal.
        run: runs the attack from outside.
        site_attack: the attack of the last site: kind of reply and round, as in `attacking/sitecustomize.py`.
    """

    description: str
    log_patterns: tuple[tuple[str, str], ...]
    run: Callable[[AttackedFederation], None] = do_nothing
    site_attack: str = ""


WRONG_NAME = "the site with the key of mallory calls itself 'site-01': it does not join under a name that"
KEY_REFUSED = "the connection ended: the server does not let this site's key in"
UNTRUSTED = "the certificate of .* is not to be trusted"
ATTACKS: dict[str, Attack] = {
    "unknown-key": Attack("a site with an unregistered key", (("stranger", KEY_REFUSED),), join_with_unknown_key),
    "no-key": Attack("a site without a key", (("keyless", "the server wants sites with a key"),), join_without_key),
    "wrong-ca": Attack(
        "a site that trusts another certificate authority", (("wrong-ca", UNTRUSTED),), join_with_wrong_authority
    ),
    "expired": Attack("a server with an expired certificate", (("expired", f"{UNTRUSTED}.*expired"),), join_expired_server),
    "other-host": Attack(
        "a server at an address that its certificate does not contain",
        (("other-host", f"{UNTRUSTED}.*mismatch"),), join_by_other_address,
    ),
    "same-key": Attack("a second process with the key of a connected site", (("twice", KEY_REFUSED),), join_twice),
    "insecure": Attack("a site that connects without TLS", (("insecure", "speaks TLS only"),), join_without_tls),
    "plain": Attack("a plain HTTP request to the TLS port", (("caller", "plain: HTTP/1.1 400"), ("nginx", ' 400 "')), send_plain_http),
    "control": Attack(
        "calls of Flower's Control API (list runs, start a run, register a node), also by disguised paths",
        (("nginx", ' 403 "POST /v1/control/start-run'), ("caller", "403 /v1/control/register-node")), call_control_api,
    ),
    "runtime": Attack(
        "calls of Flower's Runtime API and of its documentation page",
        (("nginx", ' 403 "POST /v1/runtime/'), ("caller", "403 /docs")), call_runtime_api,
    ),
    "self-registration": Attack(
        "a node that registers a new key",
        (("nginx", ' 412 "POST /v1/fleet/register-node'), ("caller", "must be registered")), register_node,
    ),
    "others-messages": Attack(
        "a registered site that requests the messages of another site",
        (("nginx", ' 401 "POST /v1/fleet/pull-messages'), ("caller", "Invalid SuperNode authentication")),
        pull_messages_of_another_site,
    ),
    "removed": Attack(
        "a registered site under the name of another; then its key is removed, and it reconnects",
        (
            ("serve.log", WRONG_NAME),
            ("serve.log", "mallory may not come in any more: its key is removed"),
            ("removed", KEY_REFUSED),
        ),
        use_and_remove_key,
    ),
    "oversized-body": Attack(
        "a body of 20 MB, sent to the proxy", (("nginx", ' 413 "POST /v1/fleet/push-object'),), send_oversized_body
    ),
    "malformed-body": Attack(
        "a pickle, or random bytes, in place of a message of Flower",
        (("nginx", ' 4.. "POST /v1/fleet/push-messages'),), send_malformed_bodies,
    ),
    "replay": Attack(
        "a site that sends its reply of the previous round",
        (("serve.log", "refused in round 2: the answer of site-02: it answers round 1"),), site_attack="replay:1",
    ),
    "pickle": Attack(
        "a site that replies with a pickle", (("serve.log", "refused in round 3: the answer of site-02: a message"),),
        site_attack="pickle:2",
    ),
    "garbage": Attack(
        "a site that replies with random bytes",
        (("serve.log", "refused in round 1: the answer of site-02: a message"),), site_attack="garbage:0",
    ),
    "large": Attack(
        "a site that replies with 300 MB",
        (("serve.log", "refused in round 4: the answer of site-02: "),), site_attack="large:3",
    ),
}  # fmt: skip
FINAL_ATTACK = "removed"
"""The attack that removes the key which other attacks use, and therefore must be the last."""


def list_executed_pickles(fed: AttackedFederation) -> list[Path]:
    """Return the files that unpickling `CreateFileOnUnpickle` has created."""
    return sorted(fed.folder.rglob("pwned"))

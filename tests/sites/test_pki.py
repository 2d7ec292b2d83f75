"""Who may come in: certificates and keys as others read them, changes that no kill can halve, nothing secret shown."""

import argparse
import base64
import json
import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

from halfmoon.cli import main as cli
from halfmoon.cli.commands.base import list_flags
from halfmoon.config.schema import SITE_NAME
from halfmoon.core.errors import UserError
from halfmoon.federation.server.plan import load_plan
from halfmoon.sites.keys import Access, key_folder
from halfmoon.sites.keys.key_folder import describe_time_until
from halfmoon.sites.keys.make import (
    add_site,
    create_keys,
    list_keys,
    parse_host,
    remove_site,
    renew_certificates,
    replace_site_key,
)
from halfmoon.storage.private_folders import check_parents

LONG_AGO = datetime(2020, 3, 1, 12, tzinfo=UTC)
needs = {
    tool: pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed")
    for tool in ("openssl", "ssh-keygen")
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_keys(tmp_path / "fed", ["north", "south"], ["federation.example", "192.0.2.7"])
    return tmp_path / "fed"


def run_command(*message: str) -> str:
    """Run a program and return what it says; it has to succeed."""
    return subprocess.run(message, check=True, capture_output=True, text=True).stdout


def foreign(path: Path, kind: str = "ecdsa", bits: str = "384") -> Path:
    run_command("ssh-keygen", "-q", "-t", kind, "-b", bits, "-N", "", "-C", "somebody@else", "-f", str(path))
    return path.with_suffix(".pub")


@needs["openssl"]
def test_openssl_accepts_the_certificate_under_the_authority_alone(folder: Path, tmp_path: Path) -> None:
    """Its chain holds by the strict rules, for its names, as a server's, and not under another authority."""
    certificate = str(folder / "server" / "server.crt")
    verify = ("openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile")
    for named in (("-verify_hostname", "federation.example"), ("-verify_ip", "192.0.2.7"), ("-verify_ip", "::1")):
        assert run_command(*verify, str(folder / "ca.crt"), *named, certificate).endswith(": OK\n")
    create_keys(tmp_path / "other")
    for message in (
        (*verify, str(tmp_path / "other" / "ca.crt"), certificate),
        (*verify, str(folder / "ca.crt"), "-verify_hostname", "other.example", certificate),
        ("openssl", "verify", "-purpose", "sslclient", "-CAfile", str(folder / "ca.crt"), certificate),
    ):
        assert subprocess.run(message, capture_output=True, check=False).returncode == 2


@needs["openssl"]
def test_the_authority_may_sign_certificates_and_no_other_authority(folder: Path) -> None:
    shown = run_command("openssl", "x509", "-noout", "-text", "-in", str(folder / "ca.crt"))
    assert "CA:TRUE, pathlen:0" in shown
    assert re.search(r"Key Usage: critical\n\s+Certificate Sign\n", shown)
    assert "ASN1 OID: secp384r1" in shown
    shown = run_command("openssl", "x509", "-noout", "-text", "-in", str(folder / "server" / "server.crt"))
    assert "CA:FALSE" in shown
    assert re.search(r"Extended Key Usage: *\n\s+TLS Web Server Authentication\n", shown)
    names = "DNS:federation.example, IP Address:192.0.2.7, DNS:localhost, IP Address:127.0.0.1"
    assert f"{names}, IP Address:0:0:0:0:0:0:0:1" in shown


@needs["openssl"]
@needs["ssh-keygen"]
def test_fingerprints_are_those_that_openssl_and_ssh_keygen_show(folder: Path) -> None:
    found = list_keys(folder)
    for name, path in (("authority", "ca.crt"), ("server", "server/server.crt")):
        shown = run_command("openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", str(folder / path))
        assert shown.strip().partition("=")[2] == found[name]["fingerprint"]
        end = run_command("openssl", "x509", "-noout", "-dateopt", "iso_8601", "-enddate", "-in", str(folder / path))
        assert end.startswith(f"notAfter={found[name]['until']} ")
    for site in found["sites"]:
        for suffix in ("pub", "key"):
            shown = run_command(
                "ssh-keygen", "-l", "-f", str(folder / "sites" / site["name"] / f"{site['name']}.{suffix}")
            )
            assert shown.split()[:2] == ["384", site["fingerprint"]]


def test_flower_reads_a_site_s_key_and_its_public_half(folder: Path) -> None:
    """By the very functions of `flower-supernode` and `flwr supernode register`."""
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication

    site = folder / "sites" / "north"
    given = argparse.Namespace(auth_supernode_private_key=str(site / "north.key"), auth_supernode_public_key=None)
    pair = _try_setup_client_authentication(given)
    assert try_load_public_key(Access.open(folder).sites["north"]) == public_key_to_bytes(pair[1])


def shaken(at: Path, ca: Path, name: str) -> str:
    """Return "" once a client that trusts `ca` has shaken hands with the server of a folder, or why it refuses."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(at / "server" / "server.crt", at / "server" / "server.key")
    calling = ssl.create_default_context(cafile=ca)
    calling.verify_flags |= ssl.VERIFY_X509_STRICT
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve_once() -> None:
            link = listener.accept()[0]
            try:
                serving.wrap_socket(link, server_side=True).close()
            except OSError:
                link.close()

        thread = threading.Thread(target=serve_once)
        thread.start()
        try:
            with socket.create_connection(listener.getsockname(), timeout=10) as link:
                calling.wrap_socket(link, server_hostname=name).close()
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
        finally:
            thread.join()
    return ""


def test_a_site_shakes_hands_with_the_right_server_alone(folder: Path, tmp_path: Path) -> None:
    """By OpenSSL's strict rules and every name it was given; not by another, under another authority or too late."""
    for name in ("federation.example", "192.0.2.7", "localhost", "127.0.0.1", "::1"):
        assert shaken(folder, folder / "ca.crt", name) == ""
    assert "Hostname mismatch" in shaken(folder, folder / "ca.crt", "other.example")
    assert "IP address mismatch" in shaken(folder, folder / "ca.crt", "192.0.2.8")
    create_keys(tmp_path / "other", hosts=["federation.example"])
    assert "unable to get local issuer" in shaken(folder, tmp_path / "other" / "ca.crt", "federation.example")
    create_keys(tmp_path / "old", days=30, now=LONG_AGO)
    assert shaken(tmp_path / "old", tmp_path / "old" / "ca.crt", "localhost") == "certificate has expired"


def test_a_new_server_certificate_needs_nothing_at_the_sites_and_a_new_authority_does(folder: Path) -> None:
    """A site with the old ca.crt connects after a new server certificate, and not after a new authority until it has its ca.crt."""
    stored = folder / "sites" / "north" / "ca.crt"
    old = stored.read_bytes()
    before = (folder / "server" / "server.key").read_bytes()
    done = renew_certificates(folder, days=7)
    assert (folder / "server" / "server.key").read_bytes() != before
    assert stored.read_bytes() == old
    assert shaken(folder, stored, "federation.example") == ""
    assert "The sites have nothing to do: they trust the same authority." in done.advice
    done = renew_certificates(folder, ca=True)
    outside = folder.parent / "old.crt"
    outside.write_bytes(old)
    assert shaken(folder, outside, "federation.example") != ""
    assert stored.read_bytes() != old
    assert shaken(folder, stored, "federation.example") == ""
    assert done.advice[0].startswith(f"Hand {folder / 'ca.crt'} to every site (north, south)")


def test_a_server_that_moves_gets_its_new_name(folder: Path) -> None:
    done = renew_certificates(folder, hosts=["2001:db8::7"])
    assert shaken(folder, folder / "ca.crt", "2001:db8::7") == ""
    assert shaken(folder, folder / "ca.crt", "federation.example") != ""
    assert "--server [2001:db8::7]:9443 " in (folder / "sites" / "north" / "join.txt").read_text()
    assert any("now join --server [2001:db8::7]:9443" in each for each in done.advice)


def test_a_certificate_ends_with_its_authority(tmp_path: Path) -> None:
    """The authority of 2020 lives 3,650 days, until 2030-02-27; a certificate of 300 days in 2029-12 does not."""
    create_keys(tmp_path / "fed", now=LONG_AGO)
    renew_certificates(tmp_path / "fed", days=300, now=datetime(2029, 12, 1, tzinfo=UTC))
    found = list_keys(tmp_path / "fed", datetime(2029, 12, 1, tzinfo=UTC))
    assert (found["authority"]["until"], found["server"]["until"]) == ("2030-02-27", "2030-02-27")
    with pytest.raises(UserError, match="the authority has expired"):
        renew_certificates(tmp_path / "fed", now=datetime(2030, 3, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    ("distance", "message"),
    [
        (timedelta(days=34, hours=5), "in 34 days"),
        (timedelta(days=1, hours=23), "in 1 day"),
        (timedelta(hours=23, minutes=59), "in 23 hours"),
        (timedelta(minutes=59), "in less than an hour"),
        (timedelta(0), "EXPIRED less than an hour ago"),
        (-timedelta(hours=1), "EXPIRED 1 hour ago"),
        (-timedelta(days=3, hours=1), "EXPIRED 3 days ago"),
    ],
)
def test_how_far_away_an_end_is(distance: timedelta, message: str) -> None:
    assert describe_time_until(LONG_AGO + distance, LONG_AGO) == message


def test_warnings_come_a_month_before_the_end(tmp_path: Path) -> None:
    """Of 90 days from 2020-03-01 12:00 the last month begins on 2020-04-30 12:00."""
    create_keys(tmp_path / "fed", days=90, now=LONG_AGO)
    access = Access.open(tmp_path / "fed")
    order = f"halfmoon federation rotate {tmp_path / 'fed'} --server"
    assert access.warnings(LONG_AGO + timedelta(days=59)) == []
    soon = access.warnings(LONG_AGO + timedelta(days=60))
    assert soon == [f"the server's certificate runs out in 30 days: run {order} before."]
    late = access.warnings(LONG_AGO + timedelta(days=93, hours=1))
    assert late == [f"the server's certificate EXPIRED 3 days ago, and no site can come in: run {order}."]
    early = access.warnings(LONG_AGO - timedelta(days=1))
    assert len(early) == 2
    assert "is not valid before 2020-03-01 11:00 UTC" in early[0]
    assert len(access.warnings()) == 1  # the authority is good until 2030


def test_warnings_of_certificates_that_went_away_are_sentences(folder: Path) -> None:
    access = Access.open(folder)
    access.certificate.write_text("x")
    with pytest.raises(UserError, match=r"server\.crt cannot be read"):
        access.warnings()
    access.ca.unlink()
    with pytest.raises(UserError, match=r"ca\.crt is missing"):
        access.warnings()


def bodies(folder: Path) -> list[str]:
    """Return of all private keys in a folder the lines that hold a part of the private number.
    The others hold the public half, which a certificate may repeat."""
    found: list[str] = []
    for path in folder.rglob("*.key"):
        lines = [line for line in path.read_text().splitlines() if "-----" not in line]
        load = load_ssh_private_key if "OPENSSH" in path.read_text() else load_pem_private_key
        key = load(path.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        number = key.private_numbers().private_value.to_bytes(48, "big").lstrip(b"\0")
        offset = base64.b64decode("".join(lines)).index(number) * 4 // 3
        width = len(lines[0])
        matching = [line for k, line in enumerate(lines) if k * width < offset + 48 and (k + 1) * width > offset + 16]
        assert matching
        found += matching
    return found


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_private_files_are_private_from_their_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made by one call that gives it mode 600, for any umask; no mode is changed later."""
    made: dict[str, int] = {}
    opening = os.open

    def noting(path: str | Path, flags: int, mode: int = 0o777, **more: int) -> int:
        if flags & os.O_CREAT:
            made[Path(path).name] = mode if flags & os.O_EXCL else -1
        return opening(path, flags, mode, **more)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a mode is changed")

    monkeypatch.setattr(os, "open", noting)
    for name in ("chmod", "fchmod", "lchmod"):
        monkeypatch.setattr(os, name, forbidden, raising=False)
    before = os.umask(0)
    try:
        create_keys(tmp_path / "fed", ["north"])
        add_site(tmp_path / "fed", "south")
        renew_certificates(tmp_path / "fed", ca=True)
    finally:
        os.umask(before)
    private = {"ca.key", "server.key", "north.key", "south.key"}
    assert {name: made[name] for name in private} == dict.fromkeys(private, 0o600)
    files = list((tmp_path / "fed").rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in files if path.suffix == ".key"} == {0o600}
    folders = [tmp_path / "fed", *(path for path in files if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_nothing_private_is_printed_or_written_elsewhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    at = str(tmp_path / "fed")
    secrets: list[str] = []
    for message in (
        ["init", at, "--sites", "north", "south", "--host", "federation.example"],
        ["add-site", at, "east"],
        ["add-site", at, "west", "--json"],
        ["rotate", at, "--site", "north"],
        ["rotate", at, "--server", "--json"],
        ["rotate", at, "--ca"],
        ["show", at],
        ["show", at, "--json"],
        ["remove-site", at, "east"],
    ):
        secrets += bodies(tmp_path / "fed") if (tmp_path / "fed").exists() else []
        assert cli.main(["federation", *message]) == 0
    shown = "".join(capfd.readouterr())
    others = [path.read_text() for path in (tmp_path / "fed").rglob("*") if path.is_file() and path.suffix != ".key"]
    for text in (shown, *others):
        assert "PRIVATE" not in text
        assert not [line for line in secrets if line in text]
    assert "SHA256:" in shown


def test_fingerprints_are_shown_as_they_are(folder, monkeypatch, capsys):
    """The library that prints would make a picture of the disk of ":CD:", and of 🆎 of ":AB:"."""
    seal = ":".join(["AB", "CD"] * 16)
    found = list_keys(folder)
    found["server"]["fingerprint"] = seal
    monkeypatch.setattr("halfmoon.sites.keys.make.list_keys", lambda _: found)
    assert cli.main(["federation", "show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert seal in shown
    assert re.search(r"^certificate of the server +in 364 days \(\d{4}-\d\d-\d\d\)", shown, re.MULTILINE)


@needs["ssh-keygen"]
def test_a_key_made_at_the_site_is_taken_and_no_private_one_is_made(folder: Path, tmp_path: Path) -> None:
    line = foreign(tmp_path / "own")
    done = add_site(folder, "east", line)
    names = {path.name for path in (folder / "sites" / "east").iterdir()}
    assert names == {"east.pub", "ca.crt", "join.txt", "sites.pub"}
    kind, blob, _ = line.read_text().split()
    assert (folder / "sites" / "east" / "east.pub").read_text() == f"{kind} {blob} east\n"
    assert done.summary["sites"] == {"east": run_command("ssh-keygen", "-l", "-f", str(line)).split()[1]}
    with pytest.raises(UserError, match="made at the site: have a new one made"):
        replace_site_key(folder, "east")
    replace_site_key(folder, "east", foreign(tmp_path / "second"))
    with pytest.raises(UserError, match="the key of east already"):
        add_site(folder, "west", tmp_path / "second.pub")


@needs["ssh-keygen"]
def test_keys_that_flower_does_not_take_are_refused(folder, tmp_path):
    for kind, bits in (("ed25519", "256"), ("rsa", "2048")):
        with pytest.raises(UserError, match="of a type that Flower does not support"):
            add_site(folder, "east", foreign(tmp_path / kind, kind, bits))
    assert "east" not in Access.open(folder).sites


def test_a_private_key_in_place_of_a_public_one_is_refused(folder: Path, tmp_path: Path) -> None:
    mistaken = folder / "sites" / "north" / "north.key"
    with pytest.raises(UserError, match=r"north\.key is a private key, which only its site may have"):
        add_site(folder, "east", mistaken)
    with pytest.raises(UserError, match="is no public key in OpenSSH's format"):
        add_site(folder, "east", folder / "ca.crt")
    with pytest.raises(UserError, match="nowhere cannot be read"):
        add_site(folder, "east", tmp_path / "nowhere")
    assert not (folder / "sites" / "east").exists()


def fingerprints(folder: Path) -> dict[str, str]:
    """Return the fingerprint of each site's key."""
    return {site["name"]: site["fingerprint"] for site in list_keys(folder)["sites"]}


def refused(folder: Path) -> list[tuple[str, str]]:
    return [(key["name"], key["fingerprint"]) for key in list_keys(folder)["refused"]]


def test_a_replaced_or_removed_key_never_comes_back(folder: Path, tmp_path: Path) -> None:
    line = tmp_path / "north.pub"
    shutil.copy(folder / "sites" / "north" / "north.pub", line)
    first = fingerprints(folder)["north"]
    replace_site_key(folder, "north")
    second = fingerprints(folder)["north"]
    assert refused(folder) == [("north", first)]
    with pytest.raises(UserError, match="is not accepted again"):
        replace_site_key(folder, "south", line)
    shutil.copy(folder / "sites" / "north" / "north.pub", line)
    remove_site(folder, "north")
    assert (set(Access.open(folder).sites), refused(folder)) == ({"south"}, [("north", first), ("north", second)])
    assert not (folder / "sites" / "north").exists()
    for name in ("north", "east"):
        with pytest.raises(UserError, match="is not accepted again"):
            add_site(folder, name, line)
    add_site(folder, "north")
    assert set(Access.open(folder).sites) == {"north", "south"}
    assert len({first, second, fingerprints(folder)["north"]}) == 3


def test_the_stamp_changes_with_the_record_alone(folder: Path) -> None:
    access = Access.open(folder)
    stamps = [access.stamp()]
    (folder / "notes.txt").write_text("a note of the server's people")
    Access.open(folder).warnings()
    assert access.stamp() == stamps[0]
    for change in (
        lambda: add_site(folder, "east"),
        lambda: replace_site_key(folder, "east"),
        lambda: remove_site(folder, "east"),
    ):
        change()
        stamps.append(access.stamp())
    assert len(set(stamps)) == 4
    (folder / "access.json").unlink()
    assert access.stamp() == ()


def test_hosts_that_can_be_used() -> None:
    assert parse_host("Federation.Example") == "federation.example"
    assert parse_host("[2001:DB8:0::7]") == "2001:db8::7"
    for message in ("192.0.2.7", "xn--bcher-kva.example", "server-1"):
        assert parse_host(message) == message


def test_hosts_that_cannot_be_used(tmp_path: Path) -> None:
    addresses = ("1.2.3", "999.1.1.1", "0.0.0.0", "::", "fe80::1%eth0", "224.0.0.1", "192.0.2.7:9443")
    letters = ("", "a b", "-a", "a-", "a..b", "a.", "a:9443", "http://a", "*.a", "a_b", "bücher.example", "a\n")
    for message in (*addresses, *letters, "x" * 64, ".".join(["x" * 60] * 5)):
        with pytest.raises(UserError, match="--host"):
            create_keys(tmp_path / "fed", hosts=[message])
    assert list(tmp_path.iterdir()) == []


def test_every_mistake_is_a_sentence_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    for message, reply in (
        ("", "needs an action"),
        ("init", "FOLDER"),
        ("init full", "is there already"),
        ("init file", "is there already"),
        ("init file/under", "cannot be created"),
        ("init new --sites a b a", "there are two sites 'a'"),
        ("init new --sites a A", "there are two sites 'A'"),
        ("init new --sites ../a", "'../a' cannot be a site's name"),
        ("init new --days 0", "--days is '0'"),
        ("init new --days 3651", "from 1 to 3650"),
        ("init new --days x", "--days is 'x'"),
        ("init new --port 9443", "--port and --listen are both 9443"),
        ("init new --sites a b --images a=5", "has no count for b: declare those of every site, or of none"),
        ("init new --sites a b --images a=5 c=5 b=1", "there is no site 'c' among --sites"),
        ("init new --sites a --images a=5 a=6", "has two counts of a"),
        ("init new --sites a --images a=0", "NAME=COUNT with a whole number from 1"),
        ("init new --sites a --images a", "NAME=COUNT with a whole number from 1"),
        ("init new --images a=5", "there is no site 'a' among --sites"),
        ("init new$ --sites a", "cannot be written into nginx's configuration"),
        ("show full", "is no folder of keys: make one with"),
        ("add-site nowhere a", "is no folder of keys"),
        ("rotate nowhere", "give --server, --ca or --site NAME"),
        ("rotate nowhere --server --site a", "one thing at a time"),
        ("rotate nowhere --server --public-key x", "--public-key is the key of a site"),
        ("rotate nowhere --site a --days 3", "they need --server or --ca"),
        ("remove-site nowhere", "NAME"),
    ):
        assert cli.main(["federation", *message.split()]) == 2, message
        shown = capsys.readouterr().err
        assert reply in shown, message
        assert shown.startswith("halfmoon: ")
        assert shown.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_declared_images_are_what_the_federations_file_reads(tmp_path: Path) -> None:
    """The line that init says, pasted below [federation], gives the plan these counts, in the order of its sites."""
    done = create_keys(tmp_path / "fed", ["north", "south"], images=["south=800", "north=1200"])
    assert done.summary["images"] == {"north": 1200, "south": 800}
    (output,) = [each for each in done.advice if "[federation]" in each]
    lines = output.split("write ")[1].split(" below")[0].replace(" and ", "\n")
    file = tmp_path / "wards.toml"
    file.write_text(f'network = "small"\n[federation]\n{lines}\nclasses = ["a", "b"]\nimage = [1, 8, 8]\n')
    plan = load_plan(file)
    assert (plan.terms.sites, plan.rules.images) == (("north", "south"), (1200, 800))
    assert "images" not in create_keys(tmp_path / "other", ["north"]).summary


def test_sites_that_are_not_there_are_named(folder: Path) -> None:
    for change in (remove_site, replace_site_key):
        with pytest.raises(UserError, match="there is no site 'nort': did you mean 'north'"):
            change(folder, "nort")
    with pytest.raises(UserError, match="there are two sites 'North'"):
        add_site(folder, "North")


def _open_to_others(path: str, mode: int = 0o640) -> Callable[[Path], None]:
    return lambda folder: (folder / path).chmod(mode)


def _swapped(path: str, other: str) -> Callable[[Path], None]:
    """Return what puts the file of another federation instead of one."""

    def swap(folder: Path) -> None:
        if not (folder.parent / "other").exists():
            create_keys(folder.parent / "other", ["north"])
        shutil.copy(folder.parent / "other" / other, folder / path)

    return swap


def _edited(**values: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        record = json.loads((folder / "access.json").read_bytes())
        (folder / "access.json").write_text(json.dumps(record | values))

    return edit


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "server.key open": (_open_to_others("server/server.key"), r"server\.key is open to other users.* chmod 600"),
    "ca.key open": (_open_to_others("ca/ca.key"), r"ca\.key is open to other users"),
    "a site's key open": (_open_to_others("sites/north/north.key"), r"north\.key is open to other users"),
    "the folder open": (_open_to_others("", 0o770), "fed can be changed by other users of this machine"),
    "a parent open": (_open_to_others("..", 0o777), r"can be changed by other users .* who could replace \S+fed"),
    "the record open": (_open_to_others("access.json", 0o664), r"access\.json can be changed by other users"),
    "a site's folder open": (_open_to_others("sites/north", 0o707), r"north can be changed by other users"),
    "a public key open": (_open_to_others("sites/north/north.pub", 0o666), r"chmod go-w \S+north\.pub"),
    "no record": (lambda folder: (folder / "access.json").unlink(), r"access\.json is missing"),
    "no json": (lambda folder: (folder / "access.json").write_text("{"), r"access\.json is damaged"),
    "a wrong type": (_edited(port="9092"), r"access\.json is damaged \(port: "),
    "a newer record": (_edited(schema=2, sites=3), "written by a newer halfmoon"),
    "a path as a name": (_edited(sites={"../x": {"fingerprint": "", "since": "", "made": "here"}}), "is no name"),
    "another authority": (_swapped("ca.crt", "ca.crt"), r"ca\.crt is not the certificate in access\.json"),
    "another certificate": (_swapped("server/server.crt", "server/server.crt"), "rotate .* --server"),
    "another server key": (_swapped("server/server.key", "server/server.key"), "rotate .* --server"),
    "another site's key": (_swapped("sites/north/north.pub", "sites/north/north.pub"), r"north\.pub is not the key"),
    "no certificate": (lambda folder: (folder / "server" / "server.crt").unlink(), r"server\.crt is missing"),
    "garbage": (lambda folder: (folder / "server" / "server.crt").write_text("x"), "cannot be read"),
    "no public key": (lambda folder: (folder / "sites" / "south" / "south.pub").write_text("x"), "no public key"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_with_what_to_do(folder: Path, damage: str) -> None:
    harm, message = DAMAGES[damage]
    harm(folder)
    with pytest.raises(UserError, match=message):
        Access.open(folder)


def test_a_folder_that_others_could_replace_gets_no_keys(folder: Path, tmp_path: Path) -> None:
    """Its own permissions do not protect it; the sticky bit of its parent does, as in /tmp."""
    shared = tmp_path / "shared"
    shared.mkdir()
    for mode, refused in ((0o777, True), (0o1777, False), (0o755, False)):
        shared.chmod(mode)
        if refused:
            with pytest.raises(UserError, match="who could replace"):
                check_parents(shared / "deep" / "fed")
        else:
            check_parents(shared / "deep" / "fed")


@pytest.mark.parametrize("damage", ["another certificate", "another server key", "no certificate", "garbage"])
def test_a_new_certificate_mends_the_server_s(folder: Path, damage: str) -> None:
    DAMAGES[damage][0](folder)
    renew_certificates(folder)
    assert set(Access.open(folder).sites) == {"north", "south"}


def test_a_record_that_was_cut_off_anywhere_is_refused(folder: Path) -> None:
    whole = (folder / "access.json").read_bytes()
    for length in range(0, len(whole) - 1, 17):
        (folder / "access.json").write_bytes(whole[:length])
        with pytest.raises(UserError, match="damaged"):
            Access.open(folder)


def test_the_authority_s_key_is_needed_for_new_certificates_alone(folder: Path) -> None:
    """It may are in a safe: sites come and go without it."""
    stored = (folder / "ca" / "ca.key").read_bytes()
    (folder / "ca" / "ca.key").unlink()
    add_site(folder, "east")
    replace_site_key(folder, "north")
    remove_site(folder, "south")
    assert set(Access.open(folder).sites) == {"north", "east"}
    with pytest.raises(UserError, match=r"ca\.key does not exist"):
        renew_certificates(folder)
    (folder / "ca" / "ca.key").write_bytes(stored)
    (folder / "ca" / "ca.key").chmod(0o600)
    renew_certificates(folder)


def killed(step: int, act: Callable[[], object]) -> bool:
    """Run something in a child that ends, without a word, before the step-th thing it does to the disk.
    Return whether it was ended: False, it was through before."""
    child = os.fork()
    if child == 0:
        count = 0

        def counting(original: Callable[..., object]) -> Callable[..., object]:
            def counted(*given: object, **more: object) -> object:
                nonlocal count
                count += 1
                if count == step:
                    os._exit(9)
                return original(*given, **more)

            return counted

        try:
            os.fsync = lambda _: None  # a kill of a process does not touch what it has written
            for name in ("write", "replace", "unlink", "rmdir"):
                setattr(os, name, counting(getattr(os, name)))
            act()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_killed_init_leaves_nothing_half_written(tmp_path: Path) -> None:
    """At whatever step: there is no folder, and the next init leaves nothing of this one."""
    at = tmp_path / "fed"
    step = 1
    while killed(step, lambda: create_keys(at, ["north"])):
        assert not at.exists()
        create_keys(at, ["south"])
        assert list(tmp_path.iterdir()) == [at]
        shutil.rmtree(at)
        step += 1
    assert step == 16  # fourteen files and a rename, and then it is through


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda at: renew_certificates(at, ca=True), id="new authority", marks=pytest.mark.nightly),
        pytest.param(lambda at: remove_site(at, "north"), id="removed"),
        pytest.param(lambda at: add_site(at, "east"), id="added", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_change_is_made_or_not(tmp_path: Path, act: Callable[[Path], object]) -> None:
    """At whatever step: the folder is whole, all new or all old, no leftover key lies around, and it can continue."""

    def state(at: Path) -> tuple[dict[str, bytes], str]:
        access = Access.open(at)  # checks that all fits together
        files = {str(path.relative_to(at)): path.read_bytes() for path in at.rglob("*.*") if path.is_file()}
        return files, access.ca.read_text()

    at = tmp_path / "fed"
    origin = tmp_path / "origin"
    create_keys(origin, ["north", "south"])
    shutil.copytree(origin, at)
    before = state(at)
    step = 1
    made = 0
    while killed(step, lambda: act(at)):
        after = state(at)
        made += after != before
        gone = "north" not in Access.open(at).sites
        assert gone != any((at / "sites").glob("north*"))
        add_site(at, "west")
        assert not (at / ".next").exists()
        assert not (at / ".ready").exists()
        shutil.rmtree(at)
        shutil.copytree(origin, at)
        step += 1
    assert state(at) != before
    assert 1 < made < step - 2  # some kills came before the change counted, and some after


def test_those_who_change_at_once_wait_for_one_another(folder: Path) -> None:
    """Six add a site each while others look: all six are in, and nobody saw the folder in between."""
    looked: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            looked.append(len(Access.open(folder).sites))

    failures: list[BaseException] = []

    def safely(act: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                act()
            except BaseException as error:
                failures.append(error)

        return run

    watcher = threading.Thread(target=safely(look))
    adders = [threading.Thread(target=safely(lambda k=k: add_site(folder, f"site-{k}"))) for k in range(6)]
    watcher.start()
    for each in adders:
        each.start()
    for each in adders:
        each.join()
    done.set()
    watcher.join()
    assert failures == []
    assert len(Access.open(folder).sites) == 8
    assert looked == sorted(looked)


def test_a_lock_that_is_never_given_back_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_folder, "LOCK_TIMEOUT_SECONDS", 0.2)
    with (
        key_folder.lock_folder(folder),
        pytest.raises(UserError, match="is being changed by another process: try again"),
    ):
        add_site(folder, "east")


def test_help_needs_no_library_and_keys_say_which(tmp_path: Path) -> None:
    """In a Python that has no cryptography."""
    script = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from halfmoon.cli.main import main\n"
        "try: main(['federation', 'init', '--help'])\n"
        "finally: sys.exit(main(['federation', 'init', 'fed']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "--sites" in done.stdout
    assert done.stderr.count("\n") == 1
    assert "'.[flower]'" in done.stderr


def test_warnings_go_to_stderr_and_the_json_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = str(tmp_path / "fed")
    assert cli.main(["federation", "init", at, "--sites", "north", "--days", "3", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["sites"].keys() == {"north"}
    assert re.fullmatch(r"halfmoon: the server's certificate runs out in [23] days: .*\n", shown.err)
    assert cli.main(["federation", "show", at, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["warnings"] == [shown.err.removeprefix("halfmoon: ").strip()]


def test_names_are_those_of_a_federation(tmp_path: Path) -> None:
    name = "a" * 64
    assert SITE_NAME.fullmatch(name)
    create_keys(tmp_path / "fed", [name, "0._-"])
    assert set(Access.open(tmp_path / "fed").sites) == {name, "0._-"}
    with pytest.raises(UserError, match="cannot be a site's name"):
        add_site(tmp_path / "fed", name + "a")


def test_every_flag_and_file_is_on_the_page_of_commands(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli_federation.md").read_text(encoding="utf-8")
    section = page.split("## halfmoon federation\n")[1].split("\n## ")[0]
    known = list_flags(cli._build_parser(True)[1]["federation"], argparse.Namespace())
    assert len(set(known)) > 10
    assert not [flag for flag in known if not re.search(rf"`{flag}\b", section + page.split("\n## ")[0])]
    for path in folder.iterdir():
        assert path.name.startswith(".") or re.search(rf"`{path.name}/?`|`{path.name}/", section), path.name

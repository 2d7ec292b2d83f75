"""What changes who may come in: a new folder, a site more or less, other keys. Each says what has to be done then."""

import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from halfmoon.config.schema import SITE_NAME
from halfmoon.core.errors import UserError, suggest
from halfmoon.sites.keys import certificates, paths
from halfmoon.sites.keys.key_folder import (
    AUTHORITY_DAYS,
    DEFAULT_CERTIFICATE_DAYS,
    DEFAULT_LISTEN_PORT,
    DEFAULT_PORT,
    MADE_AT_SITE,
    MADE_HERE,
    Access,
    AccessRecord,
    FileContent,
    RefusedKey,
    SiteKeys,
    apply_changes,
    check_permissions,
    create_folder,
    describe_time_until,
    open_record,
)
from halfmoon.sites.keys.paths import CA, CERTIFICATE, JOIN, KEY, LOGS, PROXY, SITE_KEYS, SUPERLINK
from halfmoon.storage import atomic_io, toml

_NGINX = {"body": "6m", "connections": 16384, "files": 32768, "backlog": 4096, "handshake": 5}
"""nginx's limits: a body (Flower sends 5 MiB and a few hundred bytes), connections of a worker, open files, connections
in its queue, and seconds for TLS and a header."""

_TEMPLATES = Environment(
    loader=PackageLoader("halfmoon.sites.keys"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render_proxy_config(folder: Path, record: AccessRecord) -> str:
    """Return nginx's configuration, which lets sites through to the SuperLink alone; raise UserError."""
    if re.search(r'["\\$\x00-\x1f\x7f]', str(folder)):
        raise UserError(
            f"{str(folder)!r} cannot stand in nginx's configuration: choose a path without quotes, \\ and $."
        )
    return _render(PROXY, **_NGINX, **_files(folder), record=record, nginx=nginx_command(folder), ipv6=supports_ipv6())


def nginx_command(folder: Path) -> str:
    """Return the command that starts nginx; with other words behind, it sends nginx a signal."""
    return f"nginx -c {shlex.quote(str(folder / PROXY))}"


def render_superlink_instructions(folder: Path, record: AccessRecord) -> str:
    quoted = {name: shlex.quote(str(path)) for name, path in _files(folder).items()}
    half_open = 256  # new connections of one address that a firewall in front of the proxy lets through at once
    return _render(SUPERLINK, **quoted, record=record, nginx=nginx_command(folder), half_open=half_open)


def render_join_instructions(name: str, record: AccessRecord, here: bool) -> str:
    return _render(JOIN, name=name, key=f"{name}.key", record=record, site_keys=SITE_KEYS, here=here)


def _files(folder: Path) -> dict[str, Path]:
    names = {"folder": "", "ca": CA, "certificate": CERTIFICATE, "key": KEY, "logs": LOGS}
    return {name: folder / file for name, file in names.items()}


def _render(template: str, **values: Any) -> str:
    return _TEMPLATES.get_template(template).render(**values)


def supports_ipv6() -> bool:
    """Return whether this machine speaks IPv6: if not, nginx would not start with an address of it."""
    try:
        socket.socket(socket.AF_INET6).close()
    except OSError:
        return False
    return True


_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?=[a-z0-9-]*[a-z]){_LABEL}")


@dataclass(frozen=True)
class KeyChange:
    """What was changed, and in sentences what has to be handed out and started again; nothing of it is secret."""

    facts: Mapping[str, Any]
    advice: tuple[str, ...] = ()


def create_keys(
    folder: Path,
    sites: Sequence[str] = (),
    hosts: Sequence[str] = (),
    days: int = DEFAULT_CERTIFICATE_DAYS,
    port: int = DEFAULT_PORT,
    listen: int = DEFAULT_LISTEN_PORT,
    images: Sequence[str] = (),
    now: datetime | None = None,
) -> KeyChange:
    """Make a folder with an authority, a server's certificate, and a key for each site.

    `images` says NAME=COUNT of every site or of none. Raise UserError for a bad name, host or number.
    """
    folder = folder.absolute()
    _free(sites, ())
    declared = _declared(images, sites)
    _numbers(days, port, listen)
    called = tuple(dict.fromkeys(map(parse_host, hosts)))
    now = now or datetime.now(UTC)
    authority = certificates.create_authority(AUTHORITY_DAYS, now)
    pair = certificates.create_server_certificate(authority, called, days, now)
    record = AccessRecord(
        called,
        port,
        listen,
        days,
        certificates.certificate_fingerprint(authority.certificate),
        certificates.certificate_fingerprint(pair.certificate),
        {},
    )
    files = {
        paths.CA_KEY: FileContent(authority.key, private=True),
        paths.CA: FileContent(authority.certificate),
        **_server(pair),
        paths.PROXY: FileContent(render_proxy_config(folder, record).encode()),
        paths.SUPERLINK: FileContent(render_superlink_instructions(folder, record).encode()),
        f"{paths.LOGS}/README": FileContent(b"nginx writes its logs here.\n"),
    }
    for name in sites:
        record, more = _with_site(record, name, None, authority.certificate, now)
        files |= more
    create_folder(folder, files | _lists(folder, record, files) | {paths.RECORD_FILE: record.file()})
    advice = [_handing(folder, name, True) for name in sites]
    if not called:
        advice.append("No --host was given: sites on other machines will not accept the server's certificate.")
    facts = _facts(folder, record, *record.sites)
    if declared:
        table = f"sites = {toml.value(list(declared))} and images = {toml.value(list(declared.values()))}"
        advice.append(f"In the federation's file, write {table} below [federation]: no site counts for more images.")
        facts["images"] = declared
    return KeyChange(facts, (*advice, _safe(folder)))


def add_site(folder: Path, name: str, key: Path | None = None, now: datetime | None = None) -> KeyChange:
    """Let one more site come in, with its own public key or a new one; raise UserError where name or key is taken."""
    folder = folder.absolute()
    line = None if key is None else _read_public(key, name)
    with open_record(folder) as record:
        _free([name], list(record.sites))
        record, files = _with_site(record, name, line, _authority(folder, record), now or datetime.now(UTC))
        _save(folder, record, files)
    serving = f"A running halfmoon serve lets {name} in within seconds."
    return KeyChange(_facts(folder, record, name), (_handing(folder, name, line is None), serving, _telling(folder)))


def remove_site(folder: Path, name: str, now: datetime | None = None) -> KeyChange:
    """Let a site come in no more; its key never comes back. Raise UserError where there is no such site."""
    folder = folder.absolute()
    with open_record(folder) as record:
        site = _site(record, name)
        rest = {other: each for other, each in record.sites.items() if other != name}
        record = replace(_refusing(record, name, "removed", now or datetime.now(UTC)), sites=rest)
        others = [paths.site_path(name, file) for file in (CA, JOIN, SITE_KEYS)]
        _save(folder, record, {}, [paths.private_key_path(name), paths.public_key_path(name), *others])
    facts = {**_facts(folder, record), "removed": {name: site.fingerprint}}
    return KeyChange(facts, (f"A running halfmoon serve shuts {name} out within seconds.",))


def renew_certificates(
    folder: Path, hosts: Sequence[str] = (), days: int | None = None, ca: bool = False, now: datetime | None = None
) -> KeyChange:
    """Make a new certificate of the server, and with `ca` a new authority; raise UserError where its key is missing."""
    folder, now = folder.absolute(), now or datetime.now(UTC)
    with open_record(folder) as record:
        called = tuple(dict.fromkeys(map(parse_host, hosts))) or record.hosts
        record = replace(record, hosts=called, days=record.days if days is None else days)
        _numbers(record.days, record.port, record.listen)
        files: dict[str, FileContent] = {}
        issuer = certificates.create_authority(AUTHORITY_DAYS, now) if ca else _issuer(folder, record)
        if ca:
            files |= {paths.CA_KEY: FileContent(issuer.key, private=True), paths.CA: FileContent(issuer.certificate)}
            files |= {paths.site_path(name, CA): FileContent(issuer.certificate) for name in record.sites}
        pair = certificates.create_server_certificate(issuer, record.hosts, record.days, now)
        files |= _server(pair)
        for name, site in record.sites.items() if hosts else ():
            files[paths.site_path(name, JOIN)] = FileContent(
                render_join_instructions(name, record, site.made == MADE_HERE).encode()
            )
        record = replace(
            record,
            authority=certificates.certificate_fingerprint(issuer.certificate),
            certificate=certificates.certificate_fingerprint(pair.certificate),
        )
        apply_changes(folder, files | {paths.RECORD_FILE: record.file()})
    return KeyChange(_facts(folder, record), _renewed(folder, record, ca, bool(hosts)))


def replace_site_key(folder: Path, name: str, key: Path | None = None, now: datetime | None = None) -> KeyChange:
    """Give a site another key; raise UserError where its key was made there and no new public key is given."""
    folder, now = folder.absolute(), now or datetime.now(UTC)
    line = None if key is None else _read_public(key, name)
    with open_record(folder) as record:
        here = _site(record, name).made == MADE_HERE
        if not here and line is None:
            raise UserError(f"the key of {name} was made at the site: have a new one made, and give --public-key FILE.")
        record = _refusing(record, name, "replaced", now)
        record, files = _with_site(record, name, line, _authority(folder, record), now)
        _save(folder, record, files, [paths.private_key_path(name)] if here and line else [])
    advice = _handing(folder, name, line is None)
    serving = f"A running halfmoon serve takes the new key of {name} within seconds, and the old one no more."
    return KeyChange(_facts(folder, record, name), (advice, serving, _telling(folder)))


def parse_host(words: str) -> str:
    """Return a name or an address by which sites call the server; raise UserError where it cannot be one."""
    plain = words.removeprefix("[").removesuffix("]") if words.startswith("[") else words
    try:
        address = ip_address(plain)
    except ValueError:
        address = None
    if address is not None:
        if address.is_unspecified or address.is_multicast or "%" in plain:
            raise UserError(f"--host {words} is no address that a site can call: give the one that this machine has.")
        return str(address)
    if not _HOST.fullmatch(plain.lower()):
        raise UserError(
            f"--host is {words!r}: it must be a name or an address of this machine, such as federation.example or "
            "192.0.2.7, without a port."
        )
    return plain.lower()


def _free(names: Sequence[str], others: Sequence[str]) -> None:
    folded = {name.casefold() for name in others}
    for name in names:
        if not SITE_NAME.fullmatch(name):
            raise UserError(
                f"{name!r} cannot be a site's name: use up to 64 letters, digits, dots, dashes and underscores, of "
                "which the first is a letter or a digit."
            )
        if name.casefold() in folded:
            raise UserError(f"there are two sites {name!r}: a name is one site's alone, in capitals or not.")
        folded.add(name.casefold())


def _declared(images: Sequence[str], sites: Sequence[str]) -> dict[str, int]:
    """Return how many images each site has, in the order of sites, from NAME=COUNT; raise UserError for a mistake."""
    counts: dict[str, int] = {}
    for words in images:
        name, _, count = words.partition("=")
        if not re.fullmatch(r"[1-9][0-9]{0,11}", count):
            raise UserError(f"--images {words}: it must be NAME=COUNT with a whole number from 1, such as north=1200.")
        if name not in sites:
            hint = suggest(name, sites) if sites else "name them there."
            raise UserError(f"--images {words}: there is no site {name!r} among --sites; {hint}")
        if name in counts:
            raise UserError(f"--images says twice how many images {name} has: say it once.")
        counts[name] = int(count)
    missing = [name for name in sites if name not in counts]
    if counts and missing:
        raise UserError(f"--images has no count for {', '.join(missing)}: declare those of every site, or of none.")
    return {name: counts[name] for name in sites} if counts else {}


def _numbers(days: int, port: int, listen: int) -> None:
    if not 1 <= days <= AUTHORITY_DAYS:
        raise UserError(f"--days is {days}: it must be a whole number from 1 to {AUTHORITY_DAYS}.")
    if port == listen:
        raise UserError(f"--port and --listen are both {port}: the SuperLink and the proxy need one each.")


def _server(pair: certificates.KeyPair) -> dict[str, FileContent]:
    return {paths.KEY: FileContent(pair.key, private=True), paths.CERTIFICATE: FileContent(pair.certificate)}


def _with_site(
    record: AccessRecord, name: str, line: bytes | None, ca: bytes, now: datetime
) -> tuple[AccessRecord, dict[str, FileContent]]:
    """Return the record with a site, and its files; `line` is its public key, None: it gets a new key."""
    files: dict[str, FileContent] = {}
    here = line is None
    if line is None:
        secret, line = certificates.create_site_key(name)
        files[paths.private_key_path(name)] = FileContent(secret, private=True)
    mark = certificates.key_fingerprint(line)
    for other, site in record.sites.items():
        if site.fingerprint == mark and other != name:
            raise UserError(f"that is the key of {other} already: each site has a key of its own.")
    if mark in {each.fingerprint for each in record.refused}:
        raise UserError(f"that key ({mark}) was removed or replaced, and never comes back: make a new one at the site.")
    site = SiteKeys(mark, _stamp(now), MADE_HERE if here else MADE_AT_SITE)
    record = replace(record, sites={**record.sites, name: site})
    files |= {
        paths.public_key_path(name): FileContent(line),
        paths.site_path(name, CA): FileContent(ca),
        paths.site_path(name, JOIN): FileContent(render_join_instructions(name, record, here).encode()),
    }
    return record, files


def _save(folder: Path, record: AccessRecord, files: Mapping[str, FileContent], gone: Sequence[str] = ()) -> None:
    apply_changes(folder, {**files, **_lists(folder, record, files), paths.RECORD_FILE: record.file()}, gone)


def _lists(folder: Path, record: AccessRecord, files: Mapping[str, FileContent]) -> dict[str, FileContent]:
    lines = []
    for name, site in record.sites.items():
        path = paths.public_key_path(name)
        line = files[path].data if path in files else atomic_io.read(folder / path) or b""
        if not line or certificates.key_fingerprint(line) != site.fingerprint:
            raise UserError(f"{folder / path} is missing or another key than {paths.RECORD_FILE} says: restore it.")
        lines.append(line)
    whole = FileContent(b"".join(lines))
    return {SITE_KEYS: whole, **{paths.site_path(name, SITE_KEYS): whole for name in record.sites}}


def _site(record: AccessRecord, name: str) -> SiteKeys:
    if name not in record.sites:
        raise UserError(f"there is no site {name!r}: {suggest(name, record.sites) if record.sites else 'none at all.'}")
    return record.sites[name]


def _refusing(record: AccessRecord, name: str, why: str, now: datetime) -> AccessRecord:
    key = RefusedKey(name, record.sites[name].fingerprint, _stamp(now), why)
    return replace(record, refused=(*record.refused, key))


def _read_public(path: Path, name: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(2**16)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({atomic_io.reason(error)}): give the file of a public key.") from error
    return certificates.parse_public_key(data, str(path), name)


def _authority(folder: Path, record: AccessRecord) -> bytes:
    path = folder / paths.CA
    data = atomic_io.read(path) or b""
    with suppress(ValueError):
        if certificates.certificate_fingerprint(data) == record.authority:
            return data
    raise UserError(f"{path} is missing, or not the one that {paths.RECORD_FILE} says: restore it from a copy.")


def _issuer(folder: Path, record: AccessRecord) -> certificates.KeyPair:
    path = folder / paths.CA_KEY
    check_permissions(path)
    issuer = certificates.KeyPair(atomic_io.read(path) or b"", _authority(folder, record))
    if not issuer.key:
        raise UserError(f"{path} is not there, and nothing can be signed without it: put it back for a moment.")
    with suppress(ValueError):
        if certificates.key_matches(issuer.key, issuer.certificate):
            return issuer
    raise UserError(f"{path} is not the key of {paths.CA}: restore it from a copy, or make a new authority with --ca.")


def _renewed(folder: Path, record: AccessRecord, ca: bool, moved: bool) -> tuple[str, ...]:
    names = ", ".join(record.sites)
    steps = []
    if ca and names:
        steps.append(
            f"Hand {folder / paths.CA} to every site ({names}): none gets in with the old one. Their keys stay."
        )
    steps.append(f"Start halfmoon serve again, and let nginx read the certificate: {nginx_command(folder)} -s reload.")
    if moved and names:
        steps.append(f"Tell the sites ({names}) that they now join --server {record.address}, as each join.txt says.")
    elif not ca:
        steps.append("The sites have nothing to do: they trust the same authority.")
    return (*steps, _safe(folder))


def _facts(folder: Path, record: AccessRecord, *names: str) -> dict[str, Any]:
    sites = {name: record.sites[name].fingerprint for name in names}
    return {"folder": str(folder), "authority": record.authority, "server": record.certificate, "sites": sites}


def _handing(folder: Path, name: str, here: bool) -> str:
    where = folder / paths.site_path(name)
    if here:
        return (
            f"Hand {where} to the people of {name} by a way that nobody else can read, then delete "
            f"{folder / paths.private_key_path(name)} here."
        )
    return f"Send {where} to the people of {name}: nothing in it is secret."


def _telling(folder: Path) -> str:
    return f"With secure_aggregation, hand {folder / paths.SITE_KEYS} to every site: it says whose keys are whose."


def _safe(folder: Path) -> str:
    return (
        f"Keep {folder / paths.CA_KEY} away from machines that others reach: it is needed for new certificates alone."
    )


def _stamp(now: datetime) -> str:
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def list_keys(folder: Path, now: datetime | None = None) -> dict[str, Any]:
    """Return a folder's certificates, sites, refused keys and warnings; raise UserError where it is damaged."""
    now = now or datetime.now(UTC)
    access = Access.open(folder)
    with open_record(access.folder) as record:
        sites = [
            {"name": name, **asdict(site), "private_key": (access.folder / paths.private_key_path(name)).exists()}
            for name, site in record.sites.items()
        ]
    terms = {
        name: {
            "fingerprint": term.fingerprint,
            "until": f"{term.end:%Y-%m-%d}",
            "left": describe_time_until(term.end, now),
        }
        for name, term in zip(("authority", "server"), access.terms(), strict=True)
    }
    about = {"hosts": list(record.hosts), "port": record.port, "listen": record.listen}
    refused = [asdict(each) for each in record.refused]
    warnings = access.warnings(now)
    return {"folder": str(access.folder), **about, **terms, "sites": sites, "refused": refused, "warnings": warnings}

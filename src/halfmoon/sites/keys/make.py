"""Create and change a federation's folder of keys: its sites, certificates and instructions.

Each function returns a `KeyChange` with the steps that people have to do next.
"""

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
from halfmoon.core import toml
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
from halfmoon.storage import atomic_io

_NGINX_LIMITS = {"body": "6m", "connections": 16384, "files": 32768, "backlog": 4096, "handshake": 5}
"""Limits of nginx: size of a request's body (Flower sends 5 MiB and a few hundred bytes), connections of a worker, open
files, connections in its queue, and seconds for the TLS handshake and a header."""

_HALF_OPEN_CONNECTIONS = 256
"""New connections of one address that the firewall rule in superlink.txt allows at once."""

MAX_KEY_FILE_BYTES = 2**16
"""Bytes of a file that are read as a public key, which has about 200."""

_TEMPLATES = Environment(
    loader=PackageLoader("halfmoon.sites.keys"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render_proxy_config(folder: Path, record: AccessRecord) -> str:
    """Render the configuration of nginx, the proxy that forwards sites to Flower's SuperLink and refuses all others.

    Args:
        folder: the folder of keys, which is also nginx's folder.
        record: the ports and the hosts of the server.

    Raises:
        UserError: nginx's configuration cannot contain the folder's path.
    """
    # Quotes, backslashes, $ (a variable of nginx) and control characters.
    if re.search(r'["\\$\x00-\x1f\x7f]', str(folder)):
        raise UserError(
            f"{str(folder)!r} cannot be written into nginx's configuration: choose a path without quotes, \\ and $."
        )
    return _render(
        PROXY,
        **_NGINX_LIMITS,
        **_template_paths(folder),
        record=record,
        nginx=nginx_command(folder),
        ipv6=supports_ipv6(),
    )


def nginx_command(folder: Path) -> str:
    """Return the command that starts nginx; with -s and a signal appended, it controls nginx."""
    return f"nginx -c {shlex.quote(str(folder / PROXY))}"


def render_superlink_instructions(folder: Path, record: AccessRecord) -> str:
    """Render the instructions for starting the server."""
    quoted = {name: shlex.quote(str(path)) for name, path in _template_paths(folder).items()}
    return _render(SUPERLINK, **quoted, record=record, nginx=nginx_command(folder), half_open=_HALF_OPEN_CONNECTIONS)


def render_join_instructions(name: str, record: AccessRecord, key_made_here: bool) -> str:
    """Render the instructions for a site; they depend on the location where its private key was created."""
    return _render(JOIN, name=name, key=f"{name}.key", record=record, site_keys=SITE_KEYS, here=key_made_here)


def _template_paths(folder: Path) -> dict[str, Path]:
    names = {"folder": "", "ca": CA, "certificate": CERTIFICATE, "key": KEY, "logs": LOGS}
    return {name: folder / file for name, file in names.items()}


def _render(template: str, **values: Any) -> str:
    return _TEMPLATES.get_template(template).render(**values)


def supports_ipv6() -> bool:
    """Check whether this machine supports IPv6; otherwise nginx does not start with an IPv6 address."""
    try:
        socket.socket(socket.AF_INET6).close()
    except OSError:
        return False
    return True


_HOST_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}$)({_HOST_LABEL}\.)*(?=[a-z0-9-]*[a-z]){_HOST_LABEL}")


@dataclass(frozen=True)
class KeyChange:
    """The result of a change of a folder of keys. It contains no secrets.

    Attributes:
        summary: the folder, and fingerprints of the certificates and of the sites concerned; for JSON.
        advice: sentences about the files to send and the programs to restart.
    """

    summary: Mapping[str, Any]
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
    """Create the folder of keys of a federation: an authority, the server's certificate, and a key for each site.

    Args:
        folder: the new folder.
        sites: names of the sites.
        hosts: names and addresses of the server.
        days: validity of the server's certificate.
        port: the SuperLink's port.
        listen: the proxy's port.
        images: NAME=COUNT of every site, or empty: limits the weight of the sites in the average.
        now: the time of the change; None for the current time.

    Raises:
        UserError: a name, host or number is invalid, or the folder exists.
    """
    folder = folder.absolute()
    _check_site_names(sites, ())
    image_counts = _parse_image_counts(images, sites)
    _check_numbers(days, port, listen)
    host_names = _parse_hosts(hosts)
    now = now or datetime.now(UTC)
    authority = certificates.create_authority(AUTHORITY_DAYS, now)
    server = certificates.create_server_certificate(authority, host_names, days, now)
    record = AccessRecord(
        hosts=host_names,
        port=port,
        listen=listen,
        days=days,
        authority=certificates.certificate_fingerprint(authority.certificate),
        certificate=certificates.certificate_fingerprint(server.certificate),
        sites={},
    )
    files = {
        paths.CA_KEY: FileContent(authority.key, private=True),
        paths.CA: FileContent(authority.certificate),
        **_server_files(server),
        paths.PROXY: FileContent(render_proxy_config(folder, record).encode()),
        paths.SUPERLINK: FileContent(render_superlink_instructions(folder, record).encode()),
        f"{paths.LOGS}/README": FileContent(b"nginx writes its logs here.\n"),
    }
    for name in sites:
        record, site_files = _add_to_record(record, name, public_key=None, ca=authority.certificate, now=now)
        files |= site_files
    files |= _public_key_lists(folder, record, files)
    files[paths.RECORD_FILE] = record.file()
    create_folder(folder, files)
    advice = [_advise_to_send_keys(folder, name, key_made_here=True) for name in sites]
    if not host_names:
        advice.append("No --host was given: sites on other machines will not accept the server's certificate.")
    summary = _summarize(folder, record, *record.sites)
    if image_counts:
        names_text = toml.format_value(list(image_counts))
        counts_text = toml.format_value(list(image_counts.values()))
        lines = f"sites = {names_text} and images = {counts_text}"
        advice.append(f"In the federation's file, write {lines} below [federation]: no site counts for more images.")
        summary["images"] = image_counts
    return KeyChange(summary, (*advice, _advise_to_protect_authority(folder)))


def add_site(folder: Path, name: str, key: Path | None = None, now: datetime | None = None) -> KeyChange:
    """Admit one more site to a federation: register its public key, or create a key pair for it.

    Args:
        folder: the folder of keys.
        name: the site's name.
        key: the file of the site's public key; None to create a key here.
        now: the time of the change; None for the current time.

    Raises:
        UserError: the name is invalid or taken, or the key is invalid, taken or refused.
    """
    folder = folder.absolute()
    public_key = None if key is None else _read_public_key(key, name)
    with open_record(folder) as record:
        _check_site_names([name], list(record.sites))
        ca = _read_authority_certificate(folder, record)
        record, files = _add_to_record(record, name, public_key, ca, now or datetime.now(UTC))
        _save(folder, record, files)
    advice = (
        _advise_to_send_keys(folder, name, key_made_here=public_key is None),
        f"A running halfmoon serve admits {name} within seconds.",
        _advise_to_send_key_list(folder),
    )
    return KeyChange(_summarize(folder, record, name), advice)


def remove_site(folder: Path, name: str, now: datetime | None = None) -> KeyChange:
    """Stop admitting a site to a federation, and delete its files. Its key is refused from then on, under any name.

    Args:
        folder: the folder of keys.
        name: the site's name.
        now: the time of the change; None for the current time.

    Raises:
        UserError: there is no such site.
    """
    folder = folder.absolute()
    with open_record(folder) as record:
        site = _find_site(record, name)
        remaining_sites = {other: keys for other, keys in record.sites.items() if other != name}
        record = _refuse_key(record, name, "removed", now or datetime.now(UTC))
        record = replace(record, sites=remaining_sites)
        deleted = [paths.private_key_path(name), paths.public_key_path(name)]
        deleted += [paths.site_path(name, file) for file in (CA, JOIN, SITE_KEYS)]
        _save(folder, record, files={}, deleted=deleted)
    summary = {**_summarize(folder, record), "removed": {name: site.fingerprint}}
    return KeyChange(summary, (f"A running halfmoon serve excludes {name} within seconds.",))


def renew_certificates(
    folder: Path, hosts: Sequence[str] = (), days: int | None = None, ca: bool = False, now: datetime | None = None
) -> KeyChange:
    """Create a new certificate of the server, signed by the federation's authority or by a new one.

    Sites trust the authority, not the server's certificate: only a new authority (after the theft of its key, for
    example) or new names of the server require that files are sent to them.

    Args:
        folder: the folder of keys, with a record (access.json) of the server's options and the sites that may join.
        hosts: names and addresses of the server; empty to keep the present ones.
        days: validity of the certificate; None for that of the present one.
        ca: whether to create a new authority as well.
        now: the time of the change; None for the current time.

    Returns:
        A summary of the folder, and advice on the files to send and the programs to restart.

    Raises:
        UserError: the authority's key is missing, or a host or number is invalid.
    """
    folder = folder.absolute()
    now = now or datetime.now(UTC)
    with open_record(folder) as record:
        host_names = _parse_hosts(hosts) or record.hosts
        valid_days = record.days if days is None else days
        record = replace(record, hosts=host_names, days=valid_days)
        _check_numbers(record.days, record.port, record.listen)
        files: dict[str, FileContent] = {}
        if ca:
            issuer = certificates.create_authority(AUTHORITY_DAYS, now)
            files[paths.CA_KEY] = FileContent(issuer.key, private=True)
            files[paths.CA] = FileContent(issuer.certificate)
            for name in record.sites:
                files[paths.site_path(name, CA)] = FileContent(issuer.certificate)
        else:
            issuer = _read_authority(folder, record)
        server = certificates.create_server_certificate(issuer, record.hosts, record.days, now)
        files |= _server_files(server)
        if hosts:  # the instructions to join contain the server's address
            for name, site in record.sites.items():
                text = render_join_instructions(name, record, site.made == MADE_HERE)
                files[paths.site_path(name, JOIN)] = FileContent(text.encode())
        record = replace(
            record,
            authority=certificates.certificate_fingerprint(issuer.certificate),
            certificate=certificates.certificate_fingerprint(server.certificate),
        )
        apply_changes(folder, files | {paths.RECORD_FILE: record.file()})
    advice = _advise_after_renewal(folder, record, new_authority=ca, new_hosts=bool(hosts))
    return KeyChange(_summarize(folder, record), advice)


def replace_site_key(folder: Path, name: str, key: Path | None = None, now: datetime | None = None) -> KeyChange:
    """Replace a site's key; the previous one is refused from then on.

    Args:
        folder: the folder of keys.
        name: the site's name.
        key: the file of the new public key; None to create a key here.
        now: the time of the change; None for the current time.

    Raises:
        UserError: there is no such site, or its key was created at the site and no new public key is given.
    """
    folder = folder.absolute()
    now = now or datetime.now(UTC)
    public_key = None if key is None else _read_public_key(key, name)
    with open_record(folder) as record:
        was_made_here = _find_site(record, name).made == MADE_HERE
        if not was_made_here and public_key is None:
            raise UserError(f"the key of {name} was made at the site: have a new one made, and give --public-key FILE.")
        record = _refuse_key(record, name, "replaced", now)
        ca = _read_authority_certificate(folder, record)
        record, files = _add_to_record(record, name, public_key, ca, now)
        # With a public key from the site, the earlier private key in this folder has no use.
        deleted = [paths.private_key_path(name)] if was_made_here and public_key else []
        _save(folder, record, files, deleted)
    advice = (
        _advise_to_send_keys(folder, name, key_made_here=public_key is None),
        f"A running halfmoon serve accepts the new key of {name} within seconds, and refuses the previous one.",
        _advise_to_send_key_list(folder),
    )
    return KeyChange(_summarize(folder, record, name), advice)


def _parse_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """Parse names and addresses of the server, and remove duplicates."""
    return tuple(dict.fromkeys(map(parse_host, hosts)))


def parse_host(text: str) -> str:
    """Parse a name or an IP address of the server, which its certificate is going to contain.

    Args:
        text: the name or address, without a port; an IPv6 address may be in brackets.

    Returns:
        The name in lower case, or the address in its usual form.

    Raises:
        UserError: it is invalid, or an address to which sites cannot connect.
    """
    unbracketed = text.removeprefix("[").removesuffix("]") if text.startswith("[") else text
    try:
        address = ip_address(unbracketed)
    except ValueError:
        address = None
    if address is not None:
        # 0.0.0.0 and ::, multicast addresses, and IPv6 addresses with a zone, which is valid on one machine only.
        if address.is_unspecified or address.is_multicast or "%" in unbracketed:
            raise UserError(f"--host {text} is no address that a site can call: give the one that this machine has.")
        return str(address)
    if not _HOST.fullmatch(unbracketed.lower()):
        raise UserError(
            f"--host is {text!r}: it must be a name or an address of this machine, such as federation.example or "
            "192.0.2.7, without a port."
        )
    return unbracketed.lower()


def _check_site_names(names: Sequence[str], existing: Sequence[str]) -> None:
    """Check new names of sites, which become names of folders.

    Args:
        names: the new names.
        existing: the names of the sites that a federation has already.

    Raises:
        UserError: a name is invalid, or differs from another one in case only, which some file systems ignore.
    """
    used_names = {name.casefold() for name in existing}
    for name in names:
        if not SITE_NAME.fullmatch(name):
            raise UserError(
                f"{name!r} cannot be a site's name: use up to 64 letters, digits, dots, dashes and underscores, of "
                "which the first is a letter or a digit."
            )
        if name.casefold() in used_names:
            raise UserError(f"there are two sites {name!r}: names must differ, not only in case.")
        used_names.add(name.casefold())


def _parse_image_counts(images: Sequence[str], sites: Sequence[str]) -> dict[str, int]:
    """Parse the option --images, which declares the number of images of each site.

    For example ["south=30", "north=1200"] and the sites ["north", "south"] give {"north": 1200, "south": 30}.

    Args:
        images: the values of the option; empty if nothing is declared.
        sites: the names of all sites.

    Returns:
        The count of each site, in the order of `sites`; empty if nothing is declared.

    Raises:
        UserError: a text is invalid, or a site has no count or two.
    """
    counts: dict[str, int] = {}
    for text in images:
        name, _, count = text.partition("=")
        if not re.fullmatch(r"[1-9][0-9]{0,11}", count):
            raise UserError(f"--images {text}: it must be NAME=COUNT with a whole number from 1, such as north=1200.")
        if name not in sites:
            hint = suggest(name, sites) if sites else "name them there."
            raise UserError(f"--images {text}: there is no site {name!r} among --sites; {hint}")
        if name in counts:
            raise UserError(f"--images has two counts of {name}: give one.")
        counts[name] = int(count)
    missing = [name for name in sites if name not in counts]
    if counts and missing:
        raise UserError(f"--images has no count for {', '.join(missing)}: declare those of every site, or of none.")
    return {name: counts[name] for name in sites} if counts else {}


def _check_numbers(days: int, port: int, listen: int) -> None:
    if not 1 <= days <= AUTHORITY_DAYS:
        raise UserError(f"--days is {days}: it must be a whole number from 1 to {AUTHORITY_DAYS}.")
    if port == listen:
        raise UserError(f"--port and --listen are both {port}: the SuperLink and the proxy need one each.")


def _server_files(server: certificates.KeyPair) -> dict[str, FileContent]:
    return {paths.KEY: FileContent(server.key, private=True), paths.CERTIFICATE: FileContent(server.certificate)}


def _add_to_record(
    record: AccessRecord, name: str, public_key: bytes | None, ca: bytes, now: datetime
) -> tuple[AccessRecord, dict[str, FileContent]]:
    """Add a site to the record of a federation, or replace the key of a site. No file is written.

    Args:
        record: the present record.
        name: the site's name.
        public_key: the line of the site's public key in OpenSSH's format; None to create a key pair.
        ca: the authority's certificate.
        now: the time of the change.

    Returns:
        The new record, and the site's files by path.

    Raises:
        UserError: another site has the key, or the key was removed or replaced earlier.
    """
    files: dict[str, FileContent] = {}
    made_here = public_key is None
    if public_key is None:
        private_key, public_key = certificates.create_site_key(name)
        files[paths.private_key_path(name)] = FileContent(private_key, private=True)
    fingerprint = certificates.key_fingerprint(public_key)
    for other, site in record.sites.items():
        if site.fingerprint == fingerprint and other != name:
            raise UserError(f"that is the key of {other} already: each site needs a different key.")
    if fingerprint in {key.fingerprint for key in record.refused}:
        raise UserError(
            f"that key ({fingerprint}) was removed or replaced, and is not accepted again: make a new one at the site."
        )
    site = SiteKeys(fingerprint, since=_format_time(now), made=MADE_HERE if made_here else MADE_AT_SITE)
    record = replace(record, sites={**record.sites, name: site})
    instructions = render_join_instructions(name, record, made_here)
    files |= {
        paths.public_key_path(name): FileContent(public_key),
        paths.site_path(name, CA): FileContent(ca),
        paths.site_path(name, JOIN): FileContent(instructions.encode()),
    }
    return record, files


def _save(folder: Path, record: AccessRecord, files: Mapping[str, FileContent], deleted: Sequence[str] = ()) -> None:
    """Write the record, the lists of public keys and `files`, and delete files, all or none."""
    key_lists = _public_key_lists(folder, record, files)
    apply_changes(folder, {**files, **key_lists, paths.RECORD_FILE: record.file()}, deleted)


def _public_key_lists(folder: Path, record: AccessRecord, files: Mapping[str, FileContent]) -> dict[str, FileContent]:
    """Make the file with the public keys of all sites, one line each, for the server and a copy for each site.

    Args:
        folder: the folder of keys.
        record: the sites and the fingerprints of their keys.
        files: files that are going to be written to the folder; keys that are not among them are read from it.

    Returns:
        The contents of the files by path.

    Raises:
        UserError: a key is missing or does not match its fingerprint.
    """
    public_keys = []
    for name, site in record.sites.items():
        path = paths.public_key_path(name)
        public_key = files[path].data if path in files else atomic_io.read(folder / path)
        if not public_key or certificates.key_fingerprint(public_key) != site.fingerprint:
            raise UserError(f"{folder / path} is missing or not the key in {paths.RECORD_FILE}: restore it.")
        public_keys.append(public_key)
    key_list = FileContent(b"".join(public_keys))
    key_files = {SITE_KEYS: key_list}
    for name in record.sites:
        key_files[paths.site_path(name, SITE_KEYS)] = key_list
    return key_files


def _find_site(record: AccessRecord, name: str) -> SiteKeys:
    if name not in record.sites:
        hint = suggest(name, record.sites) if record.sites else "none at all."
        raise UserError(f"there is no site {name!r}: {hint}")
    return record.sites[name]


def _refuse_key(record: AccessRecord, name: str, why: str, now: datetime) -> AccessRecord:
    key = RefusedKey(name, record.sites[name].fingerprint, _format_time(now), why)
    return replace(record, refused=(*record.refused, key))


def _read_public_key(path: Path, name: str) -> bytes:
    """Read a site's public key from a file that the site has sent.

    Args:
        path: the file.
        name: the name of the site.

    Returns:
        One line in OpenSSH's format, with the site's name as its comment.

    Raises:
        UserError: the file cannot be read, or has no public key of the required kind.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({atomic_io.error_reason(error)}): give the file of a public key."
        ) from error
    return certificates.parse_public_key(data, str(path), name)


def _read_authority_certificate(folder: Path, record: AccessRecord) -> bytes:
    path = folder / paths.CA
    data = atomic_io.read(path) or b""
    with suppress(ValueError):
        if certificates.certificate_fingerprint(data) == record.authority:
            return data
    raise UserError(f"{path} is missing, or not the certificate in {paths.RECORD_FILE}: restore it from a copy.")


def _read_authority(folder: Path, record: AccessRecord) -> certificates.KeyPair:
    """Read the key pair of the federation's authority, to sign a certificate with it.

    Args:
        folder: the folder of keys.
        record: its record, with the fingerprint of the authority's certificate.

    Raises:
        UserError: a file is missing, they do not match, or other users can read the private key.
    """
    path = folder / paths.CA_KEY
    check_permissions(path)
    authority = certificates.KeyPair(atomic_io.read(path) or b"", _read_authority_certificate(folder, record))
    if not authority.key:
        raise UserError(f"{path} does not exist, and certificates cannot be signed without it: put it back briefly.")
    with suppress(ValueError):
        if certificates.key_matches(authority.key, authority.certificate):
            return authority
    raise UserError(f"{path} is not the key of {paths.CA}: restore it from a copy, or make a new authority with --ca.")


def _advise_after_renewal(folder: Path, record: AccessRecord, new_authority: bool, new_hosts: bool) -> tuple[str, ...]:
    """List the steps that people have to do after the server got a new certificate, a sentence each.

    Args:
        folder: the folder of keys.
        record: its record, with the sites and the server's address.
        new_authority: whether there is a new authority, which sites do not trust yet.
        new_hosts: whether the server has other names or addresses than before.
    """
    names = ", ".join(record.sites)
    steps = []
    if new_authority and names:
        steps.append(
            f"Hand {folder / paths.CA} to every site ({names}): none gets in with the old one. Their keys stay valid."
        )
    reload = f"{nginx_command(folder)} -s reload"
    if new_authority:
        steps.append(f"Restart halfmoon serve, and let nginx read the certificate: {reload}.")
    else:
        steps.append(
            f"Let nginx read the certificate: {reload}. A running halfmoon serve needs no restart before its old certificate "
            "expires."
        )
    if new_hosts and names:
        steps.append(f"Inform the sites ({names}) that they now join --server {record.address}, as in each join.txt.")
    elif not new_authority:
        steps.append("The sites have nothing to do: they trust the same authority.")
    return (*steps, _advise_to_protect_authority(folder))


def _summarize(folder: Path, record: AccessRecord, *names: str) -> dict[str, Any]:
    """Summarize a folder of keys for JSON: fingerprints of the certificates, and of the keys of the named sites."""
    sites = {name: record.sites[name].fingerprint for name in names}
    return {"folder": str(folder), "authority": record.authority, "server": record.certificate, "sites": sites}


def _advise_to_send_keys(folder: Path, name: str, key_made_here: bool) -> str:
    """Advise the operator how to send a site its files, which are secret only if its private key was made here."""
    site_folder = folder / paths.site_path(name)
    if key_made_here:
        return (
            f"Hand {site_folder} to the people of {name} over a channel that no other person can read, then delete "
            f"{folder / paths.private_key_path(name)} here."
        )
    return f"Send {site_folder} to the people of {name}: nothing in it is secret."


def _advise_to_send_key_list(folder: Path) -> str:
    return f"With secure_aggregation, hand {folder / paths.SITE_KEYS} to every site: it lists the keys of all sites."


def _advise_to_protect_authority(folder: Path) -> str:
    return f"Store {folder / paths.CA_KEY} where other machines cannot read it: it is needed only for new certificates."


def _format_time(now: datetime) -> str:
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def list_keys(folder: Path, now: datetime | None = None) -> dict[str, Any]:
    """Describe a folder's certificates, sites, refused keys and warnings, for JSON.

    Args:
        folder: the folder of keys.
        now: the present time; None for the clock's.

    Raises:
        UserError: the folder is damaged.
    """
    now = now or datetime.now(UTC)
    access = Access.open(folder)
    with open_record(access.folder) as record:
        sites = []
        for name, site in record.sites.items():
            has_private_key = (access.folder / paths.private_key_path(name)).exists()
            sites.append({"name": name, **asdict(site), "private_key": has_private_key})
    certificate_rows = {}
    for name, validity in zip(("authority", "server"), access.certificate_validity(), strict=True):
        certificate_rows[name] = {
            "fingerprint": validity.fingerprint,
            "until": f"{validity.end:%Y-%m-%d}",
            "left": describe_time_until(validity.end, now),
        }
    return {
        "folder": str(access.folder),
        "hosts": list(record.hosts),
        "port": record.port,
        "listen": record.listen,
        **certificate_rows,
        "sites": sites,
        "refused": [asdict(key) for key in record.refused],
        "warnings": access.warnings(now),
    }

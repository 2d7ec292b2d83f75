"""The folder that says who may come in: what lies where, its record, and what is wrong with it."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import mkdtemp

from pydantic import TypeAdapter, ValidationError

from halfmoon.config.schema import SITE_NAME
from halfmoon.core.errors import UserError
from halfmoon.sites.keys import paths
from halfmoon.sites.keys.paths import LOCK_FILE, RECORD_FILE
from halfmoon.storage import atomic_io, locks

LOCK_TIMEOUT_SECONDS = 10.0  # seconds that the lock is waited for; whoever has it needs it for less than one

_NEXT, _PENDING, _BORN, _GONE = ".next", ".ready", ".partial-", ".gone"


@dataclass(frozen=True)
class FileContent:
    """What a file holds; a private one is for its owner alone."""

    data: bytes
    private: bool = False


def create_folder(folder: Path, files: Mapping[str, FileContent]) -> None:
    """Make a folder with these files, whole or not at all; raise UserError where something is there already."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()) or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} is there already: name a new folder, or delete that one if nobody needs it.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        born = Path(mkdtemp(prefix=f".{folder.name}{_BORN}", dir=folder.parent))
        try:
            with locks.hold(born / LOCK_FILE) as lock:
                _write(born, files)
                os.replace(born, folder)
                if lock.owner is not None:  # it has moved along, and says that somebody is at work
                    (folder / lock.owner.name).unlink(missing_ok=True)
        except BaseException:
            shutil.rmtree(born, ignore_errors=True)
            raise
        atomic_io.sync_folder(folder.parent)
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({atomic_io.reason(error)}); choose another folder.") from error


def apply_changes(folder: Path, files: Mapping[str, FileContent], gone: Sequence[str] = ()) -> None:
    """Put files into a locked folder and delete others: all or none."""
    os.mkdir(folder / _NEXT, 0o700)
    _write(folder / _NEXT, {**files, _GONE: FileContent(json.dumps(list(gone)).encode())})
    os.replace(folder / _NEXT, folder / _PENDING)
    atomic_io.sync_folder(folder)
    finish_changes(folder)


def finish_changes(folder: Path) -> None:
    """Put into place what a change in a locked folder has left to do; clear away what never counted."""
    pending = folder / _PENDING
    if (folder / _NEXT).exists():
        shutil.rmtree(folder / _NEXT)
    if not pending.is_dir():
        return
    gone = json.loads((pending / _GONE).read_bytes())
    paths = [path.relative_to(pending) for path in pending.rglob("*") if path.is_file() and path.name != _GONE]
    for path in sorted(paths, key=lambda each: (each == Path(RECORD_FILE), each)):
        _folders(folder, path.parent)
        os.replace(pending / path, folder / path)
        atomic_io.sync_folder((folder / path).parent)
    for name in gone:
        (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # something else lies there
            (folder / name).parent.rmdir()
    os.replace(pending, folder / _NEXT)  # it is done, however far the next line comes
    shutil.rmtree(folder / _NEXT)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock and finish what was left; raise UserError where it cannot be had or used."""
    try:
        with locks.hold(folder / LOCK_FILE, LOCK_TIMEOUT_SECONDS):
            finish_changes(folder)
            yield
    except locks.Conflict as error:
        raise UserError(
            f"{folder} is being changed by another process: try again when that is done ({atomic_io.reason(error)})."
        ) from error
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be used ({atomic_io.reason(error)}); mend that.") from error


def _clear(folder: Path) -> None:
    """Delete what was left by those who were killed while they made this folder."""
    for left in folder.parent.glob(f".{folder.name}{_BORN}*"):
        try:
            with locks.hold(left / LOCK_FILE):
                shutil.rmtree(left)
        except locks.Conflict:
            continue  # it is being made right now


def _write(root: Path, files: Mapping[str, FileContent]) -> None:
    for name, file in files.items():
        _folders(root, Path(name).parent)
        mode = 0o600 if file.private else 0o644
        with atomic_io.opened(root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as handle:
            atomic_io.write_all(handle, file.data)
            os.fsync(handle)


def _folders(root: Path, path: Path) -> None:
    for part in [*reversed(path.parents), path]:
        (root / part).mkdir(mode=0o700, exist_ok=True)


DEFAULT_CERTIFICATE_DAYS, DEFAULT_PORT, DEFAULT_LISTEN_PORT = 365, 9092, 9443
"""How long a server's certificate is valid, and the ports, where nothing else is said."""
AUTHORITY_DAYS = 3650  # how long an authority is valid; what it signs never outlives it
SCHEMA = 1

MADE_HERE, MADE_AT_SITE = "here", "at the site"  # where a site's key was made


@dataclass(frozen=True)
class SiteKeys:
    """A site that may come in: its key's fingerprint, since when, and where the key was made."""

    fingerprint: str
    since: str
    made: str


@dataclass(frozen=True)
class RefusedKey:
    """A key that may not come in any more, and never again under any name."""

    name: str
    fingerprint: str
    since: str
    why: str  # removed or replaced


@dataclass(frozen=True)
class AccessRecord:
    """What access.json holds: how the server is reached, the certificates' fingerprints, the sites, refused keys."""

    hosts: tuple[str, ...]
    port: int  # of the SuperLink, on this machine alone
    listen: int  # of the proxy, for everybody
    days: int  # of a server's certificate
    authority: str
    certificate: str
    sites: dict[str, SiteKeys]
    refused: tuple[RefusedKey, ...] = ()
    schema: int = SCHEMA

    def file(self) -> FileContent:
        return FileContent(atomic_io.render(asdict(self)))

    @property
    def address(self) -> str:
        host = self.hosts[0] if self.hosts else "localhost"
        return f"[{host}]:{self.listen}" if ":" in host else f"{host}:{self.listen}"


@dataclass(frozen=True)
class CertificateValidity:
    """How long a certificate is valid; `remedy` is the flag of `halfmoon federation rotate` that makes a new one."""

    what: str
    fingerprint: str
    begin: datetime
    end: datetime
    remedy: str


@dataclass(frozen=True)
class Access:
    """Who may come in: the server's TLS files and port, and the public key of each site by name."""

    folder: Path
    ca: Path
    certificate: Path
    key: Path
    port: int
    sites: Mapping[str, Path]

    @classmethod
    def open(cls, folder: Path) -> "Access":
        """Return what a folder says; raise UserError where it is none, damaged, or its keys are open to others."""
        folder = folder.absolute()
        with open_record(folder) as record:
            _check(folder, record)
        return cls(
            folder,
            ca=folder / paths.CA,
            certificate=folder / paths.CERTIFICATE,
            key=folder / paths.KEY,
            port=record.port,
            sites={name: folder / paths.public_key_path(name) for name in record.sites},
        )

    def stamp(self) -> tuple[int, ...]:
        """Return what changes whenever the folder's record does; () where it is gone."""
        try:
            now = (self.folder / paths.RECORD_FILE).stat()
        except OSError:
            return ()
        return now.st_ino, now.st_mtime_ns, now.st_size

    def terms(self) -> list[CertificateValidity]:
        """Return how long the certificates are valid; raise UserError where they cannot be read."""
        from halfmoon.sites.keys import certificates

        terms = []
        for what, path, remedy in (
            ("the authority's certificate", self.ca, "--ca"),
            ("the server's certificate", self.certificate, "--server"),
        ):
            data = _bytes(path)
            try:
                terms.append(
                    CertificateValidity(
                        what, certificates.certificate_fingerprint(data), *certificates.validity_period(data), remedy
                    )
                )
            except ValueError as error:
                raise UserError(f"{path} cannot be read ({error}): restore it from a copy.") from error
        return terms

    def warnings(self, now: datetime | None = None) -> list[str]:
        """Return a sentence for each certificate that has run out, will within a month, or is not valid yet."""
        now = now or datetime.now(UTC)
        sentences = []
        for term in self.terms():
            order = f"halfmoon federation rotate {self.folder} {term.remedy}"
            if term.end <= now:
                sentences.append(
                    f"{term.what} {describe_time_until(term.end, now)}, and no site can come in: run {order}."
                )
            elif term.end - now <= timedelta(days=30):
                sentences.append(f"{term.what} runs out {describe_time_until(term.end, now)}: run {order} before.")
            if term.begin > now:
                sentences.append(
                    f"{term.what} is not valid before {term.begin:%Y-%m-%d %H:%M} UTC: look at this clock."
                )
        return sentences


def describe_time_until(end: datetime, now: datetime) -> str:
    """Return in words how far away a moment is: "in 34 days", "EXPIRED 3 days ago"."""
    hours = abs(end - now) // timedelta(hours=1)
    count, unit = (hours // 24, "day") if hours >= 24 else (hours, "hour")
    words = f"{count} {unit}{'' if count == 1 else 's'}" if count else "less than an hour"
    return f"in {words}" if end > now else f"EXPIRED {words} ago"


@contextmanager
def open_record(folder: Path) -> Iterator[AccessRecord]:
    """Give the record of a folder, which nobody changes meanwhile; raise UserError where there is none."""
    if not folder.is_dir() or not any(
        (folder / name).exists() for name in (paths.RECORD_FILE, paths.CA, paths.CERTIFICATE)
    ):
        raise UserError(f"{folder} is no folder of keys: make one with halfmoon federation init {folder}.")
    with lock_folder(folder):
        yield _record(folder)


def _record(folder: Path) -> AccessRecord:
    path = folder / paths.RECORD_FILE
    data = atomic_io.read(path)
    if data is None:
        raise UserError(f"{path} is missing: restore it from a copy; without it nobody knows which sites may come in.")
    try:
        record = TypeAdapter(AccessRecord).validate_json(data, strict=True)
    except ValidationError as error:
        schema = (atomic_io.read_json(path) or {}).get("schema")
        if isinstance(schema, int) and schema > SCHEMA:
            raise UserError(f"{path} was written by a newer halfmoon: update the one on this machine.") from error
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise UserError(f"{path} is damaged ({where}: {first['msg']}): restore it from a copy.") from error
    for name in [*record.sites, *(each.name for each in record.refused)]:
        if not SITE_NAME.fullmatch(name):
            raise UserError(f"{path} is damaged ({name!r} is no name of a site): restore it from a copy.")
    if record.schema != SCHEMA:
        raise UserError(f"{path} was written by another halfmoon: use that one, or a newer one.")
    return record


def _check(folder: Path, record: AccessRecord) -> None:
    from halfmoon.sites.keys import certificates

    for name in (paths.CA_KEY, paths.KEY, *map(paths.private_key_path, record.sites)):
        check_permissions(folder / name)
    for name in ("", paths.RECORD_FILE, paths.CA, paths.CERTIFICATE, *map(paths.site_path, record.sites)):
        _check_not_writable(folder / name)
    for name in record.sites:
        _check_not_writable(folder / paths.public_key_path(name))
    authority, certificate, key = (_bytes(folder / name) for name in (paths.CA, paths.CERTIFICATE, paths.KEY))
    try:
        if certificates.certificate_fingerprint(authority) != record.authority:
            raise UserError(
                f"{folder / paths.CA} is another one than {paths.RECORD_FILE} says: restore it from a copy."
            )
        whole = certificates.certificate_fingerprint(certificate) == record.certificate and certificates.key_matches(
            key, certificate
        )
    except ValueError as error:
        raise UserError(f"{folder}: its certificates cannot be read ({error}): restore them from a copy.") from error
    if not whole:
        order = f"halfmoon federation rotate {folder} --server"
        raise UserError(
            f"{folder / paths.KEY} and {paths.CERTIFICATE} are not those of {paths.RECORD_FILE}: make new ones with {order}."
        )
    for name, site in record.sites.items():
        path = folder / paths.public_key_path(name)
        if certificates.key_fingerprint(_bytes(path)) != site.fingerprint:
            raise UserError(
                f"{path} is another key than {paths.RECORD_FILE} says: restore it from a copy, or remove the site."
            )


def _bytes(path: Path) -> bytes:
    data = atomic_io.read(path)
    if data is None:
        raise UserError(f"{path} is missing: restore it from a copy.")
    return data


def check_permissions(path: Path) -> None:
    """Raise UserError where a private file is there and somebody else can read or change it."""
    if os.name == "posix" and path.exists() and path.stat().st_mode & 0o077:
        raise UserError(
            f"{path} is open to other users of this machine: run chmod 600 {path}, and where anyone else may have "
            "read it, replace it with halfmoon federation rotate."
        )


def _check_not_writable(path: Path) -> None:
    if os.name == "posix" and path.exists() and path.stat().st_mode & 0o022:
        raise UserError(f"{path} can be changed by other users of this machine: run chmod go-w {path}, and look at it.")

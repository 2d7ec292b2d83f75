"""The folder of a federation's keys: its files, its record access.json, and checks of both.

The record lists the sites that may join and the fingerprints of their keys. Changes are atomic: files are first written
to a subfolder `.next`, which is renamed to `.ready` when it is complete; only then are they moved to their locations. A
process that is killed in between leaves either no change or a `.ready` folder, which the next process finishes.
"""

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
from halfmoon.storage.private_folders import check_parents

LOCK_TIMEOUT_SECONDS = 10.0
"""Time to wait for the folder's lock; a process has it for less than a second."""

_INCOMPLETE_CHANGE = ".next"
_COMPLETE_CHANGE = ".ready"
_INCOMPLETE_FOLDER = ".partial-"

_DELETED_FILES = ".gone"
"""Lists, in the folder of a change, the files to delete."""


@dataclass(frozen=True)
class FileContent:
    """The content of a file; a private file is readable by its owner only."""

    data: bytes
    private: bool = False


def create_folder(folder: Path, files: Mapping[str, FileContent]) -> None:
    """Create a folder of keys with these files, completely or not at all.

    The files are written to a temporary folder, which is renamed to `folder` when it is complete.

    Args:
        folder: the folder, which must be empty or not exist.
        files: contents by path relative to `folder`.

    Raises:
        UserError: the folder has contents, or it cannot be created.
    """
    is_file = folder.exists() and not folder.is_dir()
    has_content = folder.is_dir() and any(folder.iterdir())
    if folder.is_symlink() or is_file or has_content:
        raise UserError(f"{folder} is there already: name a new folder, or delete that one if it is not needed.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _delete_incomplete_folders(folder)  # those of processes that were killed
        check_parents(folder)  # nobody else may be able to replace the folder of private keys
        incomplete = Path(mkdtemp(prefix=f".{folder.name}{_INCOMPLETE_FOLDER}", dir=folder.parent))
        try:
            with locks.hold(incomplete / LOCK_FILE) as lock:
                _write_files(incomplete, files)
                os.replace(incomplete, folder)
                # On a file system without locks, an owner file stands in. It was renamed with the folder, so that the
                # lock would look for it at the previous path.
                if lock.owner is not None:
                    (folder / lock.owner.name).unlink(missing_ok=True)
        except BaseException:
            shutil.rmtree(incomplete, ignore_errors=True)
            raise
        atomic_io.sync_folder(folder.parent)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be created ({atomic_io.error_reason(error)}); choose another folder."
        ) from error


def apply_changes(folder: Path, files: Mapping[str, FileContent], deleted: Sequence[str] = ()) -> None:
    """Write files into a folder and delete others, all or none, also if the process is killed meanwhile.

    The new files and a list of the files to delete are written to a subfolder, which is renamed when it is complete.
    From then on the change will take place: by this process, or by the next one that locks the folder.

    Args:
        folder: the folder, which the caller has locked.
        files: contents by path relative to `folder`.
        deleted: files to delete, relative to `folder`.
    """
    incomplete = folder / _INCOMPLETE_CHANGE
    os.mkdir(incomplete, 0o700)
    deleted_list = FileContent(json.dumps(list(deleted)).encode())
    _write_files(incomplete, {**files, _DELETED_FILES: deleted_list})
    os.replace(incomplete, folder / _COMPLETE_CHANGE)
    atomic_io.sync_folder(folder)
    finish_changes(folder)


def finish_changes(folder: Path) -> None:
    """Move the files of a complete change to their locations, and discard an incomplete change.

    If this is interrupted, the next call continues.

    Args:
        folder: the folder, which the caller has locked.
    """
    change = folder / _COMPLETE_CHANGE
    if (folder / _INCOMPLETE_CHANGE).exists():
        shutil.rmtree(folder / _INCOMPLETE_CHANGE)
    if not change.is_dir():
        return
    deleted = json.loads((change / _DELETED_FILES).read_bytes())
    files = [path.relative_to(change) for path in change.rglob("*") if path.is_file() and path.name != _DELETED_FILES]
    # The record is moved last: servers look for changes of the record, and then expect the other files.
    record_last = sorted(files, key=lambda path: (path == Path(RECORD_FILE), path))
    for path in record_last:
        _create_parents(folder, path.parent)
        os.replace(change / path, folder / path)
        atomic_io.sync_folder((folder / path).parent)
    # Files are deleted after the record was moved, which no longer refers to them.
    for name in deleted:
        (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # the folder is not empty
            (folder / name).parent.rmdir()
    # After this rename the change counts as done, even if deleting its folder is interrupted.
    os.replace(change, folder / _INCOMPLETE_CHANGE)
    shutil.rmtree(folder / _INCOMPLETE_CHANGE)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder during the `with` block, after finishing a change that was interrupted.

    Raises:
        UserError: another process has the lock, or the folder cannot be used.
    """
    try:
        with locks.hold(folder / LOCK_FILE, LOCK_TIMEOUT_SECONDS):
            finish_changes(folder)
            yield
    except locks.LockConflict as error:
        raise UserError(
            f"{folder} is being changed by another process: try again when that is done ({atomic_io.error_reason(error)})."
        ) from error
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} cannot be used ({atomic_io.error_reason(error)}); resolve that."
        ) from error


def _delete_incomplete_folders(folder: Path) -> None:
    """Delete the temporary folders of processes that were killed while they created this folder."""
    for incomplete in folder.parent.glob(f".{folder.name}{_INCOMPLETE_FOLDER}*"):
        try:
            with locks.hold(incomplete / LOCK_FILE):
                shutil.rmtree(incomplete)
        except locks.LockConflict:
            continue  # another process is creating it now


def _write_files(root: Path, files: Mapping[str, FileContent]) -> None:
    """Write new files below `root` to the disk, private ones with permissions for their owner only."""
    for name, file in files.items():
        _create_parents(root, Path(name).parent)
        mode = 0o600 if file.private else 0o644
        with atomic_io.open_file(root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as handle:
            atomic_io.write_all(handle, file.data)
            os.fsync(handle)


def _create_parents(root: Path, path: Path) -> None:
    for folder in [*reversed(path.parents), path]:
        (root / folder).mkdir(mode=0o700, exist_ok=True)


WARNING_DAYS = 30
"""Days before a certificate expires from which on there is a warning."""

DEFAULT_CERTIFICATE_DAYS = 365
"""Validity of a server's certificate."""

DEFAULT_PORT = 9092
"""Port of the SuperLink, on the server's machine only."""

DEFAULT_LISTEN_PORT = 9443
"""Port of the proxy, which sites connect to."""

AUTHORITY_DAYS = 3650
"""Validity of an authority; the certificates that it signs are never valid for longer."""

SCHEMA = 1

MADE_HERE = "here"
MADE_AT_SITE = "at the site"


@dataclass(frozen=True)
class SiteKeys:
    """A site that may join; the attributes are keys of access.json.

    Attributes:
        fingerprint: of the site's public key.
        since: the time of the change, UTC.
        made: `MADE_HERE` or `MADE_AT_SITE`, the location where the private key was created.
    """

    fingerprint: str
    since: str
    made: str


@dataclass(frozen=True)
class RefusedKey:
    """A key that is never accepted again, under any name; the attributes are keys of access.json.

    Attributes:
        name: the site's name.
        fingerprint: of the site's public key.
        since: the time of the change, UTC.
        why: "removed" or "replaced".
    """

    name: str
    fingerprint: str
    since: str
    why: str


@dataclass(frozen=True)
class AccessRecord:
    """The contents of access.json; the attributes are its keys.

    Attributes:
        hosts: names and addresses of the server.
        port: the SuperLink's port, on the server's machine only.
        listen: the proxy's port, which sites connect to.
        days: validity of the server's certificate.
        authority: fingerprint of the authority's certificate.
        certificate: fingerprint of the server's certificate.
        sites: the sites that may join, by name.
        refused: keys that are never accepted again.
        schema: the version of the format.
    """

    hosts: tuple[str, ...]
    port: int
    listen: int
    days: int
    authority: str
    certificate: str
    sites: dict[str, SiteKeys]
    refused: tuple[RefusedKey, ...] = ()
    schema: int = SCHEMA

    def file(self) -> FileContent:
        """Render access.json."""
        return FileContent(atomic_io.json_line(asdict(self)))

    @property
    def address(self) -> str:
        """Return HOST:PORT that sites connect to."""
        host = self.hosts[0] if self.hosts else "localhost"
        return f"[{host}]:{self.listen}" if ":" in host else f"{host}:{self.listen}"


@dataclass(frozen=True)
class CertificateValidity:
    """The validity of a certificate.

    Attributes:
        certificate: its name in messages.
        fingerprint: its fingerprint.
        begin: the beginning of its validity.
        end: the end of its validity.
        remedy: the flag of `halfmoon federation rotate` that makes a new one.
    """

    certificate: str
    fingerprint: str
    begin: datetime
    end: datetime
    remedy: str


@dataclass(frozen=True)
class Access:
    """The files that a server needs to admit sites.

    Attributes:
        folder: the folder of keys.
        ca: the authority's certificate.
        certificate: the server's certificate.
        key: the server's private key.
        port: the SuperLink's port.
        sites: the file of each site's public key, by name.
    """

    folder: Path
    ca: Path
    certificate: Path
    key: Path
    port: int
    sites: Mapping[str, Path]

    @classmethod
    def open(cls, folder: Path) -> "Access":
        """Read a folder of keys, and check its files before a server relies on them.

        Raises:
            UserError: the folder is no folder of keys, is damaged, or other users can read its private keys.
        """
        folder = folder.absolute()
        with open_record(folder) as record:
            _check_folder(folder, record)
        return cls(
            folder,
            ca=folder / paths.CA,
            certificate=folder / paths.CERTIFICATE,
            key=folder / paths.KEY,
            port=record.port,
            sites={name: folder / paths.public_key_path(name) for name in record.sites},
        )

    def stamp(self) -> tuple[int, ...]:
        """Return a value that changes with every change of the folder's record, to poll for changes; () without one."""
        try:
            status = (self.folder / paths.RECORD_FILE).stat()
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size

    def certificate_validity(self) -> list[CertificateValidity]:
        """Read from when until when the certificates of the authority and of the server are valid, in this order.

        Raises:
            UserError: a certificate is missing or damaged.
        """
        return [
            _read_validity(self.ca, name="the authority's certificate", remedy="--ca"),
            _read_validity(self.certificate, name="the server's certificate", remedy="--server"),
        ]

    def warnings(self, now: datetime | None = None) -> list[str]:
        """Describe each certificate that has expired, expires soon, or is not valid yet, with the command that helps.

        Args:
            now: the time; None for the current time.
        """
        now = now or datetime.now(UTC)
        sentences = []
        for validity in self.certificate_validity():
            name = validity.certificate
            command = f"halfmoon federation rotate {self.folder} {validity.remedy}"
            time_until_end = describe_time_until(validity.end, now)
            if validity.end <= now:
                sentences.append(f"{name} {time_until_end}, and no site can come in: run {command}.")
            elif validity.end - now <= timedelta(days=WARNING_DAYS):
                sentences.append(f"{name} runs out {time_until_end}: run {command} before.")
            if validity.begin > now:
                sentences.append(f"{name} is not valid before {validity.begin:%Y-%m-%d %H:%M} UTC: check this clock.")
        return sentences


def _read_validity(path: Path, name: str, remedy: str) -> CertificateValidity:
    """Read from when until when a certificate is valid.

    Args:
        path: the certificate's file.
        name: its name, for messages.
        remedy: the flag of `halfmoon federation rotate` that makes a new one, for messages.

    Raises:
        UserError: the file is missing or damaged.
    """
    from halfmoon.sites.keys import certificates

    data = _read_required(path)
    try:
        begin, end = certificates.validity_period(data)
        fingerprint = certificates.certificate_fingerprint(data)
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}): restore it from a copy.") from error
    return CertificateValidity(name, fingerprint, begin, end, remedy)


def describe_time_until(end: datetime, now: datetime) -> str:
    """Describe the time until a moment: "in 34 days", "EXPIRED 3 days ago"."""
    hours = abs(end - now) // timedelta(hours=1)
    if hours == 0:
        duration = "less than an hour"
    elif hours < 24:
        duration = f"{hours} hour{'' if hours == 1 else 's'}"
    else:
        days = hours // 24
        duration = f"{days} day{'' if days == 1 else 's'}"
    return f"in {duration}" if end > now else f"EXPIRED {duration} ago"


@contextmanager
def open_record(folder: Path) -> Iterator[AccessRecord]:
    """Read the record of a folder of keys, and lock the folder during the `with` block; raise UserError without one."""
    expected = (paths.RECORD_FILE, paths.CA, paths.CERTIFICATE)
    if not folder.is_dir() or not any((folder / name).exists() for name in expected):
        raise UserError(f"{folder} is no folder of keys: make one with halfmoon federation init {folder}.")
    with lock_folder(folder):
        yield _read_record(folder)


def _read_record(folder: Path) -> AccessRecord:
    """Read and check the record of a folder of keys, access.json.

    Raises:
        UserError: it is missing or damaged, or was written by a newer version of halfmoon.
    """
    path = folder / paths.RECORD_FILE
    data = atomic_io.read(path)
    if data is None:
        raise UserError(f"{path} is missing: restore it from a copy; it lists the sites that may join.")
    try:
        record = TypeAdapter(AccessRecord).validate_json(data, strict=True)
    except ValidationError as error:
        schema = (atomic_io.read_json(path) or {}).get("schema")
        if isinstance(schema, int) and schema > SCHEMA:
            raise UserError(f"{path} was written by a newer halfmoon: update the one on this machine.") from error
        first_error = error.errors()[0]
        location = ".".join(map(str, first_error["loc"])) or "the file"
        raise UserError(f"{path} is damaged ({location}: {first_error['msg']}): restore it from a copy.") from error
    for name in [*record.sites, *(key.name for key in record.refused)]:
        if not SITE_NAME.fullmatch(name):
            raise UserError(f"{path} is damaged ({name!r} is no name of a site): restore it from a copy.")
    if record.schema != SCHEMA:
        raise UserError(f"{path} was written by another halfmoon: use that one, or a newer one.")
    return record


def _check_folder(folder: Path, record: AccessRecord) -> None:
    """Check that all files of a folder of keys exist, match the record, and have safe permissions.

    Args:
        folder: the folder.
        record: the contents of its access.json, with the fingerprint of each site's key.

    Raises:
        UserError: they do not.
    """
    from halfmoon.sites.keys import certificates

    _check_folder_permissions(folder, record)
    _check_certificates(folder, record)
    for name, site in record.sites.items():
        path = folder / paths.public_key_path(name)
        if certificates.key_fingerprint(_read_required(path)) != site.fingerprint:
            raise UserError(
                f"{path} is not the key in {paths.RECORD_FILE}: restore it from a copy, or remove the site."
            )


def _check_folder_permissions(folder: Path, record: AccessRecord) -> None:
    """Check that other users can read no private key, and can change no file that decides who may join."""
    check_parents(folder)
    for name in (paths.CA_KEY, paths.KEY, *map(paths.private_key_path, record.sites)):
        check_permissions(folder / name)
    for name in ("", paths.RECORD_FILE, paths.CA, paths.CERTIFICATE, *map(paths.site_path, record.sites)):
        _check_not_writable(folder / name)
    for name in record.sites:
        _check_not_writable(folder / paths.public_key_path(name))


def _check_certificates(folder: Path, record: AccessRecord) -> None:
    """Check that a folder's certificates are those of its record, and the server's private key that of its certificate.

    Args:
        folder: the folder of keys.
        record: the contents of its access.json, with the fingerprints of the certificates.

    Raises:
        UserError: a file is missing, damaged or another one than recorded.
    """
    from halfmoon.sites.keys import certificates

    authority = _read_required(folder / paths.CA)
    certificate = _read_required(folder / paths.CERTIFICATE)
    key = _read_required(folder / paths.KEY)
    try:
        is_authority = certificates.certificate_fingerprint(authority) == record.authority
        is_recorded = certificates.certificate_fingerprint(certificate) == record.certificate
        is_valid_pair = is_recorded and certificates.key_matches(key, certificate)
    except ValueError as error:
        raise UserError(f"{folder}: its certificates cannot be read ({error}): restore them from a copy.") from error
    if not is_authority:
        raise UserError(f"{folder / paths.CA} is not the certificate in {paths.RECORD_FILE}: restore it from a copy.")
    if not is_valid_pair:
        command = f"halfmoon federation rotate {folder} --server"
        raise UserError(
            f"{folder / paths.KEY} and {paths.CERTIFICATE} are not those of {paths.RECORD_FILE}: make new ones with "
            f"{command}."
        )


def _read_required(path: Path) -> bytes:
    data = atomic_io.read(path)
    if data is None:
        raise UserError(f"{path} is missing: restore it from a copy.")
    return data


def check_permissions(path: Path) -> None:
    """Raise UserError if a private file exists and other users can read or change it."""
    if os.name == "posix" and path.exists() and path.stat().st_mode & 0o077:
        raise UserError(
            f"{path} is open to other users of this machine: run chmod 600 {path}, and if another person may have "
            "read it, replace it with halfmoon federation rotate."
        )


def _check_not_writable(path: Path) -> None:
    if os.name == "posix" and path.exists() and path.stat().st_mode & 0o022:
        raise UserError(f"{path} can be changed by other users of this machine: run chmod go-w {path}, and check it.")

"""Keys and certificates: made, read, compared. The one module that needs the library cryptography.

All keys are on the curve P-384, which Flower, OpenSSH and every TLS library of today know. What sites and servers show
each other is what `openssl` and `ssh-keygen` show, so that people can compare it over the telephone.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address

from halfmoon.core.errors import UserError, install_command

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise UserError(
        f"keys and certificates need the library cryptography, which is not installed: {install_command('flower')}."
    ) from error

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")  # programs on a server's own machine call it by these
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)  # those that both OpenSSH and Flower know
_NO_ENCRYPTION = serialization.NoEncryption()


@dataclass(frozen=True)
class KeyPair:
    """A private key and its certificate, both PEM."""

    key: bytes
    certificate: bytes


def create_authority(days: int, now: datetime) -> KeyPair:
    """Return a new authority for so many days: it may sign certificates of servers, and no other authority."""
    key = ec.generate_private_key(ec.SECP384R1())
    serial = x509.random_serial_number()
    name = _named(f"federation authority {serial:x}"[:40])
    builder = _builder(name, name, key, serial, now, now + timedelta(days=days), ca=True)
    return KeyPair(_pem(key), builder.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))


def create_server_certificate(issuer: KeyPair, hosts: Sequence[str], days: int, now: datetime) -> KeyPair:
    """Return a server's key and certificate for these names; raise UserError where the authority has run out."""
    above = x509.load_pem_x509_certificate(issuer.certificate)
    if above.not_valid_after_utc <= now:
        raise UserError(
            "the authority has run out, and what it signs is worth nothing: make a new one with "
            "halfmoon federation rotate FOLDER --ca."
        )
    signer = _loaded(issuer.key)
    key = ec.generate_private_key(ec.SECP384R1())
    end = min(now + timedelta(days=days), above.not_valid_after_utc)
    names = [_alternative(host) for host in dict.fromkeys([*hosts, *LOCAL_HOSTS])]
    serial = x509.random_serial_number()
    builder = _builder(above.subject, _named("federation server"), key, serial, now, end, ca=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    signer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(signer_key, critical=False)
    return KeyPair(_pem(key), builder.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))


def create_site_key(name: str) -> tuple[bytes, bytes]:
    """Return a new private key in OpenSSH's format, as a SuperNode reads it, and the line with its public half."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, _NO_ENCRYPTION)
    return private, _line(key.public_key(), name)


def parse_public_key(data: bytes, source: str, name: str) -> bytes:
    """Return the line of a public key with the site's name; raise UserError for any other key."""
    if b"PRIVATE KEY-----" in data:
        raise UserError(f"{source} is a private key, which no one but its site may have: give the file NAME.pub.")
    words = "it must be the line that ssh-keygen -t ecdsa -b 384 writes into NAME.pub"
    try:
        key = serialization.load_ssh_public_key(data.strip())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"{source} is no public key in OpenSSH's format: {words}.") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, _CURVES):
        raise UserError(f"{source} is a public key of a kind that Flower does not take: {words}.")
    return _line(key, name)


def key_fingerprint(line: bytes) -> str:
    """Return the fingerprint of a public key's line as `ssh-keygen -l` shows it; raise UserError where it is none."""
    try:
        blob = base64.b64decode(line.split()[1], validate=True)
    except (IndexError, ValueError) as error:
        raise UserError("this is no public key in OpenSSH's format.") from error
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


def certificate_fingerprint(certificate: bytes) -> str:
    """Return the fingerprint of a certificate as `openssl x509 -fingerprint -sha256` shows it; raise ValueError."""
    return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex(":").upper()


def validity_period(certificate: bytes) -> tuple[datetime, datetime]:
    read = x509.load_pem_x509_certificate(certificate)
    return read.not_valid_before_utc, read.not_valid_after_utc


def key_matches(key: bytes, certificate: bytes) -> bool:
    return _loaded(key).public_key() == x509.load_pem_x509_certificate(certificate).public_key()


def _builder(
    issuer: x509.Name,
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    serial: int,
    now: datetime,
    end: datetime,
    ca: bool,
) -> x509.CertificateBuilder:
    """Return a certificate that signs others (`ca`), or that shows who somebody is."""
    begin = now - timedelta(hours=1)  # sites whose clocks are slow believe a new certificate too
    builder = x509.CertificateBuilder().issuer_name(issuer).subject_name(subject).public_key(key.public_key())
    builder = builder.serial_number(serial).not_valid_before(begin).not_valid_after(end)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
    usage = x509.KeyUsage(not ca, False, False, False, False, ca, False, False, False)
    return builder.add_extension(usage, critical=True)


def _named(words: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, words)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, _NO_ENCRYPTION)


def _loaded(key: bytes) -> ec.EllipticCurvePrivateKey:
    read = serialization.load_pem_private_key(key, None)
    if not isinstance(read, ec.EllipticCurvePrivateKey):
        raise ValueError("a key that is not on an elliptic curve")
    return read


def _line(key: ec.EllipticCurvePublicKey, name: str) -> bytes:
    line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return line + f" {name}\n".encode()

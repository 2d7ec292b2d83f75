"""Create, read and compare keys and certificates. Only this module needs the library cryptography.

All keys are on the curve P-384, which Flower, OpenSSH and current TLS libraries support. Fingerprints have the form of
`openssl` and `ssh-keygen`, so that people can compare them over the telephone.
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

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
"""Names by which programs on the server's machine connect to it."""

_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)  # supported by OpenSSH and Flower
_NO_ENCRYPTION = serialization.NoEncryption()


@dataclass(frozen=True)
class KeyPair:
    """A private key and its certificate, both PEM."""

    key: bytes
    certificate: bytes


def create_authority(days: int, now: datetime) -> KeyPair:
    """Create a self-signed authority that is valid for `days`; it can sign servers' certificates, but no authority."""
    key = ec.generate_private_key(ec.SECP384R1())
    serial = x509.random_serial_number()
    name = _common_name(f"federation authority {serial:x}"[:40])
    builder = _build_certificate(name, name, key, serial, now, now + timedelta(days=days), ca=True)
    return KeyPair(_pem(key), builder.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))


def create_server_certificate(issuer: KeyPair, hosts: Sequence[str], days: int, now: datetime) -> KeyPair:
    """Create the private key and the TLS certificate of a federation's server.

    Args:
        issuer: the authority.
        hosts: names and addresses of the server; `LOCAL_HOSTS` are added.
        days: the validity, which is limited by that of the authority.
        now: the beginning of the validity.

    Raises:
        UserError: the authority has expired.
    """
    issuer_certificate = x509.load_pem_x509_certificate(issuer.certificate)
    if issuer_certificate.not_valid_after_utc <= now:
        raise UserError(
            "the authority has expired, and certificates that it signs are invalid: make a new one with "
            "halfmoon federation rotate FOLDER --ca."
        )
    issuer_key = _load_private_key(issuer.key)
    key = ec.generate_private_key(ec.SECP384R1())
    end = min(now + timedelta(days=days), issuer_certificate.not_valid_after_utc)
    builder = _build_certificate(
        issuer=issuer_certificate.subject,
        subject=_common_name("federation server"),
        key=key,
        serial=x509.random_serial_number(),
        now=now,
        end=end,
        ca=False,
    )
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    # TLS libraries compare the host that a site connects to with these names, not with the subject.
    alternative_names = [_alternative_name(host) for host in dict.fromkeys([*hosts, *LOCAL_HOSTS])]
    builder = builder.add_extension(x509.SubjectAlternativeName(alternative_names), critical=False)
    authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = builder.add_extension(authority_id, critical=False)
    certificate = builder.sign(issuer_key, hashes.SHA384())
    return KeyPair(_pem(key), certificate.public_bytes(serialization.Encoding.PEM))


def create_site_key(name: str) -> tuple[bytes, bytes]:
    """Create a site's private key in OpenSSH's format, as a SuperNode reads it, and the line of its public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, _NO_ENCRYPTION)
    return private, _public_key_line(key.public_key(), name)


def parse_public_key(data: bytes, source: str, name: str) -> bytes:
    """Parse a site's public key in OpenSSH's format, and give it the site's name as its comment.

    Args:
        data: the content of the file.
        source: the file, for messages.
        name: the site's name, which becomes the comment of the key.

    Returns:
        The line of the key.

    Raises:
        UserError: it is no public key, or of an unsupported type.
    """
    if b"PRIVATE KEY-----" in data:
        raise UserError(f"{source} is a private key, which only its site may have: give the file NAME.pub.")
    expected = "it must be the line that ssh-keygen -t ecdsa -b 384 writes into NAME.pub"
    try:
        key = serialization.load_ssh_public_key(data.strip())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"{source} is no public key in OpenSSH's format: {expected}.") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, _CURVES):
        raise UserError(f"{source} is a public key of a type that Flower does not support: {expected}.")
    return _public_key_line(key, name)


def key_fingerprint(line: bytes) -> str:
    """Compute the fingerprint of a public key's line, as `ssh-keygen -l` does; raise UserError for an invalid line."""
    try:
        key_bytes = base64.b64decode(line.split()[1], validate=True)
    except (IndexError, ValueError) as error:
        raise UserError("this is no public key in OpenSSH's format.") from error
    return f"SHA256:{base64.b64encode(hashlib.sha256(key_bytes).digest()).decode().rstrip('=')}"


def certificate_fingerprint(certificate: bytes) -> str:
    """Compute the fingerprint of a certificate, as `openssl x509 -fingerprint -sha256` does.

    Raises:
        ValueError: the certificate is invalid.
    """
    return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex(":").upper()


def validity_period(certificate: bytes) -> tuple[datetime, datetime]:
    """Return the beginning and the end of a certificate's validity."""
    parsed = x509.load_pem_x509_certificate(certificate)
    return parsed.not_valid_before_utc, parsed.not_valid_after_utc


def key_matches(key: bytes, certificate: bytes) -> bool:
    """Check whether a certificate belongs to a private key."""
    return _load_private_key(key).public_key() == x509.load_pem_x509_certificate(certificate).public_key()


def _build_certificate(
    issuer: x509.Name,
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    serial: int,
    now: datetime,
    end: datetime,
    ca: bool,
) -> x509.CertificateBuilder:
    """Build a certificate that is not signed yet.

    Args:
        issuer: the name of the authority that is going to sign it.
        subject: the name of the certificate's owner.
        key: the key of the owner.
        serial: the serial number.
        now: the time; the validity begins an hour earlier, for sites whose clocks are slow.
        end: the end of the validity.
        ca: whether the owner may sign certificates (an authority) or data (a server).
    """
    begin = now - timedelta(hours=1)
    builder = x509.CertificateBuilder().issuer_name(issuer).subject_name(subject).public_key(key.public_key())
    builder = builder.serial_number(serial).not_valid_before(begin).not_valid_after(end)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
    usage = x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return builder.add_extension(usage, critical=True)


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, _NO_ENCRYPTION)


def _load_private_key(key: bytes) -> ec.EllipticCurvePrivateKey:
    parsed = serialization.load_pem_private_key(key, None)
    if not isinstance(parsed, ec.EllipticCurvePrivateKey):
        raise ValueError("a key that is not on an elliptic curve")
    return parsed


def _public_key_line(key: ec.EllipticCurvePublicKey, name: str) -> bytes:
    line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return line + f" {name}\n".encode()

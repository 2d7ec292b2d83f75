"""Long-term keys of sites, which sign the keys of a sum, so that the server cannot substitute its own.

A site's long-term key is the one that identifies it to Flower (ECDSA, in OpenSSH's format, as `halfmoon federation init`
generates it). Messages contain its public half as a compressed point (SEC 1, 2.3.3), whose length identifies the curve.
"""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

from halfmoon.aggregation.secure.csprng import MISSING
from halfmoon.core.errors import UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

POINT_BYTES = 67
"""Bytes of a public key in a message: those of the longest curve; shorter ones are padded with zeros in front."""

INTEGER_BYTES = 66
"""Bytes of each of the two integers of a signature, on the longest curve."""

SIGNATURE_BYTES = 2 * INTEGER_BYTES
"""Bytes of a signature: r and s."""


def _curves() -> dict[int, ec.EllipticCurve]:
    """Return the curves that both OpenSSH and Flower support, by the length of a compressed point in bytes.

    Raises:
        UserError: If the library cryptography is not installed. Callers import it only after this call.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise UserError(MISSING) from error
    return {1 + (curve.key_size + 7) // 8: curve for curve in (ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1())}


def _curve_names() -> set[str]:
    return {curve.name for curve in _curves().values()}


def generate_private_key() -> bytes:
    """Generate a site's long-term private key (ECDSA on P-384), and encode it in OpenSSH's format, unencrypted.

    Raises:
        UserError: If the library cryptography is not installed.
    """
    curves = _curves()  # by the length of a compressed point (1 byte and the x coordinate), as in messages
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(curves[1 + 384 // 8])  # P-384
    return key.private_bytes(
        encoding=serialization.Encoding.PEM,
        format=serialization.PrivateFormat.OpenSSH,
        encryption_algorithm=serialization.NoEncryption(),
    )


def load_private_key(data: bytes) -> ec.EllipticCurvePrivateKey:
    """Parse a site's long-term private key (ECDSA) in OpenSSH's or PEM format.

    Args:
        data: The content of the key file.

    Raises:
        ValueError: If it is not an unencrypted key on a supported curve.
    """
    curve_names = _curve_names()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    is_openssh = b"OPENSSH PRIVATE KEY" in data
    load = serialization.load_ssh_private_key if is_openssh else serialization.load_pem_private_key
    try:
        key = load(data, None)
    except (UnsupportedAlgorithm, TypeError) as error:  # TypeError: it is encrypted
        raise ValueError(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in curve_names:
        raise ValueError("it is on no curve that Flower takes")
    return key


def encode_public_key(key: ec.EllipticCurvePublicKey) -> bytes:
    """Encode a public key as a compressed point, without padding."""
    from cryptography.hazmat.primitives import serialization

    return key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)


def parse_public_key(line: bytes) -> bytes:
    """Convert a public key from a line in OpenSSH's format to a compressed point on its elliptic curve (SEC 1, 2.3.3).

    Args:
        line: A line as in authorized_keys or a .pub file.

    Raises:
        ValueError: If the line is not a public key on a supported curve.
    """
    curve_names = _curve_names()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_ssh_public_key(line.strip())
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in curve_names:
        raise ValueError("it is on no curve that Flower takes")
    return encode_public_key(key)


def fingerprint(key: bytes) -> str:
    """Compute the fingerprint of a public key, in the format of `ssh-keygen -l`.

    Args:
        key: The public key, a compressed point.

    Raises:
        ValueError: If the bytes are not a public key on a supported curve.
    """
    from cryptography.hazmat.primitives import serialization

    line = _decode_public_key(key).public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _, key_base64 = line.split()  # type and key
    digest = hashlib.sha256(base64.b64decode(key_base64)).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def sign(key: ec.EllipticCurvePrivateKey, text: bytes) -> bytes:
    """Sign a text (ECDSA with SHA-384): r and s, `SIGNATURE_BYTES` bytes altogether."""
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

    r, s = decode_dss_signature(key.sign(text, _scheme()))
    return r.to_bytes(INTEGER_BYTES, "big") + s.to_bytes(INTEGER_BYTES, "big")


def verify(key: bytes, text: bytes, signature: bytes) -> bool:
    """Verify the signature of a text with a public key (ECDSA with SHA-384).

    Args:
        key: The public key, a compressed point.
        text: The signed bytes.
        signature: The integers r and s, `SIGNATURE_BYTES` bytes altogether.

    Returns:
        False also if the key is malformed.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

    r = int.from_bytes(signature[:INTEGER_BYTES], "big")
    s = int.from_bytes(signature[INTEGER_BYTES:], "big")
    try:
        _decode_public_key(key).verify(encode_dss_signature(r, s), text, _scheme())
    except (ValueError, InvalidSignature):
        return False
    return True


def is_public_key(key: bytes) -> bool:
    """Check that these bytes are a public key on a supported curve."""
    try:
        _decode_public_key(key)
    except ValueError:
        return False
    return True


def _decode_public_key(key: bytes) -> ec.EllipticCurvePublicKey:
    """Decode a compressed point; the curve follows from its length. Raise ValueError if it is not on a curve."""
    curves = _curves()
    from cryptography.hazmat.primitives.asymmetric import ec

    if len(key) not in curves:
        raise ValueError("it has the length of no public key")
    return ec.EllipticCurvePublicKey.from_encoded_point(curves[len(key)], key)


def _scheme() -> ec.ECDSA:
    """Return the signature scheme: ECDSA with SHA-384."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.ECDSA(hashes.SHA384())

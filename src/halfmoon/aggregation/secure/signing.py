"""Lasting keys of sites, and what is signed with them: keys of one sum, so that a server cannot put its own in.

A lasting key is the one by which Flower knows a site (ECDSA, in OpenSSH's format, as `halfmoon federation init` makes
it). Between machines its public half is the compressed point of SEC 1, 2.3.3, whose length tells the curve.
"""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

from halfmoon.aggregation.secure.csprng import MISSING
from halfmoon.core.errors import UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

POINT, HALF = 67, 66
"""Bytes of a public key and of each half of a signature on the longest curve; those of others have zeros before."""

SIGNATURE = 2 * HALF
"""Bytes of a signature: r and s."""


def _curves() -> dict[int, ec.EllipticCurve]:
    """Return the curves that both OpenSSH and Flower know, by the bytes of a compressed point."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise UserError(MISSING) from error
    return {1 + (curve.key_size + 7) // 8: curve for curve in (ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1())}


def generate() -> bytes:
    """Return a new private key (P-384) in OpenSSH's format."""
    curves = _curves()
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(curves[49])
    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())


def loaded(data: bytes) -> ec.EllipticCurvePrivateKey:
    """Return a private key in OpenSSH's or PEM format; raise ValueError where it is none of these curves'."""
    curves = _curves()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        read = form.load_ssh_private_key if b"OPENSSH PRIVATE KEY" in data else form.load_pem_private_key
        key = read(data, None)
    except (UnsupportedAlgorithm, TypeError) as error:  # TypeError: it is encrypted
        raise ValueError(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in {c.name for c in curves.values()}:
        raise ValueError("it is on no curve that Flower takes")
    return key


def public(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as it travels, without zeros before."""
    from cryptography.hazmat.primitives import serialization as form

    return key.public_bytes(form.Encoding.X962, form.PublicFormat.CompressedPoint)


def point(line: bytes) -> bytes:
    """Return the public key in a line of OpenSSH's format as it travels; raise ValueError where it is none."""
    curves = _curves()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = form.load_ssh_public_key(line.strip())
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in {c.name for c in curves.values()}:
        raise ValueError("it is on no curve that Flower takes")
    return public(key)


def fingerprint(key: bytes) -> str:
    """Return the fingerprint of a public key as `ssh-keygen -l` shows it; raise ValueError where it is none."""
    from cryptography.hazmat.primitives import serialization as form

    line = _read(key).public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def sign(key: ec.EllipticCurvePrivateKey, text: bytes) -> bytes:
    """Return the signature of a text (ECDSA with SHA-384): `SIGNATURE` bytes, r and s."""
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

    r, s = decode_dss_signature(key.sign(text, _scheme()))
    return r.to_bytes(HALF, "big") + s.to_bytes(HALF, "big")


def signed(key: bytes, text: bytes, signature: bytes) -> bool:
    """Say whether a signature of a text is by the private half of a public key; False where that is none."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

    r, s = (int.from_bytes(half, "big") for half in (signature[:HALF], signature[HALF:]))
    try:
        _read(key).verify(encode_dss_signature(r, s), text, _scheme())
    except (ValueError, InvalidSignature):
        return False
    return True


def usable(key: bytes) -> bool:
    """Say whether these bytes are a public key of one of the curves."""
    try:
        _read(key)
    except ValueError:
        return False
    return True


def _read(key: bytes) -> ec.EllipticCurvePublicKey:
    curves = _curves()
    from cryptography.hazmat.primitives.asymmetric import ec

    if len(key) not in curves:
        raise ValueError("it has the length of no public key")
    return ec.EllipticCurvePublicKey.from_encoded_point(curves[len(key)], key)


def _scheme() -> ec.ECDSA:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.ECDSA(hashes.SHA384())

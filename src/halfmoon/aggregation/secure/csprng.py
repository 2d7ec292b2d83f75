"""A cryptographically secure random number generator for noise and masks: AES in counter mode.

The output of torch's generator (the Mersenne Twister) can be predicted from earlier output. The output of AES in counter
mode cannot be predicted without its key.
"""

import hmac
from hashlib import sha256

import numpy as np

from halfmoon.core.errors import UserError, install_command

MISSING = f"this needs the library cryptography, which is not installed: {install_command('privacy')}."
"""The error message if the optional dependency is not installed."""


def derive_subkey(secret: bytes, *context: bytes | str | int) -> bytes:
    """Derive a key of 32 bytes from a secret and the context of its use (HMAC-SHA256)."""
    fields = [value if isinstance(value, bytes) else str(value).encode() for value in context]
    # The length before each field makes the encoding unique: ("ab", "c") and ("a", "bc") give different keys.
    message = b"".join(len(field).to_bytes(8, "big") + field for field in fields)
    return hmac.digest(secret, message, sha256)


def generate_keystream(key: bytes, count: int) -> np.ndarray:
    """Generate pseudorandom 64-bit words with AES in counter mode, the same on every machine.

    Args:
        key: 16, 24 or 32 bytes. Use a key for one keystream only: the counter always starts at 0.
        count: The number of words.

    Returns:
        Little-endian words, uint64 (count,).

    Raises:
        UserError: If the library cryptography is not installed.
    """
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        raise UserError(MISSING) from error
    cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    # The encryption of zeros is the keystream itself.
    return np.frombuffer(cipher.update(bytes(8 * count)), "<u8").astype(np.uint64, copy=False)


def generate_gaussians(key: bytes, count: int) -> np.ndarray:
    """Generate independent standard normal numbers, float64 (count,), from the keystream of a key.

    Args:
        key: 16, 24 or 32 bytes, used for these numbers only.
        count: The number of values.
    """
    import torch  # slow to import

    # The upper 52 bits of a word select an odd multiple of 2^-53. These are never 0 or 1, where the quantile function is
    # infinite, and they are symmetric about 1/2.
    upper_bits = (generate_keystream(key, count) >> np.uint64(12)).astype(np.float64)
    uniform = (upper_bits + 0.5) * 2.0**-52
    # Inverse-transform sampling.
    return torch.special.ndtri(torch.from_numpy(uniform)).numpy()

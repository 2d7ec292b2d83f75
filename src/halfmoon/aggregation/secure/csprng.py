"""Numbers that nobody can guess without their key: what noise and masks are drawn from, in place of torch's generator.

torch's generator (the Mersenne Twister) can be predicted from what it has drawn; AES in counter mode cannot.
"""

import hmac
from hashlib import sha256

import numpy as np

from halfmoon.core.errors import UserError, install_command

MISSING = f"this needs the library cryptography, which is not installed: {install_command('privacy')}."


def subkey(secret: bytes, *facts: bytes | str | int) -> bytes:
    """Return 32 bytes that depend on the secret and every fact (HMAC-SHA256); no two lists of facts look the same."""
    parts = [fact if isinstance(fact, bytes) else str(fact).encode() for fact in facts]
    return hmac.digest(secret, b"".join(len(part).to_bytes(8, "big") + part for part in parts), sha256)


def keystream(key: bytes, count: int) -> np.ndarray:
    """Return the first `count` 64-bit words, uint64 (count,), of AES in counter mode under a key used for this alone.

    The key has 16, 24 or 32 bytes; the counter begins at 0 and words are little-endian, the same on every machine.
    Raises UserError where the library that has AES is missing.
    """
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        raise UserError(MISSING) from error
    cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * count)), "<u8").astype(np.uint64, copy=False)


def gaussians(key: bytes, count: int) -> np.ndarray:
    """Return `count` independent standard normal numbers, float64 (count,), of a key used for this alone.

    A word's upper 52 bits name one of the odd multiples of 2^-53 (never 0 or 1, symmetric about 1/2), and the number is
    the quantile of the normal distribution there.
    """
    import torch  # slow to import

    uniform = ((keystream(key, count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return torch.special.ndtri(torch.from_numpy(uniform)).numpy()

"""Secure aggregation: the server learns the sum of the clients' vectors, but no single vector.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", Figure 4, with signed keys
(`announcement`), and without the consistency check of its active-adversary variant, in which clients sign the list of
survivors. This module has no input or output: callers store and send the messages.

A sum has four steps:

1. Announce keys: each party (a client in this sum) has two X25519 key pairs and sends the public keys to all parties.
2. Deal shares: each party draws a self-mask seed. It splits the seed and the private key for pairwise masks into shares
   (Shamir 1979, "How to share a secret"), one for each party, encrypted (AES-GCM) with a key from the other key pair.
3. Mask: a party uploads its vector, plus the mask from its seed, plus one mask for each other party, modulo 2^64. Of
   two parties the one with the lower number adds their pairwise mask and the other subtracts it: the sum has no trace.
4. Reveal shares: for each party whose vector arrived, the others reveal their shares of the seed, so that the server
   can subtract the self-mask. For each party that dropped out, they reveal their shares of the private key, so that the
   server can remove the pairwise masks that it would have canceled. No party reveals both for the same party: together
   they would uncover its vector.

All secrets of a party in a sum are derived (HKDF-SHA256) from 32 random bytes, drawn for this sum and erased after it.
An attacker who steals the site's disk later cannot decrypt an earlier sum.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np

from halfmoon.aggregation.secure.csprng import MISSING, generate_keystream
from halfmoon.core.errors import UserError

PRIME = 2**256 + 297
"""The order of the field of the secret shares: the smallest prime above 2^256, so that 32 bytes are one element."""

ELEMENT_BYTES = 33
"""Bytes of a field element."""

KEY_BYTES = 32
"""Bytes of keys, secrets and seeds."""

PUBLIC_KEYS_BYTES = 2 * KEY_BYTES
"""Bytes of a party's public keys in a sum: first the key that encrypts shares, then the key for pairwise masks."""

SHARES_BYTES = 2 * ELEMENT_BYTES + 16
"""Bytes of two encrypted shares (of the seed and of the private key), with AES-GCM's authentication tag of 16 bytes."""

VERSION = "halfmoon secure sum 2"
"""Protocol version, the first field of every signed text and every key derivation."""

MIN_PARTIES = 3
"""Fewest parties of a sum. Each of two parties could compute the other's vector by subtracting its own."""


class UnreadableShare(UserError):
    """Shares or keys that are malformed, or belong to another sum."""


@dataclass(frozen=True)
class SumId:
    """The identity of the sum of one query. All keys depend on it, so that none is valid in another sum.

    Attributes:
        federation: The name of the federation.
        run: The run id.
        round: The round, from 0.
        attempt: The number of earlier attempts at this round.
        query: The number of earlier queries in this round.
        session: A random string from the server, so that a restarted sum has another identity.
    """

    federation: str
    run: str
    round: int
    attempt: int
    query: int
    session: str


def announcement(sum_id: SumId, number: int, keys: bytes) -> bytes:
    """Encode the statement that a party signs with its long-term key: its number and public keys in this sum."""
    return json.dumps([VERSION, "keys", *astuple(sum_id), number, keys.hex()]).encode()


def threshold(parties: int) -> int:
    """Compute the number of parties that must remain until the end of a sum: more than two thirds."""
    return 2 * parties // 3 + 1


def derive_key(key: bytes, purpose: str, *context: str | int) -> bytes:
    """Derive a key of 32 bytes for one purpose (HKDF-SHA256, RFC 5869).

    Args:
        key: A secret.
        purpose: The use of the derived key.
        context: Further values that it depends on.

    Raises:
        UserError: If the library cryptography is not installed.
    """
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise UserError(MISSING) from error
    info = json.dumps([VERSION, purpose, *context]).encode()  # JSON: different lists have different encodings
    return HKDF(SHA256(), KEY_BYTES, None, info).derive(key)


def compute_public_key(private: bytes) -> bytes:
    """Compute the public key that belongs to a private key (X25519, RFC 7748)."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def compute_shared_secret(private: bytes, other: bytes) -> bytes:
    """Compute the shared secret of two parties (X25519). Use it only as the input of `derive_key`.

    Args:
        private: The private key of one party.
        other: The public key of the other party.

    Raises:
        UnreadableShare: If the public key is not valid, for example a point of low order.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise UnreadableShare("a party's public key is not valid.") from error


def are_valid_public_keys(keys: bytes) -> bool:
    """Check that a shared secret can be computed with a party's public keys: an invalid key would stop all parties."""
    try:
        for key in (keys[:KEY_BYTES], keys[KEY_BYTES:]):
            compute_shared_secret(bytes(KEY_BYTES), key)
    except UnreadableShare:
        return False
    return True


def split_secret(
    secret: int, threshold: int, points: Sequence[int], other_coefficients: Sequence[int], prime: int = PRIME
) -> list[int]:
    """Split a secret into shares: any `threshold` of them recover it, and fewer contain no information (Shamir 1979).

    The shares are values of a polynomial of degree threshold - 1 whose constant term is the secret.

    Args:
        secret: A field element.
        threshold: The number of shares that recover the secret.
        points: The points, all above 0, at which the polynomial is evaluated: one share for each.
        other_coefficients: The threshold - 1 other coefficients, drawn uniformly from the field.
        prime: The order of the field.
    """
    assert len(other_coefficients) == threshold - 1
    shares = []
    for point in points:
        value = 0
        for coefficient in (*reversed(other_coefficients), secret):  # Horner's rule, from the highest degree
            value = (value * point + coefficient) % prime
        shares.append(value)
    return shares


def compute_lagrange_factors(points: Sequence[int], prime: int = PRIME) -> dict[int, int]:
    """Compute the factor of each share in the secret: the Lagrange polynomials of the points, evaluated at 0.

    Args:
        points: The points of the shares.
        prime: The order of the field.

    Returns:
        By point, the product of q / (q - point) over all other points q, modulo the prime.
    """
    factors: dict[int, int] = {}
    for point in points:
        numerator = 1
        denominator = 1
        for other_point in points:
            if other_point != point:
                numerator = numerator * other_point % prime
                denominator = denominator * (other_point - point) % prime
        # Division in the field: multiply by the modular inverse.
        factors[point] = numerator * pow(denominator, -1, prime) % prime
    return factors


def draw_coefficients(key: bytes, count: int) -> list[int]:
    """Draw field elements from the keystream of a key that is used for nothing else."""
    words = generate_keystream(key, 8 * count).astype("<u8").tobytes()
    # 512 random bits modulo a prime of 257 bits: the bias is below 2^-255.
    return [int.from_bytes(words[64 * k : 64 * k + 64], "little") % PRIME for k in range(count)]


@dataclass(frozen=True)
class Cohort:
    """The parties at the start of a sum.

    Attributes:
        sum_id: The sum.
        members: The numbers of all clients that the server selected, ascending.
        numbers: The numbers of those that announced keys, ascending.
        keys: The public keys of each of `numbers`, `PUBLIC_KEYS_BYTES` bytes.
    """

    sum_id: SumId
    members: tuple[int, ...]
    numbers: tuple[int, ...]
    keys: tuple[bytes, ...]

    @property
    def threshold(self) -> int:
        return threshold(len(self.members))

    @cached_property
    def digest(self) -> str:
        """A hash of all fields. Keys derived from it agree only between parties that received the same cohort."""
        fields = [*astuple(self.sum_id), list(self.members), list(self.numbers), [key.hex() for key in self.keys]]
        return sha256(json.dumps(fields).encode()).hexdigest()


@dataclass(frozen=True)
class Masking:
    """The parties that dealt their shares, and the masks between them.

    Attributes:
        cohort: The parties at the start.
        numbers: The numbers of those that dealt shares, ascending.
    """

    cohort: Cohort
    numbers: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        """A hash of the parties. Masks derived from it agree only between parties with the same view of them."""
        return sha256(json.dumps([self.cohort.digest, list(self.numbers)]).encode()).hexdigest()

    def key(self, number: int) -> bytes:
        """Return the public key of a party for pairwise masks."""
        return self.cohort.keys[self.cohort.numbers.index(number)][KEY_BYTES:]

    def pairwise_mask(self, number: int, private: bytes, other: int, count: int) -> np.ndarray:
        """Generate the mask between two parties of a sum, with the sign that `number` adds it with.

        Args:
            number: One party.
            private: The private key of this party.
            other: The other party.
            count: The length of the vectors.

        Returns:
            uint64 (count,): the negative, modulo 2^64, of the mask that `other` adds, so that the sum cancels them.
        """
        low, high = sorted((number, other))
        shared_secret = compute_shared_secret(private, self.key(other))
        mask = generate_keystream(derive_key(shared_secret, "pair", self.digest, low, high), count)
        return mask if number < other else np.negative(mask)

    def self_mask(self, number: int, seed: bytes, count: int) -> np.ndarray:
        """Generate the mask of one party from its seed, uint64 (count,)."""
        return generate_keystream(derive_key(seed, "own", self.digest, number), count)


def compute_public_keys(secret: bytes) -> bytes:
    """Compute the public keys, `PUBLIC_KEYS_BYTES` bytes, of a party with this secret."""
    return compute_public_key(derive_key(secret, "channel")) + compute_public_key(derive_key(secret, "private"))


@dataclass(frozen=True)
class Party:
    """A client in a sum.

    Attributes:
        secret: 32 random bytes, drawn for this sum: the only state to store until the sum is complete.
        number: The client's number.
        cohort: The parties at the start.
    """

    secret: bytes
    number: int
    cohort: Cohort

    @cached_property
    def private(self) -> bytes:
        """The private key for pairwise masks."""
        return derive_key(self.secret, "private")

    @cached_property
    def seed(self) -> bytes:
        """The seed of the self-mask."""
        return derive_key(self.secret, "seed")

    def deal(self) -> list[bytes]:
        """Split this party's seed and private key into encrypted shares, one message for each party (Shamir 1979).

        Returns:
            A message of `SHARES_BYTES` bytes for each party of the cohort, this one included, in their order.

        Raises:
            UnreadableShare: If a party's public key is not valid.
        """
        cohort = self.cohort
        # The polynomial's value at 0 is the secret itself, so that numbers, which start at 0, are shifted by 1.
        points = [number + 1 for number in cohort.numbers]
        seed_shares = self._split_value("seed", self.seed, points)
        private_shares = self._split_value("private", self.private, points)
        messages: list[bytes] = []
        for number, keys, seed_share, private_share in zip(
            cohort.numbers, cohort.keys, seed_shares, private_shares, strict=True
        ):
            plain = seed_share.to_bytes(ELEMENT_BYTES, "big") + private_share.to_bytes(ELEMENT_BYTES, "big")
            cipher = self._cipher(keys, sender=self.number, recipient=number)
            # A nonce of 12 zero bytes: each cipher encrypts one message only.
            messages.append(cipher.encrypt(bytes(12), plain, None))
        return messages

    def _split_value(self, name: str, value: bytes, points: Sequence[int]) -> list[int]:
        """Split a secret value of this party into shares.

        Args:
            name: The name of the value, which selects the random polynomial.
            value: The value, `KEY_BYTES` bytes.
            points: The points at which the polynomial is evaluated: one share for each.
        """
        key = derive_key(self.secret, f"shares of the {name}", self.cohort.digest, self.number)
        polynomial = draw_coefficients(key, self.cohort.threshold - 1)
        return split_secret(int.from_bytes(value, "big"), self.cohort.threshold, points, polynomial)

    def mask(self, vector: np.ndarray, masking: Masking) -> np.ndarray:
        """Add this party's self-mask and its pairwise masks with all other parties to its vector, modulo 2^64.

        Of two parties, the one with the lower number adds their pairwise mask and the other subtracts it (the sign is
        part of `pairwise_mask`), so that these masks cancel in the sum. The self-mask protects the vector if the server
        recovers the pairwise masks of a party that it believes to have dropped out.

        Args:
            vector: int64 (n,).
            masking: The parties that dealt shares, with their public keys.

        Returns:
            uint64 (n,), uniformly distributed for everyone who lacks a key.
        """
        private = self.private
        # A view as uint64: sums then wrap around modulo 2^64 without overflow, and the final view as int64 restores signs.
        masked = vector.astype(np.int64).view(np.uint64) + masking.self_mask(self.number, self.seed, len(vector))
        for other in masking.numbers:
            if other != self.number:
                masked += masking.pairwise_mask(self.number, private, other, len(vector))
        return masked

    def reveal(self, dealt: Mapping[int, bytes], survived: frozenset[int]) -> dict[int, int]:
        """Decrypt the shares that the server needs to remove the masks.

        Args:
            dealt: The message that each party encrypted for this one, by the sender's number.
            survived: The numbers of the parties whose vectors arrived.

        Returns:
            By number, the share of the seed if the party survived, otherwise the share of its private key.

        Raises:
            UnreadableShare: If a message is not for this party, or not from this sum.
        """
        from cryptography.exceptions import InvalidTag

        keys = dict(zip(self.cohort.numbers, self.cohort.keys, strict=True))
        shares: dict[int, int] = {}
        for number, message in dealt.items():
            try:
                cipher = self._cipher(keys[number], sender=number, recipient=self.number)
                plain = cipher.decrypt(bytes(12), message, None)
            except (InvalidTag, KeyError) as error:
                raise UnreadableShare(f"the shares that site number {number} has dealt cannot be read.") from error
            share = plain[:ELEMENT_BYTES] if number in survived else plain[ELEMENT_BYTES:]
            shares[number] = int.from_bytes(share, "big")
        return shares

    def _cipher(self, keys: bytes, sender: int, recipient: int):
        """Create the AES-GCM cipher of one message. Its key encrypts nothing else, so the nonce can be constant (0)."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        shared_secret = compute_shared_secret(derive_key(self.secret, "channel"), keys[:KEY_BYTES])
        return AESGCM(derive_key(shared_secret, "to", self.cohort.digest, sender, recipient))


def unmask(masking: Masking, vectors: Mapping[int, np.ndarray], shares: Mapping[int, Mapping[int, int]]) -> np.ndarray:
    """Remove all masks from the sum of the masked vectors.

    Args:
        masking: The parties that dealt shares.
        vectors: The masked vectors that arrived, uint64 (n,), by the party's number.
        shares: The shares that each party revealed: first key its number, second key the party they were dealt by.

    Returns:
        The sum of the vectors that arrived, int64 (n,).

    Raises:
        UnreadableShare: If too few parties remained, or the shares do not recover a dropped party's private key.
    """
    needed = masking.cohort.threshold
    remaining = min(len(shares), len(vectors))
    if remaining < needed:
        raise UnreadableShare(
            f"the sum cannot be unmasked: {remaining} sites remained until its end, and {needed} are needed."
        )
    senders = sorted(shares)[:needed]
    total = np.zeros_like(next(iter(vectors.values())))
    for vector in vectors.values():
        total += vector
    factors = compute_lagrange_factors([sender + 1 for sender in senders])  # a share is at its party's number + 1
    for number in masking.numbers:
        secret = sum(shares[sender][number] * factors[sender + 1] for sender in senders) % PRIME
        # The field has 297 elements more than 32 bytes can encode. No valid secret is one of them.
        if secret >> 8 * KEY_BYTES:
            raise UnreadableShare("the revealed shares are inconsistent: they do not recover a secret.")
        key = secret.to_bytes(KEY_BYTES, "big")
        # Of a party whose vector arrived the shares recover the seed of its self mask, of a dropped one its private key.
        if number in vectors:
            total -= masking.self_mask(number, key, len(total))
            continue
        if compute_public_key(key) != masking.key(number):
            raise UnreadableShare("the revealed shares are inconsistent: they do not recover a private key.")
        # The dropped party adds its masks here, which cancel those that the remaining parties added.
        for other in vectors:
            total += masking.pairwise_mask(number, key, other, len(total))
    return total.view(np.int64)

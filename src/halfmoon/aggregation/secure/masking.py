"""Sums of which nobody sees a single term: pairwise masks that cancel, and shares by which the dropped are made up for.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", Figure 4, with keys that
are signed (`announcement`), and without the round of its active case in which parties sign who is still there. Nothing
here reads, writes or sends.

Every party of a sum has two key pairs (X25519) for it, whose public halves all are told, and the seed of a mask of its
own. It deals shares (Shamir 1979) of the seed and of one private key to all, each encrypted to one of them (AES-GCM)
under what those two agree on by their other keys. What it sends is its vector, plus its own mask, plus one mask for
each other party that both can make: the one with the lower number adds it, the other takes it away (modulo 2^64). Of
those whose vectors came, the others then tell shares of the seed, which takes the own masks off the sum; of those whose
vectors did not come, shares of the private key, which takes off the masks that they were to cancel. Nobody tells both
of one party: with both, its vector would lie open.

All that a party has to hide of a sum follows (HKDF-SHA256) from 32 random bytes that it draws for this sum and erases
after it. Who steals what is left later opens nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np

from halfmoon.aggregation.secure.csprng import MISSING, keystream
from halfmoon.core.errors import UserError

PRIME = 2**256 + 297
"""The smallest prime above 2^256: a secret of 32 bytes is one number of its field."""

WIDE = 33
"""Bytes of a number of the field."""

KEY = 32
"""Bytes of keys, secrets and seeds."""

PUBLIC = 2 * KEY
"""Bytes of a party's public keys of a sum: that by which shares are dealt to it, and that by which masks are made."""

SEALED = 2 * WIDE + 16
"""Bytes of two shares, encrypted: the tag of AES-GCM is the rest."""

VERSION = "halfmoon secure sum 2"
"""What every signed text and every derived key begins with."""

LEAST = 3
"""Parties of a sum at least: of two, each would know the other's vector by taking its own away."""


class UnreadableShare(UserError):
    """Shares or keys that are none, or are meant for another sum."""


@dataclass(frozen=True)
class SumId:
    """The sum of one query: no key of one has anything to do with a key of another.

    `session` is drawn by the server: a sum that is begun anew is another one.
    """

    federation: str
    run: str
    round: int
    attempt: int
    query: int
    session: str


def announcement(sum_id: SumId, number: int, keys: bytes) -> bytes:
    """Return what a party signs with its lasting key: which keys are its own in one sum."""
    return json.dumps([VERSION, "keys", *astuple(sum_id), number, keys.hex()]).encode()


def threshold(parties: int) -> int:
    """Return how many parties of those that a sum was begun with have to stay to its end: over two thirds."""
    return 2 * parties // 3 + 1


def derive(key: bytes, purpose: str, *facts: str | int) -> bytes:
    """Return 32 bytes for one purpose (HKDF-SHA256, RFC 5869); raise UserError where the library is missing."""
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise UserError(MISSING) from error
    info = json.dumps([VERSION, purpose, *facts]).encode()  # of no two lists the same
    return HKDF(SHA256(), KEY, None, info).derive(key)


def public(private: bytes) -> bytes:
    """Return the public half of a private key (X25519, RFC 7748)."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, other: bytes) -> bytes:
    """Return the secret that one's private and the other's public key make; raise `UnreadableShare` for a key that is
    none.

    It is made into a key by `derive` alone.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise UnreadableShare("a party's public key is none.") from error


def usable(keys: bytes) -> bool:
    """Say whether a party's public keys are ones that others can agree with: hostile ones would stop them all."""
    try:
        for key in (keys[:KEY], keys[KEY:]):
            agree(bytes(KEY), key)
    except UnreadableShare:
        return False
    return True


def split(secret: int, threshold: int, at: Sequence[int], draws: Sequence[int], prime: int = PRIME) -> list[int]:
    """Return the shares of a secret at the places `at` (above 0): any `threshold` of them tell it, fewer tell nothing.

    `draws` are the threshold - 1 other coefficients of the polynomial, drawn from the whole field (Shamir 1979).
    """
    assert len(draws) == threshold - 1
    shares = []
    for place in at:
        value = 0
        for coefficient in (*reversed(draws), secret):
            value = (value * place + coefficient) % prime
        shares.append(value)
    return shares


def lagrange(places: Sequence[int], prime: int = PRIME) -> dict[int, int]:
    """Return what the share at each place counts in the secret: the Lagrange polynomials at 0."""
    weights = {}
    for here in places:
        above = below = 1
        for there in places:
            if there != here:
                above = above * there % prime
                below = below * (there - here) % prime
        weights[here] = above * pow(below, -1, prime) % prime
    return weights


def coefficients(key: bytes, count: int) -> list[int]:
    """Return numbers of the field, drawn from a key used for this alone; 512 bits each leave no bias to speak of."""
    words = keystream(key, 8 * count).astype("<u8").tobytes()
    return [int.from_bytes(words[64 * k : 64 * k + 64], "little") % PRIME for k in range(count)]


@dataclass(frozen=True)
class Cohort:
    """Whom a sum is begun with: `members` are the numbers of all that it was to be of, `numbers` those that have keys.

    Both are ascending; `keys` are the public keys of each, `PUBLIC` bytes.
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
        facts = [*astuple(self.sum_id), list(self.members), list(self.numbers), [key.hex() for key in self.keys]]
        return sha256(json.dumps(facts).encode()).hexdigest()


@dataclass(frozen=True)
class Masking:
    """Those of a cohort that have dealt their shares, so that vectors can be masked."""

    cohort: Cohort
    numbers: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        return sha256(json.dumps([self.cohort.digest, list(self.numbers)]).encode()).hexdigest()

    def key(self, number: int) -> bytes:
        return self.cohort.keys[self.cohort.numbers.index(number)][KEY:]

    def pairwise(self, number: int, private: bytes, other: int, count: int) -> np.ndarray:
        """Return the mask between two, uint64 (count,), as the party `number` with this private key adds it."""
        low, high = sorted((number, other))
        mask = keystream(derive(agree(private, self.key(other)), "pair", self.digest, low, high), count)
        return mask if number < other else np.negative(mask)

    def own(self, number: int, seed: bytes, count: int) -> np.ndarray:
        return keystream(derive(seed, "own", self.digest, number), count)


def announced(secret: bytes) -> bytes:
    """Return the public keys that a party with this secret has in its sum."""
    return public(derive(secret, "channel")) + public(derive(secret, "private"))


@dataclass(frozen=True)
class Party:
    """One of a cohort: `secret`, drawn for this sum, is all that it has to keep until the sum is over."""

    secret: bytes
    number: int
    cohort: Cohort

    @cached_property
    def private(self) -> bytes:
        return derive(self.secret, "private")

    @cached_property
    def seed(self) -> bytes:
        return derive(self.secret, "seed")

    def deal(self) -> list[bytes]:
        """Return its shares of (seed, private key), a message for each of the cohort; raise `UnreadableShare` for a
        key.
        """
        cohort, at = self.cohort, [number + 1 for number in self.cohort.numbers]
        rows: list[list[int]] = []
        for name, value in (("seed", self.seed), ("private", self.private)):
            polynomial = coefficients(
                derive(self.secret, f"shares of the {name}", cohort.digest, self.number), cohort.threshold - 1
            )
            rows.append(split(int.from_bytes(value, "big"), cohort.threshold, at, polynomial))
        unparsed = []
        for number, keys, *pair in zip(cohort.numbers, cohort.keys, *rows, strict=True):
            plain = b"".join(share.to_bytes(WIDE, "big") for share in pair)
            unparsed.append(self._cipher(keys, self.number, number).encrypt(bytes(12), plain, None))
        return unparsed

    def mask(self, vector: np.ndarray, masking: Masking) -> np.ndarray:
        """Return a vector, int64 (n,), under its masks: uint64 (n,), uniform to whoever lacks a key."""
        private = self.private
        hidden = vector.astype(np.int64).view(np.uint64) + masking.own(self.number, self.seed, len(vector))
        for other in masking.numbers:
            if other != self.number:
                hidden += masking.pairwise(self.number, private, other, len(vector))
        return hidden

    def reveal(self, dealt: Mapping[int, bytes], survived: frozenset[int]) -> dict[int, int]:
        """Return the shares that were dealt to this party: of the seed where the vector came, else of the private key.

        Raise `UnreadableShare` for shares that are not for it, or not of this sum.
        """
        from cryptography.exceptions import InvalidTag

        keys = dict(zip(self.cohort.numbers, self.cohort.keys, strict=True))
        shares: dict[int, int] = {}
        for number, unparsed in dealt.items():
            try:
                plain = self._cipher(keys[number], number, self.number).decrypt(bytes(12), unparsed, None)
            except (InvalidTag, KeyError) as error:
                raise UnreadableShare(f"the shares that site number {number} has dealt cannot be read.") from error
            part = plain[:WIDE] if number in survived else plain[WIDE:]
            shares[number] = int.from_bytes(part, "big")
        return shares

    def _cipher(self, keys: bytes, giver: int, taker: int):
        """Return AES-GCM under a key that is used for one message: its nonce can be 0."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        agreed = agree(derive(self.secret, "channel"), keys[:KEY])
        return AESGCM(derive(agreed, "to", self.cohort.digest, giver, taker))


def unmask(masking: Masking, vectors: Mapping[int, np.ndarray], shares: Mapping[int, Mapping[int, int]]) -> np.ndarray:
    """Return the sum of those whose masked vectors are given, int64 (n,).

    `shares` has what each of them who answered has told: its shares, by whose they are. Raise `UnreadableShare` where
    they are too few, or do not give the private key of one that has dropped.
    """
    least = masking.cohort.threshold
    if min(len(shares), len(vectors)) < least:
        raise UnreadableShare(f"{min(len(shares), len(vectors))} sites have stayed to the end, and {least} are needed.")
    senders = sorted(shares)[:least]
    total = np.zeros_like(next(iter(vectors.values())))
    for vector in vectors.values():
        total += vector
    counts = lagrange([sender + 1 for sender in senders])
    for number in masking.numbers:
        secret = sum(shares[sender][number] * counts[sender + 1] for sender in senders) % PRIME
        if secret >> 8 * KEY:
            raise UnreadableShare("the shares that were told do not fit together.")
        key = secret.to_bytes(KEY, "big")
        if number in vectors:
            total -= masking.own(number, key, len(total))
            continue
        if public(key) != masking.key(number):
            raise UnreadableShare("the shares of a private key do not fit together.")
        for other in vectors:
            total += masking.pairwise(number, key, other, len(total))
    return total.view(np.int64)

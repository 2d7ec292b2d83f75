"""A site's part in a sum of which the server sees no single term (`halfmoon.aggregation.secure.masking`).

The server asks four times: for keys of this sum (`KEYS`), for shares (`DEAL`), for the work (`MASK`), and for what
takes the masks off the sum (`REVEAL`). All of them are about one client update: a round, an attempt and a query. Keys
are signed with a site's lasting key, and each site judges the signatures of all others before it deals a share, so
that a server cannot put keys of its own in.

What a site answers follows from its secret of the sum and from what it has put down: the same question gets the same
answer, also from a new process, and no other question gets any. So nobody gets its vector twice under the same masks
with other values, and nobody gets shares for two sets of sites, whose sums would differ by a single one. With the last
answer the secret is erased (`halfmoon.federation.site.sum_notes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from halfmoon.aggregation import AggregationContext, update
from halfmoon.aggregation.secure import signing
from halfmoon.aggregation.secure.fixed_point import check_upload, contribution
from halfmoon.aggregation.secure.masking import (
    LEAST,
    PUBLIC,
    SEALED,
    WIDE,
    Cohort,
    Masking,
    Party,
    Scene,
    announced,
    announcement,
    threshold,
)
from halfmoon.aggregation.secure.signing import POINT, SIGNATURE
from halfmoon.api.uploads import Upload
from halfmoon.core.tree import Tree
from halfmoon.federation.protocol.messages import UNFIT, Reply, Request
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.protocol.tree_spec import TreeSpec
from halfmoon.federation.site.runtime import Refused
from halfmoon.federation.site.site_keys import KnownSites
from halfmoon.federation.site.sum_notes import SECRET, SESSION, SUMS, Answered, Fresh, erase
from halfmoon.storage import atomic_io

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

KEYS, DEAL, MASK, REVEAL = "keys", "deal", "mask", "reveal"
"""What a request's masks are for: each is the one name at the top of them."""


def look(masks: TreeSpec, terms: Terms) -> None:
    """Raise `Refused` for what came for a sum, by its names, shapes and types: nothing else was read."""
    if masks and not terms.config.secure_aggregation:
        raise Refused(UNFIT, "the server asks for a part in a masked sum, but nobody agreed on such sums.")
    fault = next(_faults(masks, len(terms.sites)), None)
    if fault is not None:
        raise Refused(UNFIT, f"what the server sends for a masked sum cannot be used: {fault}.")


_SITES = {
    "sites": ((), torch.int64),
    "keys": ((PUBLIC,), torch.uint8),
    "signatures": ((SIGNATURE,), torch.uint8),
    "lasting": ((POINT,), torch.uint8),
}
_LEAVES: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {
    KEYS: {"session": ((), torch.uint8)},
    DEAL: {"asked": ((), torch.int64), **_SITES},
    MASK: {"sites": ((), torch.int64)},
    REVEAL: {"survived": ((), torch.int64), "shares": ((SEALED,), torch.uint8)},
}
"""What is told at each stage, by name: its shape without the first dimension, the sites, and its type."""


def _faults(masks: TreeSpec, sites: int) -> Iterator[str]:
    if not masks:
        return
    stage = next(iter(masks)).split("/")[0]
    leaves = _LEAVES.get(stage, {})
    if set(masks) != {f"{stage}/{name}" for name in leaves}:
        yield "it is about no stage of a sum"
        return
    for path, kind in masks.items():
        name = path.removeprefix(f"{stage}/")
        if kind is None or not kind[0] or (kind[0][1:], kind[1]) != leaves[name]:
            yield f"its {path} are none"
        elif stage == KEYS and kind[0][0] != SESSION:
            yield f"its {path} has {kind[0][0]} bytes, not {SESSION}"
        elif stage != KEYS and not kind[0][0] <= sites:
            yield f"its {path} are of {kind[0][0]} sites, and the federation has {sites}"
    if len({kind[0][0] for path, kind in masks.items() if kind is not None and path.split("/")[1] in _SITES}) > 1:
        yield "its keys are of other sites than it names"


@dataclass(frozen=True)
class Part:
    """The part of site `number` in the sums of one run, whose `folder` remembers them.

    `key` is its lasting key, `known` has those of all sites. With `even` it weighs 1, whatever it has (client-level
    privacy). No sum is begun with fewer than `least` sites, the cohort that all agreed on: a server that asks for less
    could leave honest sites out until one is alone with others of its own.
    """

    key: ec.EllipticCurvePrivateKey
    folder: Path
    number: int
    known: KnownSites
    even: bool
    least: int = LEAST

    @cached_property
    def lasting(self) -> bytes:
        """The public half of its lasting key."""
        return signing.public(self.key.public_key())

    def answer(self, request: Request, do: Callable[[Request], Reply]) -> Reply:
        """Return the answer to a request; `do` does what is asked of a site whose uploads are seen.

        Raise `Refused` for what would tell more than a sum, `UserError` for an update that does not fit into one, and
        OSError.
        """
        if not request.masks:
            if request.client_update:
                raise Refused(
                    UNFIT, "the server asks for an upload of its own, but all agreed that it sees sums alone."
                )
            return do(request)
        ((stage, told),) = request.masks.items()
        if (stage == MASK) != bool(request.client_update):
            raise Refused(UNFIT, "the server asks for a work and for the rest of a sum at once.")
        visit = Answered(self.folder / SUMS, request)
        if stage == KEYS:
            up = self._announce(request, visit, told)
        elif stage == DEAL:
            up = self._deal(request, visit, told)
        elif stage == MASK:
            return self._mask(request, visit, told, do)
        else:
            up = self._reveal(request, visit, told)
        return replace(do(request), up=up)

    def _announce(self, request: Request, visit: Answered, told: Tree) -> Tree:
        """Return this site's public keys of a new sum, signed."""
        session = told["session"].numpy().tobytes().hex()
        scene = _scene(request, session)
        fresh = self._fresh(scene)
        if visit.has(DEAL) and visit.get("session") == session and fresh.held() is None:
            raise Refused(UNFIT, "the server asks for keys of a sum that is over for this site.")
        secret = fresh.begin()
        visit.begin(session)
        keys = announced(secret)
        signature = signing.sign(self.key, announcement(scene, self.number, keys))
        return {"keys": _bytes([keys])[0], "signature": _bytes([signature])[0]}

    def _deal(self, request: Request, visit: Answered, told: Tree) -> Tree:
        """Return this site's shares for each of those whose keys are theirs."""
        secret, scene = self._secret(request, visit)
        asked, numbers = self._numbers(told["asked"]), self._numbers(told["sites"])
        what = f"the server asks for a sum of {len(asked)} sites"
        if len(asked) < LEAST:
            raise Refused(UNFIT, f"{what}: of fewer than {LEAST} it hides nothing.")
        if len(asked) < self.least:
            raise Refused(UNFIT, f"{what}, but all agreed on cohorts of {self.least}: of fewer it hides less.")
        if not set(numbers) <= set(asked):
            raise Refused(UNFIT, "the server has keys of sites that are not in the sum.")
        if len(numbers) < threshold(len(asked)):
            needed = threshold(len(asked))
            raise Refused(UNFIT, f"{len(numbers)} sites of {len(asked)} have keys, and {needed} are needed.")
        keys, lasting = _rows(told["keys"]), [row.lstrip(b"\0") for row in _rows(told["lasting"])]
        here = numbers.index(self.number)
        if keys[here] != announced(secret) or lasting[here] != self.lasting:
            raise Refused(UNFIT, "the server has other keys of this site than its own.")
        for number, *said in zip(numbers, lasting, keys, _rows(told["signatures"]), strict=True):
            if not signing.signed(said[0], announcement(scene, number, said[1]), said[2]):
                name = self.known.names[number]
                raise Refused(UNFIT, f"the server has keys of {name} for this sum that {name} has not signed.")
        self.known.check(dict(zip(numbers, lasting, strict=True)))
        visit.once(DEAL, {"asked": list(asked), "numbers": list(numbers), "keys": [key.hex() for key in keys]})
        return {"shares": _bytes(self._party(request, visit).deal())}

    def _mask(self, request: Request, visit: Answered, told: Tree, do: Callable[[Request], Reply]) -> Reply:
        """Return what came of the work, with the masked update in place of the upload."""
        party = self._party(request, visit)
        numbers = self._numbers(told["sites"])
        if not set(numbers) <= set(party.cohort.numbers):
            raise Refused(UNFIT, "the server counts sites in that were not asked for shares.")
        if len(numbers) < party.cohort.threshold:
            raise Refused(UNFIT, f"{len(numbers)} sites have dealt shares, and {party.cohort.threshold} are needed.")
        visit.once(MASK, list(numbers))
        reply = do(request)
        vector = self._vector(request, reply.up, len(party.cohort.asked))
        # Other values under the same masks would show by how much they differ.
        visit.once("vector", atomic_io.digest(vector.tobytes()))
        hidden = torch.from_numpy(party.mask(vector, Masking(party.cohort, numbers)).view(np.int64))
        return replace(reply, up={"sum": hidden})

    def _vector(self, request: Request, up: Tree, asked: int) -> np.ndarray:
        context = AggregationContext(
            request.round,
            request.attempt,
            request.query,
            request.client_update,
            request.down,
            {},
            (self.number,),
            asked,
            True,
        )
        sent = Upload.of(up)
        stacked = sent.map(lambda leaf: leaf.unsqueeze(0))
        changes = update(stacked, context)
        check_upload(stacked, changes)
        weight = 1.0 if self.even else float(sent.weight)
        return contribution({path: leaf[0] for path, leaf in changes.items()}, weight, asked).cpu().numpy()

    def _reveal(self, request: Request, visit: Answered, told: Tree) -> Tree:
        """Return the shares that take the masks off: of one set of sites, once and for all. Then the sum is over."""
        if not visit.has("vector"):
            raise Refused(UNFIT, "the server asks what takes masks off before this site has sent anything under one.")
        numbers, survived = visit.get(MASK), sorted(told["survived"].tolist())
        needed = threshold(len(visit.get(DEAL)["asked"]))
        if self.number not in survived or not set(survived) <= set(numbers) or len(set(survived)) < len(survived):
            raise Refused(UNFIT, "the server names sites whose updates it cannot have, or leaves out this one's.")
        if len(survived) < needed:
            count = len(visit.get(DEAL)["asked"])
            raise Refused(
                UNFIT, f"the server asks for the sum of {len(survived)} sites of {count}, and {needed} are needed."
            )
        if len(told["shares"]) != len(numbers):
            raise Refused(UNFIT, "the server sends shares of other sites than those that have dealt them.")
        dealt = dict(zip(numbers, _rows(told["shares"]), strict=True))
        asked = [survived, atomic_io.digest(b"".join(dealt.values()))]
        if not visit.has(REVEAL):
            if visit.has("told"):  # in a sum of this client update that was begun before
                visit.once("told", survived)
            shares = self._party(request, visit).reveal(dealt, frozenset(survived))
            visit.once("told", survived)
            answer = [shares[number].to_bytes(WIDE, "big").hex() for number in numbers]
            visit.once(REVEAL, {"asked": asked, "answer": answer})
        held = visit.get(REVEAL)
        visit.once(REVEAL, {**held, "asked": asked})
        # The server is told the shares, so that they are no secret; all else is gone before they are.
        erase(self.folder / SUMS / SECRET)
        return {"shares": _bytes([bytes.fromhex(share) for share in held["answer"]])}

    def _fresh(self, scene: Scene) -> Fresh:
        what = f"{scene.round}/{scene.attempt}/{scene.query}/{scene.session}"
        return Fresh(self.folder / SUMS / SECRET, what)

    def _secret(self, request: Request, visit: Answered) -> tuple[bytes, Scene]:
        """Return the secret of the sum that is under way, and which one it is."""
        if not visit.has("session"):
            raise Refused(UNFIT, "the server goes on with a sum that this site has not begun.")
        scene = _scene(request, visit.get("session"))
        secret = self._fresh(scene).held()
        if secret is None:
            raise Refused(UNFIT, "the server goes on with a sum that is over for this site: its keys are erased.")
        return secret, scene

    def _party(self, request: Request, visit: Answered) -> Party:
        secret, scene = self._secret(request, visit)
        if not visit.has(DEAL):
            raise Refused(UNFIT, "the server goes on with a sum for which this site has dealt no shares.")
        held = visit.get(DEAL)
        keys = tuple(bytes.fromhex(key) for key in held["keys"])
        return Party(secret, self.number, Cohort(scene, tuple(held["asked"]), tuple(held["numbers"]), keys))

    def _numbers(self, leaf: Tensor) -> tuple[int, ...]:
        """Return the numbers of sites in a message; raise `Refused` where they are none of this federation's."""
        numbers, sites = tuple(leaf.tolist()), len(self.known.names)
        strange = [number for number in numbers if not 0 <= number < sites]
        if strange:
            raise Refused(UNFIT, f"the server names site number {strange[0]}, and the federation has {sites} sites.")
        if len(set(numbers)) < len(numbers):
            raise Refused(UNFIT, "the server names a site twice.")
        if list(numbers) != sorted(numbers):
            raise Refused(UNFIT, "the server does not name sites in the order of their numbers.")
        if self.number not in numbers:
            raise Refused(UNFIT, "the server asks for a part in a sum without this site.")
        return numbers


def _scene(request: Request, session: str) -> Scene:
    return Scene(request.federation, request.run, request.round, request.attempt, request.query, session)


def _rows(leaf: Tensor) -> tuple[bytes, ...]:
    return tuple(row.numpy().tobytes() for row in leaf)


def _bytes(rows: Sequence[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1).copy())

"""The server's part in a sum of which it sees no single term: four exchanges with the sites, and what came of them.

Sites drop out between any two of them. As long as over two thirds of those asked stay to the end
(`halfmoon.aggregation.secure.masking.threshold`), the sum is that of all whose masked updates came; otherwise nothing
of it can be read, and the round is played again.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from halfmoon.aggregation import AggregationContext
from halfmoon.aggregation.secure import signing
from halfmoon.aggregation.secure.fixed_point import mean, sound, spread
from halfmoon.aggregation.secure.masking import (
    LEAST,
    PUBLIC,
    SEALED,
    WIDE,
    Cohort,
    Masking,
    Scene,
    UnreadableShare,
    announcement,
    threshold,
    unmasked,
    usable,
)
from halfmoon.aggregation.secure.signing import POINT, SIGNATURE
from halfmoon.api.uploads import Upload
from halfmoon.core.tree import Tree
from halfmoon.engine.loop import TooFew
from halfmoon.federation.protocol.messages import Joined, Reply, Request
from halfmoon.federation.protocol.tree_spec import TreeSpec
from halfmoon.federation.site.secure_sum import DEAL, KEYS, MASK, REVEAL
from halfmoon.federation.site.sum_notes import SESSION

UPDATE = "update/"
"""Where the update lies in an upload that travels."""

Ask = Callable[[Mapping[str, Request], TreeSpec, str], Mapping[str, Reply]]
"""Sends each named site a request, and returns the replies whose `up` is like the pattern; says what in words."""


@dataclass
class MaskedSum:
    """One sum: `requests` are those of a plain query, by site, in the order of their `numbers`.

    `keys` has the lasting key that each site showed when it joined; one that shows none is not asked. `what` says in
    words what the question is.
    """

    requests: Mapping[str, Request]
    numbers: Mapping[str, int]
    keys: Mapping[str, bytes]
    ask: Ask
    what: str
    _masking: Masking | None = None
    _dealt: dict[str, list[bytes]] = field(default_factory=dict)

    def begin(self) -> dict[str, Request]:
        """Have keys made and shares dealt; return the requests for the work, of those who have.

        Raise `TooFew` where they are fewer than have to stay to the end.
        """
        asked = sorted(self.requests, key=self.numbers.__getitem__)
        cohort, names, signatures = self._announced(asked)
        keys = [self.keys[site].rjust(POINT, b"\0") for site in names]
        sites = {"sites": torch.tensor(cohort.numbers), "keys": _rows(cohort.keys)}
        sites |= {"signatures": _rows(signatures), "lasting": _rows(keys)}
        deal = {DEAL: {"asked": torch.tensor(cohort.asked), **sites}}
        pattern: TreeSpec = {"shares": ((len(names), SEALED), torch.uint8)}
        said = self.ask({site: self._aside(site, deal) for site in names}, pattern, f"{self.what}, shares")
        self._enough(len(said), "that have dealt shares", cohort.threshold)
        dealers = [site for site in names if site in said]
        self._dealt = {site: _bytes(said[site].up["shares"]) for site in dealers}
        self._masking = Masking(cohort, self._numbers(dealers))
        masks = {MASK: {"sites": torch.tensor(self._masking.numbers)}}
        return {site: replace(self.requests[site], masks=masks) for site in dealers}

    def _announced(self, asked: Sequence[str]) -> tuple[Cohort, list[str], list[bytes]]:
        """Return the cohort of those who have told keys of this sum, their names, and their signatures."""
        able = [site for site in asked if site in self.keys]
        self._enough(len(able), "that could be asked", max(LEAST, threshold(len(asked))))
        session = secrets.token_bytes(SESSION)
        first = next(iter(self.requests.values()))
        scene = Scene(first.federation, first.run, first.round, first.attempt, first.query, session.hex())
        question = {KEYS: {"session": _rows([session])[0]}}
        pattern: TreeSpec = {"keys": ((PUBLIC,), torch.uint8), "signature": ((SIGNATURE,), torch.uint8)}
        said = self.ask({site: self._aside(site, question) for site in able}, pattern, f"{self.what}, keys")
        told = {site: [_bytes(reply.up[leaf][None])[0] for leaf in pattern] for site, reply in said.items()}
        names = [site for site in able if site in told and self._sound(scene, site, *told[site])]
        keys, signatures = ([told[site][at] for site in names] for at in (0, 1))
        cohort = Cohort(scene, self._numbers(asked), self._numbers(names), tuple(keys))
        self._enough(len(names), "whose keys are signed keys", max(LEAST, cohort.threshold))
        return cohort, names, signatures

    def _sound(self, scene: Scene, site: str, keys: bytes, signature: bytes) -> bool:
        """Say whether a site's keys are keys, and signed by it: the others would all refuse them."""
        signed = signing.signed(self.keys[site], announcement(scene, self.numbers[site], keys), signature)
        return signed and usable(keys)

    def total(self, replies: Mapping[str, Reply]) -> Tensor:
        """Return the sum of what those who replied contribute, (n + 1,) int64; raise `TooFew` where it stays hidden."""
        masking = self._masking
        assert masking is not None, "it was begun"
        self._enough(len(replies), "whose masked updates came", masking.cohort.threshold)
        there = [site for site in self._dealt if site in replies]
        survived = torch.tensor(self._numbers(there))
        places = {site: masking.cohort.numbers.index(self.numbers[site]) for site in there}
        asked = {
            site: self._aside(
                site, {REVEAL: {"survived": survived, "shares": _rows([d[at] for d in self._dealt.values()])}}
            )
            for site, at in places.items()
        }
        pattern: TreeSpec = {"shares": ((len(masking.numbers), WIDE), torch.uint8)}
        said = self.ask(asked, pattern, f"{self.what}, unmasking")
        self._enough(len(said), "that have helped to take the masks off", masking.cohort.threshold)
        told = {
            self.numbers[site]: {
                number: int.from_bytes(share, "big")
                for number, share in zip(masking.numbers, _bytes(reply.up["shares"]), strict=True)
            }
            for site, reply in said.items()
        }
        vectors = {self.numbers[site]: replies[site].up["sum"].numpy().view(np.uint64) for site in there}
        try:
            total = torch.from_numpy(unmasked(masking, vectors, told))
        except UnreadableShare as error:
            raise TooFew(f"{self.what} has a sum that cannot be read: {error}") from error
        if not sound(total):
            raise TooFew(f"{self.what} has a sum from which the masks do not come off: a site did not keep to it.")
        return total

    def _aside(self, site: str, masks: Tree) -> Request:
        """Return a request about the sum alone."""
        return replace(self.requests[site], client_update="", down={}, evaluation={}, masks=masks)

    def _numbers(self, sites: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.numbers[site] for site in sites)

    def _enough(self, count: int, which: str, wanted: int) -> None:
        if count < wanted:
            raise TooFew(f"{self.what} has {count} sites of {len(self.requests)} {which}, and a sum needs {wanted}.")


def shown(joined: Mapping[str, Joined]) -> dict[str, bytes]:
    """Return the lasting keys that sites showed when they joined; one that shows no usable one has no part."""
    plain = {name: said.key for name, said in joined.items() if re.fullmatch("([0-9a-f]{2})+", said.key)}
    return {name: bytes.fromhex(key) for name, key in plain.items() if signing.usable(bytes.fromhex(key))}


def layout(upload: TreeSpec) -> dict[str, Tensor]:
    """Return what a sum adds up of uploads, by path, without values: the floating leaves of the update."""
    with torch.device("meta"):
        return {
            path.removeprefix(UPDATE): torch.empty(kind[0], dtype=kind[1])
            for path, kind in upload.items()
            if path.startswith(UPDATE) and kind is not None and kind[1].is_floating_point
        }


def summed(like: Mapping[str, Tensor]) -> TreeSpec:
    """Return the pattern of a masked update."""
    count = sum(leaf.numel() for leaf in like.values()) + 1
    return {"sum": ((count,), torch.int64)}


def uploads(context: AggregationContext, upload: TreeSpec, total: Tensor, like: Mapping[str, Tensor]) -> list[Upload]:
    """Return for each of those who answered an upload as if all had sent the mean of the updates that were added up."""
    change, weight = mean(total, like)
    count = len(context.clients)
    blank: Tree = {}
    for path, kind in upload.items():
        *parents, name = path.split("/")
        branch = blank
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[name] = {} if kind is None else torch.zeros((), dtype=kind[1]).expand(count, *kind[0])
    stacked = spread(Upload.of(blank), context, change, weight)
    return [stacked.at(place) for place in range(count)]


def _rows(rows: Sequence[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1).copy())


def _bytes(leaf: Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in leaf]

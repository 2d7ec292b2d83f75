"""The server's part in a sum of which it sees no single term: four exchanges with the sites, and the sum.

Sites drop out between any two of them. As long as over two thirds of the cohort stay to the end
(`halfmoon.aggregation.secure.masking.threshold`), the sum is that of all whose masked updates came; otherwise nothing
of it can be read, and the round is played again.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from halfmoon.aggregation import AggregationContext
from halfmoon.aggregation.secure import masking, signing
from halfmoon.aggregation.secure.fixed_point import is_plausible_sum, mean, spread
from halfmoon.aggregation.secure.signing import POINT, SIGNATURE
from halfmoon.api.uploads import Upload
from halfmoon.core.tree import Tree
from halfmoon.engine.loop import TooFewReplies
from halfmoon.federation.protocol.messages import (
    ANNOUNCE_KEYS,
    DEAL_SHARES,
    MASK_UPDATE,
    REVEAL_SHARES,
    SESSION_BYTES,
    Acceptance,
    Reply,
    Request,
    make_sum_id,
    split_rows,
    stack_rows,
)
from halfmoon.federation.protocol.tree_spec import TreeSpec, build_tree

UPDATE_PREFIX = "update/"  # the path of the update in an upload that travels

QuerySites = Callable[[Mapping[str, Request], TreeSpec, str], Mapping[str, Reply]]
"""Sends each named site a request, and returns the replies whose `upload` has the shape; the text names the exchange."""


@dataclass
class MaskedSum:
    """One sum: the `requests` of a plain query, and the `numbers` and lasting `keys` of the sites."""

    requests: Mapping[str, Request]
    numbers: Mapping[str, int]
    keys: Mapping[str, bytes]
    ask: QuerySites
    what: str
    _masking: masking.Masking | None = None
    _shares: dict[str, list[bytes]] = field(default_factory=dict)

    def begin(self) -> dict[str, Request]:
        """Collect keys and shares; return the requests for masked updates, or raise `TooFewReplies`."""
        sites = sorted(self.requests, key=self.numbers.__getitem__)
        cohort, names, signatures = self._announce(sites)
        keys = [self.keys[site].rjust(POINT, b"\0") for site in names]
        masks = {"sites": torch.tensor(cohort.numbers), "keys": stack_rows(cohort.keys)}
        masks |= {"signatures": stack_rows(signatures), "lasting": stack_rows(keys)}
        deal = {DEAL_SHARES: {"asked": torch.tensor(cohort.members), **masks}}
        spec: TreeSpec = {"shares": ((len(names), masking.SEALED), torch.uint8)}
        replies = self.ask({site: self._sum_only(site, deal) for site in names}, spec, f"{self.what}, shares")
        self._enough(len(replies), "that have dealt shares", cohort.threshold)
        dealers = [site for site in names if site in replies]
        self._shares = {site: split_rows(replies[site].upload["shares"]) for site in dealers}
        self._masking = masking.Masking(cohort, self._numbers(dealers))
        mask = {MASK_UPDATE: {"sites": torch.tensor(self._masking.numbers)}}
        return {site: replace(self.requests[site], masks=mask) for site in dealers}

    def _announce(self, sites: Sequence[str]) -> tuple[masking.Cohort, list[str], list[bytes]]:
        able = [site for site in sites if site in self.keys]
        self._enough(len(able), "that could be asked", max(masking.MIN_PARTIES, masking.threshold(len(sites))))
        session = secrets.token_bytes(SESSION_BYTES)
        sum_id = make_sum_id(next(iter(self.requests.values())), session.hex())
        question = {ANNOUNCE_KEYS: {"session": stack_rows([session])[0]}}
        spec: TreeSpec = {"keys": ((masking.PUBLIC,), torch.uint8), "signature": ((SIGNATURE,), torch.uint8)}
        replies = self.ask({site: self._sum_only(site, question) for site in able}, spec, f"{self.what}, keys")
        answers = {site: [split_rows(reply.upload[leaf][None])[0] for leaf in spec] for site, reply in replies.items()}
        names = [site for site in able if site in answers and self._sound(sum_id, site, *answers[site])]
        keys, signatures = ([answers[site][at] for site in names] for at in (0, 1))
        cohort = masking.Cohort(sum_id, self._numbers(sites), self._numbers(names), tuple(keys))
        self._enough(len(names), "whose keys are signed keys", max(masking.MIN_PARTIES, cohort.threshold))
        return cohort, names, signatures

    def _sound(self, sum_id: masking.SumId, site: str, keys: bytes, signature: bytes) -> bool:
        """Say whether a site's keys are keys, and signed by it: the others would all refuse them."""
        signed = signing.verify(self.keys[site], masking.announcement(sum_id, self.numbers[site], keys), signature)
        return signed and masking.are_valid_public_keys(keys)

    def total(self, replies: Mapping[str, Reply]) -> Tensor:
        """Return the sum of the replies' updates and weights, (n + 1,) int64; raise `TooFewReplies` where it stays hidden."""
        parties = self._masking
        assert parties is not None, "it was begun"
        self._enough(len(replies), "whose masked updates came", parties.cohort.threshold)
        there = [site for site in self._shares if site in replies]
        survived = torch.tensor(self._numbers(there))
        requests: dict[str, Request] = {}
        for site in there:
            place = parties.cohort.numbers.index(self.numbers[site])
            shares = stack_rows([own[place] for own in self._shares.values()])
            requests[site] = self._sum_only(site, {REVEAL_SHARES: {"survived": survived, "shares": shares}})
        spec: TreeSpec = {"shares": ((len(parties.numbers), masking.WIDE), torch.uint8)}
        answers = self.ask(requests, spec, f"{self.what}, unmasking")
        self._enough(len(answers), "that have helped to take the masks off", parties.cohort.threshold)
        plain = {
            self.numbers[site]: {
                number: int.from_bytes(share, "big")
                for number, share in zip(parties.numbers, split_rows(reply.upload["shares"]), strict=True)
            }
            for site, reply in answers.items()
        }
        vectors = {self.numbers[site]: replies[site].upload["sum"].numpy().view(np.uint64) for site in there}
        try:
            total = torch.from_numpy(masking.unmask(parties, vectors, plain))
        except masking.UnreadableShare as error:
            raise TooFewReplies(f"{self.what} has a sum that cannot be read: {error}") from error
        if not is_plausible_sum(total):
            raise TooFewReplies(
                f"{self.what} has a sum from which the masks do not come off: a site did not keep to it."
            )
        return total

    def _sum_only(self, site: str, masks: Tree) -> Request:
        return replace(self.requests[site], client_update="", download={}, evaluation={}, masks=masks)

    def _numbers(self, sites: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.numbers[site] for site in sites)

    def _enough(self, count: int, which: str, needed: int) -> None:
        if count < needed:
            raise TooFewReplies(
                f"{self.what} has {count} sites of {len(self.requests)} {which}, and a sum needs {needed}."
            )


def lasting_keys(acceptances: Mapping[str, Acceptance]) -> dict[str, bytes]:
    """Return the usable lasting keys of sites; one without has no part."""
    plain = {name: site.key for name, site in acceptances.items() if re.fullmatch("([0-9a-f]{2})+", site.key)}
    return {name: bytes.fromhex(key) for name, key in plain.items() if signing.is_public_key(bytes.fromhex(key))}


def sum_layout(upload: TreeSpec) -> dict[str, Tensor]:
    """Return the leaves of uploads that a sum adds, by path, without values: the floating ones of the update."""
    with torch.device("meta"):
        return {
            path.removeprefix(UPDATE_PREFIX): torch.empty(kind[0], dtype=kind[1])
            for path, kind in upload.items()
            if path.startswith(UPDATE_PREFIX) and kind is not None and kind[1].is_floating_point
        }


def sum_spec(leaves: Mapping[str, Tensor]) -> TreeSpec:
    count = sum(leaf.numel() for leaf in leaves.values()) + 1
    return {"sum": ((count,), torch.int64)}


def mean_uploads(
    context: AggregationContext, upload: TreeSpec, total: Tensor, like: Mapping[str, Tensor]
) -> list[Upload]:
    """Return for each client that answered an upload as if all had sent the mean of the updates."""
    change, weight = mean(total, like)
    count = len(context.clients)
    blank = build_tree(upload, lambda shape, dtype: torch.zeros((), dtype=dtype).expand(count, *shape))
    stacked = spread(Upload.from_tree(blank), context, change, weight)
    return [stacked.at(place) for place in range(count)]

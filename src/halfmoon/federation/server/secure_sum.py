"""The server's part of a secure sum (Bonawitz et al. 2017): four exchanges with the sites, and the unmasked sum.

The server never sees a single update. Sites may drop out between any two exchanges: as long as more than two thirds of
the cohort stay until the end (`halfmoon.aggregation.secure.masking.threshold`), the result is the sum over all sites
whose masked updates arrived. Otherwise the sum cannot be unmasked, and the round is tried again.
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
from halfmoon.aggregation.secure.fixed_point import decode_mean, is_plausible_sum, replace_by_mean
from halfmoon.aggregation.secure.signing import POINT_BYTES, SIGNATURE_BYTES
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

UPDATE_PREFIX = "update/"
"""Path of the parameters in the tree of an upload."""

QuerySites = Callable[[Mapping[str, Request], TreeSpec, str], Mapping[str, Reply]]
"""Sends each site a request and returns the replies whose upload has the given spec. The text describes the exchange."""


@dataclass
class MaskedSum:
    """One secure sum of the updates of a cohort.

    Attributes:
        requests: the requests for plain updates, by site.
        numbers: client numbers, by site.
        keys: long-term public keys of the sites, for their signatures.
        query_sites: sends requests and returns usable replies.
        description: the query, in the words of the log.
    """

    requests: Mapping[str, Request]
    numbers: Mapping[str, int]
    keys: Mapping[str, bytes]
    query_sites: QuerySites
    description: str
    _masking: masking.Masking | None = None
    _shares: dict[str, list[bytes]] = field(default_factory=dict)

    def start(self) -> dict[str, Request]:
        """Run the first two exchanges: collect the sites' keys, then their encrypted secret shares.

        Returns:
            The requests for masked updates, by site.

        Raises:
            TooFewReplies: if too few sites answer.
        """
        sites = sorted(self.requests, key=self.numbers.__getitem__)
        cohort, names, signatures = self._collect_keys(sites)
        long_term_keys = [self.keys[site].rjust(POINT_BYTES, b"\0") for site in names]
        tensors = {
            "asked": torch.tensor(cohort.members),
            "sites": torch.tensor(cohort.numbers),
            "keys": stack_rows(cohort.keys),
            "signatures": stack_rows(signatures),
            "lasting": stack_rows(long_term_keys),
        }
        spec: TreeSpec = {"shares": ((len(names), masking.SHARES_BYTES), torch.uint8)}
        requests = {site: self._sum_request(site, {DEAL_SHARES: tensors}) for site in names}
        replies = self.query_sites(requests, spec, f"{self.description}, shares")
        self._require(len(replies), "that have dealt shares", cohort.threshold)
        dealers = [site for site in names if site in replies]
        self._shares = {site: split_rows(replies[site].upload["shares"]) for site in dealers}
        self._masking = masking.Masking(cohort, self._client_numbers(dealers))
        mask = {MASK_UPDATE: {"sites": torch.tensor(self._masking.numbers)}}
        return {site: replace(self.requests[site], masks=mask) for site in dealers}

    def _collect_keys(self, sites: Sequence[str]) -> tuple[masking.Cohort, list[str], list[bytes]]:
        """Collect the signed keys of this sum; return the cohort, the sites with valid keys, and their signatures."""
        with_key = [site for site in sites if site in self.keys]
        min_sites = max(masking.MIN_PARTIES, masking.threshold(len(sites)))
        self._require(len(with_key), "that could be asked", min_sites)
        session = secrets.token_bytes(SESSION_BYTES)
        sum_id = make_sum_id(next(iter(self.requests.values())), session.hex())
        question = {ANNOUNCE_KEYS: {"session": stack_rows([session])[0]}}
        spec: TreeSpec = {
            "keys": ((masking.PUBLIC_KEYS_BYTES,), torch.uint8),
            "signature": ((SIGNATURE_BYTES,), torch.uint8),
        }
        requests = {site: self._sum_request(site, question) for site in with_key}
        replies = self.query_sites(requests, spec, f"{self.description}, keys")

        names: list[str] = []
        keys: list[bytes] = []
        signatures: list[bytes] = []
        for site in with_key:
            if site not in replies:
                continue
            upload = replies[site].upload
            (site_keys,) = split_rows(upload["keys"][None])
            (signature,) = split_rows(upload["signature"][None])
            if self._keys_are_valid(sum_id, site, site_keys, signature):
                names.append(site)
                keys.append(site_keys)
                signatures.append(signature)
        cohort = masking.Cohort(sum_id, self._client_numbers(sites), self._client_numbers(names), tuple(keys))
        self._require(len(names), "whose keys are signed keys", max(masking.MIN_PARTIES, cohort.threshold))
        return cohort, names, signatures

    def _keys_are_valid(self, sum_id: masking.SumId, site: str, keys: bytes, signature: bytes) -> bool:
        """Check the keys of a site and their signature, because the other sites would refuse the whole sum."""
        announcement = masking.announcement(sum_id, self.numbers[site], keys)
        return signing.verify(self.keys[site], announcement, signature) and masking.are_valid_public_keys(keys)

    def total(self, replies: Mapping[str, Reply]) -> Tensor:
        """Run the last exchange and unmask the sum.

        Args:
            replies: the replies with masked updates, by site.

        Returns:
            The sum of updates and weights in fixed point, int64, shape (number of parameters + 1,).

        Raises:
            TooFewReplies: if the sum cannot be unmasked.
        """
        parties = self._masking
        assert parties is not None, "start() was called"
        threshold = parties.cohort.threshold
        self._require(len(replies), "whose masked updates came", threshold)
        included = [site for site in self._shares if site in replies]
        survived = torch.tensor(self._client_numbers(included))
        requests: dict[str, Request] = {}
        for site in included:
            # Every dealer encrypted one share for each site of the cohort; a site gets back those meant for it.
            column = parties.cohort.numbers.index(self.numbers[site])
            shares = stack_rows([dealt[column] for dealt in self._shares.values()])
            requests[site] = self._sum_request(site, {REVEAL_SHARES: {"survived": survived, "shares": shares}})
        spec: TreeSpec = {"shares": ((len(parties.numbers), masking.ELEMENT_BYTES), torch.uint8)}
        revealed = self.query_sites(requests, spec, f"{self.description}, unmasking")
        self._require(len(revealed), "that have helped to take the masks off", threshold)
        shares_by_client: dict[int, dict[int, int]] = {}
        for site, reply in revealed.items():
            rows = zip(parties.numbers, split_rows(reply.upload["shares"]), strict=True)
            shares_by_client[self.numbers[site]] = {number: int.from_bytes(share, "big") for number, share in rows}
        vectors = {self.numbers[site]: replies[site].upload["sum"].numpy().view(np.uint64) for site in included}
        try:
            total = torch.from_numpy(masking.unmask(parties, vectors, shares_by_client))
        except masking.UnreadableShare as error:
            raise TooFewReplies(f"{self.description} has a sum that cannot be read: {error}") from error
        if not is_plausible_sum(total):
            raise TooFewReplies(
                f"{self.description} has a sum that cannot be unmasked: a site did not follow the protocol."
            )
        return total

    def _sum_request(self, site: str, masks: Tree) -> Request:
        return replace(self.requests[site], client_update="", download={}, evaluation={}, masks=masks)

    def _client_numbers(self, sites: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.numbers[site] for site in sites)

    def _require(self, count: int, which: str, needed: int) -> None:
        """Raise `TooFewReplies` if fewer sites than needed are left."""
        if count < needed:
            raise TooFewReplies(
                f"{self.description} has {count} sites of {len(self.requests)} {which}, and a sum needs {needed}."
            )


def lasting_keys(acceptances: Mapping[str, Acceptance]) -> dict[str, bytes]:
    """Collect the valid long-term keys of sites. A site without one cannot take part in a secure sum."""
    keys: dict[str, bytes] = {}
    for name, acceptance in acceptances.items():
        if re.fullmatch("([0-9a-f]{2})+", acceptance.key):
            key = bytes.fromhex(acceptance.key)
            if signing.is_public_key(key):
                keys[name] = key
    return keys


def sum_layout(upload: TreeSpec) -> dict[str, Tensor]:
    """Return the leaves of an upload that are summed, by path, on the meta device: the floating-point parameters."""
    with torch.device("meta"):
        return {
            path.removeprefix(UPDATE_PREFIX): torch.empty(kind[0], dtype=kind[1])
            for path, kind in upload.items()
            if path.startswith(UPDATE_PREFIX) and kind is not None and kind[1].is_floating_point
        }


def sum_spec(leaves: Mapping[str, Tensor]) -> TreeSpec:
    """Return the spec of a masked update: all values of the leaves and the weight, in one int64 vector."""
    count = sum(leaf.numel() for leaf in leaves.values()) + 1
    return {"sum": ((count,), torch.int64)}


def mean_uploads(
    context: AggregationContext, upload: TreeSpec, total: Tensor, like: Mapping[str, Tensor]
) -> list[Upload]:
    """Make an upload for each client of a secure sum, as if all had sent the mean of the updates.

    Args:
        context: the query and its clients.
        upload: the spec of a plain upload.
        total: the unmasked sum.
        like: the leaves of `total` from `sum_layout`.
    """
    change, weight = decode_mean(total, like)
    count = len(context.clients)
    # Expanded zeros need no memory for the clients.
    zeros = build_tree(upload, lambda shape, dtype: torch.zeros((), dtype=dtype).expand(count, *shape))
    stacked = replace_by_mean(Upload.from_tree(zeros), context, change, weight)
    return [stacked.at(index) for index in range(count)]

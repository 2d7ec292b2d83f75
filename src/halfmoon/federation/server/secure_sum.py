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
        description: description of the query for the log.
    """

    requests: Mapping[str, Request]
    numbers: Mapping[str, int]
    keys: Mapping[str, bytes]
    query_sites: QuerySites
    description: str
    _masking: masking.Masking | None = None
    _shares: dict[str, list[bytes]] = field(default_factory=dict)

    def start(self) -> dict[str, Request]:
        """Run the first two exchanges of secure aggregation (Bonawitz et al. 2017): public keys and secret shares.

        Each site announces signed public keys of this sum. The server passes them to all sites; each site encrypts
        one share of its secrets for every other site, and the server stores these until the masks are removed. With the
        shares of enough sites it can remove the masks of a site that drops out.

        Returns:
            The requests for masked updates, by site.

        Raises:
            TooFewReplies: if too few sites reply.
        """
        sites = sorted(self.requests, key=self.numbers.__getitem__)
        cohort, names, signatures = self._collect_keys(sites)
        # Keys of different curves differ in length; padding on the left makes them rows of one tensor.
        long_term_keys = [self.keys[site].rjust(POINT_BYTES, b"\0") for site in names]
        announcements = {
            "asked": torch.tensor(cohort.members),  # numbers of all sites of the sum
            "sites": torch.tensor(cohort.numbers),  # of those with valid keys, in the order of the rows below
            "keys": stack_rows(cohort.keys),
            "signatures": stack_rows(signatures),
            "lasting": stack_rows(long_term_keys),  # by these, sites check the signatures
        }
        spec: TreeSpec = {"shares": ((len(names), masking.SHARES_BYTES), torch.uint8)}
        requests = {site: self._sum_request(site, {DEAL_SHARES: announcements}) for site in names}
        replies = self.query_sites(requests, spec, f"{self.description}, shares")
        self._require(len(replies), "that have dealt shares", cohort.threshold)
        dealers = [site for site in names if site in replies]
        self._shares = {site: split_rows(replies[site].upload["shares"]) for site in dealers}
        self._masking = masking.Masking(cohort, self._client_numbers(dealers))
        # The field `masks` of a request has the tensors of one stage of the protocol, below the name of the stage.
        stage = {MASK_UPDATE: {"sites": torch.tensor(self._masking.numbers)}}
        return {site: replace(self.requests[site], masks=stage) for site in dealers}

    def _collect_keys(self, sites: Sequence[str]) -> tuple[masking.Cohort, list[str], list[bytes]]:
        """Collect the public keys that the sites generate for this sum, signed with their long-term keys.

        Keys and signatures travel as uint8 tensors; `stack_rows` and `split_rows` convert rows of bytes.

        Args:
            sites: the sites in the order of their client numbers.

        Returns:
            The cohort with its keys, the sites whose keys are valid, and their signatures.

        Raises:
            TooFewReplies: if fewer sites than the threshold have valid keys.
        """
        with_key = [site for site in sites if site in self.keys]
        min_sites = max(masking.MIN_PARTIES, masking.threshold(len(sites)))
        self._require(len(with_key), "that could be asked", min_sites)
        # A random id, so that a signature of this sum cannot be replayed in another one.
        session = secrets.token_bytes(SESSION_BYTES)
        sum_id = make_sum_id(next(iter(self.requests.values())), session.hex())
        stage = {ANNOUNCE_KEYS: {"session": stack_rows([session])[0]}}
        spec: TreeSpec = {
            "keys": ((masking.PUBLIC_KEYS_BYTES,), torch.uint8),
            "signature": ((SIGNATURE_BYTES,), torch.uint8),
        }
        requests = {site: self._sum_request(site, stage) for site in with_key}
        replies = self.query_sites(requests, spec, f"{self.description}, keys")

        names: list[str] = []
        keys: list[bytes] = []
        signatures: list[bytes] = []
        for site in with_key:
            if site not in replies:
                continue
            upload = replies[site].upload
            # `split_rows` expects a leading dimension of rows.
            (site_keys,) = split_rows(upload["keys"][None])
            (signature,) = split_rows(upload["signature"][None])
            if self._keys_are_valid(sum_id, site, site_keys, signature):
                names.append(site)
                keys.append(site_keys)
                signatures.append(signature)
        cohort = masking.Cohort(
            sum_id,
            self._client_numbers(sites),  # all sites of the sum
            self._client_numbers(names),  # those with valid keys
            tuple(keys),
        )
        self._require(len(names), "whose keys are signed keys", max(masking.MIN_PARTIES, cohort.threshold))
        return cohort, names, signatures

    def _keys_are_valid(self, sum_id: masking.SumId, site: str, keys: bytes, signature: bytes) -> bool:
        """Check the keys of a site and their signature, because the other sites would refuse the whole sum."""
        announcement = masking.announcement(sum_id, self.numbers[site], keys)
        return signing.verify(self.keys[site], announcement, signature) and masking.are_valid_public_keys(keys)

    def total(self, replies: Mapping[str, Reply]) -> Tensor:
        """Run the last exchange of secure aggregation, which removes the masks from the sum of the updates.

        Args:
            replies: the replies with masked updates, by site.

        Returns:
            The sum of updates and weights in fixed point, int64, shape (number of parameters + 1,).

        Raises:
            TooFewReplies: if the sum cannot be unmasked.
        """
        parties = self._masking  # the sites that have dealt shares, and their cohort
        assert parties is not None, "start() was called"
        self._require(len(replies), "whose masked updates came", parties.cohort.threshold)
        included = [site for site in self._shares if site in replies]
        shares_by_client = self._collect_shares(parties, included)
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

    def _collect_shares(self, parties: masking.Masking, included: Sequence[str]) -> dict[int, dict[int, int]]:
        """Have the sites decrypt the shares from which the masks are computed.

        Each site gets back the shares that were encrypted for it, and the list of sites that are in the sum. It reveals
        for each dealer either the share of its self mask or that of its pairwise masks, never both.

        Args:
            parties: the sites that have dealt shares.
            included: the sites whose masked updates are in the sum.

        Returns:
            For each client that replied, by its number: the shares that it decrypted, by the number of the dealer.
        """
        survived = torch.tensor(self._client_numbers(included))
        requests: dict[str, Request] = {}
        for site in included:
            # Each dealer encrypted one share for each site of the cohort, in the order of the cohort.
            column = parties.cohort.numbers.index(self.numbers[site])
            shares = stack_rows([dealt[column] for dealt in self._shares.values()])
            requests[site] = self._sum_request(site, {REVEAL_SHARES: {"survived": survived, "shares": shares}})
        spec: TreeSpec = {"shares": ((len(parties.numbers), masking.ELEMENT_BYTES), torch.uint8)}
        replies = self.query_sites(requests, spec, f"{self.description}, unmasking")
        self._require(len(replies), "that have helped to take the masks off", parties.cohort.threshold)

        shares_by_client: dict[int, dict[int, int]] = {}
        for site, reply in replies.items():
            rows = zip(parties.numbers, split_rows(reply.upload["shares"]), strict=True)
            shares_by_client[self.numbers[site]] = {dealer: int.from_bytes(share, "big") for dealer, share in rows}
        return shares_by_client

    def _sum_request(self, site: str, masks: Tree) -> Request:
        """Build the request of one step of the sum: that for the update, with `masks` instead of a model."""
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
    """List the tensors of an upload that a secure sum adds up: its floating-point parameters.

    Args:
        upload: (shape, dtype) of each tensor of a plain upload by path; None is a branch without tensors.

    Returns:
        Tensors without data (on the meta device), by path.
    """
    leaves: dict[str, Tensor] = {}
    for path, leaf_spec in upload.items():
        if not path.startswith(UPDATE_PREFIX) or leaf_spec is None:
            continue
        shape, dtype = leaf_spec
        if dtype.is_floating_point:
            leaves[path.removeprefix(UPDATE_PREFIX)] = torch.empty(shape, dtype=dtype, device="meta")
    return leaves


def sum_spec(leaves: Mapping[str, Tensor]) -> TreeSpec:
    """Return the spec of a masked update: all values of the leaves and the weight, in one int64 vector."""
    count = sum(leaf.numel() for leaf in leaves.values()) + 1
    return {"sum": ((count,), torch.int64)}


def mean_uploads(
    context: AggregationContext, upload_spec: TreeSpec, total: Tensor, layout: Mapping[str, Tensor]
) -> list[Upload]:
    """Make an upload for each client of a secure sum, as if all had sent the mean of the updates.

    Methods expect one upload from each client, with a weight. These uploads have equal weights, so that their average
    is that mean.

    Args:
        context: the query and its clients.
        upload_spec: names, shapes and dtypes of a plain upload.
        total: the unmasked sum of updates and weights in fixed point, int64, (number of parameters + 1,).
        layout: the parameters in `total` in their order, from `sum_layout`.
    """
    mean_change, weight_sum = decode_mean(total, layout)
    client_count = len(context.clients)
    # Only the structure of the uploads matters here. An expanded scalar needs no memory for its copies.
    zeros = build_tree(upload_spec, lambda shape, dtype: torch.zeros((), dtype=dtype).expand(client_count, *shape))
    stacked = replace_by_mean(Upload.from_tree(zeros), context, mean_change, weight_sum)
    return [stacked.at(index) for index in range(client_count)]

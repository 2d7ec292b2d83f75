"""Sums of which the server sees no single term: the arithmetic, the masks, and what a site tells, and tells once."""

import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch
from recording_methods import make_context
from test_contract import build_simulation

from halfmoon.aggregation.secure import signing
from halfmoon.aggregation.secure.csprng import generate_keystream
from halfmoon.aggregation.secure.fixed_point import (
    SCALE,
    FixedPointMean,
    TooLarge,
    check_summable,
    decode_mean,
    encode_contribution,
    is_plausible_sum,
)
from halfmoon.aggregation.secure.masking import (
    PRIME,
    Cohort,
    Party,
    SumId,
    UnreadableShare,
    announcement,
    compute_lagrange_factors,
    compute_public_key,
    compute_public_keys,
    compute_shared_secret,
    derive_key,
    draw_coefficients,
    split_secret,
    threshold,
    unmask,
)
from halfmoon.api.uploads import Upload
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.engine.loop import TooFewReplies
from halfmoon.federation.contract.checks import SIZES
from halfmoon.federation.contract.small_federation import max_difference, run_rounds, start_server
from halfmoon.federation.protocol.messages import (
    ANNOUNCE_KEYS,
    DEAL_SHARES,
    MASK_UPDATE,
    REVEAL_SHARES,
    Acceptance,
    RefusalError,
    Reply,
    Request,
    read_message,
    write_message,
)
from halfmoon.federation.protocol.tree_spec import make_tree_spec
from halfmoon.federation.server.secure_sum import MaskedSum, lasting_keys, sum_layout, sum_spec
from halfmoon.federation.server.validation import check_schema
from halfmoon.federation.site import secure_sum
from halfmoon.federation.site.runtime import EMPTY_RESULT
from halfmoon.federation.site.secure_sum import SECRET_FILE, SUMS_FOLDER, SumParticipant, erase_secrets
from halfmoon.federation.site.site_keys import KNOWN_KEYS_FILE, KeyFiles, KnownKeys
from halfmoon.storage.events import EventList

FEDERATION = "f" * 64
RUN = "0" * 32
VERSION = "0.1.0"


# ---- Shamir's shares and the primitives around them


def reconstruct(shares: Mapping[int, int], prime: int = PRIME) -> int:
    """Return the secret whose shares are given by place."""
    counts = compute_lagrange_factors(list(shares), prime)
    return sum(share * counts[place] for place, share in shares.items()) % prime


def test_shares_are_the_published_ones() -> None:
    """The example of Wikipedia's article on Shamir's secret sharing: 1234 + 166 x + 94 x^2 modulo 1613."""
    shares = split_secret(1234, 3, range(1, 7), [166, 94], prime=1613)
    assert shares == [1494, 329, 965, 176, 1188, 775]
    assert reconstruct({2: 329, 4: 176, 5: 1188}, prime=1613) == 1234


def test_the_field_is_a_field() -> None:
    from sympy import isprime  # half a second

    assert isprime(PRIME)
    assert not any(isprime(2**256 + k) for k in range(297))


def test_coefficients_are_eight_words_of_the_keystream_each() -> None:
    """Word by word, the lowest first: shorter coefficients would be easier to guess, and overlapping ones depend."""
    words = [int(word) for word in generate_keystream(b"k" * 32, 8 * 100)]
    expected = [sum(words[8 * k + i] << 64 * i for i in range(8)) % PRIME for k in range(100)]
    assert draw_coefficients(b"k" * 32, 100) == expected


def test_enough_shares_reveal_a_secret_and_fewer_do_not() -> None:
    """In a field of 11, one share of two is compatible with each secret just once: all are as likely as before."""
    secret = int.from_bytes(bytes(range(32)), "big")
    shares = dict(zip(range(1, 8), split_secret(secret, 4, range(1, 8), draw_coefficients(b"k" * 32, 3)), strict=True))
    for some in ((1, 2, 3, 4), (7, 5, 2, 3), (1, 2, 3, 4, 5, 6, 7)):
        assert reconstruct({k: shares[k] for k in some}) == secret
    assert reconstruct({k: shares[k] for k in (1, 2, 3)}) != secret
    for share in range(11):
        secrets = [s for s in range(11) for drawn in range(11) if split_secret(s, 2, [3], [drawn], prime=11) == [share]]
        assert sorted(secrets) == list(range(11))


def test_keys_are_agreed_on_as_in_rfc_7748() -> None:
    """Section 5.2: X25519 of 9 and 9, once, and a thousand times over; a point of low order is no key."""
    k = u = bytes([9]) + bytes(31)
    assert compute_public_key(k).hex() == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
    for _ in range(1000):
        k, u = compute_shared_secret(k, u), k
    assert k.hex() == "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"
    with pytest.raises(UnreadableShare, match="public key is not valid"):
        compute_shared_secret(k, bytes(32))


def test_more_than_two_thirds_have_to_stay() -> None:
    assert [threshold(k) for k in (3, 4, 5, 6, 10, 30)] == [3, 3, 4, 5, 7, 21]


# ---- fixed point


def test_a_contribution_is_hand_made_numbers() -> None:
    """3 (0.5, -1/4), and the weight 3, in units of 2^-24; 2^-26 is half of a half of a unit: it rounds to none."""
    change = {"a": torch.tensor([0.5, -0.25]), "b": torch.tensor([[2.0**-26]])}
    vector = encode_contribution(change, 3.0, 2)
    assert vector.tolist() == [3 * 2**23, -3 * 2**22, 1, 3 * 2**24]  # 0.75 of a unit rounds to 1
    assert encode_contribution(change, 1.0, 2).tolist() == [2**23, -(2**22), 0, 2**24]
    got, weight = decode_mean(vector + encode_contribution(change, 1.0, 2), change)
    assert weight == 4
    assert got["a"].tolist() == [0.5, -0.25]
    assert got["b"].shape == (1, 1)
    nothing, weight = decode_mean(torch.zeros(4, dtype=torch.int64), change)
    assert (weight, nothing["a"].tolist()) == (0, [0, 0])


def test_what_would_not_fit_is_refused() -> None:
    """The sum over k clients has to stay below 2^62; no number that is not finite passes."""
    maximum = 2.0**62 / SCALE / 4
    encode_contribution({"a": torch.tensor([np.nextafter(maximum, 0.0)], dtype=torch.float64)}, 1.0, 4)
    for value in (maximum, -maximum, float("inf"), float("nan")):
        with pytest.raises(TooLarge, match="too large for a sum of 4"):
            encode_contribution({"a": torch.tensor([value], dtype=torch.float64)}, 1.0, 4)
    with pytest.raises(TooLarge):
        encode_contribution({"a": torch.tensor([1.0])}, 2.0**37, 4)
    assert is_plausible_sum(torch.tensor([-(2**61), 2**61]))
    assert not is_plausible_sum(torch.tensor([2**62, 1]))
    assert not is_plausible_sum(torch.tensor([1, -1]))


@pytest.mark.parametrize("even", [False, True])
def test_the_mean_is_the_weighted_mean_to_the_bound(even: bool) -> None:
    """Compared with exact fractions: off by k 2^-25 / W at most, in double precision where no other rounding adds to it."""
    g = torch.Generator().manual_seed(1)
    broadcast = {"params": {"w": torch.zeros(200, dtype=torch.float64)}, "stats": {}}
    k = 5
    weights = torch.tensor([3.0, 1.0, 7.0, 2.0, 4.0], dtype=torch.float64)
    upload = {"params": {"w": torch.randn(k, 200, generator=g).double()}, "stats": {}}
    upload = Upload(upload, weights)
    rows, got = FixedPointMean(even).process_uploads(make_context(broadcast, k), upload)
    assert list(rows) == list(range(k))
    assert got.update["stats"] == {}
    assert got.weight.tolist() == [1.0] * k
    w = [Fraction(1) if even else Fraction(v) for v in weights.tolist()]
    bound = k * Fraction(1, 2**25) / sum(w)
    worst = Fraction(0)
    for j in range(200):
        exact = sum(a * Fraction(float(x)) for a, x in zip(w, upload.update["params"]["w"][:, j], strict=True)) / sum(w)
        values = got.update["params"]["w"][:, j].tolist()
        assert len(set(values)) == 1
        worst = max(worst, abs(Fraction(values[0]) - exact))
    assert bound / 50 < worst <= bound + Fraction(1, 2**50)


def test_invalid_upload_is_excluded_and_an_empty_sum_has_weight_zero() -> None:
    broadcast = {"params": {"w": torch.zeros(2)}}
    upload = Upload({"params": {"w": torch.tensor([[1.0, 2.0], [1e30, 0.0], [3.0, float("nan")]])}}, torch.ones(3))
    aggregator = FixedPointMean(False)
    rows, got = aggregator.process_uploads(make_context(broadcast, 3), upload)
    assert list(rows) == [0]
    assert got.update["params"]["w"].tolist() == [[1.0, 2.0]]
    assert aggregator.row() == {"summed": 1}
    rows, _ = aggregator.process_uploads(
        make_context(broadcast, 3), upload._replace(update={"params": {"w": torch.full((3, 2), 1e30)}})
    )
    assert list(rows) == []
    rows, got = aggregator.process_uploads(
        make_context(broadcast, 3), Upload({"params": {"w": torch.ones(3, 2)}}, torch.zeros(3))
    )
    assert (got.weight.tolist(), got.update["params"]["w"].tolist()) == ([0.0] * 3, [[0.0, 0.0]] * 3)


def test_an_upload_with_more_than_an_update_is_refused() -> None:
    with pytest.raises(UserError, match="'appu' in addition to their update"):
        check_summable(Upload({"w": torch.ones(2)}, torch.ones(()), {"appu": torch.ones(3)}), {"w": None})
    with pytest.raises(UserError, match="'steps' in addition to their update"):
        check_summable(Upload({"w": torch.ones(2), "steps": torch.tensor(3)}, torch.ones(())), {"w": None})


@pytest.mark.parametrize("name", ["fedavg", "fedavg-fixmatch", "fixmatch-feddpl", "feddure", "fedloke", "fml"])
def test_the_mean_of_a_sum_does_for_a_method(name: str) -> None:
    """Its server does with it what it does with single uploads, to the bound of 3 clients, in double precision."""
    made, shared, plain = build_simulation(name, "both")
    _, _, summing = build_simulation(name, "both", aggregators=[FixedPointMean(False)])
    (one,), (two,) = (run_rounds(made, each, start_server(made, shared), range(1)) for each in (plain, summing))
    weights = 3 if name == "fml" else sum(sum(SIZES[k]) for k in one.report.cohort)  # FML's are 1
    assert 0 < max_difference(two.server, one.server) <= 3 * 2**-25 / weights + 1e-12
    assert two.report.aggregator == {"summed": 3}


def test_lifted_clients_have_the_same_sum_to_rounding() -> None:
    """Loop and vmap differ in the last digits of float64; a unit of 2^-24 may turn with them, of 3 clients."""
    results = []
    for executor in ("loop", "vmap"):
        made, shared, runtime = build_simulation(
            "fedavg", "both", executor=executor, aggregators=[FixedPointMean(False)]
        )
        results.append(run_rounds(made, runtime, start_server(made, shared), range(1))[0])
    loop, lifted = results
    weights = sum(sum(SIZES[k]) for k in loop.report.cohort)
    assert max_difference(lifted.server, loop.server) <= 3 * 2**-24 / weights + 1e-12
    assert lifted.report.aggregator == loop.report.aggregator == {"summed": 3}


def test_a_sum_of_two_is_no_sum() -> None:
    with pytest.raises(UserError, match="secure_aggregation needs a cohort of 3 or more, not 2"):
        Config(method="fedavg", cohort=2, secure_aggregation=True)


# ---- sites and a server without a network


DOWN = {"params": {"w": torch.zeros(40, 30), "b": torch.zeros(7)}, "stats": {}}


@dataclass
class Village:
    """Sites with made-up updates, which reply as real ones do; `drops` says who is away at which stage."""

    folder: Path
    count: int
    drops: Mapping[str, set[int]] = field(default_factory=dict)
    seen: list[bytes] = field(default_factory=list)
    sent: list[Request] = field(default_factory=list)  # to site 0
    printed: EventList = field(default_factory=EventList)
    round: int = 0
    least: int = 3
    listed: Path | None = None

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        shapes = {"w": (40, 30), "b": (7,)}
        self.updates = [
            {name: rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()} for _ in range(self.count)
        ]
        self.weights = rng.integers(1, 500, self.count).tolist()

    @property
    def names(self) -> list[str]:
        return [f"site-{k}" for k in range(self.count)]

    def participant(self, k: int) -> SumParticipant:
        """Return a site's part as a new process finds it."""
        state_folder = self.folder / f"home-{k}"
        state_folder.mkdir(parents=True, exist_ok=True)
        known = KnownKeys(self.names, state_folder, self.listed, self.printed)
        return SumParticipant(KeyFiles().load(state_folder), state_folder / RUN, k, known, False, self.least)

    def key(self, k: int) -> bytes:
        return signing.encode_public_key(KeyFiles().load(self.folder / f"home-{k}").public_key())

    def secret(self, k: int) -> bytes:
        return (self.folder / f"home-{k}" / RUN / SUMS_FOLDER / SECRET_FILE).read_bytes()[:32]

    def upload(self, k: int) -> Upload:
        moved = {name: torch.from_numpy(leaf) for name, leaf in self.updates[k].items()}
        return Upload({"params": moved, "stats": {}}, torch.tensor(float(self.weights[k]), dtype=torch.float64))

    def do(self, k: int) -> Callable[[Request], Reply]:
        def done(request: Request) -> Reply:
            plain = Reply.from_result(request, VERSION, EMPTY_RESULT)
            return replace(plain, upload=self.upload(k).tree) if request.client_update else plain

        return done

    def reply_to_request(self, k: int, data: bytes) -> bytes:
        request = read_message(data, Request)
        return write_message(self.participant(k).reply_to(request, self.do(k)))

    def requests(self) -> dict[str, Request]:
        for k in range(self.count):
            self.participant(k)
        plain = Request(FEDERATION, VERSION, RUN, self.round, 0, 0, "train", download=DOWN)
        return dict.fromkeys(self.names, plain)

    def send_requests(self, requests: Mapping[str, Request], pattern: Any, what: str) -> dict[str, Reply]:
        """Carry requests to the sites, in bytes, and their replies back."""
        replies = {}
        for name, request in requests.items():
            k = self.names.index(name)
            stage = next(iter(request.masks))
            self.sent += [request] if k == 0 else []
            if k in self.drops.get(stage, set()):
                continue
            self.seen.append(write_message(request))
            self.seen.append(self.reply_to_request(k, self.seen[-1]))
            replies[name] = read_message(self.seen[-1], Reply)
            assert check_schema(replies[name].upload, {}, pattern) is None
        return replies

    def sum(self) -> MaskedSum:
        numbers = {name: k for k, name in enumerate(self.names)}
        requests = self.requests()
        keys = {name: self.key(k) for k, name in enumerate(self.names)}
        return MaskedSum(requests, numbers, keys, self.send_requests, "round 1, query 1 (train)")

    def trained(self, sum: MaskedSum) -> dict[str, Reply]:
        """Begin a sum, and return what the sites send up under their masks."""
        return self.send_requests(sum.start(), sum_spec(sum_layout(make_tree_spec(self.upload(0).tree))), "the work")

    def run_round(self) -> torch.Tensor:
        sum = self.sum()
        return sum.total(self.trained(sum))


def exact(village: Village, there: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of the contributions of some sites, int64, and the weighted mean of their updates, in float64."""
    flat = np.stack([np.concatenate([u["w"].ravel(), u["b"]]) for u in village.updates])[there].astype("f8")
    weights = np.array(village.weights, "f8")[there]
    parts = np.round(np.c_[flat, np.ones(len(there))] * weights[:, None] * 2.0**24).astype("i8")
    return parts.sum(0), (flat * weights[:, None]).sum(0) / weights.sum()


STAGES = (ANNOUNCE_KEYS, DEAL_SHARES, MASK_UPDATE, REVEAL_SHARES)
DROPS = [
    {},
    *({stage: {4}} for stage in STAGES),
    *({stage: {0, 5, 9}} for stage in STAGES),
    {ANNOUNCE_KEYS: {2}, DEAL_SHARES: {2, 3}, MASK_UPDATE: {2, 3}, REVEAL_SHARES: {2, 3, 8}},
]


@pytest.mark.parametrize(
    "drops", DROPS, ids=lambda drops: ",".join(f"{s}-{len(d)}" for s, d in drops.items()) or "none"
)
def test_the_sum_is_exact_whoever_drops_out(drops: dict[str, set[int]], tmp_path: Path) -> None:
    """Ten sites, of which none, one or three (30 %) drop out before each stage: the sum is that of those who trained.
    As whole numbers it is exact; as a mean it is off by the rounding of k numbers to units of 2^-24."""
    village = Village(tmp_path, 10, drops)
    total = village.run_round()
    there = [k for k in range(10) if k not in set().union(*(drops.get(at, set()) for at in STAGES[:3]))]
    whole, average = exact(village, there)
    assert np.array_equal(total.numpy(), whole)
    got, weight = decode_mean(total, {"w": torch.empty(1207, dtype=torch.float64)})
    assert weight == sum(village.weights[k] for k in there)
    assert np.abs(got["w"].numpy() - average).max() <= len(there) * 2.0**-25 / weight + 1e-15


@pytest.mark.parametrize("stage", STAGES)
def test_sum_of_too_few_sites_cannot_be_read(stage: str, tmp_path: Path) -> None:
    """Four of ten are gone: the server reports it and has no sum."""
    village = Village(tmp_path, 10, {stage: {1, 2, 3, 4}})
    with pytest.raises(TooFewReplies, match=r"round 1, query 1 \(train\) has 6 sites of 10 .* and a sum needs 7"):
        village.run_round()


def test_fewer_shares_than_the_threshold_take_no_mask_off(tmp_path: Path) -> None:
    """What six of ten tell is refused; taken all the same, it gives another key than the one that is looked for."""
    village = Village(tmp_path, 10, {MASK_UPDATE: {9}})
    sum = village.sum()
    message = {}
    replies = village.trained(sum)
    village.drops = {REVEAL_SHARES: {6, 7, 8}}
    with pytest.raises(TooFewReplies, match="a sum needs 7"):
        sum.total(replies)
    responses = [read_message(data, Reply) for data in village.seen[-12:][1::2]]
    masking = sum._masking
    assert masking is not None
    for k, output in enumerate(responses):
        message[k] = {j: int.from_bytes(row.numpy().tobytes(), "big") for j, row in enumerate(output.upload["shares"])}
    vectors = {k: replies[f"site-{k}"].upload["sum"].numpy().view(np.uint64) for k in range(9)}
    with pytest.raises(UnreadableShare, match="6 sites remained until its end, and 7 are needed"):
        unmask(masking, vectors, message)
    party = Party(village.secret(9), 9, masking.cohort)
    assert reconstruct({k + 1: shares[9] for k, shares in message.items()}) != int.from_bytes(party.private, "big")


def spread_of(vector: np.ndarray) -> float:
    return float(scipy.stats.chisquare(np.bincount(np.frombuffer(vector.tobytes(), np.uint8), minlength=256)).pvalue)


def test_masked_vectors_look_like_noise_and_differ_between_rounds(tmp_path: Path) -> None:
    """Bytes are uniform, of each site, and of the difference of two rounds with equal updates; plain ones are not."""
    village = Village(tmp_path, 4)
    vectors: dict[tuple[int, int], np.ndarray] = {}
    for village.round in range(2):
        village.seen.clear()
        village.run_round()
        for data in village.seen:
            with suppress(UserError):
                reply = read_message(data, Reply)
                if "sum" in reply.upload:
                    vectors[village.round, len(vectors) % 4] = reply.upload["sum"].numpy()
    assert len(vectors) == 8
    values = [spread_of(each) for each in vectors.values()]
    values += [spread_of(vectors[0, k] - vectors[1, k]) for k in range(4)]
    values += [spread_of(vectors[0, k] - vectors[0, j]) for k in range(4) for j in range(k)]
    # Fisher's method, over all of them together, and none on its beyond what one of eighteen may be by chance.
    assert min(values) > 1e-5
    assert scipy.stats.chi2.sf(-2 * np.log(values).sum(), 2 * len(values)) > 1e-5
    assert spread_of(exact(village, [0])[0]) < 1e-9
    assert not (vectors[0, 0] == vectors[1, 0]).any()


def stages(village: Village) -> dict[str, Request]:
    """Run one query, and return the requests to site 0 at each stage."""
    village.run_round()
    return sent(village)


def altered(request: Request, stage: str, **leaves: Any) -> Request:
    return replace(request, masks={stage: {**request.masks[stage], **leaves}})


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def until(village: Village, stage: str) -> dict[str, Request]:
    """Run one query up to a stage, which no site receives; return the messages of site 0 at each."""
    village.drops = {stage: set(range(village.count))}
    with suppress(TooFewReplies):
        village.run_round()
    village.drops = {}
    return sent(village)


def sent(village: Village) -> dict[str, Request]:
    """Return what site 0 was sent at each stage in the last round."""
    return {next(iter(each.masks)): each for each in village.sent if each.round == village.round}


def test_repeated_request_gets_the_same_reply_and_a_different_one_none(tmp_path: Path) -> None:
    """A server that asks again, after a restart, or with changes: at each stage a site replies to only one request."""
    village = Village(tmp_path, 5)
    first = until(village, REVEAL_SHARES)
    deal = first[DEAL_SHARES]
    mask = first[MASK_UPDATE]
    for request in (deal, mask):
        assert village.reply_to_request(0, write_message(request)) in village.seen
    keys = [
        read_message(village.reply_to_request(0, write_message(first[ANNOUNCE_KEYS])), Reply).upload["keys"]
        for _ in range(2)
    ]
    assert torch.equal(*keys)
    fewer = {name: leaf[:4] for name, leaf in deal.masks[DEAL_SHARES].items() if name != "asked"}
    for other in (altered(deal, DEAL_SHARES, **fewer), altered(mask, MASK_UPDATE, sites=numbers(0, 1, 2, 3))):
        with pytest.raises(RefusalError, match="already replied for that round"):
            village.reply_to_request(0, write_message(other))


def test_shares_are_revealed_for_one_set_of_sites_even_in_a_restarted_sum(tmp_path: Path) -> None:
    """A server that was killed after the last reply runs all again: the same sum, or none."""
    village = Village(tmp_path, 5)
    reveal = stages(village)[REVEAL_SHARES]
    response = village.reply_to_request(0, write_message(reveal))
    assert response in village.seen
    for survived in (numbers(0, 1, 2, 3), numbers(0, 2, 3, 4)):
        with pytest.raises(RefusalError, match="already replied for that round"):
            village.reply_to_request(0, write_message(altered(reveal, REVEAL_SHARES, survived=survived)))
    assert np.array_equal(village.run_round().numpy(), exact(village, [0, 1, 2, 3, 4])[0])
    village.drops = {MASK_UPDATE: {4}}
    with pytest.raises(RefusalError, match="already replied for that round"):
        village.run_round()


def test_other_values_do_not_go_out_under_the_same_masks(tmp_path: Path) -> None:
    """Two vectors under one mask would tell their difference: of one site alone."""
    village = Village(tmp_path, 4)
    first = until(village, REVEAL_SHARES)
    village.updates[0]["b"][3] += 2.0**-20
    with pytest.raises(RefusalError, match="already replied for that round"):
        village.reply_to_request(0, write_message(first[MASK_UPDATE]))


def cohort_of(deal: Request, session: str) -> Cohort:
    message = deal.masks[DEAL_SHARES]
    requested, sites = (tuple(message[name].tolist()) for name in ("asked", "sites"))
    keys = tuple(row.numpy().tobytes() for row in message["keys"])
    return Cohort(SumId(FEDERATION, RUN, deal.round, 0, 0, session), requested, sites, keys)


def test_site_reveals_seeds_or_keys_but_never_both_of_one_site(tmp_path: Path) -> None:
    """Of those whose vectors came it tells the seed's share, of the others the key's: as they were dealt."""
    village = Village(tmp_path, 7, {MASK_UPDATE: {6}})
    sum = village.sum()
    replies = village.trained(sum)
    secrets = [village.secret(k) for k in range(7)]  # before they are erased
    sum.total(replies)
    first = sent(village)
    output = read_message(village.reply_to_request(0, write_message(first[REVEAL_SHARES])), Reply).upload["shares"]
    cohort = sum._masking.cohort
    for k in range(7):
        party = Party(secrets[k], k, cohort)
        for purpose, held, is_selected in (("seed", party.seed, k != 6), ("private", party.private, k == 6)):
            key = derive_key(party.secret, f"shares of the {purpose}", cohort.digest, k)
            (share,) = split_secret(int.from_bytes(held, "big"), 5, [1], draw_coefficients(key, 4))
            assert (output[k].numpy().tobytes() == share.to_bytes(33, "big")) is is_selected


def test_site_refuses_requests_that_would_reveal_more_than_a_sum(tmp_path: Path) -> None:
    village = Village(tmp_path, 5)
    village.least = 5
    old = stages(village)
    village.round = 1
    village.seen.clear()

    def refused(request: Request, message: str) -> None:
        with pytest.raises(RefusalError, match=message):
            village.reply_to_request(0, write_message(request))

    refused(replace(old[DEAL_SHARES], round=1), "has not begun")
    refused(replace(old[MASK_UPDATE], round=1), "has not begun")
    refused(replace(old[REVEAL_SHARES], round=1), "before this site has sent anything under masks")
    first = until(village, DEAL_SHARES)
    refused(replace(first[ANNOUNCE_KEYS], client_update="train"), "a client update together with another stage")
    refused(replace(old[MASK_UPDATE], round=1, masks={}), "the terms allow secure sums only")
    refused(replace(old[MASK_UPDATE], round=1), "has dealt no shares")
    deal = first[DEAL_SHARES]
    message = first[DEAL_SHARES].masks[DEAL_SHARES]

    def of(*sites: int) -> dict[str, torch.Tensor]:
        stored = [each % 5 for each in sites]
        return {"sites": numbers(*sites), **{n: message[n][stored] for n in ("keys", "signatures", "lasting")}}

    two = numbers(0, 1)
    three = numbers(0, 1, 2)
    refused(altered(deal, DEAL_SHARES, asked=two, **of(0, 1)), "a sum of fewer than 3 hides nothing")
    refused(altered(deal, DEAL_SHARES, asked=three, **of(0, 1, 2)), "the terms have cohorts of 5")
    refused(altered(deal, DEAL_SHARES, **of(0, 1, 2)), "3 sites of 5 have keys, and 4 are needed")
    refused(altered(deal, DEAL_SHARES, **of(0, 1, 1)), "names a site twice")
    refused(altered(deal, DEAL_SHARES, **of(0, 1, 5)), "site number 5, and the federation has 5")
    refused(altered(deal, DEAL_SHARES, **of(0, 1, -1)), "site number -1")
    refused(altered(deal, DEAL_SHARES, **of(0, 2, 1)), "in the order of their numbers")
    refused(altered(deal, DEAL_SHARES, **of(1, 2, 3, 4)), "that does not include it")
    refused(
        altered(deal, DEAL_SHARES, **of(*range(5)) | {"keys": message["keys"][[1, 1, 2, 3, 4]]}),
        "other keys of this site",
    )
    village.reply_to_request(0, write_message(deal))
    mask = replace(old[MASK_UPDATE], round=1)
    refused(altered(mask, MASK_UPDATE, sites=three), "3 sites have dealt shares, and 4 are needed")
    village.reply_to_request(0, write_message(mask))
    reveal = replace(old[REVEAL_SHARES], round=1)
    refused(altered(reveal, REVEAL_SHARES, survived=three), "sum of 3 sites of 5, and 4 are needed")
    refused(altered(reveal, REVEAL_SHARES, survived=numbers(1, 2, 3, 4)), "leaves out this one's")
    refused(altered(reveal, REVEAL_SHARES, survived=numbers(0, 1, 2, 3, 7)), "sites whose updates it cannot have")
    refused(altered(reveal, REVEAL_SHARES, survived=numbers(0, 1, 2, 2, 3)), "sites whose updates it cannot have")
    fewer = reveal.masks[REVEAL_SHARES]["shares"][:4]
    refused(altered(reveal, REVEAL_SHARES, shares=fewer), "other sites than those that have dealt")
    with pytest.raises(UnreadableShare, match="the shares that site number 0 has dealt cannot be read"):
        village.reply_to_request(0, write_message(reveal))  # those of round 0


def test_shares_that_were_changed_or_meant_for_another_are_not_read(tmp_path: Path) -> None:
    village = Village(tmp_path, 4)
    sum = village.sum()
    replies = village.trained(sum)
    spoiled = bytearray(sum._shares["site-2"][0])
    spoiled[5] ^= 1
    sum._shares["site-2"][0] = bytes(spoiled)
    with pytest.raises(UnreadableShare, match="site number 2"):
        sum.total(replies)


def bad_key(village: Village, site: int) -> Callable[..., dict[str, Reply]]:
    """Let a site tell keys that nobody can agree with, signed all the same."""
    original = village.send_requests

    def send_requests(requests: Mapping[str, Request], pattern: Any, what: str) -> dict[str, Reply]:
        replies, (one, *_) = original(requests, pattern, what), requests.values()
        if ANNOUNCE_KEYS in one.masks:
            session = one.masks[ANNOUNCE_KEYS]["session"].numpy().tobytes().hex()
            text = announcement(SumId(FEDERATION, RUN, village.round, 0, 0, session), site, bytes(64))
            output = signing.sign(KeyFiles().load(village.folder / f"home-{site}"), text)
            upload = {
                "keys": torch.zeros(64, dtype=torch.uint8),
                "signature": torch.frombuffer(bytearray(output), dtype=torch.uint8),
            }
            replies[f"site-{site}"] = replace(replies[f"site-{site}"], upload=upload)
        return replies

    return send_requests


@pytest.mark.parametrize("what", ["of low order", "not signed"])
def test_a_site_whose_keys_are_none_is_left_out(what: str, tmp_path: Path) -> None:
    """With a point of low order nobody can agree, and what is not signed everybody refuses: all would fail over it."""
    village = Village(tmp_path, 4)
    if what == "of low order":
        village.send_requests = bad_key(village, 2)
        total = village.run_round()
    else:
        sum = village.sum()
        sum.keys = {**sum.keys, "site-2": sum.keys["site-1"]}  # what it showed when it joined is not what it signs with
        total = sum.total(village.trained(sum))
    assert np.array_equal(total.numpy(), exact(village, [0, 1, 3])[0])


def test_a_sum_that_a_site_has_spoiled_is_not_used(tmp_path: Path) -> None:
    """Shares of another key, and a vector under other masks: the round has no sum."""
    village = Village(tmp_path, 4)
    sum = village.sum()
    replies = village.trained(sum)
    noise = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63, 1208))
    spoiled = {**replies, "site-1": replace(replies["site-1"], upload={"sum": noise})}
    with pytest.raises(TooFewReplies, match="that cannot be unmasked"):
        sum.total(spoiled)


def dealt(count: int, **leaves: Any) -> Tree:
    """Return the messages before shares are dealt, with some leaves replaced."""
    wide = {"keys": 64, "signatures": 132, "lasting": 67}
    blank = {name: torch.zeros(count, each, dtype=torch.uint8) for name, each in wide.items()}
    return {DEAL_SHARES: {"asked": numbers(0, 1, 2), "sites": numbers(*range(count)), **blank, **leaves}}


MALFORMED: list[Tree] = [
    {"end": {"sites": numbers(0)}},
    {DEAL_SHARES: {"sites": numbers(0, 1, 2)}},
    {ANNOUNCE_KEYS: {"session": torch.zeros(31, dtype=torch.uint8)}},
    {ANNOUNCE_KEYS: {"session": torch.zeros(32)}},
    dealt(3, keys=torch.zeros(3, 63, dtype=torch.uint8)),
    dealt(3, keys=torch.zeros(2, 64, dtype=torch.uint8)),
    dealt(3, sites=torch.zeros(3)),
    dealt(3, sites=torch.tensor(3)),
    dealt(3, sites={}),
    dealt(3, asked=numbers(*range(9))),
    {MASK_UPDATE: {"sites": numbers(*range(9))}},
    {REVEAL_SHARES: {"survived": numbers(0, 1, 2), "shares": torch.zeros(3, 5, dtype=torch.uint8)}},
    {DEAL_SHARES: {}, MASK_UPDATE: {}},
]


@pytest.mark.parametrize("masks", MALFORMED, ids=range(len(MALFORMED)))
def test_upload_that_does_not_fit_the_sum_is_refused(masks: Tree) -> None:
    from fake_transport import make_terms

    with pytest.raises(RefusalError, match="for a secure sum is invalid: it"):
        secure_sum.check_masks(make_tree_spec(masks), make_terms(cohort=3, secure_aggregation=True))


def test_site_without_agreed_masks_is_not_in_the_sum() -> None:
    from fake_transport import TERMS

    secure_sum.check_masks({}, TERMS)
    with pytest.raises(RefusalError, match="the terms have no secure aggregation"):
        secure_sum.check_masks(make_tree_spec(dealt(1)), TERMS)


def test_secrets_of_a_site_are_only_in_a_file_of_its_owner(tmp_path: Path) -> None:
    village = Village(tmp_path, 4)
    until(village, REVEAL_SHARES)
    state_folder = tmp_path / "home-0"
    for path in (state_folder / "site.key", state_folder / RUN / SUMS_FOLDER / SECRET_FILE):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    held = village.secret(0)
    hidden = [held, *(derive_key(held, purpose) for purpose in ("channel", "private", "seed"))]
    notes = [each.read_bytes() for each in (state_folder / RUN).rglob("*.json")]
    assert len(notes) == 1
    for secret in hidden:
        assert not [note for note in [*notes, *village.seen] if secret in note or secret.hex().encode() in note]
    (state_folder / "site.key").write_bytes(b"short")
    with pytest.raises(UserError, match="is no private key"):
        village.participant(0)


def test_what_a_site_put_down_is_damaged(tmp_path: Path) -> None:
    village = Village(tmp_path, 4)
    first = stages(village)
    (path,) = (tmp_path / "home-0" / RUN / SUMS_FOLDER).glob("*.json")
    path.write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        village.reply_to_request(0, write_message(first[REVEAL_SHARES]))


def test_site_without_a_key_is_not_queried(tmp_path: Path) -> None:
    village = Village(tmp_path, 5)
    village.participant(1)
    is_selected = village.key(1).hex()
    output = {
        f"site-{k}": Acceptance(FEDERATION, VERSION, f"site-{k}", 1, 1, 0, key=key)
        for k, key in enumerate(["", is_selected, is_selected.upper(), is_selected[:-2], "zz" * 49, "ff" * 49])
    }
    assert lasting_keys(output) == {"site-1": bytes.fromhex(is_selected)}
    sum = village.sum()
    sum.keys = {name: key for name, key in sum.keys.items() if name in ("site-1", "site-3")}
    with pytest.raises(TooFewReplies, match="has 2 sites of 5 that could be asked, and a sum needs 4"):
        sum.start()
    assert not village.seen


# ---- whom a site takes part with: D5


def test_no_sum_is_of_fewer_sites_than_the_agreed_cohort(tmp_path: Path) -> None:
    """A server that leaves honest sites out, until one is alone with invented ones, is refused by each of them."""
    made = Village(tmp_path, 5, least=5)
    made.requests()
    begin = made.sum()
    begin.requests = dict(list(begin.requests.items())[:4])
    with pytest.raises(RefusalError, match="the terms have cohorts of 5"):
        begin.start()


class Forging(MaskedSum):
    """A server that replaces the keys of two sites by keys that it generated, as in the review; `sign` is with what it signs.

    With the private halves it would take the masks of these two off, and of three sites the third one's update is left.
    """

    sign: Callable[[int], Any]

    def _collect_keys(self, sites: Any) -> Any:
        cohort, names, signatures = super()._collect_keys(sites)
        keys = list(cohort.keys)
        texts = list(signatures)
        for at in (1, 2):
            keys[at] = compute_public_keys(bytes([at]) * 32)
            texts[at] = signing.sign(self.sign(at), announcement(cohort.sum_id, cohort.numbers[at], keys[at]))
        return replace(cohort, keys=tuple(keys)), names, texts


def forging(village: Village, lasting: bool) -> Forging:
    """Return the sum of such a server, which also replaces the lasting keys if `lasting`."""
    plain = village.sum()
    made = {k: signing.load_private_key(signing.generate_private_key()) for k in (1, 2)}
    shown = {f"site-{k}": signing.encode_public_key(key.public_key()) for k, key in made.items()} if lasting else {}
    forged = Forging(plain.requests, plain.numbers, plain.keys, plain.query_sites, plain.description)
    forged.sign = made.__getitem__
    original = Forging._collect_keys

    def announced_then_shown(self: Forging, requested: Any) -> Any:
        found = original(self, requested)
        self.keys = {**self.keys, **shown}
        return found

    forged._collect_keys = announced_then_shown.__get__(forged)
    return forged


@pytest.mark.parametrize("known", ["handed out", "remembered", "neither"])
def test_server_cannot_insert_its_keys(known: str, tmp_path: Path) -> None:
    """Keys that a site has not signed are refused; so is another lasting key, once a site knows the right one.
    `neither` is what is left: who never knew a key believes the first one, which its log shows."""
    village = Village(tmp_path, 3)
    village.requests()
    if known == "handed out":
        village.listed = tmp_path / "sites.pub"
        village.listed.write_bytes(b"".join(line(village, k) for k in range(3)))
    if known == "remembered":
        village.run_round()
        village.round += 1
    with pytest.raises(RefusalError, match="keys of site-1 for this sum that site-1 has not signed"):
        forging(village, lasting=False).start()
    village.round += 1
    if known == "neither":
        assert not list(tmp_path.rglob(KNOWN_KEYS_FILE))  # what was refused is not remembered
        # Site 1 sees that another is shown as its own.
        with pytest.raises(RefusalError, match="other keys of this site"):
            forging(village, lasting=True).start()
        assert [
            message
            for message in village.printed.texts
            if message.startswith("from now on the key of site-1 is SHA256:")
        ]
        return
    message = "than the file of keys has" if known == "handed out" else "than before"
    with pytest.raises(RefusalError, match=f"different key of site-1 .SHA256:.{{43}}. {message}"):
        forging(village, lasting=True).start()


def line(village: Village, k: int) -> bytes:
    """Return a site's line in the file of keys, as OpenSSH writes it."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = KeyFiles().load(village.folder / f"home-{k}").public_key()
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" site-{k}\n".encode()


def test_a_signature_is_of_one_site_one_sum_and_these_keys(tmp_path: Path) -> None:
    """Also on the other curves that Flower takes; nothing that is no key or no signature passes or raises."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    sum_id = SumId(FEDERATION, RUN, 3, 0, 0, "a" * 64)
    text = announcement(sum_id, 1, bytes(64))
    for curve in (ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()):
        key = ec.generate_private_key(curve)
        is_selected = signing.encode_public_key(key.public_key())
        output = signing.sign(key, text)
        assert signing.verify(is_selected, text, output)
        assert len(is_selected) <= signing.POINT_BYTES
        others = [(replace(sum_id, session="b" * 64), 1), (replace(sum_id, round=4), 1), (sum_id, 2)]
        assert not [each for each in others if signing.verify(is_selected, announcement(*each, bytes(64)), output)]
        assert not signing.verify(is_selected, announcement(sum_id, 1, b"x" * 64), output)
        for wrong in (bytes(132), b"", output[:-1] + bytes([output[-1] ^ 1])):
            assert not signing.verify(is_selected, text, wrong)
    assert not signing.verify(b"\x02" + bytes(48), text, output)
    odd = ec.generate_private_key(ec.SECP256K1())
    data = odd.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    with pytest.raises(ValueError, match="curve that Flower takes"):
        signing.load_private_key(data)


# ---- what a thief finds later: D6


def test_a_recorded_sum_cannot_be_opened_with_what_sites_keep(tmp_path: Path) -> None:
    """All that is sent is recorded, and after the sum every file of every site is stolen.
    During the sum the secret opens a site's update (so the test sees what it looks for); afterwards nothing kept does:
    each run of 32 bytes in any file, plain or in hexadecimal, is tried as the secret of each site."""
    village = Village(tmp_path, 4)
    sum = village.sum()
    replies = village.trained(sum)
    during = {k: village.secret(k) for k in range(4)}
    sum.total(replies)
    masking = sum._masking
    assert masking is not None
    whole = exact(village, [0])[0]

    def opens(secret: bytes) -> bool:
        party = Party(secret, 0, masking.cohort)
        hidden = replies["site-0"].upload["sum"].numpy().view(np.uint64)
        return np.array_equal((hidden - party.mask(np.zeros(len(hidden), "i8"), masking)).view("i8"), whole)

    assert opens(during[0])
    assert not opens(during[1])
    stolen = set[bytes]()
    for path in tmp_path.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            stolen |= {data[at : at + 32] for at in range(len(data) - 31)}
            texts = [bytes.fromhex(word) for word in re.findall("[0-9a-f]{64}", data.decode("utf-8", "replace"))]
            stolen |= set(texts)
    assert not stolen & set(during.values())
    expected = [key[:32] for key in masking.cohort.keys]
    assert not [
        each
        for each in stolen
        if compute_public_key(each) in expected or compute_public_key(derive_key(each, "channel")) in expected
    ]
    assert not list(tmp_path.rglob(SECRET_FILE))


def test_secrets_are_overwritten_even_of_a_failed_sum(tmp_path: Path) -> None:
    """The bytes on the disk are zeros before the file is gone: another name of the same file shows them."""
    village = Village(tmp_path, 4)
    until(village, REVEAL_SHARES)
    path = tmp_path / "home-0" / RUN / SUMS_FOLDER / SECRET_FILE
    os.link(path, tmp_path / "other")
    assert any((tmp_path / "other").read_bytes())
    village.round += 1
    until(village, DEAL_SHARES)  # the next sum
    assert not any((tmp_path / "other").read_bytes())
    os.link(path, tmp_path / "last")
    erase_secrets(tmp_path / "home-0")  # the federation is over
    assert not path.exists()
    assert not any((tmp_path / "last").read_bytes())

"""Rounds below quorum are repeated: with other sites, and as if the failed attempt had never been."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_contract import BATCHINGS, ROUNDS, build_simulation
from text_log import TextLog

from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.engine.loop import TooFewReplies
from halfmoon.federation.contract.sites import HASH, VERSION, make_remote_runtime
from halfmoon.federation.contract.small_federation import run_rounds, start_server, trees_equal
from halfmoon.federation.protocol.messages import FAILED, Refusal, Request, read_message, write_message
from halfmoon.federation.server.calls import RunIdentity, SiteCalls
from halfmoon.federation.server.connection import SiteReply
from halfmoon.federation.server.plan import Rules
from halfmoon.federation.server.runtime import RemoteRuntime
from halfmoon.federation.site.runtime import SiteMemory, SiteRuntime, parse_round_key, prune_memories
from halfmoon.methods.semifl import SemiFL

CPU = torch.device("cpu")
RUN = "a" * 32
GONE = "gone"
LOST = "lost"
NOISE = "noise"
OTHER = "other"
"""What happens to a request: the site never gets it; it does it, but no answer comes; noise comes; a wrong answer."""

Fate = Callable[[str, Request], str]


@dataclass
class Link:
    """A link to sites that remember on the disk, as real ones do; `fate` says what happens to a request, "" nothing."""

    sites: Mapping[str, SiteRuntime]
    folder: Path
    fate: Fate = lambda site, request: ""
    sent_requests: list[tuple[int, int, int, tuple[str, ...]]] = field(default_factory=list)

    def exchange(self, requests: Mapping[str, bytes], what: str) -> Mapping[str, SiteReply]:
        """Have the sites reply, last to first."""
        if not requests:
            return {}
        first = read_message(next(iter(requests.values())), Request)
        self.sent_requests.append((first.round, first.attempt, first.query, tuple(requests)))
        return {
            name: self._answer(name, read_message(data, Request)) for name, data in reversed(list(requests.items()))
        }

    def _answer(self, name: str, request: Request) -> SiteReply:
        fate = self.fate(name, request)
        if fate == GONE:
            return SiteReply(None, "it was away")
        memory_folder = self.folder / name / request.run
        at = (request.round, request.attempt, request.query)
        reply = self.sites[name].run_request(
            request, SiteMemory(memory_folder, at, parse_round_key(request.latest), CPU, pytest.fail)
        )
        prune_memories(memory_folder, parse_round_key(request.oldest))
        if fate == LOST:
            return SiteReply(None, "it did not answer in time")
        if fate == NOISE:
            return SiteReply(b"noise")
        return SiteReply(write_message(replace(reply, round=7) if fate == OTHER else reply))


class Stage(NamedTuple):
    """A federation whose clients are sites, and what it says."""

    method: Any
    server: Tree
    remote: RemoteRuntime
    link: Link
    heard: list[str]


Make = Callable[..., Stage]


@pytest.fixture
def stage(tmp_path: Path) -> Make:
    """Return what makes federations of a method: four sites, of which `cohort` run a round."""
    count: list[int] = []

    def made(
        name: str = "fedavg", fate: Fate = lambda site, request: "", cohort: int = 2, labels_at: str | None = None,
        rules: Rules | None = None, run: str = RUN,
    ) -> Stage:  # fmt: skip
        count.append(1)
        method, shared, simulation = build_simulation(name, "both", labels_at=labels_at, cohort=cohort)
        if isinstance(method, SemiFL):  # the statistics are queried of the cohort, whose quorum is the round's
            simulation.method = method = replace(method, sbn="cohort")
        remote, wire = make_remote_runtime(simulation, BATCHINGS["both"])
        link = Link(wire.sites, tmp_path / str(len(count)), fate)
        messages = list[str]()
        identity = RunIdentity(HASH, VERSION, run)
        remote.sites.calls = SiteCalls(
            link, remote.names, identity, rules or Rules(min_replies=2), log=TextLog(messages)
        )
        remote.cohorts.quarantine = remote.calls.quarantine
        return Stage(method, start_server(method, shared), remote, link, messages)

    return made


def turn(stage: Stage, number: int, server: Tree) -> tuple[Tree, list[int]]:
    """Run a round until it counts, as the only round loop does; return the server's tree and the cohort."""
    remote = stage.remote
    while True:
        remote.open(number)
        try:
            server = stage.method.round(remote.task, server, remote)
        except TooFewReplies as few:
            remote.retry_round(few)
        else:
            remote.record_server_bytes(0)
            remote.on_checkpoint(number + 1)
            return server, remote.close().cohort


def rounds(stage: Stage, count: int = ROUNDS) -> tuple[Tree, list[list[int]]]:
    """Run rounds; return the server's tree and the cohorts."""
    server = stage.server
    drawn = list[list[int]]()
    for number in range(count):
        server, cohort = turn(stage, number, server)
        drawn.append(cohort)
    return server, drawn


def forced(stage: Stage, number: int, server: Tree, cohort: list[int]) -> Tree:
    """Run a round with this cohort."""
    stage.remote.open(number)
    stage.remote.cohort = torch.tensor(cohort)
    server = stage.method.round(stage.remote.task, server, stage.remote)
    stage.remote.record_server_bytes(0)
    stage.remote.on_checkpoint(number + 1)
    stage.remote.close()
    return server


@cache
def cohorts(cohort: int) -> list[list[int]]:
    method, shared, simulation = build_simulation("fedavg", "both", cohort=cohort)
    return [
        result.report.cohort for result in run_rounds(method, simulation, start_server(method, shared), range(ROUNDS))
    ]


def failing(number: int, attempts: int, how: str, count: int = 1) -> Fate:
    """Return a fate of the first `count` sites that are queried in the first attempts of a round."""
    hit: dict[int, set[str]] = {}

    def fate(site: str, request: Request) -> str:
        seen = hit.setdefault(request.attempt, set())
        if request.round != number or request.attempt >= attempts or (len(seen) >= count and site not in seen):
            return ""
        seen.add(site)
        return how

    return fate


@pytest.mark.parametrize("cohort", [1, 2, 3, 4])
def test_undisturbed_cohorts_are_those_of_a_simulation(stage: Make, cohort: int) -> None:
    scenery = stage(cohort=cohort, rules=Rules())
    assert rounds(scenery)[1] == cohorts(cohort)
    assert [(number, attempt) for number, attempt, _, _ in scenery.link.sent_requests] == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("how", [GONE, LOST, NOISE, OTHER])
def test_round_below_quorum_is_repeated_with_different_sites(stage: Make, how: str) -> None:
    """Two of four run, both have to reply. The one that fails is not in the second attempt, for others are there."""
    scenery = stage(fate=failing(1, 1, how))
    server, _ = turn(scenery, 0, scenery.server)
    server, second = turn(scenery, 1, server)
    (_, _, _, first), (_, attempt, _, repeated) = scenery.link.sent_requests[1:]
    assert first == tuple(f"site-{k}" for k in cohorts(2)[1]), "the first attempt is the simulation's"
    failed = first[-1]  # replied last to first
    assert attempt == 1
    assert failed not in repeated
    assert [f"site-{k}" for k in second] == list(repeated)
    text = "round 2 is repeated, attempt 2: round 2, query 1 (train) has 1 usable replies of 2, and 2 are needed."
    assert text in scenery.heard
    _, third = turn(scenery, 2, server)
    assert third == cohorts(2)[2], "what comes after is drawn as if nothing had happened"


def test_failed_site_is_queried_anew_if_too_few_remain(stage: Make) -> None:
    """Of four sites three run; two fail at first, then there are two others and one of these. Cohorts are sorted."""
    scenery = stage(fate=failing(0, 1, GONE, 2), cohort=3, rules=Rules(min_replies=3))
    _, cohort = turn(scenery, 0, scenery.server)
    (_, _, _, first), (_, _, _, repeated) = scenery.link.sent_requests
    failed = set(first[-2:])
    others = {f"site-{k}" for k in range(4)} - failed
    assert others < set(repeated)
    assert len(set(repeated) & failed) == 1
    assert cohort == sorted(cohort)


def test_default_quorum_is_half_of_the_cohort(stage: Make) -> None:
    """Two of four reply: the round counts, with those two."""
    scenery = stage(fate=failing(0, 9, GONE, 2), cohort=4, rules=Rules())
    _, cohort = turn(scenery, 0, scenery.server)
    assert cohort == [0, 1]
    assert len(scenery.link.sent_requests) == 1


@pytest.mark.parametrize("attempts", [1, 3])
def test_after_so_many_attempts_all_stops(stage: Make, attempts: int) -> None:
    scenery = stage(fate=lambda site, request: GONE, rules=Rules(min_replies=2, attempts=attempts))
    with pytest.raises(
        TooFewReplies, match=r"^round 1, query 1 \(train\) has 0 usable replies of 2, and 2 are needed\.$"
    ):
        turn(scenery, 0, scenery.server)
    assert [attempt for _, attempt, _, _ in scenery.link.sent_requests] == list(range(attempts))
    assert len(scenery.heard) == attempts - 1 + 2 * attempts


def test_round_waits_for_enough_sites(stage: Make) -> None:
    """Before each attempt but the first, as many as the round needs."""
    waited: list[int] = []
    scenery = stage(fate=failing(0, 2, GONE), cohort=3, rules=Rules(min_replies=3))
    scenery.remote.calls.wait_for_sites = waited.append
    turn(scenery, 0, scenery.server)
    assert waited == [3, 3]


SHELVES = [("fedmatch", None), ("semifed", None), ("semifl", "server"), ("fedmatch", "server"), ("fedloke", None)]
"""Methods that keep something on the server's shelf, for the server's own labels, or at the sites."""


def everything(scenery: Stage) -> Tree:
    keys = scenery.remote.store.keys()
    return {key: scenery.remote.store.get(key) or {} for key in keys if key != "visits"}


@pytest.mark.parametrize(("name", "labels_at"), SHELVES)
def test_a_failed_attempt_never_happened(stage: Make, name: str, labels_at: str | None) -> None:
    """In the second round a reply of the last trip is lost, twice; then it is run. All equals, in every bit, a run
    in which this round had the last cohort from the start: the server's tree, its shelf, its memory, and the rounds
    that follow, to which the sites bring what they remember."""
    scenery = stage(name, failing_last(name), labels_at=labels_at)
    server, first = turn(scenery, 0, scenery.server)
    before = everything(scenery)
    seen: list[bool] = []
    scenery.remote.calls.wait_for_sites = lambda wanted: seen.append(trees_equal(everything(scenery), before))
    server, second = turn(scenery, 1, server)
    assert seen == [True, True], "what counts is as it was before the attempt"
    server, third = turn(scenery, 2, server)
    calm = stage(name, labels_at=labels_at)
    other = calm.server
    for number, cohort in enumerate((first, second, third)):
        other = forced(calm, number, other, cohort)
    assert trees_equal(server, other)
    assert trees_equal(everything(scenery), everything(calm))


def failing_last(name: str) -> Fate:
    """Return a fate: in the second round's first two attempts, one site's reply is lost in the last trip."""
    last = 2 if name == "semifl" else 0  # its training, the server's own, then the statistics
    hit: dict[int, str] = {}

    def fate(site: str, request: Request) -> str:
        if request.round != 1 or request.attempt > 1 or request.query < last:
            return ""
        return LOST if hit.setdefault(request.attempt, site) == site else ""

    return fate


def test_sites_of_another_run_have_no_memory_in_this_one(stage: Make) -> None:
    """A federation that was disturbed is repeated, into another folder, in which sites remember nothing of it."""
    first = stage("fedloke", cohort=2)
    second = stage("fedloke", cohort=2, run="b" * 32)
    second.link.folder = first.link.folder
    first.link.fate = failing(0, 1, LOST)
    third = stage("fedloke", cohort=2)
    servers = [rounds(scenery)[0] for scenery in (first, second, third)]
    assert trees_equal(*servers[1:])
    assert not trees_equal(*servers[:2])


def test_discarded_reply_leaves_no_memory(stage: Make) -> None:
    """A site works in the first round, but too late. In the next ones it is as a client that was silent in that round.
    FedLoKe's sites remember a model each: with the late visit in it, the result is another one."""
    rules = Rules(min_replies=1)
    lost, gone = (rounds(stage("fedloke", failing(0, 1, how), cohort=4, rules=rules))[0] for how in (LOST, GONE))
    assert trees_equal(lost, gone)


@pytest.mark.parametrize("name", ["semifl", "feddb", "semifed"])
def test_method_continues_after_losing_a_site_in_a_round(stage: Make, name: str) -> None:
    """The site that fails in a trip is queried nothing more in that round; in the next one it is back."""
    scenery = stage(name, failing(1, 9, GONE), cohort=4, rules=Rules(min_replies=2))
    server, drawn = rounds(scenery)
    assert [len(cohort) for cohort in drawn] == [4, 3, 4]
    assert max(attempt for _, attempt, _, _ in scenery.link.sent_requests) == 0
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(server) if leaf.is_floating_point())


def test_site_lost_between_queries_is_not_queried_in_that_round(stage: Make) -> None:
    """SemiFL with labels at the server: training first, the statistics of the average then."""
    scenery = stage("semifl", failing(1, 9, GONE), cohort=4, labels_at="server")
    rounds(scenery, 2)
    queries = [sites for number, _, _, sites in scenery.link.sent_requests if number == 1]
    assert [len(sites) for sites in queries] == [4, 3]


def test_strikes_set_a_site_aside(stage: Make) -> None:
    """Noise twice, where two are the limit: the site is named, counted, and drawn no more; silence is no strike."""
    scenery = stage(
        fate=lambda site, request: NOISE if site == "site-2" else GONE if site == "site-1" else "",
        cohort=4, rules=Rules(min_replies=1, strikes=2),
    )  # fmt: skip
    rounds(scenery)
    whole = ("site-0", "site-1", "site-2", "site-3")
    assert [sites for _, _, _, sites in scenery.link.sent_requests] == [whole, whole, ("site-0", "site-1", "site-3")]
    rows = {row.name: (row.count, row.quarantined) for row in scenery.remote.calls.quarantine.refusals()}
    assert rows == {"site-0": (0, False), "site-1": (0, False), "site-2": (2, True), "site-3": (0, False)}
    assert sum("site-2 is set aside after 2 unusable answers" in text for text in scenery.heard) == 1


def test_absent_site_does_not_change_the_draw_of_the_rest(stage: Make) -> None:
    scenery = stage(cohort=2, rules=Rules(min_replies=2, strikes=1))
    aside = next(k for k in range(4) if k not in cohorts(2)[0])
    scenery.remote.calls.quarantine.count_refusal(f"site-{aside}", 0, "noise")
    for cohort, before in zip(rounds(scenery)[1], cohorts(2), strict=True):
        assert aside not in cohort
        assert len(cohort) == 2
        if aside not in before:
            assert cohort == before


def test_where_every_site_is_aside_all_stops(stage: Make) -> None:
    scenery = stage(fate=lambda site, request: NOISE, cohort=4, rules=Rules(strikes=1, attempts=5))
    with pytest.raises(TooFewReplies, match="0 usable replies of 4"):
        turn(scenery, 0, scenery.server)
    assert len(scenery.link.sent_requests) == 1
    with pytest.raises(TooFewReplies, match="every site is set aside"):
        scenery.remote.open(0)


def test_a_refusal_of_a_site_is_no_strike(stage: Make) -> None:
    """A full disk is a site's bad day: it has no part in the round, and is queried in the next."""
    scenery = stage(cohort=4, rules=Rules(strikes=1))
    whole = scenery.link.exchange

    def exchange(requests: Mapping[str, bytes], what: str) -> Mapping[str, SiteReply]:
        full = SiteReply(write_message(Refusal(VERSION, FAILED, "its disk: No space left on device.")))
        return {**whole(requests, what), "site-3": full}

    scenery.link.exchange = exchange
    _, cohort = turn(scenery, 0, scenery.server)
    assert cohort == [0, 1, 2]
    assert not scenery.remote.calls.quarantine.sites
    assert "site-3 has no part in round 1: its disk: No space left on device." in scenery.heard


def test_report_of_a_failed_attempt_is_discarded(stage: Make) -> None:
    """The samples of the round are those of the attempt that counts: a mean over two sites, not over three."""
    scenery = stage(fate=failing(0, 1, GONE))
    remote = scenery.remote
    remote.open(0)
    with pytest.raises(TooFewReplies) as few:
        scenery.method.round(remote.task, scenery.server, remote)
    remote.retry_round(few.value)
    remote.open(0)
    scenery.method.round(remote.task, scenery.server, remote)
    report = remote.close()
    calm = stage()
    calm.remote.open(0)
    calm.remote.cohort = torch.tensor(report.cohort)
    calm.method.round(calm.remote.task, calm.server, calm.remote)
    expected = calm.remote.close()
    assert {name: float(each.total) for name, each in report.samples.items()} == {
        name: float(each.total) for name, each in expected.samples.items()
    }


@pytest.mark.parametrize("rules", [Rules(strikes=1), Rules(min_replies=2, strikes=1)])
@pytest.mark.parametrize("how", ["aside", "away"])
def test_statistics_of_all_sites_are_taken_without_one(stage: Make, how: str, rules: Rules) -> None:
    """SemiFL asks all sites a cohort's number at a time, 3 + 1 here: a group of one may have nobody in it."""
    away = GONE if how == "away" else ""
    result = stage("semifl", lambda site, request: away if site == "site-3" else "", cohort=3, rules=rules)
    method = replace(result.method, sbn="all")
    result.remote.method = method
    if how == "aside":
        result.remote.calls.quarantine.count_refusal("site-3", 0, "noise")
    assert not [cohort for cohort in rounds(result._replace(method=method))[1] if 3 in cohort]


def test_a_rate_whose_sites_are_all_away_is_left_out(stage: Make) -> None:
    """HeteroFL asks the sites of each rate apart."""
    result = stage("heterofl", lambda site, request: GONE if site == "site-3" else "", cohort=4, rules=Rules())
    assert rounds(result)[1] == [[0, 1, 2]] * ROUNDS

"""Client-level differential privacy: clipping, noise, what it costs in epsilon, and the ledger that survives kills."""

import hmac
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch
from recording_methods import make_context
from test_run_folder import WHEN, killed

from halfmoon.aggregation.privacy import accounting
from halfmoon.aggregation.privacy.accounting import CohortDraw
from halfmoon.aggregation.privacy.clipping import ClippedMethod, ClippedUpdate, clip_upload
from halfmoon.aggregation.privacy.dp import DifferentialPrivacy, PrivacyPlan, compute_spent_epsilon, sum_clipped_updates
from halfmoon.aggregation.privacy.releases import Release
from halfmoon.aggregation.secure import csprng
from halfmoon.api.uploads import Upload
from halfmoon.cli import main as cli
from halfmoon.config import schema as settings
from halfmoon.config.schema import Config
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.engine import loop
from halfmoon.engine.loop import Experiment
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.federation.contract.small_federation import (
    NETWORK,
    make_dataset,
    make_simulation,
    make_split,
    make_task,
    max_difference,
    run_rounds,
    start_server,
)
from halfmoon.federation.server.calls import RunIdentity, SiteCalls
from halfmoon.federation.server.cohorts import Quarantine
from halfmoon.federation.server.runtime import RemoteRuntime
from halfmoon.federation.server.server import FederationServer, describe_round
from halfmoon.methods import registry
from halfmoon.runs import factory, runner
from halfmoon.runs.privacy_ledger import LEDGER, Ledger
from halfmoon.runs.progress import Progress, describe_progress
from halfmoon.storage.run_folder import RunFolder
from halfmoon.storage.state_store import TreeStore

pytestmark = pytest.mark.skipif(find_spec("dp_accounting") is None, reason="needs dp_accounting")

SUMS = [name for name in registry.names() if not registry.entry(name).individual_uploads]
PROMISE = PrivacyPlan(clip=0.5, noise=1.0, delta=1e-5, budget=None, cohort=3, clients=4)
GROUPED = replace(NETWORK, norm="group")


def private(path: Path, promise: PrivacyPlan = PROMISE, secret: bytes = b"seed 3") -> DifferentialPrivacy:
    return DifferentialPrivacy(promise, secret, Ledger(path / LEDGER))


def vector(*rows: list[float]) -> Upload:
    return Upload({"params": {"w": torch.tensor(rows)}}, torch.arange(1.0, len(rows) + 1))


ORIGIN = {"params": {"w": torch.zeros(2)}}


def test_the_stream_is_aes_in_counter_mode_from_zero() -> None:
    """E(K, 0), E(K, 1), E(K, 2) for K = 0 of 256 bits, as the GCM specification's test cases 13 and 14 print them."""
    blocks = (
        "dc95c078a2408989ad48a21492842087"
        "530f8afbc74536b9a963b4f1c4cb738b"
        "cea7403d4d606b6e074ec5d3baf39d18"
    )  # fmt: skip
    assert csprng.generate_keystream(bytes(32), 6).tobytes().hex() == blocks
    text = np.frombuffer(bytes.fromhex(blocks), "<u8")
    uniform = [(2 * (int(word) >> 12) + 1) / 2**53 for word in text]
    assert csprng.generate_gaussians(bytes(32), 6) == pytest.approx(scipy.stats.norm.ppf(uniform), abs=1e-12)


def test_subkey_depends_on_every_input_and_its_position() -> None:
    """HMAC-SHA256 of the facts, each after its length: no two lists of facts run together."""
    text = b"\x00" * 7 + b"\x05" + b"noise" + b"\x00" * 7 + b"\x02" + b"12"
    assert csprng.derive_subkey(b"k", "noise", 12) == hmac.new(b"k", text, sha256).digest()
    keys = {
        csprng.derive_subkey(b"k", *metadata)
        for metadata in (("a", "bc"), ("ab", "c"), ("abc",), ("a", "bc", ""), ("bc", "a"))
    }
    assert len(keys) == 5


def test_noise_is_standard_normal_and_independent_of_other_keys() -> None:
    """Kolmogorov-Smirnov against N(0, 1); the correlation of the noise of two keys is that of chance."""
    one, two = (csprng.generate_gaussians(csprng.derive_subkey(b"secret", "noise", k), 200_000) for k in (0, 1))
    assert scipy.stats.kstest(one, "norm").pvalue > 0.01
    assert scipy.stats.kstest(two, "norm").pvalue > 0.01
    assert abs(np.corrcoef(one, two)[0, 1]) < 4 / math.sqrt(len(one))
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 4 / math.sqrt(len(one))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_an_update_is_scaled_down_to_the_bound(dtype: torch.dtype, size: float) -> None:
    """numpy: start + update * min(1, C / |update|) over all leaves together; the norm of what is sent is at most C."""
    g = torch.Generator().manual_seed(int(size * 1000))
    broadcast = {
        "a": torch.randn(40, 5, generator=g).to(dtype),
        "b": {"c": torch.randn(7, generator=g).to(dtype)},
        "e": {},
    }
    upload = tree.map(lambda leaf: (leaf.double() + size * torch.randn(leaf.shape, generator=g)).to(dtype), broadcast)
    broadcast = {**broadcast, "steps": torch.tensor(3)}
    upload = {**upload, "steps": torch.tensor(4)}
    sent = clip_upload(Upload(upload, torch.tensor(9.0), {"new": torch.ones(3)}), broadcast, 1.0)
    got = sent.update
    del broadcast["steps"]

    def change(new: Tree) -> tuple[dict[str, np.ndarray], float]:
        there = tree.flatten(new)
        leaves = {path: (there[path].double() - old.double()).numpy() for path, old in tree.flatten(broadcast).items()}
        return leaves, math.sqrt(math.fsum(float((leaf**2).sum()) for leaf in leaves.values()))

    (moved, length), (actual, sent_length) = change(upload), change(got)
    assert sent_length <= 1.0
    for path, leaf in actual.items():
        # What is rounded away of weights of about 3, or was left room for.
        assert leaf == pytest.approx(moved[path] * min(1.0, 1.0 / length), abs=40 * torch.finfo(dtype).eps)
    if length <= 1.0:
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(got), tree.leaves(upload), strict=True))
    assert got["e"] == {}
    assert (float(sent.weight), sent.aux["new"].tolist(), int(got["steps"])) == (9.0, [1.0, 1.0, 1.0], 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rounding_never_lengthens_a_clipped_update_beyond_the_bound(dtype: torch.dtype) -> None:
    """Rounded up as often as down: without room for it, about half of these would be over."""
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        broadcast, upload = (torch.randn(50, generator=g).to(dtype) for _ in range(2))
        sent = clip_upload(Upload({"w": upload}, torch.ones(())), {"w": broadcast}, 0.3).update["w"]
        assert math.sqrt(math.fsum((sent.double() - broadcast.double()).square().tolist())) <= 0.3


def test_clip_norm_below_the_rounding_of_the_model_gives_a_zero_update() -> None:
    """Weights of 1e6 in float32 cannot move by 1e-3: an update that was clipped to that is zero."""
    sent = clip_upload(Upload({"w": torch.full((3,), 1e6 + 7)}, torch.ones(())), {"w": torch.full((3,), 1e6)}, 1e-3)
    assert sent.update["w"].tolist() == [1e6] * 3


@pytest.mark.parametrize("name", ["feddure", "fedavg-fixmatch", "fedloke", "fml"])
def test_loop_equals_vmap_behind_clipping(name: str) -> None:
    got = {}
    for executor, norm in (("loop", 0.05), ("vmap", 0.05), ("loop", 1e9)):
        made = ClippedMethod(registry.make(name), norm)
        shared = make_task(GROUPED)
        held = make_dataset(all_labels=registry.entry(name).all_labels)
        got[executor, norm] = run_rounds(
            made, make_simulation(made, shared, held, executor=executor), start_server(made, shared), range(1)
        )
    one, two, free = got.values()
    assert max_difference(one[-1].server, two[-1].server) < 1e-9
    assert max_difference(one[-1].server, free[-1].server) > 1e-3


def test_clipped_client_update_differs_only_in_its_upload() -> None:
    for name in SUMS:
        shared = make_task(GROUPED)
        for key, client_update in registry.make(name).client_updates(shared).items():
            around = ClippedMethod(registry.make(name), 1.0).client_updates(shared)[key]
            assert isinstance(around, ClippedUpdate)
            assert (around.task, around.requirements) == (client_update.task, client_update.requirements)
            assert (around.passes(3, 5), around.images_outside_steps(3, 5)) == (
                client_update.passes(3, 5),
                client_update.images_outside_steps(3, 5),
            )
            later = replace(around, task=shared.at(7))
            assert later.client_update.task.round == 7
            assert replace(later, task=shared) == around


def test_replacing_one_client_moves_the_sum_by_at_most_twice_the_bound() -> None:
    """Whatever one client sends: huge, tiny, nothing, NaN, infinite, float32's largest."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 30, generator=g) * torch.tensor([0.01, 0.1, 1.0, 10.0, 1e4])[:, None]
    broadcast = {"params": {"w": torch.randn(30, generator=g)}}
    sums = []
    odd = [torch.full((30,), value) for value in (0.0, math.nan, math.inf, 3e38)]
    for other in (rows[0], -rows[4], rows[4], *odd):
        mine = torch.cat([rows[1:], other[None]]) + broadcast["params"]["w"]
        kept_rows, total = sum_clipped_updates(
            make_context(broadcast, 5), Upload({"params": {"w": mine}}, torch.ones(5)), 0.5
        )
        assert kept_rows == ([0, 1, 2, 3, 4] if bool(other.isfinite().all()) else [0, 1, 2, 3])
        sums.append(total["params/w"])
    distance = [float((a - b).norm()) for a in sums for b in sums]
    assert 0.9 < max(distance) <= 1.0 + 1e-12


def test_mean_is_over_the_cohort_and_missing_clients_count_as_zero(tmp_path: Path) -> None:
    """By hand: updates (3, 4) and (0, 0.25) under a bound of 0.5 are (0.3, 0.4) and (0, 0.25); four were queried."""
    server = private(tmp_path, PROMISE._replace(noise=1e-12))
    kept_rows, upload = server.process_uploads(make_context(ORIGIN, 2, 4), vector([3.0, 4.0], [0.0, 0.25]))
    assert list(kept_rows) == [0, 1]
    assert upload.weight.tolist() == [1.0, 1.0]
    for row in upload.update["params"]["w"]:
        assert row.tolist() == pytest.approx([0.3 / 4, 0.65 / 4], abs=1e-7)


def test_the_noise_has_the_standard_deviation_that_is_promised(tmp_path: Path) -> None:
    """z C / asked on the mean; normal; another one in another round, under another secret, of another sum."""
    broadcast = {"w": torch.zeros(20_000, dtype=torch.float64)}
    promise = PROMISE._replace(clip=0.25, noise=3.0)

    def noise(secret: bytes = b"a", value: float = 0.0, **changes: Any) -> np.ndarray:
        server = private(tmp_path / str(next(number)), promise, secret)
        upload = Upload({"w": torch.full((2, 20_000), value / 20_000, dtype=torch.float64)}, torch.ones(2))
        return (
            server.process_uploads(make_context(broadcast, 2, 5, **changes), upload)[1].update["w"][0].numpy()
            - 2 * value / 20_000 / 5
        )

    number = count()
    for k in range(9):
        (tmp_path / str(k)).mkdir()
    all_of_them = [noise(), noise(secret=b"b"), noise(value=1e-9), noise(round=1), noise(attempt=1), noise(query=1)]
    for each in all_of_them:
        assert scipy.stats.kstest(each / (3.0 * 0.25 / 5), "norm").pvalue > 0.001
    distance = np.abs(np.corrcoef(all_of_them)[np.triu_indices(6, 1)])
    assert distance.max() < 5 / math.sqrt(20_000)
    assert noise() == pytest.approx(all_of_them[0], abs=0)


def test_what_is_no_update_stops_the_run(tmp_path: Path) -> None:
    upload = vector([1.0, 0.0])._replace(aux={"mean_prediction": torch.ones(1, 2)})
    with pytest.raises(UserError, match="'mean_prediction' in addition to their update"):
        private(tmp_path).process_uploads(make_context(ORIGIN, 1), upload)


@pytest.mark.parametrize("name", SUMS)
def test_no_method_sends_more_than_an_update_and_a_weight(name: str, tmp_path: Path) -> None:
    """Run with the server's half; where nobody is noised or clipped much, all that is left is equal weights."""
    made = ClippedMethod(registry.make(name), 1e6)
    shared = make_task(GROUPED)
    held = make_dataset(all_labels=registry.entry(name).all_labels)
    aggregator = private(tmp_path, PROMISE._replace(clip=1e6, noise=1e-20))
    there = make_simulation(made, shared, held, aggregators=[aggregator])
    (noised,) = run_rounds(made, there, start_server(made, shared), range(1))
    plain = make_simulation(made, shared, held)
    plain.open(0)
    broadcast = {name: leaf for name, leaf in start_server(made, shared).items() if name != "round"}
    upload = plain.query("train", {**broadcast, "gate": torch.tensor(1.0)} if "feddure" in name else broadcast)
    mean = tree.map(lambda leaf: leaf.mean(0), upload.update["params"])
    assert max_difference(noised.server["params"], mean) < 1e-9
    assert noised.report.aggregator is not None
    assert set(noised.report.aggregator) == {"epsilon", "delta"}


def gaussian(noise: float, rounds: int, delta: float) -> float:
    """Return the exact epsilon of rounds without sampling (Balle and Wang 2018, Theorem 8): mu = 2 sqrt(T) / z."""
    mu = 2 * math.sqrt(rounds) / noise

    def excess(epsilon: float) -> float:
        upper = scipy.special.ndtr(mu / 2 - epsilon / mu)
        return upper - math.exp(epsilon) * scipy.special.ndtr(-mu / 2 - epsilon / mu) - delta

    root: Any = scipy.optimize.brentq(excess, 0, 200)
    return float(root)


def test_epsilon_equals_the_published_value() -> None:
    """DP-SGD on MNIST (tensorflow_privacy's tutorial): 60 epochs in batches of 256 of 60,000, z = 1.1: epsilon 3.01.
    And the library's own test of its conversion: 4.530877117 sensitivities of noise, ours of twice that, are (1, 1e-6).
    """
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    event = dp_event.PoissonSampledDpEvent(256 / 60_000, dp_event.GaussianDpEvent(1.1))
    made = RdpAccountant().compose(dp_event.SelfComposedDpEvent(event, 60 * 60_000 // 256))
    assert 2.5 < made.get_epsilon(1e-5) <= 3.01
    assert accounting._compute_renyi_epsilon(Counter({(2 * 4.530877117, None): 1}), 1e-6) == pytest.approx(1, rel=2e-3)


@pytest.mark.parametrize(("noise", "rounds"), [(2.0, 1), (8.0, 10), (20.0, 50), (60.0, 30)])
def test_everybody_in_every_round_costs_what_the_gaussian_mechanism_does(noise: float, rounds: int) -> None:
    assert accounting.compute_planned_epsilon(20, 20, rounds, noise, 1e-5) == pytest.approx(
        gaussian(noise, rounds, 1e-5), rel=1e-9
    )


@pytest.mark.parametrize(("cohort", "noise"), [(10, 1.5), (10, 4.0), (50, 4.0), (90, 3.0), (1, 1.0)])
def test_a_drawn_cohort_costs_no_less_than_two_neighbors_differ(cohort: int, noise: float) -> None:
    """Renyi divergence, by numbers, where a client that sent +C sends -C: of a mixture, as it is drawn or not.
    With half the sensitivity (C in place of 2 C) the count would be below it."""
    q = cohort / 100
    worse = 0
    curve = accounting.compute_renyi_curve(noise, CohortDraw(cohort, 100))
    halved = accounting.compute_renyi_curve(2 * noise, CohortDraw(cohort, 100))
    for order in (2, 4, 8, 16):
        at = accounting.ORDERS.index(float(order) if order < 11 else order)

        def density(x: float, way: float) -> float:
            near, far = (math.exp(-(((x - mean) / noise) ** 2) / 2) for mean in (0, way))
            return ((1 - q) * near + q * far) / (noise * math.sqrt(2 * math.pi))

        def moment(x: float, order: int = order) -> float:
            return density(x, 1) * (density(x, 1) / density(x, -1)) ** (order - 1)

        value, _ = scipy.integrate.quad(moment, -30 * noise, 30 * noise, limit=400)
        true = math.log(value) / (order - 1)
        assert true <= curve[at] * (1 + 1e-6)
        worse += true > halved[at]
    assert worse or cohort < 50


def naive(q: float, noise: float, order: int) -> float:
    """Return Theorem 9 of Wang, Balle and Kasiviswanathan 2019 for whole orders: the bound for any mechanism."""

    def plain(a: int) -> float:
        return 2 * a / noise**2  # a (2 C)^2 / (2 z^2 C^2)

    total = 1 + q**2 * math.comb(order, 2) * min(4 * math.expm1(plain(2)), 2 * math.exp(plain(2)))
    total += sum(2 * q**j * math.comb(order, j) * math.exp((j - 1) * plain(j)) for j in range(3, order + 1))
    return math.log(total) / (order - 1)


def test_sampled_cohort_costs_at_most_the_general_theorem() -> None:
    """The general bound, written naively, is above what is counted, and close to it where sampling matters."""
    for cohort, noise in ((10, 4.0), (50, 8.0), (5, 2.0)):
        curve = accounting.compute_renyi_curve(noise, CohortDraw(cohort, 100))
        for order in (2, 3, 6, 10, 12):
            at = accounting.ORDERS.index(float(order) if order < 11 else order)
            bound = naive(cohort / 100, noise, order)
            assert curve[at] <= bound * (1 + 1e-9)
            if order == 2:
                assert curve[at] == pytest.approx(bound, rel=1e-9)


def test_curves_add_up_to_what_the_library_composes() -> None:
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    plain = dp_event.GaussianDpEvent(3.0)
    made = RdpAccountant(accounting.ORDERS, NeighboringRelation.REPLACE_ONE)
    made.compose(dp_event.SampledWithoutReplacementDpEvent(100, 10, plain), 7)
    made.compose(plain, 2)
    made.compose(dp_event.SampledWithoutReplacementDpEvent(40, 2, dp_event.GaussianDpEvent(2.0)))
    kinds = [(6.0, CohortDraw(10, 100))] * 7 + [(6.0, None)] * 2 + [(4.0, CohortDraw(2, 40))]
    assert accounting.compute_epsilon(kinds, 1e-5) == pytest.approx(made.get_epsilon(1e-5), rel=1e-12)
    assert accounting.compute_epsilon([], 1e-5) == 0.0


def test_more_rounds_a_larger_share_and_less_noise_cost_more() -> None:
    def costs(cohort: int = 10, clients: int = 100, rounds: int = 10, noise: float = 4.0, delta: float = 1e-5) -> float:
        return accounting.compute_planned_epsilon(cohort, clients, rounds, noise, delta)

    assert costs() < costs(rounds=11) < costs(rounds=40)
    assert costs() < costs(cohort=11) < costs(cohort=50) < costs(cohort=100)
    assert costs() < costs(noise=3.9) < costs(noise=1.0)
    assert costs() < costs(delta=1e-6)
    assert costs(cohort=100) == costs(cohort=50, clients=50)
    assert math.isfinite(costs(noise=1e-3))
    # The theorem's bound alone would make nine of ten dearer than all ten.
    assert costs(cohort=9, clients=10, noise=1.0) <= costs(cohort=10, clients=10, noise=1.0)


def test_noise_for_an_epsilon_is_the_smallest_of_three_digits() -> None:
    noise = accounting.find_noise(3.0, 10, 100, 20, 1e-5)
    assert (
        accounting.compute_planned_epsilon(10, 100, 20, noise, 1e-5)
        <= 3.0
        < accounting.compute_planned_epsilon(10, 100, 20, 0.99 * noise, 1e-5)
    )
    assert float(f"{noise:.3g}") == noise
    with pytest.raises(UserError, match="no noise up to"):
        accounting.find_noise(1e-9, 100, 100, 20, 1e-12)


DRAWN = CohortDraw(3, 40)


def release(round: int, mark: str = "", sampled: CohortDraw | None = DRAWN, **changes: Any) -> Release:
    return Release(round, 0, 0, sampled, 4.0, mark or f"{round:02x}")._replace(**changes)


def test_two_sums_of_one_round_are_counted_as_of_a_known_cohort() -> None:
    """A random cohort lowers the price of a round that told one sum; of one that told two, none of both."""
    once = [release(0), release(1)]
    assert compute_spent_epsilon(once, 1e-5) == accounting.compute_epsilon([(4.0, CohortDraw(3, 40))] * 2, 1e-5)
    twice = [*once, release(1, "ff", query=1)]
    assert compute_spent_epsilon(twice, 1e-5) == accounting.compute_epsilon(
        [(4.0, CohortDraw(3, 40)), (4.0, None), (4.0, None)], 1e-5
    )
    assert compute_spent_epsilon(twice, 1e-5) > 2 * compute_spent_epsilon(once, 1e-5)


def uniform(drawn: np.ndarray, clients: int, cohort: int) -> float:
    """Return the p-value of how often each client was drawn, (rounds, cohort), without replacement."""
    counts = np.bincount(drawn.ravel(), minlength=clients)
    q = cohort / clients
    value = ((counts - len(drawn) * q) ** 2).sum() / (len(drawn) * q * (1 - q)) * (clients - 1) / clients
    return float(scipy.stats.chi2.sf(value, clients - 1))


CLIENTS = 12
COHORT = 3
DRAWS = 2000


def remote(**options: Any) -> RemoteRuntime:
    """Return a server of twelve sites that are not there."""

    class Nobody:
        def exchange(self, requests: Any, what: str) -> Any:
            raise AssertionError("nobody is asked")

    shared = make_task(GROUPED)
    names = [f"site-{k}" for k in range(CLIENTS)]
    settings = RuntimeSettings(COHORT, options.pop("seed", 5), cohort_secret=options.pop("secret", None))
    calls = SiteCalls(Nobody(), names, RunIdentity("", "", ""), **options)
    return RemoteRuntime(registry.make("fedavg"), shared, factory.build_views(Config(), FORM), calls, settings)


FORM = factory.ImageSpec((1, 8, 8), ("a", "b"), False, (0.5,), (0.5,))


@pytest.mark.parametrize("where", ["simulation", "server", "server with a secret"])
def test_cohorts_are_drawn_as_the_accountant_assumes(where: str) -> None:
    """Thousands of rounds as a runtime opens them: the size is fixed, every client and every pair has its share."""
    if where == "simulation":
        sizes = [(2, 2)] * CLIENTS
        runtime: Any = make_simulation(registry.make("fedavg"), make_task(GROUPED), make_dataset(sizes), cohort=COHORT)
    else:
        runtime = remote(secret=b"of the server" if "secret" in where else None)
    drawn = []
    for number in range(DRAWS):
        runtime.open(number)
        assert runtime._uniform_cohort
        assert len(set(runtime.cohort.tolist())) == COHORT
        drawn.append(runtime.cohort.tolist())
    found = np.array(drawn)
    assert 0.001 < uniform(found, CLIENTS, COHORT) < 0.999
    pairs = np.array([sum({a, b} <= set(row) for row in drawn) for a in range(CLIENTS) for b in range(a)])
    expected = DRAWS * COHORT * (COHORT - 1) / (CLIENTS * (CLIENTS - 1))
    assert scipy.stats.chi2.sf(((pairs - expected) ** 2 / expected).sum(), len(pairs) - 1) > 0.001
    # One round tells nothing of the next.
    repeated = np.mean([len(set(a) & set(b)) for a, b in pairwise(drawn)])
    assert repeated == pytest.approx(COHORT * COHORT / CLIENTS, abs=0.06)


def test_sites_cannot_know_the_cohorts_of_a_private_federation() -> None:
    """They know the seed; with a secret the draw does not depend on it, without one on nothing else."""

    def cohorts(**options: Any) -> list[list[int]]:
        there = remote(**options)
        found = []
        for number in range(20):
            there.open(number)
            found.append(there.cohort.tolist())
        return found

    assert cohorts(secret=b"a") == cohorts(secret=b"a", seed=6)
    assert cohorts(secret=b"a") != cohorts(secret=b"b")
    assert cohorts() != cohorts(seed=6)
    assert cohorts(secret=b"a") != cohorts()


def test_a_cohort_of_those_who_are_left_is_no_random_one(tmp_path: Path) -> None:
    """Sites that are set aside, and rounds that are repeated, are counted without a random cohort."""
    there = remote(secret=b"a", quarantine=Quarantine([f"site-{k}" for k in range(CLIENTS)], 1, None))
    there.open(0)
    assert there._uniform_cohort
    there.cohorts.attempt += 1
    there.open(0)
    assert not there._uniform_cohort
    there.cohorts.end_round()
    there.calls.quarantine.count_refusal("site-4", 0, "nonsense")
    there.open(1)
    assert not there._uniform_cohort
    aggregator = private(tmp_path, PROMISE._replace(clients=40))
    for number, changes in enumerate(({}, {"random_cohort": False}, {"attempt": 1})):
        aggregator.process_uploads(
            make_context(ORIGIN, 3, round=number, **changes), vector([1.0, 0], [0, 1.0], [1.0, 1.0])
        )
    assert [each.sampled for each in aggregator.ledger.releases] == [CohortDraw(3, 40), None, None]


def written(path: Path, releases: int = 4) -> bytes:
    path.unlink(missing_ok=True)
    there = Ledger(path)
    for number in range(releases):
        there.add(release(number))
    return path.read_bytes()


def test_a_ledger_reads_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / LEDGER
    whole = written(path)
    there = Ledger(path)
    assert there.releases == [release(k) for k in range(4)]
    assert release(2) in there
    assert release(2, "another") not in there
    there.add(release(4, sampled=None))
    assert path.read_bytes().startswith(whole)
    assert Ledger(path).releases[-1] == release(4, sampled=None)
    there.check(5)


def test_every_changed_byte_of_a_ledger_is_found(tmp_path: Path) -> None:
    """Flipped anywhere but in the end of its last line, which then counts as one that a kill has cut off."""
    path = tmp_path / LEDGER
    whole = written(path, 2)
    for at in range(len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(UserError, match=r"privacy.jsonl, line [12]: it was changed or damaged"):
            Ledger(path)
    path.write_bytes(b"[" * 100_000 + b"\n")
    with pytest.raises(UserError, match="line 1: it was changed or damaged"):
        Ledger(path)


def test_a_ledger_that_lost_lines_is_no_new_beginning(tmp_path: Path) -> None:
    path = tmp_path / LEDGER
    whole = written(path)
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1] + lines[2:]))
    with pytest.raises(UserError, match="line 2"):
        Ledger(path)
    for stored, missing in ((3, 4), (0, 1)):
        path.write_bytes(b"".join(lines[:stored]))
        with pytest.raises(UserError, match=f"has no line of round {missing}, but the run has completed 4"):
            private(tmp_path).stop_reason(4)
    path.write_bytes(whole[:-20])  # a kill while round 4 was written down: nobody has seen that round
    assert Ledger(path).releases == [release(k) for k in range(3)]
    assert path.read_bytes() == b"".join(lines[:3])


def test_a_ledger_that_cannot_be_written_stops_the_release(tmp_path: Path) -> None:
    aggregator = private(tmp_path)
    aggregator.ledger.path = tmp_path / "nowhere" / LEDGER
    with pytest.raises(UserError, match="cannot be written"):
        aggregator.process_uploads(make_context(ORIGIN, 1), vector([1.0, 0.0]))
    assert aggregator.ledger.releases == []


def test_repeated_sum_is_counted_once(tmp_path: Path) -> None:
    aggregator = private(tmp_path)
    _, first = aggregator.process_uploads(make_context(ORIGIN, 1, 2), vector([1.0, 0.0]))
    repeated = private(tmp_path)  # a server that was killed before its checkpoint
    _, second = repeated.process_uploads(make_context(ORIGIN, 1, 2), vector([1.0, 0.0]))
    assert torch.equal(second.update["params"]["w"], first.update["params"]["w"])
    assert len(repeated.ledger.releases) == 1
    repeated.process_uploads(make_context(ORIGIN, 1, 2), vector([0.0, 1.0]))
    assert len(repeated.ledger.releases) == 2
    assert repeated.row()["epsilon"] > aggregator.row()["epsilon"]


def test_ledger_reveals_no_sum_without_the_secret(tmp_path: Path) -> None:
    """A plain hash of the sum could be compared with candidate sums: with two secrets, one sum has two hashes."""
    marks = set()
    for secret in (b"a", b"b"):
        (tmp_path / secret.decode()).mkdir()
        aggregator = private(tmp_path / secret.decode(), secret=secret)
        aggregator.process_uploads(make_context(ORIGIN, 1, 2), vector([1.0, 0.0]))
        marks.add(aggregator.ledger.releases[0].mark)
    plain = np.array([0.5, 0.0])
    assert len(marks) == 2
    assert sha256(plain.tobytes()).hexdigest() not in marks


def test_round_beyond_the_privacy_budget_does_not_run(tmp_path: Path) -> None:
    plenty = PROMISE._replace(noise=8.0, clients=40)
    costs = [accounting.compute_planned_epsilon(3, 40, rounds, 8.0, 1e-5) for rounds in (1, 2, 3)]
    aggregator = private(tmp_path, plenty._replace(budget=(costs[1] + costs[2]) / 2))
    for number in range(2):
        assert aggregator.stop_reason(number) is None
        aggregator.process_uploads(make_context(ORIGIN, 3, round=number), vector([1.0, number], [0, 1.0], [1.0, 1.0]))
        assert aggregator.stop_reason(number) is None  # run already: paid
    text = aggregator.stop_reason(2)
    assert text.startswith(f"the privacy budget is spent: epsilon is {costs[1]:.4g} after round 2")
    assert f"{costs[2]:.4g}" in text
    with pytest.raises(UserError, match="the privacy budget is spent: round 3 would make epsilon"):
        aggregator.process_uploads(make_context(ORIGIN, 3, round=2), vector([1.0, 9], [0, 1.0], [1.0, 1.0]))
    assert len(aggregator.ledger.releases) == 2
    none = private(tmp_path / "none", plenty._replace(budget=costs[0] / 2)).stop_reason(0)
    assert none is not None
    assert f"the first round alone costs {costs[0]:.4g}" in none


def test_run_stops_at_its_privacy_budget_and_reports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`halfmoon run`: as many rounds as the budget allows, epsilon in every row, the reason in summary and log."""
    clients = "--clients 12 --cohort 2 --dp-clip 0.5 --dp-noise 6 --dp-delta 1e-5"
    message = f"run --method fedavg --norm group --rounds 9 --steps 1 --width 4 --threads 1 {clients}"
    costs = [accounting.compute_planned_epsilon(2, 12, rounds, 6.0, 1e-5) for rounds in range(1, 5)]
    assert cli.main([*message.split(), "--dp-epsilon", f"{costs[2] + 1e-6}", "--run-dir", str(tmp_path / "run")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["aggregation"]["epsilon"] for row in rows] == pytest.approx(costs[:3])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ended"].startswith("the privacy budget is spent")
    assert summary["aggregation"] == {"epsilon": pytest.approx(costs[2]), "delta": 1e-5}
    text = capsys.readouterr().err
    assert "dp_clip 0.5, dp_noise 6.0" in text
    assert f"epsilon {costs[2]:.4g}" in text
    assert summary["ended"] in text
    assert cli.main([*message.split(), "--dp-epsilon", f"{costs[0] / 2}", "--run-dir", str(tmp_path / "none")]) == 2
    assert f"the first round alone costs {costs[0]:.4g}" in capsys.readouterr().err


def run(path: Path, promise: PrivacyPlan = PROMISE, rounds: int = 2, every: int = 2) -> None:
    """Run a private run in a folder, or continue with it there, until it ends."""
    method = ClippedMethod(registry.make("fedavg"), promise.clip)
    shared = make_task(GROUPED, rounds=rounds, dtype=torch.float32)
    with RunFolder.open(path) if RunFolder.exists(path) else RunFolder.create(path, "", "0" * 64) as folder:
        loaded = folder.load()
        store = TreeStore()
        there = make_simulation(method, shared, aggregators=[private(path, promise)], store=store, client_dropout=0.3)
        made = Experiment(method, shared, there, None, 3, checkpoint_every=every)
        result = loop.run_rounds(made, folder, loaded, lambda row: None)
        folder.finish(result["model"], {}, {"aggregation": result["aggregation"]})


def left(path: Path) -> dict[str, bytes]:
    files = (each for each in path.rglob("*") if each.is_file() and each.name not in (".lock", "timings.jsonl"))
    return {str(each.relative_to(path)): each.read_bytes() for each in files}


@WHEN
def test_private_run_killed_at_any_write_resumes(when: str, tmp_path: Path) -> None:
    """The same bytes, the ledger's and epsilon among them, as of a run that nobody stopped."""
    tmp_path.joinpath("straight").mkdir()
    run(tmp_path / "straight")
    wanted = left(tmp_path / "straight")
    assert {LEDGER, "metrics.jsonl", "model.safetensors"} <= set(wanted)
    for at in count():
        path = tmp_path / f"killed-{at}"
        path.mkdir()
        if not killed(at, when, partial(run, path), ["write"]):
            break
        run(path)
        assert left(path) == wanted, at
    assert at > 10


def test_a_run_that_falls_back_to_an_older_checkpoint_counts_a_new_sum_too(tmp_path: Path) -> None:
    """Another sum of a round that was told before is another release; the same one is none."""
    run(tmp_path, rounds=3)
    whole = (tmp_path / LEDGER).read_bytes()
    aggregator = private(tmp_path)
    before = compute_spent_epsilon(aggregator.ledger.releases, 1e-5)
    aggregator.process_uploads(make_context(ORIGIN, 1, 3, round=1), vector([1.0, 0.0]))
    assert (tmp_path / LEDGER).read_bytes().startswith(whole)
    assert aggregator.row()["epsilon"] < compute_spent_epsilon(aggregator.ledger.releases, 1e-5) > before


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Give three sites behind Flower's two apps, whose server's secret is what a simulation of seed 0 has."""
    pytest.importorskip("flwr")
    import in_process_federation

    with in_process_federation.speed_up_rehearsals(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederationServer, "_secret", lambda self: b"seed 0")
        yield in_process_federation.export_small_sites("clients", tmp_path_factory.mktemp("private"))


@pytest.mark.parametrize("method", ["feddure", "fedavg"])
def test_a_federation_gives_the_simulators_bits_with_the_same_secret(method: str, flower: Any) -> None:
    """Model, rows and ledger, where all sites train in every round: a smaller cohort is drawn from the secret."""
    import in_process_federation

    there: list[RemoteRuntime] = []
    original = RemoteRuntime.open

    def opened(self: RemoteRuntime, round: int) -> None:
        there.append(self)
        original(self, round)

    file = flower.write_plan(method, norm="group", cohort=3, dp_clip=0.3, dp_noise=0.5, dp_delta=1e-4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteRuntime, "open", opened)
        run = flower.run(file)
    simulated = flower.runs / f"{method}-simulated"
    runner.run_in_folder(settings.resolve(settings.load_file(file), {}), simulated)
    assert in_process_federation.read_model_bytes(run) == in_process_federation.read_model_bytes(simulated)
    assert (run / LEDGER).read_bytes() == (simulated / LEDGER).read_bytes()
    actual = in_process_federation.read_metrics(run)
    expected_value = in_process_federation.read_metrics(simulated)
    for key in ("train", "cohort", "aggregation"):
        assert [row[key] for row in actual] == [row[key] for row in expected_value]
    assert f"epsilon {actual[-1]['aggregation']['epsilon']:.4g}" in (run / "serve.log").read_text()
    # What one site sends must not decide whether another one counts.
    assert there[0].calls.rules.norm_bound == 0


def test_stopped_private_server_resumes(flower: Any) -> None:
    """After the sites have trained, before it has taken their replies; cohorts of two of three, from the secret."""
    import in_process_federation

    file = flower.write_plan("fedavg", norm="group", cohort=2, rounds=3, dp_clip=0.3, dp_noise=0.5)
    straight = flower.run(file, "straight")
    flower.delete_client_memory()
    with in_process_federation.stop_server_at((1, 0), after=True):
        flower.run(file, "stopped")
    stopped = flower.run(file, "stopped")
    for name in ("model.safetensors", "metrics.jsonl", LEDGER):
        assert (stopped / name).read_bytes() == (straight / name).read_bytes()
    assert [each.sampled for each in Ledger(straight / LEDGER).releases] == [CohortDraw(2, 3)] * 3


def test_configuration_adds_clipping_and_noise(tmp_path: Path) -> None:
    config = Config(method="fedavg", norm="group", dp_clip=0.5, dp_noise=2.0, dp_epsilon=3.0, clients=9, cohort=4)
    assert factory.build_method(config) == ClippedMethod(registry.make("fedavg"), 0.5)
    (aggregator,) = factory.build_aggregators(config, b"x", tmp_path)
    assert isinstance(aggregator, DifferentialPrivacy)
    assert aggregator.plan == PrivacyPlan(0.5, 2.0, 1e-5, 3.0, 4, 9)
    held = make_split([(2, 2)] * 7)
    held.save(tmp_path / "split.parquet")
    (aggregator,) = factory.build_aggregators(replace(config, split=tmp_path / "split.parquet"), b"x", tmp_path)
    assert isinstance(aggregator, DifferentialPrivacy)
    assert aggregator.plan.clients == 7
    assert factory.build_aggregators(Config(), b"x", tmp_path) == ()


def test_epsilon_is_reported() -> None:
    row = {"round": 3, "cohort": [0, 1], "train": {}, "aggregation": {"epsilon": 1.23456, "delta": 1e-5}}
    assert describe_round(row, 9) == "round 3 of 9: 2 sites; epsilon 1.235 (delta 1e-05)"
    progress = Progress(Path("run"), "FedAvg", 3, 0, 0.0)
    progress.add(row)
    assert describe_progress(progress, 0.0) == "FedAvg: round 3/3, epsilon 1.235, delta 1e-05"


def test_command_reports_the_epsilon_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan = "privacy --clients 100 --cohort 10 --rounds 20 --json"
    assert cli.main([*plan.split(), "--noise", "5", "--delta", "1e-6"]) == 0
    text = json.loads(capsys.readouterr().out)
    assert text["epsilon"] == accounting.compute_planned_epsilon(10, 100, 20, 5.0, 1e-6)
    assert cli.main([*plan.split(), "--epsilon", "3"]) == 0
    text = json.loads(capsys.readouterr().out)
    assert text["noise"] == accounting.find_noise(3.0, 10, 100, 20, 1e-5)
    assert text["epsilon"] <= 3
    wrong = {
        "--noise 5 --epsilon 3": "give one of --noise and --epsilon",
        "": "give one of --noise and --epsilon",
        "--noise 0": "--noise is 0.0: it must be a number above 0",
        "--noise 5 --cohort 101": "it must be at most 100",
        "--noise 5 --delta 1": "--delta is 1: it must be above 0 and below 1",
        "--noise 5 --rounds x": "--rounds is",
    }
    for message, sentence in wrong.items():
        assert cli.main([*plan.split(), *message.split()]) == 2
        assert sentence in capsys.readouterr().err
    assert cli.main(["privacy", "--clients", "5"]) == 2
    assert "--cohort is missing" in capsys.readouterr().err

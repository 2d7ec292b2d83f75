"""Heads solved from sums: equal to a pooled solution written in NumPy, whoever holds which images."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import halfmoon
from halfmoon import Config, UserError
from halfmoon.aggregation.privacy.accounting import compute_epsilon
from halfmoon.api.types import ClientData, Task
from halfmoon.core import tree
from halfmoon.core.optim import Adam
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER, Split
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.local_clients import FederatedDataset
from halfmoon.engine.simulation import SharedAverages
from halfmoon.federation.contract.small_federation import Snapshot, make_simulation, run_rounds, start_server
from halfmoon.methods import analytic
from halfmoon.methods.analytic import (
    MeanSums,
    MixtureHead,
    MomentSums,
    RidgeHead,
    SumsUpdate,
    eigen_decomposition,
    estimate_log_shares,
    positive_definite,
    solve_linear,
    sum_outer_products,
    symmetric_matrix,
)
from halfmoon.models.efficientnet import CenteredLinear
from halfmoon.models.finetuned import FeatureHead, FirstView, feature_head, fine_tune
from halfmoon.models.modules import from_factory
from halfmoon.models.weights import Weights

ROWS = 600
WIDTH = 24
CLASSES = 3
LABELS = 30


class Tiny(nn.Module):
    """A backbone of one convolution, and a centered head."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, WIDTH, 3, stride=2)
        self.head = CenteredLinear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


def make(channels: int, classes: int, size: tuple[int, int]) -> nn.Module:
    """Return the stand-in for a backbone: what `network` names."""
    return Tiny(channels, classes)


def head_network() -> FeatureHead:
    """Return the stand-in's head on features."""
    network = from_factory(f"{__name__}:make", 1, CLASSES, (8, 8))
    first = tree.flatten(network.init(torch.Generator().manual_seed(0)))
    tensors = {path.removeprefix("params/").replace("/", "."): leaf for path, leaf in first.items()}
    head = feature_head(
        fine_tune(network, Weights("tiny", "0" * 64, ("a", "b", "c"), tensors), ("backbone",), ("a", "b", "c"))
    )
    assert head is not None
    return head


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features (n, F), classes (n,), and which rows are labeled (n,)."""
    g = np.random.default_rng(0)
    y = g.integers(0, CLASSES, ROWS)
    f = np.maximum(g.normal(size=(ROWS, WIDTH)) + 1.5 * g.normal(size=(CLASSES, WIDTH))[y], 0).astype(np.float32)
    return f, y, np.arange(ROWS) < LABELS


def oracle(
    f: np.ndarray, y: np.ndarray, labeled: np.ndarray, rounds: int, d: int, noise: float = 0.15
) -> tuple[np.ndarray, np.ndarray]:
    """Return (weight (F, K), bias (K,)) of the pooled data: the ridge head for 0 rounds, else the mixture's."""
    q = np.sqrt(f.astype(np.float64))
    h = q - q.mean(0)
    h /= np.linalg.norm(h, axis=1, keepdims=True)
    x = h[labeled]
    u = h[~labeled]
    onehot = np.eye(CLASSES)[y[labeled]]
    p = onehot.mean(0)
    n = len(x)
    xc = x - x.mean(0)
    w = np.linalg.solve(xc.T @ xc + np.eye(WIDTH), xc.T @ (onehot - p))
    b = p - x.mean(0) @ w
    if not rounds:
        return w, b

    def scaled(w: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = h @ w + b
        spread = np.sqrt(((logits - logits.mean(1, keepdims=True)) ** 2).sum(1).mean() / CLASSES)
        return w / spread, b / spread

    ridge = scaled(w, b - p)
    trust = (n / CLASSES) / (n / CLASSES + 25)
    basis = np.linalg.eigh(h.T @ h)[1][:, ::-1][:, :d]
    v = trust / (1 - trust) * len(u) / n
    z = np.concatenate([u, x]) @ basis
    w = 4 * ridge[0]
    b = 4 * ridge[1]
    correction = np.zeros(CLASSES)
    for i in range(rounds):
        e = np.exp(u @ w + b)
        r = e / e.sum(1, keepdims=True)
        totals = np.log(r.mean(0) * CLASSES)
        centered = totals - correction - (totals - correction).mean()
        confidence = max(0, 1 - (noise * (CLASSES - 1) / CLASSES / np.mean(centered**2)) ** 2) if i >= 2 else 0
        shares = np.exp(1.5 * confidence * centered)
        correction = 0.7 * correction - 0.3 * (totals - np.log(shares / shares.mean()))
        weights = np.concatenate([r, v * onehot])
        mu = weights.T @ z / weights.sum(0)[:, None]
        within = sum((weights[:, k, None] * (z - mu[k])).T @ (z - mu[k]) for k in range(CLASSES)) / weights.sum()
        within = 0.8 * within + 0.2 * np.trace(within) / d * np.eye(d)
        a = np.linalg.solve(within, mu.T)
        mix = scaled(basis @ a, -0.5 * (mu.T * a).sum(0))
        w, b = scaled(*(trust * one + (1 - trust) * two for one, two in zip(ridge, mix, strict=True)))
        sharp = 4 + 2 * min(i + 1, rounds - 1) / (rounds - 1)
        w = w * sharp
        b = b * sharp + correction
    return w, b


def holders(name: str) -> np.ndarray:
    """Return which client holds each row."""
    g, (_, y, labeled) = np.random.default_rng(1), data()
    if name.isdigit():
        client = g.integers(0, int(name), ROWS)
    elif name == "class":
        client = y
    elif name == "classes":
        client = y * 10 + g.integers(0, 10, ROWS)
    elif name == "some":
        client = np.where(labeled, g.integers(0, 2, ROWS), g.integers(0, 20, ROWS))
    elif name == "server":
        client = np.where(labeled, SERVER, g.integers(0, 5, ROWS))
    else:
        client = (20 * g.random(ROWS) ** 4).astype(int)
    return client.astype(np.int64)


def solved(method: RidgeHead, name: str, rounds: int, cohort: int | None = None) -> dict[str, Tensor]:
    """Return the head after so many rounds of a federation that is split so."""
    f, y, labeled = data()
    client = holders(name)
    count = max(int(client.max()) + 1, 1)
    images = torch.from_numpy(f)[:, None, None]
    held = FederatedDataset(Examples(images, torch.from_numpy(y)), Split(client, labeled, count))
    shared = Task(head_network(), Adam(1e-3), FirstView((0.0,), (1.0,)), rounds=rounds)
    simulation = make_simulation(method, shared, held, cohort=cohort or count)
    return run_rounds(method, simulation, start_server(method, shared), range(rounds))[-1].server["head"]


def test_sums_of_outer_products_are_those_of_the_whole_matrix() -> None:
    vectors = torch.randn(7, 2 * analytic.TRIANGLE_BLOCK + 3, dtype=torch.float64)
    side = vectors.shape[1]
    whole = vectors.T @ vectors
    rows, columns = torch.triu_indices(side, side)
    upper = sum_outer_products(vectors)
    torch.testing.assert_close(upper, whole[rows, columns])
    matrix = symmetric_matrix(upper, side)
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix[rows, columns], upper)


def test_heads_of_one_comparison_share_their_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second head computes no mean and no moments; its head, its cost and its responders are those without sharing.

    Other images at the clients and another seed's head share nothing.
    """
    f, y, labeled = data()
    images = Examples(torch.from_numpy(f)[:, None, None], torch.from_numpy(y))
    held = FederatedDataset(images, Split(np.arange(ROWS) % 5, labeled, 5))
    task = Task(head_network(), Adam(1e-3), FirstView((0.0,), (1.0,)), rounds=1)
    queries: list[str] = []
    for update in (MeanSums, MomentSums):
        original = update.sums

        def count(self: SumsUpdate, broadcast: Tree, data: ClientData, original: Any = original) -> Tree:
            if len(data.x) + len(data.u):
                queries.append(type(self).__name__)
            return original(self, broadcast, data)

        monkeypatch.setattr(update, "sums", count)

    def run_ridge_head(averages: SharedAverages | None, dataset: FederatedDataset, seed: int = 0) -> Snapshot:
        method = RidgeHead()
        simulation = make_simulation(method, task, dataset, cohort=5, shared_averages=averages)
        (snapshot,) = run_rounds(method, simulation, start_server(method, task, seed), range(1))
        assert simulation.responders.tolist() == [0, 1, 2, 3, 4]
        return snapshot

    alone = run_ridge_head(None, held)
    averages = SharedAverages()
    mixture = MixtureHead(directions=8)
    simulation = make_simulation(mixture, task, held, cohort=5, shared_averages=averages)
    run_rounds(mixture, simulation, start_server(mixture, task), range(1))
    queries.clear()
    shared = run_ridge_head(averages, held)
    assert not queries
    assert torch.equal(shared.server["head"]["weight"], alone.server["head"]["weight"])
    assert shared.report.cost == alone.report.cost
    run_ridge_head(averages, replace(held, reuse_labeled=True))
    assert queries.count("MomentSums") == 5
    queries.clear()
    run_ridge_head(averages, held, seed=1)
    assert queries.count("MomentSums") == 5


SPLITS = ("1", "2", "10", "200", "class", "classes", "some", "server", "sizes")


@pytest.mark.parametrize("name", SPLITS)
def test_head_equals_the_pooled_one_for_any_partition(name: str) -> None:
    mixture = MixtureHead(directions=8, em_rounds=4)
    uneven_mixture = replace(mixture, share_noise=1e-4)  # small, so that this set's classes are taken for uneven
    for method, rounds, after in ((RidgeHead(), 2, 0), (mixture, 6, 4), (uneven_mixture, 6, 4)):
        noise = method.share_noise if isinstance(method, MixtureHead) else 0.0
        weight, bias = oracle(*data(), after, 8, noise)
        head = solved(method, name, rounds)
        np.testing.assert_allclose(head["weight"].numpy(), weight.T, rtol=0, atol=1e-9)
        np.testing.assert_allclose(head["bias"].numpy(), bias, rtol=0, atol=1e-9)
    assert not torch.equal(head["bias"], solved(mixture, name, 6)["bias"])


def test_class_shares_are_even_unless_totals_differ_clearly() -> None:
    even = torch.zeros(4, dtype=torch.float64)
    slight = torch.tensor([0.3, -0.3, 0.3, -0.3], dtype=torch.float64)  # variance 0.09, below 0.15 * 3 / 4
    clear = torch.tensor([1.0, 0.5, 0.0, -1.5], dtype=torch.float64)
    for noise, totals in ((0.15, even), (0.15, slight), (1e9, clear)):
        torch.testing.assert_close(estimate_log_shares(totals + 7, noise), even)
    shares = estimate_log_shares(clear, 0.15).exp()
    assert float(shares.sum()) == pytest.approx(4)
    # The variance is 0.875, so that the confidence is 1 - (0.1125 / 0.875)^2, times the exponent of 1.5.
    torch.testing.assert_close(
        shares[0].log() - shares[3].log(), torch.tensor(2.5 * 1.5 * (1 - (0.1125 / 0.875) ** 2)).double()
    )


def test_uneven_unlabeled_images_gain_by_estimated_shares() -> None:
    g = np.random.default_rng(3)
    centers = 1.0 * g.normal(size=(CLASSES, WIDTH))
    y = np.concatenate([np.arange(LABELS) % CLASSES, g.choice(CLASSES, ROWS - LABELS, p=(0.8, 0.1, 0.1))])
    f = np.maximum(g.normal(size=(ROWS, WIDTH)) + centers[y], 0).astype(np.float32)
    labeled = np.arange(ROWS) < LABELS
    accuracies: list[float] = []
    for noise in (1e9, 0.15):
        images = torch.from_numpy(f)[:, None, None]
        held = FederatedDataset(Examples(images, torch.from_numpy(y)), Split(np.zeros(ROWS, np.int64), labeled, 1))
        shared = Task(head_network(), Adam(1e-3), FirstView((0.0,), (1.0,)), rounds=11)
        method = MixtureHead(directions=8, share_noise=noise)
        simulation = make_simulation(method, shared, held, cohort=1)
        head = run_rounds(method, simulation, start_server(method, shared), range(11))[-1].server["head"]
        h = np.sqrt(f.astype(np.float64)) - head["center"].numpy()
        h /= np.linalg.norm(h, axis=1, keepdims=True)
        predicted = (h @ head["weight"].numpy().T + head["bias"].numpy()).argmax(1)
        accuracies.append(float((predicted == y)[~labeled].mean()))
    assert accuracies[1] > accuracies[0] + 0.01, accuracies


def test_all_clients_must_be_in_the_cohort() -> None:
    with pytest.raises(UserError, match="set cohort to 10"):
        solved(RidgeHead(), "10", 1, cohort=4)


def test_a_system_without_a_solution_is_a_sentence() -> None:
    for matrix in (torch.zeros(2, 2), torch.full((2, 2), torch.nan)):
        with pytest.raises(UserError, match="the head cannot be solved"):
            solve_linear(matrix, torch.ones(2, 1))
    with pytest.raises(UserError, match="the head cannot be solved"):
        eigen_decomposition(torch.full((2, 2), torch.nan))
    fine = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    assert positive_definite(fine) is fine
    assert int(torch.linalg.cholesky_ex(positive_definite(torch.diag(torch.tensor([1.0, -1.0]))))[1]) == 0


def test_derivatives_of_a_centered_head_on_features() -> None:
    network = head_network()
    params = network.init(torch.Generator().manual_seed(1))["params"]
    x = torch.rand(4, WIDTH)
    direction = tree.map(torch.ones_like, params)
    logits, tape = network.linearize(params, x)
    step = tree.map(lambda a, b: a + 1e-3 * b, params, direction)
    back = tree.map(lambda a, b: a - 1e-3 * b, params, direction)
    expected = (network.predict(step, {}, x) - network.predict(back, {}, x)) / 2e-3
    torch.testing.assert_close(network.tangent(params, x, tape, direction), expected, rtol=1e-2, atol=1e-3)
    # The gradient of a sum is an expanded tensor, as in a step of FedDure.
    expanded = tree.map(lambda leaf: torch.ones(()).expand(leaf.shape), params)
    torch.testing.assert_close(network.tangent(params, x, tape, expanded), expected, rtol=1e-2, atol=1e-3)
    whole, model = network.full_model({"params": params, "stats": {}})
    images = torch.rand(4, 1, 8, 8)
    expected, features = whole.represent(model["params"], {}, images)
    torch.testing.assert_close(network.predict(params, {}, features), expected)
    assert logits.shape == (4, CLASSES)


CONFIG = Config(
    method="fedavg", network=f"{__name__}:make", rounds=1, data_share=0.3, clients=3, cohort=3, steps=1, budget="none",
    threads=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the file of a backbone that has taken a step."""
    folder = tmp_path_factory.mktemp("weights") / "first"
    halfmoon.run(replace(CONFIG, run_dir=folder))
    return str(folder / "model.safetensors")


@pytest.mark.parametrize("method", ["ridge-head", "mixture-head"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_run_solves_the_head(
    method: str, cached: bool, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accuracy rises above chance, with features cached or not, and the whole model is saved. With features it is
    the same under a mask; without, under noise, whose budget only rounds that release sums spend."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = replace(CONFIG, method=method, weights=weights, rounds=40, features=cached, run_dir=tmp_path / "run")
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        result = halfmoon.run(replace(config, tune="head"))
    assert not [each for each in remarks if "than a batch" in str(each.message)], "it takes no steps"
    assert result.summaries[0]["accuracy"]["last"] > 0.3
    with pytest.raises(UserError, match="frozen backbone"):
        halfmoon.run(replace(config, features=False, run_dir=tmp_path / "other"))
    plain = load_file(tmp_path / "run" / "model.safetensors")["params/head/weight"]
    guarded = replace(config, tune="head", secure_aggregation=True, run_dir=tmp_path / "masked")
    if cached:
        halfmoon.run(guarded)
        masked = load_file(tmp_path / "masked" / "model.safetensors")["params/head/weight"]
        torch.testing.assert_close(masked, plain, rtol=1e-4, atol=1e-4)
        return
    halfmoon.run(replace(guarded, dp_clip=1e4, dp_noise=1e-8, run_dir=tmp_path / "noised"))
    noised = load_file(tmp_path / "noised" / "model.safetensors")["params/head/weight"]
    torch.testing.assert_close(noised, plain, rtol=1e-2, atol=1e-2)
    with (tmp_path / "noised" / "metrics.jsonl").open() as lines:
        spent = [json.loads(line)["aggregation"]["epsilon"] for line in lines]
    rounds = {"ridge-head": 1, "mixture-head": 11}[method]  # the first releases two sums, each other one
    expected = [compute_epsilon([(1e-8, None)] * (2 + number), config.dp_delta) for number in range(rounds)]
    assert spent == pytest.approx(expected)

"""Hostile clients of a simulation: each attack is what it says, the same in every executor, and refused elsewhere."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from interrupted_runs import run_with_interruption
from test_contract import build_simulation
from test_robust import SMALL

from halfmoon.aggregation import AggregationContext
from halfmoon.aggregation.attacks import NOISE_FACTOR, Attack, HostileClients, draw_hostile_clients
from halfmoon.aggregation.robust import FiniteCheck, RobustAggregator
from halfmoon.api.uploads import Upload
from halfmoon.cli import main as cli
from halfmoon.config.schema import Config
from halfmoon.core import rng, tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER
from halfmoon.engine.local_clients import FederatedDataset
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    SIZES,
    make_dataset,
    max_difference,
    run_rounds,
    start_server,
    trees_equal,
)
from halfmoon.federation.server.plan import load_plan
from halfmoon.runs import runner
from halfmoon.storage.checkpoints import METRICS

ATTACKS: tuple[Attack, ...] = get_args(Attack)
UPLOADS: tuple[Attack, ...] = ("sign-flip", "noise", "stale", "nan")  # those that touch what is sent
EVERY = pytest.mark.parametrize("attack", ATTACKS)
CLIENTS = (3, 5, 8)


def cohort(round: int = 0, query: int = 0) -> tuple[AggregationContext, Upload]:
    """Return a question that three clients have replied, and their uploads in float32."""
    g = torch.Generator().manual_seed(0)
    broadcast = {"params": {"w": torch.randn(4, 5, generator=g), "b": torch.randn(3, generator=g)}, "stats": {}}
    moved = {name: torch.randn(3, *leaf.shape, generator=g) for name, leaf in broadcast["params"].items()}
    params = {name: leaf + moved[name] for name, leaf in broadcast["params"].items()}
    appu = torch.rand(3, 2, generator=g)
    upload = Upload({"params": params, "stats": {}}, torch.tensor([4.0, 5.0, 6.0]), {"appu": appu})
    return AggregationContext(round, 0, query, "train", broadcast, {}, CLIENTS, 3, True), upload


def attacked(attack, round=0, query=0, bad=(5,), seed=7):
    question, upload = cohort(round, query)
    client_rows, new = HostileClients(attack, bad, seed).process_uploads(question, upload)
    assert list(client_rows) == [0, 1, 2]
    return question.broadcast, upload, new


def change(upload: Upload, broadcast: Tree, client_row: int) -> torch.Tensor:
    """Return all that one client changed, one vector in float64."""
    moved = [
        upload.update["params"][name][client_row].double() - broadcast["params"][name].double() for name in ("w", "b")
    ]
    return torch.cat([each.flatten() for each in moved])


@pytest.mark.parametrize("attack", UPLOADS)
def test_honest_clients_and_what_is_no_update_keep_their_bits(attack: Attack):
    _, upload, new = attacked(attack)
    honest = [0, 2]
    assert trees_equal(new.map(lambda leaf: leaf[honest]).tree, upload.map(lambda leaf: leaf[honest]).tree)
    assert torch.equal(new.weight, upload.weight)
    assert torch.equal(new.aux["appu"], upload.aux["appu"])
    assert not torch.equal(new.update["params"]["w"][1], upload.update["params"]["w"][1])


def test_a_flipped_update_points_the_other_way_and_is_as_long():
    broadcast, upload, new = attacked("sign-flip")
    assert change(new, broadcast, 1).tolist() == pytest.approx((-change(upload, broadcast, 1)).tolist(), abs=1e-6)


def test_a_stale_upload_is_what_was_sent():
    broadcast, _, new = attacked("stale")
    assert all(torch.equal(new.update["params"][name][1], leaf) for name, leaf in broadcast["params"].items())


def test_a_nan_upload_is_no_number_anywhere():
    _, _, new = attacked("nan")
    assert all(bool(leaf[1].isnan().all()) for leaf in tree.leaves(new.update["params"]))


def test_noise_is_ten_times_as_long_as_the_update_and_always_another():
    """Its norm is exact; equal for one round, trip, client and seed, and different where any of them differs."""
    assert NOISE_FACTOR == 10
    broadcast, upload, new = attacked("noise")
    drawn = change(new, broadcast, 1) - change(upload, broadcast, 1)
    assert float(drawn.norm()) == pytest.approx(10 * float(change(upload, broadcast, 1).norm()), rel=1e-5)
    _, _, repeated = attacked("noise")
    assert trees_equal(repeated.tree, new.tree)
    others = [attacked("noise", 1), attacked("noise", 0, 1), attacked("noise", seed=8), attacked("noise", bad=(5, 3))]
    for number, (_, _, other) in enumerate(others):
        assert torch.equal(other.update["params"]["w"][1], new.update["params"]["w"][1]) == (number == 3)
    directions = [change(each, broadcast, 1) - change(upload, broadcast, 1) for _, _, each in others[:3]]
    directions.append(change(others[3][2], broadcast, 0) - change(upload, broadcast, 0))
    for each in directions:
        assert abs(float(torch.cosine_similarity(each, drawn, 0))) < 0.9


def test_noise_is_normal():
    """Of 200,000 numbers in units of their deviation: mean 0, deviation 1, kurtosis 3, within four sigmas."""
    broadcast = {"w": torch.zeros(200_000)}
    upload = Upload({"w": torch.full((1, 200_000), 1e-3)}, torch.ones(1))
    _, new = HostileClients("noise", [0], 1).process_uploads(
        AggregationContext(0, 0, 0, "train", broadcast, {}, (0,), 1, True), upload
    )
    z = (new.update["w"][0] - 1e-3).double() / (NOISE_FACTOR * 1e-3)
    assert abs(float(z.mean())) < 4 / 200_000**0.5
    assert float(z.square().mean()) == pytest.approx(1, abs=1e-5)  # its norm is fixed
    assert float(z.pow(4).mean()) == pytest.approx(3, abs=4 * (96 / 200_000) ** 0.5)


def test_who_is_hostile_is_fixed_by_the_seed():
    """The first ceil(share * clients) of a permutation: of 10, 0.3 is 3 and 0.31 is 4; more include fewer."""
    assert [len(draw_hostile_clients(10, share, 0)) for share in (0.0, 0.1, 0.3, 0.31)] == [0, 1, 3, 4]
    assert len(draw_hostile_clients(100, 0.29, 0)) == 29
    assert draw_hostile_clients(10, 0.3, 0) == draw_hostile_clients(10, 0.3, 0)
    assert set(draw_hostile_clients(10, 0.3, 0)) < set(draw_hostile_clients(10, 0.49, 0))
    order = torch.randperm(10, generator=rng.generator(5, "hostile"))[:3].sort().values.tolist()
    assert draw_hostile_clients(10, 0.3, 5) == order
    assert len({tuple(draw_hostile_clients(10, 0.3, seed)) for seed in range(20)}) > 10


def test_a_row_names_the_hostile_clients_of_the_round():
    question, upload = cohort()
    aggregator = HostileClients("stale", (8, 3, 77), 0)
    aggregator.process_uploads(question, upload)
    assert aggregator.row() == {"hostile": [3, 8]}
    assert aggregator.row() == {"hostile": []}


def test_label_flip_reverses_the_classes():
    """Of four classes 0, 1, 2, 3 become 3, 2, 1, 0, in labeled rows of label_flippers alone; hidden labels stay true."""
    honest = make_dataset()
    lying = FederatedDataset(honest.train, honest.split, label_flippers=frozenset({1, 3}), classes=CLASSES)
    for client in range(len(SIZES)):
        (data, hidden), (message, true) = honest.client_data(client), lying.client_data(client)
        assert message.y.tolist() == [(3 - label if client in (1, 3) else label) for label in data.y.tolist()]
        assert torch.equal(message.x, data.x)
        assert torch.equal(message.u, data.u)
        assert torch.equal(true, hidden)
    served = make_dataset(labels_at="server")
    lying = FederatedDataset(served.train, served.split, label_flippers=frozenset({1, 3}), classes=CLASSES)
    assert torch.equal(lying.client_data(SERVER)[0].y, served.client_data(SERVER)[0].y)


def test_attacker_trains_on_its_flipped_labels():
    """A round whose hostile clients have flipped labels equals one whose images carry these labels from the start."""
    made, shared, lied = build_simulation("fedavg", "both")
    held = lied.dataset
    lied.local_clients.dataset = lied.dataset = FederatedDataset(
        held.train, held.split, label_flippers=frozenset({0, 2}), classes=CLASSES
    )
    _, _, other = build_simulation("fedavg", "both")
    labels = held.train.labels.clone()
    for client in (0, 2):
        rows = torch.from_numpy(held.rows(client, True))
        labels[rows] = CLASSES - 1 - labels[rows]
    relabeled = held.train._replace(labels=labels)
    other.local_clients.dataset = other.dataset = FederatedDataset(relabeled, held.split)
    (one,) = run_rounds(made, lied, start_server(made, shared), range(1))
    (two,) = run_rounds(made, other, start_server(made, shared), range(1))
    assert trees_equal(one.server, two.server)


@pytest.mark.parametrize("attack", ["sign-flip", "noise", "stale"])
def test_loop_equals_vmap_under_attack(attack: Attack):
    results = []
    for executor in ("loop", "vmap"):
        made, shared, simulation = build_simulation(
            "fedavg-fixmatch", "both", executor, aggregators=[HostileClients(attack, [1, 2], 3)]
        )
        results.append(run_rounds(made, simulation, start_server(made, shared), range(3)))
    for one, many in zip(*results, strict=True):
        assert max_difference(many.server, one.server) < 1e-9
        assert one.report.aggregator == many.report.aggregator
        assert one.report.aggregator["hostile"] == [k for k in (1, 2) if k in one.report.cohort]


@pytest.mark.parametrize("attack", UPLOADS)
def test_without_hostile_clients_no_upload_changes(attack: Attack):
    made, shared, plain = build_simulation("fedavg", "both")
    _, _, baselines = build_simulation(
        "fedavg", "both", aggregators=[HostileClients(attack, draw_hostile_clients(4, 0.0, 3), 3), FiniteCheck()]
    )
    one = run_rounds(made, plain, start_server(made, shared), range(2))
    two = run_rounds(made, baselines, start_server(made, shared), range(2))
    assert trees_equal(one[-1].server, two[-1].server)


def test_stale_client_delays_the_mean_by_its_weight():
    """FedAvg with weights w: mean = sum over honest w u + w of the stale one times the model that was sent."""
    made, shared, plain = build_simulation("fedavg-fixmatch", "both")
    server = start_server(made, shared)
    plain.open(0)
    upload = plain.query("train", server)
    bad = int(plain.cohort[1])
    shares = (upload.weight / upload.weight.sum()).tolist()

    def wanted(leaf: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return shares[0] * leaf[0] + shares[1] * old + shares[2] * leaf[2]

    _, _, held = build_simulation("fedavg-fixmatch", "both", aggregators=[HostileClients("stale", [bad], 0)])
    (result,) = run_rounds(made, held, server, range(1))
    mean = {name: tree.map(wanted, upload.update[name], server[name]) for name in server}
    assert max_difference(result.server, mean) < 1e-12


@pytest.mark.parametrize("rule", ["clip", "cosine", "cosine-nnm", "cosine-trimmed", "median", "trimmed", "krum"])
def test_who_sends_no_numbers_is_left_out_of_the_round(rule: Any):
    made, shared, simulation = build_simulation(
        "fedavg", "both", aggregators=[HostileClients("nan", [1], 0), RobustAggregator(rule, 0.2)]
    )
    met = False
    for one in run_rounds(made, simulation, start_server(made, shared), range(4)):
        assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(one.server))
        assert 1 not in one.report.cohort
        met |= one.report.aggregator.get("not_finite") == [1]
    assert met


@pytest.mark.parametrize(
    ("rule", "minimum", "maximum"),
    [
        ("mean", 0.0, 0.2),
        ("cosine-nnm", 0.6, 1.0),
        pytest.param("cosine-trimmed", 0.7, 1.0, marks=pytest.mark.nightly),
    ],
)
def test_one_of_five_that_flips_its_signs_does_not_decide(rule: Any, minimum: float, maximum: float, tmp_path: Path):
    """Four times its update with the sign turned destroys the mean's model in 10 rounds, and not the default's."""
    config = Config(
        method="fedavg-soft-labels", data="digits", clients=5, cohort=5, steps=6, rounds=10, labels_per_class=1.0,
        attack="sign-flip", attackers=0.2, attack_factor=4.0, aggregation=rule, weight_cap=2.0, evaluate_every=10,
        threads=1, device="cpu",
    )  # fmt: skip
    assert minimum <= runner.run_in_folder(config, tmp_path / "run")["accuracy"]["last"] <= maximum


def test_a_mean_of_no_numbers_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    message = "run --method fedavg --rounds 2 --clients 5 --cohort 5 --steps 1 --width 2 --threads 1 --device cpu"
    message += f" --attack nan --attackers 0.2 --run-dir {tmp_path / 'run'}"
    (bad,) = draw_hostile_clients(5, 0.2, 0)
    assert cli.main(message.split()) == 2
    text = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"the upload of client {bad} in round 1 (train) is not finite" in text
    assert "--aggregation cosine-nnm, cosine-trimmed, cosine, clip, median, trimmed or krum" in text
    assert not (tmp_path / "run" / "model.safetensors").exists()


HONEST: dict[str, Any] = {"method": "fedavg", "aggregation": "median", **SMALL, "labels_per_class": 2.0}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run that no client attacks."""
    folder = tmp_path_factory.mktemp("honest") / "run"
    runner.start(Config(run_dir=folder, **HONEST))
    return folder


@pytest.mark.parametrize("attack", ["noise", "label-flip"])
def test_a_run_under_attack_repeats_itself_when_it_is_stopped(attack: Attack, tmp_path: Path):
    """Killed after its second round and resumed, the run has the bytes of a straight one, noise and rows as well."""
    run_with_interruption(Config(**HONEST, attack=attack, attackers=0.2), tmp_path, 2)


@EVERY
def test_run_reports_its_attack(attack: Attack, honest: Path, tmp_path: Path):
    """Without the attack it has another model: the option reaches the clients."""
    folder = runner.start(Config(**HONEST, attack=attack, attackers=0.2, run_dir=tmp_path / "run")).folder
    models = [(each / "model.safetensors").read_bytes() for each in (folder, honest)]
    assert models[0] != models[1]
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    assert [row["aggregation"]["hostile"] for row in rows] == [draw_hostile_clients(5, 0.2, 0)] * 3
    summaries = [json.loads((each / "summary.json").read_text()) for each in (folder, honest)]
    assert summaries[0]["defenses"] == {"aggregation": "median", "attack": attack, "attackers": 0.2}
    assert summaries[1]["defenses"] == {"aggregation": "median"}


def test_pooled_rows_have_no_hostile_client(tmp_path: Path):
    config = Config(method="fixmatch", attack="stale", attackers=0.2, run_dir=tmp_path / "run", **SMALL)
    with pytest.raises(UserError, match="attack needs clients, but method fixmatch has all rows in one place"):
        runner.start(config)
    assert not (tmp_path / "run").exists()


def test_a_server_of_real_sites_knows_no_attack(tmp_path: Path):
    path = tmp_path / "federation.toml"
    table = '[federation]\nsites = ["a", "b"]\nclasses = ["x", "y"]\nimage = [1, 16, 16]\n'
    path.write_text(f'attack = "nan"\nattackers = 0.2\ncohort = 2\n{table}')
    with pytest.raises(UserError, match=r"attack is 'nan' in federation.toml, but .* in simulations only: leave"):
        load_plan(path)
    path.write_text(f"cohort = 2\n{table}")
    assert load_plan(path).config.attack == "none"

"""What a recipe costs: images counted as real runs count them, times speeds that are measured once."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from halfmoon import build, cli, pieces
from halfmoon.commands.recipes import duration
from halfmoon.config import Config
from halfmoon.errors import UserError
from halfmoon.sweep import timing
from halfmoon.sweep.cost import Estimator, facts_of, seen, threads, words_of
from halfmoon.sweep.grid import Cell
from halfmoon.sweep.rehearsal import Rehearsal, rehearse, tiny
from halfmoon.sweep.timing import Signature, Speed, Timings, cache_folder, measure

BASE = Config(
    clients=4, cohort=4, rounds=2, labels_per_class=2, budget="none", network="small", width=4, threads=1, device="cpu",
    labeled_batch=8, unlabeled_batch=64, evaluate_every=2, data_share=0.3,
)  # fmt: skip
AT_SERVER = {"labels_at": "server", "setting": "semifl-iid", "labels": 100, "labels_per_class": None}
UNIT = Speed(forward_pass=0.0, forward=1.0, backward_pass=0.0, backward=2.0, look=1.0, update=0.0)
FREE = Speed(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Fixed:
    """Timings of a machine whose images cost what a test says, and nothing else takes time."""

    def __init__(self, speed: Speed, view: float = 0.0) -> None:
        self.one, self.view = speed, view

    def speed(self, signature: Signature) -> Speed:
        return self.one

    def kept(self, what: str, facts: Any, read: Callable[[Any], Any], measure: Callable[[], Any]) -> Any:
        if what == "views":
            return read({"seconds": dict.fromkeys(("labeled", "plain", "weak", "strong"), self.view)})
        found: Rehearsal = measure()
        nothing = dict.fromkeys(found.visit, 0.0)
        return replace(found, visit=nothing, step=nothing, rest=0.0)


def estimator(speed: Speed = UNIT, view: float = 0.0) -> Estimator:
    """Return an estimator on a machine of known speed."""
    return Estimator(cast(Timings, Fixed(speed, view)))


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "fedavg"},
        {"method": "fedavg-sl"},
        {"method": "fedavg-fixmatch", "statistics": "separate", "labeling": "running"},
        {"method": "feddure", "unlabeled_batch": "rest"},
        {"method": "feddure", "budget": "forwards", "reference": "fedavg-fixmatch"},
        {"method": "fedloke", "setting": "fedloke", "labels_per_class": None, "label_ratio": 0.1},
        {"method": "feddb", "reuse_labeled": True, "labeled_batch": "all", "unlabeled_batch": "rest", "epochs": 2},
        {"method": "fedmatch", "options": {"interval": 2}, "norm": "none"},
        {"method": "fedmatch", "setting": "fedmatch-stream", "stages": 3, "norm": "none", "rounds": 3},
        {"method": "semifl", "options": {"tau": 0.0}, "server_epochs": 3, "server_batch": 50, **AT_SERVER},
        {"method": "fedrgd", "server_epochs": 2, "norm": "group", **AT_SERVER},
        {"method": "fixmatch", "cohort": 2},
        {"method": "feddb", "executor": "vmap", "setting": "iid-iid"},
        {"method": "heterofl", **AT_SERVER},
    ],
    ids=lambda changes: changes["method"],
)
def test_images_are_counted_as_a_run_counts_them(changes, tmp_path: Path):
    """All clients train in every round, so that the mean client is exact; SemiFL keeps every row (tau 0)."""
    config = replace(BASE, **changes)
    flows, _ = estimator().flows(config)
    cost = build.cell(config, tmp_path / "run")["cost"]
    assert sum(flow.forward + flow.swept for flow in flows) == pytest.approx(cost["forward"])
    assert sum(flow.backward for flow in flows) == pytest.approx(cost["backward"])
    assert sum(flow.steps for flow in flows) == pytest.approx(cost["labeled_steps"])


def test_a_work_that_asks_everybody_counts_all_clients():
    """SemiFL counts its statistics over all 6 clients and the server, once before round 1 and after each of 3 rounds:
    4 * 6 and 4 * 1 visits; 2 clients of the cohort train in each round, and the server once."""
    flows, _ = estimator().flows(replace(BASE, clients=6, cohort=2, rounds=3, method="semifl", **AT_SERVER))
    visits: Counter[tuple[str, bool]] = Counter()
    for flow in flows:
        visits[flow.work, flow.server] += round(flow.visits)
    assert visits == {("train", False): 6, ("fine-tune", True): 3, ("census", False): 24, ("census", True): 4}


def test_some_who_do_not_answer_cost_nothing():
    """Of 4 clients a round over 2 rounds, a quarter is silent: 6 visits."""
    (flow,), _ = estimator().flows(replace(BASE, method="fedavg", silent=0.25))
    assert flow.visits == pytest.approx(6)


def test_a_run_takes_what_its_images_take():
    """fedavg-sl on digits, 4 clients, one step of 100 labeled images each: 400 images a round forward (1 s) and
    backward (2 s) are 1200 s, 3600 s in 3 rounds; 2 evaluations (after rounds 2 and 3) of 360 test images, 1 s each,
    are 720 s; nobody has unlabeled rows to look at. 1200 labeled views of 0.5 s are 600 s."""
    config = replace(BASE, method="fedavg-sl", rounds=3, steps=1, labeled_batch=100)
    found = estimator(view=0.5).run(config)
    assert (found.network, found.evaluation, found.views, found.beside) == (3600, 720, 600, 0)
    assert found.seconds == 4920


def test_a_pass_costs_something_beside_its_images():
    """30 images forward in passes of 10 are 3 passes, 20 backward 2: 30 * 1 + 3 * 5 + 20 * 2 + 2 * 7 = 99."""
    assert Speed(5.0, 1.0, 7.0, 2.0, 0.0, 0.0).training(30, 20, 10) == 99


def test_a_narrower_network_is_cheaper():
    """Every second client of HeteroFL trains a quarter of the width: less than if all trained the whole network."""
    narrow = estimator().run(replace(BASE, method="heterofl", options={"rates": "1-0.25"}, rounds=1))
    wide = estimator().run(replace(BASE, method="heterofl", options={"rates": "1"}, rounds=1))
    assert 0.5 * wide.network < narrow.network < 0.9 * wide.network


@pytest.mark.parametrize("network", ["small", "resnet9", "wrn"])
@pytest.mark.parametrize("changes", [{}, {"shrink": 2}, {"image_size": 24}])
def test_images_are_as_large_as_those_of_a_run(network, changes):
    """`pieces.source` shrinks and pads the real images."""
    config = replace(BASE, network=network, **changes)
    height, width, channels = pieces.source(config).train.images.shape[1:]
    assert facts_of(config).image == (channels, height, width)


def test_images_that_cannot_be_shrunk_are_refused():
    with pytest.raises(UserError, match="3 does not divide images of 8x8"):
        seen(replace(BASE, shrink=3), (8, 8, 1))


def test_a_share_of_the_data_is_a_share_of_every_class():
    """CIFAR-10 has 5,000 images of each of 10 classes: 1 % are 50 of each."""
    facts = facts_of(replace(BASE, data="cifar10", data_share=0.01, network="resnet9"))
    assert torch.bincount(torch.from_numpy(facts.labels)).tolist() == [50] * 10
    assert (facts.test, facts.image) == (10_000, (3, 32, 32))


def test_small_networks_compute_with_one_thread():
    assert threads(replace(BASE, threads=None)) == 1
    assert threads(replace(BASE, threads=None, network="resnet9")) == torch.get_num_threads()
    assert threads(replace(BASE, threads=10_000)) == os.cpu_count()


def test_a_folder_has_no_cost_but_a_reason(tmp_path: Path):
    """Two cells, one of unknown size, two seeds each: the known one still has its time, all together have none."""
    known, unknown = replace(BASE, method="fedavg"), replace(BASE, method="fedavg", data=str(tmp_path))
    price = estimator().price([Cell({"data": "a"}, None, {0: unknown}), Cell({"data": "b"}, None, {0: known})], 2)
    assert (price.runs, len(price.seconds), price.total) == (4, 2, None)
    assert price.mean == estimator().run(known).seconds
    assert price.reason is not None
    assert "data=a" in price.reason


def test_equal_runs_count_once():
    one = Cell({"a": "x"}, None, {0: replace(BASE, method="fedavg")})
    price = estimator().price([one, replace(one, at={"a": "y"})], 3)
    assert (price.runs, len(price.seconds)) == (3, 3)
    assert estimator().price([one], 1, trains=False).seconds == (0.0,)


# Timings

TINY = Signature("small", 4, "batch", (1, 8, 8), 1, "sgd", "cpu", 1)


@pytest.mark.parametrize("together", [1, 2])
def test_a_measured_speed_is_of_this_world(together):
    """A pass of a network that a laptop trains takes more than nothing and less than a second; SGD's step as well."""
    speed = measure(replace(TINY, together=together))
    assert 0 < speed.forward + speed.forward_pass < 1
    assert speed.backward >= speed.forward
    assert 0 < speed.look < 1
    assert 0 < speed.update < 1


def test_a_wider_network_is_slower():
    """Eight times the width is up to 64 times the work; twice the time is far below."""
    image = (3, 16, 16)
    narrow, wide = (measure(replace(TINY, width=width, image=image)) for width in (4, 32))
    assert wide.training(64, 64, 64) > 2 * narrow.training(64, 64, 64)


def test_what_is_measured_is_kept(tmp_path: Path, monkeypatch):
    told: list[Path] = []
    first = Timings(tmp_path / "cache", told.append).speed(TINY)
    monkeypatch.setattr(timing, "measure", lambda signature: pytest.fail("measured twice"))
    assert Timings(tmp_path / "cache", told.append).speed(TINY) == first
    assert told == [tmp_path / "cache" / "timings.json"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["timings.json"]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"format": 1, "entries": 7}', b'{"format": 99, "entries": {}}'])
def test_a_damaged_file_counts_as_none(damage, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda signature: UNIT)
    (tmp_path / "timings.json").write_bytes(damage)
    assert Timings(tmp_path).speed(TINY) == UNIT
    assert json.loads((tmp_path / "timings.json").read_text())["format"] == 1


@pytest.mark.parametrize("entry", [None, 3, {}, {"forward": 1.0}, {**UNIT.__dict__, "look": "x"}, {"look": -1.0}])
def test_a_damaged_entry_is_measured_again(entry, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda signature: UNIT)
    Timings(tmp_path).speed(TINY)
    facts = json.loads((tmp_path / "timings.json").read_text())
    facts["entries"] = dict.fromkeys(facts["entries"], entry)
    (tmp_path / "timings.json").write_text(json.dumps(facts))
    monkeypatch.setattr(timing, "measure", lambda signature: FREE)
    assert Timings(tmp_path).speed(TINY) == FREE


def test_other_machines_measure_anew(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda signature: UNIT)
    Timings(tmp_path).speed(TINY)
    monkeypatch.setattr(timing, "machine", lambda: {"cpu": "another", "cores": 4, "gpu": None})
    monkeypatch.setattr(timing, "measure", lambda signature: FREE)
    assert Timings(tmp_path).speed(TINY) == FREE
    assert len(json.loads((tmp_path / "timings.json").read_text())["entries"]) == 2


def test_a_folder_that_cannot_be_written_is_no_hindrance(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda signature: UNIT)
    (tmp_path / "file").write_text("")
    assert Timings(tmp_path / "file").speed(TINY) == UNIT


def test_the_cache_lies_where_the_user_says(monkeypatch, tmp_path: Path):
    """A relative path is to be ignored (XDG Base Directory Specification)."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here" / "halfmoon"
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == tmp_path / ".cache" / "halfmoon"


def test_a_rehearsal_survives_its_file(tmp_path: Path):
    small = tiny(replace(BASE, method="semifl", **AT_SERVER))
    timings = Timings(tmp_path)
    found = timings.kept("rehearsal", 0, Rehearsal.of, lambda: rehearse(small, "server", lambda signature: FREE))
    again = Timings(tmp_path).kept("rehearsal", 0, Rehearsal.of, lambda: pytest.fail("played twice"))
    assert again == found
    assert {asked.work for asked in found.later} == {"train", "fine-tune", "census"}
    assert all(value >= 0 for value in (*found.visit.values(), *found.step.values(), found.rest))


# The command

RECIPE = """
title = "Toy"
paper = "none"
item = "Table 1"
about = "two methods"
rows = "method"
seeds = [0, 1]
[protocol]
clients = 4
cohort = 2
rounds = 2
labels_per_class = 1
network = "small"
width = 4
threads = 1
budget = "none"
[axes.method.fedavg]
set = { method = "fedavg" }
[axes.method.folder]
set = { method = "fedavg", data = "./nowhere" }
extra = true
[scales.more]
about = "ten times the rounds"
set = { rounds = 20 }
[scales.folder]
about = "another data set"
set = { data = "./nowhere" }
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch) -> str:
    """Return a small recipe's file, with a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "toy.toml").write_text(RECIPE)
    return str(tmp_path / "toy.toml")


def test_a_recipe_is_listed_with_its_cost(toy: str, capsys):
    assert cli.main(["recipes", toy, "--json"]) == 0
    said = capsys.readouterr()
    (facts,) = json.loads(said.out)["recipes"]
    assert "measuring this machine" in said.err
    assert (facts["name"], facts["cells"], facts["runs"]) == ("toy", 1, 2)
    assert facts["cost"]["seconds"] == pytest.approx(2 * facts["cost"]["seconds_per_run"], abs=0.01)
    assert facts["cost"]["rows"]["fedavg"]["seconds"] == facts["cost"]["seconds"] > 0
    assert cli.main(["recipes", toy, "--json", "--scale", "more"]) == 0
    said = capsys.readouterr()
    (longer,) = json.loads(said.out)["recipes"]
    assert said.err == ""  # all of it was measured before
    assert longer["cost"]["seconds"] == pytest.approx(10 * facts["cost"]["seconds"], rel=0.2)


def test_a_recipe_of_unknown_data_says_why(toy: str, capsys):
    assert cli.main(["recipes", toy, "--json", "--scale", "folder"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)["recipes"]
    assert facts["cost"]["seconds"] is None
    assert "known only when it is loaded" in facts["cost"]["reason"]
    assert cli.main(["recipes", toy, "--scale", "folder"]) == 0
    assert "known only when it is loaded" in capsys.readouterr().out


def test_a_recipe_in_detail(toy: str, capsys):
    assert cli.main(["recipes", toy]) == 0
    words = capsys.readouterr().out
    for part in ("toy: Toy", "method: fedavg, folder (with --only)", "rounds = 2", "scale more: ten", "core", "fedavg"):
        assert part in words


def test_all_recipes_are_listed_without_measuring(capsys, tmp_path: Path, monkeypatch):
    from halfmoon.sweep.recipe import names

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["recipes", "--no-cost"]) == 0
    said = capsys.readouterr()
    assert all(name in said.out for name in names())
    assert said.err == ""
    assert not list(tmp_path.iterdir())


def test_a_scale_that_only_some_have_is_no_mistake_in_a_list(toy: str, capsys):
    assert cli.main(["recipes", "--no-cost", "--json", "--scale", "nosuch"]) == 0
    found = json.loads(capsys.readouterr().out)["recipes"]
    assert all(each["runs"] is None and each["reason"] == "it has no scale nosuch" for each in found)


@pytest.mark.parametrize(
    ("words", "said"), [(["feddure-tabel1"], "unknown recipe"), (["feddure-table1", "--scale", "smal"], "small")]
)
def test_mistakes_are_one_sentence(words: list[str], said: str, capsys):
    assert cli.main(["recipes", "--no-cost", *words]) == 2
    assert said in capsys.readouterr().err


def test_durations_have_the_unit_that_fits():
    words = [duration(value) for value in (None, 0.4, 89, 600, 7200, 172_800, 1.6 * 31_557_600)]
    assert words == ["-", "0 s", "89 s", "10 min", "2.0 hours", "2.0 days", "1.6 years"]


def test_what_computes_is_named():
    assert words_of({"cpu": "X", "cores": 2, "gpu": None}) == "2 cores (X)"
    assert words_of({"cpu": "X", "cores": 1, "gpu": None}) == "1 core (X)"
    assert words_of({"cpu": "X", "cores": 2, "gpu": "Y"}) == "GPU Y"

"""Recipes: all that ship are valid and hold every published number, and what is wrong in one's own is one sentence."""

import csv
import json
import re
import tomllib
from collections import Counter
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from halfmoon.cli import main as cli
from halfmoon.config.schema import Config, identity, method_options
from halfmoon.core import toml
from halfmoon.core.errors import UserError
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.methods import registry
from halfmoon.methods.semifl import SemiFL
from halfmoon.runs import factory, runner
from halfmoon.studies import recipe
from halfmoon.studies.grid import RecipeCell, build_cells, parse_selection
from halfmoon.studies.recipe import Recipe, find_published
from halfmoon.studies.recipe_file import INHERITED, merge_layers, read_recipe
from halfmoon.studies.run_sweep import RunReport, run_sweep
from halfmoon.studies.sweep_folder import SweepFolder

FOLDER = Path(str(resources.files("halfmoon"))) / "recipes"
NAMES = recipe.list_names()
SCALES = (None, "small", "tiny")
ASKED = {
    "feddure": ("table1", "table2", "figure1", "figure3", "figure4", "figure5", "figure6", "figure6cd"),
    "fedloke": (
        *("table1", "table2", "table4", "table5", "table6"),
        *("figure2", "figure4", "figure5", "figure6", "figure7"),
    ),
    "feddb": ("table1", "table2", "table3", "table4", "figure1", "figure3", "figure5", "figure6", "figure7"),
    "semifl": ("table1", "table2", "figure2", "figure5", "figure6", "figure7", "figure8", "ablations"),
    "proxyfl": ("table1", "table6"),
    "fl2": ("table1",),
    "cbafed": ("table1", "table2", "table3"),
    "twinsight": ("table1", "table2"),
}
"""The tables and figures of the papers that the library reproduces."""


@cache
def loaded(name: str) -> Recipe:
    return recipe.load(name)


@cache
def every_cell(name: str, scale: str | None) -> tuple[RecipeCell, ...]:
    """Return all cells of a recipe with seed 0, those that are not the paper's too."""
    found = loaded(name)
    only = {axis: tuple(value.name for value in values) for axis, values in found.axes.items()}
    return tuple(build_cells(found, only, [0], found.scale(scale) if scale else None))


def mark(cell: RecipeCell) -> str:
    """Return the identity of a cell's run with seed 0."""
    return identity(cell.configs[0], cell.configs[0].method)


def cell_at(name: str, scale: str | None = None, **at: str) -> RecipeCell:
    (found,) = (cell for cell in every_cell(name, scale) if cell.at == at)
    return found


def test_every_table_and_figure_has_its_recipe() -> None:
    wanted = {f"{paper}-{item}" for paper, items in ASKED.items() for item in items}
    assert wanted <= set(NAMES)
    assert set(NAMES) - wanted == {"fedloke-figure6a"}  # another kind of picture than 6b and 6c


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        # By default the paper's scale and one of the others, in turn.
        pytest.param(name, scale, marks=[pytest.mark.nightly] if scale == ("small", "tiny")[number % 2] else [])
        for number, name in enumerate(NAMES)
        for scale in SCALES
    ],
)
def test_every_cell_is_a_valid_configuration_and_a_run_of_its_own(name: str, scale: str | None) -> None:
    """Scales that set what an axis sets would make equal runs of different cells.
    Training in one place is the same in both settings of SemiFL's Figure 2; the local and the global model of FedLoKe's
    Figure 4 are measured in one run; FedDure's Figure 5 begins at the same point in both panels."""
    found = every_cell(name, scale)
    cells_by_mark = Counter((mark(cell), cell.measure) for cell in found)
    same = {cell.at["method"] for cell in found if cells_by_mark[mark(cell), cell.measure] > 1}
    alike = {"semifl-figure2": {"supervised", "partially-supervised"}}
    if name == "feddure-figure5":
        same = {cell.at["iterations"] for cell in found if cells_by_mark[mark(cell), cell.measure] > 1}
        alike = {name: {"1"}}
    assert same == alike.get(name, set())


@pytest.mark.parametrize("name", NAMES)
def test_what_a_recipe_says_of_itself(name: str) -> None:
    found = loaded(name)
    assert {"(FL)^2": "fl2", "Twin-sight": "twinsight"}.get(found.paper, found.paper.lower()) == name.partition("-")[0]
    assert found.title == f"{found.paper}, {found.item}"
    assert found.about[0].islower() or found.about[0].isupper()
    assert not found.about.endswith(".")
    assert not found.reading or found.reading.endswith(".")
    assert {"small", "tiny"} <= set(found.scales)
    assert "digits" in {value.name for value in found.axes["dataset"] if value.extra}
    assert (found.kind == "lines") == (found.x is not None)
    if found.x:
        assert [value.name for value in found.axes[found.x]] == sorted(
            (value.name for value in found.axes[found.x]), key=float
        )


def test_the_scales_say_how_many_rounds_they_play() -> None:
    """A scale's words are all that marks its numbers: the rounds in them are those of its cells."""
    for name in NAMES:
        for scale in ("small", "tiny"):
            about = loaded(name).scale(scale).about
            rounds = {cell.configs[0].rounds for cell in every_cell(name, scale)}
            if name == "feddure-figure5":
                assert re.search(r"rounds \(.*\d+ to \d+ where", about)
            else:
                assert rounds == {30 if name.startswith("semifl") and scale == "small" else max(rounds)}
                assert f"{rounds.pop()} of " in about, (name, scale)


def test_every_when_of_the_bases_meets_a_cell() -> None:
    bases = {path.stem: tomllib.loads(path.read_text()) for path in FOLDER.glob("_*.toml")}
    assert sorted(bases) == ["_cbafed", "_feddb", "_feddure", "_fedloke", "_proxyfl", "_semifl", "_twinsight"]
    for base, keys in bases.items():
        over = [name for name in NAMES if name.startswith(base.removeprefix("_"))]
        ats = [cell.at for name in over for cell in every_cell(name, None)]
        whens = [*keys.get("when", ()), *(each for scale in keys["scales"].values() for each in scale.get("when", ()))]
        for when in whens:
            meant = {axis: [names] if isinstance(names, str) else names for axis, names in when["at"].items()}
            assert any(all(at.get(axis) in names for axis, names in meant.items()) for at in ats), (base, when)


@pytest.mark.parametrize("name", NAMES)
def test_every_when_of_a_recipe_and_every_skip_meets_a_cell(name: str) -> None:
    found = loaded(name)
    ats = [cell.at for cell in every_cell(name, None)]
    parsed = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    inherited = read_recipe(FOLDER / f"{name}.toml")[INHERITED]
    for when in found.when[inherited[""] :]:
        assert any(recipe.matches_axes(when.at, at) for at in ats), when
    for scale, value in found.scales.items():
        for when in value.when[inherited[scale] :]:
            assert any(recipe.matches_axes(when.at, at) for at in ats), when
    for skipped in found.skip:
        assert not any(recipe.matches_axes(skipped, at) for at in ats)
    assert len(found.skip) == len(parsed.get("skip", ()))


def test_digits_can_be_shared_out_at_the_tiny_scale() -> None:
    """The embedded images are few: every tiny cell on them has a split all the same."""
    data = None
    seen = set[Any]()
    for name in NAMES:
        for cell in every_cell(name, "tiny"):
            config = cell.configs[0]
            scenario = factory.build_scenario(config)
            if config.data == "digits" and scenario not in seen:
                data = data or factory.load_source_for_network(config)
                seen.add(scenario)
                split = factory.get_split(config, data)
                assert split.clients == config.clients
    assert len(seen) > 30


COUNTS = {
    "cifar10": [5000] * 10,
    "fashion_mnist": [6000] * 10,
    "cinic10": [9000] * 10,
    "svhn": [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659],
    "cifar100": [500] * 100,
    "tiny_imagenet": [500] * 200,
}
"""The training images of each class."""


def test_the_papers_images_can_be_shared_out() -> None:
    """Every full-scale cell has a split of as many images as its data set has, and no client is without a label."""
    draw = np.random.default_rng(0)
    labels = {name: draw.permutation(np.repeat(np.arange(len(each)), each)) for name, each in COUNTS.items()}
    seen = set[Any]()
    for name in NAMES:
        for config in (cell.configs[0] for cell in every_cell(name, None)):
            case = (config.data, factory.build_scenario(config))
            if case in seen or config.data == "digits":
                continue
            seen.add(case)
            split = case[1].split(labels[config.data], len(COUNTS[config.data]))
            held = np.bincount(split.client[split.labeled & (split.client >= 0)], minlength=split.clients)
            some = {"server": 0, "some": config.labeled_clients, "clients": config.clients}[config.labels_at]
            assert (held > 0).sum() == some, (name, config.data)
    assert {data for data, _ in seen} == set(COUNTS)


DATASETS = {
    "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100",
    "SVHN": "svhn",
    "CINIC-10": "cinic10",
    "Fashion-MNIST": "fashion_mnist",
    "TinyImageNet": "tiny_imagenet",
}
METHODS = {
    "FedAvg (labeled only)": "fedavg",
    "FedAvg+UDA": "fedavg-uda",
    "FedProx+UDA": "fedprox-uda",
    "FedAvg+FixMatch": "fedavg-fixmatch",
    "FedProx+FixMatch": "fedprox-fixmatch",
    "FedDure w/o C-reg": "feddure-without-creg",
    "FedDure w/o F-reg": "feddure-without-freg",
    "FixMatch (centralized)": "fixmatch",
    "Fully Supervised": "supervised",
    "Partially Supervised": "partially-supervised",
    "Pseudo-Labeling": "pseudo-label",
    "Mean Teacher": "mean-teacher",
    "HeteroFL (fully supervised)": "heterofl",
    "SemiFL (client side)": "semifl",
    "SemiFL, one part only (a)": "global-labels",
    "SemiFL, one part only (b)": "alternate",
    "FedProx (labeled only)": "fedprox",
    "FedAvg+FlexMatch": "flexmatch",
    "(FL)^2": "fl2",
    "FedAvg upper bound": "upper",
    "FedAvg lower bound": "lower",
    "FedProx lower bound": "fedprox-lower",
    "FedAvg+FreeMatch": "fedavg-freematch",
    "FedProx+FreeMatch": "fedprox-freematch",
    "FedAvg+": "fedavg-plus",
    "Fed-Consist+": "fed-consist-plus",
}
SETTINGS = {
    "(IID, IID)": "iid-iid",
    "(IID, DIR)": "iid-dir",
    "(DIR, DIR)": "dir-dir",
    "IID": "iid",
    "Dir(0.01)": "dir-0_01",
    "Dir(0.1)": "dir-0_1",
    "Dir(0.3)": "dir-0_3",
    "Dir(0.5)": "dir-0_5",
    "2 classes per client": "k2",
    "centralized": "centralized",
    "pair-block Dirichlet 0.1": "pair-0_1",
    "pair-block Dirichlet 0.5": "pair-0_5",
    "pair-block Dirichlet 1": "pair-1",
}


class Place(NamedTuple):
    """Where a published number stands."""

    name: str
    at: dict[str, str]


def place_of(row: dict[str, str]) -> Place:
    """Return the cell that a row of the published numbers belongs to, found without the recipes' own words."""
    paper = row["paper"]
    table = row["table"]
    count = row["labels"].partition(" ")[0]
    first, *rest = row["setting"].split(", ") if not row["setting"].startswith("(") else [row["setting"]]
    method = METHODS.get(row["method"], row["method"].lower())
    at = {"dataset": DATASETS[row["dataset"]], "setting": SETTINGS.get(first, first), "method": method}
    if paper == "FedDB":
        at["method"] = "fixmatch" if method == "fedavg-fixmatch" else method
    if paper == "FedLoKe" and table in "12":
        del at["setting"]
        at["labels"] = {"r=1%": "r1", "r=5%": "r5", "r=10%": "r10"}[row["labels"]]
    if paper == "FedLoKe" and table == "6":
        del at["setting"]
        at["clients"] = rest[0].removesuffix(" clients")
    if paper == "SemiFL" and table == "1":
        low = {"CIFAR-100": "2500"}.get(row["dataset"], "250")
        at["labels"] = {low: "low", "all": "all"}.get(count, "high")
    if paper in ("CBAFed", "Twin-sight"):
        del at["setting"]
        paper = paper.replace("-", "")
    if paper == "(FL)^2":
        paper = "fl2"
        maximum = {"CIFAR-10": "40", "SVHN": "250", "CIFAR-100": "400"}[row["dataset"]]
        at["labels"] = "high" if count == maximum else "low"
    return Place(f"{paper.lower()}-table{table}", at)


ROWS = list(csv.DictReader((FOLDER / "published.csv").read_text().splitlines()))


def test_every_published_number_stands_in_one_cell() -> None:
    """All rows of the file, by a way that does not go through the recipes' words; and no number stands elsewhere."""
    numbers: dict[str, int] = Counter()
    taken = set()
    for row in ROWS:
        name, at = place_of(row)
        published = cell_at(name, **at).published
        assert published is not None, (name, at)
        assert published.mean == float(row["mean"])
        assert published.deviation == (float(row["std"]) if row["std"] else None)
        assert published.note == row["note"]
        numbers[name] += 1
        taken.add((name, *sorted(at.items())))
    assert len(taken) == len(ROWS) == 1050
    for name in NAMES:
        if "-table" in name and name != "feddb-table4":
            shown = sum(cell.published is not None for cell in every_cell(name, None))
            assert shown == numbers[name], name


def test_labels_of_the_runs_are_those_of_the_published_rows() -> None:
    """Where the file states how many images are labeled, that is what is run; SemiFL's full rows use none of them."""
    for row in ROWS:
        name, at = place_of(row)
        config = cell_at(name, **at).configs[0]
        message = row["labels"]
        if message.endswith(" labels") and message != "all labels":
            assert config.labels == int(message.split()[0]), row
        elif message.startswith("r="):
            assert config.label_ratio == pytest.approx(float(message[2:-1]) / 100)
        elif message == "5 per class and client":
            assert config.labels_per_class == 5


def test_numbers_of_the_ablation_are_those_of_the_tables() -> None:
    """FedDB's Table 4 has rows of FixMatch and FixMatch-FedDPL: the numbers, and here the runs, of Tables 1 to 3."""
    pairs = {"neither": "fixmatch", "dpl": "fixmatch-feddpl", "both": "feddb"}
    for table, setting in {"1": "iid", "2": "dir-0_3", "3": "dir-0_1"}.items():
        for four, one in pairs.items():
            here = cell_at("feddb-table4", dataset="svhn", setting=setting, method=four)
            there = cell_at(f"feddb-table{table}", dataset="svhn", setting=setting, method=one)
            assert here.published == there.published
            assert mark(here) == mark(there)


def test_figure_1_of_feddure_plays_cells_of_table_1() -> None:
    """All eight are Table 1's at (DIR, DIR), which a sweep of either runs once for both."""
    here = [cell for cell in every_cell("feddure-figure1", None) if cell.at["dataset"] == "cifar10"]
    assert len(here) == 8
    assert {mark(cell) for cell in here} < {mark(cell) for cell in every_cell("feddure-table1", None)}
    assert not any(cell.published for cell in here)  # the text prints no height


def test_a_number_that_two_rows_claim_is_none() -> None:
    assert find_published({"paper": "FedDure", "table": "1"}) is None
    assert find_published({"paper": "FedDure", "table": "9"}) is None


def test_protocols_by_hand() -> None:
    """A cell of each paper, against numbers copied from the notes (rounds, batches, optimizer, labels)."""
    table = cell_at("semifl-table1", dataset="cifar100", setting="k2", labels="low", method="semifl").configs[0]
    assert (table.width, table.labels, table.server_batch, table.rounds) == (8, 2500, 250, 800)
    digits = cell_at("semifl-table1", dataset="svhn", setting="iid", labels="high", method="fedrgd").configs[0]
    assert (digits.labels, digits.server_batch, digits.norm, digits.flip) == (1000, 10, "batch", None)
    assert registry.make("semifl", method_options(digits, "semifl")) == SemiFL(
        labels="step", mix_weight=0.0, fine_tune=False, server_share="groups"
    )
    few = cell_at("semifl-table1", dataset="cifar10", setting="iid", labels="low", method="fedmatch").configs[0]
    assert (few.labels, few.server_batch, few.method) == (250, 10, "fedmatch-semifl")
    single = cell_at(
        "semifl-table1", dataset="svhn", setting="centralized", labels="high", method="partially-supervised"
    ).configs[0]
    assert (single.rounds, single.epochs, single.lr, single.labeled_batch) == (400, 1, 0.1, 10)
    long = cell_at("semifl-table1", dataset="cifar10", setting="centralized", labels="low", method="fixmatch")
    assert long.configs[0].rounds * (long.configs[0].steps or 0) == 2**20
    assert long.configs[0].unlabeled_batch == 7 * 64
    for name in ("feddb-table1", "fedloke-table5"):
        setting = {"feddb-table1": "iid", "fedloke-table5": "dir-0_1"}[name]
        data = {"feddb-table1": "svhn", "fedloke-table5": "tiny_imagenet"}[name]
        assert cell_at(name, dataset=data, setting=setting, method="fedrgd").configs[0].norm == "group"
    assert cell_at("feddb-table1", dataset="svhn", setting="iid", method="feddb").configs[0].labels == 1000
    assert cell_at("feddb-table2", dataset="svhn", setting="dir-0_3", method="feddb").configs[0].labels == 4000


def test_feddures_tables_play_what_the_paper_fixes() -> None:
    """5e-4 for eta, eta_s and eta_w (Section 4.1), no bias, raw logits; the scaled-down ones use the defaults."""
    for name in ("feddure-table1", "feddure-table2", "feddure-figure4", "feddure-figure6cd"):
        for cell in every_cell(name, None):
            config = cell.configs[0]
            if config.method.startswith("feddure"):
                made = registry.make(config.method, method_options(config, config.method))
                assert (config.preset, config.lr, made.regulator_lr) == ("paper", 5e-4, None)
                assert (made.regulator_bias, made.regulator_input, made.hidden) == (0.0, "logits", 128)
        assert {cell.configs[0].preset for cell in every_cell(name, "small")} == {"none"}


def test_sages_protocol_by_hand() -> None:
    """Section 2 of the notes: 5 * floor(images of a client / 128) steps, of which 228,000 to 560,000 are a run."""
    images = {"cifar10": 50_000, "cifar100": 50_000, "svhn": 73_257, "cinic10": 90_000}
    totals = {"cifar10": 228_000, "cifar100": 380_000, "svhn": 168_000, "cinic10": 560_000}
    for data, count in images.items():
        config = cell_at("proxyfl-table1", dataset=data, setting="pair-0_1", method="sage").configs[0]
        assert config.steps == 5 * (count // 20 // 128)
        assert config.steps * config.cohort * config.rounds == totals[data]
        assert (config.labeled_batch, config.unlabeled_batch, config.schedule) == (128, 256, "constant")


def test_proxyfls_labels_by_hand() -> None:
    """Its code takes 460 images of each class of SVHN; 10 % of the others, whose classes are of one size. Table 6 has
    twice as many."""
    labels = {name: np.repeat(np.arange(len(each)), each) for name, each in COUNTS.items()}
    wanted = {"svhn": [460] * 10, "cifar10": [500] * 10, "cifar100": [50] * 100, "cinic10": [900] * 10}
    for (data, tenth), (table, times) in product(wanted.items(), {"1": 1, "6": 2}.items()):
        config = cell_at(f"proxyfl-table{table}", dataset=data, setting="pair-0_1", method="proxyfl").configs[0]
        counts = [times * count for count in tenth]
        split = factory.build_scenario(config).split(labels[data], len(counts))
        assert np.bincount(labels[data][split.labeled]).tolist() == counts
        assert len(labels[data]) - sum(counts) == (~split.labeled).sum()  # whom the labeled images join, unlabeled
        assert config.reuse_labeled


def test_feddbs_figures_1_and_3_play_section_4_2() -> None:
    """ "10 clients, each participating in model training in every round", 4,000 and 46,000 images on CIFAR-10."""
    labels = np.repeat(np.arange(10), 5000)
    for name in ("feddb-figure1", "feddb-figure3"):
        for scale, rounds in ((None, 800), ("small", 40), ("tiny", 12)):
            config = cell_at(name, scale, dataset="cifar10", setting="dir-0_3", method="fixmatch").configs[0]
            assert (config.clients, config.cohort, config.rounds) == (10, 10, rounds)
        config = cell_at(name, dataset="cifar10", setting="dir-0_3", method="fixmatch").configs[0]
        split = factory.build_scenario(config).split(labels, 10)
        assert (split.labeled.sum(), (~split.labeled & (split.client >= 0)).sum()) == (4000, 46_000)
        assert (config.reuse_labeled, config.setting, config.dirichlet_alpha) == (False, "feddb-dir", 0.3)
        assert np.bincount(labels[split.labeled]).tolist() == [400] * 10  # "a balanced labeled dataset" (Section 5.1)


def test_labels_of_some_clients_are_trained_on_as_the_authors_do() -> None:
    """CBAFed's 11 epochs of the labeled client; no other method's, and nowhere an epoch of a few unlabeled images."""
    for name in ("cbafed-table1", "cbafed-table3", "twinsight-table1"):
        for cell in every_cell(name, None):
            config = cell.configs[0]
            parsed = method_options(config, config.method).get("labeled_epochs")
            assert (config.epoch, config.epochs) == ("larger", 1)
            assert parsed == (11 if config.method == "cbafed" else None)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_names_its_sources_and_a_scale_does_not(name: str) -> None:
    """What a scale unsets is not said of its page; of the seeds' papers, sentences are quoted by their section."""
    found = loaded(name)
    assert found.sources in found.describe_reading(None)
    quoted = found.paper in ("FedDure", "FedLoKe", "FedDB", "SemiFL")
    assert ("Section" in found.sources and "'" in found.sources) == quoted
    assert all(word in found.sources for word in ("round", "seed") if not quoted)
    for scale in found.scales.values():
        message = found.describe_reading(scale)
        assert not found.sources or found.sources not in message
        for option in scale.set.get("unset", ()):
            assert f"{option} '" not in message, (name, scale.name)
        # Scales of these have other pixels, or other statistics.
        assert found.paper not in ("FedLoKe", "FedDB") or "normalized" not in message


def test_rows_of_semifls_table_2_are_the_authors() -> None:
    """SemiFL alone has Mixup; labels of the moment come under the batch's statistics; the controls lose momentum."""
    rows = {
        "fedavg-fixmatch": ("batch", {"fine_tune": False, "labels": "step", "mix_weight": 0.0}),
        "global-labels": ("running", {"fine_tune": False, "mix_weight": 0.0}),
        "alternate": ("batch", {"labels": "step", "mix_weight": 0.0}),
        "semifl": ("running", {}),
    }
    plain = {f"{name}-plain": (where, {**rows[name][1], "server_momentum": 0.0}) for name, (where, _) in rows.items()}
    del plain["alternate-plain"], plain["semifl-plain"]
    for name, (labeling, options) in {**rows, **plain}.items():
        config = cell_at("semifl-table2", dataset="cifar10", setting="iid", method=name).configs[0]
        assert (config.labeling, config.options.get("semifl", {})) == (labeling, options), name


def test_statistics_and_constants_are_each_papers_code() -> None:
    """FedDB labels and tests under batch statistics; FedLoKe does not normalize; SemiFL and FedDB have their own."""
    fedloke = cell_at("fedloke-table1", dataset="cifar10", labels="r5", method="fedloke").configs[0]
    feddb = cell_at("feddb-table1", dataset="cifar10", setting="iid", method="feddb").configs[0]
    semifl, fedrgd = (
        cell_at("semifl-table1", dataset="cifar10", setting="iid", labels="high", method=method).configs[0]
        for method in ("semifl", "fedrgd")
    )
    assert (fedloke.pixel_mean, fedloke.pixel_std) == ((0.0,), (1.0,))
    assert feddb.pixel_std == semifl.pixel_std == fedrgd.pixel_std == (0.2023, 0.1994, 0.2010)
    assert (feddb.labeling, feddb.test_statistics) == ("batch", "batch")
    assert (semifl.labeling, semifl.test_statistics) == ("running", "running")
    assert (fedrgd.labeling, fedrgd.options["semifl"]["labels"]) == ("batch", "step")
    svhn = cell_at("feddb-table1", dataset="svhn", setting="iid", method="feddb").configs[0]
    assert svhn.pixel_std is None


def test_figure_6_of_feddure_labels_the_shares_that_it_names() -> None:
    """On CIFAR-10, 50,000 images: labels * classes * clients / 50,000 is the share at full scale."""
    for cell in every_cell("feddure-figure6", None):
        config = cell.configs[0]
        share = float(cell.at["share"]) / 100
        assert config.labels_per_class is not None
        assert config.labels_per_class * 10 * config.clients / 50_000 == pytest.approx(share)
    for cell in every_cell("feddure-figure6", "small"):
        assert cell.configs[0].label_ratio == pytest.approx(float(cell.at["share"]) / 100)
        assert cell.configs[0].labels_per_class is None


def test_figure_7_of_fedloke_takes_the_steps_of_all_images() -> None:
    """1000 images of a client, 50 of them labeled: ceil(950 / 32) = 30 steps; SVHN 1465, 73 labeled: 44."""
    whole = cell_at("fedloke-figure7", dataset="cifar10", method="fedloke", share="1").configs[0]
    assert (whole.steps, whole.epoch, whole.unlabeled_batch) == (None, "unlabeled", 32)
    for data, images in (("cifar10", 50_000 // 50), ("svhn", 73_257 // 50)):
        unlabeled = images - int(0.05 * images)
        part = cell_at("fedloke-figure7", dataset=data, method="fedloke", share="0.4").configs[0]
        assert part.steps == -(-unlabeled // 32)
    none = cell_at("fedloke-figure7", dataset="svhn", method="fedrgd", share="0").configs[0]
    assert none.options == {"fedrgd": {"unlabeled_weight": 0.0}}


@pytest.mark.parametrize(
    ("figure", "table", "at", "there"),
    [
        ("feddure-table2", "feddure-table1", {"setting": "dir-dir"}, {"setting": "dir-dir"}),
        ("feddure-figure5", "feddure-table1", {"fixed": "total", "iterations": "1"}, {"setting": "dir-dir"}),
        ("feddure-figure6", "feddure-table1", {"setting": "iid-dir", "share": "10"}, {"setting": "iid-dir"}),
        ("feddure-figure6cd", "feddure-table1", {"cohort": "5"}, {"setting": "dir-dir"}),
        ("feddure-figure4", "feddure-table1", {"setting": "dir-dir", "gamma": "0.5"}, {"setting": "dir-dir"}),
        ("fedloke-figure5", "fedloke-table4", {"alpha": "0.1"}, {"setting": "dir-0_1"}),
        ("fedloke-figure7", "fedloke-table1", {"share": "1"}, {"labels": "r5"}),
        ("feddb-figure5", "feddb-table1", {"setting": "iid"}, {"setting": "iid"}),
        ("feddb-figure6", "feddb-table2", {"setting": "dir-0_3"}, {"setting": "dir-0_3"}),
        ("feddb-figure7", "feddb-table2", {"setting": "dir-0_3"}, {"setting": "dir-0_3"}),
        ("semifl-figure6", "semifl-table2", {"setting": "k2"}, {"setting": "k2"}),
        ("semifl-figure5", "semifl-table1", {"setting": "k2", "labels": "low"}, {"setting": "k2", "labels": "low"}),
    ],
)
def test_figures_share_the_runs_of_tables(figure: str, table: str, at: dict[str, str], there: dict[str, str]) -> None:
    method = figure.split("-")[0]
    common = {"dataset": "cifar100" if method == "feddb" else "cifar10", "method": method}
    assert mark(cell_at(figure, **common, **at)) == mark(cell_at(table, **common, **there))


CUSTOM_RECIPE = """
title = "Mine, Table 1"
paper = "Mine"
item = "Table 1"
about = "two methods"
rows = "method"
seeds = [0, 3]

[protocol]
data = "digits"
rounds = 2
clients = 4
cohort = 2
steps = 2
width = 4

[axes.method.fedavg]
title = "FedAvg"
set = { method = "fedavg" }

[axes.method.feddure]
title = "FedDure"
set = { method = "feddure", options = { feddure = { hidden = 8 } } }

[axes.amount.few]
title = "few"
set = { labels_per_class = 1 }

[axes.amount.many]
title = "many"
set = { label_ratio = 0.1 }
extra = true

[scales.half]
about = "1 of 2 rounds"
set = { rounds = 1 }
"""


def write(folder: Path, text: str = CUSTOM_RECIPE, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(folder: Path, text: str, **more: Any) -> str:
    """Return the sentence with which a recipe, or its cells, are refused."""
    with pytest.raises(UserError) as caught:
        build_cells(recipe.load(str(write(folder, text))), **{"selection": {}, **more})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    custom = recipe.load(str(write(tmp_path)))
    assert (custom.name, custom.kind, custom.columns, custom.seeds) == ("mine", "table", ("amount",), (0, 3))
    found = build_cells(custom, {})
    assert [cell.at for cell in found] == [
        {"method": "fedavg", "amount": "few"},
        {"method": "feddure", "amount": "few"},
    ]
    assert all(cell.published is None for cell in found)
    assert {seed: (c.seed, c.split_seed) for seed, c in found[0].configs.items()} == {0: (0, 0), 3: (3, 3)}
    assert found[0].configs[0].options == {}  # only its method's
    assert found[1].configs[3].options == {"feddure": {"hidden": 8}}
    assert [cell.configs[0].rounds for cell in build_cells(custom, {}, scale=custom.scale("half"))] == [1, 1]
    assert [cell.configs[5].threads for cell in build_cells(custom, {}, [5], overrides={"threads": 1})] == [1, 1]


def test_the_order_of_the_grid_is_that_of_the_axes(tmp_path: Path) -> None:
    custom = recipe.load(str(write(tmp_path)))
    only = parse_selection(custom, ["amount=many,amount=few", "method=feddure,method=fedavg"])
    assert only == {"amount": ("many", "few"), "method": ("feddure", "fedavg")}
    assert [cell.label for cell in build_cells(custom, only)] == [
        "method=fedavg, amount=few",
        "method=fedavg, amount=many",
        "method=feddure, amount=few",
        "method=feddure, amount=many",
    ]


def test_later_layers_win() -> None:
    below = {"rounds": 3, "labels": 40, "options": {"feddure": {"hidden": 8, "warmup": 1}}, "epochs": 2}
    above = {"label_ratio": 0.1, "options": {"feddure": {"warmup": 2}, "fedloke": {"ema": 0.5}}, "unset": ["epochs"]}
    assert merge_layers([below, above]) == {
        "rounds": 3,
        "label_ratio": 0.1,
        "options": {"feddure": {"hidden": 8, "warmup": 2}, "fedloke": {"ema": 0.5}},
    }
    assert merge_layers([{"unset": ["rounds"], "rounds": 4}]) == {"rounds": 4}
    assert merge_layers([{"rounds": 1}, {"rounds": 2}, {"unset": ["lr"]}]) == {"rounds": 2}
    assert merge_layers([]) == {}


def test_layers_of_a_cell(tmp_path: Path) -> None:
    """Protocol, the values in the order of the axes, `when`, the scale, its `when`, the command line."""
    more = """
when = [{ at = { method = "fedavg", amount = ["few", "many"] }, set = { rounds = 7, cohort = 3 } }]
"""
    over = """
[[scales.half.when]]
at = { method = "fedavg" }
set = { cohort = 4 }
"""
    text = more + CUSTOM_RECIPE.replace("labels_per_class = 1 }", "labels_per_class = 1, rounds = 5 }") + over
    custom = recipe.load(str(write(tmp_path, text)))
    only = parse_selection(custom, ["amount=few"])
    plain = [cell.configs[0] for cell in build_cells(custom, only)]
    assert [(c.rounds, c.cohort, c.labels_per_class) for c in plain] == [(7, 3, 1), (5, 2, 1)]
    scaled = [cell.configs[0] for cell in build_cells(custom, only, scale=custom.scale("half"))]
    assert [(c.rounds, c.cohort) for c in scaled] == [(1, 4), (1, 2)]
    over_all = [
        cell.configs[0] for cell in build_cells(custom, only, scale=custom.scale("half"), overrides={"rounds": 9})
    ]
    assert [c.rounds for c in over_all] == [9, 9]


def test_a_recipe_over_another(tmp_path: Path) -> None:
    """Own axes of values from below, own values, own protocol on top, and both files' say about a scale."""
    write(tmp_path, CUSTOM_RECIPE, "below.toml")
    text = """
title = "Over"
extends = "below"
seeds = [1]

[protocol]
rounds = 6

[axes]
amount = ["many"]

[axes.method]
fedavg = {}

[axes.method.late]
set = { method = "feddure", options = { feddure = { warmup = 1 } } }

[scales.half]
set = { cohort = 1, unset = ["steps"] }
when = [{ at = { method = "late" }, set = { cohort = 2 } }]

[scales.third]
about = "a third"
"""
    found = recipe.load(str(write(tmp_path, text, "over.toml")))
    assert (found.title, found.paper, found.seeds) == ("Over", "Mine", (1,))
    assert [value.name for value in found.axes["method"]] == ["fedavg", "late"]
    assert [value.name for value in found.axes["amount"]] == ["many"]
    assert set(found.scales) == {"half", "third"}
    assert found.scale("half").about == "1 of 2 rounds"
    only = {"amount": ("many",)}
    assert [(c.configs[1].rounds, c.configs[1].steps) for c in build_cells(found, only)] == [(6, 2), (6, 2)]
    scaled = [cell.configs[1] for cell in build_cells(found, only, scale=found.scale("half"))]
    assert [(c.rounds, c.cohort, c.steps) for c in scaled] == [(1, 1, None), (1, 2, None)]


def test_a_recipe_may_extend_what_ships(tmp_path: Path) -> None:
    text = 'extends = "_feddure"\n[axes]\ndataset = ["digits"]\nmethod = ["fedavg"]\n[protocol]\nrounds = 3\n'
    (cell,) = build_cells(recipe.load(str(write(tmp_path, text))), {"dataset": ("digits",)})
    assert (cell.configs[0].rounds, cell.configs[0].clients, cell.configs[0].lr) == (3, 100, 5e-4)


def test_skipped_combinations_are_no_cells(tmp_path: Path) -> None:
    text = 'skip = [{ method = "fedavg", amount = ["many"] }]\n' + CUSTOM_RECIPE
    custom = recipe.load(str(write(tmp_path, text)))
    only = parse_selection(custom, ["amount=few,amount=many"])
    assert [cell.label for cell in build_cells(custom, only)] == [
        "method=fedavg, amount=few",
        "method=feddure, amount=few",
        "method=feddure, amount=many",
    ]
    assert "none of these cells" in refused(tmp_path, text, selection={"method": ("fedavg",), "amount": ("many",)})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('rows = "method"', 'rows = "method"\nrow = 1', "mine.toml: unknown field 'row': did you mean 'rows'?"),
        ('title = "Mine, Table 1"\n', "", "recipe mine: title is missing; docs/recipes.md describes"),
        ("rounds = 2", "rouns = 2", "mine.toml, protocol: unknown option 'rouns': did you mean 'rounds'?"),
        (
            "rounds = 2",
            "rounds = 2\nrun_dir = 'x'",
            "run_dir has no effect in a recipe (each run has a folder in that of --out)",
        ),
        (
            "rounds = 2",
            "rounds = 2\nprocesses = 2",
            "processes has no effect in a recipe (--jobs sets how many runs are",
        ),
        (
            "rounds = 2",
            "rounds = 2\nbaselines = ['fedavg']",
            "baselines has no effect in a recipe (each cell is a run of",
        ),
        ("rounds = 2", "rounds = 2.5", "cell method=fedavg, amount=few: rounds in mine is 2.5: it must be"),
        ("rounds = 2", "cohort = 9\nrounds = 2", "mine.toml is not valid TOML: Cannot overwrite a value"),
        ("rounds = 2", "rounds = 0", "cell method=fedavg, amount=few: rounds is 0: it must be at least 1."),
        ("hidden = 8", "hiden = 8", "method feddure has no option 'hiden': did you mean 'hidden'?"),
        ("hidden = 8", "hidden = [8]", "it must be a number, text, true or false"),
        (
            "width = 4",
            'width = 4\nlabels_at = "server"',
            "cell method=fedavg, amount=few: method fedavg needs labels at",
        ),
        ('rows = "method"', 'rows = "methods"', "rows is 'methods', which is no axis: did you mean 'method'?"),
        ('rows = "method"', 'rows = "method"\nx = "gamma"', "x is 'gamma', which is no axis"),
        ('rows = "method"', 'rows = "method"\ncolumns = ["amout"]', "columns has 'amout', which is no axis"),
        ('rows = "method"', 'rows = "method"\nkind = "tabel"', "kind is 'tabel': did you mean 'table'?"),
        ("seeds = [0, 3]", "seeds = [0, 0]", "seeds must be different whole numbers from 0, in a list."),
        ("seeds = [0, 3]", "seeds = []", "seeds must be different whole numbers"),
        ("seeds = [0, 3]", "seeds = 3", "mine.toml: seeds must be a list."),
        ("seeds = [0, 3]", "skip = [{ metod = 'fedavg' }]", "skip: 'metod' is no axis: did you mean 'method'?"),
        (
            "seeds = [0, 3]",
            "skip = [{ method = 'fedavgg' }]",
            "axis method has no value 'fedavgg': did you mean 'fedavg'?",
        ),
        ("seeds = [0, 3]", "skip = [{}]", "skip: an entry without an axis would leave out every cell"),
        ("seeds = [0, 3]", "when = [{ at = { amount = 'none' } }]", "when: axis amount has no value 'none'"),
        ("seeds = [0, 3]", "when = [{ where = {} }]", "when: unknown field 'where'"),
        (
            "seeds = [0, 3]",
            "when = [{ at = { amount = 3 } }]",
            "amount must be the name of a value, or a list of names.",
        ),
        ("extra = true", "extra = true\nmore = 1", "value many: unknown field 'more'"),
        ('about = "1 of 2 rounds"', "", "recipe mine, scale half: about is missing"),
        ("set = { rounds = 1 }", "set = { round = 1 }", "scale half: unknown option 'round': did you mean 'rounds'?"),
        ("set = { rounds = 1 }", "sets = { rounds = 1 }", "scale half: unknown field 'sets': did you mean 'set'?"),
        ("set = { rounds = 1 }", "set = { unset = 3 }", "scale half: unset must be a list of options."),
        ("set = { rounds = 1 }", "set = { unset = ['round'] }", "unknown option 'round': did you mean 'rounds'?"),
        ("seeds = [0, 3]", 'published = { tabel = "1" }', "published: unknown field 'tabel': did you mean 'table'?"),
        ("seeds = [0, 3]", 'measure = "tset"', "recipe mine: measure is 'tset': did you mean 'test'?"),
        ("extra = true", 'extra = true\nmeasure = "used up"', "value many: measure is 'used up': did you mean 'used'?"),
        ("seeds = [0, 3]", 'panels = { a = { amount = "none" } }', "panel a: axis amount has no value 'none'"),
        ("seeds = [0, 3]", 'extends = "mine"', "mine.toml: it extends mine, which leads back to itself."),
        ("seeds = [0, 3]", 'extends = "nowhere"', "nowhere.toml cannot be read"),
        ("seeds = [0, 3]", 'extends = "../a"', "leads back to itself"),
        ("[axes.amount.few]", "[axes.amount.few", "mine.toml is not valid TOML"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in CUSTOM_RECIPE
    assert message in refused(tmp_path, CUSTOM_RECIPE.replace(old, new, 1))


def test_a_value_that_the_base_does_not_have(tmp_path: Path) -> None:
    text = 'extends = "_feddure"\n[axes]\ndataset = ["cifar"]\n'
    assert "mine.toml: axis dataset has no value 'cifar': did you mean 'cifar10'?" in refused(tmp_path, text)
    text = 'extends = "_feddure"\nwhen = [{ at = { dataset = "svhn" } }]\n[axes]\ndataset = ["cifar10"]\n'
    assert "recipe mine, when: axis dataset has no value 'svhn'" in refused(tmp_path, text)


def test_what_only_may_say() -> None:
    found = loaded("feddure-table1")
    for message, output in {
        "dataset": "--only 'dataset' is not AXIS=VALUE: write, for example, --only dataset=cifar10,setting=iid-iid.",
        "data=cifar10": "--only: recipe feddure-table1 has no axis 'data': did you mean 'dataset'?",
        "dataset=cifar": "--only: axis dataset of recipe feddure-table1 has no value 'cifar': did you mean 'cifar10'?",
        "": "is not AXIS=VALUE",
    }.items():
        with pytest.raises(UserError, match="--only") as caught:
            parse_selection(found, [message])
        assert output in str(caught.value)
    with pytest.raises(UserError, match=r"recipe feddure-table1 has no scale 'smal': did you mean 'small'\?"):
        found.scale("smal")
    with pytest.raises(UserError, match=r"unknown recipe 'feddure-tabel1': did you mean 'feddure-table1'\?"):
        recipe.load("feddure-tabel1")
    with pytest.raises(UserError, match=r"nowhere\.toml cannot be read"):
        recipe.load("nowhere.toml")


def test_an_axis_of_extras_alone_is_an_empty_selection(tmp_path: Path) -> None:
    text = CUSTOM_RECIPE.replace('[axes.amount.few]\ntitle = "few"\nset = { labels_per_class = 1 }\n', "")
    assert refused(tmp_path, text) == "recipe mine: axis amount has no selected value; name some with --only."


def replaced(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of nested keys in which what stands at `path` is `value`."""
    if not path:
        return value
    copy: Any = dict(node) if isinstance(node, dict) else list(node)
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


def paths(node: Any, here: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    below = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [at for key, value in below for at in [(*here, key), *paths(value, (*here, key))]]


FULL = tomllib.loads(
    'skip = [{ method = "fedavg", amount = ["many"] }]\n'
    'when = [{ at = { amount = ["few"] }, set = { unset = ["lr"] }, published = { table = "1" } }]\n'
    'published = { table = "1" }\nkind = "lines"\nx = "amount"\ncolumns = ["amount"]\nreading = "so"\n'
    + CUSTOM_RECIPE
    + '[[scales.half.when]]\nat = { method = "fedavg" }\nset = { unset = ["steps"] }\n'
)


@hypothesis_settings(deadline=None, database=None)
@given(
    path=st.sampled_from(paths(FULL)), value=st.sampled_from([3, 1.5, True, "a", [], {}, [3], ["a"], {"a": 3}, [{}]])
)
def test_damage_is_a_sentence_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, path: tuple[str | int, ...], value: Any
) -> None:
    """Anything in any place of a recipe: it is run as it stands there, or refused in words, and nothing else."""
    keys = replaced(FULL, path, value)
    text = "\n".join(f"{toml.format_key(name)} = {inline(each)}" for name, each in keys.items())
    assert "\n" not in complaint(write(tmp_path_factory.getbasetemp(), text, "damaged.toml"))


def complaint(file: Path) -> str:
    """Return the sentence with which a recipe or its cells are refused, none where they are run."""
    try:
        found = recipe.load(str(file))
        assert all(isinstance(c, Config) for cell in build_cells(found, {}) for c in cell.configs.values())
    except UserError as error:
        return str(error)
    return ""


def inline(value: Any) -> str:
    """Return a value as TOML on one line, tables in braces."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml.format_key(name)} = {inline(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return toml.format_value(value)


@pytest.mark.parametrize(
    ("name", "only"),
    [
        ("feddure-table2", ["setting=dir-dir", "method=fedavg-fixmatch,method=feddure-without-freg"]),
        ("feddure-figure6", ["method=fedavg-fixmatch", "setting=dir-dir", "share=2,share=20"]),
        ("fedloke-figure4", ["alpha=0.5", "model=fml-local,model=fml-global"]),
        ("feddb-figure3", ["method=fixmatch,method=feddb"]),
        ("feddure-figure3", ["setting=fedmatch-noniid,setting=dir-dir"]),
    ],
)
def test_a_recipe_of_each_kind_is_played(tmp_path: Path, name: str, only: list[str]) -> None:
    """Two cells on the embedded digits at the tiny scale, two rounds long, of a table, lines, curves and splits."""
    found = loaded(name)
    scale = found.scale("tiny")
    requested = build_cells(found, parse_selection(found, ["dataset=digits", *only]), [0], scale, {"device": "cpu"})
    requested = [replace(cell, configs={0: replace(cell.configs[0], rounds=2)}) for cell in requested]
    assert len(requested) == 2
    folder = SweepFolder(tmp_path, found, scale)
    steps = list[RunReport]()
    assert run_sweep(folder, requested, SerialExecutor(), steps.append) == []
    metadata = folder.read()
    assert {step.failed for step in steps} == {None}
    assert [run["finished"] for cell in metadata["cells"] for run in cell["runs"]] == [True, True]
    trained = [("accuracy" in run) for cell in metadata["cells"] for run in cell["runs"]]
    assert trained == [found.kind != "splits"] * 2
    if name == "fedloke-figure4":  # one run, measured twice
        assert len(steps) == 1
        local, whole = (cell["runs"][0]["accuracy"]["last"] for cell in metadata["cells"])
        rows = [
            json.loads(line)
            for line in (folder.run_path(mark(requested[0])) / "metrics.jsonl").read_text().splitlines()
        ]
        models = rows[-1]["pseudo"]["models"]
        assert (local, whole) == (models["local"]["accuracy"], models["global"]["accuracy"])
        assert local != whole


TAUGHT = {
    "feddure-table2": "setting=dir-dir,method=fedavg-fixmatch",
    "fedloke-table4": "setting=dir-0_5,method=fedavg-fixmatch",
    "feddb-table2": "method=fedavg",
    "semifl-table2": "setting=iid,method=semifl",
    "proxyfl-table1": "setting=pair-0_1,method=sage",
}
"""A quick cell of each paper."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] if number > 1 else []) for number, name in enumerate(TAUGHT)],
)
def test_the_tiny_scale_teaches(tmp_path: Path, name: str) -> None:
    """Three times chance on the embedded digits, in a second or two; four rounds of three steps taught nothing."""
    found = loaded(name)
    only = parse_selection(found, ["dataset=digits", TAUGHT[name]])
    (cell,) = build_cells(found, only, [0], found.scale("tiny"), {"device": "cpu"})
    assert runner.run_in_folder(cell.configs[0], tmp_path)["accuracy"]["last"] > 0.3


def test_sweep_says_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = write(tmp_path, CUSTOM_RECIPE.replace("rounds = 2", "rouns = 2"))
    assert cli.main(["sweep", str(file), "--out", str(tmp_path)]) != 0
    assert "unknown option 'rouns': did you mean 'rounds'?" in capsys.readouterr().err
    assert not list(tmp_path.glob("mine*/"))


@pytest.mark.parametrize(
    ("name", "statements"),
    [
        ("feddure-table1", ["three runs, as in the paper"]),
        ("fedloke-table1", ["five runs, as in the paper", "`private` 'fresh'"]),
        ("feddb-table1", ["`mean` 'used'", "SemiFL's RandAugment"]),
        ("cbafed-table1", ["RSCFed starts with a warm-up on labels"]),
        ("twinsight-table1", ["RSCFed starts with a warm-up on labels"]),
    ],
)
def test_recipes_state_where_they_depart_from_their_papers(name: str, statements: list[str]) -> None:
    loaded = recipe.load(name)
    text = f"{loaded.sources} {loaded.reading}"
    assert all(statement in text for statement in statements)
    cells = build_cells(loaded, parse_selection(loaded, []), [0])
    warmups = {cell.configs[0].options["rscfed"]["warmup"] for cell in cells if cell.configs[0].method == "rscfed"}
    assert all(0 < warmup < 1 for warmup in warmups)
    assert bool(warmups) == name.startswith(("cbafed", "twinsight"))


@pytest.mark.parametrize(
    "name", ["feddure-table1", "feddure-table2", "fedloke-table1", "proxyfl-table1", "cbafed-table1"]
)
def test_the_control_is_a_row_on_request(name: str) -> None:
    loaded = recipe.load(name)
    assert "control" not in {cell.at["method"] for cell in build_cells(loaded, parse_selection(loaded, []), [0])}
    selected = build_cells(loaded, parse_selection(loaded, ["method=control"]), [0])
    assert {cell.configs[0].method for cell in selected} == {"fedavg-control"}
    assert all(cell.published is None for cell in selected)

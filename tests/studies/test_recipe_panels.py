"""Each recipe of a figure or a table runs what the paper's caption and text name, panel by panel.

The expectations are written here from the papers' captions and paragraphs, not from the recipes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from halfmoon.config.schema import Config
from halfmoon.studies import recipe
from halfmoon.studies.grid import RecipeCell, build_cells


@cache
def training_cells(name: str) -> tuple[RecipeCell, ...]:
    """Return the cells of a recipe without selection: those of the paper."""
    return tuple(build_cells(recipe.load(name), {}, [0]))


def values(name: str, of: Callable[[Config], Any], at: dict[str, tuple[str, ...]] | None = None) -> set[Any]:
    """Return what the cells of a recipe (those at some values of axes) say of one thing."""
    return {of(cell.configs[0]) for cell in training_cells(name) if recipe.matches_axes(at or {}, cell.at)}


@dataclass(frozen=True)
class Panel:
    """What a caption says of a panel: data sets, the options that are alike in it, and one that varies."""

    data: set[str]
    alike: dict[str, Any]
    varies: dict[str, set[Any]]
    measure: str = "test"


FEDDB = {"fixmatch", "fedmatch", "fedrgd", "semifl", "feddb"}
DEBIASED = {"fixmatch-feddpl", "fedmatch-feddpl", "fedrgd-feddpl", "semifl-feddpl"}
ALPHAS = {0.01, 0.1, 0.5}
TEN = {"clients": 10, "cohort": 10, "labels": 4000, "reuse_labeled": False}
"""FedDB's Section 4.2: 10 clients, each in every round, 4000 labeled and 46000 unlabeled images."""
EVEN = {"setting": "feddb-iid"}
UNEVEN = {"setting": "feddb-dir", "dirichlet_alpha": 0.3}
COHORTS = {2, 5, 10, 20}
SHARES = {1.0, 2.0, 5.0, 7.5, 10.0}  # of 500 CIFAR-10 images a client, ten classes: 2, 4, 10, 15, 20 %
GAMMAS = {0.3, 0.5, 0.7, 1.0}

PANELS: dict[str, dict[str, Panel]] = {
    # "three runs on CIFAR-10"; the text: "under internal and external imbalance"
    "feddure-figure1": {"all": Panel({"cifar10"}, {"setting": "dir-dir", "cohort": 5}, {})},
    # "Comparison of data distribution between FedMatch and our (DIR, DIR) setting"
    "feddure-figure3": {
        "a, b": Panel({"cifar10"}, {"setting": "fedmatch-noniid"}, {}),
        "c, d": Panel({"cifar10"}, {"setting": "dir-dir"}, {}),
    },
    # "Impact of different Dirichlet coefficients under (IID, DIR) and (DIR, DIR) settings on CIFAR10 dataset"
    "feddure-figure4": {
        "a": Panel({"cifar10"}, {"setting": "iid-dir"}, {"dirichlet_alpha": GAMMAS}),
        "b": Panel({"cifar10"}, {"setting": "dir-dir"}, {"dirichlet_alpha": GAMMAS}),
    },
    # "different local iterations, where the total number of local iterations or global rounds is fixed";
    # the text: "only 40 global rounds" where the total is fixed
    "feddure-figure5": {
        "a": Panel({"cifar10"}, {"cohort": 5}, {"rounds": {200, 100, 50, 40}, "epochs": {1, 2, 4, 5}}),
        "b": Panel({"cifar10"}, {"cohort": 5, "rounds": 200}, {"epochs": {1, 2, 4, 5}}),
    },
    # "percentages of labeled instances in each client in {2%, 4%, 10%, 15%, 20%}", "in two data settings"
    "feddure-figure6": {
        "a": Panel({"cifar10"}, {"setting": "iid-dir", "cohort": 5}, {"labels_per_class": SHARES}),
        "b": Panel({"cifar10"}, {"setting": "dir-dir", "cohort": 5}, {"labels_per_class": SHARES}),
    },
    # "(c) and (d) ... increasing numbers of selected clients on CIFAR-10 and Fashion-MNIST", {2, 5, 10, 20}
    "feddure-figure6cd": {
        "c": Panel({"cifar10"}, {"labels_per_class": 5, "method": "feddure"}, {"cohort": COHORTS}),
        "d": Panel({"fashion_mnist"}, {"labels_per_class": 5, "method": "feddure"}, {"cohort": COHORTS}),
    },
    # "Pseudo-label accuracy of local models only using local labeled data and FedRGD ... on CIFAR-10"
    "fedloke-figure2": {
        "all": Panel({"cifar10"}, {}, {"dirichlet_alpha": ALPHAS, "method": {"fedloke", "fedrgd"}}, "pseudo")
    },
    # "Pseudo-label accuracy of different models under different non-IID degrees on CIFAR-10"
    "fedloke-figure4": {
        "all": Panel({"cifar10"}, {}, {"dirichlet_alpha": ALPHAS, "method": {"fedloke", "fml", "fedrgd"}}, "pseudo")
    },
    # "Ablation Study of FedLoKe on CIFAR-10 and SVHN under different non-IID degrees"
    "fedloke-figure5": {
        "CIFAR-10": Panel({"cifar10"}, {"method": "fedloke"}, {"dirichlet_alpha": ALPHAS}),
        "SVHN": Panel({"svhn"}, {"method": "fedloke"}, {"dirichlet_alpha": ALPHAS}),
    },
    # "performance of FedLoKe with different EMA parameters on CIFAR-10 and SVHN under different non-IID degrees"
    "fedloke-figure6": {
        "b": Panel({"cifar10"}, {"method": "fedloke"}, {"dirichlet_alpha": ALPHAS}),
        "c": Panel({"svhn"}, {"method": "fedloke"}, {"dirichlet_alpha": ALPHAS}),
    },
    "fedloke-figure6a": {"a": Panel({"cifar10", "svhn"}, {"method": "fedloke"}, {})},
    # "Performance of FedLoKe and FedRGD under different ratios of used unlabeled data", 5 % labels, alpha 0.5
    "fedloke-figure7": {
        "CIFAR-10": Panel(
            {"cifar10"}, {"dirichlet_alpha": 0.5, "label_ratio": 0.05}, {"method": {"fedloke", "fedrgd"}}
        ),
        "SVHN": Panel({"svhn"}, {"dirichlet_alpha": 0.5, "label_ratio": 0.05}, {"method": {"fedloke", "fedrgd"}}),
    },
    # "Class-wise test accuracy ... along with the labeled data distribution on an individual client. (a) ... local
    # model, (b) ... global model"
    "feddb-figure1": {"a, b": Panel({"cifar10"}, {**UNEVEN, **TEN, "client_models": 2}, {})},
    # "JS divergence between the ground truth bias and either the labeled data distribution or APP-U on clients. (a) ...
    # local model, (b) ... global model"; the text: "mean and range across clients"
    "feddb-figure3": {"a, b": Panel({"cifar10"}, {**UNEVEN, **TEN, "client_models": 10}, {})},
    # "Convergence curve on CIFAR100. (a) IID, (b) Non-IID with delta = 0.3"
    "feddb-figure5": {"a": Panel({"cifar100"}, EVEN, {}), "b": Panel({"cifar100"}, UNEVEN, {})},
    # "Accuracy of pseudo labels on CIFAR100"
    "feddb-figure6": {"a": Panel({"cifar100"}, EVEN, {}, "pseudo"), "b": Panel({"cifar100"}, UNEVEN, {}, "pseudo")},
    # "Ratio of unlabeled samples that are finally assigned with pseudo-labels on CIFAR100"
    "feddb-figure7": {"a": Panel({"cifar100"}, EVEN, {}, "used"), "b": Panel({"cifar100"}, UNEVEN, {}, "used")},
    # "Results of CIFAR10 dataset with (a) IID and (b) Non-IID, K=2 data partition and N_S = 4000"
    "semifl-figure2": {
        "a": Panel({"cifar10"}, {"setting": "semifl-iid"}, {}),
        "b": Panel({"cifar10"}, {}, {"setting": {"semifl-iid", "semifl-shards"}}),  # in one place there is no split
    },
    # "Results of CIFAR10 dataset with (a) N_S = 250 and (b) N_S = 4000"
    "semifl-figure5": {"a": Panel({"cifar10"}, {"labels": 250}, {}), "b": Panel({"cifar10"}, {"labels": 4000}, {})},
    # The captions are in the appendix: read as those of Figure 5
    "semifl-figure7": {"a": Panel({"svhn"}, {"labels": 250}, {}), "b": Panel({"svhn"}, {"labels": 1000}, {})},
    "semifl-figure8": {"a": Panel({"cifar100"}, {"labels": 2500}, {}), "b": Panel({"cifar100"}, {"labels": 10000}, {})},
    # "measuring the quality of Pseudo Labeling with CIFAR10 dataset": (a) to (c) IID, (d) to (f) Non-IID, K = 2
    "semifl-figure6": {
        "a, b, c": Panel({"cifar10"}, {"setting": "semifl-iid", "labels": 4000}, {}, "pseudo"),
        "d, e, f": Panel({"cifar10"}, {"setting": "semifl-shards", "labels": 4000}, {}, "pseudo"),
    },
}

EXISTING = {"fedavg-uda", "fedprox-uda", "fedavg-fixmatch", "fedprox-fixmatch", "fedmatch"}
CURVES = {
    # "green line, which is FedAvg* in Table 1", "fully supervised learning (orange line)", "existing ... methods"
    "feddure-figure1": {"feddure", "fedavg", "fedavg-sl"} | EXISTING,
    "feddure-figure4": {"fedavg-fixmatch", "fedmatch", "feddure"},
    "feddure-figure5": {"feddure"},
    "feddure-figure6": {"fedavg-fixmatch", "fedmatch", "feddure"},
    "feddure-figure6cd": {"feddure"},
    "fedloke-figure2": {"local", "fedrgd"},
    "fedloke-figure4": {"fedloke-local", "fedloke-global", "fml-local", "fml-global", "fedrgd"},
    "fedloke-figure5": {"without-local", "without-global-labels", "without-ema", "fedloke"},
    "fedloke-figure6": {"0.01", "0.1", "0.5"},
    "fedloke-figure6a": {"strong", "weak", "none", "default"},
    "fedloke-figure7": {"fedrgd", "fedloke"},
    "feddb-figure5": FEDDB | DEBIASED | {"fedavg"},
    "feddb-figure6": FEDDB | DEBIASED,
    "feddb-figure7": FEDDB,
    "semifl-figure2": {"supervised", "partially-supervised", "fedsgd-fixmatch", "fedavg-fixmatch"},
    "semifl-figure5": {"fedmatch", "fedrgd", "semifl"},
    "semifl-figure7": {"fedmatch", "fedrgd", "semifl"},
    "semifl-figure8": {"fedmatch", "fedrgd", "semifl"},
    "semifl-figure6": {"semifl", "global-labels", "alternate", "fedavg-fixmatch"},
}
"""The curves (or bars) of each figure: methods, or what else tells them apart."""

KINDS = {"feddure-figure1": "table", "feddure-figure3": "splits", "fedloke-figure6a": "table"} | dict.fromkeys(
    (
        "feddb-figure1",
        "feddb-figure3",
        "feddb-figure5",
        "feddb-figure6",
        "feddb-figure7",
        "semifl-figure2",
        "semifl-figure5",
        "semifl-figure6",
        "semifl-figure7",
        "semifl-figure8",
    ),
    "curves",
)
"""What a figure draws its values against, where it is no other quantity (`lines`)."""


def test_every_figure_has_its_panels_here() -> None:
    assert set(PANELS) == {name for name in recipe.list_names() if "-figure" in name}


@pytest.mark.parametrize("name", PANELS)
def test_a_recipe_plays_the_panels_of_its_caption(name: str) -> None:
    found = recipe.load(name)
    wanted = PANELS[name]
    assert set(found.panels) == set(wanted)
    assert found.kind == KINDS.get(name, "lines")
    for title, panel in wanted.items():
        at = dict(found.panels[title])
        assert values(name, lambda config: config.data, at) == panel.data
        for option, value in panel.alike.items():
            assert values(name, lambda config, option=option: getattr(config, option), at) == {value}, option
        for option, points in panel.varies.items():
            assert values(name, lambda config, option=option: getattr(config, option), at) == points, option
        panel_cells = [cell for cell in training_cells(name) if recipe.matches_axes(at, cell.at)]
        assert {cell.measure.partition(".")[0] for cell in panel_cells} == {panel.measure}
        if name in CURVES:
            assert {cell.at[found.rows] for cell in panel_cells} == CURVES[name]


@pytest.mark.parametrize("name", PANELS)
def test_every_cell_of_a_figure_is_in_one_panel(name: str) -> None:
    found = recipe.load(name)
    for cell in training_cells(name):
        assert sum(recipe.matches_axes(at, cell.at) for at in found.panels.values()) == 1, cell.label


def test_figure_5_of_feddure_fixes_the_iterations_or_the_rounds() -> None:
    """(a): T local iterations in each of 200 / T rounds; (b): in each of 200 rounds."""
    for scale, rounds in ((None, 200), ("small", 40), ("tiny", 20)):
        found = recipe.load("feddure-figure5")
        for cell in build_cells(found, {}, [0], found.scale(scale) if scale else None):
            config = cell.configs[0]
            iterations = int(cell.at["iterations"])
            assert config.rounds == (rounds // iterations if cell.at["fixed"] == "total" else rounds)
            assert config.epochs == iterations if scale is None else config.steps == iterations * {
                "small": 10, "tiny": 3
            }[scale]  # fmt: skip


def test_local_models_of_figure_2_learn_from_their_labels_alone() -> None:
    """Never the global model's parameters (mu 1), never its pseudo-labels, and not its first parameters either."""
    (cell,) = (cell for cell in training_cells("fedloke-figure2") if cell.at == {
        "dataset": "cifar10", "alpha": "0.1", "method": "local"
    })  # fmt: skip
    assert cell.measure == "pseudo.local"
    assert cell.configs[0].options["fedloke"] == {"ema": 1.0, "global_labels": False, "private": "fresh"}


def test_the_figures_whose_values_stand_in_the_picture_alone_say_so() -> None:
    for name in PANELS:
        text = recipe.load(name).reading
        assert "could not be read" not in text, name
        assert "read as an ordering" not in text, name

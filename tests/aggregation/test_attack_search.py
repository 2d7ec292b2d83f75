"""Check the random attacks of benchmarks/attack_search.py: what hostile sites change, and how far."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halfmoon.aggregation import AggregationContext, compute_update
from halfmoon.api.uploads import Upload
from halfmoon.core import tree

SIZES = {"conv/weight": (3, 1, 3, 3), "conv/bias": (3,), "head/weight": (4, 3), "head/bias": (4,)}
HOSTILE = 1
SITES = 5


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import attack_search

    yield attack_search
    del sys.modules["attack_search"]


def make_round(number: int = 0) -> tuple[AggregationContext, Upload]:
    """Make the uploads of five sites with 10 to 50 images in one round."""
    generator = torch.Generator().manual_seed(number)
    params = {name: torch.randn(SITES, *size, generator=generator) for name, size in SIZES.items()}
    broadcast = {
        "params": tree.unflatten({name: torch.zeros(size) for name, size in SIZES.items()}),
        "stats": {"mean": torch.zeros(6)},
    }
    upload = Upload(
        {"params": tree.unflatten(params), "stats": {"mean": torch.randn(SITES, 6, generator=generator)}},
        torch.arange(10.0, 60, 10),
    )
    return AggregationContext(number, 0, 0, "train", broadcast, {}, tuple(range(SITES)), SITES, True), upload


def flatten_updates(context: AggregationContext, upload: Upload, prefix: str) -> torch.Tensor:
    leaves = [leaf for path, leaf in compute_update(upload, context).items() if path.startswith(prefix)]
    return torch.cat([leaf.flatten(1) for leaf in leaves], 1)


@pytest.mark.parametrize("number", range(40))
def test_a_try_stays_inside_the_bounds_of_a_server(search: Any, number: int) -> None:
    """Norms of at most 9.9 honest medians, twice the honest median of images, and no honest upload changes."""
    attack = search.draw_attack(number, rounds=9)
    assert attack == search.draw_attack(number, rounds=9)
    context, upload = make_round(number=8)
    sent = search.apply_attack(attack, HOSTILE, context, upload)
    honest = upload.map(lambda leaf: leaf[HOSTILE:])
    stored = sent.map(lambda leaf: leaf[HOSTILE:])
    pairs = zip(tree.leaves(stored.tree), tree.leaves(honest.tree), strict=True)
    assert all(torch.equal(new, old) for new, old in pairs)
    for prefix in ("params", "stats"):
        norms = flatten_updates(context, sent, prefix).norm(dim=1)
        assert float(norms[0]) <= 9.9 * float(norms[HOSTILE:].median()) * (1 + 1e-5)
    assert sent.weight[0] in (10, 2 * float(upload.weight[HOSTILE:].median()))


def test_the_first_tries_have_every_target(search: Any) -> None:
    targets = [search.draw_attack(number, rounds=9).target for number in range(len(search.TARGETS))]
    assert targets == list(search.TARGETS)


@pytest.mark.parametrize(("target", "count"), [("one head bias", 1), ("one class row", 4), ("one channel", 9)])
def test_an_attack_changes_its_target_only(search: Any, target: str, count: int) -> None:
    """A bias is one number, a class 3 weights and a bias, a channel a filter of 3x3."""
    context, upload = make_round()
    attack = search.Attack(target, "up", length=2.0, claim=False)
    sent = search.apply_attack(attack, HOSTILE, context, upload)
    difference = (flatten_updates(context, sent, "params") - flatten_updates(context, upload, "params"))[0]
    assert int((difference.abs() > 1e-6).sum()) == count
    median = flatten_updates(context, upload, "params")[HOSTILE:].double().norm(dim=1).median()
    assert float(difference.norm()) == pytest.approx(2 * float(median), rel=1e-5)


def test_an_attack_waits_for_its_first_round(search: Any) -> None:
    context, upload = make_round()
    assert search.apply_attack(search.Attack("counts", "up", start=1), HOSTILE, context, upload) is upload
    late = search.apply_attack(search.Attack("counts", "up", start=1), HOSTILE, context._replace(round=1), upload)
    assert late.weight.tolist() == [60, 20, 30, 40, 50]  # the lower median of 20 to 50 is 30


def test_the_page_compares_a_rule_with_the_mean_of_the_same_seed(search: Any) -> None:
    """Tries 0 and 1 are drawn for seeds 0 and 1: 90 - 85 and 80 - 79. Try 0 with both seeds loses (5 + 9) / 2."""

    def row(seed: int, attack: str, rule: str, accuracy: float) -> dict[str, Any]:
        cell = {"data": "digits", "setting": "even", "labels": 50, "method": "fedavg", "sites": 5}
        terms = {"try": int(attack[4:]), "description": "one bias"} if attack.startswith("try") else {}
        return {**cell, "seed": seed, "attack": attack, "rule": rule, "accuracy": accuracy, **terms}

    rows = [
        row(0, "none", "mean", 90.0), row(1, "none", "mean", 80.0),
        row(0, "none", "cosine", 91.0), row(1, "none", "cosine", 81.0),
        row(0, "try 0", "cosine", 85.0), row(1, "try 1", "cosine", 79.0), row(1, "try 0", "cosine", 71.0),
    ]  # fmt: skip
    (line,) = [line for line in search.format_search(rows, ["cosine"], [0, 1]).splitlines() if "`cosine`" in line]
    assert line == "| `cosine` | -1.0 | not measured | 2 | 3.0 | 5.0 | 1 | 5.0 | 7.0 | try 0: one bias |"

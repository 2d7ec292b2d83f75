"""Robust aggregation: each rule against numbers by hand, numpy and scipy; before methods, and in both executors."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupted_runs import run_with_interruption
from test_contract import build_simulation

from halfmoon.aggregation import AggregationContext, Aggregator
from halfmoon.aggregation.agreement import compute_alignment_scores, compute_inner_products, median
from halfmoon.aggregation.robust import (
    COSINE_MAX_NORM,
    RobustAggregator,
    Rule,
    clamp_extremes,
    compute_squared_distances,
    compute_trimmed_mean,
    count_tolerated,
    find_finite_clients,
    limit_norms,
    limit_unit_shares,
    mix_nearest,
    replace_extremes,
    select_by_krum,
)
from halfmoon.api.uploads import Aux, Upload, UploadSpec
from halfmoon.config.schema import Config
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.federation.contract.small_federation import max_difference, run_rounds, start_server, trees_equal
from halfmoon.methods import registry
from halfmoon.runs.factory import build_aggregators, build_method
from halfmoon.storage.checkpoints import METRICS
from halfmoon.storage.state_store import StateView, TreeStore

RULES: tuple[Rule, ...] = ("clip", "cosine", "cosine-nnm", "cosine-trimmed", "median", "trimmed", "krum")
EVERY = pytest.mark.parametrize("rule", RULES)
ONE: tuple[Rule, ...] = ("median", "trimmed", "krum")  # the rules that make one aggregate
ROUNDS = range(2)

batches = st.integers(1, 9).flatmap(
    lambda k: st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), min_size=k, max_size=k)
)


def make_query_context(count: int, broadcast: Tree) -> AggregationContext:
    """Return a query to which clients 0, 10, 20, ... have replied."""
    return AggregationContext(0, 0, 0, "train", broadcast, {}, tuple(range(0, 10 * count, 10)), count, True)


def models(
    values: Sequence[Sequence[float]],
    stats: Sequence[Sequence[float]] | None = None,
    weights: Sequence[float] | None = None,
) -> tuple[Tree, Upload]:
    """Return a model of ones and zeros that was sent, and uploads that changed it by these rows; weights are 1, 2, ..."""
    change = torch.tensor(values, dtype=torch.float64)
    more = torch.zeros_like(change) if stats is None else torch.tensor(stats, dtype=torch.float64)
    broadcast = {"params": {"w": torch.ones_like(change[0])}, "stats": {"mean": torch.zeros_like(more[0])}}
    parts = {"params": {"w": 1 + change}, "stats": {"mean": more}}
    return broadcast, Upload(parts, torch.tensor(weights or range(1, len(change) + 1)).double())


def ruled(
    rule: Rule, values: Sequence[Sequence[float]], byzantine: float = 0.2, **more: Any
) -> tuple[list[list[float]], dict[str, Any]]:
    broadcast, upload = models(values, **more)
    aggregator = RobustAggregator(rule, byzantine)
    kept_rows, new = aggregator.process_uploads(make_query_context(len(values), broadcast), upload)
    assert list(kept_rows) == list(range(len(values)))
    assert torch.equal(new.weight, upload.weight)
    return (new.update["params"]["w"] - 1).tolist(), aggregator.row()


def test_clip_scales_down_to_the_median_norm():
    """Norms 5, 1, 10, 2: the median is the mean of 2 and 5, 3.5. So (3, 4) becomes 0.7 of itself, (6, -8) 0.35."""
    new, row = ruled("clip", [[3, 4], [0, 1], [6, -8], [2, 0]])
    assert new == [pytest.approx([2.1, 2.8]), [0, 1], pytest.approx([2.1, -2.8]), [2, 0]]
    assert row == {"clipped": 2, "counted": 4, "median_norm": {"parameters": 3.5, "statistics": 0.0}}


def test_statistics_are_clipped_by_themselves():
    """Huge statistics do not raise the parameters' bound: 1, 2, 3 -> 2; nor parameters theirs: 100, 0, 300 -> 100."""
    broadcast, upload = models([[1], [2], [3]], [[100], [0], [300]])
    aggregator = RobustAggregator("clip", 0.2)
    _, new = aggregator.process_uploads(make_query_context(3, broadcast), upload)
    assert (new.update["params"]["w"] - 1).flatten().tolist() == pytest.approx([1, 2, 2])
    assert new.update["stats"]["mean"].flatten().tolist() == pytest.approx([100, 0, 100])
    assert aggregator.row() == {"clipped": 1, "counted": 3, "median_norm": {"parameters": 2.0, "statistics": 100.0}}


def test_update_in_the_opposite_direction_is_excluded():
    """The last one's cosines are -1, -0.6 and -0.8, of which -0.8 is the median; the others' lie above 0.6."""
    broadcast, upload = models([[2, 0], [3, 4], [4, 3], [-9, 0]])
    aggregator = RobustAggregator("cosine", 0.2)
    kept_rows, new = aggregator.process_uploads(make_query_context(4, broadcast), upload)
    assert list(kept_rows) == [0, 1, 2]
    assert (new.update["params"]["w"] - 1).tolist() == [[2, 0], pytest.approx([3, 4]), pytest.approx([4, 3])]
    assert aggregator.row()["outside"] == [{"client": 30, "part": "parameters", "cosine": -0.8, "others": 0.6}]


def test_statistics_in_the_opposite_direction_are_excluded():
    broadcast, upload = models([[1, 0]] * 5, [[1, 0], [2, 1], [1, 1], [3, 1], [-1, -1]])
    kept_rows, _ = RobustAggregator("cosine", 0.2).process_uploads(make_query_context(5, broadcast), upload)
    assert list(kept_rows) == [0, 1, 2, 3]


def test_no_client_of_three_is_excluded():
    """Two against one says nothing: whoever is wrong may be the two."""
    assert ruled("cosine", [[1, 0], [1, 0], [-1, 0]])[0] == [[1, 0], [1, 0], [-1, 0]]


def test_client_as_different_as_all_is_included():
    """Where nobody agrees, being against the others betrays nobody."""
    values = [[1, -0.1, -0.1, -0.1], [-0.1, 1, -0.1, -0.1], [-0.1, -0.1, 1, -0.1], [-0.1, -0.1, -0.1, 1]]
    assert np.allclose(ruled("cosine", values)[0], values)


def test_update_is_compared_with_the_cohort_and_the_history():
    """Of e1 to e4, e1 meets the history and the others' mean: e1 + 4/3 (e2 + e3 + e4), whose length is sqrt(19/3).

    With -e1 in its place e2 meets 2/3 e1 + e2 + 4/3 (e3 + e4), whose length is sqrt(5).
    """
    updates = torch.cat([torch.eye(4), torch.ones(1, 4)])
    assert compute_alignment_scores(compute_inner_products([updates]))[0] == pytest.approx((3 / 19) ** 0.5)
    updates[0, 0] = -1
    assert compute_alignment_scores(compute_inner_products([updates])).tolist() == pytest.approx(
        [-((3 / 19) ** 0.5), *[5**-0.5] * 3]
    )


def test_history_distinguishes_a_reversed_update_from_one_of_different_classes():
    """Six clients learn six things, so that all are unlike each other; who turns its update is against the past."""
    store = StateView(TreeStore(), "state/", torch.device("cpu"))
    honest = torch.eye(6).tolist()
    turned = [*honest[:5], [-value for value in honest[5]]]

    def kept(values: Sequence[Sequence[float]], memory: StateView | None) -> list[int]:
        broadcast, upload = models(values)
        return list(
            RobustAggregator("cosine", 0.2).process_uploads(
                make_query_context(6, broadcast)._replace(memory=memory), upload
            )[0]
        )

    assert kept(turned, None) == [0, 1, 2, 3, 4, 5]
    assert kept(honest, store) == [0, 1, 2, 3, 4, 5]
    assert kept(turned, store) == [0, 1, 2, 3, 4]
    assert kept(honest, store) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("images", "moments", "expected"),
    [([1, 2, 3, 4, 5], [1, 2, 3, 4, 100], [0, 1, 2, 3]), ([1, 2, 3, 4, 100], [1, 2, 3, 4, 100], [0, 1, 2, 3, 4])],
)
def test_sums_too_large_for_their_images_are_left_out(
    images: list[float], moments: list[float], expected: list[int]
) -> None:
    """Four clients of 1 to 4 images send 1 to 4 in sum. A sum of 100 is twenty for each of 5 images, but one for each of
    100."""
    aux = {"moments": torch.tensor(moments, dtype=torch.float32)[:, None]}
    upload = Upload({}, torch.tensor(images, dtype=torch.float64), aux)
    context = make_query_context(5, {})._replace(
        upload_spec=UploadSpec((), (), aux={"moments": Aux("sum", "statistic")})
    )
    aggregator = RobustAggregator("cosine", 0.2)
    assert list(aggregator.process_uploads(context, upload)[0]) == expected
    assert [outlier["part"] for outlier in aggregator.row().get("outside", [])] == ["sums"] * (5 - len(expected))


def test_median_of_an_even_number_is_the_mean_of_the_middle_two():
    """Coordinates (1, 2, 10, 4) and (0, -5, 7, 1): 3 and 0.5, for everyone."""
    new, row = ruled("median", [[1, 0], [2, -5], [10, 7], [4, 1]])
    assert new == [pytest.approx([3, 0.5])] * 4
    assert row == {"counted": 4}


def test_trimmed_leaves_out_a_share_at_both_ends():
    """Of 5 a share of 0.2 is one: (1, 2, 3, 4, 100) without 1 and 100 has the mean 3. Of 4 it is none."""
    new, row = ruled("trimmed", [[4], [100], [1], [3], [2]])
    assert new == [pytest.approx([3])] * 5
    assert row == {"trimmed": 2, "counted": 5}
    assert ruled("trimmed", [[4], [100], [1], [3]])[0] == [pytest.approx([27])] * 4


def test_extremes_of_each_coordinate_become_the_weighted_mean_of_the_rest():
    """Five clients of weights 1 to 5. First coordinate (7, 8, 6, 9, 90): 6 and 90 become (7 * 1 + 8 * 2 + 9 * 4) / 7 =
    59 / 7. Second (8, 6, 7, 9, 9): of the two 9 that of the smaller weight 4 is replaced, and it and 6 become (8 * 1 +
    7 * 3 + 9 * 5) / 9 = 74 / 9. The lengths, 10.6 to 11.7 without a coordinate of 90, are below 1.5 medians."""
    new, row = ruled("cosine-trimmed", [[7, 8], [8, 6], [6, 7], [9, 9], [90, 9]])
    a = 59 / 7
    b = 74 / 9
    assert new == [pytest.approx(each) for each in ([7, 8], [8, b], [a, 7], [9, b], [a, 9])]
    assert (row["trimmed"], row["counted"], row["clipped"]) == (2, 5, 0)
    # The weighted mean is the weighted trimmed mean: the method's mean sees the extremes no more.
    weights = np.arange(1, 6)
    assert np.average(np.array(new), axis=0, weights=weights) == pytest.approx([a, b])


def test_a_change_of_one_bias_passes_the_directions_and_not_the_trimming():
    """Four honest updates (3, 4, 0) or so, and one with 7 in the last coordinate: its cosine with the others is about
    0.58, so that "cosine" averages it. Trimmed, the last coordinate is 0 at every client."""
    values = [[3, 4, 0], [3, 4, 0], [4, 3, 0], [4, 3, 0], [3, 4, 7]]
    assert ruled("cosine", values)[0][4][2] == pytest.approx(7 * 7.5 / 74**0.5)
    new, _ = ruled("cosine-trimmed", values)
    assert [each[2] for each in new] == [0, 0, 0, 0, 0]


def test_each_update_becomes_the_weighted_mean_of_its_nearest():
    """Values (0, 1, 2, 3, 100) of weights 1 to 5, each with its three nearest: the first four have the mean
    (0 + 1 * 2 + 2 * 3 + 3 * 4) / 10 = 2, and the last one (1 * 2 + 2 * 3 + 3 * 4 + 100 * 5) / 14."""
    change = {"params/w": torch.tensor([[0.0], [1], [2], [3], [100]])}
    weight = torch.arange(1.0, 6)
    new = mix_nearest(weight, change, change, range(5), 1, ("stats",))
    assert new["params/w"].flatten().tolist() == pytest.approx([2, 2, 2, 2, 520 / 14])
    assert change["params/w"].flatten().tolist() == [0, 1, 2, 3, 100]
    assert mix_nearest(weight, change, change, range(5), 0, ("stats",))["params/w"].equal(change["params/w"])


def test_parameters_and_statistics_have_their_own_neighbors():
    """The last client is far away in its parameters, the first one in its statistics. Client 3 has no weight."""
    change = {
        "params/w": torch.tensor([[0.0], [0], [3], [7], [90]]),
        "params/b": torch.tensor([[1.0, 1], [1, 1], [1, 1], [7, 7], [1, 1]]),
        "stats/mean": torch.tensor([[50.0], [1], [2], [7], [3]]),
    }
    new = mix_nearest(torch.tensor([1.0, 1, 1, 0, 1]), change, change, [0, 1, 2, 4], 1, ("stats",))
    assert new["params/w"].flatten().tolist() == pytest.approx([1, 1, 1, 7, 31])
    assert new["params/b"].tolist() == [[1, 1], [1, 1], [1, 1], [7, 7], [1, 1]]
    assert new["stats/mean"].flatten().tolist() == pytest.approx([55 / 3, 2, 2, 7, 2])


@pytest.mark.parametrize("hostile", [1, 2])
def test_mixing_in_chunks_of_columns_has_the_same_bits(hostile: int, monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    change = {"params/w": torch.randn(9, 3, 7, generator=generator, dtype=torch.float64)}
    weight = torch.rand(9, generator=generator)
    whole = mix_nearest(weight, change, change, range(9), hostile, ())["params/w"]
    monkeypatch.setattr("halfmoon.aggregation.robust.MIXED_COLUMNS", 4)
    assert mix_nearest(weight, change, change, range(9), hostile, ())["params/w"].equal(whole)


def test_a_bound_brings_no_update_nearer():
    """100 is far from all others, and so it is in no mean but its own, also where it is bounded to 2: the first four have
    the mean (0 + 1 + 2 + 3) / 4, and the last one (1 + 2 + 3 + 2) / 4."""
    change = {"params/w": torch.tensor([[0.0], [1], [2], [3], [100]])}
    bounded = {"params/w": torch.tensor([[0.0], [1], [2], [3], [2]])}
    new = mix_nearest(torch.ones(5), change, bounded, range(5), 1, ())
    assert new["params/w"].flatten().tolist() == [1.5, 1.5, 1.5, 1.5, 2]


def test_limited_updates_are_scaled_by_the_norms_that_were_sent():
    """Norms 5, 10 and 40: the bound is 1.5 times 10, so the last update is scaled by 15 / 40, although most of it has
    been removed. The statistics have their own median, 2, and client 3 does not vote."""
    sent = {
        "params/w": torch.tensor([[3.0, 4], [6, 8], [0, 40], [0, 80]]),
        "stats/mean": torch.tensor([[1.0], [2], [2.5], [9]]),
    }
    limited = sent | {"params/w": torch.tensor([[3.0, 4], [6, 8], [0, 8], [0, 80]])}
    new = limit_norms(limited, sent, range(3), ("stats",), 1.5)
    assert new["params/w"].tolist() == [[3, 4], [6, 8], [0, 3], [0, 15]]
    assert new["stats/mean"].flatten().tolist() == [1, 2, 2.5, 3]
    assert limited["params/w"].tolist() == [[3, 4], [6, 8], [0, 8], [0, 80]], "the given updates remain"


def test_extremes_are_clamped_to_the_next_value():
    """Each coordinate by itself; equal values are no extremes, and a client's other coordinates remain."""
    leaf = torch.tensor([[1.0, 7], [2, 7], [3, 7], [4, -9], [50, 8]])
    assert clamp_extremes(leaf, 1).tolist() == [[2, 7], [2, 7], [3, 7], [4, 7], [4, 7]]
    assert clamp_extremes(leaf, 2).tolist() == [[3, 7]] * 5


def test_a_client_cannot_leave_the_range_of_the_mixed_updates():
    """Values (0, 2, 4, 6, 90), one hostile: each with its three nearest, weights 1 to 5. The first three have the mean of
    the first four, as has the fourth; the last one has another mean, as 90 is far away, and is clamped to theirs. Bounding
    its share by the next largest, 6 / sqrt(37), only makes 90 a 88.8."""
    mean = (2 * 2 + 4 * 3 + 6 * 4) / 10
    new, row = ruled("cosine-nnm", [[0, 1], [2, 1], [4, 1], [6, 1], [90, 1]])
    assert [each[0] for each in new] == pytest.approx([mean] * 5)
    assert row["trimmed"] == 2


def test_the_largest_share_of_each_output_unit_is_scaled_to_the_next_largest():
    """Three updates of two units with norms (3, 4), (6, 8) and (5, 0). The shares of the first unit are 0.6, 0.6 and 1, so
    that of the last becomes 0.6: its norm 3. Those of the second are 0.8, 0.8 and 0: equal ones are no extremes, although
    the second update is twice as long. The statistics are an update by themselves, and client 3 does not vote."""
    weight = torch.tensor([[[3.0, 0], [0, 4]], [[0, 6], [-8, 0]], [[3, 4], [0, 0]], [[90, 90], [90, 90]]])
    mean = torch.tensor([[3.0, 4], [3, -4], [0, -7], [90, 90]])
    change = {"params/weight": weight, "stats/mean": mean}
    new = limit_unit_shares(change, range(3), 1, ("stats",))
    assert new["params/weight"][2].flatten().tolist() == pytest.approx([1.8, 2.4, 0, 0])
    assert new["params/weight"][[0, 1, 3]].equal(weight[[0, 1, 3]])
    # The last client's share of the second entry is 1: it becomes 0.8, the next largest.
    assert new["stats/mean"][2].tolist() == pytest.approx([0, -5.6])
    assert new["stats/mean"][[0, 1, 3]].equal(mean[[0, 1, 3]])
    assert weight[2].flatten().tolist() == [3, 4, 0, 0], "the given updates remain"
    assert limit_unit_shares(change, range(3), 0, ("stats",))["stats/mean"].equal(mean)


def test_an_update_without_a_change_has_no_shares():
    change = {"params/b": torch.tensor([[1.0, 0], [0, 0], [0, 2], [2, 1]])}
    new = limit_unit_shares(change, range(4), 1, ())["params/b"]
    assert new.isfinite().all()
    assert new[1].tolist() == [0, 0]


def test_an_update_close_to_all_others_cannot_reverse_the_row_of_a_class():
    """Eight rows of 50 weights. The hostile client sends the mean of the four honest updates, and one row reversed with
    four times its length: it is a near neighbor of all, so without a bound for rows the cohort's row turns around."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(8, 50, generator=generator)
    honest = mean + 4 * torch.randn(4, 8, 50, generator=generator)
    hostile = honest.mean(0)
    hostile[3] *= -4
    new, _ = ruled("cosine-nnm", [update.tolist() for update in (*honest, hostile)], weights=[1] * 5)
    row = torch.tensor(new).mean(0)[3]
    assert row @ honest.mean(0)[3] > 0
    assert row.norm() < honest[:, 3].norm(dim=1).max()


def test_a_long_update_of_one_row_has_little_of_its_own_mean():
    """The honest updates are +-(3, 4) and +-(3, -4), the hostile one is (0, -45): nine median norms in the second unit.
    Shares: 0.8 for all others, so it becomes (0, -36), and it is in no mean but its own. There it counts as 1.5 / 9 of
    that, (0, -6): the mean with its three nearest (3, -4), (-3, -4) and, of the equal ones, (3, 4) is (0.75, -2.5).
    Without this bound it would be (0.75, -10), and clamping would leave the lowest mean of the others, -2 instead."""
    change = {"params/w": torch.tensor([[3.0, 4], [-3, -4], [3, -4], [-3, 4], [0, -45]])}
    limited = limit_unit_shares(change, range(5), 1, ())
    assert limited["params/w"][4].tolist() == pytest.approx([0, -36])
    bounded = limit_norms(limited, change, range(5), (), COSINE_MAX_NORM)
    assert bounded["params/w"][4].tolist() == pytest.approx([0, -6])
    new = mix_nearest(torch.ones(5), limited, bounded, range(5), 1, ())
    assert new["params/w"][4].tolist() == pytest.approx([0.75, -2.5])


def test_the_default_rule_bounds_a_long_update_before_it_is_averaged():
    """Of six clients two send 100 in the last unit. One hostile client is expected, so that each mean of five updates has at
    least one of the two, and the share of the one bounds that of the other. With a median norm of 1 each counts as 1.5."""
    values = [
        [1.0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 100],
        [0, 0, 0, 0, 100],
    ]
    new, _ = ruled("cosine-nnm", values, weights=[1] * 6)
    assert max(each[4] for each in new) <= 2 * 1.5 / 5 + 1e-9


def test_a_change_of_one_bias_passes_neither_mixing_nor_clamping():
    """7 in the last coordinate becomes 0, the next largest of this unit; then the update has the distances of the first two.
    It was sent with a norm of sqrt(74), where the others have 5, so that it counts 7.5 / sqrt(74) in means."""
    values = [[3, 4, 0], [3, 4, 0], [4, 3, 0], [4, 3, 0], [3, 4, 7]]
    new, row = ruled("cosine-nnm", values)
    assert [each[2] for each in new] == [0, 0, 0, 0, 0]
    assert (row["trimmed"], row["counted"]) == (2, 5)
    # The nearest of the first are the equal ones and, by order, the third.
    assert new[0][0] == pytest.approx((3 * 1 + 3 * 2 + 4 * 3 + 3 * 7.5 / 74**0.5 * 5) / 11)


def test_three_clients_are_not_mixed():
    assert ruled("cosine-nnm", [[2], [3], [4]])[0] == [[2], [3], [4]]


def test_two_of_ten_are_trimmed_and_of_four_one_is():
    """Values 1 to 10: 1, 2, 9 and 10 become the mean of 3 to 8 with weights 3 to 8, 199 / 33. Of four, 1 and 4 become
    (2 * 2 + 3 * 3) / 5; of three none is trimmed, and of any number none if no client is expected to be hostile."""
    mean = 199 / 33
    new, row = ruled("cosine-trimmed", [[k] for k in range(1, 11)])
    assert [each[0] for each in new] == pytest.approx([mean, mean, 3, 4, 5, 6, 7, 8, mean, mean])
    assert row["trimmed"] == 4
    assert [each[0] for each in ruled("cosine-trimmed", [[1], [2], [3], [4]])[0]] == pytest.approx([2.6, 2, 3, 2.6])
    assert ruled("cosine-trimmed", [[2], [3], [4]])[0] == [[2], [3], [4]]
    assert ruled("cosine-trimmed", [[2], [3], [4], [4]], byzantine=0.0)[0] == [[2], [3], [4], [4]]


def test_an_outlier_is_left_out_before_coordinates_are_trimmed():
    """The last of five points away and is removed. Of the others, weights 1 to 4, one extreme a side is replaced."""
    broadcast, upload = models([[2, 3], [3, 4], [4, 3], [3, 3.5], [-9, 0]])
    kept_rows, new = RobustAggregator("cosine-trimmed", 0.2).process_uploads(make_query_context(5, broadcast), upload)
    assert list(kept_rows) == [0, 1, 2, 3]
    # (2, 3, 4, 3): of the equal ones both remain, weights 2 and 4. (3, 4, 3, 3.5): 3 of weight 3 and 3.5 of weight 4.
    second = (3 * 3 + 3.5 * 4) / 7
    wanted = [[3, second], [3, second], [3, 3], [3, 3.5]]
    assert (new.update["params"]["w"] - 1).tolist() == [pytest.approx(each) for each in wanted]


def test_clients_without_images_are_neither_trimmed_nor_counted():
    broadcast, upload = models([[1], [2], [3], [4], [0]])
    upload = upload._replace(weight=torch.tensor([1.0, 2, 3, 4, 0]).double())
    _, new = RobustAggregator("cosine-trimmed", 0.2).process_uploads(make_query_context(5, broadcast), upload)
    assert (new.update["params"]["w"] - 1).flatten().tolist() == pytest.approx([2.6, 2, 3, 2.6, 0])


def test_large_values_and_counts_do_not_overflow():
    """Of 3e38 in float32 with counts of 1e300 the mean is 3e38, not infinite."""
    leaf = torch.tensor([[1e38], [3e38], [3e38], [3.2e38]])
    new = replace_extremes(leaf, 1, torch.full((4,), 1e300, dtype=torch.float64))
    assert new.flatten().tolist() == pytest.approx([3e38] * 4)


def test_krum_chooses_the_update_nearest_to_its_neighbors():
    """Five on a line at 0, 1, 3, 4 and 100, one hostile: each has 5 - 1 - 2 = 2 neighbors. Squared distances to the
    nearest two: 1 + 9, 1 + 4, 1 + 4, 1 + 9, 96^2 + 97^2. Of the equal ones the first is taken."""
    new, row = ruled("krum", [[0], [1], [3], [4], [100]])
    assert new == [[1]] * 5
    assert row == {"chosen": 10, "expected": 1}


def test_krum_selects_by_parameters_and_uses_the_same_statistics():
    broadcast, upload = models([[0], [1], [3], [4], [100]], [[7], [1e9], [7], [7], [7]])
    _, new = RobustAggregator("krum", 0.2).process_uploads(make_query_context(5, broadcast), upload)
    assert new.update["stats"]["mean"].flatten().tolist() == [1e9] * 5


def test_client_without_weight_has_no_influence():
    """A client without labels sends back what it got: it is no vote for standing still."""
    broadcast, upload = models([[2], [4], [0], [0], [0]])
    upload = upload._replace(weight=torch.tensor([3.0, 5.0, 0.0, 0.0, 0.0]).double())
    wanted: dict[Rule, int] = {"median": 3, "trimmed": 3, "krum": 2}
    for rule in ONE:
        aggregator = RobustAggregator(rule, 0.2)
        _, new = aggregator.process_uploads(make_query_context(5, broadcast), upload)
        assert (new.update["params"]["w"] - 1).flatten().tolist() == pytest.approx([wanted[rule]] * 5), rule
    aggregator = RobustAggregator("clip", 0.2)
    _, new = aggregator.process_uploads(make_query_context(5, broadcast), upload)
    assert (new.update["params"]["w"] - 1).flatten().tolist() == pytest.approx([2, 3, 0, 0, 0])
    upload = upload._replace(weight=torch.zeros(5))
    _, still = RobustAggregator("median", 0.2).process_uploads(make_query_context(5, broadcast), upload)
    assert trees_equal(still.tree, upload.tree)


@given(batches, st.floats(0, 0.49))
@settings(deadline=None)
def test_median_and_trimmed_mean_are_those_of_numpy_and_scipy(rows: list[list[float]], share: float):
    values = np.array(rows, np.float64)
    leaf = torch.tensor(values)
    assert median(leaf).numpy() == pytest.approx(np.median(values, axis=0), rel=1e-12, abs=1e-12)
    cut = int(share * len(rows))
    assert compute_trimmed_mean(leaf, cut).numpy() == pytest.approx(
        scipy.stats.trim_mean(values, share, axis=0), rel=1e-9, abs=1e-9
    )


def naive_krum(vectors: np.ndarray, hostile: int) -> int:
    """Return Krum's choice as Blanchard et al. 2017 write it: the smallest score, of equals the first."""
    count = len(vectors)
    scores = []
    for i in range(count):
        others = sorted(float(((vectors[i] - vectors[j]) ** 2).sum()) for j in range(count) if j != i)
        scores.append(sum(others[: count - hostile - 2]))
    return int(np.argmin(scores))


def test_krum_is_the_published_rule():
    """On random updates of several leaves, with and without outliers; distances come by way of inner products."""
    g = np.random.default_rng(0)
    for trial in range(40):
        k = int(g.integers(3, 12))
        vectors = g.normal(size=(k, 40)) * np.where(np.arange(k)[:, None] < trial % 3, 1e3, 1.0)
        hostile = int(g.integers(0, (k - 3) // 2 + 1))
        change = {"params/a": torch.tensor(vectors[:, :24]).reshape(k, 4, 6), "params/b": torch.tensor(vectors[:, 24:])}
        assert select_by_krum(change, hostile) == naive_krum(vectors, hostile)
        direct = ((vectors[:, None] - vectors[None]) ** 2).sum(-1)
        assert compute_squared_distances(change).numpy() == pytest.approx(direct, rel=1e-9, abs=1e-6)


def test_distances_do_not_depend_on_the_size_of_a_chunk(monkeypatch):
    change = {"params/a": torch.randn(6, 50, generator=torch.Generator().manual_seed(0))}
    whole = compute_squared_distances(change)
    monkeypatch.setattr("halfmoon.aggregation.agreement.CHUNK", 7)
    assert max_difference({"d": compute_squared_distances(change)}, {"d": whole}) < 1e-12


def test_krum_bears_as_many_as_there_are_neighbors_for():
    """2f + 3 of k: of 10 at most 3, of 5 one, of 3 none; never more than the share."""
    assert [count_tolerated(count, 0.45) for count in (10, 5, 4, 3, 2, 1)] == [3, 1, 0, 0, 0, 0]
    assert count_tolerated(10, 0.1) == 1
    assert count_tolerated(10, 0.3) == 3  # 0.3 * 10 is not cut to 2
    assert count_tolerated(100, 0.29) == 29  # nor 0.29 * 100, 28.999999999999996


@EVERY
def test_one_client_is_the_aggregate(rule: Rule):
    for count in (1, 2, 3, 4, 7):
        new, _ = ruled(rule, [[1.5, -2.0, 0.25]] * count)
        assert new == [pytest.approx([1.5, -2.0, 0.25])] * count


def test_trimmed_mean_of_zero_share_is_the_mean():
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    new, row = ruled("trimmed", values.tolist(), byzantine=0.0)
    assert new == [pytest.approx(values.mean(0).tolist())] * 6
    assert row["trimmed"] == 0


@EVERY
def test_order_of_clients_does_not_matter(rule: Rule):
    values = (2 + torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)).tolist()
    first, _ = ruled(rule, values)
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 17):
        new, _ = ruled(rule, [values[k] for k in order], weights=[k + 1 for k in order])
        assert [new[order.index(k)] for k in range(5)] == [pytest.approx(each) for each in first]


def test_update_below_the_median_norm_is_unchanged():
    g = torch.Generator().manual_seed(3)
    broadcast = {"params": {"w": torch.randn(8, generator=g)}}
    upload = Upload({"params": {"w": broadcast["params"]["w"] + torch.randn(7, 8, generator=g)}}, torch.ones(7))
    _, new = RobustAggregator("clip", 0.2).process_uploads(make_query_context(7, broadcast), upload)
    norms = (upload.update["params"]["w"] - broadcast["params"]["w"]).double().norm(dim=1)
    short = norms <= norms.median()
    assert int(short.sum()) == 4
    assert torch.equal(new.update["params"]["w"][short], upload.update["params"]["w"][short])
    long = (new.update["params"]["w"] - broadcast["params"]["w"]).double().norm(dim=1)[~short]
    assert long.tolist() == pytest.approx([float(norms.median())] * 3, rel=1e-5)


@pytest.mark.parametrize("size", [1e3, 1e30, 3e38])
@EVERY
def test_one_of_any_size_moves_the_aggregate_no_further_than_the_honest_are(rule: Rule, size: float):
    """Of five in float32, one as far as numbers go: it has the median norm, or is in the range of the honest."""
    honest = torch.randn(4, 6, generator=torch.Generator().manual_seed(4))
    broadcast = {"params": {"w": torch.full((6,), -1.0)}}
    upload = Upload({"params": {"w": torch.cat([honest - 1, torch.full((1, 6), size)])}}, torch.ones(5))
    kept_rows, new = RobustAggregator(rule, 0.2).process_uploads(make_query_context(5, broadcast), upload)
    assert list(kept_rows) == list(range(5))
    moved = new.update["params"]["w"] + 1
    if rule in ("clip", "cosine"):
        longest = float(honest.norm(dim=1).max()) * (1.0 if rule == "clip" else COSINE_MAX_NORM)
        assert float(moved.norm(dim=1).max()) <= longest * (1 + 1e-6)
    else:
        assert bool((moved >= honest.min(0).values - 1e-6).all())
        assert bool((moved <= honest.max(0).values + 1e-6).all())


@EVERY
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_uploads_that_are_not_finite_are_left_out(rule: Rule, bad: float):
    """The others are what they are without it, to the bit; a spoiled weight counts as well."""
    values = 3 + torch.randn(6, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    broadcast, upload = models(values.tolist())
    rest = [0, 1, 3, 4, 5]
    alone = RobustAggregator(rule, 0.2).process_uploads(
        make_query_context(6, broadcast).only(rest), upload.map(lambda leaf: leaf[rest])
    )[1]
    for path in ("params", "weight"):
        _, spoiled = models(values.tolist())
        leaf = spoiled.update["params"]["w"] if path == "params" else spoiled.weight
        leaf[2, ...] = bad
        aggregator = RobustAggregator(rule, 0.2)
        kept_rows, new = aggregator.process_uploads(make_query_context(6, broadcast), spoiled)
        assert list(kept_rows) == rest
        assert trees_equal(new.tree, alone.tree)
        assert aggregator.row()["not_finite"] == [20]


def test_a_difference_that_is_not_finite_is_left_out():
    broadcast = {"params": {"w": torch.tensor([-3e38])}}
    upload = Upload({"params": {"w": torch.tensor([[-3e38], [3e38], [-2.9e38]])}}, torch.ones(3))
    kept_rows, new = RobustAggregator("median", 0.2).process_uploads(make_query_context(3, broadcast), upload)
    assert list(kept_rows) == [0, 2]
    assert new.update["params"]["w"].flatten().tolist() == pytest.approx([-2.95e38] * 2)


def test_without_finite_uploads_no_client_remains():
    broadcast, upload = models([[1.0], [2.0]])
    upload.update["params"]["w"][:] = torch.nan
    assert find_finite_clients(list(tree.leaves(upload.tree))) == []
    kept_rows, _ = RobustAggregator("median", 0.2).process_uploads(make_query_context(2, broadcast), upload)
    assert list(kept_rows) == []


def test_a_question_without_an_update_passes():
    """SemiFL's census, say: nothing in it came down, so that no rule has anything to say, and the row is empty."""
    upload = Upload({}, torch.tensor([4.0, 5.0]), {"moments": {"mean": torch.tensor([[1.0], [9.0]])}})
    aggregator = RobustAggregator("median", 0.2)
    kept_rows, new = aggregator.process_uploads(make_query_context(2, {"params": {"w": torch.zeros(3)}}), upload)
    assert list(kept_rows) == [0, 1]
    assert trees_equal(new.tree, upload.tree)
    assert aggregator.row() == {}


def refused(rule: Rule, norm: Literal["batch", "group"] = "batch") -> set[str]:
    """Return the methods that a configuration with this rule and norm is refused for, each with a reason."""
    found: set[str] = set()
    for name in registry.names():
        config = Config(method=name, labels_at=registry.entry(name).label_locations[0], aggregation=rule, norm=norm)
        if registry.entry(name).robust_rule_conflict(rule, norm):
            with pytest.raises(UserError, match=f"aggregation '{rule}' cannot be used with method {name}: .*[.]"):
                build_method(config)
            found.add(name)
        else:
            build_method(config)
    return found


SINGLE = ("fedmatch", "heterofl", "semifed", "proxyfl", "fixmatch-proxy-tuning", "protofssl")
CENSUS = {name for name in registry.names() if name.startswith(("semifl", "heterofl", "fl2", "fedmatch-semifl"))}
ALONE = {name for name in registry.names() if name.startswith(SINGLE) and name != "fedmatch-semifl"}


@EVERY
def test_the_methods_that_a_rule_cannot_stand_before(rule: Rule):
    """By name: those that need single models, and those whose statistics no rule would look at."""
    single = rule in ("clip", "cosine")
    assert refused(rule) == (CENSUS if single else CENSUS | ALONE)
    assert refused(rule, "group") == (set() if single else ALONE)


PLAYED: dict[Rule, tuple[str, ...]] = {
    "clip": ("feddb", "fedmatch", "semifed", "fml"),
    "cosine": ("feddb", "fedmatch"),
    "cosine-nnm": ("feddb", "feddure"),
    "cosine-trimmed": ("feddb", "fedavg-fixmatch"),
    "median": ("fedavg-fixmatch", "feddb", "fedrgd"),
    "trimmed": ("fedavg-fixmatch", "feddb"),
    "krum": ("feddure", "feddb", "fedrgd"),
}


@pytest.mark.parametrize(("rule", "name"), [(rule, name) for rule in RULES for name in PLAYED[rule]])
def test_loop_equals_vmap_behind_a_rule(rule: Rule, name: str):
    """Three clients of unequal size in float64: the same server, to rounding, and the same row."""
    results = []
    for executor in ("loop", "vmap"):
        made, shared, simulation = build_simulation(name, "both", executor, aggregators=[RobustAggregator(rule, 0.34)])
        results.append(run_rounds(made, simulation, start_server(made, shared), ROUNDS))
    for one, many in zip(*results, strict=True):
        assert max_difference(many.server, one.server) < 1e-9
        assert one.report.aggregator.keys() == many.report.aggregator.keys()
        assert one.report.aggregator.get("chosen") == many.report.aggregator.get("chosen")
    _, _, plain = build_simulation(name, "both")
    (first, *_) = run_rounds(made, plain, start_server(made, shared), range(1))
    if not rule.startswith("cosine"):  # of three clients it leaves out nobody, and none of these is long
        assert max_difference(results[0][0].server, first.server) > 1e-6  # the rule has done something


def test_history_is_restored_when_a_run_resumes(tmp_path: Path):
    """Killed after the second of four rounds, a run that leaves a site out ends in the bytes of one that was not."""
    config = Config(
        method="fedavg-soft-labels", data="digits", clients=6, cohort=6, labels_per_class=5.0, rounds=4, steps=4,
        width=4, threads=1, aggregation="cosine", attack="sign-flip", attackers=0.2, attack_factor=4.0,
    )  # fmt: skip
    last = (run_with_interruption(config, tmp_path, 2) / METRICS).read_text().splitlines()[-1]
    assert '"outside": [{' in last


@pytest.mark.parametrize("rule", ONE)
def test_auxiliary_values_of_feddb_do_not_affect_robust_rules(rule: Rule):
    """With one aggregate in everyone's place, a client that is in its mean prediction and rows changes nothing."""

    class Liar(Aggregator):
        def process_uploads(self, question: AggregationContext, upload: Upload) -> tuple[Sequence[int], Upload]:
            appu = upload.aux["appu"].clone()
            weight = upload.weight.clone()
            appu[0], weight[0] = torch.tensor([1e6, 0.0, 0.0, -1e6]), 1e9
            return range(len(question.clients)), Upload(upload.update, weight, {"appu": appu})

    made, shared, honest = build_simulation("feddb", "both", aggregators=[RobustAggregator(rule, 0.34)])
    _, _, lied = build_simulation("feddb", "both", aggregators=[Liar(), RobustAggregator(rule, 0.34)])
    one = run_rounds(made, honest, start_server(made, shared), range(1))
    two = run_rounds(made, lied, start_server(made, shared), range(1))
    assert max_difference(two[0].server, one[0].server) < 1e-12
    _, _, bare = build_simulation("feddb", "both", aggregators=[Liar()])
    assert max_difference(run_rounds(made, bare, start_server(made, shared), range(1))[0].server, one[0].server) > 1e-6


def test_configuration_selects_its_rule():
    assert build_aggregators(Config(), b"", Path()) == ()
    (aggregator,) = build_aggregators(Config(aggregation="trimmed", byzantine=0.1), b"", Path())
    assert isinstance(aggregator, RobustAggregator)
    assert (aggregator.rule, aggregator.byzantine) == ("trimmed", 0.1)


def test_krum_needs_enough_clients():
    """2f + 3 with f the share of the cohort, rounded down: 0.3 of 10 is 3, which needs 9; of 6 is 1, which needs 5."""
    Config(aggregation="krum", cohort=10, byzantine=0.3)
    with pytest.raises(
        UserError, match=r"krum cannot find 4 hostile clients among 10: .* cohort of 11 or more; choose"
    ):
        Config(aggregation="krum", cohort=10, byzantine=0.4)
    with pytest.raises(UserError, match="a cohort of 3 or more"):
        Config(aggregation="krum", cohort=2)


SMALL: dict[str, Any] = {"clients": 5, "cohort": 5, "rounds": 3, "steps": 1, "width": 2, "threads": 1, "device": "cpu"}


@pytest.mark.parametrize("rule", ["clip", "krum"])
def test_stopped_run_resumes_to_the_same_bits(rule: Rule, tmp_path: Path):
    """Stopped after its second round and resumed: the model and the rows, with what the guard says, are the same."""
    folder = run_with_interruption(Config(method="fedavg", aggregation=rule, **SMALL), tmp_path, 2)
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    assert all(row["aggregation"] for row in rows)

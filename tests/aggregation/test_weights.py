"""Caps on what clients say they weigh: hand-derived numbers, whole runs under attack, and what a server warns of."""

from pathlib import Path

import pytest
import torch
from recording_methods import make_context
from safetensors.torch import load_file
from torch import Tensor

from halfmoon.aggregation.attacks import FALSE_COUNT_FACTOR, HostileClients
from halfmoon.aggregation.weights import WeightCap, compute_caps
from halfmoon.api.uploads import Aux, Upload, UploadSpec
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.federation.server.calls import FederatedEvaluation
from halfmoon.federation.server.plan import Rules
from halfmoon.runs import runner

DOWN = {"params": {"w": torch.zeros(2)}}


def uploads(weights: list[float], values: list[float]) -> Upload:
    rows = torch.tensor(values, dtype=torch.float32).unsqueeze(1).expand(-1, 2).clone()
    return Upload({"params": {"w": rows}}, torch.tensor(weights, dtype=torch.float64))


def mean(upload: Upload) -> Tensor:
    return (upload.weight[:, None] * upload.update["params"]["w"].double()).sum(0) / upload.weight.sum()


def test_the_cap_is_twice_the_lower_median_of_those_who_weigh_something():
    """Of 1, 2, 3, 1e9 the lower median is 2, so that the cap is 4; a weight of 0 is not of the cohort."""
    assert compute_caps([1, 2, 3, 1e9], 2.0) == [4.0] * 4
    assert compute_caps([0, 0, 5], 2.0) == [10.0] * 3
    assert compute_caps([7, 1e9], 2.0) == [14.0] * 2
    assert compute_caps([1, 1e9], 0.0) == [float("inf")] * 2
    assert compute_caps([1, 1e9, 3], 2.0, [None, 40, None]) == [6.0, 40.0, 6.0]
    assert compute_caps([0.0, 0.0], 2.0) == [float("inf")] * 2


@pytest.mark.parametrize("attackers", [1, 2, 3, 4])
def test_no_minority_dominates_the_mean_by_false_counts(attackers: int):
    """Nine clients at 1, of whom `liars` send -1 and claim 1e9 times the images: their share is that of the cap, 2."""
    cap = WeightCap(2.0)
    honest = 9 - attackers
    upload = uploads([100.0] * honest + [1e11] * attackers, [1.0] * honest + [-1.0] * attackers)
    _, capped = cap.process_uploads(make_context(DOWN, 9), upload)
    assert mean(capped)[0] == pytest.approx((honest - 2 * attackers) / (honest + 2 * attackers))
    assert cap.row() == {
        "capped": list(range(honest, 9)),
        "largest_share": pytest.approx(2 / (honest + 2 * attackers), abs=1e-4),
    }
    assert mean(upload)[0] == pytest.approx(-1.0)
    assert cap.row() == {}


def test_honest_weights_keep_their_bits_and_counts_of_sums_scale_with_their_sums():
    """A census sends sums over rows: where 900 rows count as 20, the sums are 20 / 900 of what they were."""
    cap = WeightCap(2.0)
    moments = {"mean": torch.tensor([[1.0], [2.0], [90.0]])}
    upload = Upload({}, torch.tensor([10.0, 20.0, 900.0]), {"moments": moments})
    counting = make_context(DOWN, 3)._replace(upload_spec=UploadSpec((), (), aux={"moments": Aux("sum", "statistic")}))
    _, new = cap.process_uploads(counting, upload)
    assert new.weight.tolist() == [10.0, 20.0, 40.0]
    assert new.aux["moments"]["mean"][:2].equal(upload.aux["moments"]["mean"][:2])
    assert float(new.aux["moments"]["mean"][2]) == pytest.approx(90 * 40 / 900)
    plain = uploads([10.0, 20.0, 40.0], [0.1, 0.2, 0.3])
    assert cap.process_uploads(make_context(DOWN, 3), plain)[1].weight.equal(plain.weight)


def test_share_over_one_half_is_logged_once_with_the_site():
    """Of 3 and 4 images the second has 57 %; a third time it is not said."""
    messages: list[tuple[int, float]] = []
    cap = WeightCap(2.0, warn=lambda client, share: messages.append((client, round(share, 3))))
    for _ in range(3):
        cap.process_uploads(make_context(DOWN, 2), uploads([3.0, 4.0], [1.0, 1.0]))
    assert messages == [(1, 0.571)]
    assert cap.row() == {"largest_share": 0.5714}


def test_declared_counts_are_the_cap_where_they_are_known():
    """A site of which 5 images are known weighs 5, however many it claims, and one of which 500 are known its 300."""
    cap = WeightCap(2.0, {0: 5, 1: 500})
    _, new = cap.process_uploads(make_context(DOWN, 3), uploads([1e9, 300.0, 1.0], [0.0, 0.0, 0.0]))
    assert new.weight.tolist() == [5.0, 300.0, 1.0]


def test_attacks_report_a_million_times_their_images_and_flip_signs():
    upload = uploads([10.0, 10.0], [1.0, 1.0])
    for name, value in (("false-counts", 1.0), ("sign-flip-false-counts", -1.0)):
        _, new = HostileClients(name, [1], 0).process_uploads(make_context(DOWN, 2), upload)
        assert new.weight.tolist() == [10.0, 10.0 * FALSE_COUNT_FACTOR]
        assert new.update["params"]["w"].tolist() == [[1.0, 1.0], [value, value]]
    assert upload.weight.tolist() == [10.0, 10.0]


def test_test_counts_are_capped_too():
    """Three sites with 10 test images, all wrong, and one that claims 10^6, all right: 20 of 50, not 100 %."""
    evaluation = FederatedEvaluation(2.0)
    wrong = torch.tensor([[0, 10], [0, 0]])
    right = torch.tensor([[500_000, 0], [0, 500_000]])
    loss = torch.tensor(1.0, dtype=torch.float64)
    assert all(
        evaluation.add({"confusion": cells, "loss": loss}, 2, int(cells.sum())) for cells in (wrong, wrong, wrong)
    )
    assert evaluation.add({"confusion": right, "loss": torch.tensor(0.0, dtype=torch.float64)}, 2, 10**6)
    total = evaluation.total()
    assert total.row()["accuracy"] == pytest.approx(20 / 50)
    assert total.loss == pytest.approx(30 / 50)
    assert len(evaluation.results) == 4


def test_declared_counts_have_to_be_numbers_of_images():
    """Zero is none, and a cap below 0 is refused as other options are."""
    with pytest.raises(UserError, match="images is"):
        Rules(images=(3, 0))
    with pytest.raises(UserError, match="weight_cap is"):
        Rules(weight_cap=-1.0)


@pytest.mark.parametrize("rule", ["mean", "clip"])
def test_cap_limits_the_effect_of_false_counts_on_a_run(tmp_path: Path, rule: str):
    """Digits: one client of five flips its sign and claims 10^6 times its images, in a round of two steps."""
    common = {"data": "digits", "clients": 5, "cohort": 5, "network": "small", "width": 2, "rounds": 1, "steps": 2}
    run_options = {"threads": 1, "executor": "loop", "device": "cpu", "method": "fedavg-sl", "aggregation": rule}

    def moved(**options: object) -> dict[str, Tensor]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        runner.run_in_folder(Config(**common, **run_options, **options), folder)
        return load_file(folder / "model.safetensors")

    attack = {"attack": "sign-flip-false-counts", "attackers": 0.2}
    honest = moved()
    owned = moved(**attack)
    capped = moved(**attack, weight_cap=2.0)

    def away(one: dict[str, Tensor]) -> float:
        return float(sum((one[name].double() - honest[name].double()).square().sum() for name in honest)) ** 0.5

    assert away(capped) < 0.7 * away(owned)

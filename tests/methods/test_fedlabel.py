"""FedLabel's terms by hand, on SAGE's line: w = ln 3 in training, another weight in the received model."""

from math import log

import pytest
from test_sage import validated

from halfmoon.methods.objectives import FedLabel


def test_models_that_disagree_train_on_the_label_of_the_surer_one():
    """Weak 2: class 0 with 0.9, received class 1 with 3/4. The strong x = 1 costs ln(4/3), of derivative 3/4 - 1."""
    loss, slope, pseudo = validated(FedLabel(0.8), log(3), -log(3) / 2, [2], [1])
    assert (loss, slope) == pytest.approx((log(4 / 3), -0.25), rel=1e-12)
    assert (pseudo.label.tolist(), pseudo.weight.tolist()) == ([0], [1.0])
    # Weak 1: 3/4, received class 1 with 0.9. Weak 0: neither model is confident, and the mean runs over both images.
    loss, _, pseudo = validated(FedLabel(0.8), log(3), -2 * log(3), [1, 0], [1, 1])
    assert loss == pytest.approx(log(4) / 2, rel=1e-12)
    assert (pseudo.label.tolist()[0], pseudo.weight.tolist()) == (1, [1.0, 0.0])


def test_models_that_agree_are_drawn_together_by_the_ratio_of_their_confidences():
    """Weak 2: 0.9 and 3/4 for class 0, a ratio of 5/6. The strong x = 2 has p = (0.9, 0.1), q = (3/4, 1/4):
    the derivatives are 2 (0.9 - 1) of the cross-entropy and 2 (0.9 - 0.75) of the divergence.
    """
    divergence = 0.75 * log(0.75 / 0.9) + 0.25 * log(0.25 / 0.1)
    for weight in (1.0, 0.3):
        loss, slope, _ = validated(FedLabel(0.8, consistency_weight=weight), log(3), log(3) / 2, [2], [2])
        assert loss == pytest.approx(log(10 / 9) + weight * 5 / 6 * divergence, rel=1e-12)
        assert slope == pytest.approx(-0.2 + weight * 0.25, rel=1e-12)

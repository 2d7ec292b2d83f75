"""The control: FixMatch without pseudo-labels, and labels only in networks without batch normalization."""

import pytest
from method_helpers import simulate_rounds

from halfmoon.federation.contract.small_federation import CLASSES, make_dataset, make_task, max_difference, trees_equal
from halfmoon.methods import registry
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import FixMatch
from halfmoon.models import SmallCNN


def final_model(method, held=None, **settings):
    """Train three rounds and return the server's state."""
    return simulate_rounds(method, make_task(**settings), held or make_dataset(), rounds=3)[-1].server


@pytest.mark.parametrize("statistics", ["joint", "separate"])
@pytest.mark.parametrize("labeling", ["batch", "running"])
@pytest.mark.parametrize("labels", ["step", "round"])
def test_control_equals_fixmatch_without_pseudo_labels(labels, labeling, statistics):
    """With a threshold above 1 no pseudo-label is used, so the models are equal byte for byte."""
    settings = {"labeling": labeling, "statistics": statistics}
    control = final_model(registry.make("fedavg-control", {"labels": labels}), **settings)
    fixmatch = final_model(FedAvg(FixMatch(threshold=1.5, labels=labels)), **settings)
    assert trees_equal(control, fixmatch)


@pytest.mark.parametrize("options", [{"prox": 0.1}, {"keep_optimizer": True}])
def test_control_equals_fixmatch_with_options_of_fedavg(options):
    control = final_model(registry.make("fedavg-control", options))
    assert trees_equal(control, final_model(FedAvg(FixMatch(threshold=1.5), **options)))


def test_control_differs_from_labels_only_with_batch_normalization():
    assert max_difference(final_model(registry.make("fedavg-control")), final_model(FedAvg())) > 1e-6


@pytest.mark.parametrize("norm", ["group", "none"])
def test_control_equals_labels_only_without_batch_normalization(norm):
    network = SmallCNN(1, CLASSES, 4, norm=norm)
    settings = {"network": network}
    assert trees_equal(final_model(registry.make("fedavg-control"), **settings), final_model(FedAvg(), **settings))

"""Accuracy, pseudo-label quality and leanings against plain counting in numpy, scipy, and by hand."""

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch_models import TorchSmall, load_weights

from halfmoon.api.types import PseudoLabels
from halfmoon.config.schema import Config
from halfmoon.core import rng, tree
from halfmoon.core.errors import UserError
from halfmoon.data.partition.heterogeneity import class_shares, jensen_shannon
from halfmoon.engine.evaluation import (
    Examples,
    ModelEvaluation,
    Quality,
    accuracy_by_client,
    compute_mean_prediction,
    evaluate_model,
    images_per_pass,
    prediction_bias,
    roc_auc,
    summarize_clients,
)
from halfmoon.engine.loop import summarize_pseudo_labels
from halfmoon.federation.contract.small_federation import CLASSES, make_examples, make_task
from halfmoon.models import SmallCNN, track
from halfmoon.runs import factory

counted = hnp.arrays(np.int64, (2, 6), elements=st.integers(0, 9)).filter(lambda n: (n.sum(1) > 0).all())


def spoken(images: torch.Tensor) -> np.ndarray:
    oracle = load_weights(TorchSmall(1, CLASSES, make_task().network.width), model()).eval()
    with torch.no_grad():
        return oracle(images.double() / 127.5 - 1).numpy()


def model():
    """Return a random model with the statistics of the images and logits around zero: it says all classes of them."""
    shared = make_task()
    made = tree.to(shared.network.init(rng.generator(4, "evaluate")), dtype=torch.float64)
    images = shared.normalize(make_examples(50, seed=8).images)
    for _ in range(40):
        _, moments = shared.network.train(made["params"], images)
        made["stats"] = track(made["stats"], moments)
    made["params"]["head"]["bias"] -= shared.network.predict(made["params"], made["stats"], images).mean(0)
    return made


@pytest.mark.parametrize("batch", [1, 7, 50, 1000])
def test_confusion_counts_equal_a_direct_count(batch):
    """Accuracy, loss and class-wise accuracy of 50 images equal the module's in eval mode, however they are cut. Each
    cell counts images of its row's class that are said to be of its column's."""
    test = make_examples(50, seed=8)
    shared = make_task()
    result = evaluate_model(shared.network, model(), shared.normalize, test, batch)
    made = result.row()
    logits = spoken(test.images)
    labels = test.labels.numpy()
    text = logits.argmax(1)
    right = text == labels
    cells = [[int(((labels == row) & (text == column)).sum()) for column in range(CLASSES)] for row in range(CLASSES)]
    assert result.confusion.tolist() == cells
    assert result.confusion.T.tolist() != cells
    chance = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert made["accuracy"] == right.mean()
    assert made["loss"] == pytest.approx(-np.log(chance[np.arange(50), labels]).mean(), rel=1e-10)
    assert made["per_class"] == [round(right[labels == k].mean(), 6) for k in range(CLASSES)]
    assert len(set(text)) == CLASSES
    assert 0 < made["accuracy"] < 1


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_a_mean_prediction_equals_a_mean(batch):
    """The mean softmax over 50 images, however they are cut; a head 300 times as large says 300 times as much."""
    images = make_examples(50, seed=8).images
    shared = make_task()
    confident = model()
    confident["params"]["head"] = tree.map(lambda leaf: 300 * leaf, confident["params"]["head"])
    made = compute_mean_prediction(shared.network, confident, shared.normalize, images, batch)
    power = np.exp(300 * spoken(images))
    assert made == pytest.approx((power / power.sum(1, keepdims=True)).mean(0), rel=1e-6)
    assert made.sum() == pytest.approx(1, abs=1e-12)
    assert made.max() - made.min() > 0.1


@given(counted)
def test_jensen_shannon_equals_scipys(pair):
    """scipy has the distance, the root of the divergence; zeros stand in most of these shares."""
    p, q = class_shares(pair)
    assert jensen_shannon(p, q) == pytest.approx(scipy.spatial.distance.jensenshannon(p, q, 2) ** 2, abs=1e-12)


def test_leanings_by_hand():
    """Accuracy (0.9, 0.3, 0) is (3/4, 1/4, 0) of its sum; the labels are (2, 2, 0), the unlabeled rows (1, 1, 2).
    APP-U (1/4, 3/4, 0): the middle is (1/2, 1/2, 0) with 1 bit, either side has h = 2 - (3/4) log2(3) = 0.811278, so
    the divergence is 0.188722. Labels (1/2, 1/2, 0): the middle (5/8, 3/8) has 0.954434 bits, the sides h and 1, so it
    is 0.954434 - 0.905639 = 0.048795."""
    row = prediction_bias(np.array([0.25, 0.75, 0]), np.array([2, 2, 0]), np.array([1, 1, 2]), [0.9, 0.3, 0.0])
    assert row == {
        "app_u": [0.25, 0.75, 0.0],
        "labeled": [0.5, 0.5, 0.0],
        "unlabeled": [0.25, 0.25, 0.5],
        "accuracy": [0.75, 0.25, 0.0],
        "js_app_u": pytest.approx(0.188722, abs=1e-6),
        "js_labeled": pytest.approx(0.048795, abs=1e-6),
    }


def test_leanings_are_zero_for_the_same_and_one_without_a_common_class():
    """And shares of nothing, with their divergences, are None: no NaN gets into a row."""
    one = np.array([3, 1, 0, 0])
    other = np.array([0, 0, 5, 2])
    nothing = np.zeros(4)
    row = prediction_bias(class_shares(one), other, one, [0.6, 0.2, 0.0, 0.0])
    assert (row["js_app_u"], row["js_labeled"]) == (0, 1)
    row = prediction_bias(class_shares(one), nothing, one, [0.6, 0.2, 0.0, 0.0])
    assert (row["labeled"], row["js_labeled"], row["js_app_u"]) == (None, None, 0)
    row = prediction_bias(class_shares(one), other, one, [0.0] * 4)
    assert (row["accuracy"], row["js_labeled"], row["js_app_u"]) == (None, None, None)


def test_a_class_without_test_images_scores_zero():
    test = make_examples(30, seed=8)
    without = Examples(test.images, test.labels.clamp_max(CLASSES - 2))
    per_class = evaluate_model(make_task().network, model(), make_task().normalize, without).per_class
    assert len(per_class) == CLASSES
    assert per_class[-1] == 0


def test_quality_equals_a_count():
    """Over 40 random batches: accuracy, accuracy and share above the threshold, of those used, and by class."""
    random = np.random.default_rng(0)
    quality = Quality(CLASSES, 0.7, torch.device("cpu"))
    label = []
    hidden = []
    confidence = []
    weight = []
    for size in random.integers(1, 9, 40):
        label.append(random.integers(0, CLASSES, size))
        hidden.append(random.integers(0, CLASSES - 1, size))  # the last class is never there
        confidence.append(random.choice([0.3, 0.7, 0.9], size))
        weight.append(random.choice([0.0, 0.2, 1.0], size))
        pseudo = PseudoLabels(*(torch.from_numpy(each[-1]) for each in (label, confidence, weight)))
        quality.add(pseudo, torch.from_numpy(hidden[-1]))
    label, hidden, confidence, weight = (np.concatenate(each) for each in (label, hidden, confidence, weight))
    right = label == hidden
    above = confidence >= 0.7
    used = weight > 0
    row = quality.row()
    assert row["accuracy"] == pytest.approx(right.mean(), rel=1e-12)
    assert row["share_above"] == pytest.approx(above.mean(), rel=1e-12)
    assert row["accuracy_above"] == pytest.approx(right[above].mean(), rel=1e-12)
    assert row["share_used"] == pytest.approx(used.mean(), rel=1e-12)
    assert row["accuracy_used"] == pytest.approx(right[used].mean(), rel=1e-12)
    assert row["per_class"][:-1] == pytest.approx([right[hidden == k].mean() for k in range(CLASSES - 1)], rel=1e-12)
    assert row["per_class"][-1] is None


def test_areas_under_the_curve_of_confidence_and_weight():
    """By hand: correct confidences 0.9, 0.6 and wrong 0.6, 0.2 give 3.5 of 4 pairs; equal weights give 0.5."""
    quality = Quality(CLASSES, 0.7, torch.device("cpu"))
    label = torch.tensor([0, 1, 2, 0, 1])
    hidden = torch.tensor([0, 1, 0, 1, -1])
    confidence = torch.tensor([0.9, 0.6, 0.6, 0.2, 0.99])
    quality.add(PseudoLabels(label[:2], confidence[:2], torch.full((2,), 0.5)), hidden[:2])
    assert quality.row()["auc_confidence"] is None, "all are correct"
    quality.add(PseudoLabels(label[2:], confidence[2:], torch.full((3,), 0.5)), hidden[2:])
    assert (quality.row()["auc_confidence"], quality.row()["auc_weight"]) == (3.5 / 4, 0.5)


def test_area_under_roc_equals_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    for _ in range(20):
        positive = random.random(50) < 0.3
        scores = random.choice([0.1, 0.2, 0.5, 0.7], 50)
        if positive.any():
            assert roc_auc(positive, scores) == pytest.approx(metrics.roc_auc_score(positive, scores), abs=1e-12)


def test_quality_of_zero_pseudo_labels_is_none():
    """No pseudo-label: no row. None above the threshold or used: no accuracy of those, a share of 0."""
    quality = Quality(CLASSES, 0.95, torch.device("cpu"))
    assert quality.row() is None
    quality.add(
        PseudoLabels(torch.tensor([1, 2]), torch.tensor([0.5, 0.6]), torch.tensor([0.0, 0.0])), torch.tensor([1, 1])
    )
    row = quality.row()
    assert row["accuracy"] == 0.5
    assert row["accuracy_above"] is None
    assert row["accuracy_used"] is None
    assert row["share_above"] == row["share_used"] == 0


def test_pseudo_labels_without_true_labels_are_counted_but_not_evaluated():
    ones = torch.ones(4)
    unused = torch.tensor([1.0, 1.0, 1.0, 0.0])
    quality = Quality(CLASSES, 0.95, torch.device("cpu"))
    quality.add(PseudoLabels(torch.tensor([0, 1, 2, 0]), ones, unused), torch.tensor([0, -1, -1, 1]))
    row = quality.row()
    assert (row["accuracy"], row["share_used"], row["accuracy_used"], row["accuracy_above"]) == (0.5, 0.75, 1.0, 0.5)
    assert row["per_class"][:3] == [1.0, 0.0, None]
    unjudged = Quality(CLASSES, 0.95, torch.device("cpu"))
    unjudged.add(PseudoLabels(torch.tensor([0, 1, 2, 0]), ones, unused), torch.full((4,), -1))
    row = unjudged.row()
    assert (row["accuracy"], row["share_used"], row["accuracy_used"]) == (None, 0.75, None)
    assert summarize_pseudo_labels([{"round": 1, "pseudo": row}]) == {
        "used": {"last": 0.75, "best": 0.75, "best_round": 1}
    }


def test_pseudo_labels_of_several_models_are_counted_separately() -> None:
    """The local model is right of 3 in 4, the global one of 1 in 4; what teaches is the global one's."""
    hidden = torch.tensor([0, 1, 2, 3])
    ones = torch.ones(4)
    local = PseudoLabels(torch.tensor([0, 1, 2, 0]), ones, ones)
    whole = PseudoLabels(torch.tensor([0, 0, 0, 0]), ones, 0 * ones)
    quality = Quality(CLASSES, 0.95, torch.device("cpu"))
    quality.add(whole, hidden, {"local": local, "global": whole})
    row = quality.row()
    assert (row["accuracy"], row["share_used"]) == (0.25, 0.0)
    assert {name: each["accuracy"] for name, each in row["models"].items()} == {"local": 0.75, "global": 0.25}


def test_metrics_that_a_run_measures_in_addition_to_the_test() -> None:
    """Last and best of each quantity over the rounds that have it; the earliest of equal rounds is the best."""
    rows = [
        {"round": 1, "pseudo": None},
        {"round": 2, "pseudo": {"accuracy": 0.6, "share_used": 0.1, "models": {"local": {"accuracy": 0.9}}}},
        {"round": 3, "pseudo": {"accuracy": 0.5, "share_used": 0.2, "models": {"local": {"accuracy": 0.9}}}},
    ]
    assert summarize_pseudo_labels(rows) == {
        "pseudo": {"last": 0.5, "best": 0.6, "best_round": 2},
        "used": {"last": 0.2, "best": 0.2, "best_round": 3},
        "pseudo.local": {"last": 0.9, "best": 0.9, "best_round": 2},
    }


def test_test_images_are_normalized_by_their_statistics():
    """In batches of 250 in the order of the set, as the module in training mode says of each (here 250 and 30)."""
    test = make_examples(280, seed=8)
    shared = make_task()
    oracle = load_weights(TorchSmall(1, CLASSES, shared.network.width), model()).train()
    with torch.no_grad():
        parts = [oracle(part.double() / 127.5 - 1) for part in (test.images[:250], test.images[250:])]
    text = evaluate_model(shared.network, model(), shared.normalize, test, statistics="batch")
    assert text.row()["accuracy"] == (torch.cat(parts).argmax(1) == test.labels).double().mean().item()
    assert text.loss != evaluate_model(shared.network, model(), shared.normalize, test).loss


@pytest.mark.parametrize(
    ("given", "constants"),
    [
        ({}, None),
        ({"pixel_mean": (0.0,), "pixel_std": (1.0,)}, ((0.0,), (1.0,))),
        ({"pixel_std": (0.25,)}, ("own", (0.25,))),
    ],
)
def test_pixels_are_normalized_as_documented(given, constants):
    plain, made = (factory.build_problem(Config(**each)) for each in ({}, given))
    constants_of_data = plain.source.mean, plain.source.std
    mean, std = constants or constants_of_data
    assert (made.source.mean, made.source.std) == (constants_of_data[0] if mean == "own" else mean, std)
    image = made.test.images[:1]
    wanted = (image.double() / 255 - made.source.mean[0]) / made.source.std[0]
    assert torch.allclose(made.task.normalize(image).double(), wanted, atol=1e-6)


def test_wrong_constants_are_a_sentence():
    with pytest.raises(UserError, match=r"pixel_std is .*: it must be numbers above 0"):
        Config(pixel_std=(0.0,))
    with pytest.raises(UserError, match="pixel_mean has 3 numbers, but the images have 1 channels"):
        factory.build_problem(Config(pixel_mean=(0.5, 0.5, 0.5)))


def test_evaluation_batches_on_a_cpu_have_a_million_pixels() -> None:
    """A thousand of 28x28, 256 of 64x64, one of 2048x2048; 300 images of 64x64 count all in two parts."""
    sides = (28, 64, 2048)
    assert [images_per_pass(torch.zeros(0, 1, side, side), 1000) for side in sides] == [1000, 256, 1]
    shared = make_task()
    large = make_examples(300, side=64)
    made = model()
    parts = [Examples(*(leaf[rows] for leaf in large)) for rows in (slice(0, 256), slice(256, None))]
    counts = [evaluate_model(shared.network, made, shared.normalize, each).confusion for each in (large, *parts)]
    assert torch.equal(counts[0], counts[1] + counts[2])


def test_a_cpu_sends_few_images_through_the_network_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The activations of 150 images of 32x32 at once would be larger than many a model; the bits are those of one."""
    network = SmallCNN(channels=3, classes=10, width=4)
    model = network.init(rng.generator(0, "model"))
    images = torch.randint(0, 256, (150, 3, 32, 32), dtype=torch.uint8, generator=rng.generator(0, "images"))
    test = Examples(images, torch.arange(150) % 10)

    def normalize(x: torch.Tensor) -> torch.Tensor:
        return x.float() / 255

    with torch.no_grad():
        logits = network.predict(tree.channels_last(model["params"]), model["stats"], normalize(images))
    counts = list[int]()
    predict = SmallCNN.predict

    def counted(self: SmallCNN, params: tree.Tree, stats: tree.Tree, x: torch.Tensor) -> torch.Tensor:
        counts.append(len(x))
        return predict(self, params, stats, x)

    monkeypatch.setattr(SmallCNN, "predict", counted)
    text = evaluate_model(network, model, normalize, test)
    assert counts == [64, 64, 22]
    loss = torch.nn.functional.cross_entropy(logits, test.labels, reduction="sum")
    assert text.loss == float(loss.double()) / 150
    assert torch.equal(torch.from_numpy(text.correct), logits.argmax(-1) == test.labels)


def test_balanced_accuracy_leaves_out_classes_without_images():
    """Recalls of 3/4 and 0/1, and a class without an image: their mean is 3/8, the accuracy 3/5."""
    row = ModelEvaluation(torch.tensor([[3, 1, 0], [1, 0, 0], [0, 0, 0]]), 0.0).row()
    assert (row["balanced_accuracy"], row["accuracy"]) == (0.375, 0.6)


def test_accuracy_by_client_counts_the_images_of_each():
    correct = np.array([True, False, True, True, False, True])
    owners = np.array([0, 0, 2, 2, 2, -1])
    assert accuracy_by_client(correct, owners) == {0: 0.5, 2: 0.666667}


def test_summary_of_clients():
    """Of 11 clients with 0, 0.1, ..., 1 the worst tenth is two clients: 0 and 0.1."""
    row = summarize_clients([step / 10 for step in range(11)])
    assert row == {"clients": 11, "mean": 0.5, "deviation": round(10**0.5 / 10, 6), "worst": 0.05}

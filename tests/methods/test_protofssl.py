"""ProtoFSSL: an episode by loops over images, prototypes by hand, and the head that stands for them."""

from collections.abc import Sequence

import pytest
import torch
from method_helpers import make_random_images, simulate_rounds
from torch import Tensor

from halfmoon.api.types import Batch, ClientData
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.core.tree import Tree
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    NETWORK,
    make_dataset,
    make_task,
    max_difference,
    start_server,
)
from halfmoon.methods.protofssl import ProtoFSSL, distances, first_of_each_class
from halfmoon.models import SmallCNN


def textbook(options: ProtoFSSL, params: Tree, broadcast: Tree, batch: Batch) -> Tensor:
    """Return the loss of an episode, image by image: classes 0 and 2 are in it, 1 is the helpers', 3 nobody's."""
    _, e, _ = NETWORK.embed(params, torch.cat([batch.x, batch.u["weak"]]))
    helpers = broadcast["helpers"][: int(broadcast["there"].sum())]
    class_prototypes = [e[0], helpers[:, 1].mean(0), e[1]]

    def distance(f: Tensor, prototype: Tensor) -> Tensor:
        return (f - prototype).square().sum() / len(f)

    def log_probabilities(f: Tensor, prototypes: Sequence[Tensor]) -> Tensor:
        return torch.stack([-distance(f, prototype) for prototype in prototypes]).log_softmax(0)

    loss = (-log_probabilities(e[2], class_prototypes)[2] - log_probabilities(e[3], class_prototypes)[0]) / 2
    for f in e[4:]:
        prediction = sum(log_probabilities(f, h[:3]).exp() for h in helpers) / len(helpers)
        target = prediction**2 / (prediction**2).sum()
        target = target if options.through_target else target.detach()
        loss = loss - options.unlabeled_weight * (target * log_probabilities(f, class_prototypes)).sum() / (len(e) - 4)
    return loss


@pytest.mark.parametrize("through", [True, False])
def test_an_episode_image_by_image(through: bool):
    """Loss and gradient, with two of five helpers there; the labels are 0, 2, 2, 0."""
    options = ProtoFSSL(through_target=through)
    shared = make_task()
    broadcast = start_server(options, shared)
    broadcast["helpers"][:2] = torch.randn(2, CLASSES, 8, generator=torch.Generator().manual_seed(3)).double()
    broadcast["there"] = torch.tensor([1.0, 1, 0, 0, 0]).double()
    broadcast["known"] = torch.tensor([1.0, 1, 1, 0]).double()
    batch = Batch(
        make_random_images(4, 1),
        torch.tensor([0, 2, 2, 0]),
        torch.arange(4),
        {"weak": make_random_images(5, 2)},
        torch.arange(5),
    )
    client_update = options.client_updates(shared)["train"]
    gradient, loss, (moments, pseudo) = grad_and_value(client_update._loss, broadcast["params"], broadcast, batch)
    wanted, expected, _ = grad_and_value(lambda p: (textbook(options, p, broadcast, batch), ()), broadcast["params"])
    assert float(loss) == pytest.approx(float(expected), rel=1e-10)
    assert max_difference(gradient, wanted) < 1e-10
    assert len(moments) == 1
    assert pseudo.weight.tolist() == [1.0] * 5
    assert not gradient["head"]["weight"].any()


def test_supports_and_distances_by_hand():
    assert first_of_each_class(torch.tensor([3, 1, 3, 3, 1, 0])).tolist() == [1, 1, 0, 0, 0, 1]
    found = distances(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [4.0, 6.0]]))
    assert found.tolist() == [[2.0, 12.5]]


def test_prototypes_are_means_of_features():
    """Of classes 0, 1, 1 under the tracked statistics, without padding rows; class 2 and 3 are not there."""
    options = ProtoFSSL()
    shared = make_task()
    broadcast = start_server(options, shared)
    x = torch.randint(0, 256, (4, 1, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    data = ClientData(x, torch.tensor([0, 1, 1, 3]), x[:0], torch.tensor(3), torch.tensor(0))
    upload, memory = options.client_updates(shared)["train"].finish(broadcast, {**broadcast, "optimizer": {}}, data)
    head = {"weight": torch.eye(8).double()}
    e = NETWORK.predict({**broadcast["params"], "head": head}, broadcast["stats"], x.double() / 127.5 - 1)
    torch.testing.assert_close(upload.aux["own"][0], e[0])
    torch.testing.assert_close(upload.aux["own"][1], (e[1] + e[2]) / 2)
    assert upload.aux["present"].tolist() == [1, 1, 0, 0]
    assert (float(upload.weight), memory) == (1.0, {})


def test_head_returns_the_distances():
    """Its softmax is that of -d to the mean prototypes; a class without prototypes is never predicted."""
    options = ProtoFSSL()
    shared = make_task()
    server = start_server(options, shared)
    server["mean"] = torch.randn(CLASSES, 8, generator=torch.Generator().manual_seed(4)).double()
    server["known"] = torch.tensor([1.0, 1, 1, 0]).double()
    model = options.solution(shared, server)
    x = make_random_images(6, 7)
    same = {**server["params"], "head": {"weight": torch.eye(8).double()}}
    d = distances(NETWORK.predict(same, server["stats"], x), server["mean"][:3])
    text = NETWORK.predict(model["params"], model["stats"], x).softmax(-1)
    torch.testing.assert_close(text[:, :3], (-d).softmax(-1))
    assert float(text[:, 3].max()) == 0


def test_server_fills_and_stores_helpers():
    """Three clients reply: of four helpers' places the last is empty, and the first round has no helpers."""
    options = ProtoFSSL(helpers=4)
    shared = make_task(rounds=2)
    first, second = simulate_rounds(options, shared, make_dataset(), rounds=2)
    assert first.server["there"].tolist() == [1, 1, 1, 0]
    assert not first.server["helpers"][3].any()
    assert set(first.server["known"].tolist()) <= {0.0, 1.0}
    assert first.report.pseudo["share_used"] == 0
    assert second.report.pseudo["share_used"] == 1


class Answers:
    """A federation of three clients whose uploads are given."""

    def __init__(self, upload: Upload) -> None:
        self.upload = upload

    def query(self, client_update: str, broadcast: Tree) -> Upload:
        self.broadcast = broadcast
        return self.upload


def test_a_round_by_hand():
    """Class 0 is known to two clients with 1 and 3: the mean 2 fills the third's. Who weighs nothing does not count."""
    options = ProtoFSSL(helpers=2)
    shared = make_task()
    server = start_server(options, shared)
    class_prototypes = torch.zeros(4, CLASSES, 8).double()
    class_prototypes[0, 0], class_prototypes[1, 0], class_prototypes[2, 1], class_prototypes[3] = 1, 3, 7, 99
    present = torch.tensor([[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]]).double()
    model = {name: tree.stack([server[name]] * 4) for name in ("params", "stats")}
    weight = torch.tensor([1.0, 1, 1, 0]).double()
    federation = Answers(Upload(model, weight, {"own": class_prototypes, "present": present}))
    new = options.round(shared, server, federation)
    assert "mean" not in federation.broadcast
    assert new["mean"][:, 0].tolist() == [2, 7, 0, 0]
    assert new["known"].tolist() == [1, 1, 0, 0]
    assert new["helpers"][:, :, 0].tolist() == [[1, 7, 0, 0], [3, 7, 0, 0]]
    with pytest.raises(Exception, match="head with a bias"):
        options.start(shared, SmallCNN(1, CLASSES, 4, "none").init(torch.Generator()))

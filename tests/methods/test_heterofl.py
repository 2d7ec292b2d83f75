"""HeteroFL: the cut, the scaler, the mask and the average by hand; and FedAvg where all clients are wide."""

from dataclasses import dataclass
from math import log

import pytest
import torch
import torch.nn.functional as F
from method_helpers import simulate_rounds, simulate_with_both_executors
from scripted_federation import ScriptedFederation
from test_batchnorm_stats import counted
from torch import Tensor, nn
from torch_models import build_module

from halfmoon.api.types import Batch, ClientData
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.optim import SGD
from halfmoon.core.tree import Tree
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    SIZES,
    make_dataset,
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
    trees_equal,
)
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.heterofl import HeteroFL, cut_to_leading_channels, fixed_dimensions, parse_rates
from halfmoon.models import SmallCNN, WideResNet
from halfmoon.models.network import Network
from halfmoon.models.passes import ForwardPass

WIDE = SmallCNN(1, CLASSES, 4)


@dataclass(frozen=True)
class Pair(Network):
    """Two hidden channels: one 1x1 convolution without bias, and a head; nothing to normalize."""

    channels: int = 1
    classes: int = 2
    norm: str = "none"  # pyright: ignore[reportIncompatibleVariableOverride]

    def init(self, generator: torch.Generator) -> Tree:
        conv = {"weight": torch.ones(2, self.channels, 1, 1)}
        head = {"weight": torch.ones(self.classes, 2), "bias": torch.ones(self.classes)}
        return {"params": {"layer": {"conv": conv}, "head": head}, "stats": {}}

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        return run.linear("head", run.conv("layer", x).mean((-2, -1)))

    def check(self, shape: tuple[int, int, int]) -> None:
        pass


def pair(conv: list[float], head: list[list[float]], bias: list[float]) -> Tree:
    """Return parameters of `Pair` or of its leading part."""
    d = torch.float64
    weight = torch.tensor(conv, dtype=d).reshape(-1, 1, 1, 1)
    return {
        "layer": {"conv": {"weight": weight}},
        "head": {"weight": torch.tensor(head, dtype=d), "bias": torch.tensor(bias, dtype=d)},
    }


def upload(params: Tree, present: list[float], weight: float = 1.0) -> Upload:
    """Return what a client sends."""
    return Upload({"params": params}, torch.tensor(weight), {"present": torch.tensor(present)})


def shapes(params: Tree) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name."""
    return {path: tuple(leaf.shape) for path, leaf in tree.flatten(params).items()}


def test_a_client_of_half_width_gets_the_leading_half():
    """Hidden channels 4, 8, 8 become 2, 4, 4; the image's one channel and the four classes stay."""
    params = start_server(HeteroFL(), make_task(WIDE))["params"]
    half = cut_to_leading_channels(params, 0.5, fixed_dimensions(WIDE))
    assert shapes(half) == {
        "conv1/conv/weight": (2, 1, 3, 3), "conv1/conv/bias": (2,), "conv1/norm/weight": (2,), "conv1/norm/bias": (2,),
        "conv2/conv/weight": (4, 2, 3, 3), "conv2/conv/bias": (4,), "conv2/norm/weight": (4,), "conv2/norm/bias": (4,),
        "conv3/conv/weight": (4, 4, 3, 3), "conv3/conv/bias": (4,), "conv3/norm/weight": (4,), "conv3/norm/bias": (4,),
        "head/weight": (4, 4), "head/bias": (4,),
    }  # fmt: skip
    assert torch.equal(half["conv2"]["conv"]["weight"], params["conv2"]["conv"]["weight"][:4, :2])
    assert torch.equal(half["head"]["weight"], params["head"]["weight"][:, :4])
    assert trees_equal(cut_to_leading_channels(params, 1.0, fixed_dimensions(WIDE)), params)


def test_sizes_are_rounded_up_and_no_name_is_needed():
    """A rate of 0.3 leaves ceil(1.2) = 2 and ceil(2.4) = 3 channels; 0.28 of 25 is 7, though as floats it is more.

    Whole dimensions are found though hidden ones are as large: 4 channels, 4 classes, 4 hidden ones.
    """
    network = SmallCNN(4, 4, 4)
    sizes = shapes(cut_to_leading_channels(network.init(torch.Generator())["params"], 0.3, fixed_dimensions(network)))
    assert sizes["conv1/conv/weight"] == (2, 4, 3, 3)
    assert sizes["conv2/conv/weight"] == (3, 2, 3, 3)
    assert sizes["head/weight"] == (4, 3)
    odd = SmallCNN(1, 2, 25)
    assert shapes(cut_to_leading_channels(odd.init(torch.Generator())["params"], 0.28, fixed_dimensions(odd)))[
        "conv1/conv/bias"
    ] == (7,)


def test_the_average_by_hand():
    """Two whole clients, one of half width; the third whole one has no image and weighs nothing.

    conv: channel 0 is held by three: (1 + 3 + 8) / 3 = 4; channel 1 by two: (2 + 4) / 2 = 3. The head's row of class 0
    belongs to the first and the narrow client: (10 + 40) / 2 = 25 in column 0, 20 in column 1, bias (1 + 3) / 2 = 2.
    Class 1 is the second client's alone: 30, 40, bias 5. Unmasked, row 0 is (10 + 50 + 40) / 3 = 33.3, (20 + 60) / 2.
    """
    whole = [
        upload(pair([1, 2], [[10, 20], [-9, -9]], [1, -9]), [1, 0]),
        upload(pair([3, 4], [[50, 60], [30, 40]], [-9, 5]), [0, 1]),
        upload(pair([99, 99], [[99, 99]] * 2, [99, 99]), [0, 0], 0),
    ]
    narrow = [upload(pair([8], [[40], [-9]], [3, -9]), [1, 0])]

    def make_federation() -> ScriptedFederation:
        replies = {"train-1": lambda broadcast, who: whole, "train-0.5": lambda broadcast, who: narrow}
        return ScriptedFederation(replies, clients=6, cohort=torch.tensor([0, 2, 3, 4]))

    server = {"params": pair([0, 0], [[0, 0], [0, 0]], [0, 0]), "stats": {}}
    fed = make_federation()
    new = HeteroFL("1-0.5").round(make_task(Pair()), server, fed)["params"]
    assert fed.queries == [("train-1", [0, 2, 4]), ("train-0.5", [3])]
    assert shapes(fed.broadcasts[1]["params"]) == {
        "layer/conv/weight": (1, 1, 1, 1),
        "head/weight": (2, 1),
        "head/bias": (2,),
    }
    assert new["layer"]["conv"]["weight"].flatten().tolist() == [4, 3]
    assert new["head"]["weight"].tolist() == [[25, 20], [30, 40]]
    assert new["head"]["bias"].tolist() == [2, 5]
    free = HeteroFL("1-0.5", masked=False).round(make_task(Pair()), server, make_federation())["params"]
    assert free["layer"]["conv"]["weight"].flatten().tolist() == [4, 3]
    assert free["head"]["weight"][0].tolist() == pytest.approx([100 / 3, 40])


def test_parameters_that_no_client_trained_are_unchanged():
    """A round of a narrow client alone, without class 1: channel 1, its column, and class 1's row keep their values."""
    old = pair([1, 2], [[3, 4], [5, 6]], [7, 8])
    replies = {"train-0.5": lambda broadcast, who: [upload(pair([10], [[20], [30]], [40, 50]), [1, 0])]}
    fed = ScriptedFederation(replies, cohort=torch.tensor([1]))
    new = HeteroFL("1-0.5").round(make_task(Pair()), {"params": old, "stats": {}}, fed)["params"]
    assert trees_equal(new, pair([10, 2], [[20, 4], [5, 6]], [40, 8]))
    nobody = {"train-0.5": lambda broadcast, who: [upload(pair([10], [[20], [30]], [40, 50]), [0, 0], 0)]}
    fed = ScriptedFederation(nobody, cohort=torch.tensor([1]))
    assert trees_equal(HeteroFL("1-0.5").round(make_task(Pair()), {"params": old, "stats": {}}, fed)["params"], old)


def test_the_servers_momentum_by_hand():
    """Channel 0 goes from 1 to the clients' .7: v = .3, W = .7; then to .2: v = .5 * .3 + .5 = .65, W = .05."""
    uploads = iter([0.7, 0.2])
    replies = {"train-1": lambda broadcast, who: [upload(pair([next(uploads), 0], [[0, 0]] * 2, [0, 0]), [1, 1])]}
    method = HeteroFL(server_momentum=0.5)
    fed = ScriptedFederation(replies, cohort=torch.tensor([0]))
    server = method.start(make_task(Pair()), {"params": pair([1, 0], [[0, 0]] * 2, [0, 0]), "stats": {}})
    for expected in (0.7, 0.05):
        server = method.round(make_task(Pair()), server, fed)
        assert float(server["params"]["layer"]["conv"]["weight"][0]) == pytest.approx(expected)
    assert "momentum" not in HeteroFL().start(make_task(Pair()), {"params": server["params"], "stats": {}})


def test_the_mask_by_hand():
    """Logits (log 2, 0, log 100) with class 2 unseen: its logit becomes 0, so p = (2, 1, 1) / 4.

    CE of class 0 is log 2; unmasked it is log(103 / 2). Class 2's row gets no gradient.
    """
    network = Pair(1, 3)
    params = pair([1, 1], [[log(2), 0], [0, 0], [log(100), 0]], [0, 0, 0])
    image = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    y = torch.tensor([0])
    batch = Batch(image, y, y, {}, y[:0])
    no_images = torch.zeros(0, 1, 1, 1, dtype=torch.uint8)
    data = ClientData(no_images, torch.tensor([0, 1, 1]), no_images, torch.tensor(3), torch.tensor(0))
    for masked, loss in ((True, log(2)), (False, log(103 / 2))):
        client_update = HeteroFL(masked=masked).client_updates(make_task(network, optimizer=SGD(1.0)))["train-1"]
        carry = client_update.begin({"params": params}, {}, data)
        assert carry["present"].tolist() == [True, True, False]
        after, notes = client_update.step({}, carry, batch)
        assert float(notes.loss) == pytest.approx(loss)
        moved = after["params"]["head"]["weight"] - params["head"]["weight"]
        assert bool(moved[2].any()) == (not masked)
    empty = ClientData(no_images, torch.zeros(4, dtype=torch.int64), no_images, torch.tensor(0), torch.tensor(0))
    carry = client_update.begin({"params": params}, {}, empty)
    assert not carry["present"].any()  # the labels of a client without rows are padding
    sent, memory = client_update.finish({}, carry, empty)
    assert (float(sent.weight), memory) == (0, {})


class Scaler(nn.Module):
    """Divide by the rate, as the authors' code does after a convolution."""

    def __init__(self, inner: nn.Module, rate: float) -> None:
        super().__init__()
        self.inner = inner
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) / self.rate


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("network", "rate"), [(WIDE, 0.5), (WIDE, 0.3), (WideResNet(1, CLASSES, 1, depth=10), 0.5)])
def test_three_steps_are_those_of_a_module_with_scalers(network, rate, masked):
    """A narrow torch module with a scaler behind each convolution, logits filled with 0, torch.optim's SGD."""
    shared = make_task(network, optimizer=SGD(0.1, momentum=0.9, weight_decay=0.01))
    method = HeteroFL(f"1-{rate}", masked=masked)
    broadcast = {
        "params": cut_to_leading_channels(start_server(method, shared)["params"], rate, fixed_dimensions(network))
    }
    client_update = method.client_updates(shared)[f"train-{rate}"]

    oracle = build_module(network).double()
    for name, leaf in tree.flatten(broadcast["params"]).items():
        *where, last = name.split("/")
        module = oracle.get_submodule(".".join(where))
        setattr(module, last, nn.Parameter(leaf.clone()))
    for module in list(oracle.modules()):
        if isinstance(module, nn.BatchNorm2d):  # of the width that its parameters have
            module.running_mean = module.running_var = None
    leaves = {name.replace(".", "/"): p for name, p in oracle.named_parameters()}
    for module in list(oracle.modules()):
        if hasattr(module, "conv") and isinstance(module.conv, nn.Conv2d):
            module.conv = Scaler(module.conv, rate)
    optimizer = torch.optim.SGD(oracle.parameters(), 0.1, momentum=0.9, weight_decay=0.01)

    g = torch.Generator().manual_seed(0)
    no_images = torch.zeros(0, 1, 8, 8, dtype=torch.uint8)
    data = ClientData(no_images, torch.tensor([0, 2, 3]), no_images, torch.tensor(3), torch.tensor(0))
    carry = client_update.begin(broadcast, {}, data)
    for _ in range(3):
        x = torch.randn(6, 1, 8, 8, generator=g, dtype=torch.float64)
        y = torch.tensor([0, 2, 3, 3, 2, 0])
        carry, notes = client_update.step(broadcast, carry, Batch(x, y, y, {}, y[:0]))
        optimizer.zero_grad()
        logits = oracle(x)
        if masked:
            logits = logits.masked_fill(torch.tensor([False, True, False, False]), 0)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        assert float(notes.loss) == pytest.approx(float(loss.detach()), rel=1e-9)
    assert max_difference(tree.unflatten({k: p.detach() for k, p in leaves.items()}), carry["params"]) < 1e-8
    assert max_difference(carry["params"], broadcast["params"]) > 1e-2


@pytest.mark.parametrize("keep_optimizer", [False, True])
def test_all_wide_and_unmasked_it_is_fedavg_with_static_statistics(keep_optimizer):
    """Equal clients, rate 1: parameters and memories of FedAvg on all labels; the statistics are counted."""
    held = make_dataset(((4, 8),) * 4, all_labels=True)
    shared = make_task(optimizer=SGD(0.1, momentum=0.9))
    actual = HeteroFL(masked=False, keep_optimizer=keep_optimizer)
    expected_value = FedAvg(keep_optimizer=keep_optimizer)
    one, two = (simulate_rounds(m, shared, held, rounds=3) for m in (actual, expected_value))
    assert max_difference(one[-1].server["params"], two[-1].server["params"]) < 1e-12
    assert max_difference(one[-1].state, two[-1].state) < 1e-12
    assert one[-1].report.cost["labeled_steps"] == two[-1].report.cost["labeled_steps"]
    holders = [held.client_data(k)[0].x for k in range(4)]
    assert max_difference(one[-1].server["stats"], counted(one[-1].server, holders)) < 1e-10
    masked = run_rounds(HeteroFL(), make_simulation(HeteroFL(), shared, held), start_server(actual, shared), range(3))
    assert max_difference(masked[-1].server["params"], two[-1].server["params"]) > 1e-3


def test_bytes_by_hand():
    """Leaf by leaf, 8 bytes a number.

    The whole network: convolutions 9 * (4 + 4 * 8 + 8 * 8) = 900, three numbers a channel 60, head 4 * 8 + 4: 996. At
    1/2: 9 * (2 + 2 * 4 + 4 * 4) = 234, 30 and 20: 284. At 1/4: 9 * (1 + 2 + 4) = 63, 15 and 12: 90. Clients 0 and 3
    are whole, 1 is half, 2 a quarter wide. Up come four classes and a weight beside. The census sends four whole
    networks and takes back 40 moments and a count each.
    """
    method = HeteroFL("1-0.5-0.25")
    shared = make_task(WIDE)
    (result,) = simulate_rounds(method, shared, make_dataset(all_labels=True), cohort=4)
    trained = 2 * 996 + 284 + 90
    assert result.report.cost["bytes_down"] == 8 * (trained + 4 * 996)
    assert result.report.cost["bytes_up"] == 8 * (trained + 4 * 5 + 4 * 41)


@pytest.mark.parametrize("options", [{}, {"keep_optimizer": True, "server_momentum": 0.5, "sbn": "cohort"}])
def test_widths_lift(options):
    """Loop and vmap agree with clients of three widths, two of them in one program, some without a reply."""
    held = make_dataset((*SIZES, (4, 4), (3, 7)), all_labels=True)
    run = simulate_with_both_executors(
        HeteroFL("1-0.5-0.3", **options), make_task(), held, rounds=3, cohort=6, client_dropout=0.3
    )
    assert min(len(one.report.cohort) for one in run) < 6
    assert max_difference(run[-1].server["params"], start_server(HeteroFL(), make_task())["params"]) > 1e-2


def test_only_the_cohort_can_be_counted():
    """sbn "cohort" counts the rows of the round's clients, "all" those of all clients; the server's are left out."""
    held = make_dataset(all_labels=True, labels_at="server")
    for sbn in ("all", "cohort"):
        method = HeteroFL(sbn=sbn)
        (result,) = run_rounds(
            method, make_simulation(method, make_task(), held), start_server(method, make_task()), range(1)
        )
        who = range(4) if sbn == "all" else result.report.cohort
        expected = counted(result.server, [held.client_data(k)[0].x for k in who])
        assert max_difference(result.server["stats"], expected) < 1e-10


def test_the_widest_is_named_first():
    """The first work of a method is what others are measured by."""
    assert list(HeteroFL("0.5-1-0.25-0.5").client_updates(make_task())) == [
        "train-1",
        "train-0.5",
        "train-0.25",
        "census",
    ]
    assert parse_rates("1-0.5-0.0625") == (1.0, 0.5, 0.0625)


@pytest.mark.parametrize("rates", ["", "1,0.5", "wide", "0.5-0.25", "1-0", "1-2", "1--0.5", "1-nan", "1-"])
def test_impossible_rates_are_refused_in_a_sentence(rates):
    """Not numbers, out of range, or without a whole client; it says what they were and how they are written."""
    with pytest.raises(UserError, match="one of them 1") as message:
        HeteroFL(rates)
    assert repr(rates) in str(message.value)

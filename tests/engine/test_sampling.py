"""Check the draws of a local update: batch sizes by hand, complete passes, and independence of everything else."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from halfmoon.api.types import ClientData, Task, UpdateRequirements
from halfmoon.core import rng
from halfmoon.core.errors import UserError
from halfmoon.core.normalize import Normalize
from halfmoon.core.optim import SGD
from halfmoon.data.views import Plain, Shared, Strong, Weak
from halfmoon.engine.budget import ClientSize, compute_amount
from halfmoon.engine.sampling import Amount, Batching, DrawnUpdate, Views, batches, compute_views, cycle, draw
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import FixMatch
from halfmoon.models import SmallCNN

PLAIN = Views(Plain(), {"plain": Plain(), "weak": Plain(), "strong": Plain()})
PIXELS = Normalize((0.0,), (1 / 255,), torch.float64)  # the value of a pixel as it is


def local(labeled: int, unlabeled: int, start: int = 0) -> ClientData:
    """Return a client whose n-th image is the constant start + n, unlabeled ones 100 above, labels n modulo 4."""
    images = lambda first, n: (torch.arange(n) + first).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)  # noqa: E731
    x = images(start, labeled)
    u = images(start + 100, unlabeled)
    return ClientData(x, torch.arange(labeled) % 4, u, torch.tensor(labeled), torch.tensor(unlabeled))


def draw_update(client, amount, names=("weak", "strong"), views=None, keep=None, path=("visit", 0)):
    """Draw a local update of seed 0."""
    return draw(amount, client, views or Views(), UpdateRequirements(names), keep, 0, *path)


def same_draws(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@given(st.integers(1, 12), st.integers(1, 60), st.integers(0, 5))
def test_a_cycle_is_pass_after_pass(count, length, seed):
    rows = torch.arange(count) * 3 + 1
    made = cycle(rows, length, rng.generator(seed, "cycle"))
    assert len(made) == length
    for chunk in made.split(count):
        assert len(set(chunk.tolist())) == len(chunk)
        assert set(chunk.tolist()) <= set(rows.tolist())


def test_cycle_reshuffles_every_pass():
    """Four passes over 20 rows come in four orders, none of them the given one."""
    passes = cycle(torch.arange(20), 80, rng.generator(0, "cycle")).view(4, 20).tolist()
    assert len({tuple(each) for each in [*passes, list(range(20))]}) == 5


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 40))
def test_longer_update_starts_with_the_draws_of_a_shorter_one(count, one, two):
    a, b = (cycle(torch.arange(count), n, rng.generator(1, "x")) for n in (one, two))
    shared = min(one, two)
    assert torch.equal(a[:shared], b[:shared])


@pytest.mark.parametrize("seed", range(3))
def test_labeled_batches_do_not_depend_on_the_views(seed):
    """Labeled rows and draws are the same with and without unlabeled views, weak draws with and without strong."""
    client = local(7, 23)
    path = ("visit", seed)
    single = draw_update(client, Amount(5, 4, 0), (), path=path)
    both = draw_update(client, Amount(5, 4, 6), path=path)
    weak = draw_update(client, Amount(5, 4, 6), ("weak",), path=path)
    assert torch.equal(single.x_rows, both.x_rows)
    assert same_draws(single.x_draws, both.x_draws)
    assert torch.equal(weak.u_rows, both.u_rows)
    assert same_draws(weak.u_draws["weak"], both.u_draws["weak"])
    assert not torch.equal(both.u_draws["weak"]["top"], both.u_draws["strong"]["top"])


def test_labeled_and_unlabeled_rows_have_independent_orders():
    """A client with as many labeled as unlabeled rows does not see them in the same order, nor with the same crops."""
    made = draw_update(local(20, 20), Amount(5, 4, 4))
    assert not torch.equal(made.x_rows, made.u_rows)
    assert not torch.equal(made.x_draws["top"], made.u_draws["weak"]["top"])


def test_distinct_paths_draw_independently():
    client = local(30, 90)
    updates = [
        draw(Amount(6, 5, 10), client, Views(), UpdateRequirements(("weak",)), None, seed, *path)
        for seed, path in [(0, (0, 0, 0)), (1, (0, 0, 0)), (0, (1, 0, 0)), (0, (0, 1, 0)), (0, (0, 0, 1))]
    ]
    for drawn in (
        [v.x_rows for v in updates],
        [v.u_rows for v in updates],
        [v.u_draws["weak"]["top"] for v in updates],
    ):
        assert len({tuple(each.tolist()) for each in drawn}) == len(updates)


def test_batch_contains_the_rows_it_names():
    client = local(7, 23)
    made = draw_update(client, Amount(5, 4, 6), views=PLAIN)
    steps = list(batches([client], [made], PLAIN, PIXELS, 512))
    assert len(steps) == 5
    for t, batch in enumerate(steps):
        assert batch.x.shape == (1, 4, 1, 8, 8)
        assert batch.x_rows[0].tolist() == made.x_rows[4 * t : 4 * t + 4].tolist()
        assert batch.x[0, :, 0, 3, 3].tolist() == pytest.approx(batch.x_rows[0].tolist(), abs=1e-9)
        assert batch.y[0].tolist() == [row % 4 for row in batch.x_rows[0].tolist()]
        for view in ("weak", "strong"):
            assert batch.u[view][0, :, 0, 3, 3].tolist() == pytest.approx((batch.u_rows[0] + 100).tolist(), abs=1e-9)


def listed(steps) -> list[torch.Tensor]:
    return [t for b in steps for t in (b.x, b.y, b.x_rows, *(b.u[name] for name in sorted(b.u)), b.u_rows)]


@settings(max_examples=20)
@given(st.integers(1, 200))
def test_chunking_does_not_change_the_result(rows):
    """However many images have their views made in one call: the same bits, for clients of unequal local updates."""
    clients = [local(7, 23), local(3, 9, 50)]
    updates = [
        draw_update(c, Amount(n, 4, 5), path=("visit", k)) for k, (c, n) in enumerate(zip(clients, (5, 3), strict=True))
    ]
    whole = listed(batches(clients, updates, Views(), PIXELS, 10**6))
    parts = listed(batches(clients, updates, Views(), PIXELS, rows))
    assert len(whole) == len(parts) == 5 * 6
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_draws_do_not_depend_on_the_cohort():
    """A client's batches among others are those it has alone, when its local update is over its last step is repeated, and one
    that may draw nothing has no step and stops nobody."""
    clients = [local(7, 23), local(3, 9, 50), local(5, 9)]
    keep = [None, None, torch.zeros(9, dtype=torch.bool)]
    updates = [
        draw_update(client, Amount(steps, 4, 5), keep=keep[k], path=("visit", k))
        for k, (client, steps) in enumerate(zip(clients, (5, 3, 2), strict=True))
    ]
    together = list(batches(clients, updates, Views(), PIXELS, 512))
    assert len(together) == 5
    for k, steps in ((0, 5), (1, 3)):
        single = list(batches([clients[k]], [updates[k]], Views(), PIXELS, 512))
        assert len(single) == steps
        for t in range(5):
            one = single[min(t, steps - 1)]
            many = together[t]
            assert torch.equal(one.x[0], many.x[k])
            assert torch.equal(one.u["strong"][0], many.u["strong"][k])
            assert torch.equal(one.u_rows[0], many.u_rows[k])


def rule(batching: Batching, labeled: int, unlabeled: int, views: bool = True) -> tuple[int, int, int]:
    """Return what the batch rule says of a client, for a method with or without unlabeled views."""
    method = FedAvg(FixMatch()) if views else FedAvg()
    client_update = method.client_updates(Task(SmallCNN(), SGD(), PIXELS))["train"]
    return compute_amount(batching, client_update, ClientSize(labeled, unlabeled))[:3]


@pytest.mark.parametrize(
    ("batching", "holding", "both", "labels"),
    [
        # a client of FedDure on CIFAR-10: 500 images, 5 of each of 10 classes labeled
        (Batching(10, "rest"), (50, 450), (5, 10, 90), (5, 10, 0)),  # round(50 / 10) steps, 450 // 5 images
        (Batching(10, 10), (50, 450), (45, 10, 10), (5, 10, 0)),  # ceil(450 / 10) steps: nine-fold
        (Batching(10, "rest", epochs=2), (50, 450), (10, 10, 90), (10, 10, 0)),
        (Batching(10, 10, epochs=2), (50, 450), (90, 10, 10), (10, 10, 0)),
        (Batching(10, 10, epoch="labeled"), (50, 450), (5, 10, 10), (5, 10, 0)),
        (Batching(10, 64, epoch="unlabeled"), (50, 450), (8, 10, 64), (5, 10, 0)),  # ceil(7.03)
        (Batching(10, "rest", epoch="labeled"), (50, 450), (5, 10, 90), (5, 10, 0)),
        # one of CBAFed's clients: 4,750 of 5,000 images labeled are round(74.2) steps, not ceil(250 / 64) = 4
        (Batching(64, 64, epoch="larger"), (4750, 250), (74, 64, 64), (74, 64, 0)),
        (Batching(64, 64, epoch="larger", epochs=2), (0, 5000), (158, 0, 64), (0, 0, 0)),
        (Batching(10, "rest", epoch="larger"), (50, 450), (5, 10, 90), (5, 10, 0)),
        (Batching(10, "rest", steps=7), (50, 450), (7, 10, 64), (7, 10, 0)),  # 450 // 7 = 64
        (Batching(10, 10, steps=7), (50, 450), (7, 10, 10), (7, 10, 0)),
        (Batching(10, "rest"), (27, 100), (3, 10, 33), (3, 10, 0)),  # round(2.7), 100 // 3
        (Batching(10, "rest"), (3, 8), (1, 10, 8), (1, 10, 0)),  # fewer labels than a batch: one step all the same
        (Batching(10, "rest"), (50, 2), (5, 10, 1), (5, 10, 0)),  # never less than one image
        (Batching(10, 10), (3, 4), (1, 10, 10), (1, 10, 0)),  # fewer of both: cycled
        (Batching(10, 10), (50, 451), (46, 10, 10), (5, 10, 0)),  # a started batch counts
    ],
)
def test_the_batch_rule_by_hand(batching, holding, both, labels):
    """(steps, labeled, unlabeled images a step) with and without unlabeled views."""
    assert rule(batching, *holding) == both
    assert rule(batching, *holding, views=False) == labels


@given(st.integers(1, 60), st.integers(1, 300), st.integers(1, 3))
def test_remaining_rows_are_passed_once_an_epoch(labeled, unlabeled, epochs):
    """Under "rest" at most `epochs` passes over the unlabeled rows are made, and less than an image a step is lost."""
    steps, _, size = rule(Batching(10, "rest", epochs=epochs), labeled, unlabeled)
    assert size >= 1
    if unlabeled * epochs >= steps:
        assert 0 <= unlabeled * epochs - steps * size < steps


def test_rows_fewer_than_a_batch_repeat():
    """3 labeled rows in a batch of 10: three whole passes and one row more; 2 unlabeled ones in one of 5: two."""
    client = local(3, 2)
    (batch,) = batches([client], [draw_update(client, Amount(1, 10, 5), views=PLAIN)], PLAIN, PIXELS, 512)
    assert sorted(batch.x_rows[0].bincount(minlength=3).tolist()) == [3, 3, 4]
    assert sorted(batch.u_rows[0].bincount(minlength=2).tolist()) == [2, 3]
    assert batch.x.shape[1] == 10


def test_only_selected_rows_are_drawn():
    """`keep` names rows of the client; what stands beyond its count (padding under vmap) is never drawn."""
    client = local(5, 9)
    keep = torch.zeros(14, dtype=torch.bool)
    keep[[2, 7, 8, 11]] = True
    made = draw_update(client, Amount(4, 3, 6), keep=keep)
    assert set(made.u_rows.tolist()) == {2, 7, 8}
    assert made.amount == Amount(4, 3, 6)


def test_client_without_selected_rows_takes_no_step():
    """Neither labeled nor unlabeled rows are drawn; a method that wants no unlabeled view is not concerned."""
    client = local(5, 9)
    no_rows = torch.zeros(9, dtype=torch.bool)
    made = draw_update(client, Amount(4, 3, 6), keep=no_rows)
    assert made.amount == Amount(0, 3, 6)
    assert len(made.x_rows) == len(made.u_rows) == 0
    assert list(batches([client], [made], Views(), PIXELS, 512)) == []
    assert draw_update(local(5, 0), Amount(4, 3, 6)).amount.steps == 0
    assert draw_update(local(5, 0), Amount(4, 3, 0), ()).amount.steps == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"labeled": 0}, "labeled is 0"),
        ({"unlabeled": 0}, "unlabeled is 0"),
        ({"unlabeled": -3}, "unlabeled is -3"),
        ({"epochs": 0}, "epochs is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"unlabeled": "rest", "epoch": "unlabeled"}, "rest"),
    ],
)
def test_impossible_batch_rules_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        Batching(**wrong)


SHOWN = Views(Plain(), {"plain": Plain(), "weak": Weak(), "strong": Strong()})


def test_labeled_images_have_the_requested_views():
    """`x_views` shows the very rows of `x`: the plain one is `x` itself, the others are that name's recipe on it.
    Neither the rows, nor the labeled view, nor the unlabeled views depend on them; "weak2" is one more draw."""
    clients = [local(7, 23), local(3, 9, 50)]
    requested = UpdateRequirements(("weak", "strong"), labeled_views=("plain", "strong", "weak", "weak2"))
    updates = [
        draw(Amount(n, 4, 5), c, SHOWN, requested, None, 0, "visit", n) for c, n in zip(clients, (3, 2), strict=True)
    ]
    without = [
        draw_update(c, Amount(n, 4, 5), views=SHOWN, path=("visit", n)) for c, n in zip(clients, (3, 2), strict=True)
    ]
    steps = list(batches(clients, updates, SHOWN, PIXELS, 9))
    for t, (actual, expected) in enumerate(zip(steps, batches(clients, without, SHOWN, PIXELS, 512), strict=True)):
        assert expected.x_views == {}
        assert all(torch.equal(a, b) for a, b in zip(listed([actual]), listed([expected]), strict=True))
        assert torch.equal(actual.x_views["plain"], actual.x)
        for k, n in enumerate((3, 2)):
            at = min(t, n - 1)
            for name in ("strong", "weak", "weak2"):
                drawn = {key: leaf[4 * at : 4 * at + 4] for key, leaf in updates[k].x_view_draws[name].items()}
                made = SHOWN.unlabeled[name.rstrip("2")].apply(clients[k].x[actual.x_rows[k]], drawn, PIXELS)
                assert torch.equal(actual.x_views[name][k], made)
    first = updates[0]
    assert not torch.equal(first.x_view_draws["weak"]["top"], first.x_view_draws["weak2"]["top"])
    assert not torch.equal(first.x_view_draws["weak"]["top"], first.u_draws["weak"]["top"][:12])


def test_a_draw_shared_by_a_step_is_shared_by_its_labeled_images():
    """`Shared` counts the unlabeled images of a step (5 here); each of 3 steps with 4 labeled ones has its draw."""
    views = Views(Plain(), {"weak": Shared(Weak(), 5)})
    requested = UpdateRequirements(("weak",), labeled_views=("weak",))
    drawn = draw(Amount(3, 4, 5), local(7, 23), views, requested, None, 0).x_view_draws["weak"]
    rows = torch.stack([drawn["flip"], drawn["top"], drawn["left"]], 1).view(3, 4, 3)
    assert (rows == rows[:, :1]).all()
    assert len({tuple(each) for each in rows[:, 0].tolist()}) > 1


def mixing(amount: Amount, wanted: UpdateRequirements, seed: int = 0, client: ClientData | None = None) -> DrawnUpdate:
    return draw(amount, client or local(20, 30), PLAIN, wanted, None, seed, "visit", 0)


def test_mixing_coefficients_are_beta_distributed():
    """6,000 draws of Beta(a, a): mean 1/2 and variance 1 / (4 (2 a + 1)), each within five standard errors."""
    for a in (0.75, 4.0):
        drawn = mixing(Amount(6000, 1, 1), UpdateRequirements(("plain",), mixup=a)).mixing["mix"]
        variance = 1 / (4 * (2 * a + 1))
        assert abs(float(drawn.mean()) - 0.5) < 5 * (variance / 6000) ** 0.5
        assert abs(float(drawn.var()) / variance - 1) < 5 * (2 / 6000) ** 0.5
        assert float(drawn.min()) >= 0
        assert float(drawn.max()) <= 1


def test_every_step_has_an_independent_permutation_and_rotation():
    """ "order" permutes labeled images and all views of the unlabeled ones; "turn" counts quarter turns."""
    drawn = mixing(Amount(7, 4, 3), UpdateRequirements(("weak", "weak2", "strong"), mixup=1.0)).mixing
    assert drawn["order"].shape == (7, 4 + 3 * 3)
    assert all(sorted(order.tolist()) == list(range(13)) for order in drawn["order"])
    assert len({tuple(order.tolist()) for order in drawn["order"]}) == 7
    assert drawn["turn"].shape == (7, 3)
    assert set(drawn["turn"].flatten().tolist()) == {0, 1, 2, 3}
    assert mixing(Amount(7, 4, 3), UpdateRequirements(("weak",))).mixing == {}


def test_mixing_changes_no_other_draw():
    """A work that mixes, or wants a second minibatch, sees the same rows and views as one that does not."""
    plain = mixing(Amount(5, 4, 6), UpdateRequirements(("weak",)))
    more = mixing(Amount(5, 4, 6), UpdateRequirements(("weak",), second_batch=("weak",), mixup=1.0))
    assert torch.equal(plain.x_rows, more.x_rows)
    assert torch.equal(plain.u_rows, more.u_rows)
    assert same_draws(plain.u_draws["weak"], more.u_draws["weak"])
    assert not torch.equal(more.u_rows, more.second_rows)


def test_another_draw_of_a_recipe_is_another_draw():
    """ "weak2" is drawn like "weak", and differs from it."""
    made = draw_update(local(5, 40), Amount(4, 4, 10), ("weak", "weak2"))
    assert made.u_draws["weak"].keys() == made.u_draws["weak2"].keys()
    assert not same_draws(made.u_draws["weak"], made.u_draws["weak2"])


def test_the_second_minibatch_is_drawn_with_replacement_from_all_rows():
    """Also from rows that are not kept; some row twice before every row came once (40 of 30 rows)."""
    client = local(6, 30)
    keep = torch.arange(30) < 3
    made = draw(
        Amount(8, 3, 5), client, PLAIN, UpdateRequirements(("plain",), second_batch=("plain",)), keep, 0, "visit", 0
    )
    assert set(made.u_rows.tolist()) == {0, 1, 2}
    rows = made.second_rows.tolist()
    assert len(rows) == 40
    assert max(rows) > 2
    assert len(set(rows[:30])) < 30
    (first, *_) = batches([client], [made], PLAIN, PIXELS, 512)
    assert torch.equal(first.mixing["second_batch_rows"][0], made.second_rows[:5])
    assert torch.equal(first.second_batch["plain"][0], PIXELS(client.u[made.second_rows[:5]]))


@pytest.mark.parametrize(("stored", "steps"), [(0, 0), (1, 2), (4, 2), (5, 4), (30, 16)])
def test_epoch_passes_over_the_selected_rows(stored, steps):
    """Two epochs over `kept` of 30 rows in batches of 4: 2 * ceil(kept / 4) steps, by hand; none without a row."""
    client = local(6, 30)
    made = draw(
        Amount(99, 3, 4, epochs=2),
        client,
        PLAIN,
        UpdateRequirements(("plain",)),
        torch.arange(30) < stored,
        0,
        "visit",
        0,
    )
    assert made.amount.steps == steps
    assert len(made.u_rows) == 4 * steps
    fixed = draw(
        Amount(7, 3, 4), client, PLAIN, UpdateRequirements(("plain",)), torch.arange(30) < stored, 0, "visit", 0
    )
    assert fixed.amount.steps == (7 if stored else 0)


def test_a_client_without_labels_has_empty_labeled_batches():
    """The batches hold no labeled image in any view, and the unlabeled ones are those of a client that has labels."""
    client = local(6, 30)
    requested = UpdateRequirements(("plain",), labeled_views=("weak",))
    bare = client._replace(x=client.x[:0], y=client.y[:0], labeled=torch.tensor(0))
    made = [draw(Amount(3, n, 4), c, PLAIN, requested, None, 0, "v") for c, n in ((client, 2), (bare, 0))]
    assert torch.equal(made[0].u_rows, made[1].u_rows)
    for batch in batches([bare], [made[1]], PLAIN, PIXELS, 512):
        assert batch.x.shape == batch.x_views["weak"].shape == (1, 0, *client.x.shape[1:])
        assert batch.y.shape == (1, 0)
        assert batch.u["plain"].shape[:2] == (1, 4)


def test_a_sweep_shows_every_row_once():
    client = local(6, 30)
    swept = compute_views(client, PLAIN, ("plain",), PIXELS, 0, "visit", 0)
    assert torch.equal(swept.views["plain"], PIXELS(client.u))
    noise = torch.randint(256, client.u.shape, dtype=torch.uint8, generator=rng.generator(0))
    noisy = client._replace(u=noise)
    weak = [compute_views(noisy, Views(), ("weak",), PIXELS, 0, "visit", k).views["weak"] for k in (0, 1, 0)]
    assert torch.equal(weak[0], weak[2])
    assert not torch.equal(weak[0], weak[1])
    assert compute_views(client, Views(), (), PIXELS, 0, "visit", 0) is client

"""Budgets: the cost of a step by hand, and comparisons at equal steps or equal images through the network."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from halfmoon.api.types import ClientUpdate, Passes
from halfmoon.config.schema import Config
from halfmoon.engine.budget import Budget, ClientSize, Cost, compute_amount, find_largest_update, images_per_step
from halfmoon.engine.sampling import Amount, Batching
from halfmoon.federation.contract.small_federation import (
    make_dataset,
    make_simulation,
    make_task,
    run_rounds,
    start_server,
)
from halfmoon.methods import registry
from halfmoon.runs import runner

TEN = Batching(10, 10)
CLIENT = ClientSize(50, 450)


def client_update(name: str, **rules: str) -> ClientUpdate:
    return next(iter(registry.make(name).client_updates(make_task(**rules)).values()))


def holding(name: str, given_: ClientSize) -> ClientSize:
    return ClientSize(given_.labeled + given_.unlabeled, 0) if registry.entry(name).all_labels else given_


@pytest.mark.parametrize(
    ("name", "rules", "forward", "backward"),
    [
        # 10 labeled images, forward and backward
        ("fedavg", {}, 10, 10),
        # labeled, strong and weak share one pass and its backward pass
        ("fedavg-fixmatch", {}, 30, 30),
        # weak images under running statistics, or in a pass of their own, need no backward pass
        ("fedavg-fixmatch", {"labeling": "running"}, 30, 20),
        ("fedavg-uda", {"statistics": "separate"}, 30, 20),
        # local model 30; C-reg on strong views 10, its tangent 10; labeled loss at the virtual step 10, before and
        # after C-reg's step 2 * 10. Backward: local 30, Eq. 4 10, the labeled loss 10, Eq. 2 10
        ("feddure", {}, 80, 60),
        # local 30, C-reg 10, its labeled losses 20; backward local 30, Eq. 2 10
        ("feddure-without-freg", {}, 60, 40),
        # local 30, again with its tangent 2 * 30, the labeled loss 10; backward local 30, Eq. 4 30, the labeled loss 10
        ("feddure-without-creg", {}, 100, 70),
    ],
)
def test_passes_of_a_step_by_hand(name, rules, forward, backward):
    """Images through the network in a step on 10 + 10; the cost counts a backward pass as two forward ones."""
    one = client_update(name, **rules)
    assert one.passes(10, 10) == Passes(forward, backward)
    assert images_per_step(one, Amount(45, 10, 10)) == forward + 2 * backward


def test_equal_forwards_by_hand():
    """FedDure's 45 steps of 80 + 2 * 60 = 200 are 9000 images: 100 steps of FixMatch's 90, 300 of FedAvg's 30."""
    budget = Budget("forwards", client_update("feddure"))
    steps = {
        name: budget.amount(TEN, client_update(name), CLIENT, CLIENT).steps
        for name in ("feddure", "fedavg-fixmatch", "fedavg")
    }
    assert steps == {"feddure": 45, "fedavg-fixmatch": 100, "fedavg": 300}


def test_equal_labeled_steps_by_hand():
    """Labels alone take 5 steps by themselves, all labels 50, and 45 at FedDure's budget."""
    budget = Budget("labeled-steps", client_update("feddure"))
    for name, single in (("fedavg", 5), ("fedavg-sl", 50)):
        client_sizes = holding(name, CLIENT)
        assert compute_amount(TEN, client_update(name), client_sizes).steps == single
        assert budget.amount(TEN, client_update(name), client_sizes, CLIENT) == Amount(45, 10, 0)


def test_no_budget_is_the_batch_rule():
    for budget in (Budget(), Budget("none", client_update("feddure")), Budget("forwards"), Budget("labeled-steps")):
        assert budget.amount(TEN, client_update("fedavg"), CLIENT, CLIENT) == Amount(5, 10, 0)
        assert budget.amount(TEN, client_update("fedavg-uda"), CLIENT, CLIENT) == Amount(45, 10, 10, epochs=1)


BATCHINGS = st.builds(Batching, st.integers(1, 12), st.integers(1, 12) | st.just("rest"), st.integers(1, 3))
HOLDINGS = st.builds(ClientSize, st.integers(1, 60), st.integers(1, 300))
NAMES = st.sampled_from(registry.names())


@given(BATCHINGS, HOLDINGS, NAMES, NAMES)
def test_labeled_steps_are_those_of_the_reference(batching, client, name, reference):
    wanted = compute_amount(batching, client_update(reference), holding(reference, client))
    budget = Budget("labeled-steps", client_update(reference))
    made = budget.amount(batching, client_update(name), holding(name, client), holding(reference, client))
    assert made.steps == wanted.steps
    assert made[1:3] == compute_amount(batching, client_update(name), holding(name, client))[1:3]


@given(BATCHINGS, HOLDINGS, NAMES, NAMES)
def test_forwards_are_equal_within_half_a_step(batching, client, name, reference):
    """The images through the network differ by at most half a step's (or the method takes its one step)."""
    wanted = compute_amount(batching, client_update(reference), client)
    client_sizes = holding(name, client)
    total = wanted.steps * images_per_step(client_update(reference), wanted) + client_update(
        reference
    ).images_outside_steps(client.labeled, client.unlabeled)
    made = Budget("forwards", client_update(reference)).amount(batching, client_update(name), client_sizes, client)
    step = images_per_step(client_update(name), made)
    total -= client_update(name).images_outside_steps(
        client_sizes.labeled, client_sizes.unlabeled
    )  # what is left for steps
    assert made.steps >= 1
    assert abs(made.steps * step - total) <= step / 2 or (made.steps == 1 and total < step / 2)


@given(BATCHINGS, HOLDINGS, NAMES)
def test_reference_method_uses_its_batch_rule(batching, client, name):
    client_sizes = compute_amount(batching, client_update(name), client)
    for rule in ("labeled-steps", "forwards"):
        assert Budget(rule, client_update(name)).amount(batching, client_update(name), client, client) == client_sizes


@pytest.mark.parametrize("name", ["fedavg", "fedavg-sl", "fedprox-fixmatch", "feddure-without-freg"])
def test_rounds_stay_within_the_budget(name):
    """What the runs count: the labeled steps of FedDure at "labeled-steps", its images within half a step a client."""

    def used(result: str, budget: Budget) -> dict[str, int]:
        method = registry.make(result)
        shared = make_task()
        held = make_dataset(all_labels=registry.entry(result).all_labels)
        simulation = make_simulation(method, shared, held, batching=Batching(2, "rest"), budget=budget, cohort=4)
        return run_rounds(method, simulation, start_server(method, shared), range(1))[-1].report.cost

    reference = used("feddure", Budget())
    assert used(name, Budget("labeled-steps", client_update("feddure")))["labeled_steps"] == reference["labeled_steps"]
    made = used(name, Budget("forwards", client_update("feddure")))
    step = max(
        images_per_step(
            client_update(name),
            compute_amount(Batching(2, "rest"), client_update(name), holding(name, ClientSize(a, b))),
        )
        for a, b in ((5, 11), (3, 6), (6, 14), (4, 9))
    )
    total = reference["forward"] + 2 * reference["backward"]
    assert abs(made["forward"] + 2 * made["backward"] - total) <= 4 * step / 2


def test_costs_add_up_by_hand():
    """3 steps of 4 + 5 images and 14 forward, 9 backward a step; then 2 steps of 4 + 0 and 4, 4."""
    total = Cost()
    total.add(Amount(3, 4, 5), Passes(14, 9))
    total.add(Amount(2, 4, 0), Passes(4, 4))
    assert total.row() == {
        "labeled_steps": 5,
        "labeled_images": 20,
        "unlabeled_images": 15,
        "forward": 50,
        "backward": 35,
        "bytes_down": 0,
        "bytes_up": 0,
        "stored_client": 0,
        "stored_server": 0,
    }


def test_an_all_labels_reference_counts_all_its_rows():
    """5 + 45 rows, all labeled, 10 a step: 5 steps for the reference itself and for everybody measured by it."""
    shared = make_task()
    ceiling = registry.make("fedavg-sl").client_updates(shared)["train"]
    fixmatch = registry.make("fedavg-fixmatch").client_updates(shared)["train"]
    budget = Budget("labeled-steps", ceiling, all_labels=True)
    given = ClientSize(5, 45)
    batching = Batching(10, 10)
    assert budget.amount(batching, ceiling, ClientSize(50, 0), given).steps == 5
    assert budget.amount(batching, fixmatch, given, given).steps == 5
    forwards = Budget("forwards", ceiling, all_labels=True)
    assert forwards.amount(batching, ceiling, ClientSize(50, 0), given).steps == 5


def test_largest_is_the_method_with_the_largest_budget():
    """Batches of 10 + 10 on 20 labeled and 95 unlabeled rows: labels only 2 steps, FixMatch 10, all labels 12. In
    images, FixMatch sends B + 2b through the classifier forward and backward: 10 * 90 = 900 against 12 * 30 = 360."""
    names = ("fedavg", "fedavg-sl", "fedavg-fixmatch")
    client_updates = {name: (client_update(name), registry.entry(name).all_labels) for name in names}
    sizes = [ClientSize(20, 95), ClientSize(20, 95)]
    assert find_largest_update("labeled-steps", TEN, client_updates, sizes) == "fedavg-sl"
    assert find_largest_update("forwards", TEN, client_updates, sizes) == "fedavg-fixmatch"
    del client_updates["fedavg-sl"]
    assert find_largest_update("labeled-steps", TEN, client_updates, sizes) == "fedavg-fixmatch"


def test_comparison_has_the_same_budget_in_every_order(tmp_path):
    """Also if the method on labels only is named first, whose 2 steps would be too few; --reference still decides."""
    few = {"clients": 2, "cohort": 2, "rounds": 1, "network": "small", "width": 4, "labels": 40, "threads": 1}
    budgets = {}
    for names in (("fedavg", "fedavg-fixmatch"), ("fedavg-fixmatch", "fedavg")):
        config = Config(**few, method=names[0], data_share=0.2, run_dir=tmp_path / names[0])
        outcome = runner.compare(config, names)
        budgets[names[0]] = {each["method"]: each["cost"]["labeled_steps"] for each in outcome.summaries}
        assert {each["budget"]["reference"] for each in outcome.summaries} == {"FedAvg + FixMatch"}
        assert (
            "Budget: each method has as many labeled steps as FedAvg + FixMatch by its batch rule."
            in outcome.tables[1].read_text()
        )
    assert budgets["fedavg"] == budgets["fedavg-fixmatch"]
    chosen = Config(**few, reference="fedavg", data_share=0.2, run_dir=tmp_path / "own")
    client_sizes = runner.compare(chosen, ("fedavg-fixmatch", "fedavg"))
    assert {each["budget"]["reference"] for each in client_sizes.summaries} == {"FedAvg (labeled only)"}
    assert client_sizes.summaries[0]["cost"]["labeled_steps"] < budgets["fedavg"]["fedavg"]

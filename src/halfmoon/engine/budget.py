"""How much a method may look at: the shared batch rule, and comparisons at an equal budget."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Literal

from halfmoon.api.types import ClientUpdate, Passes
from halfmoon.engine.sampling import Amount, Batching

Rule = Literal["none", "labeled-steps", "forwards"]


@dataclass(frozen=True)
class ClientSize:
    """How many rows of each kind a client trains on."""

    labeled: int
    unlabeled: int


@dataclass(frozen=True)
class Budget:
    """What the client updates of one method are measured by.

    "none": its own reading of the batch rule. "labeled-steps": as many steps an update as `reference` takes at the same
    client. "forwards": as many images through the classifier as `reference`, a backward pass counted as two forward
    ones. `all_labels` says that the reference trains on all rows as labeled ones.
    """

    rule: Rule = "none"
    reference: ClientUpdate | None = None
    all_labels: bool = False

    def amount(self, batching: Batching, client_update: ClientUpdate, own: ClientSize, size: ClientSize) -> Amount:
        """Return the amount of a client update of `client_update` to a client that trains on `own` rows.

        `size` are its rows in the split.
        """
        amount = batch_rule_amount(batching, client_update, own)
        if self.rule == "none" or self.reference is None or not client_update.requirements.trains or not amount.steps:
            return amount
        holding = ClientSize(size.labeled + size.unlabeled, 0) if self.all_labels else size
        if client_update == self.reference and own == holding:
            return amount
        target = batch_rule_amount(batching, self.reference, holding)
        if self.rule == "labeled-steps":
            return amount._replace(steps=target.steps, epochs=0)
        images = target.steps * images_per_step(self.reference, target) + self.reference.images_outside_steps(
            *astuple(holding)
        )
        steps = (images - client_update.images_outside_steps(*astuple(own))) / images_per_step(client_update, amount)
        return amount._replace(steps=max(1, round(steps)), epochs=0)


def batch_rule_amount(batching: Batching, client_update: ClientUpdate, own: ClientSize) -> Amount:
    """Return what the batch rule alone says."""
    if not client_update.requirements.trains:
        return Amount(0, 0, 0)
    labeled = batching.labeled_size(own.labeled)
    if not client_update.requirements.views:
        return Amount(batching.steps_labeled(own.labeled) if labeled else 0, labeled, 0)
    size = batching.unlabeled_size(own.labeled, own.unlabeled)
    more = client_update.requirements.labeled_epochs if labeled and not batching.steps else 1
    epochs = batching.passes(own.labeled, own.unlabeled) * more
    return Amount(batching.steps_both(own.labeled, own.unlabeled) * more, labeled, size, epochs)


def find_largest_update(
    rule: Rule, batching: Batching, client_updates: Mapping[str, tuple[ClientUpdate, bool]], sizes: Sequence[ClientSize]
) -> str:
    """Return the name of the client update that takes most by the batch rule alone, the first of equal ones.

    `client_updates` are (update, whether it trains on all rows as labeled ones) by name, `sizes` what the split gives
    to each client. "forwards" counts images through the classifier, another rule steps.
    """

    def usage(client_update: ClientUpdate, all_labels: bool) -> int:
        total = 0
        for size in sizes:
            own = ClientSize(size.labeled + size.unlabeled, 0) if all_labels else size
            amount = batch_rule_amount(batching, client_update, own)
            images = amount.steps * images_per_step(client_update, amount) + client_update.images_outside_steps(
                *astuple(own)
            )
            total += images if rule == "forwards" else amount.steps
        return total

    return max(client_updates, key=lambda name: usage(*client_updates[name]))


def images_per_step(client_update: ClientUpdate, amount: Amount) -> int:
    """Return the images of one step in forward passes, a backward pass counted as two; at least 1."""
    passes = client_update.passes(amount.labeled, amount.unlabeled)
    return max(1, passes.forward + 2 * passes.backward)


@dataclass
class Cost:
    """What a run has used so far; every field only grows.

    `stored_client` is the largest memory that a client keeps between its rounds, `stored_server` the most that the
    server has kept between rounds, in bytes.
    """

    labeled_steps: int = 0
    labeled_images: int = 0
    unlabeled_images: int = 0
    forward: int = 0
    backward: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    stored_client: int = 0
    stored_server: int = 0

    def add(self, amount: Amount, passes: Passes, swept: int = 0) -> None:
        """Count one client's update; `swept` images went through the network outside its steps."""
        self.labeled_steps += amount.steps
        self.labeled_images += amount.steps * amount.labeled
        self.unlabeled_images += amount.steps * amount.unlabeled
        self.forward += amount.steps * passes.forward + swept
        self.backward += amount.steps * passes.backward

    def row(self) -> dict[str, int]:
        return asdict(self)

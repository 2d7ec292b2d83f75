"""The number of steps of a client update: by the shared batch rule, or for comparisons at equal cost."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from halfmoon.api.types import ClientUpdate, Passes
from halfmoon.engine.sampling import Amount, Batching

Rule = Literal["none", "labeled-steps", "forwards"]


@dataclass(frozen=True)
class ClientSize:
    """The numbers of labeled and unlabeled rows on which a client trains."""

    labeled: int
    unlabeled: int

    @property
    def as_labeled(self) -> "ClientSize":
        """The size of a client that uses all its rows as labeled ones."""
        return ClientSize(self.labeled + self.unlabeled, 0)


@dataclass(frozen=True)
class Budget:
    """The rule by which the client updates of different methods have equal cost.

    Attributes:
        rule: "none": each method takes the steps of the batch rule. "labeled-steps": as many steps as `reference`
            takes at the same client. "forwards": as many images through the network as `reference`, where a backward
            pass counts as two forward passes.
        reference: the client update that sets the cost.
        all_labels: the reference uses all rows as labeled ones.
    """

    rule: Rule = "none"
    reference: ClientUpdate | None = None
    all_labels: bool = False

    def amount(self, batching: Batching, client_update: ClientUpdate, rows: ClientSize, size: ClientSize) -> Amount:
        """Compute the number of steps of a client update, and of images in a step, so that methods have equal cost.

        The cost to match is that of another client update, `reference`, at the same client: its number of steps, or of
        images through the network.

        Args:
            batching: the batch rule, which sets the images of a step.
            client_update: the update.
            rows: the numbers of images on which the client trains under this method.
            size: the numbers of its images in the split, before a method uses unlabeled images as labeled ones.

        Returns:
            The amount of the batch rule, with the number of steps changed to match the cost of `reference`.
        """
        amount = compute_amount(batching, client_update, rows)
        if self.rule == "none" or self.reference is None or not client_update.requirements.trains or not amount.steps:
            return amount
        reference_size = size.as_labeled if self.all_labels else size
        # The reference itself retains its epochs, which may depend on the rows that it can draw.
        if client_update == self.reference and rows == reference_size:
            return amount
        target = compute_amount(batching, self.reference, reference_size)
        # With `epochs` other than 0 the drawing of minibatches would set the number of steps again.
        if self.rule == "labeled-steps":
            return amount._replace(steps=target.steps, epochs=0)
        # The rule "forwards": images that go through the network outside of steps count towards the budget, too.
        target_images = count_images(self.reference, target, reference_size)
        step_images = target_images - client_update.images_outside_steps(rows.labeled, rows.unlabeled)
        steps = step_images / images_per_step(client_update, amount)
        return amount._replace(steps=max(1, round(steps)), epochs=0)


def compute_amount(batching: Batching, client_update: ClientUpdate, rows: ClientSize) -> Amount:
    """Compute the number of steps of a client update, and of images in a step, from the batch sizes and epochs.

    Args:
        batching: the batch rule: batch sizes, and epochs or a fixed number of steps.
        client_update: the update.
        rows: the numbers of labeled and unlabeled images on which the client trains.

    Returns:
        The amount. If its `epochs` are not 0, its steps are that many passes over the unlabeled images. The number of
        steps changes later if a client may use only some of its unlabeled images.
    """
    requirements = client_update.requirements
    if not requirements.trains:
        return Amount(steps=0, labeled=0, unlabeled=0)
    labeled = batching.labeled_size(rows.labeled)
    uses_unlabeled = bool(requirements.views)  # an unlabeled image is used by its augmented views
    if not uses_unlabeled:
        steps = batching.steps_labeled(rows.labeled) if labeled else 0
        return Amount(steps=steps, labeled=labeled, unlabeled=0)
    # Some methods train clients with labels for more epochs; a fixed number of steps (`batching.steps`) overrides this.
    epoch_factor = requirements.labeled_epochs if labeled and not batching.steps else 1
    return Amount(
        steps=batching.steps_both(rows.labeled, rows.unlabeled) * epoch_factor,
        labeled=labeled,
        unlabeled=batching.unlabeled_size(rows.labeled, rows.unlabeled),
        epochs=batching.passes(rows.labeled, rows.unlabeled) * epoch_factor,
    )


def find_largest_update(
    rule: Rule, batching: Batching, client_updates: Mapping[str, tuple[ClientUpdate, bool]], sizes: Sequence[ClientSize]
) -> str:
    """Find the client update with the highest total cost over all clients, under the batch rule.

    Args:
        rule: "forwards" compares images through the network, another rule steps.
        batching: the batch rule.
        client_updates: (update, whether it uses all rows as labeled ones) by name.
        sizes: the rows of each client in the split.

    Returns:
        Its name; of equal updates the first.
    """

    def total_cost(name: str) -> int:
        """Sum the images or steps of an update over all clients."""
        client_update, all_labels = client_updates[name]
        total = 0
        for size in sizes:
            rows = size.as_labeled if all_labels else size
            amount = compute_amount(batching, client_update, rows)
            total += count_images(client_update, amount, rows) if rule == "forwards" else amount.steps
        return total

    return max(client_updates, key=total_cost)


def count_images(client_update: ClientUpdate, amount: Amount, rows: ClientSize) -> int:
    """Count the images through the network in an update, in and outside of its steps, as forward passes."""
    in_steps = amount.steps * images_per_step(client_update, amount)
    return in_steps + client_update.images_outside_steps(rows.labeled, rows.unlabeled)


def images_per_step(client_update: ClientUpdate, amount: Amount) -> int:
    """Count the images through the network in one step, a backward pass as two forward passes, 1 or more."""
    passes = client_update.passes(amount.labeled, amount.unlabeled)
    return max(1, passes.forward + 2 * passes.backward)


@dataclass
class Cost:
    """The cost of a run until now; no field ever decreases.

    Attributes:
        labeled_steps: steps of all clients.
        labeled_images: labeled images in these steps.
        unlabeled_images: unlabeled images in these steps.
        forward: images that went through the network.
        backward: images of which a gradient was computed.
        bytes_down: bytes sent to clients.
        bytes_up: bytes sent by clients.
        stored_client: bytes of the largest memory of a client between its rounds.
        stored_server: the largest number of bytes that the server stored between rounds.
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

    def add(self, amount: Amount, passes: Passes, images_outside_steps: int = 0) -> None:
        """Add the cost of one client's update to that of the run.

        Args:
            amount: its steps, and images of each step.
            passes: images through the network in each step.
            images_outside_steps: images through the network before or after the steps.
        """
        self.labeled_steps += amount.steps
        self.labeled_images += amount.steps * amount.labeled
        self.unlabeled_images += amount.steps * amount.unlabeled
        self.forward += amount.steps * passes.forward + images_outside_steps
        self.backward += amount.steps * passes.backward

    def row(self) -> dict[str, int]:
        """Return the fields as metrics.jsonl stores them."""
        return asdict(self)

"""Group the clients of a cohort that train together under vmap.

Clients of a group are padded to the largest of them, which can cost more than training them one by one. Groups depend
only on the clients' sizes, not on time or memory, so that a run has the same bytes on every machine.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from halfmoon.api.types import ClientUpdate
from halfmoon.engine.budget import ClientSize, images_per_step
from halfmoon.engine.sampling import Amount

MAX_PADDING = Fraction(1, 3)
"""The largest share of a group's images that may be padding, or follow a client's last step.

Measured in `results/unequal_clients.md`.
"""


class WorkSize(NamedTuple):
    """The images that a client's update processes."""

    amount: Amount  # in its steps
    rows: ClientSize  # of the client, for updates that process all rows outside of their steps

    def count_images(self, client_update: ClientUpdate) -> int:
        """Count the images that go through the network; an image with a backward pass counts three times."""
        images = client_update.images_outside_steps(self.rows.labeled, self.rows.unlabeled)
        if self.amount.steps:
            images += self.amount.steps * images_per_step(client_update, self.amount)
        return images

    def maximum(self, other: "WorkSize") -> "WorkSize":
        """Return the size to which two clients are padded together."""
        return WorkSize(
            Amount._make(map(max, self.amount, other.amount)),
            ClientSize(
                labeled=max(self.rows.labeled, other.rows.labeled),
                unlabeled=max(self.rows.unlabeled, other.rows.unlabeled),
            ),
        )


def group_clients(
    client_update: ClientUpdate, sizes: Sequence[WorkSize], max_padding: Fraction = MAX_PADDING
) -> list[list[int]]:
    """Divide clients into groups that train together under `torch.func.vmap`.

    Clients of a group are padded to the largest of them. Starting with the largest client, the next smaller one joins
    the last group as long as the share of padding allows.

    Args:
        client_update: the update that they run.
        sizes: for each client, its numbers of steps and images.
        max_padding: the largest share of a group's images that may be padding.

    Returns:
        For each group the positions of its clients in `sizes`, ascending.
    """
    if len(sizes) < 2:
        # No other client to compare with: the update need not count its images.
        return [[position] for position in range(len(sizes))]
    images = [size.count_images(client_update) for size in sizes]
    groups: list[list[int]] = []
    padded_size: WorkSize | None = None  # the size to which the last group is padded
    real_images = 0  # the images of the last group without padding
    for position in sorted(range(len(sizes)), key=lambda position: (-images[position], position)):
        if groups and padded_size is not None:
            wider = padded_size.maximum(sizes[position])
            padded_images = (len(groups[-1]) + 1) * wider.count_images(client_update)
            padding = padded_images - real_images - images[position]
            if padding <= max_padding * padded_images:
                groups[-1].append(position)
                padded_size = wider
                real_images += images[position]
                continue
        groups.append([position])
        padded_size = sizes[position]
        real_images = images[position]
    return [sorted(group) for group in groups]

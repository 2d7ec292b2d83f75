"""Options of a split: the assignment of images to clients, and the choice of labeled images."""

from dataclasses import dataclass
from typing import Annotated

from halfmoon.core.label_locations import LabelLocation
from halfmoon.core.ranges import BELOW_ONE, POSITIVE, SHARE, Range, minimum

# With a larger concentration, the gamma variates from which a Dirichlet variate is computed overflow.
ALPHA = Range(0, 1e9, "above 0 and at most 1e9", with_low=False)


DEFAULT_LABELS_PER_CLASS = 0.5
"""Labeled images for each class and client if no option sets an amount."""


@dataclass(frozen=True)
class SplitOptions:
    """Section of a configuration from which `halfmoon.data.partition.scenario.Scenario` makes a split."""

    setting: Annotated[
        str,
        "rule that distributes labeled and unlabeled images over the clients (see halfmoon data), or my_module:rule",
    ] = "dir-dir"
    clients: Annotated[int, "number of clients", minimum(1)] = 20
    dirichlet_alpha: Annotated[
        float, "concentration of the Dirichlet distribution; a smaller value is more uneven", ALPHA
    ] = 0.5
    labels_per_class: Annotated[
        float | None,
        "labeled images of each class for a client, on average; none: 0.5, unless label_ratio or labels is set",
        POSITIVE,
    ] = None
    label_ratio: Annotated[float | None, "instead of labels_per_class: the share of images that is labeled", SHARE] = (
        None
    )
    labels: Annotated[
        int | None, "instead of labels_per_class: total number of labeled images, the same for each class", minimum(1)
    ] = None
    labels_at: Annotated[LabelLocation, "who has labels: all clients, some clients, or the server"] = "clients"
    labeled_clients: Annotated[int | None, "with labels_at some: number of clients with labels", minimum(1)] = None
    classes_per_client: Annotated[
        int, "with setting semifl-shards: number of shards of a client, each of one class", minimum(1)
    ] = 2
    stages: Annotated[
        int, "portions of each client's unlabeled images, which become available one after the other", minimum(1)
    ] = 1
    unlabeled_share: Annotated[float, "share of its unlabeled images that each client uses", SHARE] = 1.0
    unknown_share: Annotated[
        float, "with unknown_classes: share of each client's unlabeled images that are of these classes", BELOW_ONE
    ] = 0.0
    min_size: Annotated[
        int | None, "fewest labeled, and unlabeled, images of a client; none: a fifth of the mean, 1 to 10", minimum(0)
    ] = None

"""The options of a split: who holds which rows, and which are labeled."""

from dataclasses import dataclass
from typing import Annotated

from halfmoon.api.ranges import POSITIVE, SHARE, Range, at_least
from halfmoon.api.requirements import Place

# Beyond, the gamma variates behind a Dirichlet overflow.
ALPHA = Range(0, 1e9, "above 0 and at most 1e9", with_low=False)


@dataclass(frozen=True)
class SplitOptions:
    """What a configuration says of a split, and `halfmoon.data.partition.scenario.Scenario` plays."""

    setting: Annotated[
        str, "how labeled and unlabeled images lie among the clients (see halfmoon data), or my_module:rule"
    ] = "dir-dir"
    clients: Annotated[int, "how many clients hold the data", at_least(1)] = 20
    dirichlet_alpha: Annotated[float, "concentration of the Dirichlet draws; smaller is more uneven", ALPHA] = 0.5
    labels_per_class: Annotated[
        float | None,
        "labeled images of each class for a client, on average; none: 0.5, unless label_ratio or labels is set",
        POSITIVE,
    ] = None
    label_ratio: Annotated[float | None, "instead of labels_per_class: the share of images that is labeled", SHARE] = (
        None
    )
    labels: Annotated[
        int | None, "instead of labels_per_class: labeled images in all, evenly of each class", at_least(1)
    ] = None
    labels_at: Annotated[Place, "who holds labels: all clients, some, the server"] = "clients"
    labeled_clients: Annotated[int | None, "with labels_at some: how many clients hold labels", at_least(1)] = None
    classes_per_client: Annotated[
        int, "with setting semifl-shards: shards of a client, each of one class", at_least(1)
    ] = 2
    stages: Annotated[int, "parts of each client's unlabeled images that are seen one after the other", at_least(1)] = 1
    unlabeled_share: Annotated[float, "share of its unlabeled images that each client keeps", SHARE] = 1.0
    min_size: Annotated[
        int | None, "fewest labeled, and unlabeled, images of a client; none: a fifth of the mean, 1 to 10", at_least(0)
    ] = None

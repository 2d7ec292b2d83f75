"""Declarations of a method: the uploads that its server half needs, and the holders of labels that it supports."""

from dataclasses import dataclass
from typing import Literal

from halfmoon.core.label_locations import LabelLocation


@dataclass(frozen=True)
class Requirements:
    """Requirements of a method. Settings that it does not declare to support are refused.

    Attributes:
        aggregation: "sum" if the server needs only the weighted sum of uploads, so that secure aggregation and
            client-level privacy are possible; "individual" if it needs every single upload.
        reason: the reason for "individual", as the end of a sentence.
        label_locations: supported holders of labels, the preferred one first.
        personal: whether the server sends clients something that it computes from single uploads. A robust rule, which
            replaces all uploads by one aggregate, would make that meaningless.
        counts_statistics: the options that avoid a query in which clients count statistics. No robust rule checks such
            a query. Empty if there is none.
        period: number of rounds after which uploads and downloads repeat: 1 if every round is like the one before. A
            site uses it to find out which tensors a server may send.
        min_class_images: fewest labeled images of a class at a client that has any, because its upload has a sum or a
            mean over exactly these images. A site with fewer is refused, unless the sums are secure. 0 for no limit.
        min_unlabeled_images: the same for the unlabeled images of a client.
        every_client: whether each round needs all clients, so that the cohort must be as large as their number.
    """

    aggregation: Literal["sum", "individual"] = "individual"
    reason: str = "it does not declare that the sum of uploads is enough for it"
    label_locations: tuple[LabelLocation, ...] = ("clients", "some")
    personal: bool = False
    counts_statistics: str = ""
    period: int = 1
    min_class_images: int = 0
    min_unlabeled_images: int = 0
    every_client: bool = False


SUM = Requirements("sum", "")
"""Requirements of a method that averages uploads and expects labels at clients."""


def requirements_of(method: object, norm: str = "batch") -> Requirements:
    """Get the requirements of a method; one that declares nothing needs every single upload.

    Args:
        method: a method, with or without `requirements(norm)`.
        norm: normalization of the network: "batch", "group" or "none".
    """
    declared = getattr(method, "requirements", None)
    return Requirements() if declared is None else declared(norm)

"""The tensors that a site sends on the terms of a federation, and what each tells about a single image.

They are found by rounds with simulated clients (`TrialFederation`), so the text that people consent to is made from what
is sent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from halfmoon.api.requirements import Requirements, requirements_of
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.log import format_bytes
from halfmoon.federation.protocol.tree_spec import TreeSpec, UploadProbe
from halfmoon.federation.protocol.trial import TrialFailed, TrialFederation
from halfmoon.runs.factory import ImageSpec, build_method, build_task, build_views

TRIAL_CLIENTS = 5
"""Simulated clients: HeteroFL sends clients models of up to five sizes."""

MODEL = (
    "numbers of the trained network: one step on one image reveals it and its label, many steps on many images parts of "
    "some"
)

MEANINGS = {
    "params": MODEL,
    "sigma": MODEL,
    "psi": MODEL,
    "stats": "means and variances of activations over the images of a step: of a step on one image, that image's",
    "moments": "means and variances of activations over all images here: of a single image, that image's",
    "weight": "how many images count in the average, or 1: nothing about a single image",
    "appu": "the mean prediction over the unlabeled images: of a single image, its prediction",
    "present": "whether there are labeled images of each class: nothing about a single image",
    "labels": "whether there are labels here: nothing about a single image",
    "own": (
        "the mean feature vector of each class's labeled images: of a class with one label this IS that image's feature "
        "vector, with its label"
    ),
    "share": "the share of each class in training: of a single image, its class",
    "prior": "the distribution of labels and pseudo-labels over classes: of a single image, its class",
    "relation": "mean predictions for the labeled images of each class: of a class with one labeled image, its prediction",
    "related": "whether there are labels here: nothing about a single image",
    "embedding": "the model's output for an image of noise: as for the trained network",
    "changed": "how many numbers of the model differ from those received: nothing about a single image",
    "sums/count": "the number of images: nothing about a single image",
    "sums/q": "the sum of the feature vectors of all images: of a single image, its feature vector",
    "sums/h": "the sum of the normalized feature vectors of all images: of a single image, its feature vector",
    "sums/hh": (
        "the sum of products of features over all images: of few images, the space that their feature vectors span"
    ),
    "sums/label_counts": "the number of labeled images of each class: of a single labeled image, its class",
    "sums/label_h": "the sum of the feature vectors of the labeled images: of a single one, its feature vector",
    "sums/label_hh": (
        "the sum of products of features over the labeled images: of few images, the space that their feature vectors span"
    ),
    "sums/label_hy": (
        "the sum of the feature vectors of each class: of a class with one label this IS that image's feature vector, with "
        "its label"
    ),
    "sums/r": "the number of unlabeled images that the server's head predicts for each class: of one, its prediction",
    "sums/rh": "sums of the feature vectors of the unlabeled images, weighted by prediction: of one, its feature vector",
}
"""What the tensors under a path tell about a single image. The longest matching path counts."""

UNKNOWN_MEANING = "not described: its method is not halfmoon's, so read its source"

MASKED = "sum"
"""Path of the masked update of a secure sum."""


class SentTensor(NamedTuple):
    """A tensor that a site sends.

    Attributes:
        client_update: name of the client update that sends it.
        path: its path in the upload, without "update/" and "aux/".
        shape: its largest shape.
        dtype: its type.
    """

    client_update: str
    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def section(self) -> str:
        """The path in `MEANINGS` that this tensor belongs to; the first name of its path if there is none."""
        return _find_section(self.path) or self.path.split("/")[0]

    @property
    def meaning(self) -> str:
        """What it tells about a single image."""
        return MEANINGS.get(self.section, UNKNOWN_MEANING)

    def describe(self) -> str:
        """Describe its shape, type and size: (10, 64) float32, 2.6 kB."""
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}, {format_bytes(self.nbytes)}"


@dataclass(frozen=True)
class Disclosure:
    """What a site sends.

    Attributes:
        tensors: the tensors of all client updates; of one in several shapes, the largest.
        metrics: names of the measures that are sent as sums.
        secure: whether the tensors are sent under masks, so that the server learns only their sum over sites.
        min_class_images: fewest labeled images of a class at a site, see `Requirements`.
        min_unlabeled_images: fewest unlabeled images at a site, see `Requirements`.
    """

    tensors: tuple[SentTensor, ...]
    metrics: tuple[str, ...]
    secure: bool
    min_class_images: int
    min_unlabeled_images: int

    def transmitted(self) -> tuple[SentTensor, ...]:
        """List the tensors of a site's uploads as they are sent: with secure aggregation, as masked vectors.

        Such a vector (int64, one for each client update) has all its parameters, and the weight with which the site
        enters the average. Integer tensors are not averaged, so they are not in the vector.
        """
        if not self.secure:
            return self.tensors
        lengths: dict[str, int] = {}  # of the vector of each client update, by its name
        for tensor in self.tensors:
            lengths.setdefault(tensor.client_update, 1)  # the weight
            if tensor.path != "weight" and tensor.dtype.is_floating_point:
                lengths[tensor.client_update] += math.prod(tensor.shape)
        return tuple(
            SentTensor(client_update, MASKED, shape=(length,), dtype=torch.int64)
            for client_update, length in lengths.items()
        )

    def lines(self) -> tuple[str, ...]:
        """Describe for the people at a site what it sends and what that reveals: a line for each group of tensors.

        The tensors are those of a trial run of the method (`describe_uploads`); there are none if it cannot be run.
        """
        if not self.tensors:
            return ("What is sent: it cannot be computed in advance, because the method's rounds cannot be tried.",)
        total = format_bytes(sum(tensor.nbytes for tensor in self.transmitted()))
        updates = dict.fromkeys(tensor.client_update for tensor in self.tensors)  # a set that keeps the order
        # A method has one local update or several, and a site's reply contains the tensors of one of them.
        replies = "in one reply" if len(updates) == 1 else f"in {len(updates)} kinds of replies"
        if self.secure:
            heading = (
                f"What is sent: {total} {replies}, under masks. The server can read only the sum over all sites of a "
                "round, not this site's part of it. In the sum are:"
            )
        else:
            heading = (
                f"What is sent: {total} {replies} (a round may need several), and what it tells about a single image:"
            )
        lines = [heading]
        for update in updates:
            lines += self._section_lines(update)
        lines += self._protection_lines()
        measures = f", and sums of {', '.join(self.metrics)}" if self.metrics else ""
        lines.append(
            f"Also sent: counts of images, steps and bytes{measures}; counts of right predictions with --test."
        )
        return tuple(lines)

    def _section_lines(self, client_update: str) -> list[str]:
        """Describe the tensors of one client update: a line for each section, whose tensors reveal the same.

        A section is a group of tensors, such as "params" (the network) or "sums/h" (`MEANINGS` has all of them).
        """
        sections: dict[str, list[SentTensor]] = {}
        for tensor in self.tensors:
            if tensor.client_update == client_update:
                sections.setdefault(tensor.section, []).append(tensor)
        lines = []
        for section, tensors in sections.items():
            size = format_bytes(sum(tensor.nbytes for tensor in tensors))
            count = f"{len(tensors)} tensors, " if len(tensors) > 1 else ""
            lines.append(f"- {client_update}: {section} ({count}{size}): {tensors[0].meaning}.")
        return lines

    def _protection_lines(self) -> list[str]:
        """Describe how a site's images and the model are protected, for methods that send sums or means of features.

        Over one image, such a sum is the feature vector of that image: so there is a minimum of images for each class.
        It is not described with secure aggregation, where the server sees no site's sums; but nor can it check them.

        Returns:
            One line; none for methods without such sums (`min_class_images` is 0).
        """
        if not self.min_class_images:
            return []
        if self.secure:
            return ["No site's sums can be checked: one hostile site can spoil the model unseen."]
        if self.min_class_images == 1:
            return [
                "A class may have one labeled image here (min_class_images is 1): the server then gets its features."
            ]
        # A method has one option for both limits, so `min_unlabeled_images` is either the same number or 0.
        unlabeled = ", and as many unlabeled ones, if any" if self.min_unlabeled_images else ""
        line = (
            f"A site takes part only with {self.min_class_images} labeled images or more of each class that it "
            f"has{unlabeled}."
        )
        # Sums of features by class, with the numbers of images in them.
        sends_sums = any(tensor.path.startswith("sums/") for tensor in self.tensors)
        if sends_sums:
            line += " The server checks each site's sums against its counts."
        return [line]


def describe_uploads(config: Config, image_spec: ImageSpec) -> Disclosure:
    """Find out which tensors a site sends, by running rounds of the method with simulated clients on random images.

    The people at a site read this before they agree to the configuration.

    Args:
        config: the configuration of the federation.
        image_spec: the size and the classes of the images.

    Returns:
        The tensors, with their largest shapes; none if the rounds cannot be run.
    """
    site_task = build_task(config, image_spec)
    # Sites may compress their uploads, and the server decompresses them before its method gets them. So one probe finds
    # the shapes and dtypes in float32, with which the server's rounds are run, and another those that a site sends.
    server_task = replace(site_task, upload_precision="float32")
    image_views = build_views(config, image_spec)
    server_probe = UploadProbe(server_task, image_views, image_spec.image, config.seed)
    site_probe = None
    if server_task != site_task:
        site_probe = UploadProbe(site_task, image_views, image_spec.image, config.seed)
    trial = TrialFederation(server_probe, image_views, config.seed, TRIAL_CLIENTS, transmission=site_probe)
    method = build_method(config)
    requirements = requirements_of(method, site_task.network.norm)
    minima = (requirements.min_class_images, requirements.min_unlabeled_images)
    try:
        trial.run_rounds(method, server_task)
    except TrialFailed:
        return Disclosure((), (), config.secure_aggregation, *minima)
    tensors: list[SentTensor] = []
    for client_update, specs in trial.upload_specs.items():
        tensors += _largest_tensors(client_update, specs)
    metrics = tuple(sorted(server_probe.metrics))
    return Disclosure(tuple(tensors), metrics, config.secure_aggregation, *minima)


def sent_tensors(client_update: str, spec: TreeSpec) -> list[SentTensor]:
    """List the tensors of an upload, given (shape, dtype) by path."""
    tensors = []
    for path, leaf_spec in spec.items():
        if leaf_spec is not None:
            shape, dtype = leaf_spec
            short_path = path.removeprefix("update/").removeprefix("aux/")
            tensors.append(SentTensor(client_update, short_path, shape, dtype))
    return tensors


def _largest_tensors(client_update: str, specs: Sequence[TreeSpec]) -> list[SentTensor]:
    """List the tensors of a client update; one that has several shapes in different uploads in its largest shape."""
    largest: dict[str, SentTensor] = {}
    for spec in specs:
        for tensor in sent_tensors(client_update, spec):
            other = largest.get(tensor.path)
            if other is None or tensor.nbytes > other.nbytes:
                largest[tensor.path] = tensor
    return list(largest.values())


def _find_section(path: str) -> str | None:
    matches = [section for section in MEANINGS if path == section or path.startswith(f"{section}/")]
    return max(matches, key=len, default=None)


def check_class_counts(class_counts: Sequence[int], unlabeled: int, requirements: Requirements) -> None:
    """Check that a site has enough images to send sums or means of their feature vectors.

    The mean over a single image is the feature vector of this image, and that over few images nearly reveals them.

    Args:
        class_counts: labeled images of each class.
        unlabeled: unlabeled images.
        requirements: the requirements of the method, with the limits.

    Raises:
        UserError: a sum or a mean is of too few images.
    """
    # Secure aggregation computes sums over sites. A method that needs single uploads cannot be run with it.
    can_be_secure = requirements.aggregation == "sum"
    secure_advice = ", or have the federation use secure_aggregation" if can_be_secure else ""
    advice = (
        f"label more of them or remove these labels{secure_advice}; the option min_class_images of its method lowers "
        "the limit for all sites"
    )
    quantity = "sum" if can_be_secure else "mean"
    minimum = requirements.min_class_images
    small = [count for count in class_counts if 0 < count < minimum]
    if small:
        raise UserError(
            f"{len(small)} classes here have fewer than {minimum} labeled images ({min(small)} in one), and their features "
            f"would be sent as one {quantity} for each class: {advice}."
        )
    if 0 < unlabeled < requirements.min_unlabeled_images:
        raise UserError(
            f"{unlabeled} images here have no label, fewer than {requirements.min_unlabeled_images}, and their features "
            f"would be sent as one {quantity}: {advice}."
        )

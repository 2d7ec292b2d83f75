"""Heads on frozen features, solved from sums over all images: the partition into clients does not change them.

From an image's non-negative features f (F,), q = sqrt(f) and h = (q - m) / |q - m| with m the mean q of all images.
A standardized vector f of `halfmoon.models.vectors` has any sign and a length that matters: q = f and h = q - m.

RidgeHead (AFL, CVPR 2025; Fed3R, ICML 2024): ridge regression of one-hot labels on h, from sums over labeled images.
MixtureHead: ten rounds of EM follow. Clients send sums over their unlabeled images, weighted by soft labels; the server
fits Gaussians of one covariance in the leading principal directions, and adds their logits to the ridge head's. Soft
labels are corrected toward the classes' shares: even ones, unless the soft labels' totals differ clearly.

server: params, stats, and in float64 head, ridge, moments of h, label statistics, correction.
broadcast: params, head, and zeros.  memory: none.  upload: weight 1, and in place of the zeros sums in float64, of
symmetric matrices the upper triangle.

Departures: AFL and Fed3R regress on f itself without an intercept; AFL adds the strength at each client and removes it
at the server. Here the server adds it once, to the sum, so clients need not have full-rank data.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements
from halfmoon.api.types import ClientData, ClientUpdate, Federation, Passes, Task, UpdateRequirements
from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import hubs, tree
from halfmoon.core.errors import UserError
from halfmoon.core.label_locations import ALL_LABEL_LOCATIONS
from halfmoon.core.ranges import POSITIVE, PROBABILITY, minimum
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import split_into_chunks
from halfmoon.models.vectors import LinearClassifier

SHARPNESS = (4.0, 6.0)
"""Spread of the mixture head's logits in its first and last round."""

CORRECTION_DECAY = 0.7
"""Share of the correction of the class totals that is retained from round to round."""

FIRST_SHARES_STEP = 2
"""The step of EM, from 0, from which on class shares are estimated: the soft labels of the ridge head are too uncertain."""

SHARES_EXPONENT = 1.5
"""Power of the totals of soft labels that estimates the classes' shares: soft labels mix classes, so their totals are more
even than the shares."""

TOLERANCE = 1e-6
"""Rounding error of a sum, for each image, that the server's checks of sums allow."""

MIN_LENGTH = 1e-12
"""Length below which a centered feature vector is not scaled to length 1."""

TRIANGLE_BLOCK = 256
"""Rows of a sum of outer products that are computed at once."""

NO_SOLUTION = (
    "the head cannot be solved: the sites' sums are of no possible images, so at least one site's are wrong. The server "
    "checks each site's sums unless secure_aggregation or noise hides them: leave these out to find the site."
)


@dataclass(frozen=True)
class SumsUpdate(ClientUpdate):
    """Upload sums over a client's images, without a training step; subclasses define the sums.

    The server sends zeros, and the sums are the update of these. So they can be masked and clipped like any update.

    Attributes:
        precomputed: whether images are the vectors that are summed, q in `MeanSums` and h in the others, (n, F), float64,
            for a simulation that has all features in one process and computes them once. They may be expressed in an
            orthonormal basis, which changes no sum of products.
    """

    precomputed: bool = False

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(trains=False, all_rows=True, upload_spec=self.upload_spec)

    @property
    def upload_spec(self) -> UploadSpec:
        return UploadSpec(("sums",), ("sums",), "one", sums=("sums",))

    def sums(self, broadcast: Tree, data: ClientData) -> Tree:
        """Compute the sums by name, float64."""
        raise NotImplementedError

    def zeros(self, broadcast: Tree) -> Tree:
        """Compute the sums over no images: zeros with the names and shapes of the sums."""
        like = broadcast["head"]["center"]
        zero = torch.zeros((), dtype=torch.int64, device=like.device)
        images = like.new_zeros(0, 1, 1, len(like))
        no_data = ClientData(x=images, y=zero.new_zeros(0), u=images, labeled=zero, unlabeled=zero)
        return self.sums(broadcast, no_data)

    @torch.no_grad()
    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        return self.sums(broadcast, data)

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        return Upload({"sums": carry}, torch.ones_like(data.labeled, dtype=torch.float64)), {}

    def find_fault(self, upload: Upload, labeled: int, unlabeled: int) -> str | None:
        """Find the first bound that these sums exceed for every set of so many images."""
        return next(self.faults(upload.update["sums"], labeled, unlabeled), None)

    def faults(self, sums: Tree, labeled: int, unlabeled: int) -> Iterator[str]:
        """Yield the bounds that sums exceed."""
        raise NotImplementedError

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(0, 0)

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        return labeled + unlabeled

    def roots(self, broadcast: Tree, images: Tensor) -> Tensor:
        """Compute q (n, F), float64: the square roots of the frozen backbone's features, before they are centered.

        From sums over these vectors the server solves the network's head. Features of an image network are means after
        a ReLU. Their square roots vary less with the few largest ones.

        Args:
            broadcast: the tree that the server sent; "head" has the "center" (F,), which gives shape and dtype here.
            images: images, or with `precomputed` already the vectors q.
        """
        center = broadcast["head"]["center"]
        network = self.task.network
        if not len(images):
            return center.new_zeros(0, len(center))
        if self.precomputed:
            return images
        features: list[Tensor] = []
        for chunk in split_into_chunks(images):
            # The backbone is frozen and includes its batch-normalization statistics: none are passed.
            features.append(network.extract_features(broadcast["params"], stats={}, x=self.task.normalize(chunk)))
        # float64 from here on: sums of squares over all images are solved as a linear system.
        q = torch.cat(features).to(center.dtype)
        # A `LinearClassifier` has standardized vectors, of any sign, instead of non-negative features.
        if not isinstance(network, LinearClassifier):
            q = q.clamp_min_(0).sqrt_()  # in place: `torch.cat` has copied the features
        return q

    def unit(self, broadcast: Tree, images: Tensor) -> Tensor:
        """Compute h (n, F), float64."""
        if self.precomputed and len(images):
            return images
        return self.center(self.roots(broadcast, images), broadcast["head"]["center"])

    def center(self, q: Tensor, center: Tensor) -> Tensor:
        """Compute h (n, F) from q (n, F): subtract the center (F,), and scale features of images to length 1."""
        h = q - center
        if isinstance(self.task.network, LinearClassifier):
            return h
        # `F.normalize` in place: new memory takes longer than the arithmetic.
        lengths = cast(Tensor, torch.linalg.vector_norm(h, dim=1, keepdim=True))  # pyright: ignore[reportUnknownMemberType]
        return h.div_(lengths.clamp_min(MIN_LENGTH))


@dataclass(frozen=True)
class MeanSums(SumsUpdate):
    """Upload the number of images and the sum of their q."""

    # The sites' images differ, but their mean feature vectors have similar lengths: the networks are the same.
    max_norm_ratio: ClassVar[float] = 2.0
    is_shared: ClassVar[bool] = True

    def sums(self, broadcast: Tree, data: ClientData) -> Tree:
        q = self.roots(broadcast, torch.cat([data.x, data.u]))
        return {"count": (data.labeled + data.unlabeled).to(q.dtype), "q": q.sum(0)}

    def faults(self, sums: Tree, labeled: int, unlabeled: int) -> Iterator[str]:
        count = float(sums["count"])
        yield from count_faults("count", count, labeled + unlabeled)
        if float(sums["q"].min()) < -TOLERANCE:
            yield "its sum q of square roots is negative"
        if not count and bool(sums["q"].any()):
            yield "its sum q is of no image"

    def upload_norm(self, upload: Upload) -> float | None:
        sums = upload.update["sums"]
        return float(sums["q"].square().sum().sqrt() / sums["count"].clamp_min(1))


@dataclass(frozen=True)
class MomentSums(SumsUpdate):
    """Upload first and second moments of h over all images, and over the labeled ones by class.

    Of the symmetric sums of h h', only the upper triangle is sent.
    """

    is_shared: ClassVar[bool] = True

    def sums(self, broadcast: Tree, data: ClientData) -> Tree:
        """Compute the sums from which the server solves the head, float64.

        An image's h (F,) is its feature vector minus the mean of all clients' images, scaled to length 1.

        Args:
            broadcast: the tree that the server sent, with the frozen network and the mean.
            data: the client's labeled images x with labels y, and its unlabeled images u.

        Returns:
            Over all images "count" (), "h" (F,) and "hh", the upper triangle of the sum of the outer products h h';
            over the labeled ones alone "label_counts" (K,), "label_h" (F,), "label_hh", and "label_hy" (F, K), the sum
            of h of each class.
        """
        labeled_h = self.unit(broadcast, data.x)
        unlabeled_h = self.unit(broadcast, data.u)
        one_hot_labels = F.one_hot(data.y, self.task.network.classes).to(labeled_h.dtype)
        label_hh = sum_outer_products(labeled_h)
        return {
            "count": (data.labeled + data.unlabeled).to(labeled_h.dtype),
            "h": labeled_h.sum(0) + unlabeled_h.sum(0),
            "hh": sum_outer_products(unlabeled_h).add_(label_hh),
            "label_counts": one_hot_labels.sum(0),
            "label_h": labeled_h.sum(0),
            "label_hh": label_hh,
            "label_hy": labeled_h.T @ one_hot_labels,
        }

    def faults(self, sums: Tree, labeled: int, unlabeled: int) -> Iterator[str]:
        """Yield each reason why a client's sums cannot be those of so many images, for which the server refuses them.

        An image's h (F,) is its centered feature vector of norm 1, so no sum of vectors is longer than its count. Second
        moments minus those of the means are positive semidefinite, with a trace of the count at most; this bounds every
        entry (Cauchy-Schwarz).

        Args:
            sums: "h" and "hh" (upper triangle) are the sums of h and h h' over all images, names with "label" those
                over labeled images; "label_hy" (F, K) has the sum of h of each class.
            labeled: number of labeled images that the client has declared.
            unlabeled: number of unlabeled ones.
        """
        count = float(sums["count"])
        label_counts = sums["label_counts"]
        label_count = float(label_counts.sum())
        yield from count_faults("count", count, labeled + unlabeled)
        yield from count_faults("label_counts", label_count, labeled)
        if float(label_counts.min()) < 0:
            yield f"its label_counts have {float(label_counts.min()):g} images of a class"
        if label_count > count + TOLERANCE:
            yield f"it counts {label_count:g} labeled images of {count:g}"
        unlabeled_count = max(0.0, count - label_count)
        unlabeled_h = sums["h"] - sums["label_h"]
        # No sum of vectors of length 1 may be longer than their number: one sum for each class, one for all unlabeled.
        yield from length_faults("label_hy", sums["label_hy"].T, label_counts)
        yield from length_faults("h without label_h", unlabeled_h[None], label_counts.new_tensor([unlabeled_count]))
        allowed = TOLERANCE * max(1.0, label_count)
        if float((sums["label_hy"].sum(1) - sums["label_h"]).abs().max()) > allowed:
            yield "its label_h is not the sum of label_hy over the classes"
        side = len(sums["h"])
        label_hh = symmetric_matrix(sums["label_hh"], side)
        unlabeled_hh = symmetric_matrix(sums["hh"] - sums["label_hh"], side)
        # A group's sum s of n vectors has the second moment s s' / n: divided by the root of n, it is an outer product.
        class_sums = sums["label_hy"] / label_counts.clamp_min(1e-9).sqrt()
        yield from moment_faults("label_hh", moments=label_hh, scaled_sums=class_sums, count=label_count)
        unlabeled_sum = unlabeled_h[:, None] / max(unlabeled_count, 1e-9) ** 0.5
        yield from moment_faults(
            "hh without label_hh", moments=unlabeled_hh, scaled_sums=unlabeled_sum, count=unlabeled_count
        )


@dataclass(frozen=True)
class SoftSums(SumsUpdate):
    """Upload sums over the unlabeled images with soft labels r by the current head (E step): of r (K,), r h' (K, F)."""

    def sums(self, broadcast: Tree, data: ClientData) -> Tree:
        """Compute EM's E step on the unlabeled images: the sums of soft labels r, "r" (K,), and of r h', "rh" (K, F)."""
        h = self.unit(broadcast, data.u)
        head = broadcast["head"]
        r = (h @ head["weight"].T + head["bias"]).softmax(1)
        return {"r": r.sum(0), "rh": r.T @ h}

    def faults(self, sums: Tree, labeled: int, unlabeled: int) -> Iterator[str]:
        yield from count_faults("r", float(sums["r"].sum()), unlabeled)
        if float(sums["r"].min()) < 0:
            yield f"its r counts {float(sums['r'].min()):g} images of a class"
        yield from length_faults("rh", sums["rh"], sums["r"])


@dataclass(frozen=True)
class RidgeHead:
    """Ridge regression of one-hot labels on h, with an intercept that is not penalized.

    The first round solves it; later rounds do not change it.

    Attributes:
        strength: weight of the penalty, the same for all data sets.
        min_class_images: fewest labeled images of a class at a site of a federation that has any. The class's sum of
            features is sent, and of one image it is that image's feature vector. Of two images a class, the sums and
            the second moments leave fewer unknowns than equations; of five, more. Has no effect on secure sums and in
            simulations.
    """

    strength: float = 1.0
    min_class_images: int = 5

    def __post_init__(self) -> None:
        minimum(0).check("strength", self.strength)
        if self.min_class_images < 1:
            raise UserError(f"min_class_images is {self.min_class_images}: it must be 1 or more.")

    def requirements(self, norm: str) -> Requirements:
        return Requirements(
            "sum",
            label_locations=ALL_LABEL_LOCATIONS,
            counts_statistics="aggregation 'mean' among trusted sites",
            min_class_images=self.min_class_images,
            min_unlabeled_images=self.min_class_images,
            every_client=True,
        )

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"mean": MeanSums(task), "moments": MomentSums(task)}

    def start(self, task: Task, model: Tree) -> Tree:
        """Build the server's initial state: the model, and in "head" a float64 copy of its head, which rounds solve.

        A centered head is a linear layer on features minus their mean: its parameters are weight, bias and center.

        Args:
            task: settings that all methods share, with the network.
            model: "params", of which frozen ones are not part, and "stats".

        Raises:
            UserError: if the network is not a frozen backbone with a centered head.
        """
        flat = tree.flatten(model["params"])
        head = task.network.head
        if flat.keys() != {f"{head}/{name}" for name in ("weight", "bias", "center")}:
            # {name=value} is shown as an option of the command, or as Python, wherever the message is read.
            raise UserError(
                "the head is solved on the features of a frozen backbone that ends in a centered layer: add "
                f"{{network={hubs.MULTILAYER}}} {{tune=head}}.",
                option=("network", "tune"),
            )
        values = {name: flat[f"{head}/{name}"].double() for name in ("weight", "bias", "center")}
        return {"params": model["params"], "stats": model["stats"], "head": values}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Query the mean, then the moments, and solve; after the first round return `server` unchanged."""
        if task.round > 0:
            return server
        server, sums = self.statistics(task, server, federation)
        return {**server, "head": {**server["head"], **solve(sums, self.strength)}}

    def statistics(self, task: Task, server: Tree, federation: Federation) -> tuple[Tree, Tree]:
        """Query all clients, and the server if it has images, for the mean feature vector, then for moments around it.

        Returns:
            The server's tree with the mean as its head's center; and the sums of `MomentSums`, in which h is a centered
            feature vector, with "hh" and "label_hh" as full matrices.

        Raises:
            UserError: if there is no labeled image.
        """
        # `serving`: images at the server count, too.
        sums = sum_over_clients(MeanSums(task), "mean", server, federation, serving=True)
        center = sums["q"] / sums["count"].clamp_min(1)
        server = {**server, "head": {**server["head"], "center": center}}
        # h depends on the center, so the moments need a second query.
        sums = sum_over_clients(MomentSums(task), "moments", server, federation, serving=True)
        sums |= {name: symmetric_matrix(sums[name], len(center)) for name in ("hh", "label_hh")}
        if not sums["label_counts"].sum() > 0:
            raise UserError(
                "neither a client nor the server has a labeled image, or noise hides them: a head cannot be solved."
            )
        return server, sums

    def solution(self, task: Task, server: Tree) -> Tree:
        flat = tree.flatten(server["params"])
        head = {f"{task.network.head}/{name}": leaf for name, leaf in server["head"].items()}
        params = {path: head[path].to(leaf.dtype) for path, leaf in flat.items()}
        return {"params": tree.unflatten(params), "stats": server["stats"]}


@dataclass(frozen=True)
class MixtureHead(RidgeHead):
    """The ridge head, then `em_rounds` rounds of EM on unlabeled images.

    Attributes:
        even_labels: labels of a class at which labeled and unlabeled images have equal weight.
        directions: number of principal directions that the mixture is fitted in.
        shrinkage: share of a multiple of the identity in the mixture's covariance.
        em_rounds: rounds of EM.
        share_noise: variance of the logarithms of the estimated class shares that errors of the head cause where the
            classes are even. Clearly larger variances are taken for uneven classes; with a very large value, the
            classes are always taken for even.
    """

    even_labels: float = 25.0
    directions: int = 96
    shrinkage: float = 0.2
    em_rounds: int = 10
    share_noise: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        POSITIVE.check("even_labels", self.even_labels)
        minimum(1).check("directions", self.directions)
        PROBABILITY.check("shrinkage", self.shrinkage)
        minimum(0).check("em_rounds", self.em_rounds)
        POSITIVE.check("share_noise", self.share_noise)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {**super().client_updates(task), "soft labels": SoftSums(task)}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Solve the ridge head in the first round; take one step of EM in each of the `em_rounds` that follow."""
        if task.round > self.em_rounds:
            return server
        if task.round == 0:
            server, sums = self.statistics(task, server, federation)
            return self._start_em(server, sums)
        sums = sum_over_clients(SoftSums(task), "soft labels", server, federation)
        return self._em_step(task.round - 1, server, sums)

    def _start_em(self, server: Tree, sums: Tree) -> Tree:
        """Start EM on a mixture of Gaussians from the ridge head, and store the moments, which all EM steps share.

        The ridge head's intercept contains the labels' class frequencies. They are removed, as those of the unlabeled
        images may differ. The mixture is fitted in `directions` principal directions only, as a covariance of all F
        features would have F (F + 1) / 2 entries to estimate.

        Args:
            server: the server's tree.
            sums: sums of h, the centered feature vector of length 1, and of h h' ("hh"): over all images, and with the
                prefix "label_" over the labeled ones; "label_hy" (F, K) is the sum of h of each class.

        Returns:
            The server's tree with "head" (for the next round's soft labels), "ridge", "moments", and "correction" (K,),
            which EM adds to the biases of classes that soft labels favor too much or too little.
        """
        n = sums["count"]
        prior = sums["label_counts"] / sums["label_counts"].sum()
        first = sums["h"] / n
        second = sums["hh"] / n
        ridge = solve(sums, self.strength)
        ridge = {"weight": ridge["weight"], "bias": ridge["bias"] - prior, "products": ridge["weight"] @ second}
        # Regression outputs have no scale as logits: give them spread 1 over the images, then a chosen sharpness.
        ridge = unit_spread(ridge, first)
        first_sharpness, _ = SHARPNESS
        head = {name: first_sharpness * ridge[name] for name in ("weight", "bias")}
        basis = principal_directions(second, self.directions)
        unlabeled_hh = sums["hh"] - sums["label_hh"]
        moments = {
            "first": first,  # mean of all images
            "basis": basis,  # their principal directions, as columns
            "products": second @ basis,  # of the second moments and the directions
            "scatter": basis.T @ unlabeled_hh @ basis,  # of the unlabeled images
            "label_scatter": basis.T @ sums["label_hh"] @ basis,
            "label_sums": sums["label_hy"].T @ basis,
            "label_counts": sums["label_counts"],
            "unlabeled": n - sums["label_counts"].sum(),  # number of unlabeled images
        }
        head = {**server["head"], **head}
        return {**server, "head": head, "ridge": ridge, "moments": moments, "correction": torch.zeros_like(prior)}

    def _em_step(self, step: int, server: Tree, sums: Tree) -> Tree:
        """Take the M step of EM: fit a Gaussian to each class, and mix their logits with the ridge head's.

        Args:
            step: number of the step, from 0.
            server: the server's tree: "moments" are sums over images in the principal directions "basis" (F, D),
                "scatter" of the unlabeled and "label_scatter" of the labeled ones; "ridge" is the head of labels alone,
                and "products" are those of `unit_spread`.
            sums: over the unlabeled images, with each image's soft labels r (E step): "r" (K,), and "rh" (K, F), the sum
                of r h', with h the image's centered feature vector.

        Returns:
            The server's tree with the new head.
        """
        moments = server["moments"]
        r = sums["r"]
        if not r.sum() > 0:
            return server  # no client has an unlabeled image
        counts = moments["label_counts"]
        basis = moments["basis"]
        # `trust` is the share of labels, in the mixture's fit and in the mix of both heads: half at `even_labels` labels a
        # class. All labeled images together weigh `trust` / (1 - `trust`) times as much as all unlabeled ones.
        trust = counts.mean() / (counts.mean() + self.even_labels)
        label_weight = trust / (1 - trust) * moments["unlabeled"] / counts.sum()
        mass = r + label_weight * counts
        means = (sums["rh"] @ basis + label_weight * moments["label_sums"]) / mass[:, None]
        # The covariance that all classes share: all second moments minus those of the class means.
        between = (means * mass[:, None]).T @ means
        covariance = (moments["scatter"] + label_weight * moments["label_scatter"] - between) / mass.sum()
        identity = torch.eye(len(covariance), dtype=r.dtype, device=r.device)
        covariance = torch.lerp(covariance, covariance.trace() / len(covariance) * identity, self.shrinkage)
        covariance = positive_definite(covariance)
        # Linear discriminant analysis: weight S^-1 mu_c, bias -mu_c' S^-1 mu_c / 2, without class priors.
        slopes = solve_linear(covariance, means.T)
        mixture = {
            "weight": (basis @ slopes).T,
            "bias": -0.5 * (means.T * slopes).sum(0),
            "products": (moments["products"] @ slopes).T,
        }
        # `unit_spread` scales both heads' logits to mean square 1 over all images, so that `trust` mixes equals.
        mixture = unit_spread(mixture, moments["first"])
        combined = tree.map(lambda a, b: trust * a + (1 - trust) * b, server["ridge"], mixture)
        combined = unit_spread(combined, moments["first"])
        # The logits' spread ("sharpness") grows linearly from the first to the last step: soft labels become harder.
        share = min(step + 1, self.em_rounds - 1) / max(self.em_rounds - 1, 1)
        sharpness = SHARPNESS[0] + (SHARPNESS[1] - SHARPNESS[0]) * share
        # Soft labels that are too frequent for a class lower its bias in the next round: a running mean of logarithms.
        log_totals = (r * len(r) / r.sum()).clamp_min(1e-9).log()
        excess = log_totals
        if step >= FIRST_SHARES_STEP:
            excess = log_totals - estimate_log_shares(log_totals - server["correction"], self.share_noise)
        correction = CORRECTION_DECAY * server["correction"] - (1 - CORRECTION_DECAY) * excess
        head = {"weight": sharpness * combined["weight"], "bias": sharpness * combined["bias"] + correction}
        return {**server, "head": {**server["head"], **head}, "correction": correction}


def estimate_log_shares(log_totals: Tensor, noise: float) -> Tensor:
    """Estimate the logarithms of the classes' shares of the unlabeled images, relative to even shares.

    The head's errors make the totals of soft labels uneven even where the classes are even. So totals are shrunk to even
    ones, by their variance beside that of the errors, as in James and Stein's estimator.

    Args:
        log_totals: logarithms of the totals of the soft labels without a correction, (K,), up to a constant.
        noise: variance of the logarithms that errors cause, for many classes. results/uneven_classes.md has its effect.

    Returns:
        Logarithms (K,) of shares times K, which sum to K.
    """
    centered = log_totals - log_totals.mean()
    # The centered logarithms of K classes have K - 1 degrees of freedom.
    noise_variance = noise * (len(centered) - 1) / len(centered)
    # Squared, so that it is near 0 for variances like those of errors, and near 1 for twice that.
    confidence = (1 - (noise_variance / centered.square().mean().clamp_min(1e-12)) ** 2).clamp_min(0)
    return (SHARES_EXPONENT * confidence * centered).log_softmax(0) + math.log(len(centered))


def sum_over_clients(
    update: SumsUpdate, query: str, server: Tree, federation: Federation, serving: bool = False
) -> Tree:
    """Have all clients compute sums over their images, and add these up.

    The server sends zeros in "sums" and each client's sums are their update, so secure aggregation and clipping treat
    them like a model.

    Args:
        update: the client update, from which only the shapes of the sums are taken.
        query: name of the client update, by which clients know what to compute.
        server: the server's tree.
        federation: the clients.
        serving: also add the sums over the server's images.

    Raises:
        UserError: if the cohort does not include all clients.
    """
    # The cohort lacks clients that have not replied, or that were refused: the head is solved without these.
    if federation.size != federation.clients:
        raise UserError(
            f"the head is solved from the sums of all {federation.clients} clients, and a round has "
            f"{federation.size}: set cohort to {federation.clients}."
        )
    broadcast = {"params": server["params"], "head": server["head"]}
    broadcast["sums"] = update.zeros(broadcast)
    # All weights are 1, so the mean times the number of replies is the sum.
    mean = federation.average(query, broadcast)
    sums = tree.map(lambda leaf: leaf * len(federation.responders), mean.update["sums"])
    if serving and federation.labeled:
        sums = tree.map(torch.add, sums, federation.query_server(query, broadcast).update["sums"])
    return sums


def solve(sums: Tree, strength: float) -> Tree:
    """Solve the ridge regression of the one-hot labels y on the feature vectors h, from sums over labeled images.

    Args:
        sums: "label_counts" (K,), the number of images of each class; "label_h" (F,), "label_hh" (F, F) and "label_hy"
            (F, K), the sums of h, of h h' and of h y'.
        strength: the ridge penalty, added to the diagonal of the centered second moments.

    Returns:
        The head: "weight" (K, F) and "bias" (K,).
    """
    # Centering h and y removes the intercept from the system, so it is not penalized.
    n = sums["label_counts"].sum()
    h = sums["label_h"] / n
    y = sums["label_counts"] / n
    scatter = sums["label_hh"] - n * torch.outer(h, h)
    scatter = scatter + strength * torch.eye(len(h), dtype=h.dtype, device=h.device)
    weight = solve_linear(scatter, sums["label_hy"] - n * torch.outer(h, y)).T.contiguous()
    return {"weight": weight, "bias": y - weight @ h}


def solve_linear(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve matrix x = right for x (F, K); raise UserError if there is no finite solution."""
    try:
        solution = cast(Tensor, torch.linalg.solve(matrix, right))  # pyright: ignore[reportUnknownMemberType]
    except RuntimeError as error:  # LinAlgError, of a singular matrix
        raise UserError(NO_SOLUTION) from error
    if not bool(solution.isfinite().all()):
        raise UserError(NO_SOLUTION)
    return solution


def positive_definite(matrix: Tensor) -> Tensor:
    """Return a symmetric matrix unchanged if it is positive definite; else with its eigenvalues raised to be positive.

    Sums that contradict one another, of sites that were refused in one query only, can make it indefinite.
    """
    if is_positive_definite(matrix):
        return matrix
    values, vectors = eigen_decomposition(matrix)
    # A thousandth of the largest eigenvalue: the inverse, in which small ones dominate, then remains moderate.
    floor = (values.abs().max() * 1e-3).clamp_min(1e-12)
    return (vectors * values.clamp_min(floor)) @ vectors.T


def eigen_decomposition(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the eigenvalues (F,), ascending, and eigenvectors (F, F); raise UserError if there are none."""
    if not bool(matrix.isfinite().all()):
        raise UserError(NO_SOLUTION)
    return cast(tuple[Tensor, Tensor], torch.linalg.eigh(matrix))  # pyright: ignore[reportUnknownMemberType]


def is_positive_definite(matrix: Tensor) -> bool:
    """Check that a symmetric matrix has Cholesky's factorization."""
    factored = cast(tuple[Tensor, Tensor], torch.linalg.cholesky_ex(matrix))  # pyright: ignore[reportUnknownMemberType]
    return int(factored[1]) == 0


def count_faults(name: str, count: float, declared: int) -> Iterator[str]:
    """Yield a fault if a count is negative or above the declared one."""
    if not -TOLERANCE <= count <= declared + TOLERANCE * max(1, declared):
        yield f"its {name} is of {count:g} images, and it has declared {declared}"


def length_faults(name: str, vectors: Tensor, counts: Tensor) -> Iterator[str]:
    """Yield a fault if a sum of vectors of norm 1, a row of `vectors` (n, F), is longer than its count (n,)."""
    lengths = vectors.square().sum(1).sqrt()
    excess = lengths - counts * (1 + TOLERANCE) - TOLERANCE
    if bool((excess > 0).any()):
        row = int(excess.argmax())
        yield f"its {name} has the length {float(lengths[row]):g}, of {float(counts[row]):g} vectors of length 1"


def moment_faults(name: str, moments: Tensor, scaled_sums: Tensor, count: float) -> Iterator[str]:
    """Yield a fault, a clause about the site that sent them, if second moments are impossible.

    They are possible if `count` vectors of norm 1 in groups with the given sums can have them: the trace is then the
    count, and the moments minus those of the groups' means, which are the scatter within groups, are positive
    semidefinite.

    Args:
        name: name of the moments, for the message.
        moments: sum of h h' over the vectors h, (F, F).
        scaled_sums: sums of n groups of the vectors (F, n), each divided by the root of the group's size: so their
            outer products are the moments that the groups would have if all their vectors were equal.
        count: number of vectors.
    """
    allowed = TOLERANCE * max(1.0, count)  # rounding error
    trace = float(moments.trace())
    if trace > count + allowed:
        yield f"its {name} has the trace {trace:g}, of {count:g} vectors of length 1"
    within = moments - scaled_sums @ scaled_sums.T
    # Rounding can turn an eigenvalue 0 slightly negative.
    within = within + allowed * torch.eye(len(within), dtype=within.dtype, device=within.device)
    if not is_positive_definite(within):
        yield f"its {name} are no second moments of vectors with the sums that it sends"


def principal_directions(second: Tensor, count: int) -> Tensor:
    """Compute the `count` leading eigenvectors (F, count) of a matrix of second moments (F, F).

    Features vary most in these directions, so the mixture of Gaussians is fitted in them.

    Raises:
        UserError: if a moment is not finite.
    """
    linalg: Any = import_module("scipy.linalg")  # slow to import, and without types
    if not bool(second.isfinite().all()):
        raise UserError(NO_SOLUTION)
    side = len(second)
    # SciPy computes these eigenvectors only, in a third of the time of all. Eigenvalues ascend.
    first = max(0, side - count)
    _, vectors = linalg.eigh(second.cpu().numpy(), subset_by_index=(first, side - 1), check_finite=False)
    return torch.as_tensor(vectors[:, ::-1].copy(), device=second.device)


def sum_outer_products(vectors: Tensor) -> Tensor:
    """Sum the outer products of vectors (n, F) with themselves: the upper triangle, row by row, (F (F + 1) / 2,)."""
    rows: list[Tensor] = []
    # In blocks of rows, as the lower triangle is half of the work, and the whole matrix exceeds a processor's cache.
    for start in range(0, vectors.shape[1], TRIANGLE_BLOCK):
        block = vectors[:, start : start + TRIANGLE_BLOCK].T @ vectors[:, start:]
        rows += [row[number:] for number, row in enumerate(block.unbind())]
    return torch.cat(rows)


def symmetric_matrix(upper: Tensor, side: int) -> Tensor:
    """Build the symmetric matrix (side, side) with this upper triangle."""
    matrix = upper.new_zeros(side, side)
    # Row by row, without indices, of which there would be `side` (`side` + 1).
    for number, row in enumerate(upper.split_with_sizes(list(range(side, 0, -1)))):
        matrix[number, number:] = row
    return matrix + matrix.triu(1).T


def unit_spread(head: Tree, first: Tensor) -> Tree:
    """Scale a head so that its logits, centered over classes, have the mean square 1 over all images.

    The outputs of a regression have no scale as logits; this gives two heads equal weight before they are mixed.

    Args:
        head: "weight" (K, F), "bias" (K,), and "products" (K, F), the product of the weight and the second moments of h
            over all images. It is linear in the weight, so that no round of EM needs a product with the moments (F, F).
        first: the first moment of h over all images, (F,).

    Returns:
        The scaled head, with its products.
    """
    weight = head["weight"] - head["weight"].mean(0)
    bias = head["bias"] - head["bias"].mean()
    # The mean square needs no images: E |W h + b|^2 = tr(W M2 W') + 2 (W m1) b + |b|^2. The centered weight gives the same
    # trace with products that are not centered: the rows of W sum to zero.
    squares = (head["products"] * weight).sum() + 2 * (weight @ first) @ bias + bias @ bias
    scale = (squares / len(bias)).clamp_min(0).sqrt().clamp_min(1e-12)
    return tree.map(partial(torch.mul, 1 / scale), head)


ON_FEATURES = (
    MethodEntry("ridge-head", "Ridge head", "AFL, CVPR 2025; Fed3R, ICML 2024",
                "labeled images only: ridge regression on frozen features, from sums", RidgeHead()),
    MethodEntry("mixture-head", "Mixture head", "after AFL, CVPR 2025",
                "a mixture of Gaussians on frozen features, from sums weighted by soft labels", MixtureHead()),
)  # fmt: skip
"""Rows that are not in `ROWS`, as the networks of the contract tests have no centered head."""

"""Rules for the pseudo-labels to use: a fixed confidence, or thresholds that follow the model.

p is the prediction on a weak view, C the number of classes, t and q running means of max p and of p.

- "fixed": use if max p >= threshold.
- "freematch" (Wang et al., ICLR 2023): use if max p >= t q(label) / max q; t and q start at 1 / C.
- "flexmatch" (Zhang et al., NeurIPS 2021): for every image the last label with max p >= threshold is stored, or none;
  b(c) = images labeled c / the largest such count, "none" counted too. Use if max p >= threshold b / (2 - b), with b of
  its label.
- "softmatch" (Chen et al., ICLR 2023): p is first divided by its running mean and normalized (uniform alignment); with
  the running mean m (from 1 / C) and variance v (from 1) of max p, the weight is exp(-min(0, max p - m)^2 / (v / 2)).
- "fl2" ((FL)^2, NeurIPS 2024): FreeMatch's rule, with t and q computed by the received model over all rows of the
  client.

Running means are client memory: they are not uploaded, because clients differ in their classes, and they are retained
between client updates, because one update is too short to move them (0.999^95 = 0.91). "fl2" predicts on all rows when
a client update begins and stores nothing. FreeMatch's fairness term is a loss, not a threshold, and is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfmoon.api.types import ClientData, PseudoLabels
from halfmoon.core.padding import mask, mean, row_mean, row_weights
from halfmoon.core.tree import Tree

Rule = Literal["fixed", "freematch", "flexmatch", "softmatch", "fl2"]
"""Rules for the pseudo-labels to use."""

RULES_WITH_THRESHOLD = ("fixed", "flexmatch")
RULES_WITH_RUNNING_MEANS = ("freematch", "softmatch")


def unused_threshold_options(rule: Rule) -> dict[str, str]:
    """List the options of thresholding that have no effect under a rule.

    Returns:
        For each of them the reason, as the end of a sentence.
    """
    unused: dict[str, str] = {}
    if rule not in RULES_WITH_THRESHOLD:
        unused["threshold"] = f"with thresholding {rule!r}, which computes its threshold"
    if rule not in RULES_WITH_RUNNING_MEANS:
        unused["threshold_decay"] = f"with thresholding {rule!r}, which has no running means"
    return unused


NO_LABEL = -1
PADDING_LABEL = -2
TINY = 1e-6
"""Added to both distributions before one is divided by the other (the authors' code)."""

MIN_DIVISOR = 1e-12
"""Smallest variance or class probability to divide by."""


@dataclass(frozen=True)
class Threshold:
    """A thresholding rule.

    Attributes:
        rule: the rule.
        threshold: confidence that "fixed" and "flexmatch" require.
        decay: decay of the running means of "freematch" and "softmatch".
    """

    rule: Rule = "fixed"
    threshold: float = 0.95
    decay: float = 0.999

    @property
    def needs_all_rows(self) -> bool:
        """True if a client update has to begin with predictions on all rows."""
        return self.rule == "fl2"

    @property
    def has_memory(self) -> bool:
        """True if the client stores a state between rounds."""
        return self.rule not in ("fixed", "fl2")

    @property
    def row_memory(self) -> Mapping[str, int]:
        """Leaves of the client memory with an entry for each row (`UpdateRequirements.row_memory`)."""
        return {"thresholds/label": NO_LABEL} if self.rule == "flexmatch" else {}

    def initial_memory(self, classes: int, like: Tensor) -> Tree:
        """Build the thresholds' initial state at a client: running means, or an empty list of stored labels.

        Args:
            classes: number of classes.
            like: a tensor that gives the dtype and device.

        Returns:
            The state of `rule`; {} if the rule has none. FreeMatch and SoftMatch have the running means of the largest
            probability ("confidence") and of all ("classes"); FlexMatch the last confident label of each image ("label"),
            and a hash of the images that it is of ("mark").
        """
        uniform = like.new_full((classes,), 1 / classes)
        if self.rule == "freematch":
            return {"confidence": uniform[0].clone(), "classes": uniform}
        if self.rule == "softmatch":
            # All zeros mark a mean without any minibatch: see `_align`.
            # SoftMatch's mean starts at the first minibatch, unlike FreeMatch's, which starts uniform.
            no_mean = torch.zeros_like(uniform)
            return {"confidence": uniform[0].clone(), "variance": like.new_ones(()), "classes": no_mean}
        if self.rule == "flexmatch":
            no_rows = torch.zeros(0, dtype=torch.int64, device=like.device)
            return {"label": no_rows, "mark": torch.zeros((), dtype=torch.float64, device=like.device)}
        return {}

    def begin(self, state: Tree, data: ClientData, p: Tensor | None = None) -> Tree:
        """Build the thresholds' state for a client update from the state that the client stored.

        The rule "fl2" stores none: its means are over predictions on all images. "flexmatch" stores a label of each image,
        and others store running means or nothing.

        Args:
            state: the stored state. If the client's images have changed since (in a stream), their stored labels are
                dropped.
            data: the client's images.
            p: predicted probabilities on all U images, (U, C), which "fl2" needs.
        """
        if self.rule == "fl2":
            assert p is not None
            return self._mean_over_rows(p, data.u_real)
        if self.rule != "flexmatch":
            return state
        label, rows_hash = recall_row_labels(state, data)
        # FlexMatch counts the images of each class and those without a label. Padding gets another mark: it is neither.
        return {"label": _mark_padding(label, data.u_real), "mark": rows_hash}

    def pseudo_label(
        self, p: Tensor, rows: Tensor, state: Tree, real: Tensor | None = None
    ) -> tuple[PseudoLabels, Tree]:
        """Compute the pseudo-labels of a minibatch, and update the thresholds' state.

        As in the authors' code, the minibatch enters the running means before it is thresholded, but FlexMatch's
        labels only afterwards.

        Args:
            p: predicted probabilities of b images, (b, C).
            rows: indices of the images among the client's, (b,).
            state: the current state.
            real: (b,) bool, False for padding rows, which get the weight 0; None if no row is padding.

        Returns:
            Labels, confidences and weights (b,), and the new state.
        """
        # Pseudo-labels are targets: no gradient passes through them or through the thresholds.
        p = p.detach()
        if self.rule == "freematch":
            state = self._update_means(state, confidence=mean(p.max(-1).values, real), classes=row_mean(p, real))
        elif self.rule == "softmatch":
            p, state = self._align(p, state, real)
            confidence = p.max(-1).values
            variance = _variance(confidence, real, state["variance"])
            state = {**state, **self._update_means(state, confidence=mean(confidence, real), variance=variance)}
        pseudo = self._apply(p, state)
        pseudo = pseudo._replace(weight=mask(pseudo.weight, real))
        if self.rule == "flexmatch":
            state = {**state, "label": self._store_labels(pseudo, rows, state["label"], real)}
        return pseudo, state

    def pseudo_label_all(self, p: Tensor, state: Tree, real: Tensor | None = None) -> PseudoLabels:
        """Compute the pseudo-labels of all images of a client at once.

        No state is updated: means are those over the images, and FlexMatch counts the labels that they get now.

        Args:
            p: predicted probabilities of U images, (U, C).
            state: the current state.
            real: (U,) bool, False for padding rows, which get the weight 0; None if no row is padding.

        Returns:
            Labels, confidences and weights, (U,).
        """
        p = p.detach()
        if self.rule in ("freematch", "fl2"):
            state = self._mean_over_rows(p, real)
        elif self.rule == "softmatch":
            classes = row_mean(p, real)
            p = self._divide_by_mean(p, classes)
            confidence = p.max(-1).values
            variance = _variance(confidence, real, torch.ones_like(classes[0]))
            state = {"confidence": mean(confidence, real), "variance": variance, "classes": classes}
        elif self.rule == "flexmatch":
            confidence, label = p.max(-1)
            confident_label = torch.where(confidence >= self.threshold, label, NO_LABEL)
            state = {**state, "label": _mark_padding(confident_label, real)}
        pseudo = self._apply(p, state)
        return pseudo._replace(weight=mask(pseudo.weight, real))

    def _apply(self, p: Tensor, state: Tree) -> PseudoLabels:
        """Label each image with its most likely class, and weigh it by the rule.

        Args:
            p: predicted probabilities, (n, C).
            state: running means, or FlexMatch's stored labels, already updated by `p`.

        Returns:
            Labels, confidences and weights (n,): 1 or 0, or between them with SoftMatch.
        """
        confidence, label = p.max(-1)
        if self.rule == "softmatch":
            # SoftMatch: a Gaussian of the confidence below its running mean, and weight 1 above it.
            below_mean = (confidence - state["confidence"]).clamp_max(0)
            # The authors divide the standard deviation by 2, and so the variance by 4: 2 sigma^2 / 4 = sigma^2 / 2.
            weight = (-below_mean.square() / (state["variance"] / 2).clamp_min(MIN_DIVISOR)).exp()
            return PseudoLabels(label, confidence, weight)
        threshold: Tensor | float = self.threshold
        if self.rule in ("freematch", "fl2"):
            # FreeMatch's self-adaptive threshold: global confidence times the class's probability, relative to the
            # largest.
            largest = state["classes"].max().clamp_min(MIN_DIVISOR)
            threshold = state["confidence"] * state["classes"][label] / largest
        elif self.rule == "flexmatch":
            progress = self._class_progress(state["label"], p.shape[-1])[label].to(p.dtype)
            # FlexMatch's convex mapping x / (2 - x) of the learning status.
            threshold = self.threshold * progress / (2 - progress)
        return PseudoLabels(label, confidence, (confidence >= threshold).to(p.dtype))

    def _mean_over_rows(self, p: Tensor, real: Tensor | None = None) -> Tree:
        """Compute the mean confidence and the mean prediction over all images of a client, the state of (FL)^2.

        Args:
            p: predicted probabilities, (U, C).
            real: (U,) bool, False for padding rows; None if no row is padding.

        Returns:
            "confidence" () and "classes" (C,); both 1 / C if there is no image.
        """
        if not len(p):
            return {
                "confidence": p.new_full((), 1 / p.shape[-1]),
                "classes": torch.full_like(p.sum(0), 1 / p.shape[-1]),
            }
        return {"confidence": mean(p.max(-1).values, real), "classes": row_mean(p, real)}

    def _update_means(self, state: Tree, **new: Tensor) -> Tree:
        """Update running means by the values of a minibatch."""
        return {name: torch.lerp(state[name], value.to(state[name]), 1 - self.decay) for name, value in new.items()}

    def _align(self, p: Tensor, state: Tree, real: Tensor | None) -> tuple[Tensor, Tree]:
        """Divide p by its running mean, which starts as the mean of the first minibatch, and update that mean."""
        batch_mean = row_mean(p, real).to(state["classes"])
        has_mean = state["classes"].sum() > 0
        classes = torch.where(has_mean, torch.lerp(state["classes"], batch_mean, 1 - self.decay), batch_mean)
        return self._divide_by_mean(p, classes), {**state, "classes": classes}

    @staticmethod
    def _divide_by_mean(p: Tensor, classes: Tensor) -> Tensor:
        """Divide probabilities (n, C) by the mean prediction (C,), and normalize: SoftMatch's uniform alignment."""
        aligned = p * (1 / p.shape[-1] + TINY) / (classes + TINY)
        return aligned / aligned.sum(-1, keepdim=True)

    @staticmethod
    def _class_progress(stored: Tensor, classes: int) -> Tensor:
        """Compute FlexMatch's b (C,) from the stored labels (U,)."""
        # From -1 on: rows without a label count like a class in the maximum (FlexMatch's warm-up), and are dropped
        # after it.
        names = torch.arange(NO_LABEL, classes, device=stored.device)
        counts = (stored[:, None] == names).sum(0)
        return (counts / counts.max().clamp_min(1))[1:]

    def _store_labels(self, pseudo: PseudoLabels, rows: Tensor, stored: Tensor, real: Tensor | None) -> Tensor:
        """Replace FlexMatch's stored labels by the confident pseudo-labels of a minibatch.

        If an image is in the minibatch several times, the highest of its classes is stored.

        Args:
            pseudo: labels and confidences of b images.
            rows: indices of the images among the client's U images, (b,).
            stored: the stored labels, (U,); -1 for images without one.
            real: (b,) bool, False for padding rows; None if no row is padding.

        Returns:
            The new stored labels, (U,).
        """
        confident_label = torch.where(pseudo.confidence >= self.threshold, pseudo.label, NO_LABEL)
        if real is not None:
            confident_label = torch.where(real, confident_label, NO_LABEL)
        # A comparison with all rows instead of an indexed write: duplicate indices of a write have no defined order.
        is_row = rows[:, None] == torch.arange(len(stored), device=rows.device)
        new = torch.where(is_row, confident_label[:, None], NO_LABEL).amax(0)
        return torch.where(new == NO_LABEL, stored, new)


def recall_row_labels(memory: Tree, data: ClientData) -> tuple[Tensor, Tensor]:
    """Load the pseudo-labels that a client stored for its images, unless the images have changed since.

    Args:
        memory: "label" (U,), and "mark" (), a hash (the sum of pixels) of the images at that time.
        data: the client's images.

    Returns:
        The labels (U,), -1 for an image without one, and the hash () of the current images.
    """
    # Padding repeats rows of the client, and their number depends on the other clients of the cohort.
    pixels = data.u if data.u_real is None else data.u * data.u_real[:, None, None, None]
    rows_hash = pixels.sum().double()
    label = torch.full_like(data.u[:, 0, 0, 0], NO_LABEL, dtype=torch.int64)
    if len(memory["label"]) == len(label):
        # Selected, not branched on: under vmap the hash is a batched tensor.
        label = torch.where(memory["mark"] == rows_hash, memory["label"], label)
    return label, rows_hash


def _mark_padding(label: Tensor, real: Tensor | None) -> Tensor:
    """Mark padding rows in labels (U,), so that they count neither as a class nor as a row without a label."""
    return label if real is None else torch.where(real, label, PADDING_LABEL)


def _variance(values: Tensor, real: Tensor | None, default: Tensor) -> Tensor:
    """Compute the unbiased variance () of values (n,), without padding rows; `default` if there are fewer than two."""
    if real is None:
        # `var` is unbiased; the masked form below is corrected by count / (count - 1).
        return values.var() if len(values) > 1 else default
    count = real.sum().to(values.dtype)
    squares = (values - mean(values, real)).square()
    return torch.where(count > 1, row_weights(real, values) @ squares * count / (count - 1).clamp_min(1), default)

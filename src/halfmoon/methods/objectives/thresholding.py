"""Which pseudo-labels count: those above a fixed confidence, or above thresholds that follow the model.

p is the prediction on a weak view, C the number of classes, t and q running means of max p and of p.

- "fixed": keep where max p >= threshold.
- "freematch" (Wang et al., ICLR 2023): keep where max p >= t q(label) / max q; t and q start at 1 / C.
- "flexmatch" (Zhang et al., NeurIPS 2021): every image keeps the last label that it got with max p >= threshold, or
  none; b(c) = images labeled c / the largest such count, "none" counted too. Keep where max p >= threshold b / (2 -
  b), b of its label.
- "softmatch" (Chen et al., ICLR 2023): p is first divided by its running mean and normalized (uniform alignment); with
  the running mean m (from 1 / C) and variance v (from 1) of max p, an image weighs exp(-min(0, max p - m)^2 / (v / 2)).
- "fl2" ((FL)^2, NeurIPS 2024): FreeMatch's rule with the t and q that the received model has on all rows of the client.

A mean that starts anew in every client update would stay where it starts (0.999^95 = 0.91), and clients differ in their
classes. So what is running stays at its client between the client updates, and nothing of it travels; "fl2" looks at
all rows when a client update begins and keeps nothing. FreeMatch's fairness term is a loss, not a threshold, and not
here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfmoon.api.types import ClientData, PseudoLabels
from halfmoon.core.padding import mask, mean, row_mean, share
from halfmoon.core.tree import Tree

Rule = Literal["fixed", "freematch", "flexmatch", "softmatch", "fl2"]
"""Which pseudo-labels count."""

NONE, PADDING = -1, -2
TINY = 1e-6
"""Added to both distributions before one is divided by the other (the authors' code)."""


@dataclass(frozen=True)
class Threshold:
    """A rule with its numbers: `threshold` of "fixed" and "flexmatch", `decay` of the running means."""

    rule: Rule = "fixed"
    threshold: float = 0.95
    decay: float = 0.999

    @property
    def sweeps(self) -> bool:
        """Return whether a client update has to begin with a look at all rows."""
        return self.rule == "fl2"

    @property
    def runs(self) -> bool:
        """Return whether something is remembered from round to round."""
        return self.rule not in ("fixed", "fl2")

    @property
    def row_memory(self) -> Mapping[str, int]:
        """Return which leaf of a client's "thresholds" has an entry for each row (`UpdateRequirements.row_memory`)."""
        return {"thresholds/label": NONE} if self.rule == "flexmatch" else {}

    def initial_memory(self, classes: int, like: Tensor) -> Tree:
        """Return what a client knows that has not trained yet; `like` has the dtype and device of the model."""
        uniform = like.new_full((classes,), 1 / classes)
        if self.rule == "freematch":
            return {"confidence": uniform[0].clone(), "classes": uniform}
        if self.rule == "softmatch":
            zero = torch.zeros_like(uniform)
            return {"confidence": uniform[0].clone(), "variance": like.new_ones(()), "classes": zero}
        if self.rule == "flexmatch":
            rows = torch.zeros(0, dtype=torch.int64, device=like.device)
            return {"label": rows, "mark": torch.zeros((), dtype=torch.float64, device=like.device)}
        return {}

    def begin(self, state: Tree, data: ClientData, p: Tensor | None = None) -> Tree:
        """Return what a client update starts with, of its stored `state`; "fl2" needs the predictions p (U, C) on all
        rows.

        Where other rows have come than those that labels were kept of (in a stream), no row has one.
        """
        if self.rule == "fl2":
            assert p is not None
            return self._profile(p, data.u_real)
        if self.rule != "flexmatch":
            return state
        label, mark = remembered(state, data)
        return {"label": _own(label, data.u_real), "mark": mark}

    def pseudo_label(
        self, p: Tensor, rows: Tensor, state: Tree, real: Tensor | None = None
    ) -> tuple[PseudoLabels, Tree]:
        """Return the pseudo-labels of a minibatch with predictions p (b, C) on `rows` (b,), and the new state.

        With a mask `real` (b,), means are over the real rows, and the others weigh nothing.

        As in the authors' code, running means take in the minibatch before it is judged, FlexMatch's labels after.
        """
        p = p.detach()
        if self.rule == "freematch":
            state = self._running(state, confidence=mean(p.max(-1).values, real), classes=row_mean(p, real))
        elif self.rule == "softmatch":
            p, state = self._aligned(p, state, real)
            highest = p.max(-1).values
            variance = _variance(highest, real, state["variance"])
            state = {**state, **self._running(state, confidence=mean(highest, real), variance=variance)}
        pseudo = self._weighed(p, state)
        pseudo = pseudo._replace(weight=mask(pseudo.weight, real))
        if self.rule == "flexmatch":
            state = {**state, "label": self._stored(pseudo, rows, state["label"], real)}
        return pseudo, state

    def pseudo_label_all(self, p: Tensor, state: Tree, real: Tensor | None = None) -> PseudoLabels:
        """Return the pseudo-labels of all rows of a client at once, with predictions p (U, C).

        Nothing runs here: means are those over the rows, and FlexMatch counts the labels that the rows get now. With a
        mask `real` (U,) the rows are the real ones, and the others weigh nothing.
        """
        p = p.detach()
        if self.rule in ("freematch", "fl2"):
            state = self._profile(p, real)
        elif self.rule == "softmatch":
            classes = row_mean(p, real)
            p = self._divided(p, classes)
            highest = p.max(-1).values
            variance = _variance(highest, real, torch.ones_like(classes[0]))
            state = {"confidence": mean(highest, real), "variance": variance, "classes": classes}
        elif self.rule == "flexmatch":
            confidence, label = p.max(-1)
            state = {**state, "label": _own(torch.where(confidence >= self.threshold, label, NONE), real)}
        pseudo = self._weighed(p, state)
        return pseudo._replace(weight=mask(pseudo.weight, real))

    def _weighed(self, p: Tensor, state: Tree) -> PseudoLabels:
        """Return labels, confidences and weights under a state that is up to date."""
        confidence, label = p.max(-1)
        if self.rule == "softmatch":
            below = (confidence - state["confidence"]).clamp_max(0)
            return PseudoLabels(label, confidence, (-below.square() / (state["variance"] / 2).clamp_min(1e-12)).exp())
        least: Tensor | float = self.threshold
        if self.rule in ("freematch", "fl2"):
            least = state["confidence"] * state["classes"][label] / state["classes"].max().clamp_min(1e-12)
        elif self.rule == "flexmatch":
            learned = self._learned(state["label"], p.shape[-1])[label].to(p.dtype)
            least = self.threshold * learned / (2 - learned)
        return PseudoLabels(label, confidence, (confidence >= least).to(p.dtype))

    def _profile(self, p: Tensor, real: Tensor | None = None) -> Tree:
        """Return the means of max p and of p (U, C) over all (real) rows; uniform over no row."""
        if not len(p):
            return {
                "confidence": p.new_full((), 1 / p.shape[-1]),
                "classes": torch.full_like(p.sum(0), 1 / p.shape[-1]),
            }
        return {"confidence": mean(p.max(-1).values, real), "classes": row_mean(p, real)}

    def _running(self, state: Tree, **new: Tensor) -> Tree:
        return {name: torch.lerp(state[name], value.to(state[name]), 1 - self.decay) for name, value in new.items()}

    def _aligned(self, p: Tensor, state: Tree, real: Tensor | None) -> tuple[Tensor, Tree]:
        """Return p divided by its running mean, which starts as the first minibatch's, and the state with that."""
        now = row_mean(p, real).to(state["classes"])
        has_mean = state["classes"].sum() > 0
        classes = torch.where(has_mean, torch.lerp(state["classes"], now, 1 - self.decay), now)
        return self._divided(p, classes), {**state, "classes": classes}

    @staticmethod
    def _divided(p: Tensor, classes: Tensor) -> Tensor:
        aligned = p * (1 / p.shape[-1] + TINY) / (classes + TINY)
        return aligned / aligned.sum(-1, keepdim=True)

    @staticmethod
    def _learned(stored: Tensor, classes: int) -> Tensor:
        """Return b (C,) of the labels (U,) that rows have."""
        names = torch.arange(NONE, classes, device=stored.device)
        counts = (stored[:, None] == names).sum(0)
        return (counts / counts.max().clamp_min(1))[1:]

    def _stored(self, pseudo: PseudoLabels, rows: Tensor, stored: Tensor, real: Tensor | None) -> Tensor:
        """Return the labels (U,) with those that a minibatch is sure of; of a row's several views the highest class."""
        sure = torch.where(pseudo.confidence >= self.threshold, pseudo.label, NONE)
        sure = sure if real is None else torch.where(real, sure, NONE)
        here = rows[:, None] == torch.arange(len(stored), device=rows.device)
        new = torch.where(here, sure[:, None], NONE).amax(0)
        return torch.where(new == NONE, stored, new)


def remembered(memory: Tree, data: ClientData) -> tuple[Tensor, Tensor]:
    """Return the labels (U,) that rows have, `NONE` where they have none, and the mark () of these rows.

    `memory` has "label" and "mark" of the last time: where other rows have come since, no row has a label.
    """
    pixels = data.u if data.u_real is None else data.u * data.u_real[:, None, None, None]
    label, mark = torch.full_like(data.u[:, 0, 0, 0], NONE, dtype=torch.int64), pixels.sum().double()
    if len(memory["label"]) == len(label):
        label = torch.where(memory["mark"] == mark, memory["label"], label)
    return label, mark


def _own(label: Tensor, real: Tensor | None) -> Tensor:
    """Return labels (U,) in which a row that is padding counts as no class, and not as one without a label either."""
    return label if real is None else torch.where(real, label, PADDING)


def _variance(values: Tensor, real: Tensor | None, alone: Tensor) -> Tensor:
    """Return the unbiased variance () of values (n,), of the real ones; `alone` where they are less than two."""
    if real is None:
        return values.var() if len(values) > 1 else alone
    count = real.sum().to(values.dtype)
    around = (values - mean(values, real)).square()
    return torch.where(count > 1, share(real, values) @ around * count / (count - 1).clamp_min(1), alone)

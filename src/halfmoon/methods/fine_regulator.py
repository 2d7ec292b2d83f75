"""F-reg of FedDure: a small MLP f_w that weighs images, and the derivatives of the loss that it weighs, in closed form.

H(w; z) = sigmoid(out(relu(hidden(s)))) sees s, which is the logits z, their softmax, or z minus its mean over classes.
The loss inside Eq. 2 and 4 is L = mean_i H(w; z_i) CE(y_i, z_i). Two derivatives of it are wanted: in z, which Eq. 2
and 4 pull back through the network, and that of Eq. 5, in w of the derivative D L of L along a tangent of z. With
a = out(...), H' = H (1 - H), H'' = H' (1 - 2 H), c_i = CE(y_i, z_i) and e_i = softmax(z_i) - onehot(y_i) = dc_i/dz_i,

    dL/dz_i     = (H_i e_i + [c_i H'_i da_i/dz_i]) / n
    D L         = mean_i (H_i Dc_i + [c_i H'_i Da_i]),   Dc_i = e_i . Dz_i
    d(D L)/da_i = (H'_i Dc_i + [c_i H''_i Da_i]) / n,    d(D L)/dDa_i = [c_i H'_i] / n

where the brackets are there if gradients also pass through H's input ("product"), and are 0 if they do not
("detached"). The rest is one backward pass through the MLP, for its values a and its tangents Da: as many small matrix
products as the MLP has layers, in place of nested transforms of `torch.func`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.core.tree import Tree

Input = Literal["centered", "logits", "softmax"]
"""What F-reg sees of an image."""

Through = Literal["product", "detached"]
"""Whether gradients of the weighted loss also pass through F-reg's input."""


def weigh(regulator: Tree, z: Tensor, kind: Input) -> Tensor:
    """Return H (n,) in (0, 1) for logits z (n, classes)."""
    return _answers(regulator, _inputs(z, kind))[1]


@dataclass(frozen=True)
class WeightedLoss:
    """The cross-entropy of n images, which F-reg weighs: what does not depend on F-reg is computed once."""

    x: Tensor  # (n, inputs) what F-reg sees
    loss: Tensor  # (n,) c
    error: Tensor  # (n, classes) e
    kind: Input
    through: Through
    count: Tensor | int  # n

    @classmethod
    def of(cls, z: Tensor, label: Tensor, kind: Input, through: Through, real: Tensor | None = None) -> "WeightedLoss":
        """Return the loss of logits z (n, classes) and labels (n,) int64; with a mask `real` (n,), of the real rows."""
        log_p = z.log_softmax(-1)
        loss, error = -log_p.gather(-1, label[:, None])[:, 0], log_p.exp() - F.one_hot(label, z.shape[-1])
        if real is None:
            return cls(_inputs(z, kind), loss, error, kind, through, len(loss))
        # All derivatives are linear in these two.
        return cls(_inputs(z, kind), loss * real, error * real[:, None], kind, through, real.sum())

    def blame(self, regulator: Tree) -> Tensor:
        """Return dL/dz (n, classes); without F-reg ({}) all weights are 1."""
        if not regulator:
            return self.error / self.count
        hidden, weights = _answers(regulator, self.x)
        blame = weights[:, None] * self.error
        if self.through == "product":
            slope = self.loss * weights * (1 - weights)
            pulled = _unrectified(slope, regulator, hidden) @ regulator["hidden"]["weight"]
            blame = blame + self._back(pulled)
        return blame / self.count

    def lesson(self, regulator: Tree, tangent: Tensor) -> Tree:
        """Return d(D L)/dw, a tree like `regulator`, along the `tangent` (n, classes) of the logits."""
        hidden, weights = _answers(regulator, self.x)
        weight, out = regulator["hidden"]["weight"], regulator["out"]["weight"][0]
        slope = weights * (1 - weights) / self.count
        value = slope * (self.error * tangent).sum(-1)  # d(D L)/da
        if self.through == "detached":
            back = _unrectified(value, regulator, hidden)
            return _gradient(back.mT @ self.x, back.sum(0), value @ hidden, value)
        x_tangent = self._along(tangent)
        moved = torch.where(hidden > 0, F.linear(x_tangent, weight), 0.0)  # the tangent of the hidden layer
        change = self.loss * slope  # d(D L)/dDa
        value = value + change * (1 - 2 * weights) * (moved @ out)
        back, along = (_unrectified(each, regulator, hidden) for each in (value, change))
        return _gradient(back.mT @ self.x + along.mT @ x_tangent, back.sum(0), value @ hidden + change @ moved, value)

    def _along(self, tangent: Tensor) -> Tensor:
        """Return how F-reg's input moves along a tangent of the logits."""
        if self.kind == "softmax":
            return self.x * (tangent - (self.x * tangent).sum(-1, keepdim=True))
        return tangent - tangent.mean(-1, keepdim=True) if self.kind == "centered" else tangent

    _back = _along  # both maps are symmetric


def _inputs(z: Tensor, kind: Input) -> Tensor:
    if kind == "softmax":
        return z.softmax(-1)
    return z - z.mean(-1, keepdim=True) if kind == "centered" else z


def _answers(regulator: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden layer (n, hidden) after the rectifier, and H (n,) in (0, 1)."""
    hidden = F.relu(F.linear(x, regulator["hidden"]["weight"], regulator["hidden"]["bias"]))
    out = F.linear(hidden, regulator["out"]["weight"], regulator["out"]["bias"])
    return hidden, out.squeeze(-1).sigmoid()


def _unrectified(cotangent: Tensor, regulator: Tree, hidden: Tensor) -> Tensor:
    """Return the cotangent (n,) of a, pulled back to before the rectifier (n, hidden)."""
    return torch.where(hidden > 0, cotangent[:, None] * regulator["out"]["weight"][0], 0.0)


def _gradient(weight: Tensor, bias: Tensor, out: Tensor, value: Tensor) -> Tree:
    return {"hidden": {"weight": weight, "bias": bias}, "out": {"weight": out[None], "bias": value.sum()[None]}}

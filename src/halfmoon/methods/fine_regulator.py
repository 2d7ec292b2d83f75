"""FedDure's fine-grained regulator (F-reg): an MLP that weighs pseudo-labeled images, with closed-form derivatives.

F-reg maps the logits z_i of image i to a weight H_i = sigmoid(a_i), a_i = out(relu(hidden(s_i))). Its input s_i is
z_i, softmax(z_i), or z_i minus its mean over classes. Two options are ours: the input may be the log-odds of the
pseudo-label's confidence instead, and an offset, such as these log-odds, may be added to a_i. Both are constants: no
gradient passes through them. F-reg weighs the pseudo-label loss of Eq. 2 and Eq. 4,

    L = mean_i H_i c_i,    c_i = cross_entropy(z_i, y_i).

FedDure needs two derivatives of L:

1. the gradient in z (Eq. 2 and 4), which is then back-propagated through the network;
2. the gradient, in F-reg's parameters, of the directional derivative of L along a tangent of z (Eq. 5).

With H' = H (1 - H), H'' = H' (1 - 2 H), e_i = softmax(z_i) - onehot(y_i), and D the derivative along the tangent:

    dL/dz_i     = (H_i e_i + [c_i H'_i da_i/dz_i]) / n
    D L         = mean_i (H_i Dc_i + [c_i H'_i Da_i]),    Dc_i = e_i . Dz_i
    d(D L)/da_i = (H'_i Dc_i + [c_i H''_i Da_i]) / n,     d(D L)/dDa_i = [c_i H'_i] / n

Terms in brackets are present if gradients pass through F-reg's input ("product") and zero if they do not ("detached").
Writing them out needs one backward pass through a two-layer MLP, instead of nested transforms of `torch.func`.

Reference: FedDure (AAAI 2024), Eq. 2, 4, 5 and 6.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.core.tensors import euclidean_norm
from halfmoon.core.tree import Tree

RegulatorInput = Literal["centered", "logits", "softmax", "confidence"]
"""F-reg's input: a transform of the strong view's logits, or the log-odds of the pseudo-label's confidence."""

GradientPath = Literal["product", "detached"]
"""Whether gradients of the weighted loss also pass through F-reg's input ("product") or not ("detached")."""

MIN_NORM = 1e-12
"""Smallest divisor of a signal."""

MIN_DOUBT = 1e-4
"""Confidences are clipped to this distance from 0 and 1, so that their log-odds are between -9.2 and 9.2."""


def compute_log_odds(confidence: Tensor) -> Tensor:
    """Compute the log-odds log(p / (1 - p)) of confidences p (n,), which `MIN_DOUBT` bounds."""
    return confidence.detach().clamp(MIN_DOUBT, 1 - MIN_DOUBT).logit()


def compute_instance_weights(
    regulator: Tree,
    logits: Tensor,
    regulator_input: RegulatorInput,
    confidence: Tensor | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """Weigh pseudo-labeled images by FedDure's fine-grained regulator (F-reg), an MLP (Eq. 6).

    Args:
        regulator: F-reg's parameters.
        logits: of the strong views, (n, classes).
        regulator_input: F-reg's input: a transform of the logits, or the confidence of the pseudo-label.
        confidence: of the pseudo-labels, (n,); needed for the input "confidence".
        offset: added to F-reg's output before the sigmoid, (n,); None: nothing.

    Returns:
        Weights between 0 and 1, (n,).
    """
    inputs = _build_input(logits, regulator_input, confidence)
    _, weights = _forward(regulator, inputs, offset)
    return weights


@dataclass(frozen=True)
class WeightedLoss:
    """The pseudo-label loss of n images that F-reg weighs. Terms that do not depend on F-reg are computed once.

    Attributes:
        inputs: F-reg's inputs, (n, classes), or (n, 1) for the input "confidence".
        loss: cross-entropy of each image, (n,).
        probability_error: softmax(z) - onehot(y), the gradient of the cross-entropy in the logits, (n, classes).
        regulator_input: F-reg's input: a transform of the logits, or the confidence of the pseudo-label.
        gradient_path: whether gradients also pass through F-reg's input.
        count: the number of images, n.
        offset: added to F-reg's output before the sigmoid, (n,); None: nothing.
    """

    inputs: Tensor
    loss: Tensor
    probability_error: Tensor
    regulator_input: RegulatorInput
    gradient_path: GradientPath
    count: Tensor | int
    offset: Tensor | None = None

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        pseudo_labels: Tensor,
        regulator_input: RegulatorInput,
        gradient_path: GradientPath,
        mask: Tensor | None = None,
        confidence: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> "WeightedLoss":
        """Build the pseudo-label loss of n images, which FedDure's fine-grained regulator (F-reg) weighs.

        Args:
            logits: (n, classes).
            pseudo_labels: (n,) int64.
            regulator_input: F-reg's input: a transform of the logits, or the confidence of the pseudo-label.
            gradient_path: whether gradients also pass through F-reg's input ("product") or not ("detached"). The input
                "confidence" is a constant, so that both are equal.
            mask: (n,) bool, False for padding rows; None if no row is padding.
            confidence: of the pseudo-labels, (n,); needed for the input "confidence".
            offset: added to F-reg's output before the sigmoid, (n,); None: nothing.

        Returns:
            The object whose methods compute derivatives for given parameters of F-reg, which are not needed here.
        """
        log_probabilities = logits.log_softmax(-1)
        loss = -log_probabilities.gather(-1, pseudo_labels[:, None])[:, 0]
        # softmax - one-hot, the gradient of the cross-entropy in the logits.
        probability_error = log_probabilities.exp() - F.one_hot(pseudo_labels, logits.shape[-1])
        count: Tensor | int = len(loss)
        if mask is not None:
            # All derivatives are linear in `loss` and `probability_error`, so zeroing these two removes the padding rows.
            loss = loss * mask
            probability_error = probability_error * mask[:, None]
            count = mask.sum()
        return cls(
            inputs=_build_input(logits, regulator_input, confidence),
            loss=loss,
            probability_error=probability_error,
            regulator_input=regulator_input,
            gradient_path="detached" if regulator_input == "confidence" else gradient_path,
            count=count,
            offset=offset,
        )

    def logit_gradient(self, regulator: Tree) -> Tensor:
        """Compute the gradient in the logits of the pseudo-label loss mean_i w_i c_i, (n, classes).

        The MLP F-reg computes an image's weight w from its logits z, and c is the cross-entropy. By the product rule the
        gradient is w dc/dz + c dw/dz; with the gradient path "detached" the second term is left out.

        Args:
            regulator: F-reg's parameters; {} if all weights are 1.
        """
        if not regulator:
            return self.probability_error / self.count
        hidden, weights = _forward(regulator, self.inputs, self.offset)
        gradient = weights[:, None] * self.probability_error
        if self.gradient_path == "product":
            score_gradient = self.loss * weights * (1 - weights)  # through the sigmoid
            hidden_gradient = _backward_through_relu(score_gradient, regulator, hidden)
            input_gradient = hidden_gradient @ regulator["hidden"]["weight"]
            # The chain rule needs the transposed Jacobian of F-reg's input: the same, as it is symmetric.
            gradient = gradient + self._apply_input_jacobian(input_gradient)
        return gradient / self.count

    def regulator_gradient(self, regulator: Tree, logit_tangent: Tensor) -> Tree:
        """Compute the gradient, in F-reg's parameters, of the weighted loss's derivative along a tangent, D L.

        F-reg is an MLP: image i has the score a_i and the weight H_i = sigmoid(a_i) of its cross-entropy c_i, and
        L = mean_i H_i c_i. So D L = mean_i (H_i Dc_i + c_i H'_i Da_i), where D is the derivative along the tangent, and
        H' = H (1 - H). With the gradient path "detached" F-reg's input is a constant: Da = 0.

        Times the negative learning rate of the virtual step, the result is the hypergradient in Eq. 5 of FedDure (AAAI
        2024), if the tangent is along the gradient of the labeled loss.

        Args:
            regulator: F-reg's parameters.
            logit_tangent: Dz, the direction in which the logits z move, (n, classes).

        Returns:
            A tree like `regulator`.
        """
        hidden, weights = _forward(regulator, self.inputs, self.offset)
        sigmoid_slope = weights * (1 - weights) / self.count  # H' / n
        loss_tangent = (self.probability_error * logit_tangent).sum(-1)  # Dc
        score_gradient = sigmoid_slope * loss_tangent  # d(D L)/da without the term of Da
        if self.gradient_path == "detached":
            hidden_gradient = _backward_through_relu(score_gradient, regulator, hidden)
            return _as_tree(
                hidden_weight=hidden_gradient.mT @ self.inputs,
                hidden_bias=hidden_gradient.sum(0),
                out_weight=score_gradient @ hidden,
                out_bias=score_gradient.sum(),
            )
        # The tangent also moves F-reg's input, and with it the hidden layer and the score: Da is not 0.
        input_tangent = self._apply_input_jacobian(logit_tangent)
        hidden_tangent = torch.where(hidden > 0, F.linear(input_tangent, regulator["hidden"]["weight"]), 0.0)
        score_tangent = hidden_tangent @ regulator["out"]["weight"][0]  # Da
        score_tangent_gradient = self.loss * sigmoid_slope  # d(D L)/dDa
        # d(D L)/da: the second derivative of the sigmoid is H' (1 - 2 H).
        full_score_gradient = score_gradient + score_tangent_gradient * (1 - 2 * weights) * score_tangent
        hidden_gradient = _backward_through_relu(full_score_gradient, regulator, hidden)
        hidden_tangent_gradient = _backward_through_relu(score_tangent_gradient, regulator, hidden)
        # A layer's weight acts on its input and on the input's tangent, so its gradient has a term for each.
        return _as_tree(
            hidden_weight=hidden_gradient.mT @ self.inputs + hidden_tangent_gradient.mT @ input_tangent,
            hidden_bias=hidden_gradient.sum(0),
            out_weight=full_score_gradient @ hidden + score_tangent_gradient @ hidden_tangent,
            out_bias=full_score_gradient.sum(),
        )

    def compute_signal(self, logit_tangent: Tensor) -> Tensor:
        """Compute how much a step on each image lowers the labeled loss, (n,), per unit of the image's error.

        It is Dc / ||e||, with the derivative Dc of the image's cross-entropy along the labeled gradient, from which F-reg
        learns (Eq. 5), and its error e = softmax(z) - onehot(y); in units of the root mean square over the images.

        Args:
            logit_tangent: Dz, the derivative of the logits z along the labeled gradient, (n, classes).
        """
        loss_tangent = (self.probability_error * logit_tangent).sum(-1)
        signal = loss_tangent / euclidean_norm(self.probability_error, dim=-1).clamp_min(MIN_NORM)
        # Padding rows are 0 and do not count.
        mean_square = signal.square().sum() / self.count
        return signal / mean_square.sqrt().clamp_min(MIN_NORM)

    def _apply_input_jacobian(self, direction: Tensor) -> Tensor:
        """Apply the Jacobian of F-reg's input in the logits. It is symmetric, so it serves tangents and gradients."""
        if self.regulator_input == "softmax":
            return self.inputs * (direction - (self.inputs * direction).sum(-1, keepdim=True))
        if self.regulator_input == "centered":
            return direction - direction.mean(-1, keepdim=True)
        return direction


def _build_input(logits: Tensor, regulator_input: RegulatorInput, confidence: Tensor | None) -> Tensor:
    if regulator_input == "confidence":
        if confidence is None:
            raise TypeError("The input 'confidence' needs the confidences of the pseudo-labels.")
        return compute_log_odds(confidence)[:, None]
    if regulator_input == "softmax":
        return logits.softmax(-1)
    if regulator_input == "centered":
        return logits - logits.mean(-1, keepdim=True)
    return logits


def _forward(regulator: Tree, inputs: Tensor, offset: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the rectified hidden layer (n, hidden) and the weights H (n,)."""
    hidden = F.relu(F.linear(inputs, regulator["hidden"]["weight"], regulator["hidden"]["bias"]))
    score = F.linear(hidden, regulator["out"]["weight"], regulator["out"]["bias"]).squeeze(-1)
    if offset is not None:
        score = score + offset
    return hidden, score.sigmoid()


def _backward_through_relu(score_gradient: Tensor, regulator: Tree, hidden: Tensor) -> Tensor:
    """Back-propagate a gradient of the score (n,) to the hidden layer before its rectifier, (n, hidden)."""
    return torch.where(hidden > 0, score_gradient[:, None] * regulator["out"]["weight"][0], 0.0)


def _as_tree(*, hidden_weight: Tensor, hidden_bias: Tensor, out_weight: Tensor, out_bias: Tensor) -> Tree:
    return {
        "hidden": {"weight": hidden_weight, "bias": hidden_bias},
        "out": {"weight": out_weight[None], "bias": out_bias[None]},
    }

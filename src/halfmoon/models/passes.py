"""Passes through a network: the computation of each layer in training, in evaluation, and for tangents."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.core import padding
from halfmoon.core.arithmetic import Precision
from halfmoon.core.autodiff import apply_across_clients, inside_transform, vjp
from halfmoon.core.tree import Tree

Norm = Literal["batch", "group", "none"]
"""Normalization after a convolution: batch normalization, group normalization (FedRGD), or none (FedMatch)."""

EPS = 1e-5
MOMENTUM = 0.1
"""Constants of PyTorch's normalizations."""

GROUPS = 32
"""Groups of a group normalization (FedRGD)."""


def product_precision(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Make the context of a pass: for "bf16" PyTorch's autocast, which rounds the factors of products."""
    if precision != "bf16":
        # TensorFloat-32 is a setting of the process, as passes in reverse need it too (`halfmoon.core.arithmetic`).
        return nullcontext()
    # Not cached: each pass uses a weight once, and a copy made without gradients must not be used in a pass with them.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def is_emulated(precision: Precision, device: torch.device) -> bool:
    """Check whether the processor emulates the products because it has no instructions for them (x86 before AVX-512)."""
    return precision == "bf16" and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


def to_float32(z: Tensor) -> Tensor:
    """Convert bfloat16 activations to float32; others are returned unchanged."""
    return z.float() if z.dtype == torch.bfloat16 else z


def group_count(channels: int) -> int:
    """Choose the number of groups of a group normalization: 32 (FedRGD), or the largest smaller divisor of `channels`.

    It depends on the channels of the tensor, so a narrower network (HeteroFL) can run by itself. Such a network equals
    the full one with zeros elsewhere only if a group is one channel in both (up to 32 channels).
    """
    return max(count for count in range(1, min(GROUPS, channels) + 1) if channels % count == 0)


@dataclass
class ForwardPass:
    """One pass through a network: the computation of its layers, which `Network.layers` calls in order.

    z is activations (B, C, H, W). All other operations of a network (adding, averaging, flattening) have to be linear,
    because `TangentPass` applies them to tangents. Sizes are read from the parameters.

    Attributes:
        params: parameters of the network.
        kind: kind of its normalizations.
        inputs: the input of the last linear layer, by its name.
    """

    params: Tree
    kind: Norm
    inputs: dict[str, Tensor] = field(default_factory=dict, kw_only=True)

    def conv(self, name: str, z: Tensor, stride: int = 1) -> Tensor:
        """Convolve with an odd kernel and a padding of half of it: height and width are divided by `stride`, rounded up."""
        conv = self.params[name]["conv"]
        return F.conv2d(z, conv["weight"], conv.get("bias"), stride, padding=conv["weight"].shape[-1] // 2)

    def norm(self, name: str, z: Tensor) -> Tensor:
        """Normalize by the network's kind, with weight and bias; with "none" z is returned unchanged."""
        if self.kind == "batch":
            return self.batch_norm(name, to_float32(z))
        return self.group_norm(name, to_float32(z)) if self.kind == "group" else z

    def batch_norm(self, name: str, z: Tensor) -> Tensor:
        """Normalize each channel over the images."""
        raise NotImplementedError

    def group_norm(self, name: str, z: Tensor) -> Tensor:
        """Normalize each group of channels of each image, in training as in evaluation."""
        affine = self.params[name]["norm"]
        return F.group_norm(z, group_count(z.shape[-3]), affine["weight"], affine["bias"], EPS)

    def relu(self, z: Tensor) -> Tensor:
        """Set negative activations to 0."""
        return F.relu(z)

    def pool(self, z: Tensor, size: int | list[int], stride: int | None = None, padding: int = 0) -> Tensor:
        """Compute the maximum of each window of `size`; without a stride the windows do not overlap."""
        maxima = None
        if z.device.type == "cpu":
            maxima = apply_across_clients(lambda batch: _max_pool_on_cpu(batch, size, stride, padding), z)
        return F.max_pool2d(z, size, stride, padding) if maxima is None else maxima

    def layer_norm(self, name: str, z: Tensor) -> Tensor:
        """Normalize z (..., features) over its features, in training as in evaluation."""
        affine = self.params[name]
        return F.layer_norm(to_float32(z), z.shape[-1:], affine["weight"], affine["bias"], EPS)

    def linear(self, name: str, z: Tensor) -> Tensor:
        """Map features (..., inputs) to (..., outputs), and store the inputs of the last such layer, the head."""
        self.inputs = {name: z}
        return F.linear(z, self.params[name]["weight"], self.params[name].get("bias"))


@dataclass
class EvalPass(ForwardPass):
    """A pass under the tracked statistics."""

    stats: Tree

    def batch_norm(self, name: str, z: Tensor) -> Tensor:
        affine = self.params[name]["norm"]
        stats = self.stats[name]
        return F.batch_norm(z, stats["mean"], stats["var"], affine["weight"], affine["bias"], training=False, eps=EPS)


@dataclass
class ProductCounter(ForwardPass):
    """A pass that counts the products in convolutions and linear layers without computing them, also on "meta"."""

    products: int = 0

    def conv(self, name: str, z: Tensor, stride: int = 1) -> Tensor:
        weight = self.params[name]["conv"]["weight"]
        # Sides are divided by the stride and rounded up, as with a padding of half the kernel.
        out = z.new_zeros(len(z), len(weight), *(-(-side // stride) for side in z.shape[2:]))
        self.products += out.numel() * weight[0].numel()
        return out

    def norm(self, name: str, z: Tensor) -> Tensor:
        return z

    def layer_norm(self, name: str, z: Tensor) -> Tensor:
        return z

    def linear(self, name: str, z: Tensor) -> Tensor:
        weight = self.params[name]["weight"]
        out = z.new_zeros(*z.shape[:-1], len(weight))
        self.products += out.numel() * weight.shape[1]
        return out


@dataclass
class TrainPass(ForwardPass):
    """A pass under batch statistics.

    Attributes:
        moments: the batch statistics, after the pass.
        fixed_stats: fixed statistics of some layers, which are not normalized by the batch.
        real: (B,) bool, False for padding; None if there is none.
    """

    moments: Tree = field(default_factory=dict)
    fixed_stats: Tree = field(default_factory=dict)
    real: Tensor | None = None

    def batch_norm(self, name: str, z: Tensor) -> Tensor:
        """Normalize by the mean and variance of the batch, or by the fixed ones of this layer."""
        if name in self.fixed_stats:
            affine = self.params[name]["norm"]
            stats = self.fixed_stats[name]
            return F.batch_norm(
                z, stats["mean"], stats["var"], affine["weight"], affine["bias"], training=False, eps=EPS
            )
        return self.normalized(name, z)[0]

    def normalized(self, name: str, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize by the batch; return the activations, the mean and the inverse standard deviation (C,)."""
        affine = self.params[name]["norm"]
        out, mean, inverse, var = normalize_batch(z, self.real, affine["weight"], affine["bias"])
        self.moments[name] = {"mean": mean.detach(), "var": var}
        return out, mean, inverse

    def pool(self, z: Tensor, size: int | list[int], stride: int | None = None, padding: int = 0) -> Tensor:
        """Compute the maximum of each window, by the same algorithm for one client as inside vmap."""
        uses_default = z.device.type != "cpu" or stride is not None or inside_transform()
        if uses_default or z.is_contiguous(memory_format=torch.channels_last):
            return super().pool(z, size, stride, padding)
        return _max_pool_on_cpu(z, size, stride, padding)


@dataclass
class RecordingPass(TrainPass):
    """A pass under batch statistics that records on a tape what `TangentPass` needs; autograd stores most of it too."""

    tape: list[Tensor] = field(default_factory=list)

    def conv(self, name: str, z: Tensor, stride: int = 1) -> Tensor:
        self.tape.append(z)
        return super().conv(name, z, stride)

    def batch_norm(self, name: str, z: Tensor) -> Tensor:
        out, mean, inverse = self.normalized(name, z)
        self.tape += [z, mean, inverse]
        return out

    def group_norm(self, name: str, z: Tensor) -> Tensor:
        self.tape.append(z)
        return super().group_norm(name, z)

    def relu(self, z: Tensor) -> Tensor:
        # The output suffices for the derivative: it is positive exactly where the input is.
        self.tape.append(F.relu(z))
        return self.tape[-1]

    def pool(self, z: Tensor, size: int | list[int], stride: int | None = None, padding: int = 0) -> Tensor:
        out, indices = F.max_pool2d(z, size, stride, padding, return_indices=True)
        self.tape.append(indices)
        return out

    def linear(self, name: str, z: Tensor) -> Tensor:
        self.tape.append(z)
        return super().linear(name, z)


@dataclass
class TangentPass(ForwardPass):
    """A pass of tangents after a recorded one: the derivative of the logits along a direction of the parameters.

    The tangent of activations is their derivative along `direction`. Each method gets the tangent of the input of its
    layer and returns that of the output, of the same shapes as the activations. It takes the activations themselves
    from the tape, so the layers must be called in the order of the recorded pass.

    The tangent of a layer with weights has two terms: one from the direction of its weights, at the recorded input, and
    one from the tangent of the input, at its weights. The first layer has only the former, as images do not change.

    Attributes:
        direction: a tree like the parameters.
        images: the images of the recorded pass.
        tape: what `RecordingPass` recorded, in its order.
        real: (B,) bool, False for padding, as in the recorded pass; None if there is none.
    """

    direction: Tree
    images: Tensor
    tape: Iterator[Tensor]
    real: Tensor | None = None

    def conv(self, name: str, input_tangent: Tensor, stride: int = 1) -> Tensor:
        """Compute the tangent of a convolution w * x + b, along a direction (dw, db) of its parameters.

        Args:
            name: name of the layer.
            input_tangent: dx, the tangent of the input (B, C, H, W).
            stride: stride of the convolution.

        Returns:
            dw * x + db + w * dx, where the input x is read from the recorded pass.
        """
        recorded_input = next(self.tape)
        weight = self.params[name]["conv"]["weight"]
        direction = self.direction[name]["conv"]
        padding = weight.shape[-1] // 2
        from_params = F.conv2d(recorded_input, direction["weight"], direction.get("bias"), stride, padding)
        # The first layer gets the images themselves instead of a tangent: their derivative is 0.
        if input_tangent is self.images:
            return from_params
        from_input = F.conv2d(input_tangent, weight, None, stride, padding)
        return from_params.add_(from_input)

    def batch_norm(self, name: str, input_tangent: Tensor) -> Tensor:
        """Compute the tangent of a batch normalization w n(x) + b, along a direction (dw, db) of its parameters.

        n(x) is the input normalized by the mean and the variance of the batch, and J its Jacobian. The Jacobian of each
        channel is symmetric, so the product J dx is that of PyTorch's backward pass, with dx as the gradient.

        Args:
            name: name of the layer.
            input_tangent: dx, the tangent of the input (B, C, H, W).

        Returns:
            dw n + db + w J dx, where the input x is read from the recorded pass.
        """
        weight = self.params[name]["norm"]["weight"]
        direction = self.direction[name]["norm"]
        # In the order of `RecordingPass.batch_norm`.
        recorded_input = next(self.tape)
        mean = next(self.tape)
        inverse_deviation = next(self.tape)
        if self.real is not None:
            return _masked_tangent(
                input_tangent,
                recorded_input,
                mean,
                inverse_deviation,
                self.real,
                weight=weight,
                weight_direction=direction["weight"],
                bias_direction=direction["bias"],
            )
        from_params = torch.native_batch_norm(
            recorded_input, direction["weight"], direction["bias"], None, None, True, MOMENTUM, EPS
        )[0]
        from_input = torch.ops.aten.native_batch_norm_backward(
            input_tangent,
            recorded_input,
            weight,
            None,  # running mean
            None,  # running variance
            mean,
            inverse_deviation,
            True,  # the statistics are those of the batch
            EPS,
            [True, False, False],  # of the gradients in input, weight and bias only the first
        )[0]
        return from_params.add_(from_input)

    def group_norm(self, name: str, input_tangent: Tensor) -> Tensor:
        """Compute the tangent of a group normalization w n(x) + b, along a direction (dw, db) of its parameters.

        The Jacobian J of n is symmetric, so the product J dx is that of the backward pass of n. That of w n is not
        symmetric, as the channels of a group have different weights.

        Args:
            name: name of the layer.
            input_tangent: dx, the tangent of the input (B, C, H, W).

        Returns:
            dw n + db + w J dx, where the input x is read from the recorded pass.
        """
        params = self.params[name]["norm"]
        direction = self.direction[name]["norm"]
        groups = group_count(input_tangent.shape[-3])
        recorded_input = next(self.tape)
        normalized, backward, _ = vjp(
            lambda variables: (F.group_norm(variables["x"], groups, eps=EPS), ()), {"x": recorded_input}
        )
        # (C, 1, 1), to broadcast over height and width.
        weight, weight_direction, bias_direction = (
            leaf[:, None, None] for leaf in (params["weight"], direction["weight"], direction["bias"])
        )
        from_params = torch.addcmul(bias_direction, weight_direction, normalized)
        normalized_tangent = backward(input_tangent, False)["x"]  # False: the graph is not needed again
        return torch.addcmul(from_params, weight, normalized_tangent)

    def relu(self, input_tangent: Tensor) -> Tensor:
        """Compute the tangent of a ReLU: that of the input where the recorded output is positive, 0 elsewhere."""
        recorded_output = next(self.tape)
        return torch.ops.aten.threshold_backward(input_tangent, recorded_output, 0)

    def pool(self, input_tangent: Tensor, size: int | list[int], stride: int | None = None, padding: int = 0) -> Tensor:
        """Compute the tangent of a maximum: that of the activation at its recorded position in the input."""
        positions = next(self.tape)
        return _gather_positions(input_tangent, positions)

    def linear(self, name: str, input_tangent: Tensor) -> Tensor:
        """Compute the tangent of a linear layer w x + b: dw x + db + w dx."""
        recorded_input = next(self.tape)
        direction = self.direction[name]
        from_params = F.linear(recorded_input, direction["weight"], direction.get("bias"))
        from_input = F.linear(input_tangent, self.params[name]["weight"])
        return from_params + from_input


def _max_pool_on_cpu(z: Tensor, size: int | list[int], stride: int | None, padding: int) -> Tensor:
    """Compute `max_pool2d` of z (B, C, H, W) on a CPU.

    PyTorch needs ten times as long unless channels are last. So it finds the positions of the maxima in a channels-last
    copy, and they are gathered from z.

    Args:
        z: activations.
        size: height and width of a window.
        stride: distance of windows; None: `size`.
        padding: padding on each side.
    """
    with torch.no_grad():
        channels_last = z.contiguous(memory_format=torch.channels_last)
        indices = F.max_pool2d(channels_last, size, stride, padding, return_indices=True)[1]
    return _gather_positions(z, indices)


def _gather_positions(z: Tensor, indices: Tensor) -> Tensor:
    """Select the values of z (B, C, H, W) at flat positions (B, C, h, w) in each channel."""
    return z.flatten(-2).gather(-1, indices.flatten(-2)).unflatten(-1, indices.shape[-2:])


def normalize_batch(
    z: Tensor, real: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float = EPS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply batch normalization with the statistics of the rows that are not padding.

    The results of padding rows are undefined. If no row is real the deviation is 1: divided by 0, activations of a deep
    network would overflow.

    Args:
        z: activations (B, C, ...).
        real: (B,) bool, False for padding rows; None if there is none.
        weight: factor of each channel after normalization, (C,); None: 1.
        bias: added to each channel after that, (C,); None: 0.
        eps: added to the variance.

    Returns:
        The normalized activations, and the mean, the inverse deviation and the unbiased variance (C,).
    """
    if real is None:
        # None: no running statistics; True: normalize by those of the batch.
        out, mean, inverse = torch.native_batch_norm(z, weight, bias, None, None, True, MOMENTUM, eps)
        count = z.numel() // z.shape[1]
        # inverse^-2 - eps is the variance of the batch; count / (count - 1) makes it unbiased.
        return out, mean, inverse, (inverse.detach().pow(-2) - eps) * (count / max(count - 1, 1))
    mean = _real_mean(z, real)
    deviations = z - _broadcast(mean, z)
    var = _real_mean(deviations.square(), real)
    inverse = (torch.where(real.any(), var, 1.0) + eps).rsqrt()
    scale = _broadcast(inverse if weight is None else inverse * weight, z)
    out = deviations * scale if bias is None else torch.addcmul(_broadcast(bias, z), deviations, scale)
    # Values of a channel: images times positions.
    count = real.sum().to(var.dtype) * z[0, 0].numel()
    return out, mean, inverse, var.detach() * (count / (count - 1).clamp_min(1))


def _masked_tangent(
    input_tangent: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse_deviation: Tensor,
    real: Tensor,
    *,
    weight: Tensor,
    weight_direction: Tensor,
    bias_direction: Tensor,
) -> Tensor:
    """Compute the tangent of a batch normalization whose statistics leave out padding rows (`normalize_batch`).

    With n = (x - mean) * inverse_deviation, the tangent of weight * n + bias is dweight n + dbias + weight dn, where

        dn = inverse_deviation * (dx - mean(dx) - n mean(n dx)), the means over the real rows.

    Args:
        input_tangent: dx, (B, C, ...).
        x: the input, (B, C, ...).
        mean: its mean over the real rows, (C,).
        inverse_deviation: its inverse standard deviation, (C,).
        real: (B,) bool, False for padding rows.
        weight: (C,).
        weight_direction: dweight, (C,).
        bias_direction: dbias, (C,).
    """
    dx = input_tangent
    n = (x - _broadcast(mean, dx)) * _broadcast(inverse_deviation, dx)
    n_times_dx = _real_mean(n * dx, real)
    centered = dx - _broadcast(_real_mean(dx, real), dx)
    factor_of_n = weight_direction - n_times_dx * inverse_deviation * weight
    tangent = torch.addcmul(_broadcast(bias_direction, dx), n, _broadcast(factor_of_n, dx))
    return torch.addcmul(tangent, centered, _broadcast(inverse_deviation * weight, dx))


def _real_mean(z: Tensor, real: Tensor) -> Tensor:
    """Compute the mean (C,) of z (B, C, ...) over its real rows and all dimensions after the channels."""
    row_means = z.mean(tuple(range(2, z.dim()))) if z.dim() > 2 else z
    # Not a matrix product, which autocast would round.
    return (padding.row_weights(real, z)[:, None] * row_means).sum(0)


def _broadcast(leaf: Tensor, z: Tensor) -> Tensor:
    """Reshape a leaf (C,) so that it broadcasts over z (B, C, ...)."""
    return leaf.reshape(-1, *[1] * (z.dim() - 2))

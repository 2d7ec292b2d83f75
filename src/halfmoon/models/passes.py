"""The passes through a network: what each layer does in training, under tracked statistics, and to tangents."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.core import padding
from halfmoon.core.autodiff import apply_across_clients, inside_transform, vjp
from halfmoon.core.tree import Tree

Norm = Literal["batch", "group", "none"]
"""What stands after a convolution: batch normalization, group normalization (FedRGD), or nothing (FedMatch)."""

Precision = Literal["float32", "bf16"]
"""What convolutions and linear layers multiply in; all else, parameters and statistics too, stays float32."""

EPS = 1e-5
MOMENTUM = 0.1
GROUPS = 32


def product_precision(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Return what a pass is made in: for "bf16", where PyTorch rounds the factors of products (autocast)."""
    if precision == "float32":
        return nullcontext()
    # Not cached: each pass uses a weight once, and a copy made without gradients must not serve a pass with some.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def is_emulated(precision: Precision, device: torch.device) -> bool:
    """Return whether products are made in a form that the processor has no instructions for (x86 before AVX-512)."""
    return precision == "bf16" and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


def to_float32(z: Tensor) -> Tensor:
    """Return activations in bfloat16 as float32, others as they are."""
    return z.float() if z.dtype == torch.bfloat16 else z


def group_count(channels: int) -> int:
    """Return into how many groups `channels` are normalized: 32 (FedRGD), or the largest divisor below that there is.

    It depends on the channels that are there, so a leading part of a network (HeteroFL) runs by itself; it equals the
    whole network with zeros elsewhere only where a group is one channel in both (up to 32 channels).
    """
    return max(count for count in range(1, min(GROUPS, channels) + 1) if channels % count == 0)


@dataclass
class ForwardPass:
    """One pass through a network: what its layers do, on given parameters; `Network.layers` says in which order.

    z is activations (B, C, H, W); whatever a network does besides (adding, averaging, flattening) has to be linear.
    Sizes, kernels and biases are those of the parameters.
    """

    params: Tree
    kind: Norm
    inputs: dict[str, Tensor] = field(default_factory=dict, kw_only=True)  # what the last linear layer was given

    def conv(self, name: str, z: Tensor, stride: int = 1) -> Tensor:
        """Convolve with an odd kernel, padded by half of it: height and width are divided by `stride`, rounded up."""
        p = self.params[name]["conv"]
        return F.conv2d(z, p["weight"], p.get("bias"), stride, padding=p["weight"].shape[-1] // 2)

    def norm(self, name: str, z: Tensor) -> Tensor:
        """Normalize as the network's kind says, with weight and bias; "none" leaves z as it is."""
        if self.kind == "batch":
            return self.batch_norm(name, to_float32(z))
        return self.group_norm(name, to_float32(z)) if self.kind == "group" else z

    def batch_norm(self, name: str, z: Tensor) -> Tensor:
        """Normalize each channel over the images."""
        raise NotImplementedError

    def group_norm(self, name: str, z: Tensor) -> Tensor:
        """Normalize each group of channels of each image by itself: the same in training and evaluation."""
        p = self.params[name]["norm"]
        return F.group_norm(z, group_count(z.shape[-3]), p["weight"], p["bias"], EPS)

    def relu(self, z: Tensor) -> Tensor:
        return F.relu(z)

    def pool(self, z: Tensor, size: int | list[int], stride: int | None = None, padding: int = 0) -> Tensor:
        """Take the maximum of each window of `size`; without a stride the windows are tiles."""
        maxima = None
        if z.device.type == "cpu":
            maxima = apply_across_clients(lambda many: _largest(many, size, stride, padding), z)
        return F.max_pool2d(z, size, stride, padding) if maxima is None else maxima

    def layer_norm(self, name: str, z: Tensor) -> Tensor:
        """Normalize z (..., features) over its features: the same in training and evaluation."""
        p = self.params[name]
        return F.layer_norm(to_float32(z), z.shape[-1:], p["weight"], p["bias"], EPS)

    def linear(self, name: str, z: Tensor) -> Tensor:
        """Map features (..., inputs) to (..., outputs); keep those of the last such layer, which is the head."""
        self.inputs = {name: z}
        return F.linear(z, self.params[name]["weight"], self.params[name].get("bias"))


@dataclass
class EvalPass(ForwardPass):
    """A pass under the tracked statistics."""

    stats: Tree

    def batch_norm(self, name: str, z: Tensor) -> Tensor:
        p, s = self.params[name]["norm"], self.stats[name]
        return F.batch_norm(z, s["mean"], s["var"], p["weight"], p["bias"], False, MOMENTUM, EPS)


@dataclass
class ProductCounter(ForwardPass):
    """A pass that counts products in convolutions and linear layers, and computes none: parameters may be "meta"."""

    products: int = 0

    def conv(self, name: str, z: Tensor, stride: int = 1) -> Tensor:
        weight = self.params[name]["conv"]["weight"]
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
    """A pass under batch statistics, left in `moments`."""

    moments: Tree = field(default_factory=dict)
    settled: Tree = field(default_factory=dict)  # statistics of the layers that do not look at the batch
    real: Tensor | None = None  # (B,) bool, the images that are no padding; None: all

    def batch_norm(self, name: str, z: Tensor) -> Tensor:
        """Normalize with the batch's own mean and variance, or with the settled ones where there are some."""
        if name in self.settled:
            p, s = self.params[name]["norm"], self.settled[name]
            return F.batch_norm(z, s["mean"], s["var"], p["weight"], p["bias"], False, MOMENTUM, EPS)
        return self.normalized(name, z)[0]

    def normalized(self, name: str, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalized activations, the batch's mean and its inverse standard deviation (C,)."""
        p = self.params[name]["norm"]
        out, mean, inverse, var = normalize_batch(z, self.real, p["weight"], p["bias"])
        self.moments[name] = {"mean": mean.detach(), "var": var}
        return out, mean, inverse

    def pool(self, z: Tensor, size: int | list[int], stride: int | None = None, padding: int = 0) -> Tensor:
        """Take the maximum of each window, of one client as of many: images of one channel come with channels first."""
        plain = z.device.type != "cpu" or stride is not None or inside_transform()
        if plain or z.is_contiguous(memory_format=torch.channels_last):
            return super().pool(z, size, stride, padding)
        return _largest(z, size, stride, padding)


@dataclass
class RecordingPass(TrainPass):
    """A pass under batch statistics that keeps, in order, what its tangents will need: what autograd saves anyway."""

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
        self.tape.append(F.relu(z))
        return self.tape[-1]

    def pool(self, z: Tensor, size: int | list[int], stride: int | None = None, padding: int = 0) -> Tensor:
        out, where = F.max_pool2d(z, size, stride, padding, return_indices=True)
        self.tape.append(where)
        return out

    def linear(self, name: str, z: Tensor) -> Tensor:
        self.tape.append(z)
        return super().linear(name, z)


@dataclass
class TangentPass(ForwardPass):
    """A pass of tangents over a recorded one: z is how the activations move as the parameters move along `direction`.

    It convolves no activation again: a layer with weights costs its two derivatives, so the pass two convolutions a
    layer (one in the first, whose images stand still).
    """

    direction: Tree
    images: Tensor
    tape: Iterator[Tensor]
    real: Tensor | None = None  # (B,) bool, the images that are no padding; None: all

    def conv(self, name: str, z: Tensor, stride: int = 1) -> Tensor:
        """d(w * x) = dw * x + w * dx."""
        x, w, d = next(self.tape), self.params[name]["conv"]["weight"], self.direction[name]["conv"]
        padding = w.shape[-1] // 2
        moved = F.conv2d(x, d["weight"], d.get("bias"), stride, padding)
        return moved if z is self.images else moved.add_(F.conv2d(z, w, None, stride, padding))

    def batch_norm(self, name: str, z: Tensor) -> Tensor:
        """In weight and bias normalization is affine; in its input its derivative is symmetric: its own backward."""
        w, d = self.params[name]["norm"]["weight"], self.direction[name]["norm"]
        x, mean, inverse = next(self.tape), next(self.tape), next(self.tape)
        if self.real is not None:
            return _masked_tangent(z, (x, mean, inverse), self.real, (w, d["weight"], d["bias"]))
        moved = torch.native_batch_norm(x, d["weight"], d["bias"], None, None, True, MOMENTUM, EPS)[0]
        only_input = [True, False, False]
        backward = torch.ops.aten.native_batch_norm_backward
        return moved.add_(backward(z, x, w, None, None, mean, inverse, True, EPS, only_input)[0])

    def group_norm(self, name: str, z: Tensor) -> Tensor:
        """d(w n + b) = dw n + db + w dn: the derivative of n, not that of w n, is symmetric, so its backward serves."""
        p, d = self.params[name]["norm"], self.direction[name]["norm"]
        groups = group_count(z.shape[-3])
        n, pull, _ = vjp(lambda at: (F.group_norm(at["x"], groups, eps=EPS), ()), {"x": next(self.tape)})
        w, dw, db = (leaf[:, None, None] for leaf in (p["weight"], d["weight"], d["bias"]))
        return torch.addcmul(torch.addcmul(db, dw, n), w, pull(z, False)["x"])

    def relu(self, z: Tensor) -> Tensor:
        """Where the output is 0, nothing moves."""
        return torch.ops.aten.threshold_backward(z, next(self.tape), 0)

    def pool(self, z: Tensor, size: int | list[int], stride: int | None = None, padding: int = 0) -> Tensor:
        """The maxima move as the activations that they are."""
        return _picked(z, next(self.tape))

    def linear(self, name: str, z: Tensor) -> Tensor:
        """d(w x) = dw x + w dx."""
        d = self.direction[name]
        return F.linear(next(self.tape), d["weight"], d.get("bias")) + F.linear(z, self.params[name]["weight"])


def _largest(z: Tensor, size: int | list[int], stride: int | None, padding: int) -> Tensor:
    """Return `max_pool2d` of z (B, C, H, W) on a CPU, where PyTorch takes ten times as long unless channels lie last.

    So it only says where the maxima are, of a copy with channels last.
    """
    with torch.no_grad():
        last = z.contiguous(memory_format=torch.channels_last)
        where = F.max_pool2d(last, size, stride, padding, return_indices=True)[1]
    return _picked(z, where)


def _picked(z: Tensor, where: Tensor) -> Tensor:
    """Return of z (B, C, H, W) what stands at the places `where` (B, C, h, w) of each channel."""
    return z.flatten(-2).gather(-1, where.flatten(-2)).unflatten(-1, where.shape[-2:])


def normalize_batch(
    z: Tensor, real: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float = EPS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return z (B, C, ...) normalized by its real rows, and their mean, inverse deviation, unbiased variance (C,).

    What stands in the other rows changes nothing; what becomes of it means nothing. Where no row is real they are not
    scaled up: divided by the deviation of nothing, activations of a deep network would not stay numbers.
    """
    if real is None:
        out, mean, inverse = torch.native_batch_norm(z, weight, bias, None, None, True, MOMENTUM, eps)
        count = z.numel() // z.shape[1]
        return out, mean, inverse, (inverse.detach().pow(-2) - eps) * (count / max(count - 1, 1))
    mean = _real_mean(z, real)
    apart = z - _broad(mean, z)
    var = _real_mean(apart.square(), real)
    inverse = (torch.where(real.any(), var, 1.0) + eps).rsqrt()
    scale = _broad(inverse if weight is None else inverse * weight, z)
    out = apart * scale if bias is None else torch.addcmul(_broad(bias, z), apart, scale)
    count = real.sum().to(var.dtype) * z[0, 0].numel()
    return out, mean, inverse, var.detach() * (count / (count - 1).clamp_min(1))


def _masked_tangent(
    z: Tensor, batch: tuple[Tensor, Tensor, Tensor], real: Tensor, moving: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Return the tangent of w n + b, n = (x - mean) inverse, as x moves along z, w along dw and b along db.

    dn = inverse (dx - mean(dx) - n mean(n dx)), the means over the real rows.
    """
    (x, mean, inverse), (w, dw, db) = batch, moving
    n = (x - _broad(mean, z)) * _broad(inverse, z)
    along = _real_mean(n * z, real)
    still = z - _broad(_real_mean(z, real), z)
    moved = torch.addcmul(_broad(db, z), n, _broad(dw - along * inverse * w, z))
    return torch.addcmul(moved, still, _broad(inverse * w, z))


def _real_mean(z: Tensor, real: Tensor) -> Tensor:
    """Return the mean (C,) over the real rows of z (B, C, ...) and what stands behind its channels."""
    each = z.mean(tuple(range(2, z.dim()))) if z.dim() > 2 else z
    return (padding.row_weights(real, z)[:, None] * each).sum(0)  # no product of matrices: autocast would round it


def _broad(leaf: Tensor, z: Tensor) -> Tensor:
    """Return a leaf (C,) so that it goes with z (B, C, ...)."""
    return leaf.reshape(-1, *[1] * (z.dim() - 2))

"""Any `torch.nn.Module` as a network: its parameters become a tree, its normalizations report their batches.

A factory `make(channels=..., classes=..., size=(height, width))` gives the module. It is called twice as often as
anybody thinks (for its shapes, for its first weights, in every process), so it has to give the same layers each time.
Batch normalizations are replaced by ones that are given their statistics and say what they saw, as the networks of this
package do; every other layer stays what it is. A pass is `torch.func.functional_call`, a tangent `torch.func.jvp`.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.fusion import fuse_conv_bn_eval

from halfmoon.core import hubs, tree
from halfmoon.core.errors import UserError, one_line
from halfmoon.core.plugins import load
from halfmoon.core.tree import Tree
from halfmoon.models.hubs import make as make_named
from halfmoon.models.network import Network, forward_tangent
from halfmoon.models.passes import MOMENTUM, normalize_batch, product_precision, to_float32

_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)


@dataclass(frozen=True)
class ModuleNetwork(Network):
    """A `torch.nn.Module` from outside, as a pure function; `from_factory` makes it.

    `factory` names it ("my_module:make", or an entry point), `size` is the height and width that it was made for.
    `norm` is "batch" where it has batch normalizations, else "none", whatever other normalization it has.
    """

    width: int = 1
    factory: str = ""
    size: tuple[int, int] = (32, 32)
    about: str = ""  # of a network of transformers: its configuration, as JSON
    sliceable: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Return the name from which the module can be made again, on any machine."""
        return f"{self.factory.partition(':')[0]}:{self.about}" if self.about else self.factory

    @property
    def head(self) -> str | None:
        return _tried(self)

    def init(self, generator: torch.Generator) -> Tree:
        template = _template(self)
        if torch.get_default_device().type == "meta":  # somebody asks for shapes alone
            return tree.map(lambda leaf: leaf.to("meta"), template.first)
        with _seeded(generator):
            return _read(_new_module(self))

    def zero_moments(self, params: Tree) -> Tree:
        like = next(tree.leaves(params))
        stats = _template(self).first["stats"]
        return tree.map(lambda leaf: torch.zeros(leaf.shape, dtype=like.dtype, device=like.device), stats)

    def count_products(self, shape: tuple[int, int, int]) -> int | None:
        return None

    def check(self, shape: tuple[int, int, int]) -> None:
        if shape[0] != self.channels or shape[1:] != self.size:
            raise UserError(
                f"network {self.factory} was made for {self.channels} channel(s) of {self.size[0]}x{self.size[1]} "
                f"pixels, not for {shape[0]} of {shape[1]}x{shape[2]}."
            )
        _tried(self)

    def train(
        self, params: Tree, x: Tensor, settled: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tree]:
        logits, record = self._pass(params, x, settled or {}, True, real)
        return logits, record.moments

    def embed(
        self, params: Tree, x: Tensor, settled: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tree]:
        if self.head is None:
            raise UserError(
                f"network {self.factory} does not end in a linear layer, on whose input another head could stand; "
                "choose another method, or let forward return what the last nn.Linear gives."
            )
        logits, record = self._pass(params, x, settled or {}, True, real)
        return logits, to_float32(record.inputs[self.head]), record.moments

    def linearize(self, params: Tree, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        return self.train(params, x, real=real)[0], []

    def tangent(
        self, params: Tree, x: Tensor, tape: list[Tensor], direction: Tree, real: Tensor | None = None
    ) -> Tensor:
        refusal = (
            f"network {self.factory} has a layer that PyTorch cannot differentiate forward, which this method needs "
            "({}); replace that layer, or choose another method."
        )
        return forward_tangent(self, params, x, direction, real, refusal)

    def predict(self, params: Tree, stats: Tree, x: Tensor) -> Tensor:
        return self._pass(params, x, stats, train=False)[0]

    def represent(self, params: Tree, stats: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, record = self._pass(params, x, stats, train=False)
        return logits, to_float32(record.inputs.get(self.head or "", logits))

    def _pass(
        self, params: Tree, x: Tensor, stats: Tree, train: bool, real: Tensor | None = None
    ) -> "tuple[Tensor, _Pass]":
        """Call the module; batch normalizations that `stats` has do not look at the batch."""
        template = _template(self)
        record = _Pass(tree.flatten(stats), {}, {}, real)
        tensors = {path.replace("/", "."): leaf for path, leaf in tree.flatten(params).items()}
        constants = template.constants(x.device, next(iter(tensors.values())).dtype)
        with template.passing(record, train), product_precision(self.precision, x.device):
            logits = to_float32(_logits(functional_call(template.module, {**tensors, **constants}, (x,)), self))
        if train:
            order = [name for name in template.tracked if name in record.moments]
            record.moments = tree.unflatten({f"{n}/{k}": v for n in order for k, v in record.moments[n].items()})
        return logits, record


def from_factory(factory: str, channels: int, classes: int, size: tuple[int, int]) -> ModuleNetwork:
    """Return the network of a factory; raise `UserError` where it gives no module, or one that cannot be carried.

    The factory may be a name of `halfmoon.core.hubs`.
    """
    about = ""
    if hubs.package_of(factory) == "transformers":
        about = hubs.portable_name(factory).partition(":")[2]
        factory = hubs.short_name(f"transformers:{about}")
    network = ModuleNetwork(channels, classes, factory=factory, size=size, about=about)
    return replace(network, norm="batch" if _template(network).first["stats"] else "none")


@dataclass
class _Pass:
    """What one pass is given, and what it leaves."""

    settled: Mapping[str, Tensor]  # path/mean and path/var of the normalizations that do not look at the batch
    moments: dict[str, Any]
    inputs: dict[str, Tensor]  # what the linear layers were given
    real: Tensor | None = None  # (B,) bool, the images that are no padding; None: all


class _Batch(nn.Module):
    """A batch normalization that takes its statistics from the pass that is going on."""

    def __init__(self, name: str, old: _NormBase, template: "_Template") -> None:
        super().__init__()
        self.name: str = name
        self.eps: float = old.eps
        self.weight, self.bias = old.weight, old.bias
        self._spoken: Any = template  # no module, so no part of this one

    def forward(self, z: Tensor) -> Tensor:
        """Normalize by the statistics of the pass, or by the batch's own, and then say which they were."""
        record, z = self._spoken.record, to_float32(z)
        if f"{self.name}/mean" in record.settled:
            mean, var = record.settled[f"{self.name}/mean"], record.settled[f"{self.name}/var"]
            return F.batch_norm(z, mean, var, self.weight, self.bias, False, MOMENTUM, self.eps)
        if self.name in record.moments:
            raise UserError(f"layer {self.name} normalizes batches in two places; give each place a layer of its own.")
        out, mean, _, var = normalize_batch(z, record.real, self.weight, self.bias, self.eps)
        record.moments[self.name] = {"mean": mean.detach(), "var": var}
        return out


class _Template:
    """A module without values of its own, into which parameters are put for each pass."""

    def __init__(self, module: nn.Module, network: ModuleNetwork) -> None:
        _check_layers(module, network)
        self.first = _read(module)
        self.record = _Pass({}, {}, {})
        self.tracked = list(_norms(module))
        self.linears = {_path(name): each for name, each in module.named_modules() if isinstance(each, nn.Linear)}
        for name, layer in _norms(module).items():
            parent, _, last = name.replace("/", ".").rpartition(".")
            setattr(module.get_submodule(parent), last, _Batch(name, layer, self))
        self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        for name, layer in self.linears.items():
            layer.register_forward_pre_hook(partial(self._keep_input, name))
        for layer in module.modules():
            for name, parameter in list(layer._parameters.items()):
                if parameter is not None:
                    layer._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
        self.module, self.training = module.train(), True
        self._moved: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}

    def _keep_input(self, name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.record.inputs[name] = inputs[0]

    def constants(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the buffers that no statistics are, where the images lie."""
        if (device, dtype) not in self._moved:
            moved = {n: b.to(device, dtype if b.is_floating_point() else None) for n, b in self.buffers.items()}
            self._moved[device, dtype] = moved
        return self._moved[device, dtype]

    @contextmanager
    def passing(self, record: _Pass, train: bool):
        """Let the layers speak to `record`."""
        if train != self.training:
            self.module.train(train)
            self.training = train
        before, self.record = self.record, record
        try:
            yield
        finally:
            self.record = before


_OWN = threading.local()


def _template(network: ModuleNetwork) -> _Template:
    """Return this thread's template: a pass puts values into the module for as long as it goes on."""
    templates = _OWN.__dict__.setdefault("templates", {})
    key = (network.name, network.channels, network.classes, network.size)
    if key not in templates:
        meta = torch.get_default_device().type == "meta"
        with torch.device("cpu") if meta else nullcontext(), _seeded(torch.Generator().manual_seed(0)):
            templates[key] = _Template(_new_module(network), network)
    return templates[key]


def blank(network: ModuleNetwork) -> nn.Module:
    with torch.device("cpu"), _seeded(torch.Generator().manual_seed(0)):
        return _new_module(network)


def feature_function(network: Network, model: Tree) -> Callable[[Tensor], Tensor]:
    """Return what gives the features (B, F) of `network.represent`; a module's convolutions take in normalizations."""
    if not isinstance(network, ModuleNetwork) or network.head is None:
        return lambda x: network.represent(model["params"], model["stats"], x)[1]
    module, leaves = blank(network).eval().requires_grad_(False), tree.flatten(model)
    places = {name: network.tree_path(name) for name in module.state_dict()}
    module.load_state_dict({name: leaves[place] for name, place in places.items() if place in leaves}, strict=False)
    for row in [each for each in module.modules() if type(each) is nn.Sequential]:
        for (name, conv), (after, norm) in pairwise(list(row.named_children())):
            if type(conv) is nn.Conv2d and type(norm) is nn.BatchNorm2d:
                row.add_module(name, fuse_conv_bn_eval(conv, norm))
                row.add_module(after, nn.Identity())
        own = False  # whether nobody else reads what comes in, so that it may be overwritten
        for name, layer in list(row.named_children()):
            if own and type(layer) in (nn.ReLU, nn.ReLU6):
                row.add_module(name, type(layer)(inplace=True))
            own = type(layer) is nn.Conv2d or (own and type(layer) is nn.Identity)
    module.set_submodule(network.head.replace("/", "."), nn.Identity())
    module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return lambda x: to_float32(_logits(module(x), network))


def _new_module(network: ModuleNetwork) -> nn.Module:
    make = partial(make_named, network.name) if hubs.package_of(network.factory) else load(network.factory, "network")
    try:
        module = make(channels=network.channels, classes=network.classes, size=network.size)
    except UserError:
        raise
    except Exception as error:  # whatever somebody else's code does
        raise UserError(
            f"network {network.factory} cannot be made: make(channels={network.channels}, classes={network.classes}, "
            f"size={network.size}) raised {type(error).__name__}: {one_line(error)[:200]}."
        ) from error
    if not isinstance(module, nn.Module):
        raise UserError(
            f"network {network.factory} is a {type(module).__name__}: its factory has to return an nn.Module."
        )
    return module


def _refusal(network: ModuleNetwork, reason: str, option: str | None = None) -> UserError:
    return UserError(f"network {network.factory} cannot be used: {reason}.", option=option)


def _check_layers(module: nn.Module, network: ModuleNetwork) -> None:
    def refuse(name: str, layer: object, why: str) -> None:
        raise _refusal(network, f"layer {name} ({type(layer).__name__}) {why}")

    for name, layer in module.named_modules():
        if "/" in name:
            refuse(name, layer, "has a slash in its name")
        if isinstance(layer, LazyModuleMixin):
            refuse(name, layer, "does not know its size before its first image")
        if isinstance(layer, _RANDOM) and getattr(layer, "p", 1) > 0:
            refuse(name, layer, "draws random numbers, which no two executors share: set its probability to 0")
        if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
            refuse(name, layer, "tracks the statistics of single images: set track_running_stats to False")
        if isinstance(layer, _NormBase) and not isinstance(layer, _InstanceNorm) and layer.running_mean is None:
            refuse(name, layer, "tracks no statistics, so an image's label would depend on the images beside it")
        if isinstance(layer, nn.RNNBase | nn.modules.adaptive.AdaptiveLogSoftmaxWithLoss):
            refuse(name, layer, "is no layer that vmap can lift")
    if not any(True for _ in module.parameters()):
        raise _refusal(network, "it has no parameters")
    frozen = [name for name, each in module.named_parameters() if not each.requires_grad]
    if frozen:
        raise _refusal(
            network,
            f"its parameter {frozen[0]} has requires_grad False; leave it trainable and list it in {{freeze}} instead, "
            "so that it is neither sent nor averaged",
            option="freeze",
        )


@lru_cache(maxsize=32)
def _tried(network: ModuleNetwork) -> str | None:
    """Return the head that two images show; raise `UserError` where the module is not one function, lifted too.

    The trial passes two images at two clients, as vmap does it with a cohort.
    """
    template = _template(network)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = network.init(torch.Generator().manual_seed(0))
        x = torch.rand(2, network.channels, *network.size)
    before = {name: buffer.clone() for name, buffer in template.constants(x.device, x.dtype).items()}
    outputs: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out}))
        for name, layer in template.linears.items()
    ]
    two = tree.map(lambda leaf: torch.stack([leaf, leaf]), model["params"])
    try:
        with torch.no_grad():
            logits, _ = network.train(model["params"], x)
            head = next((name for name, out in outputs.items() if out is logits), None)
            for hook in hooks:
                hook.remove()
            if logits.shape != (2, network.classes):
                expected = f"for 2 images and {network.classes} classes"
                raise _refusal(network, f"{expected} it returns {tuple(logits.shape)}, not (2, {network.classes})")
            vmap(lambda params: network.train(params, x)[0])(two)
            network.predict(model["params"], model["stats"], x)
    except UserError:
        raise
    except Exception as error:  # whatever somebody else's code does
        words = f"{type(error).__name__}: {one_line(error)[:240]}"
        raise _refusal(network, f"two images at two clients raised {words}") from error
    for name, buffer in template.constants(x.device, x.dtype).items():
        if not torch.equal(buffer, before[name]):
            words = "a network here keeps nothing between passes but the statistics of its batch normalizations"
            raise _refusal(network, f"a pass changes its buffer {name}, and {words}")
    return head


def _logits(out: Any, network: ModuleNetwork) -> Tensor:
    if isinstance(out, Tensor):
        return out
    logits = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise _refusal(network, f"forward returns a {type(out).__name__}, not logits (images, classes)")


def _norms(module: nn.Module) -> dict[str, _NormBase]:
    return {
        _path(name): layer
        for name, layer in module.named_modules()
        if isinstance(layer, _NormBase) and not isinstance(layer, _InstanceNorm)
    }


def _read(module: nn.Module) -> Tree:
    params = {_path(name): each.detach().float().clone() for name, each in module.named_parameters()}
    stats = {
        f"{path}/{name}": cast(Tensor, buffer).detach().float().clone()
        for path, layer in _norms(module).items()
        for name, buffer in (("mean", layer.running_mean), ("var", layer.running_var))
    }
    return {"params": tree.unflatten(params), "stats": tree.unflatten(stats)}


@contextmanager
def _seeded(generator: torch.Generator):
    """Let PyTorch's own generator start from a number that `generator` draws, and leave it as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device="cpu")))
        yield


def _path(name: str) -> str:
    return name.replace(".", "/")

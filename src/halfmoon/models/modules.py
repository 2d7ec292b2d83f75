"""Adapter from any `torch.nn.Module` to a network: a pure function of a tree of parameters.

A factory `make(channels=..., classes=..., size=(height, width))` returns the module. It is called several times (for
shapes, for initial weights, in every process) and must return the same layers each time. Batch normalizations are
replaced by layers that receive fixed statistics or report batch statistics, as in the networks of this package; other
layers are unchanged. A pass is `torch.func.functional_call`, a tangent `torch.func.jvp`.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
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
from halfmoon.models.dropout import KINDS, current_key, drop, dropout_key
from halfmoon.models.hubs import make as make_named
from halfmoon.models.network import Network, forward_tangent
from halfmoon.models.passes import normalize_batch, product_precision, to_float32

_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)
"""Layers that draw random numbers. Those of `dropout.KINDS` are replaced, the others are refused."""


@dataclass(frozen=True)
class ModuleNetwork(Network):
    """A user's `torch.nn.Module` as a pure function; `from_factory` creates it.

    `factory` names it ("my_module:make", or an entry point), `size` is the height and width that it was made for.
    `norm` is "batch" if it has batch normalizations, otherwise "none", even if it has another type of normalization.
    """

    width: int = 1
    factory: str = ""
    size: tuple[int, int] = (32, 32)
    about: str = ""  # of a network of transformers: its configuration, as JSON
    sliceable: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Return the name from which any machine can recreate the module."""
        return f"{self.factory.partition(':')[0]}:{self.about}" if self.about else self.factory

    @property
    def head(self) -> str | None:
        return _test_network(self)

    @property
    def has_dropout(self) -> bool:
        return _template(self).has_dropout

    def init(self, generator: torch.Generator) -> Tree:
        template = _template(self)
        if torch.get_default_device().type == "meta":  # the caller only needs shapes
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
        _test_network(self)

    def train(
        self, params: Tree, x: Tensor, fixed_stats: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tree]:
        logits, record = self._pass(params, x, fixed_stats or {}, train=True, real=real)
        return logits, record.moments

    def embed(
        self, params: Tree, x: Tensor, fixed_stats: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tree]:
        """Compute logits (B, classes), features and batch statistics of images, normalized by the batch.

        Args:
            params: parameters.
            x: images (B, C, H, W).
            fixed_stats: fixed statistics of some layers, which are normalized by these and have no batch statistics.
            real: (B,) bool, False for padding; None if there is none.

        Returns:
            Logits, features (B, F), which are the input of the last linear layer, and the batch statistics.

        Raises:
            UserError: the module does not end in a linear layer.
        """
        if self.head is None:
            raise UserError(
                f"network {self.factory} does not end in a linear layer, on whose input another head could stand; "
                "choose another method, or let forward return what the last nn.Linear gives."
            )
        logits, record = self._pass(params, x, fixed_stats or {}, train=True, real=real)
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

    def check_tangent(self, params: Tree) -> None:
        """Raise UserError if a layer has no forward derivative, by that of two black images."""
        images = torch.zeros(2, self.channels, *self.size, device=next(tree.leaves(params)).device)
        self.tangent(params, images, [], tree.zeros_like(params))

    def predict(self, params: Tree, stats: Tree, x: Tensor) -> Tensor:
        return self._pass(params, x, stats, train=False)[0]

    def represent(self, params: Tree, stats: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, record = self._pass(params, x, stats, train=False)
        return logits, to_float32(record.inputs.get(self.head or "", logits))

    def _pass(
        self, params: Tree, x: Tensor, stats: Tree, train: bool, real: Tensor | None = None
    ) -> "tuple[Tensor, _Pass]":
        """Call the module as a pure function of its parameters (`torch.func.functional_call`).

        The template is a module of this thread, whose parameters are replaced during the call. Its dropouts and batch
        normalizations do not store anything: they read fixed statistics, the mask of padding and the key of dropout masks
        from a record of the pass, and write batch statistics into it.

        Args:
            params: parameters, a tree.
            x: images (B, C, H, W).
            stats: fixed statistics, by layer; batch normalizations without any use those of the batch.
            train: whether layers are in training mode.
            real: (B,) bool, False for padding; None if there is none.

        Returns:
            The logits (B, classes), and the batch statistics and inputs of linear layers that the pass recorded.
        """
        template = _template(self)
        parameters = {path.replace("/", "."): leaf for path, leaf in tree.flatten(params).items()}
        # Buffers that are no running statistics, such as tables of positions.
        constants = template.constants(x.device, next(iter(parameters.values())).dtype)
        record = _Pass(
            fixed_stats=tree.flatten(stats),
            real=real,
            key=current_key() if train else None,
            images=x.shape[0],  # not len(x), which fixes the batch of an exported program
        )
        with template.use_record(record, train), product_precision(self.precision, x.device):
            output = functional_call(template.module, {**parameters, **constants}, (x,))
            logits = to_float32(_logits(output, self))
        if train:
            # In the order of the layers in the module (`tracked`), which the forward pass need not follow.
            moments: dict[str, Tensor] = {}
            for layer in template.tracked:
                for name, value in record.moments.get(layer, {}).items():
                    moments[f"{layer}/{name}"] = value
            record.moments = tree.unflatten(moments)
        return logits, record


def from_factory(factory: str, channels: int, classes: int, size: tuple[int, int]) -> ModuleNetwork:
    """Create the network of a factory, a function that returns an `nn.Module`.

    A network is a description: its module is built when it is first needed, on this or another machine. A folder of
    `transformers` exists on this machine only, so the description has its configuration instead (`about`, JSON). Its
    name is then "transformers:" and that configuration, and `factory` is a short name with the model's type, for
    messages.

    Args:
        factory: "my_module:make", the name of an entry point, or a name of `halfmoon.core.hubs`, such as "timm:NAME".
        channels: channels of images.
        classes: number of classes.
        size: height and width of images.

    Raises:
        UserError: the factory returns no module, or one that cannot be a pure function.
    """
    configuration = ""
    if hubs.package_of(factory) == "transformers":
        name = hubs.portable_name(factory)  # "transformers:{...}"
        configuration = name.removeprefix("transformers:")
        factory = hubs.short_name(name)
    network = ModuleNetwork(channels, classes, factory=factory, size=size, about=configuration)
    has_statistics = bool(_template(network).first["stats"])  # whether a layer is a batch normalization
    return replace(network, norm="batch" if has_statistics else "none")


@dataclass
class _Pass:
    """Inputs of one pass, which the layers read, and its outputs, which they write."""

    fixed_stats: Mapping[str, Tensor]  # path/mean and path/var of the normalizations that do not use batch statistics
    real: Tensor | None  # (B,) bool, the images that are no padding; None: all
    key: Tensor | None  # the key of dropout masks; None: no dropout
    images: int  # B
    # Outputs:
    moments: dict[str, Any] = field(default_factory=dict[str, Any])  # batch statistics by layer
    inputs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # inputs of the linear layers
    dropouts: int = 0  # the number of dropouts until now


class _Dropout(nn.Module):
    """A dropout whose masks follow from the key of the current pass."""

    def __init__(self, name: str, old: nn.modules.dropout._DropoutNd, template: "_Template") -> None:
        super().__init__()
        self.name = name
        self.p = old.p
        self.by_channel = type(old) is not nn.Dropout
        self._template: Any = template  # not a module, so PyTorch does not register it

    def forward(self, z: Tensor) -> Tensor:
        """Apply dropout to activations z, with masks that follow from the key of the pass; without a key, return z.

        Raises:
            UserError: the first dimension of z is not that of the images.
        """
        record = self._template.record
        if record.key is None:
            return z
        if z.shape[0] % record.images:
            raise UserError(
                f"layer {self.name} (Dropout) gets {tuple(z.shape)} for {record.images} images: the first dimension "
                "must be that of the images."
            )
        record.dropouts += 1
        return drop(z, self.p, self.by_channel, record.key, record.dropouts, record.real, record.images)


class _Batch(nn.Module):
    """A batch normalization with the statistics of the current pass."""

    def __init__(self, name: str, old: _NormBase, template: "_Template") -> None:
        super().__init__()
        self.name: str = name
        self.eps: float = old.eps
        self.weight = old.weight
        self.bias = old.bias
        self._template: Any = template  # not a module, so PyTorch does not register it

    def forward(self, z: Tensor) -> Tensor:
        """Apply batch normalization to activations z (B, C, ...).

        If the current pass has fixed statistics of this layer, they are used. Otherwise the statistics of the batch are
        used, and recorded as the layer's moments.

        Raises:
            UserError: the module uses this layer twice in a forward pass.
        """
        record = self._template.record
        z = to_float32(z)
        if f"{self.name}/mean" in record.fixed_stats:
            mean = record.fixed_stats[f"{self.name}/mean"]
            var = record.fixed_stats[f"{self.name}/var"]
            return F.batch_norm(z, mean, var, self.weight, self.bias, training=False, eps=self.eps)
        if self.name in record.moments:
            raise UserError(f"layer {self.name} normalizes batches in two places; give each place a layer of its own.")
        out, mean, _, var = normalize_batch(z, record.real, self.weight, self.bias, self.eps)
        record.moments[self.name] = {"mean": mean.detach(), "var": var}
        return out


class _Template:
    """A module without parameter values, which receives them in each pass."""

    def __init__(self, module: nn.Module, network: ModuleNetwork) -> None:
        """Prepare a module for functional calls: replace batch normalizations and dropouts, and free its parameters.

        Under vmap a layer can neither change its buffers nor draw random numbers: the replacements read and write
        `record`, the inputs and outputs of the current pass.

        Args:
            module: the module, which is changed in place.
            network: the network that it belongs to, for error messages.

        Raises:
            UserError: a layer cannot be part of a pure function.
        """
        _check_layers(module, network)
        self.first = _read(module)  # the initial "params" and "stats", before the parameters are freed below
        self.record = _Pass(fixed_stats={}, real=None, key=None, images=0)
        self.tracked = list(_norms(module))
        self.linears = {_path(name): each for name, each in module.named_modules() if isinstance(each, nn.Linear)}
        # Layers with the same interface, which read statistics and dropout keys from the current pass.
        for name, layer in _norms(module).items():
            parent, _, last = name.replace("/", ".").rpartition(".")
            setattr(module.get_submodule(parent), last, _Batch(name, layer, self))
        dropouts = [(name, layer) for name, layer in module.named_modules() if type(layer) in KINDS]
        for name, layer in dropouts:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, _Dropout(name, cast(Any, layer), self))
        self.has_dropout = any(cast(Any, layer).p > 0 for _, layer in dropouts)
        self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        for name, layer in self.linears.items():
            layer.register_forward_pre_hook(partial(self._record_input, name))
        # Each pass gets the parameters as arguments: those of the module need no memory.
        for layer in module.modules():
            for name, parameter in list(layer._parameters.items()):
                if parameter is not None:
                    layer._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
        self.module = module.train()
        self.training = True
        self._moved: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}  # copies of `buffers`

    def _record_input(self, name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Store the input of a linear layer in the current pass (a forward pre-hook)."""
        self.record.inputs[name] = inputs[0]

    def constants(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the buffers other than statistics, on the given device and in the given dtype."""
        if (device, dtype) not in self._moved:
            moved = {n: b.to(device, dtype if b.is_floating_point() else None) for n, b in self.buffers.items()}
            self._moved[device, dtype] = moved
        return self._moved[device, dtype]

    @contextmanager
    def use_record(self, record: _Pass, train: bool):
        """Let the layers of the module use `record` as the current pass in this block.

        Args:
            record: inputs of the pass, which the layers read, and its outputs, which they write.
            train: whether layers are in training mode.
        """
        if train != self.training:
            self.module.train(train)
            self.training = train
        previous_record = self.record
        self.record = record
        try:
            yield
        finally:
            self.record = previous_record


_THREAD_LOCAL = threading.local()


def _template(network: ModuleNetwork) -> _Template:
    """Return this thread's template of a network, the `nn.Module` whose code its passes call; build it at the first call.

    Threads cannot share a module: `functional_call` replaces its parameters and buffers by those of a client while a pass
    runs.
    """
    templates = _THREAD_LOCAL.__dict__.setdefault("templates", {})
    key = (network.name, network.channels, network.classes, network.size)
    if key not in templates:
        is_meta = torch.get_default_device().type == "meta"
        # Buffers need real values, even if the caller works on the "meta" device. Seeded: building a module draws
        # random numbers, which must not advance the caller's generator.
        with torch.device("cpu") if is_meta else nullcontext(), _seeded(torch.Generator().manual_seed(0)):
            templates[key] = _Template(_new_module(network), network)
    return templates[key]


def build_module(network: ModuleNetwork) -> nn.Module:
    """Build the network's `nn.Module` on the CPU, with initial weights of a fixed seed."""
    with torch.device("cpu"), _seeded(torch.Generator().manual_seed(0)):
        return _new_module(network)


def feature_function(network: Network, model: Tree) -> Callable[[Tensor], Tensor]:
    """Create a function from images to the features (B, F) of `network.represent`, optimized for inference.

    For a `ModuleNetwork` convolutions are fused with their batch normalizations.

    Args:
        network: the network.
        model: "params" and "stats" (running batch-norm statistics).
    """
    if not isinstance(network, ModuleNetwork) or network.head is None:
        return lambda x: network.represent(model["params"], model["stats"], x)[1]
    module = build_module(network).eval().requires_grad_(False)
    leaves = tree.flatten(model)
    paths = {name: network.tree_path(name) for name in module.state_dict()}
    # strict=False: a model has no counters of batches and no constant buffers, which the module has already.
    module.load_state_dict({name: leaves[path] for name, path in paths.items() if path in leaves}, strict=False)
    for sequence in [each for each in module.modules() if type(each) is nn.Sequential]:
        _fuse_layers(sequence)
    # Without its head the module returns the features.
    module.set_submodule(network.head.replace("/", "."), nn.Identity())
    module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return lambda x: to_float32(_logits(module(x), network))


def _fuse_layers(sequence: nn.Sequential) -> None:
    """Fuse convolutions with the batch normalizations after them, and let ReLUs overwrite their input, in place."""
    for (name, conv), (next_name, norm) in pairwise(list(sequence.named_children())):
        if type(conv) is nn.Conv2d and type(norm) is nn.BatchNorm2d:
            sequence.add_module(name, fuse_conv_bn_eval(conv, norm))
            sequence.add_module(next_name, nn.Identity())
    is_private = False  # whether no other layer reads the input, so that it may be overwritten
    for name, layer in list(sequence.named_children()):
        if is_private and type(layer) in (nn.ReLU, nn.ReLU6):
            sequence.add_module(name, type(layer)(inplace=True))
        is_private = type(layer) is nn.Conv2d or (is_private and type(layer) is nn.Identity)


def _new_module(network: ModuleNetwork) -> nn.Module:
    """Build the `nn.Module` of a network by calling its factory: a user's function, or a name of a known package.

    Args:
        network: the network, with the factory's name and arguments.

    Raises:
        UserError: the factory raises an error, or returns no `nn.Module`.
    """
    make = partial(make_named, network.name) if hubs.package_of(network.factory) else load(network.factory, "network")
    try:
        module = make(channels=network.channels, classes=network.classes, size=network.size)
    except UserError:
        raise
    except Exception as error:  # the user's code may raise any error
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


def _find_layer_fault(layer: nn.Module) -> str | None:
    """Describe why a layer cannot be part of a pure function under `torch.func.vmap`; None if it can."""
    if isinstance(layer, LazyModuleMixin):
        return "does not know its size before its first image"
    # Layers that draw random numbers, but not with probability 0. Layers of `KINDS` are replaced by `_Dropout`.
    if isinstance(layer, _RANDOM) and type(layer) not in KINDS and getattr(layer, "p", 1) > 0:
        names = ", ".join(kind.__name__ for kind in KINDS)
        return f"draws random numbers; of such layers only {names} are supported"
    if isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0:
        return "drops attention weights inside of PyTorch: set its dropout to 0"
    if isinstance(layer, _InstanceNorm):
        if layer.track_running_stats:
            return "tracks the statistics of single images: set track_running_stats to False"
    elif isinstance(layer, _NormBase) and layer.running_mean is None:
        return "tracks no statistics, so an image's label would depend on the images beside it"
    if isinstance(layer, nn.RNNBase | nn.modules.adaptive.AdaptiveLogSoftmaxWithLoss):
        return "is no layer that vmap can lift"
    return None


def _check_layers(module: nn.Module, network: ModuleNetwork) -> None:
    """Check that a user's module can be a pure function of its parameters, which `torch.func.vmap` accepts.

    Args:
        module: the module.
        network: the network that it belongs to, for error messages.

    Raises:
        UserError: a layer draws random numbers, tracks statistics in an unknown way, or has no fixed parameters; or a
            parameter is frozen.
    """
    for name, layer in module.named_modules():
        fault = "has a slash in its name" if "/" in name else _find_layer_fault(layer)
        if fault is not None:
            raise _refusal(network, f"layer {name} ({type(layer).__name__}) {fault}")
    parameters = dict(module.named_parameters())
    if not parameters:
        raise _refusal(network, "it has no parameters")
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise _refusal(
            network,
            f"its parameter {frozen[0]} has requires_grad False; leave it trainable and list it in {{freeze}} instead, "
            "so that it is neither sent nor averaged",
            option="freeze",
        )


@lru_cache(maxsize=32)
def _test_network(network: ModuleNetwork) -> str | None:
    """Test that a user's module is a pure function, and find its last linear layer.

    It is run on two images, for one client and for two under `torch.func.vmap`, in training and in evaluation.

    Args:
        network: the network of the module.

    Returns:
        The path of the linear layer whose output the module returns; None if there is none.

    Raises:
        UserError: the module raises an error, returns no logits of the expected shape, or changes its buffers.
    """
    template = _template(network)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = network.init(torch.Generator().manual_seed(0))
        x = torch.rand(2, network.channels, *network.size)
    buffers_before = {name: buffer.clone() for name, buffer in template.constants(x.device, x.dtype).items()}
    outputs: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out}))
        for name, layer in template.linears.items()
    ]
    params_of_two_clients = tree.map(lambda leaf: torch.stack([leaf, leaf]), model["params"])
    try:
        # With a key, so that dropouts are tried as well.
        with torch.no_grad(), dropout_key(torch.tensor(0)):
            logits, _ = network.train(model["params"], x)
            # The head is the linear layer whose output is returned unchanged.
            head = next((name for name, out in outputs.items() if out is logits), None)
            for hook in hooks:
                hook.remove()
            if logits.shape != (2, network.classes):
                expected = f"for 2 images and {network.classes} classes"
                raise _refusal(network, f"{expected} it returns {tuple(logits.shape)}, not (2, {network.classes})")
            if template.has_dropout:
                # A number that divides the sizes of few layers, so that a layer which does not get images is found.
                network.train(model["params"], x[:1].expand(11, *x.shape[1:]))
            vmap(lambda params: network.train(params, x)[0])(params_of_two_clients)
            network.predict(model["params"], model["stats"], x)
    except UserError:
        raise
    except Exception as error:  # the user's code may raise any error
        cause = f"{type(error).__name__}: {one_line(error)[:240]}"
        raise _refusal(network, f"two images at two clients raised {cause}") from error
    for name, buffer in template.constants(x.device, x.dtype).items():
        if not torch.equal(buffer, buffers_before[name]):
            rule = "a network here keeps nothing between passes but the statistics of its batch normalizations"
            raise _refusal(network, f"a pass changes its buffer {name}, and {rule}")
    return head


def _logits(out: Any, network: ModuleNetwork) -> Tensor:
    """Get the logits from the output of a module: a tensor, or an object or mapping with "logits" (transformers)."""
    if isinstance(out, Tensor):
        return out
    logits = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise _refusal(network, f"forward returns a {type(out).__name__}, not logits (images, classes)")


def _norms(module: nn.Module) -> dict[str, _NormBase]:
    """Collect the batch normalizations of a module by path; instance normalizations have no batch statistics."""
    return {
        _path(name): layer
        for name, layer in module.named_modules()
        if isinstance(layer, _NormBase) and not isinstance(layer, _InstanceNorm)
    }


def _read(module: nn.Module) -> Tree:
    """Copy a module's parameters and running statistics to a tree {"params", "stats"}, in float32."""
    params = {_path(name): each.detach().float().clone() for name, each in module.named_parameters()}
    stats: dict[str, Tensor] = {}
    for path, layer in _norms(module).items():
        for name, buffer in (("mean", layer.running_mean), ("var", layer.running_var)):
            stats[f"{path}/{name}"] = cast(Tensor, buffer).detach().float().clone()
    return {"params": tree.unflatten(params), "stats": tree.unflatten(stats)}


@contextmanager
def _seeded(generator: torch.Generator):
    """Seed PyTorch's global generator with a number drawn from `generator`, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device="cpu")))
        yield


def _path(name: str) -> str:
    """Convert PyTorch's name of a layer or parameter, "block.0.weight", to a path in a tree, "block/0/weight"."""
    return name.replace(".", "/")

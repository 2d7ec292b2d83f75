"""How fast this machine is: a few timed steps of a network, timed once and kept in the user's cache folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from halfmoon import disk, tree
from halfmoon.augment import Normalize, View
from halfmoon.data.draw import Views, recipe
from halfmoon.memory import keep_memory
from halfmoon.models import NETWORKS, Network
from halfmoon.objectives.base import supervised
from halfmoon.optim import SGD, Adam, Optimizer
from halfmoon.sweep.folder import machine
from halfmoon.tree import Tree

FILE, FORMAT = "timings.json", 1
LIMIT = 0.25
"""Seconds after which a kind of pass is not timed once more; a single one takes at most about so long."""
LEAST, REPEATS = 2, 5
"""How often it is timed at least and at most."""
SMALL = 4
LARGE = {"cpu": 64, "cuda": 256}
"""Images of the two passes, of each client, from which a pass's fixed cost and that of an image follow."""
LOOKED, VIEWED = 256, 256
"""Images of one timed pass of an evaluation, and of one timed call of a view."""

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Signature:
    """All of a run that decides how fast its network is.

    `image` is (C, H, W), `together` the clients that train as one program, `width` None the network's own. The number
    of classes is left out: the head is a small part of every network here.
    """

    network: str
    width: int | None
    norm: str
    image: tuple[int, int, int]
    together: int
    optimizer: str
    device: str
    threads: int


@dataclass(frozen=True)
class Speed:
    """Seconds of passes in training, of an image's look in evaluation, and of an optimizer step of one client.

    A pass of n images takes `forward_pass` + n * `forward`, and its way back `backward_pass` + n * `backward`.
    """

    forward_pass: float
    forward: float
    backward_pass: float
    backward: float
    look: float
    update: float

    def training(self, forward: float, backward: float, rows: float) -> float:
        """Return the seconds of so many images forward and backward, in passes of `rows` images each."""
        there = forward * (self.forward + self.forward_pass / rows)
        return there + backward * (self.backward + self.backward_pass / rows)


class Timings:
    """What has been timed on this machine; what has not is timed when it is asked for.

    They lie in `folder`/timings.json. A file that is damaged or of another format counts as none, and one that cannot
    be written is not. `tell` is called before the first thing is timed.
    """

    def __init__(self, folder: Path, tell: Callable[[Path], None] = lambda path: None) -> None:
        """Read what is there."""
        self.path, self.tell = folder / FILE, tell
        self.machine = machine()
        self._here = (
            self.machine["gpu"] or self.machine["cpu"],
            self.machine["cores"],
            *(metadata.version(name) for name in ("torch", "halfmoon")),
        )
        self._told = False
        self._entries = _entries(self.path)

    def kept(self, what: str, facts: Any, read: Callable[[Any], Kind], measure: Callable[[], Kind]) -> Kind:
        """Return what is kept of `facts`, which say all that it depends on but this machine; else measure and keep it.

        What is kept is the fields of a dataclass as JSON, which `read` turns into one again.
        """
        key = self._key(what, facts)
        with suppress(LookupError, TypeError, ValueError, AttributeError):  # nothing is kept, or nothing of use
            return read(self._entries[key])
        if not self._told:
            self.tell(self.path)
            self._told = True
        found = measure()
        self._entries = {**_entries(self.path), **self._entries, key: asdict(found)}  # type: ignore[call-overload]
        self._save()
        return found

    def speed(self, signature: Signature) -> Speed:
        """Return the speed of a network."""
        return self.kept(
            "network", astuple(signature), lambda kept: Speed(**_numbers(kept)), lambda: measure(signature)
        )

    def _key(self, what: str, facts: Any) -> str:
        return json.dumps([what, *self._here, facts])

    def _save(self) -> None:
        words = json.dumps({"format": FORMAT, "entries": self._entries}, indent=1) + "\n"
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            disk.replace(self.path, words.encode())


def cache_folder() -> Path:
    """Return the user's cache folder of halfmoon: $XDG_CACHE_HOME/halfmoon, or ~/.cache/halfmoon."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path is to be ignored.
    base = Path(home) if Path(home).is_absolute() else Path(os.path.expanduser("~")) / ".cache"
    return base / "halfmoon"


def measure(signature: Signature) -> Speed:
    """Time training and evaluation of a network on random images, and its optimizer's step.

    With several threads on a busy machine each waits for the others, and all take tens of times what one alone would.
    Where a few images show that, one thread is timed in their place: what is kept is to be true later on.
    """
    threads = signature.threads
    if threads > 1 and _probe(signature, threads) > _probe(signature, 1):
        threads = 1
    return _measured(signature, threads)


def _probe(signature: Signature, threads: int) -> float:
    device = torch.device(signature.device)
    with computing(threads), torch.no_grad():
        g = torch.Generator().manual_seed(0)
        network = _network(signature)
        model = tree.to(network.init(g), device)
        passes = _Passes(network, model["params"], model["stats"], signature.image, device, g)
        few = passes.images(SMALL)
        return min(_once(partial(passes.teach, *few), device) for _ in range(1 + LEAST))


def _measured(signature: Signature, threads: int) -> Speed:
    device, k = torch.device(signature.device), signature.together
    with computing(threads), torch.no_grad():
        if device.type == "cpu":
            keep_memory()
        g = torch.Generator().manual_seed(0)
        network = _network(signature)
        model = tree.to(network.init(g), device)
        optimizer: Optimizer = {"adam": Adam(), "sgd": SGD(momentum=0.9)}[signature.optimizer]
        one = _Passes(network, model["params"], model["stats"], signature.image, device, g)
        many = _Passes(network, model["params"], model["stats"], signature.image, device, g, k)
        large = _affordable(many, many.teach, LARGE[device.type])
        forward_pass, forward = _line(many, many.forward, large)
        both_pass, both = _line(many, many.teach, large)
        looked = _affordable(one, one.look, LOOKED)
        look = seconds(partial(one.look, *one.images(looked)), device) / looked
        state, step = optimizer.init(many.params), partial(optimizer.step, many.params, many.params)
        update = seconds(lambda: step(state), device)
    # The way back is no shorter than the way there; only noise says so.
    backward_pass, backward = max(both_pass - forward_pass, 0.0), max(both - forward, forward)
    return Speed(forward_pass / k, forward / k, backward_pass / k, backward / k, look, update / k)


def _line(passes: _Passes, call: Callable[[Tensor, Tensor], object], large: int) -> tuple[float, float]:
    """Return the seconds of a pass, and of each image in it, from passes of few and of `large` images."""
    most = seconds(partial(call, *passes.images(large)), passes.device)
    if large < 4 * SMALL:  # so slow that nothing but images counts
        return 0.0, most / large
    least = seconds(partial(call, *passes.images(SMALL)), passes.device)
    each = max(most - least, 0.0) / (large - SMALL)
    fixed = max(least - SMALL * each, 0.0)
    return fixed, (most - fixed) / large


def view_seconds(views: Views, shape: tuple[int, int, int], device: torch.device) -> dict[str, float]:
    """Return the seconds that each view of an image of `shape` (C, H, W) takes to draw and make, by name.

    On a processor by one thread: more of them gain little on pixels.
    """
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (VIEWED, *shape), generator=g, dtype=torch.uint8).to(device)
    normalize = Normalize((0.5,) * shape[0], (0.5,) * shape[0])

    def make(view: View) -> float:
        return seconds(lambda: view.apply(images, view.draw(VIEWED, shape, g), normalize), device) / VIEWED

    with computing(1):
        return {"labeled": make(views.labeled), **{name: make(recipe(views, name)) for name in views.unlabeled}}


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of a few calls.

    Not their median: another process on the machine can only slow one down, and what is kept is to be true later on.
    """
    times = [_once(call, device)]
    while len(times) < REPEATS and (len(times) < LEAST or sum(times) < LIMIT):
        times.append(_once(call, device))
    return min(times)


@contextmanager
def computing(threads: int) -> Iterator[None]:
    """Compute with so many processor threads, and leave PyTorch as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Passes:
    """The passes of one network; with `clients` above 1 those of so many, lifted to one program."""

    def __init__(
        self,
        network: Network,
        params: Tree,
        stats: Tree,
        image: tuple[int, int, int],
        device: torch.device,
        generator: torch.Generator,
        clients: int = 1,
    ) -> None:
        self.network, self.stats, self.image, self.device = network, stats, image, device
        self.generator, self.clients = generator, clients
        self.params = tree.channels_last(params) if device.type == "cpu" else params
        if clients > 1:
            self.params = tree.stack([params] * clients)

    def images(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return random images (rows, C, H, W) and labels (rows,), of each client where there are several.

        They are as smooth as photographs: on a processor, pooling takes up to twice as long on noise.
        """
        lead = (self.clients, rows) if self.clients > 1 else (rows,)
        channels, height, width = self.image
        coarse = torch.randn(self.clients * rows, channels, 4, 4, generator=self.generator)
        smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
        x = smooth.reshape(*lead, *self.image).to(self.device)
        if self.clients == 1 and self.device.type == "cpu":
            x = x.contiguous(memory_format=torch.channels_last)
        return x, torch.randint(0, self.network.classes, lead, generator=self.generator).to(self.device)

    def forward(self, x: Tensor, y: Tensor) -> object:
        """Pass the images in training."""
        return self._lifted(lambda params, x: self.network.train(params, x)[0])(self.params, x)

    def teach(self, x: Tensor, y: Tensor) -> object:
        """Pass the images forward and backward."""
        return self._lifted(grad_and_value(self._loss))(self.params, x, y)

    def look(self, x: Tensor, y: Tensor) -> object:
        """Pass the images in evaluation."""
        return self.network.predict(self.params, self.stats, x)

    def _loss(self, params: Tree, x: Tensor, y: Tensor) -> Tensor:
        return supervised(self.network.train(params, x)[0], y)

    def _lifted(self, function: Callable) -> Callable:
        return vmap(function) if self.clients > 1 else function


def _affordable(passes: _Passes, call: Callable[[Tensor, Tensor], object], rows: int) -> int:
    """Return the images of a pass that takes no longer than the limit: `rows`, or less."""
    small = passes.images(2)
    each = min(_once(lambda: call(*small), passes.device) for _ in range(LEAST)) / 2
    return max(SMALL, min(rows, int(LIMIT / each)))


def now(device: torch.device) -> float:
    """Return the time in seconds once `device` has done what it was told.

    Where one processor thread does all, it is the time that this thread has computed: while another process had the
    processor, it stands still.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.thread_time() if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


def _once(call: Callable[[], object], device: torch.device) -> float:
    began = now(device)
    call()
    return now(device) - began


def _network(signature: Signature) -> Network:
    make = partial(NETWORKS[signature.network], channels=signature.image[0], norm=signature.norm)
    return make() if signature.width is None else make(width=signature.width)


def _entries(path: Path) -> dict[str, Any]:
    """Return what a file of timings holds; nothing where it is damaged or of another format."""
    facts = disk.read_json(path) or {}
    entries = facts.get("entries")
    return entries if facts.get("format") == FORMAT and isinstance(entries, dict) else {}


def _numbers(kept: Mapping[str, Any]) -> dict[str, float]:
    found = {name: float(value) for name, value in kept.items()}
    if not all(0 <= value < 1e6 for value in found.values()):
        raise ValueError("a time is no number of seconds")
    return found

"""Checks of uploads before a model learns from them: names, shapes, finite values, plausible counts, and norms.

Every check returns its reason in words that name no site: the caller knows which one it is. Quotes from an upload are
cut and escaped, for they end up in logs.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from halfmoon.api.types import WeightedMetric
from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.engine.sampling import Amount
from halfmoon.federation.protocol.messages import Reply
from halfmoon.federation.protocol.tree_spec import TreeSpec, iterate_leaves

FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
WHOLES = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}

MAX_COUNTS_PER_IMAGE = 2
"""A labeled image may count among the unlabeled ones as well (`FederatedDataset.reuse_labeled`): twice the images at
most."""

MAX_PASSES = 1024
"""How often a client update may read each image outside its steps. `ClientUpdate.images_outside_steps` is once the unlabeled rows in
most methods, twice in FedDB, all rows once in a count of statistics, one image more in FedMatch, and 1 + `peers` times
in SemiFed: that one is an option, 10 by default, so the bound is wide. It stops nonsense in a cost that is reported."""

MAX_BYTES = 2**40
"""Bytes of a client update's traffic and memory, at most: 1 TiB, beyond any model of this library."""


def check_schema(
    upload: Tree, samples: Mapping[str, Tree], pattern: TreeSpec | None, upload_spec: UploadSpec | None = None
) -> str | None:
    """Return the first fault of an upload and its samples, None where they are usable.

    Names, shapes and types must be those of a `pattern`. With an `upload_spec` nothing is there that the client update does
    not declare. Values are finite, variances and squares from 0, samples three scalars with a count above 0.
    """
    return next(_faults(upload, samples, pattern, upload_spec), None)


def _faults(upload: Any, samples: Any, pattern: TreeSpec | None, upload_spec: UploadSpec | None) -> Iterator[str]:
    if not isinstance(upload, dict) or not isinstance(samples, dict):
        yield "it is no tree of tensors"
        return
    own = dict(iterate_leaves(upload))
    statistics: set[tuple[str, ...]] = set()
    if upload_spec is not None:
        yield from _undeclared(upload, upload_spec)
        statistics |= {("update", name) for name in upload_spec.statistics}
        statistics |= {("aux", name) for name in upload_spec.names("statistic")}
    if pattern is not None:
        yield from _differences(own, pattern)
    for path, leaf in own.items():
        if leaf is None:
            continue
        if leaf.dtype not in FLOATS | WHOLES:
            yield f"{_quote(path)} holds {_kind(leaf.dtype)}, which no method sends"
        elif not bool(leaf.isfinite().all()):
            yield f"{_quote(path)} holds values that are not finite"
        elif path[:2] in statistics and path[-1] == "var" and bool((leaf < 0).any()):
            yield f"{_quote(path)} holds a variance below 0"
    for name, sample in samples.items():
        fault = _sample_fault(sample)
        if fault is not None:
            yield f"its sample {_quote((name,))} {fault}"


def _undeclared(upload: Tree, upload_spec: UploadSpec) -> Iterator[str]:
    yield from (f"{_quote((name,))} was not asked for" for name in upload if name not in ("update", "weight", "aux"))
    if "update" not in upload or not isinstance(upload.get("weight"), Tensor):
        yield "it is no update with a weight"
        return
    for part, names in (("update", upload_spec.update), ("aux", upload_spec.aux)):
        branch = upload.get(part, {})
        if not isinstance(branch, dict):
            yield f"its {part} is no tree"
            return
        yield from (f"{_quote((part, name))} was not asked for" for name in branch if name not in names)


def _differences(own: Mapping[tuple[str, ...], Tensor | None], pattern: TreeSpec) -> Iterator[str]:
    """Yield where an upload departs from the pattern. Paths are compared part by part: a key may hold a "/" itself."""
    spec = {tuple(path.split("/")): kind for path, kind in pattern.items()}
    yield from (f"{_quote(path)} is missing" for path in spec if path not in own)
    yield from (f"{_quote(path)} was not asked for" for path in own if path not in spec)
    for path, kind in spec.items():
        leaf = own[path]
        if kind is None or leaf is None:
            if (kind is None) != (leaf is None):
                yield f"{_quote(path)} is {'empty, not a tensor' if leaf is None else 'a tensor, not empty'}"
            continue
        shape, dtype = kind
        if tuple(leaf.shape) != shape:
            yield f"{_quote(path)} has the shape {_cut(str(tuple(leaf.shape)))}, not {shape}"
        elif leaf.dtype != dtype:
            yield f"{_quote(path)} holds {_kind(leaf.dtype)}, not {_kind(dtype)}"


def _sample_fault(sample: Any) -> str | None:
    if not isinstance(sample, dict) or set(sample) != set(WeightedMetric._fields):
        return f"is not {', '.join(WeightedMetric._fields)}"
    values: list[Any] = [sample[name] for name in WeightedMetric._fields]
    if not all(isinstance(v, Tensor) and v.dim() == 0 and v.dtype in FLOATS for v in values):
        return "is not three single numbers"
    total, squares, count = (float(value) for value in values)
    if not all(math.isfinite(value) for value in (total, squares, count)):
        return "is not finite"
    if count <= 0:
        return f"counts {count:g} values"
    return f"has the sum of squares {squares:g}" if squares < 0 else None


def check_counts(reply: Reply, most: Amount, images: int, upload_spec: UploadSpec | None = None) -> str | None:
    """Return which count of a reply cannot be, of a site with `images` images that trains on `most` at most."""
    return next(_impossible(reply, most, images, upload_spec), None)


def _impossible(reply: Reply, most: Amount, images: int, upload_spec: UploadSpec | None) -> Iterator[str]:
    for name, count, limit in zip(Amount._fields, reply.amount, most, strict=True):
        if not 0 <= count <= limit:
            unit = "" if name in ("steps", "epochs") else " images a step"
            yield f"it counts {_digits(count)} {name}{unit}, of {limit} at most for its {images} images"
    if upload_spec is not None:
        yield from _out_of_range(Upload.from_tree(reply.upload), upload_spec, images)
    broadcast, upload = reply.traffic
    counts = {
        "images swept": (reply.images_outside_steps, MAX_PASSES * images + 1),
        "bytes received": (broadcast, MAX_BYTES),
        "bytes sent": (upload, tree.nbytes(reply.upload)),
        "bytes remembered": (reply.memory_bytes, MAX_BYTES),
    }
    for unit, (count, limit) in counts.items():
        if not 0 <= count <= limit:
            yield f"it counts {_digits(count)} {unit}, of {limit} at most"


def _out_of_range(upload: Upload, upload_spec: UploadSpec, images: int) -> Iterator[str]:
    limits: dict[str, tuple[Tree, float]] = {
        "weight": ({"": upload.weight}, max(1, MAX_COUNTS_PER_IMAGE * images) if upload_spec.weight == "rows" else 1)
    }
    limits |= {name: ({"": upload.aux[name]}, 1) for name in upload_spec.names("mark") if name in upload.aux}
    limits |= {name: ({"": upload.aux[name]}, math.inf) for name in upload_spec.names("count") if name in upload.aux}
    for name, (part, limit) in limits.items():
        wrong = [x for leaf in tree.leaves(part) for x in leaf.flatten().tolist() if not 0 <= x <= limit]
        if wrong:
            bound = f"between 0 and {limit}" if limit < math.inf else "0 or more"
            yield f"its {name} is {wrong[0]:g}, not {bound}, the most for {images} images"


def update_norm(upload: Upload, broadcast: Tree, upload_spec: UploadSpec) -> float:
    """Return the Euclidean norm of a site's update, in float64: of up - down, and of "number"s as they are.

    Statistics measure images and would drown the parameters (a variance may be 1e4); they, weights, marks and counts
    are left out.
    """
    before = tree.flatten(broadcast)
    update = {name: part for name, part in upload.update.items() if name not in upload_spec.statistics}
    changes = [leaf.double() - before[path] for path, leaf in tree.flatten(update).items() if leaf.dtype in FLOATS]
    numbers = tree.flatten({name: upload.aux[name] for name in upload_spec.names("number") if name in upload.aux})
    changes += [leaf.double() for leaf in numbers.values() if leaf.dtype in FLOATS]
    return math.hypot(*(float(torch.linalg.vector_norm(leaf)) for leaf in changes))


def check_norm(norms: Mapping[str, float], bound: float) -> dict[str, str]:
    """Return why updates are refused: over `bound` (0: none) times the cohort's median norm, or not finite.

    Fewer than three sites are not checked. The lower of two medians counts, so that a huge half of a cohort is found; a
    median of 0 refuses nobody.
    """
    if not bound or len(norms) < 3:
        return {}
    median = statistics.median_low([norm if math.isfinite(norm) else math.inf for norm in norms.values()])
    faults: dict[str, str] = {}
    for name, norm in norms.items():
        if not math.isfinite(norm):
            faults[name] = f"its update has the norm {norm:g} (the cohort's median is {median:.3g})"
        elif median > 0 and norm > bound * median:
            faults[name] = (
                f"its update has the norm {norm:.3g}, over {bound:g} times the cohort's median of {median:.3g}"
            )
    return faults


def _quote(path: tuple[str, ...]) -> str:
    return _cut(repr("/".join(path)))


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digits(count: int) -> str:
    return str(count) if count < 10**18 else "more than 10^18"

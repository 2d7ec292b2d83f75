"""Checks of uploads before they change the model: names, shapes, finite values, plausible counts, and norms.

Each check returns a fault as text that does not name the site; the caller adds it. Text from an upload is truncated and
escaped, because faults are written to logs.
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

FLOAT_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
INTEGER_DTYPES = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}

MAX_COUNTS_PER_IMAGE = 2
"""A labeled image may also count as unlabeled (`FederatedDataset.reuse_labeled`)."""

MAX_PASSES = 1024
"""How often a client update may pass each image through a network outside its steps.

Most methods do it once for unlabeled images, FedDB twice, SemiFed 1 + `peers` times. `peers` is an option, so the bound
is wide: it only rejects counts that cannot be true, because the counts are reported as the cost of a run.
"""

MAX_BYTES = 2**40
"""Largest traffic and client memory of a client update: 1 TiB, more than any model of this library needs."""


def check_schema(
    upload: Tree, samples: Mapping[str, Tree], pattern: TreeSpec | None, upload_spec: UploadSpec | None = None
) -> str | None:
    """Check the structure and the values of an upload and its metrics.

    Values must be finite, variances and squares non-negative, and each metric three scalars with a positive count.

    Args:
        upload: the tree of the upload.
        samples: the metrics, as `WeightedMetric` fields by name.
        pattern: names, shapes and dtypes that the upload must have; None to skip this.
        upload_spec: what the client update declares to send; None to skip this.

    Returns:
        The first fault, or None.
    """
    return next(_faults(upload, samples, pattern, upload_spec), None)


def _faults(up: Any, samples: Any, pattern: TreeSpec | None, upload_spec: UploadSpec | None) -> Iterator[str]:
    if not isinstance(up, dict) or not isinstance(samples, dict):
        yield "it is not a tree of tensors"
        return
    received = dict(iterate_leaves(up))
    statistics: set[tuple[str, ...]] = set()
    if upload_spec is not None:
        yield from _undeclared(up, upload_spec)
        statistics |= {("update", name) for name in upload_spec.statistics}
        statistics |= {("aux", name) for name in upload_spec.names("statistic")}
    if pattern is not None:
        yield from _differences(received, pattern)
    for path, leaf in received.items():
        if leaf is None:
            continue
        if leaf.dtype not in FLOAT_DTYPES | INTEGER_DTYPES:
            yield f"{_quote(path)} has dtype {_dtype_name(leaf.dtype)}, which no method sends"
        elif not bool(leaf.isfinite().all()):
            yield f"{_quote(path)} has values that are not finite"
        elif path[:2] in statistics and path[-1] == "var" and bool((leaf < 0).any()):
            yield f"{_quote(path)} has a variance below 0"
    for name, sample in samples.items():
        fault = _sample_fault(sample)
        if fault is not None:
            yield f"its sample {_quote((name,))} {fault}"


def _undeclared(up: Tree, upload_spec: UploadSpec) -> Iterator[str]:
    yield from (f"{_quote((name,))} was not requested" for name in up if name not in ("update", "weight", "aux"))
    if "update" not in up or not isinstance(up.get("weight"), Tensor):
        yield "it is not an update with a weight"
        return
    for section, names in (("update", upload_spec.update), ("aux", upload_spec.aux)):
        branch = up.get(section, {})
        if not isinstance(branch, dict):
            yield f"its {section} is not a tree"
            return
        yield from (f"{_quote((section, name))} was not requested" for name in branch if name not in names)


def _differences(received: Mapping[tuple[str, ...], Tensor | None], pattern: TreeSpec) -> Iterator[str]:
    """Yield the differences between an upload and its spec.

    Paths are compared as tuples, because a key of a forged upload may itself contain a "/".
    """
    spec = {tuple(path.split("/")): kind for path, kind in pattern.items()}
    yield from (f"{_quote(path)} is missing" for path in spec if path not in received)
    yield from (f"{_quote(path)} was not requested" for path in received if path not in spec)
    for path, kind in spec.items():
        leaf = received[path]
        if kind is None or leaf is None:
            if (kind is None) != (leaf is None):
                yield f"{_quote(path)} is {'empty, not a tensor' if leaf is None else 'a tensor, not empty'}"
            continue
        shape, dtype = kind
        if tuple(leaf.shape) != shape:
            yield f"{_quote(path)} has the shape {_cut(str(tuple(leaf.shape)))}, not {shape}"
        elif leaf.dtype != dtype:
            yield f"{_quote(path)} has dtype {_dtype_name(leaf.dtype)}, not {_dtype_name(dtype)}"


def _sample_fault(sample: Any) -> str | None:
    if not isinstance(sample, dict) or set(sample) != set(WeightedMetric._fields):
        return f"is not {', '.join(WeightedMetric._fields)}"
    values: list[Any] = [sample[name] for name in WeightedMetric._fields]
    if not all(isinstance(value, Tensor) and value.dim() == 0 and value.dtype in FLOAT_DTYPES for value in values):
        return "is not three single numbers"
    total, squares, count = (float(value) for value in values)
    if not all(math.isfinite(value) for value in (total, squares, count)):
        return "is not finite"
    if count <= 0:
        return f"counts {count:g} values"
    return f"has the sum of squares {squares:g}" if squares < 0 else None


def check_counts(reply: Reply, max_amount: Amount, images: int, upload_spec: UploadSpec | None = None) -> str | None:
    """Check the counts that a reply reports.

    Args:
        reply: the reply with its upload.
        max_amount: the most that the site may train on.
        images: the number of images at the site.
        upload_spec: what the client update declares to send; None to skip the values in the upload.

    Returns:
        The first count that is impossible, as text, or None.
    """
    return next(_impossible_counts(reply, max_amount, images, upload_spec), None)


def _impossible_counts(reply: Reply, max_amount: Amount, images: int, upload_spec: UploadSpec | None) -> Iterator[str]:
    for name, count, limit in zip(Amount._fields, reply.amount, max_amount, strict=True):
        if not 0 <= count <= limit:
            unit = "" if name in ("steps", "epochs") else " images a step"
            yield f"it counts {_digits(count)} {name}{unit}, of {limit} at most for its {images} images"
    if upload_spec is not None:
        yield from _out_of_range(Upload.from_tree(reply.upload), upload_spec, images)
    received_bytes, sent_bytes = reply.traffic
    counts = {
        "images outside steps": (reply.images_outside_steps, MAX_PASSES * images + 1),
        "bytes received": (received_bytes, MAX_BYTES),
        "bytes sent": (sent_bytes, tree.nbytes(reply.upload)),
        "bytes of client memory": (reply.memory_bytes, MAX_BYTES),
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
    for name, (values, limit) in limits.items():
        numbers = [number for leaf in tree.leaves(values) for number in leaf.flatten().tolist()]
        wrong = [number for number in numbers if not 0 <= number <= limit]
        if wrong:
            bound = f"between 0 and {limit}" if limit < math.inf else "0 or more"
            yield f"its {name} is {wrong[0]:g}, not {bound}, the most for {images} images"


def update_norm(up: Upload, down: Tree, upload_spec: UploadSpec) -> float:
    """Compute the Euclidean norm of a site's update, in float64.

    Parameters count with their difference to the download, auxiliary "number"s with their values. Statistics are left
    out: they measure images, and a variance of 1e4 would hide the parameters. So are weights, marks and counts.
    """
    before = tree.flatten(down)
    update = {name: section for name, section in up.update.items() if name not in upload_spec.statistics}
    changes = [
        leaf.double() - before[path] for path, leaf in tree.flatten(update).items() if leaf.dtype in FLOAT_DTYPES
    ]
    numbers = tree.flatten({name: up.aux[name] for name in upload_spec.names("number") if name in up.aux})
    changes += [leaf.double() for leaf in numbers.values() if leaf.dtype in FLOAT_DTYPES]
    return math.hypot(*(float(torch.linalg.vector_norm(leaf)) for leaf in changes))


def check_norm(norms: Mapping[str, float], bound: float) -> dict[str, str]:
    """Find updates whose norm is far above the median of the cohort, or not finite.

    Fewer than three sites are not checked. Of two medians the lower one counts, so that half of a cohort with huge
    updates is found. A median of 0 rejects no update.

    Args:
        norms: norms by site.
        bound: the largest norm, as a multiple of the median; 0 for no check.

    Returns:
        The fault of each rejected update, by site.
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


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digits(count: int) -> str:
    return str(count) if count < 10**18 else "more than 10^18"

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

    Values must be finite, variances and sums of squares non-negative, and each metric three scalars (sum, sum of
    squares and count) with a positive count.

    Args:
        upload: the tree of the upload, nested dicts of tensors: "update", "weight" and "aux".
        samples: the metrics, as `WeightedMetric` fields by name.
        pattern: names, shapes and dtypes of all tensors, as computed for this network; None if they are unknown.
        upload_spec: what the method declares for every network: the names of the sections of "update" and "aux", and
            which are statistics; None if the upload is masked.

    Returns:
        The first fault, or None.
    """
    return next(_find_schema_faults(upload, samples, pattern, upload_spec), None)


def _find_schema_faults(
    upload: Any, samples: Any, pattern: TreeSpec | None, upload_spec: UploadSpec | None
) -> Iterator[str]:
    """Yield each fault that `check_schema` looks for, as text.

    An upload has the sections "update" (parameters and statistics), "weight" (a scalar) and "aux" (other tensors).

    Args:
        upload: the tree of the upload, from a site that may be hostile, so it may be anything.
        samples: the metrics, from the site as well.
        pattern: names, shapes and dtypes that the upload must have; None to skip this.
        upload_spec: the sections that the client update declares to send; None to skip this.
    """
    if not isinstance(upload, dict) or not isinstance(samples, dict):
        yield "it is not a tree of tensors"
        return
    leaves = dict(iterate_leaves(upload))
    statistics: set[tuple[str, ...]] = set()  # sections with the means and variances of normalization layers
    if upload_spec is not None:
        yield from _find_section_faults(upload, upload_spec)
        statistics |= {("update", name) for name in upload_spec.statistics}
        # Auxiliary tensors that are declared to have statistics as values.
        statistics |= {("aux", name) for name in upload_spec.names("statistic")}
    if pattern is not None:
        yield from _find_differences(leaves, pattern)
    for path, leaf in leaves.items():
        is_variance = path[:2] in statistics and path[-1] == "var"  # normalization layers have "mean" and "var"
        fault = None if leaf is None else _find_value_fault(leaf, is_variance)
        if fault is not None:
            yield f"{_quote(path)} {fault}"
    for name, sample in samples.items():
        fault = _find_sample_fault(sample)
        if fault is not None:
            yield f"its sample {_quote((name,))} {fault}"


def _find_value_fault(leaf: Tensor, is_variance: bool) -> str | None:
    """Describe a fault in the dtype or the values of a tensor of an upload; None if there is none."""
    if leaf.dtype not in FLOAT_DTYPES | INTEGER_DTYPES:
        return f"has dtype {_dtype_name(leaf.dtype)}, which no method sends"
    if not bool(leaf.isfinite().all()):
        return "has values that are not finite"
    if is_variance and bool((leaf < 0).any()):
        return "has a variance below 0"
    return None


def _find_section_faults(upload: Tree, upload_spec: UploadSpec) -> Iterator[str]:
    """Yield the faults in the sections of an upload: of another type, or not declared by its client update.

    The server requests what the client update declares to send.

    Args:
        upload: {"update": tree, "weight": scalar, "aux": tree}, where "aux" may be missing.
        upload_spec: the declared names of the sections in "update" and in "aux".
    """
    for name in upload:
        if name not in ("update", "weight", "aux"):
            yield f"{_quote((name,))} was not requested"
    if "update" not in upload or not isinstance(upload.get("weight"), Tensor):
        yield "it is not an update with a weight"
        return  # the rest cannot be checked
    declared = {"update": upload_spec.update, "aux": upload_spec.aux}
    for section, declared_names in declared.items():
        branch = upload.get(section, {})
        if not isinstance(branch, dict):
            yield f"its {section} is not a tree"
            return
        for name in branch:
            if name not in declared_names:
                yield f"{_quote((section, name))} was not requested"


def _find_differences(leaves: Mapping[tuple[str, ...], Tensor | None], pattern: TreeSpec) -> Iterator[str]:
    """Yield each difference between the leaves of an upload and the names, shapes and dtypes that it must have.

    Args:
        leaves: tensors of the upload by path; None is a branch without leaves.
        pattern: (shape, dtype) by path, with "/" between keys; None is a branch without leaves.
    """
    # Paths are compared as tuples, because a key of a forged upload may itself contain a "/".
    expected = {tuple(path.split("/")): leaf_spec for path, leaf_spec in pattern.items()}
    yield from (f"{_quote(path)} is missing" for path in expected if path not in leaves)
    yield from (f"{_quote(path)} was not requested" for path in leaves if path not in expected)
    for path, leaf_spec in expected.items():
        # Only the first fault is used, so this is not reached if a path is missing.
        leaf = leaves[path]
        if leaf is None and leaf_spec is None:
            continue
        if leaf is None:
            yield f"{_quote(path)} is empty, not a tensor"
            continue
        if leaf_spec is None:
            yield f"{_quote(path)} is a tensor, not empty"
            continue
        shape, dtype = leaf_spec
        if tuple(leaf.shape) != shape:
            yield f"{_quote(path)} has the shape {_truncate(str(tuple(leaf.shape)))}, not {shape}"
        elif leaf.dtype != dtype:
            yield f"{_quote(path)} has dtype {_dtype_name(leaf.dtype)}, not {_dtype_name(dtype)}"


def _find_sample_fault(sample: Any) -> str | None:
    """Describe a fault in a metric from a site: it must be {"total", "squares", "count"}, finite float scalars.

    The mean of the metric is total / count; squares is the sum of squared values, for its standard error.
    """
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
    if squares < 0:
        return f"has the sum of squares {squares:g}"
    return None


def check_counts(
    reply: Reply, max_amount: Amount, image_count: int, upload_spec: UploadSpec | None = None
) -> str | None:
    """Check the counts that a reply reports: steps, images, bytes, and the weight of its upload.

    Args:
        reply: the reply with its upload.
        max_amount: the most steps, images a step and epochs of an update at this site.
        image_count: the number of images at the site.
        upload_spec: the sections that the client update declares to send; None to skip the values in the upload.

    Returns:
        The first count that is impossible, as text, or None.
    """
    return next(_find_impossible_counts(reply, max_amount, image_count, upload_spec), None)


def _find_impossible_counts(
    reply: Reply, max_amount: Amount, image_count: int, upload_spec: UploadSpec | None
) -> Iterator[str]:
    """Yield each count of a site's reply that is impossible, as text.

    Args:
        reply: the reply with its upload.
        max_amount: the most steps, images a step and epochs of an update at this site.
        image_count: the number of images at the site.
        upload_spec: the sections that the client update declares to send; None to skip the values in the upload.
    """
    for name, count, limit in zip(Amount._fields, reply.amount, max_amount, strict=True):
        if not 0 <= count <= limit:
            unit = "" if name in ("steps", "epochs") else " images a step"
            yield f"it counts {_digits(count)} {name}{unit}, of {limit} at most for its {image_count} images"
    if upload_spec is not None:
        yield from _find_values_out_of_range(Upload.from_tree(reply.upload), upload_spec, image_count)
    received_bytes, sent_bytes = reply.traffic
    # Before and after its steps an update may classify its images, such as for pseudo-labels, each at most `MAX_PASSES`
    # times. One image more: the method FedMatch classifies an image of noise, to compare the models of clients.
    max_outside_steps = MAX_PASSES * image_count + 1
    counts_and_limits = {
        "images outside steps": (reply.images_outside_steps, max_outside_steps),
        "bytes received": (received_bytes, MAX_BYTES),
        "bytes sent": (sent_bytes, tree.nbytes(reply.upload)),
        "bytes of client memory": (reply.memory_bytes, MAX_BYTES),
    }
    for unit, (count, limit) in counts_and_limits.items():
        if not 0 <= count <= limit:
            yield f"it counts {_digits(count)} {unit}, of {limit} at most"


def _find_values_out_of_range(upload: Upload, upload_spec: UploadSpec, image_count: int) -> Iterator[str]:
    """Yield a fault for the weight and for each auxiliary flag or count of an upload that is out of its range.

    Args:
        upload: the upload.
        upload_spec: whether the weight is a number of images ("rows") or at most 1, and the kinds of auxiliary values:
            a "mark" is a flag from 0 to 1, a "count" is 0 or more.
        image_count: the number of images at the site.
    """
    # A labeled image may also be used as an unlabeled one; then it counts twice in the weight.
    max_weight = max(1, MAX_COUNTS_PER_IMAGE * image_count) if upload_spec.weight == "rows" else 1
    checks: list[tuple[str, Tree | Tensor, float]] = [("weight", upload.weight, max_weight)]
    checks += [(name, upload.aux[name], 1) for name in upload_spec.names("mark") if name in upload.aux]
    checks += [(name, upload.aux[name], math.inf) for name in upload_spec.names("count") if name in upload.aux]
    for name, values, limit in checks:
        # `values` may be a tensor or a dict of tensors; with a dict around it, both are trees.
        numbers = [number for leaf in tree.leaves({"": values}) for number in leaf.flatten().tolist()]
        # "not (0 <= number)" is also true for NaN.
        wrong = next((number for number in numbers if not 0 <= number <= limit), None)
        if wrong is not None:
            valid_range = f"between 0 and {limit}" if limit < math.inf else "0 or more"
            yield f"its {name} is {wrong:g}, not {valid_range}, the most for {image_count} images"


def update_norm(upload: Upload, received: Tree, upload_spec: UploadSpec) -> float:
    """Compute the Euclidean norm of a site's update, in float64.

    Parameters count with their difference to the download, and auxiliary values of the kind "number" with their values.
    Statistics of normalization layers are left out: they measure images, and a variance of 1e4 would hide the
    parameters. So are weights, flags and counts.

    Args:
        upload: the upload.
        received: the tree that the site received, with the parameters before its local training.
        upload_spec: the kinds of the sections of the upload.
    """
    values_before = tree.flatten(received)
    parameters = {name: section for name, section in upload.update.items() if name not in upload_spec.statistics}
    changes: list[Tensor] = []
    for path, leaf in tree.flatten(parameters).items():
        if leaf.dtype in FLOAT_DTYPES:
            changes.append(leaf.double() - values_before[path])
    aux_names = [name for name in upload_spec.names("number") if name in upload.aux]
    for leaf in tree.flatten({name: upload.aux[name] for name in aux_names}).values():
        if leaf.dtype in FLOAT_DTYPES:
            changes.append(leaf.double())
    # The norm of all changes together is the norm of their norms; hypot does not overflow.
    return math.hypot(*(float(torch.linalg.vector_norm(change)) for change in changes))


def check_norm(norms: Mapping[str, float], bound: float) -> dict[str, str]:
    """Find updates whose norm is far above the median of the cohort, or not finite.

    Fewer than three sites are not checked. In a cohort of even size the lower of the two middle norms is the median, so
    that a half of the cohort with huge updates is found. A median of 0 rejects no update.

    Args:
        norms: norms by site.
        bound: the largest norm, as a multiple of the median; 0 for no check.

    Returns:
        The fault of each rejected update, by site.
    """
    if not bound or len(norms) < 3:
        return {}
    # A norm of NaN could not be sorted; like infinity it counts as very large.
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
    """Quote a path from an upload for the log: `repr` escapes control characters."""
    return _truncate(repr("/".join(path)))


def _truncate(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digits(count: int) -> str:
    return str(count) if count < 10**18 else "more than 10^18"

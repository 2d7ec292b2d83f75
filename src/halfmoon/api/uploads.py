"""Uploads of clients and their declaration: an update of the model, its weight, and auxiliary tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree

NO_AUX: Tree = {}
"""Auxiliary tensors of most methods: none."""


class Upload(NamedTuple):
    """Tensors that one client sends to the server. In the uploads of k clients every leaf has a leading dimension k.

    Attributes:
        update: trained sections of the broadcast, with the same names, shapes and types.
        weight: () float64, the client's weight in an average.
        aux: all other tensors, under the names that the client update declares.
    """

    update: Tree
    weight: Tensor
    aux: Tree = NO_AUX

    @property
    def tree(self) -> Tree:
        """The upload as one tree for transmission: {"update", "weight"}, and "aux" if there is any."""
        content: Tree = {"update": self.update, "weight": self.weight}
        if self.aux:
            content["aux"] = self.aux
        return content

    @classmethod
    def from_tree(cls, content: Tree) -> "Upload":
        """Build an upload from its `tree`.

        Raises:
            KeyError: the tree has no update or no weight.
        """
        return cls(content["update"], content["weight"], content.get("aux", NO_AUX))

    @property
    def parts(self) -> dict[str, Tree]:
        """Top-level sections by name, for reports to people; a single tensor appears as {"": tensor}."""
        sections = {**self.update, "weight": self.weight, **self.aux}
        return {name: section if isinstance(section, dict) else {"": section} for name, section in sections.items()}

    @property
    def nbytes(self) -> int:
        """Number of bytes in transmission."""
        return tree.nbytes(self.tree)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Upload":
        """Apply a function to all leaves."""
        return Upload(tree.map(function, self.update), function(self.weight), tree.map(function, self.aux))

    def at(self, index: int) -> "Upload":
        """Select the upload of one of several clients."""
        return self.map(lambda leaf: leaf[index])


def stack(uploads: Sequence[Upload]) -> Upload:
    """Stack the uploads of k clients, every leaf (k, ...). Without uploads: no update, and weights (0,)."""
    if not uploads:
        return Upload({}, torch.zeros(0, dtype=torch.float64))
    return Upload.from_tree(tree.stack([upload.tree for upload in uploads]))


Precision = Literal["float32", "float16", "int8"]
"""Number format of an update in transmission: float32 as it is, or its difference from the broadcast in fewer bits."""

Reduction = Literal["sum", "mean", "each"]
"""Reduction of an auxiliary tensor over clients: the sum (clients have multiplied it by their weights), the weighted
mean, or none, because the server needs the tensor of each client."""

Values = Literal["number", "statistic", "mark", "count"]
"""Content of an auxiliary tensor: numbers of the magnitude of a model's, which count in the norm of the update; means
and variances of images or activations; flags (0 or 1); or counts from 0."""


class Aux(NamedTuple):
    """Declaration of an auxiliary tensor, or of a tree of them."""

    reduce: Reduction = "each"
    values: Values = "number"


@dataclass(frozen=True)
class UploadSpec:
    """Declaration of an upload; the server refuses tensors that are not declared.

    Attributes:
        update: names of the sections of the update. The broadcast has sections of the same names, shapes and types. A
            section that a network does not have (stats, without batch normalization) may be missing.
        statistics: names of those that are running statistics: they are measured, not learned, so they do not count in
            the norm of the update.
        weight: largest weight of a client: its number of images (labeled images may count twice), or one.
        aux: declarations of the auxiliary tensors, by name.
        sums: names of the sections of the update that are sums over the client's images. A server scales those of a
            client that declares far more images than the others.
    """

    update: tuple[str, ...] = ("params", "stats")
    statistics: tuple[str, ...] = ("stats",)
    weight: Literal["rows", "one"] = "rows"
    aux: Mapping[str, Aux] = field(default_factory=dict[str, Aux])
    sums: tuple[str, ...] = ()

    def names(self, *values: Values, reduce: Reduction | None = None) -> list[str]:
        """List the auxiliary tensors of these kinds.

        Args:
            *values: kinds of content; none of them means any.
            reduce: kind of reduction; None means any.
        """
        matches = {name: aux for name, aux in self.aux.items() if reduce is None or aux.reduce == reduce}
        return [name for name, aux in matches.items() if not values or aux.values in values]

    def check(self, upload: Upload, broadcast: Tree, client_update: str) -> None:
        """Check that an upload has only declared tensors, and that its update matches the broadcast.

        Each client's upload is checked before it is sent, so that the mistake of a method's author has a clear message.

        Args:
            upload: the upload of one client.
            broadcast: the tree that the client received.
            client_update: name of the client update, for the message.

        Raises:
            UserError: a tensor is not declared, or the update has one that the broadcast does not have.
        """
        received = tree.flatten({name: broadcast[name] for name in self.update if name in broadcast})
        undeclared = [f"update {name!r}" for name in upload.update if name not in self.update]
        undeclared += [f"aux {name!r}" for name in upload.aux if name not in self.aux]
        if undeclared:
            raise UserError(
                f"{client_update} sends {undeclared[0]}, which it does not declare: name it in the `upload_spec` of its "
                "client update."
            )
        for path, leaf in tree.flatten(upload.update).items():
            # The server subtracts the broadcast from the update, so both need the same names and shapes.
            if path not in received or received[path].shape != leaf.shape:
                raise UserError(
                    f"{client_update} sends {path!r} as an update, but the broadcast has no tensor of that name and "
                    "shape: send it in `aux`, and declare it in the `upload_spec` of its client update."
                )


UPDATE_ONLY = UploadSpec()
"""The upload of most client updates: parameters and statistics, weighted by the number of rows."""

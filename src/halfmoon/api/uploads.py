"""The type of an upload, and its declaration: an update, a weight, and what goes beside."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree

NO_AUX: Tree = {}
"""What goes up beside update and weight in most methods."""


class Upload(NamedTuple):
    """What one client sends; of k clients together every leaf leads with k."""

    update: Tree  # parts that came down, trained: the same names, shapes and types
    weight: Tensor  # () float64, what it counts in an average
    aux: Tree = NO_AUX  # all else, by names that the client update declares

    @property
    def tree(self) -> Tree:
        """All of it as one tree, as it travels: {"update", "weight", "aux"}, the last where there is some."""
        return {"update": self.update, "weight": self.weight, **({"aux": self.aux} if self.aux else {})}

    @classmethod
    def of(cls, content: Tree) -> "Upload":
        """Undo `tree`; raises KeyError for a tree without an update or a weight."""
        return cls(content["update"], content["weight"], content.get("aux", NO_AUX))

    @property
    def parts(self) -> dict[str, Tree]:
        """Each part by its name, as {"": leaf} where it is one tensor: what people are told that it holds."""
        named = {**self.update, "weight": self.weight, **self.aux}
        return {name: part if isinstance(part, dict) else {"": part} for name, part in named.items()}

    @property
    def nbytes(self) -> int:
        """How many bytes it takes on the wire."""
        return tree.nbytes(self.tree)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Upload":
        """Apply a function to all leaves."""
        return Upload(tree.map(function, self.update), function(self.weight), tree.map(function, self.aux))

    def at(self, place: int) -> "Upload":
        """Return the upload of one of several clients."""
        return self.map(lambda leaf: leaf[place])


def stack(uploads: Sequence[Upload]) -> Upload:
    """Return the uploads of k clients as one, every leaf (k, ...); of none, one without parts and weights (0,)."""
    if not uploads:
        return Upload({}, torch.zeros(0, dtype=torch.float64))
    return Upload.of(tree.stack([each.tree for each in uploads]))


Precision = Literal["float32", "float16", "int8"]
"""What an update travels in: whole, or the difference from what came down in fewer bits."""

Reduction = Literal["sum", "mean", "each"]
"""What the server does with an auxiliary tensor: it adds those of all clients, which come multiplied by their weights;
it takes their weighted mean; or it needs each client's own."""

Values = Literal["number", "statistic", "mark", "count"]
"""What an auxiliary tensor holds: numbers that are as large as a model's at most, and belong to an update's norm; means
and variances of images or activations; yes (1) or no (0); or a count, from 0."""


class Aux(NamedTuple):
    """A client update's declaration of an auxiliary tensor, or tree of them."""

    reduce: Reduction = "each"
    values: Values = "number"


@dataclass(frozen=True)
class Uplink:
    """What a client update sends; what it does not declare is refused.

    update: the parts of the update by name. Each came down under the same name, and has the same shapes and types; a
        part that a network does not have (stats, without batch normalization) may be missing.
    statistics: which of them are running statistics: measured, not learned, so no part of an update's norm.
    weight: the most that a client may weigh: as many as its "rows" (images, labeled ones twice at most), or "one".
    aux: what goes up beside.
    """

    update: tuple[str, ...] = ("params", "stats")
    statistics: tuple[str, ...] = ("stats",)
    weight: Literal["rows", "one"] = "rows"
    aux: Mapping[str, Aux] = field(default_factory=dict[str, Aux])

    def names(self, *values: Values, reduce: Reduction | None = None) -> list[str]:
        """Return the auxiliary tensors that hold one of these kinds of values (none named: any), and are reduced so."""
        matches = {name: aux for name, aux in self.aux.items() if reduce is None or aux.reduce == reduce}
        return [name for name, aux in matches.items() if not values or aux.values in values]

    def check(self, up: Upload, down: Tree, client_update: str) -> None:
        """Raise `UserError` where an upload holds what is not declared, or an update of what did not come down."""
        before = tree.flatten({name: down[name] for name in self.update if name in down})
        strange = [f"update {name!r}" for name in up.update if name not in self.update]
        strange += [f"aux {name!r}" for name in up.aux if name not in self.aux]
        if strange:
            raise UserError(
                f"{client_update} sends {strange[0]}, which it does not declare: name it in the `uplink` of its "
                "client update."
            )
        for path, leaf in tree.flatten(up.update).items():
            if path not in before or before[path].shape != leaf.shape:
                raise UserError(
                    f"{client_update} sends {path!r} as an update, but nothing of that name and shape came down: "
                    "send it in `aux`, and declare it in the `uplink` of its client update."
                )


UPDATE_ONLY = Uplink()
"""What most client updates send: parameters and statistics, with a weight in rows."""

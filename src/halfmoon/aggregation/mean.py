"""The weighted mean of uploads as they come: the mean and one upload are in memory, however many clients there are.

    mean <- mean + (weight / (weight + weights before)) (upload - mean)

in the order of the clients' numbers, whatever order they finish in, so that the bits depend neither on that nor on how
the clients were spread. The mean of equal uploads is that upload, to the bit.
"""

from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import RunningMean, Tree


class UploadMean:
    """Uploads of one work, added up as `upload_spec` says; raises `UserError` where the server would need each of them."""

    def __init__(self, upload_spec: UploadSpec, client_update: str) -> None:
        single = upload_spec.names(reduce="each")
        if single:
            raise UserError(
                f"the uploads of {client_update} cannot be averaged: its server needs {single[0]!r} of each "
                "client; ask for the uploads themselves, or declare how it is reduced."
            )
        self._sums, self._means = upload_spec.names(reduce="sum"), upload_spec.names(reduce="mean")
        self._update, self._aux = RunningMean(), RunningMean()
        self._total: Tree = {}
        self._last: Upload | None = None

    def add(self, upload: Upload) -> None:
        """Add the next client's upload to the running mean; it is not stored."""
        weight = float(upload.weight)
        self._update.add(upload.update, weight)
        self._aux.add({name: upload.aux[name] for name in self._means}, weight)
        sums = {name: upload.aux[name] for name in self._sums}
        self._total = tree.map(lambda a, b: a + b, self._total, sums) if self._total else sums
        self._last = upload._replace(update={name: {} for name in upload.update}, aux={})

    def result(self, broadcast: Tree) -> Upload:
        """Return the mean, with the sum of all weights; where that is 0, nobody had anything to learn from, and the
        update is what came `broadcast`. Raises `ValueError` where nothing was added.
        """
        if self._last is None:
            raise ValueError("a mean of no uploads")
        update = self._update.mean
        if not self._update.weight > 0:
            update = {name: broadcast[name] for name in self._last.update}
        weight = self._last.weight.new_tensor(self._update.weight)
        return Upload(update, weight, {**self._aux.mean, **self._total})


def mean_of(upload: Upload, upload_spec: UploadSpec, broadcast: Tree, client_update: str) -> Upload:
    """Return the mean of uploads that are all there, every leaf (k, ...)."""
    mean = UploadMean(upload_spec, client_update)
    for place in range(len(upload.weight)):
        mean.add(upload.at(place))
    return mean.result(broadcast)

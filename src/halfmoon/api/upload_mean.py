"""Average uploads incrementally: only the mean and one upload are in memory, for any number of clients.

    mean <- mean + (weight / (weight + weights before)) (upload - mean)

Uploads are added in the order of the clients' numbers, not in the order in which clients finish, so that the result
does not depend, to the bit, on timing or on the distribution of clients over workers. The mean of equal uploads is that
upload, to the bit.
"""

from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import RunningMean, Tree


class UploadMean:
    """A running weighted mean of the uploads of one client update.

    Args:
        upload_spec: The reduction (sum or mean) of each auxiliary value.
        client_update: The name of the client update, for error messages.

    Raises:
        UserError: If the upload spec declares a value that the server needs from each client.
    """

    def __init__(self, upload_spec: UploadSpec, client_update: str) -> None:
        """Start a mean of no uploads, and check that all auxiliary values can be summed or averaged.

        Args:
            upload_spec: declares what clients upload, and how each auxiliary value is reduced over clients: summed,
                averaged by weight, or kept for each of them, which a mean cannot do.
            client_update: the name of the client update, for the message.

        Raises:
            UserError: If an auxiliary value of each client is needed.
        """
        individual_names = upload_spec.names(reduce="each")
        if individual_names:
            raise UserError(
                f"the uploads of {client_update} cannot be averaged: its server needs {individual_names[0]!r} of each "
                "client; ask for the uploads themselves, or declare how it is reduced."
            )
        self._sum_names = upload_spec.names(reduce="sum")
        self._mean_names = upload_spec.names(reduce="mean")
        self._update = RunningMean()
        self._aux_means = RunningMean()
        self._aux_sums: Tree = {}
        self._last: Upload | None = None

    def add(self, upload: Upload) -> None:
        """Add the next client's upload to the running mean, without storing it."""
        weight = float(upload.weight)
        self._update.add(upload.update, weight)
        self._aux_means.add({name: upload.aux[name] for name in self._mean_names}, weight)
        sums = {name: upload.aux[name] for name in self._sum_names}
        if self._aux_sums:
            sums = tree.map(lambda total, term: total + term, self._aux_sums, sums)
        self._aux_sums = sums
        # `result` needs only the names of the sections and the type of the weight: without the tensors of the update the
        # memory of the upload can be freed.
        self._last = upload._replace(update={name: {} for name in upload.update}, aux={})

    def result(self, broadcast: Tree) -> Upload:
        """Compute the mean of all added uploads.

        Args:
            broadcast: The values that the clients downloaded: the result if all weights are 0 (no client had data).

        Returns:
            One upload, whose weight is the sum of all weights.

        Raises:
            ValueError: If no upload was added.
        """
        if self._last is None:
            raise ValueError("a mean of no uploads")
        update = self._update.mean
        if not self._update.weight > 0:
            update = {name: broadcast[name] for name in self._last.update}
        weight = self._last.weight.new_tensor(self._update.weight)
        return Upload(update, weight=weight, aux={**self._aux_means.mean, **self._aux_sums})


def average_stacked_uploads(upload: Upload, upload_spec: UploadSpec, broadcast: Tree, client_update: str) -> Upload:
    """Average k uploads that are in memory, leaves (k, ...)."""
    mean = UploadMean(upload_spec, client_update)
    for index in range(len(upload.weight)):
        mean.add(upload.at(index))
    return mean.result(broadcast)

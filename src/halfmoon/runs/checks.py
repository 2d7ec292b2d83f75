"""What is refused before anything is played, as it could only fail later."""

from collections.abc import Sequence

import numpy as np

from halfmoon.config.schema import check_label_location
from halfmoon.core.errors import UserError
from halfmoon.data.images import UNKNOWN
from halfmoon.data.partition.split import SERVER
from halfmoon.methods import registry
from halfmoon.models.passes import is_emulated
from halfmoon.runs import factory, workers
from halfmoon.runs.callbacks import Callback
from halfmoon.runs.factory import Problem
from halfmoon.runs.jobs import Job


def check(jobs: Sequence[Job], shared: Problem, watch: Callback) -> None:
    """Refuse what could only fail later: too large a cohort, a client without labels, aggregators that do not fit."""
    config, split = jobs[0].config, shared.split
    if config.cohort > split.clients:
        raise UserError(f"cohort is {config.cohort}, but the split has {split.clients} clients; choose a smaller one.")
    device = factory.device(config)
    if shared.source.remark:
        watch.say(f"{shared.source.remark}.")
    if is_emulated(config.precision, device):
        watch.say(
            "this processor has no bfloat16, so precision = 'bf16' is several times slower here than float32 and "
            "gains nothing; leave it out, or take a GPU or a processor with AVX-512."
        )
    entries = [registry.entry(job.config.method) for job in jobs]
    _refuse_one_title(entries)
    for job, each in zip(jobs, entries, strict=True):
        factory.method(job.config)
        workers.count(job.config)
        if each.pooled and job.config.attack != "none":
            raise UserError(f"attack needs clients, but method {each.name} has all rows in one place; leave it out.")
    unknown = int((shared.source.train.labels == UNKNOWN).sum())
    for each in entries if unknown else ():
        if each.all_labels:
            raise UserError(f"method {each.name} needs all labels, but {unknown:,} training images have none.")
    needing = [each for each in entries if not each.all_labels and not each.pooled]
    served = bool((split.client == SERVER).any())
    counts = np.bincount(split.client[split.labeled & (split.client >= 0)], minlength=split.clients)
    empty = np.flatnonzero(counts == 0)
    place = "server" if served else "some" if len(empty) else "clients"
    for each in needing:
        if place == "some" and each.label_locations == ("clients",):
            raise UserError(
                f"client {empty[0]} ({len(empty)} of {split.clients} in all) has no labeled image, but {each.name} "
                f"needs some at every client; ask for more labels or a larger min_size, or choose one of: "
                f"{', '.join(registry.names_at(place))}."
            )
        check_label_location(each.name, place)
    bare = [k for k in range(split.clients) if not len(split.rows(k, False))]
    looking = [
        each.name for each in needing if next(iter(each.method.client_updates(shared.task).values())).requirements.views
    ]
    if looking and bare:
        raise UserError(
            f"client {bare[0]} ({len(bare)} of {split.clients} in all) has no unlabeled image, but {looking[0]} needs "
            "some at every client; ask for fewer labels or a larger min_size."
        )
    if served or config.labeled_batch == "all":
        return
    few = int(((counts > 0) & (counts < config.labeled_batch)).sum())
    updates = [update for each in needing for update in each.method.client_updates(shared.task).values()]
    if few and any(update.requirements.trains for update in updates):
        watch.say(
            f"{few} of {split.clients} clients have fewer labeled images than a batch of {config.labeled_batch}: "
            "their images repeat within a batch."
        )


def _refuse_one_title(entries: Sequence[registry.MethodEntry]) -> None:
    owners: dict[str, str] = {}
    for each in entries:
        if (owner := owners.setdefault(each.title, each.name)) != each.name:
            raise UserError(
                f"{owner} and {each.name} are both called {each.title!r} in tables: make one of them a "
                "halfmoon.api.method_entry.MethodEntry with a title of its own."
            )

"""Checks of jobs before training, for errors that would otherwise appear only in the middle of a run."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch

from halfmoon.api.requirements import requirements_of
from halfmoon.config.schema import (
    Config,
    check_effects,
    check_label_location,
    check_methods,
    method_options,
)
from halfmoon.config.sections import DataOptions
from halfmoon.config.validation import effective_norm
from halfmoon.core.arithmetic import GPU_PRECISIONS
from halfmoon.core.errors import UserError
from halfmoon.data import Source, sources
from halfmoon.data.images import UNKNOWN
from halfmoon.data.partition.split import SERVER, Split
from halfmoon.engine.loop import initial_model
from halfmoon.methods import registry
from halfmoon.models.modules import ModuleNetwork
from halfmoon.models.passes import is_emulated
from halfmoon.runs import factory, workers
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback
from halfmoon.runs.factory import Problem
from halfmoon.runs.jobs import Job


def check_jobs(jobs: Sequence[Job], problem: Problem, watch: Callback, sites: Sequence[str] = ()) -> None:
    """Check that jobs can run on their data, and warn about slow or unusual settings.

    Args:
        jobs: the jobs; all but their methods and seeds are equal.
        problem: their data, split and batch rule.
        watch: receives the warnings.
        sites: the name of each client, if clients are site folders of the user; () for simulated ones.

    Raises:
        UserError: the cohort is too large, a method needs labels or unlabeled images where a client has none, an
            aggregator or attack does not fit a method, or two methods have the same title.
    """
    config = jobs[0].config
    split = problem.split
    if config.cohort > split.clients:
        raise UserError(f"cohort is {config.cohort}, but the split has {split.clients} clients; choose a smaller one.")
    if config.patience is not None and problem.validation is None:
        raise UserError(
            f"patience is {config.patience}, but there are no validation images to stop by: set validation_share or "
            "validation_part, or leave patience out."
        )
    device = factory.select_device(config)
    if problem.source.selection_note:
        watch.record("data_note", f"{problem.source.selection_note}.")
    if is_emulated(config.precision, device):
        text = (
            "this processor has no bfloat16, so precision = 'bf16' is several times slower here than float32 and "
            "gains nothing; leave it out, or take a GPU or a processor with AVX-512."
        )
        watch.record("warning", text)
    if config.precision in GPU_PRECISIONS and device.type == "cpu":
        raise UserError(
            f"precision = {config.precision!r} has an effect on a GPU only, and this run trains on the processor: leave "
            "it out.",
            option="precision",
            value=config.precision,
        )
    if config.deterministic and device.type == "cpu":
        raise UserError(
            "deterministic has an effect on a GPU only: a run on the processor always gives the same bits; leave it out.",
            option="deterministic",
        )
    entries = [registry.entry(job.config.method) for job in jobs]
    _check_titles(entries)
    for job, entry in zip(jobs, entries, strict=True):
        workers.count_workers(job.config)  # raises `UserError` for options that do not fit
        if job.config.seed == config.seed:  # seeds of one method have the same result
            _check_method(job.config, problem)
        if entry.pooled and job.config.attack != "none":
            raise UserError(f"attack needs clients, but method {entry.name} has all rows in one place; leave it out.")
    _check_labels(entries, problem, sites)
    _check_unlabeled(entries, problem, sites)
    _warn_of_small_clients(entries, problem, config.labeled_batch, watch)
    _report_federation_options(jobs, watch)


def _check_method(config: Config, problem: Problem) -> None:
    """Raise UserError if a method cannot start on the network, the clients and the labels of a run."""
    method = factory.build_method(config)
    norm = effective_norm(config)
    clients = problem.split.clients
    if requirements_of(method, norm).every_client and config.cohort != clients:
        raise UserError(
            f"cohort is {config.cohort}, but every round of {config.method} needs all {clients} clients: set it to "
            f"{clients}."
        )
    if norm == "batch" and getattr(method, "sbn", None) == "server" and not (problem.split.client == SERVER).any():
        raise UserError(
            f"sbn of {config.method} is 'server', but the server has no image to estimate the statistics of batch "
            "normalization on: set it to 'all' or 'cohort'."
        )
    # The server's first tree depends on the network: some methods need a network with a last layer of a certain kind.
    updates = method.client_updates(problem.task)
    model = initial_model(problem.task, config.seed, factory.select_device(config))
    method.start(problem.task, model)
    network = problem.task.network
    if isinstance(network, ModuleNetwork) and any(getattr(each, "uses_tangents", False) for each in updates.values()):
        network.check_tangent(model["params"])


def check_image_options(config: Config) -> None:
    """Raise UserError if the options `crop` or `window` of a new run have no effect on any of its images."""
    sources.check_image_options(config.data, config.data_dir, factory.image_preparation(config))


def find_errors(configs: Sequence[Config]) -> dict[int, UserError]:
    """Check runs of one search or sweep without training: options, data, split, network and method.

    Runs on the same images load them once. Features of a frozen backbone, which take long, are not computed.

    Args:
        configs: the configurations of the runs.

    Returns:
        The error of each run that cannot start, by its index in `configs`.
    """
    errors: dict[int, UserError] = {}
    names = [field.name for field in fields(DataOptions)]
    # Grouped by their images, of which those of one group are in memory at a time.
    indices_by_data: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        indices_by_data.setdefault(repr([getattr(config, name) for name in names]), []).append(index)
    for indices in indices_by_data.values():
        try:
            check_image_options(configs[indices[0]])
            raw = factory.load_images(configs[indices[0]])
        except UserError as error:
            errors |= dict.fromkeys(indices, error)
            continue
        for index in indices:
            try:
                _check_run(configs[index], raw)
            except UserError as error:
                errors[index] = error
    return errors


def _check_run(config: Config, raw: Source) -> None:
    """Raise UserError if a run of a configuration cannot start; `raw` has its images, before they are padded."""
    check_methods(config)
    check_effects(config, config.method)
    data = factory.fit_to_network(config, raw)
    split = factory.get_split(config, data)
    image_spec = factory.ImageSpec.of(data)
    task = factory.build_task(config, image_spec)
    batching, server_batching = factory.build_batch_rules(config)
    _, height, width, _ = raw.train.images.shape
    examples = factory.to_examples(data.train, torch.device("cpu"))
    problem = Problem(
        source=data,
        split=split,
        train=examples,
        test=None,
        task=task,
        views=factory.build_views(config, image_spec),
        batching=batching,
        server_batching=server_batching,
        input_size=(height, width),
        validation=None if data.validation is None else factory.to_examples(data.validation, torch.device("cpu")),
    )
    check_jobs([Job(".", config)], problem, NULL_CALLBACK)


def _semi_supervised(entries: Sequence[registry.MethodEntry]) -> list[registry.MethodEntry]:
    """Select the methods that train at clients on a split of labeled and unlabeled images."""
    return [entry for entry in entries if not entry.all_labels and not entry.pooled]


def _count_labels(problem: Problem) -> np.ndarray:
    """Count the labeled images of each client, (clients,)."""
    split = problem.split
    # Negative clients are the server and rows that belong to no client.
    return np.bincount(split.client[split.labeled & (split.client >= 0)], minlength=split.clients)


def _check_labels(entries: Sequence[registry.MethodEntry], problem: Problem, sites: Sequence[str]) -> None:
    """Raise UserError unless the labeled images are where each method needs them.

    The split has its labels at one of these locations: at the "server" (clients then have unlabeled images only), at
    all "clients", or at "some" of them.

    Args:
        entries: the methods. Those with `all_labels` are upper bounds, which train as if every image were labeled.
        problem: the data and the split.
        sites: the names of the clients, or ().
    """
    split = problem.split
    unknown_labels = int((problem.source.train.labels == UNKNOWN).sum())
    for entry in entries:
        if unknown_labels and entry.all_labels:
            raise UserError(f"method {entry.name} needs all labels, but {unknown_labels:,} training images have none.")
    clients_without_labels = np.flatnonzero(_count_labels(problem) == 0)  # labels by client
    if (split.client == SERVER).any():
        location = "server"
    elif len(clients_without_labels):
        location = "some"
    else:
        location = "clients"
    for entry in _semi_supervised(entries):
        # This case has a message that names a client; `check_label_location` refuses all other unsupported locations.
        if location == "some" and entry.label_locations == ("clients",):
            first = clients_without_labels[0]
            if sites:
                raise UserError(
                    f"{_list_sites(clients_without_labels, sites)} no labeled image, but {entry.name} needs some at every "
                    f"site; label images there, leave it out of {{sites}}, or choose one of: "
                    f"{', '.join(registry.names_at(location))}.",
                    option="sites",
                )
            raise UserError(
                f"client {first} ({len(clients_without_labels)} of {split.clients} in all) has no labeled image, but "
                f"{entry.name} needs some at every client; ask for more labels or a larger min_size, or choose one of: "
                f"{', '.join(registry.names_at(location))}."
            )
        check_label_location(entry.name, location)


def _list_sites(clients: Sequence[int] | np.ndarray, sites: Sequence[str]) -> str:
    """List the names of these clients, with the verb "has" or "have": "north has", "north and south have"."""
    names = [sites[client] for client in clients]
    return f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'}"


def _check_unlabeled(entries: Sequence[registry.MethodEntry], problem: Problem, sites: Sequence[str]) -> None:
    """Raise UserError if a method trains on unlabeled images of every client, and a client has none.

    Upper bounds and centralized methods are not checked: they do not train on one client's unlabeled images.
    """
    for entry in _semi_supervised(entries):
        # By convention the first client update of a method is the one that trains.
        training_update = next(iter(entry.method.client_updates(problem.task).values()))
        # `views` are augmentations of unlabeled images, so a method that needs some trains on these images.
        if training_update.requirements.views:
            check_unlabeled_rows(entry.name, problem.split, sites)


def check_unlabeled_rows(method: str, split: Split, sites: Sequence[str] = ()) -> None:
    """Raise UserError if a client of a split has no unlabeled image, for a method that needs some at every client."""
    empty = [client for client in range(split.clients) if not len(split.rows(client, labeled=False))]
    if empty and sites:
        raise UserError(
            f"{_list_sites(empty, sites)} no unlabeled image to train on, but {method} needs some at every site; add images "
            "without a label there, or leave it out of {sites}.",
            option="sites",
        )
    if empty:
        raise UserError(
            f"client {empty[0]} ({len(empty)} of {split.clients} in all) has no unlabeled image, but {method} "
            "needs some at every client; ask for fewer labels or a larger min_size."
        )


def _warn_of_small_clients(
    entries: Sequence[registry.MethodEntry], problem: Problem, labeled_batch: int | str, watch: Callback
) -> None:
    """Report how many clients have fewer labeled images than a batch, if a method trains on such batches.

    Args:
        entries: the methods.
        problem: the data and the split.
        labeled_batch: the number of labeled images in a batch; "all", which fits every client, needs no message.
        watch: receives the message.
    """
    # Clients then have no labeled images, and the server trains on its images.
    server_has_labels = bool((problem.split.client == SERVER).any())
    if server_has_labels or isinstance(labeled_batch, str):
        return
    label_counts = _count_labels(problem)
    small_clients = int(((label_counts > 0) & (label_counts < labeled_batch)).sum())
    updates = [
        update for entry in _semi_supervised(entries) for update in entry.method.client_updates(problem.task).values()
    ]
    if small_clients and any(update.requirements.trains for update in updates):
        text = (
            f"{small_clients} of {problem.split.clients} clients have fewer labeled images than a batch of "
            f"{labeled_batch}: their images repeat within a batch."
        )
        watch.record("small_clients", text, clients=small_clients)


def _report_federation_options(jobs: Sequence[Job], watch: Callback) -> None:
    """Report an option that a simulation ignores. It is not refused: a federation may read the same file."""
    for job in jobs:
        if "min_class_images" in method_options(job.config, job.config.method, with_preset=False):
            text = (
                f"min_class_images of {job.config.method} has no effect in a simulation: only the sites of a federation "
                "compare it with their labels."
            )
            watch.record("option_ignored", text, option="min_class_images")


def _check_titles(entries: Sequence[registry.MethodEntry]) -> None:
    """Check that different methods have different titles, which identify them in tables."""
    methods_by_title: dict[str, str] = {}
    for entry in entries:
        first = methods_by_title.setdefault(entry.title, entry.name)
        if first != entry.name:
            raise UserError(
                f"{first} and {entry.name} are both called {entry.title!r} in tables: make one of them a "
                "halfmoon.api.method_entry.MethodEntry with a title of its own."
            )

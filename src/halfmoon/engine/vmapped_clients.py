"""Run the updates of several clients at once, batched by `torch.func.vmap`; smaller clients are padded."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfmoon.api.types import ClientData, ClientUpdate
from halfmoon.core import tree
from halfmoon.core.autodiff import vmap_clients
from halfmoon.core.tree import Tree
from halfmoon.engine.driver import (
    ClientContext,
    ClientResult,
    ClientTask,
    ObservedPseudoLabels,
    StepLog,
    add_precomputed_views,
    check_upload,
    is_finite,
    observe_initial_pseudo_labels,
    with_dropout,
)
from halfmoon.engine.sampling import DrawnUpdate, batches, draw


@torch.no_grad()
def update_many(context: ClientContext, broadcast: Tree, tasks: Sequence[ClientTask]) -> list[ClientResult]:
    """Run the updates of K clients at once, batched by vmap.

    Clients of unequal size are padded to the largest one. The state of a client that has taken all its steps no longer
    changes. An update that does not mask padding needs clients with equal images a step and, if it reads all images of
    a client at once, of equal size.

    Args:
        context: the settings of this query.
        broadcast: the tree that all clients receive.
        tasks: the K clients, each with the tree that only this client receives.

    Returns:
        The results in the order of the tasks.

    Raises:
        Diverged: a loss or a number of an upload is not finite, or a loss is larger than `MAX_LOSS`.
    """
    client_update = context.client_update
    per_client = tree.stack([task.private for task in tasks])
    normalize = client_update.task.normalize
    clients_data = [add_precomputed_views(context, task.client, task.data) for task in tasks]
    padded = _pad(clients_data)
    longest_unlabeled = padded.u.shape[1]
    memory = tree.stack(
        [
            _pad_row_memory(client_update, task.memory, data, longest_unlabeled)
            for task, data in zip(tasks, clients_data, strict=True)
        ]
    )

    def lift(function: Callable[..., Any]) -> Callable[..., Any]:
        """Vmap a method of the update. Only what differs gets a client dimension; the broadcast is shared."""

        def call_for_one_client(private: Tree, *rest: Any) -> Any:
            return function({**broadcast, **private}, *rest)

        return vmap_clients(call_for_one_client)

    # As in `update_one`: begin, draw (which needs the carry), all steps, finish.
    carry: Tree = lift(client_update.begin)(per_client, memory, padded)
    makes_initial_pseudo_labels = bool(client_update.initial_pseudo_labels(carry, padded))

    def observe_before_steps(k: int) -> tuple[ObservedPseudoLabels, ...]:
        if not makes_initial_pseudo_labels:
            return ()
        client_carry = tree.index(carry, k)
        data = _one_client(padded, k)
        return observe_initial_pseudo_labels(client_update, client_carry, data, len(clients_data[k].u))

    def draw_for_client(k: int) -> DrawnUpdate:
        # Slices of the first carry must not outlive this call: they would keep it in memory for all steps.
        drawable = client_update.drawable_rows(tree.index(carry, k), _one_client(padded, k))
        return draw(
            tasks[k].amount,
            clients_data[k],
            context.views,
            client_update.requirements,
            drawable,
            context.seed,
            *context.path(tasks[k].client),
            dropout=client_update.task.network.has_dropout,
        )

    initial_pseudo_labels = [observe_before_steps(k) for k in range(len(tasks))]
    draws = [draw_for_client(k) for k in range(len(tasks))]
    steps = torch.tensor([update.amount.steps for update in draws], device=padded.y.device)
    fewest_steps = min(update.amount.steps for update in draws)
    take_step = lift(with_dropout(client_update))
    log = StepLog()
    for number, batch in enumerate(batches(clients_data, draws, context.views, normalize, context.view_images)):
        new_carry, step_metrics = take_step(per_client, carry, batch)
        if number < fewest_steps:
            carry = new_carry
        else:
            # Some clients have taken all their steps: they keep their state.
            carry = vmap_clients(tree.select)(number < steps, new_carry, carry)
        log.add(step_metrics, batch.u_rows)
    logs = [log.summarize(context, task.client, k, draws[k].amount) for k, task in enumerate(tasks)]
    upload, memory = lift(client_update.finish)(per_client, carry, padded)
    all_finite = is_finite(upload)  # checked for all clients at once: each check waits for the device
    results: list[ClientResult] = []
    for k, task in enumerate(tasks):
        client_upload = upload.at(k)
        received = {**broadcast, **tree.index(per_client, k)}
        check_upload(context, task.client, client_upload, received, draws[k].amount.steps, all_finite)
        # Cloned, as a slice would keep the memories of the whole group alive.
        client_memory = tree.map(
            torch.clone, _unpad_row_memory(client_update, tree.index(memory, k), len(clients_data[k].u))
        )
        samples, step_pseudo_labels = logs[k]
        labeled = len(clients_data[k].x)
        unlabeled = len(clients_data[k].u)
        result = ClientResult(
            upload=client_upload,
            memory=client_memory,
            samples=samples,
            amount=draws[k].amount,
            traffic=client_update.traffic(received, client_upload),
            images_outside_steps=client_update.images_outside_steps(labeled, unlabeled),
            memory_bytes=tree.nbytes(client_memory),
            observations=initial_pseudo_labels[k] or step_pseudo_labels,
        )
        results.append(result)
    return results


def _one_client(padded: ClientData, k: int) -> ClientData:
    """Return the data of client k from the data of stacked clients (leaves (K, ...)); it retains its padding."""
    return ClientData(
        x=padded.x[k],
        y=padded.y[k],
        u=padded.u[k],
        labeled=padded.labeled[k],
        unlabeled=padded.unlabeled[k],
        views=tree.index(padded.views, k),
        real=tree.index(padded.real, k),
    )


def _pad_row_memory(client_update: ClientUpdate, memory: Tree, data: ClientData, length: int) -> Tree:
    """Pad the leaves of a client's memory that have an entry for each unlabeled image, so that clients can be stacked.

    If the client has another number of images than at its last update, these leaves are reset.

    Args:
        client_update: declares these leaves, and the value of an empty entry, in `UpdateRequirements.row_memory`.
        memory: the client's memory.
        data: its images.
        length: number of entries after padding.
    """
    row_memory = client_update.requirements.row_memory
    if not row_memory:
        return memory
    leaves = tree.flatten(memory)
    for path, empty_value in row_memory.items():
        leaf = leaves[path]
        rows = leaf if len(leaf) == len(data.u) else leaf[:0]  # no entry, if the images have changed
        leaves[path] = torch.cat([rows, leaf.new_full((length - len(rows),), empty_value)])
    return tree.unflatten(leaves)


def _unpad_row_memory(client_update: ClientUpdate, memory: Tree, length: int) -> Tree:
    """Remove the padding of `_pad_row_memory`: cut leaves with an entry for each unlabeled image to `length` entries."""
    row_memory = client_update.requirements.row_memory
    if not row_memory:
        return memory
    leaves = tree.flatten(memory)
    for path in row_memory:
        leaves[path] = leaves[path][:length]
    return tree.unflatten(leaves)


def _repeat_rows(images: Tensor, length: int) -> Tensor:
    """Repeat images from the first one until there are `length`; without any, return zeros, which the mask excludes."""
    if not len(images):
        return images.new_zeros((length, *images.shape[1:]))
    return images[torch.arange(length, device=images.device) % len(images)]


def _pad(clients_data: Sequence[ClientData]) -> ClientData:
    """Stack the images of K clients; a smaller client is padded by repeating its images from the first one.

    Args:
        clients_data: each client's images.

    Returns:
        All leaves (K, ...). `real` is True for rows that are not padding; it is {} if there is no padding.
    """
    longest_x = max(len(data.x) for data in clients_data)
    longest_u = max(len(data.u) for data in clients_data)
    real: dict[str, Tensor] = {}
    if any(len(data.x) < longest_x or len(data.u) < longest_u for data in clients_data):
        device = clients_data[0].y.device
        x_positions = torch.arange(longest_x, device=device)
        u_positions = torch.arange(longest_u, device=device)
        real["x"] = torch.stack([x_positions < data.labeled for data in clients_data])
        real["u"] = torch.stack([u_positions < data.unlabeled for data in clients_data])
    views: dict[str, Tensor] = {}
    for name in clients_data[0].views:
        views[name] = torch.stack([_repeat_rows(data.views[name], longest_u) for data in clients_data])
    return ClientData(
        x=torch.stack([_repeat_rows(data.x, longest_x) for data in clients_data]),
        y=torch.stack([_repeat_rows(data.y, longest_x) for data in clients_data]),
        u=torch.stack([_repeat_rows(data.u, longest_u) for data in clients_data]),
        labeled=torch.stack([data.labeled for data in clients_data]),
        unlabeled=torch.stack([data.unlabeled for data in clients_data]),
        views=views,
        real=real,
    )

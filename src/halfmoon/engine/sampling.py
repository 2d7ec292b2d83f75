"""Draw the steps of a client update: which rows, in which order, with which augmentation.

All draws depend on (seed, round, query, client) and not on the method, so that a loop, a batched cohort and a real
network process the same images. Labeled and unlabeled rows have separate generators: methods that use labeled images
only get, with as many steps, the same labeled batches as methods that use both.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfmoon.api.types import Batch, ClientData, UpdateRequirements
from halfmoon.core import rng
from halfmoon.core.errors import UserError
from halfmoon.core.normalize import Normalize
from halfmoon.core.tensors import tensor_from_numpy
from halfmoon.data.views import Draws, Labeled, Plain, Shared, Strong, View, Weak
from halfmoon.models.dropout import KEY

MAX_DROPOUT_KEY = 2**62
"""Keys of a step's dropout masks are drawn below this number."""

NO_ROWS = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class Batching:
    """The batch rule that all methods of a comparison share.

    A set that is smaller than its batch is repeated, never padded.

    Attributes:
        labeled: labeled images of a step; "all": all labeled rows in every step.
        unlabeled: unlabeled images of a step; "rest": the unlabeled rows divided by the number of steps (FedDure's
            released code: N_u // steps).
        epochs: passes over the set that `epoch` names.
        epoch: the set that defines an epoch; the other one is cycled. "labeled": round(N_l / labeled) steps.
            "unlabeled": ceil(N_u / unlabeled) steps. "auto": "unlabeled" if `unlabeled` is a number, "labeled" if it is
            "rest". "larger": at each client the set that needs more steps.
        steps: a fixed number of steps instead of epochs.

    Raises:
        UserError: a number is below 1, or an epoch of unlabeled rows has batches of the "rest".
    """

    labeled: int | Literal["all"] = 10
    unlabeled: int | Literal["rest"] = "rest"
    epochs: int = 1
    epoch: Literal["auto", "labeled", "unlabeled", "larger"] = "auto"
    steps: int | None = None

    def __post_init__(self) -> None:
        """Check the batch rule: all numbers are 1 or more, and an epoch of unlabeled images has a batch size.

        Instead of numbers, "all" puts every labeled image into each step, and "rest" divides the unlabeled images by the
        number of steps. None, for `steps`, counts epochs instead.
        """
        sizes = {"epochs": self.epochs}
        if self.steps is not None:
            sizes["steps"] = self.steps
        if self.labeled != "all":
            sizes["labeled"] = self.labeled
        if self.unlabeled != "rest":
            sizes["unlabeled"] = self.unlabeled
        for name, value in sizes.items():
            if value < 1:
                raise UserError(f"batch {name} is {value}: it must be at least 1.")
        if self.unlabeled == "rest" and self.epoch == "unlabeled":
            raise UserError(
                "batch epoch = 'unlabeled' needs a number of unlabeled images a step, not 'rest': the rest is what one "
                "pass over the labeled rows leaves to each step."
            )

    def steps_labeled(self, labeled: int) -> int:
        """Compute the steps of an update that uses labels only, at a client with `labeled` rows."""
        return self.steps or self.epochs * max(1, round(labeled / max(1, self.labeled_size(labeled))))

    def labeled_size(self, labeled: int) -> int:
        """Return the labeled images of each step; 0 for a client that has none."""
        if not labeled:
            return 0
        return labeled if self.labeled == "all" else self.labeled

    def steps_both(self, labeled: int, unlabeled: int) -> int:
        """Compute the number of steps, 1 or more, of a client update that uses labeled and unlabeled images.

        Depending on the rule (`epoch`), an epoch is a pass over the unlabeled images or over the labeled ones.

        Args:
            labeled: number of labeled images of the client.
            unlabeled: number of its unlabeled images.
        """
        passes = self.passes(labeled, unlabeled)
        if not passes:  # the unlabeled images do not define the length of the update
            return self.steps_labeled(labeled)
        steps_per_pass = -(-unlabeled // self.unlabeled_size(labeled, unlabeled))  # rounded up
        return passes * max(1, steps_per_pass)

    def passes(self, labeled: int, unlabeled: int) -> int:
        """Return the passes over the unlabeled rows of an update; 0 if these do not define its length."""
        if self.steps or self.unlabeled == "rest" or self.epoch == "labeled":
            return 0
        steps = self.epochs * -(-unlabeled // self.unlabeled)
        return 0 if self.epoch == "larger" and self.steps_labeled(labeled) > steps else self.epochs

    def unlabeled_size(self, labeled: int, unlabeled: int) -> int:
        """Return the unlabeled images of each step."""
        if self.unlabeled == "rest":
            return max(1, unlabeled * self.epochs // self.steps_both(labeled, unlabeled))
        return self.unlabeled


@dataclass(frozen=True)
class Views:
    """The augmentations of a run: of labeled images, and of unlabeled ones by name."""

    labeled: View = field(default_factory=Labeled)
    unlabeled: Mapping[str, View] = field(
        default_factory=lambda: {"plain": Plain(), "weak": Weak(), "strong": Strong()}
    )


class Amount(NamedTuple):
    """The length of one client update."""

    steps: int
    labeled: int  # images of a step
    unlabeled: int  # images of a step; 0 for an update without views of unlabeled images
    epochs: int = 0  # if not 0: the steps are as many passes over the unlabeled rows that may be used


class DrawnUpdate(NamedTuple):
    """All random choices of one client's update, on the CPU.

    Rows are int64 indices into the client's images, one step after the other; draws are the random parameters of the
    augmentation of each of these images.
    """

    amount: Amount
    x_rows: Tensor  # (steps * labeled,)
    x_draws: Draws
    u_rows: Tensor  # (steps * unlabeled,)
    u_draws: dict[str, Draws]  # by view
    second_rows: Tensor  # (steps * unlabeled,), of the second minibatches; empty if there are none
    second_draws: dict[str, Draws]  # by view
    mixing: dict[str, Tensor]  # leaves (steps, ...): with mixup "mix", "order" and "turn"; with dropout its keys
    x_view_draws: dict[str, Draws]  # further views of the labeled images, by view


def view_by_name(views: Views, name: str) -> View:
    """Return the augmentation of a view of unlabeled images; "weak2" is a second draw of "weak"."""
    return views.unlabeled[name.rstrip("0123456789")]


def views_of_labeled(views: Views, labeled: int) -> Views:
    """Return the augmentations for further views of labeled images.

    A draw that all unlabeled images of a step share is then shared by the `labeled` images of a step.
    """
    adapted: dict[str, View] = {}
    for name, view in views.unlabeled.items():
        adapted[name] = replace(view, rows=max(1, labeled)) if isinstance(view, Shared) else view
    return replace(views, unlabeled=adapted)


def cycle(rows: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Return `length` entries of `rows` (n,): one shuffled pass after another, the last one cut off."""
    passes = -(-length // len(rows))  # rounded up
    return torch.cat([rows[torch.randperm(len(rows), generator=generator)] for _ in range(passes)])[:length]


def draw(
    amount: Amount,
    local: ClientData,
    views: Views,
    requirements: UpdateRequirements,
    drawable: Tensor | None,
    seed: int,
    *path: int | str,
    dropout: bool = False,
) -> DrawnUpdate:
    """Draw all random choices of a client update: minibatches, augmentations and, if needed, dropout keys.

    The update itself draws nothing, so that it gives the same result by itself, under vmap and on another machine.

    Args:
        amount: the number of steps, and of images in each step.
        local: the client's images, without padding.
        views: the augmentations.
        requirements: the views and further draws that the update needs.
        drawable: (U,) bool, the unlabeled images that may be used; None: all. Without any, there are no steps.
        seed: the seed of the run.
        path: the name of the random stream, such as the round and the client.
        dropout: the network has dropout, whose masks need a random key for each step.
    """
    shape = _image_shape(local)
    # Not `local.labeled` and `local.unlabeled`: they are on the device, which would be waited for.
    labeled_count = len(local.x)
    unlabeled_count = len(local.u)
    allowed = torch.arange(unlabeled_count)
    if drawable is not None:
        allowed = allowed[drawable.cpu()[:unlabeled_count]]
        if amount.epochs:
            amount = amount._replace(steps=amount.epochs * -(-len(allowed) // amount.unlabeled))
    if requirements.views and not len(allowed):
        amount = amount._replace(steps=0)

    # The images of all steps are drawn at once. Each set has a random stream of its own, so that one does not depend
    # on the size of another.
    labeled_total = amount.steps * amount.labeled
    generator = rng.generator(seed, *path, "labeled")
    x_rows = cycle(torch.arange(labeled_count), labeled_total, generator) if labeled_total else NO_ROWS
    x_draws = views.labeled.draw(labeled_total, shape, generator)
    labeled_views = views_of_labeled(views, amount.labeled)
    x_view_draws = _draw_views(labeled_views, requirements.labeled_views, labeled_total, shape, seed, *path, "labeled")

    unlabeled_total = amount.steps * amount.unlabeled
    u_rows = NO_ROWS
    if requirements.views and unlabeled_total:
        u_rows = cycle(allowed, unlabeled_total, rng.generator(seed, *path, "unlabeled"))
    u_draws = _draw_views(views, requirements.views, unlabeled_total, shape, seed, *path)

    second_rows = NO_ROWS
    second_draws: dict[str, Draws] = {}
    if requirements.second_batch and unlabeled_total:
        generator = rng.generator(seed, *path, "others")
        # With replacement, and from all unlabeled images, also those that `drawable` excludes.
        second_rows = torch.randint(unlabeled_count, (unlabeled_total,), generator=generator)
        second_draws = _draw_views(views, requirements.second_batch, unlabeled_total, shape, seed, *path, "others")

    mixing: dict[str, Tensor] = {}
    if requirements.mixup is not None:
        mixing = _draw_mixing(amount, requirements, requirements.mixup, seed, *path, "mixup")
    if dropout:
        # Dropout masks are computed from the key of the step inside of vmap, where no generator can be used.
        generator = rng.generator(seed, *path, KEY)
        mixing[KEY] = torch.randint(MAX_DROPOUT_KEY, (amount.steps,), generator=generator)
    return DrawnUpdate(
        amount=amount,
        x_rows=x_rows,
        x_draws=x_draws,
        u_rows=u_rows,
        u_draws=u_draws,
        second_rows=second_rows,
        second_draws=second_draws,
        mixing=mixing,
        x_view_draws=x_view_draws,
    )


def compute_views(
    local: ClientData, views: Views, names: Sequence[str], normalize: Normalize, seed: int, *path: int | str
) -> ClientData:
    """Add views of all unlabeled images to a client's data, for updates that predict on all of them before they train.

    A view is an augmented image, such as "weak" or "strong".

    Args:
        local: the client's data.
        views: the augmentations by name.
        names: the views to compute; if there are none, the data is returned as it is.
        normalize: converts uint8 images for the network.
        seed: the seed of the run.
        path: the name of the random stream, such as the round and the client; "sweep" is added, so that these draws do
            not depend on those of the minibatches.
    """
    if not names:
        return local
    draws = _draw_views(views, names, len(local.u), _image_shape(local), seed, *path, "sweep")
    computed = {name: view_by_name(views, name).apply(local.u, draws[name], normalize) for name in names}
    return local._replace(views=computed)


def _image_shape(local: ClientData) -> tuple[int, int, int]:
    """Return the shape (C, H, W) of a client's images."""
    channels, height, width = local.x.shape[1:]
    return channels, height, width


def _draw_views(
    views: Views, names: Sequence[str], total: int, shape: tuple[int, int, int], seed: int, *path: int | str
) -> dict[str, Draws]:
    """Draw the augmentation of `total` images of a shape (C, H, W), each view from a stream of its name."""
    draws: dict[str, Draws] = {}
    for name in names:
        draws[name] = view_by_name(views, name).draw(total, shape, rng.generator(seed, *path, name))
    return draws


def _draw_mixing(
    amount: Amount, requirements: UpdateRequirements, concentration: float, seed: int, *path: int | str
) -> dict[str, Tensor]:
    """Draw the mixup of each step: weights from Beta(concentration, concentration), partners, and rotations.

    Args:
        amount: the number of steps, and of images in each step.
        requirements: the views of the update.
        concentration: parameter of the Beta distribution.
        seed: the seed of the run.
        path: the name of the random stream.

    Returns:
        "mix" (steps,) float64; "order" (steps, images), the partner of each image; "turn" (steps, unlabeled), quarter
        turns. The images of a step are the labeled ones and all views of the unlabeled ones.
    """
    steps = amount.steps
    images = amount.labeled + len(requirements.views) * amount.unlabeled
    # PyTorch has no beta distribution with a generator, so NumPy draws the weights.
    numpy_generator = np.random.Generator(np.random.PCG64(rng.derive_seed(seed, *path)))
    mix = numpy_generator.beta(concentration, concentration, steps)
    generator = rng.generator(seed, *path)
    orders = [torch.randperm(images, generator=generator) for _ in range(steps)]
    return {
        "mix": tensor_from_numpy(mix),
        "order": torch.stack(orders) if orders else torch.zeros(0, images, dtype=torch.int64),
        "turn": torch.randint(4, (steps, amount.unlabeled), generator=generator),
    }


def batches(
    clients_data: Sequence[ClientData],
    updates: Sequence[DrawnUpdate],
    views: Views,
    normalize: Normalize,
    view_images: int,
) -> Iterator[Batch]:
    """Yield the batches of K clients step by step.

    Clients with fewer images of a step are padded, for which `Batch.real` is False. A client that has taken all its
    steps repeats its last one. A client without any step gets the images of the client with the largest number of
    steps; the caller ignores the result.

    Args:
        clients_data: the images of the clients.
        updates: their draws.
        views: the augmentations.
        normalize: converts uint8 images for the network.
        view_images: about how many images are augmented in one call, for several steps; it does not change the batches.

    Yields:
        Batches, every leaf (K, ...).
    """
    longest = max(range(len(updates)), key=lambda k: updates[k].amount.steps)
    sources = [k if update.amount.steps else longest for k, update in enumerate(updates)]
    clients_data = [clients_data[k] for k in sources]
    updates = [updates[k] for k in sources]
    labeled_sizes = [update.amount.labeled for update in updates]
    unlabeled_sizes = [update.amount.unlabeled for update in updates]
    labeled = max(labeled_sizes)
    unlabeled = max(unlabeled_sizes)
    device = clients_data[0].y.device
    real = _real_masks(labeled_sizes, unlabeled_sizes, device)
    total_steps = max(update.amount.steps for update in updates)
    # One call of an augmentation makes the views of several steps, so that its overhead is paid once.
    steps_per_call = max(1, view_images // max(1, len(updates) * max(labeled, unlabeled)))
    labeled_images = [data.x for data in clients_data]
    unlabeled_images = [data.u for data in clients_data]
    for first_step in range(0, total_steps, steps_per_call):
        steps = range(first_step, min(first_step + steps_per_call, total_steps))

        chunk = _select_images(updates, steps, labeled_sizes, [d.x_rows for d in updates], labeled_images)
        x = chunk.compute_view(views.labeled, [d.x_draws for d in updates], normalize)
        x_views = chunk.compute_views(views, [d.x_view_draws for d in updates], normalize)
        labels = [data.y[rows.to(device)] for data, rows in zip(clients_data, chunk.rows, strict=True)]
        y = chunk.stack(labels)
        x_rows = chunk.stack(chunk.rows).to(device)

        chunk = _select_images(updates, steps, unlabeled_sizes, [d.u_rows for d in updates], unlabeled_images)
        u = chunk.compute_views(views, [d.u_draws for d in updates], normalize)
        u_rows = chunk.stack(chunk.rows).to(device)

        chunk = _select_images(updates, steps, unlabeled_sizes, [d.second_rows for d in updates], unlabeled_images)
        second_batch = chunk.compute_views(views, [d.second_draws for d in updates], normalize)
        second_rows = chunk.stack(chunk.rows).to(device)

        client_mixing = [_pad_mixing(_mixing_of_steps(d, steps), d, labeled, unlabeled) for d in updates]
        mixing = {name: torch.stack([leaves[name] for leaves in client_mixing]).to(device) for name in client_mixing[0]}
        # Cut the images of these steps, which are one after the other in dimension 1, into steps.
        for step in range(len(steps)):
            labeled_slice = slice(step * labeled, (step + 1) * labeled)
            unlabeled_slice = slice(step * unlabeled, (step + 1) * unlabeled)
            step_mixing = {name: leaf[:, step] for name, leaf in mixing.items()}
            if second_batch:
                step_mixing["second_batch_rows"] = second_rows[:, unlabeled_slice]
            yield Batch(
                x=x[:, labeled_slice],
                y=y[:, labeled_slice],
                x_rows=x_rows[:, labeled_slice],
                u={name: view[:, unlabeled_slice] for name, view in u.items()},
                u_rows=u_rows[:, unlabeled_slice],
                second_batch={name: view[:, unlabeled_slice] for name, view in second_batch.items()},
                mixing=step_mixing,
                x_views={name: view[:, labeled_slice] for name, view in x_views.items()},
                real=real,
            )


def _real_masks(labeled_sizes: list[int], unlabeled_sizes: list[int], device: torch.device) -> dict[str, Tensor]:
    """Build the masks of a step's images, False for padding.

    Args:
        labeled_sizes: labeled images in a step, for each of K clients.
        unlabeled_sizes: unlabeled images in a step, for each client.
        device: the device of the masks.

    Returns:
        "x" (K, max(labeled_sizes)) and "u" (K, max(unlabeled_sizes)), bool; {} if all clients have equal sizes.
    """
    if len(set(labeled_sizes)) == 1 and len(set(unlabeled_sizes)) == 1:
        return {}
    masks: dict[str, Tensor] = {}
    for name, sizes in (("x", labeled_sizes), ("u", unlabeled_sizes)):
        positions = torch.arange(max(sizes), device=device)
        masks[name] = positions < torch.tensor(sizes, device=device)[:, None]
    return masks


class _StepImages(NamedTuple):
    """The images of K clients in several steps."""

    images: list[Tensor]  # K of (rows of the client, C, H, W)
    rows: list[Tensor]  # K of (n_k,): the rows that the steps use
    positions: list[Tensor]  # K of (n_k,): the positions of these rows in the client's draws
    padding: Tensor | None  # (K, n): which of all n_k concatenated rows is at each position; None without padding

    def stack(self, leaves: list[Tensor]) -> Tensor:
        """Stack K leaves (n_k, ...) to (K, n, ...); images that a client lacks in a step are its last one."""
        if self.padding is None:
            return torch.stack(leaves)
        return torch.cat(leaves)[self.padding.to(leaves[0].device)]

    def compute_views(self, views: Views, draws: Sequence[dict[str, Draws]], normalize: Normalize) -> dict[str, Tensor]:
        """Compute all views for which there are draws, by name."""
        computed: dict[str, Tensor] = {}
        for name in draws[0]:
            client_draws = [parameters[name] for parameters in draws]
            computed[name] = self.compute_view(view_by_name(views, name), client_draws, normalize)
        return computed

    def compute_view(self, view: View, draws: Sequence[Draws], normalize: Normalize) -> Tensor:
        """Augment the images of K clients in one call, as each call of an augmentation takes time.

        `images` has each client's images without augmentation, (N_k, C, H, W), and `rows` (n_k,) are those that these
        steps use. `positions` (n_k,) number them among the images of all steps of the client, each of which has random
        parameters: an image that is used in two steps has two.

        Args:
            view: the augmentation.
            draws: each client's random parameters of this view by name, with one entry for each image of all its steps.
            normalize: converts uint8 images for the network.

        Returns:
            The augmented images, (K, n, C, H, W), where n is the largest n_k: others are padded (`padding`).
        """
        selected = [images[rows.to(images.device)] for images, rows in zip(self.images, self.rows, strict=True)]
        parameters: Draws = {}
        for name in draws[0]:
            parameters[name] = torch.cat(
                [client_draws[name][positions] for client_draws, positions in zip(draws, self.positions, strict=True)]
            )
        output = view.apply(torch.cat(selected), parameters, normalize)
        if self.padding is None:
            return torch.unflatten(output, 0, (len(self.rows), -1))
        return output[self.padding.to(output.device)]


def _select_images(
    updates: Sequence[DrawnUpdate], steps: range, sizes: list[int], rows: list[Tensor], images: list[Tensor]
) -> _StepImages:
    """Select the images that K clients use in some of their steps.

    Args:
        updates: the clients' draws.
        steps: the steps.
        sizes: number of images in a step, for each client.
        rows: indices of the images of all steps, for each client.
        images: each client's images, (rows of the client, C, H, W).
    """
    # Where the images of these steps are in `rows`, and so among the random parameters drawn for all steps.
    positions = [_draw_positions(update, steps, size) for update, size in zip(updates, sizes, strict=True)]
    step_rows: list[Tensor] = []
    for client_rows, client_positions in zip(rows, positions, strict=True):
        step_rows.append(client_rows[client_positions] if len(client_rows) else client_rows)
    padding = None
    if len(set(sizes)) > 1 and any(len(client_rows) for client_rows in step_rows):
        padding = _padding_positions(sizes, len(steps))
    return _StepImages(images, step_rows, positions, padding)


def _padding_positions(sizes: list[int], steps: int) -> Tensor:
    """Compute the index by which the concatenated images of K clients are padded to equal numbers in each step.

    Args:
        sizes: the images of a step, by client.
        steps: the number of steps.

    Returns:
        (K, steps * max(sizes)): a client's images of each step, then its last image of the step until there are
        max(sizes). A client without images is padded with the image at position 0.
    """
    largest = max(sizes)
    start = 0  # index of the client's first image among the concatenated ones
    positions: list[Tensor] = []
    for size in sizes:
        if size:
            in_step = torch.arange(largest).clamp_max(size - 1)
            step_starts = torch.arange(steps)[:, None] * size
            positions.append(start + (step_starts + in_step).flatten())
        else:
            positions.append(torch.zeros(steps * largest, dtype=torch.int64))
        start += size * steps
    return torch.stack(positions)


def _clamped_steps(update: DrawnUpdate, steps: range) -> Tensor:
    """Return the numbers of these steps; those after the client's last step are the last one."""
    return torch.arange(steps.start, steps.stop).clamp_max(update.amount.steps - 1)


def _mixing_of_steps(update: DrawnUpdate, steps: range) -> dict[str, Tensor]:
    """Select the mixing draws of these steps."""
    step_numbers = _clamped_steps(update, steps)
    return {name: leaf[step_numbers] for name, leaf in update.mixing.items()}


def _pad_mixing(mixing: dict[str, Tensor], update: DrawnUpdate, labeled: int, unlabeled: int) -> dict[str, Tensor]:
    """Pad the draws of mixup to more images in a step: padding is mixed with itself and not rotated.

    In a step the labeled images have the first numbers, then come those of each view. Padding is at the end of each of
    these blocks, so images get new numbers. Example, with 2 labeled images padded to 3, and 3 unlabeled ones to 4:

        images before:    0 1   2 3 4       partners before:  4 2   0 1 3
        their new numbers: 0 1   3 4 5       partners after:   5 3 2   0 1 4 6    (2 and 6 are padding)

    Args:
        mixing: draws of mixup, leaves (steps, ...): "order" has the number of each image's partner, "turn" the quarter
            turns of unlabeled images, "mix" the ratio of each step, which needs no padding.
        update: all draws of the client, with its numbers of images in a step.
        labeled: labeled images in a step after padding.
        unlabeled: unlabeled images in a step after padding.
    """
    amount = update.amount
    if "order" not in mixing or (amount.labeled, amount.unlabeled) == (labeled, unlabeled):
        return mixing
    views = len(update.u_draws)
    is_real_labeled = torch.arange(labeled) < amount.labeled
    is_real_unlabeled = torch.arange(unlabeled) < amount.unlabeled  # in each view
    is_real = torch.cat([is_real_labeled, is_real_unlabeled.repeat(views)])
    positions = torch.arange(len(is_real))
    new_numbers = positions[is_real]
    order = positions.repeat(len(mixing["mix"]), 1)  # (steps, images), each its own partner
    order[:, is_real] = new_numbers[mixing["order"]]
    turn = torch.nn.functional.pad(mixing["turn"], (0, unlabeled - amount.unlabeled))
    return {**mixing, "order": order, "turn": turn}


def _draw_positions(update: DrawnUpdate, steps: range, size: int) -> Tensor:
    """Return the positions of the images of these steps in the client's draws, with `size` images of a step."""
    return (_clamped_steps(update, steps)[:, None] * size + torch.arange(size)).flatten()

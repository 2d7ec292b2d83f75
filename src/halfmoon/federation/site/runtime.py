"""One site of a federation: it runs local updates on its own images, and retains a memory between rounds."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError

from halfmoon.api.requirements import Requirements, requirements_of
from halfmoon.api.types import Method, StateStore, Task
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.data import Images, Split
from halfmoon.data.preparation import MAX_SKIPPED_SHARE
from halfmoon.engine.driver import ClientContext, ClientResult, images_per_call
from halfmoon.engine.evaluation import Examples, evaluate_model
from halfmoon.engine.local_clients import FederatedDataset, LocalClients, Training
from halfmoon.engine.sampling import Amount
from halfmoon.federation.protocol import limits
from halfmoon.federation.protocol.disclosure import check_class_counts
from halfmoon.federation.protocol.log import format_bytes
from halfmoon.federation.protocol.messages import (
    OTHER_VERSION,
    PermanentRefusal,
    RefusalError,
    Reply,
    Request,
    RoundKey,
    UnparsedMessage,
)
from halfmoon.federation.protocol.terms import (
    Terms,
    decode_folder,
    describe_held_out,
    image_spec_name,
    load_labeled_images,
    map_labels,
    open_prepared_folder,
)
from halfmoon.federation.protocol.tree_spec import make_tree_spec
from halfmoon.federation.site.download_spec import DownloadSpecs
from halfmoon.methods import registry
from halfmoon.runs.budgets import build_budget
from halfmoon.runs.factory import build_batch_rules, build_method, build_task, build_views, select_device, to_examples
from halfmoon.runs.features import Progress, select_inputs
from halfmoon.sites.folders.prepare import open_prepared_site, read_left_out
from halfmoon.sites.folders.site_folder import SiteFolder
from halfmoon.storage import atomic_io, serialization
from halfmoon.storage.events import EventRecorder
from halfmoon.storage.image_digests import write_digests
from halfmoon.storage.run_folder import SKIPPED
from halfmoon.storage.skipped_list import write_skipped_list
from halfmoon.storage.state_store import StateView, TreeStore

_MEMORY_FILE = re.compile(r"memory-(\d{6,})-(\d{3,})-(\d{3,})-[0-9a-f]{16}\.safetensors")
_USE_OLDER = "an older memory is used; restore the file from a backup."

PROGRESS_IMAGES = 1024
"""Number of images between two log lines about the progress of computing features."""


@dataclass(frozen=True)
class SiteMemory:
    """The memory of a site in one local update, as a `StateStore`: one file for each update that had a memory.

    Files of earlier updates remain, because the server may repeat a round, until `prune_memories`.

    Attributes:
        folder: the folder of the run.
        current: the local update that is run.
        latest: the local update whose memory it continues from; None to start without.
        device: where memories are loaded to.
        log: the site's log.
    """

    folder: Path
    current: RoundKey
    latest: RoundKey | None
    device: torch.device
    log: EventRecorder

    def get(self, key: str) -> Tree | None:
        """Load the client's state from which this local update continues.

        If its file is missing or damaged, the newest intact older one is used, with a warning.

        Args:
            key: not used, because a site is one client.

        Returns:
            A tree of tensors on `device`; None if this client has no state yet, or no intact file.

        Raises:
            OSError: the disk cannot be read.
        """
        if self.latest is None:
            return None
        candidates = [(round_key, path) for round_key, path in _list_memories(self.folder) if round_key <= self.latest]
        newest = candidates[-1][0] if candidates else None
        if newest != self.latest:
            number = self.latest[0] + 1
            self.log.record("memory_missing", f"the memory of round {number} is missing: {_USE_OLDER}", round=number)
        for _, path in reversed(candidates):
            memory = _read_memory(path)
            if memory is not None:
                # The tensors are mapped from the file: copy them, so that the file can be replaced.
                return tree.map(lambda leaf: leaf.to(self.device, copy=True), memory)
            self.log.record("memory_damaged", f"{path.name} is damaged: {_USE_OLDER}", file=path.name)
        return None

    def put(self, key: str, tree: Tree) -> None:
        """Write the client's state after this local update to a file, completely or not at all.

        Its name has the round, the attempt and the query (`SiteMemory.current`), and a digest of its contents.

        Args:
            key: not used, because a site is one client.
            tree: the state.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        data = serialization.pack_file(tree)
        round, attempt, query = self.current
        # By the digest a damaged file is recognized.
        digest = atomic_io.sha256(data)[:16]
        name = f"memory-{round:06d}-{attempt:03d}-{query:03d}-{digest}.safetensors"
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_io.write_atomically(self.folder / name, data)
        # A server that was killed may repeat its last request: then this update has another file already.
        for round_key, path in _list_memories(self.folder):
            if round_key == self.current and path.name != name:
                path.unlink(missing_ok=True)

    def keys(self) -> list[str]:
        """Return no keys: a site is one client, whose memory is loaded by its number."""
        return []


def prune_memories(folder: Path, oldest: RoundKey | None) -> None:
    """Remove memories older than `oldest`, the oldest one that the server may still continue from. Raises OSError."""
    for round_key, path in _list_memories(folder):
        if oldest is not None and round_key < oldest:
            path.unlink(missing_ok=True)


def parse_round_key(numbers: Sequence[int]) -> RoundKey | None:
    """Parse the (round, attempt, query) of an earlier local update in a request; None for an empty list.

    Raises:
        RefusalError: these are not three numbers.
    """
    if not numbers:
        return None
    if len(numbers) != 3:
        raise RefusalError(
            "the server names an invalid local update to continue from: it must be a round, an attempt and a query."
        )
    return (numbers[0], numbers[1], numbers[2])


def _read_memory(path: Path) -> Tree | None:
    """Map a memory file into memory; None if it is damaged."""
    if atomic_io.sha256(path.read_bytes())[:16] != path.stem.rpartition("-")[2]:
        return None
    try:
        return serialization.map_file(path)
    except SafetensorError:
        return None


def _list_memories(folder: Path) -> list[tuple[RoundKey, Path]]:
    """List the memory files of a run with their (round, attempt, query), oldest first."""
    if not folder.is_dir():
        return []
    memories: list[tuple[RoundKey, Path]] = []
    for path in folder.iterdir():
        match = _MEMORY_FILE.fullmatch(path.name)
        if match:
            memories.append(((int(match[1]), int(match[2]), int(match[3])), path))
    return sorted(memories)


EMPTY_RESULT = ClientResult(Upload({}, torch.zeros(0)), {}, {}, Amount(0, 0, 0), (0, 0))
"""The result of a request without a client update."""


class HeldOut(NamedTuple):
    """Images of a site that are never trained on.

    Attributes:
        tests: images to test models on.
        validations: images by which the server chooses the best round.
    """

    tests: Examples | None = None
    validations: Examples | None = None


@lru_cache(maxsize=4)
def compute_download_specs(terms_text: str) -> DownloadSpecs:
    """Compute names, shapes and dtypes of the tensors that a server may send on these terms.

    Rounds of the method are simulated for it, which takes seconds, so the results of the last terms are cached.
    """
    terms = Terms.parse(terms_text)
    config = terms.config
    image_spec = terms.image_spec
    return DownloadSpecs.from_trial(
        method=build_method(config),
        task=build_task(config, image_spec),
        views=build_views(config, image_spec),
        image=image_spec.image,
        seed=config.seed,
        sites=len(terms.sites),
    )


@dataclass
class SiteRuntime:
    """Runs the requests of one site.

    Attributes:
        number: number of the site, which is its client id.
        method: the method of the federation.
        task: its task.
        local_clients: local training on the site's images.
        version: version of the site's halfmoon.
        held_out: images for evaluation.
        downloads: the downloads that the server may send.
    """

    number: int
    method: Method
    task: Task
    local_clients: LocalClients
    version: str
    held_out: HeldOut = field(default_factory=HeldOut)
    downloads: DownloadSpecs = field(default_factory=lambda: DownloadSpecs({}, 0))

    @classmethod
    def from_terms(
        cls, terms: Terms, number: int, images: np.ndarray, labels: np.ndarray, version: str, device_name: str = "auto"
    ) -> "SiteRuntime":
        """Set up a site's local training, and check that its images suit the method.

        Args:
            terms: the configuration that the server and all sites of a federation share.
            number: number of the site.
            images: uint8 (N, H, W, C), in the size of the terms.
            labels: int64 (N,), by the terms' class numbers; -1 for images without one.
            version: version of the site's halfmoon.
            device_name: where to compute: "auto", or a device of PyTorch such as "cpu".

        Raises:
            RefusalError: the site lacks labels or images that the method needs, or a local update exceeds a limit.
        """
        config = replace(terms.config, device=device_name)
        site_task = build_task(config, terms.image_spec)
        site_method = build_method(config)
        labeled = labels >= 0
        entry = registry.entry(config.method)
        if config.labels_at == "server" and not entry.all_labels:
            labeled = np.zeros_like(labeled)  # labels at the sites are not used
        _check_labels(terms, site_method, site_task, int(labeled.sum()), int((~labeled).sum()))
        method_requirements = requirements_of(site_method, site_task.network.norm)
        if method_requirements.min_class_images and not config.secure_aggregation:
            class_counts = np.bincount(labels[labeled], minlength=len(terms.image_spec.classes)).tolist()
            _check_class_counts(class_counts, int((~labeled).sum()), method_requirements)
        # Unlabeled images need a number in the array of labels; it is never used.
        train = to_examples(Images(np.array(images), np.where(labeled, labels, 0)), select_device(config))
        # All images belong to this site; the other clients of the split have none here.
        split = Split(np.full(len(labels), number), labeled, len(terms.sites))
        dataset = FederatedDataset(train, split, entry.all_labels, reuse_labeled=config.reuse_labeled)
        client_batching, server_batching = build_batch_rules(config)
        update_budget = build_budget(config, site_task)
        for client_update in site_method.client_updates(site_task).values():
            amount = update_budget.amount(
                client_batching, client_update, dataset.training_size(number), dataset.split_size(number)
            )
            fault = limits.find_update_fault(client_update, amount, terms.image_spec.image)
            if fault is not None:
                raise RefusalError(fault)
        training = Training(client_batching, update_budget, server_batching)
        memories = StateView(TreeStore(), "client/", train.labels.device)
        local_clients = LocalClients(dataset, build_views(config, terms.image_spec), training, config.seed, memories)
        return cls(number, site_method, site_task, local_clients, version)

    def check_request(self, request: Request, unparsed: UnparsedMessage[Any]) -> None:
        """Check a request by its fields and the shapes of its tensors, before the tensors are parsed.

        A site trains the tensors that it receives, so without this check a server could make it train a much larger
        network than its people have agreed to.

        Args:
            request: the fields of the request.
            unparsed: the message with the tensors.

        Raises:
            RefusalError: the request is not covered by the terms.
        """
        if request.round >= self.task.rounds:
            raise RefusalError(f"the server requests round {request.round + 1} of {self.task.rounds}.")

        download_spec = unparsed.tree_spec("download")
        mismatch = self.downloads.find_mismatch(request.client_update, download_spec)
        unexpected = bool(download_spec) and not request.client_update
        if mismatch is not None or unexpected:
            details = f": {mismatch}" if mismatch else ""
            raise RefusalError(
                f"what the server sends for {request.client_update!r} is not what its method sends{details}."
            )

        network = self.task.network
        model_spec = make_tree_spec(limits.make_meta_model(network))
        if unparsed.tree_spec("evaluation") not in ({}, model_spec):
            raise RefusalError("the server sends a model to evaluate that is not the network of the terms.")

        # Without a known spec only the size of the message limits what the site trains.
        size = len(unparsed.data)
        max_size = limits.max_unknown_message_bytes(network)
        if request.client_update not in self.downloads.specs and size > max_size:
            raise RefusalError(f"the server sends {format_bytes(size)}; the limit is {format_bytes(max_size)}.")

    def count_images(self) -> tuple[int, int]:
        """Count labeled and unlabeled training images."""
        labeled = self.local_clients.dataset.split.labeled
        return int(labeled.sum()), int((~labeled).sum())

    def run_request(self, request: Request, memories: StateStore | None = None) -> Reply:
        """Run the local update and the evaluation of a request.

        Args:
            request: a request, which was checked by `check_request`.
            memories: stores the client's state between rounds; None to hold it in memory.

        Returns:
            The reply with the upload and the evaluation, as far as they were requested.

        Raises:
            RefusalError: the method has no such client update.
        """
        round_task = self.task.at(request.round)
        # The received model is evaluated before training.
        evaluation = self.evaluate(request.evaluation) if request.evaluation else {}
        if not request.client_update:
            reply = Reply.from_result(request, self.version, EMPTY_RESULT)
            return replace(reply, upload={}, evaluation=evaluation)
        client_updates = self.method.client_updates(round_task)
        if request.client_update not in client_updates:
            raise RefusalError(
                f"the server requests {request.client_update!r}, which the method does not have; it has "
                f"{list(client_updates)}."
            )
        local_clients = self.local_clients
        if memories is not None:
            local_clients = replace(local_clients, memories=memories)
        compute_device = local_clients.dataset.train.labels.device
        context = ClientContext(
            client_update=client_updates[request.client_update],
            views=local_clients.views,
            seed=local_clients.seed,
            round=request.round,
            query=request.query,
            view_images=images_per_call(compute_device),  # images that are augmented in one call
        )
        ((_, result),) = local_clients.train(
            context,
            clients=[self.number],
            broadcast=request.download,
            per_client={},  # the download contains the values for this site too
        )
        return replace(Reply.from_result(request, self.version, result), evaluation=evaluation)

    def evaluate(self, model: Tree) -> Tree:
        """Evaluate a model on this site's test and validation images.

        Args:
            model: {"params", "stats"}.

        Returns:
            {"confusion", "loss"} on the test images, and below "validation" the same on the validation images, as far
            as the site has such images.
        """
        evaluation: Tree = {}
        if self.held_out.tests is not None:
            evaluation = self._evaluate_on(model, self.held_out.tests)
        if self.held_out.validations is not None:
            evaluation = {**evaluation, "validation": self._evaluate_on(model, self.held_out.validations)}
        return evaluation

    def _evaluate_on(self, model: Tree, images: Examples) -> Tree:
        result = evaluate_model(self.task.network, model, self.task.normalize, images, statistics=self.task.testing)
        return {"confusion": result.confusion.cpu(), "loss": torch.tensor(result.loss, dtype=torch.float64)}


def check_version(site_version: str, server_version: str) -> None:
    """Check that site and server run the same version of halfmoon.

    Raises:
        RefusalError: they do not. The text names which of the two has to upgrade.
    """
    if site_version == server_version:
        return
    older, newer = sorted((site_version, server_version), key=_version_sort_key)
    outdated = "this site" if site_version == older else "the server"
    raise RefusalError(
        f"this site runs halfmoon {site_version}, the server {server_version}: {outdated} has to upgrade to {newer}.",
        OTHER_VERSION,
    )


def _version_sort_key(version: str) -> tuple[list[int], bool, str]:
    """Make the sort key of a version: 0.10.0 is newer than 0.9.0, and than 0.10.0.dev1 and 0.10.0rc1."""
    release = re.match(r"\d+(\.\d+)*", version)
    suffix = version[release.end() :] if release else version
    numbers = [int(number) for number in release[0].split(".")] if release else []
    # A suffix such as "rc1" is a pre-release, which is older; "+cpu" is a build of the release.
    is_release = not suffix or suffix.startswith("+")
    return numbers, is_release, suffix


def _check_labels(terms: Terms, site_method: Method, site_task: Task, labeled: int, unlabeled: int) -> None:
    """Check that a site has the labeled and unlabeled images that its method needs.

    Args:
        terms: the configuration that the server and all sites of a federation share.
        site_method: the method.
        site_task: its task.
        labeled: the number of labeled images.
        unlabeled: the number of unlabeled images.

    Raises:
        RefusalError: it has none of a kind that the method needs.
    """
    config = terms.config
    entry = registry.entry(config.method)
    if entry.all_labels:
        if unlabeled:
            raise RefusalError(f"method {entry.name} needs a label for every image, but {unlabeled:,} have none.")
        return
    if config.labels_at == "clients" and not labeled:
        raise RefusalError("the federation has labels at every site, but this site has none: with some it joins.")
    # `requirements.views` are augmented views of unlabeled images. A method that uses them does so in its first update;
    # further updates may train on labeled images only. With `reuse_labeled`, labeled images are used as unlabeled too.
    first_update = next(iter(site_method.client_updates(site_task).values()))
    if first_update.requirements.views and not unlabeled and not config.reuse_labeled:
        raise RefusalError(
            f"method {entry.name} needs images without a label, but this site has none: with some it joins."
        )


def _check_class_counts(class_counts: Sequence[int], unlabeled: int, requirements: Requirements) -> None:
    """Check that the site has enough images of each class to send sums or means of their features.

    A sum of the features of very few images would reveal them.

    Args:
        class_counts: the number of labeled images of each class.
        unlabeled: the number of unlabeled images.
        requirements: the method's, with the fewest images of a sum.

    Raises:
        RefusalError: a sum would be of fewer images. Its cause has the numbers.
    """
    try:
        check_class_counts(class_counts, unlabeled, requirements)
    except UserError as details:
        # The refusal is sent to the server, so it has no numbers of this site; the cause is written to the site's log.
        raise RefusalError(
            f"a {'sum' if requirements.aggregation == 'sum' else 'mean'} of features that it would send is of fewer than "
            f"{requirements.min_class_images} images; its own log has the numbers."
        ) from details


def _make_progress(log: EventRecorder) -> Progress:
    """Make a callback that logs the progress of computing features, about every thousand images and at the end."""

    def report(number: int, count: int) -> None:
        if number == count or number % PROGRESS_IMAGES == 0:
            text = f"{number:,} of {count:,} images have features, which are computed once and stay at this site"
            log.record("features_progress", text, done=number, images=count)

    return report


@dataclass(frozen=True)
class SiteImages:
    """The folders of a site's images.

    Attributes:
        folder: training images.
        state_folder: where decoded images and features are stored.
        tests: images to test models on, never trained on; None for none.
        device: where to compute, as for the option `device`.
        validations: images by which the server chooses the best round; None for none.
        skip_unreadable: whether to leave out any number of images that cannot be read, as the option of a run.
    """

    folder: Path
    state_folder: Path
    tests: Path | None = None
    device: str = "auto"
    validations: Path | None = None
    skip_unreadable: bool = False

    def make_runtime(self, terms: Terms, name: str, version: str, log: EventRecorder) -> SiteRuntime:
        """Decode the images to the size of the terms and set up the site.

        Args:
            terms: the configuration that the server and all sites of a federation share.
            name: name of the site.
            version: version of the site's halfmoon.
            log: the site's log.

        Raises:
            RefusalError: the images or labels do not fit the terms, or too many images cannot be read.
        """
        folder, left_out = self._decode(terms, log)
        self._check_unreadable(self.folder, len(folder), left_out, "")
        assert folder.images is not None, "it was just prepared"
        number = terms.sites.index(name)  # the client number of this site
        labels = map_labels(folder, terms)
        site = SiteRuntime.from_terms(terms, number, folder.images, labels, version, self.device)
        local_clients = site.local_clients
        # What the trained part of the network gets: images or, with a frozen feature extractor, their features, which
        # are computed once. The task (with the network) and the views are replaced to fit.
        model_inputs = select_inputs(
            terms.config, site.task, local_clients.views, self.state_folder / "features", progress=_make_progress(log)
        )
        train = model_inputs.prepare_training(local_clients.dataset.train)
        compute_device = local_clients.dataset.train.labels.device
        held_out: dict[str, Examples] = {}
        held_out_images: dict[Path, Images] = {}
        for purpose, folder_path in {"tests": self.tests, "validations": self.validations}.items():
            if folder_path is not None:
                decoded_folder = self.state_folder / f"{purpose}-{image_spec_name(terms)}"
                images = load_labeled_images(folder_path, terms, decoded_folder)
                self._check_unreadable(folder_path, len(images), read_left_out(decoded_folder), f"{purpose}-")
                held_out_images[folder_path] = images
                held_out[purpose] = model_inputs.prepare_test(to_examples(images, compute_device))
        for note in describe_held_out(held_out_images, folder.images if held_out_images else None):
            log.record("held_out_images", note)
        dataset = replace(local_clients.dataset, train=train)
        local_clients = replace(local_clients, dataset=dataset, views=model_inputs.views)
        return replace(site, task=model_inputs.task, local_clients=local_clients, held_out=HeldOut(**held_out))

    def write_training_digests(self, terms: Terms, log: EventRecorder) -> None:
        """Write the digests of the training images next to the final model; later commands recognize them by it."""
        images = self._decode(terms, log)[0].images
        if images is not None:
            write_digests(self.state_folder, images, replace=True)

    def _check_unreadable(self, folder: Path, readable: int, left_out: Mapping[str, str], prefix: str) -> None:
        """Refuse to take part if too many images of a folder cannot be read, and list them in a file.

        No person may be there to be asked, so only the option `skip_unreadable` permits more than `MAX_SKIPPED_SHARE`.

        Args:
            folder: the images.
            readable: the number of images that can be read.
            left_out: the reason for each of the others, by path.
            prefix: start of the name of the list, which is written into the state folder.

        Raises:
            PermanentRefusal: too many cannot be read. The refusal is sent to the server; its cause, which has the
                numbers and the name of the list, is for the site's people.
        """
        count = readable + len(left_out)
        if self.skip_unreadable or len(left_out) <= MAX_SKIPPED_SHARE * count:
            return
        path, reason = min(left_out.items())
        list_file = self.state_folder / f"{prefix}{SKIPPED}"
        try:
            write_skipped_list(list_file, left_out.items())
            listed = f"{list_file} lists all"
        except OSError:  # a full disk
            listed = f"`halfmoon site check {shlex.quote(str(folder))}` lists all"
        details = UserError(
            f"{len(left_out):,} of {count:,} images in {folder} cannot be read, such as {path} "
            f"({reason.removesuffix('.')}); {listed}",
            option="skip_unreadable",
            hint="replace or remove them, or leave them out with {skip_unreadable}.",
        )
        raise PermanentRefusal("too many of its images cannot be read; its log names them.") from details

    def _decode(self, terms: Terms, log: EventRecorder) -> tuple[SiteFolder, Mapping[str, str]]:
        """Open the folder of training images with its images decoded to the size of the terms.

        Decoded images are stored in the state folder, or in a subfolder if it has images of another size already.

        Args:
            terms: the configuration that the server and all sites of a federation share.
            log: the site's log.

        Returns:
            The folder, and the reason for each image that cannot be read, by path.
        """
        folder = open_prepared_folder(self.folder, self.state_folder, terms)
        if folder is not None:
            return folder, read_left_out(self.state_folder)
        output_folder = self.state_folder
        if self._has_decoded_images():
            output_folder /= image_spec_name(terms)
        result = decode_folder(self.folder, output_folder, terms)
        if result.decoded:
            left_out = len(result.left_out)
            text = f"decoded {result.decoded:,} images; {left_out:,} cannot be read and are left out"
            if left_out:
                share = left_out / (left_out + len(result.site))
                text += f" ({share:.0%}): `halfmoon site check {shlex.quote(str(self.folder))}` lists them"
            log.record("images_decoded", text, images=result.decoded, left_out=left_out)
        return result.site, result.left_out

    def _has_decoded_images(self) -> bool:
        try:
            return open_prepared_site(self.folder, self.state_folder).images is not None
        except UserError:
            return False

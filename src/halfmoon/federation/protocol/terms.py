"""The terms on which the server and all sites of a federation agree, and images in the form that terms require.

Equal terms have equal hashes, and every message contains the hash.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from halfmoon.api.requirements import requirements_of
from halfmoon.config import schema as settings
from halfmoon.config.schema import ATTACK_OPTIONS, EXECUTION_OPTIONS, PARTITION_OPTIONS, SITE_NAME, Config
from halfmoon.config.validation import MEASURED_COHORT, effective_norm
from halfmoon.core import hubs, toml, weight_files
from halfmoon.core.errors import UserError
from halfmoon.data import Images
from halfmoon.data.groups import hash_pixels
from halfmoon.federation.protocol import bundle, header, limits
from halfmoon.federation.protocol.disclosure import Disclosure, describe_uploads
from halfmoon.federation.protocol.log import TermsSummary, format_bytes
from halfmoon.federation.protocol.messages import PermanentRefusal
from halfmoon.methods import registry
from halfmoon.runs.factory import ImageSpec, build_method, build_task, image_preparation
from halfmoon.sites.folders import PreparedSite, prepare_site
from halfmoon.sites.folders.prepare import open_prepared_site
from halfmoon.sites.folders.site_folder import SiteFolder, read_site, suggest_class

MAX_SIDE_PIXELS = 4096

FLOAT32_BYTES = 4

SHA256_LENGTH = 64  # hexadecimal digits

LOCAL_OPTIONS = {
    "baselines", "data", "data_share", "unknown_classes", "validation_share", "validation_part", "image_size", "resize", "channels",
    "shrink", "pixel_mean", "pixel_std", "split", "client_dropout", "confidence_threshold", "evaluate_every",
    "client_models", "server_ema", "patience", "class_weights", *PARTITION_OPTIONS, *EXECUTION_OPTIONS, *ATTACK_OPTIONS,
} - {"labels_at"}  # fmt: skip
"""Options that are no part of the terms: the images of a simulation, and where and how something is computed."""


@dataclass(frozen=True)
class Terms:
    """The options that the server and the sites of a federation share.

    Attributes:
        name: name of the federation.
        sites: names of the sites. A site's number is its index here.
        image_spec: the size, normalization and classes of the images.
        config: the shared options.
    """

    name: str
    sites: tuple[str, ...]
    image_spec: ImageSpec
    config: Config

    @classmethod
    def from_options(
        cls, name: str, sites: tuple[str, ...], image_spec: ImageSpec, values: Mapping[str, Any], file: str
    ) -> "Terms":
        """Make the terms of a federation from options, and validate them.

        The options become a `Config`, like those of a simulation. It needs values for `data`, which each site gives
        itself, and for `clients`, the number of sites.

        Args:
            name: name of the federation.
            sites: names of the sites.
            image_spec: the size, normalization and classes of the images.
            values: the shared options by name; others have their defaults.
            file: the source of the options, for error messages.

        Raises:
            UserError: the first invalid value.
        """
        _check_names(name, sites)
        _check_image_spec(image_spec)
        hubs.check_portable(str(values.get("network", "")))  # it must not name a folder of the server's machine
        weights = values.get("weights")
        if weights is not None and not (isinstance(weights, str) and weight_files.NAME.fullmatch(weights)):
            raise UserError("weights must be named by their SHA-256 in the terms of a federation.")
        defaults = {"cohort": min(Config.cohort, len(sites))}
        # "federation NAME" contains a blank, so it cannot be taken for a folder on the server's machine.
        implied = {"data": f"federation {name}", "clients": len(sites)}
        config = settings.resolve({**defaults, **values, **implied}, {}, file)
        entry = registry.entry(config.method)
        if entry.pooled:  # a baseline that trains on the images of all sites together
            raise UserError(
                f"method {entry.name} needs all images on one machine: it cannot run in a federation of sites."
            )
        build_method(config)  # validates the method's options
        limits.check_terms(config, image_spec, len(sites))
        return cls(name, sites, image_spec, config)

    def check(self) -> None:
        """Check that the network can be built; raise UserError if not. A site does this once its people agreed."""
        build_task(self.config, self.image_spec)

    @classmethod
    def parse(cls, text: str) -> "Terms":
        """Parse the terms that a server sent.

        Args:
            text: JSON as of `Terms.text`. It may be hostile.

        Raises:
            UserError: the terms are invalid, or are for another version of halfmoon or other plugins.
        """
        if len(text) > limits.MAX_TERMS_BYTES:
            raise UserError(
                f"the server's terms have {format_bytes(len(text))}; the limit is "
                f"{format_bytes(limits.MAX_TERMS_BYTES)}."
            )
        try:
            record = header.parse_json(text)
            image_record = record["form"]  # size, classes and normalization of the images
            image_fields = {field.name: _list_to_tuple(image_record[field.name]) for field in fields(ImageSpec)}
            # None is the default. A configuration file has no None, so `from_options` would reject it.
            method_options = {option: value for option, value in record["options"].items() if value is not None}
            values = {**record["config"], "options": method_options}
            unknown = set(values) - shared_options() - {"options"}
            name = record["name"]
            sites = tuple(record["sites"])
            server_program = record["program"]
            # Compares versions only. Which plugins the terms need is known once their method is.
            difference = bundle.describe_difference(server_program)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"the server's terms cannot be read ({type(error).__name__}).") from error
        if unknown:
            raise UserError(f"the server's terms have an option {min(unknown)!r} that this halfmoon does not know.")
        if difference is not None:
            raise UserError(f"the server's terms are for another program: {difference}.")
        terms = cls.from_options(name, sites, ImageSpec(**image_fields), values, "the terms")
        if terms.program != server_program:  # versions are equal, so a plugin differs
            plugin_difference = _describe_plugins(terms.config, server_program["plugins"])
            raise UserError(
                f"the server's terms are for another program: {plugin_difference}; install the same version."
            )
        return terms

    @cached_property
    def program(self) -> dict[str, Any]:
        """The program that the server and the sites run, as of `bundle.describe_program`."""
        return bundle.describe_program({plugin.name: plugin.sha256 for plugin in settings.plugin_origins(self.config)})

    @cached_property
    def text(self) -> str:
        """The terms as JSON. Equal terms have the same text; the order of lines in a configuration file has no effect."""
        record = {
            "name": self.name,
            "sites": self.sites,
            "form": asdict(self.image_spec),  # the name is fixed: it is part of the hash that sites agree to
            "config": {name: getattr(self.config, name) for name in shared_options()},
            "options": self._method_options(),
            "program": self.program,
        }
        return json.dumps(record, sort_keys=True)

    def _method_options(self) -> dict[str, Any]:
        """Collect the options of the method, also those that have their defaults."""
        method = self.config.method
        defaults = {name: option.default for name, option in registry.options(method).items()}
        return {**defaults, **settings.method_options(self.config, method)}

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the terms' text, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def sentence(self) -> str:
        """Describe the terms in one sentence, for the people at a site."""
        channels, height, width = self.image_spec.image
        rounds = settings.count_rounds(self.config)
        return (
            f"federation {self.name} ({self.hash[:8]}): {registry.entry(self.config.method).title} for {rounds} "
            f"rounds, {self.config.cohort} of {len(self.sites)} sites a round; images {height}x{width} with {channels} "
            f"channel{'s' if channels > 1 else ''}; classes {', '.join(self.image_spec.classes)}"
        )

    def summary(self) -> TermsSummary:
        """Summarize the terms for the people at a site: in a sentence, in about ten lines, and in full as two tables.

        The tables have a row for each option (`rows`) and for each tensor that the site sends (`tensors`).
        """
        uploads = self.disclosure
        return TermsSummary(
            hash=self.hash,
            sentence=self.sentence(),
            rows=tuple(self._option_rows()),
            brief=self._format_brief(uploads),
            tensors=tuple(_tensor_rows(uploads)),
        )

    def _option_rows(self) -> list[tuple[str, str, str]]:
        """Make the table rows (name, value, meaning) of the options, the program and the size of the network."""
        helps = settings.option_helps()
        rows: list[tuple[str, str, str]] = []
        for name in settings.option_types():
            if name in shared_options() and name != "method":  # the sentence about the terms names the method
                rows.append((name, toml.format_text(getattr(self.config, name)), helps[name]))
        for name, value in self._method_options().items():
            rows.append((name, toml.format_text(value), f"an option of {self.config.method}"))
        program = self.program
        rows.append(("halfmoon", program["halfmoon"], "the version that runs at the server and at every site"))
        rows.append(("bundle", program["bundle"][:16], "hash of the app bundle, without code, that a site accepts"))
        for name, digest in program["plugins"].items():
            rows.append((name, digest[:16], "hash of a plugin"))
        trained, frozen = limits.count_trained_and_frozen(self.config, self.image_spec)
        trained_size = format_bytes(FLOAT32_BYTES * trained)
        rows.append(("numbers", f"{trained:,}", f"of the network that are trained ({trained_size})"))
        if frozen:
            rows.append(("frozen", f"{frozen:,}", "numbers of the pretrained weights, which are never changed or sent"))
        return rows

    @cached_property
    def disclosure(self) -> Disclosure:
        """The tensors that a site sends. Finding them takes a few steps of training on random images."""
        return describe_uploads(self.config, self.image_spec)

    def _format_brief(self, uploads: Disclosure) -> tuple[str, ...]:
        """Format what the people at a site must know before they agree to these terms: what is sent, to whom, and more.

        Args:
            uploads: the tensors that a site sends, and what each tells about a single image.

        Returns:
            About ten lines.
        """
        config = self.config
        channels, height, width = self.image_spec.image
        plural = "s" if channels > 1 else ""
        rounds = settings.count_rounds(config)
        title = registry.entry(config.method).title
        # A method that personalizes models also sends models of few sites, from which more can be learned.
        personal = requirements_of(build_method(config), effective_norm(config)).personal
        shared = "averages, and models or sums made of few sites' uploads," if personal else "the average"
        plugins = ", ".join(str(plugin) for plugin in settings.plugin_origins(config))
        return (
            f"Federation {self.name} asks this site to train one classifier with {len(self.sites) - 1} others.",
            f"Classes: {', '.join(self.image_spec.classes)}.",
            f"Training: {title} on this site's images, resized to {height}x{width} with {channels} channel{plural}.",
            *uploads.lines(),
            "What is never sent: image files, and names of files and folders.",
            f"To whom: the federation's server, which sends {shared} to all sites.",
            f"For how long: {rounds} rounds, {config.cohort} of {len(self.sites)} sites in each, then it ends.",
            f"Defenses: {'; '.join(_list_defenses(config))}.",
            f"Code from outside halfmoon: {plugins or 'none'}.",
            f"Ctrl-C ends it at any time. All options: --all, or halfmoon site terms. Hash: {self.hash}",
        )


def _tensor_rows(uploads: Disclosure) -> list[tuple[str, str, str]]:
    """Make the table rows (name, size, meaning) of the tensors that a site sends."""
    rows = []
    for tensor in uploads.tensors:
        rows.append((f"{tensor.client_update}: {tensor.path}", tensor.describe(), tensor.meaning))
    if uploads.secure:
        for tensor in uploads.transmitted():
            rows.append((f"{tensor.client_update}: {tensor.path}", tensor.describe(), "all of these, under masks"))
    return rows


def shared_options() -> set[str]:
    """List the options that all sites of a federation share."""
    return set(settings.option_types()) - LOCAL_OPTIONS


def _describe_plugins(config: Config, server_plugins: Any) -> str:
    """Describe how the plugins of this site differ from those of the server.

    Args:
        config: the configuration, whose options name plugins.
        server_plugins: from the server, which may be hostile: the SHA-256 of each plugin by name.

    Returns:
        A clause for an error, such as "its plugins differ (NAME at this site, HASH at the server)".
    """
    server_hashes = server_plugins if isinstance(server_plugins, dict) else {}
    differences = []
    for plugin in settings.plugin_origins(config):
        server_hash = server_hashes.get(plugin.name)
        if server_hash != plugin.sha256:
            differences.append(f"{plugin} at this site, {str(server_hash)[:SHA256_LENGTH]} at the server")
    # Without a difference here the server names plugins that its options do not need.
    return f"its plugins differ ({'; '.join(differences) or 'in number'})"


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_names(federation: Any, sites: tuple[Any, ...]) -> None:
    """Check the names of a federation and of its sites, which become names of folders; raise UserError if invalid."""
    _check_name("the federation", federation)
    for site in sites:
        _check_name("a site", site)
    if not sites or len(set(sites)) < len(sites):
        raise UserError("sites must name one site or more, each once.")


def _check_name(subject: str, name: Any) -> None:
    """Raise UserError unless a name is a string of up to 64 letters, digits, dots, dashes and underscores."""
    if not isinstance(name, str) or not SITE_NAME.fullmatch(name):
        raise UserError(
            f"{subject} is called {name!r}: use up to 64 letters, digits, dots, dashes and underscores, of which "
            "the first is a letter or a digit."
        )


def _list_defenses(config: Config) -> list[str]:
    """List what protects the sites' uploads and the model in a federation, and what does not."""
    defenses: list[str] = []
    if config.secure_aggregation:
        defenses.append("the server sees only the sum of many sites (secure aggregation)")
    if config.dp_clip is not None:
        defenses.append("noise hides what one site contributes (differential privacy)")
    if config.aggregation != "mean":
        defenses.append(f"uploads are checked against hostile sites ({config.aggregation})")
    if not defenses:
        defenses.append("only encryption; a trained network can reveal something about the images")
    if config.cohort < MEASURED_COHORT:
        defenses.append(f"none stops one hostile site of {config.cohort} from spoiling the model")
    return defenses


def _check_image_spec(image_spec: ImageSpec) -> None:
    """Check the types and ranges of the image size, the class names and the normalization of a federation.

    They come from a file or from a server that may be hostile.

    Args:
        image_spec: what the networks receive. Its `mirror` states whether a mirrored image has the same class.

    Raises:
        UserError: the first invalid value.
    """
    image = image_spec.image
    classes = image_spec.classes
    # A server sends JSON, so that the types are not those of the annotations either.
    if not all(isinstance(value, tuple) for value in (image, classes, image_spec.mean, image_spec.std)):
        raise UserError("image, classes, mean and std must be lists.")
    if type(image_spec.mirror) is not bool:
        raise UserError(f"mirror is {toml.format_text(image_spec.mirror)}: it must be true or false.")
    sides_are_valid = all(type(side) is int and 1 <= side <= MAX_SIDE_PIXELS for side in image)
    if len(image) != 3 or not sides_are_valid or image[0] not in (1, 3):
        raise UserError(
            f"image is {toml.format_text(image)}: it must be channels (1 or 3), height and width, such as [1, 28, 28]."
        )
    names_are_texts = all(type(name) is str and name for name in classes)
    if len(classes) < 2 or not names_are_texts or len(set(classes)) < len(classes):
        raise UserError(f"classes is {toml.format_text(classes)}: it must name two classes or more, each once.")
    _check_channel_values("mean", image_spec.mean, channels=image[0])
    _check_channel_values("std", image_spec.std, channels=image[0])


def _check_channel_values(name: str, values: tuple[Any, ...], channels: int) -> None:
    """Check a mean or standard deviation to normalize by: one finite number a channel, and a positive one for "std".

    Raises:
        UserError: it is something else.
    """
    all_finite = all(isinstance(value, float) and math.isfinite(value) for value in values)
    valid = len(values) == channels and all_finite
    if not valid or (name == "std" and min(values) <= 0):
        raise UserError(f"{name} is {toml.format_text(values)}: it must be one number for each of {channels} channels.")


def image_spec_name(terms: Terms) -> str:
    """Name the image size of terms, HEIGHTxWIDTHxCHANNELS; a site uses it as the name of a folder."""
    channels, height, width = terms.image_spec.image
    return f"{height}x{width}x{channels}"


def open_prepared_folder(folder: Path, decoded_folder: Path, terms: Terms) -> SiteFolder | None:
    """Open a folder of images that were decoded earlier, so that they need not be decoded once more.

    Args:
        folder: the images.
        decoded_folder: where they may have been decoded to.
        terms: the configuration of a federation, which gives the image size.

    Returns:
        The folder, or None if its images are not decoded to the size and preparation of the terms.
    """
    channels, height, width = terms.image_spec.image
    try:
        site = open_prepared_site(folder, decoded_folder, image_preparation(terms.config).cache_id)
    except UserError:
        return None
    # An earlier federation may have had them decoded to another size.
    if site.images is None or site.images.shape[1:] != (height, width, channels):
        return None
    return site


def decode_folder(folder: Path, decoded_folder: Path, terms: Terms) -> PreparedSite:
    """Decode and resize a folder's images to the size of the terms, and write them as one array.

    Args:
        folder: the images.
        decoded_folder: where to write them.
        terms: the configuration that the server and all sites of a federation share. Its options decide whether an
            image of another aspect ratio is cropped or stretched (`crop`), and which values of an image of more than
            8 bits become black and white (`window`).

    Returns:
        The decoded images, and the images that could not be read.

    Raises:
        UserError: they do not fit into memory.
        OSError: they do not fit on the disk.
    """
    channels, height, width = terms.image_spec.image
    limits.check_images_fit(decoded_folder, len(read_site(folder)), terms.image_spec.image)
    options = image_preparation(terms.config)
    return prepare_site(folder, (height, width), channels, decoded_folder, crop=options.crop, window=options.window)


def load_labeled_images(folder: Path, terms: Terms, decoded_folder: Path) -> Images:
    """Load a folder's labeled images and their labels, as class numbers of the terms.

    Args:
        folder: the images.
        terms: the configuration that the server and all sites of a federation share.
        decoded_folder: where the images are decoded to, unless they are there already.

    Raises:
        UserError: no image has a label.
    """
    site = open_prepared_folder(folder, decoded_folder, terms)
    if site is None:
        site = decode_folder(folder, decoded_folder, terms).site
    assert site.images is not None, "it was just prepared"
    labeled_rows = np.flatnonzero(site.labels >= 0)
    if len(labeled_rows) == 0:
        raise UserError(f"{folder} has no labeled image: name some in its labels.csv.")
    labels = map_labels(site, terms)
    return Images(np.array(site.images[labeled_rows]), labels[labeled_rows])


def describe_held_out(images: Mapping[Path, Images], train: np.ndarray | None = None) -> list[str]:
    """Describe in sentences what is wrong with folders of labeled images: unreadable images, and images in two folders.

    Args:
        images: the readable images of each folder. A folder after another one may not have its images.
        train: training images, which none of the folders may have, uint8 (N, H, W, C); None for none.
    """
    notes: list[str] = []
    source_of_pixels: dict[bytes, str] = {} if train is None else dict.fromkeys(hash_pixels(train), "training images")
    for folder, labeled in images.items():
        count = int((read_site(folder).labels >= 0).sum())
        if unreadable := count - len(labeled):
            notes.append(f"{unreadable:,} of {count:,} labeled images in {folder} cannot be read and are left out")
        hashes = hash_pixels(labeled.images)
        for other, number in Counter(source_of_pixels[key] for key in hashes if key in source_of_pixels).items():
            notes.append(
                f"{number:,} of {len(labeled):,} images in {folder} are {other} as well, so an accuracy on them is too "
                "high: take them out of one of the two"
            )
        source_of_pixels |= dict.fromkeys(hashes, f"images in {folder}")
    return notes


def map_labels(site: SiteFolder, terms: Terms) -> np.ndarray:
    """Map a folder's labels to the class numbers of the terms.

    Each folder numbers its classes in a different order, so classes are matched by name.

    Args:
        site: the folder.
        terms: the configuration that the server and all sites of a federation share.

    Returns:
        The labels, int64 (N,); -1 for images without one.

    Raises:
        PermanentRefusal: the folder has labels of classes that the terms do not have.
    """
    classes = terms.image_spec.classes
    used_numbers = {int(label) for label in np.unique(site.labels[site.labels >= 0])}
    used_names = [name for number, name in enumerate(site.classes) if number in used_numbers]
    unknown = [name for name in used_names if name not in classes]
    if unknown:
        names = ", ".join(f"{name}{suggest_class(name, classes)}" for name in unknown)
        details = UserError(
            f"{site.folder} has labels of classes that federation {terms.name} does not have: {names}. Its classes "
            f"are {', '.join(classes)}: correct the labels, or agree on the classes."
        )
        # The refusal is sent to the server, so it names no class of this site; the cause is written to the site's log.
        refusal = "it has labels of classes that the federation does not have; its log names them."
        raise PermanentRefusal(refusal) from details
    labels = site.labels.copy()
    for number in used_numbers:
        labels[site.labels == number] = classes.index(site.classes[number])
    return labels

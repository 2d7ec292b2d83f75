"""The terms that all of a federation agree on, and labeled images of a folder in their form.

Equal terms have equal hashes, and the hash is in every message.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from halfmoon.config import schema as settings
from halfmoon.config.schema import ATTACK_OPTIONS, EXECUTION_OPTIONS, PARTITION_OPTIONS, SITE_NAME, Config
from halfmoon.core import hubs, weight_files
from halfmoon.core.errors import UserError
from halfmoon.data import Images
from halfmoon.federation.protocol import bundle, header, limits
from halfmoon.federation.protocol.log import TermsSummary, format_bytes
from halfmoon.federation.protocol.messages import PermanentRefusal
from halfmoon.methods import registry
from halfmoon.runs.factory import ImageSpec, method, preparation, task
from halfmoon.sites.folders import PreparedSite, prepare_site
from halfmoon.sites.folders.prepare import open_prepared_site
from halfmoon.sites.folders.site_folder import SiteFolder, read_site, suggest_class
from halfmoon.storage import toml

MAX_SIDE_PIXELS = 4096  # pixels of a side at most

LOCAL_OPTIONS = {
    "baselines", "data", "data_share", "validation_share", "validation_part", "image_size", "resize", "channels",
    "shrink", "pixel_mean", "pixel_std", "split", "client_dropout", "confidence_threshold", "evaluate_every",
    "client_models", "server_ema", *PARTITION_OPTIONS, *EXECUTION_OPTIONS, *ATTACK_OPTIONS,
} - {"labels_at"}  # fmt: skip
"""Options that sites need not agree on: the images of a simulation, and where and how something is computed."""


@dataclass(frozen=True)
class Terms:
    """The options that a federation's sites and its server compute with; a site's number is its place in `sites`."""

    name: str
    sites: tuple[str, ...]
    image_spec: ImageSpec
    config: Config

    @classmethod
    def from_options(
        cls, name: str, sites: tuple[str, ...], form: ImageSpec, values: Mapping[str, Any], file: str
    ) -> "Terms":
        """Return the terms with the options `values` except `LOCAL`; raise UserError for the first mistake."""
        _check_names(name, sites)
        _check_form(form)
        hubs.check_portable(str(values.get("network", "")))
        weights = values.get("weights")
        if weights is not None and not (isinstance(weights, str) and weight_files.NAME.fullmatch(weights)):
            raise UserError("weights must be named by their SHA-256 in the terms of a federation.")
        defaults = {"cohort": min(Config.cohort, len(sites))}
        # With a blank: no folder beside the server's is meant.
        here = {"data": f"federation {name}", "clients": len(sites)}
        config = settings.resolve({**defaults, **values, **here}, {}, file)
        entry = registry.entry(config.method)
        if entry.pooled:
            raise UserError(f"method {entry.name} needs all images in one place: it cannot be played between sites.")
        method(config)
        limits.check_terms(config, form, len(sites))
        return cls(name, sites, form, config)

    def check(self) -> None:
        """Raise UserError where the network cannot be made: a site makes it once its people have agreed."""
        task(self.config, self.image_spec)

    @classmethod
    def parse(cls, text: str) -> "Terms":
        """Return the terms in a server's message; raise UserError where this halfmoon does not understand them."""
        if len(text) > limits.MAX_TERMS_BYTES:
            raise UserError(
                f"the server's terms have {format_bytes(len(text))}, of {format_bytes(limits.MAX_TERMS_BYTES)} at most."
            )
        try:
            facts = header.parse_json(text)
            image = {field.name: _plain(facts["form"][field.name]) for field in fields(ImageSpec)}
            # None is a default: a file cannot say it.
            options = {option: value for option, value in facts["options"].items() if value is not None}
            values = {**facts["config"], "options": options}
            strange = set(values) - shared_options() - {"options"}
            name, sites = facts["name"], tuple(facts["sites"])
            program = facts["program"]
            other = bundle.describe_difference(program)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"the server's terms cannot be read ({type(error).__name__}).") from error
        if strange:
            raise UserError(f"the server's terms have an option {min(strange)!r} that this halfmoon does not know.")
        if other is not None:
            raise UserError(f"the server's terms are of another program than this site's: {other}.")
        terms = cls.from_options(name, sites, ImageSpec(**image), values, "the terms")
        if terms.program != program:
            theirs = program["plugins"] if isinstance(program["plugins"], dict) else {}
            others = [plugin for plugin in settings.plugin_origins(terms.config) if theirs.get(plugin.part) != plugin.sha256]
            mine = "; ".join(f"here is {plugin}, there {str(theirs.get(plugin.part))[:64]}" for plugin in others)
            raise UserError(
                f"the server's terms are of another program than this site's: its plugins differ "
                f"({mine or 'in number'}); install the same version."
            )
        return terms

    @cached_property
    def program(self) -> dict[str, Any]:
        return bundle.describe_program({plugin.part: plugin.sha256 for plugin in settings.plugin_origins(self.config)})

    @cached_property
    def text(self) -> str:
        """The terms as JSON, the same for the same terms, whatever the order of a file's lines."""
        facts = {
            "name": self.name,
            "sites": self.sites,
            "form": asdict(self.image_spec),
            "config": {name: getattr(self.config, name) for name in shared_options()},
            "options": self._options(),
            "program": self.program,
        }
        return json.dumps(facts, sort_keys=True)

    def _options(self) -> dict[str, Any]:
        method = self.config.method
        defaults = {name: option.default for name, option in registry.options(method).items()}
        return {**defaults, **settings.method_options(self.config, method)}

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def sentence(self) -> str:
        """Return the terms in a sentence for the people at a site."""
        channels, height, width = self.image_spec.image
        config, rounds = self.config, settings.count_rounds(self.config)
        return (
            f"federation {self.name} ({self.hash[:8]}): {registry.entry(config.method).title} for {rounds} "
            f"rounds, {config.cohort} of {len(self.sites)} sites a round; images {height}x{width} with {channels} "
            f"channel{'s' if channels > 1 else ''}; classes {', '.join(self.image_spec.classes)}"
        )

    def summary(self) -> TermsSummary:
        """Return the terms for the people at a site: a sentence, and every option that counts."""
        config, about, program = self.config, settings.option_helps(), self.program
        names = [name for name in settings.option_types() if name in shared_options() and name != "method"]
        rows = [(name, toml.text(getattr(config, name)), about[name]) for name in names]
        rows += [(name, toml.text(value), f"an option of {config.method}") for name, value in self._options().items()]
        count, frozen = limits.count_trained_and_frozen(config, self.image_spec)
        rows += [("halfmoon", program["halfmoon"], "the version that runs at the server and at every site")]
        rows += [("bundle", program["bundle"][:16], "hash of the app bundle, without code, that a site accepts")]
        rows += [(name, hash[:16], "hash of a plugin") for name, hash in program["plugins"].items()]
        rows += [("numbers", f"{count:,}", f"of the network that are trained ({format_bytes(4 * count)})")]
        if frozen:
            rows += [("frozen", f"{frozen:,}", "numbers of the weights that stay as they are, and never travel")]
        return TermsSummary(self.hash, self.sentence(), tuple(rows), self._brief(4 * count))

    def _brief(self, numbers: int) -> tuple[str, ...]:
        """Return ten lines for a person: what leaves, to whom, how long, and which defenses there are."""
        config, rounds, (channels, height, width) = self.config, settings.count_rounds(self.config), self.image_spec.image
        kinds = {
            "the server sees only the sum of many sites (secure aggregation)": config.secure_aggregation,
            "noise hides what one site gives (differential privacy)": config.dp_clip is not None,
            f"uploads are checked against hostile sites ({config.aggregation})": config.aggregation != "mean",
        }
        defenses = "; ".join(words for words, active in kinds.items() if active)
        entry, many = registry.entry(config.method), "s" if channels > 1 else ""
        outside = ", ".join(str(plugin) for plugin in settings.plugin_origins(config))
        return (
            f"Federation {self.name} asks this site to train one classifier with {len(self.sites) - 1} others.",
            f"Classes: {', '.join(self.image_spec.classes)}.",
            f"Here: {entry.title} trains on this site's images, made {height}x{width} with {channels} channel{many}.",
            f"What leaves: the numbers of the trained network, {format_bytes(numbers)} or so a round, and counts of images.",
            "What never leaves: images, labels of single images, names of files and folders.",
            "To whom: the federation's server, which gives the average to all sites.",
            f"How long: {rounds} rounds, {config.cohort} of {len(self.sites)} sites in each; it ends by itself.",
            f"Defenses: {defenses or 'none besides encryption: numbers can tell something about images'}.",
            f"Code from outside halfmoon: {outside or 'none'}.",
            f"Ctrl-C ends it at any time. All options: --all, or halfmoon site terms. Hash: {self.hash}",
        )


def shared_options() -> set[str]:
    return set(settings.option_types()) - LOCAL_OPTIONS


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_names(name: Any, sites: tuple[Any, ...]) -> None:
    for owner, word in (("the federation", name), *(("a site", site) for site in sites)):
        if not isinstance(word, str) or not SITE_NAME.fullmatch(word):
            raise UserError(
                f"{owner} is called {word!r}: use up to 64 letters, digits, dots, dashes and underscores, of which the "
                "first is a letter or a digit."
            )
    if not sites or len(set(sites)) < len(sites):
        raise UserError("sites must name one site or more, each once.")


def _check_form(form: ImageSpec) -> None:
    image, classes = form.image, form.classes
    if not all(isinstance(value, tuple) for value in (image, classes, form.mean, form.std)):
        raise UserError("image, classes, mean and std must be lists.")
    if type(form.mirror) is not bool:
        raise UserError(f"mirror is {toml.text(form.mirror)}: it must be true or false.")
    sides = all(type(side) is int and 1 <= side <= MAX_SIDE_PIXELS for side in image)
    if len(image) != 3 or not sides or image[0] not in (1, 3):
        raise UserError(
            f"image is {toml.text(image)}: it must be channels (1 or 3), height and width, such as [1, 28, 28]."
        )
    if len(classes) < 2 or not all(type(c) is str and c for c in classes) or len(set(classes)) < len(classes):
        raise UserError(f"classes is {toml.text(classes)}: it must name two classes or more, each once.")
    for name, values in (("mean", form.mean), ("std", form.std)):
        finite = len(values) == image[0] and all(isinstance(v, float) and math.isfinite(v) for v in values)
        if not finite or (name == "std" and min(values) <= 0):
            raise UserError(f"{name} is {toml.text(values)}: it must be one number for each of {image[0]} channels.")


def image_spec_name(terms: Terms) -> str:
    channels, height, width = terms.image_spec.image
    return f"{height}x{width}x{channels}"


def open_prepared_folder(folder: Path, out: Path, terms: Terms) -> SiteFolder | None:
    """Return a folder that is decoded into `out` in the terms' form, else None."""
    channels, height, width = terms.image_spec.image
    try:
        site = open_prepared_site(folder, out, preparation(terms.config).form)
    except UserError:
        return None
    return site if site.images is not None and site.images.shape[1:] == (height, width, channels) else None


def decode_folder(folder: Path, out: Path, terms: Terms) -> PreparedSite:
    """Decode a folder's images into `out`; raise UserError or OSError where they do not fit."""
    channels, height, width = terms.image_spec.image
    limits.check_images_fit(out, len(read_site(folder)), terms.image_spec.image)
    options = preparation(terms.config)
    return prepare_site(folder, (height, width), channels, out, crop=options.crop, window=options.window)


def load_labeled_images(folder: Path, terms: Terms, out: Path) -> Images:
    """Return a folder's labeled images, decoded into `out`; raise UserError where there are none."""
    site = open_prepared_folder(folder, out, terms) or decode_folder(folder, out, terms).site
    assert site.images is not None, "it was just prepared"
    rows = np.flatnonzero(site.labels >= 0)
    if not len(rows):
        raise UserError(f"{folder} has no labeled image: name some in its labels.csv.")
    return Images(np.array(site.images[rows]), map_labels(site, terms)[rows])


def map_labels(site: SiteFolder, terms: Terms) -> np.ndarray:
    """Return the labels by the terms' class numbers, -1 for none; raise `Impossible` for another class."""
    classes = terms.image_spec.classes
    used = {int(label) for label in np.unique(site.labels[site.labels >= 0])}
    strange = [name for number, name in enumerate(site.classes) if number in used and name not in classes]
    if strange:
        near = ", ".join(f"{name}{suggest_class(name, classes)}" for name in strange)
        words = (
            f"{site.folder} has labels of classes that federation {terms.name} does not have: {near}. Its classes "
            f"are {', '.join(classes)}: correct the labels, or agree on the classes."
        )
        # The server hears no name of this site's classes.
        public = "it has labels of classes that the federation does not have; its own log names them."
        raise PermanentRefusal(public) from UserError(words)
    labels = site.labels.copy()
    for number in used:
        labels[site.labels == number] = classes.index(site.classes[number])
    return labels

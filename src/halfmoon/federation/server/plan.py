"""The configuration file of a federation: the options of a run, and a table [federation]."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from halfmoon.api.requirements import requirements_of
from halfmoon.config import schema as settings
from halfmoon.config.option_types import convert_value
from halfmoon.config.schema import EXECUTION_OPTIONS, FEDERATION_TABLE, Config
from halfmoon.config.validation import default_aggregation, effective_norm
from halfmoon.core import hubs, toml, weight_files
from halfmoon.core.errors import UserError, suggest
from halfmoon.data.partition.split import Split
from halfmoon.federation.protocol.terms import Terms, shared_options
from halfmoon.methods import registry
from halfmoon.models.efficientnet import MEAN, STD
from halfmoon.models.hubs import weights_file as published
from halfmoon.runs.factory import ImageSpec, build_method, network_name
from halfmoon.sites.folders.export import find_labels_at

SERVER_OPTIONS = (*EXECUTION_OPTIONS, "evaluate_every", "server_ema", "patience")
"""Options that concern only the server, so that they are not part of the terms."""


@dataclass(frozen=True)
class Rules:
    """A server's rules for its sites. None of them changes how an update is computed.

    Raises:
        UserError: if a value is out of range.
    """

    min_replies: Annotated[int | None, "fewest replies of a round; none: half of the cohort"] = None
    round_timeout: Annotated[float, "seconds that a site may take for one answer"] = 3600.0
    absence: Annotated[float, "seconds to wait for a site that is not connected"] = 60.0
    attempts: Annotated[
        int, "how often a round with fewer than min_replies is tried, with other sites, before the run stops"
    ] = 10
    linger: Annotated[
        float, "seconds that the server waits at the end for disconnected sites, to give them the model"
    ] = 0.0
    strikes: Annotated[int, "unusable answers after which a site is set aside; 0: never"] = 3
    norm_bound: Annotated[float, "largest update, in medians of the cohort's; 0: none is too large"] = 10.0
    weight_cap: Annotated[float, "largest weight of a site, in medians of the cohort's; 0: none is too large"] = (
        settings.DEFAULT_WEIGHT_CAP
    )
    images: Annotated[
        tuple[int, ...] | None,
        "images of each site, if the server knows them, in the order of sites; none: as the sites report",
    ] = None

    def __post_init__(self) -> None:
        """Check that each of a server's rules for its sites is in its range; raise UserError for the first that is not.

        The annotation of each field of the class describes the option.
        """
        if self.images is not None and min(self.images, default=0) < 1:
            raise UserError(
                f"{FEDERATION_TABLE}.images is {toml.format_text(self.images)}: it must have a number from 1 for each site."
            )
        minimums = {
            "weight_cap": 0,
            "strikes": 0,
            "norm_bound": 0,
            "absence": 0,
            "round_timeout": 0,
            "linger": 0,
            "min_replies": 1,
            "attempts": 1,
        }
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not value >= minimum or not math.isfinite(value):  # "not >=" also refuses NaN
                raise UserError(
                    f"{FEDERATION_TABLE}.{name} is {toml.format_text(value)}: it must be at least {minimum}."
                )

    def quorum(self, cohort: int) -> int:
        """Compute how many replies a round needs at least, if `cohort` sites were asked."""
        half = math.ceil(cohort / 2)
        needed = half if self.min_replies is None else self.min_replies
        return max(1, min(needed, cohort))


@dataclass(frozen=True)
class FederationTable:
    """The options of the table [federation] besides the `Rules`: the sites, and the format of their images."""

    sites: Annotated[tuple[str, ...], "the names of the sites, in the order of their numbers"]
    classes: Annotated[tuple[str, ...], "the names of the classes, in the order of their numbers"]
    image: Annotated[tuple[int, ...], "channels, height and width to which all images are resized, such as [1, 28, 28]"]
    name: Annotated[str | None, "the name of the federation; none: that of its file"] = None
    mirror: Annotated[bool, "whether a mirrored image keeps its class"] = False
    mean: Annotated[tuple[float, ...], "mean of each channel (of pixels in 0..1), to normalize by"] = (0.5,)
    std: Annotated[tuple[float, ...], "standard deviation of each channel, to normalize by"] = (0.25,)
    test: Annotated[Path | None, "the server's folder of labeled test images; none: the sites' test images"] = None
    validation: Annotated[
        Path | None,
        "the server's folder of labeled images that choose the round; none: the sites' validation images",
    ] = None
    server: Annotated[Path | None, "the server's folder of labeled training images; none: it has none"] = None


@dataclass(frozen=True)
class FederationPlan:
    """The configuration of a federation's server.

    Attributes:
        terms: the configuration that the sites agree to.
        rules: the server's rules for its sites.
        test: the server's folder of test images, if any.
        server: the server's folder of labeled training images, if any.
        config: the configuration of the terms, with the options of this machine.
        validation: the server's folder of validation images, if any.
    """

    terms: Terms
    rules: Rules
    test: Path | None
    server: Path | None
    config: Config
    validation: Path | None = None


def load_plan(path: Path) -> FederationPlan:
    """Load the configuration file of a federation. Paths in it are relative to its folder.

    Raises:
        UserError: for the first mistake in it.
    """
    raw = settings.read_file(path)
    if not isinstance(raw.get(FEDERATION_TABLE), Mapping):
        raise UserError(f"{path} has no table [{FEDERATION_TABLE}]: write one with sites, classes and image.")
    table, rules = _read_table(raw.pop(FEDERATION_TABLE), path)
    count = len(table.sites)
    cohort_defaults = {}
    if "split" not in raw and count:
        cohort_defaults = {"clients": count, "cohort": min(Config.cohort, count)}
    file_config = settings.resolve({**cohort_defaults, **raw}, {}, path, check_catalog=False)
    if file_config.attack != "none":
        raise UserError(
            f"attack is {file_config.attack!r} in {path.name}, but hostile clients exist in simulations only: leave "
            "attack and attackers out."
        )

    if file_config.class_weights != "none":
        raise UserError(
            f"class_weights is {file_config.class_weights!r} in {path.name}, but needs the number of labels of each class "
            "over all sites, which sites do not send: leave it out."
        )

    values = _term_values(path, raw, file_config)
    terms = _make_terms(path, table, values)
    if rules.images is not None and len(rules.images) != count:
        raise UserError(f"{FEDERATION_TABLE}.images has {len(rules.images)} numbers, but there are {count} sites.")
    if rules.min_replies is not None and rules.min_replies > terms.config.cohort:
        raise UserError(
            f"{FEDERATION_TABLE}.min_replies is {rules.min_replies}, but the cohort is {terms.config.cohort}: it can be "
            "no more."
        )
    requirements = requirements_of(build_method(terms.config), effective_norm(terms.config))
    if requirements.every_client and terms.config.cohort != count:
        raise UserError(
            f"cohort is {terms.config.cohort} in {path.name}, but every round of {terms.config.method} needs all {count} "
            f"sites: set it to {count}."
        )
    explicit = settings.method_options(terms.config, terms.config.method, with_preset=False)
    if terms.config.secure_aggregation and "min_class_images" in explicit:
        raise UserError(
            f"min_class_images in {path.name} has no effect with secure_aggregation, which hides the sums of single sites: "
            "leave it out."
        )
    settings.check_effects(terms.config, terms.config.method)
    server_values = {
        **values,
        **{name: raw[name] for name in SERVER_OPTIONS if name in raw},
        "data": terms.config.data,
        "clients": count,
        "cohort": terms.config.cohort,
    }
    return FederationPlan(
        terms,
        rules,
        test=_resolve_folder(table.test, path.parent),
        server=_resolve_folder(table.server, path.parent),
        config=settings.resolve(settings.resolve_paths(server_values, path.parent), {}, path, check_catalog=False),
        validation=_resolve_folder(table.validation, path.parent),
    )


def _resolve_folder(folder: Path | None, base: Path) -> Path | None:
    """Make a path absolute; a relative one is relative to `base`."""
    return None if folder is None else (base / folder.expanduser()).absolute()


def _term_values(path: Path, raw: Mapping[str, Any], file_config: Config) -> dict[str, Any]:
    """Collect the options that all sites must agree on, with values that mean the same on every machine.

    Sites have no file of the server's machine. So a split file (which image each client has, and which have a label) is
    replaced by where it has labels (`labels_at`: at the clients or the server), and "auto" by the chosen network.

    Args:
        path: the configuration file.
        raw: its options, without the table [federation].
        file_config: the configuration that these options make, with defaults.

    Returns:
        Values by option. Networks and weight files are named by their content instead of their path.
    """
    values = {name: raw[name] for name in raw if name in shared_options() or name == "options"}
    values.setdefault("aggregation", default_aggregation(file_config, registry.entry))
    if file_config.split is not None:
        split_file = settings.resolve_paths(raw, path.parent)["split"]
        values["labels_at"] = find_labels_at(Split.load(split_file))
    # "auto" depends on the data, which no two sites share. Without the option `data` it would mean the small network of
    # the default data set, 8x8 digits; sites have larger images.
    if file_config.network == "auto":
        values["network"] = network_name(file_config) if "data" in raw else "resnet9"
    return values | _portable_names(settings.resolve_paths(values, path.parent))


def _make_terms(path: Path, table: FederationTable, values: Mapping[str, Any]) -> Terms:
    """Build and check the terms that the server offers to the sites.

    Args:
        path: the configuration file; its name is the default name of the federation.
        table: the table [federation], with the sites and the format of the images.
        values: the options that all sites must agree on.
    """
    # Any other number of channels is refused by `Terms`.
    channels = 3 if table.image[:1] == (3,) else 1
    # One value for mean or std applies to every channel.
    mean = table.mean * channels if len(table.mean) == 1 else table.mean
    std = table.std * channels if len(table.std) == 1 else table.std
    if values.get("network") in hubs.PRETRAINED:
        # Pretrained weights expect their own normalization, as in a simulation.
        mean = MEAN[:channels]
        std = STD[:channels]
    image_spec = ImageSpec(table.image, table.classes, table.mirror, mean, std)  # type: ignore[arg-type] (checked by Terms)
    terms = Terms.from_options(table.name or path.stem, table.sites, image_spec, values, path.name)
    terms.check()
    return terms


def _portable_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Name the network and the weight file by their content, because a path of this machine does not exist at a site.

    A network of another package, such as timm or transformers, has a name "package:model" and may have published
    weights on this machine. Its name is replaced by one without a folder. Each weight file is registered, which copies
    nothing and returns its name: a prefix and the SHA-256.

    Args:
        values: the options. "network" may name a model of such a package, and "weights" a file.

    Returns:
        New values of "network" and "weights", as far as they change.
    """
    portable: dict[str, Any] = {}
    network = values.get("network")
    if isinstance(network, str) and hubs.package_of(network):
        portable["network"] = hubs.portable_name(network)
        published_weights = published(network)
        if published_weights is not None:
            portable["weights"] = weight_files.register(published_weights)
    weights = values.get("weights")
    if isinstance(weights, str) and not weights.startswith(weight_files.PREFIX):
        portable["weights"] = weight_files.register(Path(weights))
    return portable


def _read_table(raw: Mapping[str, Any], path: Path) -> tuple[FederationTable, Rules]:
    """Parse the table [federation] of a configuration file.

    Args:
        raw: the values of the table, as TOML has them.
        path: the file, for errors.

    Returns:
        The sites and the format of their images, and the server's rules.

    Raises:
        UserError: for an unknown or missing option, or a value of a wrong type.
    """
    table_types = get_type_hints(FederationTable)
    rule_types = get_type_hints(Rules)
    types = {**table_types, **rule_types}
    for name in raw:
        if name not in types:
            raise UserError(f"unknown option {name!r} in [{FEDERATION_TABLE}] of {path.name}: {suggest(name, types)}")
    values: dict[str, Any] = {}
    for name, value in raw.items():
        values[name] = convert_value(f"{FEDERATION_TABLE}.{name} in {path.name}", types[name], value)
    for name in ("sites", "classes", "image"):
        if name not in values:
            description = option_descriptions(FederationTable)[name]
            raise UserError(f"[{FEDERATION_TABLE}] in {path.name} has no {name}: {description}.")
    table_values = {name: value for name, value in values.items() if name in table_types}
    rule_values = {name: value for name, value in values.items() if name in rule_types}
    return FederationTable(**table_values), Rules(**rule_values)


def option_descriptions(kind: type) -> dict[str, str]:
    """Return the descriptions of the options of `FederationTable` or `Rules`, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: get_args(hints[field.name])[1] for field in fields(kind)}

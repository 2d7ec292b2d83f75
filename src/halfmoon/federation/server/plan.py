"""The configuration file of a federation's server: options of a run, and a table [federation]."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from halfmoon.config import schema as settings
from halfmoon.config.option_types import convert_value
from halfmoon.config.schema import EXECUTION_OPTIONS, FEDERATION_TABLE, Config
from halfmoon.config.validation import default_aggregation
from halfmoon.core import hubs, weight_files
from halfmoon.core.errors import UserError, suggest
from halfmoon.data.partition.split import Split
from halfmoon.federation.protocol.terms import Terms, shared_options
from halfmoon.methods import registry
from halfmoon.models.efficientnet import MEAN, STD
from halfmoon.models.hubs import weights_file as published
from halfmoon.runs.factory import ImageSpec, network_name
from halfmoon.sites.folders.export import find_labels_at
from halfmoon.storage import toml

SERVER_OPTIONS = (*EXECUTION_OPTIONS, "evaluate_every", "server_ema")  # options of the server's machine alone


@dataclass(frozen=True)
class Rules:
    """A server's rules for its sites, none of which changes a computation; times are seconds. Raises UserError."""

    min_replies: Annotated[int | None, "fewest replies of a round; none: half of the cohort"] = None
    round_timeout: Annotated[float, "seconds that a site may take for one answer"] = 3600.0
    absence: Annotated[float, "seconds that a site which is not connected is waited for"] = 60.0
    attempts: Annotated[int, "how often a round below min_replies is played, with other sites, before all stops"] = 10
    linger: Annotated[float, "seconds that the server stays at the end for sites that are away, to give the model"] = (
        0.0
    )
    strikes: Annotated[int, "unusable answers after which a site is set aside; 0: never"] = 3
    norm_bound: Annotated[float, "largest update, in medians of the cohort's; 0: none is too large"] = 10.0
    weight_cap: Annotated[float, "largest weight of a site, in medians of the cohort's; 0: none is too large"] = (
        settings.DEFAULT_WEIGHT_CAP
    )
    images: Annotated[
        tuple[int, ...] | None, "images that each site has, as known here, in the order of sites; none: as they say"
    ] = None

    def __post_init__(self) -> None:
        if self.images is not None and min(self.images, default=0) < 1:
            raise UserError(
                f"{FEDERATION_TABLE}.images is {toml.format_text(self.images)}: it must have a number from 1 for each site."
            )
        least = dict.fromkeys(("weight_cap", "strikes", "norm_bound", "absence", "round_timeout", "linger"), 0)
        least |= {"min_replies": 1, "attempts": 1}
        for name, bound in least.items():
            value = self.__dict__[name]
            if value is not None and not (value >= bound and math.isfinite(value)):
                raise UserError(f"{FEDERATION_TABLE}.{name} is {toml.format_text(value)}: it must be at least {bound}.")

    def quorum(self, cohort: int) -> int:
        needed = -(-cohort // 2) if self.min_replies is None else self.min_replies
        return max(1, min(needed, cohort))


@dataclass(frozen=True)
class FederationTable:
    """The options of the table [federation] beside the `Rules`: the sites, and the form of their images."""

    sites: Annotated[tuple[str, ...], "the names of the sites, in the order of their numbers"]
    classes: Annotated[tuple[str, ...], "the names of the classes, in the order of their numbers"]
    image: Annotated[tuple[int, ...], "channels, height and width to which all images are brought, such as [1, 28, 28]"]
    name: Annotated[str | None, "what the federation is called; none: as its file"] = None
    mirror: Annotated[bool, "whether a mirrored image is still of its class"] = False
    mean: Annotated[tuple[float, ...], "mean of each channel (of pixels in 0..1), to normalize by"] = (0.5,)
    std: Annotated[tuple[float, ...], "standard deviation of each channel, to normalize by"] = (0.25,)
    test: Annotated[Path | None, "the server's folder of labeled images to test on; none: the sites' own ones"] = None
    validation: Annotated[
        Path | None,
        "the server's folder of labeled images that choose the round; none: the sites' own ones",
    ] = None
    server: Annotated[Path | None, "the server's own folder of labeled images, where it has some"] = None


@dataclass(frozen=True)
class FederationPlan:
    """A federation as its server sees it; `config` is that of the terms with the options of this machine."""

    terms: Terms
    rules: Rules
    test: Path | None
    server: Path | None
    config: Config
    validation: Path | None = None


def load_plan(path: Path) -> FederationPlan:
    """Return the federation of a file, with paths relative to it; raise UserError for the first mistake."""
    raw = settings.read_file(path)
    if not isinstance(raw.get(FEDERATION_TABLE), Mapping):
        raise UserError(f"{path} has no table [{FEDERATION_TABLE}]: write one with sites, classes and image.")
    table, rules = _read_table(raw.pop(FEDERATION_TABLE), path)
    count = len(table.sites)
    here = {} if "split" in raw or not count else {"clients": count, "cohort": min(Config.cohort, count)}
    whole = settings.merge({**here, **raw}, {}, path)
    if whole.attack != "none":
        raise UserError(
            f"attack is {whole.attack!r} in {path.name}, but hostile clients are made in simulations alone: leave "
            "attack and attackers out."
        )
    values = {name: raw[name] for name in raw if name in shared_options() or name == "options"}
    values.setdefault("aggregation", default_aggregation(whole, registry.entry))
    if whole.split is not None:  # it says where the labels are, and no option may
        values["labels_at"] = find_labels_at(Split.load(settings.resolve_paths(raw, path.parent)["split"]))
    # What "auto" means depends on the data, which no two sites share; without any it is not the embedded digits.
    if whole.network == "auto":
        values["network"] = network_name(whole) if "data" in raw else "resnet9"
    values |= _portable(settings.resolve_paths(values, path.parent))
    channels = 3 if table.image[:1] == (3,) else 1  # another number is refused below
    means, deviations = (values * channels if len(values) == 1 else values for values in (table.mean, table.std))
    if values.get("network") in hubs.PRETRAINED:  # it brings them, as in a simulation
        means, deviations = MEAN[:channels], STD[:channels]
    form = ImageSpec(table.image, table.classes, table.mirror, means, deviations)  # type: ignore[arg-type] (checked by Terms)
    terms = Terms.from_options(table.name or path.stem, table.sites, form, values, path.name)
    terms.check()
    if rules.images is not None and len(rules.images) != count:
        raise UserError(f"{FEDERATION_TABLE}.images has {len(rules.images)} numbers, but there are {count} sites.")
    if rules.min_replies is not None and rules.min_replies > terms.config.cohort:
        raise UserError(
            f"{FEDERATION_TABLE}.min_replies is {rules.min_replies}, but the cohort is {terms.config.cohort}: it can be no more."
        )
    own = {name: raw[name] for name in SERVER_OPTIONS if name in raw}
    here = {"data": terms.config.data, "clients": count, "cohort": terms.config.cohort}
    config = settings.merge(settings.resolve_paths({**values, **own, **here}, path.parent), {}, path)
    folders = (table.test, table.server, table.validation)
    test, server, validation = (folder and (path.parent / folder.expanduser()).absolute() for folder in folders)
    return FederationPlan(terms, rules, test, server, config, validation)


def _portable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a network and a file of weights as sites name them: by their content, not by where they lie here."""
    names: dict[str, Any] = {}
    if isinstance(network := values.get("network"), str) and hubs.package_of(network):
        names["network"] = hubs.portable_name(network)
        if (file := published(network)) is not None:
            names["weights"] = weight_files.register(file)
    if isinstance(weights := values.get("weights"), str) and not weights.startswith(weight_files.PREFIX):
        names["weights"] = weight_files.register(Path(weights))
    return names


def _read_table(raw: Mapping[str, Any], path: Path) -> tuple[FederationTable, Rules]:
    hints = {kind: get_type_hints(kind) for kind in (FederationTable, Rules)}
    options = {**hints[FederationTable], **hints[Rules]}
    for name in raw:
        if name not in options:
            raise UserError(f"unknown option {name!r} in [{FEDERATION_TABLE}] of {path.name}: {suggest(name, options)}")
    values = {
        name: convert_value(f"{FEDERATION_TABLE}.{name} in {path.name}", options[name], value)
        for name, value in raw.items()
    }
    for name in ("sites", "classes", "image"):
        if name not in values:
            raise UserError(
                f"[{FEDERATION_TABLE}] in {path.name} has no {name}: {option_descriptions(FederationTable)[name]}."
            )
    parts = [
        {name: value for name, value in values.items() if name in hints[kind]} for kind in (FederationTable, Rules)
    ]
    return FederationTable(**parts[0]), Rules(**parts[1])


def option_descriptions(kind: type) -> dict[str, str]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: get_args(hints[field.name])[1] for field in fields(kind)}

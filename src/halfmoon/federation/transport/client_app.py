"""The program of a site: `open_client` for its worker process, and a ClientApp, which passes messages of Flower to it.

`node_config` describes the site: "name", "folder" (images), "home" (state folder), "device", "tests" and "validations"
(folders), and its consent: "terms" and "methods", as in `halfmoon.federation.site.consent.Consent`; without "terms"
its people have to consent. "key" is the file of its long-term key, "site-keys" that of the keys of all sites.

In a rehearsal, on Flower's simulation engine, `node_config` has only the client's number. The site is then the folder
with the site's name in `run_config` "sites", and accepts all terms.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from halfmoon.config.schema import plugin_origins
from halfmoon.core import weight_files
from halfmoon.core.errors import UserError
from halfmoon.federation.server.plan import load_plan
from halfmoon.federation.site.client import SiteClient
from halfmoon.federation.site.consent import ANY_TERMS
from halfmoon.federation.site.site_keys import KeyFiles
from halfmoon.federation.transport.records import unwrap_message, wrap_message

PATHS = ("home", "tests", "validations", "key", "site-keys")
OPTIONS = ("folder", "name", "device", "terms", "methods", "trusted", "weights", "skip-unreadable", *PATHS)

app = ClientApp()


@app.train()
@app.query()
def handle_message(message: Message, context: Context) -> Message:
    """Reply to a message of Flower, whose programs call this function: in a rehearsal, or as a site's SuperNode.

    A site replies to all kinds of messages by their content, whatever Flower's type of the message.

    Args:
        message: the message, with the bytes of an offer or a request.
        context: `node_config` has the options of the site. In a rehearsal (all sites on this machine, on Flower's
            simulation engine) it has only the number of the client, "partition-id", and the options follow from
            `run_config`.
    """
    options = {name: str(value) for name, value in context.node_config.items()}
    if "name" not in options:
        config = context.run_config
        options |= _rehearsal_options(str(config["federation"]), str(config["sites"]), options["partition-id"])
    client = _open_cached_client(tuple(options.get(name, "") for name in OPTIONS))
    reply = client.reply_to(unwrap_message(message.content))
    return Message(wrap_message(reply), reply_to=message)


@cache
def _open_cached_client(values: tuple[str, ...]) -> SiteClient:
    """Open the client of a site, once: opening its images takes longer than replying to a message.

    Args:
        values: the values of `OPTIONS`, in their order; "" for options that are not set.
    """
    return open_client(dict(zip(OPTIONS, values, strict=True)))


def open_client(options: Mapping[str, str]) -> SiteClient:
    """Open the client of a site. Its worker process calls this, and passes messages to the client without Flower.

    Args:
        options: the options of the site by name, some of `OPTIONS`; "" is like an option that is missing.
    """
    paths = {name: Path(options[name]) if options.get(name) else None for name in PATHS}
    for weights_file in options.get("weights", "").split(os.pathsep):
        if weights_file:
            with suppress(UserError):  # terms that need the file report that it is missing
                weight_files.register(Path(weights_file))
    return SiteClient.from_folder(
        folder=Path(options["folder"]),
        name=options["name"],
        state_folder=paths["home"],  # None: a hidden folder among the images
        device=options.get("device") or "auto",
        tests=paths["tests"],
        terms=options.get("terms", ""),
        methods=tuple(options.get("methods", "").split()),
        trusted=tuple(options.get("trusted", "").split()),
        validations=paths["validations"],
        keys=KeyFiles(paths["key"], paths["site-keys"]),
        skip_unreadable=bool(options.get("skip-unreadable")),
    )


@cache
def _rehearsal_options(federation: str, sites: str, number: str) -> dict[str, str]:
    """Build the options of a simulated site from the federation's file, the folder of all sites, and its number."""
    terms = load_plan(Path(federation)).terms
    name = terms.sites[int(number)]
    # The file is on this machine, so the plugins that it names are trusted.
    trusted = [plugin.name for plugin in plugin_origins(terms.config)]
    return {"name": name, "folder": str(Path(sites) / name), "terms": ANY_TERMS, "trusted": " ".join(trusted)}

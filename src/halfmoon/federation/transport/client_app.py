"""The one ClientApp: whatever the method, it hands a message to the site's `SiteClient` and sends its answer back.

`node_config` describes the site: "name", "folder" (of the site), "home", "device", "tests" and "validations" (folders),
and its consent: "terms" and "methods", as in `halfmoon.federation.site.consent.Consent`; without
"terms" its people are asked. "key" is the file of its lasting key, "site-keys" that of the keys of all sites. In a
rehearsal, on Flower's simulation engine, it has numbers alone: the site is then the folder of that name in `run_config`
"sites", and takes part in whatever is played there.
"""

import os
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
from halfmoon.federation.transport.grid import unwrap_message, wrap_message

PATHS = ("home", "tests", "validations", "key", "site-keys")
OPTIONS = ("folder", "name", "device", "terms", "methods", "trusted", "weights", *PATHS)

app = ClientApp()


@app.train()
@app.query()
def handle_message(message: Message, context: Context) -> Message:
    """Return the site's answer to a message."""
    facts = {name: str(value) for name, value in context.node_config.items()}
    if "name" not in facts:
        config = context.run_config
        facts |= _rehearsal_options(str(config["federation"]), str(config["sites"]), facts["partition-id"])
    client = _open_client(tuple(facts.get(word, "") for word in OPTIONS))
    return Message(wrap_message(client.reply_to(unwrap_message(message.content))), reply_to=message)


@cache
def _open_client(values: tuple[str, ...]) -> SiteClient:
    """Return the client of these `FACTS`; a process that answers several messages opens its images once."""
    facts = dict(zip(OPTIONS, values, strict=True))
    paths = {word: Path(facts[word]) if facts[word] else None for word in PATHS}
    for path in filter(None, facts["weights"].split(os.pathsep)):
        with suppress(UserError):  # terms that want it say what is missing
            weight_files.register(Path(path))
    return SiteClient.from_folder(
        Path(facts["folder"]),
        facts["name"],
        paths["home"],
        facts["device"] or "auto",
        paths["tests"],
        facts["terms"],
        tuple(facts["methods"].split()),
        tuple(facts["trusted"].split()),
        paths["validations"],
        KeyFiles(paths["key"], paths["site-keys"]),
    )


@cache
def _rehearsal_options(federation: str, sites: str, number: str) -> dict[str, str]:
    terms = load_plan(Path(federation)).terms  # of this very machine: what its file names may be loaded
    name, trusted = terms.sites[int(number)], [plugin.part for plugin in plugin_origins(terms.config)]
    return {"name": name, "folder": str(Path(sites) / name), "terms": ANY_TERMS, "trusted": " ".join(trusted)}

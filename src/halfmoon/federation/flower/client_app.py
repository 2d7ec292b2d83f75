"""The one ClientApp: whatever the method, it hands a message to the site's `SiteClient` and sends back what that
answers.

`node_config` says who it is: "name", "folder" (of the site), "home", "device", "tests" and "validations" (folders),
and on what terms it takes part: "terms" and "methods", as in `halfmoon.federation.site.consent.Consent`; without
"terms" its people are asked. "key" is the file of its lasting key, "site-keys" that of the keys of all sites. In a
rehearsal, on Flower's simulation engine, it has numbers alone: the site is then the folder of that name in `run_config`
"sites", and takes part in whatever is played there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from halfmoon.config.schema import origins
from halfmoon.core import weight_files
from halfmoon.core.errors import UserError
from halfmoon.federation.flower.link import unwrapped, wrapped
from halfmoon.federation.server.plan import load
from halfmoon.federation.site.client import SiteClient
from halfmoon.federation.site.consent import ANY
from halfmoon.federation.site.site_keys import KeyFiles

FACTS = (
    *("folder", "name", "home", "device", "tests", "validations", "terms", "methods", "trusted", "weights"),
    *("key", "site-keys"),
)

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do a round's work."""
    return _answered(message, context)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Join, or say why not."""
    return _answered(message, context)


def _answered(message: Message, context: Context) -> Message:
    said = {name: str(value) for name, value in context.node_config.items()}
    if "name" not in said:
        said |= _numbered(str(context.run_config["federation"]), str(context.run_config["sites"]), said["partition-id"])
    member = _member(*(said.get(word, "") for word in FACTS))
    return Message(wrapped(member.answer(unwrapped(message.content))), reply_to=message)


@cache
def _member(
    folder: str,
    name: str,
    home: str,
    device: str,
    tests: str,
    validations: str,
    terms: str,
    methods: str,
    trusted: str,
    weights: str,
    key: str,
    others: str,
) -> SiteClient:
    """Return the member; a process that answers several messages opens its images once."""
    own, tested, chosen = (Path(each) if each else None for each in (home, tests, validations))
    parts = tuple(methods.split()), tuple(trusted.split())
    for path in filter(None, weights.split(os.pathsep)):
        with suppress(UserError):  # terms that want it say what is missing
            weight_files.offer(Path(path))
    keys = KeyFiles(*(Path(each) if each else None for each in (key, others)))
    return SiteClient.at(Path(folder), name, own, device or "auto", tested, terms, *parts, chosen, keys)


@cache
def _numbered(federation: str, sites: str, number: str) -> dict[str, str]:
    terms = load(Path(federation)).terms  # of this very machine: what its file names may be loaded
    name, trusted = terms.sites[int(number)], [each.part for each in origins(terms.config)]
    return {"name": name, "folder": str(Path(sites) / name), "terms": ANY, "trusted": " ".join(trusted)}

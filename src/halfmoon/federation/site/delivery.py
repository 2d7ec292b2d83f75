"""The end of a federation at a site: the final model comes, is looked at, and lies in the site's home with its card."""

from __future__ import annotations

import json
from pathlib import Path

from halfmoon.federation.protocol import limits
from halfmoon.federation.protocol.messages import UNFIT, Final, UnparsedMessage
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.protocol.tree_spec import spec_of
from halfmoon.federation.site.runtime import Refused, SiteRuntime
from halfmoon.runs.model_card import Card
from halfmoon.sites.inference.load import load_model
from halfmoon.storage import atomic_io
from halfmoon.storage.run_folder import MODEL
from halfmoon.storage.serialization import pack, with_seal

FINAL = "final"
"""The folder in a site's home where the model lies that a federation ended with."""


def kept(home: Path, unparsed: UnparsedMessage[Final], terms: Terms, site: SiteRuntime) -> str:
    """Write the final model to the site's home, read it back, and return in words where it is and what it is worth.

    Raises `Refused` where it is not the network that was agreed on, and its card not that of these terms.
    """
    task = site.task
    if unparsed.pattern("model") != spec_of(limits.abstract(task.network)):
        raise Refused(UNFIT, "the final model that the server sends is not the one that was agreed on.")
    message = unparsed.open()
    path = home / FINAL / MODEL
    try:
        said = json.loads(message.card)
        if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
            raise ValueError("it is no table of texts")
        card = Card.parse(said, path)
    except ValueError as error:
        raise Refused(UNFIT, "the card of the final model cannot be read.") from error
    form = terms.form
    network, model = task.network.whole(message.model)
    if (card.network, card.classes, card.image) != (network, form.classes, form.image):
        raise Refused(UNFIT, "the card of the final model is not that of the federation.")
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_io.replace(path, with_seal(pack(model)[0], card.render()))
    load_model(path, network=terms.config.network)
    found = site.examined(message.model)
    if "confusion" not in found:
        return f"finished: the model lies in {path}"
    cells = found["confusion"]
    share = int(cells.diagonal().sum()) / max(1, int(cells.sum()))
    return f"finished: the model lies in {path}, it is right on {share:.2%} of your test images"

"""One site of five sends its update with the sign turned, times four, to a federation as it comes out of the box."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rehearsals import quick

from halfmoon.config import schema as settings
from halfmoon.core import tree
from halfmoon.federation.protocol.messages import MalformedMessage, Reply, Request, read_message, write_message
from halfmoon.federation.site.client import SiteClient
from halfmoon.federation.transport import client_app, local
from halfmoon.runs.factory import source, split_of
from halfmoon.sites.folders import export_sites
from halfmoon.storage import atomic_io

LIAR = "site-01"
SPLIT = {"data": "digits", "clients": 5, "cohort": 5, "setting": "iid-dir", "labels_per_class": 1.0}
OPTIONS = {"method": "fedavg-soft-labels", "rounds": 8, "steps": 6}


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Path]:
    config = settings.resolve(SPLIT, {})
    data = source(config)
    export_sites(config, data, split_of(config, data), tmp_path / "sites")
    with quick():
        yield tmp_path / "sites"
    client_app._open_client.cache_clear()


def play(sites: Path, name: str, **options: object) -> tuple[float, str]:
    """Play a federation through Flower's two apps; return the accuracy of its last model, and the server's log."""
    values, run = {**OPTIONS, **options}, sites.parent / name
    plain = (sites / "federation.toml").read_text().splitlines()
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    lines += [line for line in plain if line.split(" = ")[0] not in values]
    file = sites / f"{name}.toml"
    file.write_text("\n".join(lines) + "\n")
    local.rehearse(file, run, sites)
    client_app._open_client.cache_clear()
    return atomic_io.read_json(run / "summary.json")["accuracy"]["last"], (run / "serve.log").read_text()


def turned(honest: Callable[[SiteClient, bytes], bytes]) -> Callable[[SiteClient, bytes], bytes]:
    """Return `SiteClient.reply_to` of a site that turns what it has learned."""

    def answer(self: SiteClient, message: bytes) -> bytes:
        data = honest(self, message)
        try:
            broadcast, reply = tree.flatten(read_message(message, Request).download), read_message(data, Reply)
        except MalformedMessage:  # it joins, or has the final model
            return data
        flat, model = tree.flatten(reply.upload), "update/"
        if self.name == LIAR:
            before = {path: broadcast[path.removeprefix(model)] for path in flat if path.startswith(f"{model}params/")}
            flat |= {path: leaf + 4 * (leaf - flat[path]) for path, leaf in before.items()}
        return write_message(replace(reply, upload=tree.unflatten(flat)))

    return answer


def test_a_site_that_turns_its_updates_is_left_out_and_named(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm, _ = play(sites, "calm")
    monkeypatch.setattr(SiteClient, "reply_to", turned(SiteClient.reply_to))
    attacked, log = play(sites, "attacked")
    believed, _ = play(sites, "believed", aggregation="mean")
    assert attacked > calm - 0.05
    assert believed < calm - 0.3
    assert f"{LIAR} was left out: its parameters point against the others" in log

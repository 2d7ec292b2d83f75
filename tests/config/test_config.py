"""One configuration from flags, files and Python: strict, and the same after a trip through TOML."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon import models
from halfmoon.config import schema as config
from halfmoon.config.schema import Config
from halfmoon.config.template import config_template
from halfmoon.core.errors import UserError
from halfmoon.data.partition import scenario
from halfmoon.methods import registry

RUN = Path("folder/run.toml")


def refused(values: dict[str, Any], flags: dict[str, Any] | None = None) -> str:
    """Return the sentence with which a file's values or flags are refused."""
    with pytest.raises(UserError) as caught:
        config.resolve(values, flags or {}, RUN)
    return str(caught.value)


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
paths = st.lists(st.text("abcäß 'z.#\"\\\n\t\x7f", min_size=1), min_size=1, max_size=3).map(
    lambda parts: Path("/", *(part.replace("/", "") for part in parts))
)
shares = st.floats(0, 1, exclude_min=True)
positive = st.floats(0, exclude_min=True, allow_infinity=False)
at_least_one = st.integers(1, 2**70)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Draw a valid configuration with every option away from its default."""
    clients = draw(at_least_one)
    optimizer = draw(st.sampled_from(["adam", "sgd"]))
    steps = draw(st.none() | at_least_one)
    batch = draw(st.just("rest") | st.integers(2, 10**6))
    chosen: dict[str, Any] = {
        "method": "feddure",
        "baselines": tuple(draw(st.permutations(["fedavg", "fedavg-sl", "fedavg-fixmatch"])))[
            : draw(st.integers(0, 3))
        ],
        "data": draw(words),
        "cohort": draw(st.integers(1, clients)),
        "clients": clients,
        "optimizer": optimizer,
        "momentum": draw(st.floats(0, 1, exclude_max=True)) if optimizer == "sgd" else 0.0,
        "steps": steps,
        "labeled_batch": draw(st.integers(2, 10**6)),
        "unlabeled_batch": batch,
        "dirichlet_alpha": draw(st.floats(0, 1e9, exclude_min=True)),
        "lr": draw(positive),
        "weight_decay": draw(positive),
        "confidence_threshold": draw(shares),
        "flip": draw(st.none() | st.booleans()),
        "options": draw(method_options()),
        "reference": draw(st.none() | st.just("fedavg-sl")),
    }
    chosen[draw(st.sampled_from(["labels_per_class", "label_ratio"]))] = draw(shares)
    for name in ("data_dir", "cache", "run_dir"):
        chosen[name] = draw(st.none() | paths)
    for name in ("shrink", "rounds", "evaluate_every", "checkpoint_every"):
        chosen[name] = draw(at_least_one)
    for name in ("image_size", "min_size", "width", "threads"):
        chosen[name] = draw(st.none() | at_least_one)
    for name in ("seed", "split_seed"):
        chosen[name] = draw(st.integers(0, 2**64))
    for name, kind in config.option_types().items():
        if name not in chosen and getattr(kind, "__origin__", None) is Literal:
            chosen[name] = draw(st.sampled_from(get_args(kind)))
    chosen["tune"] = draw(st.sampled_from(["auto", "all"]))  # the others need weights
    chosen["protocol"] = "none"  # a word that `resolve` puts its values instead of
    chosen["labels_at"] = draw(st.sampled_from(["clients", "server"]))
    if chosen["labels_at"] == "server":
        chosen |= {"method": "fedavg-sl", "baselines": (), "options": {}, "preset": "none"}
    chosen["shared_views"] = batch != "rest" and draw(st.booleans())
    chosen["nesterov"] = chosen["momentum"] > 0 and draw(st.booleans())
    chosen["attackers"] = 0.0 if chosen["attack"] == "none" else draw(st.floats(0.01, 0.49))
    if chosen["aggregation"] == "krum" and chosen["cohort"] < 3:
        chosen["aggregation"] = "median"  # Krum needs neighbors
    private = chosen["aggregation"] == "mean" and chosen["norm"] != "batch" and draw(st.booleans())
    for name in ("dp_clip", "dp_noise", "dp_epsilon"):
        chosen[name] = draw(positive) if private else None
    many = chosen["aggregation"] == "mean" and chosen["cohort"] >= 3  # fewer hide nothing
    chosen["secure_aggregation"] = many and draw(st.booleans())
    if chosen["secure_aggregation"]:
        chosen["upload_precision"] = "float32"
    chosen["client_dropout"] = draw(st.floats(0, 1, exclude_max=True))
    for name in ("clip_norm", "clip_value"):
        chosen[name] = draw(st.none() | positive)
    for name in ("server_batch", "server_epochs"):
        chosen[name] = draw(st.none() | at_least_one)
    for name in ("classes_per_client", "stages", "memory_cap"):
        chosen[name] = draw(at_least_one)
    if steps is None:
        chosen["epochs"] = draw(at_least_one)
    if steps is not None or batch == "rest":
        chosen["epoch"] = "auto"
    if draw(st.booleans()):
        for name in config.PARTITION_OPTIONS:
            chosen.pop(name, None)
        chosen |= {"split": draw(paths)}
    return Config(**chosen)


@st.composite
def method_options(draw: st.DrawFn) -> dict[str, Any]:
    own = {"hidden": st.integers(1, 999), "coarse": st.booleans(), "virtual_lr": positive, "sign": st.just("new-old")}
    fixmatch = {"threshold": shares}
    drawn: dict[str, Any] = draw(st.fixed_dictionaries({}, optional=own))
    tables = {"feddure": st.fixed_dictionaries({}, optional=own)}
    tables["fedavg-fixmatch"] = st.fixed_dictionaries({}, optional=fixmatch)
    return {**drawn, **draw(st.fixed_dictionaries({}, optional=tables))}


@given(configs())
def test_text_loads_as_the_same_configuration(tmp_path_factory: pytest.TempPathFactory, drawn: Config) -> None:
    path = tmp_path_factory.mktemp("run") / "config.toml"
    path.write_text(config.to_toml(drawn), encoding="utf-8")
    repeated = config.resolve(config.load_file(path), {}, path)
    assert repeated == dataclasses.replace(drawn, run_dir=None)
    assert config.identity(repeated, "feddure") == config.identity(drawn, "feddure")


def test_defaults_are_a_valid_configuration_and_the_template_states_them() -> None:
    assert config.resolve({}, {}) == Config()
    stated = tomllib.loads(config_template())
    named = {name for name in config.option_types() if f"\n# {name} = " in config_template()}
    assert set(stated) | named == set(config.option_types())
    assert config.resolve(stated, {}) == Config()


def test_every_option_has_a_description() -> None:
    for name, about in config.option_helps().items():
        assert len(about.split()) > 1, name
    assert set(config.option_helps()) == {each.name for each in dataclasses.fields(Config)}


def test_flags_override_the_file_one_by_one() -> None:
    file = {"rounds": 7, "lr": 1, "options": {"hidden": 4, "fine": False, "fedavg-fixmatch": {"threshold": 0.5}}}
    merged = config.resolve(file, {"rounds": 9, "options": {"hidden": 8}})
    assert (merged.rounds, merged.lr) == (9, 1.0)
    assert isinstance(merged.lr, float)
    assert config.method_options(merged, "feddure") == {"hidden": 8, "fine": False}
    assert config.method_options(merged, "fedavg-fixmatch") == {"threshold": 0.5}
    assert config.method_options(merged, "fedavg") == {}


def test_an_exclusive_flag_displaces_the_files_value() -> None:
    assert config.resolve({"labels_per_class": 5}, {"label_ratio": 0.1}).labels_per_class is None
    assert config.resolve({"label_ratio": 0.1}, {"labels_per_class": 5}).label_ratio is None
    assert Config(label_ratio=0.1).labels_per_class is None
    assert Config().labels_per_class == config.DEFAULT_LABELS_PER_CLASS


def test_paths_of_a_file_start_at_its_folder(tmp_path: Path) -> None:
    (tmp_path / "xrays").mkdir()
    (tmp_path / "run.toml").write_text('data = "xrays"\ncache = "kept"\nrun_dir = "/elsewhere"\nsplit = "../s.parquet"')
    merged = config.resolve(config.load_file(tmp_path / "run.toml"), {"data_dir": Path("here")})
    assert merged.data == str(tmp_path / "xrays")
    assert merged.cache == tmp_path / "kept"
    assert merged.split == tmp_path / "../s.parquet"
    assert merged.run_dir == Path("/elsewhere")
    assert merged.data_dir == Path.cwd() / "here"


def test_a_known_name_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("digits", "cifar10", "mine"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    found = [Config(data=name).data for name in ("digits", "cifar10", "mine")]
    assert found == ["digits", "cifar10", str(tmp_path / "mine")]
    assert Config(data="mine", data_dir=tmp_path).data == "mine"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"beside": ["fedavg"]}, "option 'beside' in run.toml is called baselines since version 0.2: rename it."),
        ({"round": 3}, "unknown option 'round' in run.toml: did you mean 'rounds'?"),
        ({"rounds": "ten"}, 'rounds in run.toml is "ten": it must be a whole number.'),
        ({"rounds": True}, "rounds in run.toml is true: it must be a whole number."),
        ({"rounds": 2.0}, "rounds in run.toml is 2.0: it must be a whole number."),
        ({"lr": True}, "lr in run.toml is true: it must be a number."),
        ({"flip": 1}, "flip in run.toml is 1: it must be true or false."),
        ({"method": 1}, "method in run.toml is 1: it must be text."),
        ({"cache": 1}, "cache in run.toml is 1: it must be a path."),
        ({"baselines": "fedavg"}, 'baselines in run.toml is "fedavg": it must be a list of names.'),
        ({"unlabeled_batch": "all"}, "unlabeled_batch in run.toml is \"all\": it must be a whole number or 'rest'."),
        ({"setting": "dirdir"}, "setting in run.toml is 'dirdir': did you mean 'dir-dir'?"),
        ({"setting": 3}, "setting in run.toml is 3: it must be text."),
        ({"options": 3}, "options in run.toml is 3: it must be a table of the method's options."),
        ({"options": {"hidden": [1]}}, "options in run.toml: hidden is [1]: it must be a number, text, true or false."),
        ({"baselines": ["fedavgg"]}, "unknown method 'fedavgg': did you mean 'fedavg'?"),
        ({"options": {"hiden": 1}}, "method feddure has no option 'hiden': did you mean 'hidden'?"),
        ({"options": {"hidden": 1.5}}, "option hidden of feddure is 1.5: it must be a whole number."),
        ({"options": {"sign": "newold"}}, "option sign of feddure is 'newold': did you mean 'new-old'?"),
    ],
)
def test_a_wrong_key_type_or_choice_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    assert refused(values).startswith(sentence)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"dirichlet_alpha": 0}, "dirichlet_alpha is 0.0: it must be above 0 and at most 1e9."),
        ({"dirichlet_alpha": float("nan")}, "dirichlet_alpha is nan: it must be above 0 and at most 1e9."),
        ({"lr": float("inf")}, "lr is inf: it must be a number above 0."),
        ({"label_ratio": 1.5}, "label_ratio is 1.5: it must be above 0 and at most 1."),
        ({"confidence_threshold": 1.01}, "confidence_threshold is 1.01: it must be from 0 to 1."),
        ({"seed": -1}, "seed is -1: it must be at least 0."),
        ({"label_ratio": 0.1, "labels_per_class": 2}, "labels_per_class and label_ratio exclude each other"),
        ({"unlabeled_batch": "rest", "epoch": "unlabeled"}, "epoch 'unlabeled' needs a number as unlabeled_batch"),
        ({"steps": 5, "epochs": 2}, "steps and epochs exclude each other"),
        ({"momentum": 0.9}, "momentum is 0.9, but adam has none: use optimizer 'sgd'."),
        ({"clients": 0, "cohort": 2}, "clients is 0: it must be at least 1."),
        ({"baselines": ["feddure"]}, "method feddure is named twice in method and baselines: name it once."),
    ],
)
def test_ranges_and_impossible_combinations_are_one_sentence(values: dict[str, Any], sentence: str) -> None:
    text = refused(values)
    assert text.startswith(sentence)
    assert text.endswith(".")
    assert "\n" not in text


def test_flags_are_named_as_they_are_typed() -> None:
    text = "unknown option '--labels-per-clas': did you mean '--labels-per-class'?"
    assert refused({}, {"labels_per_clas": 3}) == text
    assert refused({}, {"split_seed": "x"}) == '--split-seed is "x": it must be a whole number.'


@pytest.mark.parametrize(
    ("name", "typed", "value"),
    [
        ("rounds", "12", 12),
        ("lr", "1e-3", 1e-3),
        ("labels_per_class", "none", None),
        ("unlabeled_batch", "rest", "rest"),
        ("unlabeled_batch", "4", 4),
        ("data", "none", "none"),
        ("run_dir", "a b", Path("a b")),
    ],
)
def test_command_line_arguments_are_parsed(name: str, typed: str, value: object) -> None:
    assert config.parse_option(name, typed) == value


def test_a_wrong_word_of_the_command_line_is_refused() -> None:
    with pytest.raises(UserError, match='--rounds is "none": it must be a whole number'):
        config.parse_option("rounds", "none")
    with pytest.raises(UserError, match="--executor is 'vmapp': did you mean 'vmap'"):
        config.parse_option("executor", "vmapp")


def test_a_broken_file_is_named_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('rounds = 3\ndata = "digits\n')
    with pytest.raises(UserError, match=r"run\.toml is not valid TOML: .*line 2, column 15"):
        config.load_file(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"run\.toml is not a text file: byte 0 is not UTF-8\."):
        config.load_file(path)
    with pytest.raises(UserError, match=r"none\.toml cannot be read: No such file or directory\."):
        config.load_file(tmp_path / "none.toml")


def test_the_next_free_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = Config(data=str(tmp_path / "xrays"), seed=3)
    assert config.next_free_folder(chosen, "fedavg") == Path("runs/xrays-fedavg-seed3-1")
    Path("runs/xrays-fedavg-seed3-1").mkdir(parents=True)
    assert config.next_free_folder(chosen, "fedavg") == Path("runs/xrays-fedavg-seed3-2")


def test_identity_follows_the_numbers_only() -> None:
    base = Config(baselines=("fedavg",), budget="none")
    same = dataclasses.replace(base, device="cpu", executor="loop", threads=1, run_dir=Path("x"), baselines=())
    assert config.identity(same, "feddure") == config.identity(base, "feddure")
    written_out = dataclasses.replace(
        base, reference="fedavg", options={"hidden": 128, "fedavg-fixmatch": {"threshold": 0.9}}
    )
    assert config.identity(written_out, "feddure") == config.identity(base, "feddure")
    others: list[Config] = [
        dataclasses.replace(base, **change)
        for change in (
            {"seed": 1},
            {"rounds": 61},
            {"split_seed": 1},
            {"options": {"hidden": 64}},
            {"options": {"feddure": {"hidden": 64}}},
            {"budget": "forwards"},
            {"budget": "forwards", "reference": "fedavg"},
            {"confidence_threshold": 0.9},
        )
    ]
    hashes = [config.identity(each, "feddure") for each in (base, *others)]
    assert hashes[4] == hashes[5]
    assert len(set(hashes)) == len(hashes) - 1
    assert config.identity(base, "fedavg") != config.identity(base, "feddure")


def test_odd_names_are_taken_as_they_are() -> None:
    """Found by drawn configurations: `~0` is nobody's home, and a name may be longer than a file's."""
    assert Config(data="~0").data == str(Path("~0").absolute())
    assert Config(data="0" * 300).data == "0" * 300
    with pytest.raises(UserError, match="network is '000"):
        Config(network="0" * 300)


def test_settings_are_those_of_the_scenario() -> None:
    """The configuration spells them out, as it must not import what splits."""
    assert config.SETTINGS == scenario.SETTINGS
    assert ("auto", *models.NETWORKS) == config.NETWORKS
    assert get_args(config.option_types()["labels_at"]) == ("clients", "some", "server")
    assert set(get_args(scenario.LabelLocation)) == {"clients", "some", "server"}


@pytest.mark.parametrize(
    ("labels_at", "name"), [("clients", "fedavg-soft-labels"), ("some", "fedavg"), ("server", "fl2")]
)
def test_the_recommended_method_is_picked_by_where_labels_are(labels_at: str, name: str) -> None:
    given = {"labels_at": labels_at, **({"labeled_clients": 2} if labels_at == "some" else {})}
    resolved = config.resolve({"method": "recommended", **given}, {"options": {"keep_optimizer": True}})
    assert resolved.method == name
    heads = {"method": "recommended", "network": "efficientnet-lite0", "clients": 7, **given}
    on_features = config.resolve(heads, {})
    assert (on_features.method, on_features.cohort) == ("mixture-head", 7)
    assert config.resolve({**heads, "tune": "last"}, {}).method == name
    assert labels_at in registry.entry("mixture-head").label_locations
    assert resolved == config.resolve({"method": name, **given}, {"options": {"keep_optimizer": True}})
    assert labels_at in registry.entry(name).label_locations

"""Every option has an effect: each flag is read by its command, and each option of a run changes what the run builds.

A new flag that nothing reads, or a new option without a row in `CHANGES`, fails a test here.
"""

import argparse
import ast
import hashlib
import inspect
import pickle
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from halfmoon.cli import main as cli
from halfmoon.config import schema
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.runs import factory, runner, workers
from halfmoon.runs.callbacks import NULL_CALLBACK
from halfmoon.sites import inference

READ_BEFORE = {"help", "debug", "unchecked", "command", "action"}
"""Names that the parser itself or `halfmoon.cli.main.main` reads."""


def commands(parsers: Any, prefix: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Iterate over all commands and the actions of commands, by name."""
    for name, parser in parsers.items():
        actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if actions:
            yield from commands(actions[0].choices, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", parser


COMMANDS = dict(commands(cli._build_parser(full=True)[1]))


def reads(function: Callable[..., Any], seen: set[Any]) -> set[str]:
    """Collect the names that a function of the command line, and those that it calls, read of `args`.

    `vars(args)` and the helper that collects options read all options of a run.
    """
    function = inspect.unwrap(getattr(function, "func", function))
    if not inspect.isfunction(function) or not function.__module__.startswith("halfmoon.cli") or function in seen:
        return set()
    seen.add(function)
    found: set[str] = set()
    names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "args":
                found.add(node.attr)
            elif isinstance(module := names.get(node.value.id), ModuleType):
                found |= reads(getattr(module, node.attr, None), seen)
        elif isinstance(node, ast.Name) and node.id in names:
            # A table of flags over which a function iterates counts with its keys.
            value = names[node.id]
            found |= set(value) if isinstance(value, dict) and node.id.endswith("_FLAGS") else reads(value, seen)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            arguments = [argument.id for argument in node.args if isinstance(argument, ast.Name)]
            if "args" in arguments:  # getattr(args, "name"), or a function that does so
                found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
            if node.func.id == "vars" and arguments == ["args"]:
                found |= set(schema.option_types())
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_each_flag_of_a_command_is_read(name: str):
    parser = COMMANDS[name]
    declared = {action.dest for action in parser._actions} - READ_BEFORE
    assert declared - reads(parser.get_default("do"), set()) == set()


def test_unused_flag_is_detected():
    """The test above looks at the source; this is what it must not accept."""

    def command(args: argparse.Namespace) -> str:
        return args.model

    command.__module__ = "halfmoon.cli"
    assert reads(command, set()) == {"model"}


def test_export_loads_a_custom_network(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`export --network` was accepted without effect, and a model with such a network could not be exported."""
    found: list[Any] = []

    def load_model(path: Path, device: str = "cpu", network: str | None = None) -> Any:
        found.append((path, network))
        raise UserError("stop here.")

    monkeypatch.setattr(inference, "load_model", load_model)
    assert cli.main(["export", "model", "--network", "nets:make", "--onnx", "model.onnx"]) == 2
    assert found == [(Path("model"), "nets:make")]
    assert "stop here" in capsys.readouterr().err


BASE = Config(
    data="digits", method="fedavg-fixmatch", clients=6, cohort=3, steps=2, labels_per_class=2.0, rounds=4, threads=1,
    width=4, data_share=0.5, budget="none",
)  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "method": {"method": "fedavg"},
    "preset": {"method": "feddure", "preset": "paper"},
    "options": {"options": {"threshold": 0.5}},
    "data_share": {"data_share": 0.4},
    "validation_share": {"validation_share": 0.2},
    "resize": {"resize": 12},
    "channels": {"channels": 3},
    "image_size": {"image_size": 16},
    "pixel_mean": {"pixel_mean": (0.3,)},
    "pixel_std": {"pixel_std": (0.3,)},
    "shrink": {"shrink": 2},
    "setting": {"setting": "iid-iid"},
    "clients": {"clients": 7},
    "dirichlet_alpha": {"dirichlet_alpha": 2.0},
    "labels_per_class": {"labels_per_class": 3.0},
    "label_ratio": {"labels_per_class": None, "label_ratio": 0.3},
    "labels": {"labels_per_class": None, "labels": 60},
    "labels_at": {"method": "semifl", "labels_at": "server"},
    "labeled_clients": {"labels_at": "some", "labeled_clients": 2},
    "classes_per_client": {"clients": 10, "setting": "semifl-shards", "classes_per_client": 3},
    "unlabeled_share": {"unlabeled_share": 0.5},
    "unknown_classes": {"unknown_classes": 2},
    "unknown_share": {"unknown_classes": 3, "unknown_share": 0.3},
    "stages": {"stages": 2},
    "min_size": {"dirichlet_alpha": 0.3, "min_size": 18},
    "split_seed": {"split_seed": 1},
    "cohort": {"cohort": 2},
    "rounds": {"rounds": 5},
    "seed": {"seed": 1},
    "client_dropout": {"client_dropout": 0.2},
    "labeled_batch": {"labeled_batch": 5},
    "unlabeled_batch": {"unlabeled_batch": 5},
    "epochs": {"steps": None, "epochs": 2},
    "epoch": {"steps": None, "epoch": "labeled"},
    "steps": {"steps": 3},
    "server_batch": {"server_batch": 5},
    "server_epochs": {"steps": None, "server_epochs": 3},
    "statistics": {"statistics": "separate"},
    "labeling": {"labeling": "running"},
    "reuse_labeled": {"reuse_labeled": True},
    "budget": {"budget": "forwards"},
    "reference": {"budget": "forwards", "reference": "fedavg"},
    "network": {"network": "resnet9"},
    "width": {"width": 8},
    "norm": {"norm": "group"},
    "precision": {"precision": "bf16"},
    "optimizer": {"optimizer": "sgd"},
    "lr": {"lr": 0.1},
    "momentum": {"optimizer": "sgd", "momentum": 0.5},
    "nesterov": {"optimizer": "sgd", "momentum": 0.5, "nesterov": True},
    "weight_decay": {"weight_decay": 0.1},
    "clip_norm": {"clip_norm": 1.0},
    "clip_value": {"clip_value": 1.0},
    "class_weights": {"class_weights": "balanced"},
    "schedule": {"schedule": "step"},
    "server_ema": {"server_ema": 0.5},
    "labeled_view": {"labeled_view": "cutout"},
    "strong_view": {"strong_view": "semifl"},
    "shared_views": {"shared_views": True},
    "flip": {"flip": True},
    "confidence_threshold": {"confidence_threshold": 0.5},
    "test_statistics": {"test_statistics": "batch"},
    "evaluate_every": {"evaluate_every": 2},
    "patience": {"validation_share": 0.2, "patience": 2},
    "client_models": {"client_models": 2},
    "aggregation": {"aggregation": "median"},
    "byzantine": {"aggregation": "trimmed", "byzantine": 0.4},
    "upload_precision": {"upload_precision": "int8"},
    "secure_aggregation": {"secure_aggregation": True},
    "attack": {"attack": "noise", "attackers": 0.2},
    "attackers": {"attack": "noise", "attackers": 0.4},
    "attack_factor": {"attack": "sign-flip", "attackers": 0.2, "attack_factor": 2.0},
    "weight_cap": {"weight_cap": 2.0},
    "dp_clip": {"norm": "group", "dp_clip": 1.0, "dp_noise": 1.0},
    "dp_noise": {"norm": "group", "dp_clip": 1.0, "dp_noise": 2.0},
    "dp_epsilon": {"norm": "group", "dp_clip": 1.0, "dp_noise": 2.0, "dp_epsilon": 50.0},
    "dp_delta": {"norm": "group", "dp_clip": 1.0, "dp_noise": 2.0, "dp_delta": 1e-3},
    "executor": {"executor": "vmap"},
    "memory_cap": {"memory_cap": 1},
    "checkpoint_every": {"checkpoint_every": 2},
}
"""For each option the smallest change of `BASE` in which it has an effect."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "attack": {"attack": "none", "attackers": 0.0},
    "attackers": {"attackers": 0.2},
    "label_ratio": {"label_ratio": 0.2},
    "labels": {"labels": 40},
    "labeled_clients": {"labeled_clients": 1},
    "dp_clip": {"dp_clip": 2.0},
    "dp_noise": {"dp_noise": 1.0},
}
"""Values to compare with, where the default cannot be combined with the other changes of a row."""

ELSEWHERE = {
    "baselines": "more runs: test_cli.py",
    "protocol": "values of other options: test_cli.py",
    "data": "tests/data/test_sources.py",
    "crop": "oblong images: tests/data/test_preparation.py",
    "data_dir": "tests/data/test_sources.py",
    "cache": "tests/data/test_sources.py",
    "validation_part": "a part of the data set: tests/data/test_sources.py",
    "window": "images of 16 bits: tests/data/test_preparation.py",
    "group_pattern": "names of files: tests/data/test_loaders.py",
    "skip_unreadable": "damaged files: tests/data/test_loaders.py",
    "split": "a file: tests/runs",
    "weights": "a file: tests/models/test_finetuned.py",
    "freeze": "pretrained weights: tests/models/test_finetuned.py",
    "tune": "pretrained weights: tests/models/test_finetuned.py",
    "features": "pretrained weights: tests/runs/test_features.py",
    "backbone_lr": "pretrained weights: tests/runs/test_finetuned_runs.py",
    "device": "a GPU",
    "deterministic": "a GPU; a processor refuses it: tests/core/test_arithmetic.py",
    "threads": "speed only: tests/runs/test_executor.py",
    "workers": "speed only: tests/runs/test_workers.py",
    "processes": "speed only: tests/runs/test_parallel.py",
    "run_dir": "the folder: test_cli.py",
}
"""Options whose effect needs files or another machine, and where it is tested."""


def test_each_option_has_a_row():
    assert set(schema.option_types()) | {"options"} == set(CHANGES) | set(ELSEWHERE)
    assert not set(CHANGES) & set(ELSEWHERE)


def describe(value: Any) -> str:
    """Describe an object and those that it consists of, without their addresses."""
    if type(value).__module__.startswith("halfmoon") and hasattr(value, "__dict__"):
        parts = [f"{name}={describe(part)}" for name, part in sorted(vars(value).items())]
        return f"{type(value).__name__}({', '.join(parts)})"
    return re.sub(r" at 0x\w+", "", repr(value))


def fingerprint(config: Config, folder: Path) -> str:
    """Hash what a run is built of: images, split, task, method, batches, views, runtime, and rules of the loop."""
    schema.check_methods(config)
    shared = factory.build_problem(config)
    with workers.open_executor(config) as executor:
        aggregators = runner._build_aggregators(config, shared, folder)
        method = factory.build_method(config)
        simulation = runner._build_simulation(config, method, shared, executor, aggregators)
        experiment = runner._build_experiment(config, shared, simulation, executor, NULL_CALLBACK)
    runtime: Any = experiment.runtime
    examples = [None if each is None else (each.images.numpy(), each.labels.numpy()) for each in
                (shared.train, shared.test, shared.validation)]  # fmt: skip
    loop = {name: value for name, value in vars(experiment).items() if name not in ("runtime", "test", "validation")}
    loop["test_clients"] = None if experiment.test_clients is None else experiment.test_clients.tolist()
    parts = (
        examples,
        (shared.split.client, shared.split.labeled, shared.split.stage),
        describe(loop),
        describe((runtime.settings, runtime.dataset.reuse_labeled, runtime.store.cap)),
        describe((runtime.local_clients.training, runtime.views)),
        [describe(stage) for stage in runtime.aggregators],
        type(executor).__name__,
    )
    return hashlib.sha256(pickle.dumps(parts)).hexdigest()


def differ(one: Config, other: Config, folder: Path) -> bool:
    return fingerprint(one, folder) != fingerprint(other, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("options")


def test_equal_configurations_have_equal_fingerprints(folder: Path):
    """Otherwise the tests below could not fail."""
    assert not differ(BASE, replace(BASE, run_dir=folder), folder)


@pytest.mark.parametrize("name", CHANGES)
def test_each_option_changes_what_a_run_builds(name: str, folder: Path):
    """The other changes of its row stay, so that the option alone makes the difference. Two equal builds do not differ."""
    changed = replace(BASE, **CHANGES[name])
    before = DEFAULTS.get(name, {name: getattr(BASE, name)})
    assert not differ(changed, replace(changed), folder)
    assert differ(changed, replace(changed, **before), folder)

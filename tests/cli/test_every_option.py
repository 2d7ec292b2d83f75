"""Every option of every command: it changes what the command prints, writes or starts, or it is refused.

A new command or option without a case fails `test_each_option_has_a_case`. Short commands run as they are; what takes
long (a search, a sweep, a server, a site, a page) is replaced by a function that records its arguments.
"""

import contextlib
import dataclasses
import hashlib
import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from PIL import Image
from small_recipe import RECIPE
from test_option_sweep import CALLS as TEXT_CALLS
from test_options import CHANGES, COMMANDS

import halfmoon
from halfmoon.cli import main as cli
from halfmoon.cli.commands.base import CommandExit
from halfmoon.config.schema import Config
from halfmoon.core import weight_files
from halfmoon.data import Images, sources
from halfmoon.data.readers import cache
from halfmoon.federation import contract
from halfmoon.federation.contract.promises import PromiseResult
from halfmoon.federation.transport import launch, site_process
from halfmoon.pages import folder_page, label, watch
from halfmoon.runs import runner, workers
from halfmoon.runs.callbacks import Callbacks
from halfmoon.runs.trackers import WandB
from halfmoon.sites.inference import export
from halfmoon.studies import cost, plan, run_plan, run_sweep, site_rehearsal, tuning

TINY = "--clients 4 --cohort 2 --rounds 2 --steps 1 --width 2 --threads 1 --device cpu --executor loop"
METHOD = "--method fedavg-fixmatch"
RUN = f"run {METHOD} {TINY}"
COMPARE = f"compare --methods fedavg fedavg-fixmatch {TINY}"
TUNE = f"tune {METHOD} {TINY} --knob lr=0.1,0.2"
SWEEP = "sweep recipe.toml"
TIME = "recipes recipe.toml --time"
LABEL = "site label site"
LIST = "site label unlisted --classes dark bright --list 3"
JOIN = "site join --server 127.0.0.1:9092 --site site --name a"
SERVE = "serve federation.toml"
EXPORT = "site export digits --sites 2 --out out --data-share 0.1"

FEDERATION = """
method = "fedavg"
cohort = 2
rounds = 2
network = "small"
[federation]
sites = ["a", "b"]
classes = ["dark", "bright"]
image = [1, 8, 8]
"""

CASES: dict[str, dict[str, tuple[str, str]]] = {
    "run": {
        "config": (RUN, f"{RUN} --config more.toml"),
        "option": (RUN, f"{RUN} --option threshold=0.5"),
        "explain": (RUN, f"{RUN} --explain"),
        "tracker": (RUN, f"{RUN} --tracker tensorboard"),
        "tracker_group": (f"{RUN} --tracker wandb", f"{RUN} --tracker wandb --tracker-group mine"),
        "plan": ("run --data classes --labels-per-class 2", "run --data classes --labels-per-class 2 --plan"),
        "minutes": ("run --data classes --labels-per-class 2", "run --data classes --labels-per-class 2 --minutes 3"),
        "scratch_trial": (
            "run --data classes --labels-per-class 2 --plan", "run --data classes --labels-per-class 2 --plan --scratch-trial",
        ),
        "sites": ("run", "run --sites site test"),
        "json": ("run --explain", "run --explain --json"),
        "wide": ("resume three", "resume three --wide"),
        "run_dir": (RUN, f"{RUN} --run-dir elsewhere"),
    },
    "compare": {
        "methods": (COMPARE, COMPARE.replace("fedavg-fixmatch", "fedavg-sl")),
        "seeds": (COMPARE, f"{COMPARE} --seeds 1 2"),
        "config": (COMPARE, f"{COMPARE} --config more.toml"),
        "option": (COMPARE, f"{COMPARE} --option fedavg-fixmatch.threshold=0.5"),
        "explain": (COMPARE, f"{COMPARE} --explain"),
        "tracker": (COMPARE, f"{COMPARE} --tracker tensorboard"),
        "tracker_group": (f"{COMPARE} --tracker wandb", f"{COMPARE} --tracker wandb --tracker-group mine"),
        "json": (f"{COMPARE} --explain", f"{COMPARE} --explain --json"),
        "wide": ("resume three", "resume three --wide"),
        "run_dir": (COMPARE, f"{COMPARE} --run-dir elsewhere"),
    },
    "tune": {
        "knob": (TUNE, f"{TUNE.replace('lr=0.1', 'lr=0.05')}"),
        "trials": (TUNE, f"{TUNE} --trials 3"),
        "seeds": (TUNE, f"{TUNE} --seeds 1 2"),
        "config": (TUNE, f"{TUNE} --config more.toml"),
        "option": (TUNE, f"{TUNE} --option threshold=0.5"),
        "json": (TUNE, f"{TUNE} --json"),
        "run_dir": (TUNE, f"{TUNE} --run-dir elsewhere"),
    },
    "resume": {
        "folder": ("resume run", "resume stopped"),
        "unchecked": ("resume run", "resume run --unchecked"),
        "tracker": ("resume stopped", "resume stopped --tracker tensorboard"),
        "tracker_group": (
            "resume stopped --tracker tensorboard", "resume stopped --tracker tensorboard --tracker-group mine",
        ),
        "json": ("resume run", "resume run --json"),
        "wide": ("resume three", "resume three --wide"),
    },
    "data": {
        "names": ("data", "data classes --resize 8"),
        "config": ("data digits", "data digits --config more.toml"),
        "data": ("data", "data --data classes"),
    },
    "recipes": {
        "time": ("recipes recipe.toml", "recipes recipe.toml --time"),
        "scale": (TIME, f"{TIME} --scale short"),
        "only": (TIME, f"{TIME} --only method=fedavg"),
        "data_dir": (TIME, f"{TIME} --data-dir elsewhere"),
        "cache": (TIME, f"{TIME} --cache elsewhere"),
        "device": (TIME, f"{TIME} --device auto"),
        "executor": (TIME, f"{TIME} --executor vmap"),
        "threads": (TIME, f"{TIME} --threads 2"),
        "workers": (TIME, f"{TIME} --workers 2"),
    },
    "sweep": {
        "recipe": (SWEEP, "sweep cbafed-table1 --seeds 0 --only method=cbafed"),
        "only": (SWEEP, f"{SWEEP} --only method=fedavg"),
        "seeds": (SWEEP, f"{SWEEP} --seeds 0"),
        "scale": (SWEEP, f"{SWEEP} --scale short"),
        "out": (SWEEP, f"{SWEEP} --out elsewhere"),
        "jobs": (SWEEP, f"{SWEEP} --jobs 2"),
        "engine": (SWEEP, f"{SWEEP} --engine ray"),
        "ray_address": (f"{SWEEP} --engine ray", f"{SWEEP} --engine ray --ray-address example.org:1"),
        "tracker": (SWEEP, f"{SWEEP} --tracker tensorboard"),
        "tracker_group": (f"{SWEEP} --tracker wandb", f"{SWEEP} --tracker wandb --tracker-group mine"),
        "dry_run": (SWEEP, f"{SWEEP} --dry-run"),
        "explain": (SWEEP, f"{SWEEP} --explain"),
        "json": (f"{SWEEP} --dry-run", f"{SWEEP} --dry-run --json"),
        "data_dir": (SWEEP, f"{SWEEP} --data-dir elsewhere"),
        "cache": (SWEEP, f"{SWEEP} --cache elsewhere"),
        "device": (SWEEP, f"{SWEEP} --device auto"),
        "executor": (SWEEP, f"{SWEEP} --executor vmap"),
        "threads": (SWEEP, f"{SWEEP} --threads 2"),
        "workers": (SWEEP, f"{SWEEP} --workers 2"),
        "memory_cap": (SWEEP, f"{SWEEP} --memory-cap 1000"),
        "checkpoint_every": (SWEEP, f"{SWEEP} --checkpoint-every 2"),
    },
    "report": {
        "runs": ("report run", "report run three"),
        "unchecked": ("report run", "report run --unchecked"),
        "out": ("report run", "report run --out page.html"),
        "json": ("report run", "report run --json"),
    },
    "federation init": {
        "folder": ("federation init one --sites a", "federation init two --sites a"),
    },
    "federation add-site": {
        "folder": ("federation add-site keys c", "federation add-site nowhere c"),
        "name": ("federation add-site keys c", "federation add-site keys d"),
        "public_key": ("federation add-site keys c", "federation add-site keys c --public-key c.pub"),
        "json": ("federation add-site keys c", "federation add-site keys c --json"),
    },
    "federation remove-site": {
        "folder": ("federation remove-site keys a", "federation remove-site nowhere a"),
        "name": ("federation remove-site keys a", "federation remove-site keys b"),
        "json": ("federation remove-site keys a", "federation remove-site keys a --json"),
    },
    "federation rotate": {
        "folder": ("federation rotate keys --server", "federation rotate nowhere --server"),
        "server": ("federation rotate keys --ca", "federation rotate keys --server"),
        "ca": ("federation rotate keys --server", "federation rotate keys --ca"),
        "site": ("federation rotate keys --server", "federation rotate keys --site a"),
        "public_key": ("federation rotate keys --site a", "federation rotate keys --site a --public-key c.pub"),
        "host": ("federation rotate keys --server", "federation rotate keys --server --host example.org"),
        "days": ("federation rotate keys --server", "federation rotate keys --server --days 40"),
        "json": ("federation rotate keys --server", "federation rotate keys --server --json"),
    },
    "federation show": {
        "folder": ("federation show keys", "federation show nowhere"),
        "json": ("federation show keys", "federation show keys --json"),
    },
    "site check": {
        "folder": ("site check site", "site check test"),
        "classes": ("site check site", "site check site --classes dark gray"),
        "test": ("site check site", "site check site --test site"),
        "json": ("site check site", "site check site --json"),
    },
    "site prepare": {
        "folder": ("site prepare site", "site prepare test"),
        "size": ("site prepare site", "site prepare site --size 4x4"),
        "channels": ("site prepare site", "site prepare site --channels 3"),
        "crop": ("site prepare site --size 4x8", "site prepare site --size 4x8 --crop"),
        "window": ("site prepare site", "site prepare site --window 10 200"),
        "out": ("site prepare site", "site prepare site --out elsewhere"),
        "json": ("site prepare site", "site prepare site --json"),
    },
    "site label": {
        "folder": (LABEL, "site label test"),
        "model": (LABEL, f"{LABEL} --model run"),
        "classes": ("site label unlisted --classes a b", "site label unlisted --classes b a"),
        "by": (LABEL, f"{LABEL} --by somebody"),
        "reader": (LABEL, f"{LABEL} --reader second"),
        "list": (LABEL, f"{LABEL} --list 3"),
        "seed": (LIST, f"{LIST} --seed 7"),
        "window": (LABEL, f"{LABEL} --window 0 100"),
        "network": (f"{LABEL} --model custom", f"{LABEL} --model custom --network custom_models:build_small"),
        "device": (f"{LABEL} --model run", f"{LABEL} --model run --device cuda"),
        "port": (LABEL, f"{LABEL} --port 50123"),
        "no_browser": (LABEL, f"{LABEL} --no-browser"),
        "json": (LABEL, f"{LABEL} --json"),
    },
    "site terms": {
        "config": ("site terms federation.toml", "site terms more.toml"),
        "json": ("site terms federation.toml", "site terms federation.toml --json"),
    },
    "site join": {
        "server": (JOIN, JOIN.replace(":9092", ":9093")),
        "site": (JOIN, JOIN.replace("--site site", "--site test")),
        "name": (JOIN, JOIN.replace("--name a", "--name b")),
        "home": (JOIN, f"{JOIN} --home elsewhere"),
        "ca": (JOIN, f"{JOIN} --ca keys/ca.crt"),
        "insecure": (JOIN, f"{JOIN} --insecure"),
        "key": (f"{JOIN} --ca keys/ca.crt", f"{JOIN} --ca keys/ca.crt --key keys/sites/a/a.key"),
        "site_keys": (JOIN, f"{JOIN} --site-keys sites.keys"),
        "device": (JOIN, f"{JOIN} --device cpu"),
        "test": (JOIN, f"{JOIN} --test test"),
        "validation": (JOIN, f"{JOIN} --validation test"),
        "share_accuracy": (f"{JOIN} --test test", f"{JOIN} --test test --share-accuracy"),
        "terms": (JOIN, f"{JOIN} --terms 0123abcd"),
        "accept": (JOIN, f"{JOIN} --accept fedavg"),
        "trust": (JOIN, f"{JOIN} --trust custom_models:CustomFedAvg"),
        "weights": (JOIN, f"{JOIN} --weights run/model.safetensors"),
        "skip_unreadable": (JOIN, f"{JOIN} --skip-unreadable"),
        "all": (JOIN, f"{JOIN} --all"),
        "json": (JOIN, f"{JOIN} --json"),
    },
    "site export": {
        "data": (EXPORT, EXPORT.replace("digits", "classes") + " --resize 8"),
        "sites": (EXPORT, EXPORT.replace("--sites 2", "--sites 3")),
        "out": (EXPORT, EXPORT.replace("--out out", "--out elsewhere")),
        "config": (EXPORT, f"{EXPORT} --config more.toml"),
        "json": (EXPORT, f"{EXPORT} --json"),
    },
    "serve": {
        "config": (SERVE, "serve more.toml"),
        "run_dir": (SERVE, f"{SERVE} --run-dir elsewhere"),
        "access": (SERVE, f"{SERVE} --access keys"),
        "host": (SERVE, f"{SERVE} --host 127.0.0.2"),
        "port": (SERVE, f"{SERVE} --port 9093"),
        "ca": (SERVE, f"{SERVE} --ca keys/ca.crt"),
        "certificate": (SERVE, f"{SERVE} --certificate keys/server/server.crt"),
        "key": (SERVE, f"{SERVE} --key keys/server/server.key"),
        "insecure": (SERVE, f"{SERVE} --insecure"),
        "page": (SERVE, f"{SERVE} --page"),
        "readmit": (SERVE, f"{SERVE} --readmit a"),
        "restarts": (SERVE, f"{SERVE} --restarts 3"),
        "queue": (SERVE, f"{SERVE} --queue disk"),
        "json": (SERVE, f"{SERVE} --json"),
    },
    "predict": {
        "model": ("predict run site", "predict three site"),
        "folder": ("predict run site", "predict run test"),
        "network": ("predict custom site", "predict custom site --network custom_models:build_small"),
        "device": ("predict run site", "predict run site --device cuda"),
        "out": ("predict run site", "predict run site --out elsewhere.csv"),
        "like": ("predict run site", "predict run site --like test"),
        "sure": ("predict run site", "predict run site --sure 0.05"),
        "json": ("predict run site", "predict run site --json"),
    },
    "evaluate": {
        "model": ("evaluate run test", "evaluate three test"),
        "folder": ("evaluate run test", "evaluate run site"),
        "network": ("evaluate custom test", "evaluate custom test --network custom_models:build_small"),
        "device": ("evaluate run test", "evaluate run test --device cuda"),
        "out": ("evaluate run test", "evaluate run test --out elsewhere"),
        "sure": ("evaluate run test", "evaluate run test --sure 0.05"),
        "json": ("evaluate run test", "evaluate run test --json"),
    },
    "review": {
        "model": ("review run test", "review three test"),
        "folder": ("review run test", "review run site"),
        "network": ("review custom test", "review custom test --network custom_models:build_small"),
        "device": ("review run test", "review run test --device cuda"),
        "port": ("review run test", "review run test --port 50123"),
        "no_browser": ("review run test", "review run test --no-browser"),
        "json": ("review run test", "review run test --json"),
    },
    "calibrate": {
        "model": ("calibrate run test", "calibrate three test"),
        "folder": ("calibrate run test", "calibrate run site"),
        "network": ("calibrate custom test", "calibrate custom test --network custom_models:build_small"),
        "device": ("calibrate run test", "calibrate run test --device cuda"),
        "json": ("calibrate run test", "calibrate run test --json"),
    },
    "export": {
        "model": ("export run --torch m.pt2", "export three --torch m.pt2"),
        "network": ("export custom --torch m.pt2", "export custom --torch m.pt2 --network custom_models:build_small"),
        "onnx": ("export run --torch m.pt2", "export run --torch m.pt2 --onnx m.onnx"),
        "torch": ("export run", "export run --torch m.pt2"),
        "images": ("export run --torch m.pt2", "export run --torch m.pt2 --images site"),
        "json": ("export run --torch m.pt2", "export run --torch m.pt2 --json"),
    },
    "watch": {
        "folder": ("watch run", "watch three"),
        "port": ("watch run", "watch run --port 50123"),
        "no_browser": ("watch run", "watch run --no-browser"),
        "json": ("watch run", "watch run --json"),
    },
    "check-method": {
        "method": ("check-method fedavg", "check-method fedavg-fixmatch"),
        "option": ("check-method fedavg", "check-method fedavg --option prox=0.1"),
        "network": ("check-method fedavg", "check-method fedavg --network custom_models:build_small_group_norm"),
        "json": ("check-method fedavg", "check-method fedavg --json"),
    },
}  # fmt: skip
"""By command and option: a call without the option or with another value, and one with it.

The words are relative to a folder with copies of those of `Templates` that they name.
"""

Outcome = tuple[int, str, str, dict[str, str], list[str]]
"""Exit code, output, errors, files with their contents, and the arguments of replaced functions."""

READABLE = (".toml", ".json", ".jsonl", ".conf", ".csv", ".txt", ".html")
HASHED = (".png", ".safetensors", ".parquet", ".npy")
CHANGING = re.compile(
    r"SHA256:[^\s\"]+|(?:[0-9A-F]{2}:){9,}[0-9A-F]{2}|\d{4}-\d\d-\d\d[T ][\d:.]+\+?[\dZ]*|\b[0-9a-f]{32,}\b"
    r"|\"?(seconds|cpu_seconds|peak_memory\w*)\"?[:=] ?[\d.e-]+|\b\d+:\d\d left|\d+(\.\d+)? s\b|0x[0-9a-f]+"
)
"""What differs between equal calls: keys and their fingerprints, times, and addresses of objects."""


def describe(value: Any) -> str:
    """Describe an argument without addresses of objects: functions by their names, objects by their attributes."""
    if isinstance(value, Config | Path | str | int | float | bool | None):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{describe(key)}: {describe(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple | set):
        return "[" + ", ".join(map(describe, value)) + "]"
    if isinstance(value, np.ndarray):
        return f"{value.shape} {value.mean()}"
    if callable(value):
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        return f"{type(value).__name__}{[each for each in cells if isinstance(each, str | Path)]}"
    if isinstance(value, Callbacks):
        return describe(value._callbacks)
    if isinstance(value, WandB):
        return f"WandB {value._group}"
    name = type(value).__name__
    if not dataclasses.is_dataclass(value):
        return f"{name}({getattr(value, 'number', '')})"
    return f"{name}({', '.join(f'{each.name}={describe(getattr(value, each.name))}' for each in dataclasses.fields(value))})"


class Recorder:
    """Replaces functions by ones that record their arguments and end the command."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def ending(self, name: str) -> Callable[..., NoReturn]:
        def record(*args: Any, **options: Any) -> NoReturn:
            self.calls.append(f"{name} {describe(args)} {describe(options)}")
            raise CommandExit("recorded", 0)

        return record

    def replacing(self, name: str, result: Callable[[], Any]) -> Callable[..., Any]:
        def record(*args: Any, **options: Any) -> Any:
            self.calls.append(f"{name} {describe(args)} {describe(options)}")
            return result()

        return record


def leave() -> NoReturn:
    """End the participation of a site."""
    raise site_process.SiteFinished(0, "the federation is finished.")


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Replace what takes long, or serves until it is stopped."""
    recorder = Recorder()
    monkeypatch.setattr(weight_files, "_REGISTERED", {})  # files of this test's folder, which later tests lack
    for module, name in (
        (runner, "start"), (runner, "compare"), (run_plan, "run_plan"), (plan, "plan_if_folder"),
        (site_rehearsal, "rehearse"), (run_sweep, "run_sweep"), (workers, "RayExecutor"), (cost, "estimate_costs"),
        (label, "serve_label_page"), (folder_page, "serve_page"), (watch, "serve_page"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, recorder.ending(name))
    for module, name, result in (
        (launch, "serve", lambda: None),
        (site_process, "join_federation", leave),
        (tuning, "tune", lambda: [tuning.Trial(0, {"lr": 0.1}, 0.5)]),
        (export, "export_torch", lambda: export.ExportResult(Path("m.pt2"), 1, 0.0)),
        (export, "export_onnx", lambda: export.ExportResult(Path("m.onnx"), 1, 0.0)),
    ):
        monkeypatch.setattr(module, name, recorder.replacing(name, result))
    monkeypatch.setattr(contract, "check_method", lambda *args: [PromiseResult("recorded", True, describe(args))])
    return recorder


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, no network, and decoded images that are cached however few they are."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    train, test, classes = sources._load_digits()
    few = Images(test.images[:20], test.labels[:20])
    monkeypatch.setattr(sources, "_load_digits", lambda: (train, few, classes))
    monkeypatch.setattr(cache, "MIN_CACHED_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Stop(halfmoon.NullCallback):
    """Stop a run after its first round."""

    def round(self, run: Any, row: Any) -> None:
        raise KeyboardInterrupt


def write_images(folder: Path, names: dict[str, str | None], size: int = 8) -> Path:
    """Write one gray image for each name, dark or bright by its class, and a labels.csv."""
    generator = np.random.default_rng(len(names))
    folder.mkdir()
    for name, label_name in names.items():
        low = 120 if label_name == "bright" else 0
        Image.fromarray(generator.integers(low, low + 100, (size, size), dtype=np.uint8)).save(folder / name)
    rows = [f"{name},{label_name}" for name, label_name in names.items() if label_name]
    if rows:
        (folder / "labels.csv").write_text("\n".join(["path,label", *rows, ""]))
    return folder


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all that the words of `CASES` name."""
    root = tmp_path_factory.mktemp("templates")
    pairs = [("dark", "bright")[number % 2] for number in range(12)]
    write_images(root / "site", {f"s{number}.png": name if number < 8 else None for number, name in enumerate(pairs)})
    write_images(root / "test", {f"t{number}.png": name for number, name in enumerate(pairs[:6])}, size=9)
    write_images(root / "unlisted", {f"u{number}.png": None for number in range(5)})
    for name in ("dark", "bright"):
        write_images(root / name, {f"{name}{number}.png": None for number in range(20 + len(name))})
        (root / "classes").mkdir(exist_ok=True)
        (root / name).rename(root / "classes" / name)
    for name in ("dark", "bright"):
        shutil.copytree(root / "classes" / name, root / "damaged" / name)
        for number in range(3):
            (root / "damaged" / name / f"bad{number}.png").write_bytes(b"no image")
        (root / "deep" / name).mkdir(parents=True)
        for number in range(25):
            pixels = np.random.default_rng(number + len(name)).integers(0, 4096, (8, 12), dtype=np.uint16)
            Image.fromarray(pixels).save(root / "deep" / name / f"{number}.png")
    (root / "federation.toml").write_text(FEDERATION)
    (root / "more.toml").write_text("clients = 5\nrounds = 3\n")
    (root / "recipe.toml").write_text(RECIPE)
    call(f"federation init {root / 'keys'} --sites a b")
    call(f"federation init {root / 'other'} --sites c")
    shutil.copy(root / "other" / "sites" / "c" / "c.pub", root / "c.pub")
    options: dict[str, Any] = {
        "data": str(root / "classes"), "resize": 8, "channels": 1, "method": "fedavg-fixmatch", "width": 2, "rounds": 2,
        "steps": 1, "clients": 2, "cohort": 1, "threads": 1, "device": "cpu", "executor": "loop", "labels_per_class": 1,
    }  # fmt: skip
    halfmoon.run(Config(**options, run_dir=root / "run"))
    halfmoon.run(Config(**{**options, "network": "custom_models:build_small", "width": None}, run_dir=root / "custom"))
    halfmoon.run(Config(**options, baselines=("fedavg", "fedavg-sl"), run_dir=root / "three"))
    with contextlib.suppress(KeyboardInterrupt):
        halfmoon.run(Config(**options, run_dir=root / "stopped"), Stop())
    return root


def call(words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words.split())
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def current_folder(folder: Path, templates: Path, words: str) -> Iterator[None]:
    """Enter a new folder with copies of the templates that a command names."""
    folder.mkdir()
    for word in {word.partition("/")[0] for word in words.split()}:
        if (templates / word).is_dir():
            shutil.copytree(templates / word, folder / word)
        elif (templates / word).is_file():
            shutil.copy(templates / word, folder / word)
    with contextlib.chdir(folder):
        yield


def read_files(folder: Path) -> dict[str, str]:
    files = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        text = ""
        if path.suffix in READABLE:
            text = CHANGING.sub("...", path.read_text(errors="replace").replace(str(folder), "FOLDER"))
        elif path.suffix in HASHED:
            text = hashlib.sha256(path.read_bytes()).hexdigest()
        files[re.sub(r"events\.out.*", "events.out", str(path.relative_to(folder)))] = text
    return files


def observe(words: str, folder: Path, templates: Path, recorder: Recorder) -> Outcome:
    """Run a command in a new folder, and return all that it prints, writes or would start."""
    recorder.calls = []
    with current_folder(folder, templates, words):
        code, out, err = call(words)
    texts = [CHANGING.sub("...", text.replace(str(folder), "FOLDER")) for text in (out, err, *recorder.calls)]
    return code, texts[0], texts[1], read_files(folder), texts[2:]


def is_refused(result: Outcome) -> bool:
    code, out, err, _, calls = result
    return code == 2 and out == "" and err.startswith("halfmoon: ") and err.count("\n") == 1 and not calls


SEEN: dict[str, Outcome] = {}
"""Results of calls without the option, which several options are compared with."""


def observe_base(words: str, folder: Path, templates: Path, recorder: Recorder) -> Outcome:
    """Run a command twice, the first time that it is asked for: equal calls are equal, or no test could fail."""
    if words not in SEEN:
        SEEN[words] = observe(words, folder / "once", templates, recorder)
        again = observe(words, folder / "twice", templates, recorder)
        assert SEEN[words] == again, words
    return SEEN[words]


CALLS = [(command, option) for command, options in CASES.items() for option in options]


@pytest.mark.parametrize(("command", "option"), CALLS)
def test_an_option_changes_what_a_command_does(
    command: str, option: str, tmp_path: Path, templates: Path, recorder: Recorder
) -> None:
    without, given = CASES[command][option]
    before = observe_base(without, tmp_path, templates, recorder)
    after = observe(given, tmp_path / "given", templates, recorder)
    assert after[0] in (0, 1) or is_refused(after), after
    assert before != after


OTHER_VALUES: dict[str, dict[str, Any]] = {
    "baselines": {"baselines": ("fedavg",)},
    "protocol": {"protocol": "few-labels"},
    "data": {"data": "classes", "resize": 8},
    "crop": {"data": "deep", "resize": 8, "crop": True},
    "data_dir": {"data": "cifar10", "data_dir": "elsewhere"},
    "cache": {"data": "classes", "resize": 8, "cache": "elsewhere"},
    "validation_part": {"validation_part": True},
    "window": {"data": "deep", "resize": 8, "window": (0.0, 3000.0)},
    "group_pattern": {"data": "classes", "resize": 8, "group_pattern": r"(\d)\.png"},
    "skip_unreadable": {"data": "damaged", "resize": 8, "skip_unreadable": True},
    "split": {"split": "split.parquet"},
    "weights": {"weights": "run/model.safetensors"},
    "freeze": {"network": "efficientnet-lite0", "freeze": ("backbone",)},
    "tune": {"network": "efficientnet-lite0", "tune": "last"},
    "features": {"network": "efficientnet-lite0", "tune": "head", "features": True},
    "backbone_lr": {"network": "efficientnet-lite0", "backbone_lr": 0.5},
    "device": {"device": "cpu"},
    "deterministic": {"deterministic": True},
    "threads": {"threads": 2},
    "workers": {"workers": 2},
    "processes": {"processes": 2},
    "run_dir": {"run_dir": "elsewhere"},
}
"""Values of the options of a run that `test_options.CHANGES` lacks."""

RUN_OPTIONS = {name: values for name, values in {**CHANGES, **OTHER_VALUES}.items() if name != "options"}

RUN_COMMANDS = {
    "run": f"run {METHOD} --explain --json",
    "compare": "compare --methods fedavg fedavg-fixmatch --explain --json",
    "tune": f"tune {METHOD} --knob lr=0.1,0.2",
    "data": "data --json",
    "site export": "site export digits --sites 2 --out out",
}
"""Calls that show the options of a run: as a table, as the configuration that is searched, or as what is split."""


def as_words(values: dict[str, Any]) -> list[str]:
    words = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def run_option_cases() -> Iterator[tuple[str, str]]:
    for command in RUN_COMMANDS:
        flags = {action.dest for action in COMMANDS[command]._actions}
        yield from ((command, option) for option in RUN_OPTIONS if option in flags and option not in CASES[command])


@pytest.mark.parametrize(("command", "option"), [*run_option_cases()])
def test_an_option_of_a_run_changes_what_a_command_does(
    command: str, option: str, tmp_path: Path, templates: Path, recorder: Recorder
) -> None:
    """The other options of its row stay, if the command has them."""
    flags = {action.dest for action in COMMANDS[command]._actions if action.option_strings}
    row = {name: value for name, value in RUN_OPTIONS[option].items() if name in flags}
    base = f"{RUN_COMMANDS[command]} "
    if command == "site export":
        base = base.replace("digits", RUN_OPTIONS[option].get("data", "digits --data-share 0.1"))
    without = base + " ".join(as_words({name: value for name, value in row.items() if name != option}))
    after = observe(base + " ".join(as_words(row)), tmp_path / "given", templates, recorder)
    assert after[0] in (0, 1) or is_refused(after), after
    assert observe_base(without, tmp_path, templates, recorder) != after


WITHOUT_EFFECT = {
    "recipes --device cpu": "--device needs --time: a list of recipes trains nothing.",
    "recipes recipe.toml --workers 2": "--workers needs --time: a list of recipes trains nothing.",
    "predict run site --network custom_models:build_small": (
        "--network is 'custom_models:build_small', but the network of this model is part of halfmoon: leave it out."
    ),
    "export run --torch m.pt2 --network small": (
        "--network is 'small': it must be MODULE:MAKE, or be left out for a network of halfmoon."
    ),
    "calibrate run test --network small": (
        "--network is 'small': it must be MODULE:MAKE, or be left out for a network of halfmoon."
    ),
    "site label site --network custom_models:build_small": (
        "--network needs --model RUN: without a model nothing is computed."
    ),
    "site label site --device cpu": "--device needs --model RUN: without a model nothing is computed.",
    "run --sites site test --plan": "--plan has no effect with --sites: leave one of them out.",
    "run --sites site test --minutes 3": "--minutes has no effect with --sites: leave one of them out.",
    "run --sites site test --wide": "--wide has no effect with --sites: leave one of them out.",
    "run --sites site test --clients 3": (
        "--clients has no effect with --sites, whose folders are the clients and have the labels: leave one of them out."
    ),
    "run --sites site test --labels-per-class 3": (
        "--labels-per-class has no effect with --sites, whose folders are the clients and have the labels: leave one of "
        "them out."
    ),
    f"{JOIN} --share-accuracy": "--share-accuracy needs --test FOLDER: the accuracy is that on its images.",
    f"{JOIN} --all --terms any": (
        "--all shows the terms before the command asks, but --terms answers already: leave one out."
    ),
    f"{JOIN} --insecure": "--insecure is for a server on another machine, not for 127.0.0.1:9092: leave it out.",
    f"{SERVE} --insecure": (
        "--insecure allows connections of other machines, but --host 127.0.0.1 is this machine only: leave --insecure "
        "out, or give the --host that the sites reach."
    ),
}
"""Calls with an option that would have no effect there."""


@pytest.mark.parametrize(("words", "sentence"), WITHOUT_EFFECT.items())
def test_an_option_without_effect_is_refused(
    words: str, sentence: str, tmp_path: Path, templates: Path, recorder: Recorder
) -> None:
    result = observe(words, tmp_path / "given", templates, recorder)
    assert (result[0], result[2], result[4]) == (2, f"halfmoon: {sentence}\n", [])


def test_the_cohort_of_a_rehearsal_is_the_flag(tmp_path: Path, templates: Path, recorder: Recorder) -> None:
    for words, cohort in (("", 2), (" --cohort 1", 1)):
        observe(f"run --sites site test{words}", tmp_path / str(cohort), templates, recorder)
        assert f"cohort={cohort}," in recorder.calls[0]


def test_a_finished_run_gets_event_files(tmp_path: Path, templates: Path, recorder: Recorder) -> None:
    files = observe("resume three --tracker tensorboard", tmp_path / "given", templates, recorder)[3]
    assert {name for name in files if name.endswith("events.out")} == {
        f"three/{folder}tensorboard/events.out" for folder in ("", "baselines/fedavg/", "baselines/fedavg-sl/")
    }


FAILING = {
    "compare": "compare --methods nothing", "tune": "tune --knob nothing", "run": "run --method nothing",
    "methods": "methods nothing", "data": "data nothing", "recipes": "recipes nothing", "privacy": "privacy",
    "resume": "resume nowhere", "sweep": "sweep nothing", "report": "report nowhere", "watch": "watch nowhere",
    "federation init": "federation init one --images a=5", "federation add-site": "federation add-site nowhere a",
    "federation remove-site": "federation remove-site nowhere a", "federation rotate": "federation rotate nowhere --ca",
    "federation show": "federation show nowhere", "site check": "site check nowhere",
    "site prepare": "site prepare nowhere", "site label": "site label nowhere", "site terms": "site terms nowhere",
    "site join": JOIN.replace("--site site", "--site nowhere"), "site export": EXPORT.replace("digits", "nothing"),
    "serve": "serve nowhere", "predict": "predict nowhere site", "evaluate": "evaluate nowhere site",
    "review": "review nowhere site", "calibrate": "calibrate nowhere site", "export": "export nowhere --torch m.pt2",
    "check-method": "check-method nothing --option a=1",
}  # fmt: skip
"""For each command a call that is refused."""


@pytest.mark.parametrize("command", COMMANDS)
def test_debug_raises_what_a_command_refuses(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(FAILING[command])
    assert (code, out) == (2, "")
    assert err.startswith("halfmoon: ")
    with pytest.raises(halfmoon.UserError):
        call(f"{FAILING[command]} --debug")


def test_each_option_has_a_case() -> None:
    """Of each command: those of this file, of `test_option_sweep.py`, and the common flags."""
    cases = {(command, option) for command, options in CASES.items() for option in options} | {*TEXT_CALLS}
    cases |= {(command, "debug") for command in FAILING} | set(run_option_cases())
    options = {
        (command, action.dest) for command, parser in COMMANDS.items() for action in parser._actions
        if action.dest not in ("help", "command", "action")
    }  # fmt: skip
    assert options == cases

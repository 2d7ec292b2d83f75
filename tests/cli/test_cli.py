"""The command line: what it starts, what it prints, and one sentence for every mistake."""

import errno
import io
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import halfmoon
from halfmoon.cli import console
from halfmoon.cli import main as cli
from halfmoon.cli.commands import methods
from halfmoon.config import schema as config
from halfmoon.config.schema import Config
from halfmoon.core.errors import Diverged, UserError
from halfmoon.data import Split
from halfmoon.methods import registry
from halfmoon.runs.callbacks import RunInfo
from halfmoon.runs.progress import (
    LineProgress,
    LiveProgress,
    Progress,
    describe_progress,
    duration,
    make_progress,
    print_line,
    wrap_lines,
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Fake:
    """Stands in for `halfmoon.runs.runner`: records its calls, and does what the test defines."""

    def __init__(self) -> None:
        self.config = Config()
        self.rest: tuple[Any, ...] = ()
        self.act: Callable[[Any], None] = lambda watch: None

    def start(self, chosen: Config, watch: Any) -> SimpleNamespace:
        return self._note(chosen, (), watch)

    def compare(self, chosen: Config, methods: list[str], seeds: list[int], watch: Any) -> SimpleNamespace:
        return self._note(chosen, (methods, seeds), watch)

    def _note(self, chosen: Config, rest: tuple[Any, ...], watch: Any) -> SimpleNamespace:
        self.config = chosen
        self.rest = rest
        chosen.run_dir.mkdir(parents=True, exist_ok=True)
        self.act(watch)
        curves = chosen.run_dir / "curves.png"
        return SimpleNamespace(folder=chosen.run_dir, summaries=[], curves=curves, runs=[], tables=[])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Replace `halfmoon.runs.runner` by a fake."""
    build = Fake()
    monkeypatch.setitem(sys.modules, "halfmoon.runs.runner", build)
    monkeypatch.setattr(halfmoon.runs, "runner", build, raising=False)
    return build


def test_method_or_file_runs_without_other_arguments(fake: Fake, tmp_path: Path) -> None:
    assert cli.main(["run", "--method", "fedavg"]) == 0
    assert (fake.config.method, fake.config.baselines) == ("fedavg", ())
    (tmp_path / "run.toml").write_text("rounds = 7\nlr = 0.01\n[options]\nhidden = 16\nfine = true\n")
    assert cli.main(["run", "--config", "run.toml", "--rounds", "9", "--option", "hidden=8"]) == 0
    assert (fake.config.baselines, fake.config.rounds, fake.config.lr) == ((), 9, 0.01)
    assert fake.config.options == {"hidden": 8, "fine": True}
    assert cli.main(["run", "--baselines", "fedavg-sl"]) == 0
    assert fake.config.baselines == ("fedavg-sl",)


def test_flags_reach_the_configuration_with_their_types(fake: Fake, tmp_path: Path) -> None:
    text = "run --no-flip --unlabeled-batch rest --label-ratio 0.1 --run-dir a --width none --executor vmap --lr 1"
    text += " --option coarse_lr=1 --option fine=false --option sign=new-old --option fedavg-fixmatch.threshold=0.9"
    text += " --nesterov --momentum 0.9 --optimizer sgd --no-reuse-labeled --labeled-batch all"
    text += " --pixel-mean 0.5 0.4 0.3 --pixel-std 0.2 --window 0 100"
    assert cli.main(text.split()) == 0
    chosen = fake.config
    assert (chosen.flip, chosen.unlabeled_batch, chosen.width, chosen.lr) == (False, "rest", None, 1.0)
    assert (chosen.label_ratio, chosen.labels_per_class, chosen.executor) == (0.1, None, "vmap")
    assert chosen.run_dir == tmp_path / "a"
    assert (chosen.nesterov, chosen.reuse_labeled, chosen.labeled_batch) == (True, False, "all")
    assert (chosen.pixel_mean, chosen.pixel_std, chosen.window) == ((0.5, 0.4, 0.3), (0.2,), (0, 100))
    feddure_options = {"coarse_lr": 1, "fine": False, "sign": "new-old"}
    given = cli.MAIN_JOB["options"]
    assert chosen.options == {
        **given,
        **feddure_options,
        "fedavg-fixmatch": {**given["fedavg-fixmatch"], "threshold": 0.9},
    }


def test_the_main_job_is_a_recipe_that_flags_override(fake: Fake) -> None:
    assert cli.main(["run"]) == 0
    assert (fake.config.method, fake.config.data) == ("feddure", "digits")
    assert {name: getattr(fake.config, name) for name in cli.MAIN_JOB} == cli.MAIN_JOB
    assert cli.main(["run", "--rounds", "2", "--epochs", "2", "--option", "labels=step"]) == 0
    chosen = fake.config
    assert (chosen.rounds, chosen.steps, chosen.epochs, chosen.lr) == (2, None, 2, cli.MAIN_JOB["lr"])
    assert chosen.options == {**cli.MAIN_JOB["options"], "labels": "step"}
    assert cli.main(["run", "--split", "saved.npz"]) == 0
    assert (fake.config.split, fake.config.setting) == (Path("saved.npz").absolute(), "dir-dir")
    assert cli.main(["run", "--method", "fedavg"]) == 0
    assert (fake.config.rounds, fake.config.baselines, fake.config.options) == (config.Config.rounds, (), {})


def test_other_data_take_the_recipe_for_few_labels(fake: Fake) -> None:
    """A recipe for 8x8 digits is none for other images; a protocol or a preset that is named is not overruled by it."""
    assert cli.main(["run", "--data", "xrays", "--cohort", "3"]) == 0
    chosen = fake.config
    assert (chosen.network, chosen.lr, chosen.steps, chosen.cohort) == ("resnet9", 2e-3, 5, 3)
    assert chosen.method == "feddure"
    assert chosen.baselines == (
        *("fedavg", "fedavg-control", "fedavg-fixmatch-global", "fedavg-soft-labels", "fedavg-sl"),
    )
    assert cli.main(["run", "--protocol", "sage"]) == 0
    assert (fake.config.rounds, fake.config.steps, len(fake.config.baselines)) == (300, 95, 4)
    assert cli.main(["run", "--preset", "paper"]) == 0
    assert (fake.config.lr, fake.config.schedule, fake.config.options) == (5e-4, "constant", {})


def test_compare_names_methods_seeds_and_a_free_folder(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "runs" / "digits-compare-seed0-1").mkdir(parents=True)
    text = "compare --methods feddure fedavg --seeds 0 2 --budget forwards --option feddure.hidden=8"
    assert cli.main(text.split()) == 0
    assert fake.rest == (["feddure", "fedavg"], [0, 2])
    assert (fake.config.method, fake.config.baselines, fake.config.budget) == ("feddure", (), "forwards")
    assert fake.config.run_dir == tmp_path / "runs" / "digits-compare-seed0-2"


def test_every_option_is_a_flag_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--help-all"]) == 0
    text = capsys.readouterr().out
    missing = [name for name in config.option_types() if f"--{name.replace('_', '-')}" not in text]
    assert missing == []


MISTAKES = {
    "rum": "unknown command 'rum': did you mean 'run'?",
    "--jsn": "--jsn is before the command: write halfmoon COMMAND --jsn, see halfmoon --help.",
    "train --rounds 3": "unknown command 'train': did you mean 'run'?",
    "join x": "unknown command 'join': did you mean 'site join'?",
    "predict --model runs/x images": "predict has no --model, its first argument is the model: write halfmoon predict RUN ...",
    "export --model=runs/x --onnx m.onnx": "export has no --model, its first argument is the model: write halfmoon export",
    "run --pixel-mean 0.5 0.4 0.3 x": "argument --pixel-mean: invalid float value: 'x'.",
    "run --window 1": "argument --window: expected 2 arguments.",
    "run extra": "unexpected argument 'extra'; see halfmoon run --help.",
    "run --silent 0.1": "option '--silent' is called --client-dropout since version 0.2: rename it.",
    "run --gamma 0.1": "option '--gamma' is called --dirichlet-alpha since version 0.2: rename it.",
    "run --seeds-together": "option '--seeds-together' was removed: leave it out: the seeds of a comparison train one "
    "after the other.",
    "run --compile": "option '--compile' was removed: leave it out: compiled steps paid off only in long runs of tiny networks.",
    "run --round 3": "unknown option '--round': did you mean '--rounds'?",
    "site export digits --sites 3 --out x --seed 3": "unknown option '--seed': did you mean '--split-seed'?",
    "run --rounds": "--rounds has no value: it must be a whole number.",
    "run --flip=3": "--flip takes no value: write --flip or --no-flip without one.",
    "run --option threshold": "--option 'threshold' is not NAME=VALUE: write, for example, --option threshold=0.9.",
    "compare --seeds 0": "the following arguments are required: --methods.",
    "compare fedavg feddure --seeds 0": (
        "compare has its methods after a flag: write halfmoon compare --methods fedavg feddure."
    ),
    "run .": "unexpected argument '.': a folder of images is --data .",
    "data digits --png gone/x.png": "gone/x.png: the folder gone does not exist; make it, or choose another --png.",
    "data digits --png x.jpg": "x.jpg does not end in .png, .pdf, .svg: the suffix chooses the format of a figure.",
    "data digits --crop": "digits: --crop has no effect on its square images of 8 bits; leave it out.",
    "data digits --window 0 9": "digits: --window has no effect on its square images of 8 bits; leave it out.",
    "compare --methods fedavg --seed 3": "unknown option '--seed' of compare: did you mean '--seeds'?",
    "compare --methods fedavg --seeds 0 x": "--seeds is 'x': it must be whole numbers from 0.",
    f"compare --methods fedavg --seeds {'9' * 5000}": "--seeds is '9999",
    "compare --methods feddure --option hidden=3": (
        "option 'hidden' does not name its method: in a comparison write feddure.hidden."
    ),
    "methods fedavgg": "unknown method 'fedavgg': did you mean 'fedavg'?",
    "methods --rounds 3": "unknown option '--rounds': choose one of: --debug, --help, --json.",
    "data digits cifar10 --save s": "--save needs one data set, but 2 are given.",
    "data digits --data digits": "data sets are given twice: name them either before the flags or with --data.",
    "data --split s.parquet --dirichlet-alpha 1": (
        "dirichlet_alpha and split exclude each other: the saved split has its own dirichlet_alpha; give one of them."
    ),
    "data --cohort 3": "unknown option '--cohort': ",
    f"privacy --clients 1{'0' * 400} --cohort 5 --rounds 1 --noise 1": "--clients is 1000",
    f"site export digits --sites {'9' * 5000} --out x": "--sites is '9999",
    "resume": "the following arguments are required: DIR.",
    "resume nowhere": "nowhere is not a run folder",
    "resume x --rounds 9": "--rounds cannot be changed: halfmoon resume continues the run with its configuration.",
}


@pytest.mark.parametrize(("message", "sentence"), MISTAKES.items())
def test_a_mistake_is_one_sentence_and_code_2(message: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(message.split()) == 2
    out, text = capsys.readouterr()
    assert text.startswith(f"halfmoon: {sentence}")
    assert text.count("\n") == 1
    assert out == ""
    assert not Path("runs").exists()


def test_debug_shows_where_it_happened() -> None:
    with pytest.raises(UserError):
        cli.main(["run", "--rounds", "0", "--debug"])


def raising(error: BaseException) -> Callable[[Any], None]:
    def act(watch: Any) -> None:
        raise error

    return act


def test_a_failed_run_ends_with_code_1(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.act = raising(Diverged(11, 3, 4, float("nan")))
    assert cli.main(["run", "--run-dir", "r"]) == 1
    text = capsys.readouterr().err
    assert "The loss became nan in round 12 at client 3, step 5" in text
    assert text.rstrip().endswith(f"The run folder is {Path('r').absolute()}.")
    full = UserError("r: the disk is full.")
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    fake.act = raising(full)
    assert cli.main(["run"]) == 1
    assert capsys.readouterr().err == "halfmoon: r: the disk is full.\n"
    fake.act = raising(PermissionError(errno.EACCES, "Permission denied", "r/curves.png"))
    assert cli.main(["run"]) == 1
    assert capsys.readouterr().err == "halfmoon: r/curves.png: Permission denied.\n"


def test_control_c_names_the_way_back(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.act = raising(MemoryError())
    assert cli.main(["run", "--run-dir", "my run"]) == 1
    assert capsys.readouterr().err.endswith("or end other programs. Nothing was saved yet.\n")
    fake.act = raising(KeyboardInterrupt())
    assert cli.main(["run", "--run-dir", "my run"]) == 130
    assert capsys.readouterr().err == "halfmoon: stopped; nothing was saved yet.\n"
    (tmp_path / "my run" / "run.json").write_text("{}")
    assert cli.main(["run", "--run-dir", "my run"]) == 130
    assert capsys.readouterr().err == f"halfmoon: stopped; go on with: halfmoon resume '{tmp_path / 'my run'}'\n"


def test_help_and_version_need_no_torch() -> None:
    code = "import sys; from halfmoon.cli.main import main\n"
    code += "codes = main(['run', '--help']), main(['--version']), main([])\n"
    code += "print(codes, [name for name in ('torch', 'matplotlib', 'sklearn') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "(0, 0, 0) []"
    assert "--labels-per-class X" in done.stdout
    assert "--momentum" not in done.stdout


@pytest.mark.parametrize("command", ["run", "compare", "tune"])
def test_help_shows_what_people_use_and_how_to_see_all(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    short = " ".join(capsys.readouterr().out.split())
    assert f"halfmoon {command} --help-all." in short
    assert len(re.findall(r" --[a-z]", short)) < 40
    assert cli.main([command, "--help-all"]) == 0
    assert len(re.findall(r" --[a-z]", capsys.readouterr().out)) > 90


def test_a_module_without_its_function_is_named(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mymod.py").write_text("")
    assert cli.main(["run", "--network", "mymod"]) == 2
    assert capsys.readouterr().err == (
        "halfmoon: --network is 'mymod', a module: name its function too, such as mymod:make.\n"
    )


def test_remarks_on_what_one_may_not_expect(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--method", "fixmatch"]) == 0
    assert (
        "fixmatch is centralized: it trains on the images of all clients together; fedavg-fixmatch is its federated form."
        in (capsys.readouterr().err)
    )
    assert cli.main(["run", "--method", "fedavg", "--protocol", "few-labels", "--rounds", "200"]) == 0
    text = "protocol few-labels sets server_ema, but not together with rounds; to use its value, add --server-ema 0.9."
    assert text in capsys.readouterr().err
    message = "run --method fedavg --protocol few-labels --rounds 200 --server-ema 0.9"
    assert cli.main(message.split()) == 0
    assert (fake.config.server_ema, capsys.readouterr().err.count("keeps it")) == (0.9, 0)


def test_data_takes_the_image_options_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = "data --resize 12 --channels 3 --shrink 2 --image-size 9 --labels 40 --json"
    assert cli.main(text.split()) == 0
    assert json.loads(capsys.readouterr().out)["data"][0]["shape"] == [9, 9, 3]


@pytest.mark.usefixtures("curves_are_drawn")
def test_run_prints_json_and_resume_knows_that_it_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    message = (
        "run --method fedavg --baselines fedavg-sl --rounds 2 --clients 4 --cohort 2 --run-dir r --threads 1 --json"
    )
    assert cli.main(message.split()) == 0
    out = json.loads(capsys.readouterr().out)
    assert [each["method"] for each in out["runs"]] == ["fedavg", "fedavg-sl"]
    folders = [str(Path(each["folder"]).relative_to(out["folder"])) for each in out["runs"]]
    assert folders == [".", "baselines/fedavg-sl"]
    assert Path(out["curves"]).read_bytes().startswith(b"\x89PNG")
    assert all(Path(path).stat().st_size for path in out["tables"])
    assert [each["method"] for each in out["comparison"]] == [each["title"] for each in out["runs"]]
    assert cli.main(["resume", "r"]) == 0
    table, text = capsys.readouterr()
    assert text.splitlines()[-1] == "halfmoon: r is finished already; these are its results."
    assert table.splitlines()[0].split()[:3] == ["method", "last", "%"]
    percent = f"{100 * out['runs'][0]['accuracy']['last']:.2f}"
    assert table.splitlines()[1].startswith(f"{out['runs'][0]['title']}  ")
    assert percent in table.splitlines()[1]
    assert table.splitlines()[-2:] == ["curves: r/curves.png", "run folder: r"]
    assert cli.main([*message.split(), "--rounds", "3"]) == 2
    assert "choose another --run-dir" in capsys.readouterr().err


def test_compare_trains_every_method_and_seed(capsys: pytest.CaptureFixture[str]) -> None:
    text = "compare --methods fedavg fedavg-fixmatch --seeds 0 1 --rounds 1 --clients 4 --cohort 1 --run-dir c"
    assert cli.main(f"{text} --budget labeled-steps --threads 1".split()) == 0
    table, lines = capsys.readouterr()
    names = {f"{method}-seed{seed}" for method in ("fedavg", "fedavg-fixmatch") for seed in (0, 1)}
    assert {path.parent.name for path in Path("c").glob("*/summary.json")} == names
    assert table.count("  2 seeds") == 2
    assert lines.count("round 1/1, accuracy") == 4
    assert Path("c/table.csv").read_text().startswith("method,seeds,last_percent")
    assert Path("c/table.md").read_text().count("2 seeds") == 2


def test_data_counts_what_a_source_and_a_split_hold(capsys: pytest.CaptureFixture[str]) -> None:
    text = "data --clients 6 --labels-per-class 2 --setting iid-iid --json --save s.parquet --png b.png"
    assert cli.main(text.split()) == 0
    (summary,) = json.loads(capsys.readouterr().out)["data"]
    both = np.array(summary["train_classes"]) + summary["test_classes"]
    assert both.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # what is published of the digits
    assert (summary["train"], summary["test"], summary["shape"]) == (1437, 360, [8, 8, 1])
    # Stratified labels: two of each of ten classes for each of six clients.
    assert [client["labeled_classes"] for client in summary["split"]["each"]] == [[2] * 10] * 6
    assert Path("b.png").read_bytes().startswith(b"\x89PNG")
    stored = Split.load(Path("s.parquet"))
    assert (stored.clients, int(stored.labeled.sum())) == (6, 120)
    assert cli.main(["data", "--split", "s.parquet", "--json"]) == 0
    (repeated,) = json.loads(capsys.readouterr().out)["data"]
    assert repeated["split"] == summary["split"]
    assert cli.main(["data", "--split", "s.parquet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "digits: 1,437 training and 360 test images, 8x8, 1 channel(s), 10 classes"
    assert "split: iid-iid, seed 0: 6 clients, 120 labeled and 1,317 unlabeled images" in lines
    first = summary["split"]["each"][0]
    cells = lines[-6].split()
    assert cells[:4] == ["0", "20", str(first["unlabeled"]), f"{first['tv']:.3f}"]
    assert cells[4:] == [f"2+{count}" for count in first["unlabeled_classes"]]


SPLITS = {
    "--labels-at server": (
        "dir-dir (alpha 0.5), seed 0: 20 clients, 100 labeled (at the server) and 1,337 unlabeled images"
    ),
    "--setting fedloke --dirichlet-alpha 0.1": (
        "fedloke (alpha 0.1), seed 0: 20 clients, 100 labeled and 1,320 unlabeled images; 17 assigned to no client"
    ),
    "--labels-at some --labeled-clients 1 --setting iid-iid": (
        "iid-iid, seed 0: 20 clients, 100 labeled (at 1 client) and 1,337 unlabeled images"
    ),
    "--setting semifl-shards --classes-per-client 3": (
        "semifl-shards (3 shards a client), seed 0: 20 clients, 100 labeled and 1,337 unlabeled images"
    ),
}


@pytest.mark.parametrize(("message", "line"), SPLITS.items())
def test_a_split_is_described_in_a_line(message: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """20 clients on 1,437 digits of which 100 (0.5 * 20 of each class) are labeled; 1,437 - 20 * 71 = 17 are over."""
    assert cli.main(["data", "digits", *message.split()]) == 0
    assert f"split: {line}" in capsys.readouterr().out.splitlines()


def test_the_labels_of_a_server_have_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    text = "data digits --labels-at server --labels 30 --clients 3 --setting semifl-iid --png b.png"
    assert cli.main(text.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(n for n, line in enumerate(lines) if line.startswith("client"))
    server, *clients = (line.split() for line in lines[heading + 1 : -1])
    assert server[:3] == ["server", "30", "0"]
    assert server[4:] == ["3+0"] * 10
    assert [(name, labeled, unlabeled) for name, labeled, unlabeled, *_ in clients] == [
        (str(k), "0", "469")
        for k in range(3)  # floor((1437 - 30) / 3)
    ]
    assert Path("b.png").read_bytes().startswith(b"\x89PNG")


def test_stages_of_a_stream_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 1,337 unlabeled rows each of 20 clients gets floor(66.85) = 66, 22 in each of three stages: 440 in all."""
    assert cli.main(["data", "digits", "--setting", "fedmatch-stream", "--stages", "3"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "unlabeled images seen in 3 stages, one after the other: 440, 440, 440" in shown


def test_custom_split_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    client = np.arange(1437) % 4 - 1
    Split(client=client, labeled=client == 0, clients=3).save(Path("own.parquet"))
    assert cli.main(["data", "--split", "own.parquet"]) == 0
    line = "split: custom: 3 clients, 359 labeled (at 1 client) and 718 unlabeled images; 360 assigned to no client"
    assert line in capsys.readouterr().out.splitlines()


def test_methods_lists_the_catalog(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in listed] == registry.names()
    for each in listed:
        options = registry.options(each["name"])
        assert {name: option["default"] for name, option in each["options"].items()} == {
            name: option.default for name, option in options.items()
        }
        entry = registry.entry(each["name"])
        assert each["labels"] == entry.labels
        assert (each["labels_at"], each["centralized"]) == (list(entry.label_locations), entry.pooled)
    assert cli.main(["methods", "fedavg-fixmatch"]) == 0
    shown = capsys.readouterr().out
    assert "threshold = 0.95" in shown
    assert "\n  labels_at: clients, some\n" in shown
    assert "centralized" not in shown


def test_centralized_methods_are_in_a_separate_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods"]) == 0
    federated, centralized = capsys.readouterr().out.split("centralized, all rows in one place:\n")
    assert federated.startswith("name ")
    assert centralized.startswith("name ")
    for name in registry.names():
        lines = (centralized if registry.entry(name).pooled else federated).splitlines()
        assert sum(line.startswith(f"{name} ") for line in lines) == 1
        assert f"{name}: {registry.entry(name).about}" in centralized  # what each one is comes after both tables


def row(number: int, accuracy: float | None = None, pseudo: float | None = None) -> dict[str, Any]:
    result: dict[str, Any] = {"round": number, "pseudo": None}
    if accuracy is not None:
        result["test"] = {"accuracy": accuracy}
    if pseudo is not None:
        result["pseudo"] = {"accuracy": pseudo, "share_used": 0.25}
    return result


def running(title: str, rounds: int) -> RunInfo:
    return RunInfo(Path("r"), Config(rounds=rounds), title)


def drawn(watch: LiveProgress) -> list[str]:
    """Return the lines that a watcher shows on its terminal."""
    plain = Console(file=io.StringIO(), width=watch.console.width)
    with plain.capture() as shown:
        plain.print(watch.build_table())
    return shown.get().splitlines()


def test_time_left_is_the_mean_pace_of_this_session() -> None:
    # Going on after round 10 of 40: 5 rounds in 20 s are 4 s a round; 25 rounds are left, so 100 s.
    progress = Progress(Path("run"), "FedAvg", 40, first=10, start_time=1000.0)
    assert progress.seconds_left(1001.0) is None
    # Heads are evaluated after the last round only: until then there is no accuracy to print.
    assert describe_progress(progress, 1001.0) == "FedAvg: round 10/40"
    progress.add(row(15, 0.5, 0.25))
    assert progress.seconds_left(1020.0) == 100.0
    progress.add(row(16))
    assert describe_progress(progress, 1020.0) == "FedAvg: round 16/40, accuracy 50.0 %, 1:20 left"


@given(st.integers(1, 500))
def test_pipe_gets_ten_lines_a_method_or_fewer(rounds: int) -> None:
    file = io.StringIO()
    watch = LineProgress(Console(file=file, width=40), clock=lambda: 0.0)
    run = running("FedDure", rounds)
    watch.begin(run)
    for number in range(1, rounds + 1):
        watch.round(run, row(number, 0.5, 0.25))
    lines = file.getvalue().splitlines()
    assert len(lines) == min(10, rounds)
    assert lines[-1] == f"FedDure: round {rounds}/{rounds}, accuracy 50.0 %, pseudo-labels 25.0 %, used 25.0 %"


def test_a_terminal_gets_one_live_row_a_method() -> None:
    file = io.StringIO()
    now = [0.0]
    watch = make_progress(Console(file=file, width=110, force_terminal=True))
    assert isinstance(watch, LiveProgress)
    watch.clock = lambda: now[0]
    with watch:
        one = running("FedAvg [labeled]", 4)
        other = running("FedDure", 4)
        watch.begin(one)
        now[0] = 63.0
        watch.round(one, row(1, 0.5))
        watch.end(one, {})
        watch.begin(other)
        now[0] = 73.0
        watch.round(other, row(1, 0.25, 0.75))
        first, second = drawn(watch)[1:]
    assert first.startswith("FedAvg [labeled]")
    assert first.split()[-6:] == ["1/4", "50.0", "%", "-", "-", "1:03"]
    assert second.split()[-9:] == ["1/4", "25.0", "%", "75.0", "%", "25.0", "%", "0:30", "left"]


@pytest.mark.parametrize(("width", "ruled"), [(80, True), (15, False)])
def test_table_is_complete_on_a_narrow_terminal(width: int, ruled: bool) -> None:
    file = io.StringIO()
    screen = Console(file=file, width=width, force_terminal=True)
    console.print_table(screen, ["method", "last %"], [["Fed [Dure]", "1,234.56"]])
    shown = file.getvalue()
    assert ("─" in shown) is ruled
    assert "Fed [Dure]" in shown
    assert "1,234.56" in shown


def test_text_that_resembles_markup_is_printed_as_written() -> None:
    file = io.StringIO()
    screen = Console(file=file, width=80, force_terminal=True)
    print_line(screen, "run folder: runs/:cat:")
    console.print_table(screen, [":dog:"], [["12:CD:34"]])
    assert all(word in file.getvalue() for word in ("runs/:cat:", ":dog:", "12:CD:34"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a remark that is longer than the terminal", "a remark that is longer than\nthe terminal"),
        ("  mean: of the final model over seeds", "  mean: of the final model\n    over seeds"),
        ("short\na table   of   columns", "short\na table   of   columns"),
        ("see /a/path/that/is/longer/than/the/line/x.png", "see\n/a/path/that/is/longer/than/the/line/x.png"),
        (
            "2026-11-28 11:16:55  waiting for sites: 0 of 3 are there",
            f"2026-11-28 11:16:55  waiting for sites: 0\n{21 * ' '}of 3 are there",
        ),
    ],
)
def test_long_lines_are_wrapped_between_words(text: str, expected: str) -> None:
    """The terminal broke remarks within words."""
    assert wrap_lines(text, 30) == expected


@pytest.mark.parametrize(("seconds", "message"), [(None, "-"), (0.4, "0:00"), (59.6, "1:00"), (3725, "1:02:05")])
def test_durations(seconds: float | None, message: str) -> None:
    assert duration(seconds) == message


def test_json_on_a_pipe_shows_no_progress() -> None:
    file = io.StringIO()
    watch = make_progress(Console(file=file), as_json=True)
    run = running("FedDure", 1)
    watch.begin(run)
    watch.round(run, row(1, 0.5))
    watch.end(run, {})
    assert file.getvalue() == ""
    assert len(watch.runs) == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_warning_common_to_many_runs_is_printed_once(terminal: bool) -> None:
    file = io.StringIO()
    with make_progress(Console(file=file, force_terminal=terminal, width=80)) as watch:
        for text in ("batches repeat", "batches repeat", "another", "batches repeat"):
            watch.record("warning", text)
    assert (file.getvalue().count("batches repeat"), file.getvalue().count("another")) == (1, 1)


@pytest.mark.parametrize("width", [50, 60, 72, 80, 90, 110])
def test_a_narrow_terminal_never_loses_the_time_that_is_left(width: int) -> None:
    """With the longest titles, epsilon and hours; columns go before the time does, and names before columns."""
    watch = make_progress(Console(file=io.StringIO(), width=width, force_terminal=True))
    assert isinstance(watch, LiveProgress)
    now = [0.0]
    watch.clock = lambda: now[0]
    run = running("FedProx + FixMatch without a coarse-grained regulator", 2000)
    watch.begin(run)
    now[0] = 40.0
    watch.round(run, row(1, 0.5, 0.25) | {"aggregation": {"epsilon": 12.345}})
    head, line = drawn(watch)
    assert line.rstrip().endswith("22:12:40 left")
    assert "1/2000" in line
    assert len(line) <= width
    assert ("accuracy" in head) == ("50.0 %" in line)
    assert "accuracy" in head or width < 60


@pytest.mark.parametrize("width", [60, 80, 200])
def test_methods_break_between_words_on_a_terminal(width: int) -> None:
    entries = [registry.entry(name) for name in ("feddure", "fedavg-fixmatch", "fixmatch")]
    file = io.StringIO()
    options = {
        each.name: "confidence_threshold = 0.95, another_long_option = false, the_last_one = 12" for each in entries
    }
    methods.print_methods(Console(file=file, width=width, force_terminal=True, color_system=None), entries, options)
    text = file.getvalue().replace("\n", " ")
    for each in entries:
        for word in f"{each.name} {each.title} {each.paper} {each.labels} {options[each.name]}".split():
            assert re.search(rf"(^|\s){re.escape(word)}(\s|$)", text), word
    tables = [line for line in file.getvalue().splitlines() if not re.match(r"[a-z-]+: ", line)]
    assert max(map(len, tables)) <= width


def test_the_package_runs_as_the_command_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m halfmoon` says what `halfmoon` says, and calls itself so."""
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("halfmoon", run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out == f"halfmoon {metadata.version('halfmoon')}\n"


def test_the_time_left_is_that_of_all_rows() -> None:
    """Ten rounds of a second, four of them run, one of three rows started: 6 + 2 * 10 s, and 5 s of other work."""
    now = [0.0]
    watch = LineProgress(Console(file=io.StringIO()), lambda: now[0], rows=3, seconds_after_runs=5)
    assert watch.total_seconds_left() is None
    run = RunInfo(Path("run"), Config(rounds=10), "one")
    watch.begin(run)
    assert watch.total_seconds_left() is None
    now[0] = 4.0
    watch.round(run, {"round": 4})
    assert watch.total_seconds_left() == pytest.approx(6 + 20 + 5)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (
            "run --rounds 3 --run-dir r --data nowhere",
            "6 methods on nowhere",
        ),
        (
            "compare --methods fedavg feddure --seeds 0 1 --rounds 1 --run-dir r --data nowhere",
            "2 methods with 2 seeds on nowhere",
        ),
    ],
)
def test_a_terminal_shows_what_is_trained_before_anything_is_loaded(
    command: str, sentence: str, tmp_path: Path, monkeypatch, capsys
):
    def stop(*arguments: Any) -> Config:
        raise UserError("stopped before PyTorch is loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(config, "resolve", stop)
    assert cli.main(command.split()) == 2
    printed = capsys.readouterr().err
    assert printed == f"halfmoon: training {sentence}\nhalfmoon: stopped before PyTorch is loaded\n"

"""Methods, networks and split rules from outside: named, found, checked, and written down with version and hash."""

import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import halfmoon
from halfmoon import Config, UserError, load_model
from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.types import Passes, UpdateRequirements
from halfmoon.cli import main as cli
from halfmoon.config import schema as settings
from halfmoon.contract import check_method
from halfmoon.core import plugins
from halfmoon.methods import registry
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import FixMatch, Objective, StepResult, Supervised
from halfmoon.methods.objectives.base import labeled_cross_entropy
from halfmoon.runs import outside

MODULE = '''
"""Own parts."""
from dataclasses import dataclass
import numpy as np
from torch import nn
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import FixMatch

@dataclass(frozen=True)
class Mine:
    """FedAvg with FixMatch, once more.

    Nothing new."""
    threshold: float = 0.9
    def requirements(self, norm): return self._whole().requirements(norm)
    def _whole(self): return FedAvg(FixMatch(threshold=self.threshold))
    def client_updates(self, task): return self._whole().client_updates(task)
    def start(self, task, model): return self._whole().start(task, model)
    def round(self, task, server, federation): return self._whole().round(task, server, federation)
    def solution(self, task, server): return self._whole().solution(task, server)

def make(channels, classes, size):
    return nn.Sequential(nn.Conv2d(channels, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                         nn.Linear(4 * ((size[0] - 1) // 2) * ((size[1] - 1) // 2), classes))

def rule(labels, classes, scenario):
    draw = np.random.default_rng(scenario.seed)
    return draw.integers(0, scenario.clients, len(labels)), draw.random(len(labels)) < 0.2

def strange(labels, classes, scenario):
    return labels + scenario.clients, labels > 0
'''


@dataclass(frozen=True)
class Local(FedAvg):
    """A method of this file."""

    objective: FixMatch = field(default_factory=FixMatch)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, the present one, with a module of one's own that no other test has seen."""
    name = f"own_{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return tmp_path / f"{name}.py"


SMALL = ["--rounds", "1", "--data-share", "0.2", "--clients", "4", "--cohort", "2", "--steps", "1"]


def test_run_with_a_custom_method_network_and_split(here: Path, capsys) -> None:
    """The command runs it, its file names module and hash, resume checks them, predict wants the name said."""
    plugin_name = here.stem
    flags = (
        f"--method {plugin_name}:Mine --network {plugin_name}:make --setting {plugin_name}:rule --option threshold=0.5"
    )
    assert cli.main(["run", *flags.split(), *SMALL, "--run-dir", "r"]) == 0
    text = Path("r/config.toml").read_text()
    digest = hashlib.sha256(f"{here.name}\0".encode() + hashlib.sha256(here.read_bytes()).digest()).hexdigest()
    for spec in ("Mine", "make", "rule"):
        assert f"# {plugin_name}:{spec} from {plugin_name} without a version sha256 {digest}\n" in text
    assert "threshold = 0.5" in text
    assert str(here.parent) in os.environ["PYTHONPATH"].split(os.pathsep)  # processes started from here find it too
    assert sys.path[0] == str(here.parent)  # before installed packages, as for a script of this folder
    assert cli.main(["resume", "r"]) == 0
    with pytest.raises(UserError, match="which is not loaded because a file or a server names it"):
        load_model("r")
    assert load_model("r", network=f"{plugin_name}:make").network.classes == 10
    assert cli.main(["methods", f"{plugin_name}:Mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.rpartition("run folder: r\n")[2])[0]["about"] == (
        "FedAvg with FixMatch, once more"
    )
    here.write_text(MODULE + "# changed\n")
    with pytest.raises(
        UserError, match=f"was started with {plugin_name} without a version sha256 {digest}, but here is"
    ):
        halfmoon.resume(Path("r"))


RECIPE = """
title = "Own"
paper = "FedDure"
item = "Table 1"
about = "one's own"
reading = "as it is"
columns = ["amount"]
rows = "method"
[protocol]
data = "digits"
data_share = 0.2
rounds = 1
clients = 4
cohort = 2
steps = 1
network = "OWN:make"
device = "cpu"
threads = 1
[axes.amount.few]
title = "few"
set = { labels_per_class = 1 }
[axes.method.mine]
title = "Mine"
set = { method = "OWN:Mine" }
"""


def test_compare_sweep_report_and_predict_take_them(here: Path) -> None:
    """Beside a method of ours, in a grid, on a page, and to label images; only the last wants the network said."""
    plugin_name = here.stem
    arguments = ["compare", "--methods", "fedavg", f"{plugin_name}:Mine", "--network", f"{plugin_name}:make", *SMALL]
    assert cli.main([*arguments, "--run-dir", "c"]) == 0
    assert cli.main(["resume", "c"]) == 0
    Path("own.toml").write_text(RECIPE.replace("OWN", plugin_name))
    assert cli.main(["sweep", "own.toml", "--out", "s"]) == 0
    assert cli.main(["report", "c", "s/own", "--out", "page.html"]) == 0
    assert "Mine" in Path("page.html").read_text()
    Path("images").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save("images/a.png")
    (run,) = Path("c").glob("*Mine-seed0")
    predict = ["predict", str(run), "images", "--out", "p.csv"]
    assert cli.main(predict) == 2
    assert cli.main([*predict, "--network", f"{plugin_name}:make"]) == 0
    assert Path("p.csv").read_text().count("a.png") == 1


def test_a_method_as_an_object(tmp_path: Path) -> None:
    """Its class and options stand in the run's file, and equal the same method by its name."""
    config = Config(rounds=1, data_share=0.2, clients=4, cohort=2, run_dir=tmp_path / "own")
    one = halfmoon.run(config, method=Local(FixMatch(threshold=0.5)))
    assert "test_plugins:Local" in (tmp_path / "own/config.toml").read_text()
    actual = Config(
        method="fedavg-fixmatch", options={"threshold": 0.5}, rounds=1, data_share=0.2, clients=4, cohort=2,
        run_dir=tmp_path / "ours",
    )  # fmt: skip
    two = halfmoon.run(actual)
    assert one.summaries[0]["confusion"] == two.summaries[0]["confusion"]
    assert halfmoon.resume(tmp_path / "own").summaries == one.summaries
    with pytest.raises(UserError, match=r"differs from Local\(\) in more than its options"):
        outside.describe_method(Local(Supervised()))


@dataclass(frozen=True)
class Entropy(Objective):
    """Be sure of unlabeled images."""

    sharpness: float = 0.1

    @property
    def requirements(self):
        return UpdateRequirements(("weak",))

    def __call__(self, task, params, stats, batch, aux=None, cached=None):
        logits, moments = task.network.train(params, torch.cat([batch.x, batch.u["weak"]]))
        labeled, unlabeled = logits.split([len(batch.x), len(batch.u["weak"])])
        entropy = -(unlabeled.softmax(-1) * unlabeled.log_softmax(-1)).sum(-1).mean()
        return labeled_cross_entropy(labeled, batch.y) + self.sharpness * entropy, StepResult([moments], ())

    def passes(self, task, labeled, unlabeled):
        return Passes(labeled + unlabeled, labeled + unlabeled)


custom_method = partial(FedAvg, Entropy(0.2), prox=0.1)


@pytest.mark.parametrize("spec", [custom_method, FedAvg(Entropy(0.2), prox=0.1)])
def test_fedavg_with_an_objective_has_the_options_of_the_objective(spec) -> None:
    """Its name, words and options are those of the objective; those of other objectives are refused."""
    name, options = outside.describe_method(spec)
    assert name.endswith("test_plugins:Entropy")
    assert options == {"sharpness": 0.2, "prox": 0.1}
    row = registry.entry(name)
    assert (row.title, row.about) == ("Entropy", "Be sure of unlabeled images")
    assert registry.make(name, options) == FedAvg(Entropy(0.2), prox=0.1)
    with pytest.raises(UserError, match="no option 'threshold'"):
        registry.make(name, {"threshold": 0.5})


def test_an_objective_is_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a class, an object, or by its name: FedAvg around it."""
    for spec in (Entropy, Entropy()):
        name = outside.register(spec)
        assert registry.make(name) == FedAvg(Entropy())
    monkeypatch.setattr(plugins, "_REGISTERED", {})
    assert registry.entry(f"{__name__}:custom_method").title == "Entropy"
    assert registry.make(f"{__name__}:custom_method") == FedAvg(Entropy(0.2), prox=0.1)
    assert registry.make(f"{__name__}:Entropy", {"sharpness": 0.3}) == FedAvg(Entropy(0.3))


half = MethodEntry("", "Half", "", "with another weight", FedAvg(Entropy(0.5)))


def test_variants_of_a_class_are_distinguished_before_training(tmp_path: Path) -> None:
    """Two of one title are refused by their names; a row has its title, and an object its options."""
    few: dict = {"rounds": 1, "steps": 1, "data_share": 0.2, "clients": 4, "cohort": 2, "run_dir": tmp_path / "c"}
    plugin_name, other, row = (f"{__name__}:{name}" for name in ("Entropy", "custom_method", "half"))
    with pytest.raises(UserError, match=f"{plugin_name} and {other} are both called 'Entropy'"):
        halfmoon.compare([plugin_name, other], **few)
    assert not (tmp_path / "c").exists()
    options = {f"{row}.prox": 0.1, f"{plugin_name}.prox": 0.2}
    result = halfmoon.compare([Entropy(0.3), row], options=options, **few)
    assert [each["title"] for each in result.summaries] == ["Entropy", "Half"]
    assert not [path for path in result.runs if ":" in path.name]  # a colon means something to tar, scp and Windows
    text = (result.runs[0] / "config.toml").read_text()
    assert f'[options."{plugin_name}"]\nprox = 0.2\nsharpness = 0.3\n' in text
    assert f'[options."{row}"]\nprox = 0.1\n' in text


def test_an_option_has_its_new_name(tmp_path: Path, capsys) -> None:
    """In a file, on the command line and in a run folder: one sentence."""
    (tmp_path / "old.toml").write_text('method = "fedavg-fixmatch"\n[options]\ntau = 0.5\n')
    for text in (["--config", str(tmp_path / "old.toml")], ["--method", "fedavg-fixmatch", "--option", "tau=0.5"]):
        assert cli.main(["run", *text, "--run-dir", str(tmp_path / "run")]) == 2
        assert "tau is now called threshold" in capsys.readouterr().err
    with pytest.raises(UserError, match="tau is now called threshold"):
        registry.make("semifl", {"tau": 0.5})
    with pytest.raises(UserError, match="no option 'tau': "):
        registry.make("protofssl", {"tau": 0.5})


def test_error_explains_an_invalid_name(here: Path) -> None:
    """One sentence each."""
    plugin_name = here.stem
    for name, why in (
        (f"{plugin_name}:Nope", f"module {plugin_name} has no Nope"),
        ("no_such_module:Mine", "there is no module no_such_module, neither installed nor in"),
        (f"{plugin_name}:np.ndarray", "calling it without arguments failed"),
        (f"{plugin_name}:rule", "calling it without arguments failed"),
        ("fedure", "did you mean 'feddure'"),
    ):
        with pytest.raises(UserError, match=why):
            registry.entry(name)
    (here.parent / "breaks.py").write_text("1 / 0")
    with pytest.raises(UserError, match=r"importing breaks failed \(ZeroDivisionError"):
        registry.entry("breaks:Mine")
    with pytest.raises(UserError, match="gives rows to client 29, but clients are numbered 0 to 19"):
        halfmoon.run(Config(setting=f"{plugin_name}:strange", run_dir=here.parent / "r"))


def test_only_named_modules_are_imported(here: Path) -> None:
    """What a message or a file names is not imported unless it was reported here."""
    plugin_name = here.stem
    with (
        plugins.allow_only([]),
        pytest.raises(UserError, match=f"if you have it and trust it, give --method {plugin_name}:Mine"),
    ):
        registry.entry(f"{plugin_name}:Mine")
    assert plugin_name not in sys.modules
    with plugins.allow_only([f"{plugin_name}:Mine"]):
        assert registry.entry(f"{plugin_name}:Mine").title == "Mine"


def test_an_installed_package_announces_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with entry points: its method has a name of its own, and the version of its package."""
    (tmp_path / "brought.py").write_text(MODULE)
    info = tmp_path / "brought-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.5\n")
    (info / "top_level.txt").write_text("brought\n")
    (info / "RECORD").write_text("brought.py,,\n")
    (info / "entry_points.txt").write_text(
        "[halfmoon.methods]\ntheirs = brought:Mine\n[halfmoon.networks]\nnet = brought:make\n"
        "[halfmoon.splits]\nspread = brought:rule\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.entry_points.cache_clear()
    try:
        assert "theirs" in registry.names()
        assert registry.entry("theirs").about == "FedAvg with FixMatch, once more"
        config = Config(method="theirs", network="net", setting="spread")
        assert [(each.name, each.module, each.version) for each in settings.plugin_origins(config)] == [
            ("theirs", "brought", "1.5"), ("net", "brought", "1.5"), ("spread", "brought", "1.5"),
        ]  # fmt: skip
    finally:
        plugins.entry_points.cache_clear()


@dataclass(frozen=True)
class Careless(FedAvg):
    """Draws a random number of its own, and writes into what it is given."""

    def round(self, task, server, federation):
        import torch

        new = super().round(task, server, federation)
        new["params"]["head"]["bias"] += torch.rand(())
        server["params"]["head"]["bias"].add_(1)
        return new


def test_check_method_names_the_promises_that_are_broken(capsys) -> None:
    """A valid method passes all checks; one that draws numbers and writes files fails two, and the command returns 1."""
    assert all(each.kept for each in check_method("fedavg-fixmatch", {"threshold": 0.39}))
    name = outside.register(Careless())
    broken = {each.promise: each.said for each in check_method(name) if not each.kept}
    assert "a run repeats itself" in broken
    assert "differ" in broken["loop = vmap, 4 + 4 images a step"]
    assert cli.main(["check-method", name]) == 1
    assert "BROKEN  a run repeats itself" in capsys.readouterr().out


@dataclass(frozen=True)
class Failing(Entropy):
    """An objective with a mistake."""

    def __call__(self, task, params, stats, batch, aux=None, cached=None):
        return batch.nothing


def test_check_method_reports_the_failing_line_of_custom_code(capsys) -> None:
    """The file and line always, the traceback with --debug."""
    line = Failing.__call__.__code__.co_firstlineno + 1
    for more, shown in (([], False), (["--debug"], True)):
        assert cli.main(["check-method", f"{__name__}:Failing", *more]) == 1
        out = capsys.readouterr().out
        assert f"it raised AttributeError at {__file__}:{line}: " in out
        assert ("Traceback" in out) == shown

"""Compiled steps against those that a work writes: equal to rounding, compiled once for each shape, not each round."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from callbacks import Stop
from safetensors.torch import load_file
from scenes import Snapshot, begin, dataset, furthest, play, same, simulate, task
from torch import Tensor
from torch.fx import GraphModule

from halfmoon.api.requirements import requirements_of
from halfmoon.api.types import Method
from halfmoon.config.schema import Config, identity
from halfmoon.core.errors import UserError
from halfmoon.core.optim import CosineSchedule
from halfmoon.engine import compiled
from halfmoon.engine.sampling import Batching
from halfmoon.methods import registry
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import Supervised
from halfmoon.runs import runner

ROUNDS = 4
CLOSE = 1e-9
COMPILER = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def _nothing_compiled():
    compiled._programs.cache_clear()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """Collect what would be compiled, which is run operation by operation instead: Inductor takes seconds for each."""
    found: list[GraphModule] = []

    def kept(graph: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
        found.append(graph)
        return graph

    monkeypatch.setattr(compiled, "inductor", kept)
    return found


def played(
    method: Method, executor: Any, compiling: bool, batching: Batching | None = None, rounds: int = ROUNDS, **of: Any
) -> tuple[list[Snapshot], list[str]]:
    """Return the rounds of a run in double precision under a falling rate, cohorts of 3 of 4, and what was said."""
    said: list[str] = []
    shared = task(rounds=rounds, schedule=CosineSchedule(0.1))
    simulation = simulate(method, shared, dataset(**of), batching=batching, executor=executor)
    clients = simulation.local_clients
    clients.training = replace(clients.training, compiled=compiling, say=said.append)
    return play(method, simulation, begin(method, shared), range(rounds)), said


def gap(method: Method, executor: str, batching: Batching | None = None, **of: Any) -> tuple[float, list[str]]:
    """Return the largest difference between both ways, of server and memories after any round, and what was said."""
    plain, nothing = played(method, executor, False, batching, **of)
    assert not nothing
    ours, said = played(method, executor, True, batching, **of)
    assert [each.report.cohort for each in ours] == [each.report.cohort for each in plain]
    found = 0.0
    for a, b in zip(ours, plain, strict=True):
        found = max(found, furthest(a.server, b.server), furthest(a.state, b.state))
    return found, said


# SemiFL remembers something of each row, and rows are filled up to the next power of two: of the four clients' numbers
# of labeled and unlabeled ones, three shapes are left in the loop, and the largest is in every cohort.
SHAPES = [
    *(("fedavg", "vmap", 1), ("fedavg-fixmatch", "loop", 1), ("fedavg-fixmatch", "vmap", 1), ("feddure", "loop", 1)),
    *(("semifl", "loop", 3), ("semifl", "vmap", 1)),
]


@pytest.mark.parametrize(("name", "executor", "shapes"), SHAPES)
def test_once_for_each_shape_whatever_the_round(name: str, executor: str, shapes: int, graphs: list[GraphModule]):
    """Four rounds under a rate that falls, cohorts that change: float64, 1e-9, and one program for each shape."""
    found, said = gap(registry.entry(name).method, executor)
    assert found < CLOSE
    assert not said
    assert len(graphs) == shapes


def test_the_rate_is_no_constant_of_the_program(graphs: list[GraphModule]):
    """Round 2's rate is another one: a program with the first one's in it would end elsewhere, by more than 1e-3."""
    method, fixed = FedAvg(), task(rounds=ROUNDS)
    still = play(method, simulate(method, fixed), begin(method, fixed), range(ROUNDS))
    ours, _ = played(method, "loop", True)
    assert furthest(ours[-1].server, still[-1].server) > 1e-3


def test_the_servers_own_steps_are_compiled_too(graphs: list[GraphModule]):
    """SemiFL with labels at the server: its clients' steps, and its own under another batch rule."""
    found, said = gap(registry.make("semifl", {"threshold": 0.3}), "loop", place="server")
    assert found < CLOSE
    assert not said
    assert len(graphs) == 3  # the server's, and of clients with rows for 8 and for 16


def steps_of(name: str) -> tuple[str, ...]:
    """Return the client updates and objectives of a method: those of the same ones take the same steps."""
    updates = registry.entry(name).method.client_updates(task()).values()
    return tuple(type(part).__name__ for each in updates for part in (each, getattr(each, "objective", None)))


FIRST = {steps_of(name): name for name in reversed(registry.names())}
OTHERS = sorted(set(FIRST.values()) - {name for name, *_ in SHAPES})
"""The first method of the catalog for each kind of steps, but for those above; a proximal term is one kind more."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OTHERS, "fedprox-fixmatch"])
def test_every_kind_of_steps_of_the_catalog(name: str, graphs: list[GraphModule]):
    """To 1e-9 in float64, without a word; through vmap, which is the harder way. In two rounds, or all that differ."""
    entry = registry.entry(name)
    rounds = ROUNDS if requirements_of(entry.method).period > 1 else 2
    of = {"all_labels": entry.all_labels, "pooled": entry.pooled, "place": entry.label_locations[0]}
    found, said = gap(entry.method, "vmap", rounds=rounds, **of)
    assert found < CLOSE
    assert not said
    assert 1 <= len(graphs) <= compiled.SHAPES


@dataclass(frozen=True, kw_only=True)
class Peeking(Supervised):
    """An objective that looks at a tensor's value, or at the round's, as a client on its own may."""

    at: str = "loss"

    def __call__(self, task: Any, *rest: Any, **more: Any):
        loss, seen = super().__call__(task, *rest, **more)
        if self.at == "noise":
            return loss + torch.rand(()) * 0, seen
        worth = float(loss.detach()) if self.at == "loss" else 1.0 + (task.round > 1)
        return loss * (2.0 if worth > 1.5 else 1.0), seen


@pytest.mark.parametrize("at", ["loss", "round", "noise"])
def test_what_cannot_be_traced_trains_as_it_is_written(at: str, graphs: list[GraphModule]):
    """The same bits as without the option, and one sentence for all rounds."""
    method = FedAvg(Peeking(at=at))
    found, said = gap(method, "loop")
    assert found == 0
    assert len(said) == 1
    assert said[0].startswith("The steps of LocalTraining train without compile: PyTorch cannot compile them (")
    assert not graphs


def test_what_a_step_raises_is_raised(graphs: list[GraphModule]):
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Supervised):
        def __call__(self, *rest: Any, **more: Any):
            raise UserError("wrong")

    with pytest.raises(UserError, match=r"^wrong$"):
        played(FedAvg(Wrong()), "loop", True)


def test_beyond_so_many_shapes_the_rest_trains_as_it_is_written(graphs, monkeypatch):
    """With "rest" each client has batches of its own size: two are compiled here, and it is said once."""
    monkeypatch.setattr(compiled, "SHAPES", 2)
    found, said = gap(registry.entry("fedavg-fixmatch").method, "loop", Batching(2, "rest"))
    assert found < CLOSE
    assert len(graphs) == 2
    assert len(said) == 1
    assert "more than 2 shapes" in said[0]


def test_options_that_cannot_be_hashed(graphs: list[GraphModule]):
    found, said = gap(FedAvg(Peeking(at=["loss"])), "loop")
    assert found == 0
    assert said == ["The steps of LocalTraining train without compile: its options cannot be compared."]


def test_without_a_compiler_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def none(*_: Any) -> None:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(compiled, "inductor", none)
    with pytest.raises(UserError, match=r"compile needs .*No working C\+\+ compiler found\); install it, or leave"):
        runner.start(Config(method="fedavg", rounds=1, compile=True, run_dir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


TINY: dict[str, Any] = {
    "method": "fedavg", "clients": 5, "cohort": 2, "rounds": 3, "steps": 2, "width": 4, "labels_per_class": 2.0,
    "optimizer": "sgd", "lr": 0.05, "schedule": "cosine", "executor": "loop", "device": "cpu", "network": "small",
}  # fmt: skip


@pytest.mark.slow
@COMPILER
def test_a_run_by_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its programs lie in the user's own cache: what lies in the common one, in the folder of temporary files, is
    neither read nor written. Killed after a round and resumed, with its program built anew, it ends with the bytes of a
    straight run. Two processes, each with a program of its own, have the same tensors. These are not those of a run
    without, but near; the option stays out of the run's identity, as the executor does."""
    common = tmp_path / "tmp"
    common.mkdir()
    for name, value in {"XDG_CACHE_HOME": tmp_path / "cache", "TMPDIR": common, compiled.CACHE: common}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv(compiled.CACHE)  # which compiling sets
    monkeypatch.setattr(tempfile, "tempdir", None)
    config = Config(**TINY, compile=True)
    straight = runner.start(replace(config, run_dir=tmp_path / "straight")).folder
    with pytest.raises(KeyboardInterrupt):
        runner.start(replace(config, run_dir=tmp_path / "resumed"), Stop())
    compiled._programs.cache_clear()
    runner.resume(tmp_path / "resumed")
    for name in ("model.safetensors", "metrics.jsonl", "config.toml"):
        assert (tmp_path / "resumed" / name).read_bytes() == (straight / name).read_bytes(), name
    assert "compile = true" in (straight / "config.toml").read_text()
    plain = runner.start(Config(**TINY, run_dir=tmp_path / "plain")).folder
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (straight, plain))
    for path, leaf in ours.items():
        torch.testing.assert_close(leaf, theirs[path], rtol=1e-4, atol=1e-5)
    assert identity(config, "fedavg") == identity(Config(**TINY), "fedavg")
    two = runner.start(replace(config, workers=2, run_dir=tmp_path / "two")).folder
    assert (two / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()
    assert same(load_file(two / "model.safetensors"), load_file(straight / "model.safetensors"))
    assert list((tmp_path / "cache" / "halfmoon" / "inductor").rglob("*.so"))
    assert not [path for path in common.rglob("*") if path.is_file()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_on_a_gpu(executor: str, tmp_path: Path):
    """CUDA graphs: near a run without, and no result of a step is overwritten by the next."""
    options = {**TINY, "device": "cuda", "executor": executor}
    made = [
        load_file(runner.start(Config(**options, compile=on, run_dir=tmp_path / str(on))).folder / "model.safetensors")
        for on in (False, True)
    ]
    for path, leaf in made[0].items():
        torch.testing.assert_close(leaf, made[1][path], rtol=1e-3, atol=1e-4)


def test_programs_are_cached_where_nobody_else_can_put_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the user's own cache directory; a folder that others may write into is refused, as its programs would run."""
    from torch._inductor.runtime import cache_dir_utils

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folder = compiled.private_cache()
    assert folder == tmp_path / "halfmoon" / "inductor"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert Path(cache_dir_utils.cache_dir()) == folder
    for mode in (0o777, 0o770, 0o750):
        folder.chmod(mode)
        with pytest.raises(UserError, match="others can read or write it: remove it, or make it private"):
            compiled.private_cache()
    folder.chmod(0o700)
    assert compiled.private_cache() == folder
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(UserError, match="is no folder"):
        compiled.private_cache()
    folder.unlink()
    stranger = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    with pytest.raises(UserError, match="belongs to another user"):
        compiled.private_cache()

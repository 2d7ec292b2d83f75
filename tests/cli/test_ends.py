"""Ends that nobody chose: an order of the system, and memory that is used up; what was saved continues from there."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from halfmoon.cli.commands.base import describe_out_of_memory
from halfmoon.cli.main import main
from halfmoon.engine.runtime import ServerRuntime
from halfmoon.storage.run_folder import RunFolder

RUN = (
    "run --method fedavg --network small --width 2 --clients 4 --cohort 2 --rounds 3 --steps 1 --device cpu "
    "--executor loop --threads 1 --run-dir"
)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert main([*RUN.split(), str(folder)]) == 0
    return (folder / "model.safetensors").read_bytes()


def resume_run(folder: Path) -> bytes:
    assert main(["resume", str(folder)]) == 0
    return (folder / "model.safetensors").read_bytes()


def test_an_order_to_end_ends_as_ctrl_c_does(tmp_path, straight, monkeypatch, capsys):
    """SIGTERM after the first round: 130, and the sentence that says how to continue; the same model comes out."""
    save = RunFolder.save

    def ending(self: RunFolder, round: int, *rest: Any) -> None:
        save(self, round, *rest)
        if round == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", ending)
        assert main([*RUN.split(), str(tmp_path / "run")]) == 130
    assert f"stopped; go on with: halfmoon resume {tmp_path / 'run'}" in capsys.readouterr().err
    assert resume_run(tmp_path / "run") == straight


@pytest.mark.parametrize(
    ("where", "error"),
    [("client", MemoryError()), ("server", RuntimeError("[...] DefaultCPUAllocator: can't allocate memory: ..."))],
)
def test_used_up_memory_ends_with_a_sentence_and_an_intact_checkpoint(
    tmp_path, straight, monkeypatch, capsys, where, error
):
    closed = 0
    close = ServerRuntime.close
    ask = ServerRuntime._train_clients

    def closing(self: ServerRuntime) -> Any:
        nonlocal closed
        closed += 1
        if where == "server" and closed == 3:  # the first is that of the start
            raise error
        return close(self)

    def asking(self: ServerRuntime, *rest: Any) -> Any:
        if where == "client" and closed == 2:
            raise error
        return ask(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(ServerRuntime, "close", closing)
        patch.setattr(ServerRuntime, "_train_clients", asking)
        assert main([*RUN.split(), str(tmp_path / "run")]) == 1
    text = capsys.readouterr().err
    assert "the memory of this machine is used up" in text
    assert f"go on with: halfmoon resume {tmp_path / 'run'}" in text
    assert "Traceback" not in text
    assert resume_run(tmp_path / "run") == straight


def test_torch_memory_errors_are_recognized_and_different_ones_are_not():
    """A real refusal of its allocator; a wrong shape is a mistake of the program, whose traceback is wanted."""
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**55)
    assert describe_out_of_memory(refused.value) is not None
    assert describe_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")) is not None
    assert describe_out_of_memory(torch.OutOfMemoryError("...")) is not None
    assert describe_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None

"""Output in an encoding that lacks a character, and flags that must have an effect."""

import io
import sys
from pathlib import Path

import pytest
import torch

import halfmoon
from halfmoon.cli.commands import base
from halfmoon.cli.main import main


def test_characters_that_ascii_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    base.replace_unencodable_characters()
    print("88.1 \u00b1 0.4 \u2603")
    sys.stdout.flush()
    assert raw.getvalue() == b"88.1 +- 0.4 ?\n"


def test_export_loads_a_network_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx")
    (tmp_path / "nets_of_export.py").write_text(
        "from torch import nn\n\n\ndef make(channels, classes, size):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size[0] * size[1], classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    network = "nets_of_export:make"
    options = {"clients": 2, "setting": "iid-iid", "rounds": 1, "network": network, "executor": "loop"}
    halfmoon.run(method="fedavg", run_dir=tmp_path / "out", **options)
    command = ["export", str(tmp_path / "out"), "--onnx", str(tmp_path / "m.onnx")]
    assert main(command) == 2
    assert main([*command, "--network", network]) == 0
    assert (tmp_path / "m.onnx").stat().st_size > 0
    # A network of one's own without batch normalization fixed the batch of the program, and ended in a traceback.
    assert main(["export", str(tmp_path / "out"), "--torch", str(tmp_path / "m.pt2"), "--network", network]) == 0
    program = torch.export.load(tmp_path / "m.pt2").module()
    for count in (1, 5):
        probabilities = program(torch.zeros(count, 8, 8, 1, dtype=torch.uint8))
        assert probabilities.shape == (count, 10)
        assert torch.allclose(probabilities.sum(1), torch.ones(count))

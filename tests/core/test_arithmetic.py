"""Set PyTorch's arithmetic for a run and restore it, and refuse settings that a processor does not have."""

import pytest
import torch

import halfmoon
from halfmoon.core.arithmetic import gpu_arithmetic
from halfmoon.core.errors import UserError
from halfmoon.runs import runner


def current_settings() -> tuple[str, str, bool]:
    matrix_products = torch.backends.cuda.matmul.fp32_precision
    convolutions = torch.backends.cudnn.conv.fp32_precision
    return matrix_products, convolutions, torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("precision", "name"), [("float32", None), ("float32-ieee", "ieee"), ("tf32", "tf32"), ("bf16", None)]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_settings_hold_inside_and_are_restored_after_an_error(precision, name, deterministic):
    before = current_settings()
    inside = []

    def fail() -> None:
        with gpu_arithmetic(precision, deterministic):
            inside.append(current_settings())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    products, convolutions = (name, name) if name else before[:2]
    assert inside == [(products, convolutions, deterministic)]
    assert current_settings() == before


def test_a_run_trains_with_its_settings(monkeypatch, tmp_path):
    """The settings of the configuration are in force while rounds are trained. The check for a GPU is left out."""
    seen = []

    def run_no_rounds(*_: object) -> None:
        seen.append(current_settings())
        raise InterruptedError

    monkeypatch.setattr(runner, "run_rounds", run_no_rounds)
    monkeypatch.setattr(runner.checks, "check_jobs", lambda *_: None)
    with pytest.raises(InterruptedError):
        halfmoon.run(
            data="digits", method="fedavg", rounds=1, run_dir=tmp_path / "run", precision="tf32", deterministic=True
        )
    assert seen == [("tf32", "tf32", True)]


@pytest.mark.parametrize("options", [{"precision": "tf32"}, {"precision": "float32-ieee"}, {"deterministic": True}])
def test_settings_of_a_gpu_are_refused_on_a_processor(options, tmp_path):
    with pytest.raises(UserError, match="has an effect on a GPU only"):
        halfmoon.run(data="digits", method="fedavg", rounds=1, run_dir=tmp_path / "run", device="cpu", **options)
    assert not (tmp_path / "run").exists()

"""Removed options, commands and method options are refused with a sentence that says what to use instead."""

from pathlib import Path

import pytest

from halfmoon.cli import main as cli
from halfmoon.config import retired
from halfmoon.config.retired import RetiredOption
from halfmoon.config.schema import Config, identity, load_file, resolve, to_toml
from halfmoon.core.errors import UserError


@pytest.fixture(autouse=True)
def _removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare an option, a flag, a command and a method's option that no version had."""
    options = {**retired.REMOVED_OPTIONS, "warp": RetiredOption("use lr.", 9), "twist": RetiredOption("use momentum.")}
    monkeypatch.setattr(retired, "REMOVED_OPTIONS", options)
    monkeypatch.setattr(retired, "REMOVED_COMMANDS", {"warp": "use run.", "site warp": "use site check."})
    monkeypatch.setattr(retired, "REMOVED_COMMAND_FLAGS", {("site check", "--warp"): "use --size."})
    monkeypatch.setattr(retired, "REMOVED_METHOD_OPTIONS", {"feddure.warp": "use labels."})


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("run --warp 3", "option '--warp' was removed: use lr."),
        ("run --silent 0.1", "option '--silent' is called --client-dropout since version 0.2: rename it."),
        ("run --option warp=1", "option 'warp' of method feddure was removed: use labels."),
        ("warp", "command 'halfmoon warp' was removed: use run."),
        ("site warp FOLDER", "command 'halfmoon site warp' was removed: use site check."),
        ("site check FOLDER --warp 3", "option '--warp' of site check was removed: use --size."),
    ],
)
def test_the_command_line_names_the_replacement(
    message: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(message.split()) == 2
    assert capsys.readouterr().err == f"halfmoon: {sentence}\n"


def test_files_and_python_name_the_replacement(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("warp = 3\n")
    with pytest.raises(UserError, match=r"^option 'warp' in run.toml was removed: use lr\.$"):
        resolve(load_file(file), {}, file)
    with pytest.raises(UserError, match=r"^option 'warp' in Config was removed: use lr\.$"):
        Config(warp=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(UserError, match=r"^option 'twist' in Config.of was removed: use momentum\.$"):
        Config.of(twist=3)


def test_a_file_that_lists_a_removed_option_at_its_default_is_accepted() -> None:
    """Files of earlier versions list every option."""
    assert resolve({"warp": 9, "rounds": 3}, {}) == Config(rounds=3)
    with pytest.raises(UserError, match="use lr"):
        resolve({}, {"warp": 9})


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("compile", "leave it out: compiled steps paid off only in long runs of tiny networks."),
        ("seeds_together", "leave it out: the seeds of a comparison train one after the other."),
    ],
)
def test_compiled_steps_and_batched_seeds_are_refused(
    name: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = f"--{name.replace('_', '-')}"
    for command in ("run", "compare --methods fedavg"):
        assert cli.main([*command.split(), flag]) == 2
        assert capsys.readouterr().err == f"halfmoon: option '{flag}' was removed: {advice}\n"
    file = tmp_path / "run.toml"
    file.write_text(f"{name} = true\n")
    with pytest.raises(UserError, match=f"^option '{name}' in run.toml was removed: {advice}$"):
        resolve(load_file(file), {}, file)
    with pytest.raises(UserError, match=f"^option '{name}' in Config was removed: {advice}$"):
        Config(**{name: True})


def test_a_configuration_of_an_earlier_version_equals_todays_text() -> None:
    text = to_toml(Config(method="fedavg", rounds=3))
    old = text.replace("\nexecutor", '\ncompile = false\nseeds_together = false\nstart = "none"\nexecutor', 1)
    assert old != text
    assert retired.strip_ignored_lines(old) == text
    for stored in ("compile = true\n", "[options]\ncompile = false\n"):
        assert retired.strip_ignored_lines(stored) == stored


def test_run_folders_of_earlier_versions_keep_their_identity() -> None:
    assert retired.identity_defaults() == {"start": "none", "start_rounds": 40, "start_lr": None}
    expected = "c6b1e098787875d766436ba35dcb0a2633fd4087689f5e37b7a7912fdbb0d084"
    assert identity(Config(), "fedavg") == expected

"""Run folders and comparisons of version 0.2, whose files list options that were removed since, can still be read."""

import json
from pathlib import Path
from typing import Any

import pytest
from interrupted_runs import InterruptAfterRound

from halfmoon.config import schema
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.report.gather import gather_studies
from halfmoon.runs import jobs, runner
from halfmoon.studies import tuning

OPTIONS: dict[str, Any] = {
    "clients": 4, "cohort": 2, "rounds": 2, "steps": 2, "width": 4, "labels_per_class": 1.0, "device": "cpu",
}  # fmt: skip


def old_toml(config: Config) -> str:
    """Write a configuration as version 0.2 did, with options that exist no more."""
    before, executor, after = schema.to_toml(config).partition("\nexecutor = ")
    assert executor
    return f"{before}\ncompile = false\nseeds_together = false{executor}{after}"


@pytest.fixture
def version_0_2(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Write the files of version 0.2 until the returned patch is undone."""
    for module in (runner, jobs):
        monkeypatch.setattr(module, "to_toml", old_toml)
    return monkeypatch


def test_a_run_folder_is_resumed_and_reported(tmp_path: Path, version_0_2: pytest.MonkeyPatch) -> None:
    config = Config(**OPTIONS, method="fedavg", run_dir=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        runner.start(config, InterruptAfterRound())
    version_0_2.undo()
    assert "compile = false\nseeds_together = false\n" in (tmp_path / "run" / "config.toml").read_text()
    made = runner.resume(tmp_path / "run")
    assert made.summaries[0]["cost"]["labeled_steps"] == 2 * 2 * 2
    new = runner.start(Config(**OPTIONS, method="fedavg", seed=1, run_dir=tmp_path / "new"))
    # The removed options make no second column.
    (study,) = gather_studies([made.folder, new.folder])
    assert len(study.sweep.cells) == 1


def test_a_comparison_is_continued(tmp_path: Path, version_0_2: pytest.MonkeyPatch) -> None:
    config = Config(**OPTIONS, run_dir=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        runner.compare(config, ["fedavg", "fedavg-sl"], watch=InterruptAfterRound())
    version_0_2.undo()
    assert "seeds_together = false" in (tmp_path / "run" / "comparison.json").read_text()
    with pytest.raises(UserError, match="holds a comparison of this configuration"):
        runner.compare(config, ["fedavg", "fedavg-sl"])
    with pytest.raises(UserError, match="holds a comparison of another configuration"):
        runner.compare(config, ["fedavg"], resume_existing=True)
    made = runner.compare(config, ["fedavg", "fedavg-sl"], resume_existing=True)
    assert [summary["method"] for summary in made.summaries] == ["fedavg", "fedavg-sl"]


def test_the_description_of_a_search_is_recognized() -> None:
    config = Config(method="fedavg")
    old, new = (json.dumps([text, ["lr"], [100]]) for text in (old_toml(config), schema.to_toml(config)))
    other = json.dumps([schema.to_toml(config), ["width"], [100]])
    assert tuning._without_retired_options(old) == tuning._without_retired_options(new)
    assert tuning._without_retired_options(old) != tuning._without_retired_options(other)

"""What a run folder says: the card of a model, of simulated runs and federations alike; the plan of a comparison."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.models import registry
from halfmoon.runs import assembly
from halfmoon.runs.factory import ImageSpec
from halfmoon.runs.jobs import parse_jobs
from halfmoon.storage import integrity

FORM = ImageSpec((1, 16, 16), ("cat", "dog"), False, (0.5,), (0.25,))


@pytest.mark.parametrize("options", [{}, {"crop": True, "window": (-100.0, 300.0)}])
def test_model_card_records_the_preparation_of_images(options: dict[str, Any]):
    """Sites cut and window their images as they have agreed, so who labels with the model has to do it too."""
    config = dataclasses.replace(Config(method="fedavg", resize=16), **options)
    network = registry.make("small", 1, 2, (16, 16), "batch", None)
    federated = assembly.build_card(config, FORM, network, "words")
    assert (federated.crop, federated.window) == (("crop" in options), (-100.0, 300.0) if options else None)
    assert (federated.input_size, federated.shrink, federated.image) == ((16, 16), 1, (1, 16, 16))
    simulated = assembly.build_card(dataclasses.replace(config, shrink=2), FORM, network, "words", (32, 32), 1.5)
    assert (simulated.input_size, simulated.shrink, simulated.temperature) == ((32, 32), 2, 1.5)
    assert simulated.crop == federated.crop


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([{"folder": "../..", "config": ""}], "no folder in it"),
        ([{"folder": "/tmp", "config": ""}], "no folder in it"),
        ([{"folder": "one"}], "config"),
        ([], "it names no run"),
    ],
)
def test_a_plan_names_folders_below_it(tmp_path: Path, jobs: list[dict[str, Any]], message: str):
    """A checksum finds damage, not malice: one that is right says nothing of what stands in the file."""
    with pytest.raises(UserError, match=message):
        parse_jobs(integrity.format_checked({"jobs": jobs}), tmp_path)

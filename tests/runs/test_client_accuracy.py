"""A run reports the accuracy of each client on its share of the test images."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from halfmoon.config.schema import Config
from halfmoon.data.partition.client_tests import deal_test_images
from halfmoon.report.frame import format_csv
from halfmoon.report.gather import gather_studies
from halfmoon.report.page import render_html
from halfmoon.runs import factory, runner

CONFIG = Config(
    data="digits", method="fedavg", clients=5, cohort=3, steps=4, labels_per_class=4.0, rounds=2, threads=1, width=4
)


def test_summary_table_and_report_have_the_accuracies(tmp_path: Path):
    """They are recomputed from the bits of the summary, and every dealt image counts once."""
    outcome = runner.start(Config(**{**vars(CONFIG), "run_dir": tmp_path}))
    (summary,) = outcome.summaries
    problem = factory.build_problem(CONFIG)
    assert problem.test is not None
    owners = deal_test_images(problem.split, problem.train.labels.numpy(), problem.test.labels.numpy(), 10)
    bits = np.unpackbits(np.frombuffer(base64.b64decode(summary["correct"]), np.uint8), count=360)
    accuracies = [bits[owners == client].mean() for client in range(5)]
    result = summary["client_accuracy"]
    assert [result["each"][str(client)] for client in range(5)] == pytest.approx(accuracies, abs=1e-6)
    assert (result["mean"], result["deviation"]) == pytest.approx((np.mean(accuracies), np.std(accuracies)), abs=1e-6)
    # Of five clients, the worst tenth is one.
    assert result["worst"] == pytest.approx(min(accuracies), abs=1e-6)
    last_row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last_row["test"]["clients"] == {name: result[name] for name in ("clients", "mean", "deviation", "worst")}
    assert "clients_worst_percent" in (tmp_path / "table.csv").read_text().splitlines()[0]
    studies = gather_studies([tmp_path])
    assert "worst tenth %" in render_html(studies)
    assert repr(100 * result["worst"]) in format_csv(studies)

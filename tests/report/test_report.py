"""Tables and pictures: their numbers are hand-derived, their files are pictures, and none of it needs torch."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from report_folders import make_split_summary

from halfmoon.core.errors import UserError
from halfmoon.data.memory import PREFIX
from halfmoon.methods import registry
from halfmoon.report.curves import describe_runs, draw_curves, seed_curve, separate_positions
from halfmoon.report.diagrams import bubble_areas, draw_split
from halfmoon.report.run_reader import MEMORY_PREFIX, StoredRun, dataset_name, read_runs
from halfmoon.report.styles import _METHODS_IN_ORDER, DISTINCT_STYLES, line_style, line_styles, style_numbers
from halfmoon.report.tables import comparison_table, mean_and_deviation
from halfmoon.storage import integrity


def summary(method: str, seed: int, last: float | None, best: float | None, steps: int = 1200) -> dict[str, Any]:
    cost = {"labeled_steps": steps, "labeled_images": 12000, "unlabeled_images": 36000}
    cost |= {"forward": 1_234_567, "backward": 48_000, "bytes_down": 1_500_000, "bytes_up": 23_456_789}
    cost |= {"stored_client": 4_000, "stored_server": 0}
    return {
        "method": method.lower(),
        "title": method,
        "seed": seed,
        "accuracy": {"last": last, "best": best, "best_round": 3},
        "cost": cost,
        "finished": True,
    }


def run_of(method: str, seed: int, accuracies: dict[int, float], pseudo: bool = False) -> StoredRun:
    rows: list[dict[str, Any]] = []
    for round in range(1, max(accuracies) + 1):
        row: dict[str, Any] = {"round": round, "pseudo": None}
        if pseudo:
            row["pseudo"] = {"accuracy": round / 10, "share_above": 0.5, "accuracy_above": None}
        if round in accuracies:
            row["test"] = {"accuracy": accuracies[round]}
        rows.append(row)
    return StoredRun(Path(method), "", rows, summary(method, seed, 0.5, 0.6))


def read_pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def holds(pixels: np.ndarray, color: str) -> int:
    wanted = [int(color[n : n + 2], 16) for n in (1, 3, 5)]
    return int((pixels == wanted).all(-1).sum())


def write_run(path: Path, metrics: str, done: dict[str, Any] | None) -> Path:
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    (path / "config.toml").write_text('method = "fedavg"\n')
    (path / "metrics.jsonl").write_text(metrics)
    if done is not None:
        (path / "summary.json").write_text(json.dumps(done))
        integrity.record_files(path, "config.toml", "metrics.jsonl", "summary.json")
    return path


def test_a_run_is_read(tmp_path: Path) -> None:
    metrics = (
        '{"round": 1, "pseudo": null, "test": {"accuracy": 0.25}}\n'
        '{"round": 2, "pseudo": {"accuracy": 0.5}}\n'
        '{"round": 3, "pseudo": {"accuracy": null}, "test": {"accuracy": 1}}\n'
        '{"round": 4, "ps'
    )
    run = StoredRun.read(write_run(tmp_path / "run", metrics, None))
    assert run.config == 'method = "fedavg"\n'
    assert [row["round"] for row in run.rows] == [1, 2, 3]
    assert run.summary is None
    assert run.title == "fedavg"
    assert run.series("test", "accuracy") == {1: 0.25, 3: 1.0}
    assert run.series("pseudo", "accuracy") == {2: 0.5}
    assert run.series("nothing", "of it") == {}
    done = StoredRun.read(write_run(tmp_path / "done", "", summary("FedAvg", 0, 0.5, 0.6)))
    assert done.title == "FedAvg"


def test_folder_without_run_gives_a_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        StoredRun.read(tmp_path)
    path = write_run(tmp_path / "run", '{"round": 1}\nnonsense\n{"round": 3}\n', None)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
        StoredRun.read(path)
    (path / "metrics.jsonl").unlink()
    assert StoredRun.read(path).rows == []
    (path / "summary.json").write_text("{")
    integrity.record_files(path, "config.toml", "summary.json")
    with pytest.raises(UserError, match="not a summary"):
        StoredRun.read(path)


def test_read_runs_finds_a_run_and_those_below_it(tmp_path: Path) -> None:
    write_run(tmp_path / "main", "", None)
    write_run(tmp_path / "main" / "baselines" / "b", "", None)
    write_run(tmp_path / "main" / "baselines" / "a", "", None)
    assert [run.path.name for run in read_runs(tmp_path / "main")] == ["main", "a", "b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no run"):
        read_runs(tmp_path / "empty")


def test_a_table_of_three_seeds_and_of_one() -> None:
    """Last 0.80, 0.82, 0.87: mean 0.83, squares of differences 9 + 1 + 16 = 26 in 1e-4, so s = sqrt(26 / 2) = 3.6056 %.
    Best 0.9 three times: 90 with deviation 0. 1,500,000 bytes are 1.50 MB and 4,000 bytes 0.00400 MB, 1 MB = 10^6."""
    runs = [summary("FedDure", seed, last, 0.9) for seed, last in enumerate((0.80, 0.82, 0.87))]
    runs.insert(1, summary("FedAvg", 0, 0.5, None, steps=600))
    table = comparison_table(runs)
    assert table.headings == [
        "method",
        "last %",
        "best %",
        "labeled steps",
        "forward (images)",
        "backward (images)",
        "sent down (MB)",
        "sent up (MB)",
        "stored by a client (MB)",
        "stored by the server (MB)",
        "over",
    ]
    sent = ["1.50", "23.5", "0.00400", "0"]
    assert table.cells == [
        ["FedDure", "83.00 ± 3.61", "90.00 ± 0.00", "1,200", "1,234,567", "48,000", *sent, "3 seeds"],
        ["FedAvg", "50.00", "unknown", "600", "1,234,567", "48,000", *sent, "1 seed"],
    ]


@pytest.mark.parametrize(
    ("megabytes", "shown"),
    [
        ((12_345.678,), "12,346"),
        ((99.96,), "100.0"),
        ((0.000_004,), "0.00000400"),
        ((2.0, 3.0), "2.50 ± 0.71"),
        ((0.0, 0.0), "0"),
    ],
)
def test_traffic_has_three_significant_digits(megabytes: tuple[float, ...], shown: str) -> None:
    """Digits follow the size of the mean: 2.00 and 3.00 have the mean 2.50 and s = sqrt(0.5) = 0.71."""
    made = [summary("A", seed, 0.5, 0.5) for seed in range(len(megabytes))]
    for each, sent in zip(made, megabytes, strict=True):
        each["cost"]["bytes_up"] = round(sent * 1e6)
    assert comparison_table(made).cells[0][7] == shown


def test_memory_is_blank_if_a_run_did_not_measure_it() -> None:
    """Runs of the first version did not measure memory; with one that did, the mean would be over some seeds only."""
    old = summary("A", 0, 0.5, 0.5)
    new = summary("A", 1, 0.5, 0.5)
    del old["cost"]["stored_client"], old["cost"]["stored_server"]
    for runs in ([old], [old, new]):
        table = comparison_table(runs)
        assert table.cells[0][8:10] == ["", ""]
        assert table.as_json()[0]["megabytes_client"] is None
        (row,) = csv.DictReader(io.StringIO(table.as_csv()))
        assert (row["megabytes_server"], float(row["megabytes_up"])) == ("", 23.456789)


def test_costs_that_differ_between_seeds_show_it() -> None:
    """Steps 600 and 1200: mean 900, s = sqrt(2 * 300^2 / 1) = 424.26."""
    table = comparison_table([summary("A", s, 0.5, 0.5, steps) for s, steps in ((0, 600), (1, 1200))])
    assert table.cells[0][3] == "900 ± 424"


def test_the_table_as_markdown() -> None:
    table = comparison_table([summary("A|B", 0, 0.5, 0.625), summary("Longer", 0, 0.25, 0.5)])
    assert table.cells[0] == [
        *("A|B", "50.00", "62.50", "1,200", "1,234,567", "48,000", "1.50", "23.5", "0.00400", "0", "1 seed"),
    ]  # fmt: skip
    lines = table.as_markdown().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert set(lines[1]) <= set("|-: ")
    assert lines[2].startswith("| A\\|B   | ")
    assert [cell.strip() for cell in lines[3].strip("|").split("|")] == table.cells[1]


def test_the_table_as_csv_and_json_is_not_rounded() -> None:
    """Last 1/3 and 2/3: mean 50 %, s = sqrt(2 * (50/3)^2) = 23.570226 %."""
    table = comparison_table([summary("A, B", s, (1 + s) / 3, None) for s in (0, 1)])
    (row,) = csv.DictReader(io.StringIO(table.as_csv()))
    assert row["method"] == "A, B"
    assert row["seeds"] == "2"
    assert float(row["last_percent"]) == pytest.approx(50, abs=1e-12)
    assert float(row["last_percent_deviation"]) == pytest.approx(23.570226039551585, abs=1e-12)
    assert row["best_percent"] == ""
    assert float(row["forward_images"]) == 1_234_567
    (value,) = json.loads(json.dumps(table.as_json()))
    assert value["method"] == "A, B"
    assert value["seeds"] == [0, 1]
    assert value["best_percent"] is None
    assert value["megabytes_down"] == {"mean": 1.5, "deviation": 0.0}
    assert value["megabytes_client"] == {"mean": 0.004, "deviation": 0.0}
    assert repr(value["last_percent"]["deviation"]) == row["last_percent_deviation"]


def test_one_seed_has_no_deviation() -> None:
    assert mean_and_deviation([3.0]) == (3.0, None)
    table = comparison_table([summary("A", 0, 0.5, 0.5)])
    assert table.as_json()[0]["last_percent"] == {"mean": 50.0, "deviation": None}


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8))
def test_spread_is_numpys(values: list[float]) -> None:
    mean, deviation = mean_and_deviation(values)
    assert mean == pytest.approx(np.mean(values), abs=1e-6)
    assert deviation == pytest.approx(np.std(values, ddof=1), abs=1e-6)


def test_one_seed_twice_is_refused() -> None:
    with pytest.raises(UserError, match="two runs of A have the seed 4"):
        comparison_table([summary("A", 4, 0.5, 0.5), summary("A", 4, 0.6, 0.6)])


def test_a_curve_is_the_mean_over_the_rounds_that_all_seeds_have() -> None:
    """Rounds 2 and 4 are common; means (0.2 + 0.4) / 2 = 0.3 and (0.5 + 0.7 ) / 2 = 0.6."""
    runs = [run_of("A", 0, {2: 0.2, 4: 0.7, 6: 0.9}), run_of("A", 1, {2: 0.4, 3: 0.1, 4: 0.5})]
    line = seed_curve(runs, "test", "accuracy")
    assert line.rounds.tolist() == [2, 4]
    assert line.mean.tolist() == pytest.approx([0.3, 0.6])
    assert line.low.tolist() == [0.2, 0.5]
    assert line.high.tolist() == [0.4, 0.7]
    assert seed_curve(runs, "pseudo", "accuracy").rounds.tolist() == []


@pytest.mark.parametrize(("methods", "seeds", "pseudo"), [(1, 1, False), (3, 2, True), (11, 1, True)])
def test_curves_draw_every_method_in_its_color(tmp_path: Path, methods: int, seeds: int, pseudo: bool) -> None:
    runs = [
        run_of(f"Method {m}", s, {r: (m + 1) * r / 100 + s / 50 for r in range(1, 8)}, pseudo)
        for m in range(methods)
        for s in range(seeds)
    ]
    path = tmp_path / "curves.png"
    draw_curves(runs, path)
    pixels = read_pixels(path)
    height, width, _ = pixels.shape
    assert 600 <= height <= 1200
    assert 800 <= width <= 1800
    for one in line_styles([f"Method {m}" for m in range(methods)]):
        assert holds(pixels, one.color) > 30
    assert (pixels[:, [0, -1]] == 255).all()  # nothing is cut off at the sides
    repeated = tmp_path / "again.png"
    draw_curves(runs, repeated)
    assert path.read_bytes() == repeated.read_bytes()


@pytest.mark.parametrize("accuracies", [{1: 0.5}, {1: 0.5, 2: 0.5}, {}])
def test_curves_of_single_points(tmp_path: Path, accuracies: dict[int, float]) -> None:
    run = run_of("fedavg", 0, accuracies) if accuracies else StoredRun(tmp_path, "", [], None)
    draw_curves([run], tmp_path / "curves.png")
    (style,) = line_styles(["fedavg"])
    assert (holds(read_pixels(tmp_path / "curves.png"), style.color) > 10) == bool(accuracies)


def test_figure_that_cannot_be_written_gives_a_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the figure cannot be written"):
        draw_curves([run_of("A", 0, {1: 0.5})], tmp_path / "nowhere" / "curves.png")


def test_styles_differ() -> None:
    assert len({line_style(n) for n in range(120)}) == 120
    # Without color, too: marker and dashes alone.
    assert len({line_style(n)[1:] for n in range(DISTINCT_STYLES)}) == DISTINCT_STYLES >= 12
    assert len({line_style(n).marker for n in range(12)}) == 12
    for n in range(20):
        one = line_style(n)
        other = line_style(n + 1)
        assert one.color != other.color
        assert one.dashes != other.dashes
        assert one.marker != other.marker


def test_method_has_the_same_style_in_every_figure() -> None:
    """A method that is not in the table has a style by its name, or another one if that is taken."""
    methods = [name for name in registry.names() if name in _METHODS_IN_ORDER]
    single = {name: line_styles([name])[0] for name in methods}
    assert len(set(single.values())) == len(methods) > 30  # each has its own
    for some in (methods[3:9], methods[::-1], [*methods[::3], "one of my own"]):
        assert [single[name] for name in some if name in single] == line_styles(some)[
            : len([n for n in some if n in single])
        ]
    assert len(set(line_styles(registry.names()))) == len(registry.names())


def test_variants_of_a_method_and_unknown_names_differ() -> None:
    names = ["feddure (tau 0.9)", "feddure (tau 0.95)", "fedavg", "mine", "yours", *(f"x{n}" for n in range(40))]
    found = style_numbers(names)
    assert len(set(found)) == len(names)
    assert [found[0], found[2]] == style_numbers(["feddure", "fedavg"])
    assert style_numbers(names[:5]) == found[:5]


def test_a_panel_of_zeros_is_left_out(tmp_path: Path) -> None:
    """Without it the other panel has its height, without both the accuracy the whole width."""
    run = run_of("A", 0, {1: 0.5, 2: 0.6, 3: 0.7}, pseudo=True)
    for row in run.rows:
        row["pseudo"]["share_above"] = 0.0
    draw_curves([run], tmp_path / "a.png")
    one = read_pixels(tmp_path / "a.png").shape
    for row in run.rows:
        row["pseudo"]["accuracy"] = 0.0
    draw_curves([run], tmp_path / "b.png")
    assert read_pixels(tmp_path / "b.png").shape[1] < one[1]


def test_title_describes_the_runs(tmp_path: Path) -> None:
    config = 'data = "/home/me/mri/"\nsetting = "dir-dir"\ndirichlet_alpha = 0.1\nclients = 5\nseed = '
    (tmp_path / "split.json").write_text(json.dumps({"counts": {"labeled": 1200, "unlabeled": 1, "clients": 5,
        "classes": ["a"]}, "each": []}))  # fmt: skip
    runs = [StoredRun(tmp_path, f"{config}{seed}", [], None) for seed in (0, 1, 2)]
    assert describe_runs(runs) == "mri · dir-dir (α = 0.1), 5 clients · 1,200 labels · seeds 0 to 2"  # noqa: RUF001 (the sign of the Dirichlet draw)
    other = StoredRun(tmp_path / "none", 'data = "digits"\nseed = 7', [], None)
    assert describe_runs([other]) == "digits · seed 7"
    assert describe_runs([runs[0], other]) == "seeds 0, 7"


def test_names_are_spaced_by_hand() -> None:
    """10 and 10.5 must be 2 apart: least squares puts them at 10.25 - 1 and 10.25 + 1; 20 remains."""
    assert separate_positions([10.5, 20, 10], 2) == pytest.approx([11.25, 20, 9.25])
    assert separate_positions([], 1) == []


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9), st.floats(0.1, 20))
def test_spaced_names_keep_their_order_distance_and_middle(wanted: list[float], gap: float) -> None:
    placed = separate_positions(wanted, gap)
    order = np.argsort(wanted, kind="stable")
    assert (np.diff(np.array(placed)[order]) >= gap - 1e-9).all()
    assert np.mean(placed) == pytest.approx(np.mean(wanted))


def test_areas_are_proportional_to_counts() -> None:
    assert bubble_areas(np.array([[0, 1], [2, 4]]), 100.0).tolist() == [[0, 25], [50, 100]]
    assert bubble_areas(np.zeros((2, 2), dtype=int), 100.0).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (20, 10), (100, 10), (100, 100)])
def test_bubbles_draw_both_sides(tmp_path: Path, clients: int, classes: int) -> None:
    path = tmp_path / "bubbles.png"
    draw_split(make_split_summary(clients, [f"class {n}" for n in range(classes)]), path)
    pixels = read_pixels(path)
    half = pixels.shape[0] // 2
    assert 800 <= pixels.shape[1] <= 2000
    assert holds(pixels[:half], line_style(0).color) > 50
    assert holds(pixels[half:], line_style(1).color) > 50
    assert holds(pixels[half:], line_style(0).color) == 0


def test_drawn_bubbles_cover_paper_in_proportion(tmp_path: Path) -> None:
    """One client, two classes with 400 and 100 images: the larger of two separate bubbles covers 4 times the paper.
    The bubbles are found as runs of rows that hold the color, left of the legend."""
    split = make_split_summary(1, ["a", "b"])
    split["each"][0] = {"labeled_classes": [400, 100], "unlabeled_classes": [0, 0]}
    draw_split(split, tmp_path / "bubbles.png")
    pixels = read_pixels(tmp_path / "bubbles.png")
    blue = (pixels.astype(int) == [0, 0x72, 0xB2]).all(-1)
    blue[:, int(0.8 * blue.shape[1]) :] = False
    rows = np.flatnonzero(blue.any(1))
    cut = rows[np.argmax(np.diff(rows))]
    small = int(blue[: cut + 1].sum())
    large = int(blue[cut + 1 :].sum())
    assert large / small == pytest.approx(4, rel=0.12)


def test_a_side_without_any_image_is_drawn(tmp_path: Path) -> None:
    split = make_split_summary(3, ["a", "b"])
    for each in split["each"]:
        each["labeled_classes"] = [0, 0]
    draw_split(split, tmp_path / "bubbles.png")
    assert holds(read_pixels(tmp_path / "bubbles.png"), line_style(0).color) == 0


def columns_of(path: Path, color: str) -> list[tuple[int, int]]:
    """Return (first, last) of the runs of pixel columns of a picture that hold a color, without the legend's."""
    held = (read_pixels(path) == [int(color[n : n + 2], 16) for n in (1, 3, 5)]).all(-1).any(0)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], held, [0]])))
    return [(int(a), int(b) - 1) for a, b in edges.reshape(-1, 2)][:-1]


def test_server_with_labels_is_left_of_the_clients(tmp_path: Path) -> None:
    """Three clients, of whom none has labels: one column of labeled bubbles, left of all three of unlabeled ones.
    With labels at the last client, too, there are two, the second above that client."""
    split = make_split_summary(3, ["a", "b"])
    path = tmp_path / "bubbles.png"
    split["server"] = {"labeled": 7, "labeled_classes": [3, 4]}
    for each in split["each"]:
        each.update({"labeled_classes": [0, 0], "unlabeled_classes": [40, 40]})
    draw_split(split, path)
    (labeled,) = columns_of(path, line_style(0).color)
    clients = columns_of(path, line_style(1).color)
    assert len(clients) == 3
    assert labeled[1] < clients[0][0]
    gaps = np.diff([sum(span) / 2 for span in (labeled, *clients)])
    assert gaps[0] == pytest.approx(2 * gaps[1], abs=2)  # an empty column lies between
    split["each"][2]["labeled_classes"] = [4, 4]
    draw_split(split, path)
    assert columns_of(path, line_style(0).color)[1:] == clients[2:]


def test_legend_of_many_methods_is_inside_the_figure(tmp_path: Path) -> None:
    """Names of 24 letters: a margin of white remains on all sides, and the picture grows with its legend.
    The last method has two seeds, so that the legend has its note."""
    heights = []
    for count in (8, 9, 31):
        titles = [f"Method number {n:02d} of them all" for n in range(count)]
        runs = [run_of(title, 0, {1: 0.2, 9: 0.6}, True) for title in titles]
        draw_curves([*runs, run_of(titles[-1], 1, {1: 0.2, 9: 0.6}, True)], tmp_path / f"{count}.png")
        pixels = read_pixels(tmp_path / f"{count}.png")
        heights.append(pixels.shape[0])
        if count > 8:
            for edge in (pixels[:4], pixels[-4:], pixels[:, :4], pixels[:, -4:]):
                assert (edge == 255).all(), count
    assert heights == sorted(set(heights))


def test_images_in_memory_have_a_name_for_people() -> None:
    """Two of them in one report keep their hashes, so that they can be told apart."""
    assert MEMORY_PREFIX == PREFIX
    assert dataset_name("memory:1f3a9c07b2d4-77e0a1") == "images in memory"
    assert dataset_name("memory:1f3a9c07b2d4-77e0a1", parts=2) == "images in memory 1f3a9c07b2d4-77e0a1"
    assert dataset_name("/home/a/scans/") == "scans"

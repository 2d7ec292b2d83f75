"""The page of `halfmoon watch`: rows read as they are written, alarms by hand, logs as the federation writes them."""

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from browsers import needs_browser, open_page, serve_app, set_viewport, wait_until
from report_folders import write_run, write_sweep
from text_log import TextLog

from halfmoon.cli import main as cli
from halfmoon.pages import federation_events as views
from halfmoon.pages.follow import FollowedRun, Follower, JsonLinesFile, find_alarms, find_ceiling_alarms, find_runs
from halfmoon.pages.server import serve_in_background
from halfmoon.pages.watch import WatchPage, name_variants
from halfmoon.storage import events, locks


def row(number, loss=1.0, accuracy=None, share=None):
    found: dict[str, Any] = {"round": number, "train": {"loss": loss}, "pseudo": None}
    if accuracy is not None:
        found["test"] = {"accuracy": accuracy}
    if share is not None:
        found["pseudo"] = {"share_above": 0.0, "share_used": share}
    return found


def kinds(rows: list[dict[str, Any]], state: str = "running", age: float = 0) -> list[str]:
    return [each.kind for each in find_alarms(rows, state, age)]


def test_complete_lines_are_read_once(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLinesFile(path)
    assert not lines.update()
    path.write_text('{"round": 1}\n{"rou')
    assert lines.update()
    assert [each["round"] for each in lines.rows] == [1]
    with path.open("a") as file:
        file.write('nd": 2}\nno json\n[1]\n{"round": 3}\n')
    assert lines.update()
    assert [each["round"] for each in lines.rows] == [1, 2, 3]
    assert not lines.update()


def test_rounds_of_a_resumed_run_are_replaced(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"round": {n}, "old": true}}\n' for n in range(1, 6)))
    lines = JsonLinesFile(path)
    lines.update()
    path.write_text("".join(f'{{"round": {n}}}\n' for n in range(1, 4)))
    lines.update()
    assert [each["round"] for each in lines.rows] == [1, 2, 3]
    # Longer again before anybody looked: rounds come twice in what was read.
    with path.open("a") as file:
        file.write('{"round": 3, "new": true}\n{"round": 4}\n')
    lines.update()
    assert [each["round"] for each in lines.rows] == [1, 2, 3, 4]
    assert lines.rows[2]["new"]


def test_run_has_progress_and_remaining_time(tmp_path: Path):
    write_run(tmp_path / "r", 1, 0, finished=False, config="rounds = 20\n")
    run = FollowedRun(tmp_path / "r", "r")
    assert run.update()
    metadata = run.describe(time.time())
    assert (metadata["state"], metadata["round"], metadata["rounds"]) == ("running", 12, 20)
    assert metadata["seconds_left"] == pytest.approx(8 * 0.5, abs=1)  # 8 rounds of half a second
    drawn = run.collect_plot_data()
    assert drawn["lines"]["accuracy"]["x"] == [2, 4, 6, 8, 10, 12]
    assert drawn["lines"]["sent"]["y"] == [0.5] * 12
    assert drawn["rows"][-1]["cohort"] == 2
    assert run.describe(time.time() + 3600)["state"] == "stopped"
    (tmp_path / "r" / "summary.json").write_text('{"title": "T"}')
    assert run.update()
    assert run.describe(time.time() + 3600)["state"] == "finished"


def test_runs_are_found_in_a_run_a_comparison_and_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs beyond the limit of the page are counted."""
    write_run(tmp_path / "one", 0, 0)
    assert [name for _, name in find_runs(tmp_path / "one")] == ["one"]
    write_run(tmp_path / "one" / "beside" / "fixmatch", 1, 0)
    assert [name for _, name in find_runs(tmp_path / "one")] == ["one", "beside/fixmatch"]
    sweep = write_sweep(tmp_path / "s")
    found = find_runs(sweep)
    assert len(found) == 12
    assert found[0][1] == "iid-iid, fedavg, seed 0"
    follower = Follower(sweep)
    follower.update()
    assert follower.planned() == 12
    assert all(run.round == 12 for run in follower.runs.values())
    monkeypatch.setattr("halfmoon.pages.follow.MAX_RUNS", 5)
    follower = Follower(sweep)
    follower.update()
    assert (len(follower.runs), follower.left_out) == (5, 7)
    (sweep / "sweep.json").write_text('{"cells": [1, {"at": {}, "runs": [{}]}, {"at": 3}]}')
    assert find_runs(sweep) == [], "a damaged sweep is no end"


def test_seeds_of_a_method_share_a_style_and_other_options_do_not(tmp_path: Path):
    runs = []
    for n, (seed, config) in enumerate(((0, "lr = 1\n"), (1, "lr = 1\n"), (0, "lr = 2\n"))):
        write_run(tmp_path / str(n), 2, seed, config=config)
        runs.append(FollowedRun(tmp_path / str(n), str(n)))
        runs[-1].update()
    assert name_variants(runs) == ["feddure", "feddure", "feddure (2)"]


def test_alarm_for_a_loss_that_is_not_a_number_or_grows_while_the_accuracy_falls():
    assert kinds([row(1), row(2, None)]) == ["diverged"]
    assert kinds([row(1), row(2)]) == []
    growing = [row(n, 1.0 if n < 4 else 9.0, 0.5 if n < 4 else 0.42) for n in range(1, 8)]
    assert kinds(growing) == ["diverged"]
    better = [row(n, 1.0 if n < 4 else 9.0, 0.1 * n) for n in range(1, 8)]
    assert kinds(better) == []  # methods that use more and more pseudo-labels have growing losses


def test_alarms_for_unused_pseudo_labels_fallen_accuracy_and_stopped_runs():
    assert kinds([row(n, share=0.004) for n in range(1, 6)]) == ["none used"]
    assert kinds([row(n, share=0.004) for n in range(1, 5)]) == []
    assert kinds([row(n, share=0.004 if n < 5 else 0.2) for n in range(1, 6)]) == []
    assert kinds([row(n, accuracy=a) for n, a in enumerate((0.5, 0.7, 0.5, 0.5), 1)]) == ["fallen"]
    assert kinds([row(n, accuracy=a) for n, a in enumerate((0.5, 0.7, 0.5, 0.6), 1)]) == []
    (silence,) = find_alarms([row(1)], "stopped", 3 * 3600)
    assert silence.text.startswith("no progress for 3 hours")


def test_alarm_for_an_upper_bound_below_the_lower_bound(tmp_path: Path):
    """Labels only (method 0) end at 0.65, method 2 is called the ceiling and ends higher; then the other way round."""
    runs = []
    for method in (0, 2):
        write_run(tmp_path / str(method), method, 0)
        runs.append(FollowedRun(tmp_path / str(method), str(method)))
        runs[-1].update()
    assert find_ceiling_alarms(runs, {"feddure"}, {"fedavg"}) == []
    (alarm,) = find_ceiling_alarms(runs, {"fedavg"}, {"feddure"})
    assert alarm.kind == "ceiling"
    assert "below labels only" in alarm.text


def record(folder: Path, *rows: tuple[str, str, str, dict[str, Any]], log: str = "serve.log") -> None:
    """Write event records (time, name, sentence, fields) and their readable log, instead of earlier ones."""
    for name in (events.EVENTS_FILE, log):
        (folder / name).unlink(missing_ok=True)
    for when, name, text, fields in rows:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "strftime", lambda form, when=when: f"2026-11-21 {when}")
            events.EventLog(folder / log).record(name, text, **fields)


TERMS = {"federation": "digits", "method": "FedDure", "rounds": 50}
SERVER = (
    ("04:53:13", "started", "federation digits (b697e786): FedDure for 10 rounds, 3 of 3 sites a round", TERMS),
    ("04:53:21", "site_joined", "site-02 is there: 40 images with a label, 531 without",
     {"site": "site-02", "labeled": 40, "unlabeled": 531}),
    ("04:53:22", "site_joined", "site-01 is there: 44 images with a label, 377 without", {"site": "site-01"}),
    ("04:54:09", "round_finished", "round 1 of 10: 3 sites, mean loss 2.0267, accuracy 63.06%", {"round": 1}),
    ("04:55:00", "reply_late", "site-01 answered round 2 4 s too late: discarded", {"site": "site-01"}),
    ("04:55:10", "reply_failed", "site-02 did not answer round 3: no reply within 60 s", {"site": "site-02"}),
    ("04:55:12", "site_disconnected", "site-02 is no longer connected", {"site": "site-02"}),
    ("04:55:20", "reply_rejected", "refused in round 4: the answer of site-01: a norm of 1e9", {"site": "site-01"}),
    ("04:55:30", "site_joined", "site-02 is there again: 40 images with a label", {"site": "site-02"}),
)  # fmt: skip
WORK = "trained 41 steps of 10 labeled and 10 unlabeled images in 23.0 s, mean loss 2.1043"
SENT = "params 58.2 kB, stats 640 B"
TRAINED = {"received": "61.6 kB", "work": WORK, "sent": SENT, "loss": 2.1043}
SITE = (
    ("04:53:18", "note", "decoded 445 images; 0 cannot be read and are left out", {}),
    ("04:53:18", "joined", "federation digits (b697e786): FedDure for 50 rounds; this site gives 36 images", TERMS),
    ("04:53:48", "trained", f"round 1, train: received 61.6 kB; {WORK}; sends {SENT}", {"round": 1, **TRAINED}),
    ("04:54:37", "evaluated", "the model before round 12 is right on 71.00% of the test images here",
     {"images": "test", "rounds": 11, "accuracy": 0.71}),
    ("04:54:37", "trained", "round 12 (attempt 2), train: received 61.6 kB", {"round": 12, **TRAINED}),
)  # fmt: skip


def test_federation_view_has_the_state_of_each_site(tmp_path: Path):
    record(tmp_path, *SERVER)
    (tmp_path / "terms.json").write_text('{"sites": ["site-00", "site-01", "site-02"]}')
    found = views.federation_view(tmp_path)
    sites = {each["name"]: each for each in found["sites"]}
    assert {name: each["state"] for name, each in sites.items()} == {
        "site-00": "not connected yet",
        "site-01": "refused",
        "site-02": "connected",
    }
    # Its numbers of images are in columns.
    assert sites["site-02"]["last_event"] == "joined"
    assert (sites["site-01"]["late"], sites["site-01"]["refused"], sites["site-02"]["no reply"]) == (1, 1, 1)
    assert len(found["log"]) == 9
    assert (sites["site-02"]["labeled"], sites["site-02"]["unlabeled"]) == (40, 531)
    assert sites["site-00"]["labeled"] is None
    assert sites["site-02"]["last_contact"] == "2026-11-21 04:55:30"


def test_a_finished_round_is_a_contact_with_its_sites(tmp_path: Path):
    record(tmp_path, *SERVER, ("04:59:00", "round_finished", "round 5", {"round": 5, "cohort": ["site-01"]}))
    sites = {each["name"]: each["last_contact"] for each in views.federation_view(tmp_path)["sites"]}
    assert sites == {"site-01": "2026-11-21 04:59:00", "site-02": "2026-11-21 04:55:30"}


def test_baselines_of_runs_in_a_folder_are_found(tmp_path: Path):
    write_run(tmp_path / "first", 2, 0)
    write_run(tmp_path / "first" / "baselines" / "fedavg", 0, 0)
    assert [name for _, name in find_runs(tmp_path)] == ["first", "first/baselines/fedavg"]


def test_a_federation_that_waits_is_not_stopped(tmp_path: Path):
    """No site for minutes: the page states for whom the server waits, and since when; only silence is "stopped"."""
    (tmp_path / "run.json").write_text("{}")
    os.utime(tmp_path / "run.json", (1, 1))
    missing = {"whom": "sites", "detail": "0 of 3 are there, 2 needed"}
    repeats = [(f"04:5{n}:13", "waiting_for_sites", "waiting for sites: 0 of 3 are there", missing) for n in (3, 4, 5)]
    beginning = [SERVER[0], *repeats]
    record(tmp_path, *beginning)
    run = FollowedRun(tmp_path, "r")
    now = time.time()
    metadata = run.describe(now)
    assert (metadata["state"], metadata["alarms"]) == ("waiting", [])
    assert metadata["waiting"] == "waiting for sites since 2026-11-21 04:53:13: 0 of 3 are there, 2 needed"
    assert run.describe(now + 130)["state"] == "stopped"
    record(tmp_path, *beginning, ("04:55:43", "sites_ready", "2 of 3 sites are there", {}))
    assert run.describe(now)["waiting"] == "", "round 1 has begun"
    record(tmp_path, *beginning, ("04:56:13", "round_finished", "round 1 of 10: 3 sites", {"round": 1}))
    assert run.describe(now)["waiting"] == ""
    assert run.describe(now + 3000)["state"] == "waiting"  # for a reply, up to round_timeout
    assert run.describe(now + 3700)["state"] == "stopped"
    run.options = {"federation": {"round_timeout": 200}}
    assert run.describe(now + 300)["state"] == "stopped"
    pending = {"whom": "site-01", "detail": "round 2, query 1 (train)"}
    waiting = ("04:57:13", "waiting_for_replies", "waiting for site-01: round 2, query 1 (train)", pending)
    gone = ("04:57:20", "site_disconnected", "site-01 is no longer connected", {"site": "site-01"})
    record(tmp_path, *beginning, waiting, gone)
    message = "waiting for site-01 since 2026-11-21 04:57:13: round 2, query 1 (train)"
    assert (run.describe(now)["state"], run.describe(now)["waiting"]) == ("waiting", message)


def test_run_without_a_locking_process_is_shown_as_stopped(tmp_path: Path):
    """A run with a locking process is running, however long a round takes; two minutes after the lock is free it is stopped."""
    write_run(tmp_path / "r", 1, 0, finished=False, config="rounds = 20\n[federation]\n")
    run = FollowedRun(tmp_path / "r", "r")
    now = time.time()
    run.update()
    with locks.hold(tmp_path / "r" / ".lock"):
        assert run.describe(now + 10000)["state"] == "running"
    (tmp_path / "r" / "serve.log").write_text("")
    assert run.describe(now + 100)["state"] == "running"
    metadata = run.describe(now + 130)
    assert metadata["state"] == "stopped"
    assert "continue it with halfmoon serve" in metadata["alarms"][-1]["text"]


def test_accuracies_of_sites_are_drawn_with_their_mean(tmp_path: Path):
    rows = [{"round": n, "evaluation": {"accuracy": 0.5, "by_site": {"west": 0.25 * n}}} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (*rows, {"round": 3})))
    run = FollowedRun(tmp_path, "r")
    run.update()
    (west,) = run.collect_plot_data()["sites"]
    assert (west["style"]["title"], west["x"], west["y"]) == ("west", [1, 2], [25.0, 50.0])


def test_left_out_site_is_shown_until_the_next_round(tmp_path: Path):
    message = "its parameters point against the others (cosine -0.540, median 0.040)"
    left_out = {"round": 1, "cohort": ["east", "west"], "left_out": {"west": f"west was left out: {message}"}}
    first = ("04:54:09", "round_finished", "round 1 of 9: 3 sites, mean loss 2.0", left_out)
    record(tmp_path, first)
    (west,) = views.federation_view(tmp_path)["sites"]
    assert (west["state"], west["last_event"], west["left out"]) == ("left out", f"west was left out: {message}", 1)
    later = (
        first,
        ("04:55:09", "round_finished", "round 2 of 9: 3 sites, mean loss 1.9", {"round": 2}),
        ("04:55:20", "site_absent", "west has no part in round 3: it was not connected for 60 s", {"site": "west"}),
        ("04:55:29", "round_finished", "round 3 of 9: 2 sites, mean loss 1.9", {"round": 3}),
    )
    record(tmp_path, *later)
    (tmp_path / "terms.json").write_text('{"sites": ["east", "west"]}')
    states = [
        [each["state"] for each in views.federation_view(tmp_path, [{"round": 3, "cohort": cohort}])["sites"]]
        for cohort in ([0], [0, 1])
    ]
    assert states == [["connected", "disconnected"], ["connected", "connected"]]


def test_site_view_describes_its_participation(tmp_path: Path):
    state_folder = tmp_path / ".halfmoon"
    state_folder.mkdir()
    record(state_folder, *SITE, log="join.log")
    found = views.site_view(tmp_path)
    assert found["sentence"] == (
        "Round 12 of 50: your images helped in 2, the model is right on 71 % of your test images."
    )
    assert found["evaluations"] == [[11, 71.0]]
    assert found["rows"][0]["sent"] == "params 58.2 kB, stats 640 B"
    assert views.site_view(state_folder) == found


def test_site_view_describes_invitation_and_end(tmp_path: Path):
    record(
        tmp_path, ("04:53:18", "terms_offered", "asked to take part in a", {**TERMS, "federation": "a"}), log="join.log"
    )
    assert views.site_view(tmp_path)["sentence"].startswith("You are asked to take part in a;")
    over = ("05:00:00", "finished", "finished: the model is in /x", {"accuracy": 0.6583})
    record(tmp_path, *SITE, over, log="join.log")
    found = views.site_view(tmp_path)
    assert found["sentence"] == (
        "The federation is over: your images helped in 2 of 50 rounds, the model is right on 66 % of your test images."
    )
    assert found["evaluations"][-1] == [50, pytest.approx(65.83)]


def test_every_event_that_the_views_read_is_recorded_somewhere():
    """The views know events by name; an event of that name is recorded by the server or the site, with its fields."""
    root = Path(views.__file__).parents[1] / "federation"
    code = "".join(path.read_text() for path in sorted(root.rglob("*.py")))
    names = {*views.STATES, *views.WAITING_EVENTS, "round_finished", "terms_offered", "joined", "trained", "evaluated"}
    assert {name for name in (*names, "finished") if f'"{name}"' not in code} == set()


def test_folders_without_event_records_are_from_an_older_version(tmp_path: Path):
    (tmp_path / "serve.log").write_text("2026-11-21 04:53:21  site-02 is there: 40 images with a label, 531 without\n")
    assert "older version" in views.federation_view(tmp_path)["log"][0][1]
    (tmp_path / "join.log").write_text("2026-11-21 04:53:18  decoded 445 images\n")
    assert "older version" in views.site_view(tmp_path)["sentence"]
    (tmp_path / "serve.log").unlink()
    assert views.federation_view(tmp_path) is None


@pytest.mark.parametrize("name", ["nowhere", "full"])
def test_folder_that_cannot_be_watched_gives_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("")
    assert cli.main(["watch", str(tmp_path / name), "--no-browser"]) == 2
    assert str(tmp_path / name) in capsys.readouterr().err


def test_page_of_a_federation_is_read_only(tmp_path: Path):
    record(tmp_path, *SERVER)
    messages: list[str] = []
    with serve_in_background(WatchPage(tmp_path).app(), "page", None, TextLog(messages)) as address:
        assert messages == [f"page: {address}"]
        with urllib.request.urlopen(f"{address}data") as reply:
            assert len(json.load(reply)["federation"]["sites"]) == 2
        origin = {"Origin": address[: address.index("/", 8)]}
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(urllib.request.Request(f"{address}data", b"{}", origin))


@needs_browser
def test_a_growing_run_is_followed(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "r", 1, 0, finished=False, config="rounds = 20\n")
    write_run(tmp_path / "r" / "beside" / "a", 0, 0)
    with serve_app(WatchPage(tmp_path / "r").app()) as address:
        open_page(browser, address)
        assert "1 of 2 runs finished, 1 running" in browser.find_element("id", "progress").text
        lines = "[data-chart=accuracy] .line path"
        assert len(browser.find_elements("css selector", lines)) == 2
        widths = [round(figure.rect["width"]) for figure in browser.find_elements("css selector", "#charts figure")]
        # Seven charts: the first one has a row, the others are two by two.
        assert len(widths) == 7
        assert widths[0] == 1368
        assert set(widths[1:]) == {670}
        with (tmp_path / "r" / "metrics.jsonl").open("a") as file:
            file.write('{"round": 13, "test": {"accuracy": 0.99}}\n')
        wait_until(lambda: "99.00" in browser.find_element("id", "runs-table").text)
        first = browser.find_element("css selector", "#rounds-table tbody tr td").text
        assert first == "13"
        browser.find_element("css selector", "#runs-table input").send_keys(" ")  # by keyboard
        wait_until(lambda: len(browser.find_elements("css selector", lines)) == 1)
        browser.find_element("id", "run-filter").send_keys("fedavg")
        wait_until(lambda: len(browser.find_elements("css selector", "#runs-table tbody tr")) == 1)
        assert browser.get_log("browser") == []
    wait_until(lambda: "stopped in the terminal" in browser.find_element("id", "notice").text)


@needs_browser
def test_a_site_and_a_federation_are_shown(browser: Any, tmp_path: Path) -> None:
    record(tmp_path, *SITE, log="join.log")
    with serve_app(WatchPage(tmp_path).app()) as address:
        open_page(browser, address, 390, dark=True)
        assert browser.find_element("id", "summary").text.startswith("Round 12 of 50: your images helped in 2")
        set_viewport(browser, 390, dark=False)  # the evening is over
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        assert browser.get_log("browser") == []
    (tmp_path / "join.log").unlink()
    record(
        tmp_path, *((when, name, text.replace("site-01", "<i>x</i>-01"), fields) for when, name, text, fields in SERVER)
    )
    write_run(tmp_path / "run", 1, 0)
    with serve_app(WatchPage(tmp_path).app()) as address:
        open_page(browser, address)
        assert "no longer connected" in browser.find_element("id", "log").text
        assert "<i>x</i>-01 is there" in browser.find_element("id", "log").text
        assert len(browser.find_elements("css selector", "#sites-table tbody tr")) == 2
        cells = browser.find_element("css selector", "#sites-table tbody tr:first-child").text
        assert cells.startswith("site-02 took part to the end 2026-11-21 04:55:30 40 of 571")
        tops = [
            browser.find_element("id", name).rect["y"] for name in ("sites-section", "runs-section", "curves-section")
        ]
        assert tops == sorted(tops), "the sites come first"
        assert (
            browser.find_element("id", "summary").text == "The federation is over; 1 of 2 sites took part to the end."
        )


@needs_browser
def test_accuracy_is_shown_only_of_sites_that_consent(browser: Any, tmp_path: Path) -> None:
    """site-02 reports its accuracy, site-01 does not; where no site does, there is no column."""
    record(tmp_path, *SERVER)
    write_run(tmp_path / "run", 1, 0, finished=False, config="rounds = 20\n[federation]\n")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        row = {"round": 13, "evaluation": {"accuracy": 0.5, "by_site": {"site-02": 0.625}}}
        file.write(json.dumps(row) + "\n")
    table = "return [...document.querySelectorAll('#sites-table tr')].map((row) => [...row.children].map((each) => each.innerText.trim()))"
    with serve_app(WatchPage(tmp_path).app()) as address:
        open_page(browser, address)
        head, *rows = browser.execute_script(table)
        column = head.index("accuracy %")
        assert {row[0]: row[column] for row in rows} == {"site-01": "\N{EN DASH}", "site-02": "62.50"}
        assert browser.find_element("id", "consent-note").text == "Accuracy: only of sites that consent to report it."
        names = [each.text for each in browser.find_elements("css selector", "[data-chart=evaluation] [data-part]")]
        assert "site-01" not in " ".join(names)
        received = "return fetch('data').then((reply) => reply.json()).then((found) => JSON.stringify(found.runs))"
        assert "site-01" not in browser.execute_script(received)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines[:-1]))
    with serve_app(WatchPage(tmp_path).app()) as address:
        open_page(browser, address)
        assert "accuracy %" not in browser.execute_script(table)[0]
        assert not browser.find_element("id", "consent-note").is_displayed()


@needs_browser
def test_baselines_are_shown_with_their_run(browser: Any, tmp_path: Path) -> None:
    """Of a folder of runs, as `halfmoon watch runs`: in the table of runs and as lines of the curves."""
    write_run(tmp_path / "first", 2, 0)
    write_run(tmp_path / "first" / "baselines" / "fedavg", 0, 0)
    with serve_app(WatchPage(tmp_path).app()) as address:
        open_page(browser, address)
        titles = [each.text for each in browser.find_elements("css selector", "#runs-table td.title")]
        assert sorted(titles) == ["FedAvg (labeled only)", "FedDure"]
        assert len(browser.find_elements("css selector", "[data-chart=accuracy] .line path")) == 2
        assert [each.text for each in browser.find_elements("css selector", "#legend li")] == titles


@needs_browser
def test_alarms_are_grouped_by_method(browser: Any, tmp_path: Path) -> None:
    """The same alarm of two seeds is one line with both seeds, below the method's name."""
    for method, seed in ((1, 0), (1, 1), (2, 0)):
        write_run(tmp_path / f"{method}{seed}", method, seed, finished=False, config="rounds = 20\n")
        rows = [json.loads(each) for each in (tmp_path / f"{method}{seed}" / "metrics.jsonl").read_text().splitlines()]
        for each in rows[-5:]:
            each["pseudo"]["share_used"] = 0.001
        lines = "".join(json.dumps(each) + "\n" for each in rows)
        (tmp_path / f"{method}{seed}" / "metrics.jsonl").write_text(lines)
    with serve_app(WatchPage(tmp_path).app()) as address:
        open_page(browser, address)
        groups = [each.text.split("\n") for each in browser.find_elements("css selector", "#alarms > li")]
    assert [lines[0] for lines in groups] == ["fixmatch", "feddure"]
    assert groups[0][1].startswith("seed 0, seed 1: unlabeled images are not used")
    assert groups[1][1].startswith("unlabeled images are not used")
    assert [len(lines) for lines in groups] == [2, 2]


@needs_browser
def test_twelve_runs_scroll_only_inside_their_frames(browser: Any, tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    with serve_app(WatchPage(sweep).app()) as address:
        open_page(browser, address, 390)
        assert len(browser.find_elements("css selector", "#runs-table tbody tr")) == 12
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        open_page(browser, address, 1280)
        seen = "[...document.querySelectorAll('.plot svg.chart')].map((each) => [each.viewBox.baseVal.width, each.clientWidth])"
        wait_until(lambda: len(browser.execute_script(f"return {seen}")) > 1)
        wait_until(lambda: all(abs(a - b) < 2 for a, b in browser.execute_script(f"return {seen}")), 0.7)


@needs_browser
def test_seeds_are_one_line_on_a_transparent_band(browser: Any, tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / str(seed), 2, seed)
    with serve_app(WatchPage(tmp_path).app()) as address:
        open_page(browser, address)
        (band,) = browser.find_elements("css selector", "[data-chart=accuracy] .band path")
        assert len(browser.find_elements("css selector", "[data-chart=accuracy] .line path")) == 1
        assert float(band.value_of_css_property("fill-opacity")) < 0.3

"""Event records: one JSON line each and a readable line; damaged and half-written lines are skipped."""

import json
from pathlib import Path

from halfmoon.storage.events import EVENTS_FILE, EventLog, EventTail, read_events


def test_an_event_is_one_record_and_one_readable_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "serve.log")
    log.record("site_joined", "north is there\nwith 3 images", site="north", labeled=3)
    (row,) = map(json.loads, (tmp_path / EVENTS_FILE).read_text().splitlines())
    assert (row["event"], row["fields"]) == ("site_joined", {"site": "north", "labeled": 3})
    assert row["text"] == "north is there with 3 images"
    assert (tmp_path / "serve.log").read_text() == f"{row['time']}  north is there with 3 images\n"
    (event,) = read_events(tmp_path)
    assert (event.name, event.fields, event.line) == ("site_joined", row["fields"], f"{row['time']}  {row['text']}")


def test_lines_that_are_no_records_are_skipped(tmp_path: Path) -> None:
    EventLog(tmp_path / "serve.log").record("started", "it starts")
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('no json\n[1]\n{"event": "x"}\n{"time": "", "event": "x", "fields": [], "text": ""}\n{"time": "12')
    assert [event.name for event in read_events(tmp_path)] == ["started"]
    assert read_events(tmp_path / "nowhere") == []


def test_a_tail_reads_each_event_once_and_only_complete_ones(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "join.log")
    log.record("note", "before")
    tail = EventTail(tmp_path)
    assert tail.read_events() == []
    log.record("note", "first")
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('{"time": "t", "event": "note", "fields": {}, "te')
    assert [event.text for event in tail.read_events()] == ["first"]
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('xt": "second"}\n')
    assert [event.text for event in tail.read_events()] == ["second"]


def test_a_resumed_server_loses_no_record_after_a_half_written_line(tmp_path: Path) -> None:
    EventLog(tmp_path / "serve.log").record("started", "it starts")
    tail = EventTail(tmp_path)
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('{"time": "t", "event": "site_jo')
    log = EventLog(tmp_path / "serve.log")
    log.record("started", "it resumes")
    log.record("site_joined", "north is there", site="north")
    assert [event.text for event in read_events(tmp_path)] == ["it starts", "it resumes", "north is there"]
    assert [event.text for event in tail.read_events()] == ["it resumes", "north is there"]
    assert b"\n\n" not in (tmp_path / EVENTS_FILE).read_bytes()

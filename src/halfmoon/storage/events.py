"""Events: records of what happened, for people (a sentence) and for programs (a name and fields).

Code that has something to report gets an `EventRecorder`. A terminal prints the sentences (`EventPrinter`), a callback of
a run displays them (`halfmoon.runs.callbacks.Callback`), and the server and each site of a federation write them to files
(`EventLog`): one JSON line each in `events.jsonl`, and the sentences in a readable log next to it. Programs read names
and fields, never sentences. Imports no torch, so it loads fast.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from halfmoon.storage import atomic_io

EVENTS_FILE = "events.jsonl"
"""The records, in a server's run folder and in a site's state folder."""

SERVER_LOG = "serve.log"
"""The readable log of a server, in its run folder."""

SITE_LOG = "join.log"
"""The readable log of a site, in its state folder."""

MAX_READ_BYTES = 2**22
"""Bytes at the end of the records that `read_events` reads."""


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        name: the kind of event, such as "site_joined".
        text: one sentence about it, for people.
        fields: the same information for programs; the keys depend on the name.
        time: local time, as YYYY-MM-DD HH:MM:SS.
    """

    name: str
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    time: str = ""

    @property
    def line(self) -> str:
        """The line of the readable log."""
        return f"{self.time}  {self.text}"


class EventRecorder(Protocol):
    """Interface of objects that store or display events."""

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        """Record an event.

        Args:
            name: the kind of event.
            text: one sentence about it, for people.
            fields: the same information for programs, JSON values.
        """
        ...


@dataclass(frozen=True)
class EventLog:
    """Event records and a readable log in one folder; several processes may append to them.

    Attributes:
        path: the readable log. The records are in `EVENTS_FILE` of the same folder.
        ignore_errors: whether an event is dropped if it cannot be written, for example because the disk is full.
    """

    path: Path
    ignore_errors: bool = False

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        """Append an event with the current time to the log file for people, and to the file of JSON records.

        Args:
            name: the kind of event.
            text: a sentence; its line breaks become blanks.
            **fields: further values of the record.

        Raises:
            OSError: a file cannot be written, and errors are not ignored.
        """
        try:
            self._append(name, text, fields)
        except OSError:
            if not self.ignore_errors:
                raise

    def _append(self, name: str, text: str, fields: dict[str, Any]) -> None:
        """Append an event to both files."""
        sentence = " ".join(text.splitlines())
        event = Event(name, sentence, fields, time.strftime("%Y-%m-%d %H:%M:%S"))
        row = {"time": event.time, "event": event.name, "fields": dict(event.fields), "text": event.text}
        records = self.path.with_name(EVENTS_FILE)
        # A process that was killed while it wrote leaves half a line. It is closed first: a record appended to it would
        # be skipped together with it.
        separator = b"\n" if atomic_io.ends_within_line(records) else b""
        atomic_io.append(records, separator + (json.dumps(row) + "\n").encode())
        atomic_io.append(self.path, f"{event.line}\n".encode())


class EventList:
    """Events in memory, in the order in which they happened."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        """Append an event without a time."""
        self.events.append(Event(name, text, fields))

    @property
    def texts(self) -> list[str]:
        """The sentences of the events."""
        return [event.text for event in self.events]


@dataclass(frozen=True)
class EventPrinter:
    """Print the sentence of each event as a line.

    Attributes:
        stream: the stream to print to.
        prefix: text before each sentence.
    """

    stream: TextIO
    prefix: str = ""

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        """Print the sentence, and flush the stream, so that a program which reads it sees each event at once."""
        self.stream.write(f"{self.prefix}{text}\n")
        self.stream.flush()


class NullRecorder:
    """Ignore events."""

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        """Ignore an event."""


class Tail:
    """Read the lines that are appended to a text file from now on. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read_lines(self) -> list[str]:
        """Read the complete lines that were appended to the followed file since the last call, or since the start."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # the file was truncated or replaced
                    self._offset = 0
                file.seek(self._offset)
                # An incomplete last line is read by a later call.
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(complete) + len(newline)
        return (complete + newline).decode(errors="replace").splitlines()


class EventTail:
    """Read the events that are recorded in a folder from now on."""

    def __init__(self, folder: Path) -> None:
        self._tail = Tail(folder / EVENTS_FILE)

    def read_events(self) -> list[Event]:
        """Read the events that were recorded since the last call."""
        return _parse_lines(self._tail.read_lines())


def read_events(folder: Path) -> list[Event]:
    """Read the latest events in a folder, oldest first; an empty list if nothing was recorded there."""
    try:
        with (folder / EVENTS_FILE).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_READ_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    # The first line may be cut off, and the last one may still be written: lines that are no records are skipped.
    return _parse_lines(text.splitlines())


def _parse_lines(lines: list[str]) -> list[Event]:
    """Parse lines of `EVENTS_FILE`; lines that are no records are skipped."""
    events = []
    for line in lines:
        try:
            row = json.loads(line)
            event = Event(str(row["event"]), str(row["text"]), row["fields"], str(row["time"]))
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
        if isinstance(event.fields, dict):
            events.append(event)
    return events

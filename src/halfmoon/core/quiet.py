"""Silence warnings of libraries, in all threads."""

import logging
import threading
import warnings
from typing import Any


class _IgnoreWarnings:
    """A thread-safe context manager that ignores warnings, and records of loggers, while a thread is inside.

    `warnings.catch_warnings` restores the filters that it found. If threads exit in another order than they entered, it
    would restore another thread's filters and ignore all later warnings.
    """

    def __init__(self, *loggers: str) -> None:
        """Ignore warnings, and the records of these loggers and of those below them."""
        self._loggers = [logging.getLogger(name) for name in loggers]
        for logger in self._loggers:
            # Without any handler, Python would print records of a logger that does not propagate them.
            logger.addHandler(logging.NullHandler())
        self._lock = threading.Lock()
        self._inside = 0  # threads
        self._filters = warnings.catch_warnings()

    def __enter__(self) -> None:
        """Suppress warnings and log messages; only the first of nested or parallel blocks changes the filters."""
        with self._lock:
            if not self._inside:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.simplefilter("ignore")
                for logger in self._loggers:
                    logger.propagate = False
                    logger.addFilter(_refuse_record)
            self._inside += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._filters.__exit__(*error)
                for logger in self._loggers:
                    logger.propagate = True
                    logger.removeFilter(_refuse_record)


def _refuse_record(record: logging.LogRecord) -> bool:
    return False


IGNORE_WARNINGS = _IgnoreWarnings("pydicom")
"""Silences Pillow about metadata, and pydicom, which quotes values of the header such as a patient's name.

It is the only instance, because two of them could restore each other's filters."""

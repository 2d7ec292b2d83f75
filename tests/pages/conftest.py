"""One browser for all tests of pages."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from browsers import start_chromium

    with start_chromium() as found:
        yield found
